"""Faults of a world of whole nodes: what each kind does when it begins and when it ends.

As in `faults`, beginning a fault returns a function that undoes exactly what was begun. A fault
that a quorum does not promise to survive (two nodes without their data at once) is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from doyen.lab.faults import PendingCrash, Undo, cut
from doyen.lab.files import Files
from doyen.lab.machines import NodeMachine, SimulatedMachine
from doyen.lab.plan import Fault

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld

DRIFT = 0.004
"""The share by which the clocks of machines may be slow."""
MAX_VOTERS = 7


def _and(machines: Iterable[SimulatedMachine]) -> str:
    return " and ".join(machine.name for machine in machines)


def _cut(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    names = [machine.name for machine in machines]
    everyone = list(world.participants.machines)
    return cut(fault, names, everyone, world.network.cut, world.report)


def _reset(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    if len(machines) > 1:
        world.report(_and(machines[:2]), "lose their connections")
        world.network.reset(machines[0].name, machines[1].name)
    return None


def _slow(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    if len(machines) < 2:
        return None
    names = machines[0].name, machines[1].name

    def more(seconds: float) -> None:
        for pair in (names, names[::-1]):
            extra = world.network.extra_s
            extra[pair] = max(0.0, extra.get(pair, 0.0) + seconds)

    more(fault.amount)
    world.report(_and(machines[:2]), f"receive each other's messages {fault.amount:g} s late")
    return lambda: more(-fault.amount)


def _loss(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    def more(share: float) -> None:
        world.network.loss = max(0.0, world.network.loss + share)

    more(fault.amount)
    world.report("the network", f"loses {fault.amount:.0%} of all packets, which are retransmitted")
    return lambda: more(-fault.amount)


def _crash(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    machine = machines[0]
    if machine.up and machine.pending_crash is None:
        machine.pending_restarts += 1
        effects = int(fault.amount) if isinstance(machine, NodeMachine) else 0
        machine.pending_crash = PendingCrash(
            effects, power_loss=fault.kind == "power", down_s=fault.for_s
        )
        if not effects:
            world.crash(machine)
    return None


def _pause(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    process = machines[0].process
    if process is None or process.dead:
        return None
    process.pause()
    name = machines[0].name
    world.report(name, "is paused")
    if world.observer is not None:
        world.observer.paused(name, True)

    def undo() -> None:
        world.report(name, "resumes")
        if process.paused:
            process.resume()
            if world.observer is not None:
                world.observer.paused(name, bool(process.paused))

    return undo


def _stall(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    machine = machines[0]
    if not isinstance(machine, NodeMachine):
        return None

    machine.slow_down(fault.amount)
    world.report(machine.name, f"has a slow disk: {fault.amount:g} s more for each write")
    return lambda: machine.slow_down(-fault.amount)


def _full(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    machine = machines[0]
    if not isinstance(machine, NodeMachine):
        return None
    machine.fill(True)
    world.report(machine.name, "has a full disk")
    return lambda: machine.fill(False)


def _fsync(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    machine = machines[0]
    if isinstance(machine, NodeMachine) and machine.up:
        world.report(machine.name, "has a disk that fails at the next sync")
        machine.files.sync_fails = True
    return None


def _rate(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    """The clock runs slow, within the drift that the validity of terms allows for."""
    rate = 1 - DRIFT * min(1.0, fault.amount)
    machines[0].clock.adjust(rate)
    world.report(machines[0].name, f"has a clock that runs at {rate:g} times the true rate")
    return None


def _jump(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    """The wall clock is set. Nothing may depend on it."""
    seconds = 3600.0 * fault.amount if fault.amount > 1 else -3600.0
    machines[0].clock.step_wall(seconds)
    world.report(machines[0].name, f"has its wall clock set {seconds:+g} s")
    return None


def _transfer(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    world.administrator.transfer(machines[0].name if machines else "")
    return None


def _churn(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    """A node is removed, and added again with its data; or a new node joins and stays."""
    machine = machines[0]
    if (
        not isinstance(machine, NodeMachine)
        or not world.protocol.membership
        or world.administrator.pending
    ):
        return None
    leader = world.participants.leader()
    if leader is None or leader.driver is None:
        return None
    voters = leader.driver.membership.voters
    if fault.amount and len(voters) < MAX_VOTERS:
        new = world.participants.add_node()
        world.report(new.name, "is a new node and joins")
        world.administrator.change(new, ("add", new.name), ("promote", new.name))
        return None
    if machine.name not in voters or len(voters) < 2:
        return None
    world.administrator.change(machine, ("remove", machine.name))
    return lambda: world.administrator.change(
        machine, ("add", machine.name), ("promote", machine.name)
    )


def _wipe(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    """A node loses its data directory and is started again with the same settings. The other nodes
    must refuse it. When the fault ends it is removed, and added as a new node."""
    machine = machines[0]
    if not isinstance(machine, NodeMachine) or not _survivable(world, machine):
        return None
    world.report(machine.name, "is killed, and its data directory is emptied")
    machine.stop(power_loss=False)
    machine.data_lost = machine.takes_part
    machine.files = Files()
    world.administrator.pending[machine.name] = None
    world.call_after(0.05, world.restart, machine)

    return partial(world.administrator.change, machine, *_replacement(machine))


def _rollback(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    """A node is started on a copy of its data directory whose age is half the duration of the
    fault. The other nodes must refuse it, because it has acknowledged more than it has."""
    machine = machines[0]
    if not isinstance(machine, NodeMachine) or not _survivable(world, machine):
        return None
    copy = machine.files.copy()
    world.administrator.pending[machine.name] = None
    world.report(machine.name, "has its data directory copied")

    def put_back() -> None:
        world.report(machine.name, "is killed, and started on the copy of its data directory")
        machine.stop(power_loss=False)
        machine.data_lost = machine.takes_part
        machine.files = copy
        world.call_after(0.05, world.restart, machine)

    world.call_after(fault.for_s / 2, put_back)
    return partial(world.administrator.change, machine, *_replacement(machine))


def _older(world: QuorumWorld, fault: Fault, machines: list[SimulatedMachine]) -> Undo | None:
    """A node is started with a release that does not know all commands of the log, although its
    handshake claims that it does. It must stop at the first unknown command, every time it is
    started, until the right release is installed."""
    machine = machines[0]
    if not isinstance(machine, NodeMachine) or not machine.up or machine.older:
        return None
    world.report(machine.name, "is started with an older release")

    def start(*, older: bool) -> None:
        machine.older = older
        if machine.up:
            machine.stop(power_loss=False)
            machine.pending_restarts += 1
            world.call_after(0.05, world.restart, machine)

    start(older=True)
    return partial(start, older=False)


def _replacement(machine: NodeMachine) -> tuple[tuple[str, str], ...]:
    """The requests that replace a node that has lost its data."""
    return ("remove", machine.name), ("empty", ""), ("add", machine.name), ("promote", machine.name)


def _survivable(world: QuorumWorld, lost: NodeMachine) -> bool:
    """Whether a majority would be left in the membership of every node."""
    if world.administrator.pending or not lost.up or lost.driver is None:
        return False
    for node in world.participants.nodes():
        if node.driver is None:
            return False
        membership = node.driver.membership
        if lost.name in membership.voters and len(membership.voters) <= membership.majority:
            return False
    return world.protocol.membership


BEGIN: dict[str, Callable[[QuorumWorld, Fault, list[SimulatedMachine]], Undo | None]] = {
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
    "wipe": _wipe,
    "rollback": _rollback,
    "older": _older,
}
