"""What Raft servers say to one another, what each keeps on disk, and what it is tuned by."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from doyen.errors import ConfigError
from doyen.quorum.consensus.core import LogEntry, Membership, Message, ProtocolSettings

__all__ = [
    "MESSAGES",
    "STATE",
    "Append",
    "AppendReply",
    "Ballot",
    "Heartbeat",
    "HeartbeatReply",
    "PreVote",
    "PreVoteReply",
    "RaftSettings",
    "TimeoutNow",
    "Vote",
    "VoteReply",
]

HASTE_S = 0.03


class Ballot(Struct, frozen=True, array_like=True):
    """What a server must never forget, besides its log."""

    generation: int = 0
    vote: str | None = None
    """Whom it voted for in this generation."""
    founders: Membership = Membership(())
    """The membership it was first started with. In force until the log or a snapshot holds one,
    whatever a later start says: two starts with two lists would make two majorities."""


class RaftSettings(ProtocolSettings, frozen=True, kw_only=True):
    """The times and bounds of Raft. However small a bound, one entry always goes."""

    haste_s: float = HASTE_S
    """The longest wait before the first pre-vote when the leader's connection ends; it doubles
    with each one that fails, up to the election timeout."""
    message_entries: int = 1024
    window_messages: int = 128
    """Appends sent to a peer and not yet answered."""
    window_bytes: int = 8 << 20
    tail_entries: int = 4096
    """Entries kept behind a snapshot, so that whoever is a little behind needs no snapshot."""
    tail_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s < self.election_timeout_s:
            raise ConfigError(
                f"heartbeat_s={self.heartbeat_s:g} must be positive and below election_timeout_s="
                f"{self.election_timeout_s:g}: a follower has to hear several in that time"
            )
        if not 0 < self.haste_s <= self.election_timeout_s:
            raise ConfigError(
                f"haste_s={self.haste_s:g} must be positive and at most election_timeout_s="
                f"{self.election_timeout_s:g}"
            )


class PreVote(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Would you vote for me in this generation, which I have not begun?"""

    last_index: int
    last_generation: int


class PreVoteReply(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Granted: in the generation asked about. Refused: in that of whoever answers."""

    granted: bool


class Vote(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Vote for me. With `transfer`, the leader itself wants it so."""

    last_index: int
    last_generation: int
    transfer: bool = False


class VoteReply(Message, frozen=True, array_like=True, tag=True, gc=False):
    granted: bool


class Append(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A leader's entries, which follow the one named. One message may go to several peers."""

    previous_index: int
    previous_generation: int
    entries: tuple[LogEntry, ...]
    commit: int
    round: int
    durable: int = 0
    """Up to this entry, the leader has its log on its own disk."""


class AppendReply(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Accepted: everything up to `index` is on disk and is what the leader has. Rejected: there
    is no such entry at `index`, the one before the entries; the hint says where the logs may
    meet."""

    index: int
    rejected: bool = False
    hint_index: int = 0
    hint_generation: int = 0
    round: int = 0


class Heartbeat(Message, frozen=True, array_like=True, tag=True, gc=False):
    """I lead. `commit` never goes beyond what this peer has acknowledged. Without a round it
    only tells the commit, and wants no answer."""

    commit: int
    round: int
    durable: int = 0
    """As in `Append`."""


class HeartbeatReply(Message, frozen=True, array_like=True, tag=True, gc=False):
    round: int


class TimeoutNow(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Stand for election at once: whoever leads wants you to lead."""


MESSAGES: TypeAlias = (
    PreVote
    | PreVoteReply
    | Vote
    | VoteReply
    | Append
    | AppendReply
    | Heartbeat
    | HeartbeatReply
    | TimeoutNow
)
STATE = Ballot
