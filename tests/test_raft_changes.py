"""Raft: transfers of leadership, and changes of the membership."""

from __future__ import annotations

import math

import msgspec
import pytest

from doyen.quorum.consensus.core import (
    Accepted,
    ChangeAsked,
    Disconnected,
    Effect,
    Elapsed,
    EntryKind,
    LogEntry,
    Membership,
    ProposalRefused,
    Propose,
    Recovered,
    Role,
    Send,
    TransferAsked,
    TransferFailed,
    TransferRefused,
)
from doyen.quorum.consensus.raft import Raft
from doyen.quorum.consensus.raft.messages import (
    Append,
    AppendReply,
    Ballot,
    HeartbeatReply,
    PreVoteReply,
    TimeoutNow,
    VoteReply,
)
from raft_cluster import RaftCluster
from raft_kit import ABC, change, following, hear, leading, log, raft, recovered, sends, write


def test_transfer_stops_for_a_dead_successor() -> None:
    core = leading()
    core.handle(TransferAsked("b"), 2.0)
    effects = core.handle(Disconnected("b"), 2.0)
    assert isinstance(effects[0], TransferFailed)
    assert isinstance(core.handle(Propose(b"x"), 2.0)[0], Accepted)


def test_transfer_is_bounded_by_an_election_timeout() -> None:
    core = leading()
    start = core._now
    core.handle(TransferAsked("b"), start)
    effects: list[Effect] = []
    while not any(isinstance(e, TransferFailed) for e in effects):
        effects = core.handle(Elapsed(), core.next_deadline)
        hear(core, HeartbeatReply(1, core._round), "c", core._now)
    assert core._now == pytest.approx(start + 1.0)


def test_lost_timeout_now_is_sent_again() -> None:
    core = leading()
    assert sends(core.handle(TransferAsked("b"), 2.0), TimeoutNow)
    assert sends(hear(core, HeartbeatReply(1, 1), now=2.0), TimeoutNow)


def test_another_successor_replaces_the_first() -> None:
    core = leading()
    core.handle(TransferAsked("b"), 2.0)
    assert core.handle(TransferAsked("b"), 2.0) == []
    (order,) = core.handle(TransferAsked("c"), 2.0)
    assert isinstance(order, Send)
    assert order.peer == "c"
    assert isinstance(order.message, TimeoutNow)


def test_a_transfer_that_is_refused_leaves_the_one_under_way() -> None:
    core = leading()
    core.handle(TransferAsked("b"), 2.0)
    for token, to in enumerate(("z", "a")):
        (refused,) = core.handle(TransferAsked(to, (), None, token), 2.0)
        assert isinstance(refused, TransferRefused)
        assert refused.token == token
    (refused,) = core.handle(TransferAsked("", ("b", "c")), 2.0)
    assert isinstance(refused, TransferRefused)
    assert core._successor == "b"
    assert isinstance(core.handle(Disconnected("b"), 2.0)[0], TransferFailed)


def test_transfer_without_another_candidate_is_refused() -> None:
    core = leading(Membership(("a",), ("d",)))
    assert isinstance(core.handle(TransferAsked(), 2.0)[0], TransferRefused)


def test_a_transfer_just_after_a_check_of_the_quorum() -> None:
    """The check forgets who has answered; the next answers have not arrived yet."""
    core = leading()
    while any(progress.active for progress in core._peers.values()):
        for voter in ("b", "c"):
            hear(core, HeartbeatReply(1, core._round), voter, core._now)
        core.handle(Elapsed(), core.next_deadline)
    assert sends(core.handle(TransferAsked(), core._now), TimeoutNow)
    for _ in range(2):  # two checks later, those that have not answered are not chosen
        core._check_at = core._now
        hear(core, HeartbeatReply(1, core._round), "c", core._now)
        core.handle(Elapsed(), core._now)
    assert core._furthest() == "c"


def test_stale_timeout_now_is_ignored() -> None:
    core = raft(recovered=recovered(5))
    assert hear(core, TimeoutNow(4)) == []


def test_change_needs_the_last_one_committed() -> None:
    core = leading()
    assert isinstance(change(core, "abcd")[0], Accepted)
    assert isinstance(change(core, "abcde")[0], ProposalRefused)


def test_change_needs_an_entry_of_this_generation_committed() -> None:
    """The single-server membership bug."""
    core = leading(committed=False)
    assert isinstance(change(core, "abcd")[0], ProposalRefused)
    write(core, 2.0)
    hear(core, HeartbeatReply(1, 1), "c", now=2.0)
    assert isinstance(change(core, "abcd")[0], ProposalRefused)
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
    assert isinstance(refused, ProposalRefused)
    assert word in refused.reason


def beating(core: Raft, until: float, *answering: str) -> None:
    """Time passes, and these servers answer every heartbeat."""
    while core.next_deadline < until:
        core.handle(Elapsed(), core.next_deadline)
        for peer in answering:
            hear(core, HeartbeatReply(1, core._round), peer, core._now)


def test_a_change_that_would_leave_no_majority_is_refused() -> None:
    """With one of three dead, removing another would leave two that cannot commit anything."""
    core = leading()
    beating(core, 5.0, "b")
    (refused,) = core.handle(ChangeAsked(Membership(("a", "c"))), 5.0)
    assert isinstance(refused, ProposalRefused)
    assert "without c" in refused.reason
    assert isinstance(core.handle(ChangeAsked(Membership(("a", "b"))), 5.0)[0], Accepted)


def test_a_voter_that_was_down_before_the_election_does_not_count() -> None:
    """A leader that was asked to remove itself has handed over, and the new one is asked at once.
    It has no report that a connection ended, and has made no check yet."""
    core = leading(committed=False)
    write(core, 2.0)
    hear(core, AppendReply(1, 1), "b", now=2.0)
    assert core.commit == core.log.last
    (refused,) = change(core, "ac")
    assert isinstance(refused, ProposalRefused)
    assert "without c" in refused.reason
    hear(core, AppendReply(1, 1), "c", now=2.0)
    assert isinstance(change(core, "ac")[0], Accepted)


def test_a_peer_counted_at_the_last_check_counts_as_active() -> None:
    core = leading()
    beating(core, core._check_at, "b", "c")
    core.handle(Elapsed(), core._check_at)
    assert not core._peers["b"].active
    assert isinstance(core.handle(ChangeAsked(Membership(("a", "c"))), core._now)[0], Accepted)


def test_a_disconnected_peer_does_not_count_as_active() -> None:
    core = leading()
    core.handle(Disconnected("c"), 2.0)
    assert isinstance(change(core, "ac")[0], ProposalRefused)
    assert isinstance(change(core, "bc")[0], ProposalRefused)
    assert isinstance(change(core, "ab")[0], Accepted)


def test_an_address_alone_can_change() -> None:
    core = leading()
    wanted = Membership(ABC.voters, (), {"a": "h:1"})
    assert isinstance(core.handle(ChangeAsked(wanted), 2.0)[0], Accepted)


def test_learner_is_promoted_when_it_has_caught_up() -> None:
    core = leading(Membership(("a", "b", "c"), ("d",)))
    (refused,) = change(core, "abcd")
    assert isinstance(refused, ProposalRefused)
    assert "behind; ask again" in refused.reason  # `doyen cluster promote` does, for these words
    hear(core, AppendReply(1, 1), "d", 2.0)
    assert isinstance(change(core, "abcd")[0], Accepted)


def test_learners_do_not_commit() -> None:
    core = leading(Membership(("a", "b", "c"), ("d", "e")))
    core.handle(Propose(b"x"), 2.0)
    write(core, 2.0)
    for learner in "de":
        hear(core, AppendReply(1, 2), learner, 2.0)
    assert core.commit == 1


def test_membership_in_force_goes_back_with_the_log() -> None:
    wider = LogEntry(
        2, EntryKind.MEMBERSHIP, msgspec.msgpack.encode(Membership(("a", "b", "c", "d")))
    )
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
    """a removed itself, is the only one to know, and restarts: b cannot win without a's vote."""
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


def test_a_removed_member_learns_of_its_removal() -> None:
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


def test_a_leader_that_was_just_elected_does_not_hand_over_to_a_voter_it_has_not_heard() -> None:
    """The last leader has died, and is the first of the others in alphabetical order."""
    core = raft()
    core.handle(Disconnected("b"), 0.0)
    now = core.next_deadline
    core.handle(Elapsed(), now)
    hear(core, PreVoteReply(core.generation + 1, True), "c", now)
    write(core, now)
    hear(core, VoteReply(core.generation, True), "c", now)
    write(core, now)
    assert core.role is Role.LEADING
    assert isinstance(core.handle(TransferAsked(), now)[0], TransferRefused)
    hear(core, AppendReply(core.generation, core.log.last), "c", now)
    assert sends(core.handle(TransferAsked(), now), TimeoutNow)[0].peer == "c"


def test_leadership_is_not_transferred_for_a_change_that_too_few_servers_could_commit() -> None:
    core = leading()
    hear(core, HeartbeatReply(1, core._round), "b", core._now)
    core._peers["c"].active = core._peers["c"].lately = False
    without = Membership(("b", "c"))
    (refused,) = core.handle(TransferAsked("", (), without), core._now)
    assert isinstance(refused, TransferRefused)
    assert "without c, which does not answer" in refused.reason
    core._peers["c"].active = True
    assert sends(core.handle(TransferAsked("", (), without), core._now), TimeoutNow)
