"""What can be done to a journal's folder while its node is stopped: look, copy, restore.

A backup is one file, checksummed throughout: the state of a snapshot and the entries that follow
it. Entries at its end may never have been committed; a cluster restored from it commits them, as
it might have without the restoring. A restored cluster is another cluster: it has an identity of
its own, so that no node of the old one can take part in it, and whoever restores appends the
command that lifts tokens above all that the old cluster may have given out since.

Imports `folder`, `frames`, the words of consensus, errors, msgspec.
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

__all__ = ["Contents", "backup", "inspect", "restore", "write_backup"]

REMEDY = "Use another backup."
ATTEMPTS = 3
CHUNK_BYTES = 1 << 20
"""About how much of the log goes into one piece of a backup."""


class Contents(Struct, frozen=True):
    """What is in a folder, or in a backup."""

    identity: DirectoryIdentity
    state: Any
    """The protocol's own, in plain values."""
    snapshot: Snapshot | None
    first: int
    """The index of the first entry that follows the snapshot."""
    last: int
    """The index of the last entry: `first - 1` if there is none."""
    generation: int
    """Of the last entry, or of the snapshot. The later it is, and then the higher the index, the
    more a folder has."""
    bytes: int
    segments: Sequence[Segment] = ()
    torn: int = 0
    """How many bytes of an unfinished batch there are at the end; nothing of it was
    acknowledged."""


class _Head(Struct, frozen=True, array_like=True):
    identity: DirectoryIdentity
    state: bytes
    snapshot: Snapshot | None


class _Piece(Struct, frozen=True, array_like=True, tag=0):
    """A piece of the snapshot. What follows them are `PutEntries`s."""

    data: bytes


_decode = msgspec.msgpack.Decoder(_Piece | PutEntries).decode


def inspect(folder: Path) -> Contents:
    """What is in a folder. Changes nothing; a node may be running there, and the answer is then as
    old as the reading."""
    for attempt in range(ATTEMPTS):
        try:
            return _inspect(FileSystem(), folder)
        except (FileNotFoundError, StoreUnusable):
            # A running node may have begun a segment or removed a file while we read.
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
    """Copy what is in the folder of a node that is stopped into one file."""
    disk = FileSystem()
    if not folder.is_dir():
        raise StoreUnusable(f"{folder} does not exist: name the folder of a node.")
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
    """Make a backup of what somebody else has read: a running node's snapshot, say."""
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
    """Begin a new cluster with what a backup holds, in a folder that is empty. `commands` are
    appended, each the data of an entry: the one that lifts tokens among them."""
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
            # Last: a folder with a log and no identity is refused, so half of it is never used.
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
        raise StoreUnusable(f"{folder} is not empty: restore into a new folder.")


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
                raise StoreUnusable(f"{reader.path} makes no sense: pieces of no snapshot.")
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
    """The members of the old cluster mean nothing to the new one."""
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
        raise StoreUnusable(f"{folder} holds no journal: name the folder of a node.")
    return identity, findings


def _plain(state: bytes) -> Any:
    return msgspec.msgpack.decode(state) if state else None
