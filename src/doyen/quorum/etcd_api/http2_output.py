"""What an HTTP/2 connection sends.

Invariants:

1. The bytes of DATA on a stream, and on all streams together, never exceed what the peer has
   allowed. A window never exceeds 2^31-1, and may become negative only by a change of settings.
2. What waits to be sent is bounded. A stream has at most one message waiting, since its sender
   waits for `drained`. A connection has at most about `HIGH_WATER` bytes in its queue and as many
   in the transport; as long as the peer does not read, streams add nothing. A peer that does not
   read, and sends frames that have to be answered, is disconnected.

All frames of one turn of the loop go out as one write.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from doyen.quorum.etcd_api.http2_frames import (
    DATA,
    END_STREAM,
    FRAME,
    MAX_FRAME,
    MAX_WINDOW,
    WINDOW,
    ConnectionFault,
    Http2Code,
    Patience,
)
from doyen.quorum.etcd_api.http2_streams import OutFrame, Stream

HIGH_WATER: Final = 256 << 10
PATIENCE_PER_MESSAGE: Final = 4
"""What a sent message restores, or a full frame of it. A peer that takes a message in smaller
pieces makes work: for each of its window updates a frame."""


class Output:
    """The frames that wait for the peer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        patience: Patience,
        on_end: Callable[[Stream], None],
    ) -> None:
        """`on_end` is called when the last frame of a stream was handed on."""
        self._loop = loop
        self._patience = patience
        self._on_end = on_end
        self._transport: Any = None
        self._window = WINDOW
        self.head_prefix = b""
        """What has to come before the next header block."""
        self._parts: list[bytes | memoryview] = []
        self._queued = 0
        self._scheduled = False
        self._paused = False
        self._ready: OrderedDict[Stream, None] = OrderedDict()
        """Streams that have something to send, and wait only for the connection."""
        self.closed = False

    # The transport.

    def begin(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(HIGH_WATER)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._pump()

    def close(self, last: bytes) -> None:
        """Send this frame after those that were handed on, and close."""
        self.closed = True
        self._parts.append(last)
        self._flush()
        self._transport.close()

    def lost(self) -> None:
        """The connection has ended."""
        self.closed = True
        self._parts.clear()

    def abort(self) -> None:
        """End the connection at once."""
        self.lost()
        self._transport.abort()

    # Windows of the peer.

    def widen_all(self, more: int) -> None:
        """The peer takes so many more bytes on all streams together."""
        self._window += more
        if self._window > MAX_WINDOW:
            raise ConnectionFault(Http2Code.FLOW_CONTROL_ERROR, "the window is too big")
        self._pump()

    def widen(self, stream: Stream, more: int) -> None:
        """The peer takes so many more bytes on a stream, or fewer."""
        stream.outbound += more
        if stream.out and stream.outbound > 0:
            if self._paused:
                self._ready[stream] = None
            else:
                self._advance(stream)

    # Frames.

    def send(self, stream: Stream, *frames: OutFrame) -> bool:
        """Send frames of a stream as soon as its peer takes them. Returns whether all of them were
        handed on; `stream.drained` waits for the rest."""
        stream.out.extend(frames)
        if self._paused or self.closed:
            self._ready[stream] = None
            return False
        return self._advance(stream)

    def drop(self, stream: Stream) -> None:
        """Send nothing more of a stream."""
        stream.out.clear()
        self._ready.pop(stream, None)
        stream.wake()

    def control(self, data: bytes) -> None:
        """Send a frame that no window bounds."""
        if self.closed:
            return
        self._parts.append(data)
        self._queued += len(data)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        if self._paused and self._transport.get_write_buffer_size() > 2 * HIGH_WATER:
            self.abort()

    def _pump(self) -> None:
        """Send what waits for the connection, one stream after the other."""
        ready = self._ready
        while ready and not self._paused and not self.closed:
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
                room = min(self._window, stream.outbound, MAX_FRAME)
                if room >= size:
                    out.popleft()
                    self._patience.left += PATIENCE_PER_MESSAGE
                elif room <= 0:
                    if stream.outbound > 0:
                        self._ready[stream] = None
                    return False
                else:
                    whole = memoryview(payload)
                    out[0] = kind, flags, whole[room:]
                    payload, size, flags = whole[:room], room, 0
                    self._patience.left += PATIENCE_PER_MESSAGE * size // MAX_FRAME
                self._window -= size
                stream.outbound -= size
            else:
                out.popleft()
                if self.head_prefix:
                    payload, self.head_prefix = self.head_prefix + bytes(payload), b""
                    size = len(payload)
            self._parts.append(FRAME.pack(size >> 8, size & 255, kind, flags, number))
            self._parts.append(payload)
            self._queued += 9 + size
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._flush)
        stream.wake()
        if flags & END_STREAM:
            self._on_end(stream)
        return True

    def _flush(self) -> None:
        self._scheduled = False
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._queued = 0
            self._transport.write(data)
        if self._ready:
            self._pump()
