"""Waiting in line: tickets, the ticket ahead, and giving way to a successor.

The line keeps candidates in order, and wakes one of them per change instead of all. A mistake in
it cannot make two leaders: that is decided by the creation of the record alone. In the recipe
`race` there is no line, and every candidate may always claim.

Imports the attempt, handover, queries and the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from doyen.election.attempt import Attempt
from doyen.election.core import SessionCore
from doyen.election.handover import Succession, is_ready, ready_marker_key
from doyen.election.options import CampaignSettings
from doyen.election.queries import read_leader
from doyen.errors import NotElected, StoreError, StoreUnavailable
from doyen.events import Hindered, Waiting
from doyen.model import Claim, Entry, Order, line_key, order_key

__all__ = ["CampaignWait", "InLine"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class CampaignWait:
    """How long one campaign waits, and what for. It lasts for all attempts of the campaign."""

    core: SessionCore
    settings: CampaignSettings
    deadline: float
    """When to give up, on the loop's clock."""
    admitted: bool = False
    """Holds a place of the session's admission: it is joining a line or claiming a record."""
    behind: str = ""
    """What the candidate waits for, to report it."""
    error: StoreError | None = None
    """The last error of the store, until it works again."""
    known_leader: tuple[int, float] | None = None
    """The leader that this candidate would preempt, by token, and since when it knows it."""
    deferral: tuple[str, float] | None = None
    """The lease of the order to whose successor this candidate gives way, and until when."""

    async def in_time(self, work: Awaitable[T]) -> T:
        """Wait for `work` until one request timeout after the deadline, which is what a single try
        may take."""
        limit = self.deadline + self.core.calls.timing.request_timeout_s
        try:
            async with asyncio.timeout_at(None if limit == math.inf else limit):
                return await work
        except TimeoutError:
            if self.error is None:
                self.error = StoreUnavailable("the store is slow to answer other candidates")
            raise await self.not_elected() from None

    def leave_admission(self) -> None:
        """Let another candidate of the session in: this one is elected, or waits."""
        if self.admitted:
            self.admitted = False
            self.core.admission.release()

    async def sleep(self, attempt: Attempt, until: float = math.inf) -> None:
        """Sleep until woken, or until the time has come. Raises `NotElected` at the deadline."""
        if not attempt.wakeup.woken:
            self.leave_admission()
        woken = await attempt.wakeup.sleep(min(self.deadline, until))
        if not woken and self.deadline <= until:
            raise await self.not_elected()

    async def pause(self, error: StoreError) -> None:
        """Wait before a request that failed is retried. Each error is reported once."""
        if str(error) != str(self.error):
            settings = self.settings
            self.core.telemetry.emit(
                Hindered(election=settings.election, name=settings.name, error=str(error))
            )
        self.error = error
        self.leave_admission()
        left_s = self.deadline - asyncio.get_running_loop().time()
        pause_s = self.core.calls.retry_pause()
        if left_s <= 0:
            raise await self.not_elected()
        await asyncio.sleep(min(pause_s, left_s))

    async def not_elected(self) -> NotElected:
        """The error for a campaign that has reached its deadline."""
        settings, because = self.settings, self.behind
        if self.error is not None:
            because = str(self.error)
        else:
            with contextlib.suppress(StoreError):
                leader = await read_leader(self.core.calls, settings.election, settings.kind)
                because = f"{leader.name!r} leads" if leader else because
        name, election = settings.name, settings.election
        if settings.kind == "locks":
            return NotElected(f"{name!r} did not get the lock {election!r} in time")
        return NotElected(f"{name!r} was not elected to {election!r} in time: {because}")


class InLine:
    """The state of an attempt that waits for its turn."""

    __slots__ = ("_wait", "attempt", "succession")

    def __init__(self, attempt: Attempt, wait: CampaignWait) -> None:
        self.attempt = attempt
        self.succession = Succession(attempt)
        self._wait = wait

    async def join(self) -> None:
        """Take a ticket, unless the attempt has one or needs none."""
        attempt, settings = self.attempt, self.attempt.settings
        if settings.recipe != "line" or attempt.ticket is not None:
            return
        store, line = attempt.core.store, line_key(settings.election, settings.kind)
        if attempt.in_doubt:
            for ticket in await attempt.core.call(store.list(line)):
                if attempt.is_mine(ticket):
                    attempt.ticket = ticket
                    return
        attempt.ticket = await attempt.write(
            store.enqueue(line, attempt.claim(), attempt.keepalive.lease, rank=settings.priority)
        )

    async def is_my_turn(self) -> bool:
        """Whether to claim the record now. If not, returns when something has changed."""
        await self.succession.read()
        if self.succession.order:
            return True
        ahead, order = await asyncio.gather(self._ahead(), self._order())
        if ahead is not None:
            await self._wait_behind(ahead)
            return False
        return order is None or not await self._give_way(order)

    async def _ahead(self) -> Entry | None:
        ticket, core = self.attempt.ticket, self.attempt.core
        return None if ticket is None else await core.call(core.store.ahead(ticket))

    async def _order(self) -> Entry | None:
        settings = self.attempt.settings
        return await self.attempt.get(order_key(settings.election, settings.kind))

    async def _wait_behind(self, ahead: Entry) -> None:
        """Wait until the ticket directly ahead changes. No other ticket wakes this candidate."""
        attempt, core = self.attempt, self.attempt.core
        if attempt.is_mine(ahead):
            # An enqueue whose response was lost was carried out late. Waiting behind that ticket
            # would be waiting for ourselves.
            await core.deletions.delete(ahead)
            return
        watch = await core.call(core.store.watch(ahead.key, attempt.wakeup.wake))
        try:
            if await attempt.get(ahead.key) is not None:
                await self.wait_for(ahead)
        finally:
            watch.close()

    async def _give_way(self, entry: Entry) -> bool:
        """At the head of the line, while an order names another candidate as the successor: wait
        for the leader to delete its record without claiming it, and then for the successor to
        claim it, for one request timeout. False if there is nothing to wait for."""
        attempt, wait = self.attempt, self._wait
        order = Order.decode(entry.value)
        if order is None or not order.successor or order.rank is not None:
            return False
        await attempt.watch_record()
        record, ready = await asyncio.gather(
            attempt.get(attempt.record_key),
            attempt.get(ready_marker_key(attempt, order.successor)),
        )
        if record is not None:
            if record.revision == order.token:
                await self.wait_for(record)
            return record.revision == order.token
        if not is_ready(ready, entry):
            return False
        now, lease = asyncio.get_running_loop().time(), entry.lease or ""
        if wait.deferral is None or wait.deferral[0] != lease:
            wait.deferral = lease, now + wait.core.timing.request_timeout_s
        until = wait.deferral[1]
        if now >= until:
            return False
        await wait.sleep(attempt, until)
        return True

    async def wait_for(self, entry: Entry, until: float = math.inf) -> None:
        """Wait for the holder of a ticket or record. Returns when something has changed, and at
        `until` at the latest."""
        attempt, wait, settings = self.attempt, self._wait, self.attempt.settings
        if await attempt.core.deletions.delete_left_over(entry):
            return
        if attempt.ticket is not None and not self.succession.watched:
            await self.succession.watch()
            return
        name = Claim.decode(entry.value).name
        where = "leads" if entry.key == attempt.record_key else "is ahead in line"
        if wait.behind != f"{name!r} {where}":
            wait.behind = f"{name!r} {where}"
            attempt.core.telemetry.emit(
                Waiting(election=settings.election, name=settings.name, behind=name)
            )
        wait.error = None
        await wait.sleep(attempt, until)
