"""The real `Transport`: links to the other nodes over TCP.

    peers = Peers(me, security, decode=Decoder(RaftMessage).decode)
    door = Door(me, security, peers=peers.admit, …)
    peers.start(received, connected, disconnected, asked, streamed)
    peers.reach({"n2": "10.0.0.2:7400", "n3": "10.0.0.3:7400"})

**One connection per direction.** A node dials every peer and speaks on that connection: messages,
questions, snapshots. What comes back on it are answers and credit. What a peer has to say comes on
the connection that the peer has dialled. So nobody has to agree on whose connection counts.
`connected` and `disconnected` are about the connection that this node has dialled; a process that
dies ends both.

**A peer that cannot be dialled** is sent messages on the connection that it has dialled itself. A
node that was down does not know the addresses of members that joined or moved meanwhile: they are
in entries that it lacks, and a leader sends those only to a follower that answers. While this node
dials, it sends nothing in this way: the peer would learn of a later position in the log than the
handshake states, and refuse this node as one with an older copy of its folder.

**A peer that comes back** is dialled at once when its own connection arrives; otherwise within
10 ms to half a second.

**Two processes with one id**: a peer that is connected already as another incarnation is pinged. If
it answers, the newcomer is refused; if it does not, it is dead or unreachable, and let go of. A
node refuses whoever claims to be itself.

**Who is heard** is for `members` to say: by the ids in the handshake. While a cluster waits to be
founded its nodes connect too, and nothing goes over these connections but the founding record
(`FOUNDED`); they end when it is on disk, and ordinary ones follow.

**Bounds**: what does not fit into a link's queue (`bound` bytes) is dropped and counted in
`dropped`. A snapshot goes out in chunks, so many of them ahead of the other side's word
(`WINDOW`), so that nothing waits behind more than that.
"""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from struct import Struct as Layout

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from doyen.errors import DoyenError, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.quorum.consensus.core import Message, Snapshot
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.node.membership import FolderRolledBack, Members
from doyen.quorum.node.snapshot_transfer import (
    CREDIT,
    CREDIT_LAYOUT,
    LAST,
    MORE,
    WHOLE,
    IncomingSnapshot,
    OutgoingSnapshot,
    cut_into_chunks,
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
from doyen.quorum.protocol.frames import (
    FIRST_FREE,
    MAX_FRAME,
    CloseReason,
    ConnectionRefused,
    FrameError,
)
from doyen.quorum.protocol.handshake import ConnectionIdentity, MemberInfo
from doyen.quorum.protocol.security import Security

__all__ = ["Peers"]

log = logging.getLogger("doyen")

MESSAGE, QUESTION, ANSWER, STREAM = range(FIRST_FREE, FIRST_FREE + 4)
CHUNK, STORED, FOUNDED, LOST = FIRST_FREE + 4, FIRST_FREE + 6, FIRST_FREE + 7, FIRST_FREE + 8

SOONEST_S, LATEST_S = 0.01, 0.5
HELD_S = 1.0
"""A link that ended sooner is dialled again as one that was not made, or the two of us would do
nothing else."""
PROBE_S = 1.0
MAX_QUESTIONS = 1 << 16

_NUMBER = Layout(">Q")
_CHUNK = Layout(">QB")


class _Stream(Struct, frozen=True, array_like=True):
    number: int
    generation: int
    snapshot: Snapshot


_encode = Encoder().encode
_stream = Decoder(_Stream)

Received = Callable[[str, Message], None]
Asked = Callable[[str, bytes, Callable[[bytes], None]], None]
Streamed = Callable[[str, int, Snapshot, AsyncIterator[bytes]], Awaitable[None]]


class Peers:
    """Every link of this node's to another, and of others' to it."""

    def __init__(
        self,
        me: ConnectionIdentity,
        security: Security,
        *,
        decode: Callable[[bytes], Message],
        members: Members | None = None,
        tally: ConnectionErrors | None = None,
        jitter: Callable[[], float] = random.random,
        bound: int = BOUND,
        handshake_s: float = HANDSHAKE_S,
        keepalive_s: float = KEEPALIVE_S,
        probe_s: float = PROBE_S,
    ) -> None:
        self.me = me
        self.security = security
        self.members = members
        self.tally = tally or ConnectionErrors()
        self.dropped: Counter[str] = Counter()
        """Messages that did not fit into a peer's queue, or found no link, by peer."""
        self._decode = decode
        self._jitter = jitter
        self._bound = bound
        self._handshake_s = handshake_s
        self._keepalive_s = keepalive_s
        self._probe_s = probe_s
        self._peers: dict[str, _Outgoing] = {}
        self._links: dict[str, FrameConnection] = {}
        self._callers: dict[str, _Incoming] = {}
        self._founding: dict[str, FrameConnection] = {}
        """Connections that were dialled by nodes while they or this one wait to be founded."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._version = FIRST
        security.dialling  # noqa: B018 - files that cannot be used are found here

    def start(
        self,
        received: Received,
        connected: Callable[[str], None],
        disconnected: Callable[[str], None],
        asked: Asked,
        streamed: Streamed,
    ) -> None:
        self._received = received
        self._connected = connected
        self._disconnected = disconnected
        self._asked = asked
        self._streamed = streamed

    def reach(self, addresses: dict[str, str]) -> None:
        for node, peer in list(self._peers.items()):
            if addresses.get(node) != peer.address:
                del self._peers[node]
                peer.close()
        for node, address in addresses.items():
            if node != self.me.node and node not in self._peers:
                self._peers[node] = _Outgoing(self, node, address)
        if self.members is not None:
            self.members.reformed()
            heard = {*addresses, *self.members.everyone}
            for node, caller in list(self._callers.items()):
                if node not in heard:
                    caller.link.close()

    def supports(self, peer: str) -> int:
        link = self._links.get(peer)
        return 0 if link is None else link.supports[1]

    def require(self, version: int) -> None:
        if version != self._version:
            self._version = version
            for link in [*self._links.values(), *(each.link for each in self._callers.values())]:
                if (reason := self._unsupported(link)) is not None:
                    log.warning("%s", reason)
                    link.abort()

    def _unsupported(self, link: FrameConnection) -> str | None:
        """Why this peer cannot take part in a cluster of our version."""
        newest = link.supports[1]
        if self._version <= newest:
            return None
        return (
            f"this cluster is at version {self._version} of its state, and node"
            f" {link.remote.node!r} supports versions up to {newest}: install the release there"
            " that the other nodes run"
        )

    def send(self, peer: str, message: Message) -> None:
        link = self._links.get(peer) or self._link_back(peer)
        if link is None or link.full or not self._fits(link, _encode(message)):
            self.dropped[peer] += 1

    def _link_back(self, peer: str) -> FrameConnection | None:
        """The connection that a peer has dialled, unless this node is dialling the peer now."""
        caller, outgoing = self._callers.get(peer), self._peers.get(peer)
        if caller is None or (outgoing is not None and outgoing.dialling):
            return None
        return caller.link

    def _fits(self, link: FrameConnection, data: bytes) -> bool:
        if len(data) >= MAX_FRAME:
            self.tally.record(CloseReason.TOO_LARGE, f"a message of {len(data)} bytes was not sent")
            return False
        return link.send(MESSAGE, data)

    def _read(self, payload: bytes) -> Message:
        try:
            return self._decode(payload)
        except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(CloseReason.MALFORMED, f"not a message: {error}") from None

    async def ask(self, peer: str, question: bytes) -> bytes:
        outgoing = self._peers.get(peer)
        if outgoing is None or outgoing.link is None:
            raise StoreUnavailable(f"node {peer!r} is not connected")
        return await outgoing.ask(outgoing.link, question)

    def send_snapshot(
        self,
        peer: str,
        generation: int,
        snapshot: Snapshot,
        pieces: AsyncIterator[bytes],
        done: Callable[[bool], None],
    ) -> None:
        outgoing = self._peers.get(peer)
        self._run(self._stream(outgoing, generation, snapshot, pieces, done))

    async def close(self) -> None:
        self._closed = True
        links = [*self._links.values(), *(caller.link for caller in self._callers.values())]
        links += self._founding.values()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        for link in links:
            link.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for link in links:
            await link.wait()

    @property
    def troubles(self) -> dict[str, str]:
        """Why each peer that is not connected is not."""
        return {node: peer.trouble for node, peer in self._peers.items() if peer.link is None}

    # Who comes in.

    def admit(self, link: FrameConnection) -> None:
        """A peer has dialled us, and proved who it is."""
        if self._closed:
            link.abort()
            return
        self._run(self._let_in(link))

    async def _let_in(self, link: FrameConnection) -> None:
        them = link.remote
        reason = self._unsupported(link)
        if reason is not None:
            link.refuse(CloseReason.VERSION, reason)
            return
        if not await self._is_the_one(them):
            text = f"another process is connected as node {them.node!r}: every node needs its own"
            link.refuse(CloseReason.DUPLICATE, text)
            return
        members = self.members
        if members is not None:
            try:
                members.admit(them, link.info, link.certificate)
            except FolderRolledBack as error:
                self._tell_lost(link, str(error))
                return
            except ConnectionRefused as error:
                link.refuse(error.reason, str(error))
                return
            if members.waiting or link.info.founding:
                self._let_in_to_found(link)
                return
        before = self._callers.get(them.node)
        if before is not None:
            before.link.abort()
        if link.closed:
            return
        caller = self._callers[them.node] = _Incoming(self, link)
        link.welcome(caller.take, caller.ended)
        peer = self._peers.get(them.node)
        if peer is not None:
            peer.hurry()

    def _tell_lost(self, link: FrameConnection, text: str) -> None:
        """Have a node that comes with an older copy of its folder take no part: there may be others
        that do not know, and could make up a majority with it. It is let in for this, since only
        then it knows who says so."""
        self.tally.record(CloseReason.MEMBER, f"{link}: {text}")
        link.welcome(lambda *_: None, lambda *_: None)
        link.send(LOST, text.encode())
        link.close()

    def _take_no_part(self, text: str) -> None:
        if self.members is not None and not self.members.lost:
            self.members.lost = text
            log.critical("node %s takes no part any more: %s", self.me.node, text)
            for link in [*self._links.values(), *(each.link for each in self._callers.values())]:
                link.abort()

    # Founding.

    def _let_in_to_found(self, link: FrameConnection) -> None:
        node = link.remote.node
        before = self._founding.pop(node, None)
        if before is not None:
            before.abort()
        if link.closed:
            return
        self._founding[node] = link
        link.welcome(self._take_record, self._founding_ended)
        peer = self._peers.get(node)
        if peer is not None:
            peer.hurry()

    def _founding_ended(self, link: FrameConnection, end: End) -> None:
        if self._founding.get(link.remote.node) is link:
            del self._founding[link.remote.node]

    def _take_record(self, link: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        for kind, payload in frames:
            if kind != FOUNDED:
                raise FrameError(
                    CloseReason.OUT_OF_TURN, f"a frame of kind {kind} before the founding"
                )
            self._run(self._told(link, payload))

    async def _told(self, link: FrameConnection, record: bytes) -> None:
        assert self.members is not None
        try:
            if await self.members.told(record):
                self._founded()
        except DoyenError as error:
            link.fail(CloseReason.MEMBER, str(error))

    async def found(self) -> None:
        """Found the cluster, if it is for this node to do and everybody is there."""
        if self.members is not None and await self.members.found():
            self._founded()

    def _founded(self) -> None:
        """This node has the founding record on disk: tell it, and connect as members do."""
        for peer in self._peers.values():
            peer.founded()
        for link in list(self._founding.values()):
            link.close()

    async def _is_the_one(self, them: ConnectionIdentity) -> bool:
        """Whether no other live process is connected under this id."""
        while rivals := [
            link for link in self._linked(them.node) if link.remote.incarnation != them.incarnation
        ]:
            for link in rivals:
                if await link.alive(self._probe_s):
                    return False
                link.abort(End.SILENT)
        return True

    def _linked(self, node: str) -> list[FrameConnection]:
        links = [self._links[node]] if node in self._links else []
        if node in self._callers:
            links.append(self._callers[node].link)
        return [link for link in links if not link.ending]

    def _run(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Snapshots going out.

    async def _stream(
        self,
        peer: _Outgoing | None,
        generation: int,
        snapshot: Snapshot,
        pieces: AsyncIterator[bytes],
        done: Callable[[bool], None],
    ) -> None:
        ok = False
        try:
            if peer is not None and peer.link is not None:
                ok = await peer.stream(peer.link, generation, snapshot, pieces)
        except Exception as error:
            log.warning("snapshot not sent: %s", error, exc_info=not isinstance(error, DoyenError))
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()
            if not self._closed:
                done(ok)


class _Outgoing:
    """The connection that this node has dialled, or tries to."""

    def __init__(self, peers: Peers, node: str, address: str) -> None:
        self.node = node
        self.address = address
        self.link: FrameConnection | None = None
        self.trouble = "not tried yet"
        self.dialling = False
        self._peers = peers
        self._numbers = count(1)
        self._questions: dict[int, tuple[asyncio.Future[bytes], int]] = {}
        self._streams: dict[int, OutgoingSnapshot] = {}
        self._hurry = asyncio.Event()
        self._waiting: FrameConnection | None = None
        """The connection while the cluster waits to be founded."""
        self._task = peers._run(self._keep())

    def hurry(self) -> None:
        """It is there: no need to wait."""
        self._hurry.set()

    def founded(self) -> None:
        """The cluster has been founded: tell the peer if it waits for that, and connect anew."""
        link, members = self._waiting, self._peers.members
        if link is not None and members is not None:
            link.send(FOUNDED, members.record())
            link.close()
        self.hurry()

    def close(self) -> None:
        self._task.cancel()
        if self._waiting is not None:
            self._waiting.close()
        link, self.link = self.link, None
        if link is not None:
            if self._peers.members is not None:
                self._peers.members.disconnected(self.node)
            link.close()  # first: what was queued goes out by this, and may be heard
            self._let_go(link)

    async def _keep(self) -> None:
        """Dial, again and again, until told not to. At once after a link that has held."""
        loop, jitter, pause = asyncio.get_running_loop(), self._peers._jitter, SOONEST_S
        while True:
            self._hurry.clear()
            self.dialling = True
            try:
                link = await self._dial()
            except DoyenError as error:
                self.dialling = False
                self.trouble = str(error)
                if isinstance(error, ConnectionRefused):
                    self._peers.tally.record(
                        error.reason, f"node {self.node!r} not reached: {error}"
                    )
            else:
                self.dialling = False
                began = loop.time()
                await link.wait()
                if self._waiting is not None and self._peers.members is not None:
                    self._waiting = None
                    self._peers.members.parted(self.node)
                if loop.time() - began > HELD_S:
                    pause = SOONEST_S
                    continue
            with suppress(TimeoutError):
                async with asyncio.timeout(pause * (0.5 + jitter() / 2)):
                    await self._hurry.wait()
                    pause = SOONEST_S
            pause = min(2 * pause, LATEST_S)

    async def _dial(self) -> FrameConnection:
        peers, members = self._peers, self._peers.members
        info = members.info() if members is not None else MemberInfo()
        link = await dial(
            self.address,
            peers.me,
            role="peer",
            wanted=self.node,
            info=info,
            check=members.judging(self.node) if members is not None else None,
            security=peers.security,
            on_frames=self._take,
            on_end=self._ended,
            errors=peers.tally,
            handshake_s=peers._handshake_s,
            keepalive_s=peers._keepalive_s,
            bound=peers._bound,
        )
        try:
            if (reason := peers._unsupported(link)) is not None:
                raise ConnectionRefused(CloseReason.VERSION, reason)
            if not await peers._is_the_one(link.remote):
                raise ConnectionRefused(
                    CloseReason.DUPLICATE,
                    f"another process is connected as node {self.node!r} than the one at "
                    f"{self.address}: every node needs an id of its own",
                )
            if link.closed:
                raise StoreUnavailable(f"{self.address} ended the connection")
        except BaseException:
            link.abort()
            raise
        if members is not None:
            if info.founding or link.info.founding:
                self._wait_to_found(link, members)
                return link
            members.connected(self.node, link.info)
        self.link = peers._links[self.node] = link
        peers._connected(self.node)
        return link

    def _wait_to_found(self, link: FrameConnection, members: Members) -> None:
        self.trouble = "the cluster has not been founded"
        if not members.waiting:  # any more: the peer is told, and dialled anew as a member
            if record := members.record():
                link.send(FOUNDED, record)
            link.close()
            return
        self._waiting = link
        members.met(self.node, link.info)
        self._peers._run(self._peers.found())

    def _ended(self, link: FrameConnection, end: End) -> None:
        if link is not self.link:
            return
        self.link = None
        self.trouble = f"{self.address}: {end.value}"
        if self._peers.members is not None:
            self._peers.members.disconnected(self.node)
        self._let_go(link)
        if end is End.LEFT:
            self._peers._disconnected(self.node)

    def _let_go(self, link: FrameConnection) -> None:
        if self._peers._links.get(self.node) is link:
            del self._peers._links[self.node]
        for future, place in self._questions.values():
            if not future.done():
                future.set_exception(
                    OutcomeUnknown(f"the link to node {self.node!r} ended before its answer came")
                    if place <= link.written
                    else StoreUnavailable(f"the link to node {self.node!r} ended")
                )
        self._questions.clear()
        for stream in self._streams.values():
            stream.end(False)
        self._streams.clear()

    async def ask(self, link: FrameConnection, question: bytes) -> bytes:
        if len(question) > MAX_FRAME - 64:
            raise StoreUnusable(f"a question of {len(question)} bytes is too large to be put")
        if len(self._questions) >= MAX_QUESTIONS:
            raise StoreUnavailable(f"too many questions to node {self.node!r} are open")
        number = next(self._numbers)
        if not link.send(QUESTION, _NUMBER.pack(number), question):
            raise StoreUnavailable(f"the link to node {self.node!r} is full")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[number] = (future, link.accepted)
        try:
            return await future
        finally:
            self._questions.pop(number, None)

    async def stream(
        self,
        link: FrameConnection,
        generation: int,
        snapshot: Snapshot,
        pieces: AsyncIterator[bytes],
    ) -> bool:
        """Whether the peer has all of it on disk."""
        number = next(self._numbers)
        sending = self._streams[number] = OutgoingSnapshot()
        try:
            head = _encode(_Stream(number, generation, snapshot))
            if not link.send(STREAM, head):
                return False
            async for piece in pieces:
                for chunk in cut_into_chunks(piece):
                    await sending.room(len(chunk))
                    await link.drain()
                    whole = WHOLE if chunk.end else MORE
                    if not link.send(CHUNK, _CHUNK.pack(number, whole), chunk.data):
                        return False
            link.send(CHUNK, _CHUNK.pack(number, LAST))
            return await sending.outcome
        finally:
            self._streams.pop(number, None)

    def _take(self, link: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        questions = self._questions
        try:
            for kind, payload in frames:
                if kind == ANSWER:
                    (number,) = _NUMBER.unpack_from(payload)
                    asked = questions.pop(number, None)
                    if asked is not None and not asked[0].done():
                        asked[0].set_result(payload[8:])
                elif kind == MESSAGE:
                    message = self._peers._read(payload)
                    if link is self.link:
                        self._peers._received(self.node, message)
                elif kind == LOST:
                    self._peers._take_no_part(payload.decode(errors="replace"))
                elif kind == CREDIT:
                    number, size = CREDIT_LAYOUT.unpack(payload)
                    if number in self._streams:
                        self._streams[number].credit(size)
                elif kind == STORED:
                    number, ok = _CHUNK.unpack(payload)
                    if number in self._streams:
                        self._streams[number].end(bool(ok))
                else:
                    raise FrameError(CloseReason.OUT_OF_TURN, f"a frame of kind {kind} in answer")
        except struct.error as error:
            link.fail(CloseReason.MALFORMED, str(error))


class _Incoming:
    """The connection that a peer has dialled."""

    def __init__(self, peers: Peers, link: FrameConnection) -> None:
        self.link = link
        self._peers = peers
        self._node = link.remote.node
        self._arriving: IncomingSnapshot | None = None

    def take(self, link: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        peers, node = self._peers, self._node
        read, received = peers._read, peers._received
        for kind, payload in frames:
            if kind == MESSAGE:
                received(node, read(payload))
            elif kind == QUESTION and len(payload) >= 8:
                self._question(payload)
            elif kind == FOUNDED:
                link.close()  # this node has heard of it since it was dialled; ordinary ones follow
            else:
                self._snapshot(kind, payload)

    def _question(self, payload: bytes) -> None:
        number, link = payload[:8], self.link

        def answer(data: bytes) -> None:
            if not link.send(ANSWER, number, data) and not link.closed:
                link.fail(CloseReason.OVERFLOW, "reads no answers")

        self._peers._asked(self._node, payload[8:], answer)

    def _snapshot(self, kind: int, payload: bytes) -> None:
        try:
            if kind == STREAM:
                stream = _stream.decode(payload)
                self._let_go("another snapshot follows")
                self._arriving = IncomingSnapshot(self.link, stream.number)
                self._peers._run(self._store(self._arriving, stream))
            elif kind == CHUNK:
                number, ends = _CHUNK.unpack_from(payload)
                if self._arriving is not None and self._arriving.number == number:
                    self._arriving.take(payload[_CHUNK.size :], ends)
            else:
                raise FrameError(CloseReason.OUT_OF_TURN, f"a frame of kind {kind} from a peer")
        except (MsgspecError, UnicodeDecodeError, struct.error) as error:
            raise FrameError(CloseReason.MALFORMED, str(error)) from None

    async def _store(self, arriving: IncomingSnapshot, stream: _Stream) -> None:
        ok = False
        try:
            pieces = arriving.pieces()
            await self._peers._streamed(self._node, stream.generation, stream.snapshot, pieces)
            ok = True
        except Exception as error:
            bug = not isinstance(error, DoyenError)
            log.warning("snapshot of node %r not stored: %s", self._node, error, exc_info=bug)
        finally:
            if self._arriving is arriving:
                self._arriving = None
            self.link.send(STORED, _CHUNK.pack(arriving.number, ok))

    def _let_go(self, why: str) -> None:
        if self._arriving is not None:
            self._arriving.end(why)
            self._arriving = None

    def ended(self, link: FrameConnection, end: End) -> None:
        self._let_go(f"the link ended: {end.value}")
        if self._peers._callers.get(self._node) is self:
            del self._peers._callers[self._node]
