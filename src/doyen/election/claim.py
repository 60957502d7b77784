"""Claiming an election: creating its leader record, which decides who leads.

This is the one write that safety rests on. The record is created atomically, only if absent, under
a lease that this process keeps alive and whose validity it counts from the instant of sending.

Imports the line, handover and the model.
"""

from __future__ import annotations

import asyncio
import math

from doyen.election.attempt import Attempt
from doyen.election.handover import is_void
from doyen.election.line import CampaignWait, InLine
from doyen.errors import LeaseGone
from doyen.model import Claim, Entry, Order, order_key

__all__ = ["Claiming"]


class Claiming:
    """The state of an attempt that tries to become the leader, from its ticket to its record."""

    __slots__ = ("_created", "_wait", "attempt", "line")

    def __init__(self, attempt: Attempt, wait: CampaignWait) -> None:
        self.attempt = attempt
        self.line = InLine(attempt, wait)
        self._wait = wait
        self._created = False
        """A creation of the record was sent and is not known to have failed. It may have been
        carried out, or may be while this candidate waits in line: then all would wait for it."""

    async def win(self) -> Entry:
        """Wait in line and claim the record until it is this attempt's own."""
        attempt = self.attempt
        await self.line.join()
        while True:
            attempt.wakeup.woken = False
            if attempt.keepalive.lost_because is not None:
                raise LeaseGone(attempt.keepalive.lost_because)
            if self._created:
                await attempt.watch_record()
                record = await attempt.get(attempt.record_key)
                if record is not None and attempt.is_mine(record):
                    return record
            if await self.line.is_my_turn():
                record = await self._create()
                if record is not None:
                    return record

    def end(self) -> None:
        """End the attempt, whose lease is lost: the store removes its entries."""
        self.line.succession.close()
        self.attempt.end()

    async def _create(self) -> Entry | None:
        """Create the record. If another attempt's is there, wait for it to change."""
        attempt, store = self.attempt, self.attempt.core.store
        before, self._created = self._created, True
        creation = await attempt.write(
            store.create(attempt.record_key, attempt.claim(), attempt.keepalive.lease)
        )
        if creation.won or attempt.is_mine(creation.entry):
            return creation.entry
        self._created = before
        if not attempt.watches_record:
            await attempt.watch_record()
            return None  # to look again: it may have changed before it was watched
        await self.line.wait_for(creation.entry, await self._preempt(creation.entry))
        return None

    async def _preempt(self, leader: Entry) -> float:
        """Order a leader of lower priority to resign, once this candidate has known it for the
        cooldown. Returns when that will be; infinity if there is nothing to do then.

        If another order is there already, its end wakes this candidate.
        """
        attempt, settings = self.attempt, self.attempt.settings
        if not settings.preempt or Claim.decode(leader.value).rank >= settings.priority:
            return math.inf
        now = asyncio.get_running_loop().time()
        known = self._wait.known_leader
        if known is None or known[0] != leader.revision:
            known = self._wait.known_leader = leader.revision, now
        due = known[1] + settings.cooldown_s
        if now < due:
            return due
        order = Order(leader.revision, settings.name, attempt.id, settings.priority)
        key = order_key(settings.election, settings.kind)
        written = await attempt.write_marker(key, order.encode())
        if is_void(written, leader.revision):
            core = attempt.core
            await core.call(core.store.delete(key, if_version=written.version))
            attempt.wakeup.wake()
        return math.inf
