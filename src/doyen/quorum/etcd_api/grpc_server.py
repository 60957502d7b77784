"""The API over gRPC: calls as streams of HTTP/2.

A request is `HEADERS`, then messages in `DATA`, each behind a flag and its length; a response is
the same, and ends with a status in a second `HEADERS`. Each call has a task, in which its handler
runs. The task is cancelled when the client resets the stream, when its deadline has passed, and
when the connection ends. An error is answered at once; the rest of the request is ignored then.
Messages of clients may be compressed with gzip or deflate; responses are not.

Invariants, beside those of `http2`:

1. Exactly one status is sent for a call, unless the client has left, and nothing after it.
2. A handler of one message is called when the request has ended. A handler of a stream is given the
   next message when it asks for it, and is asked for the next response when the one before has been
   handed on. Nothing is queued on behalf of a client that does not read.
3. A compressed message is decompressed when its handler takes it, to at most `MAX_REQUEST` bytes.
"""

from __future__ import annotations

import asyncio
import re
import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple
from urllib.parse import quote_from_bytes

from google.protobuf.message import DecodeError

from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.errors import STOPPED, Code, EtcdError, unexpected
from doyen.quorum.etcd_api.http2 import Http2Connection
from doyen.quorum.etcd_api.http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    WINDOW,
    Header,
)
from doyen.quorum.etcd_api.http2_streams import Stream
from doyen.quorum.etcd_api.service import Streaming, Unary

MAX_REQUEST: Final = 2 << 20
"""The keyspace refuses requests above 1 MiB; a larger one ends here."""
MAX_TEXT: Final = 2048
"""Bytes of the text of an error. Each may take three when it is sent, and gRPC refuses responses
with more than 8 KiB of headers."""
LONGEST_S: Final = 1e6
"""A deadline that is further away has no timer."""
CONNECTION_HEADERS: Final = {
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"transfer-encoding",
    b"upgrade",
}
UNITS_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
GRPC: Final = re.compile(rb"application/grpc(?:[+;].*)?")
COMPRESSIONS: Final = {b"gzip", b"deflate"}
EITHER_FORMAT: Final = 32 + zlib.MAX_WBITS
"""zlib recognises which of the two it is by the first bytes."""
_PREFIX: Final = struct.Struct(">BL")
_END: Final = END_HEADERS | END_STREAM


def _integer(number: int, bits: int, first: int) -> bytes:
    """An integer of HPACK, in the last bits of a first byte."""
    most = (1 << bits) - 1
    if number < most:
        return bytes([first | number])
    number -= most
    more = bytearray([first | most])
    while number >= 128:
        more.append(number & 127 | 128)
        number >>= 7
    more.append(number)
    return bytes(more)


def header(name: bytes, value: bytes) -> bytes:
    """A header without use of HPACK's tables."""
    return b"".join((b"\0", _integer(len(name), 7, 0), name, _integer(len(value), 7, 0), value))


_OK: Final = b"\x88"  # ":status: 200" in HPACK's static table
HEAD: Final = _OK + header(b"content-type", b"application/grpc")
"""The headers of a response that has messages."""
SUCCESS: Final = header(b"grpc-status", b"0")
ACCEPTED: Final = header(b"grpc-accept-encoding", b"identity,deflate,gzip")


def trailers(code: int, text: str) -> bytes:
    """The status of a call."""
    message = text.encode(errors="replace")[:MAX_TEXT]
    printable = quote_from_bytes(message, safe=_PRINTABLE).encode()
    return header(b"grpc-status", b"%d" % code) + header(b"grpc-message", printable)


_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class _Method(NamedTuple):
    """A method that is offered."""

    parse: Callable[[bytes], Any]
    unary: Unary | None
    streaming: Streaming | None
    takes_stream: bool = False


class _Head(NamedTuple):
    """What the headers of a request say."""

    method: _Method | None
    timeout_s: float | None = None
    encoding: bytes = b""
    refusal: bytes = b""
    """The headers of the response, if there is no more to it."""


class GrpcServer:
    """Serves methods on any number of connections. Other methods are not implemented."""

    def __init__(
        self, unary: Mapping[rpc.EtcdMethod, Unary], streaming: Mapping[rpc.EtcdMethod, Streaming]
    ) -> None:
        """Handlers of streams may return messages or, if that is what they have, their bytes."""
        self._methods: dict[bytes, _Method] = {}
        for method, call in unary.items():
            self._methods[method.path.encode()] = _Method(method.request.FromString, call, None)
        for method, stream in streaming.items():
            self._methods[method.path.encode()] = _Method(
                method.request.FromString, None, stream, method.takes_stream
            )
        self._services = {path.split(b"/")[1] for path in self._methods}
        self._connections: dict[Http2Connection, Callable[[], None]] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def connection(self, on_lost: Callable[[], None]) -> Http2Connection:
        """The protocol of a new connection."""
        connection = Http2Connection(self._interpret, self._call, self._lost)
        self._connections[connection] = on_lost
        return connection

    async def close(self) -> None:
        """End all calls and connections."""
        connections = [*self._connections]
        for connection in connections:
            for call in [*connection.streams.values()]:
                assert isinstance(call, _Call)
                call.end(*STOPPED)
            connection.close()
        if self.tasks:
            await asyncio.wait(self.tasks)
        await asyncio.sleep(0)  # in which the loop writes
        for connection in connections:
            connection.abort()

    def _lost(self, connection: Http2Connection) -> None:
        self._connections.pop(connection)()

    def _call(self, connection: Http2Connection, number: int, head: _Head) -> _Call:
        if head.method is not None and head.method.unary is None:
            return _StreamCall(self, connection, number, head)
        return _UnaryCall(self, connection, number, head)

    def _interpret(self, headers: Sequence[Header]) -> _Head | None:
        """Check the headers of a request. Returns None if they are malformed."""
        fields: dict[bytes, bytes] = {}
        regular = False
        for name, value in headers:
            pseudo = name.startswith(b":")
            flawed = not name or name != name.lower() or name in CONNECTION_HEADERS
            if flawed or (pseudo and (regular or name in fields)) or _has_breaks(value):
                return None
            regular = regular or not pseudo
            fields[name] = value
        pseudos = {name for name in fields if name.startswith(b":")}
        needed = {b":method", b":scheme", b":path"}
        if not needed <= pseudos <= needed | {b":authority"}:
            return None
        if fields.get(b"te", b"trailers") != b"trailers":
            return None
        return self._head(fields)

    def _head(self, fields: Mapping[bytes, bytes]) -> _Head:
        if fields[b":method"] != b"POST":
            return _Head(None, refusal=header(b":status", b"405"))
        if not GRPC.fullmatch(fields.get(b"content-type", b"")):
            return _Head(None, refusal=header(b":status", b"415"))
        if b"te" not in fields:
            text = "the header `te: trailers` is missing; a proxy may have removed it"
            return _refused(Code.INTERNAL, text)
        timeout_s = None
        if (given := fields.get(b"grpc-timeout")) is not None:
            found = TIMEOUT.fullmatch(given)
            if found is None:
                return _refused(Code.INTERNAL, f"malformed grpc-timeout: {given!r}")
            timeout_s = int(found[1]) * UNITS_S[found[2]]
        path = fields[b":path"]
        method = self._methods.get(path)
        if method is None:
            service, _, name = path.lstrip(b"/").decode("latin-1").rpartition("/")
            known = service.encode("latin-1") in self._services
            what = f"method {name} for service {service}" if known else f"service {service}"
            return _refused(Code.UNIMPLEMENTED, f"unknown {what}")
        return _Head(method, timeout_s, fields.get(b"grpc-encoding", b"identity"))


def _has_breaks(value: bytes) -> bool:
    return b"\0" in value or b"\r" in value or b"\n" in value


def _refused(code: Code, text: str) -> _Head:
    return _Head(None, refusal=HEAD + trailers(code, text))


class _Call(Stream):
    """A call: its messages, its deadline, its status."""

    __slots__ = ("_answering", "_buffer", "_head", "_server", "_task", "_timer", "over")

    def __init__(
        self, server: GrpcServer, connection: Http2Connection, number: int, head: _Head
    ) -> None:
        super().__init__(connection, number)
        self._server = server
        self._head = head
        self._buffer = bytearray()
        """The beginning of a message that is not complete."""
        self._answering = False
        """The headers of the response have been sent."""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.over = False
        """Its status was sent, or the client has left."""

    def opened(self) -> None:
        head = self._head
        if head.refusal:
            self.over = True
            self.connection.send(self, (HEADERS, _END, head.refusal))
            return
        if head.timeout_s is not None and head.timeout_s < LONGEST_S:
            self._timer = self.connection.loop.call_later(head.timeout_s, self._expire)

    def _expire(self) -> None:
        self.end(Code.DEADLINE_EXCEEDED, "context deadline exceeded")

    # What arrives.

    def received(self, data: bytes) -> None:
        if self.over:
            return
        buffer = self._buffer
        whole: bytes | bytearray = data
        if buffer:
            buffer += data
            whole = buffer
        at, end = 0, len(whole)
        while end - at >= 5:
            flag, size = _PREFIX.unpack_from(whole, at)
            if (flag or size > MAX_REQUEST) and self._refuse(flag, size):
                return
            stop = at + 5 + size
            if stop > end:
                break
            self.message(flag, bytes(whole[at + 5 : stop]))
            if self.over:
                return
            at = stop
        if whole is buffer:
            del buffer[:at]
        elif at < end:
            buffer += memoryview(whole)[at:]
        if self.ended:
            self.request_ended()
        elif len(buffer) >= 5 and not self.granted:
            size = 5 + _PREFIX.unpack_from(buffer)[1]
            if size > WINDOW:
                self.connection.windows.grant(self, size)

    def admitted(self) -> None:
        more = self.granted - len(self._buffer) - self.inbound
        if more > 0:
            self.connection.windows.allow(self, more)

    def _refuse(self, flag: int, size: int) -> bool:
        """Refuse a message that is too large, or compressed in an unknown way. Returns whether it
        is."""
        encoding = self._head.encoding
        if size > MAX_REQUEST:
            text = f"SERVER: Received message larger than max ({size} vs. {MAX_REQUEST})"
            self.end(Code.RESOURCE_EXHAUSTED, text)
        elif flag == 1 and encoding in COMPRESSIONS:
            return False
        elif flag == 1 and encoding != b"identity":
            name = encoding.decode("latin-1")
            text = f'grpc: Decompressor is not installed for grpc-encoding "{name}"'
            self.end(Code.UNIMPLEMENTED, text, ACCEPTED)
        else:
            text = "grpc: compressed flag set with identity or empty encoding"
            self.end(Code.INTERNAL, text)
        return True

    def message(self, flag: int, data: bytes) -> None:
        """One message of the request. The flag says whether it is compressed."""
        raise NotImplementedError

    def request_ended(self) -> None:
        """The client has sent everything."""
        raise NotImplementedError

    def _parsed(self, flag: int, data: bytes) -> Any:
        assert self._head.method is not None
        try:
            return self._head.method.parse(_decompressed(data) if flag else data)
        except DecodeError as error:
            text = f"grpc: error unmarshalling request: {error}"
            raise EtcdError(Code.INTERNAL, text) from error

    # The handler.

    def _start(self) -> None:
        self._task = task = self.connection.loop.create_task(self._run())
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _run(self) -> None:
        try:
            await self.serve()
        except EtcdError as error:
            self.end(error.code, error.text)
        except asyncio.CancelledError:
            self.end(*STOPPED)
            raise
        except Exception as error:  # noqa: BLE001 - the client has to be answered
            answer = unexpected(error)
            self.end(answer.code, answer.text)

    async def serve(self) -> None:
        """Call the handler, and send what it answers."""
        raise NotImplementedError

    # What is answered.

    def end(self, code: int, text: str, more: bytes = b"") -> None:
        """Send the status, and end the handler if it runs."""
        if not self.over:
            head = b"" if self._answering else HEAD
            status = trailers(code, text) if code else SUCCESS
            self.stop()
            self.connection.send(self, (HEADERS, _END, head + more + status))

    def stop(self) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def lost(self) -> None:
        if not self.over:
            self.stop()


def _decompressed(data: bytes) -> bytes:
    decompressor = zlib.decompressobj(EITHER_FORMAT)
    try:
        plain = decompressor.decompress(data, MAX_REQUEST + 1)
    except zlib.error as error:
        text = f"grpc: failed to decompress the received message: {error}"
        raise EtcdError(Code.INTERNAL, text) from error
    if len(plain) > MAX_REQUEST:
        text = f"SERVER: Received message after decompression larger than max ({MAX_REQUEST})"
        raise EtcdError(Code.RESOURCE_EXHAUSTED, text)
    if not decompressor.eof or decompressor.unused_data:
        text = "grpc: failed to decompress the received message: it does not end with its data"
        raise EtcdError(Code.INTERNAL, text)
    return plain


class _UnaryCall(_Call):
    """One message, one response."""

    __slots__ = ("_request",)

    _request: tuple[int, bytes] | None

    def opened(self) -> None:
        self._request = None
        super().opened()

    def message(self, flag: int, data: bytes) -> None:
        if self._request is not None:
            self.end(Code.INTERNAL, "the request has more than one message")
        self._request = flag, data

    def request_ended(self) -> None:
        if self._request is None or self._buffer:
            self.end(Code.INTERNAL, "the request ended before its message")
        else:
            self._start()

    async def serve(self) -> None:
        method, request = self._head.method, self._request
        assert method is not None
        assert method.unary is not None
        assert request is not None
        self._request = None
        answer = (await method.unary(self._parsed(*request))).SerializeToString()
        if not self.over:
            self.over = True
            if self._timer is not None:
                self._timer.cancel()
            self.connection.send(
                self,
                (HEADERS, END_HEADERS, HEAD),
                (DATA, 0, _PREFIX.pack(0, len(answer)) + answer),
                (HEADERS, _END, SUCCESS),
            )


class _StreamCall(_Call):
    """Responses as a stream, to a stream of requests or to one. It is the iterator of requests that
    its handler is given."""

    __slots__ = ("_asking", "_messages", "_untaken")

    def opened(self) -> None:
        self._messages: deque[tuple[int, bytes]] = deque()
        self._untaken = 0
        """Bytes of messages that the handler has not taken."""
        self._asking: asyncio.Future[None] | None = None
        super().opened()
        method = self._head.method
        assert method is not None
        if method.takes_stream and not self.over:
            self._start()

    def message(self, flag: int, data: bytes) -> None:
        self._messages.append((flag, data))
        self._untaken += 5 + len(data)
        self._notify()

    def request_ended(self) -> None:
        if self._buffer:
            self.end(Code.INTERNAL, "the request ended within a message")
        elif self._task is not None:
            self._notify()
        elif not self._messages:
            self.end(Code.INTERNAL, "the request ended before its message")
        else:
            self._start()

    def _notify(self) -> None:
        if self._asking is not None and not self._asking.done():
            self._asking.set_result(None)

    def __aiter__(self) -> _StreamCall:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self.ended:
                raise StopAsyncIteration
            self._asking = self.connection.loop.create_future()
            await self._asking
        flag, data = self._messages.popleft()
        self._untaken -= 5 + len(data)
        windows = self.connection.windows
        if self.granted and 5 + len(data) > WINDOW:
            windows.used(self)
        room = WINDOW - self._untaken - len(self._buffer)
        if room - self.inbound > (0 if self._buffer else WINDOW // 2):
            windows.allow(self, room - self.inbound)
        return self._parsed(flag, data)

    async def serve(self) -> None:
        method = self._head.method
        assert method is not None
        assert method.streaming is not None
        async with aclosing(method.streaming(self)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                if self.over:
                    break
                data = answer if type(answer) is bytes else answer.SerializeToString()
                if not self._send(data):
                    await self.drained()
        self.end(0, "")

    def _send(self, data: bytes) -> bool:
        """Returns whether it was handed on at once."""
        message = DATA, 0, _PREFIX.pack(0, len(data)) + data
        if self._answering:
            return self.connection.send(self, message)
        self._answering = True
        return self.connection.send(self, (HEADERS, END_HEADERS, HEAD), message)
