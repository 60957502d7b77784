"""Barriers: processes wait until n of them have arrived.

A party that arrives takes a ticket, and then changes its mark from "new" to "arrived". The state of
the barrier is a document:

    {"n": 3, "passed": {"5f0c…-1": 7, …}}

It maps the attempt of each party that has passed to the number of the passage. One write adds
exactly n attempts, and that write decides. Every party that sees n tickets tries it, and only one
succeeds, so exactly n parties pass together.

- A ticket whose request was carried out late, when its party had gone, was never marked. It does
  not count.
- A party that gives up marks its ticket as "gone" and then rewrites the state. So a write that
  counted this party was either made before, and the party has passed, or it fails. A mark that is
  carried out late fails too, because the ticket has another version.
- A party stays in the state while its ticket exists, and for some further passages, so that a party
  whose lease has expired still finds that it has passed.
"""

from __future__ import annotations

import asyncio
import json
from typing import Literal

from doyen.election.core import SessionCore
from doyen.errors import (
    ConfigError,
    Conflict,
    LeaseGone,
    NotArrived,
    OutcomeUnknown,
    StoreUnavailable,
)
from doyen.lease.keepalive import Keepalive
from doyen.manage.documents import Document, Versioned
from doyen.model import Entry, barrier_key, encode_json
from doyen.stores.port import Watch

__all__ = ["arrive"]

MAX_PARTIES = 256
REMEMBERED = 8
"""For how many further passages a party stays in the state after its ticket is gone."""


async def arrive(core: SessionCore, barrier: str, n: int, wait_s: float | None) -> int:
    """Arrive at a barrier, and return the number of times it was passed, when it is."""
    if type(n) is not int or not 1 <= n <= MAX_PARTIES:
        raise ConfigError(f"a barrier is for 1 to {MAX_PARTIES}, not {n!r}")
    party = _Party(core, barrier, n)
    try:
        try:
            async with asyncio.timeout(wait_s):
                return await party.pass_()
        except TimeoutError:
            passed = await party.withdraw()
            if passed is None:
                raise NotArrived(
                    f"{party.arrived} of {n} had arrived at the barrier {barrier!r} within"
                    f" {wait_s:g} s; this one is not counted any more"
                ) from None
            return passed
    finally:
        party.leave()


class _Ticket:
    """A ticket in the line of a barrier."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        try:
            raw = json.loads(entry.value)
            self.attempt, self.mark = str(raw["attempt"]), str(raw["mark"])
        except (ValueError, TypeError, KeyError, RecursionError):
            self.attempt, self.mark = "", "gone"

    @property
    def arrived(self) -> bool:
        return self.mark == "arrived"

    @staticmethod
    def encode(attempt: str, mark: Literal["new", "arrived", "gone"]) -> bytes:
        return encode_json({"attempt": attempt, "mark": mark})


class _Party:
    """One call of `arrive`. Used on doyen's loop."""

    def __init__(self, core: SessionCore, barrier: str, n: int) -> None:
        self._core = core
        self._barrier = barrier
        self._n = n
        self._line = f"{barrier_key(barrier)}/line"
        self._document = Document(core.calls, f"{barrier_key(barrier)}/state")
        self._keepalive: Keepalive | None = None
        self._attempt = core.next_attempt()
        """On all leases that it has. The store may still have the ticket on a lease that is lost
        here; with another attempt for each lease this party would be counted twice."""
        self._changed = asyncio.Event()
        self._watches: dict[str, Watch] = {}
        self._in_doubt = False
        """A ticket may have been taken whose response was lost."""
        self.arrived = 0
        """How many had arrived when this party last looked."""

    async def pass_(self) -> int:
        while True:
            try:
                self._changed.clear()
                passed = await self._try()
                if passed is not None:
                    return passed
                await self._changed.wait()
            except (StoreUnavailable, OutcomeUnknown, LeaseGone) as error:
                if isinstance(error, LeaseGone) and self._keepalive is not None:
                    self._keepalive.lose(str(error))
                await asyncio.sleep(self._core.calls.retry_pause())

    async def _try(self) -> int | None:
        state = await self._state()
        passed = self._passed(state)
        if passed is not None:
            return passed
        await self._begin()
        for scope in (self._line, self._document.key):
            if scope not in self._watches:
                watch = self._core.store.watch(scope, self._changed.set)
                self._watches[scope] = await self._core.call(watch)
                self._changed.set()  # read once more: it may have changed before it was watched
        tickets = await self._tickets()
        if await self._take_ticket(tickets):
            self._changed.set()
            return None
        # By attempt: a request that was carried out late may have left two tickets of one.
        arrived = {ticket.attempt: None for ticket in tickets if ticket.arrived}
        waiting = [attempt for attempt in arrived if attempt not in state.body["passed"]]
        self.arrived = len(waiting)
        if len(waiting) >= self._n:
            await self._release(state, waiting[: self._n], {ticket.attempt for ticket in tickets})
            self._changed.set()
        return None

    async def _state(self) -> Versioned:
        state = await self._document.read()
        if state is None:
            try:
                state = await self._document.write({"n": self._n, "passed": {}}, expect=None)
            except Conflict:
                return await self._state()
        if state.body.get("n") != self._n:
            raise ConfigError(
                f"the barrier {self._barrier!r} is for {state.body.get('n')} in this store, not"
                f" {self._n}: use that number everywhere, or another name"
            )
        return state

    def _passed(self, state: Versioned) -> int | None:
        passed: int | None = state.body["passed"].get(self._attempt)
        return passed

    async def _begin(self) -> None:
        """Arrive on a lease that is live, as far as is known here."""
        if self._keepalive is None or self._keepalive.lose_if_expired():
            core = self._core
            self._keepalive = await core.leases.shared()
            self._keepalive.on_loss(self, self._changed.set)

    async def _tickets(self) -> list[_Ticket]:
        return [
            _Ticket(entry) for entry in await self._core.call(self._core.store.list(self._line))
        ]

    async def _take_ticket(self, tickets: list[_Ticket]) -> bool:
        """Take a ticket or mark it, if that has to be done. True if something was written."""
        core, mine = self._core, [each for each in tickets if each.attempt == self._attempt]
        assert self._keepalive is not None
        if any(ticket.arrived for ticket in mine):
            return False
        if mine:
            entry = mine[0].entry
        else:
            value = _Ticket.encode(self._attempt, "new")
            before, self._in_doubt = self._in_doubt, True
            entry = await core.call(core.store.enqueue(self._line, value, self._keepalive.lease))
            self._in_doubt = before
        await core.call(core.store.update(entry, _Ticket.encode(self._attempt, "arrived")))
        return True

    async def _release(self, state: Versioned, those: list[str], waiting: set[str]) -> None:
        """Let n pass, unless another has changed the state since it was read."""
        before: dict[str, int] = state.body["passed"]
        last = max(before.values(), default=0)
        passed = {
            attempt: time
            for attempt, time in before.items()
            if attempt in waiting or time > last - REMEMBERED
        }
        passed.update(dict.fromkeys(those, last + 1))
        try:
            await self._document.write({"n": self._n, "passed": passed}, expect=state)
        except Conflict:
            pass

    async def withdraw(self) -> int | None:
        """Make sure that this party is not counted any more. If it has passed already, return the
        number of the passage."""
        timing = self._core.calls.timing
        try:
            async with asyncio.timeout(3 * timing.request_timeout_s):
                while True:
                    try:
                        await self._mark_as_gone()
                        state = await self._state()
                        passed = self._passed(state)
                        if passed is None:
                            await self._document.write(state.body, expect=state)
                        return passed
                    except Conflict:
                        continue
                    except (StoreUnavailable, OutcomeUnknown):
                        await asyncio.sleep(self._core.calls.retry_pause())
        except TimeoutError:
            raise OutcomeUnknown(
                f"the barrier {self._barrier!r} was not passed in time, and the store does not"
                " answer: this party may still be counted"
            ) from None

    async def _mark_as_gone(self) -> None:
        """Mark the tickets, so that this party does not count. While they exist, the state keeps
        the party if it has passed."""
        core = self._core
        while mine := [
            each
            for each in await self._tickets()
            if each.attempt == self._attempt and each.mark != "gone"
        ]:
            for ticket in mine:
                value = _Ticket.encode(ticket.attempt, "gone")
                await core.call(core.store.update(ticket.entry, value))

    async def _remove_tickets(self) -> None:
        """Delete the tickets of this party, until none is left."""
        core = self._core
        while mine := [each for each in await self._tickets() if each.attempt == self._attempt]:
            for ticket in mine:
                entry = ticket.entry
                await core.call(core.store.delete(entry.key, if_version=entry.version))

    def leave(self) -> None:
        """Stop watching, and remove the tickets in the background."""
        for watch in self._watches.values():
            watch.close()
        if self._keepalive is not None:
            self._keepalive.forget(self)
            if not self._core.closed:
                self._core.tasks.start(self._leave(self._keepalive))

    async def _leave(self, keepalive: Keepalive) -> None:
        core = self._core
        doubt_ends = core.runtime.clock.now() + keepalive.timing.ttl_s
        while keepalive.lost_because is None:
            try:
                await self._remove_tickets()
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(core.calls.retry_pause())
                continue
            if not self._in_doubt or core.runtime.clock.now() >= doubt_ends:
                return
            await asyncio.sleep(keepalive.timing.request_timeout_s)
