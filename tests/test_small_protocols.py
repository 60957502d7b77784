"""What the smaller protocols have in common: one suite for all four.

The lab runs them with random faults, from pinned seeds; this file and each one's own test single
steps.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import msgspec
import pytest

from doyen.errors import ConfigError
from doyen.lab.plan import draw
from doyen.lab.protocols import known
from doyen.lab.world import World
from doyen.quorum.consensus.core import (
    Accepted,
    ChangeAsked,
    Compacted,
    Connected,
    Disconnected,
    Elapsed,
    LogEntry,
    Membership,
    Persist,
    Persisted,
    ProposalRefused,
    Propose,
    ReadAsked,
    ReadReady,
    ReadRefused,
    Received,
    Recovered,
    Role,
    Snapshot,
    SnapshotReceived,
    SnapshotSent,
    TransferAsked,
    TransferRefused,
)
from doyen.quorum.consensus.invariants import facts
from room import SETTINGS, Room

NAMES = ("smallest-id", "zab", "viewstamped", "paxos")
THREE = ("n1", "n2", "n3")


def module(name: str) -> Any:
    return import_module(f"doyen.quorum.consensus.{name.replace('-', '_')}")


@pytest.fixture(params=NAMES)
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def room(protocol: str) -> Room:
    room = Room(known(protocol).make, THREE)
    room.start()
    room.run(2.0)
    return room


@pytest.mark.parametrize("seed", range(24))
def test_nothing_goes_wrong_when_everything_does(protocol: str, seed: int) -> None:
    outcome = World(draw(protocol, 3 + seed % 3, seed, for_s=10.0)).run()
    assert outcome.violations == []


def test_elects_and_replicates(room: Room) -> None:
    assert room.settled()
    for number in range(5):
        room.propose(b"%d" % number)
    room.run(0.5)
    assert room.settled()
    assert room.data("n3") == [b"0", b"1", b"2", b"3", b"4"]


def test_a_single_server_leads_and_waits_for_its_disk(protocol: str) -> None:
    room = Room(known(protocol).make, ["n1"], disk_s=0.05)
    room.start()
    room.run(1.0)
    assert room.leader() == "n1"
    room.propose(b"x")
    room.run(0.04)
    assert room.data("n1") == []
    room.run(0.02)
    assert room.data("n1") == [b"x"]
    room.read(1)
    assert ("n1", ReadReady(1, room.cores["n1"].commit)) in room.said


def test_a_dead_leader_is_replaced_and_nothing_committed_is_lost(room: Room) -> None:
    room.propose(b"a")
    room.run(0.5)
    first = room.leader()
    assert first is not None
    generation = room.cores[first].generation
    room.crash(first)
    room.run(2.5)
    assert room.settled()
    assert room.leader() != first
    assert room.cores[room.leader() or ""].generation > generation
    room.propose(b"b")
    room.run(0.5)
    room.start(first)
    room.run(2.0)
    assert room.settled()
    assert room.data(first) == [b"a", b"b"]


def test_a_crash_of_all_loses_nothing(room: Room) -> None:
    for number in range(3):
        room.propose(b"%d" % number)
        room.run(0.2)
    room.crash(*THREE)
    room.start()
    room.run(3.0)
    assert room.settled()
    assert room.data("n1") == [b"0", b"1", b"2"]


def test_a_leader_that_is_cut_off_steps_down_and_its_entries_go(room: Room) -> None:
    old = room.leader()
    assert old is not None
    room.cut(old)
    accepted = [effect for effect in room.propose(b"lost", old) if isinstance(effect, Accepted)]
    room.run(4.0)
    assert room.cores[old].role is Role.LOOKING
    room.propose(b"kept")
    room.run(0.5)
    room.cuts.clear()
    room.run(3.0)
    assert room.settled()
    assert room.data(old) == [b"kept"]
    index, generation = accepted[0].index, accepted[0].generation
    assert room.applied[old][index - 1].generation != generation


def test_a_server_that_was_cut_off_does_not_disturb_the_leader(room: Room) -> None:
    leader = room.leader()
    follower = next(name for name in THREE if name != leader)
    generation = room.cores[leader or ""].generation
    room.cut(follower)
    room.run(10.0)
    room.cuts.clear()
    room.run(2.0)
    assert room.settled()
    assert (room.leader(), room.cores[follower].generation) == (leader, generation)


def test_a_read_waits_for_a_majority(room: Room) -> None:
    room.propose(b"x")
    room.run(0.2)
    leader = room.leader() or ""
    room.read(1)
    room.run(0.1)
    assert (leader, ReadReady(1, room.cores[leader].commit)) in room.said
    room.cut(leader)
    room.read(2, leader)
    room.run(3.0)
    assert (leader, ReadRefused(2)) in room.said
    assert not any(isinstance(e, ReadReady) and e.token == 2 for _, e in room.said)


def test_answers_given_before_a_read_do_not_count(room: Room) -> None:
    """A round that has begun may have been answered before the read was requested."""
    leader = room.leader() or ""
    room.read(1)
    room.drop = lambda sender, to, message: True
    room.read(2)
    room.run(0.05)
    assert not any(isinstance(e, ReadReady) and e.token == 2 for _, e in room.said)
    room.drop = lambda sender, to, message: False
    room.run(0.3)
    assert any(isinstance(e, ReadReady) and e.token == 2 for n, e in room.said if n == leader)


def test_followers_refuse(room: Room) -> None:
    follower = next(name for name in THREE if name != room.leader())
    assert isinstance(room.propose(b"x", follower)[0], ProposalRefused)
    assert room.read(7, follower) == [ReadRefused(7)]


def test_what_the_protocol_cannot_do_is_refused_or_ignored(room: Room) -> None:
    snapshot = Snapshot(1, 1, room.membership)
    for name in THREE:
        assert isinstance(room.tell(name, TransferAsked("n2"))[0], TransferRefused)
        assert isinstance(room.tell(name, ChangeAsked(Membership(("n1",))))[0], ProposalRefused)
        assert room.tell(name, Compacted(snapshot)) == []
        assert room.tell(name, SnapshotSent("n2", snapshot, True)) == []
        assert room.tell(name, SnapshotReceived("n2", 1, snapshot)) == []


def make(protocol: str, voters: tuple[str, ...], recovered: Recovered | None = None) -> Any:
    return known(protocol).make(
        "n1",
        Membership(voters),
        recovered or Recovered(),
        settings=SETTINGS,
        jitter=lambda: 0.5,
        now=0.0,
    )


def test_what_cannot_work_is_refused_at_once(protocol: str) -> None:
    with pytest.raises(ConfigError, match="share an id: n2"):
        make(protocol, ("n1", "n2", "n2"))
    with pytest.raises(ConfigError, match="not among the voters"):
        make(protocol, ("n2", "n3"))
    with pytest.raises(ConfigError, match="snapshot"):
        make(protocol, THREE, Recovered(None, Snapshot(1, 1, Membership(THREE))))
    with pytest.raises(ConfigError, match="learners"):
        known(protocol).make(
            "n1",
            Membership(THREE, ("n4",)),
            Recovered(),
            settings=SETTINGS,
            jitter=lambda: 0.5,
            now=0.0,
        )


def test_a_late_disk_confirmation_does_not_cover_rewritten_entries(protocol: str) -> None:
    """The disk confirms a write of entries that have been cut off since (ABA)."""
    core = make(protocol, THREE)
    core.log.extend([LogEntry(1, 1, b"a"), LogEntry(1, 1, b"b")])
    first = core.log.write(first=1, entries=tuple(core.log))
    core.log.cut(1)
    core.log.append(LogEntry(2, 1, b"c"))
    second = core.log.write(first=2, entries=core.log[1:])
    core._effects.clear()
    core.handle(Persisted(first), 0.0)
    assert core.log.stable == 1
    core.handle(Persisted(second), 0.0)
    assert core.log.stable == 2


def kinds(protocol: str) -> list[type[msgspec.Struct]]:
    return list(module(protocol).MESSAGES.__args__)


def samples(kind: type[msgspec.Struct], generation: int) -> list[Any]:
    """Messages of this kind with a few values for each field."""
    values: dict[Any, list[Any]] = {
        int: [0, 1, 3],
        bool: [False, True],
        str: ["n1", "n2"],
        Role: list(Role),
        tuple[LogEntry, ...]: [(), (LogEntry(generation, 1, b"z"),)],
        tuple[int, ...]: [()],
    }
    fields = msgspec.structs.fields(kind)[1:]
    some = [values[field.type] for field in fields]
    found = [kind(generation, *choice) for choice in itertools.product(*some)]
    return [
        m
        for m in found
        if len(getattr(m, "ballots", ())) == len(getattr(m, "entries", ()))
        or not hasattr(m, "ballots")
    ]


@pytest.mark.parametrize("role", list(Role))
def test_every_message_in_every_role(protocol: str, role: Role) -> None:
    """Whatever arrives, late or early: nothing raises, and no invariant is broken."""
    for kind, ahead in itertools.product(kinds(protocol), (-1, 0, 1, 7)):
        room, name = in_role(protocol, role)
        core = room.cores[name]
        peers = [peer for peer in THREE if peer != name]
        # No protocol tolerates two leaders of one generation: only one of them may send.
        sender = core.leader if core.leader in peers else peers[0]
        for message in samples(kind, max(0, core.generation + ahead)):
            if ahead == 0 and role is Role.LEADING and not sent_to_leaders(kind):
                continue
            if not getattr(message, "entries", ()):
                room.tell(name, Received(sender, message))


def sent_to_leaders(kind: type[msgspec.Struct]) -> bool:
    """Whether a leader may receive this in its own generation."""
    return kind.__name__ not in (
        "Append",
        "LeaderInfo",
        "Sync",
        "NewLeader",
        "UpToDate",
        "Proposal",
        "Commit",
        "StartView",
        "NewState",
        "Prepare",
        "Accept",
        "Chosen",
    )


def in_role(protocol: str, role: Role) -> tuple[Room, str]:
    room = Room(known(protocol).make, THREE)
    if role is Role.LOOKING:
        room.start("n1")
        room.run(0.5)
        return room, "n1"
    room.start()
    room.run(2.0)
    leader = room.leader() or ""
    name = leader if role is Role.LEADING else next(n for n in THREE if n != leader)
    assert room.cores[name].role is role
    return room, name


@pytest.mark.parametrize("role", list(Role))
def test_messages_of_strangers_and_of_ones_own_name_are_ignored(protocol: str, role: Role) -> None:
    room, name = in_role(protocol, role)
    core = room.cores[name]
    before = facts(core)
    for kind in kinds(protocol):
        for message in samples(kind, core.generation + 1):
            for sender in (name, "stranger"):
                assert core.handle(Received(sender, message), room.now) == []
    assert facts(core) == before


@pytest.mark.parametrize("role", list(Role))
def test_other_events_in_every_role(protocol: str, role: Role) -> None:
    room, name = in_role(protocol, role)
    for event in (
        Elapsed(),
        Connected("n2"),
        Disconnected("stranger"),
        Persisted(0),
        Propose(b"x"),
        ReadAsked(1),
        Disconnected("n2"),
        Disconnected("n3"),
        Disconnected("n1"),
    ):
        room.tell(name, event)


def test_what_goes_over_the_wire_comes_out_the_same(protocol: str) -> None:
    decoder = msgspec.msgpack.Decoder(module(protocol).MESSAGES)
    for kind in kinds(protocol):
        for message in samples(kind, 5):
            assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_what_is_on_disk_comes_out_the_same(room: Room, protocol: str) -> None:
    states = [e.state for _, e in room.said if isinstance(e, Persist) and e.state is not None]
    decoder = msgspec.msgpack.Decoder(module(protocol).STATE)
    assert states
    for state in states:
        assert decoder.decode(msgspec.msgpack.encode(state)) == state


def test_early_elapsed_does_nothing(room: Room) -> None:
    for name in THREE:
        core = room.cores[name]
        assert core.next_deadline > room.now
        assert core.handle(Elapsed(), room.now) == []


def test_large_logs_go_in_pieces(protocol: str) -> None:
    settings = msgspec.structs.replace(SETTINGS, message_bytes=100)
    room = Room(known(protocol).make, THREE, settings=settings)
    room.start()
    room.run(2.0)
    leader = room.leader() or ""
    behind = next(name for name in THREE if name != leader)
    room.crash(behind)
    for number in range(40):
        room.propose(b"%03d" % number + b"." * 50)
    room.run(1.0)
    room.crash(leader, *[name for name in THREE if name not in (leader, behind)])
    room.start()
    room.run(5.0)
    assert room.settled()
    assert len(room.data(behind)) == 40
