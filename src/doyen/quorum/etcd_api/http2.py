"""The server's side of an HTTP/2 connection (RFC 9113), over asyncio.

`Http2Connection` is the protocol of one connection: frames, header blocks, flow control, limits. It
opens a `Stream` for each request. What is said on a stream is the business of the layer above (see
`grpc_server`), which derives from `Stream`. Nothing is raised out of the protocol: a fault of the
peer ends its stream, or its connection with GOAWAY.

Invariants:

1. What a peer is answered depends on the bytes that it sends, never on how they were divided into
   reads.
2. The bytes of DATA on a stream, and on all streams together, never exceed what the peer has
   allowed. A window never exceeds 2^31-1, and may become negative only by a change of settings.
3. A stream is in `streams` from its first HEADERS until both sides have ended it or one has reset
   it. `Stream.lost` is called once, and only if it did not end in order.
4. What is received and not used yet is bounded. A stream buffers at most `WINDOW` bytes, unless the
   connection has granted it a larger message; grants together are at most `LARGE_BYTES`. The window
   of the whole connection is renewed as data arrives, so that no stream waits for another.
5. What waits to be sent is bounded. A stream has at most one message waiting, since its sender
   waits for `drained`. A connection has at most about `HIGH_WATER` bytes in its queue and as many
   in the transport; as long as the peer does not read, streams add nothing. A peer that does not
   read, and sends frames that have to be answered, is disconnected.
6. Work without requests is bounded: frames that carry none (resets, pings, settings, windows,
   priorities, empty data) use up the patience of the connection, which time and sent responses
   restore.
7. Header blocks are decoded in order, also those of streams that are refused. A block that leaves
   the dynamic table as it was means the same until the table changes, and is remembered as long.

All frames of one turn of the loop go out as one write. Imports hpack.
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final

from hpack import Decoder
from hpack.exceptions import HPACKError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME: Final = 1 << 14
"""The largest frame that is received: the least that RFC 9113 allows."""
WINDOW: Final = (1 << 16) - 1
"""The window of a stream, which is the default of RFC 9113."""
CONNECTION_WINDOW: Final = 1 << 20
LARGE_BYTES: Final = 16 << 20
"""How much the messages of one connection may have together that do not fit into `WINDOW`."""
MAX_WINDOW: Final = (1 << 31) - 1
MAX_STREAMS: Final = 10_000
"""A call that waits for a lock is a stream, and one client may wait for many."""
MAX_HEADERS: Final = 1 << 14
"""Bytes of a header block, and of the headers in it."""
REMEMBERED: Final = 64
"""How many header blocks are remembered."""
RESET_STREAMS: Final = 256
"""How many of the streams that this side has reset are remembered. Frames that were under way are
ignored; on other streams that have ended they are faults."""
HIGH_WATER: Final = 256 << 10
PATIENCE: Final = 10_000
PATIENCE_PER_S: Final = 1000
PATIENCE_PER_DATA: Final = 4
FIRST_S: Final = 10.0
"""How long a client may take to send the preface and its settings."""
KEEPALIVE_S: Final = 7200.0
ANSWER_S: Final = 20.0
"""A client that was silent for `KEEPALIVE_S` and does not answer a ping for so long has gone. These
are the defaults of etcd."""
LINGER_S: Final = 1.0

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
TABLE_SIZE, ENABLE_PUSH, CONCURRENT_STREAMS, INITIAL_WINDOW, FRAME_SIZE, HEADER_LIST = range(1, 7)

_FRAME: Final = struct.Struct(">HBBBL")
_SETTING: Final = struct.Struct(">HL")
_NUMBER: Final = struct.Struct(">L")
_TWO_NUMBERS: Final = struct.Struct(">LL")
_DEFAULT_TABLE: Final = 4096
_EMPTY_TABLE: Final = b"\x20"
"""Sets the size of the dynamic table to 0, at the beginning of a header block."""

Header = tuple[bytes, bytes]
OutFrame = tuple[int, int, bytes | memoryview]
"""Kind, flags and payload of a frame of a stream that is to be sent."""


class Http2Code(IntEnum):
    """Why a stream or a connection was ended."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """The peer has violated the protocol or a limit, and its connection ends."""

    def __init__(self, code: Http2Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFault(Exception):
    """The peer has violated the protocol on one stream, which is reset."""

    def __init__(self, code: Http2Code) -> None:
        super().__init__(code.name)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame in bytes."""
    size = len(payload)
    return _FRAME.pack(size >> 8, size & 255, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """The payload of a SETTINGS frame."""
    return b"".join(_SETTING.pack(*each) for each in values.items())


GREETING: Final = frame(
    SETTINGS,
    0,
    0,
    settings({CONCURRENT_STREAMS: MAX_STREAMS, HEADER_LIST: MAX_HEADERS}),
) + frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(CONNECTION_WINDOW - WINDOW))


class Stream:
    """One request and its response. The layer above implements what happens on it."""

    __slots__ = ("connection", "ended", "granted", "id", "inbound", "out", "outbound", "waiter")

    def __init__(self, connection: Http2Connection, number: int) -> None:
        self.connection = connection
        self.id = number
        self.inbound = WINDOW
        """Bytes that the peer may still send."""
        self.outbound = connection.initial_window
        """Bytes that the peer still takes."""
        self.ended = False
        """The peer has sent everything."""
        self.granted = 0
        """The size of the message that may exceed the window."""
        self.out: deque[OutFrame] = deque()
        self.waiter: asyncio.Future[None] | None = None

    def opened(self) -> None:
        """The headers of the request have arrived."""
        raise NotImplementedError

    def received(self, data: bytes) -> None:
        """Data of the peer. After the last of it, which may be empty, `ended` is true."""
        raise NotImplementedError

    def lost(self) -> None:
        """The stream was reset, or the connection has ended."""
        raise NotImplementedError

    def admitted(self) -> None:
        """The larger message that it asked for is granted."""
        raise NotImplementedError

    async def drained(self) -> None:
        """Wait until everything has been handed on."""
        while self.out:
            self.waiter = self.connection.loop.create_future()
            await self.waiter


class Http2Connection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(
        self,
        interpret: Callable[[Sequence[Header]], Any],
        make_stream: Callable[[Http2Connection, int, Any], Stream],
        on_lost: Callable[[Http2Connection], None],
    ) -> None:
        """`interpret` turns the headers of a request into what `make_stream` needs; None if they
        are malformed. It must depend on nothing else, since its result is remembered."""
        self.loop = asyncio.get_running_loop()
        self._interpret = interpret
        self._make_stream = make_stream
        self._on_lost = on_lost
        self._transport: Any = None
        self.streams: dict[int, Stream] = {}
        self._last = 0
        """The latest stream that the peer has opened."""
        self._reset: OrderedDict[int, None] = OrderedDict()
        self._rest = b""
        self._preface = PREFACE
        """What of the preface has not been received."""
        self._settled = False
        """The peer's first settings have been received."""
        self._heard = True
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

        self._hpack = Decoder(max_header_list_size=MAX_HEADERS)
        self._remembered: dict[bytes, Any] = {}
        self._block = bytearray()
        self._block_of = 0
        """The stream of the header block that has not ended."""
        self._block_flags = 0

        self._inbound = CONNECTION_WINDOW
        self._granted = 0
        self._large: dict[Stream, int] = {}
        """Streams that wait for the grant of a large message, and its size."""
        self._outbound = WINDOW
        self.initial_window = WINDOW
        self._head_prefix = b""
        self._parts: list[bytes | memoryview] = []
        self._queued = 0
        self._scheduled = False
        self._paused = False
        self._ready: OrderedDict[Stream, None] = OrderedDict()
        """Streams that have something to send, and wait only for the connection."""
        self._patience: float = PATIENCE
        self._restored_at = self.loop.time()
        self._takes: dict[int, Callable[[int, int, bytes], None]] = {
            DATA: self._take_data,
            HEADERS: self._take_headers,
            PRIORITY: self._take_priority,
            RST_STREAM: self._take_reset,
            SETTINGS: self._take_settings,
            PUSH_PROMISE: self._take_push,
            PING: self._take_ping,
            GOAWAY: self._take_goaway,
            WINDOW_UPDATE: self._take_window,
            CONTINUATION: self._take_continuation,
        }

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(HIGH_WATER)
        self._timer = self.loop.call_later(FIRST_S, self.abort)
        self._control(GREETING)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._closing:
            return
        try:
            if self._preface:
                data = self._take_preface(data)
            self._take(self._rest + data if self._rest else data)
        except ConnectionFault as fault:
            self.close(fault.code, str(fault))

    def eof_received(self) -> None:
        """Returning None makes the transport close itself."""

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._parts.clear()
        self._drop_all()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    # The end of a connection.

    def close(self, code: Http2Code = Http2Code.NO_ERROR, text: str = "") -> None:
        """Tell the peer why, and close."""
        if self._closing:
            return
        self._closing = True
        payload = _TWO_NUMBERS.pack(self._last, code) + text.encode()
        self._parts.append(frame(GOAWAY, 0, 0, payload))
        self._flush()
        self._transport.close()
        self._drop_all()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(LINGER_S, self.abort)

    def abort(self) -> None:
        """End it at once."""
        self._closing = True
        self._parts.clear()
        self._transport.abort()

    def _check_life(self) -> None:
        if self._heard:
            self._heard = False
            self._timer = self.loop.call_later(KEEPALIVE_S, self._check_life)
        else:
            self._control(frame(PING, 0, 0, bytes(8)))
            self._timer = self.loop.call_later(ANSWER_S, self._give_up)

    def _give_up(self) -> None:
        if self._heard:
            self._check_life()
        else:
            self.abort()

    # Frames that arrive.

    def _take_preface(self, data: bytes) -> bytes:
        expected = self._preface
        some = min(len(data), len(expected))
        if data[:some] != expected[:some]:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "the preface of HTTP/2 is malformed")
        self._preface = expected[some:]
        return data[some:]

    def _take(self, data: bytes) -> None:
        """Process all frames that are complete."""
        at, end = 0, len(data)
        unpack, takes = _FRAME.unpack_from, self._takes
        while end - at >= 9:
            high, low, kind, flags, number = unpack(data, at)
            size = high << 8 | low
            if size > MAX_FRAME:
                raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, f"a frame has {size} bytes")
            start, stop = at + 9, at + 9 + size
            if stop > end:
                break
            if self._block_of and kind != CONTINUATION:
                raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "a header block has not ended")
            if not self._settled and kind != SETTINGS:
                raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            take = takes.get(kind)
            number &= MAX_WINDOW  # the first bit has no meaning
            if take is None:
                self._charge()
            else:
                try:
                    take(flags, number, data[start:stop])
                except StreamFault as fault:
                    self.reset(number, fault.code)
            if self._closing:
                return
            at = stop
        self._rest = data[at:]

    def _charge(self, cost: int = 1) -> None:
        """Count a frame that makes work and carries no request."""
        self._patience = min(self._patience, PATIENCE) - cost
        if self._patience < 0:
            now = self.loop.time()
            self._patience += (now - self._restored_at) * PATIENCE_PER_S
            self._restored_at = now
            if self._patience < 0:
                raise ConnectionFault(Http2Code.ENHANCE_YOUR_CALM, "too many frames of no use")

    def _check_opened(self, number: int) -> None:
        """Refuse a frame on a stream that the peer has not opened."""
        if not number & 1 or number > self._last:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, f"stream {number} is not open")

    def _take_late(self, number: int) -> None:
        """A frame on a stream that the peer, or this side, has ended."""
        self._check_opened(number)
        self._charge()
        if number not in self._reset:
            raise StreamFault(Http2Code.STREAM_CLOSED)

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._inbound -= size
        if self._inbound < 0:
            raise ConnectionFault(Http2Code.FLOW_CONTROL_ERROR, "more data than the window allows")
        if self._inbound <= CONNECTION_WINDOW // 2:
            self._allow(0, CONNECTION_WINDOW - self._inbound)
            self._inbound = CONNECTION_WINDOW
        stream = self.streams.get(number)
        if stream is None or stream.ended:
            self._take_late(number)
            return
        stream.inbound -= size
        if stream.inbound < 0:
            raise StreamFault(Http2Code.FLOW_CONTROL_ERROR)
        if flags & PADDED:
            payload = _without_padding(payload)
            self._charge()
            self.allow(stream, size - len(payload))
        if flags & END_STREAM:
            stream.ended = True
        elif not payload:
            self._charge()
            return
        stream.received(payload)

    def _take_headers(self, flags: int, number: int, payload: bytes) -> None:
        if not number & 1:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, f"HEADERS on stream {number}")
        if flags & PADDED:
            payload = _without_padding(payload)
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "HEADERS without a priority")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._take_block(flags, number, payload)
        else:
            self._block_of, self._block_flags = number, flags
            self._block[:] = payload

    def _take_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if not self._block_of or number != self._block_of:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "CONTINUATION of no header block")
        if not payload:
            self._charge()
        self._block += payload
        if len(self._block) > MAX_HEADERS:
            raise ConnectionFault(Http2Code.ENHANCE_YOUR_CALM, "the header block is too large")
        if flags & END_HEADERS:
            block, self._block_of = bytes(self._block), 0
            self._block.clear()
            self._take_block(self._block_flags, number, block)

    def _take_block(self, flags: int, number: int, block: bytes) -> None:
        """A whole header block: that of a request, or its trailers, which have no meaning."""
        head = self._decoded(block)
        stream = self.streams.get(number)
        if stream is not None:
            if stream.ended:
                raise StreamFault(Http2Code.STREAM_CLOSED)
            if not flags & END_STREAM:
                raise StreamFault(Http2Code.PROTOCOL_ERROR)
            stream.ended = True
            stream.received(b"")
            return
        if number <= self._last:
            self._take_late(number)
            return
        self._last = number
        if head is None:
            self._charge()
            raise StreamFault(Http2Code.PROTOCOL_ERROR)
        if len(self.streams) >= MAX_STREAMS:
            self._charge()
            raise StreamFault(Http2Code.REFUSED_STREAM)
        self.streams[number] = stream = self._make_stream(self, number, head)
        stream.ended = bool(flags & END_STREAM)
        stream.opened()
        if stream.ended and number in self.streams:
            stream.received(b"")

    def _decoded(self, block: bytes) -> Any:
        """What a header block means."""
        found = self._remembered.get(block, self)
        if found is not self:
            return found
        table = self._hpack.header_table
        entries, most = table.dynamic_entries, table.maxsize
        size, first = len(entries), entries[0] if entries else None
        try:
            headers = self._hpack.decode(block, raw=True)
        except HPACKError as error:
            code = Http2Code.COMPRESSION_ERROR
            raise ConnectionFault(code, f"a header block cannot be decoded: {error}") from error
        head = self._interpret(headers)
        # An entry that enters the table is the first, and another object.
        same = len(entries) == size and (not size or entries[0] is first)
        if not same or table.maxsize != most:
            self._remembered.clear()
        else:
            if len(self._remembered) >= REMEMBERED:
                self._remembered.clear()
            self._remembered[block] = head
        return head

    def _take_priority(self, flags: int, number: int, payload: bytes) -> None:
        self._charge()
        if not number:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "PRIORITY without a stream")
        if len(payload) != 5:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "PRIORITY of the wrong size")

    def _take_reset(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "RST_STREAM of the wrong size")
        self._check_opened(number)
        self._charge()
        stream = self.streams.get(number)
        if stream is not None:
            self._drop(stream)

    def _take_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & ACK:
            if payload or not self._settled:
                code = Http2Code.FRAME_SIZE_ERROR if payload else Http2Code.PROTOCOL_ERROR
                raise ConnectionFault(code, "SETTINGS with an ACK out of place")
            self._charge()
            return
        if len(payload) % 6:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "SETTINGS of the wrong size")
        # A change of the initial window concerns every stream.
        self._charge(1 + len(payload) // 6 * (1 + len(self.streams) // 64))
        self._control(frame(SETTINGS, ACK, 0))
        for name, value in _SETTING.iter_unpack(payload):
            self._set(name, value)
        if not self._settled:
            self._settled = True
            if self._timer is not None:
                self._timer.cancel()
            self._check_life()

    def _set(self, name: int, value: int) -> None:
        if name == INITIAL_WINDOW:
            if value > MAX_WINDOW:
                raise ConnectionFault(Http2Code.FLOW_CONTROL_ERROR, "the initial window is too big")
            change, self.initial_window = value - self.initial_window, value
            for stream in [*self.streams.values()]:
                if stream.outbound + change > MAX_WINDOW:
                    text = "the window of a stream is too big"
                    raise ConnectionFault(Http2Code.FLOW_CONTROL_ERROR, text)
                self._widen(stream, change)
        elif name == FRAME_SIZE:
            if not MAX_FRAME <= value < 1 << 24:
                raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "the frame size is out of range")
            # Larger frames are not used: they would delay other streams.
        elif name == ENABLE_PUSH and value > 1:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        elif name == TABLE_SIZE and value < _DEFAULT_TABLE:
            # The dynamic table is not used for responses. A peer that reduces it has to be told.
            self._head_prefix = _EMPTY_TABLE

    def _take_push(self, flags: int, number: int, payload: bytes) -> None:
        raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    def _take_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "PING of the wrong size")
        self._charge()
        if not flags & ACK:
            self._control(frame(PING, ACK, 0, payload))

    def _take_goaway(self, flags: int, number: int, payload: bytes) -> None:
        """The peer opens no more streams, and waits for the end of those that are open."""
        if number:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "GOAWAY of the wrong size")
        self._charge()

    def _take_window(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE of the wrong size")
        self._charge()
        more = _NUMBER.unpack(payload)[0] & MAX_WINDOW
        if not number:
            if not more:
                raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            self._outbound += more
            if self._outbound > MAX_WINDOW:
                raise ConnectionFault(Http2Code.FLOW_CONTROL_ERROR, "the window is too big")
            self._pump()
            return
        stream = self.streams.get(number)
        if stream is None:  # it may have ended while this was under way
            self._check_opened(number)
        elif not more:
            raise StreamFault(Http2Code.PROTOCOL_ERROR)
        else:
            self._widen(stream, more)

    # What streams receive.

    def allow(self, stream: Stream, more: int) -> None:
        """Let the peer send so many more bytes on a stream."""
        if not stream.ended:
            stream.inbound += more
            self._allow(stream.id, more)

    def _allow(self, number: int, more: int) -> None:
        self._control(frame(WINDOW_UPDATE, 0, number, _NUMBER.pack(more)))

    def grant(self, stream: Stream, size: int) -> None:
        """Call `stream.admitted` when there is room for a message of this size, which is larger
        than the window."""
        self._large[stream] = size
        self._grant()

    def ungrant(self, stream: Stream) -> None:
        """The large message has been used."""
        self._granted -= stream.granted
        stream.granted = 0
        self._grant()

    def _grant(self) -> None:
        while self._large:
            stream, size = next(iter(self._large.items()))
            if self._granted and self._granted + size > LARGE_BYTES:
                return
            del self._large[stream]
            self._granted += size
            stream.granted = size
            stream.admitted()

    # What streams send.

    def send(self, stream: Stream, *frames: OutFrame) -> bool:
        """Send frames of a stream as soon as its peer takes them. Returns whether all of them were
        handed on; `stream.drained` waits for the rest."""
        stream.out.extend(frames)
        if self._paused or self._closing:
            self._ready[stream] = None
            return False
        return self._advance(stream)

    def reset(self, number: int, code: Http2Code) -> None:
        """End a stream at once."""
        self._send_reset(number, code)
        stream = self.streams.get(number)
        if stream is not None:
            self._drop(stream)

    def _send_reset(self, number: int, code: Http2Code) -> None:
        self._reset[number] = None
        if len(self._reset) > RESET_STREAMS:
            self._reset.popitem(last=False)
        self._control(frame(RST_STREAM, 0, number, _NUMBER.pack(code)))

    def _drop(self, stream: Stream) -> None:
        """A stream has ended, and not in order."""
        self._forget(stream)
        stream.out.clear()
        self._ready.pop(stream, None)
        _wake(stream)
        stream.lost()

    def _drop_all(self) -> None:
        self._large.clear()
        for stream in [*self.streams.values()]:
            self._drop(stream)

    def _forget(self, stream: Stream) -> None:
        del self.streams[stream.id]
        self._large.pop(stream, None)
        if stream.granted:
            self.ungrant(stream)

    def _widen(self, stream: Stream, more: int) -> None:
        """The peer takes so many more bytes on a stream, or fewer."""
        stream.outbound += more
        if stream.outbound > MAX_WINDOW:
            self.reset(stream.id, Http2Code.FLOW_CONTROL_ERROR)
        elif stream.out and stream.outbound > 0:
            if self._paused:
                self._ready[stream] = None
            else:
                self._advance(stream)

    def _pump(self) -> None:
        """Send what waits for the connection, one stream after the other."""
        ready = self._ready
        while ready and not self._paused and not self._closing:
            stream, _ = ready.popitem(last=False)
            self._advance(stream)
            if stream in ready:  # the window of the connection is used up, or its queue is full
                return

    def _advance(self, stream: Stream) -> bool:
        """Hand on what the peer takes now. Returns whether that was everything."""
        out, number, flags = stream.out, stream.id, 0
        while out:
            if self._queued >= HIGH_WATER:
                self._ready[stream] = None
                return False
            kind, flags, payload = out[0]
            size = len(payload)
            if kind == DATA:
                room = min(self._outbound, stream.outbound, MAX_FRAME)
                if room >= size:
                    out.popleft()
                elif room <= 0:
                    if stream.outbound > 0:
                        self._ready[stream] = None
                    return False
                else:
                    whole = memoryview(payload)
                    out[0] = kind, flags, whole[room:]
                    payload, size, flags = whole[:room], room, 0
                self._outbound -= size
                stream.outbound -= size
                self._patience += PATIENCE_PER_DATA
            else:
                out.popleft()
                if self._head_prefix:
                    payload, self._head_prefix = self._head_prefix + bytes(payload), b""
                    size = len(payload)
            self._parts.append(_FRAME.pack(size >> 8, size & 255, kind, flags, number))
            self._parts.append(payload)
            self._queued += 9 + size
            if not self._scheduled:
                self._scheduled = True
                self.loop.call_soon(self._flush)
        _wake(stream)
        if flags & END_STREAM:
            self._forget(stream)
            if not stream.ended:
                # The rest of the request is of no use.
                self._send_reset(number, Http2Code.NO_ERROR)
        return True

    def _control(self, data: bytes) -> None:
        """Send a frame that no window bounds."""
        if self._closing:
            return
        self._parts.append(data)
        self._queued += len(data)
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._flush)
        if self._paused and self._transport.get_write_buffer_size() > 2 * HIGH_WATER:
            self.abort()

    def _flush(self) -> None:
        self._scheduled = False
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._queued = 0
            self._transport.write(data)
        if self._ready:
            self._pump()


def _wake(stream: Stream) -> None:
    if stream.waiter is not None:
        if not stream.waiter.done():
            stream.waiter.set_result(None)
        stream.waiter = None


def _without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "more padding than the frame has bytes")
    return payload[1 : len(payload) - payload[0]]
