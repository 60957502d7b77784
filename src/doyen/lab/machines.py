"""The machines of a world of whole nodes: nodes and candidates, each a process of its own.

A node is assembled as `node.server` does it, on a data directory in memory (see `files`), with
small limits: what happens to a real node once an hour happens here several times in a run. A
candidate is a session on `doyen://` that campaigns in one election.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.msgpack import Decoder

from doyen.election.options import Recipe, SessionSettings
from doyen.errors import DoyenError, OutcomeUnknown, StoreError, StoreUnusable
from doyen.lab.faults import PendingCrash
from doyen.lab.files import DATA_DIRECTORY, Files, LabJournal
from doyen.lab.linearizability import encode_swap
from doyen.lab.plan import stream
from doyen.lab.processes import MachineClock, Process, ProcessKilled
from doyen.lab.registers import Registers
from doyen.lease.runtime import InlineRuntime
from doyen.quorum.keyspace.commands import RemoveEndedKeys, decode_command
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.node.data_directory import DirectoryIdentity, read_member, write_member
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.leader_calls import Answer
from doyen.quorum.node.lease_keeper import decode_leases
from doyen.quorum.node.membership import FOUNDING, Members, NodeMember, initial_member
from doyen.quorum.node.peers import Peers
from doyen.quorum.node.proposals import ProposalLimits
from doyen.quorum.node.replicated import KEYSPACE, USER, Command, ReplicatedMachines
from doyen.quorum.node.server import record_members
from doyen.quorum.node.service import Service
from doyen.quorum.protocol.connection import ConnectionErrors, FrameConnection
from doyen.quorum.protocol.handshake import ConnectionIdentity, ServerHandshake
from doyen.quorum.protocol.security import Security
from doyen.session import Session
from doyen.stores.port import Context, open_store

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld

RECIPES: list[Recipe] = ["line", "line", "race"]
TTL_S = 2.0
ELECTION = "lab"
SLICE_KEYS = 1
"""The number of keys of ended leases that one command removes; few, so that several are needed."""
HISTORY = 12
"""The number of changes that nodes keep for watches; few, so that some are resumed too late."""
RESULT_VALUE = 1000
"""The longest value that a result carries; some values of clients are longer (`clients.LARGE`)."""
QUOTA_BYTES = 12_000
"""The quota of the keyspace; small, so that some writes of clients are refused."""
CLIENT_SECRET = "the-secret-of-clients"
SECURITY = Security(
    secret=CLIENT_SECRET.encode(),
    peer_secret=b"the-secret-of-peers",
    admin_secret=b"the-secret-of-admins",
)

_UNKNOWN = msgspec.msgpack.encode([99])
"""A command that no release knows."""


class OlderKeyspace(Keyspace):
    """The keyspace of a release that does not know `RemoveEndedKeys`."""

    def apply(self, command: bytes) -> bytes:
        known = not isinstance(decode_command(command), RemoveEndedKeys)
        return super().apply(command if known else _UNKNOWN)


class ObservedDriver(Driver):
    """A driver that reports the renewals that arrive at it as the leader."""

    on_renewals: Callable[[list[int]], None]

    def on_question(self, handler: Callable[[bytes, Answer], None]) -> None:
        def asked(question: bytes, answer: Answer) -> None:
            self.on_renewals(decode_leases(question))
            handler(question, answer)

        super().on_question(asked)


class CheckedMachines(ReplicatedMachines):
    """A node's state machines, with a check of every result."""

    def __init__(
        self, targets: Mapping[int, Any], check: Callable[[int, Sequence[Any]], None]
    ) -> None:
        super().__init__(targets)
        self._check = check

    def apply(self, index: int, commands: Sequence[Command]) -> list[Any]:
        results = super().apply(index, commands)
        self._check(index, results)
        return results


class SimulatedMachine:
    """A machine with a clock, and the process on it while there is one."""

    def __init__(self, world: QuorumWorld, name: str, number: int) -> None:
        self.world = world
        self.name = name
        self.number = number
        self.rng = stream(world.noise, name)
        self.clock = MachineClock(world.loop.clock, self.rng.uniform(0.0, 1000.0))
        self.process: Process | None = None
        self.starts = 0
        """The number of processes so far."""
        self.pending_crash: PendingCrash | None = None
        self.pending_restarts = 0
        """The number of faults that keep the machine down, or are about to."""

    @property
    def up(self) -> bool:
        return self.process is not None and not self.process.dead

    @property
    def client_number(self) -> int:
        """Identifies the process among all processes of the world."""
        return self.number * 1000 + self.starts

    def start(self) -> None:
        if self.up:
            return
        dead = self.process
        self.starts += 1
        self.process = Process(self.world.loop, self.name, self.client_number)
        if dead is not None:
            self.world.network.restarted(self.process, dead)
            self.world.participants.dead.append(dead)
        if self.world.observer is not None and not isinstance(self, NodeMachine):
            self.world.observer.started(self.name, None, None)
        self.process.start(self.run())

    async def run(self) -> None:
        """What the process does."""
        raise NotImplementedError

    def stop(self, *, power_loss: bool) -> None:
        """Kill the process. Its kernel closes its connections, unless the machine loses power."""
        if self.up:
            assert self.process is not None
            self.pending_crash = None
            if self.world.observer is not None:
                self.world.observer.stopped(self.name)
            self.world.network.kill(self.process, power_loss=power_loss)
            self.stopped()

    def stopped(self) -> None:
        """Called when the process was killed."""

    def before_effect(self) -> None:
        """Count an effect towards the pending crash, and kill the process if it is due."""
        if self.pending_crash is not None:
            if self.pending_crash.effects == 0:
                self.world.crash(self)
                raise ProcessKilled
            self.pending_crash.effects -= 1


class NodeMachine(SimulatedMachine):
    """A node, and a proposer in its process."""

    def __init__(self, world: QuorumWorld, name: str, number: int, *, joining: bool) -> None:
        super().__init__(world, name, number)
        self._module = import_module(world.protocol.module)
        self._settings = world.protocol.make_settings(world.plan)
        self._limits = ProposalLimits(
            snapshot_entries=world.plan.compact_every if world.protocol.snapshots else sys.maxsize,
            snapshot_bytes=sys.maxsize,
            apply_commands=20,
        )
        self.files = Files()
        self._full = 0
        self.sync_s = world.plan.latencies.fsync_s
        self.joining = joining
        """Whether it is started with `--join`. Other nodes are started with `--found`, also when
        they have lost their data directory."""
        self.data_lost = False
        """Whether its data directory was emptied, or replaced by an older copy. The other nodes
        must refuse it then."""
        self.older = False
        """Whether it runs a release that does not know all commands."""
        self.journal: LabJournal | None = None
        self.driver: Driver | None = None
        self.keyspace = Keyspace(FIRST)
        self.registers = Registers(world.registers.applied)
        self.snapshots = self.installs = 0
        """The number of snapshots taken and installed since the run began."""

    @property
    def takes_part(self) -> bool:
        """Whether its data directory is not that of a founder that waits for the others. Such a
        one has promised nothing, so nothing is lost with it."""
        member = read_member(self.files, DATA_DIRECTORY)
        return member is not None and member.pending != FOUNDING

    def at(self, index: int) -> bool:
        """Whether it is up and has applied exactly the entries up to this index."""
        return self.driver is not None and self.driver.applied == index

    def _open(self) -> tuple[LabJournal, NodeMember]:
        """Open the journal and the identity, as `node.server` does."""
        world, files = self.world, self.files
        start = partial(
            initial_member,
            node=self.name,
            peers=world.participants.addresses_for(self),
            founding=not self.joining,
            joining=self.joining,
            folder=f"the data directory of {self.name}",
        )
        journal = LabJournal(
            files,
            DirectoryIdentity("lab", self.name, world.protocol.name),
            self._module.STATE,
            sync_s=self.sync_s,
            rng=self.rng,
            before_effect=self.before_effect,
            count=self._count,
        )
        found, recovered = read_member(files, DATA_DIRECTORY), journal.recovered
        own = start(found, blank=not (recovered.state or recovered.snapshot or recovered.entries))
        if own != found:
            write_member(files, DATA_DIRECTORY, own)
        return journal, own

    def _count(self, what: str) -> None:
        if what == "snapshot":
            self.snapshots += 1
        else:
            self.installs += 1

    async def _save(self, member: NodeMember) -> None:
        await asyncio.sleep(self.sync_s)
        self.before_effect()
        try:
            write_member(self.files, DATA_DIRECTORY, member)
        except (OSError, StoreUnusable) as error:
            self._abort(error)

    async def run(self) -> None:
        world = self.world
        me = ConnectionIdentity("lab", self.name, self.number * 1_000_000 + self.starts)
        errors = ConnectionErrors()
        try:
            journal, own = self._open()
        except (OSError, StoreUnusable) as error:
            self._abort(error)
            return
        self.journal = journal
        members = Members(self.name, world.participants.addresses_for(self), own, self._save)
        peers = Peers(
            me,
            SECURITY,
            decode=Decoder(self._module.MESSAGES).decode,
            members=members,
            errors=errors,
            jitter=self.rng.random,
        )
        core = members.core = world.log.make_core(
            self.name,
            world.participants.membership_for(self),
            journal.recovered,
            settings=self._settings,
            jitter=self.rng.random,
            now=self.clock.now(),
        )
        world.log.cluster.started(core, journal.recovered)
        if world.observer is not None:
            world.observer.started(self.name, core, journal.recovered)
        release = OlderKeyspace if self.older else Keyspace
        self.keyspace = release(
            FIRST, slice_keys=SLICE_KEYS, history=HISTORY, result_value=RESULT_VALUE
        )
        self.registers = Registers(world.registers.applied)
        driver = ObservedDriver(
            core,
            journal,
            peers,
            CheckedMachines(
                {KEYSPACE: self.keyspace, USER: self.registers},
                partial(world.log.check_results, self),
            ),
            self.clock,
            incarnation=f"{me.incarnation:x}",
            limits=self._limits,
            abort=self._abort,
        )
        driver.on_renewals = world.clients.renewals_arrived
        service = Service(
            driver,
            self.keyspace,
            self.clock,
            election_s=self._settings.election_timeout_s,
            quota_bytes=QUOTA_BYTES,
        )

        def admit(connection: FrameConnection) -> None:
            (peers if connection.role == "peer" else service).admit(connection)

        driver.on_role(partial(world.role_changed, self))
        self.driver = driver
        await driver.start()
        assert self.process is not None
        world.network.listen(
            self.process,
            lambda: FrameConnection(
                ServerHandshake(me, security=SECURITY, info=members.info), errors, admit=admit
            ),
        )
        if world.protocol.membership:
            driver.pump.start_task(record_members(driver, members))
        await self._propose(driver)

    def _abort(self, error: BaseException) -> None:
        self.world.aborted(self, error)

    async def _propose(self, driver: Driver) -> None:
        """Swap and read registers, one operation after the other, for as long as the process
        runs."""
        world, rng = self.world, self.rng
        while True:
            await asyncio.sleep(rng.expovariate(1 / world.plan.pause_s))
            writes = rng.random() < 0.5
            operation = world.registers.begin(self.client_number, rng, writes=writes)
            try:
                if operation.value is None:
                    await driver.barrier()
                    operation.position = self.registers.count - 0.5
                    result = self.registers.values.get(operation.key)
                else:
                    result = await driver.propose(USER, encode_swap(operation))
            except OutcomeUnknown:
                continue
            except StoreError:
                world.registers.refused(operation)
                continue
            world.answered(operation, result)

    def stopped(self) -> None:
        self.files = self.files.after_crash(self.rng)
        self.files.fill(self._full > 0)
        self.world.log.cluster.crashed(self.name)
        self.driver = self.journal = None

    def fill(self, full: bool) -> None:
        """Make the disk full, or undo that once."""
        self._full += 1 if full else -1
        self.files.fill(self._full > 0)

    def slow_down(self, seconds: float) -> None:
        """Make every sync take longer by this much."""
        self.sync_s = max(0.0005, self.sync_s + seconds)
        if self.journal is not None:
            self.journal.sync_s = self.sync_s


class CandidateMachine(SimulatedMachine):
    """A candidate that campaigns again and again."""

    async def run(self) -> None:
        world = self.world
        settings = SessionSettings(
            url="doyen://lab", ttl_s=TTL_S, stop_budget_s=0.01, sinks=(world.terms.on_record,)
        )
        nodes = ",".join(f"{name}:1" for name in world.plan.names)
        while True:
            try:
                store = await open_store(
                    f"doyen://{CLIENT_SECRET}@{nodes}", Context(self.clock, lambda _: None)
                )
                runtime = InlineRuntime(self.clock, self.rng.getrandbits(32))
                async with Session(settings, runtime, store) as session:
                    async for campaign in session.campaigns(
                        ELECTION, name=self.name, recipe=self.rng.choice(RECIPES)
                    ):
                        async with campaign as term:
                            world.terms.entered(self.name, term)
                            await asyncio.sleep(self.rng.uniform(0.0, 4 * TTL_S))
            except DoyenError:
                await asyncio.sleep(0.2)
