"""Three drivers on virtual time: a network that loses, delays and cuts, and disks that crash.

`World` holds them to the invariants of consensus after every step. `storm` has clients write and
read while nodes crash (between any two effects), are cut off and come back; then everything heals,
and what the clients received is compared with what is there.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import suppress
from typing import Any, cast

import msgspec

from doyen.errors import CommandFailed, DoyenError, OutcomeUnknown, StoreUnavailable
from doyen.lease.clock import VirtualClock
from doyen.quorum.consensus.core import (
    Connected,
    CoreEvent,
    Disconnected,
    Install,
    LogEntry,
    Membership,
    Message,
    Persist,
    Persisted,
    Received,
    Recovered,
    Role,
    Snapshot,
)
from doyen.quorum.consensus.invariants import ClusterView, check
from doyen.quorum.consensus.raft import STATE, Raft, RaftSettings
from doyen.quorum.keyspace.versions import IDENTIFIED, NEWEST
from doyen.quorum.node import StateMachine
from doyen.quorum.node.data_directory import Installed, Kept, Ledger, PutEntries, Stated, Took
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.proposals import ProposalLimits
from doyen.quorum.node.replicated import USER, Command, ReplicatedMachines
from doyen.quorum.protocol.frames import MAX_FRAME
from doyen.testing.virtual import run_virtual
from support import runner

KEEPALIVE_S = 1.0
"""How long a link may be silent before it is given up."""
VOTERS = ("n1", "n2", "n3")


class Tally(StateMachine):
    """Counts, and remembers in which order: a command done twice is seen twice."""

    def __init__(self) -> None:
        self.done: list[bytes] = []

    def apply(self, command: bytes) -> int:
        if command.startswith(b"fail"):
            raise ValueError("as asked" + "!" * int(command[4:] or 0))
        self.done.append(command)
        return len(self.done)

    def snapshot(self) -> Iterator[bytes]:
        return iter([msgspec.msgpack.encode(self.done)])

    def restore(self, pieces: Iterable[bytes]) -> None:
        self.done = msgspec.msgpack.decode(b"".join(pieces), type=list[bytes])


class Disk:
    """A journal in memory that takes its time."""

    sync_s = 0.0005

    def __init__(self, ledger: Ledger | None = None, stored: Any = None) -> None:
        self._ledger = ledger = ledger or Ledger()
        self._stored: dict[str, list[bytes]] = stored or {}
        self._queue: list[tuple[list[Any], int]] = []
        self._received: Kept | None = None
        self._latest = kept = ledger.kept
        self.full = False
        self._closed = False
        self.recovered = Recovered(
            msgspec.msgpack.decode(ledger.state, type=STATE) if ledger.state else None,
            kept.snapshot if kept else None,
            [*ledger.following()],
        )

    def reopen(self) -> Disk:
        """What a restart finds: what was not yet reported as persisted is lost."""
        self._closed = True
        return Disk(self._ledger, self._stored)

    def crash(self, written: int) -> None:
        """The first few of what was queued are on disk all the same, and were not reported."""
        queued, self._queue = self._queue, []
        for records, _ in queued[:written]:
            for record in records:
                self._ledger.advance(record)
        self._closed = True

    def start(
        self, persisted: Callable[[int], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._persisted = persisted

    def persist(self, effect: Persist) -> None:
        records: list[Any] = []
        if effect.state is not None:
            records.append(Stated(msgspec.msgpack.encode(effect.state)))
        if effect.first:
            records.append(PutEntries(effect.first, effect.keep, effect.entries))
        self._enqueue(records, effect.token)

    @property
    def queued(self) -> int:
        puts = [each for records, _ in self._queue for each in records]
        return sum(
            len(entry.data) for put in puts if isinstance(put, PutEntries) for entry in put.entries
        )

    async def take_snapshot(self, snapshot: Snapshot, pieces: Iterator[bytes]) -> None:
        if self.full:
            raise StoreUnavailable("there is no room for a snapshot")
        kept = self._keep(snapshot, list(pieces))
        if self._latest is None or snapshot.index > self._latest.snapshot.index:
            self._latest = kept
            self._enqueue([Took(kept)], 0)

    async def read_snapshot(self) -> tuple[Snapshot, AsyncIterator[bytes]]:
        assert self._latest is not None
        pieces = self._stored[self._latest.file]

        async def each() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        return self._latest.snapshot, each()

    async def receive_snapshot(self, snapshot: Snapshot, pieces: AsyncIterator[bytes]) -> None:
        self._received = self._keep(snapshot, [piece async for piece in pieces])

    def install(self, effect: Install) -> None:
        kept = self._received
        assert kept is not None
        assert kept.snapshot == effect.snapshot
        self._latest, self._received = kept, None
        self._enqueue([Installed(kept)], effect.token)

    async def close(self) -> None:
        self._flush()
        self._closed = True

    def _keep(self, snapshot: Snapshot, pieces: list[bytes]) -> Kept:
        kept = Kept(snapshot, f"snapshot-{snapshot.index}-{len(self._stored)}")
        self._stored[kept.file] = pieces
        return kept

    def _enqueue(self, records: list[Any], token: int) -> None:
        if not self._queue:
            asyncio.get_running_loop().call_later(self.sync_s, self._flush)
        self._queue.append((records, token))

    def _flush(self) -> None:
        if self._closed:
            return
        queued, self._queue = self._queue, []
        for records, _ in queued:
            for record in records:
                self._ledger.advance(record)
        if token := max((token for _, token in queued), default=0):
            self._persisted(token)


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
        step: Callable[[CoreEvent], None],
        asked: Callable[[str, bytes, Callable[[bytes], None]], None],
        streamed: Callable[[str, int, Snapshot, AsyncIterator[bytes]], Awaitable[None]],
    ) -> None:
        self.step, self.asked, self.streamed = step, asked, streamed
        self.open = True
        self._world.opened(self._node)

    def reach(self, addresses: dict[str, str]) -> None:
        self.addresses = addresses

    def supports(self, peer: str) -> int:
        link = self._world.links.get(peer)
        met = link is not None and link.open and self._world.joined(self._node, peer)
        if not met:
            return IDENTIFIED if peer in self._world.identified else 0
        return self._world.supports.get(peer, NEWEST)

    async def newest(self, node: str, address: str) -> int | None:
        return self.supports(node) or None

    def require(self, version: int) -> None:
        self.required = version

    def send(self, peer: str, message: Message) -> None:
        self._world.carry(self._node, peer, lambda link: link.step(Received(self._node, message)))

    async def ask(self, peer: str, question: bytes) -> bytes:
        world = self._world
        if peer not in world.links or not world.links[peer].open:
            raise StoreUnavailable(f"{peer} is not there")
        answer: asyncio.Future[bytes] = world.loop.create_future()
        world.asking.append((peer, answer))

        def put(link: Link) -> None:
            link.asked(self._node, question, respond)

        def respond(given: bytes) -> None:
            if len(given) >= MAX_FRAME:
                raise ValueError(f"a frame of {len(given)} bytes")  # as connections do
            world.carry(peer, self._node, give(given), lossy=False)

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


# Mutants.


class Hasty(Driver):
    """Does not wait for the disk."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.pump._durable = sys.maxsize
        vars(self.pump)["persisted"] = lambda token: self.pump.step(Persisted(token))


class Stale(Driver):
    """Reads without a round of the quorum."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        applier = self.applier
        vars(self.reads)["when_current"] = lambda call: applier.when(applier.index, call)


class Forgetful(ReplicatedMachines):
    """Does again what it has done."""

    def apply(self, index: int, commands: Sequence[Command]) -> list[Any]:
        return [self._applies[command.target](command.body) for command in commands]


class Credulous(Driver):
    """Takes what stands at the place of its own entry for its own."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        applier, apply, appended = self.applier, self.applier._apply, self.proposals.appended

        def take(entry: LogEntry) -> int:
            if batch := appended.get(applier.index + 1):
                batch.generation = entry.generation
            return apply(entry)

        vars(applier)["_apply"] = take
        vars(self.proposals)["entered"] = lambda generation, index: None


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
        self.identified: set[str] = set()
        """Nodes whose member ids are recorded, so that something is known of them when they are not
        connected (see `Peers.supports`)."""
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
        disk = self.disks[name] = old.reopen() if old else Disk()
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
            cast(Any, disk),
            cast(Any, link),
            self.machine({USER: tally}),
            self.clock,
            incarnation=f"{self._starts}",
            limits=self.limits,
            abort=lambda error: self.aborted.append((name, error)),
        )
        self._arm(driver, link)
        await driver.start()

    def _arm(self, driver: Driver, link: Link) -> None:
        """Have the node crash before the effect that `crash_in` counts down to."""
        name = driver.id

        def armed(carry_out: Callable[..., None]) -> Callable[..., None]:
            def do(*effect: Any) -> None:
                if name in self.crash_in:
                    self.crash_in[name] -= 1
                    if self.crash_in[name] < 0:
                        self.crash(name)
                        raise Crashed
                carry_out(*effect)

            return do

        vars(link)["send"] = armed(link.send)

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
            self.links[node].step(Connected(peer))

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
            self.links[node].step(Disconnected(peer))

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

    def __init__(self, world: World, *, together: bool = False) -> None:
        """`together`: they submit several commands at a time, of which some fail."""
        self.world = world
        self.together = together
        self.acknowledged: dict[bytes, int] = {}
        self.highest = 0
        self.wrong: list[str] = []
        self.reads = 0
        self.unknown = 0

    async def write(self, *commands: bytes) -> None:
        """Submit these together, and wait for the outcome of each. A result is a place in the order
        of all; whoever began later comes later."""
        node = self._somebody()
        before = self.highest
        waiting = {*commands}
        settled = self.world.loop.create_future()

        def settle(command: bytes, place: Any, error: BaseException | None) -> None:
            if command not in waiting:
                self.wrong.append(f"{command!r} has two outcomes")
                return
            waiting.remove(command)
            if not waiting:
                settled.set_result(None)
            self.unknown += isinstance(error, OutcomeUnknown)
            carried_out = error is None or isinstance(error, CommandFailed)
            if carried_out and (error is None) is command.startswith(b"fail"):
                self.wrong.append(f"{command!r} has the result {place} and the error {error!r}")
            elif error is None:
                if place <= before:
                    earlier = f"behind an earlier {before}"
                    self.wrong.append(f"{command!r} was put at {place}, {earlier}")
                self.acknowledged[command] = place
                self.highest = max(self.highest, place)

        def settle_all(settled: Sequence[bytes], places: Sequence[Any]) -> None:
            for command, place in zip(settled, places, strict=True):
                settle(command, place, None)

        if node.proposals.submit_all(USER, commands, commands, settle, settle_all):
            await settled

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
                begin, count = count, count + 1
                if self.together:
                    count += self.world.random.randrange(4)
                commands = [b"%d-%d" % (client, each) for each in range(begin, count)]
                if self.together and self.world.random.random() < 0.2:
                    commands.insert(self.world.random.randrange(len(commands)), b"fail")
                await self.write(*commands)
            await asyncio.sleep(self.world.random.uniform(0, 0.02))


async def misfortune(world: World, until: float, *, full: bool = False) -> None:
    """Crash, cut, slow down: one node at a time, or the power fails for all of them."""
    chance = world.random
    while world.loop.time() < until:
        await asyncio.sleep(chance.uniform(0.05, 0.8))
        node = chance.choice([*world.nodes])
        what = chance.randrange(8 + full)
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
        elif what == 8:
            world.disks[node].full = True
        elif what == 3:
            world.disks[node].sync_s = chance.choice([0.0001, 0.02, 0.3])
        else:
            world.loss = chance.choice([0.0, 0.02, 0.2])
        await asyncio.sleep(chance.uniform(0.05, 2.0))
        if full:
            world.disks[node].full = False
        world.heal()
        await revive(world)


async def revive(world: World) -> None:
    world.crash_in.clear()
    for name in world.voters:
        if name not in world.nodes:
            await world.boot_one(name)


async def storm(
    world: World, seconds: float = 12.0, clients: int = 6, *, together: bool = False
) -> Clients:
    """A run, and what is wrong about it. With `together`, disks are full at times as well."""
    await world.boot()
    people = Clients(world, together=together)
    until = world.loop.time() + seconds
    async with asyncio.TaskGroup() as tasks:
        for client in range(clients):
            tasks.create_task(people.work(client, until))
        tasks.create_task(misfortune(world, until, full=together))
    world.heal()
    world.loss = 0.0
    await revive(world)
    leader = await world.leader()
    await leader.propose(USER, b"last")
    for node in world.nodes.values():
        await node.barrier()
    people.wrong += [f"{name}: {error!r}" for name, error in world.aborted]
    for name, node in world.nodes.items():
        if len(node.proposals) or node.proposals._live_bytes or node.proposals._identity.open:
            people.wrong.append(f"{name} counts proposals that have an outcome")
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


def run_world(main: Callable[[World], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Three nodes of which one leads."""

    async def begin() -> None:
        world = World(**options)
        await world.boot()
        await world.leader()
        await main(world)
        assert not world.aborted

    run_virtual(begin)


with_world = runner(run_world)


def follower_of(world: World) -> Driver:
    return next(node for node in world.nodes.values() if node.role is Role.FOLLOWING)
