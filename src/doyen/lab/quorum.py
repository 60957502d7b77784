"""A world of whole nodes and their clients: everything that users run, on simulated machines.

Each node is what `doyen serve` is: a core under the real driver, peers and links on (simulated)
TCP, the keyspace and its service. Only the journal is the lab's, since it must be able to forget.
Each candidate is a process of its own with a session on `doyen://`, standing for one election.
Beside them, proposers on every node swap registers, and their history is checked.

What must hold, looked at after every turn of the loop:

- what `consensus.invariants` says of the cores;
- every node applies the same commands in the same order, each once;
- at most one term is valid at any instant of *true* time, whatever the machines' clocks say;
- tokens increase from term to term;
- what clients saw is linearizable; what was refused was not carried out; and after the healing
  somebody is elected and a command is carried out.

Imports the node, the session and the rest of the lab.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextvars import copy_context
from math import inf
from typing import Any

import msgspec

from doyen.clock import VirtualClock
from doyen.consensus.core import Effect, Event, Membership, Role
from doyen.consensus.invariants import Cluster, InvariantBroken
from doyen.errors import DoyenError
from doyen.events import Elected, Record
from doyen.lab.checkers import Violation
from doyen.lab.faults import Undo, told_of_cut
from doyen.lab.linearizability import Operation, linearizable, witnessed
from doyen.lab.machines import Killed, LabLoop, Network, Process, undisturbed
from doyen.lab.plan import LEADER, Fault, Plan, Weather, stream
from doyen.lab.protocols import Protocol, known
from doyen.lab.residents import CandidateHost, Host, NodeHost, decode_swap
from doyen.lab.world import Outcome, Statistics
from doyen.node.driver import Driver
from doyen.term import Term

__all__ = ["HOLDER", "KINDS", "QuorumWorld", "draw"]

HOLDER = "holder"
"""Stands, in a fault, for the candidate whose term is valid when it happens."""
KINDS = (
    *("partition", "oneway", "bridge", "reset", "slow", "loss"),
    *("crash", "power", "pause"),
    *("stall", "full", "fsync"),
    *("rate", "jump"),
    *("transfer", "churn"),
)
"""Of those that plans know. Links are TCP here, so nothing is repeated or comes out of order."""
DRIFT = 0.004
LIVENESS_S = 60.0
OF_NODES = frozenset({"stall", "full", "fsync", "transfer", "churn"})
"""What cannot befall a candidate, which has no disk and belongs to nothing."""
INSISTENCE = 10
"""How often an order is given if it is refused."""


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
        addresses = {name: f"{name}:1" for name in plan.names}
        self.membership = Membership(plan.names, (), addresses)
        self.cluster = Cluster(ballots=self.protocol.ballots)
        self.make = _watched(self.protocol.make, self.cluster)
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
        self._applied = 0
        self._stop: asyncio.Future[None]
        self.loop: LabLoop
        self.network: Network
        self.hosts: dict[str, Host] = {}

    # What the parts tell.

    def complain(self, kind: str, text: str) -> None:
        if self.violation is None:
            self.violation = Violation(kind, round(self.loop.time(), 6), text)
            if not self._stop.done():
                self._stop.set_result(None)

    def tell(self, who: str, what: str) -> None:
        if self.chronicle is not None:
            self.chronicle(self.loop.time(), who, what)

    def role_changed(self, host: Host, role: Role, generation: int, leader: str | None) -> None:
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

    def aborted(self, host: Host, error: BaseException) -> None:
        if self._over:
            return
        if not isinstance(error, OSError):
            self.complain("defect", f"{host.name}: {error!r}")
        self.tell(host.name, "ends its own process")
        host.downs += 1
        host.stop(told=True)
        self._later(0.1, self._revive, host)
        raise Killed

    def leader(self) -> NodeHost | None:
        leading = [
            (host.driver.generation, host.number, host)
            for host in self.hosts.values()
            if isinstance(host, NodeHost) and host.driver and host.driver.role is Role.LEADING
        ]
        return max(leading, key=lambda each: each[:2])[2] if leading else None

    # The history.

    def begin(self, host: Host, *, writes: bool) -> Operation:
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

    def refused(self, operation: Operation) -> None:
        """It is certain, they say, that it was not carried out."""
        if operation.value is not None:
            self._refused[operation.client, operation.seq] = None

    # Fate.

    def blow(self, host: Host) -> None:
        self.tell(host.name, "is killed")
        host.stop(told=host.fuse_told)
        self._later(host.fuse_down_s, self._revive, host)

    def _later(self, delay_s: float, do: Callable[..., object], *given: Any) -> None:
        """As the world's own doing, not that of the process in which this is called. After the end
        of the run nothing is done: a fault that began or ended while its hosts are being closed
        would leave one of them frozen for good."""

        def act() -> None:
            if not self._over:
                do(*given)

        self._outside.run(self.loop.call_later, delay_s, act)

    def _revive(self, host: Host) -> None:
        host.downs -= 1
        if host.downs <= 0 and not host.up:
            host.downs = 0
            host.start()
            self.tell(host.name, "is back")

    def _begin(self, number: int) -> None:
        fault = self.plan.faults[number]
        hosts = self._named(fault)
        self.statistics.faults += 1
        undo = _BEGIN[fault.kind](self, fault, hosts) if hosts is not None else None
        if undo is not None:
            self._active[number] = undo
            self._later(fault.for_s, self._end, number)

    def _end(self, number: int) -> None:
        undo = self._active.pop(number, None)
        if undo is not None:
            undo()

    def _named(self, fault: Fault) -> list[Host] | None:
        hosts: dict[str, Host] = {}
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

    def run(self) -> Outcome:
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
        self.network = Network(self.loop, self.plan.weather, self.noise)
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
            self.hosts[name] = NodeHost(self, name, number)
        for number in range(1, self.plan.clients + 1):
            name = f"c{number}"
            self.hosts[name] = CandidateHost(self, name, 100 + number)
        for host in self.hosts.values():
            host.clock.adjust(rate=rng.uniform(1 - DRIFT, 1))
            self._later(rng.uniform(0.0, 0.2), host.start)
        for number, fault in enumerate(self.plan.faults):
            if fault.at < self.plan.for_s:
                self._later(fault.at, self._begin, number)
        try:
            await self._wait(self.plan.for_s)
            if self.violation is None:
                await self._heal()
            if self.violation is None:
                self._judge()
        finally:
            await self._clean_up()

    async def _wait(self, seconds: float) -> None:
        await asyncio.wait({self._stop}, timeout=seconds)

    async def _heal(self) -> None:
        healed_at = self.loop.time()
        self.tell("", "everything is healed")
        for number in list(self._active):
            self._end(number)
        for host in self.hosts.values():
            host.fuse = -1
            host.downs = 0
            host.start()
        while self.violation is None:
            await self._wait(0.5)
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
        return None

    def _judge(self) -> None:
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
        if witnessed(history) is not None and (key_ops := linearizable(history)) is not None:
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
        for _ in range(20):
            left = [task for process in processes for task in process.tasks if not task.done()]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(5.0)

    def _outcome(self) -> Outcome:
        figures = self.statistics
        figures.events = self.loop.steps
        figures.virtual_s = round(self.clock.monotonic(), 3)
        figures.messages = self.network.messages
        figures.leaders = len(self.cluster.leaders)
        figures.commits = len(self.cluster.committed)
        tenths = max(1, int(self.plan.for_s * 10))
        early = sum(tenth < tenths for tenth in self._tenths)
        figures.available_share = round(early / tenths, 4)
        return Outcome(
            plan=self.plan,
            events=self.loop.steps,
            trace_hash=f"{self.loop.trace & (1 << 64) - 1:016x}",
            violations=[self.violation] if self.violation else [],
            statistics=figures,
        )


def _watched(making: Any, cluster: Cluster) -> Any:
    """The same core, whose every step the invariants are held against."""

    class Watched(making):  # type: ignore[misc]
        def handle(self, event: Event, now: float) -> list[Effect]:
            effects: list[Effect] = super().handle(event, now)
            if effects:
                cluster.stepped(self, effects)
            return effects

    return Watched


# Faults.


def _and(hosts: Iterable[Host]) -> str:
    return " and ".join(host.name for host in hosts)


def _cut(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    if not hosts:
        return None
    others = [host for host in world.hosts.values() if host not in hosts]
    pairs: list[tuple[str, str]] = []
    if fault.kind == "oneway":
        pairs += [(hosts[0].name, other.name) for other in hosts[1:]]
    else:
        for one in hosts if fault.kind == "partition" else hosts[1:]:
            for other in others:
                pairs += [(one.name, other.name), (other.name, one.name)]
    who, begins, ends = told_of_cut(fault.kind, [host.name for host in hosts])
    if pairs:
        world.tell(who, begins)
    for here, there in pairs:
        world.network.cut(here, there)

    def undo() -> None:
        for here, there in pairs:
            world.network.cut(here, there, -1)
        if pairs:
            world.tell(who, ends)

    return undo


def _reset(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    if len(hosts) > 1:
        world.tell(_and(hosts[:2]), "lose their connections")
        world.network.reset(hosts[0].name, hosts[1].name)
    return None


def _slow(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    if len(hosts) < 2:
        return None
    names = hosts[0].name, hosts[1].name

    def more(seconds: float) -> None:
        for pair in (names, names[::-1]):
            extra = world.network.extra_s
            extra[pair] = max(0.0, extra.get(pair, 0.0) + seconds)

    more(fault.amount)
    world.tell(_and(hosts[:2]), f"hear each other {fault.amount:g} s late")
    return lambda: more(-fault.amount)


def _loss(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    def more(share: float) -> None:
        world.network.loss = max(0.0, world.network.loss + share)

    more(fault.amount)
    world.tell("the network", f"loses {fault.amount:.0%} of all packets, and sends them again")
    return lambda: more(-fault.amount)


def _crash(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    host = hosts[0]
    if host.up and host.fuse < 0:
        host.downs += 1
        host.fuse_told = fault.kind == "crash"
        host.fuse_down_s = fault.for_s
        if isinstance(host, NodeHost) and fault.amount:
            host.fuse = int(fault.amount)
        else:
            world.blow(host)
    return None


def _pause(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    process = hosts[0].process
    if process is None or process.dead:
        return None
    process.freeze()
    world.tell(hosts[0].name, "is frozen")

    def undo() -> None:
        world.tell(hosts[0].name, "goes on")
        if process.frozen:
            process.thaw()

    return undo


def _stall(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    host = hosts[0]
    if not isinstance(host, NodeHost):
        return None

    def more(seconds: float) -> None:
        host.disk.sync_s = max(0.0005, host.disk.sync_s + seconds)

    more(fault.amount)
    world.tell(host.name, f"has a disk that takes {fault.amount:g} s a write")
    return lambda: more(-fault.amount)


def _full(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    host = hosts[0]
    if not isinstance(host, NodeHost):
        return None
    host.disk.fill(True)
    world.tell(host.name, "has a full disk")
    return lambda: host.disk.fill(False)


def _fsync(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    host = hosts[0]
    if isinstance(host, NodeHost) and host.up and host.driver is not None:
        world.tell(host.name, "is told by its disk that a write has failed")
        assert host.process is not None
        error = OSError(5, "the disk reports an error")
        world.loop.call_soon(host.disk.failed, error, context=host.process.context)
    return None


def _rate(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    """Within the drift that validity allows for."""
    rate = 1 - DRIFT * min(1.0, fault.amount)
    hosts[0].clock.adjust(rate=rate)
    world.tell(hosts[0].name, f"has a clock that runs at {rate:g} times the rate")
    return None


def _jump(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    """Of wall time, which nothing may rest on."""
    seconds = 3600.0 * fault.amount if fault.amount > 1 else -3600.0
    hosts[0].clock.step_wall(seconds)
    world.tell(hosts[0].name, f"has its wall clock set {seconds:+g} s")
    return None


def _transfer(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    _order(world, ("transfer", hosts[0].name if hosts else ""))
    return None


def _churn(world: QuorumWorld, fault: Fault, hosts: list[Host]) -> Undo | None:
    """A node goes, and comes back with what it knew."""
    host = hosts[0]
    if not isinstance(host, NodeHost) or not world.protocol.membership:
        return None
    _order(world, ("remove", host.name))
    return lambda: _order(world, ("add", host.name), ("promote", host.name))


def _order(world: QuorumWorld, *orders: tuple[str, str]) -> None:
    """Have the leader, or whichever node is up, give orders one after the other."""
    nodes = [world.leader(), *(host for host in world.hosts.values() if isinstance(host, NodeHost))]
    giver = next((host for host in nodes if host is not None and host.driver is not None), None)
    if giver is None:
        return

    async def give(driver: Driver) -> None:
        for what, node in orders:
            asked = f"let {node or 'another'} lead" if what == "transfer" else f"{what} {node}"
            world.tell(giver.name, f"is asked to {asked}")
            for _ in range(INSISTENCE):
                try:
                    await driver.arrange(what, node, f"{node}:1")
                    break
                except DoyenError:
                    await asyncio.sleep(0.2)

    assert giver.process is not None
    assert giver.driver is not None
    giver.process.start(give(giver.driver))


_BEGIN: dict[str, Callable[[QuorumWorld, Fault, list[Host]], Undo | None]] = {
    "partition": _cut,
    "oneway": _cut,
    "bridge": _cut,
    "reset": _reset,
    "slow": _slow,
    "loss": _loss,
    "crash": _crash,
    "power": _crash,
    "pause": _pause,
    "stall": _stall,
    "full": _full,
    "fsync": _fsync,
    "rate": _rate,
    "jump": _jump,
    "transfer": _transfer,
    "churn": _churn,
}


def draw(
    protocol: str,
    nodes: int,
    seed: int,
    *,
    kinds: tuple[str, ...] = KINDS,
    for_s: float = 20.0,
    clients: int = 3,
) -> Plan:
    """What this seed has in store for nodes and candidates."""
    from doyen.lab.plan import draw as draw_plan

    kinds = tuple(kind for kind in kinds if kind in KINDS)
    plan = draw_plan(protocol, nodes, seed, kinds=kinds, for_s=for_s, clients=clients)
    rng = stream(seed, "quorum")
    candidates = [f"c{number}" for number in range(1, clients + 1)]
    faults = []
    for fault in plan.faults:
        given = list(fault.nodes)
        if given and clients and fault.kind not in OF_NODES and rng.random() < 0.4:
            given[0] = HOLDER if rng.random() < 0.5 else rng.choice(candidates)
        if fault.kind == "partition" and rng.random() < 0.5:
            given += rng.sample(candidates, rng.randint(0, clients))
        faults.append(msgspec.structs.replace(fault, nodes=tuple(dict.fromkeys(given))))
    weather = Weather(min(plan.weather.latency_s, 0.02), plan.weather.spread, plan.weather.fsync_s)
    return plan.but(
        world="quorum",
        clients=clients,
        faults=tuple(faults),
        weather=weather,
        heartbeat_s=min(plan.heartbeat_s, 0.2),
    )
