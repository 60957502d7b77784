"""The files in a node's data directory, and how they are read after a crash.

    identity                     cluster, node and protocol that the directory belongs to
    member                       its random id, and the cluster's (see `membership`)
    lock                         held by the process that writes here
    log-0000000001, …            segments of the log
    snapshot-<index>-<unique>    snapshots; the log names the one in force
    reserve                      space in reserve, released for votes when the disk is full

The log and the snapshots are files of frames (see `framed_files`).

A frame of the log is a *batch*: records that are written together and synced before anything else
is written. How a damaged log is read follows from that:

- At most one batch, the last, was not yet on disk when the process ended. If it is damaged, it was
  not acknowledged, and is cut off.
- Damage before an intact batch is damage to acknowledged data: the directory is refused. When no
  batch follows for a moment, or at the end, an empty *seal* is written after the last batch (and
  overwritten by the next), so this also holds for the last batch of an idle node. If a node is
  killed while it writes, damage to its last batch cannot be told from an unfinished write.
- The next segment is created before the batch that fills the current one is written. That batch is
  marked, and a log that ends with it has lost a segment.

The head of a segment holds everything that earlier segments determine, except for entries: the
protocol's state, the snapshot in force, where the log ended. Earlier segments can be removed as
soon as the snapshot covers their entries. A snapshot is in force when the log says so; a file that
no record names is unused.

Knows no event loops and no threads. Imports `framed_files`, the consensus types, errors, msgspec.
"""

from __future__ import annotations

import gc
import json
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from doyen.errors import StoreUnusable
from doyen.quorum.consensus.core import EntryKind, LogEntry, Snapshot
from doyen.quorum.node import framed_files as frames
from doyen.quorum.node.framed_files import (
    FORMAT,
    FRAME_LIMIT,
    FRAME_SIZE,
    LAST,
    NO_ROOM,
    ORDINARY,
    REMEDY,
    SEAL,
    FileSystem,
    FrameReader,
    FrameWriter,
)
from doyen.quorum.node.membership import NodeMember

SEGMENT_BYTES = 64 << 20
AHEAD_BYTES = 1 << 20
"""How many zeros are written ahead of the batches in a segment."""


S = TypeVar("S", bound=Struct)

# Identity.


class DirectoryIdentity(Struct, frozen=True):
    """The node that a data directory belongs to. A node that used another's could vote twice."""

    cluster: str
    node: str
    protocol: str
    format: int = FORMAT


def claim(disk: FileSystem, folder: Path) -> int:
    """Lock the data directory for this process, until the returned descriptor is closed."""
    disk.make_folder(folder)
    path = folder / "lock"
    try:
        fd = disk.open(path, write=True)
    except FileNotFoundError:
        fd = disk.create(path)
    if not disk.lock(fd):
        pid = disk.read(fd, 20, 0).decode(errors="replace").strip() or "unknown"
        disk.close(fd)
        raise StoreUnusable(
            f"{folder} is in use by process {pid}: stop that process, or give this node a data"
            " directory of its own."
        )
    with suppress(OSError):  # for operators; a full disk must not prevent the opening
        disk.write(fd, b"%-19d\n" % os.getpid(), 0)
    return fd


def write_identity(disk: FileSystem, folder: Path, identity: DirectoryIdentity) -> None:
    _write(disk, folder / "identity", identity)


def read_identity(disk: FileSystem, folder: Path) -> DirectoryIdentity | None:
    return _read(disk, folder / "identity", DirectoryIdentity)


def write_member(disk: FileSystem, folder: Path, member: NodeMember) -> None:
    """In a file of its own, since earlier releases read `identity`."""
    _write(disk, folder / "member", member)


def read_member(disk: FileSystem, folder: Path) -> NodeMember | None:
    return _read(disk, folder / "member", NodeMember)


def _write(disk: FileSystem, path: Path, what: Struct) -> None:
    about = msgspec.to_builtins(what)
    about["checksum"] = zlib.crc32(msgspec.json.encode(what))
    frames.put_file(disk, path, json.dumps(about, indent=1).encode() + b"\n")


def _read(disk: FileSystem, path: Path, kind: type[S]) -> S | None:
    try:
        data = frames.read_all(disk, path)
    except FileNotFoundError:
        return None
    try:
        about = json.loads(data)
        checksum = about.pop("checksum")
        found = msgspec.convert(about, kind)
    except (ValueError, KeyError, AttributeError, msgspec.ValidationError):
        raise frames.damaged(
            path, 0, "it does not name the node that this directory belongs to"
        ) from None
    if checksum != zlib.crc32(msgspec.json.encode(found)):
        raise frames.damaged(path, 0, "its checksum is wrong")
    return found


def check_identity(folder: Path, found: DirectoryIdentity, wanted: DirectoryIdentity) -> None:
    if found.format > wanted.format:
        raise StoreUnusable(
            f"{folder} was written by a later release of doyen (format {found.format}; this one"
            f" supports {wanted.format}): install that release."
        )
    for field, setting in (("cluster", "cluster"), ("node", "id"), ("protocol", "protocol")):
        theirs, ours = getattr(found, field), getattr(wanted, field)
        if theirs != ours:
            raise StoreUnusable(
                f"{folder} belongs to {field} {theirs!r}, and this is {field} {ours!r}: set"
                f" {setting} to {theirs!r}, or give this node the data directory it had before, or"
                " an empty one."
            )


# Records: what the log says.


class Kept(Struct, frozen=True, array_like=True):
    """A snapshot, and the name of its file."""

    snapshot: Snapshot
    file: str


class PutEntries(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Entries at `first` and after; unless `keep`, what stood beyond them is cut off."""

    first: int
    keep: bool
    entries: Sequence[LogEntry]


class Stated(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The protocol's own state, encoded."""

    state: bytes


class Took(Struct, frozen=True, array_like=True, tag=3):
    """A snapshot that this node took is in force."""

    kept: Kept


class Installed(Struct, frozen=True, array_like=True, tag=4):
    """A snapshot of the leader is in force, and the log after it is empty."""

    kept: Kept


Record = PutEntries | Stated | Took | Installed

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Record]).decode

HOLE = LogEntry(0, EntryKind.NOTHING, b"")
"""A gap in the log of a protocol that fills it out of order."""


class Mark(Struct):
    """The state that the log leads to, without its entries."""

    end: int = 0
    """The index of the last entry."""
    state: bytes = b""
    kept: Kept | None = None

    @property
    def base(self) -> int:
        """The index up to which the snapshot replaces the log."""
        return self.kept.snapshot.index if self.kept else 0

    def advance(self, record: Record) -> None:
        if isinstance(record, PutEntries):
            end = record.first + len(record.entries) - 1
            if not record.keep and record.first > self.end + 1:
                raise ValueError(f"entries at {record.first} after a log that ends at {self.end}")
            self.end = max(end, self.end) if record.keep else end
        elif isinstance(record, Stated):
            self.state = record.state
        else:
            self.kept = record.kept
            if isinstance(record, Installed):
                self.end = record.kept.snapshot.index


class Ledger(Mark):
    """The state that the log leads to. `entries` begin at `start`, which may be before the end of
    the snapshot."""

    start: int = 0
    entries: list[LogEntry] = []

    def __post_init__(self) -> None:
        self.start = self.end + 1

    def advance(self, record: Record) -> None:
        if isinstance(record, PutEntries) and record.first == self.end + 1:  # most frequent
            self.entries += record.entries
            self.end += len(record.entries)
            return
        super().advance(record)
        if isinstance(record, PutEntries):
            self._put(record)
        elif isinstance(record, Installed):
            self.start = self.end + 1
            self.entries.clear()

    def _put(self, put: PutEntries) -> None:
        entries = self.entries
        at = put.first - self.start
        new: Sequence[LogEntry] = put.entries
        if put.keep:
            if at < 0:
                new, at = new[-at:], 0
            entries += [HOLE] * (at - len(entries))
            entries[at : at + len(new)] = new
        else:
            if at < 0:
                self.start, at = put.first, 0
            entries[at:] = new

    def following(self) -> list[LogEntry]:
        """The entries that follow the snapshot."""
        covered = self.base + 1 - self.start
        return self.entries[covered:] if covered > 0 else self.entries


# Segments.


class SegmentHead(Struct, frozen=True, array_like=True):
    """The head of a segment: everything that earlier segments determine, except for entries."""

    number: int
    batch: int
    """The number of its first batch."""
    first: int
    """The index after the last entry when the segment was created."""
    state: bytes
    kept: Kept | None


class Segment(Struct, frozen=True):
    """A segment that was read."""

    number: int
    file: str
    bytes: int
    batches: int
    end: int
    """The index of the last entry at the end of the segment."""


class Findings(Struct):
    """The result of reading the log."""

    ledger: Ledger
    segments: list[Segment]
    salt: int = 0
    """Of the last segment, like the fields below."""
    batch: int = 1
    """The number of the next batch."""
    offset: int = 0
    """The offset at which it goes."""
    last: tuple[str, int, int] | None = None
    """File, start and end of the last batch, which may be in the segment before."""
    sealed: bool = False
    torn: int = 0
    """How many bytes of an unfinished batch follow."""
    unused: list[str] = []
    """Files that nothing refers to, left by a crash."""


_SEGMENT = re.compile(r"log-(\d{10})")
_OURS = re.compile(r"(log-\d{10}|snapshot-\d+-[0-9a-f]{8})(\.new)?|(identity|member|reserve)\.new")


def _segment_name(number: int) -> str:
    return f"log-{number:010d}"


def survey(disk: FileSystem, folder: Path) -> Findings | None:
    """Read the log, without changes. None if there is none."""
    names = disk.names(folder)
    numbers = sorted(int(found[1]) for name in names if (found := _SEGMENT.fullmatch(name)))
    if not numbers:
        return None
    # Segments are removed oldest first, but after a crash an older one may still be there.
    first = next(n for n in range(numbers[-1], -1, -1) if n - 1 not in numbers)
    collecting = gc.isenabled()
    gc.disable()
    try:
        findings = _replay(disk, folder, range(first, numbers[-1] + 1))
    finally:
        if collecting:
            gc.enable()
    in_force = {segment.file for segment in findings.segments}
    if findings.ledger.kept:
        in_force.add(findings.ledger.kept.file)
    findings.unused = [n for n in names if _OURS.fullmatch(n) and n not in in_force]
    return findings


def _replay(disk: FileSystem, folder: Path, numbers: Sequence[int]) -> Findings:
    findings: Findings | None = None
    for number in numbers:
        path = folder / _segment_name(number)
        data = frames.read_all(disk, path)
        salt, head, start = frames.read_head(path, data, SegmentHead)
        if head.number != number:
            raise frames.damaged(
                path, 0, f"it is segment {head.number} under the name of another one"
            )
        if findings is None:
            ledger = Ledger(head.first - 1, head.state, head.kept)
            findings = Findings(ledger, [], batch=head.batch)
        elif findings.offset >= 0:
            # The segment before was not filled, so this one was created for a batch that was never
            # finished, and is empty.
            if number != numbers[-1] or frames.valid_after(data, start, salt) is not None:
                before = folder / _segment_name(number - 1)
                raise frames.damaged(before, findings.offset, "its last batch is missing")
            break
        elif (head.batch, head.first) != (findings.batch, findings.ledger.end + 1):
            raise frames.damaged(path, 0, "it does not follow the segment before it")
        findings.salt = salt
        _replay_segment(findings, path, data, start, number)
    assert findings is not None
    if findings.offset < 0:
        lost = folder / _segment_name(numbers[-1] + 1)
        raise StoreUnusable(f"{lost} is missing. {REMEDY}")
    ledger = findings.ledger
    if ledger.start > ledger.base + 1:
        raise StoreUnusable(
            f"{folder / _segment_name(numbers[0])} begins at entry {ledger.start}, and the last"
            f" snapshot named by the log ends at {ledger.base}: {_segment_name(numbers[0] - 1)} is"
            f" missing, or the end of {_segment_name(numbers[-1])}. {REMEDY}"
        )
    return findings


def _replay_segment(findings: Findings, path: Path, data: bytes, offset: int, number: int) -> None:
    """Read the batches of one segment; `findings.offset` is negative if it was filled."""
    ledger, salt, batch = findings.ledger, findings.salt, findings.batch
    begun, flag, last = batch, ORDINARY, 0
    advance = ledger.advance
    view = memoryview(data)
    while flag == ORDINARY and (found := frames.valid_at(view, offset, salt)):
        flag, this, end = found
        if this != batch or flag not in (ORDINARY, LAST, SEAL):
            flag = ORDINARY
            break
        if flag == SEAL:
            break
        try:
            for record in _decode(view[offset + FRAME_SIZE : end]):
                advance(record)
        except (msgspec.MsgspecError, ValueError) as error:
            raise frames.damaged(path, offset, f"a batch cannot be decoded ({error})") from None
        last, offset, batch = offset, end, batch + 1
    if last:
        findings.last = (path.name, last, offset)
    findings.batch, findings.sealed = batch, flag == SEAL
    findings.segments.append(Segment(number, path.name, len(data), batch - begun, ledger.end))
    if flag == LAST:
        findings.offset = -1
        return
    findings.offset = offset
    rest = offset + FRAME_SIZE if flag == SEAL else offset
    valid = frames.valid_after(data, rest, salt)
    if valid is not None:
        raise frames.damaged(
            path, offset, f"a batch is damaged, and an intact one follows at {valid}"
        )
    findings.torn = len(data[rest:].rstrip(b"\0"))


class LogWriter:
    """The log, open for writing. When `append` returns, the batch is on disk."""

    def __init__(
        self,
        disk: FileSystem,
        folder: Path,
        findings: Findings | None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
        synced: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`synced` is called with the seconds that each sync of a batch took."""
        self._disk = disk
        self._synced = synced
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._ahead_bytes = ahead_bytes
        self._older: list[tuple[str, int]] = []
        """Filled segments, oldest first: the name, and the index of the last entry at the end."""
        self.unused: list[str] = []
        """Files that nothing refers to any more."""
        if findings is None:
            self._mark = Mark()
            self._batch = 1
            self._fd = -1
            self._enter(1, *self._create(1, 1, self._mark))
        else:
            self._resume(findings)

    def _resume(self, findings: Findings) -> None:
        ledger = findings.ledger
        self._mark = Mark(ledger.end, ledger.state, ledger.kept)
        self._batch = findings.batch
        *older, current = findings.segments
        self._older = [(segment.file, segment.end) for segment in older]
        self._number = current.number
        self._salt = findings.salt
        self._path = self._folder / current.file
        self._offset = findings.offset
        self._allocated = current.bytes
        self._fd = self._disk.open(self._path, write=True)
        if findings.torn:
            self._disk.cut(self._fd, self._offset)
            self._allocated = self._offset
        self._disk.sync(self._fd, self._path)
        if findings.last and not findings.sealed:
            self._rewrite(*findings.last)
        for name in findings.unused:
            self._disk.remove(self._folder / name)
        self._disk.sync_folder(self._folder)

    def _rewrite(self, name: str, start: int, end: int) -> None:
        """Write a batch again of which it is not known whether it was synced. After a failed sync
        the kernel may have it in memory, marked as clean, without having written it."""
        path = self._folder / name
        fd = self._disk.open(path, write=True)
        try:
            self._disk.write(fd, self._disk.read(fd, end - start, start), start)
            self._disk.sync(fd, path)
        finally:
            self._disk.close(fd)

    def append(self, records: Sequence[Record]) -> None:
        """Write one batch. If there is no space, nothing has changed and it can be retried; after
        any other error the state of the disk is unknown."""
        after = Mark(self._mark.end, self._mark.state, self._mark.kept)
        replaced = []
        for record in records:
            if isinstance(record, Took | Installed) and after.kept:
                replaced.append(after.kept.file)
            after.advance(record)
        payload = _encode(records)
        if len(payload) > FRAME_LIMIT:
            raise ValueError(f"a batch of {len(payload)} bytes is too long")
        end = self._offset + FRAME_SIZE + len(payload)
        following = None
        if end > self._segment_bytes:
            following = self._create(self._number + 1, self._batch + 1, after)
        flag = LAST if following else ORDINARY
        try:
            data = frames.frame(payload, flag, self._batch, self._salt)
            self._disk.write(self._fd, data, self._offset)
            if end > self._allocated:
                self._write_ahead(end)
        except OSError:
            if following:
                self._disk.close(following[0])
            raise
        began = time.perf_counter()
        self._disk.sync(self._fd, self._path)
        self._synced(time.perf_counter() - began)
        self._mark = after
        self._batch += 1
        self._offset = end
        self.unused += replaced
        if following:
            self._older.append((self._path.name, after.end))
            self._enter(self._number + 1, *following)
        while self._older and self._older[0][1] <= after.base:
            self.unused.append(self._older.pop(0)[0])

    def seal(self) -> None:
        """Mark the last batch as synced. The mark itself need not reach the disk."""
        self._disk.write(self._fd, frames.frame(b"", SEAL, self._batch, self._salt), self._offset)

    def take_unused(self) -> list[Path]:
        """The files that nothing refers to any more; the caller removes them."""
        found = [self._folder / name for name in self.unused]
        self.unused.clear()
        return found

    def close(self) -> None:
        self._disk.close(self._fd)

    def _write_ahead(self, end: int) -> None:
        """A sync that need not record a new length of the file is much faster."""
        self._allocated = end
        try:
            self._disk.write(self._fd, bytes(self._ahead_bytes), end)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        else:
            self._allocated += self._ahead_bytes

    def _create(self, number: int, batch: int, mark: Mark) -> tuple[int, int, int]:
        """Create a segment durably. Returns descriptor, salt and the offset of the first batch."""
        path = self._folder / _segment_name(number)
        new = path.with_name(path.name + ".new")
        head = SegmentHead(number, batch, mark.end + 1, mark.state, mark.kept)
        salt, data = frames.new_head(head)
        fd = self._disk.create(new)
        try:
            self._disk.write(fd, data, 0)
            self._disk.sync(fd, new)
            self._disk.rename(new, path)
            self._disk.sync_folder(self._folder)
        except BaseException:
            self._disk.close(fd)
            raise
        return fd, salt, len(data)

    def _enter(self, number: int, fd: int, salt: int, offset: int) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._number = number
        self._path = self._folder / _segment_name(number)
        self._fd, self._salt, self._offset = fd, salt, offset
        self._allocated = offset


# Snapshots.


class SnapshotWriter(FrameWriter):
    """Writes a snapshot."""

    def __init__(self, disk: FileSystem, folder: Path, snapshot: Snapshot) -> None:
        name = f"snapshot-{snapshot.index}-{secrets.token_hex(4)}"
        super().__init__(disk, folder / name, snapshot)
        self.kept = Kept(snapshot, name)


class SnapshotReader(FrameReader):
    """Reads a snapshot."""

    def __init__(self, disk: FileSystem, folder: Path, kept: Kept) -> None:
        super().__init__(disk, folder / kept.file, Snapshot)
        if self.head != kept.snapshot:
            self.close()
            raise frames.damaged(self.path, 0, "it is not the snapshot that the log names")

    def __iter__(self) -> Iterator[bytes]:
        while (piece := self.read()) is not None:
            yield piece
