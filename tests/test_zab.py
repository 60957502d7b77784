"""Fast leader election and Zab: the examples of its documents, and defects seen in production."""

from __future__ import annotations

from typing import Any

import pytest

import mutants_zab as mutants
from doyen.quorum.consensus.core import (
    Elapsed,
    EntryKind,
    LogEntry,
    Membership,
    Persist,
    Received,
    Recovered,
    Role,
)
from doyen.quorum.consensus.core import Send as Sending
from doyen.quorum.consensus.zab import Phase, Zab, ZabVote
from doyen.quorum.consensus.zab.messages import (
    AckEpoch,
    AckLeader,
    FollowerInfo,
    LeaderInfo,
    NewLeader,
    Notification,
    Sync,
    ZabState,
)
from room import SETTINGS, Room, hear, sent

FIVE = ("1", "2", "3", "4", "5")
THREE = ("1", "2", "3")


def entry(epoch: int) -> LogEntry:
    return LogEntry(epoch, EntryKind.COMMANDS, b"e%d" % epoch)


def one(
    name: str = "1",
    *,
    voters: tuple[str, ...] = THREE,
    state: ZabState | None = None,
    epochs: tuple[int, ...] = (),
    make: Any = Zab,
) -> Any:
    """A server that has just begun to look for a leader."""
    core = make(
        name,
        Membership(voters),
        Recovered(state, None, tuple(entry(epoch) for epoch in epochs)),
        settings=SETTINGS,
        jitter=lambda: 0.5,
        now=0.0,
    )
    core._look()
    core._effects.clear()
    return core


def test_five_servers_started_in_order_the_third_leads() -> None:
    """As in the document: one and two keep looking, three leads, four and five follow."""
    room = Room(Zab, FIVE)
    room.start("1")
    room.run(1.0)
    assert room.cores["1"].role is Role.LOOKING
    room.start("2")
    room.run(1.0)
    assert {core.role for core in room.cores.values()} == {Role.LOOKING}
    assert {core.proposal.rank for core in room.cores.values()} == {1}
    room.start("3")
    room.run(1.0)
    assert room.leader() == "3"
    for name in ("4", "5"):
        room.start(name)
        room.run(1.0)
        assert room.cores[name].role is Role.FOLLOWING
    assert room.leader() == "3"
    assert room.settled()


def test_a_restarted_cluster_goes_by_data_then_by_id() -> None:
    room = Room(Zab, FIVE)
    room.start("1", "2", "3")
    room.run(1.0)
    room.propose(b"x")
    room.run(0.5)
    room.crash("1", "2", "3")
    # Four and five have the greater ids, and none of the data.
    room.start()
    room.run(2.0)
    assert room.leader() == "3"
    assert room.data("5") == [b"x"]
    room.crash(*FIVE)
    room.start()
    room.run(2.0)
    assert room.leader() == "5"
    assert room.settled()


def looking(round_: int, leader: str, epoch: int = 0, zxid: int = 0) -> Notification:
    return Notification(epoch, Role.LOOKING, round_, leader, epoch, epoch, zxid)


def test_an_older_round_is_ignored_and_answered() -> None:
    core = one()
    core.clock = 5
    effects = hear(core, "3", looking(4, "3"))
    assert core.proposal.rank == 0
    assert [message.round for message in sent(effects, Notification)] == [5]


def test_a_newer_round_replaces_ones_own() -> None:
    core = one(epochs=(1, 1), state=ZabState(1, 1))
    core._votes = {"2": ZabVote(9, 9, 9, 1)}
    hear(core, "3", looking(7, "3", 1, 1))
    # This server's own vote is better than theirs; votes of the old round no longer count.
    assert (core.clock, core.proposal) == (7, ZabVote(1, 1, 2, 0))
    assert list(core._votes) == ["3"]


def test_epoch_then_zxid_then_id() -> None:
    ordered = [
        ZabVote(1, 9, 9, 9),
        ZabVote(2, 1, 5, 0),
        ZabVote(2, 1, 6, 0),
        ZabVote(2, 2, 1, 0),
        ZabVote(2, 2, 1, 1),
    ]
    assert sorted(ordered) == ordered


def test_a_zxid_does_not_roll_over() -> None:
    """ZOOKEEPER-1277: the counter is not limited to 32 bits, and never touches the epoch."""
    assert ZabVote(1, 1, 2**32 + 1, 0) > ZabVote(1, 1, 2**32 - 1, 0)
    assert ZabVote(1, 1, 2**40, 0) < ZabVote(1, 2, 1, 0)


def test_the_round_waits_for_something_better() -> None:
    core = one("1", voters=FIVE)
    for peer in ("2", "3"):
        hear(core, peer, looking(1, "3"))
    assert core.phase is Phase.ELECTION
    hear(core, "4", looking(1, "4"), 0.1)
    assert core.proposal.rank == 3
    for peer in ("2", "3"):
        hear(core, peer, looking(1, "4"), 0.1)
    core.next_deadline = 0.1
    core._finalize = 0.1
    core.handle(Elapsed(), 0.2)
    assert core.chosen == "4"


@pytest.mark.parametrize("make", [Zab, mutants.FollowsOnHearsay])
def test_no_server_follows_on_the_report_of_another(make: Any) -> None:
    """21: the followers of a leader are the last to learn that it is gone."""
    core = one("1", make=make)
    for peer in ("2", "3"):
        hear(core, peer, Notification(1, Role.FOLLOWING, 9, "3" if peer == "2" else "2", 1, 1, 1))
    hear(core, "2", Notification(1, Role.FOLLOWING, 9, "3", 1, 1, 1))
    assert (core.chosen is None) == (make is Zab)


def test_joining_an_ensemble_whose_votes_are_from_other_rounds() -> None:
    """ZOOKEEPER-1732, -1805: its members joined it in different rounds, with different votes."""
    core = one("1", voters=FIVE)
    hear(core, "2", Notification(4, Role.FOLLOWING, 3, "3", 1, 1, 7))
    hear(core, "4", Notification(4, Role.FOLLOWING, 8, "3", 3, 3, 12))
    assert core.chosen is None
    hear(core, "3", Notification(4, Role.LEADING, 2, "3", 1, 1, 5))
    assert core.chosen == "3"


def follower(state: ZabState, epochs: tuple[int, ...], make: Any = Zab) -> Any:
    """A server that has chosen 3, which opens an epoch."""
    core = one("1", state=state, epochs=epochs, make=make)
    core._choose("3")
    core._effects.clear()
    hear(core, "3", LeaderInfo(state.accepted_epoch + 1))
    return core


def written(effects: list[Any]) -> list[str]:
    """The order of the transactions, the epoch and the acknowledgement."""
    order = []
    token = 0
    for effect in effects:
        if isinstance(effect, Persist):
            token = effect.token
            order.append("epoch" if effect.state is not None else "log")
        elif isinstance(effect, Sending) and isinstance(effect.message, AckLeader):
            assert effect.after == token, "acknowledged before it is written"
            order.append("ack")
    return order


def test_transactions_then_epoch_then_acknowledgement() -> None:
    """20: ZOOKEEPER-3911, -4643, -4646, -4785."""

    def trial(make: Any) -> list[str]:
        core = follower(ZabState(1, 1), (1, 1, 1), make)
        effects = hear(core, "3", Sync(2, "TRUNC", 1, 1, (entry(2),)))
        effects += hear(core, "3", NewLeader(2, 2, 2))
        assert core.current_epoch == 2
        return written(effects)

    assert trial(Zab) == ["log", "epoch", "ack"]
    assert trial(mutants.EpochBeforeLog)[0] == "epoch"
    with pytest.raises(AssertionError, match="before it is written"):
        trial(mutants.AcknowledgesBeforeWriting)


@pytest.mark.parametrize("make", [Zab, mutants.ForgetsEpoch, mutants.PromisesBeforeWriting])
def test_an_epoch_is_accepted_on_disk_before_it_is_acknowledged(make: Any) -> None:
    core = one("1", make=make)
    core._choose("3")
    core._effects.clear()
    effects = hear(core, "3", LeaderInfo(4))
    persist = next(effect for effect in effects if isinstance(effect, Persist))
    ack = next(effect for effect in effects if isinstance(effect, Sending))
    assert ((persist.state, ack.after) == (ZabState(4, 0), persist.token)) == (make is Zab)


@pytest.mark.parametrize("make", [Zab, mutants.EpochBeforeLog])
def test_a_crash_in_the_midst_of_synchronisation_loses_nothing(make: Any) -> None:
    """20: with the epoch on disk and the log not, an empty server would be ahead of all."""
    room = Room(make, THREE)
    room.start("2", "3")
    room.run(1.0)
    room.propose(b"x")
    room.run(0.5)
    room.crash("2", "3")
    room.start("1", "3")
    while not any(write.entries for write in room.queues["1"]):
        room.run(0.0001)
    writes = room.queues["1"]
    del writes[next(n for n, write in enumerate(writes) if write.entries) :]
    room._sync("1")
    room.crash("1", "3")
    room.start("1", "2")
    room.run(3.0)
    assert room.settled()
    assert room.data("1") == ([b"x"] if make is Zab else [])


def test_an_epoch_that_another_was_given_does_not_count() -> None:
    core = one("1", state=ZabState(4, 1))
    core._choose("3")
    effects = hear(core, "3", LeaderInfo(4))
    assert sent(effects, AckEpoch) == [AckEpoch(4, False, 1, 0, 0)]


def test_a_leader_gives_up_if_one_of_its_majority_is_ahead() -> None:
    core = one("3", epochs=(1,), state=ZabState(1, 1))
    core._choose("3")
    hear(core, "1", FollowerInfo(1))
    core.log.durable = core.log.token
    hear(core, "1", AckEpoch(2, True, 1, 1, 2))
    assert core.phase is Phase.ELECTION
    assert core.role is Role.LOOKING


def test_a_follower_is_synchronised_by_diff_trunc_or_the_whole() -> None:
    leader = (1, 1, 3, 3)
    for epochs, how in (((1, 1), "DIFF"), ((1, 1, 2, 2), "TRUNC"), ((), "DIFF"), ((2,), "WHOLE")):
        core = one("3", epochs=leader, state=ZabState(3, 3))
        core._choose("3")
        hear(core, "1", FollowerInfo(3))
        core.log.durable = core.log.token
        last = (epochs[-1], len(epochs)) if epochs else (0, 0)
        said = hear(core, "1", AckEpoch(4, True, 0, *last))
        peer = follower(ZabState(3, 2), epochs)
        ways = []
        for effect in said:  # which grows meanwhile
            if isinstance(effect, Sending) and effect.peer == "1":
                ways += [effect.message.how] if isinstance(effect.message, Sync) else []
                for answer in hear(peer, "3", effect.message):
                    if isinstance(answer, Sending):
                        said += hear(core, "1", answer.message)
        assert ways[-1] == how
        assert peer.phase is Phase.BROADCAST
        assert [e.generation for e in peer.log] == list(leader)


def test_a_history_that_is_only_too_long_is_cut() -> None:
    core = follower(ZabState(1, 1), (1, 1, 1))
    effects = hear(core, "3", NewLeader(2, 2, 1))
    cut = next(effect for effect in effects if isinstance(effect, Persist))
    assert (cut.first, tuple(cut.entries), cut.keep) == (3, (), False)
    assert len(core.log) == 2


def test_a_late_message_does_not_truncate_later_proposals() -> None:
    core = follower(ZabState(1, 1), (1, 1))
    hear(core, "3", NewLeader(2, 2, 1))
    core.log.append(entry(2))
    core.log.write(first=3, entries=core.log[2:])
    core._effects.clear()
    core._look()
    core._choose("3")
    core._effects.clear()
    hear(core, "3", LeaderInfo(2))
    effects = hear(core, "3", NewLeader(2, 2, 1))
    assert len(core.log) == 3
    assert sent(effects, AckLeader) == [AckLeader(2, 3)]


def test_a_leader_that_learns_of_a_later_epoch_starts_an_election() -> None:
    room = Room(Zab, THREE)
    room.start()
    room.run(1.0)
    leader = room.leader()
    assert leader == "3"
    room.tell(leader, Received("1", FollowerInfo(9)))
    assert room.cores[leader].role is Role.LOOKING
    room.run(2.0)
    assert room.settled()
    assert room.cores[leader].generation == 10
