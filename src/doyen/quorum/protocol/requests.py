"""The requests of a quorum's clients and the responses of its nodes.

Each is one struct in a frame of its own, of kind `REQUEST` or `ANSWER`: a msgpack array that begins
with an integer tag. Responses come in any order and carry the id of their request, which the client
chooses. Writes are numbered from 1 under the name given by `IdentifyClient`, and may be sent again,
to any node, under the same id (see `doyen.quorum.node.replicated`). All other requests have
negative ids and may be repeated because they change nothing.

The body of a write is an encoded command of the keyspace, and its result is an encoded result;
nodes forward both without decoding. Writes that are made together go in one frame, and so do their
results. Imports msgspec and the types of the keyspace and the core.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from doyen.quorum.consensus.core import Snapshot
from doyen.quorum.keyspace.commands import StoredEntry
from doyen.quorum.keyspace.versions import FIRST

REQUEST: Final = 32
ANSWER: Final = 33

MAX_KEY: Final = 4096
MAX_LEVELS: Final = 64
"""Parts of a key, between slashes. A change concerns a scope per part."""
MAX_VALUE: Final = 1_000_000
MAX_WRITES: Final = 256
"""Writes in one frame."""
MAX_LEASES: Final = 500
"""Leases of which one request reads what is left."""
MIN_TTL_S: Final = 0.5
MAX_TTL_S: Final = 366 * 86400.0


class Request(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A request of a client."""


class IdentifyClient(Request, frozen=True, gc=False, tag=0):
    """The name under which the writes that follow are numbered. Not answered."""

    client: str


Count = Annotated[int, Meta(ge=1, lt=2**62)]
"""Well below msgpack's limit, because nodes store these numbers and add to them."""


class Write(Request, frozen=True, gc=False, tag=1):
    """Carry out these commands, each once. → WriteResults, for some at a time, or Failed for
    one"""

    floor: Count
    """The client needs no results of writes below this id: it has them, or has given up."""
    ids: Annotated[list[Count], Meta(min_length=1, max_length=MAX_WRITES)]
    bodies: Annotated[list[bytes], Meta(max_length=MAX_WRITES)]


class Get(Request, frozen=True, gc=False, tag=2):
    """Read an entry. → FoundEntry"""

    id: int
    key: str


class Scan(Request, frozen=True, gc=False, tag=3):
    """List the entries below a prefix, as of one instant. → ListChunk, perhaps several"""

    id: int
    prefix: str


class Head(Request, frozen=True, gc=False, tag=4):
    """Read the first ticket of a line. → FoundEntry"""

    id: int
    line: str


class Ahead(Request, frozen=True, gc=False, tag=5):
    """Read the ticket before this one. → FoundEntry, or Failed if this one does not exist"""

    id: int
    ticket: str


class WatchRequest(Request, frozen=True, gc=False, tag=6):
    """Notify of changes in a scope. → WatchConfirmed, then WatchNotification for each change"""

    id: int
    scope: str
    since: int
    """The position of a watch that is resumed on a new connection: its client was notified of all
    changes up to this revision. Negative if the watch is new."""
    cluster: str = ""
    """The id of the cluster that this revision belongs to; empty if the client does not know it."""
    entry: bool = False
    """The scope is a key, and notifications may carry its entry. Earlier releases ignore this."""


class CancelWatch(Request, frozen=True, gc=False, tag=7):
    """End a watch. Not answered."""

    id: int


class RenewLease(Request, frozen=True, gc=False, tag=8):
    """Restart the ttl of a lease. → LeaseRenewed"""

    id: int
    lease: int


class StatusRequest(Request, frozen=True, gc=False, tag=9):
    """Read the status of this node. → NodeStatus"""

    id: int


class Administer(Request, frozen=True, gc=False, tag=10):
    """`add`, `promote` or `remove` a node, or `transfer` leadership to it. Has no effect if it is
    done already. → Administered"""

    id: int
    action: str
    node: str
    address: str = ""


class BackupRequest(Request, frozen=True, gc=False, tag=11):
    """Read the whole state, as of one instant, for a backup. → BackupChunk, several"""

    id: int


class LeaseTimesRequest(Request, frozen=True, gc=False, tag=12):
    """Read what is left of leases, on the clock of the leader. → LeaseTimes"""

    id: int
    leases: tuple[int, ...]
    """At most `MAX_LEASES`; more are not answered."""


class Response(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A response or a notification of a node."""


class WriteResults(Response, frozen=True, gc=False, tag=1):
    """The results of these writes."""

    ids: list[int]
    results: list[bytes]


class FoundEntry(Response, frozen=True, gc=False, tag=2):
    """The entry, or None if there is none."""

    id: int
    entry: StoredEntry | None


class ListChunk(Response, frozen=True, gc=False, tag=3):
    """Some of the listed entries, in order."""

    id: int
    entries: list[StoredEntry]
    more: bool
    """Whether other chunks follow."""


class WatchConfirmed(Response, frozen=True, gc=False, tag=4):
    """The watch has begun. If it is resumed, missed changes up to this revision were notified
    before; all later changes will be."""

    id: int
    revision: int


class WatchNotification(Response, frozen=True, gc=False, tag=5):
    """Something changed, or may have, in the scopes of these watches: read again. All watches
    confirmed on this connection have been notified of all changes up to this revision."""

    ids: list[int]
    revision: int
    entries: dict[int, StoredEntry] = {}
    """The entries of some watches that asked for theirs, as of this revision. At most about a MiB
    of them, so that the frame is well below `MAX_FRAME`: the client reads those left out."""


class LeaseRenewed(Response, frozen=True, gc=False, tag=6):
    """The lease's ttl was restarted by a leader that a majority confirmed after the request."""

    id: int


class ErrorCode(IntEnum):
    """Why a request failed."""

    UNAVAILABLE = 1
    """Not carried out; a retry may succeed."""
    UNKNOWN = 2
    """May have been carried out."""
    FORGOTTEN = 3
    """Not carried out: the quorum no longer remembers this client's writes, so the client needs
    another name."""
    LEASE_GONE = 4
    TICKET_GONE = 5
    UNUSABLE = 6
    """Not carried out; a retry is useless."""


class Failed(Response, frozen=True, gc=False, tag=7):
    """The request failed."""

    id: int
    code: ErrorCode
    text: str


class NodeStatus(Response, frozen=True, gc=False, tag=8):
    """The status of a node."""

    id: int
    node: str
    version: str
    role: str
    generation: int
    leader: str | None
    commit: int
    applied: int
    snapshot: int
    full: bool
    voters: tuple[str, ...]
    learners: tuple[str, ...]
    addresses: dict[str, str]
    revision: int
    keys: int
    leases: int
    clients: int
    watches: int
    election_s: float = 1.0
    """Its election timeout."""
    state: int = FIRST
    """The version of the replicated state; see `versions`."""
    bytes: int = 0
    """The size of the keyspace."""
    quota: int = 0
    """The limit on this size; 0 if the node does not send it."""
    alarm: bool = False
    """Whether a write was refused because of the quota, and there is still little room."""
    refused: dict[str, str] = {}
    """Members to which this node cannot connect because one of the two refuses, with the reason."""
    missing: tuple[str, ...] = ()
    """The nodes that this one waits for to found the cluster with it."""
    lease_times: bool = False
    """Whether it answers `LeaseTimesRequest`."""
    disk_free: int = 0
    """Bytes that are free on the disk of its data directory."""
    disk_bytes: int = 0
    """The size of this disk; 0 if that is not known."""
    sync_p99_s: float = 0.0
    """One sync of the log in a hundred took longer, since the node was started; 0 if not known."""


class Administered(Response, frozen=True, gc=False, tag=9):
    """The change is in effect."""

    id: int


class LeaseTimes(Response, frozen=True, gc=False, tag=11):
    """What is left of each lease in seconds; None if it has ended. Empty if the leader cannot tell.
    The leader has not asked a majority, so this is for people to look at."""

    id: int
    remaining_s: tuple[float | None, ...]


class BackupOrigin(Struct, frozen=True, array_like=True):
    """Where a backup was taken, and how far the log was applied."""

    cluster: str
    node: str
    protocol: str
    snapshot: Snapshot


class BackupChunk(Response, frozen=True, gc=False, tag=10):
    """A piece of a backup. The first has the origin and no data; the last has `more` false."""

    id: int
    origin: BackupOrigin | None
    piece: bytes
    more: bool


Requests = (
    IdentifyClient
    | Write
    | Get
    | Scan
    | Head
    | Ahead
    | WatchRequest
    | CancelWatch
    | RenewLease
    | StatusRequest
    | Administer
    | BackupRequest
    | LeaseTimesRequest
)
Answers = (
    WriteResults
    | FoundEntry
    | ListChunk
    | WatchConfirmed
    | WatchNotification
    | LeaseRenewed
    | Failed
    | NodeStatus
    | Administered
    | BackupChunk
    | LeaseTimes
)

decode_request: Callable[[bytes], Requests] = msgspec.msgpack.Decoder(Requests).decode
decode_answer: Callable[[bytes], Answers] = msgspec.msgpack.Decoder(Answers).decode
