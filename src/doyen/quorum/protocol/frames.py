"""Framing: how bytes on a connection are cut into messages, and why connections are closed.

A frame is a length (4 bytes, big-endian, counting what follows), a kind (1 byte) and a payload,
usually msgpack. Kinds below `FIRST_FREE` belong to the protocol itself; the others belong to the
owner of the connection. No frame is longer than `MAX_FRAME`, and no frame of the handshake is
longer than `MAX_GREETING`. The first byte of a connection is therefore 0, which distinguishes it
from an HTTP request.

Imports the error tree only. Performs no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from struct import Struct as Layout

from doyen.errors import StoreError

MAX_FRAME = 8 << 20
MAX_GREETING = 4096
FIRST_FREE = 16
NOT_FOUNDED = "the cluster has not been founded"
"""Begins the reason of a node that refuses clients because it waits for other founders."""

_HEADER = Layout(">IB")
HEADER_SIZE = _HEADER.size
pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from


class FrameKind(IntEnum):
    """The kinds of frame that belong to the protocol itself."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSAL = 5
    PING = 6
    PONG = 7


class CloseReason(StrEnum):
    """Why a connection was refused or closed. The values are also the labels of the metrics."""

    GARBAGE = "garbage"
    TOO_LARGE = "too-large"
    MALFORMED = "malformed"
    OUT_OF_TURN = "out-of-turn"
    VERSION = "version"
    CLUSTER = "cluster"
    NODE = "node"
    DUPLICATE = "duplicate"
    SECRET = "secret"
    ROLE = "role"
    MEMBER = "member"
    TLS = "tls"
    CROWDED = "crowded"
    DEADLINE = "deadline"
    NOT_SERVING = "not-serving"
    SILENT = "silent"
    OVERFLOW = "overflow"


class FrameError(Exception):
    """The received bytes violate the protocol. The connection has to be closed."""

    def __init__(self, reason: CloseReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ConnectionRefused(StoreError):
    """The handshake failed: an identity, a credential or a version does not match, or the server
    is at a limit."""

    def __init__(self, reason: CloseReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason

    @property
    def lasting(self) -> bool:
        """Whether a retry is useless until a configuration is changed."""
        return self.reason not in {
            CloseReason.CROWDED,
            CloseReason.DEADLINE,
            CloseReason.NOT_SERVING,
            CloseReason.DUPLICATE,
        }


def frame(kind: int, *parts: bytes) -> bytes:
    """Encode one frame. Its size is not checked."""
    return b"".join((pack_header(1 + sum(map(len, parts)), kind), *parts))


class FrameDecoder:
    """Cuts a stream of bytes into frames, however the bytes are split."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.control: list[tuple[int, bytes]] = []
        """Received frames of the protocol's own kinds, in order. The caller removes them."""
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 0

    def feed(self, data: bytes, most: int = 1 << 30) -> Sequence[tuple[int, bytes]]:
        """Add received bytes and return the complete frames of the owner's kinds. At most `most`
        frames are decoded; the next call decodes the rest. Raises `FrameError` as soon as an
        invalid length is seen."""
        if self._parts:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return ()
            data = b"".join(self._parts)
            self._parts.clear()
        frames: list[tuple[int, bytes]] = []
        at, end, need, limit = 0, len(data), 0, self.limit
        while most and end - at >= HEADER_SIZE:
            length, kind = _unpack_header(data, at)
            if not 0 < length <= limit:
                raise self._invalid(length)
            stop = at + 4 + length
            if stop > end:
                need = 4 + length
                break
            (frames if kind >= FIRST_FREE else self.control).append((kind, data[at + 5 : stop]))
            at = stop
            most -= 1
        if at < end:
            self._parts.append(data[at:] if at else data)
            self._have, self._need = end - at, need
        return frames

    def _invalid(self, length: int) -> FrameError:
        if not length:
            return FrameError(CloseReason.MALFORMED, "a frame has length 0")
        return FrameError(
            CloseReason.TOO_LARGE, f"a frame has {length} bytes, where {self.limit} are allowed"
        )
