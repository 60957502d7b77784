"""Snapshots of the keyspace: the pieces that one consists of, encoded and decoded.

The first piece is the `SnapshotHeader`. Leases, ended leases, entries and the history follow in
this order, each in pieces of limited size. Format 1 is that of version 1 of the state; it has no
ended leases and no history. Format 2 is that of all later versions. Imports msgspec, `commands`,
`history`, `sorted_map` and `versions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
from msgspec import Struct

from doyen.quorum.keyspace.commands import StoredEntry, encode
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


Piece = SnapshotHeader | Leases | StoredEntries | EndedLeases | Changes
decode_piece: Callable[[bytes], Piece] = msgspec.msgpack.Decoder(Piece).decode


def encode_pieces(
    head: SnapshotHeader,
    leases: Iterable[tuple[int, float]],
    ended: list[int],
    blocks: list[Block[str, StoredEntry]],
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
