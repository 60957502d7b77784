"""Raft's log, rule by rule: replication, commitment, reads, snapshots."""

from __future__ import annotations

from doyen.quorum.consensus.core import (
    ChangeAsked,
    Committed,
    Compacted,
    Connected,
    Disconnected,
    Elapsed,
    Install,
    Membership,
    Persist,
    Persisted,
    Position,
    ProposalRefused,
    Propose,
    ReadAsked,
    ReadReady,
    ReadRefused,
    Recovered,
    Role,
    RoleChanged,
    SendSnapshot,
    Snapshot,
    SnapshotReceived,
    SnapshotSent,
    TransferAsked,
    TransferRefused,
)
from doyen.quorum.consensus.invariants import check
from doyen.quorum.consensus.raft import RaftSettings
from doyen.quorum.consensus.raft.messages import (
    Append,
    AppendReply,
    Ballot,
    Heartbeat,
    HeartbeatReply,
)
from raft_cluster import RaftCluster
from raft_kit import (
    ABC,
    SNAPSHOT,
    following,
    hear,
    leading,
    log,
    only,
    raft,
    recovered,
    sends,
    write,
)


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
    core.handle(Propose(b"x"), 2.0)
    hear(core, AppendReply(1, 2), now=2.0)
    assert core.commit == 1
    write(core, 2.0)
    assert core.commit == 2


def test_a_majority_without_the_leaders_disk_is_one() -> None:
    core = leading()
    core.handle(Propose(b"x"), 2.0)
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
    core.handle(Propose(b"x"), 2.0)
    assert core.commit == 0
    write(core, 2.0)
    assert core.commit == 2


def test_late_disk_confirmation_does_not_cover_replaced_entries() -> None:
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


def test_a_leader_is_held_to_what_it_has_on_disk_and_not_to_what_it_has_sent() -> None:
    core = following()
    hear(core, Append(1, 0, 0, log(1, 1, 1), 2, 1, durable=1))
    assert core.witnessed["b"] == Position(1, 1, 1)
    hear(core, Heartbeat(1, 2, 1, durable=3))  # the third entry may yet be cut off
    assert core.witnessed["b"] == Position(1, 1, 2)
    hear(core, Heartbeat(2, 2, 1), "c")  # a release that does not send it: it has the generation
    assert core.witnessed["c"] == Position(2)


def test_a_leader_reports_its_durable_log() -> None:
    core = leading()
    (first, _) = sends(core.handle(Propose(b"x"), 2.0), Append)
    assert isinstance(first.message, Append)
    assert first.message.durable == core.log.last - 1
    write(core, 2.0)
    beats = sends(core.handle(ReadAsked(1), 2.0), Heartbeat)
    assert [each.message.durable for each in beats] == [core.log.last] * 2  # type: ignore[attr-defined]


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
    core.handle(Propose(b"x"), 2.0)
    assert hear(core, AppendReply(1, 1, True, 0, 0), now=2.0) == []
    assert core._peers["b"].match == 1


def test_window_bounds_what_is_on_its_way() -> None:
    settings = RaftSettings(window_messages=3, window_bytes=1000)
    cluster = RaftCluster(["a", "b"], settings=settings)
    cluster.elapse("a")
    cluster.settle()
    for _ in range(10):
        cluster.tell("a", Propose(b"x"))
    assert len(cluster.flying) == 3
    cluster.settle()
    assert cluster.core("b").commit == 11
    for _ in range(10):
        cluster.tell("a", Propose(b"x" * 600))
    assert len(cluster.flying) == 2


def test_batches_are_bounded_in_entries_and_bytes() -> None:
    start = Recovered(Ballot(1, None, ABC), None, log(*[1] * 10))
    for settings, size in (
        (RaftSettings(message_entries=4), 4),
        (RaftSettings(message_bytes=3), 3),
        (RaftSettings(message_bytes=1), 1),
    ):
        core = raft(recovered=start, settings=settings)
        entries, weight = core.log.batch(1, settings)
        assert len(entries) == weight == size


def test_peers_get_the_very_same_message() -> None:
    core = leading()
    one, other = sends(core.handle(Propose(b"x"), 2.0), Append)
    assert one.message is other.message


def test_what_is_lost_in_a_stream_is_found_by_the_next_heartbeat() -> None:
    cluster = RaftCluster(["a", "b", "c"])
    cluster.elapse("a")
    cluster.settle()
    for _ in range(3):
        cluster.tell("a", Propose(b"x"))
    while cluster.flying:
        cluster.lose()
    cluster.run(0.5)
    assert cluster.core("b").commit == cluster.core("c").commit == 4


def test_follower_that_was_disconnected_is_probed_again() -> None:
    core = leading()
    core.handle(Disconnected("b"), 2.0)
    assert [s.peer for s in sends(core.handle(Propose(b"x"), 2.0), Append)] == ["c"]
    (send,) = sends(core.handle(Connected("b"), 2.0), Append)
    assert send.peer == "b"


def test_connection_that_blinks_needs_no_snapshot() -> None:
    """A new leader does not know what its peers have; it must not send everything for that
    reason."""
    core = leading(start=Recovered(Ballot(2, None, ABC), Snapshot(5, 2, ABC), ()), committed=False)
    core.handle(Disconnected("b"), 2.0)
    (send,) = sends(core.handle(Connected("b"), 2.0))
    assert isinstance(send.message, Append)
    assert send.message.previous_index == 5


def test_refused_by_whoever_does_not_lead() -> None:
    for core in (raft(), following()):
        assert isinstance(core.handle(Propose(b"x"), 0.0)[0], ProposalRefused)
        assert isinstance(core.handle(ChangeAsked(ABC), 0.0)[0], ProposalRefused)
        assert isinstance(core.handle(TransferAsked("b"), 0.0)[0], TransferRefused)
        assert core.handle(ReadAsked(1), 0.0) == [ReadRefused(1)]


def test_read_waits_for_an_entry_of_this_generation() -> None:
    core = leading(start=recovered(1, 1), committed=False)
    core.handle(ReadAsked(7), 2.0)
    hear(core, HeartbeatReply(2, core._round), now=2.0)
    assert core.commit == 0
    write(core, 2.0)
    effects = hear(core, AppendReply(2, 2), now=2.0)
    assert ReadReady(7, 2) in effects


def test_read_is_not_answered_by_a_round_begun_before() -> None:
    """etcd 20418 and others: an old answer must not confirm a new request."""
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
    assert not sends(core.handle(Propose(b"x"), 2.0))[1:]
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


def test_follower_whose_lost_stream_is_compacted_away_gets_a_snapshot() -> None:
    """The window is full of lost messages, and nothing in it can be asked about."""
    settings = RaftSettings(window_messages=3, tail_entries=0)
    cluster = RaftCluster(["a", "b", "c"], settings=settings)
    cluster.elapse("a")
    cluster.settle()
    cluster.cut("a", "b")
    for _ in range(9):
        cluster.tell("a", Propose(b"x"))
        cluster.settle()
    cluster.compact("a")
    assert cluster.core("a").log.base == 10
    cluster.cuts.clear()
    cluster.run(0.5)
    assert cluster.core("b").commit == 10


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


def test_log_restored_without_a_ballot_is_begun_from() -> None:
    core = raft(recovered=Recovered(None, Snapshot(5, 3, ABC), log(4)))
    assert (core.generation, core.vote, core.commit) == (4, None, 5)
    check(core)
