"""Who lives in a quorum's world: nodes and candidates, each a process on a machine of its own.

A node is put together as `node.server` does it, but for the journal, which is the lab's, since it
must be able to forget. A candidate is a session on `doyen://`, standing for one election.

Imports the node, the session and the machines.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.msgpack import Decoder

from doyen.errors import DoyenError, OutcomeUnknown, StoreError
from doyen.lab.machines import Killed, OwnClock, Process
from doyen.lab.plan import stream
from doyen.node.driver import Driver
from doyen.node.journal import MemoryJournal
from doyen.node.machine import KEYSPACE, USER, Machine
from doyen.node.peers import Peers
from doyen.node.service import Service
from doyen.node.state import StateMachine
from doyen.presence import Settings as SessionSettings
from doyen.quorum.keyspace import Keyspace
from doyen.quorum.link import Link, Tally
from doyen.quorum.versions import FIRST
from doyen.quorum.wire import Identity, Listener, Security
from doyen.runtime import InlineRuntime
from doyen.session import Session
from doyen.stand import Recipe
from doyen.store import Context, open_store

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld

__all__ = ["CandidateHost", "Host", "NodeHost", "decode_swap"]

RECIPES: list[Recipe] = ["line", "line", "race"]
TTL_S = 2.0
ELECTION = "lab"

_encode = msgspec.msgpack.Encoder().encode
decode_swap = Decoder(tuple[int, int, int, int]).decode
_state = Decoder(tuple[int, dict[int, int]]).decode


class Registers(StateMachine):
    """What proposers swap. Tells the world what it applies, as the how manieth."""

    def __init__(self, applied: Callable[[int, bytes], None]) -> None:
        self._applied = applied
        self.count = 0
        self.values: dict[int, int] = {}

    def apply(self, command: bytes) -> int | None:
        _, _, key, value = decode_swap(command)
        before = self.values.get(key)
        self.values[key] = value
        self.count += 1
        self._applied(self.count, command)
        return before

    def snapshot(self) -> Iterator[bytes]:
        return iter([_encode((self.count, self.values))])

    def restore(self, pieces: Iterable[bytes]) -> None:
        self.count, self.values = _state(b"".join(pieces))


class Disk(MemoryJournal):
    """A journal that takes its time, and forgets what was not synced."""

    sync_s = 0.001
    chance: random.Random
    fuse: Callable[[], None] = staticmethod(lambda: None)
    failed: Callable[[BaseException], None]

    def start(
        self, persisted: Callable[[int], None], failed: Callable[[BaseException], None]
    ) -> None:
        super().start(persisted, failed)
        self.failed = failed

    def _enqueue(self, records: list[Any], token: int) -> None:
        self.fuse()
        if not self._queue:
            self._loop.call_later(self.sync_s, self._flush)
        self._queue.append((records, token))

    def crash(self) -> None:
        queued, self._queue = self._queue, []
        for records, _ in queued[: self.chance.randint(0, len(queued))]:
            for record in records:
                self._ledger.advance(record)
        self._closed = True

    def again(self) -> Disk:
        reopened = super().reopen()
        reopened.__class__ = Disk
        assert isinstance(reopened, Disk)
        reopened.chance, reopened.sync_s = self.chance, self.sync_s
        return reopened


class Host:
    """A machine: what runs there, its clock, and, under a node, its disk."""

    def __init__(self, world: QuorumWorld, name: str, number: int) -> None:
        self.world = world
        self.name = name
        self.number = number
        self.rng = stream(world.noise, name)
        self.clock = OwnClock(world.clock, self.rng.uniform(0.0, 1000.0))
        self.process: Process | None = None
        self.lives = 0
        self.downs = 0
        self.fuse = -1
        self.fuse_told = True
        self.fuse_down_s = 0.0

    @property
    def up(self) -> bool:
        return self.process is not None and not self.process.dead

    def start(self) -> None:
        if self.up:
            return
        dead = self.process
        self.lives += 1
        self.process = Process(self.world.loop, self.name, self.number * 1000 + self.lives)
        if dead is not None:
            self.world.network.back(self.process, dead)
            self.world.dead.append(dead)
        self.process.start(self.live())

    async def live(self) -> None:
        raise NotImplementedError

    def stop(self, *, told: bool) -> None:
        if self.up:
            assert self.process is not None
            self.fuse = -1
            self.world.network.kill(self.process, told=told)
            self.stopped()

    def stopped(self) -> None:
        """What else a crash does."""

    def burn(self) -> None:
        """An effect is about to be carried out. If the fuse is at its end, it is not."""
        if self.fuse >= 0:
            if self.fuse == 0:
                self.world.blow(self)
                raise Killed
            self.fuse -= 1


class NodeHost(Host):
    """A node, and proposers on it."""

    def __init__(self, world: QuorumWorld, name: str, number: int) -> None:
        super().__init__(world, name, number)
        self.disk = Disk(import_module(world.where).STATE)
        self.disk.chance = self.rng
        self.disk.sync_s = world.plan.weather.fsync_s
        self.driver: Driver | None = None
        self.registers = Registers(world.applied)

    async def live(self) -> None:
        world = self.world
        me = Identity("lab", self.name, self.number * 1_000_000 + self.lives)
        tally = Tally()
        decode = Decoder(import_module(world.where).MESSAGES).decode
        peers = Peers(me, Security(), decode=decode, tally=tally, jitter=self.rng.random)
        self.disk = self.disk.again() if self.lives > 1 else self.disk
        self.disk.fuse = self.burn
        core = world.make(
            self.name,
            world.membership,
            self.disk.recovered,
            settings=world.settings,
            jitter=self.rng.random,
            now=self.clock.now(),
        )
        world.cluster.started(core, self.disk.recovered)
        keyspace = Keyspace(FIRST)
        self.registers = Registers(world.applied)
        driver = Driver(
            core,
            self.disk,
            peers,
            Machine({KEYSPACE: keyspace, USER: self.registers}),
            self.clock,
            incarnation=f"{me.incarnation:x}",
            abort=self._abort,
        )
        service = Service(
            driver, keyspace, self.clock, election_s=world.settings.election_timeout_s
        )

        def admit(link: Link) -> None:
            (peers if link.role == "peer" else service).admit(link)

        driver.on_role(partial(world.role_changed, self))
        self.driver = driver
        await driver.start()
        assert self.process is not None
        world.network.listen(self.process, lambda: Link(Listener(me, None), tally, admit=admit))
        await self._propose(driver)

    def _abort(self, error: BaseException) -> None:
        self.world.aborted(self, error)

    async def _propose(self, driver: Driver) -> None:
        """Swap and read, one after the other, for as long as the node lives."""
        world, rng = self.world, self.rng
        while True:
            await asyncio.sleep(rng.expovariate(1 / world.plan.pause_s))
            operation = world.begin(self, writes=rng.random() < 0.5)
            try:
                if operation.value is None:
                    await driver.barrier()
                    operation.position = self.registers.count - 0.5
                    result = self.registers.values.get(operation.key)
                else:
                    command = (operation.client, operation.seq, operation.key, operation.value)
                    result = await driver.propose(USER, _encode(command))
            except OutcomeUnknown:
                continue
            except StoreError:
                world.refused(operation)
                continue
            world.end(operation, result)

    def stopped(self) -> None:
        self.disk.crash()
        self.world.cluster.crashed(self.name)
        self.driver = None


class CandidateHost(Host):
    """A candidate that never gives up."""

    async def live(self) -> None:
        world = self.world
        asked = SessionSettings(
            url="doyen://lab", ttl_s=TTL_S, stop_budget_s=0.01, sinks=(world.oracle.hear,)
        )
        nodes = ",".join(f"{name}:1" for name in world.plan.names)
        while True:
            try:
                store = await open_store(f"doyen://{nodes}", Context(self.clock, lambda _: None))
                runtime = InlineRuntime(self.clock, self.rng.getrandbits(32))
                async with Session(asked, runtime, store) as session:
                    async for campaign in session.campaigns(
                        ELECTION, name=self.name, recipe=self.rng.choice(RECIPES)
                    ):
                        async with campaign as term:
                            world.oracle.entered(self.name, term)
                            await asyncio.sleep(self.rng.uniform(0.0, 4 * TTL_S))
            except DoyenError:
                await asyncio.sleep(0.2)
