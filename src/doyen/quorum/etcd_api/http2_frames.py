"""What is read from an HTTP/2 connection (RFC 9113): frames, header blocks, and the limit on frames
that carry no request.

Imports hpack.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final

from hpack import Decoder
from hpack.exceptions import HPACKError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME: Final = 1 << 14
"""The largest frame that is received or sent: the least that RFC 9113 allows."""
WINDOW: Final = (1 << 16) - 1
"""The window of a stream, which is the default of RFC 9113."""
MAX_WINDOW: Final = (1 << 31) - 1
MAX_HEADERS: Final = 1 << 14
"""Bytes of a header block, and of the headers in it."""
REMEMBERED: Final = 64
REMEMBERED_BYTES: Final = 1 << 10
"""How many header blocks are remembered, and the largest of them."""
PATIENCE: Final = 10_000
PATIENCE_PER_S: Final = 1000

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
TABLE_SIZE, ENABLE_PUSH, CONCURRENT_STREAMS, INITIAL_WINDOW, FRAME_SIZE, HEADER_LIST = range(1, 7)

FRAME: Final = struct.Struct(">HBBBL")
SETTING: Final = struct.Struct(">HL")
NUMBER: Final = struct.Struct(">L")

Header = tuple[bytes, bytes]


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
    return FRAME.pack(size >> 8, size & 255, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """The payload of a SETTINGS frame."""
    return b"".join(SETTING.pack(*each) for each in values.items())


def without_padding(payload: bytes) -> bytes:
    """The payload of a frame with the flag PADDED."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "more padding than the frame has bytes")
    return payload[1 : len(payload) - payload[0]]


class Patience:
    """Counts the frames of a peer that make work and carry no request: resets, pings, settings,
    windows, priorities, very small data, and whatever this side answers with a reset. Time and sent
    responses restore it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.left: float = PATIENCE
        self._now = now
        self._restored_at = now()

    def charge(self, cost: int = 1) -> None:
        """Raises `ConnectionFault` if there were too many."""
        self.left = min(self.left, PATIENCE) - cost
        if self.left < 0:
            now = self._now()
            self.left += (now - self._restored_at) * PATIENCE_PER_S
            self._restored_at = now
            if self.left < 0:
                raise ConnectionFault(Http2Code.ENHANCE_YOUR_CALM, "too many frames of no use")


class HeaderBlocks:
    """The header blocks of one connection, which are decoded in order.

    A block that leaves the dynamic table as it was means the same until the table changes, and is
    remembered as long."""

    def __init__(self, interpret: Callable[[Sequence[Header]], Any]) -> None:
        """`interpret` turns headers into what `decoded` returns."""
        self._interpret = interpret
        self._hpack = Decoder(max_header_list_size=MAX_HEADERS)
        self._remembered: dict[bytes, Any] = {}
        self._block = bytearray()
        self._flags = 0
        self.stream = 0
        """The stream of the block that has not ended; 0 if there is none."""

    def begin(self, flags: int, stream: int, payload: bytes) -> None:
        """The first part of a block that does not end with it."""
        self.stream, self._flags = stream, flags
        self._block[:] = payload

    def add(self, stream: int, payload: bytes) -> None:
        """The next part."""
        if not self.stream or stream != self.stream:
            raise ConnectionFault(Http2Code.PROTOCOL_ERROR, "CONTINUATION of no header block")
        self._block += payload
        if len(self._block) > MAX_HEADERS:
            raise ConnectionFault(Http2Code.ENHANCE_YOUR_CALM, "the header block is too large")

    def end(self) -> tuple[int, bytes]:
        """The whole block, and the flags of its first frame."""
        self.stream, block = 0, bytes(self._block)
        self._block.clear()
        return self._flags, block

    def decoded(self, block: bytes) -> Any:
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
        elif len(block) <= REMEMBERED_BYTES:
            if len(self._remembered) >= REMEMBERED:
                self._remembered.clear()
            self._remembered[block] = head
        return head
