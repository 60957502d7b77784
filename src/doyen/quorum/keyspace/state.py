"""The keyspace: the replicated state machine that makes a quorum of nodes a Store.

Commands go in as bytes, in the order the quorum agreed on; results come out as bytes, so that
nodes keep and forward them without looking inside. The same commands give the same results and
the same state on every node: nothing here looks at a clock, rolls dice or iterates over a set.
What a command means may depend on the cluster's version (see `versions`), which is part of the
state. A command that this release does not know raises `UnknownCommand`: a node that skipped it
would differ from the others from then on.

Invariants:

- One counter numbers whatever changes. It never goes back, so neither do revisions, versions,
  ticket keys and lease ids, which are all taken from it.
- Keys are sorted, and a ticket's key sorts as the ticket stands in its line.
- Whatever is bound to a lease is listed under it, and counts as absent from the step that ends the
  lease. From version 2 on it is removed in slices of at most `SLICE` keys: the first by that step,
  the others by `Reap` commands, each at a revision of its own, in the order in which the keys were
  bound. A slice removes a key only if what stands there is still bound to the ended lease.
- A lease is ended by its time only if the leader says so *in its own era*. Each leader begins an
  era before it confirms any renewal; so an `Expire` that an earlier leader proposed, and that
  comes late, ends nothing that has been renewed since.

Reads are plain methods, for whoever knows that this node is up to date. Imports msgspec, the error
tree, `history`, `ordered` and `versions`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import Struct

from doyen.errors import StoreUnusable
from doyen.quorum.keyspace.history import Change, ChangeKind, History
from doyen.quorum.keyspace.ordered import Block, Ordered
from doyen.quorum.keyspace.versions import FIRST, NEWEST

__all__ = [
    "Advance",
    "Begin",
    "ConditionFailed",
    "Create",
    "Delete",
    "Done",
    "Enqueue",
    "Expire",
    "Full",
    "Gone",
    "Grant",
    "Keyspace",
    "KeyspaceCommand",
    "LeaseGranted",
    "Malformed",
    "Put",
    "Quota",
    "Raise",
    "Reap",
    "Result",
    "Revoke",
    "Stands",
    "StoredEntry",
    "Ticketed",
    "UnknownCommand",
    "Written",
    "decode_command",
    "decode_result",
    "encode",
]

RANKS: Final = 2**63
SLICE: Final = 500
"""How many keys of ended leases one command removes at most. Changing it needs a new version."""
OVERHEAD: Final = 128
"""Bytes that a record or a lease takes, apart from key and value, in the count that the quota
bounds. Changing it needs a new version."""
QUOTA: Final = 1 << 30
"""The quota of a cluster in which no leader has set another."""
PIECE: Final = 2**18
"""About how many bytes a piece of a snapshot has."""
MANY: Final = 2**12
"""How many leases or changes a piece of a snapshot has."""
FORMATS: Final = (1, 2)
"""Of snapshots: of version 1 of the state, and of all later ones."""


class UnknownCommand(StoreUnusable):
    """The log holds a command that this release of doyen does not know."""


class StoredEntry(Struct, frozen=True, array_like=True, gc=False):
    """What stands at a key."""

    key: str
    value: bytes
    revision: int
    version: int
    lease: int = 0
    """The lease it is bound to; 0 if none."""
    ticket: bool = False


class KeyspaceCommand(
    Struct, frozen=True, array_like=True, tag=True, gc=False, forbid_unknown_fields=True
):
    """What can be done to a keyspace. Has nothing behind its fields: how deep a nest of lists could
    be skipped there depends on the stack, and so on the node."""


class Grant(KeyspaceCommand, frozen=True, gc=False, tag=1):
    """Begin a lease. → Granted"""

    ttl_s: float


class Revoke(KeyspaceCommand, frozen=True, gc=False, tag=2):
    """End a lease, if it has not ended. → Done"""

    lease: int


class Create(KeyspaceCommand, frozen=True, gc=False, tag=3):
    """Write where nothing stands, bound to a lease. → Written, Stands or Gone"""

    key: str
    value: bytes
    lease: int


class Put(KeyspaceCommand, frozen=True, gc=False, tag=4):
    """Write over this version, or, with 0, where nothing stands. → Written or Refused"""

    key: str
    value: bytes
    if_version: int


class Delete(KeyspaceCommand, frozen=True, gc=False, tag=5):
    """Delete what stands there, with this version unless 0. → Done or Refused"""

    key: str
    if_version: int


class Enqueue(KeyspaceCommand, frozen=True, gc=False, tag=6):
    """Take a ticket. → Ticketed or Gone"""

    line: str
    value: bytes
    lease: int
    rank: int


class Begin(KeyspaceCommand, frozen=True, gc=False, tag=7):
    """A leader begins its era, which is later than every other. → Done or Refused"""

    era: int


class Expire(KeyspaceCommand, frozen=True, gc=False, tag=8):
    """The time of these leases is over. → Done, or Refused if the era is over"""

    era: int
    leases: tuple[int, ...]


class Advance(KeyspaceCommand, frozen=True, gc=False, tag=9):
    """Go on counting above this, and at least so much further on, after a move or a restore.
    → Done"""

    floor: int
    by: int = 0


class Raise(KeyspaceCommand, frozen=True, gc=False, tag=10):
    """All members support this version: it is the cluster's from now on. → Done, or Refused if it
    has been"""

    version: int


class Reap(KeyspaceCommand, frozen=True, gc=False, tag=11):
    """Remove the next slice of what was bound to ended leases. → Done"""


class Quota(KeyspaceCommand, frozen=True, gc=False, tag=12):
    """Bound the size of the keyspace. → Done"""

    bytes: int


Commands = (
    Grant
    | Revoke
    | Create
    | Put
    | Delete
    | Enqueue
    | Begin
    | Expire
    | Advance
    | Raise
    | Reap
    | Quota
)


class Result(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What became of a command."""


class Done(Result, frozen=True, gc=False, tag=1):
    """Nothing more to say."""


class ConditionFailed(Result, frozen=True, gc=False, tag=2):
    """The condition did not hold, and nothing was done."""


class Gone(Result, frozen=True, gc=False, tag=3):
    """The lease has ended, and nothing was done."""


class LeaseGranted(Result, frozen=True, gc=False, tag=4):
    """A lease has begun."""

    lease: int


class Written(Result, frozen=True, gc=False, tag=5):
    """The entry stands."""

    revision: int
    version: int


class Ticketed(Result, frozen=True, gc=False, tag=6):
    """The ticket stands at this key."""

    key: str
    revision: int


class Stands(Result, frozen=True, gc=False, tag=7):
    """Something else stands there, and was left alone."""

    record: StoredEntry


class Malformed(Result, frozen=True, gc=False, tag=8):
    """This is no command of the keyspace, and nothing was done."""

    reason: str


class Full(Result, frozen=True, gc=False, tag=9):
    """There is no room for it within the quota, and nothing was done."""

    bytes: int
    """The size of the keyspace."""
    quota: int


Results = (
    Done | ConditionFailed | Gone | LeaseGranted | Written | Ticketed | Stands | Malformed | Full
)

_encoder = msgspec.msgpack.Encoder()
encode: Callable[[Any], bytes] = _encoder.encode
decode_command: Callable[[bytes], Commands] = msgspec.msgpack.Decoder(Commands).decode
decode_result: Callable[[bytes], Results] = msgspec.msgpack.Decoder(Results).decode

_PUT = ChangeKind.PUT
_DONE, _REFUSED, _GONE = encode(Done()), encode(ConditionFailed()), encode(Gone())


class _Held(Struct, gc=False):
    """A lease, and the keys bound to it."""

    ttl_s: float
    keys: dict[str, None]


class _Head(Struct, frozen=True, array_like=True, tag=0):
    """A snapshot's first piece. Format 1 ends with the era."""

    format: int
    counter: int
    era: int
    version: int = FIRST
    floor: int = 0
    """Of the history."""
    quota: int = QUOTA
    alarm: bool = False


class _Leases(Struct, frozen=True, array_like=True, tag=1):
    """A piece of leases, in order."""

    leases: list[int]
    ttls: list[float]


class _Records(Struct, frozen=True, array_like=True, tag=2):
    """A piece of records, in order, after all leases."""

    records: list[StoredEntry]


class _Ended(Struct, frozen=True, array_like=True, tag=3):
    """Leases that have ended and whose keys are not all removed, in the order of their ends."""

    leases: list[int]


class _Changes(Struct, frozen=True, array_like=True, tag=4):
    """A piece of the history, after all records, oldest first."""

    changes: list[Change]


_Piece = _Head | _Leases | _Records | _Ended | _Changes
_decode_piece: Callable[[bytes], _Piece] = msgspec.msgpack.Decoder(_Piece).decode


class Keyspace:
    """The state, and everything that can be done to it.

    >>> keyspace = Keyspace()
    >>> lease = decode_result(keyspace.apply(encode(Grant(5.0)))).lease
    >>> decode_result(keyspace.apply(encode(Create("elections/e/leader", b"me", lease))))
    Written(revision=2, version=2)
    >>> keyspace.apply(encode(Revoke(lease))) == encode(Done())
    True
    >>> keyspace.get("elections/e/leader") is None
    True
    """

    def __init__(
        self, version: int = NEWEST, *, slice_keys: int | None = None, history: int | None = None
    ) -> None:
        """Empty. A node's begins at version `FIRST`: the log says when it was raised. Smaller
        slices and histories than the usual ones are for simulations; all nodes have the same."""
        self._slice_keys = SLICE if slice_keys is None else slice_keys
        self._history_changes = history
        self.revision = 0
        """The number of the last change."""
        self.era = 0
        """The last one that a leader began."""
        self.version = version
        """The cluster's; see `versions`."""
        self.history = History(most=history)
        """The latest changes. From version 2 on it is the same on every node."""
        self.bytes = 0
        """The size of everything, as the quota counts it."""
        self.quota = QUOTA
        self.alarm = False
        """Something was refused because of the quota. Ends when there is a tenth of it left."""
        self._records: Ordered[str, StoredEntry] = Ordered()
        self._leases: Ordered[int, _Held] = Ordered()
        # By lease, in the order of their ends: the keys that are left, in the order in which they
        # were bound. Some of them may have been written over meanwhile.
        self._ended: dict[int, Iterator[str]] = {}
        self._handlers: dict[type[KeyspaceCommand], Callable[[Any], bytes]] = {
            Grant: self._grant,
            Revoke: self._revoke,
            Create: self._create,
            Put: self._put,
            Delete: self._delete,
            Enqueue: self._enqueue,
            Begin: self._begin,
            Expire: self._expire,
            Advance: self._advance,
            Raise: self._raise,
            Reap: self._reap,
            Quota: self._set_quota,
        }

    def apply(self, command: bytes) -> bytes:
        """Carry out one command. Raises `UnknownCommand`, changing nothing, for one that this
        release does not know."""
        try:
            wanted = decode_command(command)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if self.version == FIRST:  # every release knows its commands, so this is not one
                return encode(Malformed(f"not a command of this keyspace: {error}"))
            raise UnknownCommand(
                "the quorum's log holds a command that this release of doyen does not know"
                f" ({error}): install the release that the other nodes run"
            ) from None
        return self._handlers[type(wanted)](wanted)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> StoredEntry | None:
        return self._standing(self._records.get(key))

    def list(self, prefix: str) -> Iterator[StoredEntry]:
        """Everything whose key begins with `prefix` and a slash, in order, as it is now, however
        much is applied until it is taken."""
        # 0 comes after the slash.
        blocks = self._records.detail(f"{prefix}/", f"{prefix}0")
        return _under(blocks, f"{prefix}/", frozenset(self._ended))

    def head(self, line: str) -> StoredEntry | None:
        """The first of `list`."""
        prefix = line + "/"
        for key, record in self._records.upward(prefix):
            if not key.startswith(prefix):
                break
            if record.lease not in self._ended:
                return record
        return None

    def ahead(self, ticket: StoredEntry) -> StoredEntry | None:
        """The ticket directly before this one, which stands."""
        line = ticket.key.rpartition("/")[0] + "/"
        at: str | None = ticket.key if ticket.ticket else None
        while at is not None:
            below, at = self._records.downward(at), None
            for key, record in below:
                if not key.startswith(line):
                    break
                if "/" not in key[len(line) :]:
                    if record.ticket and record.lease not in self._ended:
                        return record
                    continue
                # Something else lies in between, perhaps with much under it: pass over that.
                at = line + key[len(line) :].partition("/")[0] + "/"
                break
        return None

    def _standing(self, record: StoredEntry | None) -> StoredEntry | None:
        """A record, unless its lease has ended and it only waits for its removal."""
        return None if record is not None and record.lease in self._ended else record

    def lease(self, lease: int) -> float | None:
        """The ttl of a lease, None if it has ended."""
        held = self._leases.get(lease)
        return None if held is None else held.ttl_s

    def leases(self, after: int = 0) -> Iterator[tuple[int, float]]:
        """Leases and their ttls, those above `after`. Nothing may be applied meanwhile."""
        for lease, held in self._leases.upward(after + 1):
            yield lease, held.ttl_s

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    @property
    def ended(self) -> int:
        """How many leases have ended whose keys are not all removed: see `Reap`."""
        return len(self._ended)

    def snapshot(self) -> Iterator[bytes]:
        """The state as it is now, in pieces, none of which costs anything before it is taken."""
        records = self._records.picture()
        leases = self._leases.picture()
        if self.version == FIRST:  # for members that know no other
            head = encode([0, FORMATS[0], self.revision, self.era])
            return _pieces(head, leases, [], records, [])
        head = encode(
            _Head(
                FORMATS[1],
                self.revision,
                self.era,
                self.version,
                self.history.floor,
                self.quota,
                self.alarm,
            )
        )
        return _pieces(head, leases, [*self._ended], records, self.history.picture())

    def restore(self, pieces: Iterable[bytes]) -> None:
        """Put a snapshot in the place of this state. Raises, changing nothing, if it is none."""
        unread = iter(pieces)
        head = _decode_piece(next(unread, b""))
        if not isinstance(head, _Head):
            raise ValueError("not a snapshot of a keyspace")  # noqa: TRY004
        if head.format not in FORMATS or head.version > NEWEST:
            raise UnknownCommand(
                f"the snapshot is of version {head.version} of the quorum's state, in format"
                f" {head.format}, and this release of doyen knows versions up to {NEWEST}: install"
                " the release that the other nodes run"
            )
        leases: Ordered[int, _Held] = Ordered()
        records: Ordered[str, StoredEntry] = Ordered()
        bound: dict[int, list[tuple[int, str]]] = {}
        ended: list[int] = []
        changes: list[Change] = []
        size = 0
        for piece in map(_decode_piece, unread):
            if isinstance(piece, _Leases):
                leases.append(piece.leases, [_Held(ttl_s, {}) for ttl_s in piece.ttls])
            elif isinstance(piece, _Records):
                records.append([record.key for record in piece.records], piece.records)
                for record in piece.records:
                    size += _size(record)
                    if record.lease:
                        bound.setdefault(record.lease, []).append((record.version, record.key))
            elif isinstance(piece, _Ended):
                ended += piece.leases
            elif isinstance(piece, _Changes):
                changes += piece.changes
        for lease, keys in bound.items():
            keys.sort()  # as they were bound
            if (held := leases.get(lease)) is not None:
                held.keys.update((key, None) for _, key in keys)
        self._leases, self._records = leases, records
        self._ended = {lease: iter([key for _, key in bound.get(lease, ())]) for lease in ended}
        self.revision, self.era, self.version = head.counter, head.era, head.version
        self.bytes = size + OVERHEAD * len(leases)
        self.quota, self.alarm = head.quota, head.alarm
        if head.format == FORMATS[0]:
            self.history = History(head.counter, most=self._history_changes)
        else:
            self.history = History(head.floor, changes, most=self._history_changes)

    def _grant(self, command: Grant) -> bytes:
        if (full := self._full(OVERHEAD)) is not None:
            return full
        self.revision += 1
        self.bytes += OVERHEAD
        self._leases.put(self.revision, _Held(command.ttl_s, {}))
        return encode(LeaseGranted(self.revision))

    def _revoke(self, command: Revoke) -> bytes:
        self._end((command.lease,))
        return _DONE

    def _create(self, command: Create) -> bytes:
        key, lease = command.key, command.lease
        held = self._leases.get(lease)
        if held is None:
            return _GONE
        there = self._records.get(key)
        standing = self._standing(there)
        if standing is not None:
            return encode(Stands(standing))
        revision = self.revision + 1
        record = StoredEntry(key, command.value, revision, revision, lease)
        if (full := self._write(record, there)) is not None:
            return full
        held.keys[key] = None
        return encode(Written(revision, revision))

    def _put(self, command: Put) -> bytes:
        key = command.key
        sought = self._records.seek(key)
        there = sought[2]
        version = self.revision + 1
        if there is None or (there.lease and there.lease in self._ended):
            if command.if_version:
                return _REFUSED
            lease, record = 0, StoredEntry(key, command.value, version, version, 0)
        elif there.version != command.if_version:
            return _REFUSED
        else:
            lease = there.lease
            record = StoredEntry(key, command.value, there.revision, version, 0, there.ticket)
        if (full := self._write(record, there, sought)) is not None:
            return full
        if lease and (held := self._leases.get(lease)) is not None:
            del held.keys[key]
        return encode(Written(record.revision, version))

    def _delete(self, command: Delete) -> bytes:
        standing = self.get(command.key)
        if standing is None or command.if_version not in (0, standing.version):
            return _REFUSED
        self.revision += 1
        self._unbind(standing)
        self._remove(standing, ChangeKind.DELETE)
        return _DONE

    def _enqueue(self, command: Enqueue) -> bytes:
        if not -RANKS < command.rank < RANKS:
            return encode(Malformed(f"a rank is a number of 64 bits, not {command.rank}"))
        held = self._leases.get(command.lease)
        if held is None:
            return _GONE
        revision = self.revision + 1
        key = f"{command.line}/{RANKS - command.rank:020d}-{revision:020d}"
        record = StoredEntry(key, command.value, revision, revision, command.lease, True)
        if (full := self._write(record, None)) is not None:
            return full
        held.keys[key] = None
        return encode(Ticketed(key, revision))

    def _begin(self, command: Begin) -> bytes:
        if command.era <= self.era:
            return _REFUSED
        self.era = command.era
        return _DONE

    def _expire(self, command: Expire) -> bytes:
        if command.era != self.era:
            return _REFUSED
        self._end(command.leases)
        return _DONE

    def _advance(self, command: Advance) -> bytes:
        self.revision = max(self.revision + command.by, command.floor)
        return _DONE

    def _raise(self, command: Raise) -> bytes:
        if command.version > NEWEST:
            raise UnknownCommand(
                f"the quorum was raised to version {command.version} of its state, and this"
                f" release of doyen knows versions up to {NEWEST}: install the release that the"
                " other nodes run"
            )
        if command.version <= self.version:
            return _REFUSED
        if self.version == FIRST:
            # A node that was restored has less of it than the others. From here on all have the
            # same.
            self.history = History(self.revision, most=self._history_changes)
        self.version = command.version
        return _DONE

    def _reap(self, command: Reap) -> bytes:
        self._remove_slice()
        return _DONE

    def _set_quota(self, command: Quota) -> bytes:
        self.quota = command.bytes
        self._calm()
        return _DONE

    def _end(self, leases: tuple[int, ...]) -> None:
        """End these. Of what is bound to ended leases, one slice is removed now."""
        for lease in leases:
            held = self._leases.get(lease)
            if held is None:
                continue
            self.revision += 1
            self.bytes -= OVERHEAD
            self._leases.remove(lease)
            if self.version == FIRST:
                for key in held.keys:
                    self._remove_bound(key, lease)
            elif held.keys:
                self._ended[lease] = iter(held.keys)
        self._remove_slice()
        self._calm()

    def _remove_slice(self) -> None:
        room = self._slice_keys
        for lease in [*islice(self._ended, room)]:
            revision = self.revision
            self.revision = revision + 1
            keys, removed, left = self._ended[lease], 0, True
            # Only what is removed is counted: a restored node does not know which of the keys
            # have been written over since the lease ended.
            while left and removed < room:
                key = next(keys, None)
                left = key is not None
                removed += key is not None and self._remove_bound(key, lease)
            if not left:
                del self._ended[lease]
            if not removed:
                self.revision = revision
            room -= removed
            if not room:
                break

    def _remove_bound(self, key: str, lease: int) -> bool:
        record = self._records.get(key)
        if record is None or record.lease != lease:
            return False
        self._remove(record, ChangeKind.END)
        return True

    def _write(
        self,
        record: StoredEntry,
        there: StoredEntry | None,
        sought: tuple[int, int, StoredEntry | None] | None = None,
    ) -> bytes | None:
        """Have a record of the next revision stand where `there` is, within the quota; or say that
        it is full."""
        key = record.key
        more = len(key) + len(record.value) + OVERHEAD
        if there is not None:
            more -= len(key) + len(there.value) + OVERHEAD
        size = self.bytes + more
        if size > self.quota and (full := self._full(more)) is not None:
            return full
        self.bytes = size
        self.revision = revision = self.revision + 1
        self._records.put(key, record, sought)
        self.history.add(Change(revision, key, _PUT, record.lease))
        return None

    def _remove(self, record: StoredEntry, kind: ChangeKind) -> None:
        self.bytes -= _size(record)
        self._calm()
        self._records.remove(record.key)
        self.history.add(Change(self.revision, record.key, kind, record.lease))

    def _full(self, more: int) -> bytes | None:
        """What to answer to a command that needs so many bytes more than there are."""
        if more <= 0 or self.bytes + more <= self.quota or self.version == FIRST:
            return None
        self.alarm = True
        return encode(Full(self.bytes, self.quota))

    def _calm(self) -> None:
        """End the alarm if there is room again."""
        if self.alarm and self.bytes <= self.quota - self.quota // 10:
            self.alarm = False

    def _unbind(self, record: StoredEntry) -> None:
        if record.lease:
            held = self._leases.get(record.lease)
            if held is not None:
                del held.keys[record.key]


def _size(record: StoredEntry) -> int:
    return len(record.key) + len(record.value) + OVERHEAD


def _under(
    blocks: list[Block[str, StoredEntry]], prefix: str, ended: Container[int]
) -> Iterator[StoredEntry]:
    for keys, records in blocks:
        for key, record in zip(keys, records, strict=True):
            if key.startswith(prefix):
                if record.lease not in ended:
                    yield record
            elif key > prefix:
                return


def _pieces(
    head: bytes,
    leases: list[Block[int, _Held]],
    ended: list[int],
    records: list[Block[str, StoredEntry]],
    changes: list[Change],
) -> Iterator[bytes]:
    yield head
    # Cut by size, not by block: how keys lie in blocks differs between nodes.
    granted = _Leases([], [])
    for numbers, held in leases:
        for number, each in zip(numbers, held, strict=True):
            granted.leases.append(number)
            granted.ttls.append(each.ttl_s)
            if len(granted.leases) == MANY:
                yield encode(granted)
                granted = _Leases([], [])
    if granted.leases:
        yield encode(granted)
    for at in range(0, len(ended), MANY):
        yield encode(_Ended(ended[at : at + MANY]))
    piece: list[StoredEntry] = []
    size = 0
    for _, block in records:
        for record in block:
            piece.append(record)
            size += len(record.key) + len(record.value) + 16
            if size >= PIECE:
                yield encode(_Records(piece))
                piece, size = [], 0
    if piece:
        yield encode(_Records(piece))
    for at in range(0, len(changes), MANY):
        yield encode(_Changes(changes[at : at + MANY]))
