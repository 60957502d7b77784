"""What must hold of a world, looked at after every event.

The checkers see everything at once, which no server can. What holds of any cluster of cores is
`consensus.invariants`' to say: election safety, one vote each, log matching, leader completeness,
state machine safety, and what each core knows of itself. What only a world can know is said here:

- what is committed is on the disks of a majority by the time the first server says so;
- nobody whose disk lacks it could win an election after a crash of all, then or at any later time;
- a snapshot stands for exactly what was applied up to its index;
- a leader with whom nothing is wrong is not deposed;
- no core raises.

They are incremental: an event in which nothing is written costs next to nothing.

Imports the words of consensus, its invariants, and the load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from doyen.lab.plan import Fault
from doyen.lab.workload import RegisterMachine
from doyen.quorum.consensus.core import EntryKind, LogEntry, Snapshot
from doyen.quorum.consensus.invariants import ClusterView

if TYPE_CHECKING:
    from doyen.lab.server import SimulatedServer
    from doyen.lab.world import World

__all__ = ["Broken", "Checkers", "Stability", "Violation"]


class Violation(Struct, frozen=True):
    """What did not hold, and when."""

    kind: str
    at: float
    text: str


class Broken(Exception):
    """The checkers' word: the run ends here."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(f"{violation.kind} at {violation.at:.3f} s: {violation.text}")
        self.violation = violation


class Checkers:
    """The world as seen from above."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cluster = ClusterView(
            ballots=world.protocol.ballots,
            vote_in=world.protocol.vote_in,
        )
        self.log = self.cluster.committed
        """What has been agreed on: the entry at index i stands at i - 1."""
        self.positions: dict[tuple[int, int], int] = {}
        """Where each request was first carried out, as counted by those that were."""
        self._machine = RegisterMachine(self.positions)
        self.digests = [0]
        """Of everything applied up to an index."""
        self.counts = [0]
        """How many requests were carried out up to an index."""
        self._fixed = all(fault.kind != "churn" for fault in world.plan.faults)
        """Whether it is always the same servers that vote."""

    def object(self, kind: str, text: str) -> None:
        raise Broken(Violation(kind, round(self._world.now, 6), text))

    def agreed(self, host: SimulatedServer) -> None:
        """More is committed than before."""
        log = self.log
        for index in range(len(self.digests), len(log) + 1):
            self._agree(host, index, log[index - 1])
        self._world.checked = len(log)
        for each in self._world.hosts.values():
            self.kept(each)

    def kept(self, host: SimulatedServer) -> None:
        """What is committed cannot be lost by way of this server, were all to crash now."""
        world = self._world
        reach = world.protocol.reach
        index = len(self.log)
        if reach is None or not index or not self._fixed or host.disk.flipped is not None:
            return
        if world.protocol.holds(host.disk, index, self.log[-1]):
            return
        own = reach(host.disk)
        votes = sum(
            each.disk.flipped is None and reach(each.disk) <= own for each in world.hosts.values()
        )
        if votes >= world.membership.majority:
            self.object(
                "durability",
                f"{host.id} lacks {describe(self.log[-1])} at index {index}, which is committed,"
                f" and {votes} of {len(world.hosts)} would let it lead",
            )

    def _agree(self, host: SimulatedServer, index: int, entry: LogEntry) -> None:
        world = self._world
        if entry.kind == EntryKind.COMMANDS:
            self._machine.apply(entry.data)
        self.digests.append(self._machine.digest)
        self.counts.append(len(self.positions))
        assert host.core is not None
        membership = host.core.membership
        holders = 0
        for name in membership.voters:
            holder = world.hosts.get(name)
            if holder is not None and world.protocol.holds(holder.disk, index, entry):
                holders += 1
        if holders < membership.majority:
            self.object(
                "durability",
                f"{host.id} commits {describe(entry)} at index {index}, which is on {holders} of"
                f" {len(membership.voters)} disks",
            )

    def restored(self, host: SimulatedServer, snapshot: Snapshot, digest: int) -> None:
        """A server puts a snapshot in the place of its state."""
        if snapshot.index >= len(self.digests) or self.digests[snapshot.index] != digest:
            self.object(
                "applied",
                f"{host.id} installs a snapshot of index {snapshot.index}"
                " that is not what was applied up to there",
            )


class Stability:
    """Whether anybody deposes a leader with whom nothing is wrong.

    A leader that a majority can hear and answer, on machines that have been left alone for two
    election timeouts, is not replaced, whatever those who are cut off from it do when they are, or
    when they come back.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._others = 0
        """Faults at present that are not cuts."""
        self._disturbed_at = 0.0
        self._cut_off = False
        plan = world.plan
        self._fair = plan.weather.latency_s <= 0.03 and plan.heartbeat_s <= 0.2

    def disturb(self) -> None:
        self._disturbed_at = max(self._disturbed_at, self._world.now)

    def changed(self, fault: Fault, by: int) -> None:
        """A fault has begun or ended."""
        if fault.kind in ("partition", "oneway", "bridge"):
            leader = self._world.leader()
            cut_off = leader is None or not self._heard(leader)
            if cut_off or self._cut_off:
                self.disturb()
            self._cut_off = cut_off
        else:
            self._others += by
            self.disturb()
            # What was slow to arrive, or to be written, still is when the link or the disk is not.
            for host in self._world.hosts.values():
                self._disturbed_at = max(self._disturbed_at, host.disk.until)
                for link in host.links.values():
                    self._disturbed_at = max(self._disturbed_at, link.last)

    def _heard(self, leader: SimulatedServer) -> bool:
        """Whether a majority is up, hears the leader, and is heard by it."""
        assert leader.core is not None
        membership = leader.core.membership
        near = 0
        for name in membership.voters:
            host = self._world.hosts[name]
            near += host is leader or (
                host.core is not None
                and not host.links[leader.id].cuts
                and not leader.links[host.id].cuts
            )
        return near >= membership.majority

    def _calm(self) -> bool:
        """Whether there is nothing to complain of, and has not been for a while."""
        calm_s = self._world.now - self._disturbed_at
        long_s = 2 * self._world.plan.election_timeout_s
        return self._fair and not self._others and not self._cut_off and calm_s > long_s

    def gave_up(self, host: SimulatedServer) -> None:
        """One that led does not any more. It may have had its reasons."""
        if not self._calm():
            host.was_leading = False

    def elected(self, host: SimulatedServer) -> None:
        """Another leads."""
        world = self._world
        if self._calm() and any(
            other.was_leading and other is not host for other in world.hosts.values()
        ):
            raise Broken(
                Violation(
                    "stability",
                    round(world.now, 6),
                    f"{host.id} replaces a leader with whom nothing was wrong",
                )
            )
        for other in world.hosts.values():
            other.was_leading = other is host
        self.disturb()


def describe(entry: LogEntry) -> str:
    what = ("nothing", "commands", "a membership")[entry.kind]
    return f"{what} of generation {entry.generation}"
