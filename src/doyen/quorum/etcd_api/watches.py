"""Watches of the etcd keyspace, served from what this node has applied.

A watch is a position in the history, not a queue: what a client has not read yet stays where it is,
in the history that the keyspace keeps anyway. A client that reads slowly therefore takes no memory.
When the history is compacted beyond its position, its watch is cancelled with the compacted
revision, which tells the client what it has missed.

`WatchHub` knows which watches a changed key concerns; `WatchStream` is one stream of a client, with
any number of watches. Responses are made as bytes: equal watches share the events in them, so that
many watches of one key are told at little more than the cost of one.

Invariant: a client that resumes a watch after the revision of any response to it misses nothing.
The response that a watch was created has the revision of that moment, and a notification of
progress names a revision up to which everything has been told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final, Protocol

from doyen.quorum.consensus.core import Role
from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.errors import LEADERLESS, STOPPED, Code, EtcdError, fail, unexpected
from doyen.quorum.etcd_api.messages import key_value
from doyen.quorum.etcd_api.replica import Replica
from doyen.quorum.keyspace.etcd_requests import FROM_KEY, EtcdRecord
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.node.driver import Driver

EVENTS: Final = 1000
"""About how many events one response has; those of one revision are not divided."""
EVENTS_BYTES: Final = 1 << 20
SCANNED: Final = 1000
"""About how many changes a stream looks at in one turn of the loop: hundreds of streams may
have to look at a long history at the same time."""
PROGRESS_S: Final = 600.0
"""How often a watch that asks for it is notified although nothing happened."""
NO_WATCH: Final = -1
"""The watch id of a response that concerns all watches of a stream, or none."""
ALL_WATCHES: Final = rpc.WATCH.response(watch_id=NO_WATCH).SerializeToString()
CreateRequest: Final = rpc.message("WatchCreateRequest")
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


class Watcher(Protocol):
    """The owner of watches, which is notified of their changes."""

    def mark(self, watch: EtcdWatch, since: int) -> None:
        """A watch has something to tell, of changes since a revision."""


class Waiter:
    """Waits for one change."""

    def __init__(self, future: asyncio.Future[None]) -> None:
        self._future = future

    def mark(self, watch: EtcdWatch, since: int) -> None:
        if not self._future.done():
            self._future.set_result(None)


class WatchHub:
    """The watches of all streams on one node."""

    def __init__(self, driver: Driver, keyspace: Keyspace) -> None:
        self._driver = driver
        self._keyspace = keyspace
        self._keys: dict[bytes, dict[EtcdWatch, Watcher]] = {}
        self._ranges: dict[EtcdWatch, Watcher] = {}
        self.seen = keyspace.etcd.revision
        """The revision up to which watches have been marked."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._shared: dict[Any, tuple[bytes, int, bool]] = {}
        self._shared_at = 0, 0
        self._loop = asyncio.get_running_loop()
        driver.on_applied(self._applied)

    def close(self) -> None:
        self._driver.off_applied(self._applied)

    def add(self, watch: EtcdWatch, watcher: Watcher) -> None:
        watchers = self._keys.setdefault(watch.key, {}) if not watch.end else self._ranges
        watchers[watch] = watcher

    def remove(self, watch: EtcdWatch) -> None:
        if watch.end:
            del self._ranges[watch]
        else:
            watchers = self._keys[watch.key]
            del watchers[watch]
            if not watchers:
                del self._keys[watch.key]

    async def changed(self, key: bytes, end: bytes = b"") -> None:
        """Wait for the next change in a range of keys. It may have been undone since."""
        future: asyncio.Future[None] = self._loop.create_future()
        watch = EtcdWatch(NO_WATCH, CreateRequest(key=key, range_end=end))
        self._waiting[future] = None
        self.add(watch, Waiter(future))
        try:
            await future
        finally:
            self.remove(watch)
            del self._waiting[future]

    def fail(self, error: Exception) -> None:
        """Raise this error in all calls that wait for a change."""
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)

    def events(self, watch: EtcdWatch) -> tuple[bytes, int, bool]:
        """What a watch has to be told next, encoded; its position after that; and whether there may
        be more."""
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
        changes = etcd.changes(position, SCANNED)
        for change in changes:
            more = (len(events) >= EVENTS or size > EVENTS_BYTES) and change.mod > position
            position = change.mod
            if more:
                break
            if watch.admits(change):
                event = self._event(watch, change)
                events.append(event)
                size += event.ByteSize()
        else:
            last = changes[-1].mod if changes else etcd.revision
            position = max(position, last + 1)
            more = position <= etcd.revision
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
        if since < etcd.compacted:  # a snapshot of the leader has replaced the state
            for watchers in [*self._keys.values(), self._ranges]:
                for watch, watcher in watchers.items():
                    watcher.mark(watch, since)
            return
        for key in dict.fromkeys(change.key for change in etcd.changes(since)):
            for watch, watcher in self._keys.get(key, {}).items():
                watcher.mark(watch, since)
            for watch, watcher in self._ranges.items():
                if not watch.behind and watch.covers(key):
                    watcher.mark(watch, since)


class WatchStream:
    """One stream of a client."""

    def __init__(
        self,
        hub: WatchHub,
        keyspace: Keyspace,
        header: Callable[[int], bytes],
    ) -> None:
        """`header` makes the beginning of a response, for a revision."""
        self._hub = hub
        self._keyspace = keyspace
        self._header = header
        self._watches: dict[int, EtcdWatch] = {}
        self._next = 0
        self._behind: deque[EtcdWatch] = deque()
        self._controls: deque[tuple[int, dict[str, Any]]] = deque()
        """Responses to requests, and the revision of each."""
        self._asked = False
        """The client has asked how far its watches are."""
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
            self._asked = True
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
        self._controls.append((self._hub.seen, fields))

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
        timer = self._loop.call_later(PROGRESS_S, self._notice_progress)
        quiet: dict[EtcdWatch, None] = {}
        """Watches that were told nothing since the last notification of progress."""
        try:
            while True:
                if self._ended is not None:
                    raise self._ended
                if self._controls:
                    yield self._next_control()
                elif self._behind:
                    quiet.pop(self._behind[0], None)
                    response = self._tell(self._behind[0])
                    if response is not None:
                        yield response
                    else:
                        await asyncio.sleep(0)  # a long history must not delay heartbeats
                elif self._asked:
                    self._asked = False
                    yield self._header(self._hub.seen) + ALL_WATCHES
                elif self._progress_due:
                    self._progress_due = False
                    timer = self._loop.call_later(PROGRESS_S, self._notice_progress)
                    # Meanwhile there may be changes that these watches have not been told of.
                    header = self._header(self._hub.seen)
                    for watch in quiet:
                        if self._watches.get(watch.id) is watch:
                            yield header + watch.encoded_id
                    quiet = {each: None for each in self._watches.values() if each.progress}
                else:
                    self._idle = self._loop.create_future()
                    await self._idle
        finally:
            timer.cancel()

    def _notice_progress(self) -> None:
        self._progress_due = True
        self._wake()

    def _next_control(self) -> bytes:
        revision, fields = self._controls.popleft()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        response: bytes = rpc.WATCH.response(**fields).SerializeToString()
        return self._header(revision) + response

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
        self._behind.popleft()
        if watch.behind:  # after the others, so that a long history does not delay them
            self._behind.append(watch)
        if not events:
            return None
        return self._header(self._hub.seen) + watch.encoded_id + events


class WatchService:
    """The Watch service. When this node knows no leader, it ends streams and the calls that wait
    for a change, so that their clients go to another node."""

    def __init__(self, replica: Replica, election_s: float) -> None:
        self._replica = replica
        self._election_s = election_s
        self.hub = WatchHub(replica.driver, replica.keyspace)
        self.streams: dict[WatchStream, None] = {}
        self._header_of: Any = None
        self._header_bytes = b""
        self._giving_up: asyncio.TimerHandle | None = None
        replica.driver.on_role(self._role_changed)
        self.leader_is(replica.driver.leader)

    def close(self) -> None:
        self._replica.driver.off_role(self._role_changed)
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._end_all(STOPPED)
        self.hub.close()

    def _role_changed(self, role: Role, generation: int, leader: str | None) -> None:
        self.leader_is(leader)

    def leader_is(self, leader: str | None) -> None:
        """When no leader is known for an election timeout, streams are ended; and again after each
        further one, for clients that came meanwhile."""
        if leader is None:
            if self._giving_up is None:
                self._giving_up = self._replica.loop.call_later(self._election_s, self._give_up)
        elif self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        self._giving_up = self._replica.loop.call_later(self._election_s, self._give_up)
        self._end_all(LEADERLESS)

    def _end_all(self, error: tuple[Code, str]) -> None:
        for stream in self.streams:
            stream.end(fail(error))
        self.hub.fail(fail(error))

    def _header(self, revision: int) -> bytes:
        """The beginning of a response."""
        replica = self._replica
        current = revision, replica.driver.generation, replica.members.cluster_id
        if self._header_of != current:
            self._header_of = current
            response = rpc.WATCH.response(header=replica.header(revision))
            self._header_bytes = response.SerializeToString()
        return self._header_bytes

    async def watch(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """`watch_encoded` with messages."""
        async with aclosing(self.watch_encoded(requests)) as responses:  # type: ignore[type-var]
            async for each in responses:
                yield rpc.WATCH.response.FromString(each)

    async def watch_encoded(self, requests: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        """One stream of a client."""
        stream = WatchStream(self.hub, self._replica.keyspace, self._header)
        self.streams[stream] = None
        reading = self._replica.loop.create_task(self._take(requests, stream))
        try:
            async with aclosing(stream.responses()) as responses:  # type: ignore[type-var]
                async for each in responses:
                    yield each
        finally:
            reading.cancel()
            del self.streams[stream]
            stream.close()

    async def _take(self, requests: AsyncIterator[Any], stream: WatchStream) -> None:
        """The client may stop sending and still receive."""
        try:
            async for message in requests:
                # A watch that is created now must not tell of writes that were acknowledged before,
                # and has to know what was compacted.
                await self._replica.current()
                stream.take(message)
                await stream.has_room()
        except EtcdError as error:
            stream.end(error)
        except Exception as error:  # noqa: BLE001 - the client has to be answered
            stream.end(unexpected(error))
