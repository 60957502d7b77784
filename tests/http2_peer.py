"""A client of HTTP/2 for tests: it sends any frames, and checks what a server may send.

The server's connection runs on a transport in memory. The peer keeps the windows that it has given
to the server, and fails if the server exceeds one, sends frames on streams that have ended, or more
than one status for a call.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from hpack import Decoder, Encoder

from doyen.quorum.etcd_api import http2_frames, rpc
from doyen.quorum.etcd_api.errors import Code, EtcdError
from doyen.quorum.etcd_api.grpc_server import GrpcServer
from doyen.quorum.etcd_api.http2_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    WINDOW_UPDATE,
    Http2Code,
    frame,
    settings,
)

NUMBER = struct.Struct(">L").pack
TURNS = 12
"""Turns of the loop after which the server has done what it can."""


class Transport(asyncio.Transport):
    """Keeps what is written. While `stuck`, the other side does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.written = bytearray()
        self.waiting = 0
        self.most_waiting = 0
        self.stuck = False
        self.gone = False
        self._high = 0
        self._paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 0

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def write(self, data: Any) -> None:
        assert not self.gone, "written to a connection that has ended"
        self.written += data
        if self.stuck:
            self.waiting += len(data)
            self.most_waiting = max(self.most_waiting, self.waiting)
            if self.waiting > self._high and not self._paused:
                self._paused = True
                self.protocol.pause_writing()

    def release(self) -> None:
        self.stuck, self.waiting = False, 0
        if self._paused:
            self._paused = False
            self.protocol.resume_writing()

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.gone:
            self.gone = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self.gone


@dataclass
class Answer:
    """What the server has sent on a stream."""

    window: int
    data: bytearray = field(default_factory=bytearray)
    headers: list[dict[str, str]] = field(default_factory=list)
    ended: bool = False
    reset: Http2Code | None = None
    left: bool = False
    """This peer has reset the stream; what was under way still arrives."""

    @property
    def status(self) -> int:
        assert self.ended, "it has a status"
        return int(self.headers[-1]["grpc-status"])

    @property
    def text(self) -> str:
        return self.headers[-1]["grpc-message"]

    @property
    def messages(self) -> list[bytes]:
        found, at = [], 0
        while at < len(self.data):
            flag, size = struct.unpack_from(">BL", self.data, at)
            assert not flag
            if at + 5 + size > len(self.data):
                break
            found.append(bytes(self.data[at + 5 : at + 5 + size]))
            at += 5 + size
        return found


def message(data: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BL", flag, len(data)) + data


def put(value: bytes = b"", key: bytes = b"k") -> bytes:
    return message(rpc.PUT.request(key=key, value=value).SerializeToString())


HOLD = message(rpc.LOCK.request(name=b"l").SerializeToString())


class Peer:
    """One connection to a server."""

    def __init__(self, server: GrpcServer, *, greet: bool = True) -> None:
        self.transport = Transport()
        self.lost: list[bool] = []
        self.connection = server.connection(lambda: self.lost.append(True))
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)
        self.encoder = Encoder()
        self._decoder = Decoder()
        self.window = WINDOW
        self.initial_window = WINDOW
        self.answers: dict[int, Answer] = {}
        self.allowed: dict[int, int] = {0: WINDOW}
        """What the server lets this peer send."""
        self.pongs: list[bytes] = []
        self.pings = 0
        self.acks = 0
        self.goaway: Http2Code | None = None
        self._parsed = 0
        self._changes: list[tuple[int, list[Answer]]] = [(0, [])]
        """Changes of the initial window that the server has not acknowledged."""
        self.next = 1
        if greet:
            self.feed(PREFACE + frame(SETTINGS, 0, 0))

    def feed(self, data: bytes) -> None:
        """Send bytes."""
        if not self.transport.gone:
            self.connection.data_received(data)

    def head(self, path: str, **more: Any) -> bytes:
        """The header block of a request."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        headers |= {name.replace("_", "-"): str(value) for name, value in more.items()}
        return self.encoder.encode([*headers.items()])

    def opened(self, method: Any, *, end: bool = False, **more: Any) -> tuple[int, bytes]:
        """The number of a new stream, and its HEADERS."""
        number, self.next = self.next, self.next + 2
        path = method if isinstance(method, str) else method.path
        flags = END_HEADERS | (END_STREAM if end else 0)
        self.answers[number] = Answer(self.initial_window)
        self.allowed[number] = WINDOW
        return number, frame(HEADERS, flags, number, self.head(path, **more))

    def open(self, method: Any, *, end: bool = False, **more: Any) -> int:
        number, data = self.opened(method, end=end, **more)
        self.feed(data)
        return number

    def data(self, number: int, data: bytes, *, end: bool = False) -> None:
        self.feed(frame(DATA, END_STREAM if end else 0, number, data))

    def call(self, method: Any, data: bytes, **more: Any) -> int:
        """A whole request in one piece."""
        number, head = self.opened(method, **more)
        self.feed(head + frame(DATA, END_STREAM, number, data))
        return number

    def allow(self, number: int, more: int) -> None:
        """Give the server a larger window."""
        if number:
            self.answers[number].window += more
        else:
            self.window += more
        self.feed(frame(WINDOW_UPDATE, 0, number, struct.pack(">L", more)))

    def set_initial_window(self, size: int) -> None:
        change, self.initial_window = size - self.initial_window, size
        self._changes.append((change, [*self.answers.values()]))
        self.feed(frame(SETTINGS, 0, 0, settings({INITIAL_WINDOW: size})))

    def reset(self, number: int, code: Http2Code = Http2Code.CANCEL) -> None:
        self.answers[number].left = True
        self.feed(frame(RST_STREAM, 0, number, struct.pack(">L", code)))

    async def settle(self, turns: int = TURNS) -> None:
        """Let the server work, and check what it has sent."""
        for _ in range(turns):
            await asyncio.sleep(0)
        self.parse()

    def parse(self) -> None:
        """Read the frames that the server has sent."""
        data = bytes(self.transport.written[self._parsed :])
        at = 0
        while len(data) - at >= 9:
            size = int.from_bytes(data[at : at + 3])
            kind, flags = data[at + 3], data[at + 4]
            number = int.from_bytes(data[at + 5 : at + 9])
            assert size <= http2_frames.MAX_FRAME, "no frame is larger than every peer takes"
            if at + 9 + size > len(data):
                break
            assert self.goaway is None, "GOAWAY is the last frame"
            self._take(kind, flags, number, data[at + 9 : at + 9 + size])
            at += 9 + size
        self._parsed += at

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == SETTINGS:
            if flags & ACK:
                self._acknowledged()
        elif kind == PING:
            if flags & ACK:
                self.pongs.append(payload)
            else:
                self.pings += 1
        elif kind == GOAWAY:
            self.goaway = Http2Code(int.from_bytes(payload[4:8]))
        elif kind == WINDOW_UPDATE:
            self.allowed[number] += int.from_bytes(payload)
        elif kind == RST_STREAM:
            self.answers[number].reset = Http2Code(int.from_bytes(payload))
        else:
            self._take_response(kind, flags, number, payload)

    def _acknowledged(self) -> None:
        """The server has applied the next of the settings. Until then it need not obey them."""
        self.acks += 1
        change, answers = self._changes.pop(0) if self._changes else (0, [])
        for answer in answers:
            answer.window += change

    def _take_response(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        answer = self.answers[number]
        assert not answer.ended or answer.left, "nothing follows the status"
        if kind == HEADERS:
            assert flags & END_HEADERS
            decoded = self._decoder.decode(payload)
            answer.headers.append({str(name): str(value) for name, value in decoded})
        else:
            assert kind == DATA
            assert answer.headers, "headers come first"
            answer.window -= len(payload)
            self.window -= len(payload)
            assert answer.window >= 0 or answer.left, "the window of the stream was exceeded"
            assert self.window >= 0, "the window of the connection was exceeded"
            answer.data += payload
        answer.ended = bool(flags & END_STREAM)


class Handlers:
    """Methods that need no quorum."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled = 0
        self.sent = 0
        self.waiting: list[asyncio.Future[None]] = []
        self.server = GrpcServer(
            {rpc.PUT: self.put, rpc.LOCK: self.wait, rpc.TXN: self.broken},
            {rpc.KEEP_ALIVE: self.echo, rpc.WATCH: self.endless, rpc.OBSERVE: self.thrice},
        )

    async def put(self, request: Any) -> Any:
        """Answers with the value; a key "x" is refused."""
        if request.key == b"x":
            raise EtcdError(Code.NOT_FOUND, "no such thing: 100 % é")
        return rpc.PUT.response(prev_kv={"key": request.key, "value": request.value})

    async def wait(self, request: Any) -> Any:
        """Waits until it is cancelled or told to end."""
        self.running += 1
        future = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return rpc.LOCK.response(key=b"k")

    async def broken(self, request: Any) -> Any:
        raise ZeroDivisionError("a defect")

    async def echo(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        self.running += 1
        try:
            async for request in requests:
                yield rpc.KEEP_ALIVE.response(ID=request.ID)
        finally:
            self.running -= 1

    async def endless(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Bytes, without end."""
        self.running += 1
        try:
            while True:
                self.sent += 10_000
                yield bytes(10_000)
        finally:
            self.running -= 1

    async def thrice(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        request = await anext(aiter(requests))
        for _ in range(3):
            yield rpc.LEADER.response(kv={"key": request.name})


def renew(number: int) -> bytes:
    return message(rpc.KEEP_ALIVE.request(ID=number).SerializeToString())


def run(work: Callable[[Handlers], Coroutine[Any, Any, None]]) -> None:
    """Run a test, after which no call may be left."""
    failures: list[Any] = []

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        handlers = Handlers()
        async with asyncio.timeout(60):
            await work(handlers)
            await handlers.server.close()
            await asyncio.sleep(0)
        assert not handlers.running
        assert not handlers.server.tasks

    asyncio.run(whole())
    assert not failures, failures


def values(peer: Peer, number: int) -> list[bytes]:
    """What a Put was answered."""
    return [
        rpc.PUT.response.FromString(each).prev_kv.value for each in peer.answers[number].messages
    ]
