"""A world in virtual time whose processes have wardens: killed, frozen, late, two at a time.

The sessions, the table, the warden and the way it ends leases are the code that users run. Only the
kernel is simulated: who is dead, who has a link to whom, and when that is reported.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from doyen import Session, Term
from doyen.election.options import SessionSettings
from doyen.lease.runtime import InlineRuntime
from doyen.model import Entry, Lease
from doyen.stores.port import Store
from doyen.testing.faults import Faults, FaultyStore
from doyen.warden.server import Warden
from doyen.warden.table import TABLE_BYTES, LeaseTable, WardedLease
from doyen.warden.watched import HolderConnection
from doyen.warden.wire import BYE, Hello, decode_number, encode_number
from swarm import FAIR, ROUGH, TTL_S, Oracle, Process, WatchedClient, World, election_of, is_record

FROZEN_AFTER_S = 0.4


class WardenOracle(Oracle):
    """Also knows who is dead, and whose command still runs.

    - The term of a dead process is over, unless a command of its still runs.
    - No record goes while a command of its leader runs.
    - A lease is ended by a warden only if its holder is dead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.commands: set[tuple[str, int]] = set()
        self.dead_leases: set[str] = set()

    def died(self, terms: list[Term]) -> None:
        self._valid = [term for term in self._valid if term not in terms]

    def gone(self, entry: Entry) -> None:
        if is_record(entry.key) and (election_of(entry.key), entry.revision) in self.commands:
            self.object(f"the record {entry.revision} went while its command ran")
        super().gone(entry)

    def ended_by_warden(self, lease: str) -> None:
        if lease not in self.dead_leases:
            self.object(f"a warden ended {lease}, whose holder lives")


class WardensClient(WatchedClient):
    """A warden's client of the store. It reports what it is about to end."""

    async def end(self, warrant: bytes) -> None:
        oracle = self._oracle
        assert isinstance(oracle, WardenOracle)
        if warrant.decode() in self._at()._leases:
            oracle.ended_by_warden(warrant.decode())
        await super().end(warrant)


class Link(HolderConnection):
    """What the kernel shows of one holder to one warden."""

    def __init__(self, process: WardedProcess, host: WardenHost) -> None:
        self.process = process
        self.host = host
        self.messages: deque[bytes] = deque()
        self.ended = False
        self._on_message: Callable[[], None] = lambda: None
        self._on_death: Callable[[], None] = lambda: None

    def attach(self, on_message: Callable[[], None], on_death: Callable[[], None]) -> None:
        self._on_message, self._on_death = on_message, on_death
        if self.process.crashed:
            self.report_death()
        self.host.later(self._message)

    def _message(self) -> None:
        self._on_message()  # as it is when it is called

    def _death(self) -> None:
        self._on_death()

    def receive(self) -> bytes | None:
        if self.messages:
            return self.messages.popleft()
        return b"" if self.ended else None

    def send(self, message: bytes) -> bool:
        ping = decode_number(message)
        if ping is not None:
            self.process.pinged(self, ping)
        return True

    def read(self, at: int, count: int) -> bytes:
        return bytes(self.process.warding.memory[at : at + count])

    def kill(self) -> str:
        self.process.world.crash(self.process)
        return ""

    def detach(self) -> None:
        self._on_message = self._on_death = lambda: None

    def close(self) -> None:
        pass

    def say(self, number: int) -> None:
        """A message of the holder or of its guard."""
        if not self.ended:
            self.messages.append(encode_number(number))
            self.host.later(self._message)

    def end(self) -> None:
        """Nobody holds the holder's end any more."""
        self.ended = True
        self.host.later(self._message)

    def report_death(self) -> None:
        self.host.later(self._death)


class WardenHost:
    """A warden process. It can be killed, frozen and late."""

    def __init__(self, world: WardenWorld) -> None:
        self.world = world
        self.alive = True
        self.frozen_until = 0.0
        self.faults = Faults(world.rng.getrandbits(32), FAIR if world.is_calm else ROUGH)
        self.links: list[Link] = []
        self.warden = Warden(self._open, world.clock)

    async def _open(self, _: str) -> Store:
        return FaultyStore(WardensClient(self.world.server, self.world.clock), self.faults)

    def later(self, call: Callable[[], None]) -> None:
        """What the kernel reports to it, when it runs and gets to it."""
        world = self.world
        late_s = 0.0 if world.is_calm else world.rng.choice([0.0, 0.0, 0.0, 0.001, 0.3, 2.0])
        at = max(world.clock.now() + late_s, self.frozen_until)

        def deliver() -> None:
            if self.alive and world.clock.now() < self.frozen_until:
                self.later(call)
            elif self.alive:
                call()

        asyncio.get_running_loop().call_later(at - world.clock.now(), deliver)

    def serve(self, link: Link, hello: Hello) -> None:
        self.links.append(link)
        self.later(lambda: self._watch(hello, link))

    def _watch(self, hello: Hello, link: Link) -> None:
        self.warden.watch(hello, link)

    def kill(self) -> None:
        self.alive = False
        self.faults.cut()
        for task in list(self.warden._ending):
            task.cancel()
        for link in self.links:
            link.process.lost_warden(link)


class SimulatedWarding:
    """A session's side of its warden, on simulated memory."""

    def __init__(self, process: WardedProcess) -> None:
        self.process = process
        self.memory = bytearray(TABLE_BYTES)
        self.table = LeaseTable(memoryview(self.memory))
        self.link: Link | None = None
        self.leases: set[str] = set()

    @property
    def _dead(self) -> bool:
        return self.process.crashed

    def begin(self) -> None:
        self.renewed()

    def renewed(self) -> None:
        if self.link is None and not self._dead and not self.process.closed_all:
            self.link = self.process.world.connect(self.process)

    def register(self, lease: Lease, warrant: bytes) -> None:
        if not self._dead:
            self.table.register(WardedLease(lease.id, lease.ttl_s, warrant))
            self.leases.add(lease.id)

    def withdraw(self, lease: Lease) -> None:
        if not self._dead:
            self.table.withdraw(lease.id)

    def bodies(self, number: int) -> None:
        if not self._dead:
            self.table.bodies(number)

    def proof(self) -> tuple[int, ...]:
        return ()

    def run_begins(self) -> int:
        return 0 if self._dead else self.table.run_begins()

    def run_ended(self, run: int) -> None:
        if not self._dead:
            self.table.run_ended(run)

    def close(self) -> None:
        if not self._dead:
            self.table.close()
            if self.link is not None:
                self.link.say(BYE)
                self.link.end()

    def forked(self) -> None:
        raise NotImplementedError


class WardedProcess(Process):
    """A candidate with a warden. Some run a command under a guard, which outlives them a little."""

    world: WardenWorld

    def prepare(self) -> None:
        super().prepare()
        rng = self.world.rng
        self.warding = SimulatedWarding(self)
        self.supervised = rng.random() < 0.4
        self.frozen = False
        self.closed_all = False
        """It has closed all its descriptors, the link among them."""
        self.terms: list[Term] = []
        self.hello = Hello(
            session=self.name,
            url="memory://",
            settle_s=rng.choice([0.0, 0.0, 0.2]),
            frozen_after_s=FROZEN_AFTER_S if rng.random() < 0.5 else None,
            request_timeout_s=TTL_S / 6,
        )
        self.runs: dict[tuple[str, int], tuple[int, Link | None]] = {}

    async def _live(self) -> None:
        world = self.world
        runtime = InlineRuntime(self.clock, world.rng.getrandbits(32))
        asked = SessionSettings(
            url="memory://",
            ttl_s=TTL_S,
            stop_budget_s=world.stop_budget_s,
            sinks=(world.oracle.hear,),
        )
        async with Session(asked, runtime, self.store(), self.warding) as session:
            await self.act(session)

    async def act(self, session: Session) -> None:
        world = self.world
        async for campaign in session.campaigns(
            "swarm", name=self.name, priority=self.rank, recipe=self.recipe
        ):
            async with campaign as term:
                self.terms = [term]
                with world.oracle.body(term):
                    if self.supervised:
                        await self.run_command(term)
                    else:
                        await asyncio.sleep(world.rng.uniform(0, 1) * world.body_s)

    async def run_command(self, term: Term) -> None:
        """A command, as `doyen.supervise` runs one."""
        key, run = (term.election, term.token), term._run_begins()
        self.runs[key] = run, self.warding.link
        self.world.oracle.commands.add(key)
        try:
            await asyncio.sleep(self.world.rng.uniform(0, 1) * self.world.body_s)
        finally:
            if not self.crashed:
                self.world.oracle.commands.discard(key)
                _, link = self.runs.pop(key)
                if link is not None:
                    link.say(run)  # the guard does
                term._run_ended(run)

    def pinged(self, link: Link, ping: int) -> None:
        if not self.crashed and not self.frozen and link is self.warding.link:
            self.warding.table.answer(ping)

    def lost_warden(self, link: Link) -> None:
        if link is self.warding.link:
            self.warding.link = None

    def crash(self) -> None:
        world, link = self.world, self.warding.link
        world.oracle.died(self.terms)
        world.oracle.dead_leases |= self.warding.leases
        left_s = max((term.remaining_s for term in self.terms), default=0.0)
        super().crash()
        for host in world.hosts:
            for each in host.links:
                if each.process is self:
                    each.report_death()
        if link is not None and not self.runs:
            link.end()
        for key, (run, guards) in self.runs.items():
            self._leave_to_guard(key, run, guards, left_s)

    def _leave_to_guard(
        self, key: tuple[str, int], run: int, link: Link | None, left_s: float
    ) -> None:
        """The command runs on until its guard has stopped it, at its deadline at the latest. The
        guard may be killed too; then nobody reports."""
        rng, loop = self.world.rng, asyncio.get_running_loop()
        guard_lives = rng.random() < 0.6
        left_s = min(left_s, rng.uniform(0, 2.0))

        def command_ended() -> None:
            self.world.oracle.commands.discard(key)
            if link is not None and guard_lives:
                link.say(run)
                link.end()

        if link is not None and not guard_lives:
            loop.call_later(rng.uniform(0, left_s), link.end)
        loop.call_later(left_s, command_ended)


class WardenWorld(World):
    """Processes on one host, with one warden at a time, or two."""

    happenings: ClassVar = {
        "join": 4,
        "leave": 1,
        "crash": 5,
        "cut": 2,
        "heal": 3,
        "freeze": 2,
        "thaw": 2,
        "close_all": 1,
        "warden_killed": 1,
        "warden_frozen": 1,
        "warden_cut": 1,
        "warden_healed": 2,
        "second_warden": 1,
    }
    oracle: WardenOracle
    processes: list[WardedProcess]  # type: ignore[assignment]

    def __init__(self, seed: int, drift: float = 0.005, stop_budget_s: float = 0.01) -> None:
        super().__init__(seed, drift, stop_budget_s)
        self.oracle = WardenOracle()
        self.server.oracle = self.oracle
        self.hosts: list[WardenHost] = []
        self.is_calm = False

    def start(self) -> None:
        self.started += 1
        self.processes.append(WardedProcess(self, f"p{self.started}"))

    def connect(self, process: WardedProcess) -> Link | None:
        """A link to the warden that listens now."""
        if not self.hosts or not self.hosts[-1].alive:
            if self.rng.random() < 0.3 and not self.is_calm:
                return None  # none listens at the moment
            self.hosts.append(WardenHost(self))
        link = Link(process, self.hosts[-1])
        self.hosts[-1].serve(link, process.hello)
        return link

    def freeze(self, process: WardedProcess) -> None:
        process.frozen = True
        process.faults.cut()

    def thaw(self, process: WardedProcess) -> None:
        process.frozen = False
        process.faults.heal()

    def close_all(self, process: WardedProcess) -> None:
        link = process.warding.link
        if link is not None:
            process.closed_all = True
            process.warding.link = None
            if not process.runs:
                link.end()

    def warden_killed(self, _: WardedProcess) -> None:
        if self.hosts:
            self.hosts[-1].kill()

    def warden_frozen(self, _: WardedProcess) -> None:
        if self.hosts:
            self.hosts[-1].frozen_until = self.clock.now() + self.rng.uniform(0, 2 * TTL_S)

    def warden_cut(self, _: WardedProcess) -> None:
        if self.hosts:
            self.hosts[-1].faults.cut(answers_only=self.rng.random() < 0.3)

    def warden_healed(self, _: WardedProcess) -> None:
        for host in self.hosts:
            host.faults.heal()

    def second_warden(self, process: WardedProcess) -> None:
        """A session registers with a new warden while the old one still watches over it."""
        self.hosts.append(WardenHost(self))
        process.warding.link = None

    def crash(self, process: Process) -> None:
        if process in self.processes:
            super().crash(process)

    def calm(self) -> None:
        self.is_calm = True
        for host in self.hosts:
            host.faults.odds = FAIR
            host.faults.heal()
            host.frozen_until = 0.0
        for process in self.processes:
            process.frozen = False
        super().calm()

    async def end(self) -> None:
        await super().end()
        for host in self.hosts:
            host.kill()
