"""The store calls and the leases of one session: granting, renewing and revoking them.

A session has one lease that its campaigns share, granted when it is first needed and again after
each loss. A campaign with `stall_after_s`, or an order, has a lease of its own.

A lost lease is revoked, so that a successor need not wait for it to expire, but only once the last
body that ran on it has ended: until then it is what keeps a successor away.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from doyen._waiting import Admission, BackgroundTasks
from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.events.telemetry import Telemetry
from doyen.lease.clock import Clock
from doyen.lease.keepalive import Keepalive
from doyen.lease.runtime import Runtime
from doyen.lease.timing import Timing
from doyen.model import SessionHealth
from doyen.stores.port import Store
from doyen.warden.warding import Warding

__all__ = ["CALLS_AT_ONCE", "LeaseKeeper", "Observer", "Reachability", "StoreCalls"]

log = logging.getLogger("doyen")
T = TypeVar("T")

CALLS_AT_ONCE = 128
"""How many store calls of a session are under way at a time."""


LEASES_AT_ONCE = 64
"""Of how many leases one call asks what is left of them."""


class StoreCalls:
    """Makes the calls of one session to its store: limited in number, each with a deadline.

    A call without a response within the request timeout raises `OutcomeUnknown`: the request may
    have been carried out, or may be later. Renewals are made without this class, so that they never
    wait for other calls.
    """

    def __init__(
        self,
        store: Store,
        timing: Timing,
        spread: random.Random,
        clock: Clock,
        tasks: BackgroundTasks,
    ) -> None:
        self.store = store
        self.timing = timing
        """Of the session's leases. Replaced if the store grants another ttl than was requested."""
        self.reachability = Reachability(self, clock, tasks)
        self._random = spread
        self._clock = clock
        self.failing = False
        """The last call that ended did so without a response of the store."""
        self._admission = Admission(CALLS_AT_ONCE)

    async def call(self, request: Awaitable[T]) -> T:
        """Make one store call.

        Its timeout begins when it is admitted. If it began earlier, thousands of simultaneous
        calls would wait for one another until all of them had timed out.
        """
        if not self._admission.enter_now():
            await self._wait_for_admission(request)
        sent_at = self._clock.now()
        try:
            async with asyncio.timeout(self.timing.request_timeout_s):
                answer = await request
            self.reachability.answered(sent_at)
            self.failing = False
            return answer
        except (StoreUnavailable, OutcomeUnknown):
            self.failing = True
            raise
        except TimeoutError as error:
            self.failing = True
            raise OutcomeUnknown(
                f"the store did not answer within {self.timing.request_timeout_s:.3g} s"
            ) from error
        finally:
            self._admission.leave()

    async def _wait_for_admission(self, request: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(self.timing.ttl_s):
                await self._admission.enter()
        except BaseException as error:
            if isinstance(request, Coroutine):
                request.close()
            if isinstance(error, TimeoutError):
                raise StoreUnavailable(
                    f"{CALLS_AT_ONCE} calls to the store are under way, and none of them ended"
                    f" within {self.timing.ttl_s:g} s"
                ) from error
            raise

    async def remaining(self, leases: Sequence[str]) -> dict[str, float]:
        """What is left of these leases, as `Store.remaining` tells it. Some stores have to be asked
        for each lease, so many of them are asked for in several calls, each with its deadline."""
        found: dict[str, float] = {}
        for begin in range(0, len(leases), LEASES_AT_ONCE):
            some = leases[begin : begin + LEASES_AT_ONCE]
            found |= await self.call(self.store.remaining(some))
        return found

    def unique_id(self) -> str:
        """A random id for something that is written to the store."""
        return f"{self._random.getrandbits(64):016x}"

    def retry_pause(self) -> float:
        """How many seconds to wait before a failed request is retried."""
        return self.timing.retry_pause_s(self._random.uniform(-1, 1))


class Observer(Protocol):
    """Is notified when the store stops answering, and when it answers again."""

    @property
    def key(self) -> str:
        """A key that may be read to find out."""
        ...

    def unreachable(self, since: float, error: str) -> None:
        """The store has not answered for a ttl. It last answered at `since`, on the wall clock."""
        ...

    def reachable(self) -> None:
        """The store answers again."""
        ...

    def read_again(self) -> None:
        """The store answers with an error, which the observer gets by a call of its own."""
        ...


class _Failures:
    """For how long the calls of one observer have failed without an answer between them."""

    def __init__(self, now: float) -> None:
        self.since = self.last_at = now
        self.total_s = 0.0
        self.reported = False


class Reachability:
    """Whether the store answers, checked for as long as there are observers.

    Notifications of a watch do not tell whether the store can still send them. So while there are
    observers, and no other call was answered for a third of the ttl, one key of one of them is
    read, of each in turn. If no call that was sent within the last ttl is answered, every observer
    is notified that the store is unreachable, and notified when it answers again.

    A store may answer these reads and still fail the calls of one observer: with a full disk it
    registers no watch. That observer is notified after two ttls of failures, since a store that
    loses many calls may lose some in a row.

    A process that was stopped, or whose machine was suspended, could not receive an answer
    meanwhile: that time does not count.
    """

    def __init__(self, calls: StoreCalls, clock: Clock, tasks: BackgroundTasks) -> None:
        self._calls = calls
        self._clock = clock
        self._tasks = tasks
        self._observers: dict[Observer, None] = {}
        self._checking: asyncio.Task[None] | None = None
        self._answered_at: float | None = None
        self._began_at = 0.0
        self._error = ""
        self._failing: dict[Observer, _Failures] = {}
        self.lost = False
        """Observers have been notified that the store is unreachable."""

    @property
    def as_of(self) -> float | None:
        """When the last call that was answered had been sent, on the wall clock; None if there is
        none. Any thread."""
        answered_at = self._answered_at
        if answered_at is None:
            return None
        return self._clock.wall() - (self._clock.now() - answered_at)

    def answered(self, sent_at: float) -> None:
        """A call that was sent at this time, on the boot-time clock, was answered."""
        if self._answered_at is None or sent_at > self._answered_at:
            self._answered_at = sent_at
        if self.lost and self._clock.now() - self._answered_at < self._calls.timing.ttl_s:
            self.lost = False
            for observer in list(self._observers):
                if not self._reported_alone(observer):
                    observer.reachable()

    def failed(self, observer: Observer, error: StoreError) -> None:
        """A call of this observer failed, whether or not others are answered."""
        if observer not in self._observers:
            return
        now, ttl_s = self._clock.now(), self._calls.timing.ttl_s
        failures = self._failing.setdefault(observer, _Failures(now))
        # The machine may have been suspended, so a long gap counts for half a ttl only.
        failures.total_s += min(now - failures.last_at, ttl_s / 2)
        failures.last_at = now
        if failures.total_s >= 2 * ttl_s and not failures.reported and not self.lost:
            failures.reported = True
            observer.unreachable(self._clock.wall() - (now - failures.since), str(error))

    def succeeded(self, observer: Observer) -> None:
        """The calls of this observer are answered."""
        failures = self._failing.pop(observer, None)
        if failures is not None and failures.reported:
            observer.reachable()

    def _reported_alone(self, observer: Observer) -> bool:
        return observer in self._failing and self._failing[observer].reported

    def join(self, observer: Observer) -> None:
        """Notify this observer from now on."""
        self._observers[observer] = None
        if self.lost:
            self._report_unreachable(observer)
        if self._checking is None or self._checking.done():
            self._began_at = self._clock.now()
            self._checking = self._tasks.start(self._check())

    def leave(self, observer: Observer) -> None:
        self._observers.pop(observer, None)
        self._failing.pop(observer, None)
        if not self._observers and self._checking is not None:
            self._checking.cancel()
            self._checking = None
            self.lost = False

    async def _check(self) -> None:
        failed_after = -1.0
        """The last answer before a check failed."""
        awake_until = math.inf
        """When the sleep or call under way should have ended. A much later end means that the
        process was suspended."""
        while True:
            timing = self._calls.timing
            if self._clock.now() > awake_until + timing.ttl_s / 3 and not self.lost:
                self._began_at = self._clock.now()
            last = self._last
            idle_s = last + timing.ttl_s / 3 - self._clock.now()
            if idle_s > 0 and not self.lost:
                awake_until = self._clock.now() + idle_s
                await asyncio.sleep(idle_s)
                continue
            left_s = self._left_s
            if left_s <= 0 and failed_after == last and not self.lost:
                self.lost = True
                for observer in list(self._observers):
                    if not self._reported_alone(observer):
                        self._report_unreachable(observer)
            awake_until = self._clock.now() + (left_s if left_s > 0 else timing.ttl_s)
            try:
                async with asyncio.timeout(left_s if left_s > 0 else None):
                    await self._read()
                continue
            except (OutcomeUnknown, StoreUnavailable) as error:
                self._error = str(error)
            except TimeoutError:
                self._error = self._error or "the store does not answer"
            except StoreError as error:
                # Observers get the error by their own calls, and one that waits makes none: wake
                # all.
                log.debug("%s", log_line(event="check_failed", error=error))
                for observer in list(self._observers):
                    observer.read_again()
                await asyncio.sleep(timing.ttl_s / 3)
                continue
            failed_after = last
            pause_s, left_s = self._calls.retry_pause(), self._left_s
            if self.lost or left_s > 0:
                pause_s = pause_s if self.lost else min(pause_s, left_s)
                awake_until = max(awake_until, self._clock.now() + pause_s)
                await asyncio.sleep(pause_s)

    @property
    def _left_s(self) -> float:
        """How long the store may still take to answer."""
        return self._last + self._calls.timing.ttl_s - self._clock.now()

    @property
    def _last(self) -> float:
        """When the store last answered or, if that is later, since when there have been
        observers."""
        return max(self._began_at, self._answered_at or 0.0)

    async def _read(self) -> None:
        observer = next(iter(self._observers))
        self._observers[observer] = self._observers.pop(observer)  # to the end
        await self._calls.call(self._calls.store.get(observer.key))

    def _report_unreachable(self, observer: Observer) -> None:
        last = self._began_at if self._answered_at is None else self._answered_at
        since = self._clock.wall() - (self._clock.now() - last)
        observer.unreachable(since, self._error)


class LeaseKeeper:
    """Keeps the leases of one session. Used on doyen's loop."""

    def __init__(
        self,
        calls: StoreCalls,
        timing_of: Callable[[float], Timing],
        runtime: Runtime,
        telemetry: Telemetry,
        tasks: BackgroundTasks,
        warding: Warding,
    ) -> None:
        """`timing_of` computes the timing of a lease from its ttl."""
        self._calls = calls
        self._timing_of = timing_of
        self._runtime = runtime
        self._telemetry = telemetry
        self._tasks = tasks
        self._warding = warding
        self._shared: Keepalive | None = None
        self._own: dict[Keepalive, None] = {}
        self._granting = asyncio.Lock()
        self.bodies = 0
        """How many bodies run."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._bodies_left = False
        """The session was closed, and a body had not ended by then."""

    def held(self) -> Keepalive | None:
        """The keepalive that campaigns share, if its lease is valid."""
        lost = self._shared is None or self._shared.lose_if_expired()
        return None if lost else self._shared

    async def shared(self) -> Keepalive:
        """The same; a new one on a new lease if there is none."""
        if (held := self.held()) is not None:
            return held
        async with self._granting:
            if self._shared is None or self._shared.lost_because is not None:
                self._shared = await self._grant()
            return self._shared

    async def own(self, stall_after_s: float | None = None) -> Keepalive:
        """A keepalive on a lease of its own, for one campaign or one order. Pair with `release`."""
        keepalive = await self._grant(stall_after_s)
        self._own[keepalive] = None
        return keepalive

    def release(self, keepalive: Keepalive) -> asyncio.Task[None] | None:
        """End a lease that `own` returned, in the background. A shared lease is left alone."""
        if keepalive not in self._own:
            return None
        del self._own[keepalive]
        if keepalive.lost_because is not None:
            return None
        keepalive.stop()
        return self._tasks.start(self._revoke(keepalive))

    def find(self, lease_id: str | None) -> Keepalive | None:
        """The keepalive of a lease of this session."""
        return next((each for each in self._all() if each.lease.id == lease_id), None)

    def _all(self) -> list[Keepalive]:
        return [*self._own, *([self._shared] if self._shared else [])]

    @property
    def health(self) -> SessionHealth:
        """The health of the session, as far as its leases show it. Any thread."""
        keepalives = self._all()
        if any(each.lost_because is not None for each in keepalives):
            return "lost"
        unsure = self._calls.failing or any(each.unsure for each in keepalives)
        return "unsure" if unsure else "ok"

    async def _grant(self, stall_after_s: float | None = None) -> Keepalive:
        calls, runtime = self._calls, self._runtime
        self._warding.begin()
        sent_at = runtime.clock.now()
        lease = await calls.call(calls.store.grant(calls.timing.ttl_s))
        self._warding.register(lease, calls.store.warrant(lease))
        if lease.ttl_s != calls.timing.ttl_s:
            calls.timing = self._timing_of(lease.ttl_s)
        keepalive = Keepalive(
            calls.store,
            lease,
            calls.timing,
            runtime.clock,
            self._telemetry,
            sent_at=sent_at,
            spread=runtime.random,
            post=runtime.post,
            stall_after_s=stall_after_s,
            warding=self._warding,
        )
        keepalive.on_renewal(lambda _: self._warding.renewed())
        keepalive.on_loss(self, lambda: self._revoke_lost(keepalive))
        self._tasks.start(keepalive.run())
        return keepalive

    def body_begins(self, keepalive: Keepalive) -> None:
        """A body runs on this lease from now on: the watchdog watches its deadline."""
        self.bodies += 1
        self._warding.bodies(self.bodies)
        self._idle.clear()
        keepalive.bodies += 1
        if keepalive.bodies == 1:
            # Only after the body was told: the watchdog's thread would compete with the body's.
            self._runtime.after_reply(partial(self._watch, keepalive))

    def _watch(self, keepalive: Keepalive) -> None:
        if keepalive.bodies:
            self._runtime.watch(keepalive)

    def body_ended(self, keepalive: Keepalive) -> None:
        self.bodies -= 1
        self._warding.bodies(0 if self._closed else self.bodies)
        if not self.bodies:
            self._idle.set()
            if self._bodies_left:
                self._warding.close()
        keepalive.bodies -= 1
        if not keepalive.bodies:
            self._runtime.unwatch(keepalive)
            self._revoke_lost(keepalive)

    def _revoke_lost(self, keepalive: Keepalive) -> None:
        """Revoke a lost lease, unless a body still runs on it."""
        if keepalive.lost_because is not None and not keepalive.bodies and not self._closed:
            self._tasks.start(self._revoke(keepalive, until_done=True))

    async def _revoke(self, keepalive: Keepalive, *, until_done: bool = False) -> None:
        """End a lease. With `until_done`, retry for as long as the store is unavailable: a store
        that has been restarted may give all leases their full ttl again, and candidates would
        wait for this one to expire."""
        await self._telemetry.written()
        while True:
            try:
                await self._calls.call(self._calls.store.revoke(keepalive.lease))
                break
            except StoreError as error:
                passing = isinstance(error, StoreUnavailable | OutcomeUnknown)
                if not passing or not until_done:
                    line = log_line(event="revoke_failed", lease=keepalive.lease.id, error=error)
                    log.debug("%s", line)
                    break
            await asyncio.sleep(self._calls.retry_pause())
        self._warding.withdraw(keepalive.lease)

    def give_up_all(self, reason: str) -> None:
        """End every term. The leases are revoked when the bodies have ended."""
        for keepalive in self._all():
            keepalive.lose(reason, planned=True)

    def bodies_suspended(self, *, ended: bool) -> None:
        """The process is ending, and the thread of all bodies is suspended for good, so their
        end cannot be waited for. `ended`: their code runs on no other thread either. Then they
        have ended as far as their leases are concerned, except for the processes that they have
        started."""
        for keepalive in self._all():
            if ended and not keepalive.runs:
                keepalive.bodies = 0
        self._idle.set()

    async def close(self) -> None:
        """End every term, wait for the bodies for as long as the stop budget allows, and revoke
        the leases on which no body runs any more. The others expire."""
        self._closed = True
        keepalives = self._all()
        for keepalive in keepalives:
            keepalive.forget(self)
            if keepalive.depended_on:
                keepalive.lose("the session was closed", planned=True)
            else:
                keepalive.stop()
        if self.bodies:
            ended = asyncio.ensure_future(self._idle.wait())
            await asyncio.wait({ended}, timeout=self._calls.timing.stop_budget_s)
            ended.cancel()
        idle = [keepalive for keepalive in keepalives if not keepalive.bodies]
        for keepalive in idle:
            self._runtime.unwatch(keepalive)
        await asyncio.gather(*map(self._revoke, idle))
        self._warding.bodies(0)
        self._bodies_left = len(idle) < len(keepalives)
        # The warden of a lease that is left to expire goes on: if this process dies before that,
        # and the processes that it has supervised are gone, it ends the lease.
        if not self._bodies_left:
            self._warding.close()

    def forked(self) -> None:
        """In the child of a fork: the leases belong to the parent."""
        for keepalive in self._all():
            keepalive.forked()
        self._warding.forked()
