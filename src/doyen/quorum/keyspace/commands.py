"""The commands of the keyspace and their results, as they stand in the log and on connections.

Both are msgpack arrays that begin with an integer tag. The tags and the order of the fields are
part of the log format: a field may only be added at the end, with a default, and a new command
needs a new version of the state (see `versions`). Imports msgspec and `etcd_requests`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Struct

from doyen.quorum.keyspace.etcd_requests import EtcdRefusal, EtcdRequests, EtcdResults

RANKS: Final = 2**63
"""A ticket's rank lies between -RANKS and RANKS, both excluded."""


class StoredEntry(Struct, frozen=True, array_like=True, gc=False):
    """An entry of the keyspace."""

    key: str
    value: bytes
    revision: int
    version: int
    lease: int = 0
    """The lease that it is bound to; 0 if none."""
    ticket: bool = False


class KeyspaceCommand(
    Struct, frozen=True, array_like=True, tag=True, gc=False, forbid_unknown_fields=True
):
    """A change to the keyspace. Unknown trailing fields are refused, because the depth of nesting
    that a decoder can skip depends on its stack, and would differ between nodes."""


class Grant(KeyspaceCommand, frozen=True, gc=False, tag=1):
    """Begin a lease. → LeaseGranted"""

    ttl_s: float


class Revoke(KeyspaceCommand, frozen=True, gc=False, tag=2):
    """End a lease, unless it has ended. → Done"""

    lease: int


class Create(KeyspaceCommand, frozen=True, gc=False, tag=3):
    """Create an entry that is bound to a lease. → Written, EntryExists, LargeEntryExists or
    LeaseNotFound"""

    key: str
    value: bytes
    lease: int


class Put(KeyspaceCommand, frozen=True, gc=False, tag=4):
    """Replace this version of an entry or, with version 0, create it. → Written or
    ConditionFailed"""

    key: str
    value: bytes
    if_version: int


class Delete(KeyspaceCommand, frozen=True, gc=False, tag=5):
    """Delete this version of an entry or, with version 0, any. → Done or ConditionFailed"""

    key: str
    if_version: int


class Enqueue(KeyspaceCommand, frozen=True, gc=False, tag=6):
    """Issue a ticket. → TicketIssued or LeaseNotFound"""

    line: str
    value: bytes
    lease: int
    rank: int


class BeginEra(KeyspaceCommand, frozen=True, gc=False, tag=7):
    """A leader begins its era, which must be later than the current one. → Done or
    ConditionFailed"""

    era: int


class Expire(KeyspaceCommand, frozen=True, gc=False, tag=8):
    """End leases whose ttl has passed. → Done, or ConditionFailed if the era is over"""

    era: int
    leases: tuple[int, ...]


class AdvanceRevision(KeyspaceCommand, frozen=True, gc=False, tag=9):
    """Raise the revision by `by`, and to `floor` at least, after a migration or a restore.
    → Done"""

    floor: int
    by: int = 0


class RaiseVersion(KeyspaceCommand, frozen=True, gc=False, tag=10):
    """Raise the version of the cluster, which all members support. → Done, or ConditionFailed if
    it is that high already"""

    version: int


class RemoveEndedKeys(KeyspaceCommand, frozen=True, gc=False, tag=11):
    """Remove the next slice of entries that were bound to ended leases. → Done"""


class SetQuota(KeyspaceCommand, frozen=True, gc=False, tag=12):
    """Limit the size of the keyspace. → Done"""

    bytes: int


class Update(KeyspaceCommand, frozen=True, gc=False, tag=13):
    """Replace the value of this version of an entry that is bound to a lease. → Written or
    ConditionFailed"""

    key: str
    value: bytes
    if_version: int


class EtcdApply(KeyspaceCommand, frozen=True, gc=False, tag=14):
    """Carry out a request to the etcd keyspace. → EtcdDone or EtcdRefused"""

    request: EtcdRequests


class EtcdGrant(KeyspaceCommand, frozen=True, gc=False, tag=15):
    """Begin a lease with an id of etcd. → EtcdDone or EtcdRefused"""

    lease: int
    ttl_s: float


class EtcdRevoke(KeyspaceCommand, frozen=True, gc=False, tag=16):
    """End a lease of etcd. → EtcdDone or EtcdRefused"""

    lease: int


class EtcdCompact(KeyspaceCommand, frozen=True, gc=False, tag=17):
    """Forget what the etcd keyspace had before a revision. → EtcdDone or EtcdRefused"""

    revision: int


Commands = (
    Grant
    | Revoke
    | Create
    | Put
    | Delete
    | Enqueue
    | BeginEra
    | Expire
    | AdvanceRevision
    | RaiseVersion
    | RemoveEndedKeys
    | SetQuota
    | Update
    | EtcdApply
    | EtcdGrant
    | EtcdRevoke
    | EtcdCompact
)


class Result(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The result of a command."""


class Done(Result, frozen=True, gc=False, tag=1):
    """The command was carried out."""


class ConditionFailed(Result, frozen=True, gc=False, tag=2):
    """The condition did not hold. Nothing was changed."""


class LeaseNotFound(Result, frozen=True, gc=False, tag=3):
    """The lease has ended. Nothing was changed."""


class LeaseGranted(Result, frozen=True, gc=False, tag=4):
    """A lease has begun."""

    lease: int


class Written(Result, frozen=True, gc=False, tag=5):
    """The entry was written."""

    revision: int
    version: int


class TicketIssued(Result, frozen=True, gc=False, tag=6):
    """The ticket was written at this key."""

    key: str
    revision: int


class EntryExists(Result, frozen=True, gc=False, tag=7):
    """The key is taken by this entry. Nothing was changed."""

    entry: StoredEntry


class MalformedCommand(Result, frozen=True, gc=False, tag=8):
    """The command cannot be understood. Nothing was changed."""

    reason: str


class QuotaExceeded(Result, frozen=True, gc=False, tag=9):
    """The quota has no room for the write. Nothing was changed."""

    bytes: int
    """The size of the keyspace."""
    quota: int


class LargeEntryExists(Result, frozen=True, gc=False, tag=10):
    """The key is taken by an entry that is too large for a result. Nothing was changed. Clients do
    not receive this: the node that serves the client reads the entry and sends `EntryExists`."""

    key: str


class EtcdDone(Result, frozen=True, gc=False, tag=11):
    """A request to the etcd keyspace was carried out."""

    revision: int
    """The revision of the etcd keyspace after it."""
    result: EtcdResults | None = None


class EtcdRefused(Result, frozen=True, gc=False, tag=12):
    """A request to the etcd keyspace was refused. Nothing was changed."""

    refusal: EtcdRefusal


Results = (
    Done
    | ConditionFailed
    | LeaseNotFound
    | LeaseGranted
    | Written
    | TicketIssued
    | EntryExists
    | MalformedCommand
    | QuotaExceeded
    | LargeEntryExists
    | EtcdDone
    | EtcdRefused
)

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
decode_command: Callable[[bytes], Commands] = msgspec.msgpack.Decoder(Commands).decode
decode_result: Callable[[bytes], Results] = msgspec.msgpack.Decoder(Results).decode
