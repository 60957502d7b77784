"""What the servers of a Zab ensemble send, and what each keeps on disk.

A message's class name is its tag on connections, and `generation` is its first field. Imports
`core`.
"""

from __future__ import annotations

from msgspec import Struct

from doyen.quorum.consensus.common import Answer, Behind, Commit, Entries
from doyen.quorum.consensus.core import LogEntry, Message, Role


class ZabState(Struct, frozen=True, array_like=True):
    """What a server keeps on disk beside its history."""

    accepted_epoch: int = 0
    """The latest epoch that it has accepted from a prospective leader."""
    current_epoch: int = 0
    """The epoch whose leader's history is this server's history."""


class Notification(Message, frozen=True, gc=False):
    """A vote, in a round, of a server in this role. `generation` is its accepted epoch."""

    role: Role
    round: int
    leader: str
    epoch: int
    zxid_epoch: int
    zxid: int


class FollowerInfo(Message, frozen=True, gc=False):
    """The sender would follow the receiver; `generation` is its accepted epoch."""


class LeaderInfo(Message, frozen=True, gc=False):
    """The prospective leader opens this epoch."""


class AckEpoch(Message, frozen=True, gc=False):
    """The sender has accepted the epoch, and its history ends here."""

    counts: bool
    """False if it accepted the epoch before, perhaps from another leader."""
    current_epoch: int
    zxid_epoch: int
    zxid: int


class Sync(Message, frozen=True, gc=False):
    """A piece of the leader's history, which follows `previous`."""

    how: str
    previous: int
    previous_epoch: int
    entries: tuple[LogEntry, ...]


class Synced(Message, frozen=True, gc=False):
    """The histories may agree up to `last`; send what follows."""

    last: int


class NewLeader(Message, frozen=True, gc=False):
    """The end of the leader's history."""

    last: int
    last_epoch: int


class AckLeader(Message, frozen=True, gc=False):
    """The sender has the leader's history and the epoch on disk."""

    last: int


class UpToDate(Message, frozen=True, gc=False):
    """A majority has the leader's history: the receiver may serve."""

    commit: int


class Proposal(Entries, frozen=True, gc=False):
    """New transactions, the first of them at `first`."""


class Ack(Answer, frozen=True, gc=False):
    """The sender has everything up to `last` on disk."""


MESSAGES = (
    Notification
    | FollowerInfo
    | LeaderInfo
    | AckEpoch
    | Sync
    | Synced
    | NewLeader
    | AckLeader
    | UpToDate
    | Proposal
    | Ack
    | Commit
    | Behind
)
STATE = ZabState
