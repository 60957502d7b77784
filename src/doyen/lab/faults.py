"""What each kind of fault does to a world when it begins, and when it ends.

A fault names servers, or whoever leads at that instant. Beginning gives the way to undo exactly
what was begun and nothing else, since faults may overlap.
A fault that would go beyond what any protocol promises to survive (the disks of a majority rotten)
does not happen.

Imports the words of consensus and the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from doyen.lab.plan import LEADER, Fault
from doyen.lab.workload import membership_of
from doyen.quorum.consensus.core import ChangeAsked, EntryKind, Membership, TransferAsked

if TYPE_CHECKING:
    from doyen.lab.network import SimulatedLink
    from doyen.lab.server import SimulatedServer
    from doyen.lab.world import World

__all__ = ["Undo", "begin", "told_of_cut"]

MAX_VOTERS = 7
MAX_HOSTS = 12


Undo = Callable[[], None]


def begin(world: World, fault: Fault) -> Undo | None:
    """Let it happen. Gives what ends it, if there is an end to it."""
    names = _named(world, fault)
    if names is None:
        return None
    return _KINDS[fault.kind](world, fault, [world.hosts[name] for name in names])


def _named(world: World, fault: Fault) -> tuple[str, ...] | None:
    leader = world.leader() if LEADER in fault.nodes else None
    names = []
    for name in fault.nodes:
        if name == LEADER:
            if leader is None:
                return None
            name = leader.id  # noqa: PLW2901
        if name not in world.hosts:
            return None
        if name not in names:
            names.append(name)
    return tuple(names)


def _and(names: Iterable[SimulatedServer]) -> str:
    return " and ".join(host.id for host in names)


# Links.


def told_of_cut(kind: str, names: Sequence[str]) -> tuple[str, str, str]:
    """Of whom a cut is told, what when it begins, and what when it ends."""
    first, rest = names[0], " and ".join(names[1:])
    match kind:
        case "oneway":
            return first, f"is no longer heard by {rest}", "is heard again"
        case "bridge":
            return first, f"alone reaches both {rest} and the others", "is no longer alone"
    return " and ".join(names), "can reach nobody else", "can reach the others again"


def _cut(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    if not hosts:
        return None
    others = [host for host in world.hosts.values() if host not in hosts]
    cut: list[SimulatedLink] = []
    if fault.kind == "oneway":
        cut += [hosts[0].links[other.id] for other in hosts[1:]]
    else:
        for one in hosts if fault.kind == "partition" else hosts[1:]:
            for other in others:
                cut += [one.links[other.id], other.links[one.id]]
    who, begins, ends = told_of_cut(fault.kind, [host.id for host in hosts])
    if cut:
        world.tell(who, begins)
    for link in cut:
        link.cuts += 1

    def undo() -> None:
        for link in cut:
            link.cuts -= 1
        if cut:
            world.tell(who, ends)
        world.network.reach()

    return undo


def _reset(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    if len(hosts) > 1:
        world.tell(_and(hosts[:2]), "lose their connection")
        world.network.reset(hosts[0], hosts[1])
    return None


def _slow(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    if len(hosts) < 2:
        return None
    there, back = hosts[0].links[hosts[1].id], hosts[1].links[hosts[0].id]

    def more(seconds: float) -> None:
        there.extra_s += seconds
        back.extra_s += seconds

    more(fault.amount)
    world.tell(_and(hosts[:2]), f"hear each other {fault.amount:g} s late")
    return lambda: more(-fault.amount)


def _rough(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    world.network.weather(**{fault.kind: fault.amount})
    told = {"loss": "loses", "duplicate": "repeats", "reorder": "reorders"}[fault.kind]
    world.tell("the network", f"{told} {fault.amount:.0%} of all messages")
    return lambda: world.network.weather(**{fault.kind: -fault.amount})


# Processes.


def _crash(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    """At once, or after so many more effects have been carried out; or so many after it has next
    written what it must not forget about an election."""
    for host in hosts:
        if host.core is None or host.fuse >= 0:
            continue
        host.downs += 1
        host.fuse = int(fault.amount)
        host.fuse_waits = fault.kind == "ballot"
        host.fuse_told = fault.kind != "power"
        host.fuse_down_s = fault.for_s
        if host.fuse == 0 and not host.fuse_waits:
            world.blow(host)
    return None


def _pause(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    host = hosts[0]
    host.pause()
    world.tell(host.id, "is frozen")

    def undo() -> None:
        world.tell(host.id, "goes on")
        host.resume()

    return undo


# Disks.


def _stall(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    disk = hosts[0].disk

    def more(seconds: float) -> None:
        disk.stall_s = max(0.0, disk.stall_s + seconds)

    more(fault.amount)
    world.tell(hosts[0].id, f"has a disk that takes {fault.amount:g} s a write")
    return lambda: more(-fault.amount)


def _full(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    disk = hosts[0].disk

    def more(by: int) -> None:
        disk.full += by

    more(1)
    world.tell(hosts[0].id, "has a full disk")
    return lambda: more(-1)


def _fsync(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    """The disk reports an error: the process ends itself, and is started again."""
    host = hosts[0]
    if host.core is None:
        return None
    world.tell(host.id, "is told by its disk that a write has failed")
    host.fail_sync()
    if host.core is None:
        _start_later(world, host, fault.for_s)
    return None


def _rot(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    """A bit flips while the machine is down: it must not start again."""
    host = hosts[0]
    if host.core is None or not all(
        _bearable(world, _in_force(world, each), host.id) for each in world.hosts.values()
    ):
        return None
    world.tell(host.id, "is killed, and a bit flips on its disk")
    host.stop(told=True)
    host.disk.flip(world.rng)
    _start_later(world, host, fault.for_s)
    return None


def _in_force(world: World, host: SimulatedServer) -> Membership:
    """Whom a server holds to be the members, or will when it is back."""
    if host.core is not None:
        return host.core.membership
    for entry in reversed(host.disk.entries):
        if entry.kind == EntryKind.MEMBERSHIP:
            return membership_of(entry.data)
    return host.disk.snapshot.membership if host.disk.snapshot else world.membership


def _bearable(world: World, membership: Membership, *lost: str) -> bool:
    """Whether a majority would be left if these were lost for good, too."""
    left = [
        name
        for name in membership.voters
        if name not in lost and world.hosts[name].disk.flipped is None
    ]
    return len(left) >= membership.majority


def _start_later(world: World, host: SimulatedServer, after_s: float) -> None:
    host.downs += 1
    world.push(world.now + after_s, world.revive, host)


# Clocks.


def _rate(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    host = hosts[0]
    host.adjust(rate=fault.amount)
    world.tell(host.id, f"has a clock that runs at {fault.amount:g} times the rate")
    return lambda: host.adjust(rate=1.0)


def _jump(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    hosts[0].adjust(jump_s=fault.amount)
    world.tell(hosts[0].id, f"has a clock that jumps ahead {fault.amount:g} s")
    return None


# Orders.


def _transfer(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    leader = world.leader()
    if leader is not None:
        to = hosts[0].id if hosts else ""
        world.tell(leader.id, f"is asked to let {to or 'another'} lead")
        leader.take(TransferAsked(to))
    return None


def _compact(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    if hosts[0].core is not None:
        hosts[0].compact()
    return None


def _churn(world: World, fault: Fault, hosts: list[SimulatedServer]) -> Undo | None:
    """The membership changes by one: now, and whenever somebody begins to lead for a while."""
    if not world.protocol.membership:
        return None

    def ask(leader: SimulatedServer) -> None:
        if leader.core is not None and not leader.paused:
            change = _change(world, fault, leader.core.membership)
            if change is not None and _bearable(world, change):
                world.tell(leader.id, f"is asked for the voters {', '.join(change.voters)}")
                leader.take(ChangeAsked(change))

    leader = world.leader()
    if leader is not None:
        ask(leader)
    world.on_leading.append(ask)
    return lambda: world.on_leading.remove(ask)


def _change(world: World, fault: Fault, now: Membership) -> Membership | None:
    """A lost server goes, a learner is promoted, one joins or one leaves."""
    lost = [name for name in now.voters if world.hosts[name].gone]
    if lost and len(now.voters) > 1:
        return _without(now, lost[0])
    if now.learners:
        return Membership((*now.voters, now.learners[0]), now.learners[1:], now.addresses)
    if fault.amount and len(now.voters) < MAX_VOTERS and len(world.hosts) < MAX_HOSTS:
        host = world.add_host(f"n{len(world.hosts) + 1}")
        host.start()
        return Membership(now.voters, (host.id,), now.addresses)
    if len(now.voters) > 3 or (len(now.voters) == 3 and not fault.amount):
        leaving = fault.nodes[0] if fault.nodes[0] in now.voters else now.voters[-1]
        return _without(now, leaving)
    return None


def _without(membership: Membership, name: str) -> Membership:
    return Membership(
        tuple(each for each in membership.voters if each != name),
        membership.learners,
        membership.addresses,
    )


_KINDS: dict[str, Callable[[World, Fault, list[SimulatedServer]], Undo | None]] = {
    "partition": _cut,
    "oneway": _cut,
    "bridge": _cut,
    "reset": _reset,
    "slow": _slow,
    "loss": _rough,
    "duplicate": _rough,
    "reorder": _rough,
    "crash": _crash,
    "power": _crash,
    "ballot": _crash,
    "pause": _pause,
    "stall": _stall,
    "full": _full,
    "fsync": _fsync,
    "rot": _rot,
    "rate": _rate,
    "jump": _jump,
    "transfer": _transfer,
    "compact": _compact,
    "churn": _churn,
}
