"""Three drivers on virtual time: a network that loses, delays and cuts, and disks that crash.

`World` holds them to the invariants of consensus after every step. `storm` has clients write and
read while nodes crash (between any two effects), are cut off and come back; then everything heals,
and what the clients received is compared with what is there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from doyen.errors import DoyenError, OutcomeUnknown, StoreUnavailable
from doyen.lease.clock import VirtualClock
from doyen.quorum.consensus.core import CoreEvent, Membership, Message, Role, Snapshot
from doyen.quorum.consensus.invariants import ClusterView, check
from doyen.quorum.consensus.raft import STATE, Raft, RaftSettings
from doyen.quorum.keyspace.versions import NEWEST
from doyen.quorum.node.driver import Driver, ProposalLimits
from doyen.quorum.node.interfaces import StateMachine
from doyen.quorum.node.journal import MemoryJournal
from doyen.quorum.node.replicated import USER, ReplicatedMachines

KEEPALIVE_S = 1.0
"""How long a link may be silent before it is given up."""
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

    def crash(self, written: int) -> None:
        """The first few of what was queued are on disk all the same; no one was notified."""
        queued, self._queue = self._queue, []
        for records, _ in queued[:written]:
            for record in records:
                self._ledger.advance(record)
        self._closed = True

    def reopen(self) -> Disk:
        again = super().reopen()
        again.__class__ = type(self)
        assert isinstance(again, Disk)
        return again


class Crashed(Exception):
    """Whatever this node was about to do, it does not."""


class Link:
    """A node's transport in the world."""

    def __init__(self, world: World, node: str) -> None:
        self._world = world
        self._node = node
        self.open = False
        self.addresses: dict[str, str] = {}

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

    def supports(self, peer: str) -> int:
        link = self._world.links.get(peer)
        met = link is not None and link.open and self._world.joined(self._node, peer)
        return self._world.supports.get(peer, NEWEST) if met else 0

    def require(self, version: int) -> None:
        self.required = version

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
                self._node,
                question,
                lambda given: world.carry(peer, self._node, give(given), lossy=False),
            )

        def give(given: bytes) -> Callable[[Link], None]:
            return lambda _: None if answer.done() else answer.set_result(given)

        world.carry(self._node, peer, put, lossy=False)
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                return await answer
        except TimeoutError:
            raise OutcomeUnknown(f"{peer} has fallen silent") from None

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
        limits: ProposalLimits = ProposalLimits(),  # noqa: B008
        loss: float = 0.0,
        delay_s: float = 0.001,
        driver: type[Driver] = Driver,
        machine: type[ReplicatedMachines] = ReplicatedMachines,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock: VirtualClock = self.loop.clock  # type: ignore[attr-defined]
        self.random = random.Random(seed)
        self.voters = voters
        self.limits = limits
        self.loss, self.delay_s = loss, delay_s
        self.driver, self.machine = driver, machine
        self.cluster = ClusterView()
        self.supports: dict[str, int] = {}
        """Nodes of an older release: the version of the state that each supports."""
        self.crash_in: dict[str, int] = {}
        """How many effects a node still carries out before it crashes."""
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
        disk = self.disks[name] = old.reopen() if old else Disk(STATE)
        core = Raft(
            name,
            membership or Membership(self.voters),
            disk.recovered,
            settings=RaftSettings(tail_entries=20),
            jitter=self.random.random,
            now=self.clock.now(),
        )
        self.cluster.started(core, disk.recovered)
        self._watch(core)
        self._starts += 1
        tally = self.tallies[name] = Tally()
        link = self.links[name] = Link(self, name)
        self.nodes[name] = driver = self.driver(
            core,
            disk,
            link,
            self.machine({USER: tally}),
            self.clock,
            incarnation=f"{self._starts}",
            limits=self.limits,
            abort=lambda error: self.aborted.append((name, error)),
        )
        self._arm(driver)
        await driver.start()

    def _arm(self, driver: Driver) -> None:
        """Have the node crash before the effect that `crash_in` counts down to."""
        name = driver.id

        def armed(carry_out: Callable[[Any], None]) -> Callable[[Any], None]:
            def do(effect: Any) -> None:
                if name in self.crash_in:
                    self.crash_in[name] -= 1
                    if self.crash_in[name] < 0:
                        self.crash(name)
                        raise Crashed
                carry_out(effect)

            return do

        for kind, carry_out in driver.pump.carry_out.items():
            driver.pump.carry_out[kind] = armed(carry_out)

    def _watch(self, core: Raft) -> None:
        """Look at everything after every step."""
        handle = core.handle

        def watched(event: CoreEvent, now: float) -> list[Any]:
            effects = handle(event, now)
            self.steps += 1
            check(core)
            self.cluster.stepped(core, effects)
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

    def crash(self, node: str, written: int | None = None) -> None:
        self.crash_in.pop(node, None)
        self.nodes.pop(node).crash()
        self.disks[node].crash(self.random.randrange(3) if written is None else written)
        self.cluster.crashed(node)
        self.closed(node)

    async def stop(self, node: str) -> None:
        await self.nodes[node].stop()
        self.nodes.pop(node, None)
        self.cluster.crashed(node)

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
        if lossy and peer not in self.links[node].addresses:
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
            while not condition():  # noqa: ASYNC110 - virtual time
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


class Clients:
    """Those who write and read, and what they received."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.acknowledged: dict[bytes, int] = {}
        self.highest = 0
        self.wrong: list[str] = []
        self.reads = 0
        self.unknown = 0

    async def write(self, command: bytes) -> None:
        """A result is a place in the order of all; whoever began later comes later."""
        node = self._somebody()
        before = self.highest
        try:
            place = await node.propose(USER, command)
        except DoyenError as error:
            self.unknown += isinstance(error, OutcomeUnknown)
            return
        if place <= before:
            self.wrong.append(f"{command!r} was put at {place}, behind an earlier {before}")
        self.acknowledged[command] = place
        self.highest = max(self.highest, place)

    async def read(self) -> None:
        node = self._somebody()
        tally = self.world.tallies[node.id]
        before = self.highest
        try:
            await node.barrier()
        except DoyenError:
            return
        if self.world.nodes.get(node.id) is not node:
            return
        self.reads += 1
        if len(tally.done) < before:
            self.wrong.append(f"{node.id} read {len(tally.done)} after {before} was acknowledged")
        self.highest = max(self.highest, len(tally.done))

    def _somebody(self) -> Driver:
        return self.world.random.choice([*self.world.nodes.values()])

    async def work(self, client: int, until: float) -> None:
        count = 0
        while self.world.loop.time() < until:
            if not self.world.nodes:
                await asyncio.sleep(0.01)
            elif self.world.random.random() < 0.3:
                await self.read()
            else:
                count += 1
                await self.write(b"%d-%d" % (client, count))
            await asyncio.sleep(self.world.random.uniform(0, 0.02))


async def misfortune(world: World, until: float) -> None:
    """Crash, cut, slow down: one node at a time, or the power fails for all of them."""
    chance = world.random
    while world.loop.time() < until:
        await asyncio.sleep(chance.uniform(0.05, 0.8))
        node = chance.choice([*world.nodes])
        what = chance.randrange(8)
        if what == 0:
            world.crash(node)
        elif what == 5:
            for each in [*world.nodes]:
                world.crash(each)
        elif what == 6:
            with suppress(DoyenError):
                await world.nodes[node].admin.transfer(chance.choice(world.voters))
        elif what == 7:
            await world.stop(node)
        elif what == 1:
            world.crash_in[node] = chance.randrange(12)
        elif what == 2:
            world.cut(node)
        elif what == 3:
            world.disks[node].sync_s = chance.choice([0.0001, 0.02, 0.3])
        else:
            world.loss = chance.choice([0.0, 0.02, 0.2])
        await asyncio.sleep(chance.uniform(0.05, 2.0))
        world.heal()
        await revive(world)


async def revive(world: World) -> None:
    world.crash_in.clear()
    for name in world.voters:
        if name not in world.nodes:
            await world.boot_one(name)


async def storm(world: World, seconds: float = 12.0, clients: int = 6) -> Clients:
    """A run, and what is wrong about it."""
    await world.boot()
    people = Clients(world)
    until = world.loop.time() + seconds
    async with asyncio.TaskGroup() as tasks:
        for client in range(clients):
            tasks.create_task(people.work(client, until))
        tasks.create_task(misfortune(world, until))
    world.heal()
    world.loss = 0.0
    await revive(world)
    leader = await world.leader()
    await leader.propose(USER, b"last")
    for node in world.nodes.values():
        await node.barrier()
    people.wrong += [f"{name}: {error!r}" for name, error in world.aborted]
    agreed = world.tallies[leader.id].done
    for name, tally in world.tallies.items():
        if tally.done != agreed:
            people.wrong.append(f"{name} differs")
    for command, place in people.acknowledged.items():
        if agreed[place - 1 : place] != [command]:
            people.wrong.append(f"{command!r} was acknowledged at {place} and is not there")
    if len({*agreed}) != len(agreed):
        people.wrong.append("something was carried out twice")
    return people
