"""The keyspace: the replicated state machine that makes a quorum of nodes a Store.

Commands go in as bytes, in the order the quorum agreed on; results come out as bytes, so that
nodes keep and forward them without looking inside. The same commands give the same results and
the same state on every node: nothing here looks at a clock, rolls dice or iterates over a set.

Invariants:

- One counter numbers whatever changes. It never goes back, so neither do revisions, versions,
  ticket keys and lease ids, which are all taken from it.
- Keys are sorted, and a ticket's key sorts as the ticket stands in its line.
- Whatever is bound to a lease is listed under it, and goes in the same step as the lease.
- A lease is ended by its time only if the leader says so *in its own era*. Each leader begins an
  era before it confirms any renewal; so an `Expire` that an earlier leader proposed, and that
  comes late, ends nothing that has been renewed since.

Reads are plain methods, for whoever knows that this node is up to date. Imports msgspec and
`ordered`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from doyen.quorum.ordered import Block, Ordered

__all__ = [
    "Advance",
    "Begin",
    "Command",
    "Create",
    "Delete",
    "Done",
    "Enqueue",
    "Expire",
    "Gone",
    "Grant",
    "Granted",
    "Keyspace",
    "Malformed",
    "Put",
    "Record",
    "Refused",
    "Result",
    "Revoke",
    "Stands",
    "Ticketed",
    "Written",
    "decode_command",
    "decode_result",
    "encode",
]

RANKS: Final = 2**63
HISTORY: Final = 2**16
"""How many changes are remembered for those who ask what they missed."""
PIECE: Final = 2**18
"""About how many bytes a piece of a snapshot has."""
LEASES: Final = 2**12
"""How many leases a piece of a snapshot has."""
FORMAT: Final = 1


class Record(Struct, frozen=True, array_like=True, gc=False):
    """What stands at a key."""

    key: str
    value: bytes
    revision: int
    version: int
    lease: int = 0
    """The lease it is bound to; 0 if none."""
    ticket: bool = False


class Command(Struct, frozen=True, array_like=True, tag=True, gc=False, forbid_unknown_fields=True):
    """What can be done to a keyspace. Has nothing behind its fields: how deep a nest of lists could
    be skipped there depends on the stack, and so on the node."""


class Grant(Command, frozen=True, gc=False, tag=1):
    """Begin a lease. → Granted"""

    ttl_s: float


class Revoke(Command, frozen=True, gc=False, tag=2):
    """End a lease, if it has not ended. → Done"""

    lease: int


class Create(Command, frozen=True, gc=False, tag=3):
    """Write where nothing stands, bound to a lease. → Written, Stands or Gone"""

    key: str
    value: bytes
    lease: int


class Put(Command, frozen=True, gc=False, tag=4):
    """Write over this version, or, with 0, where nothing stands. → Written or Refused"""

    key: str
    value: bytes
    if_version: int


class Delete(Command, frozen=True, gc=False, tag=5):
    """Delete what stands there, with this version unless 0. → Done or Refused"""

    key: str
    if_version: int


class Enqueue(Command, frozen=True, gc=False, tag=6):
    """Take a ticket. → Ticketed or Gone"""

    line: str
    value: bytes
    lease: int
    rank: int


class Begin(Command, frozen=True, gc=False, tag=7):
    """A leader begins its era, which is later than every other. → Done or Refused"""

    era: int


class Expire(Command, frozen=True, gc=False, tag=8):
    """The time of these leases is over. → Done, or Refused if the era is over"""

    era: int
    leases: tuple[int, ...]


class Advance(Command, frozen=True, gc=False, tag=9):
    """Go on counting above this, and at least so much further on, after a move or a restore.
    → Done"""

    floor: int
    by: int = 0


Commands = Grant | Revoke | Create | Put | Delete | Enqueue | Begin | Expire | Advance


class Result(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What became of a command."""


class Done(Result, frozen=True, gc=False, tag=1):
    """Nothing more to say."""


class Refused(Result, frozen=True, gc=False, tag=2):
    """The condition did not hold, and nothing was done."""


class Gone(Result, frozen=True, gc=False, tag=3):
    """The lease has ended, and nothing was done."""


class Granted(Result, frozen=True, gc=False, tag=4):
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

    record: Record


class Malformed(Result, frozen=True, gc=False, tag=8):
    """This is no command of the keyspace, and nothing was done."""

    reason: str


Results = Done | Refused | Gone | Granted | Written | Ticketed | Stands | Malformed

_encoder = msgspec.msgpack.Encoder()
encode: Callable[[Any], bytes] = _encoder.encode
decode_command: Callable[[bytes], Commands] = msgspec.msgpack.Decoder(Commands).decode
decode_result: Callable[[bytes], Results] = msgspec.msgpack.Decoder(Results).decode

_DONE, _REFUSED, _GONE = encode(Done()), encode(Refused()), encode(Gone())


class _Held(Struct, gc=False):
    """A lease, and the keys bound to it."""

    ttl_s: float
    keys: dict[str, None]


class _Head(Struct, frozen=True, array_like=True, tag=0):
    """A snapshot's first piece."""

    format: int
    counter: int
    era: int


class _Leases(Struct, frozen=True, array_like=True, tag=1):
    """A piece of leases, in order."""

    leases: list[int]
    ttls: list[float]


class _Records(Struct, frozen=True, array_like=True, tag=2):
    """A piece of records, in order, after all leases."""

    records: list[Record]


_decode_piece: Callable[[bytes], _Head | _Leases | _Records] = msgspec.msgpack.Decoder(
    _Head | _Leases | _Records
).decode


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

    def __init__(self) -> None:
        self.revision = 0
        """The number of the last change."""
        self.era = 0
        """The last one that a leader began."""
        self._records: Ordered[str, Record] = Ordered()
        self._leases: Ordered[int, _Held] = Ordered()
        self._history: deque[tuple[int, str]] = deque(maxlen=HISTORY)
        self._restored = 0
        """Changes up to this number were never in the history."""
        self._recent: dict[str, int] = {}
        self._recent_to = 0
        self._handlers: dict[type[Command], Callable[[Any], bytes]] = {
            Grant: self._grant,
            Revoke: self._revoke,
            Create: self._create,
            Put: self._put,
            Delete: self._delete,
            Enqueue: self._enqueue,
            Begin: self._begin,
            Expire: self._expire,
            Advance: self._advance,
        }

    def apply(self, command: bytes) -> bytes:
        """Carry out one command. What cannot be understood changes nothing, on any node."""
        try:
            wanted = decode_command(command)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return encode(Malformed(f"not a command of this keyspace: {error}"))
        return self._handlers[type(wanted)](wanted)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> Record | None:
        return self._records.get(key)

    def list(self, prefix: str) -> Iterator[Record]:
        """Everything whose key begins with `prefix` and a slash, in order, as it is now, however
        much is applied until it is taken."""
        # 0 comes after the slash.
        return _under(self._records.detail(f"{prefix}/", f"{prefix}0"), f"{prefix}/")

    def head(self, line: str) -> Record | None:
        """The first of `list`."""
        prefix = line + "/"
        _, record = next(self._records.upward(prefix), ("", None))
        return record if record is not None and record.key.startswith(prefix) else None

    def ahead(self, ticket: Record) -> Record | None:
        """The ticket directly before this one, which stands."""
        line = ticket.key.rpartition("/")[0] + "/"
        at = ticket.key
        while ticket.ticket:
            found = self._records.below(at)
            if found is None or not found[0].startswith(line):
                break
            key, record = found
            if record.ticket and "/" not in key[len(line) :]:
                return record
            # Something else lies in between, perhaps with much under it: pass over that.
            child = line + key[len(line) :].partition("/")[0]
            at = child if key == child else child + "/"
        return None

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

    def changes(self, since: int) -> Iterator[str] | None:
        """The keys that changed after `since`, latest first; None if too much has happened."""
        if since < self._horizon():
            return None
        return self._changes(since)

    def changed(self, scope: str, since: int) -> bool:
        """Whether anything at `scope` or under it changed, or may have changed, after `since`."""
        if since < self._horizon():
            return True
        self._catch_up()
        return self._recent.get(scope, 0) > since

    def snapshot(self) -> Iterator[bytes]:
        """The state as it is now, in pieces, none of which costs anything before it is taken."""
        head = _Head(FORMAT, self.revision, self.era)
        return _pieces(head, self._leases.picture(), self._records.picture())

    def restore(self, pieces: Iterable[bytes]) -> None:
        """Put a snapshot in the place of this state. Raises, changing nothing, if it is none."""
        unread = iter(pieces)
        head = _decode_piece(next(unread, b""))
        if not isinstance(head, _Head) or head.format != FORMAT:
            raise ValueError(f"not a snapshot of a keyspace of format {FORMAT}")
        leases: Ordered[int, _Held] = Ordered()
        records: Ordered[str, Record] = Ordered()
        for piece in map(_decode_piece, unread):
            if isinstance(piece, _Leases):
                leases.append(piece.leases, [_Held(ttl_s, {}) for ttl_s in piece.ttls])
            elif isinstance(piece, _Records):
                records.append([record.key for record in piece.records], piece.records)
                for record in piece.records:
                    if record.lease and (held := leases.get(record.lease)) is not None:
                        held.keys[record.key] = None
        self._leases, self._records = leases, records
        self.revision = self._restored = head.counter
        self.era = head.era
        self._history.clear()
        self._recent.clear()
        self._recent_to = head.counter

    def _grant(self, command: Grant) -> bytes:
        self.revision += 1
        self._leases.put(self.revision, _Held(command.ttl_s, {}))
        return encode(Granted(self.revision))

    def _revoke(self, command: Revoke) -> bytes:
        self._end((command.lease,))
        return _DONE

    def _create(self, command: Create) -> bytes:
        held = self._leases.get(command.lease)
        if held is None:
            return _GONE
        standing = self._records.get(command.key)
        if standing is not None:
            return encode(Stands(standing))
        revision = self.revision = self.revision + 1
        self._write(Record(command.key, command.value, revision, revision, command.lease))
        held.keys[command.key] = None
        return encode(Written(revision, revision))

    def _put(self, command: Put) -> bytes:
        key = command.key
        sought = self._records.seek(key)
        standing = sought[2]
        if (standing.version if standing else 0) != command.if_version:
            return _REFUSED
        version = revision = self.revision = self.revision + 1
        ticket = False
        if standing is not None:
            self._unbind(standing)
            revision, ticket = standing.revision, standing.ticket
        self._records.put(key, Record(key, command.value, revision, version, 0, ticket), sought)
        self._history.append((version, key))
        return encode(Written(revision, version))

    def _delete(self, command: Delete) -> bytes:
        standing = self._records.get(command.key)
        if standing is None or command.if_version not in (0, standing.version):
            return _REFUSED
        self.revision += 1
        self._unbind(standing)
        self._remove(command.key)
        return _DONE

    def _enqueue(self, command: Enqueue) -> bytes:
        if not -RANKS < command.rank < RANKS:
            return encode(Malformed(f"a rank is a number of 64 bits, not {command.rank}"))
        held = self._leases.get(command.lease)
        if held is None:
            return _GONE
        revision = self.revision = self.revision + 1
        key = f"{command.line}/{RANKS - command.rank:020d}-{revision:020d}"
        self._write(Record(key, command.value, revision, revision, command.lease, True))
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

    def _end(self, leases: tuple[int, ...]) -> None:
        for lease in leases:
            held = self._leases.get(lease)
            if held is None:
                continue
            self.revision += 1
            self._leases.remove(lease)
            # Sorted, because a restored node does not know in which order they were bound.
            for key in sorted(held.keys):
                self._remove(key)

    def _write(self, record: Record) -> None:
        self._records.put(record.key, record)
        self._history.append((self.revision, record.key))

    def _remove(self, key: str) -> None:
        self._records.remove(key)
        self._history.append((self.revision, key))

    def _unbind(self, record: Record) -> None:
        if record.lease:
            held = self._leases.get(record.lease)
            if held is not None:
                del held.keys[record.key]

    def _horizon(self) -> int:
        """Changes up to this number may be missing from the history."""
        history = self._history
        return history[0][0] if len(history) == history.maxlen else self._restored

    def _changes(self, since: int) -> Iterator[str]:
        for revision, key in reversed(self._history):
            if revision <= since:
                return
            yield key

    def _catch_up(self) -> None:
        """Have `_recent` tell of every scope when it last changed. Only those who come back ask,
        so it is not kept while nobody does."""
        horizon = self._horizon()
        if self._recent_to < horizon or len(self._recent) > 8 * HISTORY:
            self._recent.clear()
            self._recent_to = horizon
        fresh: dict[str, int] = {}
        for revision, key in reversed(self._history):
            if revision <= self._recent_to:
                break
            scope = key
            while scope and scope not in fresh:  # or this change and all above it are known
                fresh[scope] = revision
                scope = scope.rpartition("/")[0]
        self._recent.update(fresh)
        self._recent_to = self.revision


def _under(picture: list[Block[str, Record]], prefix: str) -> Iterator[Record]:
    for keys, records in picture:
        for key, record in zip(keys, records, strict=True):
            if key.startswith(prefix):
                yield record
            elif key > prefix:
                return


def _pieces(
    head: _Head, leases: list[Block[int, _Held]], records: list[Block[str, Record]]
) -> Iterator[bytes]:
    yield encode(head)
    # Cut by size, not by block: how keys lie in blocks differs between nodes.
    granted = _Leases([], [])
    for numbers, held in leases:
        for number, each in zip(numbers, held, strict=True):
            granted.leases.append(number)
            granted.ttls.append(each.ttl_s)
            if len(granted.leases) == LEASES:
                yield encode(granted)
                granted = _Leases([], [])
    if granted.leases:
        yield encode(granted)
    piece: list[Record] = []
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
