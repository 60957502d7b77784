"""What clients ask of a quorum's nodes, and what those answer.

One struct a frame, `REQUEST` one way and `ANSWER` the other. Answers come in any order and name
their request by its id, which the client chooses: writes count up from 1 under the name of `Hello`
and may be sent again, to any node, under the same id (see `node.machine`); everything else has a
negative id, and may be repeated because it changes nothing.

A write's body is a command of the keyspace and its answer a result of it, both encoded; nodes pass
them on as they are. Writes that are asked for together go in one frame, and so do their results.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from doyen.quorum.consensus.core import Snapshot
from doyen.quorum.keyspace.state import StoredEntry
from doyen.quorum.keyspace.versions import FIRST

__all__ = [
    "ANSWER",
    "MAX_KEY",
    "MAX_LEVELS",
    "MAX_TTL_S",
    "MAX_VALUE",
    "MAX_WRITES",
    "MIN_TTL_S",
    "REQUEST",
    "Ahead",
    "Answers",
    "Arrange",
    "Arranged",
    "Changed",
    "Condition",
    "Copied",
    "Copy",
    "ErrorCode",
    "Failed",
    "FoundEntry",
    "Get",
    "Head",
    "Hello",
    "Inquire",
    "LeaseRenewed",
    "Listed",
    "Origin",
    "Renew",
    "Request",
    "Requests",
    "Response",
    "Scan",
    "Unwatch",
    "WatchRequest",
    "Watching",
    "Write",
    "Wrote",
    "decode_answer",
    "decode_request",
]

REQUEST: Final = 32
ANSWER: Final = 33

MAX_KEY: Final = 4096
MAX_LEVELS: Final = 64
"""Parts of a key, between slashes: a change concerns the scopes of all of them."""
MAX_VALUE: Final = 1_000_000
MAX_WRITES: Final = 256
"""In one frame."""
MIN_TTL_S: Final = 0.5
MAX_TTL_S: Final = 366 * 86400.0


class Request(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What a client asks."""


class Hello(Request, frozen=True, gc=False, tag=0):
    """Under which name the writes that follow are counted."""

    client: str


Count = Annotated[int, Meta(ge=1, lt=2**62)]
"""Far from where msgpack ends: nodes keep these, and count on from them."""


class Write(Request, frozen=True, gc=False, tag=1):
    """Carry out these commands, each once. → Wrote, for some at a time, or Failed for one"""

    floor: Count
    """The answers to all writes below this have been had, or are not wanted any more."""
    ids: Annotated[list[Count], Meta(min_length=1, max_length=MAX_WRITES)]
    bodies: Annotated[list[bytes], Meta(max_length=MAX_WRITES)]


class Get(Request, frozen=True, gc=False, tag=2):
    """→ Found"""

    id: int
    key: str


class Scan(Request, frozen=True, gc=False, tag=3):
    """Everything under a prefix, as it is at one instant. → Listed, perhaps several"""

    id: int
    prefix: str


class Head(Request, frozen=True, gc=False, tag=4):
    """→ Found"""

    id: int
    line: str


class Ahead(Request, frozen=True, gc=False, tag=5):
    """The ticket before this one. → Found, or Failed if it is gone"""

    id: int
    ticket: str


class WatchRequest(Request, frozen=True, gc=False, tag=6):
    """Tell of changes at a scope. → Watching, then Changed as often as it takes"""

    id: int
    scope: str
    since: int
    """The position of a watch that is resumed after a break: everything up to this revision has
    been told. Below 0 if the watch begins."""
    cluster: str = ""
    """The id of the cluster whose revision that is; empty if the client does not know it."""


class Unwatch(Request, frozen=True, gc=False, tag=7):
    """Tell no more. Not answered."""

    id: int


class Renew(Request, frozen=True, gc=False, tag=8):
    """Begin a lease's time anew. → Renewed"""

    id: int
    lease: int


class Inquire(Request, frozen=True, gc=False, tag=9):
    """How is this node? → Condition"""

    id: int


class Arrange(Request, frozen=True, gc=False, tag=10):
    """`add`, `promote`, `remove` a node, or `transfer` leadership to it. Harmless if it is so
    already. → Arranged"""

    id: int
    what: str
    node: str
    address: str = ""


class Copy(Request, frozen=True, gc=False, tag=11):
    """Everything, as it is at one instant, for a backup. → Copied, as often as it takes"""

    id: int


class Response(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What a node says."""


class Wrote(Response, frozen=True, gc=False, tag=1):
    """What became of these writes."""

    ids: list[int]
    results: list[bytes]


class FoundEntry(Response, frozen=True, gc=False, tag=2):
    """What stands there, if anything does."""

    id: int
    record: StoredEntry | None


class Listed(Response, frozen=True, gc=False, tag=3):
    """Some of what was asked for, in order; the last piece has no more to come."""

    id: int
    records: list[StoredEntry]
    more: bool


class Watching(Response, frozen=True, gc=False, tag=4):
    """The watch has begun. Everything up to this revision that a resumed watch had missed was told
    before this; nothing after it stays untold."""

    id: int
    revision: int


class Changed(Response, frozen=True, gc=False, tag=5):
    """Something changed, or may have, for these watches: read again. All changes up to this
    revision have been told to all watches that were confirmed on this connection."""

    ids: list[int]
    revision: int


class LeaseRenewed(Response, frozen=True, gc=False, tag=6):
    """The lease's time has begun anew, and a majority knew its leader after that was asked."""

    id: int


class ErrorCode(IntEnum):
    """Why something failed."""

    UNAVAILABLE = 1
    """Not done; trying again may help."""
    UNKNOWN = 2
    """Perhaps done."""
    FORGOTTEN = 3
    """Not done now; this client's count is not known any more. Another name is needed."""
    LEASE_GONE = 4
    TICKET_GONE = 5
    UNUSABLE = 6
    """Not done, and never will be."""


class Failed(Response, frozen=True, gc=False, tag=7):
    """The request failed."""

    id: int
    trouble: ErrorCode
    text: str


class Condition(Response, frozen=True, gc=False, tag=8):
    """How a node is doing."""

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
    """How long its leader may be silent."""
    state: int = FIRST
    """The version of the replicated state; see `versions`."""
    bytes: int = 0
    """The size of the keyspace."""
    quota: int = 0
    """How large it may become; 0 if the node does not say."""
    alarm: bool = False
    """Whether something was refused because of the quota, and there is still little room."""


class Arranged(Response, frozen=True, gc=False, tag=9):
    """It is so."""

    id: int


class Origin(Struct, frozen=True, array_like=True):
    """What a copy is a copy of: whose, and how far its log had been applied."""

    cluster: str
    node: str
    protocol: str
    snapshot: Snapshot


class Copied(Response, frozen=True, gc=False, tag=10):
    """A piece of a copy. The first has its origin and nothing else, the last no more to come."""

    id: int
    origin: Origin | None
    piece: bytes
    more: bool


Requests = (
    Hello
    | Write
    | Get
    | Scan
    | Head
    | Ahead
    | WatchRequest
    | Unwatch
    | Renew
    | Inquire
    | Arrange
    | Copy
)
Answers = (
    Wrote
    | FoundEntry
    | Listed
    | Watching
    | Changed
    | LeaseRenewed
    | Failed
    | Condition
    | Arranged
    | Copied
)

decode_request: Callable[[bytes], Requests] = msgspec.msgpack.Decoder(Requests).decode
decode_answer: Callable[[bytes], Answers] = msgspec.msgpack.Decoder(Answers).decode
