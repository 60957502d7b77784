"""Multi-Paxos: ballots, slots, gaps, and what a new leader must propose."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

import mutants_paxos as mutants
from doyen.quorum.consensus.common import Behind, Later
from doyen.quorum.consensus.core import (
    Accepted,
    Committed,
    Elapsed,
    EntryKind,
    LogEntry,
    Membership,
    Persist,
    Persisted,
    Recovered,
    Role,
)
from doyen.quorum.consensus.core import Send as Sending
from doyen.quorum.consensus.paxos import (
    GAP,
    REPORTED_AT_ONCE,
    Accept,
    AcceptOk,
    AcceptorState,
    Chosen,
    Doubt,
    Paxos,
    Prepare,
    Promise,
)
from room import SETTINGS, Room, hear, role_of, sent

THREE = ("n0", "n1", "n2")


def value(text: str, ballot: int = 1) -> LogEntry:
    return LogEntry(ballot, EntryKind.COMMANDS, text.encode())


def one(
    name: str = "n0",
    state: AcceptorState | None = None,
    entries: tuple[LogEntry, ...] = (),
    make: Any = Paxos,
) -> Any:
    return make(
        name,
        Membership(THREE),
        Recovered(state, None, entries),
        settings=SETTINGS,
        jitter=lambda: 0.0,
        now=0.0,
    )


def proposer(
    make: Any = Paxos, state: AcceptorState | None = None, entries: tuple[LogEntry, ...] = ()
) -> Any:
    """n0, which prepares; its own promise is on disk."""
    core = one("n0", state, entries, make)
    core._look()
    hear(core, "n1", Doubt(0, True))
    core.handle(Persisted(core.log.token), 0.0)
    return core


def test_no_two_servers_share_a_ballot() -> None:
    ballots = set()
    for name in THREE:
        for seen in range(20):
            core = one(name)
            core._seen = seen
            core._become_candidate()
            assert core.generation > seen
            assert core.leader_of(core.generation) == name
            ballots.add((name, core.generation))
    owners = {ballot: {n for n, b in ballots if b == ballot} for _, ballot in ballots}
    assert all(len(names) == 1 for names in owners.values())


def test_no_server_prepares_alone() -> None:
    room = Room(Paxos, THREE)
    room.start("n0")
    room.run(20.0)
    assert room.cores["n0"].generation == 0
    room.start("n1")
    room.run(2.0)
    assert room.leader() is not None


def test_a_promise_is_on_disk_before_it_is_sent_and_holds_after_a_restart() -> None:
    core = one("n1")
    effects = hear(core, "n0", Prepare(3, 1))
    persist = next(effect for effect in effects if isinstance(effect, Persist))
    promise = next(effect for effect in effects if isinstance(effect, Sending))
    assert (persist.state, promise.after) == (AcceptorState(3, ()), persist.token)
    again = one("n1", persist.state)
    assert sent(hear(again, "n2", Accept(2, 1, (value("x"),), 0, 1)), Later) == [Later(3)]
    assert again.log == []


def test_values_of_an_earlier_ballot_are_not_accepted() -> None:
    core = one("n1", AcceptorState(5, ()))
    assert sent(hear(core, "n0", Accept(3, 1, (value("x"),), 0, 1)), Later) == [Later(5)]
    assert sent(hear(core, "n0", Prepare(3, 1)), Later) == [Later(5)]


def test_a_ballot_that_is_not_the_senders_is_ignored() -> None:
    core = one("n1")
    assert hear(core, "n0", Accept(5, 1, (value("x"),), 0, 1)) == []
    assert hear(core, "n0", Prepare(5, 1)) == []
    assert core.generation == 0


def test_a_proposer_without_answers_prepares_nothing() -> None:
    """It hears the others doubt, and they do not hear it. A ballot of its own would only depose,
    when it is heard again, the leader that they have elected meanwhile."""
    core = one("n0")
    core._look()
    for doubter in ("n1", "n2"):
        hear(core, doubter, Doubt(0, False))
    core.handle(Elapsed(), core.next_deadline)
    assert core.generation == 0
    hear(core, "n1", Doubt(0, True))
    assert core.generation > 0


def test_a_peer_that_has_answered_is_kept_from_campaigning_while_others_answer() -> None:
    """Otherwise it would campaign before it has received everything."""
    core = Paxos(
        "n0",
        Membership(("n0", "n1", "n2", "n3", "n4")),
        Recovered(),
        settings=SETTINGS,
        jitter=lambda: 0.0,
        now=0.0,
    )
    core._look()
    for doubter in ("n1", "n2"):
        hear(core, doubter, Doubt(0, True))
    core.handle(Persisted(core.log.token), 0.0)
    hear(core, "n1", Promise(core.generation, 1, (), (), 0))
    effects = core.handle(Elapsed(), core.next_deadline)
    assert sent(effects, Prepare, "n1") == [Prepare(core.generation, 1)]
    assert role_of(core) is Role.LOOKING


def test_an_abandoned_ballot_does_not_depose_the_leader() -> None:
    """Its proposer failed as soon as it had promised it to itself."""
    room = Room(Paxos, THREE)
    room.start("n1", "n2")
    room.run(2.0)
    leader = room.leader()
    assert leader == "n1"
    room.start("n0")
    room.propose(b"x")
    room.run(1.0)
    room.crash("n2")
    room.states["n2"] = AcceptorState(122, room.states["n2"].accepted)
    room.start("n2")
    room.run(1.0)
    assert room.leader() == leader
    assert room.cores[leader].generation > 122
    assert room.settled()
    assert [*map(room.data, THREE)] == [[b"x"]] * 3


@pytest.mark.parametrize("make", [Paxos, mutants.FirstReportWins])
def test_the_value_of_the_highest_ballot_is_proposed_anew(make: Any) -> None:
    """It may have been chosen; the others cannot have been."""
    core = one("n0", AcceptorState(4, ((1, 2),)), (value("old", 2),), make)
    core._look()
    hear(core, "n1", Doubt(4, True))
    core.handle(Persisted(core.log.token), 0.0)
    ballot = core.generation
    hear(core, "n2", Promise(ballot, 1, (1,), (value("older", 1),), 1))
    assert role_of(core) is Role.LEADING
    assert core.log[0].data == (b"old" if make is Paxos else b"older")


def test_gaps_are_filled_with_nothing() -> None:
    core = proposer()
    ballot = core.generation
    report = Promise(ballot, 1, (1, 0, 1), (value("a"), GAP, value("c")), 3)
    effects = hear(core, "n1", report)
    assert [entry.data for entry in core.log] == [b"a", b"", b"c", b""]
    assert core.log[1] == LogEntry(ballot, EntryKind.NOTHING, b"")
    # Entries keep the generation in which they were first proposed.
    assert [entry.generation for entry in core.log] == [1, ballot, 1, ballot]
    persist = next(e for e in effects if isinstance(e, Persist))
    assert persist.state == AcceptorState(ballot, ((1, ballot),))


def test_the_first_phase_takes_all_the_pieces_it_needs() -> None:
    """Several promises answer one `Prepare`, and the rest is requested after the last of them."""
    core = proposer()
    ballot, last = core.generation, REPORTED_AT_ONCE + 1
    for slot in range(1, last):
        effects = hear(core, "n1", Promise(ballot, slot, (1,), (value(f"v{slot}"),), last))
        assert role_of(core) is Role.LOOKING
        asked = [Prepare(ballot, last)] if slot == REPORTED_AT_ONCE else []
        assert sent(effects, Prepare, "n1") == asked
        hear(core, "n1", Promise(ballot, 1, (1,), (value("v1"),), last))  # repeated, no effect
    hear(core, "n1", Promise(ballot, last, (1,), (value(f"v{last}"),), last))
    assert role_of(core) is Role.LEADING
    assert [entry.data for entry in core.log[:-1]] == [
        f"v{slot}".encode() for slot in range(1, last + 1)
    ]


def test_what_an_acceptor_has_is_reported_in_several_messages() -> None:
    values = tuple(value(f"v{slot}") for slot in range(1, 4))
    core = one("n1", AcceptorState(1, ((1, 1),)), values)
    core._settings = structs.replace(core._settings, message_bytes=1)
    effects = hear(core, "n0", Prepare(3, 1)) + core.handle(Persisted(core.log.token), 0.0)
    assert [promise.first for promise in sent(effects, Promise, "n0")] == [1, 2, 3]


def test_slots_are_accepted_in_any_order() -> None:
    core = one("n1")
    effects = hear(core, "n0", Accept(3, 3, (value("c", 3),), 0, 1))
    persist = [e for e in effects if isinstance(e, Persist)][-1]
    assert (persist.first, persist.entries, persist.keep) == (1, (GAP, GAP, value("c", 3)), True)
    assert sent(effects, Behind) == [Behind(3, 0, 1)]
    effects = hear(core, "n0", Accept(3, 1, (value("a", 3), value("b", 3)), 0, 1))
    assert sent(effects, AcceptOk) == [AcceptOk(3, 3, 1)]
    assert [entry.data for entry in core.log] == [b"a", b"b", b"c"]


def test_what_was_accepted_in_another_ballot_is_not_known_to_be_chosen() -> None:
    core = one("n1", AcceptorState(3, ((1, 3),)), (value("mine", 3),))
    effects = hear(core, "n2", Chosen(5, 1, 1, 1))
    assert not any(isinstance(effect, Committed) for effect in effects)
    assert sent(effects, Behind) == [Behind(5, 0, 1)]
    effects = hear(core, "n2", Accept(5, 1, (value("theirs", 4),), 1, 1))
    assert Committed(1, (value("theirs", 4),)) in effects


@pytest.mark.parametrize("make", [Paxos, mutants.ForgetsBallots])
def test_ballots_of_slots_survive_a_restart(make: Any) -> None:
    core = one("n1", make=make)
    hear(core, "n0", Accept(3, 1, (value("a", 3), value("b", 3)), 0, 1))
    core._look()
    effects = hear(core, "n2", Accept(5, 2, (value("B", 5),), 0, 1))
    state = [e.state for e in effects if isinstance(e, Persist) and e.state is not None][-1]
    again = one("n1", state, tuple(core.log))
    assert (again._ballots == [3, 5]) == (make is Paxos)


def test_a_proposer_recognises_what_a_later_leader_has_finished() -> None:
    room = Room(Paxos, THREE)
    room.start()
    room.run(2.0)
    old = room.leader() or ""
    others = [name for name in THREE if name != old]
    room.cuts = {(old, others[1]), (others[0], old), (others[1], old)}
    accepted = next(e for e in room.propose(b"x") if isinstance(e, Accepted))
    room.run(5.0)
    assert room.leader() in others
    room.cuts.clear()
    room.run(3.0)
    assert room.settled()
    entry = room.applied[old][accepted.index - 1]
    assert (entry.data, entry.generation) == (b"x", accepted.generation)


@pytest.mark.parametrize("make", [Paxos, mutants.ForgetsPromise, mutants.PromisesBeforeWriting])
def test_a_promise_made_before_a_crash_keeps_an_old_leader_out(make: Any) -> None:
    """n1 promises n2 a later ballot, crashes, and receives a request of the earlier ballot's
    leader."""
    core = one("n1", AcceptorState(3, ((1, 3),)), (value("a", 3),), make)
    effects = hear(core, "n2", Prepare(5, 1))
    said = [e for e in effects if isinstance(e, Sending) and isinstance(e.message, Promise)]
    # It crashes when the promise has been sent, and not later.
    state = AcceptorState(3, ((1, 3),))
    for effect in effects:
        if isinstance(effect, Persist) and effect.token <= said[0].after:
            state = effect.state
    again = one("n1", state, (value("a", 3),), make)
    effects = hear(again, "n0", Accept(3, 2, (value("late", 3),), 0, 1))
    assert (sent(effects, Later) == [Later(5)]) == (make is Paxos)


@pytest.mark.parametrize("make", [Paxos, mutants.HearsNoReports])
def test_what_may_be_chosen_is_not_lost(make: Any) -> None:
    core = proposer(make)
    hear(core, "n1", Promise(core.generation, 1, (1,), (value("a"),), 1))
    assert (core.log[0].data == b"a") == (make is Paxos)
