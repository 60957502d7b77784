"""The connections between this node and one peer, and the frames on them.

`OutgoingPeer` keeps the connection that this node dials, and dials again when it ends. This node
sends its messages, questions and snapshots on it. A peer that connects itself is dialled at once;
otherwise the pause between attempts grows from 10 ms to half a second. `IncomingPeer` is the
connection that the peer has dialled, with its messages, questions and snapshots to this node.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import count
from struct import Struct as Layout
from typing import TYPE_CHECKING

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from doyen.errors import DoyenError, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.events.log_lines import log_line
from doyen.metrics.histogram import Histogram
from doyen.quorum.consensus.core import Connected, Disconnected, Received, Snapshot
from doyen.quorum.node.snapshot_transfer import (
    CREDIT,
    CREDIT_LAYOUT,
    LAST,
    IncomingSnapshot,
    OutgoingSnapshot,
    cut_into_chunks,
)
from doyen.quorum.protocol.connection import End, FrameConnection
from doyen.quorum.protocol.frames import (
    FIRST_FREE,
    MAX_FRAME,
    NOT_FOUNDED,
    CloseReason,
    ConnectionRefused,
    FrameError,
)

if TYPE_CHECKING:
    from doyen.quorum.node.peers import Peers

log = logging.getLogger("doyen")

SOONEST_S, LATEST_S = 0.01, 0.5
HELD_S = 1.0
"""After a connection that ended sooner, the pause is that of a failed attempt. Otherwise two nodes
that refuse one another would do nothing but connect."""
MAX_QUESTIONS = 1 << 16

MESSAGE, QUESTION, ANSWER, STREAM = range(FIRST_FREE, FIRST_FREE + 4)
CHUNK, STORED, FOUNDED, LOST = FIRST_FREE + 4, FIRST_FREE + 6, FIRST_FREE + 7, FIRST_FREE + 8

NUMBER_LAYOUT = Layout(">Q")
"""Number of a question, before the question and the answer."""
CHUNK_LAYOUT = Layout(">QB")
"""Number of a snapshot, and what the chunk ends or whether all of it is stored."""


class _SnapshotHead(Struct, frozen=True, array_like=True):
    """The first frame of a snapshot."""

    number: int
    generation: int
    snapshot: Snapshot


_UNDECODABLE = (MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not a message."""


def _not_a_message(error: Exception) -> FrameError:
    return FrameError(CloseReason.MALFORMED, f"not a message: {error}")


encode = Encoder().encode
_decode_head = Decoder(_SnapshotHead).decode


class OutgoingPeer:
    """The connection that this node dials to one peer."""

    def __init__(self, peers: Peers, node: str, address: str) -> None:
        self.node = node
        self.address = address
        self.connection: FrameConnection | None = None
        self.error = "not tried yet"
        self.refused = False
        """Whether the last attempt failed because this node or the peer refused."""
        self.dialling = False
        self._peers = peers
        self._numbers = count(1)
        self._questions: dict[int, tuple[asyncio.Future[bytes], int]] = {}
        self._streams: dict[int, OutgoingSnapshot] = {}
        self._dial_now = asyncio.Event()
        self._waiting: FrameConnection | None = None
        """The connection while the cluster waits to be founded."""
        self._task = peers.start_task(self._keep())

    def dial_now(self) -> None:
        """Dial at once instead of after the pause: the peer is running."""
        self._dial_now.set()

    def founded(self) -> None:
        """The cluster has been founded: send the record to the peer if it waits, and reconnect."""
        if self._waiting is not None:
            self._waiting.send(FOUNDED, self._peers.members.record())
            self._waiting.close()
        self.dial_now()

    def close(self) -> None:
        self._task.cancel()
        if self._waiting is not None:
            self._waiting.close()
        connection, self.connection = self.connection, None
        if connection is not None:
            self._peers.members.disconnected(self.node)
            connection.close()  # first, since this still sends what is queued
            self._drop(connection)

    async def _keep(self) -> None:
        """Dial until cancelled; at once after a connection that has held for a while."""
        loop, jitter, pause = asyncio.get_running_loop(), self._peers.jitter, SOONEST_S
        while True:
            self._dial_now.clear()
            self.dialling = True
            try:
                connection = await self._dial()
            except DoyenError as error:
                self.dialling = False
                self.error = str(error)
                self.refused = isinstance(error, ConnectionRefused)
                if isinstance(error, ConnectionRefused):
                    self._peers.errors.record(
                        error.reason, f"node {self.node!r} not reached: {error}"
                    )
                self._peers.members.log_change()
            else:
                self.dialling = self.refused = False
                began = loop.time()
                await connection.wait()
                if self._waiting is not None:
                    self._waiting = None
                    self._peers.members.founder_disconnected(self.node)
                if loop.time() - began > HELD_S:
                    pause = SOONEST_S
                    continue
            with suppress(TimeoutError):
                async with asyncio.timeout(pause * (0.5 + jitter() / 2)):
                    await self._dial_now.wait()
                    pause = SOONEST_S
            pause = min(2 * pause, LATEST_S)

    async def _dial(self) -> FrameConnection:
        peers, members = self._peers, self._peers.members
        info = members.info()
        connection = await peers.dial(
            self.address,
            peers.me,
            wanted=self.node,
            info=info,
            check=members.checker(self.node),
            on_frames=self._take,
            on_end=self._ended,
        )
        try:
            if (reason := peers.unsupported(connection)) is not None:
                raise ConnectionRefused(CloseReason.VERSION, reason)
            if not await peers.is_unique(connection.remote):
                raise ConnectionRefused(
                    CloseReason.DUPLICATE,
                    f"another process is connected as node {self.node!r} than the one at "
                    f"{self.address}: every node needs an id of its own",
                )
            if members.lost:
                # Another peer has reported it since the handshake of this connection was checked.
                raise ConnectionRefused(CloseReason.MEMBER, members.lost)
            if connection.closed:
                raise StoreUnavailable(f"{self.address} ended the connection")
        except BaseException:
            connection.abort()
            raise
        if info.founding or connection.info.founding:
            self._wait_to_found(connection)
            return connection
        members.connected(self.node, connection.info)
        self.connection = peers.connections[self.node] = connection
        connection.measure(peers.round_trips.setdefault(self.node, Histogram()).add)
        peers.step(Connected(self.node))
        return connection

    def _wait_to_found(self, connection: FrameConnection) -> None:
        members = self._peers.members
        self.error = NOT_FOUNDED
        if not members.waiting:  # founded meanwhile: send the record, and reconnect as a member
            if record := members.record():
                connection.send(FOUNDED, record)
            connection.close()
            return
        self._waiting = connection
        members.founder_connected(self.node, connection.info)
        self._peers.start_task(self._peers.found())

    def _ended(self, connection: FrameConnection, end: End) -> None:
        if connection is not self.connection:
            return
        self.connection = None
        self.error = f"{self.address}: {end.value}"
        self._peers.members.disconnected(self.node)
        self._drop(connection)
        if end is End.LEFT:
            self._peers.step(Disconnected(self.node))

    def _drop(self, connection: FrameConnection) -> None:
        if self._peers.connections.get(self.node) is connection:
            del self._peers.connections[self.node]
        for future, place in self._questions.values():
            if not future.done():
                future.set_exception(
                    OutcomeUnknown(
                        f"the connection to node {self.node!r} ended before its answer came"
                    )
                    if place <= connection.written
                    else StoreUnavailable(f"the connection to node {self.node!r} ended")
                )
        self._questions.clear()
        for stream in self._streams.values():
            stream.end(False)
        self._streams.clear()

    async def ask(self, connection: FrameConnection, question: bytes) -> bytes:
        if len(question) > MAX_FRAME - 64:
            raise StoreUnusable(f"a question of {len(question)} bytes is too large to be put")
        if len(self._questions) >= MAX_QUESTIONS:
            raise StoreUnavailable(f"too many requests to node {self.node!r} have no response yet")
        number = next(self._numbers)
        if not connection.send(QUESTION, NUMBER_LAYOUT.pack(number), question):
            raise StoreUnavailable(f"the send queue to node {self.node!r} is full")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[number] = (future, connection.accepted)
        try:
            return await future
        finally:
            self._questions.pop(number, None)

    async def stream(
        self,
        connection: FrameConnection,
        generation: int,
        snapshot: Snapshot,
        pieces: AsyncIterator[bytes],
    ) -> bool:
        """Send a snapshot. Returns whether the peer has all of it on disk."""
        number = next(self._numbers)
        sending = self._streams[number] = OutgoingSnapshot()
        try:
            head = encode(_SnapshotHead(number, generation, snapshot))
            if not connection.send(STREAM, head):
                return False
            async for piece in pieces:
                for chunk, ends in cut_into_chunks(piece):
                    await sending.room(len(chunk))
                    await connection.drain()
                    if not connection.send(CHUNK, CHUNK_LAYOUT.pack(number, ends), chunk):
                        return False
            connection.send(CHUNK, CHUNK_LAYOUT.pack(number, LAST))
            return await sending.outcome
        finally:
            self._streams.pop(number, None)

    def _take(self, connection: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        questions = self._questions
        try:
            for kind, payload in frames:
                if kind == ANSWER:
                    (number,) = NUMBER_LAYOUT.unpack_from(payload)
                    asked = questions.pop(number, None)
                    if asked is not None and not asked[0].done():
                        asked[0].set_result(payload[8:])
                elif kind == MESSAGE:
                    try:
                        message = self._peers.decode(payload)
                    except _UNDECODABLE as error:
                        raise _not_a_message(error) from None
                    if connection is self.connection:
                        self._peers.step(Received(self.node, message))
                elif kind == LOST:
                    self._peers.stop_taking_part(payload.decode(errors="replace"))
                elif kind == CREDIT:
                    number, size = CREDIT_LAYOUT.unpack(payload)
                    if number in self._streams:
                        self._streams[number].credit(size)
                elif kind == STORED:
                    number, ok = CHUNK_LAYOUT.unpack(payload)
                    if number in self._streams:
                        self._streams[number].end(bool(ok))
                else:
                    raise FrameError(CloseReason.OUT_OF_TURN, f"a frame of kind {kind} in answer")
        except struct.error as error:
            connection.fail(CloseReason.MALFORMED, str(error))


class IncomingPeer:
    """The connection that a peer has dialled."""

    def __init__(
        self, peers: Peers, connection: FrameConnection, among: dict[str, IncomingPeer]
    ) -> None:
        """`among` are the connections of its kind, by peer."""
        self.connection = connection
        self._peers = peers
        self._among = among
        self._node = connection.remote.node
        self._arriving: IncomingSnapshot | None = None

    def take(self, connection: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        peers, node = self._peers, self._node
        for kind, payload in frames:
            if kind == MESSAGE:
                try:
                    message = peers.decode(payload)
                except _UNDECODABLE as error:
                    raise _not_a_message(error) from None
                peers.step(Received(node, message))
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
                stream = _decode_head(payload)
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

    async def _store(self, arriving: IncomingSnapshot, stream: _SnapshotHead) -> None:
        ok = False
        try:
            pieces = arriving.pieces()
            await self._peers.streamed(self._node, stream.generation, stream.snapshot, pieces)
            ok = True
        except Exception as error:
            line = log_line(event="snapshot_not_stored", sender=self._node, error=error)
            log.warning("%s", line, exc_info=not isinstance(error, DoyenError))
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
        if self._among.get(self._node) is self:
            del self._among[self._node]


class FoundingPeer(IncomingPeer):
    """The connection that a peer has dialled while it or this node waits to be founded. The peer
    sends only the founding record on it."""

    def take(self, connection: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        for kind, payload in frames:
            if kind != FOUNDED:
                raise FrameError(
                    CloseReason.OUT_OF_TURN, f"a frame of kind {kind} before the founding"
                )
            self._peers.start_task(self._take_record(payload))

    async def _take_record(self, record: bytes) -> None:
        try:
            if await self._peers.members.take_record(record):
                self._peers.founded()
        except DoyenError as error:
            self.connection.fail(CloseReason.MEMBER, str(error))
