"""Watches: ZooKeeper's, which tell once, made into ones that go on telling.

All of a store's watches are on one connection. A znode is watched once there, however many wait
for it, and no longer than somebody does.

Whoever is told may act through another connection than the one that watches. So after an event the
watch is set again *first*, and told when the server has it: whatever changes from then on makes
another event, and whatever changed before is seen by who looks now. After a reconnect everything
is set again and everybody is told.

Imports the wire, the layout and the errors.
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
from doyen.stores.zookeeper.connection import ZooKeeperSession
from doyen.stores.zookeeper.paths import Layout, is_ticket

__all__ = ["ZooKeeperWatches"]

_CHILDREN, _DATA = 1, 2
"""What of a znode is watched, by ZooKeeper's numbers."""
_SPENT = {
    EventType.CREATED: (_DATA,),
    EventType.CHANGED: (_DATA,),
    EventType.DELETED: (_DATA, _CHILDREN),
    EventType.CHILD: (_CHILDREN,),
}
"""Which watches an event has used up."""


class ZooKeeperWatches:
    """The watches of one store."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.wire: ZooKeeperSession
        self._watches: dict[ScopeWatch, None] = {}
        self._waiting: dict[str, dict[ScopeWatch, None]] = {}
        self._set: dict[tuple[int, str], asyncio.Future[Any]] = {}

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
            watch.stir()

    def went_down(self) -> None:
        """The server forgets the watches of a connection that is gone."""
        self._set.clear()

    async def children(self, path: str) -> Sequence[str]:
        """The names in a znode, watched; none while there is no such znode, which is watched."""
        if (_CHILDREN, path) not in self._set:
            # Both at once: mostly there is none, and this spares a wait.
            there = self._ask(_DATA, path)
            inside = self._ask(_CHILDREN, path)
            if (await asyncio.gather(there, _or_none(inside)))[1] is None:
                return []
            self._unset(_DATA, path)
        names: Sequence[str] | None = await _or_none(self._ask(_CHILDREN, path))
        return names or []

    async def exists(self, path: str) -> None:
        """Watch one znode, whether or not it is there."""
        await self._ask(_DATA, path)

    async def _ask(self, kind: int, path: str) -> Any:
        # Noted as set when the request is made: the event may be told before its answer is seen.
        asked = self._set.get((kind, path))
        if asked is None:
            read = GetChildren if kind == _CHILDREN else Exists
            asked = self._set[kind, path] = self.wire.send(read(path, self._happened))
        try:
            return await shared(asked)
        except (NoNodeError, StoreError):
            if self._set.get((kind, path)) is asked:
                del self._set[kind, path]
            raise

    def _happened(self, event: Any) -> None:
        """kazoo's thread."""
        if event.type in _SPENT:
            self.wire.post(lambda: self._spent(event.type, event.path))

    def _spent(self, event: str, path: str) -> None:
        for kind in _SPENT[event]:
            self._set.pop((kind, path), None)
        # A ticket's name is not used again, so of one that is gone there is nothing more to tell.
        final = event == EventType.DELETED and is_ticket(path.rpartition("/")[2])
        for watch in list(self._waiting.get(path, ())):
            if final:
                watch.tell()
            else:
                watch.stir()

    def wait_for(self, path: str, watch: ScopeWatch) -> None:
        self._waiting.setdefault(path, {})[watch] = None

    def leave(self, path: str, watch: ScopeWatch) -> None:
        waiting = self._waiting.get(path, {})
        waiting.pop(watch, None)
        if not waiting:
            self._waiting.pop(path, None)
            for kind in (_CHILDREN, _DATA):
                self._unset(kind, path)

    def _unset(self, kind: int, path: str) -> None:
        asked = self._set.get((kind, path))
        if asked is not None and asked.done():
            del self._set[kind, path]
            self.wire.unwatch(path, kind)

    def drop(self, watch: ScopeWatch) -> None:
        self._watches.pop(watch, None)


class ScopeWatch:
    """One standing request: every znode that belongs to a scope is watched for it."""

    def __init__(self, lookout: ZooKeeperWatches, scope: str, notify: Callable[[], None]) -> None:
        self._lookout = lookout
        self._scope = scope
        self._notify = notify
        self._paths: set[str] = set()
        self._stirred = False
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._lookout.drop(self)
            self._leave(self._paths)

    def stir(self) -> None:
        """Something has happened: watch again, then tell."""
        self._stirred = True
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._follow())

    def tell(self) -> None:
        if not self._closed:
            self._notify()

    async def _follow(self) -> None:
        try:
            while self._stirred and not self._closed:
                self._stirred = False
                try:
                    await self.survey()
                except StoreUnavailable:
                    if not self._lookout.wire.up:
                        return  # told when the connection is back
                    self._stirred = True
                    continue
                except StoreError:
                    pass  # whoever looks meets the same
                self.tell()
        finally:
            self._task = None

    async def survey(self) -> None:
        """Watch everything at the scope and under it that is not watched yet."""
        lookout, layout = self._lookout, self._lookout.layout
        seen: set[str] = set()

        async def children(path: str) -> Sequence[str]:
            self._note(path, seen)
            return await lookout.children(path)

        async def exists(path: str) -> None:
            self._note(path, seen)
            await lookout.exists(path)

        _, leaves = await asyncio.gather(
            exists(layout.leaf(self._scope)), layout.walk(self._scope, children)
        )
        # A ticket is never written again: its coming and going is told by the znode it lies in.
        paths = [each.path for each in leaves if not is_ticket(each.path.rpartition("/")[2])]
        await asyncio.gather(*map(exists, paths))
        left, self._paths = self._paths - seen, seen
        self._leave(seen if self._closed else left)

    def _note(self, path: str, seen: set[str]) -> None:
        seen.add(path)
        self._paths.add(path)
        if not self._closed:
            self._lookout.wait_for(path, self)

    def _leave(self, paths: set[str]) -> None:
        for path in paths:
            self._lookout.leave(path, self)


async def _or_none(asked: Awaitable[Any]) -> Any:
    """The answer, or None if there is no such znode."""
    try:
        return await asked
    except NoNodeError:
        return None
