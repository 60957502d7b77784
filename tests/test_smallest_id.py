"""The vote for the smallest id: which server campaigns, which ones vote, and why ids alone must not
decide."""

from __future__ import annotations

from typing import Any

import pytest

import mutants_smallest_id as mutants
from doyen.quorum.consensus.common import order
from doyen.quorum.consensus.core import (
    LogEntry,
    Membership,
    Persist,
    Persisted,
    Received,
    Recovered,
    Role,
)
from doyen.quorum.consensus.core import Send as Sending
from doyen.quorum.consensus.smallest_id import Append, Looking, SmallestId, Stand, Vote, VoterState
from room import SETTINGS, Room, role_of

FIVE = ("n1", "n2", "n3", "n4", "n5")


def one(recovered: Recovered | None = None, make: Any = SmallestId, name: str = "n2") -> Any:
    return make(
        name,
        Membership(("n1", "n2", "n3")),
        recovered or Recovered(),
        settings=SETTINGS,
        jitter=lambda: 0.5,
        now=0.0,
    )


def votes(effects: list[Any]) -> list[tuple[Vote, int]]:
    return [
        (effect.message, effect.after)
        for effect in effects
        if isinstance(effect, Sending) and isinstance(effect.message, Vote)
    ]


def test_the_smallest_id_that_is_up_stands_first() -> None:
    room = Room(SmallestId, FIVE)
    room.start()
    room.run(1.0)
    assert room.leader() == "n1"
    room.crash("n1")
    room.run(1.0)
    assert room.leader() == "n2"
    assert room.settled()


def test_numbers_in_names_count_as_numbers() -> None:
    assert sorted(["n10", "n9", "b", "n1a", "n1"], key=order) == ["b", "n1", "n1a", "n9", "n10"]
    room = Room(SmallestId, ["n10", "n9", "n11"])
    room.start()
    room.run(1.0)
    assert room.leader() == "n9"


def test_the_smallest_id_does_not_lead_without_the_log() -> None:
    room = Room(SmallestId, FIVE)
    room.start()
    room.run(1.0)
    room.crash("n1")
    room.run(1.0)
    room.propose(b"x")
    room.run(0.5)
    room.crash("n2", "n3", "n4", "n5")
    room.start("n1", "n4", "n5")
    room.run(2.0)
    assert room.leader() == "n4"
    assert room.data("n1") == [b"x"]


def test_a_smaller_id_that_returns_does_not_depose_the_leader() -> None:
    room = Room(SmallestId, FIVE)
    room.start("n3", "n4", "n5")
    room.run(1.0)
    assert room.leader() == "n3"
    room.start("n1", "n2")
    room.run(3.0)
    assert room.leader() == "n3"
    assert room.settled()


def test_an_abandoned_generation_does_not_depose_the_leader() -> None:
    """The server that began it failed as soon as it had voted for itself."""
    room = Room(SmallestId, FIVE)
    room.start("n3", "n4", "n5")
    room.run(1.0)
    room.propose(b"x")
    room.start("n1", "n2")
    room.run(1.0)
    room.crash("n5")
    room.states["n5"] = VoterState(40, "n5")
    room.start("n5")
    room.run(1.0)
    assert room.leader() == "n3"
    assert room.cores["n3"].generation > 40
    assert room.settled()
    assert [*map(room.data, FIVE)] == [[b"x"]] * 5


def test_a_server_without_answers_does_not_stand() -> None:
    """It hears the others look for a leader, and they do not hear it."""
    room = Room(SmallestId, ("n1", "n2", "n3"))
    room.cuts = {("n1", "n2"), ("n1", "n3")}
    room.start()
    room.run(5.0)
    assert room.leader() == "n2"
    stood = {
        name
        for name, effect in room.said
        if isinstance(effect, Sending) and isinstance(effect.message, Stand)
    }
    assert stood == {"n2"}
    room.cuts = set()
    room.run(1.0)
    assert room.leader() == "n2"
    assert room.settled()


def test_without_a_majority_no_server_campaigns_repeatedly() -> None:
    """No server votes too early, and no generation runs away meanwhile."""
    room = Room(SmallestId, FIVE)
    room.start("n1", "n2")
    room.run(20.0)
    assert {core.generation for core in room.cores.values()} == {0}
    room.start("n3")
    room.run(1.0)
    assert room.leader() == "n1"


def test_a_round_without_a_winner_is_followed_by_another() -> None:
    """All servers hear the one that should campaign, and it hears none."""
    room = Room(SmallestId, ("n1", "n2", "n3"))
    room.cuts = {("n2", "n1"), ("n3", "n1")}
    room.start()
    room.run(5.0)
    assert room.leader() == "n2"


@pytest.mark.parametrize("make", [SmallestId, mutants.VotesBeforeWriting])
def test_a_vote_is_on_disk_before_it_is_sent(make: Any) -> None:
    core = one(make=make)
    effects = core.handle(Received("n1", Stand(1, 0, 0)), 0.0)
    persist = next(effect for effect in effects if isinstance(effect, Persist))
    assert persist.state == VoterState(1, "n1")
    assert (votes(effects) == [(Vote(1, True), persist.token)]) == (make is SmallestId)


def test_one_vote_per_generation_also_after_a_restart() -> None:
    core = one(Recovered(VoterState(1, "n1")))
    assert votes(core.handle(Received("n3", Stand(1, 0, 0)), 0.0)) == [(Vote(1, False), 0)]
    assert votes(core.handle(Received("n1", Stand(1, 0, 0)), 0.0)) == [(Vote(1, True), 0)]


@pytest.mark.parametrize(
    ("last", "granted"),
    [((2, 2), True), ((2, 3), True), ((3, 1), True), ((2, 1), False), ((1, 9), False)],
)
def test_a_vote_is_granted_to_a_log_at_least_as_long(last: tuple[int, int], granted: bool) -> None:
    core = one(Recovered(VoterState(2, None), None, (LogEntry(1, 0, b""), LogEntry(2, 0, b""))))
    effects = core.handle(Received("n1", Stand(3, *last)), 0.0)
    assert votes(effects)[0][0] == Vote(3, granted)


def test_no_vote_while_a_leader_lives() -> None:
    core = one()
    core.handle(Received("n1", Append(1, 0, 0, (), 0, 1)), 0.0)
    assert core.handle(Received("n3", Stand(5, 9, 9)), 0.9) == []
    assert votes(core.handle(Received("n3", Stand(5, 9, 9)), 1.1))


def candidate(make: Any) -> Any:
    """A server of five that campaigns, its own vote on disk."""
    core = make(
        "n1",
        Membership(FIVE),
        Recovered(),
        settings=SETTINGS,
        jitter=lambda: 0.5,
        now=0.0,
    )
    core._look()
    for peer in ("n2", "n3", "n4", "n5"):
        core.handle(Received(peer, Looking(0, 0, 0, True)), 0.0)
    assert core._vote_token
    core.handle(Persisted(core._vote_token), 0.0)
    return core


def test_a_vote_that_comes_twice_counts_once() -> None:
    core = candidate(SmallestId)
    for _ in range(3):
        core.handle(Received("n2", Vote(1, True)), 0.0)
    assert role_of(core) is Role.LOOKING
    core.handle(Received("n3", Vote(1, True)), 0.0)
    assert role_of(core) is Role.LEADING
    broken = candidate(mutants.CountsRepliesNotVoters)
    for _ in range(3):
        broken.handle(Received("n2", Vote(1, True)), 0.0)
    assert broken.role is Role.LEADING
