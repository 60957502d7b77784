"""Watches of the etcd keyspace, served from what this node has applied.

A watch is a position in the history, not a queue: what a client has not read yet stays where it is,
in the history that the keyspace keeps anyway. A client that reads slowly therefore takes no memory.
When the history is compacted beyond its position, its watch is cancelled with the compacted
revision, which tells the client what it has missed.

`WatchHub` knows which watches a changed key concerns; `WatchStream` is one stream of a client, with
any number of watches. Responses are made as bytes: equal watches share the events in them, so that
many watches of one key are told at little more than the cost of one.
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
CONTROLS: Final = 1000
"""How many responses to requests of a stream may wait until no more requests are taken."""
SHARED: Final = 64
SHARED_BYTES: Final = 64 << 10
"""How many lists of events are kept for other watches, and the largest of them."""

NOPUT, NODELETE = 0, 1


class EtcdWatch:
    """One watch."""

    __slots__ = (
        "behind",
        "encoded_id",
        "end",
        "filters",
        "id",
        "key",
        "position",
        "prev_kv",
        "progress",
    )

    def __init__(self, watch: int, request: Any) -> None:
        self.id = watch
        self.key: bytes = request.key or b"\0"
        self.end: bytes = request.range_end
        self.encoded_id: bytes = rpc.WATCH.response(watch_id=watch).SerializeToString()
        self.filters = frozenset(request.filters)
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
        self._shared: dict[Any, tuple[bytes, int, bool]] = {}
        self._shared_at = 0, 0
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

    def events(self, watch: EtcdWatch) -> tuple[bytes, int, bool]:
        """What a watch has to be told next, encoded; its position after that; and whether there is
        more."""
        etcd = self._keyspace.etcd
        if self._shared_at != (etcd.revision, etcd.compacted):
            self._shared_at = etcd.revision, etcd.compacted
            self._shared.clear()
        wanted = watch.position, watch.key, watch.end, watch.filters, watch.prev_kv
        found = self._shared.get(wanted)
        if found is None:
            found = self._events(watch)
            if len(self._shared) < SHARED and len(found[0]) <= SHARED_BYTES:
                self._shared[wanted] = found
        return found

    def _events(self, watch: EtcdWatch) -> tuple[bytes, int, bool]:
        etcd = self._keyspace.etcd
        events: list[Any] = []
        size, position, more = 0, watch.position, False
        for change in etcd.changes(position):
            more = (len(events) >= EVENTS or size > EVENTS_BYTES) and change.mod > position
            position = change.mod
            if more:
                break
            if watch.admits(change):
                events.append(self._event(watch, change))
                size += len(change.key) + len(change.value)
        else:
            position = max(position, etcd.revision + 1)
        return rpc.WATCH.response(events=events).SerializeToString(), position, more

    def _event(self, watch: EtcdWatch, change: EtcdRecord) -> Any:
        before = self._keyspace.etcd.before(change) if watch.prev_kv else None
        return rpc.Event(
            type=0 if change.version else 1,
            kv=key_value(change),
            prev_kv=None if before is None else key_value(before),
        )

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
        self,
        hub: WatchHub,
        keyspace: Keyspace,
        header: Callable[[int], bytes],
        progress_s: float,
    ) -> None:
        """`header` makes the beginning of a response, for a revision."""
        self._hub = hub
        self._keyspace = keyspace
        self._header = header
        self._progress_s = progress_s
        self._watches: dict[int, EtcdWatch] = {}
        self._next = 0
        self._behind: deque[EtcdWatch] = deque()
        self._controls: deque[Any] = deque()
        self._idle: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._progress_due = False
        self._loop = asyncio.get_running_loop()
        self._ended: BaseException | None = None

    def mark(self, watch: EtcdWatch, since: int) -> None:
        """A watch has something to tell."""
        if not watch.behind:
            watch.behind = True
            watch.position = max(watch.position, since)
            self._behind.append(watch)
            self._wake()

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
        self._wake()

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def has_room(self) -> None:
        """Wait until the client has taken enough responses to its requests."""
        while len(self._controls) > CONTROLS:
            self._room = self._loop.create_future()
            await self._room

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
        if watch.behind:
            watch.behind = False
            self._behind.remove(watch)
        self._hub.remove(watch)

    def close(self) -> None:
        for watch in [*self._watches.values()]:
            self._remove(watch)

    def end(self, error: BaseException) -> None:
        """Have `responses` raise this."""
        self._ended = error
        self._wake()

    async def responses(self) -> AsyncIterator[bytes]:
        """What the client is sent, each when it has taken the one before."""
        timer = self._loop.call_later(self._progress_s, self._notice_progress)
        quiet: set[EtcdWatch] = set()
        try:
            while True:
                if self._ended is not None:
                    raise self._ended
                behind, controls = self._behind, self._controls
                if controls and not (behind and controls[0]["watch_id"] == NO_WATCH):
                    yield self._next_control()
                elif behind:
                    quiet.discard(behind[0])
                    response = self._tell(behind[0])
                    if response is not None:
                        yield response
                    else:
                        await asyncio.sleep(0)  # a long history must not delay heartbeats
                elif self._progress_due:
                    self._progress_due = False
                    timer = self._loop.call_later(self._progress_s, self._notice_progress)
                    for watch in [*quiet]:
                        if watch.id in self._watches:
                            yield self._header(self._hub.seen) + watch.encoded_id
                    quiet = {each for each in self._watches.values() if each.progress}
                else:
                    self._idle = self._loop.create_future()
                    await self._idle
        finally:
            timer.cancel()

    def _notice_progress(self) -> None:
        self._progress_due = True
        self._wake()

    def _next_control(self) -> bytes:
        fields = self._controls.popleft()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        response: bytes = rpc.WATCH.response(**fields).SerializeToString()
        return self._header(self._hub.seen) + response

    def _tell(self, watch: EtcdWatch) -> bytes | None:
        """The next response for a watch that is behind; None if the changes do not concern it."""
        etcd = self._keyspace.etcd
        if watch.position < etcd.compacted:
            self._remove(watch)
            cancelled: bytes = rpc.WATCH.response(
                watch_id=watch.id, canceled=True, compact_revision=etcd.compacted
            ).SerializeToString()
            return self._header(self._hub.seen) + cancelled
        events, watch.position, watch.behind = self._hub.events(watch)
        if not watch.behind:
            self._behind.popleft()
        if not events:
            return None
        return self._header(self._hub.seen) + watch.encoded_id + events
