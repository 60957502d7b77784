"""Raft, with what it takes to operate a cluster.

    messages   what servers say, what each keeps on disk, settings
    log        entries by index, and how much of them is on disk
    progress   what a leader knows of one peer
    elector    what every server has, and how it comes by a leader
    server     the core: following, leading, committing, reading, handing over, changing

Elections go through a pre-vote, so that a server that was cut off comes back without deposing
anybody; a leader that hears no majority steps down; whoever hears a leader ignores the campaigns of
others. Reads wait for a round of answers, never for a clock. The membership changes by one server
at a time. See `server` for the rules and why each is there.
"""

from doyen.quorum.consensus.raft.messages import (
    MESSAGES,
    STATE,
    Append,
    AppendReply,
    Ballot,
    Heartbeat,
    HeartbeatReply,
    PreVote,
    PreVoteReply,
    RaftSettings,
    TimeoutNow,
    Vote,
    VoteReply,
)
from doyen.quorum.consensus.raft.server import Raft

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
    "Raft",
    "RaftSettings",
    "TimeoutNow",
    "Vote",
    "VoteReply",
]
