"""A simulated etcd cluster: the part of the v3 API that doyen uses, and faults.

gRPC has threads of its own, which do not run in virtual time. So `Channel` replaces
`grpc.aio.insecure_channel`, and sends calls and streams as frames over one connection of
`adversary`. It fails as gRPC does: calls in flight on a connection that breaks end in UNAVAILABLE,
the next call connects again, and a connection that does not answer a ping is closed.

In addition to the faults of connections, members have faults that are drawn for each request while
the world is rough:

- UNAVAILABLE for a request that was not carried out, because there is no leader; or that was
- a read answered with an earlier revision
- a change of leader: every lease's time begins anew. For a while the deposed member does not
  notice: it still answers renewals, which have no effect at the new leader, and sends no events
- a watch is cancelled, as after a compaction
- a silent member
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
from grpc import StatusCode

from adversary import Connection
from doyen.stores.etcd import rpc

__all__ = ["Channel", "EtcdModel"]

CLUSTER = 0xC1
PING_S = 10.0
PONG_S = 5.0
CONNECT_S = 0.001
"""With 0, a loop that retries until a deadline would never advance the virtual time."""

REQUESTS = {
    rpc.RANGE.path: rpc.RangeRequest,
    rpc.PUT.path: rpc.PutRequest,
    rpc.DELETE.path: rpc.DeleteRangeRequest,
    rpc.TXN.path: rpc.TxnRequest,
    rpc.GRANT.path: rpc.LeaseGrantRequest,
    rpc.REVOKE.path: rpc.LeaseRevokeRequest,
    rpc.TIME_TO_LIVE.path: rpc.LeaseTimeToLiveRequest,
    rpc.KEEP_ALIVE.path: rpc.LeaseKeepAliveRequest,
    rpc.WATCH.path: rpc.WatchRequest,
    rpc.STATUS.path: rpc.StatusRequest,
}
METHODS = {
    method.path: method
    for method in (
        rpc.RANGE,
        rpc.PUT,
        rpc.DELETE,
        rpc.TXN,
        rpc.GRANT,
        rpc.REVOKE,
        rpc.TIME_TO_LIVE,
        rpc.STATUS,
    )
}


def frame(data: bytes = b"", **head: object) -> bytes:
    return json.dumps({**head, "size": len(data)}).encode() + b"\n" + data


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    line = await reader.readline()
    if not line:
        raise ConnectionResetError("the connection has ended")
    head = json.loads(line)
    return head, await reader.readexactly(head["size"])


def failure(code: StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details)


class Channel:
    """Replaces a channel of gRPC."""

    def __init__(self, member: str, options: object = None) -> None:
        del options
        self._member = member
        self._ids = itertools.count(1)
        self._connecting: asyncio.Task[asyncio.StreamWriter] | None = None
        self._calls: dict[int, asyncio.Queue[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered_at = 0.0
        self._closed = False

    def unary_unary(
        self, path: str, serialise: Callable[[Any], bytes], deserialise: Callable[[bytes], Any]
    ) -> Callable[..., Any]:
        async def call(request: Any, metadata: object = ()) -> Any:
            del metadata
            number, answers = await self._begin()
            try:
                await self._send(number, path, serialise(request))
                return deserialise(_payload(await answers.get()))
            finally:
                self._calls.pop(number, None)

        return call

    def stream_stream(
        self, path: str, serialise: Callable[[Any], bytes], deserialise: Callable[[bytes], Any]
    ) -> Callable[..., Any]:
        def call(requests: AsyncIterator[Any], metadata: object = ()) -> StreamCall:
            del metadata
            return StreamCall(self, path, requests, serialise, deserialise)

        return call

    async def close(self, grace_s: float | None = None) -> None:
        if grace_s and self._calls:
            await asyncio.sleep(grace_s)
        self._closed = True
        if (
            self._connecting is not None
            and self._connecting.done()
            and not self._connecting.cancelled()
        ):
            if self._connecting.exception() is None:
                self._connecting.result().close()
        elif self._connecting is not None:
            self._connecting.cancel()
        self._fail(asyncio.CancelledError())
        for task in self._tasks:
            task.cancel()

    async def _begin(self) -> tuple[int, asyncio.Queue[Any]]:
        if self._closed:
            raise grpc.aio.UsageError("the channel is closed")
        number, answers = next(self._ids), asyncio.Queue[Any]()
        self._calls[number] = answers
        return number, answers

    async def _send(self, number: int, path: str, data: bytes, kind: str = "call") -> None:
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        link = self._connecting
        try:
            writer = await asyncio.shield(link)
        except OSError as error:
            if self._connecting is link:
                self._connecting = None
            raise failure(
                StatusCode.UNAVAILABLE, f"failed to connect to all addresses; last error: {error}"
            ) from error
        writer.write(frame(data, id=number, path=path, kind=kind, member=self._member))

    async def _connect(self) -> asyncio.StreamWriter:
        host, _, port = self._member.partition(":")
        await asyncio.sleep(CONNECT_S)
        reader, writer = await asyncio.open_connection(host, int(port))
        self._answered_at = asyncio.get_running_loop().time()
        for work in (self._read(reader, writer), self._ping(writer)):
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head, data = await read_frame(reader)
                self._answered_at = asyncio.get_running_loop().time()
                if head["id"] in self._calls:
                    answer: Any = data
                    if "code" in head:
                        answer = failure(StatusCode[head["code"]], head["details"])
                    self._calls[head["id"]].put_nowait(answer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self._connecting = None
            self._fail(failure(StatusCode.UNAVAILABLE, "Socket closed"))

    async def _ping(self, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            await asyncio.sleep(PING_S)
            pinged_at = asyncio.get_running_loop().time()
            writer.write(frame(id=0, path="", kind="ping", member=self._member))
            await asyncio.sleep(PONG_S)
            if self._answered_at < pinged_at:
                writer.close()

    def _fail(self, error: BaseException) -> None:
        for answers in self._calls.values():
            answers.put_nowait(error)


def _payload(answer: Any) -> bytes:
    if isinstance(answer, BaseException):
        raise answer
    assert isinstance(answer, bytes)
    return answer


class StreamCall:
    """A call with any number of requests and responses."""

    def __init__(
        self,
        channel: Channel,
        path: str,
        requests: AsyncIterator[Any],
        serialise: Callable[[Any], bytes],
        deserialise: Callable[[bytes], Any],
    ) -> None:
        self._channel = channel
        self._deserialise = deserialise
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._number = next(channel._ids)
        channel._calls[self._number] = self._answers

        async def pump() -> None:
            try:
                async for request in requests:
                    await channel._send(self._number, path, serialise(request), "stream")
            except grpc.aio.AioRpcError as error:
                self._answers.put_nowait(error)

        self._pumping = asyncio.get_running_loop().create_task(pump())

    async def read(self) -> Any:
        return self._deserialise(_payload(await self._answers.get()))

    def cancel(self) -> None:
        self._channel._calls.pop(self._number, None)
        self._pumping.cancel()
        self._answers.put_nowait(asyncio.CancelledError())


@dataclass(frozen=True)
class Stored:
    """A key's value."""

    value: bytes
    created: int
    modified: int
    lease: int


@dataclass
class Granted:
    """A lease, and the timer that ends it."""

    ttl_s: int
    timer: asyncio.TimerHandle
    keys: set[bytes] = field(default_factory=set)


@dataclass(frozen=True)
class Deposed:
    """A deposed leader that has not noticed: until when, and what it knows."""

    until: float
    term: int
    leases: dict[int, int]
    """The leases that it keeps, and their ttls."""


@dataclass(frozen=True)
class Watcher:
    connection: Connection
    member: str
    stream: int
    number: int
    first: bytes
    end: bytes


class EtcdModel:
    """The cluster and its members."""

    def __init__(self, seed: int = 0, rough: Callable[[], bool] = lambda: False) -> None:
        self.rng = random.Random(seed)
        self.rough = rough
        self.revision = 5
        self.term = 2
        self.kv: dict[bytes, Stored] = {}
        self.leases: dict[int, Granted] = {}
        self.silent: dict[str, float] = {}
        """Until when members are silent."""
        self.deposed: dict[str, Deposed] = {}
        """By port: a member is the same for all candidates, who reach it by different hosts."""
        self.broken: Exception | None = None
        """An error in the model itself."""
        self._watchers: dict[Watcher, None] = {}
        self._numbers = itertools.count()

    async def serve(self, connection: Connection) -> None:
        while True:
            head, data = await read_frame(connection.reader)
            member = head["member"]
            if self._draw_faults(member):
                while await connection.reader.read(65536):
                    pass
                return
            if head["kind"] == "ping":
                if not connection.ignores_requests:
                    connection.send(frame(id=0))
                continue

            def answer(
                member: str = member,
                number: int = head["id"],
                path: str = head["path"],
                data: bytes = data,
            ) -> bytes:
                try:
                    return self._answer(connection, member, number, path, data)
                except Exception as error:
                    self.broken = error
                    raise

            await connection.answer(head["path"].rpartition("/")[2], answer)

    def _draw_faults(self, member: str) -> bool:
        """Draw the faults that a request meets on arrival; whether its member is silent."""
        now = asyncio.get_running_loop().time()
        if self.rough():
            draw = self.rng.random()
            if draw < 0.003:
                self.silent[member] = now + self.rng.expovariate(1 / 10)
            elif draw < 0.007 and self._watchers:
                watcher = self.rng.choice(list(self._watchers))
                del self._watchers[watcher]
                self._notify(watcher, canceled=True)
        return now < self.silent.get(member, 0.0)

    def depose(self, member: str, unnoticed_s: float) -> None:
        """Let another member lead. This one does not notice for a time."""
        until = asyncio.get_running_loop().time() + unnoticed_s
        leases = {number: lease.ttl_s for number, lease in self.leases.items()}
        self.deposed[_port(member)] = Deposed(until, self.term, leases)
        self.term += 1
        for number in self.leases:
            self._arm(number)

    def _answer(
        self, connection: Connection, member: str, number: int, path: str, data: bytes
    ) -> bytes:
        request = REQUESTS[path].FromString(data)
        draw = self.rng.random() if self.rough() else 1.0
        deposed = self._deposed(member)
        if path == rpc.WATCH.path:
            return self._watch(connection, member, number, request)
        if path == rpc.KEEP_ALIVE.path:
            header = self._header(member)
            if draw < 0.06 and not deposed:
                self.depose(member, self.rng.uniform(0, 8))
                deposed = self._deposed(member)
            if deposed:
                ttl_s = deposed.leases.get(request.ID, 0)
                header["raft_term"] = deposed.term
            elif request.ID in self.leases:
                self._arm(request.ID)
                ttl_s = self.leases[request.ID].ttl_s
            else:
                ttl_s = 0
            response = rpc.KEEP_ALIVE.answer(header=header, ID=request.ID, TTL=ttl_s)
            return frame(response.SerializeToString(), id=number)
        if draw < 0.02 or (deposed and path != rpc.STATUS.path):
            return _error(number, StatusCode.UNAVAILABLE, "etcdserver: no leader")
        try:
            fields = self._do(path, request)
        except LookupError:
            return _error(number, StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        if draw < 0.03:
            return _error(number, StatusCode.UNAVAILABLE, "etcdserver: request timed out")
        response = METHODS[path].answer(header=self._header(member), **fields)
        if path == rpc.RANGE.path and draw < 0.04:
            response.header.revision -= 1
        return frame(response.SerializeToString(), id=number)

    def _deposed(self, member: str) -> Deposed | None:
        deposed = self.deposed.get(_port(member))
        noticed = deposed is None or deposed.until <= asyncio.get_running_loop().time()
        return None if noticed else deposed

    def _header(self, member: str) -> dict[str, int]:
        return {
            "cluster_id": CLUSTER,
            "member_id": sum(member.encode()),
            "revision": self.revision,
            "raft_term": self.term,
        }

    def _do(self, path: str, request: Any) -> dict[str, Any]:
        match path:
            case rpc.STATUS.path:
                return {"version": "3.5.16", "leader": 1}
            case rpc.GRANT.path:
                lease = self.rng.getrandbits(62)
                nothing = asyncio.get_running_loop().call_later(0, lambda: None)
                self.leases[lease] = Granted(request.TTL, nothing)
                self._arm(lease)
                return {"ID": lease, "TTL": request.TTL}
            case rpc.TIME_TO_LIVE.path:
                known = self.leases.get(request.ID)
                if known is None:
                    return {"ID": request.ID, "TTL": -1}
                left_s = max(0.0, known.timer.when() - asyncio.get_running_loop().time())
                left = min(int(left_s), known.ttl_s)
                return {"ID": request.ID, "TTL": left, "grantedTTL": known.ttl_s}
            case rpc.REVOKE.path:
                if request.ID not in self.leases:
                    raise LookupError
                self.end(request.ID)
                return {}
        at = self.revision + 1
        if path == rpc.TXN.path:
            held = all(self._holds(compare) for compare in request.compare)
            operations = request.success if held else request.failure
            for operation in operations:
                self._require_lease(operation.request_put.lease)
            events: list[dict[str, Any]] = []
            responses = [self._operate(operation, at, events) for operation in operations]
            self._commit(events)
            return {"succeeded": held, "responses": responses}
        events = []
        match path:
            case rpc.RANGE.path:
                fields = self._range(request)
            case rpc.PUT.path:
                self._require_lease(request.lease)
                fields = self._put(request, at, events)
            case rpc.DELETE.path:
                fields = self._delete(request, at, events)
            case _:
                raise NotImplementedError(path)
        self._commit(events)
        return fields

    # Keys.

    def _holds(self, compare: Any) -> bool:
        stored = self.kv.get(compare.key)
        if compare.WhichOneof("target_union") == "create_revision":
            return bool(compare.create_revision == (stored.created if stored else 0))
        return bool(compare.mod_revision == (stored.modified if stored else 0))

    def _operate(self, operation: Any, at: int, events: list[dict[str, Any]]) -> dict[str, Any]:
        kind = operation.WhichOneof("request")
        match kind:
            case "request_range":
                return {"response_range": self._range(operation.request_range)}
            case "request_put":
                return {"response_put": self._put(operation.request_put, at, events)}
            case "request_delete_range":
                deleted = self._delete(operation.request_delete_range, at, events)
                return {"response_delete_range": deleted}
        raise NotImplementedError(kind)

    def _range(self, request: Any) -> dict[str, Any]:
        keys = [key for key in sorted(self.kv) if _within(key, request.key, request.range_end)]
        if request.max_create_revision:
            keys = [key for key in keys if self.kv[key].created <= request.max_create_revision]
        if request.sort_target == request.CREATE:
            keys.sort(key=lambda key: self.kv[key].created)
        if request.sort_order == request.DESCEND:
            keys.reverse()
        if request.count_only:
            return {}
        found = keys[: request.limit or None]
        return {"kvs": [_kv(key, self.kv[key]) for key in found]}

    def _put(self, request: Any, at: int, events: list[dict[str, Any]]) -> dict[str, Any]:
        before = self.kv.get(request.key)
        if before is not None and before.lease in self.leases:
            self.leases[before.lease].keys.discard(request.key)
        if request.lease:
            self.leases[request.lease].keys.add(request.key)
        after = Stored(request.value, before.created if before else at, at, request.lease)
        self.kv[request.key] = after
        events.append({"kv": _kv(request.key, after)})
        shown = before is not None and request.prev_kv
        return {"prev_kv": _kv(request.key, before)} if shown and before is not None else {}

    def _delete(self, request: Any, at: int, events: list[dict[str, Any]]) -> dict[str, Any]:
        stored = self.kv.pop(request.key, None)
        if stored is None:
            return {}
        if stored.lease in self.leases:
            self.leases[stored.lease].keys.discard(request.key)
        gone = replace(stored, value=b"", created=0, modified=at, lease=0)
        events.append({"kv": _kv(request.key, gone)})
        return {"deleted": 1}

    def _commit(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        self.revision += 1
        for watcher in list(self._watchers):
            if watcher.connection.closed:
                del self._watchers[watcher]
                continue
            matching = [
                event for event in events if _within(event["kv"]["key"], watcher.first, watcher.end)
            ]
            if matching:
                self._notify(watcher, events=matching)

    # Leases.

    def _require_lease(self, lease: int) -> None:
        if lease and lease not in self.leases:
            raise LookupError(lease)

    def _arm(self, number: int) -> None:
        lease = self.leases[number]
        lease.timer.cancel()
        delay_s = lease.ttl_s + self.rng.uniform(0, 0.5)
        lease.timer = asyncio.get_running_loop().call_later(delay_s, self.end, number)

    def end(self, number: int) -> None:
        """End a lease and delete the keys bound to it."""
        lease = self.leases.pop(number)
        lease.timer.cancel()
        events: list[dict[str, Any]] = []
        for key in sorted(lease.keys):
            self._delete(rpc.DeleteRangeRequest(key=key), self.revision + 1, events)
        self._commit(events)

    # Watches.

    def _watch(self, connection: Connection, member: str, stream: int, request: Any) -> bytes:
        kind = request.WhichOneof("request_union")
        if kind == "create_request":
            wanted = request.create_request
            number = next(self._numbers)
            watcher = Watcher(connection, member, stream, number, wanted.key, wanted.range_end)
            self._watchers[watcher] = None
            return self._response(watcher, created=True)
        if kind == "cancel_request":
            for watcher in list(self._watchers):
                if watcher.number == request.cancel_request.watch_id:
                    del self._watchers[watcher]
                    return self._response(watcher, canceled=True)
            return b""
        progress = Watcher(connection, member, stream, -1, b"", b"")
        return self._response(progress)

    def _notify(self, watcher: Watcher, **fields: Any) -> None:
        response, deposed = self._response(watcher, **fields), self._deposed(watcher.member)
        if deposed is None:
            watcher.connection.send(response)
        else:
            asyncio.get_running_loop().call_at(deposed.until, watcher.connection.send, response)

    def _response(self, watcher: Watcher, **fields: Any) -> bytes:
        header = self._header(watcher.connection.host)
        response = rpc.WATCH.answer(header=header, watch_id=watcher.number, **fields)
        return frame(response.SerializeToString(), id=watcher.stream)


def _port(member: str) -> str:
    return member.rpartition(":")[2]


def _within(key: bytes, first: bytes, end: bytes) -> bool:
    return first <= key < end if end else key == first


def _kv(key: bytes, stored: Stored) -> dict[str, Any]:
    return {
        "key": key,
        "value": stored.value,
        "create_revision": stored.created,
        "mod_revision": stored.modified,
        "lease": stored.lease,
    }


def _error(number: int, code: StatusCode, details: str) -> bytes:
    return frame(id=number, code=code.name, details=details)
