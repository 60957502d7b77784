"""A process's presence in a store: one lease, its heart, and everyone who stands on it.

This is the part of a session that lives on doyen's loop. It hands out the current heart (granting
a new lease after a loss), bounds every store call, owns the background tasks, and gives a lost
lease back only when the last body that ran on it has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from doyen.errors import ConfigError, OutcomeUnknown, SessionClosed, StoreError, StoreUnavailable
from doyen.events import Sink
from doyen.lease.keepalive import Heart
from doyen.lease.runtime import Runtime
from doyen.lease.timing import Timing
from doyen.model import Candidate, Claim, Entry, Kind, Leader, Line, leader_key, line_key
from doyen.stores.port import Context, Store, Watch, open_store
from doyen.telemetry import Telemetry

__all__ = ["Presence", "SessionSettings", "line_of"]

T = TypeVar("T")
log = logging.getLogger("doyen")

CALLS_AT_ONCE = 128
"""How many store calls of a session are under way at a time. Renewals are not among them."""
ENTERING = 64
"""How many candidates of a session take their places, or leave them, at a time."""

CHECKS_AT_ONCE = 16
"""How many deletions are checked at a time. They are not urgent, and use up turns of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What a session was asked for. None means: the store's or the timing's default."""

    url: str
    ttl_s: float | None = None
    stop_budget_s: float | None = None
    drift: float | None = None
    audit: str | os.PathLike[str] | None = None
    sinks: tuple[Sink, ...] = ()

    def timing(self, ttl_s: float, *, renewals_lag: bool = False) -> Timing:
        """The times of a lease of `ttl_s`; raises `ConfigError` if they leave no margin."""
        asked = {"stop_budget_s": self.stop_budget_s, "drift": self.drift}
        given = {name: value for name, value in asked.items() if value is not None}
        return Timing(ttl_s=ttl_s, renewals_lag=renewals_lag, **given)


class Presence:
    """The inside of a session."""

    def __init__(
        self,
        store: Store,
        settings: SessionSettings,
        timing: Timing,
        telemetry: Telemetry,
        runtime: Runtime,
        *,
        session_id: str,
    ) -> None:
        self.store = store
        self.timing = timing
        self.telemetry = telemetry
        self.runtime = runtime
        self.clock = runtime.clock
        self.id = session_id
        self._settings = settings
        self._random = runtime.random
        self._attempts = itertools.count(1)
        self._heart: Heart | None = None
        self._own_hearts: dict[Heart, None] = {}
        self._granting = asyncio.Lock()
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
        self.entrance = asyncio.Semaphore(ENTERING)
        # In the order they came, not sets: one seed must give one run.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._errands: dict[asyncio.Task[Any], None] = {}
        self._deleted: dict[str, None] = {}
        """Keys whose deletion is checked in the next round."""
        self._checking: asyncio.Task[None] | None = None
        self._bodies = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._forked = False

    @classmethod
    async def open(
        cls,
        settings: SessionSettings,
        runtime: Runtime,
        *,
        store: Store | None = None,
    ) -> Presence:
        """Check the settings, open the store, and be ready. Nothing is granted yet."""
        session_id = f"{runtime.random.getrandbits(64):016x}"
        if settings.ttl_s is not None:
            settings.timing(settings.ttl_s)
        audit = None
        if settings.audit is not None:
            from doyen.audit import AuditLog

            to_file = await runtime.aside(partial(AuditLog, settings.audit), AuditLog.close)
            audit = runtime.outlet(to_file, "doyen-audit", to_file.close)
        telemetry = Telemetry(
            runtime.clock,
            session_id,
            settings.sinks,
            audit=audit,
            outlet=runtime.outlet,
            allowance=runtime.audit_wait,
        )
        try:
            if store is None:
                store = await open_store(settings.url, Context(runtime.clock, telemetry.emit))
            limits = store.capabilities
            ttl_s = settings.ttl_s or limits.ttl_default_s
            if ttl_s < limits.ttl_min_s:
                raise ConfigError(
                    f"ttl_s={ttl_s:g} is below what this store can keep: {limits.ttl_min_s:g} s"
                )
            timing = settings.timing(ttl_s, renewals_lag=limits.renewals_lag)
        except BaseException:
            if store is not None:
                await store.close()
            await telemetry.close()
            raise
        return cls(store, settings, timing, telemetry, runtime, session_id=session_id)

    async def call(self, request: Awaitable[T]) -> T:
        """One store call, bounded: shorter than the lease, and unknown if it did not answer.

        Its time is counted from when its turn comes. Thousands of candidates that call at once
        would otherwise wait for one another until all of them are late.
        """
        await self._turn(request)
        try:
            async with asyncio.timeout(self.timing.request_timeout_s):
                return await request
        except TimeoutError as error:
            raise OutcomeUnknown(
                f"the store did not answer within {self.timing.request_timeout_s:g} s"
            ) from error
        finally:
            self._turns.release()

    async def _turn(self, request: Awaitable[Any]) -> None:
        if not self._turns.locked():
            await self._turns.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self.timing.ttl_s):
                await self._turns.acquire()
        except BaseException as error:
            if isinstance(request, Coroutine):
                request.close()
            if isinstance(error, TimeoutError):
                raise StoreUnavailable(
                    f"{CALLS_AT_ONCE} calls wait for the store, and no turn came within"
                    f" {self.timing.ttl_s:g} s"
                ) from error
            raise

    async def errand(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run what a caller waits for. Closing the session ends it, in `SessionClosed`."""
        task = asyncio.current_task()
        assert task is not None
        self._errands[task] = None
        try:
            return await work()
        except asyncio.CancelledError:
            if task.cancelling() == 1:  # by `close` alone, not by the caller as well
                self.check_open()
            raise
        finally:
            self._errands.pop(task, None)

    async def heart(self) -> Heart:
        """The live heart; a new one on a new lease if there is none."""
        self.check_open()
        if self._heart is not None and not self._heart.lose_if_expired():
            return self._heart
        async with self._granting:
            if self._heart is None or self._heart.lost_because is not None:
                self._heart = await self._grant()
            return self._heart

    async def own_heart(self, stall_after_s: float | None = None) -> Heart:
        """A heart on a lease of its own: for one campaign whose stall is to end it alone, or for
        one order, of which nothing is to stay behind. Pair with `retire`."""
        self.check_open()
        heart = await self._grant(stall_after_s)
        self._own_hearts[heart] = None
        return heart

    def retire(self, heart: Heart) -> asyncio.Task[None] | None:
        """Whoever had `heart` to itself needs it no more: its lease ends, in the background."""
        if heart not in self._own_hearts:
            return None
        del self._own_hearts[heart]
        if heart.lost_because is not None:
            return None
        heart.stop()
        return self.spawn(self._revoke(heart))

    async def _grant(self, stall_after_s: float | None = None) -> Heart:
        sent_at = self.clock.now()
        lease = await self.call(self.store.grant(self.timing.ttl_s))
        timing = self.timing
        if lease.ttl_s != timing.ttl_s:
            lag = self.store.capabilities.renewals_lag
            timing = self.timing = self._settings.timing(lease.ttl_s, renewals_lag=lag)
        heart = Heart(
            self.store,
            lease,
            timing,
            self.clock,
            self.telemetry,
            sent_at=sent_at,
            spread=self._random,
            post=self.runtime.post,
            stall_after_s=stall_after_s,
        )
        heart.on_loss(self, lambda _: self.runtime.post(lambda: self._give_back(heart)))
        self.spawn(heart.beat())
        return heart

    def retry_pause(self) -> float:
        """How long to wait before a failed request is tried again."""
        return self.timing.retry_pause_s(self._random.uniform(-1, 1))

    def next_attempt(self) -> str:
        return f"{self.id}-{next(self._attempts)}"

    async def delete_left_over(self, entry: Entry) -> bool:
        """Delete a record or ticket of this session whose attempt has ended; False if it is none.

        A failover that loses a confirmed deletion leaves one behind. The lease under which it
        stands is still renewed, so it would stay, and everyone would wait for it.
        """
        hearts = [*self._own_hearts, *([self._heart] if self._heart else [])]
        heart = next((each for each in hearts if each.lease.id == entry.lease), None)
        if heart is None or Claim.decode(entry.value).attempt in heart.attempts:
            return False
        await self.delete(entry)
        return True

    async def delete(self, entry: Entry) -> None:
        """Delete a record or ticket by its version; one that is gone is as good as deleted.

        Where the store may lose a confirmed deletion, it is looked for once more, when one to two
        ttls have passed: its owner may have no candidate left that would come across it.
        """
        await self.call(self.store.delete(entry.key, if_version=entry.version))
        if not self.store.capabilities.durable:
            self._deleted[entry.key] = None
            if self._checking is None or self._checking.done():
                self._checking = self.spawn(self._check_deletions())

    async def _check_deletions(self) -> None:
        while self._deleted:
            keys, self._deleted = iter(self._deleted), {}
            await asyncio.sleep(self.timing.ttl_s)
            while some := [*itertools.islice(keys, CHECKS_AT_ONCE)]:
                await asyncio.gather(*map(self._check_deletion, some))

    async def _check_deletion(self, key: str) -> None:
        while True:
            try:
                entry = await self.call(self.store.get(key))
                if entry is not None:
                    await self.delete_left_over(entry)
                return
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(self.retry_pause())
            except StoreError as error:
                log.debug("whether %s is still deleted was not checked: %s", key, error)
                return

    def body_begins(self, heart: Heart) -> None:
        self._bodies += 1
        self._idle.clear()
        heart.bodies += 1
        if heart.bodies == 1:
            self.runtime.watch(heart)

    def body_ended(self, heart: Heart) -> None:
        self._bodies -= 1
        if not self._bodies:
            self._idle.set()
        heart.bodies -= 1
        if not heart.bodies:
            self.runtime.unwatch(heart)
            self._give_back(heart)

    def _give_back(self, heart: Heart) -> None:
        """Revoke a lost lease once no body runs on it, so that a successor need not wait."""
        if heart.lost_because is not None and not heart.bodies and not self._closed:
            self.spawn(self._revoke(heart, until_done=True))

    async def _revoke(self, heart: Heart, *, until_done: bool = False) -> None:
        """End a lease. If it was lost because the store was, try until that is back, however long
        it takes: a store that has been restarted may begin all leases anew, and everyone would
        wait for what lies under this one to expire."""
        while True:
            try:
                await self.call(self.store.revoke(heart.lease))
                return
            except StoreError as error:
                passing = isinstance(error, StoreUnavailable | OutcomeUnknown)
                if not passing or not until_done:
                    log.debug("lease %s was left to expire: %s", heart.lease.id, error)
                    return
            await asyncio.sleep(self.retry_pause())

    async def leader(self, election: str, kind: Kind = "elections") -> Leader | None:
        """Who leads, by a read of the store."""
        self.check_open()
        entry = await self.call(self.store.get(leader_key(election, kind)))
        return None if entry is None else _leader(election, entry)

    async def line(self, election: str) -> Line:
        """Who leads, and everyone who stands in line; the leader keeps its ticket and is marked."""
        self.check_open()
        record = await self.call(self.store.get(leader_key(election)))
        tickets = await self.call(self.store.list(line_key(election)))
        return line_of(election, record, tickets)

    async def observe(self, election: str, deliver: Callable[[Leader | None], None]) -> None:
        """Deliver who leads now, then every change, until cancelled.

        A store that cannot be reached is waited for: what was last known stands until then.
        """
        await self._observe([leader_key(election)], lambda: self.leader(election), deliver)

    async def observe_line(self, election: str, deliver: Callable[[Line], None]) -> None:
        """The same for the whole line."""
        scopes = [leader_key(election), line_key(election)]
        await self._observe(scopes, lambda: self.line(election), deliver)

    async def _observe(
        self,
        scopes: list[str],
        read: Callable[[], Awaitable[T]],
        deliver: Callable[[T], None],
    ) -> None:
        changed = asyncio.Event()
        told: list[T] = []
        watches: list[Watch] = []
        try:
            while True:
                try:
                    while len(watches) < len(scopes):
                        scope = scopes[len(watches)]
                        watches.append(await self.call(self.store.watch(scope, changed.set)))
                    changed.clear()
                    seen = await read()
                except (OutcomeUnknown, StoreUnavailable) as error:
                    log.debug("observing %s: %s", scopes[0], error)
                    await asyncio.sleep(self.retry_pause())
                    continue
                if told != [seen]:
                    told = [seen]
                    deliver(seen)
                await changed.wait()
        finally:
            for watch in watches:
                watch.close()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run in the background, until done or the presence is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task of doyen failed", exc_info=task.exception())

    def check_open(self) -> None:
        if self._forked:
            raise SessionClosed(
                f"this session was opened by process {self.runtime.pid} before a fork and stays"
                " with it; connect again in the child"
            )
        if self._closed:
            raise SessionClosed("the session is closed; connect again")

    async def close(self) -> None:
        """End every term, wait for the bodies as long as the stop budget allows, let go.

        Candidates that still wait are told that the session is closed.
        """
        if self._closed:
            return
        self._closed = True
        if self._errands:
            for errand in self._errands:
                errand.cancel()
            await asyncio.wait(list(self._errands))
        hearts = [*self._own_hearts, *([self._heart] if self._heart else [])]
        for heart in hearts:
            heart.forget(self)
            heart.lose("the session was closed") if heart.depended_on else heart.stop()
        if self._bodies:
            ended = asyncio.ensure_future(self._idle.wait())
            await asyncio.wait({ended}, timeout=self.timing.stop_budget_s)
            ended.cancel()
        idle = [heart for heart in hearts if not heart.bodies]
        for heart in idle:
            self.runtime.unwatch(heart)
        await asyncio.gather(*map(self._revoke, idle))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()
        await self.telemetry.close()

    def forked(self) -> None:
        """In the child of a fork."""
        self._forked = True
        for heart in [*self._own_hearts, *([self._heart] if self._heart else [])]:
            heart.forked()
        self.store.forked()


def _leader(election: str, record: Entry) -> Leader:
    claim = Claim.decode(record.value)
    return Leader(election, claim.name, record.revision, claim.meta)


def line_of(election: str, record: Entry | None, tickets: list[Entry]) -> Line:
    """The line that a leader record and the tickets behind it amount to."""
    if record is None:
        leader, attempt = None, None
    else:
        leader, attempt = _leader(election, record), Claim.decode(record.value).attempt
    claims = [Claim.decode(ticket.value) for ticket in tickets]
    # By attempt: for a while, a candidate may have two tickets.
    standing = {claim.attempt: claim for claim in claims}
    return Line(
        leader,
        tuple(
            Candidate(claim.name, claim.rank, claim.attempt == attempt, claim.meta)
            for claim in standing.values()
        ),
    )
