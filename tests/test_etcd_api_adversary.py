"""What an adversary has found in etcd's API on a quorum: watches, elections, the JSON gateway, and
connections that end at the wrong moment."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hpack import Encoder

from doyen.errors import StoreUnavailable
from doyen.quorum.etcd_api import elections, gateway, rpc, watches
from doyen.quorum.etcd_api.http2_frames import END_HEADERS, HEADERS, PREFACE, SETTINGS, frame
from doyen.quorum.etcd_api.watches import EVENTS_BYTES, EtcdWatch, WatchHub, WatchStream
from doyen.quorum.keyspace.etcd_requests import DeleteKeys, PutKey
from doyen.quorum.keyspace.state import Keyspace
from etcd_door import POLL_S, Doors, EtcdClient, doors

PATIENCE_S = 20.0


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test, in which no task may fail unheard."""
    failures: list[Any] = []

    async def bounded() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        async with asyncio.timeout(60):
            await work
        gc.collect()

    asyncio.run(bounded())
    assert not failures, failures


# Watches, on a keyspace without a node.


class Stream:
    """The responses to one stream of a client, as it reads them."""

    def __init__(self) -> None:
        self.keyspace = Keyspace()
        driver: Any = SimpleNamespace(on_applied=lambda call: None)
        self.hub = WatchHub(driver, self.keyspace)
        self.stream = WatchStream(self.hub, self.keyspace, self._header)
        self._responses = self.stream.responses()

    def _header(self, revision: int) -> bytes:
        header: bytes = rpc.WATCH.response(header={"revision": revision}).SerializeToString()
        return header

    def change(self, request: Any) -> None:
        self.keyspace.etcd.apply(request)
        self.hub._applied(0)

    def create(self, **create: Any) -> None:
        self.stream.take(rpc.WATCH.request(create_request=create))

    async def read(self) -> Any:
        return rpc.WATCH.response.FromString(await anext(self._responses))

    def start_reading(self) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.read())

    async def close(self) -> None:
        closing: Any = self._responses
        await closing.aclose()


def test_a_watch_resumes_where_it_was_created() -> None:
    """The client resumes after the revision with which its watch was created, if the connection
    breaks before the first event."""

    async def trial() -> None:
        client = Stream()
        client.create(key=b"a")
        client.change(PutKey(b"a", b"1"))
        created, told = await client.read(), await client.read()
        assert created.created
        assert created.header.revision == 1
        assert [each.kv.mod_revision for each in told.events] == [2]
        await client.close()

    run(trial())


def test_progress_names_what_has_been_told() -> None:
    async def trial() -> None:
        client = Stream()
        for key in (b"a", b"b"):
            client.create(key=key, progress_notify=True)
            assert (await client.read()).created
        reading = client.start_reading()
        for _ in range(2):  # after twice the interval, in which nothing happened
            await asyncio.sleep(0)
            client.stream._notice_progress()
        assert (await reading).watch_id == 0
        client.change(PutKey(b"b", b"1"))
        progress, told = await client.read(), await client.read()
        assert (progress.watch_id, len(progress.events)) == (1, 0)
        assert progress.header.revision == 1, "the change has not been told"
        assert [each.kv.mod_revision for each in told.events] == [2]
        await client.close()

    run(trial())


def test_a_watch_is_created_before_it_tells() -> None:
    """Also if the client has asked for progress, which has to wait until everything was told."""

    async def trial() -> None:
        client = Stream()
        client.change(PutKey(b"a", b"1"))
        client.create(key=b"a", start_revision=1)
        client.stream.take(rpc.WATCH.request(progress_request={}))
        client.create(key=b"a", start_revision=1)
        seen = [await client.read() for _ in range(5)]
        kinds = [(each.watch_id, "created" if each.created else len(each.events)) for each in seen]
        assert kinds == [(0, "created"), (1, "created"), (0, 1), (1, 1), (-1, 0)]
        await client.close()

    run(trial())


def test_a_long_history_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the loop, nor other watches of the same stream; and no response has far more than a
    megabyte."""
    monkeypatch.setattr(watches, "EVENTS", 2)
    monkeypatch.setattr(watches, "SCANNED", 100)
    looked_at: list[bytes] = []
    admits = EtcdWatch.admits

    def counted(self: EtcdWatch, change: Any) -> bool:
        looked_at.append(change.key)
        return admits(self, change)

    monkeypatch.setattr(EtcdWatch, "admits", counted)

    async def trial() -> None:
        client = Stream()
        for _ in range(10):
            client.change(PutKey(b"a", b"1"))
        client.create(key=b"a", start_revision=1)
        client.create(key=b"b")
        client.change(PutKey(b"b", b"1"))
        seen = [await client.read() for _ in range(5)]
        assert [each.watch_id for each in seen] == [0, 1, 0, 1, 0]
        await client.close()

        client = Stream()
        for _ in range(350):
            client.change(PutKey(b"a", b"1"))
        client.change(PutKey(b"b", b"1"))
        client.create(key=b"b", start_revision=1)
        assert (await client.read()).created
        looked_at.clear()
        reading = client.start_reading()
        for turn in range(1, 4):
            await asyncio.sleep(0)
            assert len(looked_at) <= 100 * turn
        assert [each.kv.key for each in (await reading).events] == [b"b"]
        await client.close()

        monkeypatch.setattr(watches, "EVENTS", 1000)
        client = Stream()
        for number in range(20):
            client.change(PutKey(b"%d" % number, bytes(200_000)))
        for number in range(20):
            client.change(DeleteKeys(b"%d" % number))
        client.create(key=b"\0", range_end=b"\0", start_revision=22, prev_kv=True)
        assert (await client.read()).created
        told = 0
        while told < 20:
            response = await client.read()
            told += len(response.events)
            assert response.ByteSize() < EVENTS_BYTES + 300_000
        await client.close()

    run(trial())


# Elections, on a node.


class Candidates:
    """Calls the services of a node from within it, so that each can be cancelled at a given
    moment."""

    def __init__(self, quorum: Doors) -> None:
        self.api = quorum.doors["n1"].api
        self.driver = quorum.nodes["n1"].driver

    async def call(self, method: rpc.EtcdMethod, **fields: Any) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self.api.unary[method](method.request(**fields))

    async def lease(self) -> int:
        return int((await self.call(rpc.GRANT, TTL=600)).ID)

    def campaign(self, lease: int, value: bytes = b"") -> asyncio.Task[Any]:
        call = self.call(rpc.CAMPAIGN, name=b"e", lease=lease, value=value)
        return asyncio.ensure_future(call)

    async def standing(self, values: set[bytes]) -> None:
        """Wait until the candidates have these values."""
        while True:
            found = await self.call(rpc.RANGE, key=b"e/", range_end=b"e0")
            if {each.value for each in found.kvs} == values:
                return
            await asyncio.sleep(POLL_S)


async def leave(task: asyncio.Task[Any]) -> None:
    """The client of a call goes away."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def elections_trial(quorum: Doors) -> None:
    node = Candidates(quorum)
    first, second = await node.lease(), await node.lease()
    leader = (await node.campaign(first, b"1")).leader

    # A predecessor that leaves the line and joins it again at once is behind.
    waiting = node.campaign(second, b"2")
    await node.standing({b"1", b"2"})
    await asyncio.gather(
        node.call(rpc.DELETE_RANGE, key=leader.key),
        node.call(rpc.PUT, key=leader.key, value=b"again", lease=first),
    )
    leader = (await waiting).leader
    assert leader.lease == second
    await node.call(rpc.DELETE_RANGE, key=b"e/%x" % first)

    # A client goes on at another node. Its first call, which ends later, leaves it its place.
    third = await node.lease()
    before = node.campaign(third, b"before")
    await node.standing({b"2", b"before"})
    after = node.campaign(third, b"after")
    await node.standing({b"2", b"after"})
    await leave(before)
    for _ in range(3):
        await node.call(rpc.PUT, key=b"other")
    await node.call(rpc.RESIGN, leader=leader)
    leader = (await after).leader
    assert leader.lease == third

    # A client that leaves while its key is being created leaves no key.
    fourth = await node.lease()
    while len(node.driver.proposals):  # noqa: ASYNC110
        await asyncio.sleep(0)
    gone = node.campaign(fourth, b"gone")
    while not len(node.driver.proposals):  # noqa: ASYNC110
        await asyncio.sleep(0)
    await leave(gone)
    for _ in range(3):
        await node.call(rpc.PUT, key=b"other")
    await node.standing({b"after"})

    # Nor does one that leaves while no proposal succeeds.
    gone = node.campaign(fourth, b"gone")
    await node.standing({b"after", b"gone"})
    propose, failed = node.driver.propose, 0

    async def fails(*arguments: Any) -> Any:
        nonlocal failed
        if failed < 2:
            failed += 1
            raise StoreUnavailable("no leader")
        return await propose(*arguments)

    node.driver.propose = fails  # type: ignore[assignment]
    await leave(gone)
    await node.standing({b"after"})
    assert failed == 2
    node.driver.propose = propose

    # Whoever no longer waits is forgotten, although nothing has changed meanwhile.
    hub = node.api.watches.hub
    for _ in range(3):

        async def requests() -> AsyncIterator[Any]:
            yield rpc.OBSERVE.request(name=b"e")

        observing: Any = node.api.streaming[rpc.OBSERVE](requests())
        assert (await anext(observing)).kv.value == b"after"
        waits = asyncio.ensure_future(observing.asend(None))
        await asyncio.sleep(0)
        await leave(waits)
        waiting = node.campaign(fourth, b"four")
        await node.standing({b"after", b"four"})
        await leave(waiting)
        await node.standing({b"after"})
    assert not hub._waiting
    assert not hub._ranges
    assert not hub._keys


def test_elections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elections, "RETRY_S", POLL_S)

    async def trial() -> None:
        async with doors(tmp_path) as quorum:
            await elections_trial(quorum)

    run(trial())


# Connections.


def request(path: str, body: Any = None, method: str = "POST") -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def encoded(data: bytes) -> str:
    return b64encode(data).decode()


WATCH = request("/v3/watch", {"create_request": {"key": encoded(b"k")}})


class Raw:
    """A connection of bytes to a node."""

    def __init__(self, quorum: Doors) -> None:
        self._address = quorum.addresses[0]

    async def __aenter__(self) -> Raw:
        host, port = self._address.split(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def until(self, data: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(data), PATIENCE_S)


async def connections_trial(quorum: Doors, patch: pytest.MonkeyPatch) -> None:
    door = quorum.doors["n1"]

    # HEAD is answered without a body, and the connection goes on.
    async with Raw(quorum) as raw:
        for method in ("HEAD", "HEAD", "GET"):
            raw.writer.write(request("/health", method=method))
            assert (await raw.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await raw.until(b'"health":"true"')
        (served,) = (each for each in door._connections if each.task is not None)
        connection = served._transport.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    # A client that resets its connection is no failure.
    async with Raw(quorum) as raw:
        raw.writer.write(WATCH)
        await raw.until(b'"created":true')
        sock = raw.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    while door.api.watches.streams:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)

    # What a client sends while it waits is not kept without a bound.
    async with Raw(quorum) as raw:
        raw.writer.write(WATCH)
        await raw.until(b'"created":true')
        with suppress(OSError):
            for _ in range(1000):
                raw.writer.write(bytes(1 << 14))
                await raw.writer.drain()
            await asyncio.wait_for(raw.reader.read(), PATIENCE_S)
    assert not door.api.watches.streams

    # A defect is answered and reported.
    reported: list[str] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
    with patch.context() as broken:
        broken.setattr(door.api.replica, "check_version", lambda: 1 // 0)
        for data in (request("/v3/kv/range", {"key": encoded(b"k")}), WATCH):
            async with Raw(quorum) as raw:
                raw.writer.write(data)
                await raw.until(b"unexpected ZeroDivisionError")
    loop.set_exception_handler(before)
    assert len(reported) == 2, reported

    # The JSON of a large response is made on another thread.
    threads: list[int] = []
    encode = gateway._encoded_message

    def noted(message: Any) -> bytes:
        threads.append(threading.get_ident())
        return encode(message)

    patch.setattr(gateway, "_encoded_message", noted)
    async with Raw(quorum) as raw:
        for size in (10, 500_000):
            key, value = encoded(b"size"), encoded(bytes(size))
            raw.writer.write(request("/v3/kv/put", {"key": key, "value": value}))
            await raw.until(b"raft_term")
            raw.writer.write(request("/v3/kv/range", {"key": key}))
            await raw.until(b'"count":"1"}')
    here = threading.get_ident()
    assert [each == here for each in threads] == [True, True, True, False]

    # Compressed requests of gRPC's own client.
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        async with grpc.aio.insecure_channel(
            quorum.addresses[0], compression=compression
        ) as channel:
            call = channel.unary_unary(
                rpc.PUT.path,
                request_serializer=rpc.PUT.request.SerializeToString,
                response_deserializer=rpc.PUT.response.FromString,
            )
            value = bytes(100_000) + compression.name.encode()
            await call(rpc.PUT.request(key=b"z", value=value), timeout=PATIENCE_S)
            async with EtcdClient(quorum.addresses[0]) as client:
                assert (await client.call(rpc.RANGE, key=b"z")).kvs[0].value == value


async def shutdown_trial(quorum: Doors) -> None:
    """A connection that says what it is while the door is being closed is not served."""
    door = quorum.doors.pop("n1")
    node = quorum.nodes.pop("n1")
    applied = len(node.driver.applier.on_applied)
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": rpc.WATCH.path,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = Encoder().encode([*headers.items()])
    first = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, block)
    host, port = "127.0.0.1", door.port
    _, writer = await asyncio.open_connection(host, port)
    _, late = await asyncio.open_connection(host, port)
    writer.write(first)
    while not door._server.tasks or len(door._connections) < 2:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    (undecided,) = (each for each in door._connections if each._transport.get_protocol() is each)
    closing = asyncio.ensure_future(door.close())
    await asyncio.sleep(0)
    undecided.data_received(first)
    await closing
    assert not door._server.tasks
    assert len(node.driver.applier.on_applied) == applied - 1
    for each in (writer, late):
        each.transport.abort()
    await node.close()


def test_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def trial() -> None:
        async with doors(tmp_path) as quorum:
            await connections_trial(quorum, monkeypatch)
            await shutdown_trial(quorum)

    run(trial())
