"""Who lives in a quorum's world: nodes and candidates, each a process on a machine of its own.

A node is put together as `node.server` does it, on a data directory in memory (see `files`), with
small limits: what happens to a real node once an hour happens here several times a run. A
candidate is a session on `doyen://`, standing for one election.

Imports the node, the session and the machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.msgpack import Decoder

from doyen.election.options import Recipe
from doyen.election.options import SessionSettings as SessionSettings
from doyen.errors import DoyenError, OutcomeUnknown, StoreError, StoreUnusable
from doyen.lab.files import FOLDER, Files, LabJournal
from doyen.lab.machines import Killed, OwnClock, Process
from doyen.lab.plan import stream
from doyen.lease.runtime import InlineRuntime
from doyen.quorum.keyspace.commands import RemoveEndedKeys, decode_command
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.node.data_directory import read_member, write_member
from doyen.quorum.node.driver import Answer, Driver
from doyen.quorum.node.journal import DirectoryIdentity as Owner
from doyen.quorum.node.lease_keeper import decode_leases
from doyen.quorum.node.membership import Members, NodeMember, opening
from doyen.quorum.node.peers import Peers
from doyen.quorum.node.replicated import KEYSPACE, USER, Command, ReplicatedMachines
from doyen.quorum.node.server import record_members
from doyen.quorum.node.service import Service
from doyen.quorum.node.state_machine import StateMachine
from doyen.quorum.protocol.connection import ConnectionErrors, FrameConnection
from doyen.quorum.protocol.handshake import ConnectionIdentity, ServerHandshake
from doyen.quorum.protocol.security import Security
from doyen.session import Session
from doyen.stores.port import Context, open_store

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld

__all__ = [
    "CLIENT_SECRET",
    "SLICE_KEYS",
    "CandidateHost",
    "NodeHost",
    "SimulatedMachine",
    "decode_swap",
]

RECIPES: list[Recipe] = ["line", "line", "race"]
TTL_S = 2.0
ELECTION = "lab"
SLICE_KEYS = 1
"""How many keys of ended leases one command removes: few, so that ends take several."""
HISTORY = 12
"""How many changes nodes remember for watches: few, so that some are resumed too late."""
QUOTA_BYTES = 12_000
"""Of the keyspace: few, so that clients' writes are refused now and then."""
CLIENT_SECRET = "the-secret-of-clients"
SECURITY = Security(
    secret=CLIENT_SECRET.encode(),
    peer_secret=b"the-secret-of-peers",
    admin_secret=b"the-secret-of-admins",
)

_encode = msgspec.msgpack.Encoder().encode
decode_swap = Decoder(tuple[int, int, int, int]).decode
_UNKNOWN = _encode([99])
"""A command that no release knows."""
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


class OlderKeyspace(Keyspace):
    """Of a release that does not know `Reap`."""

    def apply(self, command: bytes) -> bytes:
        return super().apply(
            _UNKNOWN if isinstance(decode_command(command), RemoveEndedKeys) else command
        )


class HeardDriver(Driver):
    """A driver that tells the world which renewals arrive at it as the leader."""

    heard: Callable[[list[int]], None]

    def on_question(self, handler: Callable[[bytes, Answer], None]) -> None:
        def asked(question: bytes, answer: Answer) -> None:
            self.heard(decode_leases(question))
            handler(question, answer)

        super().on_question(asked)


class JudgedMachine(ReplicatedMachines):
    """A node's machine, every result of which is held against the log."""

    def __init__(
        self, targets: Mapping[int, Any], judge: Callable[[int, Sequence[Any]], None]
    ) -> None:
        super().__init__(targets)
        self._judge = judge

    def apply(self, index: int, commands: Sequence[Command]) -> list[Any]:
        results = super().apply(index, commands)
        self._judge(index, results)
        return results


class SimulatedMachine:
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


class NodeHost(SimulatedMachine):
    """A node, and proposers on it."""

    def __init__(self, world: QuorumWorld, name: str, number: int, *, joining: bool) -> None:
        super().__init__(world, name, number)
        self.files = Files()
        self._full = 0
        self.sync_s = world.plan.weather.fsync_s
        self.joining = joining
        """Started with `--join`; the others with `--found`, also when they have lost everything."""
        self.lost = False
        """Its data directory was emptied, or is an older copy: it must not take part with it."""
        self.older = False
        """Of a release that does not know all commands."""
        self.journal: LabJournal | None = None
        self.driver: Driver | None = None
        self.keyspace = Keyspace(FIRST)
        self.registers = Registers(world.applied)
        self.snapshots = self.installs = 0
        """How many were taken and received, in all its lives."""

    def at(self, index: int) -> bool:
        """Whether it has applied just this much."""
        return self.driver is not None and self.driver.applied == index

    def _open(self) -> tuple[LabJournal, NodeMember]:
        """As `node.server` does it."""
        world, files = self.world, self.files
        start = partial(
            opening,
            node=self.name,
            peers=world.addresses_for(self.name),
            founding=not self.joining,
            joining=self.joining,
            folder=f"the folder of {self.name}",
        )
        journal = LabJournal(
            files,
            Owner("lab", self.name, world.protocol.name),
            import_module(world.where).STATE,
            sync_s=self.sync_s,
            chance=self.rng,
            fuse=self.burn,
            count=self._count,
        )
        found, recovered = read_member(files, FOLDER), journal.recovered
        own = start(found, blank=not (recovered.state or recovered.snapshot or recovered.entries))
        if own != found:
            write_member(files, FOLDER, own)
        return journal, own

    def _count(self, what: str) -> None:
        if what == "snapshot":
            self.snapshots += 1
        else:
            self.installs += 1

    async def _save(self, member: NodeMember) -> None:
        await asyncio.sleep(self.sync_s)
        self.burn()
        try:
            write_member(self.files, FOLDER, member)
        except (OSError, StoreUnusable) as error:
            self._abort(error)

    async def live(self) -> None:
        world = self.world
        me = ConnectionIdentity("lab", self.name, self.number * 1_000_000 + self.lives)
        tally = ConnectionErrors()
        try:
            journal, own = self._open()
        except (OSError, StoreUnusable) as error:
            self._abort(error)
            return
        self.journal = journal
        members = Members(self.name, world.addresses_for(self.name), own, self._save)
        peers = Peers(
            me,
            SECURITY,
            decode=Decoder(import_module(world.where).MESSAGES).decode,
            members=members,
            tally=tally,
            jitter=self.rng.random,
        )
        core = members.core = world.make(
            self.name,
            world.membership_for(self.name, joining=self.joining),
            journal.recovered,
            settings=world.settings,
            jitter=self.rng.random,
            now=self.clock.now(),
        )
        world.cluster.started(core, journal.recovered)
        release = OlderKeyspace if self.older else Keyspace
        self.keyspace = release(FIRST, slice_keys=SLICE_KEYS, history=HISTORY)
        self.registers = Registers(world.applied)
        driver = HeardDriver(
            core,
            journal,
            peers,
            JudgedMachine(
                {KEYSPACE: self.keyspace, USER: self.registers}, partial(world.judge_results, self)
            ),
            self.clock,
            incarnation=f"{me.incarnation:x}",
            limits=world.limits,
            abort=self._abort,
        )
        driver.heard = world.witness.heard
        service = Service(
            driver,
            self.keyspace,
            self.clock,
            election_s=world.settings.election_timeout_s,
            quota_bytes=QUOTA_BYTES,
        )

        def admit(link: FrameConnection) -> None:
            (peers if link.role == "peer" else service).admit(link)

        driver.on_role(partial(world.role_changed, self))
        self.driver = driver
        await driver.start()
        assert self.process is not None
        world.network.listen(
            self.process,
            lambda: FrameConnection(
                ServerHandshake(me, security=SECURITY, info=members.info), tally, admit=admit
            ),
        )
        if world.protocol.membership:
            driver.on_role(lambda *_: members.news.set())
            driver.pump.start_task(record_members(driver, members))
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
        self.files = self.files.after_crash(self.rng)
        self.files.fill(self._full > 0)
        self.world.cluster.crashed(self.name)
        self.driver = self.journal = None

    def fill(self, full: bool) -> None:
        """Have the disk be full, or no longer."""
        self._full += 1 if full else -1
        self.files.fill(self._full > 0)

    def slow_down(self, seconds: float) -> None:
        """Have every sync take so much longer."""
        self.sync_s = max(0.0005, self.sync_s + seconds)
        if self.journal is not None:
            self.journal.sync_s = self.sync_s


class CandidateHost(SimulatedMachine):
    """A candidate that never gives up."""

    async def live(self) -> None:
        world = self.world
        asked = SessionSettings(
            url="doyen://lab", ttl_s=TTL_S, stop_budget_s=0.01, sinks=(world.oracle.hear,)
        )
        nodes = ",".join(f"{name}:1" for name in world.plan.names)
        while True:
            try:
                store = await open_store(
                    f"doyen://{CLIENT_SECRET}@{nodes}", Context(self.clock, lambda _: None)
                )
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
