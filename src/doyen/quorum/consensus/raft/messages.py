"""The messages of Raft, what each server keeps on disk, and the settings."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from doyen.errors import ConfigError
from doyen.quorum.consensus.core import LogEntry, Membership, Message, ProtocolSettings

HASTE_S = 0.03


class Ballot(Struct, frozen=True, array_like=True):
    """What a server keeps on disk besides its log."""

    generation: int = 0
    vote: str | None = None
    """The candidate that it voted for in this generation."""
    founders: Membership = Membership(())
    """The membership it was first started with. In force until the log or a snapshot holds one,
    whatever a later start says: two starts with two lists would make two majorities."""


class RaftSettings(ProtocolSettings, frozen=True, kw_only=True):
    """The times and bounds of Raft. One entry is always sent, however small a bound is."""

    haste_s: float = HASTE_S
    """The longest wait before the first pre-vote when the leader's connection ends. It doubles with
    each that fails, up to the election timeout."""
    message_entries: int = 1024
    window_messages: int = 128
    """Appends that may be sent to a peer without an answer."""
    window_bytes: int = 8 << 20
    tail_entries: int = 4096
    """Entries kept behind a snapshot, so that a server that is a little behind needs no
    snapshot."""
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
    """Would the receiver vote for the sender in this generation, which has not begun?"""

    last_index: int
    last_generation: int


class PreVoteReply(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Granted: in the generation asked about. Refused: in that of the sender."""

    granted: bool


class Vote(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A request for a vote. With `transfer`, the leader has asked the sender to campaign."""

    last_index: int
    last_generation: int
    transfer: bool = False


class VoteReply(Message, frozen=True, array_like=True, tag=True, gc=False):
    granted: bool


class Append(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Entries that follow the named one. One message may be sent to several peers."""

    previous_index: int
    previous_generation: int
    entries: tuple[LogEntry, ...]
    commit: int
    round: int
    durable: int = 0
    """The leader has its log on its own disk up to this entry."""


class AppendReply(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Accepted: everything up to `index` is on disk and is what the leader has. Rejected: there is
    no such entry at `index`, the one before the entries; the hint is where the logs may agree."""

    index: int
    rejected: bool = False
    hint_index: int = 0
    hint_generation: int = 0
    round: int = 0


class Heartbeat(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The sender leads. `commit` never exceeds what this peer has acknowledged. Without a round it
    only carries the commit index, and is not answered."""

    commit: int
    round: int
    durable: int = 0
    """As in `Append`."""


class HeartbeatReply(Message, frozen=True, array_like=True, tag=True, gc=False):
    round: int


class TimeoutNow(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Campaign at once: the leader transfers leadership to the receiver."""


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
