"""Raft: impossible events are refused by name; every role handles every event and every message."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from doyen.errors import ConfigError
from doyen.quorum.consensus.core import (
    Accepted,
    ChangeAsked,
    Compacted,
    Connected,
    CoreEvent,
    Disconnected,
    Effect,
    Elapsed,
    EntryKind,
    LogEntry,
    Membership,
    Message,
    Persisted,
    ProposalRefused,
    Propose,
    ProtocolSettings,
    ReadAsked,
    Received,
    Role,
    RoleChanged,
    Snapshot,
    SnapshotReceived,
    SnapshotSent,
    TransferAsked,
)
from doyen.quorum.consensus.invariants import (
    IllegalEvent,
    InvariantBroken,
    check,
    check_step,
    facts,
)
from doyen.quorum.consensus.raft import MESSAGES, STATE, Raft, RaftSettings
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
from raft_kit import ABC, SNAPSHOT, change, following, hear, leading, log, raft, recovered, sends


class Foreign(Message, frozen=True, array_like=True, tag=True, gc=False):
    pass


@pytest.mark.parametrize(
    "event",
    [
        CoreEvent(),
        Received("b", Foreign(1)),
        Received("a", Heartbeat(1, 0, 1)),
        Persisted(1),
        Persisted(-1),
        Compacted(SNAPSHOT),
    ],
    ids=["event", "message", "self", "token not issued", "token gone by", "snapshot of nothing"],
)
def test_illegal_events_are_named(event: CoreEvent) -> None:
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


def test_a_disk_that_lost_synced_data_is_named() -> None:
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
        raft(settings=ProtocolSettings(election_timeout_s=0.02, heartbeat_s=0.005)).settings.haste_s
        == 0.02
    )


def test_messages_and_state_survive_the_wire() -> None:
    entry = LogEntry(1, EntryKind.COMMANDS, b"x")
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


EVENTS: list[CoreEvent] = [
    Elapsed(),
    Connected("b"),
    Connected("z"),
    Disconnected("b"),
    Disconnected("z"),
    Propose(b"x"),
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


def answered_at_once(event: CoreEvent, effects: list[Effect]) -> bool:
    kinds = {type(effect) for effect in effects}
    if isinstance(event, Propose | ChangeAsked):
        return len(kinds & {Accepted, ProposalRefused}) == 1
    return True


def reported(effects: list[Effect], before: tuple[Role, int, str | None], core: Raft) -> bool:
    """A change of role is emitted once, first; without a change, not at all."""
    after = (core.role, core.generation, core.leader)
    changes = [e for e in effects if isinstance(e, RoleChanged)]
    if before == after:
        return not changes
    return changes == [RoleChanged(*after)] == [effects[0]]


@pytest.mark.parametrize("make", ROLES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_every_role_and_event(make: Callable[[], Raft], event: CoreEvent) -> None:
    core = make()
    now = max(core._now, 2.0)
    if isinstance(event, Elapsed):
        now = max(now, min(core.next_deadline, 100.0))
    before = facts(core)
    effects = core.handle(event, now)
    check(core)
    check_step(before, core)
    assert answered_at_once(event, effects)
    assert reported(effects, (before.role, before.generation, before.leader), core)
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
        content = core._hears_leader()
        try:
            effects = hear(core, message, "b", core._now)
        except InvariantBroken:
            # A leader cannot receive messages of another leader of its own generation.
            assert shift == 0
            assert before.role is Role.LEADING
            assert isinstance(message, Append | Heartbeat)
            continue
        check(core)
        check_step(before, core)
        assert reported(effects, (before.role, before.generation, before.leader), core)
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
                # A granted pre-vote may be the one that lets this server campaign.
                assert core.generation in (before.generation, before.generation + 1)
            elif isinstance(message, TimeoutNow):
                assert core.generation in (generation, generation + 1)
            else:
                assert core.generation == (before.generation if ignored else generation)
