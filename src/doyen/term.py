"""A term: the scope of one leadership.

`valid` compares two numbers: no I/O, no lock, any thread. It turns false at the deadline by
itself, whatever else in the process is stuck. A term that has ended, one way or the other, never
becomes valid again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import Callable
from typing import Final

from doyen.errors import LeadershipLost
from doyen.lease.clock import Clock
from doyen.lease.keepalive import NEVER, Heart
from doyen.model import Kind, Meta

__all__ = ["Term", "TermState"]


class TermState(enum.Enum):
    """Where a term stands."""

    LEADER = "leader"
    UNSURE = "unsure"
    """Renewals are failing and the deadline has not come: still valid."""
    LOST = "lost"
    """It ended before its body did."""
    ENDED = "ended"
    """Its body ended first."""


class _Ended:
    """Stands in for the heart of a term that is over."""

    valid_until: Final = NEVER


_ENDED = _Ended()
_latch = threading.Lock()
log = logging.getLogger("doyen")


def forked() -> None:
    """In the child of a fork: a thread that no longer exists may have held the latch."""
    global _latch
    _latch = threading.Lock()


class Term:
    """One leadership: its token, its deadline, and word of its end.

    Handed out by `campaign`; not made by users.

        async with session.campaign("billing") as term:
            while term.valid:
                await pay_next_invoice(fencing_token=term.token)
    """

    __slots__ = (
        "_heart",
        "_hold",
        "_listeners",
        "_now",
        "_state",
        "_what",
        "election",
        "ended_at",
        "meta",
        "name",
        "reason",
        "token",
    )

    def __init__(
        self,
        *,
        election: str,
        kind: Kind = "elections",
        name: str,
        meta: Meta,
        token: int,
        heart: Heart,
        clock: Clock,
    ) -> None:
        self.election = election
        self._what = f"leads {election!r}" if kind == "elections" else f"has the lock {election!r}"
        self.name = name
        self.meta = meta
        self.token = token
        self._heart = heart
        self._hold: Heart | _Ended = heart
        self._now = clock.now
        self._state: TermState | None = None
        self.reason = ""
        """Why it is over; empty until then."""
        self.ended_at = NEVER
        """When it stopped being valid, on the boot-time clock."""
        self._listeners: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return (
            f"<Term of {self.name!r} in {self.election!r}, token {self.token}, {self.state.value}>"
        )

    @property
    def valid(self) -> bool:
        """Whether this process leads, as far as it may rely on it. Any thread, never blocks."""
        return self._now() < self._hold.valid_until

    @property
    def valid_until(self) -> float:
        """The deadline on the boot-time clock. It moves with each renewal; −∞ once over."""
        return self._hold.valid_until

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline if nothing is renewed any more; 0 once over."""
        return max(0.0, self._hold.valid_until - self._now())

    @property
    def stop_budget_s(self) -> float:
        """How long the body has to end after a loss, before the store may name another."""
        return self._heart.timing.stop_budget_s

    @property
    def state(self) -> TermState:
        """leader, unsure, lost or ended."""
        if self._state is not None:
            return self._state
        if not self.valid:
            return TermState.LOST
        return TermState.UNSURE if self._heart.unsure else TermState.LEADER

    def check(self, for_s: float = 0.0) -> None:
        """Raise `LeadershipLost` unless the term is valid, and stays so for `for_s` at least."""
        remaining = self._hold.valid_until - self._now()
        if remaining <= 0:
            raise self.loss()
        if remaining < for_s:
            raise LeadershipLost(
                f"{self.name!r} {self._what} for {remaining:.3f} s more for certain,"
                f" less than the {for_s:g} s asked for"
            )

    async def lost(self) -> str:
        """Wait until the term is over, and return why."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not over.done():
                over.set_result(None)

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(resolve)
            except RuntimeError:
                pass  # the loop has been closed, and nobody waits there

        self.on_end(wake)
        try:
            await over
        finally:
            self._forget(wake)
        return self.reason

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Block until the term is over; False if `timeout_s` passed first."""
        over = threading.Event()
        self.on_end(over.set)
        try:
            return over.wait(timeout_s)
        finally:
            self._forget(over.set)

    def beat(self) -> None:
        """Say that the work makes progress. Any thread, cheap.

        With `stall_after_s`, a term whose work does not say so in time is lost, although the
        process lives and its renewals go through. Without, this does nothing.
        """
        self._heart.work_goes_on()

    def on_renewal(self, listener: Callable[[float], None]) -> None:
        """Have `listener` called with each new deadline, on doyen's thread, until the term is over.
        It must not block."""
        self.on_end(self._heart.on_renewal(listener))

    def proof(self) -> tuple[int, ...]:
        """Descriptors that prove this process alive while any copy of them is open.

        Empty on stores without proof of death. For supervisors; see `doyen.supervise`.
        """
        return self._heart.proof()

    def loss(self) -> LeadershipLost:
        """The exception that tells of this term's end."""
        reason = self.reason or "its deadline has passed"
        return LeadershipLost(
            f"{self.name!r} no longer {self._what} (token {self.token}): {reason}"
        )

    def on_end(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when the term is over, on any thread; at once if it is."""
        with _latch:
            if self._state is None:
                self._listeners.append(listener)
                return
        listener()

    def _forget(self, listener: Callable[[], None]) -> None:
        with _latch:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def lose(self, reason: str) -> bool:
        """End the term before its body. Any thread; false if it was over already."""
        return self._over(TermState.LOST, reason, self._no_later_than(self._now()))

    def conclude(self) -> bool:
        """End the term because its body has ended. True if it was valid to that very instant.

        This is the one place where "the body ended" and "leadership was lost" are put in order.
        """
        deadline = self._hold.valid_until
        now = self._now()
        if now < deadline:
            self._over(TermState.ENDED, "its body has ended", now)
        else:
            reason = self._heart.lost_because or "its deadline has passed"
            self._over(TermState.LOST, reason, self._no_later_than(now))
        return self._state is TermState.ENDED

    def _no_later_than(self, now: float) -> float:
        """When the term ended, if it is found over `now`: a process that was paused finds out
        later than it was."""
        deadline = self._heart.valid_until
        return min(now, self._heart.ended_at if deadline == NEVER else deadline)

    def _over(self, state: TermState, reason: str, ended_at: float) -> bool:
        with _latch:
            if self._state is not None:
                return False
            self._state = state
            self.reason = reason
            self.ended_at = ended_at
            self._hold = _ENDED
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            try:
                listener()
            except Exception:
                log.exception("a listener failed on the end of %r; the others are told", self)
        return True
