"""Snapshots of the keyspace: the pieces that one consists of, encoded and decoded.

The first piece is the `SnapshotHeader`. Leases, ended leases, entries and the history follow in
this order, each in pieces of limited size. Format 1 is that of version 1 of the state; it has no
ended leases and no history. Format 2 is that of all later versions; the etcd keyspace, of versions
that have it, comes last. Imports msgspec and the other modules of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
from msgspec import Struct

from doyen.quorum.keyspace.commands import StoredEntry, encode
from doyen.quorum.keyspace.etcd_requests import EtcdRecord
from doyen.quorum.keyspace.history import Change
from doyen.quorum.keyspace.sorted_map import Block
from doyen.quorum.keyspace.versions import FIRST

QUOTA: Final = 1 << 30
"""The quota of a cluster in which no leader has set another."""
PIECE_BYTES: Final = 2**18
"""About how many bytes of entries a piece has."""
PIECE_ITEMS: Final = 2**12
"""How many leases or changes a piece has at most."""
FORMATS: Final = (1, 2)


class SnapshotHeader(Struct, frozen=True, array_like=True, tag=0):
    """The first piece of a snapshot. Format 1 ends with the era."""

    format: int
    revision: int
    era: int
    version: int = FIRST
    floor: int = 0
    """The floor of the history."""
    quota: int = QUOTA
    alarm: bool = False


class Leases(Struct, frozen=True, array_like=True, tag=1):
    """Leases in ascending order, with their ttls."""

    leases: list[int]
    ttls: list[float]


class StoredEntries(Struct, frozen=True, array_like=True, tag=2):
    """Entries in the order of their keys."""

    entries: list[StoredEntry]


class EndedLeases(Struct, frozen=True, array_like=True, tag=3):
    """Leases that have ended and whose keys are not all removed, in the order of their ends."""

    leases: list[int]


class Changes(Struct, frozen=True, array_like=True, tag=4):
    """Changes of the history, oldest first."""

    changes: list[Change]


class EtcdHeader(Struct, frozen=True, array_like=True, tag=5):
    """The first piece of the etcd keyspace."""

    revision: int
    compacted: int


class EtcdLeases(Struct, frozen=True, array_like=True, tag=6):
    """Leases with ids of etcd, in the order of their numbers."""

    leases: list[int]
    ids: list[int]


class EtcdRecords(Struct, frozen=True, array_like=True, tag=7):
    """What keys of the etcd keyspace had before the changes that follow, in the order of keys."""

    records: list[EtcdRecord]


class EtcdChanges(Struct, frozen=True, array_like=True, tag=8):
    """Changes of the etcd keyspace, oldest first."""

    records: list[EtcdRecord]


Piece = (
    SnapshotHeader
    | Leases
    | StoredEntries
    | EndedLeases
    | Changes
    | EtcdHeader
    | EtcdLeases
    | EtcdRecords
    | EtcdChanges
)
decode_piece: Callable[[bytes], Piece] = msgspec.msgpack.Decoder(Piece).decode


def encode_pieces(
    head: SnapshotHeader,
    leases: Iterable[tuple[int, float]],
    ended: list[int],
    blocks: Iterable[Block[str, StoredEntry]],
    changes: list[Change],
) -> Iterator[bytes]:
    """Encode a snapshot, each piece when it is taken."""
    if head.format == FORMATS[0]:  # members of the first release know no more fields
        yield encode([0, head.format, head.revision, head.era])
    else:
        yield encode(head)
    # Cut by size, not by block: how keys are distributed over blocks differs between nodes.
    granted = Leases([], [])
    for lease, ttl_s in leases:
        granted.leases.append(lease)
        granted.ttls.append(ttl_s)
        if len(granted.leases) == PIECE_ITEMS:
            yield encode(granted)
            granted = Leases([], [])
    if granted.leases:
        yield encode(granted)
    for at in range(0, len(ended), PIECE_ITEMS):
        yield encode(EndedLeases(ended[at : at + PIECE_ITEMS]))
    piece: list[StoredEntry] = []
    size = 0
    for _, entries in blocks:
        for entry in entries:
            piece.append(entry)
            size += len(entry.key) + len(entry.value) + 16
            if size >= PIECE_BYTES:
                yield encode(StoredEntries(piece))
                piece, size = [], 0
    if piece:
        yield encode(StoredEntries(piece))
    for at in range(0, len(changes), PIECE_ITEMS):
        yield encode(Changes(changes[at : at + PIECE_ITEMS]))


def encode_etcd(
    header: EtcdHeader,
    leases: list[tuple[int, int]],
    base: Iterable[EtcdRecord],
    changes: Iterable[EtcdRecord],
) -> Iterator[bytes]:
    """Encode the etcd keyspace, each piece when it is taken. `leases` are numbers and ids."""
    yield encode(header)
    for at in range(0, len(leases), PIECE_ITEMS):
        some = leases[at : at + PIECE_ITEMS]
        yield encode(EtcdLeases([number for number, _ in some], [each for _, each in some]))
    for kind, records in ((EtcdRecords, base), (EtcdChanges, changes)):
        piece: list[EtcdRecord] = []
        size = 0
        for record in records:
            piece.append(record)
            size += len(record.key) + len(record.value) + 32
            if size >= PIECE_BYTES:
                yield encode(kind(piece))
                piece, size = [], 0
        if piece:
            yield encode(kind(piece))
