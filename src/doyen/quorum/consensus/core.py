"""The interface of every consensus core: events in, effects out.

A core is one server's part of a protocol: `handle(event, now)` changes its state and returns the
effects to carry out. Its caller passes a clock that never runs backwards, and never calls it from
two places at once.

    Received, Elapsed, Persisted,    ┌──────┐   Persist, Send, Committed, RoleChanged,
    Connected, Disconnected,    ───▶ │ core │ ───▶   Accepted, ProposalRefused, ReadReady, …
    Propose, ReadAsked, …            └──────┘

**Durability order is part of the effects.** `Persist` carries a token; tokens count up. A `Send`
whose `after` is a token may be sent only when everything up to that token is on disk; the driver
then sends it, and afterwards passes `Persisted(token)` to the core. The driver may delay effects
but never reorders them: what a core has sent is then as good as sent at the instant it was on disk,
whatever the core has done since. Votes and acknowledgements always wait, a server's own vote
included.

**Time.** `next_deadline` is the instant at which the core needs `Elapsed`; nothing ticks in
between. An early `Elapsed` has no effect.

**Peers** are names. Messages may be lost, repeated, reordered and late. `Disconnected` is a hint
that the peer's process may have died, never a proof; no safety property depends on it.

**Entries** are opaque. A driver puts everything proposed in one iteration of its loop into one
entry, so that a core's cost is per iteration, not per command. The index of an entry is its
position in the log, counted from 1; it is not stored in the entry.

**Construction** is the same for every protocol: `Making`. The module of a protocol also exports
`MESSAGES`, the union of its message types, and `STATE`, the type of its `Persist.state`, for
encoding and decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Any, Protocol

from msgspec import Struct


class Role(StrEnum):
    """The role of a server. A looking server serves nothing."""

    LOOKING = "looking"
    FOLLOWING = "following"
    LEADING = "leading"


class EntryKind(IntEnum):
    """What an entry contains."""

    NOTHING = 0
    """A leader's first entry. By committing it, the leader learns what is committed."""
    COMMANDS = 1
    MEMBERSHIP = 2
    """An encoded `Membership`, in force as soon as it is in the log."""


class LogEntry(Struct, frozen=True, array_like=True, gc=False):
    """One entry of the log."""

    generation: int
    kind: int
    data: bytes


class Membership(Struct, frozen=True, array_like=True):
    """The servers of a cluster. Learners receive everything and do not vote."""

    voters: tuple[str, ...]
    learners: tuple[str, ...] = ()
    addresses: Mapping[str, str] = {}
    """The address of each, for servers that join later. Not used by a core."""
    members: Mapping[str, str] = {}
    """The random id of each server's data directory, by name. A server that comes back with another
    one has lost its data. Not used by a core; empty until the cluster has recorded it."""
    cluster: str = ""
    """The random id of the cluster; empty until it has been recorded."""

    @property
    def majority(self) -> int:
        return len(self.voters) // 2 + 1

    @property
    def everyone(self) -> tuple[str, ...]:
        return self.voters + self.learners


class Snapshot(Struct, frozen=True, array_like=True):
    """What a snapshot stands for: every entry up to `index`, the last of which is of that
    generation, and the membership in force there."""

    index: int
    generation: int
    membership: Membership


class Position(Struct, frozen=True, array_like=True, gc=False):
    """How far a server has come: the generation that it has entered, and the last entry of its log.
    It never goes back, as long as the disk keeps what was written."""

    generation: int = 0
    last_generation: int = 0
    last_index: int = 0

    def covers(self, other: Position) -> bool:
        """Whether a server that was at `other` can be at this position now."""
        return self.generation >= other.generation and not self.behind(other)

    def behind(self, other: Position) -> bool:
        """Whether the other log is longer."""
        return (self.last_generation, self.last_index) < (other.last_generation, other.last_index)


class Message(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A message between servers. Each protocol has its own kinds, tagged by their class names. The
    connection identifies the sender."""

    generation: int


class Recovered(Struct, frozen=True):
    """What a server finds on its disk when it starts."""

    state: Any = None
    """The last `Persist.state`, a struct of the protocol's own; None at the first start."""
    snapshot: Snapshot | None = None
    entries: Sequence[LogEntry] = ()
    """The entries that follow the snapshot (or begin at 1)."""


# Events: what happens to a server.


class CoreEvent(Struct, frozen=True, gc=False):
    """An event."""


class Received(CoreEvent, frozen=True, gc=False):
    """A message of a peer."""

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
    """The other side closed or reset the connection: its process may be dead. Not passed for mere
    silence."""

    peer: str


class Propose(CoreEvent, frozen=True, gc=False):
    """Append this to the log, as one entry. Answered at once by `Accepted` or `ProposalRefused`."""

    data: bytes


class ReadAsked(CoreEvent, frozen=True, gc=False):
    """Determine up to which index the log must be applied for a linearizable read. Answered by
    `ReadReady` or `ReadRefused` with the same token, at once or later."""

    token: int


class TransferAsked(CoreEvent, frozen=True, gc=False):
    """Transfer leadership to `to` or, if empty, to the voter with the longest log that is not to be
    avoided. Answered at once by `TransferRefused` with the same token, if it is not begun; a
    transfer under way then goes on. Otherwise this replaces the one under way."""

    to: str = ""
    avoid: tuple[str, ...] = ()
    change: Membership | None = None
    """The successor is to make this change. Nothing is transferred if it would be refused because
    too few servers answer."""
    token: int = 0


class ChangeAsked(CoreEvent, frozen=True, gc=False):
    """Change the membership to this one, which differs in one server from that in force. Answered
    at once by `Accepted` or `ProposalRefused`."""

    membership: Membership


class Compacted(CoreEvent, frozen=True, gc=False):
    """A snapshot stands for everything up to its index; the log before may be dropped."""

    snapshot: Snapshot


class SnapshotSent(CoreEvent, frozen=True, gc=False):
    """The stream begun by `SendSnapshot` has ended: with `ok`, the peer has all of it on disk."""

    peer: str
    snapshot: Snapshot
    ok: bool


class SnapshotReceived(CoreEvent, frozen=True, gc=False):
    """A leader's snapshot has arrived completely and is on disk. Answered by `Install`, or by
    nothing if it is no longer needed."""

    peer: str
    generation: int
    snapshot: Snapshot


# Effects: what has to be done.


class Effect(Struct, frozen=True, gc=False):
    """Something that the driver has to carry out."""


class Persist(Effect, frozen=True, gc=False):
    """Write this to disk. `state`, if given, replaces the one before. `entries` begin at index
    `first`; unless `keep`, everything beyond them is cut off."""

    token: int
    state: Any = None
    first: int = 0
    entries: Sequence[LogEntry] = ()
    keep: bool = False


class Send(Effect, frozen=True, gc=False):
    """Send a message to a peer once everything up to `after` is on disk (0: at once)."""

    peer: str
    message: Message
    after: int = 0


class Committed(Effect, frozen=True, gc=False):
    """These entries, from index `first` on, are committed: apply them. In order, without gaps, each
    index once in the life of a core."""

    first: int
    entries: Sequence[LogEntry]


class RoleChanged(Effect, frozen=True, gc=False):
    """The role, the generation or the known leader has changed."""

    role: Role
    generation: int
    leader: str | None


class Accepted(Effect, frozen=True, gc=False):
    """The proposal is in the log at `index`. It is carried out if an entry of this generation is
    committed there, and never if one of another generation is."""

    index: int
    generation: int


class ProposalRefused(Effect, frozen=True, gc=False):
    """This server cannot do what was requested now, and has not done it."""

    reason: str


class ReadReady(Effect, frozen=True, gc=False):
    """A state machine that has applied the log up to `index` contains every write that was
    acknowledged before the read was requested."""

    token: int
    index: int


class ReadRefused(Effect, frozen=True, gc=False):
    """This server cannot answer the read: ask the leader."""

    token: int


class TransferRefused(Effect, frozen=True, gc=False):
    """What was asked for with this token was not begun."""

    token: int
    reason: str


class TransferFailed(Effect, frozen=True, gc=False):
    """The transfer that was under way has failed: this server leads on."""

    reason: str


class SendSnapshot(Effect, frozen=True, gc=False):
    """Stream the latest snapshot to the peer, in this generation; then pass `SnapshotSent`."""

    peer: str
    generation: int


class Install(Effect, frozen=True, gc=False):
    """Replace the state machine and the log by the snapshot: nothing before it is needed, and
    nothing beyond it is kept. The entries of a later `Committed` follow it."""

    snapshot: Snapshot
    token: int
    """Counts as a `Persist`: messages may wait for it."""


class Core(Protocol):
    """One server's part of a protocol."""

    id: str
    role: Role
    generation: int
    leader: str | None
    """The leader of this generation, as far as this server knows."""
    commit: int
    """The index up to which entries are known to be committed."""
    next_deadline: float
    """When to pass `Elapsed`; infinite if never."""
    membership: Membership
    """The membership in force: the latest, committed or not."""
    founders: Membership
    """The membership in force before the first entry of the log."""

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        """Process one event and return what has to be done, in order."""
        ...


class ProtocolSettings(Struct, frozen=True, kw_only=True):
    """Times and bounds of every protocol."""

    election_timeout_s: float = 1.0
    """How long a leader may be silent. Each timeout is drawn between this and 1.5 times as much."""
    heartbeat_s: float = 0.1
    message_bytes: int = 1 << 20
    """How much of the log goes into one message, unless a single entry is larger."""


class Making(Protocol):
    """How a core is made; usually the class itself."""

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
        """`membership` is the initial one; a later one on disk takes precedence. `jitter` returns
        numbers in [0, 1)."""
        ...
