"""The server's side of an HTTP/2 connection (RFC 9113), over asyncio.

    http2_frames    frames and header blocks that arrive, and the limit on useless ones
    http2_streams   a stream, and what the peer may send
    http2_output    what is sent, within the windows of the peer

`Http2Connection` is the protocol of one connection: it takes frames and keeps the states of
streams. It opens a `Stream` for each request. What is said on a stream is the business of the layer
above (see `grpc_server`), which derives from `Stream`. Nothing is raised out of the protocol: a
fault of the peer ends its stream, or its connection with GOAWAY.

Invariants, beside those of the parts:

1. What a peer is answered depends on the bytes that it sends, never on how they were divided into
   reads.
2. A stream is in `streams` from its first HEADERS until both sides have ended it or one has reset
   it. `Stream.lost` is called once, and only if it did not end in order.
3. Header blocks are decoded in order, also those of streams that are refused.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

from doyen.quorum.etcd_api.http2_frames import (
    ACK,
    CONCURRENT_STREAMS,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME,
    FRAME_SIZE,
    GOAWAY,
    HAS_PRIORITY,
    HEADER_LIST,
    HEADERS,
    INITIAL_WINDOW,
    MAX_FRAME,
    MAX_HEADERS,
    MAX_WINDOW,
    NUMBER,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    TABLE_SIZE,
    WINDOW,
    WINDOW_UPDATE,
    ConnectionFault,
    Header,
    HeaderBlocks,
    Http2Code,
    Patience,
    StreamFault,
    frame,
    settings,
    without_padding,
)
from doyen.quorum.etcd_api.http2_output import Output
from doyen.quorum.etcd_api.http2_streams import CONNECTION_WINDOW, InboundWindows, Stream

MAX_STREAMS: Final = 10_000
"""A call that waits for a lock is a stream, and one client may wait for many."""
SMALL_DATA: Final = 32
"""Smaller frames of data are counted as frames of no use, unless a request ends with them. A
message is seldom as small, and its response makes up for it."""
RESET_STREAMS: Final = 256
"""How many of the streams that this side has reset are remembered. Frames that were under way are
ignored; on other streams that have ended they are faults."""
FIRST_S: Final = 10.0
"""How long a client may take to send the preface and its settings."""
KEEPALIVE_S: Final = 7200.0
ANSWER_S: Final = 20.0
"""A client that was silent for `KEEPALIVE_S` and does not answer a ping for so long has gone. These
are the defaults of etcd."""
LINGER_S: Final = 1.0

_DEFAULT_TABLE: Final = 4096
_EMPTY_TABLE: Final = b"\x20"
"""Sets the size of the dynamic table to 0, at the beginning of a header block."""

GREETING: Final = frame(
    SETTINGS,
    0,
    0,
    settings({CONCURRENT_STREAMS: MAX_STREAMS, HEADER_LIST: MAX_HEADERS}),
) + frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(CONNECTION_WINDOW - WINDOW))


class Liveness:
    """Notices that a client is silent, by one timer."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, ping: Callable[[], None], abort: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._ping = ping
        self._abort = abort
        self.heard = True
        """Something has arrived since the last check."""
        self._timer = loop.call_later(FIRST_S, abort)

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, call)

    def check(self) -> None:
        """Ping the client unless something has arrived. Called at intervals of `KEEPALIVE_S` once
        the client has sent its settings."""
        if self.heard:
            self.heard = False
            self._after(KEEPALIVE_S, self.check)
        else:
            self._ping()
            self._after(ANSWER_S, self._give_up)

    def _give_up(self) -> None:
        if self.heard:
            self.check()
        else:
            self._abort()

    def linger(self) -> None:
        """The connection is being closed; the client may read the rest for a while."""
        self._after(LINGER_S, self._abort)

    def end(self) -> None:
        self._timer.cancel()


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
        self._make_stream = make_stream
        self._on_lost = on_lost
        self.streams: dict[int, Stream] = {}
        self._last = 0
        """The latest stream that the peer has opened."""
        self._reset: OrderedDict[int, None] = OrderedDict()
        self._rest = b""
        self._preface = PREFACE
        """What of the preface has not been received."""
        self._settled = False
        """The peer's first settings have been received."""
        self.initial_window = WINDOW
        """What the peer takes on a new stream."""
        self._patience = Patience(self.loop.time)
        self._headers = HeaderBlocks(interpret)
        self._output = Output(self.loop, self._patience, self._sent)
        self.send = self._output.send
        self.windows = InboundWindows(self._output.control)
        self._life = Liveness(self.loop, self._ping, self.abort)
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
        self._output.begin(transport)
        self._output.control(GREETING)

    def data_received(self, data: bytes) -> None:
        self._life.heard = True
        if self._output.closed:
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
        self._output.lost()
        self._life.end()
        self._drop_all()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._output.pause()

    def resume_writing(self) -> None:
        self._output.resume()

    # The end of a connection.

    def close(self, code: Http2Code = Http2Code.NO_ERROR, text: str = "") -> None:
        """Tell the peer why, and close."""
        if self._output.closed:
            return
        payload = NUMBER.pack(self._last) + NUMBER.pack(code) + text.encode()
        self._output.close(frame(GOAWAY, 0, 0, payload))
        self._drop_all()
        self._life.linger()

    def abort(self) -> None:
        """End it at once."""
        self._output.abort()

    def _ping(self) -> None:
        self._output.control(frame(PING, 0, 0, bytes(8)))

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
        unpack, takes, headers, output = FRAME.unpack_from, self._takes, self._headers, self._output
        while end - at >= 9:
            high, low, kind, flags, number = unpack(data, at)
            size = high << 8 | low
            if size > MAX_FRAME:
                raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, f"a frame has {size} bytes")
            start, stop = at + 9, at + 9 + size
            if stop > end:
                break
            if headers.stream and kind != CONTINUATION:
                raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "a header block has not ended")
            if not self._settled and kind != SETTINGS:
                raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            take = takes.get(kind)
            number &= MAX_WINDOW  # the first bit has no meaning
            if take is None:
                self._patience.charge()
            else:
                try:
                    take(flags, number, data[start:stop])
                except StreamFault as fault:
                    # A reset that the peer has provoked makes as much work as one that it sends.
                    self._patience.charge()
                    self.reset(number, fault.code)
            if output.closed:
                return
            at = stop
        self._rest = data[at:]

    def _check_opened(self, number: int) -> None:
        """Refuse a frame on a stream that the peer has not opened."""
        if not number & 1 or number > self._last:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, f"stream {number} is not open")

    def _take_late(self, number: int) -> None:
        """A frame on a stream that the peer, or this side, has ended."""
        self._check_opened(number)
        if number not in self._reset:
            raise StreamFault(Http2Code.STREAM_CLOSED)
        self._patience.charge()

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self.windows.received(size)
        stream = self.streams.get(number)
        if stream is None or stream.ended:
            self._take_late(number)
            return
        stream.inbound -= size
        if stream.inbound < 0:
            raise StreamFault(Http2Code.FLOW_CONTROL_ERROR)
        if flags & PADDED:
            payload = without_padding(payload)
            self._patience.charge()
            self.windows.allow(stream, size - len(payload))
        if flags & END_STREAM:
            stream.ended = True
        elif size < SMALL_DATA:
            self._patience.charge()
            if not payload:
                return
        stream.received(payload)

    def _take_headers(self, flags: int, number: int, payload: bytes) -> None:
        if not number & 1:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, f"HEADERS on stream {number}")
        if flags & PADDED:
            payload = without_padding(payload)
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "HEADERS without a priority")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._take_block(flags, number, payload)
        else:
            self._headers.begin(flags, number, payload)

    def _take_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if not payload:
            self._patience.charge()
        self._headers.add(number, payload)
        if flags & END_HEADERS:
            first_flags, block = self._headers.end()
            self._take_block(first_flags, number, block)

    def _take_block(self, flags: int, number: int, block: bytes) -> None:
        """A whole header block: that of a request, or its trailers, which have no meaning."""
        head = self._headers.decoded(block)
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
            raise StreamFault(Http2Code.PROTOCOL_ERROR)
        if len(self.streams) >= MAX_STREAMS:
            raise StreamFault(Http2Code.REFUSED_STREAM)
        self.streams[number] = stream = self._make_stream(self, number, head)
        stream.ended = bool(flags & END_STREAM)
        stream.opened()
        if stream.ended and number in self.streams:
            stream.received(b"")

    def _take_priority(self, flags: int, number: int, payload: bytes) -> None:
        self._patience.charge()
        if not number:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "PRIORITY without a stream")
        if len(payload) != 5:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "PRIORITY of the wrong size")

    def _take_reset(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "RST_STREAM of the wrong size")
        self._check_opened(number)
        self._patience.charge()
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
            self._patience.charge()
            return
        if len(payload) % 6:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "SETTINGS of the wrong size")
        # A change of the initial window concerns every stream.
        self._patience.charge(1 + len(payload) // 6 * (1 + len(self.streams) // 64))
        self._output.control(frame(SETTINGS, ACK, 0))
        for name, value in SETTING.iter_unpack(payload):
            self._set(name, value)
        if not self._settled:
            self._settled = True
            self._life.check()

    def _set(self, name: int, value: int) -> None:
        if name == INITIAL_WINDOW:
            if value > MAX_WINDOW:
                raise ConnectionFault(Http2Code.FLOW_CONTROL_ERROR, "the initial window is too big")
            change, self.initial_window = value - self.initial_window, value
            for stream in [*self.streams.values()]:
                if stream.outbound + change > MAX_WINDOW:
                    text = "the window of a stream is too big"
                    raise ConnectionFault(Http2Code.FLOW_CONTROL_ERROR, text)
                self._output.widen(stream, change)
        elif name == FRAME_SIZE:
            if not MAX_FRAME <= value < 1 << 24:
                raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "the frame size is out of range")
            # Larger frames are not used: they would delay other streams.
        elif name == ENABLE_PUSH and value > 1:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        elif name == TABLE_SIZE and value < _DEFAULT_TABLE:
            # The dynamic table is not used for responses. A peer that reduces it has to be told.
            self._output.head_prefix = _EMPTY_TABLE

    def _take_push(self, flags: int, number: int, payload: bytes) -> None:
        raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    def _take_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "PING of the wrong size")
        self._patience.charge()
        if not flags & ACK:
            self._output.control(frame(PING, ACK, 0, payload))

    def _take_goaway(self, flags: int, number: int, payload: bytes) -> None:
        """The peer opens no more streams, and waits for the end of those that are open."""
        if number:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "GOAWAY of the wrong size")
        self._patience.charge()

    def _take_window(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Http2Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE of the wrong size")
        self._patience.charge()
        more = NUMBER.unpack(payload)[0] & MAX_WINDOW
        if not number:
            if not more:
                raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            self._output.widen_all(more)
            return
        stream = self.streams.get(number)
        if stream is None:  # it may have ended while this was under way
            self._check_opened(number)
        elif not more:
            raise StreamFault(Http2Code.PROTOCOL_ERROR)
        elif stream.outbound + more > MAX_WINDOW:
            raise StreamFault(Http2Code.FLOW_CONTROL_ERROR)
        else:
            self._output.widen(stream, more)

    # The end of a stream.

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
        self._output.control(frame(RST_STREAM, 0, number, NUMBER.pack(code)))

    def _sent(self, stream: Stream) -> None:
        """The last frame of a stream was handed on."""
        del self.streams[stream.id]
        self.windows.forget(stream)
        if not stream.ended:
            # The rest of the request is of no use.
            self._send_reset(stream.id, Http2Code.NO_ERROR)

    def _drop(self, stream: Stream) -> None:
        """A stream has ended, and not in order."""
        del self.streams[stream.id]
        self.windows.forget(stream)
        self._output.drop(stream)
        stream.lost()

    def _drop_all(self) -> None:
        self.windows.close()
        for stream in [*self.streams.values()]:
            self._drop(stream)
