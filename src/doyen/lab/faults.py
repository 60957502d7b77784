"""Faults of a world of bare cores: what each kind does when it begins and when it ends.

A fault names servers, or `leader` for the server that leads when it begins. Beginning a fault
returns a function that undoes exactly what was begun, because faults may overlap. A fault that no
protocol promises to survive (the corruption of a majority's disks) is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from doyen.lab.plan import DROP, LEADER, Fault
from doyen.lab.workload import membership_of
from doyen.quorum.consensus.core import ChangeAsked, EntryKind, Membership, TransferAsked

if TYPE_CHECKING:
    from doyen.lab.server import SimulatedServer
    from doyen.lab.world import World

MAX_VOTERS = 7
MAX_SERVERS = 12


Undo = Callable[[], None]


@dataclass(slots=True)
class PendingCrash:
    """A crash that happens after some more effects have been carried out."""

    effects: int
    """The number of effects that are still carried out."""
    power_loss: bool
    """Whether the machine stops, so that nothing closes its connections."""
    down_s: float
    after_state_write: bool = False
    """Effects count only from the next write of the core's state on."""


class ActiveFaults:
    """Begins the faults of a plan at their times, and ends them."""

    def __init__(
        self,
        faults: Sequence[Fault],
        begin: Callable[[Fault], Undo | None],
        call_after: Callable[[float, Callable[[int], None], int], None],
        changed: Callable[[Fault, int], None],
    ) -> None:
        self._faults = faults
        self._begin = begin
        self._call_after = call_after
        self._changed = changed
        """Called when a fault begins (1; 0 if it has no duration) and when it ends (-1)."""
        self._undo: dict[int, Undo] = {}

    def __bool__(self) -> bool:
        return bool(self._undo)

    def schedule(self, before_s: float) -> None:
        """Schedule the faults that begin before this time. Call it at time 0."""
        for number, fault in enumerate(self._faults):
            if fault.at < before_s:
                self._call_after(fault.at, self._start, number)

    def _start(self, number: int) -> None:
        fault = self._faults[number]
        undo = self._begin(fault)
        self._changed(fault, 1 if undo is not None else 0)
        if undo is not None:
            self._undo[number] = undo
            self._call_after(fault.for_s, self._end, number)

    def _end(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            undo()
            self._changed(self._faults[number], -1)

    def end_all(self) -> None:
        for number in list(self._undo):
            self._end(number)


def begin(world: World, fault: Fault) -> Undo | None:
    """Begin a fault. Returns what ends it, if it has a duration."""
    names = _named(world, fault)
    if names is None:
        return None
    return _KINDS[fault.kind](world, fault, [world.servers[name] for name in names])


def _named(world: World, fault: Fault) -> list[str] | None:
    leader = world.leader() if LEADER in fault.nodes else None
    if LEADER in fault.nodes and leader is None:
        return None
    names = [leader.id if leader and name == LEADER else name for name in fault.nodes]
    return [*dict.fromkeys(names)] if all(name in world.servers for name in names) else None


def _and(names: Iterable[SimulatedServer]) -> str:
    return " and ".join(server.id for server in names)


# Links.


def cut(
    fault: Fault,
    names: Sequence[str],
    everyone: Iterable[str],
    change: Callable[[str, str, int], None],
    report: Callable[[str, str], None],
) -> Undo | None:
    """Cut links. `change` adds to the number of faults that cut a link; `report` gets the subject
    and the predicate for the narration."""
    if not names:
        return None
    first, rest = names[0], " and ".join(names[1:])
    subject, begins, ends = first, f"cannot send to {rest}", f"can send to {rest} again"
    if fault.kind == "oneway":
        links = [(first, other) for other in names[1:]]
    else:
        cut_off = names if fault.kind == "partition" else names[1:]
        pairs = [(one, other) for one in cut_off for other in everyone if other not in names]
        links = [link for one, other in pairs for link in ((one, other), (other, one))]
        subject = " and ".join(names)
        begins, ends = "cannot reach the others", "can reach the others again"
    if fault.kind == "bridge":
        subject = first
        begins = f"is the only one that can reach both {rest} and the others"
        ends = "is no longer the only one that can reach both sides"
    if links:
        report(subject, begins)
    for here, there in links:
        change(here, there, 1)

    def undo() -> None:
        for here, there in links:
            change(here, there, -1)
        if links:
            report(subject, ends)

    return undo


def _cut(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    def change(here: str, there: str, by: int) -> None:
        world.servers[here].links[there].cut(by)

    names = [server.id for server in servers]
    end = cut(fault, names, list(world.servers), change, world.report)

    def undo() -> None:
        if end is not None:
            end()
            world.network.reconnect()

    return undo if end is not None else None


def _reset(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    if len(servers) > 1:
        world.report(_and(servers[:2]), "lose their connection")
        world.network.reset(servers[0], servers[1])
    return None


def _slow(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    if len(servers) < 2:
        return None
    there, back = servers[0].links[servers[1].id], servers[1].links[servers[0].id]

    def more(seconds: float) -> None:
        there.slow_down(seconds)
        back.slow_down(seconds)

    more(fault.amount)
    world.report(_and(servers[:2]), f"receive each other's messages {fault.amount:g} s late")
    return lambda: more(-fault.amount)


def _degrade(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    world.network.degrade(**{fault.kind: fault.amount})
    verb = {"loss": "loses", "duplicate": "repeats", "reorder": "reorders"}[fault.kind]
    world.report("the network", f"{verb} {fault.amount:.0%} of all messages")
    return lambda: world.network.degrade(**{fault.kind: -fault.amount})


def _drop(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    world.network.dropped.add(int(fault.amount))
    world.report("the network", f"drops message {int(fault.amount)}")
    return None


# Processes.


def _crash(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    """Kill servers at once, or after some more effects; `ballot` counts these from the next write
    of the core's state on, which is what a server must not forget about an election."""
    for server in servers:
        if server.core is None or server.pending_crash is not None:
            continue
        server.pending_restarts += 1
        server.pending_crash = crash = PendingCrash(
            int(fault.amount),
            power_loss=fault.kind == "power",
            down_s=fault.for_s,
            after_state_write=fault.kind == "ballot",
        )
        if crash.effects == 0 and not crash.after_state_write:
            world.crash(server)
    return None


def _pause(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    server = servers[0]
    server.pause()
    world.report(server.id, "is paused")

    def undo() -> None:
        world.report(server.id, "resumes")
        server.resume()

    return undo


# Disks.


def _stall(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    disk = servers[0].disk

    def more(seconds: float) -> None:
        disk.stall_s = max(0.0, disk.stall_s + seconds)

    more(fault.amount)
    world.report(servers[0].id, f"has a slow disk: {fault.amount:g} s more for each write")
    return lambda: more(-fault.amount)


def _full(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    disk = servers[0].disk

    def more(by: int) -> None:
        disk.full += by

    more(1)
    world.report(servers[0].id, "has a full disk")
    return lambda: more(-1)


def _fsync(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    """A sync fails, so the process ends and is started again."""
    server = servers[0]
    if server.core is None:
        return None
    world.report(server.id, "has a disk that fails to sync")
    server.fail_sync()
    if server.core is None:
        _restart_after(world, server, fault.for_s)
    return None


def _rot(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    """A bit flips on disk while the server is down, so it must not start again."""
    server = servers[0]
    if server.core is None or not all(
        _survivable(world, _in_force(world, each), server.id) for each in world.servers.values()
    ):
        return None
    world.report(server.id, "is killed, and a bit flips on its disk")
    server.stop(power_loss=False)
    server.disk.flip(world.fault_rng)
    _restart_after(world, server, fault.for_s)
    return None


def _in_force(world: World, server: SimulatedServer) -> Membership:
    """The membership that a server goes by, or will go by when it is started again."""
    if server.core is not None:
        return server.core.membership
    for entry in reversed(server.disk.entries):
        if entry.kind == EntryKind.MEMBERSHIP:
            return membership_of(entry.data)
    return server.disk.snapshot.membership if server.disk.snapshot else world.membership


def _survivable(world: World, membership: Membership, *lost: str) -> bool:
    """Whether a majority is left if these servers, too, never start again."""
    left = [
        name
        for name in membership.voters
        if name not in lost and world.servers[name].disk.flipped is None
    ]
    return len(left) >= membership.majority


def _restart_after(world: World, server: SimulatedServer, after_s: float) -> None:
    server.pending_restarts += 1
    world.queue.push_after(after_s, world.restart, server)


# Clocks.


def _rate(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    server = servers[0]
    server.adjust_clock(rate=fault.amount)
    world.report(server.id, f"has a clock that runs at {fault.amount:g} times the true rate")
    return lambda: server.adjust_clock(rate=1.0)


def _jump(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    servers[0].adjust_clock(jump_s=fault.amount)
    world.report(servers[0].id, f"has a clock that jumps {fault.amount:g} s ahead")
    return None


# Orders.


def _transfer(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    leader = world.leader()
    if leader is not None:
        to = servers[0].id if servers else ""
        world.report(leader.id, f"is asked to transfer leadership to {to or 'another server'}")
        leader.receive(TransferAsked(to))
    return None


def _compact(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    if servers[0].process is not None:
        servers[0].process.compact()
    return None


def _churn(world: World, fault: Fault, servers: list[SimulatedServer]) -> Undo | None:
    """Ask for a change of the membership by one server: now, and of every new leader meanwhile."""
    if not world.protocol.membership:
        return None

    def ask(leader: SimulatedServer) -> None:
        if leader.core is not None and not leader.paused:
            change = _change(world, fault, leader.core.membership)
            if change is not None and _survivable(world, change):
                world.report(
                    leader.id, f"is asked to change the voters to {', '.join(change.voters)}"
                )
                leader.receive(ChangeAsked(change))

    leader = world.leader()
    if leader is not None:
        ask(leader)
    world.on_leading.append(ask)
    return lambda: world.on_leading.remove(ask)


def _change(world: World, fault: Fault, now: Membership) -> Membership | None:
    """Remove a server that cannot start, promote a learner, add a server or remove one."""
    lost = [name for name in now.voters if world.servers[name].unrecoverable]
    if lost and len(now.voters) > 1:
        return _without(now, lost[0])
    if now.learners:
        return Membership((*now.voters, now.learners[0]), now.learners[1:], now.addresses)
    if fault.amount and len(now.voters) < MAX_VOTERS and len(world.servers) < MAX_SERVERS:
        server = world.add_server(f"n{len(world.servers) + 1}")
        server.start()
        return Membership(now.voters, (server.id,), now.addresses)
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
    "loss": _degrade,
    "duplicate": _degrade,
    "reorder": _degrade,
    DROP: _drop,
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
