"""A simulated cluster of bare protocol cores, run from one seed in virtual time.

    plan ──▶ world ──▶ outcome
              │
              ├ queue         events in order, virtual time
              ├ servers       a core, a disk and a clock each
              ├ network       links and connections
              ├ clients       their requests and the answers
              ├ faults        those of the plan that are active
              ├ checkers      what must hold after every event
              └ measurements  the figures of the run

Everything that happens is an event of the queue. No set is ever iterated, so that one seed always
gives the same run.

A run has two phases. In the first the plan's faults begin and end. Then all faults end, and within
a bounded time there must be a leader, a new write must be answered, and every voter must have it.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from itertools import count
from math import inf

from doyen.lab.checkers import Checkers, RecoveryChecker, StabilityChecker, ViolationFound
from doyen.lab.event_queue import LIMIT, EventQueue, QueueOverflow
from doyen.lab.faults import ActiveFaults, Undo, begin
from doyen.lab.linearizability import Operation, linearizable, witnessed
from doyen.lab.network import MessageNetwork, SimulatedLink
from doyen.lab.observer import WorldObserver
from doyen.lab.outcome import Measurements, RunOutcome, Violation
from doyen.lab.plan import Fault, Plan, stream
from doyen.lab.protocols import Protocol, known
from doyen.lab.server import SimulatedServer
from doyen.lab.workload import Client, WorkloadRequest
from doyen.quorum.consensus.core import (
    CoreEvent,
    Effect,
    Membership,
    Message,
    Role,
    RoleChanged,
)
from doyen.quorum.consensus.invariants import InvariantBroken

LIVENESS_S = 40.0
"""The time, after the end of all faults, within which the cluster must have recovered."""
HEALED_LATENCY = 1 / 8
"""The longest latency after the end of all faults, as a share of the election timeout."""


class World:
    """A simulated cluster."""

    def __init__(self, plan: Plan, protocol: Protocol | None = None) -> None:
        self.plan = plan
        self.protocol = protocol or known(plan.protocol)
        self.noise = plan.seed * 1_000_003 + plan.noise
        self.queue = EventQueue()
        self.stamp: Callable[[], int] = count(1).__next__
        """Increasing numbers for the begin and the end of clients' operations."""
        self.membership = Membership(plan.names)
        self.settings = self.protocol.make_settings(plan)
        self.measurements = Measurements()
        self.network = MessageNetwork(self, plan.latencies, self.noise)
        self.checkers = Checkers(self)
        self.stability = StabilityChecker(self)
        self.recovery = RecoveryChecker(self)
        self.on_message: Callable[[Message], None] | None = None
        """Called with every message that is sent."""
        self.on_step: Callable[[SimulatedServer, CoreEvent, Sequence[Effect]], None] | None = None
        """Called with every event that a core handles and the effects."""
        self.on_report: Callable[[float, str, str], None] | None = None
        """Called with what happens to servers, and with their roles: time, subject, predicate."""
        self.observer: WorldObserver | None = None
        self.fault_rng = stream(self.noise, "faults")
        self._faults = ActiveFaults(
            plan.faults, self._begin_fault, self.queue.push_after, self.stability.fault_changed
        )
        self.on_leading: list[Callable[[SimulatedServer], None]] = []
        """Called whenever a server becomes leader."""
        self.servers: dict[str, SimulatedServer] = {}
        for name in plan.names:
            self.add_server(name)
        self.clients = [Client(self, number) for number in range(1, plan.clients + 1)]

    @property
    def now(self) -> float:
        return self.queue.now

    def report(self, subject: str, predicate: str) -> None:
        """Report something that happens, for the narration."""
        if self.on_report is not None:
            self.on_report(self.queue.now, subject, predicate)
        if self.observer is not None:
            self.observer.reported(subject, predicate)

    # Servers.

    def add_server(self, name: str) -> SimulatedServer:
        server = SimulatedServer(self, name, len(self.servers) + 1)
        for other in self.servers.values():
            server.links[other.id] = SimulatedLink(server, other)
            other.links[name] = SimulatedLink(other, server)
        self.servers[name] = server
        return server

    def leader(self) -> SimulatedServer | None:
        """The leader of the latest generation."""
        leading = [
            (server.core.generation, -server.number, server)
            for server in self.servers.values()
            if server.core is not None and server.core.role is Role.LEADING
        ]
        return max(leading)[2] if leading else None

    def crash(self, server: SimulatedServer) -> None:
        """Carry out the pending crash of a server, and schedule its restart."""
        crash = server.pending_crash
        assert crash is not None
        server.pending_crash = None
        self.stability.disturb()
        self.report(server.id, "is killed")
        server.stop(power_loss=crash.power_loss)
        self.queue.push_after(crash.down_s, self.restart, server)

    def restart(self, server: SimulatedServer) -> None:
        """One of the faults that keep a server down has ended: start it with the last of them."""
        server.pending_restarts -= 1
        if server.pending_restarts == 0 and server.core is None:
            self.stability.disturb()
            server.start()
            if server.core is not None:
                self.report(server.id, "is back")

    def role_changed(self, server: SimulatedServer, effect: RoleChanged) -> None:
        if effect.role is Role.LEADING:
            self.measurements.elected(self.queue.now)
            self.stability.elected(server)
            for call in self.on_leading[:]:
                self.queue.push(self.queue.now, call, server)
        elif server.was_leading:
            self.stability.stepped_down(server)
        if self.on_report is not None or self.observer is not None:
            match effect.role:
                case Role.LEADING:
                    text = f"leads in generation {effect.generation}"
                case Role.FOLLOWING:
                    text = f"follows {effect.leader} in generation {effect.generation}"
                case _:
                    text = f"looks for a leader in generation {effect.generation}"
            self.report(server.id, text)

    # Clients.

    def answer(
        self, server: SimulatedServer, request: WorkloadRequest, result: int | None, index: int
    ) -> None:
        answer = (request, result, index, server.id)
        self.queue.push_after(self.network.latency(), request.client.answered, answer)

    def refuse(self, request: WorkloadRequest, leader: str | None) -> None:
        refusal = (request, leader)
        self.queue.push_after(self.network.latency(), request.client.refused, refusal)

    def answered(self, operation: Operation) -> None:
        """A client has received the answer to its request."""
        self.measurements.answered(self.queue.now, writes=operation.value is not None)
        self.recovery.answered(operation)

    # The run.

    def run(self) -> RunOutcome:
        """Run the plan, and check what clients saw."""
        violations: list[Violation] = []
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._run_faults()
            self._heal()
            self._check_history()
        except ViolationFound as found:
            violations.append(found.violation)
        except InvariantBroken as broken:
            violations.append(Violation("invariant", round(self.now, 6), str(broken)))
        except Exception as error:  # noqa: BLE001  (an exception of a core is a finding)
            violations.append(Violation("defect", round(self.now, 6), _located(error)))
        finally:
            if collecting:
                gc.enable()
        return self.measurements.outcome(
            self.plan,
            violations,
            trace=self.queue.trace,
            events=self.queue.processed,
            virtual_s=self.now,
            messages=self.network.messages,
            leaders=len(self.checkers.cluster.leaders),
            commits=len(self.checkers.log),
            faults_s=min(self.now, self.plan.for_s),
        )

    def run_until(self, end: float) -> None:
        try:
            self.queue.run_until(end)
        except QueueOverflow:
            self.checkers.fail("flood", f"more than {LIMIT:,} events are pending")

    def _run_faults(self) -> None:
        queue, rng = self.queue, stream(self.noise, "start")
        for server in self.servers.values():
            queue.push(rng.uniform(0.0, 0.2), lambda server: server.start(), server)
        for client in self.clients:
            queue.push(rng.uniform(0.0, 0.5), client.begin, None)
        self._faults.schedule(self.plan.for_s)
        self.run_until(self.plan.for_s)

    def _begin_fault(self, fault: Fault) -> Undo | None:
        self.measurements.statistics.faults += 1
        return begin(self, fault)

    def _heal(self) -> None:
        """End every fault, start every server that can start, and bound the latency: a leader is
        guaranteed only if messages arrive well within the election timeout. Then wait until the
        cluster has recovered."""
        self.measurements.healed_at = self.now
        self.report("", "all faults have ended")
        self._faults.end_all()
        for server in list(self.servers.values()):
            server.pending_crash = None
            server.pending_restarts = 0
            server.adjust_clock(rate=1.0)
            server.start()
        self.network.bound_latency(self.plan.election_timeout_s * HEALED_LATENCY)
        self.network.reconnect()
        while not self.recovery.recovered():
            if self.now >= self.plan.for_s + LIVENESS_S:
                self.recovery.fail(LIVENESS_S)
            self.run_until(self.now + 0.25)
        self.measurements.recovered(self.now)

    def _check_history(self) -> None:
        """Check what clients saw during the whole run."""
        history = [operation for client in self.clients for operation in client.history]
        positions = self.checkers.positions
        counts = self.checkers.counts
        for operation in history:
            if operation.value is not None:
                position = positions.get((operation.client, operation.seq))
                if position is not None:
                    operation.position = position
                elif operation.ended < inf:
                    self.checkers.fail("lost write", f"{operation!r}, but it is not in the log")
            elif operation.ended < inf:
                operation.position = counts[int(operation.position)] - 0.5
        if witnessed(history) is not None:
            key = linearizable(history)
            if key is not None:
                self.checkers.fail("linearizability", f"no order explains {key[-6:]}")


def _located(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})"


def run_plan(plan: Plan, protocol: Protocol | None = None) -> RunOutcome:
    """Run a plan on its own protocol or, for tests, on a variant of it."""
    return World(plan, protocol).run()
