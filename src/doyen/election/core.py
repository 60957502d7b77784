"""The part of a session that lives on doyen's loop: it composes the parts that campaigns share.

calls       store calls with a deadline (`doyen.lease.keeper`)
leases      the session's leases (`doyen.lease.keeper`)
deletions   deleting records and tickets so that they stay deleted
trail       the terms of this session, recorded for others to read
tasks       background tasks, cancelled when the session is closed
admission   how many candidates join or leave a line at a time
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from doyen._waiting import Admission, BackgroundTasks, retrieve, shared
from doyen.election.options import SessionSettings
from doyen.election.trail import TrailKeeper
from doyen.errors import ConfigError, OutcomeUnknown, SessionClosed, StoreError, StoreUnavailable
from doyen.events import Event
from doyen.events.log_lines import log_line
from doyen.events.telemetry import Telemetry
from doyen.lease.keeper import LeaseKeeper, StoreCalls
from doyen.lease.runtime import CLOSED, Runtime, ThreadRuntime
from doyen.lease.timing import Timing
from doyen.model import Claim, Entry, SessionHealth
from doyen.stores.choice import without_password
from doyen.stores.port import (
    Capabilities,
    Context,
    Store,
    adapter_loaded,
    load_adapter,
    open_store,
)
from doyen.warden.warding import Form, NoWarden, Warding

__all__ = ["ENTERING", "Deletion", "SessionCore"]

T = TypeVar("T")
log = logging.getLogger("doyen")

CHECKS_AT_ONCE = 16
"""How many deletions are checked at a time. They are not urgent and must not delay other calls."""
OPEN_PAUSE_S, OPEN_LONGEST_PAUSE_S = 0.1, 2.0
"""The pauses between the tries to open a store that cannot be reached."""
ENTERING = 64
"""How many candidates of a session join or leave their lines at a time. Thousands at once would
only delay one another."""


class Deletion(NamedTuple):
    """A deletion under way."""

    entries: Sequence[Entry]
    begun: asyncio.Future[Any]


class Deletions:
    """Deletes the records and tickets of one session so that they stay deleted.

    A store that replicates asynchronously may lose a confirmed deletion in a failover. The entry is
    then back, under a lease that is still renewed, so it would never expire and every candidate
    would wait for it. Any candidate of the same session that finds such an entry deletes it, and
    every deletion is checked once more after one to two ttls, because no candidate may be left to
    find it.
    """

    def __init__(self, calls: StoreCalls, leases: LeaseKeeper, tasks: BackgroundTasks) -> None:
        self._calls = calls
        self._leases = leases
        self._tasks = tasks
        self._unchecked: dict[str, None] = {}
        """Keys whose deletion is checked in the next round."""
        self._checking: asyncio.Task[None] | None = None

    async def delete(self, entry: Entry) -> None:
        """Delete a record or ticket by its version. It is no error if it is gone already."""
        store = self._calls.store
        await self._calls.call(store.delete(entry.key, if_version=entry.version))
        self._check_later([entry])

    def begin(self, entries: Sequence[Entry]) -> Deletion | None:
        """Begin to delete these before this returns, if the store can."""
        begun = self._calls.store.begin_deletion(entries)
        if begun is None:
            return None
        begun.add_done_callback(retrieve)  # a session that is being closed does not wait for it
        return Deletion(entries, begun)

    async def finish(self, deletion: Deletion) -> None:
        """Wait until what was begun is deleted. Raises what `delete` raises."""
        await self._calls.call(deletion.begun)
        self._check_later(deletion.entries)

    def _check_later(self, entries: Sequence[Entry]) -> None:
        if not self._calls.store.capabilities.durable:
            self._unchecked.update(dict.fromkeys(entry.key for entry in entries))
            if self._checking is None or self._checking.done():
                self._checking = self._tasks.start(self._check())

    def delete_now(self, entries: Sequence[Entry]) -> bool:
        """Delete these if nothing has to be waited for. False if that was not done."""
        store = self._calls.store
        return store.capabilities.durable and store.delete_now(entries)

    async def delete_left_over(self, entry: Entry) -> bool:
        """Delete a record or ticket of this session whose attempt has ended; False for others."""
        keepalive = self._leases.find(entry.lease)
        if keepalive is None or Claim.decode(entry.value).attempt in keepalive.attempts:
            return False
        await self.delete(entry)
        return True

    async def _check(self) -> None:
        while self._unchecked:
            keys, self._unchecked = iter(self._unchecked), {}
            await asyncio.sleep(self._calls.timing.ttl_s)
            while some := [*itertools.islice(keys, CHECKS_AT_ONCE)]:
                await asyncio.gather(*map(self._check_key, some))

    async def _check_key(self, key: str) -> None:
        while True:
            try:
                entry = await self._calls.call(self._calls.store.get(key))
                if entry is not None:
                    await self.delete_left_over(entry)
                return
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(self._calls.retry_pause())
            except StoreError as error:
                log.debug("%s", log_line(event="deletion_unchecked", key=key, error=error))
                return


async def _open_patiently(
    settings: SessionSettings, context: Context, spread: random.Random
) -> Store:
    """Open the store. One that cannot be reached is tried again until `wait_s` has passed."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + settings.wait_s
    shown = without_password(settings.url)
    for pause_s in _pauses():
        within = asyncio.timeout_at(give_up_at if settings.wait_s else None)
        try:
            async with within:
                return await open_store(settings.url, context)
        except (StoreUnavailable, OutcomeUnknown, TimeoutError) as error:
            if not settings.wait_s or (isinstance(error, TimeoutError) and not within.expired()):
                raise
            left_s = give_up_at - loop.time()
            spread_s = pause_s * spread.uniform(0.75, 1.25)
            if spread_s >= left_s:
                reason = str(error) or "it did not answer"
                raise StoreUnavailable(
                    f"the store at {shown} could not be reached within {settings.wait_s:g} s:"
                    f" {reason}"
                ) from error
            if pause_s == OPEN_PAUSE_S:
                line = log_line(
                    event="store_waited_for", store=shown, for_s=round(left_s, 3), error=error
                )
                log.warning("%s", line)
        await asyncio.sleep(spread_s)
    raise AssertionError("the pauses have no end")


def _pauses() -> Iterator[float]:
    pause_s = OPEN_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, OPEN_LONGEST_PAUSE_S)


def _report_store(settings: SessionSettings) -> None:
    """State which store the session uses, once, and warn if it is the default."""
    shown = without_password(settings.url)
    if settings.origin:
        log.info("%s", log_line(event="store_opened", store=shown, origin=settings.origin))
    else:
        reach = "this machine only"
        log.warning(
            "%s",
            log_line(event="default_store", store=shown, shared_by=reach, remedy="set DOYEN_STORE"),
        )


def warding_of(
    settings: SessionSettings,
    limits: Capabilities,
    timing: Timing,
    session_id: str,
    emit: Callable[[Event], None],
) -> Warding:
    """The warden of a new session of this process."""
    needless = limits.proof_of_death and settings.frozen_after_s is None
    if settings.warden == "none" or limits.one_process or needless:
        return NoWarden()
    from doyen.warden.client import SessionWarden, hello_for  # a quarter of the import

    settle_s = settings.settle_s
    if settle_s is None:
        settle_s = timing.stop_budget_s if settings.warden is None else 0.0
    hello = hello_for(
        session=session_id,
        url=settings.url,
        audit=None if settings.audit is None else os.fspath(settings.audit),
        settle_s=settle_s,
        frozen_after_s=settings.frozen_after_s,
        request_timeout_s=timing.request_timeout_s,
    )
    # Only a warden can kill a frozen process.
    default: Form = "found" if settings.frozen_after_s is None else "auto"
    return SessionWarden(hello, settings.warden or default, emit)


class SessionCore:
    """The part of a session that lives on doyen's loop."""

    def __init__(
        self,
        store: Store,
        timing: Timing,
        timing_of: Callable[[float], Timing],
        telemetry: Telemetry,
        runtime: Runtime,
        *,
        session_id: str,
        warding: Warding | None = None,
    ) -> None:
        self.id = session_id
        self.store = store
        self.telemetry = telemetry
        self.runtime = runtime
        self.tasks = BackgroundTasks()
        self.calls = StoreCalls(store, timing, runtime.random, runtime.clock, self.tasks)
        self.call = self.calls.call
        self.capabilities = store.capabilities
        self.leases = LeaseKeeper(
            self.calls, timing_of, runtime, telemetry, self.tasks, warding or NoWarden()
        )
        self.deletions = Deletions(self.calls, self.leases, self.tasks)
        self.admission = Admission(ENTERING)
        self.trail = TrailKeeper(self.calls, self.tasks, busy=self.admission.full)
        self._attempts = itertools.count(1)
        # A dict keeps the order of creation, a set would not: one seed must give one run.
        self._callers: dict[asyncio.Task[Any], None] = {}
        self.closed = ""
        """Why the session can no longer be used; empty until then."""
        self._closing: asyncio.Task[None] | None = None
        self.released = asyncio.Event()
        """The session is being closed, and has no lease any more that could be given up."""

    @classmethod
    async def open(
        cls,
        settings: SessionSettings,
        runtime: Runtime,
        store: Store | None = None,
        warding: Warding | None = None,
    ) -> SessionCore:
        """Check the settings and open the store. No lease is granted yet."""
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
            threads=runtime.is_process,
        )
        try:
            if store is None:
                if not adapter_loaded(settings.url):
                    # Not on the loop, on which other sessions renew their leases meanwhile.
                    await runtime.aside(partial(load_adapter, settings.url), lambda _: None)
                context = Context(runtime.clock, telemetry.emit, settings.create)
                store = await _open_patiently(settings, context, runtime.random)
                _report_store(settings)
            limits = store.capabilities
            ttl_s = settings.ttl_s or limits.ttl_default_s
            if ttl_s < limits.ttl_min_s:
                raise ConfigError(
                    f"ttl_s={ttl_s:g} is below the minimum of this store: {limits.ttl_min_s:g} s"
                )
            timing_of = partial(settings.timing, renewals_lag=limits.renewals_lag)
            timing = timing_of(ttl_s)
            if warding is None and runtime.is_process:
                warding = warding_of(settings, limits, timing, session_id, telemetry.emit)
        except BaseException:
            if store is not None:
                await store.close()
            await telemetry.close()
            raise
        return cls(
            store, timing, timing_of, telemetry, runtime, session_id=session_id, warding=warding
        )

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work that a caller waits for. Closing the session ends it with `SessionClosed`."""
        task = asyncio.current_task()
        assert task is not None
        if self.closed:
            raise SessionClosed(self.closed)
        self._callers[task] = None
        try:
            return await work()
        except asyncio.CancelledError:
            if task.cancelling() == 1:  # cancelled by `close`, and not also by the caller
                self.check_open()
            raise
        finally:
            self._callers.pop(task, None)

    @property
    def health(self) -> SessionHealth:
        """See `Session.health`. Any thread."""
        return "closed" if self.closed else self.leases.health

    @property
    def thread(self) -> ThreadRuntime:
        """The runtime, for blocking code."""
        assert isinstance(self.runtime, ThreadRuntime), "blocking code needs doyen's thread"
        return self.runtime

    def next_attempt(self) -> str:
        """The id of a new attempt."""
        return f"{self.id}-{next(self._attempts)}"

    def check_open(self) -> None:
        if self.closed:
            raise SessionClosed(self.closed)

    async def close(self) -> None:
        """Cancel what callers wait for, end every term and lease, and close the store. A second
        call waits for the end of the first."""
        if self._closing is None:
            if self.closed:
                return
            self.closed = CLOSED
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await shared(self._closing)

    async def _close(self) -> None:
        if self._callers:
            for caller in self._callers:
                caller.cancel()
            await asyncio.wait(list(self._callers))
        await self.leases.close()
        self.released.set()
        await self.trail.flush()
        await self.tasks.cancel()
        await self.store.close()
        await self.telemetry.close()

    def forked(self) -> None:
        """In the child of a fork: the session belongs to the parent."""
        self.closed = (
            f"this session belongs to process {self.runtime.pid}, which opened it before a fork;"
            " connect again in the child"
        )
        self.leases.forked()
        self.store.forked()
