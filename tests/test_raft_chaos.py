"""Raft under random faults, and what happens to the cluster with one rule left out.

Pinned seeds run here. When Raft or the chaos changes, some mutant may survive its seed: find
another by running this file (`python tests/test_raft_chaos.py [seconds per mutant]`).
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mutants_raft as mutants
from doyen.quorum.consensus.core import ChangeAsked, Disconnected, Membership, Propose, Role
from doyen.quorum.consensus.invariants import InvariantBroken
from doyen.quorum.consensus.raft import Raft
from raft_cluster import SETTINGS, Chaos, RaftCluster, chaos

SEEDS: dict[type[Raft], int] = {
    mutants.VotesTwice: 1,
    mutants.VotesBeforeWriting: 733,
    mutants.CountsItselfBeforeWriting: 102,
    mutants.ForgetsGeneration: 1,
    mutants.CountsRepliesNotVoters: 4,
    mutants.ComparesIndexOnly: 30,
    mutants.ComparesNothing: 0,
    mutants.CutsOnStaleAppend: 6,
    mutants.CommitsBeyondMatch: 23,
    mutants.ReadsBeforeCommitting: 1,
    mutants.ReadsWithoutRounds: 356,
    mutants.TrustsOldWrites: 3,
    mutants.InstallsEverySnapshot: 11,
    mutants.LeaderCountsItselfAtOnce: 57,
    mutants.AcksBeforeWriting: 74,
    mutants.GrantsInItsOwnGeneration: 0,
}


@pytest.mark.parametrize("block", range(8))
def test_nothing_breaks(block: int) -> None:
    for seed in range(8 * block, 8 * block + 8):
        chaos(seed)


def test_same_seed_same_run() -> None:
    one, other = chaos(5), chaos(5)
    assert one.events == other.events
    assert one.checker.committed == other.checker.committed


def test_chaos_gets_work_done() -> None:
    """A run in which nothing is ever committed, read, changed or installed shows nothing."""
    runs = [chaos(seed) for seed in range(20)]
    assert sum(len(run.checker.committed) for run in runs) > 300
    assert sum(len(run.served) for run in runs) > 60
    assert sum(core.log.base > 0 for run in runs for core in run.up) > 5
    assert sum(len(core.membership.voters) != 3 for run in runs for core in run.up) > 5
    assert sum(len(run.checker.leaders) for run in runs) > 60


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(rng=st.randoms(note_method_calls=False), steps=st.integers(10, 120))
def test_random_faults_that_hypothesis_can_shrink(rng: random.Random, steps: int) -> None:
    """The same, with faults that Hypothesis can shrink."""
    Chaos(rng).run(steps).heal()


@pytest.mark.parametrize("mutant", SEEDS, ids=lambda mutant: mutant.__name__)
def test_unsafe_mutant_is_caught(mutant: type[Raft]) -> None:
    chaos(SEEDS[mutant])
    with pytest.raises(InvariantBroken):
        chaos(SEEDS[mutant], mutant)


def elect(cluster: RaftCluster, name: str) -> None:
    """Have this server elected by those that are up; none of its later messages is delivered."""
    cluster.now += 3
    for _ in range(200):
        if cluster.core(name).role is Role.LEADING:
            return
        busy = [box.name for box in cluster.boxes.values() if box.core and box.disk.queue]
        if cluster.flying:
            cluster.deliver()
        elif busy:
            cluster.sync(busy[0])
        else:
            cluster.elapse(name)
    raise AssertionError(f"{name} is never elected")


def silence(cluster: RaftCluster) -> None:
    """Everything in flight is lost."""
    while cluster.flying:
        cluster.lose()


def old_entry_on_a_majority(make: type[Raft]) -> None:
    """Figure 8 of the paper: an old entry reaches a majority and is replaced all the same."""
    one_by_one = msgspec.structs.replace(SETTINGS, message_entries=1)
    cluster = RaftCluster(["a", "b", "c"], make=make, settings=one_by_one)
    cluster.elapse("a")
    cluster.settle()
    cluster.tell("a", Propose(b"x"))
    cluster.sync("a")
    silence(cluster)
    cluster.crash("a")
    elect(cluster, "b")
    cluster.sync("b")
    silence(cluster)
    cluster.crash("b")
    cluster.start("a")
    elect(cluster, "a")
    while cluster.core("a")._peers["c"].match < 2:
        if cluster.flying:
            cluster.deliver()
        else:
            cluster.sync("a")
            cluster.sync("c")
    silence(cluster)
    cluster.crash("a")
    cluster.start("b")
    elect(cluster, "b")


def majorities_that_do_not_meet(make: type[Raft]) -> None:
    """The single-server membership bug: {a, d, e} of five, and {b, c} of three."""
    cluster = RaftCluster(["a", "b", "c", "d"], joiners=["e"], make=make)
    cluster.elapse("a")
    cluster.settle()
    cluster.tell("a", ChangeAsked(Membership(("a", "b", "c", "d", "e"))))
    cluster.sync("a")
    silence(cluster)
    cluster.crash("a")
    elect(cluster, "b")
    silence(cluster)
    cluster.cut("b", "d")
    cluster.tell("b", ChangeAsked(Membership(("b", "c", "d"))))
    cluster.elapse("b")
    cluster.settle()
    cluster.crash("b")
    cluster.crash("c")
    cluster.start("a")
    elect(cluster, "a")


SCHEDULES: dict[type[Raft], Callable[[type[Raft]], None]] = {
    mutants.CommitsOldGenerations: old_entry_on_a_majority,
    mutants.ChangesTooSoon: majorities_that_do_not_meet,
}
"""Those that random runs find too seldom."""


@pytest.mark.parametrize("mutant", SCHEDULES, ids=lambda mutant: mutant.__name__)
def test_subtle_mutant_is_caught(mutant: type[Raft]) -> None:
    SCHEDULES[mutant](Raft)
    with pytest.raises(InvariantBroken, match="which is committed"):
        SCHEDULES[mutant](mutant)


def test_every_mutant_has_its_end() -> None:
    assert set(mutants.UNSAFE) == SEEDS.keys() | SCHEDULES.keys()
    assert set(mutants.STUCK) == STUCK.keys()


def silent_link(make: type[Raft]) -> None:
    """A follower that its leader cannot reach, and that has every entry, deposes no leader."""
    cluster = RaftCluster(["a", "b", "c"], make=make)
    cluster.elapse("a")
    cluster.settle()
    cluster.cut("a", "c")
    cluster.run(20)
    assert cluster.core("a").role is Role.LEADING
    assert cluster.core("a").generation == 1


def two_that_are_behind(make: type[Raft]) -> None:
    """One has the longer log, the other a later generation, and there are only these two."""
    cluster = RaftCluster(["a", "b", "c"], make=make)
    cluster.elapse("a")
    cluster.settle()
    cluster.cut("a", "b")
    cluster.cut("a", "c")
    cluster.tell("a", Propose(b"x"))
    cluster.sync("a")
    for name in ("b", "c"):
        cluster.tell(name, Disconnected("a"))
    cluster.elapse("b")
    while cluster.core("b").generation == 1:
        cluster.deliver()
    cluster.sync("b")
    while cluster.flying:
        cluster.lose()
    cluster.crash("c")
    cluster.run(3)
    cluster.cuts.clear()
    cluster.run(20)
    assert len(cluster.leaders) == 1


def leader_gone(make: type[Raft]) -> None:
    """The end of the leader's connections is enough to elect another."""
    cluster = RaftCluster(["a", "b", "c"], make=make)
    cluster.elapse("a")
    cluster.settle()
    cluster.crash("a")
    for name in ("b", "c"):
        cluster.tell(name, Disconnected("a"))
    cluster.run(0.2)
    assert len(cluster.leaders) == 1


STUCK: dict[type[Raft], Callable[[type[Raft]], None]] = {
    mutants.ListensToEveryCampaign: silent_link,
    mutants.DropsStalePreVotes: two_that_are_behind,
    mutants.KeepsItsLeader: leader_gone,
}


@pytest.mark.parametrize("mutant", mutants.STUCK, ids=lambda mutant: mutant.__name__)
def test_stuck_mutant_is_caught(mutant: type[Raft]) -> None:
    scenario = STUCK[mutant]
    scenario(Raft)
    with pytest.raises(AssertionError):
        scenario(mutant)


def hunt(mutant: type[Raft], seconds: float) -> int | None:
    """The first seed that detects the mutant."""
    seed = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            chaos(seed, mutant)
        except InvariantBroken:
            return seed
        except AssertionError:
            pass
        seed += 1
    return None


if __name__ == "__main__":
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    for each in SEEDS:
        print(f"    mutants.{each.__name__}: {hunt(each, budget)},", flush=True)
