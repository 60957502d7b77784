"""Leaving an election: removing what an attempt has in the store while its lease lives.

- The record is deleted only after the body has ended, and only by its own version.
- After an unknown outcome, a write may still be carried out late. For one ttl its traces are
  looked for and removed.
- When the lease has ended, the store removes everything that is bound to it.

Imports the attempt and the model.
"""

from __future__ import annotations

import asyncio

from doyen.election.attempt import Attempt
from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable
from doyen.model import Entry, line_key

__all__ = ["start_leaving"]


def start_leaving(attempt: Attempt, successor: str = "") -> asyncio.Task[None] | None:
    """Remove what the attempt has in the store, in the background, and end it.

    `successor` is the key of the ready marker of the candidate that is to follow, if any. Returns
    None if there is nothing to remove.
    """
    keepalive = attempt.keepalive
    keepalive.forget(attempt)
    has_entries = attempt.ticket or attempt.record or attempt.markers or attempt.in_doubt
    if not has_entries or keepalive.lost_because is not None:
        attempt.end()
        return None
    return attempt.core.tasks.start(_leave(attempt, successor))


async def _leave(attempt: Attempt, successor: str) -> None:
    core, keepalive = attempt.core, attempt.keepalive
    doubt_ends = core.runtime.clock.now() + keepalive.timing.ttl_s
    try:
        while keepalive.lost_because is None:
            try:
                if successor:
                    await _let_in(attempt, successor)
                    successor = ""
                async with core.admission:
                    await _remove_entries(attempt)
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(core.calls.retry_pause())
                continue
            except StoreError as error:
                keepalive.lose(f"the entries of this session could not be deleted: {error}")
                return
            if not attempt.in_doubt or core.runtime.clock.now() >= doubt_ends:
                return
            await asyncio.sleep(keepalive.timing.request_timeout_s)
    finally:
        attempt.end()


async def _let_in(attempt: Attempt, successor: str) -> None:
    """Delete the record, and keep the ticket until the successor has the record, or is gone, or one
    request timeout has passed. Meanwhile the ticket keeps the rest of the line asleep."""
    await _delete(attempt, attempt.record)
    attempt.record = None
    until = asyncio.get_running_loop().time() + attempt.core.timing.request_timeout_s
    while True:
        attempt.wakeup.woken = False
        record, ready = await asyncio.gather(
            attempt.get(attempt.record_key), attempt.get(successor)
        )
        if record is not None or ready is None or not await attempt.wakeup.sleep(until):
            return


async def _remove_entries(attempt: Attempt) -> None:
    core, settings = attempt.core, attempt.settings
    if attempt.record is None and attempt.in_doubt:
        record = await attempt.get(attempt.record_key)
        if record is not None and attempt.is_mine(record):
            attempt.record = record
    # The requests are sent in this order, without waiting in between. A successor that finds the
    # record before it is deleted waits for that.
    await asyncio.gather(_delete(attempt, attempt.record), _delete(attempt, attempt.ticket))
    attempt.record = attempt.ticket = None
    if attempt.in_doubt and settings.recipe == "line":
        for ticket in await core.call(core.store.list(line_key(settings.election, settings.kind))):
            if attempt.is_mine(ticket):
                await core.deletions.delete(ticket)
    await attempt.remove_markers()


async def _delete(attempt: Attempt, entry: Entry | None) -> None:
    if entry is not None:
        await attempt.core.deletions.delete(entry)
