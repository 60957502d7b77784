"""Watches: how a handle is notified of changes without polling.

Two things change what a watcher sees, and the loop waits for a descriptor for each:

- *A write.* The watches of a handle are rows in the database (scope, inbox, tag). A writer with the
  same connection notifies them after its commit. Any other sends the tag to the inbox before it
  commits, or just after it (`tables`). The receiver then notifies its watchers, and queues a
  `refresh`, which waits for the write lock, before the first thing that they read. So they see the
  commit. Watchers of an entry are notified after the refresh, which reads the entry once for all of
  them.
- *The end of a lease.* Each lease that owns entries in a watched scope has one monitor, which all
  watches share: its FIFO ends with its owner, a timer reports its expiry, and `LocalLeases.judge`
  decides.

Everything runs on the store's loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from doyen.errors import StoreUnusable
from doyen.model import Entry
from doyen.stores.kit.lifecycle import WatchHandle
from doyen.stores.sqlite.database import Database
from doyen.stores.sqlite.inbox import Inbox
from doyen.stores.sqlite.leases import LocalLeases
from doyen.stores.sqlite.tables import HandleChanges

__all__ = ["EntryWatch", "LocalWatches"]

W = TypeVar("W", bound=WatchHandle)

_RETRY_S = 0.2
"""Pause before a failed refresh is retried: another process is stuck in a write."""
_SETTLE_S = 0.0002
"""First pause when a FIFO has ended and the lock is still held by the dying process."""
_REAP_AFTER_S = 0.05
"""When to remove the remaining rows of an ended lease. Notified watchers usually remove them."""
_JUDGE_AGAIN_S = 1.0


class EntryWatch(WatchHandle):
    """A watch of one key, whose notifications may carry the entry."""

    __slots__ = ("carried",)
    carried: Entry | None


@dataclass(slots=True, eq=False)
class _LocalScope:
    """A scope that this handle watches, through one or more watches."""

    name: str
    tag: int
    registered: bool = False
    watches: dict[WatchHandle, None] = field(default_factory=dict)
    owners: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class _LeaseMonitor:
    lease: str
    alone: frozenset[str]
    """The owners of each scope in which only this lease owns entries: one set for all of them."""
    tags: set[int] = field(default_factory=set)
    fd: int = -1
    timer: asyncio.TimerHandle | None = None
    settle_s: float | None = None


class LocalWatches:
    """The watches of one handle."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, database: Database, leases: LocalLeases, inbox: Inbox
    ) -> None:
        self._loop = loop
        self._database = database
        self._leases = leases
        self._inbox = inbox
        self._tags = itertools.count(1)
        self._scopes: dict[str, _LocalScope] = {}
        self._by_tag: dict[int, _LocalScope] = {}
        self._monitors: dict[str, _LeaseMonitor] = {}
        self._closed = False
        self.ever_watched = False

    def open(self) -> None:
        """Begin to listen."""
        self._loop.add_reader(self._inbox.fd, self._on_message)

    def follow(self, undecided: Iterable[str]) -> None:
        """Monitor leases that could not be judged yet."""
        for lease in undecided:
            if lease not in self._monitors and not self._closed:
                self._follow(lease)

    async def watch(self, scope: str, notify: Callable[[], None]) -> WatchHandle:
        return await self._begin(WatchHandle(scope, notify, self._leave))

    async def watch_entry(self, key: str, notify: Callable[[], None]) -> EntryWatch:
        watch = EntryWatch(key, notify, self._leave)
        watch.carried = None
        return await self._begin(watch)

    async def _begin(self, watch: W) -> W:
        scope = watch.scope
        place = self._scopes.get(scope)
        if place is None:
            place = self._scopes[scope] = _LocalScope(scope, next(self._tags))
            self._by_tag[place.tag] = place
        place.watches[watch] = None
        if isinstance(watch, EntryWatch):
            self._database.carrying |= {place.tag}
        if not place.registered:
            tag = place.tag
            self.ever_watched = True
            try:
                await self._database.submit(lambda tables: tables.watch(scope, tag))
            except BaseException:
                watch.close()
                raise
        return watch

    def _leave(self, watch: WatchHandle) -> None:
        """Remove a watch. The row of a scope without watches is deleted with the next write."""
        scope = self._scopes[watch.scope]
        del scope.watches[watch]
        if not scope.watches:
            del self._scopes[scope.name], self._by_tag[scope.tag]
            self._database.stale.add(scope.tag)
            self._database.carrying -= {scope.tag}
            self._monitor_owners(scope, frozenset())

    def apply(self, committed: HandleChanges) -> None:
        """Apply the outcome of a transaction of this process."""
        if self._closed:
            return
        for tag, owners in committed.owners.items():
            scope = self._by_tag.get(tag)
            if scope is not None:
                scope.registered = True
                self._monitor_owners(scope, owners)
        # A tag that is not known is of a watch that was closed. The transaction that was to delete
        # its row has failed.
        self._database.stale.update(committed.touched.keys() - self._by_tag.keys())
        self._notify(committed.touched)
        self._notify_of_entries((committed.touched | committed.reread).keys(), committed.carried)

    def _notify(self, tags: Iterable[int]) -> None:
        """Notify the watchers of these scopes, except those of their entries."""
        for tag in tags:
            scope = self._by_tag.get(tag)
            if scope is not None:
                for watch in scope.watches:
                    if not isinstance(watch, EntryWatch):
                        watch.notify_soon()

    def _notify_now(self, tags: Iterable[int]) -> None:
        """`_notify`, in this turn of the loop. Not to be used before a caller has its result."""
        for tag in tags:
            scope = self._by_tag.get(tag)
            for watch in [] if scope is None else [*scope.watches]:
                if not isinstance(watch, EntryWatch):
                    watch.notify()

    def _notify_of_entries(self, tags: Set[int], carried: Mapping[int, Entry]) -> None:
        """Notify the watchers of the entries of these scopes. One that is not carried is read by
        each of them."""
        for tag in tags & self._database.carrying:
            for watch in self._by_tag[tag].watches:
                if isinstance(watch, EntryWatch):
                    watch.carried = carried.get(tag)
                    watch.notify_soon()

    def _on_message(self) -> None:
        tags = self._inbox.drain()
        known = self._by_tag.keys() if tags is None else tags & self._by_tag.keys()
        if tags is not None and tags != known:
            # Of closed watches. Whoever writes goes on sending them until their rows are removed.
            self._database.stale.update(tags - known)
            self._database.drop_stale()
        scopes = {tag: self._by_tag[tag].name for tag in known}
        self._refresh(scopes, notify=False)
        self._notify_now(scopes)

    def _refresh(self, scopes: dict[int, str], notify: bool = True) -> None:
        """Read under the write lock who owns something in these scopes. `notify`: the last attempt
        failed, so that watchers may have read before the commit, and are notified once more."""
        if scopes and not self._closed:
            # A watcher that is notified reads, or creates a record, in the same transaction.
            # Watchers of an entry are notified after it.
            carries = not self._database.carrying.isdisjoint(scopes)
            submit = self._database.submit if carries else self._database.submit_later
            done = submit(lambda tables: tables.refresh(scopes, notify=notify))
            done.add_done_callback(lambda done: self._refreshed(scopes, done))

    def _refreshed(self, scopes: dict[int, str], done: asyncio.Future[None]) -> None:
        error = done.exception()
        if error is None or self._closed:
            return
        self._notify_of_entries(scopes.keys(), {})
        if isinstance(error, StoreUnusable):
            self._notify(scopes)  # their next read raises the error
        else:
            self._loop.call_later(_RETRY_S, self._refresh, scopes)

    def _monitor_owners(self, scope: _LocalScope, owners: frozenset[str]) -> None:
        """Monitor exactly the leases that own entries in the scope."""
        before, scope.owners = scope.owners, owners
        for lease in before - owners:
            monitor = self._monitors.get(lease)
            if monitor is not None:
                monitor.tags.discard(scope.tag)
                if not monitor.tags:
                    self._drop(monitor)
        for lease in owners - before:
            monitor = self._monitors.get(lease) or self._follow(lease)
            monitor.tags.add(scope.tag)
            if len(owners) == 1:
                scope.owners = monitor.alone

    def _follow(self, lease: str) -> _LeaseMonitor:
        monitor = self._monitors[lease] = _LeaseMonitor(lease, frozenset((lease,)))
        flags = os.O_RDONLY | os.O_NONBLOCK
        try:
            monitor.fd = os.open(self._leases.alive_path(lease), flags)
        except OSError:
            pass  # gone, or no descriptor is available: the verdict and its timer remain
        else:
            self._loop.add_reader(monitor.fd, self._on_alive, monitor)
        # The poll does not report a writer that was already gone; reading does.
        self._loop.call_soon(self._on_alive, monitor, True)
        return monitor

    def _on_alive(self, monitor: _LeaseMonitor, first: bool = False) -> None:
        """The FIFO of the lease's owner is readable."""
        if self._monitors.get(monitor.lease) is not monitor:
            return
        if monitor.fd >= 0:
            try:
                ended = os.read(monitor.fd, 1) == b""
            except BlockingIOError:
                ended = False
            if ended:
                monitor.settle_s = _SETTLE_S
            elif not first:
                return
        self._judge(monitor)

    def _judge(self, monitor: _LeaseMonitor) -> None:
        if monitor.timer is not None:
            monitor.timer.cancel()
            monitor.timer = None
        try:
            ended, wait_s, _ = self._leases.judge_only(monitor.lease)
        except OSError:
            ended, wait_s = False, _JUDGE_AGAIN_S
        if not ended:
            if monitor.settle_s is not None:
                self._close(monitor)
                wait_s = min(wait_s, monitor.settle_s)
                monitor.settle_s *= 2
            monitor.timer = self._loop.call_later(max(wait_s, 0.0001), self._judge, monitor)
            return
        del self._monitors[monitor.lease]
        tags = sorted(monitor.tags)
        for tag in tags:
            scope = self._by_tag[tag]
            scope.owners -= {monitor.lease}
        self._notify_now(tags)
        self._notify_of_entries(monitor.tags, {})
        self._loop.call_soon(self._clean_up, monitor)  # after those that were notified

    def _clean_up(self, monitor: _LeaseMonitor) -> None:
        """The lease has ended, and its watchers go on."""
        self._close(monitor)
        if not self._leases.looks_only:
            with suppress(OSError):  # `_sweep` removes it
                self._leases.clear_remains(monitor.lease)
            self._loop.call_later(_REAP_AFTER_S, self._reap, monitor.lease)

    def _reap(self, lease: str) -> None:
        if not self._closed:
            done = self._database.submit(lambda tables: tables.remove(lease), writes=False)
            done.add_done_callback(lambda done: done.exception())

    def _drop(self, monitor: _LeaseMonitor) -> None:
        del self._monitors[monitor.lease]
        if monitor.timer is not None:
            monitor.timer.cancel()
        self._close(monitor)

    def _close(self, monitor: _LeaseMonitor) -> None:
        """Do not listen for the end of the owner any more."""
        if monitor.fd >= 0:
            self._loop.remove_reader(monitor.fd)
            os.close(monitor.fd)
            monitor.fd = -1

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for monitor in list(self._monitors.values()):
            self._drop(monitor)
        if self._inbox.fd >= 0:
            self._loop.remove_reader(self._inbox.fd)

    def forked(self) -> None:
        """In a forked child: close the copied descriptors. The poll set of the loop is shared with
        the parent, so its entries stay."""
        self._closed = True
        for monitor in self._monitors.values():
            fd, monitor.fd = monitor.fd, -1
            if fd >= 0:
                with suppress(OSError):  # the parent was closing it
                    os.close(fd)
