"""For the tests of Raft's rules: one server, in the role that the test needs."""

from __future__ import annotations

from doyen.quorum.consensus.core import (
    ChangeAsked,
    Effect,
    Elapsed,
    EntryKind,
    LogEntry,
    Membership,
    Message,
    Persisted,
    ProtocolSettings,
    Received,
    Recovered,
    Role,
    Send,
    Snapshot,
)
from doyen.quorum.consensus.raft import Raft, RaftSettings
from doyen.quorum.consensus.raft.messages import (
    AppendReply,
    Ballot,
    Heartbeat,
    PreVoteReply,
    VoteReply,
)

SNAPSHOT = Snapshot(5, 2, Membership(("a", "b", "c", "d")))
ABC = Membership(("a", "b", "c"))


def raft(
    name: str = "a",
    membership: Membership = ABC,
    recovered: Recovered | None = None,
    settings: ProtocolSettings | None = None,
) -> Raft:
    return Raft(
        name,
        membership,
        recovered or Recovered(),
        settings=settings or RaftSettings(),
        jitter=lambda: 0.5,
        now=0.0,
    )


def log(*generations: int) -> tuple[LogEntry, ...]:
    return tuple(LogEntry(generation, EntryKind.COMMANDS, b"x") for generation in generations)


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
        if voter != "a" and core._campaign is not None and core._campaign.pre_vote:
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


def change(core: Raft, voters: str, learners: str = "") -> list[Effect]:
    return core.handle(ChangeAsked(Membership(tuple(voters), tuple(learners))), 2.0)
