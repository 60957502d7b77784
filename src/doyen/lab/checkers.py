"""What must hold of a world of bare cores, checked after every event.

The checkers see the state of all servers at once, which no server can. `consensus.invariants` holds
what is true of any cluster of cores: election safety, one vote per server and generation, log
matching, leader completeness, state machine safety, and the invariants of each core by itself. What
only a world can know is checked here:

- a committed entry is on the disks of a majority when the first server reports it as committed;
- no server whose disk lacks a committed entry could win an election if all servers crashed at this
  instant;
- a snapshot holds exactly what was applied up to its index;
- a leader that a majority can reach is not replaced while there are no other faults;
- after all faults have ended, the cluster recovers.

The checks are incremental: an event that writes nothing costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

from doyen.lab.linearizability import Operation
from doyen.lab.outcome import Violation
from doyen.lab.plan import Fault
from doyen.lab.workload import RegisterMachine
from doyen.quorum.consensus.core import EntryKind, LogEntry, Snapshot
from doyen.quorum.consensus.invariants import ClusterView

if TYPE_CHECKING:
    from doyen.lab.server import SimulatedServer
    from doyen.lab.world import World


class ViolationFound(Exception):
    """Something did not hold: the run ends."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(f"{violation.kind} at {violation.at:.3f} s: {violation.text}")
        self.violation = violation


class Checkers:
    """Checks that need the state of all servers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cluster = ClusterView(
            ballots=world.protocol.ballots,
            vote_in=world.protocol.vote_in,
        )
        self.log = self.cluster.committed
        """The committed entries: the entry with index i is at position i - 1."""
        self.checked = 0
        """The index up to which committed entries have been checked."""
        self.positions: dict[tuple[int, int], int] = {}
        """By client and request: its number among all requests in order of execution."""
        self._machine = RegisterMachine(self.positions)
        self.digests = [0]
        """By index: the digest of everything applied up to it."""
        self.counts = [0]
        """By index: the number of requests executed up to it."""
        self._fixed = all(fault.kind != "churn" for fault in world.plan.faults)
        """Whether the voters never change."""

    def fail(self, kind: str, text: str) -> Never:
        raise ViolationFound(Violation(kind, round(self._world.now, 6), text))

    def committed(self, server: SimulatedServer) -> None:
        """A server reports entries as committed that no server reported before."""
        log = self.log
        for index in range(len(self.digests), len(log) + 1):
            self._check_commit(server, index, log[index - 1])
        self.checked = len(log)
        for each in self._world.servers.values():
            self.check_durable(each)

    def check_durable(self, server: SimulatedServer) -> None:
        """If all servers crashed now, this one could not win an election without what is
        committed."""
        world = self._world
        log_position = world.protocol.log_position
        index = len(self.log)
        if log_position is None or not index or not self._fixed or server.disk.flipped is not None:
            return
        if world.protocol.holds(server.disk, index, self.log[-1]):
            return
        own = log_position(server.disk)
        votes = sum(
            each.disk.flipped is None and log_position(each.disk) <= own
            for each in world.servers.values()
        )
        if votes >= world.membership.majority:
            self.fail(
                "durability",
                f"{server.id} lacks {describe(self.log[-1])} at index {index}, which is committed,"
                f" and {votes} of {len(world.servers)} servers would vote for it",
            )

    def _check_commit(self, server: SimulatedServer, index: int, entry: LogEntry) -> None:
        world = self._world
        if entry.kind == EntryKind.COMMANDS:
            self._machine.apply(entry.data)
        self.digests.append(self._machine.digest)
        self.counts.append(len(self.positions))
        assert server.core is not None
        membership = server.core.membership
        holders = 0
        for name in membership.voters:
            holder = world.servers.get(name)
            if holder is not None and world.protocol.holds(holder.disk, index, entry):
                holders += 1
        if holders < membership.majority:
            self.fail(
                "durability",
                f"{server.id} commits {describe(entry)} at index {index}, which is on {holders} of"
                f" {len(membership.voters)} disks",
            )

    def snapshot_installed(self, server: SimulatedServer, snapshot: Snapshot, digest: int) -> None:
        if snapshot.index >= len(self.digests) or self.digests[snapshot.index] != digest:
            self.fail(
                "applied",
                f"{server.id} installs a snapshot of index {snapshot.index}"
                " that differs from what was applied up to it",
            )


class StabilityChecker:
    """Checks that a leader is not replaced without a reason.

    A leader that can exchange messages with a majority is not replaced if there has been no other
    fault for two election timeouts, whatever servers do that are, or were, cut off from it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._others = 0
        """The number of active faults that are not cuts."""
        self._disturbed_at = 0.0
        self._cut_off = False
        plan = world.plan
        self._applicable = plan.latencies.latency_s <= 0.03 and plan.heartbeat_s <= 0.2

    def disturb(self) -> None:
        """Something happened that is a reason to replace a leader."""
        self._disturbed_at = max(self._disturbed_at, self._world.now)

    def fault_changed(self, fault: Fault, by: int) -> None:
        if fault.kind in ("partition", "oneway", "bridge"):
            leader = self._world.leader()
            cut_off = leader is None or not self._has_majority(leader)
            if cut_off or self._cut_off:
                self.disturb()
            self._cut_off = cut_off
        else:
            self._others += by
            self.disturb()
            # Messages and writes that were delayed are still under way when the fault ends.
            for server in self._world.servers.values():
                self._disturbed_at = max(self._disturbed_at, server.disk.until)
                for link in server.links.values():
                    self._disturbed_at = max(self._disturbed_at, link.last)

    def _has_majority(self, leader: SimulatedServer) -> bool:
        """Whether the leader can exchange messages with a majority."""
        assert leader.core is not None
        membership = leader.core.membership
        reachable = 0
        for name in membership.voters:
            server = self._world.servers[name]
            reachable += server is leader or (
                server.core is not None
                and not server.links[leader.id].cuts
                and not leader.links[server.id].cuts
            )
        return reachable >= membership.majority

    def _calm(self) -> bool:
        """Whether a leader has had no reason to be replaced for two election timeouts."""
        calm_s = self._world.now - self._disturbed_at
        long_s = 2 * self._world.plan.election_timeout_s
        return self._applicable and not self._others and not self._cut_off and calm_s > long_s

    def stepped_down(self, server: SimulatedServer) -> None:
        if not self._calm():
            server.was_leading = False

    def elected(self, server: SimulatedServer) -> None:
        world = self._world
        if self._calm() and any(
            other.was_leading and other is not server for other in world.servers.values()
        ):
            world.checkers.fail(
                "stability", f"{server.id} replaces a leader that a majority could reach"
            )
        for other in world.servers.values():
            other.was_leading = other is server
        self.disturb()


class RecoveryChecker:
    """Checks, after all faults have ended, that there is a leader, that a new write was answered,
    and that every voter that can start has applied it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._write: Operation | None = None
        """The first write that was answered after the end of all faults."""

    def answered(self, operation: Operation) -> None:
        if (
            self._write is None
            and operation.value is not None
            and self._world.now > self._world.measurements.healed_at
        ):
            self._write = operation

    def recovered(self) -> bool:
        world, write = self._world, self._write
        leader = world.leader()
        if write is None:
            return not world.clients and leader is not None
        if leader is None or leader.core is None:
            return False
        voters = [world.servers[name] for name in leader.core.membership.voters]
        machines = [
            voter.process.machine if voter.process is not None else RegisterMachine()
            for voter in voters
            if not voter.unrecoverable
        ]
        return bool(machines) and all(
            machine.done.get(write.client, (0, None))[0] >= write.seq for machine in machines
        )

    def fail(self, limit_s: float) -> Never:
        leader = self._world.leader()
        if leader is None:
            text = "there is no leader"
        elif self._write is None:
            text = f"{leader.id} leads, but no write was answered"
        else:
            text = "not every voter has caught up"
        self._world.checkers.fail("liveness", f"{limit_s:g} s after all faults had ended, {text}")


def describe(entry: LogEntry) -> str:
    what = ("an empty entry", "commands", "a membership")[entry.kind]
    return f"{what} of generation {entry.generation}"
