"""What each kind of fault does to a world of whole nodes when it begins, and when it ends.

As in `faults`, beginning gives the way to undo exactly what was begun. A fault that would go beyond
what a quorum promises to survive (two nodes without their data at once) does not happen.

Imports the hosts and the node's driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from doyen.errors import DoyenError
from doyen.lab.faults import Undo, told_of_cut
from doyen.lab.files import Files
from doyen.lab.plan import Fault
from doyen.lab.processes import NodeHost, SimulatedMachine

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld

__all__ = ["BEGIN", "DRIFT", "give_orders"]

DRIFT = 0.004
"""By how much machines' clocks may be slow."""
INSISTENCE = 10
"""How often an order is given if it is refused."""
ORDER_S = 4.0
"""How long an order may take before it is given on another node."""
MAX_VOTERS = 7


def _and(hosts: Iterable[SimulatedMachine]) -> str:
    return " and ".join(host.name for host in hosts)


def _cut(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
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


def _reset(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    if len(hosts) > 1:
        world.tell(_and(hosts[:2]), "lose their connections")
        world.network.reset(hosts[0].name, hosts[1].name)
    return None


def _slow(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
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


def _loss(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    def more(share: float) -> None:
        world.network.loss = max(0.0, world.network.loss + share)

    more(fault.amount)
    world.tell("the network", f"loses {fault.amount:.0%} of all packets, and sends them again")
    return lambda: more(-fault.amount)


def _crash(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
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


def _pause(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
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


def _stall(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    host = hosts[0]
    if not isinstance(host, NodeHost):
        return None

    host.slow_down(fault.amount)
    world.tell(host.name, f"has a disk that takes {fault.amount:g} s a write")
    return lambda: host.slow_down(-fault.amount)


def _full(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    host = hosts[0]
    if not isinstance(host, NodeHost):
        return None
    host.fill(True)
    world.tell(host.name, "has a full disk")
    return lambda: host.fill(False)


def _fsync(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    host = hosts[0]
    if isinstance(host, NodeHost) and host.up:
        world.tell(host.name, "has a disk that fails at the next sync")
        host.files.sync_fails = True
    return None


def _rate(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    """Within the drift that validity allows for."""
    rate = 1 - DRIFT * min(1.0, fault.amount)
    hosts[0].clock.adjust(rate=rate)
    world.tell(hosts[0].name, f"has a clock that runs at {rate:g} times the rate")
    return None


def _jump(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    """Of wall time, which nothing may rest on."""
    seconds = 3600.0 * fault.amount if fault.amount > 1 else -3600.0
    hosts[0].clock.step_wall(seconds)
    world.tell(hosts[0].name, f"has its wall clock set {seconds:+g} s")
    return None


def _transfer(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    _transferred(world, hosts[0].name if hosts else "")
    return None


def _churn(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    """A node goes, and comes back with what it knew; or a new one joins, and stays."""
    host = hosts[0]
    if not isinstance(host, NodeHost) or not world.protocol.membership or world.changing:
        return None
    leader = world.leader()
    if leader is None or leader.driver is None:
        return None
    voters = leader.driver.membership.voters
    if fault.amount and len(voters) < MAX_VOTERS:
        new = world.add_node()
        world.tell(new.name, "is new, and joins")
        world.change(new, ("add", new.name), ("promote", new.name))
        return None
    if host.name not in voters or len(voters) < 2:
        return None
    world.change(host, ("remove", host.name))
    return lambda: world.change(host, ("add", host.name), ("promote", host.name))


def _wipe(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    """A node loses its data directory and is started again with the same settings: the others must
    refuse it. When the fault ends it is removed, and added anew as a new node."""
    host = hosts[0]
    if (
        not isinstance(host, NodeHost)
        or not world.protocol.membership
        or not _bearable(world, host)
    ):
        return None
    world.tell(host.name, "is killed, and its data directory emptied")
    host.stop(told=True)
    host.files, host.lost = Files(), True
    world.changing[host.name] = None
    world.later(0.05, world.revive, host)

    return partial(world.change, host, *_replaced(host))


def _rollback(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    """A node is started on a copy of its data directory that is half as old as the fault is long:
    the others must refuse it, since they have heard more of it."""
    host = hosts[0]
    if not isinstance(host, NodeHost) or not _bearable(world, host):
        return None
    copy = host.files.copy()
    world.changing[host.name] = None
    world.tell(host.name, "has its data directory copied")

    def put_back() -> None:
        world.tell(host.name, "is killed, and started on the copy")
        host.stop(told=True)
        host.files, host.lost = copy, True
        world.later(0.05, world.revive, host)

    world.later(fault.for_s / 2, put_back)
    return partial(world.change, host, *_replaced(host))


def _older(world: QuorumWorld, fault: Fault, hosts: list[SimulatedMachine]) -> Undo | None:
    """A node is started with a release that does not know all commands of the log, although it says
    so in the handshake. It must stop at the first that it does not know, as often as it is started,
    until the right release is installed."""
    host = hosts[0]
    if not isinstance(host, NodeHost) or not host.up or host.older:
        return None
    world.tell(host.name, "is started with an older release")

    def start(*, older: bool) -> None:
        host.older = older
        if host.up:
            host.stop(told=True)
            host.downs += 1
            world.later(0.05, world.revive, host)

    start(older=True)
    return partial(start, older=False)


def _replaced(host: NodeHost) -> tuple[tuple[str, str], ...]:
    """What to do about a node that has lost its data."""
    return ("remove", host.name), ("empty", ""), ("add", host.name), ("promote", host.name)


def _bearable(world: QuorumWorld, lost: NodeHost) -> bool:
    """Whether a majority of every membership that anybody holds to be in force would be left."""
    if not world.protocol.membership or world.changing or not lost.up or lost.driver is None:
        return False
    for host in world.hosts.values():
        if isinstance(host, NodeHost):
            if host.driver is None:
                return False
            membership = host.driver.membership
            if lost.name in membership.voters and len(membership.voters) <= membership.majority:
                return False
    return True


def _transferred(world: QuorumWorld, node: str) -> None:
    giver = _giver(world)
    if giver is not None:
        assert giver.process is not None
        giver.process.start(_give(world, giver, "transfer", node, INSISTENCE))


def _giver(world: QuorumWorld) -> NodeHost | None:
    """The leader, or whichever node is up and has not lost its data."""
    nodes = [world.leader(), *(host for host in world.hosts.values() if isinstance(host, NodeHost))]
    return next(
        (host for host in nodes if host is not None and host.driver is not None and not host.lost),
        None,
    )


async def _give(world: QuorumWorld, giver: NodeHost, what: str, node: str, times: int) -> bool:
    """Have a node carry an order out, in its own process."""
    driver = giver.driver
    assert driver is not None
    asked = f"let {node or 'another'} lead" if what == "transfer" else f"{what} {node}"
    world.tell(giver.name, f"is asked to {asked}")
    for _ in range(times):
        try:
            await driver.admin.perform(what, node, f"{node}:1")
        except DoyenError:
            await asyncio.sleep(0.2)
        else:
            return True
    return False


async def give_orders(world: QuorumWorld, host: NodeHost, *orders: tuple[str, str]) -> None:
    """What an administrator does, who does not give up: one order after the other, on one node or
    another. `empty` has the node about which the orders are start anew, as one that joins."""
    for what, node in orders:
        if what == "empty":
            world.tell(host.name, "is emptied, to join anew")
            host.stop(told=True)
            host.files, host.lost, host.joining = Files(), False, True
            host.start()
            continue
        done = False
        while not done:
            giver = _giver(world)
            if giver is None or giver.process is None:
                await asyncio.sleep(0.2)
                continue
            task = giver.process.start(_give(world, giver, what, node, INSISTENCE))
            await asyncio.wait({task}, timeout=ORDER_S)
            done = task.done() and not task.cancelled() and task.exception() is None
            done = done and task.result()
            task.cancel()


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
