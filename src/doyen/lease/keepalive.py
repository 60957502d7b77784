"""The keepalive of one lease: renews it, and derives the deadline from the confirmations.

`LeaseValidity` is the deadline and the end of the lease, for any thread; `Keepalive` renews it, on
doyen's loop. Invariants:

- `valid_until` is derived from the *send* instant of a grant or renewal that the store has
  confirmed. A request without a response moves nothing.
- A keepalive that is lost stays lost: `valid_until` is −∞ from then on, and a confirmation that
  comes later is ignored. A session that goes on gets a new keepalive on a new lease.
- Whoever finds that the deadline has passed declares the lease lost before acting on it, so what
  was once found to have expired is not extended by a confirmation that is under way.
- Renewals are retried until the deadline. They never stop without a report.
- With `stall_after_s`, the deadline is also never later than that after the last progress that
  the work reported. Such a keepalive serves one campaign, so that its stall ends nothing else.

There are no locks. The handler of a signal may interrupt the main thread anywhere, and wait for
doyen's loop, or never return: the loop and the watchdog must not wait for what that thread holds.
Instead, the first loss that is appended counts, and the deadline is an object that is replaced with
the loss: a confirmation that is being processed at this moment moves the deadline of the object
before it, which nobody reads any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from doyen.errors import LeaseGone
from doyen.events import Granted, LeaseLost, Renewed, Unsure
from doyen.events.log_lines import log_line
from doyen.events.reasons import EXPIRED, stalled
from doyen.events.telemetry import Telemetry
from doyen.lease.clock import Clock
from doyen.lease.timing import Timing
from doyen.model import Lease
from doyen.stores.port import Store
from doyen.warden.warding import NoWarden, Warding

__all__ = ["NEVER", "NO_DEADLINE", "Deadline", "Keepalive"]

NEVER = float("-inf")
_SHORTEST_RETRY_S = 0.001
log = logging.getLogger("doyen")


class Deadline:
    """Until when something is valid, on the boot-time clock. `term.valid` compares this number with
    the clock."""

    __slots__ = ("valid_until",)

    def __init__(self, valid_until: float) -> None:
        self.valid_until = valid_until


NO_DEADLINE = Deadline(NEVER)
"""That of what is over."""


class _Loss(NamedTuple):
    reason: str
    planned: bool
    ended_at: float


class BoundTerm(Protocol):
    """A term that ends with the lease."""

    def _lose(self, reason: str) -> None: ...


class LeaseValidity:
    """Until when a lease is valid, and what depends on that. Any thread."""

    def __init__(
        self,
        lease: Lease,
        timing: Timing,
        clock: Clock,
        telemetry: Telemetry,
        sent_at: float,
        post: Callable[[Callable[[], None]], None],
        stall_after_s: float | None,
    ) -> None:
        self.lease = lease
        self.timing = timing
        self._stall_after_s = math.inf if stall_after_s is None else stall_after_s
        self._progress_at = math.inf
        self._confirmed_from = sent_at
        self.deadline = Deadline(timing.valid_until(sent_at))
        self._losses: deque[_Loss] = deque()
        """The first one counts."""
        self._unreported = deque([None])
        """Empty once the loss is being reported."""
        self.in_child = False
        """This process is the child of a fork, and the lease is its parent's."""
        self._clock = clock
        self._telemetry = telemetry
        self.post = post
        self._terms: dict[object, BoundTerm] = {}
        self._listeners: dict[object, Callable[[], None]] = {}

    @property
    def valid_until(self) -> float:
        """The deadline; −∞ once the lease is lost."""
        return self.deadline.valid_until

    @property
    def lost_because(self) -> str | None:
        """Why the lease is lost, once it is."""
        return self._losses[0].reason if self._losses else None

    @property
    def loss_planned(self) -> bool:
        """It was lost because this process gave it up."""
        return bool(self._losses) and self._losses[0].planned

    @property
    def ended_at(self) -> float:
        """When validity ended, once it has."""
        return self._losses[0].ended_at if self._losses else math.inf

    def bind(self, term: BoundTerm) -> None:
        """Have `term` end with the lease, on the thread that declares it lost; at once if it is."""
        self._terms[term] = term
        if self._losses and self._terms.pop(term, None) is not None:
            term._lose(self._losses[0].reason)

    def on_loss(self, owner: object, listener: Callable[[], None]) -> None:
        """Have `listener` called on doyen's loop once the lease is lost."""
        self._listeners[owner] = listener
        if self._losses and self._listeners.pop(owner, None) is not None:
            self.post(listener)

    def forget(self, owner: object) -> None:
        """Undo what `bind` or `on_loss` did for `owner`."""
        self._terms.pop(owner, None)
        self._listeners.pop(owner, None)

    @property
    def depended_on(self) -> bool:
        return bool(self._terms or self._listeners)

    def _extend(self, confirmed_from: float) -> bool:
        """Move the deadline. False if the lease is lost: `term.valid` may have been read as false,
        and it never turns true again."""
        if self.lose_if_expired():
            return False
        self._confirmed_from = confirmed_from
        return self._move_deadline()

    def _deadline(self) -> float:
        return min(
            self.timing.valid_until(self._confirmed_from), self._progress_at + self._stall_after_s
        )

    def _move_deadline(self) -> bool:
        """Set the deadline that follows from confirmations and progress. False if the lease is
        lost."""
        deadline = self.deadline
        if deadline is NO_DEADLINE:
            return False
        while deadline.valid_until != (until := self._deadline()):
            deadline.valid_until = until  # another thread may report progress meanwhile
        if self._losses:
            deadline.valid_until = NEVER
        return not self._losses

    def progress(self) -> None:
        """The work has made progress: its next report is due within `stall_after_s`."""
        if self._stall_after_s == math.inf or self.lose_if_expired():
            return
        self._progress_at = self._clock.now()
        self._move_deadline()

    def lose_if_expired(self) -> bool:
        """Declare the lease lost if its deadline has passed."""
        if self._clock.now() < self.deadline.valid_until:
            return False
        self.lose(self._expired_because(), only_if_expired=True)
        return bool(self._losses)

    def expire(self) -> None:
        """As `lose_if_expired`, but what depends on the lease is told on doyen's loop."""
        if self._mark_lost(self._expired_because(), only_if_expired=True):
            self.post(self._tell)

    def _expired_because(self) -> str:
        stall_at = self._progress_at + self._stall_after_s
        return stalled(self._stall_after_s) if self._clock.now() >= stall_at else EXPIRED

    def lose(self, reason: str, *, only_if_expired: bool = False, planned: bool = False) -> None:
        """Declare the lease lost, once. `planned`: this process gives it up by itself, which is no
        reason for a warning."""
        if self._mark_lost(reason, only_if_expired=only_if_expired, planned=planned):
            self._tell()

    def _mark_lost(
        self, reason: str, *, only_if_expired: bool = False, planned: bool = False
    ) -> bool:
        """End the validity. True if the lease is lost."""
        now, deadline = self._clock.now(), self.deadline
        if not self._losses:
            if only_if_expired and now < deadline.valid_until:
                return False
            self._losses.append(_Loss(reason, planned, min(now, deadline.valid_until)))
        self.deadline = NO_DEADLINE
        if deadline is not NO_DEADLINE:
            deadline.valid_until = NEVER
        return True

    def _tell(self) -> None:
        """Tell what depends on the lease that it is lost, each once."""
        # Bodies are told first. The other listeners wake doyen's thread, which would compete with
        # theirs for the interpreter.
        for owner in [*self._terms]:
            if (term := self._terms.pop(owner, None)) is not None:
                term._lose(self._losses[0].reason)
        if self._unreported:
            try:
                self._unreported.pop()
            except IndexError:
                return  # another thread reports it
            self._report()

    def _report(self) -> None:
        loss = self._losses[0]
        listeners = [self._listeners.pop(owner, None) for owner in [*self._listeners]]
        event = LeaseLost(lease=self.lease.id, reason=loss.reason, ended_at=loss.ended_at)

        def report() -> None:
            for listener in listeners:
                if listener is not None:
                    listener()
            self._telemetry.emit(event, planned=loss.planned)

        self.post(report)

    def stop(self) -> None:
        """End the validity, without events or listeners: nothing depends on it any more."""
        self._unreported.clear()
        self._terms.clear()
        self._listeners.clear()
        self._mark_lost("the session was closed")

    def forked(self) -> None:
        """In the child of a fork: the lease belongs to the parent."""
        self.in_child = True
        self._losses.appendleft(
            _Loss("the lease belongs to the parent process", False, self._clock.now())
        )
        self._unreported.clear()
        self._terms.clear()
        self._listeners.clear()
        self._mark_lost("")


class SupervisedRuns:
    """The supervised runs, by term, whose processes may be alive. They are part of the term's body,
    which has not ended before them, whatever becomes of this process."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._running: list[object] = []
        """The term of each run."""
        self._post = post
        self._ended = asyncio.Event()

    def __contains__(self, term: object) -> bool:
        return term in self._running

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, term: object) -> None:
        """Processes are about to be started for a term. Any thread."""
        self._running.append(term)

    def end(self, term: object) -> None:
        """The processes of a run are gone. Any thread."""
        self._running.remove(term)
        self._post(self._ended.set)

    async def wait_for_end(self, term: object) -> None:
        """Wait until no process of a term's runs is alive."""
        while term in self._running:
            self._ended.clear()  # it is set on this loop, after what has ended is taken out
            await self._ended.wait()


class Keepalive(LeaseValidity):
    """Keeps one lease alive, for the bodies and attempts that rely on it."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        timing: Timing,
        clock: Clock,
        telemetry: Telemetry,
        *,
        sent_at: float,
        spread: random.Random,
        post: Callable[[Callable[[], None]], None],
        stall_after_s: float | None = None,
        warding: Warding | None = None,
    ) -> None:
        super().__init__(lease, timing, clock, telemetry, sent_at, post, stall_after_s)
        self.warding: Warding = warding or NoWarden()
        self.unsure = False
        """The last renewal failed, and the deadline has not come."""
        self.bodies = 0
        """Bodies that still run on this lease. It is not revoked before they have ended."""
        self.runs = SupervisedRuns(post)
        self.attempts: set[str] = set()
        """Attempts on this lease that have not ended. A record or ticket under this lease that
        belongs to none of them is left over."""
        self._store = store
        self._sent_at = sent_at
        self._random = spread
        self._renewal_listeners: dict[object, Callable[[float], None]] = {}
        telemetry.emit(Granted(lease=lease.id, ttl_s=lease.ttl_s, valid_until=self.valid_until))

    def on_renewal(self, listener: Callable[[float], None]) -> Callable[[], None]:
        """Have `listener` called with the new deadline after each renewal, on doyen's loop.
        Returns a function that removes the listener."""
        mine = object()
        self._renewal_listeners[mine] = listener

        def forget() -> None:
            self._renewal_listeners.pop(mine, None)

        return forget

    def proof(self) -> tuple[int, ...]:
        """Copies of the descriptors that prove the lease's holder alive (see `Store.proof`) and, if
        there is a warden, of the link to it. The caller closes them. Any thread."""
        while True:
            held = self._held_descriptors()
            copies = []
            for descriptor in held:
                with contextlib.suppress(OSError):
                    copies.append(os.dup(descriptor))
            # Doyen's thread may have closed one meanwhile, and its number may have been used again.
            # It forgets a descriptor before it closes it.
            if self._held_descriptors() == held:
                return tuple(copies)
            for copy in copies:
                os.close(copy)

    def _held_descriptors(self) -> tuple[int, ...]:
        return (*self._store.proof(self.lease), *self.warding.proof())

    async def run(self) -> None:
        """Renew until the lease is lost. Runs as a task of its own on doyen's loop."""
        due = self._next_renewal()
        while self.lost_because is None:
            await asyncio.sleep(max(0.0, due - self._clock.now()))
            if self.lose_if_expired():
                return
            sent_at = self._clock.now()
            try:
                async with asyncio.timeout(self.timing.request_timeout_s):
                    await self._store.renew(self.lease)
            except LeaseGone as error:
                self.lose(str(error) or "the store has ended the lease")
                return
            except Exception as error:  # noqa: BLE001 - whatever failed, the renewal is retried
                self._failed(error)
                now = self._clock.now()
                # A store that fails at once just before the deadline would otherwise be retried
                # without any pause, because timers cannot resolve what is left of the time.
                retry_at = min(now + self.timing.retry_every_s, self.valid_until)
                due = max(now + _SHORTEST_RETRY_S, retry_at)
            else:
                self._confirm(sent_at)
                due = self._next_renewal()

    def _next_renewal(self) -> float:
        return self.timing.renew_at(self._sent_at, self._random.uniform(-1, 1))

    def _confirm(self, sent_at: float) -> None:
        """The store has confirmed the renewal that was sent at `sent_at`."""
        if not self._extend(self._sent_at if self.timing.renewals_lag else sent_at):
            return
        self._sent_at = sent_at
        self.unsure = False
        took_s = round(self._clock.now() - sent_at, 6)
        self._telemetry.emit(
            Renewed(lease=self.lease.id, valid_until=self.valid_until, took_s=took_s)
        )
        for listener in [*self._renewal_listeners.values()]:
            try:
                listener(self.valid_until)
            except Exception:
                log.exception("%s", log_line(event="listener_failed", on="renewal"))

    def _failed(self, error: Exception) -> None:
        """A renewal has failed."""
        remaining_s = self.valid_until - self._clock.now()
        if remaining_s <= 0:
            return  # lost, or about to be declared so
        self.unsure = True
        text = str(error) or type(error).__name__
        if isinstance(error, TimeoutError) and not str(error):
            text = f"the store did not answer within {self.timing.request_timeout_s:.3g} s"
        self._telemetry.emit(
            Unsure(lease=self.lease.id, remaining_s=round(remaining_s, 3), error=text)
        )
