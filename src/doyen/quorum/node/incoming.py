"""The connection that a peer has dialled: its messages, questions and snapshots to this node."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import MsgspecError

from doyen.errors import DoyenError
from doyen.quorum.node.peer_frames import (
    ANSWER,
    CHUNK,
    CHUNK_LAYOUT,
    FOUNDED,
    MESSAGE,
    QUESTION,
    STORED,
    STREAM,
    UNDECODABLE,
    SnapshotHead,
    decode_head,
    not_a_message,
)
from doyen.quorum.node.snapshot_transfer import IncomingSnapshot
from doyen.quorum.protocol.connection import End, FrameConnection
from doyen.quorum.protocol.frames import CloseReason, FrameError

if TYPE_CHECKING:
    from doyen.quorum.node.peers import Peers

__all__ = ["IncomingPeer"]

log = logging.getLogger("doyen")


class IncomingPeer:
    """The connection that a peer has dialled."""

    def __init__(self, peers: Peers, connection: FrameConnection) -> None:
        self.connection = connection
        self._peers = peers
        self._node = connection.remote.node
        self._arriving: IncomingSnapshot | None = None

    def take(self, connection: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        peers, node = self._peers, self._node
        for kind, payload in frames:
            if kind == MESSAGE:
                try:
                    message = peers.decode(payload)
                except UNDECODABLE as error:
                    raise not_a_message(error) from None
                peers.received(node, message)
            elif kind == QUESTION and len(payload) >= 8:
                self._question(payload)
            elif kind == FOUNDED:
                connection.close()  # this node has the record by now; ordinary connections follow
            else:
                self._snapshot(kind, payload)

    def _question(self, payload: bytes) -> None:
        number, connection = payload[:8], self.connection

        def answer(data: bytes) -> None:
            if not connection.send(ANSWER, number, data) and not connection.closed:
                connection.fail(CloseReason.OVERFLOW, "does not read its answers")

        self._peers.asked(self._node, payload[8:], answer)

    def _snapshot(self, kind: int, payload: bytes) -> None:
        try:
            if kind == STREAM:
                stream = decode_head(payload)
                self._drop("another snapshot follows")
                self._arriving = IncomingSnapshot(self.connection, stream.number)
                self._peers.start_task(self._store(self._arriving, stream))
            elif kind == CHUNK:
                number, ends = CHUNK_LAYOUT.unpack_from(payload)
                if self._arriving is not None and self._arriving.number == number:
                    self._arriving.take(payload[CHUNK_LAYOUT.size :], ends)
            else:
                raise FrameError(CloseReason.OUT_OF_TURN, f"a frame of kind {kind} from a peer")
        except (MsgspecError, UnicodeDecodeError, struct.error) as error:
            raise FrameError(CloseReason.MALFORMED, str(error)) from None

    async def _store(self, arriving: IncomingSnapshot, stream: SnapshotHead) -> None:
        ok = False
        try:
            pieces = arriving.pieces()
            await self._peers.streamed(self._node, stream.generation, stream.snapshot, pieces)
            ok = True
        except Exception as error:
            bug = not isinstance(error, DoyenError)
            log.warning("snapshot of node %r not stored: %s", self._node, error, exc_info=bug)
        finally:
            if self._arriving is arriving:
                self._arriving = None
            self.connection.send(STORED, CHUNK_LAYOUT.pack(arriving.number, ok))

    def _drop(self, why: str) -> None:
        if self._arriving is not None:
            self._arriving.end(why)
            self._arriving = None

    def ended(self, connection: FrameConnection, end: End) -> None:
        self._drop(f"the connection ended: {end.value}")
        if self._peers.incoming.get(self._node) is self:
            del self._peers.incoming[self._node]
