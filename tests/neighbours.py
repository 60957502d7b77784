"""Nodes without a driver: a listener, its peers, and a record of what they received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from msgspec.msgpack import Decoder

from doyen.quorum.consensus.core import Membership, Message, Received, Snapshot
from doyen.quorum.node.listener import Listener
from doyen.quorum.node.membership import Members, NodeMember
from doyen.quorum.node.peers import Peers
from doyen.quorum.protocol.connection import ConnectionErrors, End, FrameConnection, dial
from doyen.quorum.protocol.handshake import ConnectionIdentity
from doyen.quorum.protocol.security import Role, Security

HOST = "127.0.0.1"
SECRET = b"a secret long enough"
OPEN = Security()
UNNAMED_CLIENT = ConnectionIdentity("", "", 5)
SNAPSHOT = Snapshot(7, 3, Membership(("n1", "n2")))


class Beat(Message, frozen=True, array_like=True, tag=True, gc=False):
    count: int
    data: bytes = b""


class Text(Message, frozen=True, array_like=True, tag=True, gc=False):
    text: str


def run(
    work: Coroutine[Any, Any, None],
    within_s: float = 30.0,
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """On a loop that complains of nothing."""

    async def watched() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context)
        )
        async with asyncio.timeout(within_s):
            await work
        assert not complaints

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(watched())


def _bug() -> tuple[int, str, bytes]:
    raise LookupError("a bug")


class Anyone(Members):
    """Accepts every peer."""

    def __init__(self, node: str) -> None:
        async def save(member: NodeMember) -> None: ...

        super().__init__(node, {}, NodeMember(""), save)

    @property
    def everyone(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(10))

    def admit(self, *_: Any) -> None: ...

    def check(self, *_: Any) -> None: ...


class Node:
    """A node that others can reach. `events` is what its transport reported, in order."""

    def __init__(
        self,
        name: str,
        *,
        cluster: str = "c",
        incarnation: int = 0,
        security: Security = OPEN,
        listener: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.me = ConnectionIdentity(cluster, name, incarnation or hash(name))
        self.errors = ConnectionErrors()
        decode = Decoder(Beat | Text).decode
        settings = {"members": Anyone(name), **settings}
        self.peers = Peers(self.me, security, decode=decode, errors=self.errors, **settings)
        self.clients: list[FrameConnection] = []
        self.frames: list[tuple[int, bytes]] = []
        self.ends: list[End] = []
        self.listener = Listener(
            self.me,
            security,
            peers=self.peers.admit,
            clients=self._welcome,
            pages={"/healthz": lambda: (200, "text/plain", b"fine\n"), "/bug": _bug},
            errors=self.errors,
            **(listener or {}),
        )
        self.port = 0
        self.events: list[tuple[Any, ...]] = []
        self.streams: list[tuple[str, int, Snapshot, list[bytes]]] = []
        self.answer: Callable[[bytes, Callable[[bytes], None]], None]
        self.answer = lambda question, answer: answer(b"re: " + question)
        self.slowly: Callable[[], Coroutine[Any, Any, Any]] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"doyen://{self.address}"

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.errors.counts)

    def _welcome(self, link: FrameConnection) -> None:
        self.clients.append(link)
        link.welcome(
            lambda _, frames: self.frames.extend(frames), lambda _, end: self.ends.append(end)
        )

    async def open(self, port: int = 0) -> Node:
        self.port = await self.listener.listen(HOST, port)
        self.peers.start(
            self._step,
            lambda peer, question, answer: self.answer(question, answer),
            self._store,
        )
        return self

    def _step(self, event: Any) -> None:
        more = (event.message,) if isinstance(event, Received) else ()
        self.events.append((type(event).__name__.lower(), event.peer, *more))

    async def _store(
        self, peer: str, generation: int, snapshot: Snapshot, pieces: AsyncIterator[bytes]
    ) -> None:
        got: list[bytes] = []
        self.streams.append((peer, generation, snapshot, got))
        async for piece in pieces:
            if self.slowly is not None:
                await self.slowly()
            got.append(piece)

    def know(self, *others: Node) -> None:
        self.peers.reach({other.me.node: other.address for other in others})

    def heard(self) -> list[Message]:
        return [event[2] for event in self.events if event[0] == "received"]

    def links(self) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[0] != "received"]

    async def close(self) -> None:
        await self.listener.close()
        await self.peers.close()

    def die(self) -> None:
        """As a process does: every connection ends without a reason."""
        self.listener.stop_listening()
        for link in [
            *self.peers.connections.values(),
            *(c.connection for c in self.peers.incoming.values()),
        ]:
            link.abort()
        for link in self.clients:
            link.abort()
        self.peers.reach({})


class Nodes:
    """Neighbours that are gone when it is left."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Nodes:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def add(self, name: str, port: int = 0, **settings: Any) -> Node:
        neighbour = Node(name, **settings)
        self._stack.push_async_callback(neighbour.close)
        return await neighbour.open(port)


@dataclass
class Caller:
    """A client's side of a link."""

    link: FrameConnection
    frames: list[tuple[int, bytes]]
    ends: list[End]


async def call(
    address: str, me: ConnectionIdentity = UNNAMED_CLIENT, role: Role = "client", **settings: Any
) -> Caller:
    frames: list[tuple[int, bytes]] = []
    ends: list[End] = []

    def take(_: FrameConnection, some: Sequence[tuple[int, bytes]]) -> None:
        frames.extend(some)

    settings = {"security": OPEN, **settings}
    link = await dial(
        address, me, role=role, on_frames=take, on_end=lambda _, end: ends.append(end), **settings
    )
    return Caller(link, frames, ends)
