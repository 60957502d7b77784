"""Raft, with everything that operating a cluster needs.

    messages   the messages, what each server keeps on disk, the settings
    log        entries by index, and how much of them is on disk
    progress   what a leader knows of one peer
    elector    the state of every server, and the election
    server     the core: following, leading, committing, reading, transfers, changes of membership

Elections begin with a pre-vote, so that a server that was cut off rejoins without deposing the
leader; a leader that hears no majority steps down; a server that hears a leader ignores the
campaigns of others. Reads wait for a round of answers, never for a clock. The membership changes by
one server at a time. `server` states the rules and the reason for each.
"""

from doyen.quorum.consensus.raft.messages import MESSAGES, STATE, RaftSettings
from doyen.quorum.consensus.raft.server import Raft

__all__ = ["MESSAGES", "STATE", "Raft", "RaftSettings"]
