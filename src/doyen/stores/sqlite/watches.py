"""Watches: how a handle is notified of changes without polling.

Two things change what a watcher sees, and the loop waits for a descriptor for each:

- *A write.* The watches of a handle are rows in the database (scope, inbox, tag). A writer with the
  same connection notifies them after its commit. Any other sends the tag to the inbox before it
  commits. The receiver then notifies its watchers, and queues a `refresh`, which waits for the
  write lock, before the first thing that they read. So they see the commit.
- *The end of a lease.* Each lease that owns entries in a watched scope has one monitor, which all
  watches share: its FIFO ends with its owner, a timer reports its expiry, and `LocalLeases.judge`
  decides.

Everything runs on the store's loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from doyen.errors import StoreUnusable
from doyen.stores.kit.lifecycle import WatchHandle
from doyen.stores.sqlite.database import Database
from doyen.stores.sqlite.inbox import Inbox
from doyen.stores.sqlite.leases import LocalLeases
from doyen.stores.sqlite.tables import HandleChanges

__all__ = ["LocalWatches"]

_RETRY_S = 0.2
"""Pause before a failed refresh is retried: another process is stuck in a write."""
_SETTLE_S = 0.0002
"""First pause when a FIFO has ended and the lock is still held by the dying process."""
_REAP_AFTER_S = 0.05
"""When to remove the remaining rows of an ended lease. Notified watchers usually remove them."""
_JUDGE_AGAIN_S = 1.0


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
        place = self._scopes.get(scope)
        if place is None:
            place = self._scopes[scope] = _LocalScope(scope, next(self._tags))
            self._by_tag[place.tag] = place
        watch = WatchHandle(scope, notify, self._leave)
        place.watches[watch] = None
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
            self._database.stale.append(scope.tag)
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
        self._database.stale.extend(committed.touched.keys() - self._by_tag.keys())
        self._notify(committed.touched)

    def _notify(self, tags: Iterable[int]) -> None:
        for tag in tags:
            scope = self._by_tag.get(tag)
            if scope is not None:
                for watch in scope.watches:
                    watch.notify_soon()

    def _on_message(self) -> None:
        tags = self._inbox.drain()
        known = self._by_tag.keys() if tags is None else tags & self._by_tag.keys()
        if tags is not None:
            self._database.stale.extend(tags - known)
        scopes = {tag: self._by_tag[tag].name for tag in known}
        self._refresh(scopes, notify=False)
        self._notify(scopes)

    def _refresh(self, scopes: dict[int, str], notify: bool = True) -> None:
        """Read under the write lock who owns something in these scopes. `notify`: the last attempt
        failed, so that watchers may have read before the commit, and are notified once more."""
        if scopes and not self._closed:
            # Whoever is notified reads, or creates a record, in the same transaction.
            done = self._database.submit_later(lambda tables: tables.refresh(scopes, notify=notify))
            done.add_done_callback(lambda done: self._refreshed(scopes, done))

    def _refreshed(self, scopes: dict[int, str], done: asyncio.Future[None]) -> None:
        error = done.exception()
        if error is None or self._closed:
            return
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
                self._loop.remove_reader(monitor.fd)
                os.close(monitor.fd)
                monitor.fd = -1
                monitor.settle_s = _SETTLE_S
            elif not first:
                return
        self._judge(monitor)

    def _judge(self, monitor: _LeaseMonitor) -> None:
        if monitor.timer is not None:
            monitor.timer.cancel()
            monitor.timer = None
        try:
            ended, wait_s, _ = self._leases.judge(monitor.lease)
        except OSError:
            ended, wait_s = False, _JUDGE_AGAIN_S
        if not ended:
            if monitor.settle_s is not None:
                wait_s = min(wait_s, monitor.settle_s)
                monitor.settle_s *= 2
            monitor.timer = self._loop.call_later(max(wait_s, 0.0001), self._judge, monitor)
            return
        tags = sorted(monitor.tags)
        self._drop(monitor)
        for tag in tags:
            scope = self._by_tag[tag]
            scope.owners -= {monitor.lease}
        self._notify(tags)
        if not self._leases.looks_only:
            self._loop.call_later(_REAP_AFTER_S, self._reap, monitor.lease)

    def _reap(self, lease: str) -> None:
        if not self._closed:
            done = self._database.submit(lambda tables: tables.remove(lease), writes=False)
            done.add_done_callback(lambda done: done.exception())

    def _drop(self, monitor: _LeaseMonitor) -> None:
        del self._monitors[monitor.lease]
        if monitor.timer is not None:
            monitor.timer.cancel()
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
