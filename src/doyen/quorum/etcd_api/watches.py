"""Watches of the etcd keyspace, served from what this node has applied.

A watch is a position in the history, not a queue: what a client has not read yet stays where it is,
in the history that the keyspace keeps anyway. A client that reads slowly therefore takes no memory.
When the history is compacted beyond its position, its watch is cancelled with the compacted
revision, which tells the client what it has missed.

`WatchHub` knows which watches a changed key concerns; `WatchStream` is one stream of a client, with
any number of watches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.messages import key_value
from doyen.quorum.keyspace.etcd_requests import FROM_KEY, EtcdRecord
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.node.driver import Driver

EVENTS: Final = 1000
"""About how many events one response has; those of one revision are not divided."""
EVENTS_BYTES: Final = 1 << 20
PROGRESS_S: Final = 600.0
"""How often a watch that asks for it is notified although nothing happened."""
NO_WATCH: Final = -1
"""The watch id of a response that concerns all watches of a stream, or none."""

NOPUT, NODELETE = 0, 1


class EtcdWatch:
    """One watch."""

    __slots__ = ("behind", "end", "filters", "id", "key", "position", "prev_kv", "progress")

    def __init__(self, watch: int, request: Any) -> None:
        self.id = watch
        self.key: bytes = request.key or b"\0"
        self.end: bytes = request.range_end
        self.filters = {*request.filters}
        self.prev_kv: bool = request.prev_kv
        self.progress: bool = request.progress_notify
        self.position = 0
        """It has been told of what came before this revision, or does not want it."""
        self.behind = False

    def covers(self, key: bytes) -> bool:
        if not self.end:
            return key == self.key
        return key >= self.key and (self.end == FROM_KEY or key < self.end)

    def admits(self, change: EtcdRecord) -> bool:
        unwanted = NOPUT if change.version else NODELETE
        return self.covers(change.key) and unwanted not in self.filters


class WatchHub:
    """The watches of all streams on one node."""

    def __init__(self, driver: Driver, keyspace: Keyspace) -> None:
        self._driver = driver
        self._keyspace = keyspace
        self._keys: dict[bytes, dict[EtcdWatch, WatchStream]] = {}
        self._ranges: dict[EtcdWatch, WatchStream] = {}
        self.seen = keyspace.etcd.revision
        """The revision up to which watches have been marked."""
        self._waiting: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        driver.on_applied(self._applied)

    def add(self, watch: EtcdWatch, stream: WatchStream) -> None:
        watchers = self._keys.setdefault(watch.key, {}) if not watch.end else self._ranges
        watchers[watch] = stream

    def remove(self, watch: EtcdWatch) -> None:
        if watch.end:
            del self._ranges[watch]
        else:
            watchers = self._keys[watch.key]
            del watchers[watch]
            if not watchers:
                del self._keys[watch.key]

    async def changed(self) -> None:
        """Wait for the next change of the keyspace."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(future)
        await future

    def fail(self, error: Exception) -> None:
        """Have everybody who waits for a change get this error."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def _applied(self, index: int) -> None:
        etcd, since = self._keyspace.etcd, self.seen + 1
        if etcd.revision < since:
            return
        self.seen = etcd.revision
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        if since < etcd.compacted:  # a snapshot of the leader has replaced the state
            for watchers in [*self._keys.values(), self._ranges]:
                for watch, stream in watchers.items():
                    stream.mark(watch, since)
            return
        for key in dict.fromkeys(change.key for change in etcd.changes(since)):
            for watch, stream in self._keys.get(key, {}).items():
                stream.mark(watch, since)
            for watch, stream in self._ranges.items():
                if not watch.behind and watch.covers(key):
                    stream.mark(watch, since)


class WatchStream:
    """One stream of a client."""

    def __init__(
        self, hub: WatchHub, keyspace: Keyspace, header: Callable[[int], Any], progress_s: float
    ) -> None:
        """`header` makes the header of a response, for a revision."""
        self._hub = hub
        self._keyspace = keyspace
        self._header = header
        self._progress_s = progress_s
        self._watches: dict[int, EtcdWatch] = {}
        self._next = 0
        self._behind: dict[EtcdWatch, None] = {}
        self._controls: deque[Any] = deque()
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ended: BaseException | None = None

    def mark(self, watch: EtcdWatch, since: int) -> None:
        """A watch has something to tell."""
        if not watch.behind:
            watch.behind = True
            watch.position = max(watch.position, since)
            self._behind[watch] = None
            self._ready.set()

    def take(self, request: Any) -> None:
        """A request of the client."""
        kind = request.WhichOneof("request_union")
        if kind == "create_request":
            self._create(request.create_request)
        elif kind == "cancel_request":
            watch = self._watches.get(request.cancel_request.watch_id)
            if watch is not None:
                self._remove(watch)
                self._control(watch_id=watch.id, canceled=True)
        elif kind == "progress_request":
            self._control(watch_id=NO_WATCH)
        self._ready.set()

    def _control(self, **fields: Any) -> None:
        self._controls.append(fields)

    def _create(self, request: Any) -> None:
        watch = request.watch_id
        reason = ""
        if request.range_end not in (b"", FROM_KEY) and request.key >= request.range_end:
            reason = "mvcc: watcher range is empty"
        elif watch in self._watches and watch:
            reason = "mvcc: duplicate watch ID provided on the WatchStream"
        if reason:
            self._control(watch_id=NO_WATCH, created=True, canceled=True, cancel_reason=reason)
            return
        if not watch:
            while self._next in self._watches:
                self._next += 1
            watch, self._next = self._next, self._next + 1
        new = self._watches[watch] = EtcdWatch(watch, request)
        self._hub.add(new, self)
        self._control(watch_id=watch, created=True)
        new.position = request.start_revision
        if 0 < request.start_revision <= self._hub.seen:
            self.mark(new, request.start_revision)

    def _remove(self, watch: EtcdWatch) -> None:
        del self._watches[watch.id]
        self._behind.pop(watch, None)
        self._hub.remove(watch)

    def close(self) -> None:
        for watch in [*self._watches.values()]:
            self._remove(watch)

    def end(self, error: BaseException) -> None:
        """Have `responses` raise this."""
        self._ended = error
        self._ready.set()

    async def responses(self) -> AsyncIterator[Any]:
        """What the client is sent, each when it has taken the one before."""
        due = self._loop.time() + self._progress_s
        quiet: set[EtcdWatch] = set()
        while True:
            if self._ended is not None:
                raise self._ended
            if self._controls and not (self._behind and self._controls[0]["watch_id"] == NO_WATCH):
                fields = self._controls.popleft()
                yield rpc.WATCH.response(header=self._header(self._hub.seen), **fields)
                continue
            watch = next(iter(self._behind), None)
            if watch is not None:
                quiet.discard(watch)
                response = self._tell(watch)
                if response is not None:
                    yield response
                else:
                    await asyncio.sleep(0)  # a long history must not delay heartbeats
                continue
            self._ready.clear()
            try:
                async with asyncio.timeout_at(due):
                    await self._ready.wait()
            except TimeoutError:
                due = self._loop.time() + self._progress_s
                for watch in [*quiet]:
                    if watch.id in self._watches:
                        header = self._header(self._hub.seen)
                        yield rpc.WATCH.response(header=header, watch_id=watch.id)
                quiet = {each for each in self._watches.values() if each.progress}

    def _tell(self, watch: EtcdWatch) -> Any:
        """The next response for a watch that is behind; None if the changes do not concern it."""
        etcd = self._keyspace.etcd
        if watch.position < etcd.compacted:
            self._remove(watch)
            return rpc.WATCH.response(
                header=self._header(self._hub.seen),
                watch_id=watch.id,
                canceled=True,
                compact_revision=etcd.compacted,
            )
        events: list[Any] = []
        size = 0
        for change in etcd.changes(watch.position):
            if (len(events) >= EVENTS or size > EVENTS_BYTES) and change.mod > watch.position:
                watch.position = change.mod
                break
            watch.position = change.mod
            if watch.admits(change):
                events.append(self._event(watch, change))
                size += len(change.key) + len(change.value)
        else:
            watch.behind = False
            watch.position = max(watch.position, etcd.revision + 1)
            del self._behind[watch]
        if not events:
            return None
        header = self._header(self._hub.seen)
        return rpc.WATCH.response(header=header, watch_id=watch.id, events=events)

    def _event(self, watch: EtcdWatch, change: EtcdRecord) -> Any:
        before = self._keyspace.etcd.before(change) if watch.prev_kv else None
        return rpc.Event(
            type=0 if change.version else 1,
            kv=key_value(change),
            prev_kv=None if before is None else key_value(before),
        )
