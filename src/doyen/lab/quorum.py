"""A world of whole nodes and their clients: everything that users run, on simulated machines.

Each node is what `doyen serve` runs: a core under the real driver, the journal on a simulated disk,
peers on simulated TCP with secrets and member ids, the keyspace and its service. Each candidate is
a process of its own with a session on `doyen://` that campaigns in one election. Other processes
are clients of the keyspace (see `clients`). A proposer on every node swaps registers.

What must hold is checked after every turn of the event loop:

- the invariants of the cores (`consensus.invariants`);
- every result on every node is the one of the reference, and each command is executed once;
- at most one term is valid at any instant of true time, whatever the machines' clocks say;
- tokens increase from term to term;
- what clients see of keys, leases and watches agrees with the log, and what was refused was not
  executed;
- no node catches an exception of its own code;
- a node that has lost its data directory does not take part until it was added again;
- without faults, requests are answered (`quorum_checkers.OUTAGE_S`); and after all faults have
  ended, a candidate is elected, commands are executed, and the leases of dead processes end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextvars import copy_context
from typing import Any

from doyen.errors import DoyenError
from doyen.lab.administrator import Administrator
from doyen.lab.client_checker import ClientChecker
from doyen.lab.clients import ClientMachine
from doyen.lab.faults import ActiveFaults, Undo
from doyen.lab.linearizability import Operation
from doyen.lab.machines import CandidateMachine, NodeMachine, SimulatedMachine
from doyen.lab.node_faults import BEGIN, DRIFT
from doyen.lab.observer import WorldObserver
from doyen.lab.outcome import Measurements, RunOutcome, Violation
from doyen.lab.plan import LEADER, Fault, Plan, stream
from doyen.lab.processes import (
    LabLoop,
    Process,
    ProcessKilled,
    StreamNetwork,
    failed_callbacks,
    quiet,
)
from doyen.lab.protocols import Protocol, known
from doyen.lab.quorum_checkers import (
    LogChecker,
    QuorumRecoveryChecker,
    ServiceChecker,
    TermChecker,
)
from doyen.lab.quorum_plan import CLIENTS, HOLDER
from doyen.lab.registers import RegisterChecker
from doyen.lease.clock import VirtualClock
from doyen.quorum.consensus.core import Membership, Role
from doyen.quorum.consensus.invariants import InvariantBroken
from doyen.quorum.keyspace.state import UnknownCommand
from doyen.quorum.node.framed_files import SyncFailed

LIVENESS_S = 60.0
"""The time, after the end of all faults, within which the quorum must have recovered."""


class Participants:
    """Nodes, candidates and clients of the keyspace."""

    def __init__(self, world: QuorumWorld) -> None:
        self._world = world
        self.machines: dict[str, SimulatedMachine] = {}
        self.dead: list[Process] = []
        """Processes that were killed and replaced."""

    def create(self) -> None:
        world, plan = self._world, self._world.plan
        for number, name in enumerate(plan.names, 1):
            self.machines[name] = NodeMachine(world, name, number, joining=False)
        for number in range(1, plan.clients + 1):
            self.machines[f"c{number}"] = CandidateMachine(world, f"c{number}", 100 + number)
        for number, name in enumerate(CLIENTS, 1):
            self.machines[name] = ClientMachine(world, name, 200 + number)

    def __iter__(self) -> Iterator[SimulatedMachine]:
        return iter(self.machines.values())

    def processes(self) -> list[Process]:
        """All processes that there ever were."""
        return [*self.dead, *(machine.process for machine in self if machine.process)]

    def nodes(self) -> list[NodeMachine]:
        return [machine for machine in self if isinstance(machine, NodeMachine)]

    def leader(self) -> NodeMachine | None:
        """The node that leads in the latest generation."""
        leading = [
            (node.driver.generation, node.number, node)
            for node in self.nodes()
            if node.driver and node.driver.role is Role.LEADING
        ]
        return max(leading, key=lambda each: each[:2])[2] if leading else None

    def add_node(self) -> NodeMachine:
        """Start a new node that waits to be added to the membership."""
        number = 1 + len(self.nodes())
        node = NodeMachine(self._world, f"n{number}", number, joining=True)
        self.machines[node.name] = node
        node.start()
        return node

    def addresses_for(self, node: NodeMachine) -> dict[str, str]:
        """The addresses with which a node is started: the founders' or, if it joins, all nodes'."""
        plan = self._world.plan
        known = [each.name for each in self.nodes()] if node.joining else plan.names
        return {name: f"{name}:1" for name in dict.fromkeys((*known, node.name))}

    def membership_for(self, node: NodeMachine) -> Membership:
        """The membership with which a node is started."""
        addresses = self.addresses_for(node)
        if not node.joining:
            return Membership(self._world.plan.names, (), addresses)
        others = tuple(name for name in addresses if name != node.name)
        return Membership(others, (node.name,), addresses)


class QuorumWorld:
    """A simulated quorum with candidates and clients."""

    def __init__(self, plan: Plan, protocol: Protocol | None = None) -> None:
        self.plan = plan
        self.protocol = protocol or known(plan.protocol)
        self.noise = plan.seed * 1_000_003 + plan.noise
        self.measurements = Measurements()
        self.log = LogChecker(self)
        self.clients = ClientChecker(self, self.log.reference)
        self.registers = RegisterChecker(plan.keys, self.fail)
        self.terms = TermChecker(self)
        self.service = ServiceChecker(self)
        self.recovery = QuorumRecoveryChecker(self)
        self.participants = Participants(self)
        self.administrator = Administrator(self)
        self._faults = ActiveFaults(
            plan.faults, self._begin_fault, self.call_after, lambda *_: self.service.disturb()
        )
        self.on_report: Callable[[float, str, str], None] | None = None
        """Called with what happens: time, subject, predicate."""
        self.observer: WorldObserver | None = None
        self.violation: Violation | None = None
        self._over = False
        self._stop: asyncio.Future[None]
        self.loop: LabLoop
        self.network: StreamNetwork

    # Called by the parts.

    def fail(self, kind: str, text: str) -> None:
        """End the run with a violation. Only the first one counts."""
        if self.violation is None:
            self.violation = Violation(kind, round(self.loop.time(), 6), text)
            if not self._stop.done():
                self._stop.set_result(None)

    def report(self, subject: str, predicate: str) -> None:
        """Report something that happens, for the narration."""
        if self.on_report is not None:
            self.on_report(self.loop.time(), subject, predicate)
        if self.observer is not None:
            self.observer.reported(subject, predicate)

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine outside of every process."""
        return self._outside.run(self.loop.create_task, work)

    def call_after(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call outside of every process. Nothing is called after the end of the run: a fault that
        began while machines are being closed would leave one of them paused for good."""

        def run() -> None:
            if not self._over:
                call(*arguments)

        self._outside.run(self.loop.call_later, delay_s, run)

    def answered(self, operation: Operation, result: int | None) -> None:
        self.registers.end(operation, result)
        self.measurements.answered(self.loop.time(), writes=operation.value is not None)
        self.service.answered()

    def role_changed(
        self, machine: NodeMachine, role: Role, generation: int, leader: str | None
    ) -> None:
        if machine.data_lost and leader is not None:
            self.fail("identity", f"{machine.name} takes part, but has lost its data directory")
        if role is Role.LEADING:
            self.measurements.elected(self.loop.time())
            self.report(machine.name, f"leads in generation {generation}")
        elif leader is not None:
            self.report(machine.name, f"follows {leader} in generation {generation}")

    # Crashes and restarts.

    def crash(self, machine: SimulatedMachine) -> None:
        """Carry out the pending crash of a machine, and schedule its restart."""
        crash = machine.pending_crash
        assert crash is not None
        self.report(machine.name, "is killed")
        machine.stop(power_loss=crash.power_loss)
        self.call_after(crash.down_s, self.restart, machine)

    def restart(self, machine: SimulatedMachine) -> None:
        """One of the faults that keep a machine down has ended: start it with the last of them."""
        machine.pending_restarts -= 1
        if machine.pending_restarts <= 0 and not machine.up:
            machine.pending_restarts = 0
            self.service.disturb()
            machine.start()
            self.report(machine.name, "is back")

    def aborted(self, machine: NodeMachine, error: BaseException) -> None:
        """A node ends its own process. Only errors of the disk are a reason for that, and unknown
        commands if it runs an older release."""
        if self._over:
            return
        expected = isinstance(error, OSError | SyncFailed) or isinstance(error.__cause__, OSError)
        if machine.older:
            expected = expected or isinstance(error, UnknownCommand)
        if not expected:
            self.fail("defect", f"{machine.name}: {error!r}")
        self.report(machine.name, "ends its own process")
        machine.pending_restarts += 1
        machine.stop(power_loss=False)
        self.call_after(0.1, self.restart, machine)
        raise ProcessKilled

    def _begin_fault(self, fault: Fault) -> Undo | None:
        self.measurements.statistics.faults += 1
        self.service.disturb()
        machines = self._named_in(fault)
        return BEGIN[fault.kind](self, fault, machines) if machines is not None else None

    def _named_in(self, fault: Fault) -> list[SimulatedMachine] | None:
        """The machines that a fault names; None if one of them does not exist now."""
        leader = self.participants.leader()
        roles = {LEADER: leader.name if leader is not None else None, HOLDER: self.terms.holder}
        names = dict.fromkeys(roles.get(name, name) for name in fault.nodes)
        known = self.participants.machines
        found = [known[name] for name in names if name is not None and name in known]
        return found if len(found) == len(names) else None

    # The run.

    def run(self) -> RunOutcome:
        """Run the plan, and check what clients saw."""
        before = random.getstate()
        random.seed(self.noise)  # for the jitter of connections and stores
        try:
            with (
                quiet(),
                failed_callbacks(self._on_callback_failed),
                asyncio.Runner(loop_factory=self._make_loop) as runner,
            ):
                runner.run(self._main())
        finally:
            random.setstate(before)
        return self.measurements.outcome(
            self.plan,
            [self.violation] if self.violation else [],
            trace=self.loop.trace,
            events=self.loop.steps,
            virtual_s=self.loop.clock.monotonic(),
            messages=self.network.messages,
            leaders=len(self.log.cluster.leaders),
            commits=len(self.log.cluster.committed),
            faults_s=self.plan.for_s,
        )

    def _make_loop(self) -> LabLoop:
        self.loop = LabLoop(VirtualClock())
        self.network = StreamNetwork(self.loop, self.plan.latencies, self.noise)
        self.network.on_cut = self._link_changed
        self.loop.after_turn = self.terms.check
        self.loop.set_exception_handler(self._on_exception)
        return self.loop

    def _link_changed(self, here: str, there: str, cut: bool) -> None:
        if self.observer is not None:
            self.observer.link_changed(here, there, cut, 0.0)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, InvariantBroken):
            self.fail("invariant", str(error))
        elif error is not None and not isinstance(error, ProcessKilled | DoyenError):
            self.fail("defect", f"{context['message']}: {error!r}")

    def _on_callback_failed(self, error: str) -> None:
        if not self._over:
            self.fail("defect", f"a node has caught {error}")

    async def _main(self) -> None:
        self._outside = copy_context()
        self._stop = self.loop.create_future()
        rng = stream(self.noise, "start")
        self.participants.create()
        for machine in self.participants:
            machine.clock.adjust(rng.uniform(1 - DRIFT, 1))
            self.call_after(rng.uniform(0.0, 0.2), machine.start)
        self._faults.schedule(self.plan.for_s)
        try:
            await self._run_faults()
            if self.violation is None:
                await self._heal()
            if self.violation is None:
                self._check_end()
        finally:
            await self._clean_up()

    async def _run_faults(self) -> None:
        while self.violation is None and (left := self.plan.for_s - self.loop.time()) > 0:
            await self._wait(min(left, 0.5))
            if (
                self._faults
                or self.administrator.pending
                or not all(
                    machine.up and not (machine.process and machine.process.paused)
                    for machine in self.participants
                )
            ):
                self.service.disturb()
            self.service.check()

    async def _wait(self, seconds: float) -> None:
        await asyncio.wait({self._stop}, timeout=seconds)

    async def _heal(self) -> None:
        """End all faults, and wait until the quorum has recovered."""
        self.measurements.healed_at = healed_at = self.loop.time()
        self.service.disturb()
        self.report("", "all faults have ended")
        self._faults.end_all()
        for machine in self.participants:
            machine.pending_crash = None
            machine.pending_restarts = 0
            if isinstance(machine, NodeMachine):
                machine.files.sync_fails = False
            machine.start()
        while self.violation is None:
            await self._wait(0.5)
            self.service.check()
            missing = self.recovery.missing()
            if missing is None:
                self.measurements.recovered(self.loop.time())
                return
            if self.loop.time() - healed_at > LIVENESS_S:
                text = f"{LIVENESS_S:g} s after all faults had ended, {missing}"
                self.fail("liveness", text)

    def _check_end(self) -> None:
        self.clients.check_writes()
        for node in self.participants.nodes():
            if node.at(self.log.reference.index):
                self.clients.check_state(node.name, node.keyspace)
        self.registers.check(linearizable_by_log=self.protocol.name == "raft")

    async def _clean_up(self) -> None:
        """End the tasks of all processes, including dead and paused ones."""
        self._over = True
        self.observer = None
        self.loop.after_turn = lambda: None
        self.loop.set_exception_handler(lambda loop, context: None)
        processes = self.participants.processes()
        for process in processes:
            process.release()
        self.network.close(processes)
        self.administrator.close()
        for _ in range(20):
            left = [task for process in processes for task in process.tasks if not task.done()]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(5.0)
