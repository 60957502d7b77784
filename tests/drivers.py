"""Three drivers on virtual time: a network that loses, delays and cuts, and disks that crash."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any

import msgspec

from doyen.clock import VirtualClock
from doyen.consensus.core import Event, Membership, Message, Role, Settings, Snapshot
from doyen.consensus.raft import STATE, Raft
from doyen.errors import OutcomeUnknown, StoreUnavailable
from doyen.node.driver import Driver, Limits
from doyen.node.journal import MemoryJournal
from doyen.node.machine import USER, Machine
from doyen.node.ports import StateMachine

VOTERS = ("n1", "n2", "n3")


class Tally(StateMachine):
    """Counts, and remembers in which order: a command done twice is seen twice."""

    def __init__(self) -> None:
        self.done: list[bytes] = []

    def apply(self, command: bytes) -> int:
        if command == b"fail":
            raise ValueError("as asked")
        self.done.append(command)
        return len(self.done)

    def snapshot(self) -> Iterator[bytes]:
        return iter([msgspec.msgpack.encode(self.done)])

    def restore(self, pieces: Iterable[bytes]) -> None:
        self.done = msgspec.msgpack.decode(b"".join(pieces), type=list[bytes])


class Disk(MemoryJournal):
    """Takes its time."""

    sync_s = 0.0005

    def _enqueue(self, records: list[Any], token: int) -> None:
        if not self._queue:
            self._loop.call_later(self.sync_s, self._flush)
        self._queue.append((records, token))

    def reopen(self) -> MemoryJournal:
        again = super().reopen()
        again.__class__ = type(self)
        return again


class Link:
    """A node's transport in the world."""

    def __init__(self, world: World, node: str) -> None:
        self._world = world
        self._node = node
        self.open = False

    def start(
        self,
        received: Callable[[str, Message], None],
        connected: Callable[[str], None],
        disconnected: Callable[[str], None],
        asked: Callable[[str, bytes, Callable[[bytes], None]], None],
        streamed: Callable[[str, int, Snapshot, AsyncIterator[bytes]], Awaitable[None]],
    ) -> None:
        self.received, self.connected, self.disconnected = received, connected, disconnected
        self.asked, self.streamed = asked, streamed
        self.open = True
        self._world.opened(self._node)

    def reach(self, addresses: dict[str, str]) -> None:
        self.addresses = addresses

    def send(self, peer: str, message: Message) -> None:
        self._world.carry(self._node, peer, lambda link: link.received(self._node, message))

    async def ask(self, peer: str, question: bytes) -> bytes:
        world = self._world
        if peer not in world.links or not world.links[peer].open:
            raise StoreUnavailable(f"{peer} is not there")
        answer: asyncio.Future[bytes] = world.loop.create_future()
        world.asking.append((peer, answer))

        def put(link: Link) -> None:
            link.asked(
                self._node, question, lambda given: world.carry(peer, self._node, give(given))
            )

        def give(given: bytes) -> Callable[[Link], None]:
            return lambda _: None if answer.done() else answer.set_result(given)

        world.carry(self._node, peer, put, lossy=False)
        return await answer

    def send_snapshot(
        self,
        peer: str,
        generation: int,
        snapshot: Snapshot,
        pieces: AsyncIterator[bytes],
        done: Callable[[bool], None],
    ) -> None:
        self._world.start(self._stream(peer, generation, snapshot, pieces, done))

    async def _stream(
        self,
        peer: str,
        generation: int,
        snapshot: Snapshot,
        pieces: AsyncIterator[bytes],
        done: Callable[[bool], None],
    ) -> None:
        link = self._world.links.get(peer)
        ok = False
        if link and link.open and self._world.joined(self._node, peer):
            self._world.streams += 1
            await link.streamed(self._node, generation, snapshot, pieces)
            ok = link.open
        if self.open:
            done(ok)

    async def close(self) -> None:
        self._world.closed(self._node)


class World:
    """Nodes, and everything between them. One seed, one run."""

    def __init__(
        self,
        seed: int = 0,
        *,
        voters: tuple[str, ...] = VOTERS,
        limits: Limits = Limits(),  # noqa: B008
        loss: float = 0.0,
        delay_s: float = 0.001,
        check: Callable[[World], None] | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock: VirtualClock = self.loop.clock  # type: ignore[attr-defined]
        self.random = random.Random(seed)
        self.voters = voters
        self.limits = limits
        self.loss, self.delay_s = loss, delay_s
        self.check = check
        self.links: dict[str, Link] = {}
        self.nodes: dict[str, Driver] = {}
        self.tallies: dict[str, Tally] = {}
        self.disks: dict[str, Disk] = {}
        self.cuts: set[tuple[str, str]] = set()
        self.asking: list[tuple[str, asyncio.Future[bytes]]] = []
        self.aborted: list[tuple[str, BaseException]] = []
        self.streams = 0
        self.steps = 0
        self._starts = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sent: dict[tuple[str, str], float] = {}

    async def boot(self, *names: str, membership: Membership | None = None) -> None:
        for name in names or self.voters:
            await self.boot_one(name, membership)

    async def boot_one(self, name: str, membership: Membership | None = None) -> None:
        old = self.disks.get(name)
        disk = self.disks[name] = old.reopen() if old else Disk(STATE)  # type: ignore[assignment]
        core = Raft(
            name,
            membership or Membership(self.voters),
            disk.recovered,
            settings=Settings(),
            jitter=self.random.random,
            now=self.clock.now(),
        )
        self._watch(core)
        self._starts += 1
        tally = self.tallies[name] = Tally()
        link = self.links[name] = Link(self, name)
        self.nodes[name] = driver = Driver(
            core,
            disk,
            link,
            Machine({USER: tally}),
            self.clock,
            incarnation=f"{self._starts}",
            limits=self.limits,
            abort=lambda error: self.aborted.append((name, error)),
        )
        await driver.start()

    def _watch(self, core: Raft) -> None:
        """Look at everything after every step."""
        handle = core.handle

        def watched(event: Event, now: float) -> list[Any]:
            effects = handle(event, now)
            self.steps += 1
            if self.check is not None:
                self.check(self)
            return effects

        core.handle = watched  # type: ignore[method-assign]

    def opened(self, node: str) -> None:
        for peer, link in self.links.items():
            if peer != node and link.open:
                self.loop.call_later(self.delay_s, self._meet, node, peer)
                self.loop.call_later(self.delay_s, self._meet, peer, node)

    def _meet(self, node: str, peer: str) -> None:
        if self.links[node].open and self.links[peer].open:
            self.links[node].connected(peer)

    def closed(self, node: str) -> None:
        """The others see the connection end, and whoever waits for an answer learns it."""
        self.links[node].open = False
        for peer, answer in self.asking:
            if peer == node and not answer.done():
                answer.set_exception(OutcomeUnknown(f"{node} is gone"))
        for peer, link in self.links.items():
            if link.open and self.joined(node, peer):
                self.loop.call_later(self.delay_s, self._part, peer, node)

    def _part(self, node: str, peer: str) -> None:
        if self.links[node].open:
            self.links[node].disconnected(peer)

    def crash(self, node: str) -> None:
        self.nodes.pop(node).crash()
        self.disks[node]._closed = True
        self.closed(node)

    def joined(self, one: str, other: str) -> bool:
        return (one, other) not in self.cuts and (other, one) not in self.cuts

    def cut(self, node: str) -> None:
        """Silence around a node."""
        self.cuts |= {(node, peer) for peer in self.links if peer != node}

    def heal(self) -> None:
        self.cuts.clear()

    def carry(
        self, node: str, peer: str, deliver: Callable[[Link], None], *, lossy: bool = True
    ) -> None:
        link = self.links.get(peer)
        if link is None or not link.open or not self.joined(node, peer):
            return
        if lossy and self.random.random() < self.loss:
            return
        at = self.loop.time() + self.delay_s * self.random.uniform(0.5, 1.5)
        at = self._sent[node, peer] = max(at, self._sent.get((node, peer), 0.0))

        def arrive() -> None:
            if self.links.get(peer) is link and link.open and self.joined(node, peer):
                deliver(link)

        self.loop.call_at(at, arrive)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until(self, condition: Callable[[], Any], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.001)

    def leaders(self) -> list[Driver]:
        return [node for node in self.nodes.values() if node.role is Role.LEADING]

    async def leader(self) -> Driver:
        """Whoever leads, once everyone who is there knows it."""

        def agreed() -> bool:
            known = {node.leader for node in self.nodes.values()}
            return len(known) == 1 and None not in known and len(self.leaders()) == 1

        await self.until(agreed)
        (leader,) = self.leaders()
        return leader
