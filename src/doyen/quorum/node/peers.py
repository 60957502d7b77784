"""The connections to the other nodes.

    peers = Peers(me, security, decode=Decoder(RaftMessage).decode, members=members)
    listener = Listener(me, security, peers=peers.admit, …)
    peers.start(step, asked, streamed)
    peers.reach({"n2": "10.0.0.2:7400", "n3": "10.0.0.3:7400"})

**One connection per direction.** A node dials every peer (`OutgoingPeer`) and sends on that
connection: messages, questions, snapshots. Only answers and credit come back on it. What a peer
sends arrives on the connection that the peer dialled (`IncomingPeer`). So two nodes need not agree
on which of their connections counts. `Connected` and `Disconnected` refer to the connection that
this node dialled; a process that dies ends both.

**A peer that cannot be dialled** is sent messages on the connection that it dialled itself. A node
that was down does not know the addresses of members that joined or moved meanwhile: they are in
entries that it lacks, and a leader sends those only to a follower that answers. While this node
dials, it does not send in this way: the peer would learn of a later position in the log than the
handshake states, and would refuse this node as one with an older copy of its data directory.

**Two processes with one id.** If a peer is connected already as another incarnation, the older
connection is pinged. If it answers, the new one is refused; otherwise the older one is closed. A
node refuses a peer that claims this node's own id.

**Which peers are admitted** is decided by `membership`, from the ids in the handshake. While a
cluster waits to be founded, its nodes connect too, and exchange only the founding record
(`FoundingPeer`). These connections are closed when the record is on disk, and ordinary ones follow.

**Bounds.** A message that does not fit into a connection's queue (`bound` bytes) is dropped and
counted in `dropped`. At most a window of a snapshot is under way (`snapshot_transfer`), so nothing
waits behind more than that.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from doyen._waiting import BackgroundTasks
from doyen.errors import DoyenError, StoreError, StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.metrics.histogram import Histogram
from doyen.quorum.consensus.core import CoreEvent, Message, Snapshot
from doyen.quorum.keyspace.versions import FIRST, IDENTIFIED
from doyen.quorum.node.membership import DataDirectoryRolledBack, Members
from doyen.quorum.node.peer_connections import (
    LOST,
    MESSAGE,
    FoundingPeer,
    IncomingPeer,
    OutgoingPeer,
    encode,
)
from doyen.quorum.protocol.connection import (
    BOUND,
    HANDSHAKE_S,
    KEEPALIVE_S,
    ConnectionErrors,
    End,
    FrameConnection,
    dial,
)
from doyen.quorum.protocol.frames import MAX_FRAME, CloseReason, ConnectionRefused
from doyen.quorum.protocol.handshake import ConnectionIdentity, MemberInfo
from doyen.quorum.protocol.security import Security

log = logging.getLogger("doyen")

PROBE_S = 1.0
"""How long a connection may take to answer a ping before it counts as dead."""

ANOTHER = frozenset({CloseReason.NODE, CloseReason.CLUSTER, CloseReason.GARBAGE})
"""Refusals that show that the dialled address does not belong to the wanted node."""

Asked = Callable[[str, bytes, Callable[[bytes], None]], None]
Streamed = Callable[[str, int, Snapshot, AsyncIterator[bytes]], Awaitable[None]]


def too_old(node: str, newest: int, version: int) -> str:
    """Why a node that supports versions up to `newest` is refused in a cluster of this version."""
    return (
        f"this cluster is at version {version} of its state, and node {node!r} supports"
        f" versions up to {newest}: install the release there that the other nodes run"
    )


class Peers:
    """All connections between this node and its peers."""

    def __init__(
        self,
        me: ConnectionIdentity,
        security: Security,
        *,
        decode: Callable[[bytes], Message],
        members: Members,
        errors: ConnectionErrors | None = None,
        jitter: Callable[[], float] = random.random,
        bound: int = BOUND,
        handshake_s: float = HANDSHAKE_S,
        keepalive_s: float = KEEPALIVE_S,
        probe_s: float = PROBE_S,
    ) -> None:
        self.me = me
        self.members = members
        members.refusals = lambda: self.refusals
        self.errors = errors or ConnectionErrors()
        self.dropped: Counter[str] = Counter()
        """Messages that did not fit into a peer's queue, or found no connection, by peer."""
        self.decode = decode
        self.jitter = jitter
        self.dial = partial(
            dial,
            role="peer",
            security=security,
            errors=self.errors,
            handshake_s=handshake_s,
            keepalive_s=keepalive_s,
            bound=bound,
        )
        self._probe_s = probe_s
        self.round_trips: dict[str, Histogram] = {}
        """How long pings to each peer took to be answered."""
        self.outgoing: dict[str, OutgoingPeer] = {}
        self.connections: dict[str, FrameConnection] = {}
        """Those that this node dialled, while they are open, by peer."""
        self.incoming: dict[str, IncomingPeer] = {}
        self._founding: dict[str, IncomingPeer] = {}
        """Connections that peers dialled while they or this node wait to be founded."""
        self._encoded: tuple[Message | None, bytes] = None, b""
        """The last message that was sent: a leader sends the same one to several peers."""
        self._tasks = BackgroundTasks()
        self.start_task = self._tasks.start
        self._closed = False
        self._version = FIRST
        security.dialling  # noqa: B018 - files that cannot be used raise here

    def start(
        self,
        step: Callable[[CoreEvent], None],
        asked: Asked,
        streamed: Streamed,
    ) -> None:
        """Begin. `step` is called with `Received`, `Connected` and `Disconnected`: the last when a
        connection was closed or reset, never for silence. `asked` is called with a peer's question
        and a function that answers it. `streamed` runs for a snapshot that a peer sends, with the
        generation and the pieces as they arrive. When it returns, the peer learns that all of it is
        on disk; when it raises (as the pieces do if the connection ends), that it is not."""
        self.step = step
        self.asked = asked
        self.streamed = streamed

    def reach(self, addresses: dict[str, str]) -> None:
        """Connect to these peers, at these addresses, and close the connections to others."""
        for node, peer in list(self.outgoing.items()):
            if addresses.get(node) != peer.address:
                del self.outgoing[node]
                peer.close()
        for node, address in addresses.items():
            if node != self.me.node and node not in self.outgoing:
                self.outgoing[node] = OutgoingPeer(self, node, address)
        self.members.membership_changed()
        heard = {*addresses, *self.members.everyone}
        for node, incoming in list(self.incoming.items()):
            if node not in heard:
                incoming.connection.close()

    def supports(self, peer: str) -> int:
        """The newest version of the replicated state that a peer is known to support (see
        `keyspace.versions`). Of one that is not connected, only its member id is known."""
        connection = self.connections.get(peer)
        if connection is None:
            return IDENTIFIED if peer in self.members.ids else 0
        return connection.supports[1]

    def require(self, version: int) -> None:
        """Refuse peers that do not support this version from now on, and close the connections to
        such peers."""
        if version != self._version:
            self._version = version
            for connection in self._open():
                if (reason := self.unsupported(connection)) is not None:
                    log.warning("%s", log_line(event="peer_closed", reason=reason))
                    connection.abort()

    def unsupported(self, connection: FrameConnection) -> str | None:
        """Why this peer cannot take part in a cluster of this version; None if it can."""
        node, newest = connection.remote.node, connection.supports[1]
        return None if self._version <= newest else too_old(node, newest, self._version)

    async def newest(self, node: str, address: str) -> int | None:
        """`supports`, for a node that is not connected; None if it does not answer. Raises
        `ConnectionRefused` if what answers at the address is not this node."""
        try:
            connection = await self.dial(
                address,
                self.me,
                role="onlooker",
                wanted=node,
                info=MemberInfo(self.members.cluster_id),
                on_frames=lambda *_: None,
                on_end=lambda *_: None,
                handshake_s=self._probe_s,
            )
        except StoreError as error:
            if isinstance(error, ConnectionRefused) and error.reason in ANOTHER:
                raise
            return None
        connection.close()
        return connection.supports[1]

    def _open(self) -> list[FrameConnection]:
        return [*self.connections.values(), *(peer.connection for peer in self.incoming.values())]

    def send(self, peer: str, message: Message) -> None:
        """Queue a message. Messages arrive in order or not at all."""
        connection = self.connections.get(peer) or self._dialled_by(peer)
        if connection is not None:
            last, data = self._encoded
            if last is not message:
                data = encode(message)
                self._encoded = message, data
            if len(data) >= MAX_FRAME:
                text = f"a message of {len(data)} bytes was not sent"
                self.errors.record(CloseReason.TOO_LARGE, text)
            elif connection.send(MESSAGE, data):
                return
        self.dropped[peer] += 1

    def _dialled_by(self, peer: str) -> FrameConnection | None:
        """The connection that a peer has dialled, unless this node is dialling the peer now."""
        incoming, outgoing = self.incoming.get(peer), self.outgoing.get(peer)
        if incoming is None or (outgoing is not None and outgoing.dialling):
            return None
        return incoming.connection

    async def ask(self, peer: str, question: bytes) -> bytes:
        """Send a question and wait for the answer. Raises `StoreUnavailable` if it has certainly
        not arrived, `OutcomeUnknown` if the connection ended before the answer came."""
        outgoing = self.outgoing.get(peer)
        if outgoing is None or outgoing.connection is None:
            raise StoreUnavailable(f"node {peer!r} is not connected")
        return await outgoing.ask(outgoing.connection, question)

    def send_snapshot(
        self,
        peer: str,
        generation: int,
        snapshot: Snapshot,
        pieces: AsyncIterator[bytes],
        done: Callable[[bool], None],
    ) -> None:
        """Send a snapshot, slowly enough not to delay other messages. `done` is called on the loop,
        exactly once: with True only if the peer has confirmed that all of it is on disk."""
        outgoing = self.outgoing.get(peer)
        self.start_task(self._stream(outgoing, generation, snapshot, pieces, done))

    async def close(self) -> None:
        self._closed = True
        connections = [*self._open(), *(peer.connection for peer in self._founding.values())]
        for peer in self.outgoing.values():
            peer.close()
        self.outgoing.clear()
        for connection in connections:
            connection.close()
        await self._tasks.cancel()
        for connection in connections:
            await connection.wait()

    @property
    def connection_errors(self) -> dict[str, str]:
        """Why each peer that is not connected is not."""
        outgoing = self.outgoing.items()
        return {node: peer.error for node, peer in outgoing if peer.connection is None}

    @property
    def refusals(self) -> dict[str, str]:
        """Those of `connection_errors` for which this node or the peer has refused."""
        return {
            node: error
            for node, error in self.connection_errors.items()
            if self.outgoing[node].refused
        }

    # Connections that peers have dialled.

    def admit(self, connection: FrameConnection) -> None:
        """A peer has dialled this node, and proved who it is."""
        if self._closed:
            connection.abort()
            return
        self.start_task(self._admit(connection))

    async def _admit(self, connection: FrameConnection) -> None:
        them = connection.remote
        reason = self.unsupported(connection)
        if reason is not None:
            connection.refuse(CloseReason.VERSION, reason)
            return
        if not await self.is_unique(them):
            text = (
                f"another process is connected as node {them.node!r}: every node needs an id of its"
                " own"
            )
            connection.refuse(CloseReason.DUPLICATE, text)
            return
        try:
            self.members.admit(them, connection.info, connection.certificate)
        except DataDirectoryRolledBack as error:
            self._refuse_rolled_back(connection, str(error))
            return
        except ConnectionRefused as error:
            connection.refuse(error.reason, str(error))
            return
        founding = self.members.waiting or connection.info.founding
        kind, among = (FoundingPeer, self._founding) if founding else (IncomingPeer, self.incoming)
        before = among.get(them.node)
        if before is not None:
            before.connection.abort()
        if connection.closed:
            return
        incoming = among[them.node] = kind(self, connection, among)
        connection.welcome(incoming.take, incoming.ended)
        peer = self.outgoing.get(them.node)
        if peer is not None:
            peer.dial_now()

    def _refuse_rolled_back(self, connection: FrameConnection, text: str) -> None:
        """Tell a node with an older copy of its data directory to stop taking part: it could form a
        majority with nodes that do not know. It is admitted for this, since only then does it know
        that a member of its cluster says so."""
        self.errors.record(CloseReason.MEMBER, f"{connection}: {text}")
        connection.welcome(lambda *_: None, lambda *_: None)
        connection.send(LOST, text.encode())
        connection.close()

    def stop_taking_part(self, text: str) -> None:
        """A peer says that this node's data directory is an older copy."""
        if not self.members.lost:
            self.members.lost = text
            line = log_line(event="node_takes_no_part", node=self.me.node, reason=text)
            log.critical("%s", line)
            for connection in self._open():
                connection.abort()

    # Founding.

    async def found(self) -> None:
        """Found the cluster, if that is up to this node and all founders are connected."""
        if await self.members.found():
            self.founded()

    def founded(self) -> None:
        """This node has the founding record on disk: send it, and connect as members do."""
        for peer in self.outgoing.values():
            peer.founded()
        for incoming in list(self._founding.values()):
            incoming.connection.close()

    async def is_unique(self, them: ConnectionIdentity) -> bool:
        """Whether no other live process is connected under this id."""
        while others := [
            connection
            for connection in self._open()
            if connection.remote.node == them.node
            and connection.remote.incarnation != them.incarnation
            and not connection.ending
        ]:
            for connection in others:
                if await connection.alive(self._probe_s):
                    return False
                connection.abort(End.SILENT)
        return True

    # Snapshots that this node sends.

    async def _stream(
        self,
        peer: OutgoingPeer | None,
        generation: int,
        snapshot: Snapshot,
        pieces: AsyncIterator[bytes],
        done: Callable[[bool], None],
    ) -> None:
        ok = False
        try:
            if peer is not None and peer.connection is not None:
                ok = await peer.stream(peer.connection, generation, snapshot, pieces)
        except Exception as error:
            line = log_line(event="snapshot_not_sent", error=error)
            log.warning("%s", line, exc_info=not isinstance(error, DoyenError))
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()
            if not self._closed:
                done(ok)
