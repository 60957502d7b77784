"""What every consensus core takes in and gives out.

A core is one server's part of a protocol: `handle(event, now)` changes its state and returns what
has to be done about it. It is called with a clock that never runs backwards and never from two
places at once.

    Received, Elapsed, Persisted,    ┌──────┐   Persist, Send, Committed, RoleChanged,
    Connected, Disconnected,    ───▶ │ core │ ───▶   Accepted, Refused, ReadReady, …
    Proposed, ReadAsked, …           └──────┘

**Durability order is part of the effects.** `Persist` carries a token; tokens count up. A `Send`
whose `after` is a token may leave only when everything up to that token is on disk; the driver
then sends it, and afterwards tells the core `Persisted(token)`. Whoever carries effects out keeps
their order and may delay them, but never reorders them: what a core has said is then as good as
said at the instant it was on disk, whatever the core has done since. Votes and acknowledgements
always wait, a server's own vote included.

**Time.** `next_deadline` is the instant at which the core wants to hear `Elapsed`; nothing ticks
in between. `Elapsed` that comes early does nothing.

**Peers** are names. Messages may be lost, repeated, reordered and late. `Disconnected` is a hint
that the peer's process may have died, never a proof; no safety rests on it.

**Entries** are opaque. A driver puts everything proposed in one turn of its loop into one entry,
so that the cost of a core is per turn, not per command. The index of an entry is its place in the
log, counted from 1; it is not stored in it.

**Making one** is the same for every protocol: `Making`. A module of a protocol also exports
`MESSAGES`, the union of its message types, and `STATE`, the type of its `Persist.state`, for those
who write and read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Any, Protocol

from msgspec import Struct

__all__ = [
    "Accepted",
    "ChangeAsked",
    "Committed",
    "Compacted",
    "Connected",
    "Core",
    "CoreEvent",
    "Disconnected",
    "Effect",
    "Elapsed",
    "EntryKind",
    "Install",
    "LogEntry",
    "Making",
    "Membership",
    "Message",
    "Persist",
    "Persisted",
    "Position",
    "ProposalRefused",
    "Propose",
    "ProtocolSettings",
    "ReadAsked",
    "ReadReady",
    "ReadRefused",
    "Received",
    "Recovered",
    "Role",
    "RoleChanged",
    "Send",
    "SendSnapshot",
    "Snapshot",
    "SnapshotReceived",
    "SnapshotSent",
    "TransferAsked",
    "TransferFailed",
]


class Role(StrEnum):
    """What a server is doing. Nothing is served while it is looking."""

    LOOKING = "looking"
    FOLLOWING = "following"
    LEADING = "leading"


class EntryKind(IntEnum):
    """What an entry holds."""

    NOTHING = 0
    """A leader's first entry: by committing it, it learns what is committed."""
    COMMANDS = 1
    MEMBERSHIP = 2
    """An encoded `Membership`, in force as soon as it is in the log."""


class LogEntry(Struct, frozen=True, array_like=True, gc=False):
    """One place in the log."""

    generation: int
    kind: int
    data: bytes


class Membership(Struct, frozen=True, array_like=True):
    """Who counts. Learners get everything and count for nothing."""

    voters: tuple[str, ...]
    learners: tuple[str, ...] = ()
    addresses: Mapping[str, str] = {}
    """Where to reach each, for those who join later. Meaningless to a core."""
    members: Mapping[str, str] = {}
    """The random id of each server's data folder, by name. A server that comes back with another
    one has lost its data. Meaningless to a core; absent until the cluster has recorded it."""
    cluster: str = ""
    """The random id of the cluster; empty until it has been recorded."""

    @property
    def majority(self) -> int:
        return len(self.voters) // 2 + 1

    @property
    def everyone(self) -> tuple[str, ...]:
        return self.voters + self.learners


class Snapshot(Struct, frozen=True, array_like=True):
    """What a snapshot stands for: every entry up to `index`, the last of that generation, and the
    membership in force there."""

    index: int
    generation: int
    membership: Membership


class Position(Struct, frozen=True, array_like=True, gc=False):
    """How far a server has come: the generation that it has entered, and the last entry of its log.
    What is on disk never goes back, as long as the disk keeps it."""

    generation: int = 0
    last_generation: int = 0
    last_index: int = 0

    def covers(self, other: Position) -> bool:
        """Whether a server that was at `other` can be here now."""
        return self.generation >= other.generation and not self.behind(other)

    def behind(self, other: Position) -> bool:
        """Whether the other's log is further along."""
        return (self.last_generation, self.last_index) < (other.last_generation, other.last_index)


class Message(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What servers say to one another; each protocol has its own kinds, told apart by their
    names. The sender is known from whence it came."""

    generation: int


class Recovered(Struct, frozen=True):
    """What a server finds on its disk when it starts."""

    state: Any = None
    """The last `Persist.state`, a struct of the protocol's own; None at the very first start."""
    snapshot: Snapshot | None = None
    entries: Sequence[LogEntry] = ()
    """Those that follow the snapshot (or begin at 1)."""


# Events: what happens to a server.


class CoreEvent(Struct, frozen=True, gc=False):
    """Something that happened."""


class Received(CoreEvent, frozen=True, gc=False):
    """A message of a peer's."""

    peer: str
    message: Message


class Elapsed(CoreEvent, frozen=True, gc=False):
    """`next_deadline` has come."""


class Persisted(CoreEvent, frozen=True, gc=False):
    """Everything up to the `Persist` with this token is on disk."""

    token: int


class Connected(CoreEvent, frozen=True, gc=False):
    """The peer can be reached (again)."""

    peer: str


class Disconnected(CoreEvent, frozen=True, gc=False):
    """The connection to the peer has ended, by its end or a reset: its process may be dead. Never
    given for mere silence."""

    peer: str


class Propose(CoreEvent, frozen=True, gc=False):
    """Append these to the log, one entry. Answered at once by `Accepted` or `ProposalRefused`."""

    data: bytes


class ReadAsked(CoreEvent, frozen=True, gc=False):
    """Establish up to where one must have applied the log in order to read what is current.
    Answered by `ReadReady` or `ReadRefused` with the same token, sooner or later."""

    token: int


class TransferAsked(CoreEvent, frozen=True, gc=False):
    """Have `to` lead, or, if empty, whichever voter is furthest along and not to be avoided."""

    to: str = ""
    avoid: tuple[str, ...] = ()


class ChangeAsked(CoreEvent, frozen=True, gc=False):
    """Change the membership to this, which differs in one server from the one in force. Answered
    at once by `Accepted` or `ProposalRefused`."""

    membership: Membership


class Compacted(CoreEvent, frozen=True, gc=False):
    """A snapshot stands for everything up to its index; the log before may be forgotten."""

    snapshot: Snapshot


class SnapshotSent(CoreEvent, frozen=True, gc=False):
    """The stream begun by `SendSnapshot` has ended: with `ok`, the peer has all of it on disk."""

    peer: str
    snapshot: Snapshot
    ok: bool


class SnapshotReceived(CoreEvent, frozen=True, gc=False):
    """A leader's snapshot has arrived whole and is on disk. Answered by `Install`, or by nothing
    if it is of no use any more."""

    peer: str
    generation: int
    snapshot: Snapshot


# Effects: what has to be done.


class Effect(Struct, frozen=True, gc=False):
    """Something that the driver has to carry out."""


class Persist(Effect, frozen=True, gc=False):
    """Write this to disk. `state`, if given, replaces the one before. `entries` stand at `first`
    and after; unless `keep`, whatever stood beyond them is cut off."""

    token: int
    state: Any = None
    first: int = 0
    entries: Sequence[LogEntry] = ()
    keep: bool = False


class Send(Effect, frozen=True, gc=False):
    """Tell a peer, once everything up to `after` is on disk (0: at once)."""

    peer: str
    message: Message
    after: int = 0


class Committed(Effect, frozen=True, gc=False):
    """These entries, from index `first` on, will stand for ever: apply them. In order, no gaps,
    each index once in the life of a core."""

    first: int
    entries: Sequence[LogEntry]


class RoleChanged(Effect, frozen=True, gc=False):
    """The role, the generation or the leader known is another now."""

    role: Role
    generation: int
    leader: str | None


class Accepted(Effect, frozen=True, gc=False):
    """What was proposed stands in the log at `index`. It is carried out if an entry of this
    generation is committed there, and never if one of another is."""

    index: int
    generation: int


class ProposalRefused(Effect, frozen=True, gc=False):
    """What was asked for cannot be done by this server now, and was not."""

    reason: str


class ReadReady(Effect, frozen=True, gc=False):
    """Whoever has applied the log up to `index` sees every write that was acknowledged before the
    read was asked for."""

    token: int
    index: int


class ReadRefused(Effect, frozen=True, gc=False):
    """The read cannot be answered here: ask whoever leads."""

    token: int


class TransferFailed(Effect, frozen=True, gc=False):
    """Leadership stays here."""

    reason: str


class SendSnapshot(Effect, frozen=True, gc=False):
    """Stream the latest snapshot to the peer, in this generation's name; tell `SnapshotSent`."""

    peer: str
    generation: int


class Install(Effect, frozen=True, gc=False):
    """Put the state machine and the log in the snapshot's place: nothing before it is needed, and
    nothing beyond it is left. Then the entries of a later `Committed` follow."""

    snapshot: Snapshot
    token: int
    """Counts as a `Persist`: sends may wait for it."""


class Core(Protocol):
    """One server's part of a protocol."""

    id: str
    role: Role
    generation: int
    leader: str | None
    """Who leads in this generation, as far as this server knows."""
    commit: int
    """The index up to which entries are known to be committed."""
    next_deadline: float
    """When to tell `Elapsed`; infinite if never."""
    membership: Membership
    """The one in force: the latest there is, committed or not."""
    founders: Membership
    """The one in force before the first entry of the log."""

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        """Take in one event, and say what has to be done about it, in order."""
        ...


class ProtocolSettings(Struct, frozen=True, kw_only=True):
    """Times and bounds that every protocol has."""

    election_timeout_s: float = 1.0
    """Silence after which a leader is given up; drawn anew between this and half as much again."""
    heartbeat_s: float = 0.1
    message_bytes: int = 1 << 20
    """How much of the log goes into one message, unless a single entry is larger."""


class Making(Protocol):
    """How a core is made: the class itself, as a rule."""

    def __call__(
        self,
        id: str,  # noqa: A002  (the core's own word)
        membership: Membership,
        recovered: Recovered,
        *,
        settings: ProtocolSettings,
        jitter: Callable[[], float],
        now: float,
    ) -> Core:
        """`membership` is the one to begin with; a later one on disk prevails. `jitter` gives
        numbers in [0, 1)."""
        ...
