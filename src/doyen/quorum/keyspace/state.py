"""The keyspace: the replicated state machine that makes a quorum of nodes a store.

Commands go in as bytes, in the order that the quorum agreed on, and results come out as bytes, so
that nodes store and forward them without decoding. The same commands give the same results and the
same state on every node: nothing here depends on a clock, on randomness or on the order of a set.
The meaning of a command may depend on the cluster's version (see `versions`), which is part of the
state. A command that this release does not know raises `UnknownCommand`, because a node that
skipped it would differ from the others from then on.

Invariants:

- One counter numbers all changes. It never decreases, so neither do revisions, versions, ticket
  keys and lease ids, which are all taken from it.
- Keys are sorted, and the order of ticket keys is the order of the tickets in their line.
- Every entry bound to a lease is listed under the lease, and counts as absent from the command that
  ends the lease. From version 2 on, such entries are removed in slices of at most `SLICE` keys: the
  first by that command, the others by `RemoveEndedKeys` commands, each at a revision of its own, in
  the order in which the keys were bound. A slice removes an entry only if it is still bound to the
  ended lease.
- A lease expires only by an `Expire` of the current era. Each leader begins an era before it
  confirms any renewal, so a late `Expire` of an earlier leader cannot end a lease that has been
  renewed since.

Reads are plain methods, for callers that know that this node is up to date. Imports msgspec, the
error tree and the other modules of this package.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, compress, islice
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from doyen.errors import StoreUnusable
from doyen.quorum.keyspace.commands import (
    RANKS,
    AdvanceRevision,
    BeginEra,
    ConditionFailed,
    Create,
    Delete,
    Done,
    Enqueue,
    EntryExists,
    EtcdApply,
    EtcdCompact,
    EtcdDone,
    EtcdGrant,
    EtcdRefused,
    EtcdRevoke,
    Expire,
    Grant,
    KeyspaceCommand,
    LargeEntryExists,
    LeaseGranted,
    LeaseNotFound,
    MalformedCommand,
    Put,
    QuotaExceeded,
    RaiseVersion,
    RemoveEndedKeys,
    Revoke,
    SetQuota,
    StoredEntry,
    TicketIssued,
    Update,
    Written,
    decode_command,
    encode,
)
from doyen.quorum.keyspace.etcd_requests import EtcdRecord, EtcdRefusal, EtcdResults
from doyen.quorum.keyspace.etcd_state import EtcdKeyspace, RequestRefused, cost
from doyen.quorum.keyspace.history import Change, ChangeKind, History
from doyen.quorum.keyspace.snapshot import (
    FORMATS,
    QUOTA,
    Changes,
    EndedLeases,
    EtcdChanges,
    EtcdHeader,
    EtcdLeases,
    EtcdRecords,
    Leases,
    SnapshotHeader,
    StoredEntries,
    decode_piece,
    encode_etcd,
    encode_pieces,
)
from doyen.quorum.keyspace.sorted_map import APART, Block, SortedMap
from doyen.quorum.keyspace.versions import ETCD, FIRST, NEWEST, UPDATES

__all__ = ["QUOTA", "Keyspace", "UnknownCommand"]

SLICE: Final = 500
"""How many keys of ended leases one command removes at most. Changing it needs a new version."""
OVERHEAD: Final = 128
"""Bytes that an entry or a lease takes apart from key and value, in the size that the quota limits.
Changing it needs a new version."""
RESULT_VALUE: Final = 4096
"""The longest value that a result carries. One log entry may have hundreds of results, which a
leader sends to a follower in one frame. Changing it needs a new version."""

_PUT = ChangeKind.PUT
_DONE, _CONDITION_FAILED = encode(Done()), encode(ConditionFailed())
_LEASE_NOT_FOUND = encode(LeaseNotFound())


class UnknownCommand(StoreUnusable):
    """The log holds a command that this release of doyen does not know."""


class _Lease(Struct, gc=False):
    """A lease, and the keys bound to it."""

    ttl_s: float
    keys: dict[str, None]
    id: int = 0
    """Its id of etcd; 0 if it has none."""


class Keyspace:
    """The state, and everything that can be done to it.

    >>> from doyen.quorum.keyspace.commands import decode_result
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
        self,
        version: int = NEWEST,
        *,
        slice_keys: int | None = None,
        history: int | None = None,
        result_value: int = RESULT_VALUE,
    ) -> None:
        """An empty keyspace. That of a node begins at version `FIRST`, and the log holds the
        commands that raise it. Simulations use smaller limits; all nodes must use the same."""
        self._slice_keys = SLICE if slice_keys is None else slice_keys
        self._result_value = result_value
        self._history_changes = history
        self.revision = 0
        """The number of the last change."""
        self.era = 0
        """The latest era that a leader has begun."""
        self.version = version
        """The version of the cluster; see `versions`."""
        self.newest_lease = 0
        """The last lease that was granted, or a later number after a restore."""
        self.history = History(most=history)
        """The latest changes. From version 2 on they are the same on every node."""
        self.bytes = 0
        """The size of all entries and leases, as the quota counts it."""
        self.quota = QUOTA
        self.alarm = False
        """A write was refused because of the quota. Ends when a tenth of the quota is free."""
        self._entries: SortedMap[str, StoredEntry] = SortedMap()
        self._leases: SortedMap[int, _Lease] = SortedMap()
        # Ended leases in the order of their ends, with the keys that are not removed yet in the
        # order in which they were bound. Some of them may have been replaced since.
        self._ended: dict[int, Iterator[str]] = {}
        self._ended_at: tuple[int, frozenset[int]] = -1, frozenset()
        """Those at a revision."""
        self.etcd = EtcdKeyspace()
        """The etcd keyspace. Its keys are not among the entries."""
        self._etcd_bytes = 0
        self._handlers: dict[type[KeyspaceCommand], Callable[[Any], bytes]] = {
            Grant: self._grant,
            Revoke: self._revoke,
            Create: self._create,
            Put: self._put,
            Delete: self._delete,
            Enqueue: self._enqueue,
            BeginEra: self._begin,
            Expire: self._expire,
            AdvanceRevision: self._advance,
            RaiseVersion: self._raise,
            RemoveEndedKeys: self._remove_ended_keys,
            SetQuota: self._set_quota,
            Update: self._update,
            EtcdApply: self._etcd_apply,
            EtcdGrant: self._etcd_grant,
            EtcdRevoke: self._etcd_revoke,
            EtcdCompact: self._etcd_compact,
        }

    def apply(self, command: bytes) -> bytes:
        """Carry out one command. Raises `UnknownCommand`, changing nothing, for one that this
        release does not know."""
        try:
            wanted = decode_command(command)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if self.version == FIRST:  # every release knows the commands of this version
                return encode(MalformedCommand(f"not a command of this keyspace: {error}"))
            raise UnknownCommand(
                "the quorum's log holds a command that this release of doyen does not know"
                f" ({error}): install the release that the other nodes run"
            ) from None
        return self._handlers[type(wanted)](wanted)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> StoredEntry | None:
        return self._live(self._entries.get(key))

    def list(self, prefix: str) -> Iterator[StoredEntry]:
        """All entries whose key begins with `prefix` and a slash, in order, as of now: commands
        that are applied while it is iterated do not show."""
        return chain.from_iterable(self.scan(prefix))

    def scan(self, prefix: str) -> Iterator[Sequence[StoredEntry]]:
        """`list`, one block of the map at a time, so that its reader can pause. A block whose
        entries all belong to ended leases and are not removed yet gives an empty sequence."""
        # "0" is the character after the slash.
        blocks = self._entries.blocks_between(f"{prefix}/", f"{prefix}0")
        return _below(blocks, f"{prefix}/", self._ended_now())

    def head(self, line: str) -> StoredEntry | None:
        """The first entry of `list`."""
        return next((entries[0] for entries in self.scan(line) if entries), None)

    def ahead(self, ticket: StoredEntry) -> StoredEntry | None:
        """The ticket directly before this one, which must exist."""
        return next((entries[-1] for entries in self.scan_back(ticket) if entries), None)

    def scan_back(self, ticket: StoredEntry) -> Iterator[Sequence[StoredEntry]]:
        """The tickets of a line before this one, which must exist, as of now, one block of the map
        at a time, the nearest block first. A block may give an empty sequence."""
        line = ticket.key.rpartition("/")[0] + "/"
        beyond = ticket.key if ticket.ticket else line
        return _before(self._entries.blocks_between(line, beyond), line, beyond, self._ended_now())

    def _ended_now(self) -> Container[int]:
        """The ended leases, for reads of which the rest is done later. Leases whose keys have all
        been replaced may be among them."""
        at, ended = self._ended_at
        if at != self.revision:
            ended = frozenset(self._ended)
            self._ended_at = self.revision, ended
        return ended

    def _live(self, entry: StoredEntry | None) -> StoredEntry | None:
        return None if entry is not None and entry.lease in self._ended else entry

    def lease(self, lease: int) -> float | None:
        """The ttl of a lease, or None if it has ended."""
        held = self._leases.get(lease)
        return None if held is None else held.ttl_s

    def leases(self, after: int = 0) -> Iterator[tuple[int, float]]:
        """The leases above `after`, with their ttls. Nothing may be applied meanwhile."""
        for lease, held in self._leases.ascending(after + 1):
            yield lease, held.ttl_s

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    @property
    def ended(self) -> int:
        """The number of ended leases whose keys are not all removed; see `RemoveEndedKeys`."""
        return len(self._ended)

    def snapshot(self) -> Iterator[bytes]:
        """The state as of now, in pieces. Each piece is encoded when it is taken."""
        first = self.version == FIRST  # whose members know format 1 only
        head = SnapshotHeader(
            FORMATS[0] if first else FORMATS[1],
            self.revision,
            self.era,
            self.version,
            self.history.floor,
            self.quota,
            self.alarm,
        )
        leases = self._leases.blocks()
        pieces = encode_pieces(
            head,
            (
                (id_, held.ttl_s)
                for ids, each in leases
                for id_, held in zip(ids, each, strict=True)
            ),
            [] if first else [*self._ended],
            self._entries.blocks(),
            [] if first else self.history.all(),
        )
        if self.version < ETCD:
            return pieces
        etcd = self.etcd
        ids = sorted((number, lease) for lease, number in etcd.leases.items())
        etcd_head = EtcdHeader(etcd.revision, etcd.compacted)
        return chain(pieces, encode_etcd(etcd_head, ids, *etcd.snapshot()))

    def restore(self, pieces: Iterable[bytes]) -> None:
        """Replace the state by a snapshot. Raises `ValueError` or `UnknownCommand`, changing
        nothing, if it cannot be read."""
        unread = iter(pieces)
        head = decode_piece(next(unread, b""))
        if not isinstance(head, SnapshotHeader):
            raise ValueError("not a snapshot of a keyspace")  # noqa: TRY004
        if head.format not in FORMATS or head.version > NEWEST:
            raise UnknownCommand(
                f"the snapshot is of version {head.version} of the quorum's state, in format"
                f" {head.format}, and this release of doyen knows versions up to {NEWEST}: install"
                " the release that the other nodes run"
            )
        leases: SortedMap[int, _Lease] = SortedMap()
        entries: SortedMap[str, StoredEntry] = SortedMap()
        bound: dict[int, list[tuple[int, str]]] = {}
        ended: list[int] = []
        changes: list[Change] = []
        size = 0
        etcd_head = EtcdHeader(1, -1)
        ids: dict[int, int] = {}
        records: list[EtcdRecord] = []
        etcd_changes: list[EtcdRecord] = []
        for piece in map(decode_piece, unread):
            if isinstance(piece, Leases):
                leases.append(piece.leases, [_Lease(ttl_s, {}) for ttl_s in piece.ttls])
            elif isinstance(piece, StoredEntries):
                entries.append([entry.key for entry in piece.entries], piece.entries)
                for entry in piece.entries:
                    size += _size(entry)
                    if entry.lease:
                        bound.setdefault(entry.lease, []).append((entry.revision, entry.key))
            elif isinstance(piece, EndedLeases):
                ended += piece.leases
            elif isinstance(piece, Changes):
                changes += piece.changes
            elif isinstance(piece, EtcdHeader):
                etcd_head = piece
            elif isinstance(piece, EtcdLeases):
                ids.update(zip(piece.ids, piece.leases, strict=True))
            elif isinstance(piece, EtcdRecords):
                records += piece.records
            elif isinstance(piece, EtcdChanges):
                etcd_changes += piece.records
        etcd = EtcdKeyspace()
        etcd.restore(etcd_head.revision, etcd_head.compacted, ids, records, etcd_changes)
        for lease_id, number in ids.items():
            if (held := leases.get(number)) is not None:
                held.id = lease_id
        for lease, keys in bound.items():
            keys.sort()  # into the order in which they were bound
            if (held := leases.get(lease)) is not None:
                held.keys.update((key, None) for _, key in keys)
        self._leases, self._entries, self.etcd = leases, entries, etcd
        self._ended = {lease: iter([key for _, key in bound.get(lease, ())]) for lease in ended}
        self._ended_at = -1, frozenset()
        self.revision, self.era, self.version = head.revision, head.era, head.version
        self.newest_lease = self.revision
        self._etcd_bytes = etcd.bytes
        self.bytes = size + OVERHEAD * len(leases) + etcd.bytes
        self.quota, self.alarm = head.quota, head.alarm
        if head.format == FORMATS[0]:
            self.history = History(head.revision, most=self._history_changes)
        else:
            self.history = History(head.floor, changes, most=self._history_changes)

    def _grant(self, command: Grant) -> bytes:
        if (full := self._full(OVERHEAD)) is not None:
            return full
        self._begin_lease(_Lease(command.ttl_s, {}))
        return encode(LeaseGranted(self.revision))

    def _begin_lease(self, lease: _Lease) -> None:
        self.revision += 1
        self.bytes += OVERHEAD
        self._leases.put(self.revision, lease)
        self.newest_lease = self.revision

    def _revoke(self, command: Revoke) -> bytes:
        self._end((command.lease,))
        return _DONE

    def _create(self, command: Create) -> bytes:
        key, lease = command.key, command.lease
        held = self._leases.get(lease)
        if held is None:
            return _LEASE_NOT_FOUND
        position = self._entries.seek(key)
        present = self._live(position[2])
        if present is not None:
            if len(present.value) > self._result_value and self.version > FIRST:
                return encode(LargeEntryExists(key))
            return encode(EntryExists(present))
        revision = self.revision + 1
        entry = StoredEntry(key, command.value, revision, revision, lease)
        if (full := self._write(entry, position)) is not None:
            return full
        held.keys[key] = None
        return encode(Written(revision, revision))

    def _put(self, command: Put) -> bytes:
        key, replaced = command.key, self._entries.replaced
        present = replaced.get(key)
        if (
            present is not None
            and not present.lease
            and present.version == command.if_version
            and not self.alarm
        ):
            # The same as below in fewer steps, for a key that is written again and again: every
            # node carries out every write.
            value, first = command.value, present.revision
            size = self.bytes + len(value) - len(present.value)
            if size <= self.quota:
                self.bytes = size
                self.revision = version = self.revision + 1
                key = present.key
                replaced[key] = StoredEntry(key, value, first, version, 0, present.ticket)
                self.history.add(Change(version, key, _PUT))
                return encode(Written(first, version))
        position = self._entries.seek(key)
        present = position[2]
        revision = version = self.revision + 1
        lease = 0
        if present is None or (present.lease and present.lease in self._ended):
            if command.if_version:
                return _CONDITION_FAILED
            entry = StoredEntry(key, command.value, revision, version)
        elif present.version != command.if_version:
            return _CONDITION_FAILED
        else:
            # The key that is held already: the history would hold a copy for each change.
            key, revision, lease = present.key, present.revision, present.lease
            entry = StoredEntry(key, command.value, revision, version, 0, present.ticket)
        if (full := self._write(entry, position)) is not None:
            return full
        if lease and (held := self._leases.get(lease)) is not None:
            del held.keys[key]
        return encode(Written(revision, version))

    def _update(self, command: Update) -> bytes:
        if self.version < UPDATES:  # nodes do not propose it in such a cluster
            return encode(MalformedCommand("the cluster's version has no updates"))
        position = self._entries.seek(command.key)
        present = self._live(position[2])
        if present is None or not present.lease or present.version != command.if_version:
            return _CONDITION_FAILED
        version = self.revision + 1
        entry = structs.replace(present, value=command.value, version=version)
        if (full := self._write(entry, position)) is not None:
            return full
        return encode(Written(entry.revision, version))

    def _delete(self, command: Delete) -> bytes:
        entry = self.get(command.key)
        if entry is None or command.if_version not in (0, entry.version):
            return _CONDITION_FAILED
        self.revision += 1
        if entry.lease and (held := self._leases.get(entry.lease)) is not None:
            del held.keys[entry.key]
        self._remove(entry, ChangeKind.DELETE)
        return _DONE

    def _enqueue(self, command: Enqueue) -> bytes:
        if not -RANKS < command.rank < RANKS:
            return encode(MalformedCommand(f"a rank is a number of 64 bits, not {command.rank}"))
        held = self._leases.get(command.lease)
        if held is None:
            return _LEASE_NOT_FOUND
        revision = self.revision + 1
        key = f"{command.line}/{RANKS - command.rank:020d}-{revision:020d}"
        entry = StoredEntry(key, command.value, revision, revision, command.lease, True)
        if (full := self._write(entry, self._entries.seek(key))) is not None:
            return full
        held.keys[key] = None
        return encode(TicketIssued(key, revision))

    def _begin(self, command: BeginEra) -> bytes:
        if command.era <= self.era:
            return _CONDITION_FAILED
        self.era = command.era
        return _DONE

    def _expire(self, command: Expire) -> bytes:
        if command.era != self.era:
            return _CONDITION_FAILED
        self._end(command.leases)
        return _DONE

    def _advance(self, command: AdvanceRevision) -> bytes:
        self.revision = max(self.revision + command.by, command.floor)
        if command.by and self.etcd.revision > 1:
            # A restored cluster: what the old one did since the backup must not be repeated.
            self.etcd.advance(command.by)
            self._count_etcd()
        return _DONE

    def _raise(self, command: RaiseVersion) -> bytes:
        if command.version > NEWEST:
            raise UnknownCommand(
                f"the quorum was raised to version {command.version} of its state, and this"
                f" release of doyen knows versions up to {NEWEST}: install the release that the"
                " other nodes run"
            )
        if command.version <= self.version:
            return _CONDITION_FAILED
        if self.version == FIRST:
            # A restored node has less history than the others. From here on all have the same.
            self.history = History(self.revision, most=self._history_changes)
        self.version = command.version
        return _DONE

    def _remove_ended_keys(self, command: RemoveEndedKeys) -> bytes:
        self._remove_slice()
        return _DONE

    def _set_quota(self, command: SetQuota) -> bytes:
        self.quota = command.bytes
        self._update_alarm()
        return _DONE

    # The etcd keyspace.

    def _etcd_apply(self, command: EtcdApply) -> bytes:
        return self._etcd(cost(command.request), partial(self.etcd.apply, command.request))

    def _etcd_grant(self, command: EtcdGrant) -> bytes:
        return self._etcd(OVERHEAD, partial(self._begin_etcd_lease, command))

    def _begin_etcd_lease(self, command: EtcdGrant) -> None:
        self.etcd.grant(command.lease, self.revision + 1)
        self._begin_lease(_Lease(command.ttl_s, {}, command.lease))

    def _etcd_revoke(self, command: EtcdRevoke) -> bytes:
        return self._etcd(0, partial(self._end_etcd_lease, command.lease))

    def _end_etcd_lease(self, lease: int) -> None:
        if lease not in self.etcd.leases:
            raise RequestRefused(EtcdRefusal.LEASE_NOT_FOUND)
        self._end((self.etcd.leases[lease],))

    def _etcd_compact(self, command: EtcdCompact) -> bytes:
        return self._etcd(0, partial(self.etcd.compact, command.revision))

    def _etcd(self, more: int, change: Callable[[], EtcdResults | None]) -> bytes:
        """Change the etcd keyspace, which may need this many more bytes."""
        if self.version < ETCD:  # nodes do not propose it in such a cluster
            return encode(MalformedCommand("the cluster's version has no etcd keyspace"))
        if (full := self._full(more)) is not None:
            return full
        try:
            result = change()
        except RequestRefused as refused:
            return encode(EtcdRefused(refused.refusal))
        self._count_etcd()
        return encode(EtcdDone(self.etcd.revision, result))

    def _count_etcd(self) -> None:
        """The etcd keyspace has changed: bound its history, and count its size."""
        self.etcd.bound_history(self.quota // 4)
        self.bytes += self.etcd.bytes - self._etcd_bytes
        self._etcd_bytes = self.etcd.bytes
        self._update_alarm()

    def _end(self, leases: tuple[int, ...]) -> None:
        """End leases, and remove one slice of the keys that are bound to ended leases."""
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
            if held.id:
                self.etcd.end(held.id)
                self._count_etcd()
        self._remove_slice()
        self._update_alarm()

    def _remove_slice(self) -> None:
        room = self._slice_keys
        for lease in [*islice(self._ended, room)]:
            revision = self.revision
            self.revision = revision + 1
            keys, removed, left = self._ended[lease], 0, True
            # Only removed keys count towards the slice: a restored node does not know which keys
            # were replaced after the lease ended.
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
        entry = self._entries.get(key)
        if entry is None or entry.lease != lease:
            return False
        self._remove(entry, ChangeKind.END)
        return True

    def _write(
        self, entry: StoredEntry, position: tuple[int, int, StoredEntry | None]
    ) -> bytes | None:
        """Write an entry of the next revision at its position, or return the result that says that
        the quota is exceeded."""
        key, present = entry.key, position[2]
        if present is None:
            more = len(key) + len(entry.value) + OVERHEAD
        else:
            more = len(entry.value) - len(present.value)
        size = self.bytes + more
        if size > self.quota and (full := self._full(more)) is not None:
            return full
        self.bytes = size
        if more < 0:
            self._update_alarm()
        self.revision = revision = self.revision + 1
        self._entries.put(key, entry, position, present is None or len(present.value) <= APART)
        self.history.add(Change(revision, key, _PUT, entry.lease))
        return None

    def _remove(self, entry: StoredEntry, kind: ChangeKind) -> None:
        self.bytes -= _size(entry)
        self._update_alarm()
        self._entries.remove(entry.key)
        self.history.add(Change(self.revision, entry.key, kind, entry.lease))

    def _full(self, more: int) -> bytes | None:
        """The result of a command that needs this many more bytes, if the quota has no room for
        them."""
        if more <= 0 or self.bytes + more <= self.quota or self.version == FIRST:
            return None
        self.alarm = True
        return encode(QuotaExceeded(self.bytes, self.quota))

    def _update_alarm(self) -> None:
        """End the alarm if there is enough room again."""
        if self.alarm and self.bytes <= self.quota - self.quota // 10:
            self.alarm = False


def _size(entry: StoredEntry) -> int:
    return len(entry.key) + len(entry.value) + OVERHEAD


def _below(
    blocks: list[Block[str, StoredEntry]], prefix: str, ended: Container[int]
) -> Iterator[Sequence[StoredEntry]]:
    for keys, entries in blocks:
        below = [key.startswith(prefix) for key in (keys[0], keys[-1])]
        some = entries if all(below) else compress(entries, (k.startswith(prefix) for k in keys))
        yield [entry for entry in some if entry.lease not in ended]


def _before(
    blocks: list[Block[str, StoredEntry]], line: str, beyond: str, ended: Container[int]
) -> Iterator[Sequence[StoredEntry]]:
    at = len(line)
    while blocks:
        keys, entries = blocks.pop()
        yield [
            entry
            for key, entry in zip(keys, entries, strict=True)
            if line < key < beyond
            and entry.ticket
            and entry.lease not in ended
            and "/" not in key[at:]
        ]
        child, slash, _ = keys[0][at:].partition("/")
        if slash and keys[0] > line:
            # An entry below another key of the line, perhaps one of many: skip all of them.
            del blocks[bisect_left(blocks, f"{line}{child}/", key=_first) :]


def _first(block: Block[str, StoredEntry]) -> str:
    return block[0][0]
