"""A term: the scope of one leadership.

`valid` compares two numbers: no I/O, no lock, any thread. It turns false at the deadline by
itself, whatever else in the process is stuck. A term that has ended, for whatever reason, never
becomes valid again: whoever finds that its deadline has passed ends it.

`_lose` and `_conclude` end a term. They are for `doyen.election` and the sessions. As in
`doyen.lease.keepalive` there are no locks: of several ends the first that is appended counts.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from doyen._waiting import LoopEvent
from doyen.errors import LeadershipLost
from doyen.events.log_lines import log_line
from doyen.lease.clock import Clock
from doyen.lease.keepalive import NEVER, NO_DEADLINE, Deadline, Keepalive
from doyen.model import HAS, Kind, Meta, described

__all__ = ["Term", "TermState", "is_valid"]


class TermState(enum.Enum):
    """The state of a term."""

    LEADER = "leader"
    UNSURE = "unsure"
    """Renewals are failing and the deadline has not come: still valid."""
    LOST = "lost"
    """The term ended before its body did."""
    ENDED = "ended"
    """The body ended first."""


log = logging.getLogger("doyen")


class _End(NamedTuple):
    state: TermState
    reason: str
    ended_at: float


class Publisher(Protocol):
    """Replaces the meta in the leader record of a term."""

    async def publish(self, meta: Meta) -> None: ...

    def publish_blocking(self, meta: Meta) -> None: ...


class Term:
    """One period of leadership: its token, its deadline, and notification of its end.

    Made by `campaign`, not by users.

        async with session.campaign("billing") as term:
            while term.valid:
                await pay_next_invoice(fencing_token=term.token)
    """

    __slots__ = (
        *("__weakref__", "_deadline", "_ends", "_keepalive", "_kind", "_listeners", "_now"),
        *("_publisher", "election", "meta", "name", "slot", "token"),
    )

    def __init__(
        self,
        *,
        election: str,
        kind: Kind = "elections",
        slot: int | None = None,
        name: str,
        meta: Meta,
        token: int,
        keepalive: Keepalive,
        clock: Clock,
        publisher: Publisher | None = None,
    ) -> None:
        self.election = election
        self.slot = slot
        """Of a semaphore: the number of the slot, from 0. Tokens of different slots do not compare,
        so fence with both."""
        self._kind = kind
        self.name = name
        self.meta = meta
        self.token = token
        self._keepalive = keepalive
        self._deadline: Deadline = keepalive.deadline
        self._now = clock.now
        self._publisher = publisher
        self._ends: deque[_End] = deque()
        """The first one counts."""
        self._listeners: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return (
            f"<Term of {self.name!r} in {self.election!r}, token {self.token}, {self.state.value}>"
        )

    @property
    def valid(self) -> bool:
        """Whether this process may rely on being the leader. Any thread, never blocks."""
        if self._now() < self._deadline.valid_until:
            return True
        if not self._ends:
            self._expire()
        return False

    @property
    def valid_until(self) -> float:
        """The deadline on the boot-time clock. It moves with each renewal; −∞ once over."""
        return self._deadline.valid_until

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline if no further renewal is confirmed; 0 once over."""
        return max(0.0, self._deadline.valid_until - self._now()) if self.valid else 0.0

    @property
    def stop_budget_s(self) -> float:
        """How long the body has to end after a loss, before another may be elected."""
        return self._keepalive.timing.stop_budget_s

    @property
    def state(self) -> TermState:
        """leader, unsure, lost or ended."""
        if self._ends:
            return self._ends[0].state
        if not self.valid:
            return TermState.LOST
        return TermState.UNSURE if self._keepalive.unsure else TermState.LEADER

    @property
    def reason(self) -> str:
        """Why the term is over; empty until then."""
        return self._ends[0].reason if self._ends else ""

    @property
    def ended_at(self) -> float:
        """When the term stopped being valid, on the boot-time clock; −∞ until then.

        >>> import doyen
        >>> with doyen.connect_blocking("memory:") as session, session.campaign("e") as term:
        ...     pass
        >>> term.ended_at > term.valid_until, term.reason
        (True, 'its body has ended')
        """
        return self._ends[0].ended_at if self._ends else NEVER

    def check(self, for_s: float = 0.0) -> None:
        """Raise `LeadershipLost` unless the term is valid, and stays so for `for_s` at least."""
        if not self.valid:
            raise self.loss()
        remaining = self.remaining_s
        if remaining < for_s:
            raise LeadershipLost(
                f"{self.name!r} {self._what} for certain for {remaining:.3f} s more,"
                f" less than the {for_s:g} s required"
            )

    async def lost(self) -> str:
        """Wait until the term is over, and return why."""
        over = LoopEvent()
        self.on_end(over.set_soon)
        try:
            await over.wait()
        finally:
            self._forget(over.set_soon)
        return self._over_because

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Block until the term is over; False if `timeout_s` passed first."""
        # No `threading.Event`: it has a lock that this thread may hold when the handler of a signal
        # interrupts it.
        woken = threading.Lock()
        woken.acquire()
        self.on_end(woken.release)
        try:
            return woken.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
        finally:
            self._forget(woken.release)

    def beat(self) -> None:
        """Report that the work makes progress. Any thread, cheap.

        With `stall_after_s`, a term whose work does not report in time is lost, although the
        process lives and its renewals are confirmed. Without, this does nothing.
        """
        self._keepalive.progress()

    async def publish(self, meta: Meta) -> None:
        """Replace the meta that the leader record shows to others, without a new term.

            async with session.campaign("billing", meta={"state": "starting"}) as term:
                address = await start()
                await term.publish({"address": address})

        Observers see the new meta; the token stays. Returns once the record has it, and `term.meta`
        too. While the store cannot be reached it is retried; `LeadershipLost` is raised once the
        term is over. A cancelled call may still take effect, but never after a later publication.
        """
        await self._publishes().publish(meta)

    def publish_blocking(self, meta: Meta) -> None:
        """The same as `publish`, for code without asyncio."""
        self._publishes().publish_blocking(meta)

    def _publishes(self) -> Publisher:
        self.check()
        assert self._publisher is not None, "the term was made without a record"
        return self._publisher

    def _on_renewal(self, listener: Callable[[float], None]) -> None:
        """Have `listener` called with each new deadline, on doyen's thread, until the term is over.
        It must not block."""
        self.on_end(self._keepalive.on_renewal(listener))

    def _proof(self) -> tuple[int, ...]:
        """Descriptors that prove this process alive while any copy of them is open. These are
        copies, and the caller closes them.

        Empty on stores without proof of death. For supervisors; see `doyen.supervise`.
        """
        return self._keepalive.proof()

    def _run_begins(self) -> int:
        """For supervisors: processes are about to be started that may outlive this one. Until they
        have ended, neither the record of this term is deleted nor its lease revoked. Returns the
        number of this run, 0 without a warden."""
        self._keepalive.runs.begin(self)
        return self._keepalive.warding.run_begins()

    def _run_ended(self, run: int) -> None:
        """For supervisors: none of the processes of this run is alive."""
        self._keepalive.warding.run_ended(run)
        self._keepalive.runs.end(self)

    @property
    def _what(self) -> str:
        label = self.election if self.slot is None else f"{self.election}/{self.slot}"
        return f"{HAS[self._kind]} {described(label, self._kind)}"

    def loss(self) -> LeadershipLost:
        """The exception for the end of this term."""
        return LeadershipLost(
            f"{self.name!r} no longer {self._what} (token {self.token}): {self._over_because}"
        )

    @property
    def _over_because(self) -> str:
        return self.reason or self._keepalive.lost_because or "its deadline has passed"

    def on_end(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when the term is over, on any thread; at once if it is."""
        if not self._keepalive.in_child:  # there no thread would call it
            self._listeners.append(listener)
            if not self._ends or not self._forget(listener):
                return
        listener()

    def _forget(self, listener: Callable[[], None]) -> bool:
        """Do not call this any more. False if it was called, or is about to be."""
        try:
            self._listeners.remove(listener)
        except ValueError:
            return False
        return True

    def _lose(self, reason: str) -> None:
        """End the term before its body. Any thread; does nothing if it is over already."""
        self._end(TermState.LOST, reason, self._validity_end(self._now()))

    def _expire(self) -> None:
        """The deadline was found to have passed. Before anybody acts on that, the term is over, or
        a renewal that is being confirmed on another thread could make it valid again. Listeners are
        called on doyen's thread."""
        if not self._keepalive.in_child:
            self._keepalive.expire()
            because = self._keepalive.lost_because or "its deadline has passed"
            self._mark(TermState.LOST, because, self._validity_end(self._now()))
            self._keepalive.post(self._tell)

    def _conclude(self) -> bool:
        """End the term because its body has ended. True if it was valid at that instant.

        This is the one place that decides whether the body or the validity ended first.
        """
        now = self._now()
        if now < self._deadline.valid_until:
            self._end(TermState.ENDED, "its body has ended", now)
        else:
            reason = self._keepalive.lost_because or "its deadline has passed"
            self._end(TermState.LOST, reason, self._validity_end(now))
        return self._ends[0].state is TermState.ENDED

    def _validity_end(self, now: float) -> float:
        """When the validity ended, if the end is noticed `now`. A process that was paused notices
        it late."""
        deadline = self._keepalive.valid_until
        return min(now, self._keepalive.ended_at if deadline == NEVER else deadline)

    def _end(self, state: TermState, reason: str, ended_at: float) -> None:
        self._mark(state, reason, ended_at)
        self._tell()

    def _mark(self, state: TermState, reason: str, ended_at: float) -> None:
        if not self._ends:
            self._ends.append(_End(state, reason, ended_at))
        self._deadline = NO_DEADLINE

    def _tell(self) -> None:
        """Call each listener once."""
        # In reverse order: the last listener ends the body, which must not wait for the others.
        while self._listeners:
            with suppress(IndexError):  # another thread has taken it
                self._call(self._listeners.pop())

    def _call(self, listener: Callable[[], None]) -> None:
        try:
            listener()
        except Exception:
            log.exception("%s", log_line(event="listener_failed", on="end of term", term=self))


def is_valid(term: Term) -> bool:
    """Whether a term is valid, for an onlooker such as the oracle of a simulation. Unlike
    `term.valid`, which is for the process that leads, this does not end the term."""
    return term._now() < term.valid_until
