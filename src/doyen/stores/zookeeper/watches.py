"""Watches: ZooKeeper's, each of which reports one event, made into watches that stay.

All watches of a store are on one session. A znode is watched once there, however many watches need
it, and no longer than one does.

A watcher that is notified may act through another session than the one that watches. So after an
event the ZooKeeper watch is set again *first*, and the watcher is notified when the server has it:
whatever changes from then on makes another event, and whatever changed before is seen by a read
after the notification. After a reconnect everything is set again and every watch is notified.

Imports the session, the layout, the kit and the errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Exists, GetChildren
from kazoo.protocol.states import EventType

from doyen._waiting import shared
from doyen.errors import StoreError, StoreUnavailable
from doyen.stores.kit.lifecycle import WatchHandle
from doyen.stores.zookeeper.paths import Layout
from doyen.stores.zookeeper.session import ZooKeeperSession

__all__ = ["ZooKeeperWatches", "or_none"]

_CHILDREN, _DATA = 1, 2
"""Kinds of watches of a znode, by ZooKeeper's numbers."""
_SPENT = {
    EventType.CREATED: (_DATA,),
    EventType.CHANGED: (_DATA,),
    EventType.DELETED: (_DATA, _CHILDREN),
    EventType.CHILD: (_CHILDREN,),
}
"""Which kinds of watches an event uses up."""


class ZooKeeperWatches:
    """The watches of one store."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.session: ZooKeeperSession
        self._watches: dict[ScopeWatch, None] = {}
        self._by_path: dict[str, dict[ScopeWatch, None]] = {}
        self._set: dict[tuple[int, str], asyncio.Future[Any]] = {}
        """The answers to the requests for watches that the server has, by kind and path."""

    async def watch(self, scope: str, notify: Callable[[], None]) -> ScopeWatch:
        watch = ScopeWatch(self, scope, notify)
        self._watches[watch] = None
        try:
            await watch.survey()
        except BaseException:
            watch.close()
            raise
        return watch

    def close(self) -> None:
        for watch in list(self._watches):
            watch.close()

    def went_up(self) -> None:
        for watch in list(self._watches):
            watch.refresh()

    def went_down(self) -> None:
        """The server drops the watches of a connection that has ended."""
        self._set.clear()

    async def children(self, path: str) -> Sequence[str]:
        """Watch the children of a znode; their names. Without the znode, watch for its creation."""
        if (_CHILDREN, path) not in self._set:
            # Both at once: in most cases there is no such znode, and this saves a round trip.
            if (await asyncio.gather(self._ask(_DATA, path), self._names(path)))[1] is None:
                return []
            self._unset(_DATA, path)
        return await self._names(path) or []

    async def _names(self, path: str) -> list[str] | None:
        # Asked here and not by the caller: a task that is cancelled before it begins would leave
        # a coroutine behind that is never awaited.
        names: list[str] | None = await or_none(self._ask(_CHILDREN, path))
        return names

    async def exists(self, path: str) -> None:
        """Watch one znode, whether or not it exists."""
        await self._ask(_DATA, path)

    async def _ask(self, kind: int, path: str) -> Any:
        # Noted when the request is sent: the event may be processed before the answer.
        asked = self._set.get((kind, path))
        if asked is None:
            read = GetChildren if kind == _CHILDREN else Exists
            asked = self._set[kind, path] = self.session.send(read(path, self._on_event))
        try:
            return await shared(asked)
        except (NoNodeError, StoreError):
            if self._set.get((kind, path)) is asked:
                del self._set[kind, path]
            raise

    def _on_event(self, event: Any) -> None:
        """kazoo's thread."""
        if event.type in _SPENT:
            self.session.post(lambda: self._spent(event.type, event.path))

    def _spent(self, event: str, path: str) -> None:
        for kind in _SPENT[event]:
            self._set.pop((kind, path), None)
        # A ticket's name is not used again, so a deleted one need not be watched again.
        name = path.rpartition("/")[2]
        final = event == EventType.DELETED and self.layout.is_ticket(name)
        for watch in list(self._by_path.get(path, ())):
            if final:
                watch.notify()
            else:
                watch.refresh()

    def join(self, path: str, watch: ScopeWatch) -> None:
        self._by_path.setdefault(path, {})[watch] = None

    def leave(self, path: str, watch: ScopeWatch) -> None:
        watches = self._by_path.get(path, {})
        watches.pop(watch, None)
        if not watches:
            self._by_path.pop(path, None)
            for kind in (_CHILDREN, _DATA):
                self._unset(kind, path)

    def _unset(self, kind: int, path: str) -> None:
        asked = self._set.get((kind, path))
        if asked is not None and asked.done():
            del self._set[kind, path]
            self.session.unwatch(path, kind)

    def forget(self, watch: ScopeWatch) -> None:
        self._watches.pop(watch, None)


class ScopeWatch(WatchHandle):
    """One watch: every znode that belongs to its scope is watched for it."""

    def __init__(self, watches: ZooKeeperWatches, scope: str, notify: Callable[[], None]) -> None:
        super().__init__(scope, notify, watches.forget)
        self._watches = watches
        self._paths: set[str] = set()
        self._stale = False
        self._task: asyncio.Task[None] | None = None

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._leave(self._paths)

    def refresh(self) -> None:
        """Something has happened: watch again, then notify."""
        self._stale = True
        if self._task is None and not self.closed:
            self._task = asyncio.get_running_loop().create_task(self._refresh())

    async def _refresh(self) -> None:
        try:
            while self._stale and not self.closed:
                self._stale = False
                try:
                    await self.survey()
                except StoreUnavailable:
                    if not self._watches.session.up:
                        return  # refreshed when the connection is back
                    self._stale = True
                    continue
                except StoreError:
                    pass  # the watcher meets the same error when it reads
                self.notify()
        finally:
            self._task = None

    async def survey(self) -> None:
        """Watch everything at the scope and below it that is not watched yet."""
        watches, layout = self._watches, self._watches.layout
        seen: set[str] = set()

        async def children(path: str) -> Sequence[str]:
            self._join(path, seen)
            return await watches.children(path)

        async def exists(path: str) -> None:
            self._join(path, seen)
            await watches.exists(path)

        _, leaves = await asyncio.gather(
            exists(layout.leaf(self.scope)), layout.walk(self.scope, children)
        )
        # A ticket is never written again. Its parent's watch reports its creation and deletion.
        names = [(each.path, each.path.rpartition("/")[2]) for each in leaves]
        paths = [path for path, name in names if not layout.is_ticket(name)]
        await asyncio.gather(*map(exists, paths))
        left, self._paths = self._paths - seen, seen
        self._leave(seen if self.closed else left)

    def _join(self, path: str, seen: set[str]) -> None:
        seen.add(path)
        self._paths.add(path)
        if not self.closed:
            self._watches.join(path, self)

    def _leave(self, paths: set[str]) -> None:
        for path in paths:
            self._watches.leave(path, self)


async def or_none(asked: Awaitable[Any]) -> Any:
    """The answer, or None if there is no such znode."""
    try:
        return await asked
    except NoNodeError:
        return None
