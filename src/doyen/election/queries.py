"""Reading and observing who leads an election and who waits in its line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from doyen.election.core import SessionCore
from doyen.errors import OutcomeUnknown, StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.lease.keeper import StoreCalls
from doyen.model import Candidate, Claim, Entry, Kind, Leader, Line, leader_key, line_key
from doyen.stores.port import Watch

__all__ = [
    "leader_of",
    "line_of",
    "observe",
    "observe_leader",
    "observe_line",
    "read_leader",
    "read_line",
]

T = TypeVar("T")
log = logging.getLogger("doyen")


async def read_leader(core: SessionCore, election: str, kind: Kind = "elections") -> Leader | None:
    """The leader of an election, read from the store."""
    record = await core.call(core.store.get(leader_key(election, kind)))
    return None if record is None else leader_of(election, record)


async def read_line(core: SessionCore, election: str) -> Line:
    """The leader and all candidates in line. The leader keeps its ticket and is marked."""
    record = await core.call(core.store.get(leader_key(election)))
    tickets = await core.call(core.store.list(line_key(election)))
    return line_of(election, record, tickets)


async def observe_leader(
    core: SessionCore, election: str, deliver: Callable[[Leader | None], None]
) -> None:
    """Deliver the current leader, then every change, until cancelled.

    While the store is unavailable nothing is delivered.
    """
    await observe(core.calls, [leader_key(election)], lambda: read_leader(core, election), deliver)


async def observe_line(core: SessionCore, election: str, deliver: Callable[[Line], None]) -> None:
    """The same for the leader and the line."""
    scopes = [leader_key(election), line_key(election)]
    await observe(core.calls, scopes, lambda: read_line(core, election), deliver)


async def observe(
    calls: StoreCalls,
    scopes: list[str],
    read: Callable[[], Awaitable[T]],
    deliver: Callable[[T], None],
) -> None:
    """Deliver what `read` returns, and again whenever it differs after a change in `scopes`."""
    changed = asyncio.Event()
    delivered: list[T] = []
    watches: list[Watch] = []
    try:
        while True:
            try:
                while len(watches) < len(scopes):
                    scope = scopes[len(watches)]
                    watches.append(await calls.call(calls.store.watch(scope, changed.set)))
                changed.clear()
                current = await read()
            except (OutcomeUnknown, StoreUnavailable) as error:
                log.debug("%s", log_line(event="observing_failed", key=scopes[0], error=error))
                await asyncio.sleep(calls.retry_pause())
                continue
            if delivered != [current]:
                delivered = [current]
                deliver(current)
            await changed.wait()
    finally:
        for watch in watches:
            watch.close()


def leader_of(election: str, record: Entry) -> Leader:
    """The leader that a leader record describes."""
    claim = Claim.decode(record.value)
    return Leader(election, claim.name, record.revision, claim.meta)


def line_of(election: str, record: Entry | None, tickets: list[Entry]) -> Line:
    """The line that a leader record and the tickets describe."""
    if record is None:
        leader, attempt = None, None
    else:
        leader, attempt = leader_of(election, record), Claim.decode(record.value).attempt
    claims = [Claim.decode(ticket.value) for ticket in tickets]
    # By attempt: a candidate may have two tickets for a while.
    by_attempt = {claim.attempt: claim for claim in claims}
    return Line(
        leader,
        tuple(
            Candidate(claim.name, claim.rank, claim.attempt == attempt, claim.meta)
            for claim in by_attempt.values()
        ),
    )
