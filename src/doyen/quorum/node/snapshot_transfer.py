"""Sends a snapshot to a peer in chunks, with flow control.

The receiver grants credit for what it has taken, so at most `WINDOW` bytes of a snapshot are under
way, and other messages wait behind no more than that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from struct import Struct as Layout

from doyen.errors import StoreUnavailable, StoreUnusable
from doyen.quorum.protocol.connection import FrameConnection
from doyen.quorum.protocol.frames import FIRST_FREE, MAX_FRAME, CloseReason, FrameError

CREDIT = FIRST_FREE + 5
CREDIT_LAYOUT = Layout(">QI")
CHUNK_SIZE = 32 << 10
WINDOW = 256 << 10
MAX_PIECE = MAX_FRAME
MORE, WHOLE, LAST = 0, 1, 2
"""What a chunk ends: nothing, a piece, or the snapshot."""


def cut_into_chunks(piece: bytes) -> list[tuple[bytes, int]]:
    """Each chunk, and what it ends: nothing or the piece."""
    if len(piece) > MAX_PIECE:
        raise StoreUnusable(f"a piece of a snapshot of {len(piece)} bytes is too large")
    starts = range(0, max(len(piece), 1), CHUNK_SIZE)
    return [(piece[at : at + CHUNK_SIZE], WHOLE if at == starts[-1] else MORE) for at in starts]


class OutgoingSnapshot:
    """A snapshot that is sent, and how much of it may be sent now."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._left = WINDOW
        self._more = asyncio.Event()

    async def room(self, size: int) -> None:
        while self._left < size and not self.outcome.done():
            self._more.clear()
            await self._more.wait()
        if self.outcome.done():
            raise StoreUnavailable("the peer accepts no more of the snapshot")
        self._left -= size

    def credit(self, size: int) -> None:
        self._left += size
        self._more.set()

    def end(self, ok: bool) -> None:
        if not self.outcome.done():
            self.outcome.set_result(ok)
        self._more.set()


class IncomingSnapshot:
    """A snapshot that is received, chunk by chunk.

    Credit is granted while no whole piece waits to be taken, so at most one piece and a window are
    held in memory.
    """

    def __init__(self, connection: FrameConnection, number: int) -> None:
        self.number = number
        self._connection = connection
        self._part: list[bytes] = []
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._owed = 0
        self._whole = False
        self._why = ""
        self._more = asyncio.Event()

    def take(self, data: bytes, ends: int) -> None:
        self._held += len(data)
        self._owed += len(data)
        if self._held > MAX_PIECE + WINDOW:
            raise FrameError(CloseReason.OVERFLOW, "sent more of a snapshot than it had credit for")
        if ends == LAST:
            self._whole = True
            self._more.set()
            return
        self._part.append(data)
        if ends == WHOLE:
            self._pieces.append(b"".join(self._part))
            self._part.clear()
            self._more.set()
        elif not self._pieces:
            self._credit()

    def _credit(self) -> None:
        if self._owed:
            self._connection.send(CREDIT, CREDIT_LAYOUT.pack(self.number, self._owed))
            self._owed = 0

    def end(self, why: str) -> None:
        self._why = why
        self._more.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._held -= len(piece)
                if not self._pieces:
                    self._credit()
                yield piece
            if self._why:
                raise StoreUnavailable(f"the snapshot is incomplete: {self._why}")
            if self._whole:
                return
            self._more.clear()
            await self._more.wait()
