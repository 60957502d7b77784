"""Inspects, copies and restores the data directory of a stopped node.

A backup is one checksummed file: the state of a snapshot and the entries that follow it. Its last
entries may never have been committed; a restored cluster commits them, as the old one might have. A
restored cluster is another cluster: it has an identity of its own, so no node of the old one can
take part in it, and a command is appended that raises the token floor above all tokens that the old
cluster may have given out since.

Imports `data_directory`, `framed_files`, the consensus types, errors, msgspec.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from doyen.errors import StoreUnusable
from doyen.quorum.consensus.core import EntryKind, LogEntry, Membership, Snapshot
from doyen.quorum.node.data_directory import (
    DirectoryIdentity,
    Findings,
    Installed,
    LogWriter,
    PutEntries,
    Segment,
    SnapshotReader,
    SnapshotWriter,
    Stated,
    claim,
    read_identity,
    survey,
    write_identity,
)
from doyen.quorum.node.framed_files import FileSystem, FrameReader, FrameWriter

REMEDY = "Use another backup."
ATTEMPTS = 3
CHUNK_BYTES = 1 << 20
"""About how much of the log is in one piece of a backup."""


class Contents(Struct, frozen=True):
    """The contents of a data directory, or of a backup."""

    identity: DirectoryIdentity
    state: Any
    """The protocol's own state, as plain values."""
    snapshot: Snapshot | None
    first: int
    """The index of the first entry that follows the snapshot."""
    last: int
    """The index of the last entry: `first - 1` if there is none."""
    generation: int
    """Of the last entry, or of the snapshot. Of two data directories, the one with the higher
    generation, and then the higher index, has more."""
    bytes: int
    segments: Sequence[Segment] = ()
    torn: int = 0
    """How many bytes of an unfinished batch are at the end; it was not acknowledged."""


class _Head(Struct, frozen=True, array_like=True):
    identity: DirectoryIdentity
    state: bytes
    snapshot: Snapshot | None


class _Piece(Struct, frozen=True, array_like=True, tag=0):
    """A piece of the snapshot. Pieces of the log (`PutEntries`) follow."""

    data: bytes


_decode = msgspec.msgpack.Decoder(_Piece | PutEntries).decode


def inspect(folder: Path) -> Contents:
    """Read a data directory, without changes. A node may be using it; then the result is a state
    that it had during the reading."""
    for attempt in range(ATTEMPTS):
        try:
            return _inspect(FileSystem(), folder)
        except (FileNotFoundError, StoreUnusable):
            # A running node may have created a segment or removed a file meanwhile.
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def _inspect(disk: FileSystem, folder: Path) -> Contents:
    identity, findings = _read(disk, folder)
    ledger = findings.ledger
    size = sum(segment.bytes for segment in findings.segments)
    if ledger.kept:
        with closing(SnapshotReader(disk, folder, ledger.kept)) as reader:
            size += reader.bytes
    return Contents(
        identity,
        _plain(ledger.state),
        ledger.kept.snapshot if ledger.kept else None,
        ledger.base + 1,
        ledger.end,
        _generation(ledger.kept.snapshot if ledger.kept else None, ledger.following()),
        size,
        findings.segments,
        findings.torn,
    )


def backup(folder: Path, target: Path) -> Contents:
    """Copy the data directory of a stopped node into one file."""
    disk = FileSystem()
    if not folder.is_dir():
        raise StoreUnusable(f"{folder} does not exist: name the data directory of a node.")
    lock = claim(disk, folder)
    try:
        identity, findings = _read(disk, folder)
        ledger = findings.ledger
        if ledger.kept is None:
            return write_backup(target, identity, ledger.state, None, (), ledger.following())
        with closing(SnapshotReader(disk, folder, ledger.kept)) as reader:
            return write_backup(
                target, identity, ledger.state, reader.head, reader, ledger.following()
            )
    finally:
        disk.close(lock)


def write_backup(
    target: Path,
    identity: DirectoryIdentity,
    state: bytes,
    snapshot: Snapshot | None,
    pieces: Iterable[bytes],
    entries: Sequence[LogEntry] = (),
) -> Contents:
    """Write a backup from pieces, for instance from a snapshot of a running node."""
    writer = FrameWriter(FileSystem(), target, _Head(identity, state, snapshot))
    first = snapshot.index + 1 if snapshot else 1
    try:
        for piece in pieces:
            writer.write(msgspec.msgpack.encode(_Piece(piece)))
        for put in _chunks(first, entries):
            writer.write(msgspec.msgpack.encode(put))
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    last = first + len(entries) - 1
    generation = _generation(snapshot, entries)
    return Contents(identity, _plain(state), snapshot, first, last, generation, writer.bytes)


def _generation(snapshot: Snapshot | None, entries: Sequence[LogEntry]) -> int:
    if entries:
        return entries[-1].generation
    return snapshot.generation if snapshot else 0


def restore(
    source: Path,
    folder: Path,
    identity: DirectoryIdentity,
    membership: Membership,
    commands: Sequence[bytes] = (),
) -> Contents:
    """Create a data directory, for a new cluster, from a backup. `commands` are appended, each the
    data of an entry; one of them raises the token floor."""
    disk = FileSystem()
    with closing(FrameReader(disk, source, _Head, REMEDY)) as reader:
        head: _Head = reader.head
        _check_restorable(head, source, folder, identity)
        while reader.read() is not None:
            pass
    with closing(FrameReader(disk, source, _Head, REMEDY)) as reader:
        lock = claim(disk, folder)
        try:
            log = LogWriter(disk, folder, None)
            try:
                _fill(disk, folder, log, reader, membership, commands)
            finally:
                log.close()
            # Last: a directory without an identity is refused, so a partial one is never used.
            write_identity(disk, folder, identity)
        finally:
            disk.close(lock)
    return inspect(folder)


def _check_restorable(head: _Head, source: Path, folder: Path, identity: DirectoryIdentity) -> None:
    if head.identity.protocol != identity.protocol:
        raise StoreUnusable(
            f"{source} is of a cluster that runs {head.identity.protocol}, not"
            f" {identity.protocol}: restore it with that protocol."
        )
    if head.identity.cluster == identity.cluster:
        raise StoreUnusable(
            f"{source} is of cluster {identity.cluster!r} itself: give the restored one another"
            " name (--cluster), so that no node of the old one can take part in it."
        )
    if folder.exists() and any(folder.iterdir()):
        raise StoreUnusable(f"{folder} is not empty: restore into a new data directory.")


def _fill(
    disk: FileSystem,
    folder: Path,
    log: LogWriter,
    reader: FrameReader,
    membership: Membership,
    commands: Sequence[bytes],
) -> None:
    head: _Head = reader.head
    if head.state:
        log.append([Stated(head.state)])
    generation = end = 0
    writer = None
    if head.snapshot:
        generation, end = head.snapshot.generation, head.snapshot.index
        writer = SnapshotWriter(disk, folder, Snapshot(end, generation, membership))
    for record in _records(reader):
        if isinstance(record, _Piece):
            if writer is None:
                raise StoreUnusable(f"{reader.path} is malformed: pieces without a snapshot.")
            writer.write(record.data)
            continue
        if writer:
            writer.finish()
            log.append([Installed(writer.kept)])
            writer = None
        log.append([PutEntries(record.first, False, [_without_members(e) for e in record.entries])])
        end = record.first + len(record.entries) - 1
        generation = record.entries[-1].generation
    if writer:
        writer.finish()
        log.append([Installed(writer.kept)])
    added = [LogEntry(generation, EntryKind.MEMBERSHIP, msgspec.msgpack.encode(membership))]
    added += [LogEntry(generation, EntryKind.COMMANDS, command) for command in commands]
    log.append([PutEntries(end + 1, False, added)])


def _without_members(entry: LogEntry) -> LogEntry:
    """Drop the memberships of the old cluster, which do not apply to the new one."""
    return (
        LogEntry(entry.generation, EntryKind.NOTHING, b"")
        if entry.kind == EntryKind.MEMBERSHIP
        else entry
    )


def _records(reader: FrameReader) -> Iterator[_Piece | PutEntries]:
    while (frame := reader.read()) is not None:
        yield _decode(frame)


def _chunks(first: int, entries: Sequence[LogEntry]) -> Iterator[PutEntries]:
    start = size = 0
    for at, entry in enumerate(entries):
        size += len(entry.data)
        if size > CHUNK_BYTES and at > start:
            yield PutEntries(first + start, False, entries[start:at])
            start, size = at, len(entry.data)
    if start < len(entries):
        yield PutEntries(first + start, False, entries[start:])


def _read(disk: FileSystem, folder: Path) -> tuple[DirectoryIdentity, Findings]:
    identity = read_identity(disk, folder) if folder.is_dir() else None
    findings = survey(disk, folder) if identity else None
    if identity is None or findings is None:
        raise StoreUnusable(f"{folder} has no journal: name the data directory of a node.")
    return identity, findings


def _plain(state: bytes) -> Any:
    return msgspec.msgpack.decode(state) if state else None
