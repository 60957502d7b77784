"""Watches and the leases behind them, for stores whose clients have to end what is over.

*Monitors.* While something is watched, the leases that own entries in its scope are looked at: once
per renewal, just after it is due, and more often when it is late. The last renewal was therefore
observed shortly before its holder fell silent, and the ttl that has to pass without a renewal
(`expiry`) has already begun when a candidate needs the result.

*Many leases.* A client that monitors more than a few leases looks together at those that are due in
the same tenth of their ttl. It sends a limited number of queries for each ttl, however many leases
it monitors, and observes a renewal that much later. It does not look later at a lease that may be
over.

*Together.* After an outage of the store, the leases of all clients that lost theirs are left in it.
A client that finds a late renewal, or that looks for the first time after the store failed to
respond, observes all leases of the same election from then on. Their ttls run out at the same time
and not one after the other, and all that are over can be ended at once (`ripe`).

*Changes.* An engine with notifications calls `changed`. Others are asked for changes (`polling`).

Everything runs on the store's loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from doyen.errors import StoreError
from doyen.events.log_lines import log_line
from doyen.stores.kit.expiry import (
    AT_ONCE,
    GRAIN_S,
    LOOK_AGAIN,
    LeaseObservations,
    LeaseRow,
    LeaseVerdict,
)
from doyen.stores.kit.lifecycle import WatchHandle
from doyen.stores.kit.polling import ChangedCounter, ChangedPaths, Changes, Polling

log = logging.getLogger("doyen")

_FEW = 16
"""So many leases are looked at one by one, each as soon as its renewal is due."""
_SETTLE_S = 0.004
"""Wait this long after a change before looking at its leases: the watchers act first."""
_RETRY_S = 0.2
_PATIENCE_S = 2.0


class Survey(NamedTuple):
    """The contents of a scope: for each lease, the number of its entries and their last version."""

    contents: frozenset[tuple[str | None, int, int]]
    owners: frozenset[str]


_NOTHING = Survey(frozenset(), frozenset())


class LeaseSource(Protocol):
    """What the observer needs of a store."""

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]: ...

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]: ...

    async def expire(self, lease: str, counter: int) -> None: ...


@dataclass(slots=True, eq=False)
class _ObservedScope:
    name: str
    watches: dict[WatchHandle, None] = field(default_factory=dict)
    survey: Survey | None = None
    """The contents when they were last read."""


@dataclass(slots=True, eq=False)
class _Monitor:
    lease: str
    look_at: float
    scopes: set[str] = field(default_factory=set)


class LeaseObserver(LeaseObservations):
    """The watches of one handle, and the leases that they depend on. The store reports changes
    through `changed`, unless it is asked for them (`poll_paths`, `poll_counter`)."""

    def __init__(self, source: LeaseSource, now: Callable[[], float]) -> None:
        super().__init__(now)
        self._source = source
        self._polling: Polling | None = None
        self._compares = False
        """Whether a scope that differs from what was read before is a change to notify."""
        self.unwatched: Callable[[str], None] = lambda scope: None
        """Called with a scope when its last watch is closed."""
        self._loop = asyncio.get_running_loop()
        self._scopes: dict[str, _ObservedScope] = {}
        self._monitors: dict[str, _Monitor] = {}
        self._unread: set[str] = set()
        self._store_failed = False
        """The store failed to respond since leases were last observed together."""
        self.patience_s = _PATIENCE_S
        """The deadline of what the observer asks the store at a time. Where other calls wait for
        their turn behind it, it must be short beside their ttl."""
        self._wake = asyncio.Event()
        self._settling: asyncio.TimerHandle | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        self._opened_at = now()

    def poll_paths(self, every_s: float, changes: Changes) -> None:
        """Ask the store at intervals which paths have changed."""
        self._polling = ChangedPaths(self, every_s, changes)

    def poll_counter(self, every_s: float, counter: Callable[[], Awaitable[int]]) -> None:
        """Ask the store at intervals whether anything has changed, beside its notifications."""
        self._polling, self._compares = ChangedCounter(self, every_s, counter), True

    def judge(self, row: LeaseRow) -> LeaseVerdict:
        verdict = super().judge(row)
        monitor = self._monitors.get(row.lease)
        if monitor is not None and row.ttl_us is not None:
            monitor.look_at = self._now() + verdict.look_after_s
            if len(self._monitors) > _FEW:
                self._look_with_others(monitor, LOOK_AGAIN * row.ttl_us / 1e6, verdict.remaining_s)
        return verdict

    def _look_with_others(self, monitor: _Monitor, every_s: float, remaining_s: float) -> None:
        """Look at a lease at the next multiple of `every_s`, unless it may be over before. The
        multiples begin when the store was opened, so that clients do not look all at once."""
        turns = math.ceil((monitor.look_at - self._opened_at) / every_s)
        over_at = self._now() + remaining_s + GRAIN_S
        monitor.look_at = min(max(self._opened_at + turns * every_s, monitor.look_at), over_at)

    async def watch(self, name: str, notify: Callable[[], None]) -> WatchHandle:
        scope = self._scopes.get(name)
        if scope is None:
            scope = self._scopes[name] = _ObservedScope(name)
        watch = WatchHandle(name, notify, self._leave)
        scope.watches[watch] = None
        if self._polling is not None:
            try:
                await self._polling.begin(name)
            except BaseException:
                watch.close()
                raise
            self._start("poll", self._polling.run)
        if not self._compares:
            self._mark_unread({name})
        return watch

    def _leave(self, watch: WatchHandle) -> None:
        scope = self._scopes[watch.scope]
        del scope.watches[watch]
        if not scope.watches:
            del self._scopes[scope.name]
            self._unread.discard(scope.name)
            self._monitor_owners(scope, _NOTHING)
            self.unwatched(scope.name)

    def follow(self, leases: Iterable[str]) -> None:
        """Monitor leases that may be over until they are ended, even if unwatched."""
        for lease in leases:
            self._monitors.setdefault(lease, _Monitor(lease, self._now()))
        self._wake_up()

    @property
    def scopes(self) -> Collection[str]:
        """The scopes that are watched."""
        return self._scopes

    def expect(self, path: str) -> None:
        """This path will probably change."""
        if self._polling is not None:
            self._polling.expect(path)

    def changed(self, path: str) -> None:
        """Notify all watches whose scope contains this path."""
        if self._polling is not None:
            self._polling.has_changed(path)
        names = set()
        while path:
            if path in self._scopes:
                names.add(path)
            path = path.rpartition("/")[0]
        self._notify(names)

    def all_changed(self) -> None:
        """Notify all watches, because notifications may have been missed."""
        self._notify(self._scopes)

    def close(self) -> None:
        self._closed = True
        for scope in list(self._scopes.values()):
            for watch in list(scope.watches):
                watch.close()
        self._monitors.clear()
        for task in self._tasks.values():
            task.cancel()
        if self._settling is not None:
            self._settling.cancel()

    def _notify(self, names: Iterable[str]) -> None:
        """Notify the watches of these scopes, and read their owners soon."""
        for name in names:
            for watch in self._scopes[name].watches:
                watch.notify_soon()
        self._mark_unread(names)

    def _mark_unread(self, names: Iterable[str]) -> None:
        self._unread.update(names)
        if self._unread and self._settling is None and not self._closed:
            self._settling = self._loop.call_later(_SETTLE_S, self._on_settled)

    def _on_settled(self) -> None:
        self._settling = None
        self._wake_up()

    def _wake_up(self) -> None:
        self._wake.set()
        self._start("observe", self._observe)

    def _start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if not self._closed and name not in self._tasks:
            self._tasks[name] = self._loop.create_task(self._run(name, run))

    async def _run(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await run()
        except Exception:
            log.exception("%s", log_line(event="watches_stopped", task=name))
        finally:
            del self._tasks[name]  # in the same step as the last check of its loop

    async def _observe(self) -> None:
        """Look at leases that are due, until there are no monitors left."""
        while self._monitors or self._unread:
            next_s = min(
                (monitor.look_at - self._now() for monitor in self._monitors.values()), default=None
            )
            try:
                async with asyncio.timeout(None if next_s is None else max(next_s, 0.0)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            unread, self._unread = self._unread & self._scopes.keys(), set()
            try:
                async with asyncio.timeout(self.patience_s):
                    if unread:
                        self._adopt(await self._source.survey(sorted(unread)))
                    await self._look()
            except (StoreError, TimeoutError) as error:
                log.debug("%s", log_line(event="leases_unreadable", reason=error))
                self._store_failed = True
                self._unread |= unread & self._scopes.keys()
                await asyncio.sleep(_RETRY_S)
                self._wake.set()

    async def _look(self) -> None:
        soon = self._now() + GRAIN_S
        due = [monitor for monitor in self._monitors.values() if monitor.look_at <= soon]
        if not due:
            return
        for start in range(0, len(due), AT_ONCE):
            some = [monitor.lease for monitor in due[start : start + AT_ONCE]]
            for row in await self._source.look(some):
                if self.judge(row).over:
                    if row.ttl_us is not None:
                        await self._source.expire(row.lease, row.counter)
                    monitor = self._monitors.pop(row.lease, None)
                    if monitor is not None:
                        self._mark_unread(monitor.scopes & self._scopes.keys())
        await self._look_together(due)

    async def _look_together(self, due: Sequence[_Monitor]) -> None:
        """Begin to observe the other leases of the elections in which a lease may be over."""
        doubted = []
        elections: set[str] = set()
        for monitor in due:
            observed = self._observed.get(monitor.lease)
            if observed is None or observed.together or not monitor.scopes:
                continue  # a lease without scopes belongs to no election so far
            if observed.late or self._store_failed:
                doubted.append(observed)
                elections |= {_election(scope) for scope in monitor.scopes}
        if elections:
            self._store_failed = False
            surveys = await self._source.survey(sorted(elections))
            # Also those observed before: that may have been an earlier renewal.
            owners = sorted({owner for survey in surveys.values() for owner in survey.owners})
            for start in range(0, len(owners), AT_ONCE):
                for row in await self._source.look(owners[start : start + AT_ONCE]):
                    self.judge(row)
        for observed in doubted:
            observed.together = True

    async def compare(self, scopes: Collection[str]) -> None:
        """Read what is in these scopes, and notify the watches of those that differ."""
        self._adopt(await self._source.survey(sorted(scopes)))

    def _adopt(self, surveys: dict[str, Survey]) -> None:
        for name, survey in surveys.items():
            scope = self._scopes.get(name)
            if scope is not None:
                before = scope.survey
                self._monitor_owners(scope, survey)
                if self._compares and before not in (None, survey):
                    for watch in scope.watches:
                        watch.notify_soon()

    def _monitor_owners(self, scope: _ObservedScope, survey: Survey) -> None:
        """Monitor exactly the leases that own entries in the scope."""
        before, scope.survey = scope.survey or _NOTHING, survey
        for lease in before.owners - survey.owners:
            monitor = self._monitors.get(lease)
            if monitor is not None:
                monitor.scopes.discard(scope.name)
                if not monitor.scopes:
                    del self._monitors[lease]
        for lease in survey.owners:
            monitor = self._monitors.get(lease)
            if monitor is None or not monitor.scopes:  # not monitored, or for no election so far
                monitor = self._monitors[lease] = _Monitor(lease, self._now())
                self._wake_up()
            monitor.scopes.add(scope.name)


def _election(scope: str) -> str:
    """The common prefix of all keys of an election: its kind and its name."""
    return "/".join(scope.split("/")[:2])
