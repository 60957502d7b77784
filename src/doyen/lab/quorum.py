"""A world of whole nodes and their clients: everything that users run, on simulated machines.

Each node is what `doyen serve` is: a core under the real driver, the journal on a simulated disk,
peers and links on (simulated) TCP with secrets and member ids, the keyspace and its service. Each
candidate is a process of its own with a session on `doyen://`, standing for one election. Other
processes are clients of the keyspace (see `clients`). Beside them, proposers on every node swap
registers, and their history is checked.

What must hold, looked at after every turn of the loop:

- what `consensus.invariants` says of the cores;
- every result on every node is the one that the log gives (see `reference`), each command being
  carried out once;
- at most one term is valid at any instant of *true* time, whatever the machines' clocks say;
- tokens increase from term to term;
- what clients were told of keys, leases and watches is what the log says; what was refused was not
  carried out;
- a node that has lost its data directory takes no part until it was added anew;
- with nothing wrong there is service, within `OUTAGE_S`; and after the healing somebody is elected,
  a command is carried out, and the leases of those who are gone end.

Imports the node, the session and the rest of the lab.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from contextvars import copy_context
from math import inf
from typing import Any

import msgspec

from doyen.errors import DoyenError
from doyen.events import Elected, Record
from doyen.lab.checkers import Violation
from doyen.lab.clients import ClientHost, Witness
from doyen.lab.linearizability import Operation, linearizable, witnessed
from doyen.lab.machines import Killed, LabLoop, Process, StreamNetwork, undisturbed
from doyen.lab.plan import KINDS as ALL
from doyen.lab.plan import LEADER, Fault, Plan, Weather, stream
from doyen.lab.processes import SLICE_KEYS, CandidateHost, NodeHost, SimulatedMachine, decode_swap
from doyen.lab.protocols import Protocol, known
from doyen.lab.quorum_faults import BEGIN, DRIFT, give_orders
from doyen.lab.reference import Reference
from doyen.lab.world import RunOutcome, Statistics
from doyen.lease.clock import VirtualClock
from doyen.quorum.consensus.core import CoreEvent, Effect, Membership, Role
from doyen.quorum.consensus.invariants import ClusterView, InvariantBroken
from doyen.quorum.keyspace.state import UnknownCommand
from doyen.quorum.node.driver import ProposalLimits
from doyen.quorum.node.framed_files import SyncFailed
from doyen.term import Term

__all__ = ["HOLDER", "KINDS", "NAMED", "QuorumWorld", "draw"]

HOLDER = "holder"
"""Stands, in a fault, for the candidate whose term is valid when it happens."""
CLIENTS = ("k1", "k2")
"""The clients of the keyspace."""
KINDS = (
    *("partition", "oneway", "bridge", "reset", "slow", "loss"),
    *("crash", "power", "pause"),
    *("stall", "full", "fsync"),
    *("rate", "jump"),
    *("transfer", "churn", "wipe"),
)
"""Of those that plans know. Links are TCP here, so nothing is repeated or comes out of order."""
NAMED = ("rollback", "older")
"""Only where they are asked for. What protects from the first has limits (see
`docs/stores/quorum.md`), which other faults would exceed; the handshake keeps the second from
happening."""
LIVENESS_S = 60.0
STEADY_S = 1.0
"""Whoever leads and has committed nothing for so long is not steady."""
OUTAGE_S = 10.0
"""How long nothing may be answered while nothing is wrong."""
OF_NODES = frozenset({"stall", "full", "fsync", "transfer", "churn", "wipe", "rollback", "older"})
"""What cannot befall a candidate, which has no disk and belongs to nothing."""


class Oracle:
    """Sees every term that was ever entered, at every instant of true time."""

    def __init__(self, world: QuorumWorld) -> None:
        self._world = world
        self._valid: list[tuple[str, Term]] = []
        self._last_token = 0
        self.terms = 0
        self.latest = -inf

    def hear(self, record: Record) -> None:
        event = record.event
        if isinstance(event, Elected):
            if event.token <= self._last_token:
                self._world.complain(
                    "tokens", f"{event.name} has token {event.token} after {self._last_token}"
                )
            self._last_token = event.token

    def entered(self, name: str, term: Term) -> None:
        self.terms += 1
        self.latest = self._world.loop.time()
        self._valid.append((name, term))
        self._world.tell(name, f"is elected, with token {term.token}")

    def look(self) -> None:
        if self._valid:
            self._valid = [(name, term) for name, term in self._valid if term.valid]
            if len(self._valid) > 1:
                names = " and ".join(name for name, _ in self._valid)
                self._world.complain("two terms", f"the terms of {names} are valid at once")

    @property
    def holder(self) -> str | None:
        return self._valid[0][0] if self._valid else None


class QuorumWorld:
    """Nodes, candidates, and their fate."""

    def __init__(self, plan: Plan, protocol: Protocol | None = None) -> None:
        self.plan = plan
        self.protocol = protocol or known(plan.protocol)
        self.where = self.protocol.module
        self.noise = plan.seed * 1_000_003 + plan.noise
        self.clock = VirtualClock()
        self.settings = self.protocol.make_settings(plan)
        self.limits = ProposalLimits(
            snapshot_entries=plan.compact_every if self.protocol.snapshots else sys.maxsize,
            snapshot_bytes=sys.maxsize,
            apply_commands=20,
        )
        self.reference = Reference(SLICE_KEYS)
        self.witness = Witness(self, self.reference)
        self.healed = False
        self.changing: dict[str, None] = {}
        """Nodes that are being added or removed, or have to be."""
        self.answered_at = self.disturbed_at = 0.0
        self.longest_s = 0.0
        """The longest time without an answer, from the first one on."""
        self._steady_since = 0.0
        self._leading: tuple[str, int, int] | None = None
        self._number = 0
        self._given: dict[asyncio.Task[None], None] = {}
        self.cluster = ClusterView(ballots=self.protocol.ballots)
        self.make = _watched(self.protocol.make, self)
        self.oracle = Oracle(self)
        self.chronicle: Callable[[float, str, str], None] | None = None
        self.violation: Violation | None = None
        self._over = False
        self.history: list[Operation] = []
        self.sequence: list[bytes] = []
        self.dead: list[Process] = []
        self.statistics = Statistics()
        self._stamp = 0
        self._seqs: dict[int, int] = {}
        self._refused: dict[tuple[int, int], None] = {}
        self._active: dict[int, Callable[[], None]] = {}
        self._tenths: dict[int, None] = {}
        self._applied = sys.maxsize
        """What the leader had applied when `_lacking` was last called. The first call has nothing
        to compare with, so it must not find that everybody is up to date."""
        self._stop: asyncio.Future[None]
        self.loop: LabLoop
        self.network: StreamNetwork
        self.hosts: dict[str, SimulatedMachine] = {}

    # What the parts tell.

    def complain(self, kind: str, text: str) -> None:
        if self.violation is None:
            self.violation = Violation(kind, round(self.loop.time(), 6), text)
            if not self._stop.done():
                self._stop.set_result(None)

    def tell(self, who: str, what: str) -> None:
        if self.chronicle is not None:
            self.chronicle(self.loop.time(), who, what)

    def role_changed(
        self, host: SimulatedMachine, role: Role, generation: int, leader: str | None
    ) -> None:
        if isinstance(host, NodeHost) and host.lost and leader is not None:
            self.complain("identity", f"{host.name} takes part, and has lost its data directory")
        if role is Role.LEADING:
            if self.statistics.first_leader_s is None:
                self.statistics.first_leader_s = round(self.loop.time(), 4)
            self.tell(host.name, f"leads in generation {generation}")
        elif leader is not None:
            self.tell(host.name, f"follows {leader} in generation {generation}")

    def applied(self, place: int, command: bytes) -> None:
        if place <= len(self.sequence):
            if self.sequence[place - 1] != command:
                self.complain("applied", f"two commands were applied as number {place}")
        elif place == len(self.sequence) + 1:
            self.sequence.append(command)
        else:
            self.complain("applied", f"command {place} was applied after {len(self.sequence)}")

    def committed(self) -> None:
        """More is committed than before."""
        self.reference.advance(self.cluster.committed, self.loop.time())
        self.witness.advanced()

    def judge_results(self, host: SimulatedMachine, index: int, results: Sequence[Any]) -> None:
        if not self.reference.agrees(index, results):
            self.complain(
                "applied", f"{host.name} has other results for entry {index} than the log"
            )

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def answered(self) -> None:
        """Somebody was served."""
        now = self.loop.time()
        if self.answered_at:
            self.longest_s = max(self.longest_s, now - self.answered_at)
        self.answered_at = now

    def aborted(self, host: SimulatedMachine, error: BaseException) -> None:
        if self._over:
            return
        expected = isinstance(error, OSError | SyncFailed) or isinstance(error.__cause__, OSError)
        if isinstance(host, NodeHost) and host.older:
            expected = expected or isinstance(error, UnknownCommand)
        if not expected:
            self.complain("defect", f"{host.name}: {error!r}")
        self.tell(host.name, "ends its own process")
        host.downs += 1
        host.stop(told=True)
        self.later(0.1, self.revive, host)
        raise Killed

    def leader(self) -> NodeHost | None:
        leading = [
            (host.driver.generation, host.number, host)
            for host in self.hosts.values()
            if isinstance(host, NodeHost) and host.driver and host.driver.role is Role.LEADING
        ]
        return max(leading, key=lambda each: each[:2])[2] if leading else None

    # The history.

    def begin(self, host: SimulatedMachine, *, writes: bool) -> Operation:
        self._stamp += 1
        client = host.number * 1000 + host.lives
        seq = self._seqs[client] = self._seqs.get(client, 0) + 1
        value = self._stamp if writes else None
        operation = Operation(client, seq, host.rng.randrange(self.plan.keys), value, self._stamp)
        self.history.append(operation)
        return operation

    def end(self, operation: Operation, result: int | None) -> None:
        self._stamp += 1
        operation.ended, operation.result = self._stamp, result
        if operation.value is None:
            self.statistics.reads += 1
        else:
            self.statistics.writes += 1
        self._tenths[int(self.loop.time() * 10)] = None
        self.answered()

    def refused(self, operation: Operation) -> None:
        """It is certain, they say, that it was not carried out."""
        if operation.value is not None:
            self._refused[operation.client, operation.seq] = None

    # Who belongs.

    def addresses_for(self, name: str) -> dict[str, str]:
        """The nodes that this one is told of when it is started: the founders, or, for one that
        joins, all there are."""
        nodes = [host.name for host in self.hosts.values() if isinstance(host, NodeHost)]
        known = nodes if self._joins(name) else self.plan.names
        return {each: f"{each}:1" for each in dict.fromkeys((*known, name))}

    def _joins(self, name: str) -> bool:
        host = self.hosts.get(name)
        return isinstance(host, NodeHost) and host.joining

    def membership_for(self, name: str, *, joining: bool) -> Membership:
        addresses = self.addresses_for(name)
        if not joining:
            return Membership(self.plan.names, (), addresses)
        others = tuple(each for each in addresses if each != name)
        return Membership(others, (name,), addresses)

    def add_node(self) -> NodeHost:
        """A new machine, with a node that waits to be added."""
        number = 1 + sum(isinstance(host, NodeHost) for host in self.hosts.values())
        host = NodeHost(self, f"n{number}", number, joining=True)
        self.hosts[host.name] = host
        host.start()
        return host

    def change(self, host: NodeHost, *orders: tuple[str, str]) -> None:
        """Have an administrator give orders about a node."""
        self.changing[host.name] = None
        before = [*self._given]

        async def give() -> None:
            if before:
                await asyncio.wait(before)
            await give_orders(self, host, *orders)
            if orders[-1][0] == "promote":
                self.changing.pop(host.name, None)

        task = self._outside.run(self.loop.create_task, give())
        self._given[task] = None
        task.add_done_callback(lambda _: self._given.pop(task, None))

    # Fate.

    def blow(self, host: SimulatedMachine) -> None:
        self.tell(host.name, "is killed")
        host.stop(told=host.fuse_told)
        self.later(host.fuse_down_s, self.revive, host)

    def later(self, delay_s: float, do: Callable[..., object], *given: Any) -> None:
        """As the world's own doing, not that of the process in which this is called. After the end
        of the run nothing is done: a fault that began or ended while its hosts are being closed
        would leave one of them frozen for good."""

        def act() -> None:
            if not self._over:
                do(*given)

        self._outside.run(self.loop.call_later, delay_s, act)

    def revive(self, host: SimulatedMachine) -> None:
        host.downs -= 1
        if host.downs <= 0 and not host.up:
            host.downs = 0
            self.disturbed_at = self.loop.time()
            host.start()
            self.tell(host.name, "is back")

    def _begin(self, number: int) -> None:
        fault = self.plan.faults[number]
        hosts = self._named(fault)
        self.statistics.faults += 1
        self.disturbed_at = self.loop.time()
        undo = BEGIN[fault.kind](self, fault, hosts) if hosts is not None else None
        if undo is not None:
            self._active[number] = undo
            self.later(fault.for_s, self._end, number)

    def _end(self, number: int) -> None:
        undo = self._active.pop(number, None)
        if undo is not None:
            self.disturbed_at = self.loop.time()
            undo()

    def _named(self, fault: Fault) -> list[SimulatedMachine] | None:
        hosts: dict[str, SimulatedMachine] = {}
        for name in fault.nodes:
            found: str | None = name
            if name == LEADER:
                leader = self.leader()
                found = leader.name if leader is not None else None
            elif name == HOLDER:
                found = self.oracle.holder
            if found is None or found not in self.hosts:
                return None
            hosts[found] = self.hosts[found]
        return list(hosts.values())

    # The run.

    def run(self) -> RunOutcome:
        """From the first event to the verdict."""
        before = random.getstate()
        random.seed(self.noise)  # the links' and stores' own jitter
        try:
            with undisturbed(), asyncio.Runner(loop_factory=self._make_loop) as runner:
                runner.run(self._main())
        finally:
            random.setstate(before)
        return self._outcome()

    def _make_loop(self) -> LabLoop:
        self.loop = LabLoop(self.clock)
        self.network = StreamNetwork(self.loop, self.plan.weather, self.noise)
        self.loop.after_turn = self.oracle.look
        self.loop.set_exception_handler(self._exception)
        return self.loop

    def _exception(self, loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        error = told.get("exception")
        if isinstance(error, InvariantBroken):
            self.complain("invariant", str(error))
        elif error is not None and not isinstance(error, Killed | DoyenError):
            self.complain("defect", f"{told['message']}: {error!r}")

    async def _main(self) -> None:
        self._outside = copy_context()
        self._stop = self.loop.create_future()
        rng = stream(self.noise, "start")
        for number, name in enumerate(self.plan.names, 1):
            self.hosts[name] = NodeHost(self, name, number, joining=False)
        for number in range(1, self.plan.clients + 1):
            name = f"c{number}"
            self.hosts[name] = CandidateHost(self, name, 100 + number)
        for number, name in enumerate(CLIENTS, 1):
            self.hosts[name] = ClientHost(self, name, 200 + number)
        for host in self.hosts.values():
            host.clock.adjust(rate=rng.uniform(1 - DRIFT, 1))
            self.later(rng.uniform(0.0, 0.2), host.start)
        for number, fault in enumerate(self.plan.faults):
            if fault.at < self.plan.for_s:
                self.later(fault.at, self._begin, number)
        try:
            await self._suffer()
            if self.violation is None:
                await self._heal()
            if self.violation is None:
                self._judge()
        finally:
            await self._clean_up()

    async def _suffer(self) -> None:
        """The time of trouble. Whenever there has been none for a while, there is service."""
        while self.violation is None and (left := self.plan.for_s - self.loop.time()) > 0:
            await self._wait(min(left, 0.5))
            if (
                self._active
                or self.changing
                or not all(
                    host.up and not (host.process and host.process.frozen)
                    for host in self.hosts.values()
                )
            ):
                self.disturbed_at = self.loop.time()
            self._check_service()

    def _check_service(self) -> None:
        idle_s = self.loop.time() - max(self.answered_at, self.disturbed_at)
        if idle_s > OUTAGE_S:
            self.complain("outage", f"nothing is wrong, and nobody was served for {idle_s:.1f} s")
        self._check_ends()

    def _check_ends(self) -> None:
        """That leases end in time, while one node leads and commits, whatever else is wrong."""
        leader, now, leading = self.leader(), self.loop.time(), None
        if leader is not None and leader.driver is not None and leader.process is not None:
            leading = leader.name, leader.lives, leader.driver.generation
            if leader.process.frozen or now - self.reference.times[-1] > STEADY_S:
                leading = None
        if leading is None or leading != self._leading:
            self._steady_since = now
        self._leading = leading
        self.witness.check_ends(self._steady_since)

    async def _wait(self, seconds: float) -> None:
        await asyncio.wait({self._stop}, timeout=seconds)

    async def _heal(self) -> None:
        healed_at = self.disturbed_at = self.loop.time()
        self.tell("", "everything is healed")
        self.healed = True
        for number in list(self._active):
            self._end(number)
        for host in self.hosts.values():
            host.fuse = -1
            host.downs = 0
            host.start()
        while self.violation is None:
            await self._wait(0.5)
            self._check_service()
            since = self.loop.time() - healed_at
            lacking = self._lacking(healed_at)
            if lacking is None:
                self.statistics.healed_s = round(since, 3)
                return
            if since > LIVENESS_S:
                self.complain("liveness", f"{LIVENESS_S:g} s after everything was healed {lacking}")

    def _lacking(self, healed_at: float) -> str | None:
        """What is still not as it should be: somebody leads, the nodes serve, and every voter
        follows and has all that the leader had applied half a second ago."""
        leader = self.leader()
        if leader is None or leader.driver is None:
            return "nobody leads the nodes"
        status, before = leader.driver.status(), self._applied
        self._applied = status.applied
        oracle = self.oracle
        if self.plan.clients and oracle.latest <= healed_at and oracle.holder is None:
            return "no candidate leads"
        if not any(tenth / 10 > healed_at for tenth in self._tenths):
            return "nothing was answered"
        for name in status.membership.voters:
            host = self.hosts[name]
            driver = host.driver if isinstance(host, NodeHost) else None
            if driver is None or driver.leader != leader.name or driver.status().applied < before:
                return f"{name}, a voter, is not along"
        if self.changing:
            return f"{next(iter(self.changing))} has not been added anew"
        return self.witness.overdue(healed_at) or self.witness.untold()

    def _judge(self) -> None:
        self.witness.judge()
        for host in self.hosts.values():
            if isinstance(host, NodeHost) and host.at(self.reference.index):
                self.witness.compare(host.name, host.keyspace)
        places: dict[tuple[int, int], float] = {}
        for place, command in enumerate(self.sequence):
            client, seq, _, _ = decode_swap(command)
            if (client, seq) in places:
                self.complain("applied", f"request {seq} of {client} was carried out twice")
            places[client, seq] = place
        for key in self._refused:
            if key in places:
                self.complain("refused", f"request {key} was refused, and yet carried out")
        for operation in self.history:
            if operation.value is not None:
                operation.position = places.get((operation.client, operation.seq), inf)
                if operation.ended < inf and operation.position == inf:
                    self.complain("lost write", f"{operation!r}, and it is nowhere")
            elif operation.ended == inf:
                operation.position = inf
        history = [
            operation
            for operation in self.history
            if (operation.client, operation.seq) not in self._refused
        ]
        contradicted = witnessed(history)
        if contradicted is not None and self.protocol.name == "raft":
            self.complain("linearizability", f"the log contradicts {contradicted!r}")
        elif contradicted is not None and (key_ops := linearizable(history)) is not None:
            self.complain("linearizability", f"no order explains {key_ops[-6:]}")

    async def _clean_up(self) -> None:
        """Whoever still runs is asked to end, the dead included: nothing may be left behind."""
        self._over = True
        self.loop.after_turn = lambda: None
        self.loop.set_exception_handler(lambda loop, told: None)
        processes = [*self.dead, *(host.process for host in self.hosts.values() if host.process)]
        for process in processes:
            process.bury()
        self.network.close(processes)
        for task in [*self._given]:
            task.cancel()
        for _ in range(20):
            left = [task for process in processes for task in process.tasks if not task.done()]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(5.0)

    def _outcome(self) -> RunOutcome:
        figures = self.statistics
        figures.events = self.loop.steps
        figures.virtual_s = round(self.clock.monotonic(), 3)
        figures.messages = self.network.messages
        figures.leaders = len(self.cluster.leaders)
        figures.commits = len(self.cluster.committed)
        tenths = max(1, int(self.plan.for_s * 10))
        early = sum(tenth < tenths for tenth in self._tenths)
        figures.available_share = round(early / tenths, 4)
        return RunOutcome(
            plan=self.plan,
            events=self.loop.steps,
            trace_hash=f"{self.loop.trace & (1 << 64) - 1:016x}",
            violations=[self.violation] if self.violation else [],
            statistics=figures,
        )


def _watched(making: Any, world: QuorumWorld) -> Any:
    """The same core, whose every step the invariants are held against."""
    cluster = world.cluster

    class Watched(making):  # type: ignore[misc]
        def handle(self, event: CoreEvent, now: float) -> list[Effect]:
            effects: list[Effect] = super().handle(event, now)
            if effects:
                cluster.stepped(self, effects)
                if len(cluster.committed) > world.reference.index:
                    world.committed()
            return effects

    return Watched


def _deposed(rng: random.Random, for_s: float) -> list[Fault]:
    """Leaders are cut off again and again for about as long as it takes to elect another: what
    they have decided by then comes late."""
    faults = []
    at = rng.uniform(2.0, 3.0)
    while at < for_s - 2:
        long_s = rng.uniform(1.0, 3.0)
        faults.append(Fault("partition", round(at, 4), round(long_s, 4), (LEADER,)))
        at += long_s + rng.uniform(1.0, 2.5)
    return faults


def draw(
    protocol: str,
    nodes: int,
    seed: int,
    *,
    kinds: tuple[str, ...] = ALL,
    for_s: float = 20.0,
    clients: int = 3,
) -> Plan:
    """What this seed has in store for nodes and candidates."""
    from doyen.lab.plan import draw as draw_plan

    kinds = KINDS if kinds == ALL else tuple(kind for kind in kinds if kind in (*KINDS, *NAMED))
    plan = draw_plan(protocol, nodes, seed, kinds=kinds, for_s=for_s, clients=clients)
    rng = stream(seed, "quorum")
    candidates = [*(f"c{number}" for number in range(1, clients + 1)), *CLIENTS]
    # Mostly the cluster is founded before the trouble begins: all its nodes must meet for that.
    founding_s = 1.0 if rng.random() < 0.85 else 0.0
    faults = []
    for fault in plan.faults:
        given = list(fault.nodes)
        if given and clients and fault.kind not in OF_NODES and rng.random() < 0.4:
            given[0] = HOLDER if rng.random() < 0.3 else rng.choice(candidates)
        if fault.kind == "partition" and rng.random() < 0.5:
            given += rng.sample(candidates, rng.randint(0, len(candidates)))
        at = round(fault.at + founding_s, 4)
        faults.append(msgspec.structs.replace(fault, at=at, nodes=tuple(dict.fromkeys(given))))
    if "partition" in kinds and rng.random() < 0.25:
        faults = _deposed(rng, for_s)
    if kinds:
        # One node at least is away for so long that it can only be sent a snapshot.
        away = Fault(
            "crash", round(rng.uniform(3.0, for_s - 3.0), 4), 2.0, (rng.choice(plan.names),)
        )
        faults.append(away)
    weather = Weather(min(plan.weather.latency_s, 0.02), plan.weather.spread, plan.weather.fsync_s)
    return plan.but(
        world="quorum",
        clients=clients,
        faults=tuple(faults),
        weather=weather,
        heartbeat_s=min(plan.heartbeat_s, 0.2),
        # Small, so that every run has snapshots, and nodes that can only be sent one.
        compact_every=rng.choice([5, 10, 20]),
        tail_entries=rng.choice([0, 5]),
    )
