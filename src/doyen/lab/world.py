"""A simulated cluster: one seed, one heap of events in order, virtual time.

    plan ──▶ world ──▶ outcome          heap: (when, number, what, to whom)
              │
              ├ hosts      a core, a disk and a clock each
              ├ network    links and connections
              ├ clients    their requests and what became of them
              └ checkers   after every event

Everything that happens is pushed on the heap with a number of its own, so that two things at one
instant have an order; no set is ever iterated. `trace` is a running hash of what every core took in
and came to: two runs with the same trace are the same run.

A run has two phases. In the first the plan's faults come and go. Then everything is healed, and
within bounded time somebody must lead, a new write must be answered, and everybody must have it.

Imports the rest of the lab.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any

from msgspec import Struct

from doyen.lab.checkers import Broken, Checkers, Stability, Violation
from doyen.lab.disk import SimulatedDisk
from doyen.lab.faults import Undo, begin
from doyen.lab.linearizability import Operation, linearizable, witnessed
from doyen.lab.network import MessageNetwork, SimulatedLink
from doyen.lab.plan import Plan, stream
from doyen.lab.protocols import Protocol, known
from doyen.lab.server import SimulatedServer
from doyen.lab.workload import Client, WorkloadRequest
from doyen.quorum.consensus.core import (
    Core,
    CoreEvent,
    Effect,
    Membership,
    Message,
    Recovered,
    Role,
    RoleChanged,
)
from doyen.quorum.consensus.invariants import InvariantBroken

__all__ = ["RunOutcome", "Statistics", "World", "run_plan"]

LIVENESS_S = 40.0
"""How long after the healing a write may take, in virtual time."""
FLOOD = 200_000
"""So many events wait only for a protocol that answers its own messages with ever more of them."""
TIMELY = 1 / 8
"""Of an election timeout: what a message takes at most once all is healed."""


class Statistics(Struct, kw_only=True):
    """What a run was like, in figures."""

    events: int = 0
    virtual_s: float = 0.0
    messages: int = 0
    bytes: int = 0
    """Only where asked for: measuring takes its time."""
    first_leader_s: float | None = None
    leaders: int = 0
    """How many generations had one."""
    commits: int = 0
    writes: int = 0
    reads: int = 0
    available_share: float = 0.0
    """Of the tenths of a second under trouble, those in which a request was answered."""
    healed_s: float | None = None
    """How long after the healing a new write had been answered and applied everywhere."""
    faults: int = 0


class RunOutcome(Struct, kw_only=True):
    """What came of a run."""

    plan: Plan
    events: int
    trace_hash: str
    violations: list[Violation]
    statistics: Statistics

    @property
    def ok(self) -> bool:
        return not self.violations


class World:
    """A cluster and its fate."""

    def __init__(self, plan: Plan, protocol: Protocol | None = None) -> None:
        self.plan = plan
        self.protocol = protocol or known(plan.protocol)
        self.noise = plan.seed * 1_000_003 + plan.noise
        self.heap: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self.seq = 0
        self.now = 0.0
        self.trace = 0
        self.events = 0
        self._stamp = 0
        self.fsync_s = plan.weather.fsync_s
        self.membership = Membership(plan.names)
        self._settings = self.protocol.make_settings(plan)
        self.network = MessageNetwork(self, plan.weather, self.noise)
        self.checkers = Checkers(self)
        self.checked = 0
        """The index up to which what is committed has been looked at."""
        self.measure: Callable[[Message], None] | None = None
        self.listener: Callable[[SimulatedServer, CoreEvent, Sequence[Effect]], None] | None = None
        """Told of everything that a core takes in and says; for stories."""
        self.chronicle: Callable[[float, str, str], None] | None = None
        """Told of what befalls servers, and of roles; for stories."""
        self.statistics = Statistics()
        self.rng = stream(self.noise, "faults")
        self._active: dict[int, Undo] = {}
        self.on_leading: list[Callable[[SimulatedServer], None]] = []
        """Called whenever a server begins to lead."""
        self.healed_at = inf
        self._answered_tenths: set[int] = set()
        self._proof: Operation | None = None
        self.stability = Stability(self)
        self.hosts: dict[str, SimulatedServer] = {}
        for name in plan.names:
            self.add_host(name)
        self.clients = [Client(self, number) for number in range(1, plan.clients + 1)]

    # What the parts need.

    def push(self, at: float, do: Callable[[Any], object], argument: Any) -> None:
        self.seq += 1
        heappush(self.heap, (at, self.seq, do, argument))

    def stamp(self) -> int:
        """Numbers that increase, for what clients see."""
        self._stamp += 1
        return self._stamp

    def tell(self, who: str, what: str) -> None:
        if self.chronicle is not None:
            self.chronicle(self.now, who, what)

    def make_disk(self) -> SimulatedDisk:
        return self.protocol.make_disk()

    def make_core(
        self,
        name: str,
        membership: Membership,
        recovered: Recovered,
        *,
        jitter: Callable[[], float],
        now: float,
    ) -> Core:
        return self.protocol.make(
            name, membership, recovered, settings=self._settings, jitter=jitter, now=now
        )

    def add_host(self, name: str) -> SimulatedServer:
        host = SimulatedServer(self, name, len(self.hosts) + 1)
        for other in self.hosts.values():
            host.links[other.id] = SimulatedLink(host, other)
            other.links[name] = SimulatedLink(other, host)
        self.hosts[name] = host
        return host

    def leader(self) -> SimulatedServer | None:
        """Whoever leads in the latest generation."""
        leading = [
            (host.core.generation, -host.number, host)
            for host in self.hosts.values()
            if host.core is not None and host.core.role is Role.LEADING
        ]
        return max(leading)[2] if leading else None

    def blow(self, host: SimulatedServer) -> None:
        """A fuse has burnt down: the process is killed here, between two effects."""
        host.fuse = -1
        self.stability.disturb()
        self.tell(host.id, "is killed")
        host.stop(told=host.fuse_told)
        self.push(self.now + host.fuse_down_s, self.revive, host)

    def revive(self, host: SimulatedServer) -> None:
        host.downs -= 1
        if host.downs == 0 and host.core is None:
            self.stability.disturb()
            host.start()
            if host.core is not None:
                self.tell(host.id, "is back")

    def role_changed(self, host: SimulatedServer, effect: RoleChanged) -> None:
        if effect.role is Role.LEADING:
            if self.statistics.first_leader_s is None:
                self.statistics.first_leader_s = round(self.now, 4)
            self.stability.elected(host)
            for call in self.on_leading[:]:
                self.push(self.now, call, host)
        elif host.was_leading:
            self.stability.gave_up(host)
        if self.chronicle is not None:
            match effect.role:
                case Role.LEADING:
                    told = f"leads in generation {effect.generation}"
                case Role.FOLLOWING:
                    told = f"follows {effect.leader} in generation {effect.generation}"
                case _:
                    told = f"is looking, in generation {effect.generation}"
            self.tell(host.id, told)

    # Clients.

    def answer(
        self, host: SimulatedServer, request: WorkloadRequest, result: int | None, index: int
    ) -> None:
        at = self.now + self.network.latency()
        self.push(at, request.client.answered, (request, result, index, host.id))

    def refuse(self, request: WorkloadRequest, leader: str | None) -> None:
        at = self.now + self.network.latency()
        self.push(at, request.client.refused, (request, leader))

    def served(self, operation: Operation) -> None:
        """A client has its answer."""
        if operation.value is None:
            self.statistics.reads += 1
        else:
            self.statistics.writes += 1
            if self.now > self.healed_at and self._proof is None:
                self._proof = operation
        if self.now < self.healed_at:
            self._answered_tenths.add(int(self.now * 10))

    # The run.

    def run(self) -> RunOutcome:
        """From the first event to the verdict."""
        violations: list[Violation] = []
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._live()
            self._judge()
        except Broken as broken:
            violations.append(broken.violation)
        except InvariantBroken as broken:
            violations.append(Violation("invariant", round(self.now, 6), str(broken)))
        except Exception as error:  # noqa: BLE001  (a core that raises is what we are here to find)
            violations.append(Violation("defect", round(self.now, 6), _where(error)))
        finally:
            if collecting:
                gc.enable()
        return self._outcome(violations)

    def _live(self) -> None:
        rng = stream(self.noise, "start")
        for host in self.hosts.values():
            self.push(rng.uniform(0.0, 0.2), lambda host: host.start(), host)
        for client in self.clients:
            self.push(rng.uniform(0.0, 0.5), client.begin, None)
        for number, fault in enumerate(self.plan.faults):
            if fault.at < self.plan.for_s:
                self.push(fault.at, self._begin, number)
        self._go(self.plan.for_s)
        self._heal()
        while not self._lively():
            if self.now >= self.plan.for_s + LIVENESS_S:
                self._complain()
            self._go(self.now + 0.25)
        self.statistics.healed_s = round(self.now - self.healed_at, 3)

    def _go(self, until: float) -> None:
        heap = self.heap
        count = 0
        try:
            while heap and heap[0][0] <= until:
                at, _, do, argument = heappop(heap)
                self.now = at
                count += 1
                do(argument)
                if not count & 0x3FFF and len(heap) > FLOOD:
                    self.checkers.object("flood", f"{FLOOD:,} messages and more are under way")
        finally:
            self.events += count
        self.now = until

    def _begin(self, number: int) -> None:
        fault = self.plan.faults[number]
        self.statistics.faults += 1
        undo = begin(self, fault)
        self.stability.changed(fault, 1 if undo is not None else 0)
        if undo is not None:
            self._active[number] = undo
            self.push(self.now + fault.for_s, self._end, number)

    def _end(self, number: int) -> None:
        undo = self._active.pop(number, None)
        if undo is not None:
            undo()
            self.stability.changed(self.plan.faults[number], -1)

    def _heal(self) -> None:
        """Every fault ends, whoever can start starts, and messages are as quick as the timeouts
        suppose: that somebody leads in the end is promised under no other condition."""
        self.healed_at = self.now
        self.tell("", "everything is healed")
        for number in list(self._active):
            self._end(number)
        for host in list(self.hosts.values()):
            host.fuse = -1
            host.downs = 0
            host.adjust(rate=1.0)
            host.start()
        self.network.calm(self.plan.election_timeout_s * TIMELY)
        self.network.reach()

    def _voters(self) -> list[SimulatedServer]:
        """Those who must have everything in the end: the voters that are not lost for good."""
        leader = self.leader()
        if leader is None or leader.core is None:
            return []
        voters = [self.hosts[name] for name in leader.core.membership.voters]
        return [host for host in voters if not host.gone]

    def _lively(self) -> bool:
        proof = self._proof
        if proof is None:
            return not self.clients and self.leader() is not None
        voters = self._voters()
        return bool(voters) and all(
            host.machine.done.get(proof.client, (0, None))[0] >= proof.seq for host in voters
        )

    def _complain(self) -> None:
        leader = self.leader()
        if leader is None:
            what = "nobody leads"
        elif self._proof is None:
            what = f"{leader.id} leads, and no write was answered"
        else:
            what = "not every voter has caught up"
        self.checkers.object("liveness", f"{LIVENESS_S:g} s after everything was healed {what}")

    def _judge(self) -> None:
        """What clients saw, from beginning to end."""
        history = [operation for client in self.clients for operation in client.history]
        positions = self.checkers.positions
        counts = self.checkers.counts
        for operation in history:
            if operation.value is not None:
                place = positions.get((operation.client, operation.seq))
                if place is not None:
                    operation.position = place
                elif operation.ended < inf:
                    self.checkers.object("lost write", f"{operation!r}, and it is nowhere")
            elif operation.ended < inf:
                operation.position = counts[int(operation.position)] - 0.5
        if witnessed(history) is not None:
            key = linearizable(history)
            if key is not None:
                self.checkers.object("linearizability", f"no order explains {key[-6:]}")

    def _outcome(self, violations: list[Violation]) -> RunOutcome:
        figures = self.statistics
        figures.events = self.events
        figures.virtual_s = round(self.now, 3)
        figures.messages = self.network.messages
        figures.leaders = len(self.checkers.cluster.leaders)
        figures.commits = len(self.checkers.log)
        tenths = max(1, int(min(self.now, self.plan.for_s) * 10))
        figures.available_share = round(min(1.0, len(self._answered_tenths) / tenths), 4)
        return RunOutcome(
            plan=self.plan,
            events=self.events,
            trace_hash=f"{self.trace & (1 << 64) - 1:016x}",
            violations=violations,
            statistics=figures,
        )


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})"


def run_plan(plan: Plan, protocol: Protocol | None = None) -> RunOutcome:
    """Run a plan, on its own protocol or, for tests, on a variant of it."""
    return World(plan, protocol).run()
