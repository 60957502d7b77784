"""The streams of an HTTP/2 connection, and how much its peer may send on them.

Invariant: what is received and not used yet is bounded. A stream buffers at most `WINDOW` bytes,
unless the connection has granted it a larger message; grants together are at most `LARGE_BYTES`.
The window of the whole connection is renewed as data arrives, so that no stream waits for another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from doyen.quorum.etcd_api.http2_frames import (
    NUMBER,
    WINDOW,
    WINDOW_UPDATE,
    ConnectionFault,
    Http2Code,
    frame,
)

if TYPE_CHECKING:
    from doyen.quorum.etcd_api.http2 import Http2Connection

CONNECTION_WINDOW: Final = 1 << 20
LARGE_BYTES: Final = 16 << 20
"""How much the messages of one connection may have together that do not fit into `WINDOW`."""

OutFrame = tuple[int, int, bytes | memoryview]
"""Kind, flags and payload of a frame of a stream that is to be sent."""


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

    def wake(self) -> None:
        """Let `drained` look again."""
        if self.waiter is not None:
            if not self.waiter.done():
                self.waiter.set_result(None)
            self.waiter = None


class InboundWindows:
    """What the peer may send: on all streams together, and on each."""

    def __init__(self, control: Callable[[bytes], None]) -> None:
        """`control` sends a frame."""
        self._control = control
        self._left = CONNECTION_WINDOW
        self._granted = 0
        self._large: dict[Stream, int] = {}
        """Streams that wait for the grant of a large message, and its size."""

    def received(self, size: int) -> None:
        """So many bytes of DATA, on any stream."""
        self._left -= size
        if self._left < 0:
            raise ConnectionFault(Http2Code.FLOW_CONTROL_ERROR, "more data than the window allows")
        if self._left <= CONNECTION_WINDOW // 2:
            self._update(0, CONNECTION_WINDOW - self._left)
            self._left = CONNECTION_WINDOW

    def allow(self, stream: Stream, more: int) -> None:
        """Let the peer send so many more bytes on a stream."""
        if not stream.ended:
            stream.inbound += more
            self._update(stream.id, more)

    def _update(self, number: int, more: int) -> None:
        self._control(frame(WINDOW_UPDATE, 0, number, NUMBER.pack(more)))

    def grant(self, stream: Stream, size: int) -> None:
        """Call `stream.admitted` when there is room for a message of this size, which is larger
        than the window."""
        self._large[stream] = size
        self._grant()

    def used(self, stream: Stream) -> None:
        """The large message has been used, or will not be."""
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

    def forget(self, stream: Stream) -> None:
        """A stream has ended."""
        self._large.pop(stream, None)
        if stream.granted:
            self.used(stream)

    def close(self) -> None:
        """Grant nothing more."""
        self._large.clear()
