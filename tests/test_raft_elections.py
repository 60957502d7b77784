"""Raft elections, rule by rule: each known defect has a test by its name."""

from __future__ import annotations

import math

import pytest

from doyen.quorum.consensus.core import (
    Disconnected,
    Elapsed,
    Membership,
    Persist,
    Role,
    RoleChanged,
)
from doyen.quorum.consensus.raft.messages import (
    Append,
    AppendReply,
    Ballot,
    Heartbeat,
    HeartbeatReply,
    PreVote,
    PreVoteReply,
    TimeoutNow,
    Vote,
    VoteReply,
)
from raft_cluster import RaftCluster
from raft_kit import ABC, following, hear, leading, only, raft, recovered, sends, write


def test_pre_vote_changes_no_generation() -> None:
    core = raft()
    reply = only(hear(core, PreVote(7, 0, 0)), PreVoteReply)
    assert reply == PreVoteReply(7, True)
    assert (core.generation, core.vote) == (0, None)


def test_a_granted_pre_vote_reply_changes_no_generation() -> None:
    core = raft()
    hear(core, PreVoteReply(7, True))
    assert core.generation == 0


def test_candidate_asks_for_votes_only_when_its_own_is_on_disk() -> None:
    core = raft()
    core.handle(Elapsed(), 2.0)
    effects = hear(core, PreVoteReply(1, True), now=2.0)
    (persist,) = [e for e in effects if isinstance(e, Persist)]
    assert persist.state == Ballot(1, "a", ABC)
    assert [send.after for send in sends(effects, Vote)] == [persist.token] * 2


def test_candidate_counts_its_own_vote_only_when_it_is_on_disk() -> None:
    core = raft()
    core.handle(Elapsed(), 2.0)
    hear(core, PreVoteReply(1, True), now=2.0)
    hear(core, VoteReply(1, True), now=2.0)
    assert core.leader is None
    write(core, 2.0)
    assert core.role is Role.LEADING


def test_vote_is_on_disk_before_it_is_sent() -> None:
    core = raft()
    effects = hear(core, Vote(1, 0, 0))
    (persist,) = [e for e in effects if isinstance(e, Persist)]
    (send,) = sends(effects, VoteReply)
    assert persist.state == Ballot(1, "b", ABC)
    assert send.after == persist.token


def test_votes_are_a_set() -> None:
    core = raft(membership=Membership(("a", "b", "c", "d", "e")))
    core.handle(Elapsed(), 2.0)
    for _ in range(5):
        hear(core, PreVoteReply(1, True), now=2.0)
    assert core.generation == 0
    hear(core, PreVoteReply(1, True), "c", now=2.0)
    write(core, 2.0)
    for _ in range(5):
        hear(core, VoteReply(1, True), now=2.0)
    assert core.role is Role.LOOKING


def test_votes_of_strangers_do_not_count() -> None:
    core = raft()
    core.handle(Elapsed(), 2.0)
    hear(core, PreVoteReply(1, True), "x", now=2.0)
    assert core.generation == 0


def test_one_vote_per_generation_across_a_restart() -> None:
    """PySyncObj#84, #202: generation and vote were in memory only."""
    core = raft(recovered=recovered(4, vote="b"))
    assert only(hear(core, Vote(4, 9, 9), "c"), VoteReply) == VoteReply(4, False)
    assert only(hear(core, Vote(4, 0, 0), "b"), VoteReply) == VoteReply(4, True)


@pytest.mark.parametrize(
    ("last", "generation", "granted"),
    [(3, 2, True), (4, 2, True), (2, 2, False), (1, 3, True), (9, 1, False)],
)
def test_up_to_date_rule(last: int, generation: int, granted: bool) -> None:
    core = raft(recovered=recovered(2, 1, 2, 2))
    assert only(hear(core, Vote(5, last, generation)), VoteReply) == VoteReply(5, granted)
    core = raft(recovered=recovered(2, 1, 2, 2))
    reply = only(hear(core, PreVote(5, last, generation)), PreVoteReply)
    assert reply == PreVoteReply(5 if granted else 2, granted)


def test_learners_vote_when_asked() -> None:
    core = raft("d", Membership(("a", "b", "c"), ("d",)))
    assert only(hear(core, Vote(1, 0, 0)), VoteReply) == VoteReply(1, True)


@pytest.mark.parametrize(
    "membership", [Membership(("b", "c")), Membership(()), Membership(("b",), ("a",))]
)
def test_a_learner_never_campaigns(membership: Membership) -> None:
    core = raft(membership=membership)
    assert core.next_deadline == math.inf
    hear(core, Heartbeat(1, 0, 1))
    assert core.handle(Elapsed(), core.next_deadline) == [RoleChanged(Role.LOOKING, 1, None)]
    assert core.next_deadline == math.inf
    assert not sends(hear(core, TimeoutNow(1), now=9.0))
    core.handle(Disconnected("b"), 9.0)
    assert core.next_deadline == math.inf


def test_stickiness_ignores_campaigns_while_a_leader_is_heard() -> None:
    core = following()
    assert hear(core, PreVote(2, 9, 9), "c", 0.9) == []
    assert hear(core, Vote(2, 9, 9), "c", 0.9) == []
    assert core.generation == 1
    assert only(hear(core, PreVote(2, 9, 9), "c", 1.0), PreVoteReply) == PreVoteReply(2, True)


def test_stickiness_yields_to_a_transfer() -> None:
    core = following()
    assert only(hear(core, Vote(2, 9, 9, True), "c", 0.1), VoteReply) == VoteReply(2, True)


def test_leader_ignores_campaigns() -> None:
    core = leading()
    assert hear(core, Vote(9, 9, 9), "c", 2.0) == []
    assert core.role is Role.LEADING


def test_stale_append_is_answered_in_our_own_generation() -> None:
    core = raft(recovered=recovered(5))
    assert only(hear(core, Append(3, 0, 0, (), 0, 1)), AppendReply).generation == 5
    assert only(hear(core, Heartbeat(3, 0, 1)), HeartbeatReply).generation == 5
    assert only(hear(core, Vote(3, 9, 9)), VoteReply) == VoteReply(5, False)


def test_stale_pre_vote_is_answered() -> None:
    core = raft(recovered=recovered(5))
    assert only(hear(core, PreVote(3, 9, 9)), PreVoteReply) == PreVoteReply(5, False)


def test_leader_learns_of_a_later_generation_from_answers() -> None:
    for reply in (HeartbeatReply(7, 0), AppendReply(7, 0, True), VoteReply(7, False)):
        core = leading()
        hear(core, reply, now=2.0)
        assert (core.role, core.generation) == (Role.LOOKING, 7)


def test_pre_vote_stuck_generation() -> None:
    """etcd 8243: a server ahead in generation must bring the others up, or rejoin."""
    cluster = RaftCluster(["a", "b", "c"])
    cluster.elapse("a")
    cluster.settle()
    cluster.cut("c", "a")
    cluster.cut("c", "b")
    core = cluster.core("c")
    core.generation, core.vote = 9, "c"
    core._save()
    core._look()
    cluster.heal()


def test_pre_candidate_clears_leader_and_votes() -> None:
    """raft-rs 83, 84."""
    core = following()
    core.handle(Elapsed(), core.next_deadline)
    assert core.leader is None
    assert core._campaign is not None
    assert core._campaign.votes == {"a"}
    assert only(hear(core, PreVote(2, 1, 1), "c", 1.3), PreVoteReply) == PreVoteReply(2, True)


def test_two_who_canvass_at_once_do_not_split_the_votes() -> None:
    cluster = RaftCluster(["a", "b", "c"])
    cluster.elapse("c")
    cluster.settle()
    assert cluster.core("c").role is Role.LEADING
    cluster.crash("c")
    for name in ("a", "b"):
        cluster.tell(name, Disconnected("c"))
    cluster.elapse("a")
    cluster.elapse("b")
    cluster.settle()
    assert [core.id for core in cluster.leaders] == ["a"]
    assert cluster.core("a").generation == 2


def test_a_server_with_a_shorter_log_yields_the_pre_vote() -> None:
    """A server that runs a pre-vote must not prevent the election of one that can win."""
    core = raft(recovered=recovered(2, 1, 1))
    core.handle(Elapsed(), core.next_deadline)
    reply = only(hear(core, PreVote(3, 2, 2), now=core._now), PreVoteReply)
    assert reply == PreVoteReply(3, True)
    assert sends(hear(core, PreVote(3, 2, 1), now=core._now), PreVote), "alike: it goes first"


def test_check_quorum() -> None:
    core = leading()
    while core.role is Role.LEADING:
        core.handle(Elapsed(), core.next_deadline)
        assert core.next_deadline < 10
    assert core.leader is None


def test_check_quorum_counts_voters_only() -> None:
    core = leading(Membership(("a", "b", "c"), ("d", "e")))
    while core.role is Role.LEADING:
        core.handle(Elapsed(), core.next_deadline)
        for learner in ("d", "e"):
            if core.role is Role.LEADING:
                hear(core, HeartbeatReply(1, core._round), learner, core._now)
        assert core.next_deadline < 10


def test_partial_connectivity_makes_progress() -> None:
    """The leader loses all but one connection; a server with a majority takes over, and stays
    leader."""
    cluster = RaftCluster(["a", "b", "c", "d", "e"])
    cluster.elapse("a")
    cluster.settle()
    for other in ("b", "c", "d"):
        cluster.cut("a", other)
    cluster.cut("b", "c")
    cluster.cut("b", "d")
    cluster.cut("c", "d")  # all servers hear only e
    cluster.run(30)
    leaders = [core for core in cluster.leaders if core._hears_majority()]
    assert [core.id for core in leaders] == ["e"]
    generation = cluster.core("e").generation
    cluster.run(30)
    assert cluster.core("e").generation == generation


def test_a_broken_connection_does_not_depose_the_leader() -> None:
    cluster = RaftCluster(["a", "b", "c"])
    cluster.elapse("a")
    cluster.settle()
    cluster.cut("a", "c")
    cluster.tell("c", Disconnected("a"))
    cluster.run(20)
    assert cluster.core("a").role is Role.LEADING
    assert cluster.core("a").generation == 1


def test_leaders_end_is_noticed_at_once() -> None:
    cluster = RaftCluster(["a", "b", "c"])
    cluster.elapse("a")
    cluster.settle()
    cluster.crash("a")
    for name in ("b", "c"):
        cluster.tell(name, Disconnected("a"))
    cluster.run(0.2)
    assert len(cluster.leaders) == 1


def test_haste_gives_way_to_patience() -> None:
    core = following()
    core.handle(Disconnected("b"), 0.0)
    waits = []
    for _ in range(8):
        before, now = core._now, core.next_deadline
        waits.append(now - before)
        core.handle(Elapsed(), now)
    assert waits[0] <= 0.03
    assert sum(waits[:3]) < 0.2
    assert waits[-1] >= 1.0
    assert core.generation == 1


def test_grant_gives_the_candidate_time() -> None:
    core = following()
    core.handle(Disconnected("b"), 0.0)
    hear(core, Vote(2, 0, 0), "c", 0.001)
    assert core.next_deadline >= 1.0
    core.handle(Disconnected("c"), 0.002)
    assert core.next_deadline <= 0.04


def test_early_elapsed_does_nothing() -> None:
    core = raft()
    assert core.handle(Elapsed(), core.next_deadline - 0.001) == []
