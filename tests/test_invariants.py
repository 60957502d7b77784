"""The invariants can fail: each is broken here on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from doyen.quorum.consensus.core import (
    Committed,
    Effect,
    EntryKind,
    Install,
    LogEntry,
    Membership,
    Persist,
    Recovered,
    Role,
    Send,
    Snapshot,
)
from doyen.quorum.consensus.invariants import ClusterView, InvariantBroken, check, check_step, facts
from doyen.quorum.consensus.raft.messages import VoteReply

ABC = Membership(("a", "b", "c"))


class Puppet:
    """A core whose state the test sets."""

    def __init__(self, name: str, generation: int = 1) -> None:
        self.id = name
        self.role = Role.LOOKING
        self.generation = generation
        self.leader: str | None = None
        self.commit = 0
        self.vote: str | None = None
        self.next_deadline = 1.0
        self.membership = self.founders = ABC

    def handle(self, event: object, now: float) -> list[Effect]:
        return []

    def lead(self) -> Puppet:
        self.role, self.leader = Role.LEADING, self.id
        return self


def entry(generation: int, data: bytes = b"x") -> LogEntry:
    return LogEntry(generation, EntryKind.COMMANDS, data)


def persist(first: int, *entries: LogEntry, keep: bool = False) -> Persist:
    return Persist(1, None, first, entries, keep)


def cluster(*puppets: Puppet, ballots: bool = False) -> ClusterView:
    them = ClusterView(ballots=ballots, vote_in=lambda send: (send.message.generation, send.peer))
    them.majorities = False
    for puppet in puppets:
        them.started(puppet, Recovered())
    return them


def test_leader_is_itself_and_follower_is_not() -> None:
    puppet = Puppet("a")
    check(puppet)
    for role, leader in (
        (Role.LEADING, "b"),
        (Role.LEADING, None),
        (Role.FOLLOWING, None),
        (Role.FOLLOWING, "a"),
        (Role.LOOKING, "b"),
    ):
        puppet.role, puppet.leader = role, leader
        with pytest.raises(InvariantBroken):
            check(puppet)


def test_deadline_is_a_number() -> None:
    puppet = Puppet("a")
    puppet.next_deadline = float("nan")
    with pytest.raises(InvariantBroken):
        check(puppet)


@pytest.mark.parametrize(
    "change",
    [
        lambda puppet: setattr(puppet, "generation", 4),
        lambda puppet: setattr(puppet, "commit", 4),
        lambda puppet: setattr(puppet, "vote", "c"),
        lambda puppet: setattr(puppet, "vote", None),
        lambda puppet: setattr(puppet, "leader", "c"),
    ],
    ids=["generation back", "commit back", "another vote", "vote forgotten", "another leader"],
)
def test_step(change: Callable[[Puppet], None]) -> None:
    puppet = Puppet("a", 5)
    puppet.commit, puppet.vote, puppet.leader, puppet.role = 5, "b", "b", Role.FOLLOWING
    before = facts(puppet)
    check_step(before, puppet)
    change(puppet)
    with pytest.raises(InvariantBroken):
        check_step(before, puppet)


def test_leading_two_generations_without_an_election_is_detected() -> None:
    puppet = Puppet("a").lead()
    before = facts(puppet)
    puppet.generation = 2
    with pytest.raises(InvariantBroken, match="without an election"):
        check_step(before, puppet)


def test_two_leaders() -> None:
    a, b = Puppet("a").lead(), Puppet("b").lead()
    them = cluster(a, b)
    them.stepped(a, [])
    with pytest.raises(InvariantBroken, match="both lead"):
        them.stepped(b, [])


def test_two_leaders_one_after_the_other() -> None:
    a, b = Puppet("a").lead(), Puppet("b").lead()
    them = cluster(a, b)
    them.stepped(a, [])
    them.crashed("a")
    with pytest.raises(InvariantBroken, match="both lead"):
        them.stepped(b, [])


def test_two_votes() -> None:
    them = cluster(Puppet("a"))
    them.sent("a", Send("b", VoteReply(1, True)))
    them.sent("a", Send("b", VoteReply(1, True)))
    them.sent("a", Send("c", VoteReply(2, True)))
    with pytest.raises(InvariantBroken, match="votes for"):
        them.sent("a", Send("c", VoteReply(1, True)))


def test_generation_and_commit_do_not_go_back() -> None:
    a = Puppet("a", 2)
    them = cluster(a)
    a.generation = 1
    with pytest.raises(InvariantBroken, match="went back"):
        them.stepped(a, [])


def test_log_matching_by_content() -> None:
    a, b = Puppet("a"), Puppet("b")
    them = cluster(a, b)
    them.stepped(a, [persist(1, entry(1, b"x"))])
    with pytest.raises(InvariantBroken, match="differs"):
        them.stepped(b, [persist(1, entry(1, b"y"))])


def test_log_matching_by_what_came_before() -> None:
    a, b = Puppet("a", 2), Puppet("b", 2)
    them = cluster(a, b)
    them.stepped(a, [persist(1, entry(1), entry(2))])
    with pytest.raises(InvariantBroken, match="differs"):
        them.stepped(b, [persist(1, entry(2)), persist(2, entry(2))])


def test_hole_in_the_log() -> None:
    a = Puppet("a")
    with pytest.raises(InvariantBroken, match="writes entries at 3"):
        cluster(a).stepped(a, [persist(3, entry(1))])


def test_committed_entry_never_changes() -> None:
    a, b = Puppet("a", 2), Puppet("b", 2)
    them = cluster(a, b)
    them.stepped(a, [persist(1, entry(1)), Committed(1, [entry(1)])])
    with pytest.raises(InvariantBroken, match="applies"):
        them.stepped(b, [persist(1, entry(2)), Committed(1, [entry(2)])])


def test_same_value_in_a_later_ballot_is_the_same() -> None:
    a, b = Puppet("a", 2), Puppet("b", 2)
    them = cluster(a, b, ballots=True)
    them.stepped(a, [persist(1, entry(1)), Committed(1, [entry(1)])])
    them.stepped(b, [persist(1, entry(2)), Committed(1, [entry(2)])])
    with pytest.raises(InvariantBroken, match="applies"):
        them.stepped(b, [persist(2, entry(2)), Committed(1, [entry(2, b"y")])])


def test_gap_in_what_is_applied() -> None:
    a = Puppet("a")
    with pytest.raises(InvariantBroken, match="applies 2 after 0"):
        cluster(a).stepped(a, [persist(1, entry(1), entry(1)), Committed(2, [entry(1)])])


def test_committed_entry_is_not_cut_off() -> None:
    a = Puppet("a", 2)
    them = cluster(a)
    a.commit = 1
    them.stepped(a, [persist(1, entry(1)), Committed(1, [entry(1)])])
    with pytest.raises(InvariantBroken, match="below what is committed"):
        them.stepped(a, [persist(1, entry(2))])


def test_leader_has_what_was_committed_before() -> None:
    a, b = Puppet("a"), Puppet("b", 2)
    them = cluster(a, b)
    them.stepped(a.lead(), [persist(1, entry(1)), Committed(1, [entry(1)])])
    with pytest.raises(InvariantBroken, match="without entry 1"):
        them.stepped(b.lead(), [])


def test_leader_has_what_an_earlier_one_commits_later() -> None:
    a, b = Puppet("a"), Puppet("b", 2)
    them = cluster(a, b)
    them.stepped(b.lead(), [])
    with pytest.raises(InvariantBroken, match="without entry 1"):
        them.stepped(a.lead(), [persist(1, entry(1)), Committed(1, [entry(1)])])


def test_leader_elected_late_need_not_have_what_later_ones_committed() -> None:
    a, b = Puppet("a"), Puppet("b", 2)
    them = cluster(a, b)
    them.stepped(b.lead(), [persist(1, entry(2)), Committed(1, [entry(2)])])
    them.stepped(a.lead(), [])


@pytest.mark.parametrize(
    ("snapshot", "word"),
    [
        (Snapshot(9, 1, ABC), "which is not committed"),
        (Snapshot(2, 7, ABC), "another history"),
        (Snapshot(1, 1, ABC), "goes back"),
    ],
)
def test_snapshot_of_what_never_was(snapshot: Snapshot, word: str) -> None:
    a, b = Puppet("a"), Puppet("b")
    them = cluster(a, b)
    history = [entry(1), entry(1)]
    them.stepped(a, [persist(1, *history), Committed(1, history)])
    them.stepped(b, [persist(1, entry(1)), Committed(1, [entry(1)])])
    with pytest.raises(InvariantBroken, match=word):
        them.stepped(b, [Install(snapshot, 2)])
