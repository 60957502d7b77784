"""Raft, rule by rule: each known way to get it wrong has a test here by its name."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from doyen.consensus.core import (
    Accepted,
    ChangeAsked,
    Committed,
    Compacted,
    Connected,
    Disconnected,
    Effect,
    Elapsed,
    Entry,
    Event,
    Install,
    Kind,
    Membership,
    Message,
    Persist,
    Persisted,
    Proposed,
    ReadAsked,
    ReadReady,
    ReadRefused,
    Received,
    Recovered,
    Refused,
    Role,
    RoleChanged,
    Send,
    SendSnapshot,
    Settings,
    Snapshot,
    SnapshotReceived,
    SnapshotSent,
    TransferAsked,
    TransferFailed,
)
from doyen.consensus.invariants import IllegalEvent, InvariantBroken, check, check_step, facts
from doyen.consensus.raft import (
    MESSAGES,
    STATE,
    Append,
    AppendReply,
    Ballot,
    Heartbeat,
    HeartbeatReply,
    PreVote,
    PreVoteReply,
    Raft,
    RaftSettings,
    TimeoutNow,
    Vote,
    VoteReply,
)
from doyen.errors import ConfigError
from raft_cluster import RaftCluster

ABC = Membership(("a", "b", "c"))


def raft(
    name: str = "a",
    membership: Membership = ABC,
    recovered: Recovered | None = None,
    settings: Settings | None = None,
) -> Raft:
    return Raft(
        name,
        membership,
        recovered or Recovered(),
        settings=settings or RaftSettings(),
        jitter=lambda: 0.5,
        now=0.0,
    )


def log(*generations: int) -> tuple[Entry, ...]:
    return tuple(Entry(generation, Kind.COMMANDS, b"x") for generation in generations)


def recovered(generation: int, *generations: int, vote: str | None = None) -> Recovered:
    return Recovered(Ballot(generation, vote, ABC), None, log(*generations))


def sends(effects: list[Effect], kind: type[Message] = Message) -> list[Send]:
    return [e for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def only(effects: list[Effect], kind: type[Message]) -> Message:
    (send,) = sends(effects, kind)
    return send.message


def hear(core: Raft, message: Message, peer: str = "b", now: float = 0.0) -> list[Effect]:
    return core.handle(Received(peer, message), now)


def write(core: Raft, now: float = 0.0) -> list[Effect]:
    return core.handle(Persisted(core._token), now)


def following(leader: str = "b", generation: int = 1, **others: Recovered) -> Raft:
    core = raft(**others)  # type: ignore[arg-type]
    hear(core, Heartbeat(generation, 0, 1), leader)
    assert core.role is Role.FOLLOWING
    return core


def leading(
    membership: Membership = ABC, start: Recovered | None = None, *, committed: bool = True
) -> Raft:
    core = raft(membership=membership, recovered=start)
    now = core.next_deadline
    core.handle(Elapsed(), now)
    for voter in membership.voters:
        if voter != "a" and core._campaign == 1:
            hear(core, PreVoteReply(core.generation + 1, True), voter, now)
    write(core, now)
    for voter in membership.voters:
        if voter != "a" and core.role is not Role.LEADING:
            hear(core, VoteReply(core.generation, True), voter, now)
    assert core.role is Role.LEADING
    if committed:
        write(core, now)
        for voter in membership.voters:
            if voter != "a":
                hear(core, AppendReply(core.generation, core.log.last), voter, now)
        assert core.commit == core.log.last
    return core


# Elections.


def test_pre_vote_changes_nobodys_generation() -> None:
    core = raft()
    reply = only(hear(core, PreVote(7, 0, 0)), PreVoteReply)
    assert reply == PreVoteReply(7, True)
    assert (core.generation, core.vote) == (0, None)


def test_granted_pre_vote_reply_changes_nobodys_generation() -> None:
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
def test_whoever_is_no_voter_never_campaigns(membership: Membership) -> None:
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
    assert core._votes == {"a"}
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
    """The leader loses all but one link; somebody with a quorum takes over, and keeps it."""
    cluster = RaftCluster(["a", "b", "c", "d", "e"])
    cluster.elapse("a")
    cluster.settle()
    for other in ("b", "c", "d"):
        cluster.cut("a", other)
    cluster.cut("b", "c")
    cluster.cut("b", "d")
    cluster.cut("c", "d")  # everybody hears only e
    cluster.run(30)
    leaders = [core for core in cluster.leaders if core._hears_majority()]
    assert [core.id for core in leaders] == ["e"]
    generation = cluster.core("e").generation
    cluster.run(30)
    assert cluster.core("e").generation == generation


def test_broken_link_deposes_nobody() -> None:
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


# Replication and commitment.


def test_old_generation_is_never_committed_by_counting() -> None:
    """Figure 8 of the paper."""
    core = leading(start=recovered(2, 1, 2), committed=False)
    write(core, 2.0)
    hear(core, AppendReply(3, 2), now=2.0)
    assert core.commit == 0
    effects = hear(core, AppendReply(3, 3), now=2.0)
    (committed,) = [e for e in effects if isinstance(e, Committed)]
    assert (committed.first, len(committed.entries)) == (1, 3)


def test_leader_counts_itself_only_when_its_disk_does() -> None:
    core = leading()
    core.handle(Proposed(b"x"), 2.0)
    hear(core, AppendReply(1, 2), now=2.0)
    assert core.commit == 1
    write(core, 2.0)
    assert core.commit == 2


def test_a_majority_without_the_leaders_disk_is_one() -> None:
    core = leading()
    core.handle(Proposed(b"x"), 2.0)
    hear(core, AppendReply(1, 2), "b", 2.0)
    hear(core, AppendReply(1, 2), "c", 2.0)
    assert core.commit == 2


def test_single_voter_commits_only_what_is_durable() -> None:
    """etcd 14370."""
    core = raft(membership=Membership(("a",)))
    core.handle(Elapsed(), 2.0)
    assert core.leader is None
    write(core, 2.0)
    assert core.role is Role.LEADING
    core.handle(Proposed(b"x"), 2.0)
    assert core.commit == 0
    write(core, 2.0)
    assert core.commit == 2


def test_late_word_of_the_disk_does_not_vouch_for_what_was_replaced() -> None:
    """ABA: the same index, written once by an old leader and again by a new one."""
    core = following("b", 1)
    hear(core, Append(1, 0, 0, log(1, 1), 0, 1), "b")
    old = core._token
    hear(core, Append(2, 0, 0, log(2), 0, 1), "c")
    hear(core, Append(2, 1, 2, log(2), 0, 1), "c")
    core.handle(Persisted(old), 0.0)
    assert core.log.durable == 0
    write(core)
    assert core.log.durable == 2


def test_append_is_acknowledged_only_when_on_disk() -> None:
    core = following()
    (send,) = sends(hear(core, Append(1, 0, 0, log(1), 0, 1)), AppendReply)
    assert send.after == core._token > 0


def test_stale_append_does_not_truncate() -> None:
    core = following()
    hear(core, Append(1, 0, 0, log(1, 1, 1), 0, 1))
    effects = hear(core, Append(1, 0, 0, log(1), 0, 1))
    assert core.log.last == 3
    assert not [e for e in effects if isinstance(e, Persist)]


def test_conflicting_suffix_is_replaced() -> None:
    core = raft(recovered=recovered(2, 1, 2, 2, 2))
    effects = hear(core, Append(3, 1, 1, log(3), 0, 1))
    (persist,) = [e for e in effects if isinstance(e, Persist) and e.first]
    assert (persist.first, persist.entries, persist.keep) == (2, log(3), False)
    assert (core.log.last, core.log.last_generation) == (2, 3)


def test_commit_never_exceeds_the_matched_prefix() -> None:
    core = raft(recovered=recovered(2, 1, 2, 2))
    hear(core, Append(3, 0, 0, log(1), 3, 1))
    assert core.commit == 1
    hear(core, Append(3, 1, 1, (), 3, 1))
    assert core.commit == 1


def test_rejection_hints_where_the_logs_may_meet() -> None:
    core = raft(recovered=recovered(4, 1, 1, 2, 2, 4, 4))
    reply = only(hear(core, Append(5, 6, 3, (), 0, 1)), AppendReply)
    assert reply == AppendReply(5, 6, True, 4, 2, 1)
    reply = only(hear(core, Append(5, 99, 3, (), 0, 1)), AppendReply)
    assert isinstance(reply, AppendReply)
    assert reply.hint_index <= 6


def test_back_off_skips_whole_generations() -> None:
    core = leading(start=recovered(5, 1, 1, 1, 5, 5, 5), committed=False)
    effects = hear(core, AppendReply(6, 6, True, 6, 2), now=2.0)
    append = only(effects, Append)
    assert isinstance(append, Append)
    assert append.previous_index == 3


def test_late_rejection_is_ignored() -> None:
    core = leading()
    core.handle(Proposed(b"x"), 2.0)
    assert hear(core, AppendReply(1, 1, True, 0, 0), now=2.0) == []
    assert core._peers["b"].match == 1


def test_window_bounds_what_is_on_its_way() -> None:
    settings = RaftSettings(window_messages=3, window_bytes=1000)
    cluster = RaftCluster(["a", "b"], settings=settings)
    cluster.elapse("a")
    cluster.settle()
    for _ in range(10):
        cluster.tell("a", Proposed(b"x"))
    assert len(cluster.flying) == 3
    cluster.settle()
    assert cluster.core("b").commit == 11
    for _ in range(10):
        cluster.tell("a", Proposed(b"x" * 600))
    assert len(cluster.flying) == 2


def test_batches_are_bounded_in_entries_and_bytes() -> None:
    start = Recovered(Ballot(1, None, ABC), None, log(*[1] * 10))
    for settings, size in (
        (RaftSettings(message_entries=4), 4),
        (RaftSettings(message_bytes=3), 3),
        (RaftSettings(message_bytes=1), 1),
    ):
        core = raft(recovered=start, settings=settings)
        entries, weight = core.log.batch(1, settings.message_entries, settings.message_bytes)
        assert len(entries) == weight == size


def test_peers_get_the_very_same_message() -> None:
    core = leading()
    one, other = sends(core.handle(Proposed(b"x"), 2.0), Append)
    assert one.message is other.message


def test_what_is_lost_in_a_stream_is_found_by_the_next_heartbeat() -> None:
    cluster = RaftCluster(["a", "b", "c"])
    cluster.elapse("a")
    cluster.settle()
    for _ in range(3):
        cluster.tell("a", Proposed(b"x"))
    while cluster.flying:
        cluster.lose()
    cluster.run(0.5)
    assert cluster.core("b").commit == cluster.core("c").commit == 4


def test_follower_that_was_disconnected_is_probed_again() -> None:
    core = leading()
    core.handle(Disconnected("b"), 2.0)
    assert [s.peer for s in sends(core.handle(Proposed(b"x"), 2.0), Append)] == ["c"]
    (send,) = sends(core.handle(Connected("b"), 2.0), Append)
    assert send.peer == "b"


def test_refused_by_whoever_does_not_lead() -> None:
    for core in (raft(), following()):
        assert isinstance(core.handle(Proposed(b"x"), 0.0)[0], Refused)
        assert isinstance(core.handle(ChangeAsked(ABC), 0.0)[0], Refused)
        assert isinstance(core.handle(TransferAsked("b"), 0.0)[0], TransferFailed)
        assert core.handle(ReadAsked(1), 0.0) == [ReadRefused(1)]


# Reads.


def test_read_waits_for_an_entry_of_this_generation() -> None:
    core = leading(start=recovered(1, 1), committed=False)
    core.handle(ReadAsked(7), 2.0)
    hear(core, HeartbeatReply(2, core._round), now=2.0)
    assert core.commit == 0
    write(core, 2.0)
    effects = hear(core, AppendReply(2, 2), now=2.0)
    assert ReadReady(7, 2) in effects


def test_read_is_not_answered_by_a_round_begun_before() -> None:
    """etcd 20418, and the like: an old answer must not confirm a new question."""
    core = leading()
    core.handle(ReadAsked(1), 2.0)
    begun = core._round
    core.handle(ReadAsked(2), 2.0)
    effects = hear(core, HeartbeatReply(1, begun), now=2.0)
    assert [e for e in effects if isinstance(e, ReadReady)] == [ReadReady(1, 1)]
    assert core._round == begun + 1
    assert ReadReady(2, 1) in hear(core, HeartbeatReply(1, begun + 1), "c", 2.0)


def test_answers_of_an_earlier_leadership_confirm_nothing() -> None:
    core = leading()
    core.handle(ReadAsked(1), 2.0)
    effects = hear(core, HeartbeatReply(0, core._round), now=2.0)
    assert effects == []


def test_reads_are_refused_when_leadership_ends() -> None:
    core = leading()
    core.handle(ReadAsked(1), 2.0)
    effects = hear(core, Append(5, 0, 0, (), 0, 1), "c", 2.0)
    assert ReadRefused(1) in effects
    assert effects[0] == RoleChanged(Role.FOLLOWING, 5, "c")


def test_reads_share_rounds() -> None:
    core = leading()
    for token in range(100):
        core.handle(ReadAsked(token), 2.0)
    assert core._round == 1
    hear(core, HeartbeatReply(1, 1), now=2.0)
    effects = hear(core, HeartbeatReply(1, 2), now=2.0)
    assert len([e for e in effects if isinstance(e, ReadReady)]) == 99


def test_appends_confirm_rounds_too() -> None:
    core = leading()
    core.handle(ReadAsked(1), 2.0)
    assert ReadReady(1, 1) in hear(core, AppendReply(1, 1, round=core._round), now=2.0)


# Handing over.


def test_transfer_stops_for_a_dead_heir() -> None:
    core = leading()
    core.handle(TransferAsked("b"), 2.0)
    effects = core.handle(Disconnected("b"), 2.0)
    assert isinstance(effects[0], TransferFailed)
    assert isinstance(core.handle(Proposed(b"x"), 2.0)[0], Accepted)


def test_transfer_is_bounded_by_an_election_timeout() -> None:
    core = leading()
    start = core._now
    core.handle(TransferAsked("b"), start)
    effects: list[Effect] = []
    while not any(isinstance(e, TransferFailed) for e in effects):
        effects = core.handle(Elapsed(), core.next_deadline)
        hear(core, HeartbeatReply(1, core._round), "c", core._now)
    assert core._now == pytest.approx(start + 1.0)


def test_transfer_word_that_is_lost_is_said_again() -> None:
    core = leading()
    assert sends(core.handle(TransferAsked("b"), 2.0), TimeoutNow)
    assert sends(hear(core, HeartbeatReply(1, 1), now=2.0), TimeoutNow)


def test_another_heir_takes_the_first_ones_place() -> None:
    core = leading()
    core.handle(TransferAsked("b"), 2.0)
    assert core.handle(TransferAsked("b"), 2.0) == []
    effects = core.handle(TransferAsked("c"), 2.0)
    assert isinstance(effects[0], TransferFailed)
    assert sends(effects, TimeoutNow)[0].peer == "c"


def test_nobody_to_transfer_to() -> None:
    core = leading(Membership(("a",), ("d",)))
    assert isinstance(core.handle(TransferAsked(), 2.0)[0], TransferFailed)


def test_stale_transfer_word_is_ignored() -> None:
    core = raft(recovered=recovered(5))
    assert hear(core, TimeoutNow(4)) == []


# Membership.


def change(core: Raft, voters: str, learners: str = "") -> list[Effect]:
    return core.handle(ChangeAsked(Membership(tuple(voters), tuple(learners))), 2.0)


def test_change_needs_the_last_one_committed() -> None:
    core = leading()
    assert isinstance(change(core, "abcd")[0], Accepted)
    assert isinstance(change(core, "abcde")[0], Refused)


def test_change_needs_an_entry_of_this_generation_committed() -> None:
    """The single-server membership bug."""
    core = leading(committed=False)
    assert isinstance(change(core, "abcd")[0], Refused)
    write(core, 2.0)
    hear(core, AppendReply(1, 1), now=2.0)
    assert isinstance(change(core, "abcd")[0], Accepted)


@pytest.mark.parametrize(
    ("voters", "learners", "word"),
    [
        ("abcde", "", "only one"),
        ("ab", "d", "only one"),
        ("", "", "voter"),
        ("abca", "", "twice"),
        ("abc", "a", "twice"),
        ("abc", "", "in force"),
    ],
)
def test_change_refused(voters: str, learners: str, word: str) -> None:
    (refused,) = change(leading(), voters, learners)
    assert isinstance(refused, Refused)
    assert word in refused.reason


def test_an_address_alone_can_change() -> None:
    core = leading()
    wanted = Membership(ABC.voters, (), {"a": "h:1"})
    assert isinstance(core.handle(ChangeAsked(wanted), 2.0)[0], Accepted)


def test_learner_is_promoted_when_it_has_caught_up() -> None:
    core = leading(Membership(("a", "b", "c"), ("d",)))
    (refused,) = change(core, "abcd")
    assert isinstance(refused, Refused)
    assert "behind" in refused.reason
    hear(core, AppendReply(1, 1), "d", 2.0)
    assert isinstance(change(core, "abcd")[0], Accepted)


def test_learners_do_not_commit() -> None:
    core = leading(Membership(("a", "b", "c"), ("d", "e")))
    core.handle(Proposed(b"x"), 2.0)
    write(core, 2.0)
    for learner in "de":
        hear(core, AppendReply(1, 2), learner, 2.0)
    assert core.commit == 1


def test_membership_in_force_goes_back_with_the_log() -> None:
    wider = Entry(2, Kind.MEMBERSHIP, msgspec.msgpack.encode(Membership(("a", "b", "c", "d"))))
    core = following("b", 2)
    hear(core, Append(2, 0, 0, (wider,), 0, 1))
    assert core.membership.voters == ("a", "b", "c", "d")
    hear(core, Append(3, 0, 0, log(3), 0, 1), "c")
    assert core.membership == ABC


def test_leader_that_removes_itself_leads_until_that_is_committed() -> None:
    core = leading()
    change(core, "bc")
    write(core, 2.0)
    hear(core, AppendReply(1, 2), "b", 2.0)
    assert core.leader == "a", "two of two must have it, and the leader is none of them"
    effects = hear(core, AppendReply(1, 2), "c", 2.0)
    assert core.role is Role.LOOKING
    assert sends(effects, TimeoutNow)
    assert core.next_deadline == math.inf


def test_removal_that_may_be_lost_does_not_strand_its_server() -> None:
    """a removed itself, alone knows of it, and restarts: b cannot win without a's vote."""
    cluster = RaftCluster(["a", "b"])
    cluster.elapse("a")
    cluster.settle()
    cluster.tell("a", ChangeAsked(Membership(("b",))))
    cluster.sync("a")
    while cluster.flying:
        cluster.lose()
    cluster.crash("a")
    cluster.start("a")
    leader = cluster.heal()
    assert leader.id == "b"


def test_those_who_leave_learn_of_it() -> None:
    cluster = RaftCluster(["a", "b", "c"])
    cluster.elapse("a")
    cluster.settle()
    cluster.tell("a", ChangeAsked(Membership(("a", "b"))))
    cluster.settle()
    assert cluster.core("c").membership.voters == ("a", "b")
    cluster.run(10)
    assert cluster.core("a").generation == 1
    assert cluster.core("c").role is Role.LOOKING


def test_later_start_cannot_change_the_founders() -> None:
    core = raft(membership=Membership(("a", "z")), recovered=recovered(1))
    assert core.membership == ABC


def test_ballot_as_plain_data_is_understood() -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(Ballot(3, "b", ABC)))
    core = raft(recovered=Recovered(plain))
    assert (core.generation, core.vote, core.membership) == (3, "b", ABC)


# Snapshots.


SNAPSHOT = Snapshot(5, 2, Membership(("a", "b", "c", "d")))


def test_snapshot_is_installed_and_acknowledged_when_in_force() -> None:
    core = raft()
    effects = core.handle(SnapshotReceived("b", 3, SNAPSHOT), 0.0)
    (install,) = [e for e in effects if isinstance(e, Install)]
    (send,) = sends(effects, AppendReply)
    assert send.after == install.token
    assert (core.commit, core.log.last, core.log.durable) == (5, 5, 0)
    assert core.membership == SNAPSHOT.membership
    write(core)
    assert core.log.durable == 5


def test_snapshot_does_not_replace_a_log_that_goes_further() -> None:
    core = raft(recovered=recovered(2, 1, 1, 2, 2, 2, 2))
    effects = core.handle(SnapshotReceived("b", 3, SNAPSHOT), 0.0)
    assert not [e for e in effects if isinstance(e, Install)]
    assert (core.commit, core.log.last) == (5, 6)


def test_late_snapshot_is_ignored() -> None:
    core = raft()
    core.handle(SnapshotReceived("b", 3, Snapshot(9, 3, ABC)), 0.0)
    effects = core.handle(SnapshotReceived("b", 3, SNAPSHOT), 0.0)
    assert not [e for e in effects if isinstance(e, Install)]
    assert core.handle(SnapshotReceived("c", 2, SNAPSHOT), 0.0) == []


def test_snapshot_that_was_sent_counts_only_when_the_peer_says_so() -> None:
    core = leading(start=Recovered(Ballot(2, None, ABC), Snapshot(5, 2, ABC), ()))
    hear(core, AppendReply(3, 6), "c", 2.0)
    core._peers["b"].match = 0
    core._peers["b"].probe(1)
    assert SendSnapshot("b", 3) in core.handle(Connected("b"), 2.0)
    assert not sends(core.handle(Proposed(b"x"), 2.0))[1:]
    core.handle(SnapshotSent("b", Snapshot(5, 2, ABC), True), 2.0)
    assert core._peers["b"].match == 0
    assert core._peers["b"].next == 6


def test_snapshot_that_failed_is_tried_again_on_a_sign_of_life() -> None:
    core = leading(start=Recovered(Ballot(2, None, ABC), Snapshot(5, 2, ABC), ()))
    core._peers["b"].match = 0
    core._peers["b"].probe(1)
    core.handle(Connected("b"), 2.0)
    assert core.handle(SnapshotSent("b", Snapshot(5, 2, ABC), False), 2.0) == []
    assert SendSnapshot("b", 3) in hear(core, HeartbeatReply(3, 1), now=2.0)


def test_compaction_keeps_a_tail() -> None:
    core = raft(recovered=recovered(1, *[1] * 50), settings=RaftSettings(tail_entries=10))
    hear(core, Heartbeat(1, 40, 1))
    core.handle(Compacted(Snapshot(40, 1, ABC)), 0.0)
    assert (core.log.base, core.log.last) == (30, 50)
    core.handle(Compacted(Snapshot(30, 1, ABC)), 0.0)
    assert core.log.base == 30
    tight = raft(recovered=recovered(1, *[1] * 50), settings=RaftSettings(tail_bytes=3))
    hear(tight, Heartbeat(1, 40, 1))
    tight.handle(Compacted(Snapshot(40, 1, ABC)), 0.0)
    assert tight.log.base == 37


def test_entries_left_from_before_a_snapshot_are_dropped() -> None:
    core = raft(recovered=Recovered(Ballot(3, None, ABC), Snapshot(5, 3, ABC), log(2, 2)))
    assert (core.log.last, core.log.last_generation) == (5, 3)


# What cannot be.


class Foreign(Message, frozen=True, array_like=True, tag=True, gc=False):
    pass


@pytest.mark.parametrize(
    "event",
    [
        Event(),
        Received("b", Foreign(1)),
        Received("a", Heartbeat(1, 0, 1)),
        Persisted(1),
        Persisted(-1),
        Compacted(SNAPSHOT),
    ],
    ids=["event", "message", "self", "token not issued", "token gone by", "snapshot of nothing"],
)
def test_illegal_events_are_named(event: Event) -> None:
    with pytest.raises(IllegalEvent, match="a: "):
        raft().handle(event, 0.0)


def test_clock_that_goes_back_is_illegal() -> None:
    core = raft()
    core.handle(Elapsed(), 0.5)
    with pytest.raises(IllegalEvent, match="clock"):
        core.handle(Elapsed(), 0.4)


def test_two_leaders_in_a_generation_are_named() -> None:
    core = following("b")
    with pytest.raises(InvariantBroken, match="both lead"):
        hear(core, Heartbeat(1, 0, 1), "c")


def test_a_disk_that_forgot_is_named() -> None:
    core = following()
    with pytest.raises(InvariantBroken, match="lost what it had written"):
        hear(core, Heartbeat(1, 3, 1))


def test_committed_conflict_is_named() -> None:
    core = following(recovered=recovered(1, 1, 1))
    hear(core, Heartbeat(1, 2, 1))
    with pytest.raises(InvariantBroken, match="committed"):
        hear(core, Append(1, 0, 0, log(0), 0, 1))


def test_acknowledgement_of_what_does_not_exist_is_named() -> None:
    core = leading()
    with pytest.raises(InvariantBroken, match="which has"):
        hear(core, AppendReply(1, 9), now=2.0)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="heartbeat_s"):
        RaftSettings(heartbeat_s=2.0)
    with pytest.raises(ConfigError, match="haste_s"):
        RaftSettings(haste_s=0.0)
    assert (
        raft(settings=Settings(election_timeout_s=0.02, heartbeat_s=0.005)).settings.haste_s == 0.02
    )


def test_messages_and_state_survive_the_wire() -> None:
    entry = Entry(1, Kind.COMMANDS, b"x")
    for message in (
        PreVote(1, 2, 3),
        PreVoteReply(1, True),
        Vote(1, 2, 3, True),
        VoteReply(1, False),
        Append(1, 2, 3, (entry,), 4, 5),
        AppendReply(1, 2, True, 3, 4, 5),
        Heartbeat(1, 2, 3),
        HeartbeatReply(1, 2),
        TimeoutNow(1),
    ):
        data = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(data, type=MESSAGES) == message
    ballot = Ballot(1, "b", ABC)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ballot), type=STATE) == ballot


# Every role × every event.


def looking() -> Raft:
    return raft(recovered=recovered(3, 1, 3))


def canvassing() -> Raft:
    core = looking()
    core.handle(Elapsed(), core.next_deadline)
    return core


def standing() -> Raft:
    core = canvassing()
    hear(core, PreVoteReply(4, True), now=2.0)
    assert core.vote == "a"
    return core


def follower() -> Raft:
    return following("b", 3, recovered=recovered(3, 1, 3))


def leader() -> Raft:
    return leading(start=recovered(2, 1, 2))


def leader_before_commit() -> Raft:
    return leading(start=recovered(2, 1, 2), committed=False)


def leader_handing_over() -> Raft:
    core = leader()
    core.handle(TransferAsked("b"), 2.0)
    return core


def leader_in_change() -> Raft:
    core = leader()
    change(core, "bc")
    return core


def joiner() -> Raft:
    return raft("a", Membership(()))


ROLES: list[Callable[[], Raft]] = [
    looking,
    canvassing,
    standing,
    follower,
    leader,
    leader_before_commit,
    leader_handing_over,
    leader_in_change,
    joiner,
]


def messages(generation: int) -> list[Message]:
    return [
        PreVote(generation, 2, 2),
        PreVote(generation, 0, 0),
        PreVoteReply(generation, True),
        PreVoteReply(generation, False),
        Vote(generation, 2, 3),
        Vote(generation, 0, 0),
        Vote(generation, 9, 9, True),
        VoteReply(generation, True),
        VoteReply(generation, False),
        Append(generation, 0, 0, log(1), 0, 1),
        Append(generation, 7, 3, log(3), 7, 1),
        AppendReply(generation, 2, round=1),
        AppendReply(generation, 2, True, 1, 1, 1),
        Heartbeat(generation, 0, 1),
        Heartbeat(generation, 0, 0),
        HeartbeatReply(generation, 1),
        TimeoutNow(generation),
    ]


EVENTS: list[Event] = [
    Elapsed(),
    Connected("b"),
    Connected("z"),
    Disconnected("b"),
    Disconnected("z"),
    Proposed(b"x"),
    ReadAsked(1),
    TransferAsked("c"),
    TransferAsked(),
    ChangeAsked(Membership(("a", "b", "c", "d"))),
    ChangeAsked(ABC),
    SnapshotSent("b", SNAPSHOT, True),
    SnapshotSent("z", SNAPSHOT, False),
    SnapshotReceived("b", 2, SNAPSHOT),
    SnapshotReceived("b", 9, Snapshot(50, 8, ABC)),
    Compacted(Snapshot(0, 0, ABC)),
]


def answered_at_once(event: Event, effects: list[Effect]) -> bool:
    kinds = {type(effect) for effect in effects}
    if isinstance(event, Proposed | ChangeAsked):
        return len(kinds & {Accepted, Refused}) == 1
    return True


def told(effects: list[Effect], before: tuple[Role, int, str | None], core: Raft) -> bool:
    """A change of role is announced once, first; no change, not at all."""
    after = (core.role, core.generation, core.leader)
    changes = [e for e in effects if isinstance(e, RoleChanged)]
    if before == after:
        return not changes
    return changes == [RoleChanged(*after)] == [effects[0]]


@pytest.mark.parametrize("make", ROLES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_every_role_and_event(make: Callable[[], Raft], event: Event) -> None:
    core = make()
    now = max(core._now, 2.0)
    if isinstance(event, Elapsed):
        now = max(now, min(core.next_deadline, 100.0))
    before = facts(core)
    effects = core.handle(event, now)
    check(core)
    check_step(before, core)
    assert answered_at_once(event, effects)
    assert told(effects, (before.role, before.generation, before.leader), core)
    assert core.next_deadline > now or isinstance(event, Elapsed) is False


@pytest.mark.parametrize("make", ROLES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("shift", [-1, 0, 1, 5])
def test_every_role_and_message(make: Callable[[], Raft], shift: int) -> None:
    for sample in messages(1):
        core = make()
        generation = core.generation + shift
        if generation < 1:
            continue
        message = msgspec.structs.replace(sample, generation=generation)
        before = facts(core)
        content = core._content()
        try:
            effects = hear(core, message, "b", core._now)
        except InvariantBroken:
            # Leaders of our own generation cannot hear another one.
            assert shift == 0
            assert before.role is Role.LEADING
            assert isinstance(message, Append | Heartbeat)
            continue
        check(core)
        check_step(before, core)
        assert told(effects, (before.role, before.generation, before.leader), core)
        if shift < 0:
            assert facts(core) == before, message
            asks = isinstance(message, PreVote | Vote | Append | Heartbeat)
            assert [send.message.generation for send in sends(effects)] == [core.generation] * asks
        elif shift > 0:
            prospective = isinstance(message, PreVote) or (
                isinstance(message, PreVoteReply) and message.granted
            )
            ignored = isinstance(message, Vote) and content and not message.transfer
            if prospective:
                # A pre-vote that is granted may be the one that lets us stand ourselves.
                assert core.generation in (before.generation, before.generation + 1)
            elif isinstance(message, TimeoutNow):
                assert core.generation in (generation, generation + 1)
            else:
                assert core.generation == (before.generation if ignored else generation)
