"""The lab detects every mutant: cores and disks without one of their rules.

A seed that detects it is pinned for each mutant, so that this is fast. If the code has changed and
a pinned seed no longer detects it, a search from the first seed on follows. The mutants of leases
and terms are in `test_lab_quorum`, those of the real journal in its own tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType

import msgspec
import pytest

import mutants_paxos as paxos
import mutants_raft as raft
import mutants_smallest_id as smallest_id
import mutants_viewstamped as viewstamped
import mutants_zab as zab
from doyen.lab.disk import SimulatedDisk
from doyen.lab.narration import narrate
from doyen.lab.plan import LEADER, Fault, Plan
from doyen.lab.protocols import Protocol, known
from doyen.lab.runner import hunt_mutant, kinds_of, nodes_for, plan_for
from doyen.lab.world import run_plan
from doyen.quorum.consensus.common import ReplicatedServer
from doyen.quorum.consensus.core import Making, Persist, Recovered
from doyen.quorum.consensus.raft import Raft

CUTS = "partition,oneway,bridge"
HUNT_S = 60.0


def kill(variant: Protocol, pinned: int, faults: str = "all") -> None:
    """Check that a mutant fails, and that the original does not on the same plan."""
    kinds = kinds_of(faults)
    plan = plan_for("cores", variant.name, nodes_for(pinned), pinned, kinds=kinds)
    if run_plan(plan, variant).ok:
        found = hunt_mutant(variant, HUNT_S, faults=faults)
        assert found is not None, f"no seed detects it within {HUNT_S:g} s"
        plan = found[1].plan
    assert run_plan(plan).ok


RAFT: list[tuple[Making, int, str]] = [
    (raft.VotesTwice, 20, "all"),
    (raft.VotesBeforeWriting, 78, "ballot"),
    (raft.CountsItselfBeforeWriting, 50, "all"),
    (raft.ForgetsGeneration, 20, "all"),
    (raft.ComparesNothing, 98, "all"),
    (raft.CutsOnStaleAppend, 60, "all"),
    (raft.CommitsBeyondMatch, 8, "all"),
    (raft.ReadsBeforeCommitting, 3, "all"),
    (raft.TrustsOldWrites, 22, "all"),
    (raft.LeaderCountsItselfAtOnce, 10, "all"),
    (raft.AcksBeforeWriting, 59, "all"),
    (raft.GrantsInItsOwnGeneration, 65, "all"),
    (raft.ComparesIndexOnly, 395, "partition,crash"),
    (raft.ReadsWithoutRounds, 138, "partition,rate"),
    (raft.InstallsEverySnapshot, 13, "compact,power,partition"),
    (raft.ChangesTooSoon, 4, "rivals"),
    (raft.CommitsOldGenerations, 56, "seesaw"),
    (raft.CountsRepliesNotVoters, 15, "duplicate,crash"),
    (raft.DropsStalePreVotes, 6, "remnant"),
    (raft.ListensToEveryCampaign, 102, CUTS),
]


@pytest.mark.parametrize(("mutant", "pinned", "faults"), RAFT)
def test_raft(mutant: Making, pinned: int, faults: str) -> None:
    kill(known("raft").replace(make=mutant), pinned, faults)


def failover_s(make: Making) -> float:
    """The time from the end of the leader's process to the next leader."""
    plan = Plan(
        protocol="raft", nodes=5, seed=1, for_s=6.0, faults=(Fault("crash", 2.0, 9.0, (LEADER,)),)
    )
    _, lines = narrate(plan, known("raft").replace(make=make))
    return [float(line.split()[0]) for line in lines if " leads in " in line][1] - 2.0


def test_a_pre_candidate_that_keeps_its_leader_is_slow() -> None:
    assert failover_s(Raft) < 0.3
    assert failover_s(raft.KeepsItsLeader) > 0.8


OTHERS: list[tuple[str, Making, int, str]] = [
    ("zab", zab.AcknowledgesBeforeWriting, 4, "all"),
    ("zab", zab.AcceptsAnyLeader, 10, "all"),
    ("zab", zab.EpochBeforeLog, 1, "all"),
    ("zab", zab.ForgetsEpoch, 4, "all"),
    ("zab", zab.ForgetsCurrentEpoch, 43, "all"),
    ("zab", zab.PromisesBeforeWriting, 11, "all"),
    ("zab", zab.FollowsOnHearsay, 1, "remnant"),
    ("paxos", paxos.AcceptsBeforeWriting, 0, "all"),
    ("paxos", paxos.FirstReportWins, 31, "seesaw"),
    ("paxos", paxos.HearsNoReports, 13, "all"),
    ("paxos", paxos.ForgetsBallots, 31, "seesaw"),
    ("paxos", paxos.ForgetsPromise, 1, "all"),
    ("paxos", paxos.PromisesBeforeWriting, 1, "all"),
    ("viewstamped", viewstamped.LongestLogWins, 204, "all"),
    ("viewstamped", viewstamped.ForgetsView, 4, "all"),
    ("viewstamped", viewstamped.AcknowledgesBeforeWriting, 4, "all"),
    ("viewstamped", viewstamped.ReportsBeforeWriting, 23, "all"),
    ("viewstamped", viewstamped.LeadsOnAfterRestart, 1, "all"),
    ("viewstamped", viewstamped.KeepsTheRest, 13, "all"),
    ("smallest-id", smallest_id.VotesTwice, 14, "all"),
    ("smallest-id", smallest_id.VotesBeforeWriting, 91, "all"),
    ("smallest-id", smallest_id.ForgetsGeneration, 14, "all"),
    ("smallest-id", smallest_id.LooksAtIndexOnly, 11, "seesaw"),
    ("smallest-id", smallest_id.LooksAtNoLog, 68, "all"),
    ("smallest-id", smallest_id.CountsRepliesNotVoters, 23, "all"),
    ("smallest-id", smallest_id.IdAloneDecides, 14, "all"),
]


@pytest.mark.parametrize(("protocol", "mutant", "pinned", "faults"), OTHERS)
def test_the_other_protocols(protocol: str, mutant: Making, pinned: int, faults: str) -> None:
    kill(known(protocol).replace(make=mutant), pinned, faults)


@pytest.mark.parametrize("module", [raft, zab, paxos, viewstamped, smallest_id])
def test_no_mutant_is_left_out(module: ModuleType) -> None:
    tried = [*(each for each, _, _ in RAFT), *(each for _, each, _, _ in OTHERS)]
    tried.append(raft.KeepsItsLeader)
    there = [
        each
        for each in vars(module).values()
        if getattr(each, "__module__", "") == module.__name__
        and issubclass(each, (Raft, ReplicatedServer))
    ]
    assert there
    assert [each.__name__ for each in there if each not in tried] == []


class AcceptsTornTail(SimulatedDisk):
    """16: a write that was torn by a power loss counts as complete."""

    def crash(self, rng: random.Random) -> None:
        kept = rng.randint(0, len(self.queue))
        torn = self.queue[kept] if kept < len(self.queue) else None
        if kept:
            self.settle(kept)
        if isinstance(torn, Persist) and torn.entries:
            *whole, last = torn.entries
            half = msgspec.structs.replace(last, data=last.data[: len(last.data) // 2])
            self._place(torn.first, [*whole, half], keep=torn.keep)
        self.queue.clear()
        self.received.clear()


class CutsOffCorruption(SimulatedDisk):
    """17: corruption in the middle of the log is cut off as if it were a torn tail."""

    def recover(self) -> Recovered:
        if self.flipped is not None:
            del self.entries[max(0, self.flipped - self.base - 1) :]
            self.flipped = None
        return super().recover()


class RetriesAfterError(SimulatedDisk):
    """18: after an error the same writes are synced again, but the kernel has dropped them."""

    def failed(self, rng: random.Random) -> bool:
        self.queue = [msgspec.structs.replace(each, **_EMPTY) for each in self.queue]
        return False


_EMPTY: dict[str, object] = {"state": None, "first": 0, "entries": ()}

DISKS: list[tuple[Callable[[], SimulatedDisk], int, str]] = [
    (AcceptsTornTail, 1, "crash,power,fsync"),
    (CutsOffCorruption, 2, "rot,crash"),
    (RetriesAfterError, 4, "fsync,crash,stall"),
]


@pytest.mark.parametrize(("disk", "pinned", "faults"), DISKS)
def test_disks(disk: Callable[[], SimulatedDisk], pinned: int, faults: str) -> None:
    kill(known("raft").replace(make_disk=disk), pinned, faults)
