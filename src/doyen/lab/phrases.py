"""What messages say, in words, and why votes are refused.

`phrase` gives the kind of a message: its name, its category, and a sentence with placeholders for
the fields. `reason` says why a server grants, refuses or ignores a request for a vote, from what
the server knew when the request arrived. Both serve readers only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from doyen.quorum.consensus.common import Answer, Commit, Entries
from doyen.quorum.consensus.core import Core, Message, Role

VOTES, ENTRIES, BEATS = "votes", "entries", "heartbeats"
"""The categories of messages."""
YES, NO = "granted", "refused"


class Phrase(NamedTuple):
    """The kind of a message."""

    name: str
    category: str
    tag: str
    """`granted` or `refused`, if it answers a request for a vote."""
    says: str
    """A sentence, with fields of the message in braces."""


_Phrases = Callable[[Any], tuple[str, str, str]]


def _votes(says: str) -> _Phrases:
    return lambda message: (VOTES, "", says)


def _beat(says: str) -> _Phrases:
    return lambda message: (BEATS, "", says)


def _entries(says: str) -> _Phrases:
    return lambda message: (ENTRIES, "", says)


def _granted(yes: str, no: str) -> _Phrases:
    return lambda message: (VOTES, YES, yes) if message.granted else (VOTES, NO, no)


def _append(message: Any) -> tuple[str, str, str]:
    if message.entries:
        return ENTRIES, "", "After entry {previous_index}: {entries}. Committed up to {commit}."
    return BEATS, "", "Does your log match mine up to entry {previous_index}?"


def _append_reply(message: Any) -> tuple[str, str, str]:
    if message.rejected:
        says = "My log does not match at entry {index}. It may match at entry {hint_index}."
        return ENTRIES, "", says
    return ENTRIES, "", "I have everything up to entry {index} on disk."


_KINDS: dict[str, _Phrases] = {
    "raft.PreVote": _votes(
        "Would you vote for me in generation {generation}? My log ends at entry {last_index} of"
        " generation {last_generation}."
    ),
    "raft.PreVoteReply": _granted(
        "I would vote for you in generation {generation}.",
        "I would not. I am in generation {generation}.",
    ),
    "raft.Vote": lambda message: (
        VOTES,
        "",
        "Vote for me in generation {generation}. My log ends at entry {last_index} of generation"
        " {last_generation}." + (" The leader asked me to stand." if message.transfer else ""),
    ),
    "raft.VoteReply": _granted(
        "You have my vote in generation {generation}.",
        "You do not have my vote. I am in generation {generation}.",
    ),
    "raft.Append": _append,
    "raft.AppendReply": _append_reply,
    "raft.Heartbeat": _beat("I lead generation {generation}. Committed up to entry {commit}."),
    "raft.HeartbeatReply": _beat("I hear you, in generation {generation}."),
    "raft.TimeoutNow": _votes("Stand for election at once: I hand over to you."),
    "zab.Notification": _votes(
        "I am {role}. In round {round} my vote is for {leader}, whose history ends at"
        " {zxid_epoch}:{zxid}."
    ),
    "zab.FollowerInfo": _votes("I would follow you. I have accepted epoch {generation}."),
    "zab.LeaderInfo": _votes("I open epoch {generation}."),
    "zab.AckEpoch": _votes("I accept epoch {generation}. My history ends at {zxid_epoch}:{zxid}."),
    "zab.Sync": _entries("A piece of my history, after entry {previous}: {entries}."),
    "zab.Synced": _entries("Our histories may agree up to entry {last}. Send what follows."),
    "zab.NewLeader": _votes("My history ends at entry {last}. Follow it in epoch {generation}."),
    "zab.AckLeader": _votes("I have your history up to entry {last} on disk."),
    "zab.UpToDate": _votes("A majority has my history. Serve; committed up to entry {commit}."),
    "viewstamped.StartViewChange": _votes("I miss the primary. Let view {generation} begin."),
    "viewstamped.DoViewChange": _votes(
        "I have entered view {generation}, which you lead. My log ends at operation {op}."
    ),
    "viewstamped.StartView": _votes("View {generation} has begun. Its log ends at {op}."),
    "viewstamped.GetState": _entries("Our logs may agree up to entry {agreed}. Send the rest."),
    "viewstamped.NewState": _entries("A piece of the log, after entry {previous}: {entries}."),
    "paxos.Doubt": _votes("I miss the leader. I have promised ballot {generation}."),
    "paxos.Prepare": _votes("Promise ballot {generation}. What have you accepted from {first} on?"),
    "paxos.Promise": _votes("I promise ballot {generation}. My last slot is {last}."),
    "smallest-id.Looking": _votes(
        "I have no leader. My log ends at entry {last} of generation {last_generation}."
    ),
    "smallest-id.Stand": _votes(
        "Vote for me in generation {generation}. My log ends at entry {last} of generation"
        " {last_generation}."
    ),
    "smallest-id.Vote": _granted(
        "You have my vote in generation {generation}.",
        "You do not have my vote. I am in generation {generation}.",
    ),
    "smallest-id.Append": lambda message: (
        (ENTRIES, "", "After entry {previous}: {entries}. Committed up to {commit}.")
        if message.entries
        else (BEATS, "", "I lead generation {generation}. Committed up to entry {commit}.")
    ),
    "smallest-id.Missing": _entries("Your entries do not follow my log: begin after {last}."),
    "Behind": _entries("I lack what follows entry {last}."),
    "Later": _votes("I am in generation {generation}, which is later than yours."),
}


def phrase(protocol: str, message: Message) -> Phrase:
    """The kind of a message of a protocol."""
    name = type(message).__name__
    make = _KINDS.get(f"{protocol}.{name}") or _KINDS.get(name) or _by_class(type(message))
    return Phrase(_spaced(name), *make(message))


def _by_class(kind: type) -> _Phrases:
    """The phrase for a message that has none of its own."""
    if issubclass(kind, Answer):
        return _entries("I have everything up to entry {last} on disk.")
    if issubclass(kind, Commit):
        return _beat("I lead generation {generation}. Committed up to entry {commit}.")
    if issubclass(kind, Entries):
        return _entries("{entries}. Committed up to {commit}.")
    text = " ".join((kind.__doc__ or "").split()).replace("{", "(").replace("}", ")")
    return _votes(text.partition(". ")[0].rstrip(".") + ".")


@cache
def _spaced(name: str) -> str:
    """The name of a class as words.

    >>> _spaced("PreVoteReply")
    'pre vote reply'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


@cache
def _placeholders(says: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\{(\w+)\}", says))


def values(says: str, message: Message) -> list[int | str]:
    """The values for the placeholders of a sentence, in their order."""
    return [_value(message, name) for name in _placeholders(says)]


def _value(message: Message, name: str) -> int | str:
    if name == "entries":
        first = next(
            getattr(message, field) + more
            for field, more in (("previous_index", 1), ("previous", 1), ("first", 0))
            if hasattr(message, field)
        )
        return entries_text(range(first, first + len(getattr(message, "entries", ()))))
    value = getattr(message, name)
    return value if type(value) is int else str(value)


def entries_text(indices: range) -> str:
    """The indices of entries as a reader names them.

    >>> entries_text(range(4, 5)), entries_text(range(4, 8))
    ('entry 4', 'entries 4 to 7')
    """
    if len(indices) == 1:
        return f"entry {indices[0]}"
    return f"entries {indices[0]} to {indices[-1]}" if indices else "no entries"


# Votes.


class VoterView(NamedTuple):
    """What decides about the vote of a server."""

    name: str
    generation: int
    vote: str | None
    leader: str | None
    leads: bool
    last_generation: int
    last: int


def voter_view(core: Core) -> VoterView:
    """The view of a server now."""
    log: Any = getattr(core, "log", None)
    if hasattr(log, "last_generation"):
        position = log.last_generation, log.last
    elif hasattr(log, "position"):
        position = log.position()
    else:
        position = 0, 0
    vote = getattr(core, "vote", None)
    return VoterView(
        core.id, core.generation, vote, core.leader, core.role is Role.LEADING, *position
    )


_REQUESTS = {"PreVote": ("last_generation", "last_index"), "Stand": ("last_generation", "last")}
_REQUESTS["Vote"] = _REQUESTS["PreVote"]


def asks_for_vote(message: Message) -> bool:
    """Whether a message asks its receiver for a vote, now or for later."""
    return type(message).__name__ in _REQUESTS and not hasattr(message, "granted")


def reason(before: VoterView, peer: str, request: Message, answer: Message | None) -> str:
    """Why a request for a vote was granted, refused or ignored."""
    me = before.name
    theirs = tuple(getattr(request, field) for field in _REQUESTS[type(request).__name__])
    mine = before.last_generation, before.last
    logs = (
        f"{me}'s log ends at entry {mine[1]} of generation {mine[0]}, {peer}'s at entry"
        f" {theirs[1]} of generation {theirs[0]}."
    )
    if answer is not None and getattr(answer, "granted", False):
        if theirs < mine:
            return f"{logs} The rule is to refuse such a candidate; this server does not."
        return f"{peer}'s log is at least as long as {me}'s, and {me} had a vote to give."
    if before.leads:
        return f"{me} leads generation {before.generation} itself."
    if request.generation < before.generation:
        return f"{me} is in generation {before.generation}, which is later."
    if theirs < mine:
        return (
            f"{logs} A vote goes only to a log that is at least as long; otherwise something"
            " committed could be lost."
        )
    if before.vote not in (None, peer) and request.generation == before.generation:
        whom = "itself" if before.vote == me else before.vote
        return f"{me} has given its vote of generation {before.generation} to {whom}."
    if before.leader is not None:
        return f"{me} hears {before.leader}, which leads generation {before.generation}."
    return ""


def names_in(text: str, names: Iterable[str]) -> list[str]:
    """Which of these names a text contains, as words.

    >>> names_in("n1 leads, n10 does not", ["n1", "n2", "n10"])
    ['n1', 'n10']
    """
    return [name for name in names if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]
