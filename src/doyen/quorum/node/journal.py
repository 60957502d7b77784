"""A node's log and snapshots on disk.

One thread writes the log. It takes everything that is queued, writes it as one batch, syncs,
reports to the event loop, and takes what was queued meanwhile. At most one sync is in flight, and
its cost is shared by everything that arrived during the one before. Snapshots are written and read
on another thread, in small steps, so that neither the event loop nor the log waits for them.

Failures of the disk:

- **A sync fails.** The state of the disk is unknown. The sync is not repeated: `failed` is called,
  and the process must end. Opening the data directory afterwards shows what is on disk.
- **The disk is full.** The journal keeps space in reserve. It releases the reserve, so that votes
  and what is under way can still be written, and is `full` until the reserve can be restored. What
  does not fit even so waits, unacknowledged, until there is space.
- **A file is damaged.** See `data_directory`.

Imports `data_directory`, `framed_files`, the consensus types, errors, msgspec.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from doyen.errors import StoreUnavailable, StoreUnusable
from doyen.metrics.histogram import Histogram
from doyen.quorum.consensus.core import Install, Persist, Recovered, Snapshot
from doyen.quorum.node.data_directory import (
    AHEAD_BYTES,
    SEGMENT_BYTES,
    DirectoryIdentity,
    Findings,
    Installed,
    Kept,
    Ledger,
    LogWriter,
    PutEntries,
    Record,
    SnapshotReader,
    SnapshotWriter,
    Stated,
    Took,
    check_identity,
    claim,
    read_identity,
    survey,
    write_identity,
)
from doyen.quorum.node.framed_files import NO_ROOM, FileSystem, SyncFailed

RESERVE_BYTES = 16 << 20
BATCH_BYTES = 4 << 20
"""About how much is written as one batch. A longer write is split into several."""
STEP_BYTES = 256 << 10
STEP_S = 0.003
"""How much of a snapshot is written or read at a time, and the longest time that it may take."""
SYNC_BYTES = 8 << 20
"""How much of a snapshot is written between syncs: a long sync delays those of the log."""
IDLE_S = 0.005
"""How long the queue has to be empty until the last batch is sealed. Under load the next batch
comes sooner, and shows as well that the one before it was synced."""
RETRY_S = 0.25
"""How often a full disk is checked for space."""
LOOK_S = 5.0
"""The same for a disk that had space: others may fill it."""

T = TypeVar("T")


class _Write(NamedTuple):
    records: list[Record]
    size: int
    token: int
    done: asyncio.Future[None] | None = None


class FileJournal:
    """The log and the snapshots on a node's disk. What was reported as persisted survives a crash
    at any instant. Opening one reads all of it, which may take a while, so open it on a thread."""

    def __init__(
        self,
        folder: Path,
        identity: DirectoryIdentity,
        state: Any = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
        reserve_bytes: int = RESERVE_BYTES,
        disk: FileSystem | None = None,
    ) -> None:
        """`state` is the type of the protocol's own state."""
        self._folder = folder
        self._disk = disk or FileSystem()
        self.syncs = Histogram()
        """How long syncs of the log took."""
        self._reserve_bytes = reserve_bytes
        self._ahead_bytes = ahead_bytes
        try:
            ledger = self._open(identity, state, segment_bytes, ahead_bytes)
        except OSError as error:
            raise StoreUnusable(f"{folder} cannot be used: {error}") from error
        self._kept = ledger.kept
        """The snapshot in force when everything that is queued is written."""
        self._received: Kept | None = None
        self.queued = 0
        """About how many bytes wait to be on disk."""
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._look_at = 0.0
        """When the disk is checked for space again."""
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None
        self._aside = ThreadPoolExecutor(1, "doyen-snapshot")

    def _open(
        self, identity: DirectoryIdentity, state: Any, segment_bytes: int, ahead_bytes: int
    ) -> Ledger:
        disk, folder = self._disk, self._folder
        self._lock = claim(disk, folder)
        try:
            known, findings = self._examine(identity)
            ledger = findings.ledger if findings else Ledger()
            # What was found at opening; `start` drops the entries.
            self.recovered = Recovered(
                msgspec.msgpack.decode(ledger.state, type=state or Any) if ledger.state else None,
                ledger.kept.snapshot if ledger.kept else None,
                ledger.following(),
            )
            self._log = LogWriter(
                disk,
                folder,
                findings,
                segment_bytes=segment_bytes,
                ahead_bytes=ahead_bytes,
                synced=self.syncs.add,
            )
            if not known:
                write_identity(disk, folder, identity)
            # Whether the disk has no room for more proposals. What is on it stays.
            self.full = not self._has_space()
        except BaseException:
            disk.close(self._lock)
            raise
        return ledger

    def _examine(self, identity: DirectoryIdentity) -> tuple[bool, Findings | None]:
        """Whether the data directory has an identity, and what is in its log."""
        found = read_identity(self._disk, self._folder)
        if found:
            check_identity(self._folder, found, identity)
        findings = survey(self._disk, self._folder)
        if found and findings is None:
            raise StoreUnusable(
                f"{self._folder} has lost its log: a node that has forgotten its votes could vote"
                " twice. Remove it from the cluster, delete the data directory and add it again."
            )
        if findings and not found and findings.batch > 1:
            raise StoreUnusable(
                f"{self._folder} has a log, and its file 'identity' is missing. Put that file back,"
                " or remove the node from the cluster, delete the data directory and add it again."
            )
        if findings and findings.ledger.kept:
            SnapshotReader(self._disk, self._folder, findings.ledger.kept).close()
        return found is not None, findings

    def start(
        self, persisted: Callable[[int], None], failed: Callable[[BaseException], None]
    ) -> None:
        """Begin. `persisted(token)` is called on the loop when everything up to the token is on
        disk; tokens may be skipped and are never reordered. `failed` means that the state of the
        disk is unknown, so the process must end."""
        self._persisted = persisted
        self._failed = failed
        self._tell: Callable[..., Any] = asyncio.get_running_loop().call_soon_threadsafe
        # The core has its own copy; this one would be kept for ever.
        self.recovered = Recovered(self.recovered.state, self.recovered.snapshot)
        self._writer = threading.Thread(target=self._run, name="doyen-journal", daemon=True)
        self._writer.start()

    def persist(self, effect: Persist) -> None:
        """Queue a write. Everything that is queued while the disk is busy is written together."""
        records: list[Record] = []
        size = 0
        if effect.state is not None:
            records.append(Stated(msgspec.msgpack.encode(effect.state)))
        if effect.first:
            first, entries, keep = effect.first, effect.entries, effect.keep
            start = 0
            for at, entry in enumerate(entries):
                size += len(entry.data) + 16
                if size > BATCH_BYTES and at > start:
                    records.append(PutEntries(first + start, keep, entries[start:at]))
                    self.queued += size
                    self._queue.put(_Write(records, size, 0))
                    records, start, size = [], at, len(entry.data) + 16
            rest = entries[start:] if start else entries
            records.append(PutEntries(first + start, keep, rest))
        self.queued += size
        self._queue.put(_Write(records, size, effect.token))

    async def take_snapshot(self, snapshot: Snapshot, pieces: Iterator[bytes]) -> None:
        """Write a snapshot of this node durably, in small steps; then drop the log entries that it
        replaces, except for a tail that serves followers which are a little behind."""
        kept = await self._store(snapshot, lambda step: self._on_aside(step, pieces))
        if self._kept and snapshot.index <= self._kept.snapshot.index:
            self._remove([self._folder / kept.file])
            return
        self._kept = kept
        done = asyncio.get_running_loop().create_future()
        self._queue.put(_Write([Took(kept)], 0, 0, done))
        await done

    async def receive_snapshot(self, snapshot: Snapshot, pieces: AsyncIterator[bytes]) -> None:
        """Store a snapshot of the leader durably, without using it. `install` puts it in force."""

        async def step(write: Callable[[Iterator[bytes]], bool]) -> bool:
            async for piece in pieces:
                await self._on_aside(write, iter((piece,)))
            return False

        kept = await self._store(snapshot, step)
        if self._received:
            self._remove([self._folder / self._received.file])
        self._received = kept

    async def _store(
        self,
        snapshot: Snapshot,
        step: Callable[[Callable[[Iterator[bytes]], bool]], Awaitable[bool]],
    ) -> Kept:
        """Write a snapshot durably, without using it."""
        storing: _Storing | None = None
        try:
            storing = await self._on_aside(_Storing, self._disk, self._folder, snapshot)
            while await step(storing.step):
                pass
            await self._on_aside(storing.finish)
        except BaseException as error:
            if storing:
                self._aside.submit(storing.abandon)
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise StoreUnavailable(f"{self._folder} has no room for a snapshot") from error
            if isinstance(error, SyncFailed):
                self._failed(error)
            raise
        return storing.kept

    async def read_snapshot(self) -> tuple[Snapshot, AsyncIterator[bytes]]:
        """The latest snapshot and its pieces, to send or to restore. It stays readable until the
        iterator is closed, even if another snapshot is taken meanwhile."""
        kept = self._kept
        if kept is None:
            raise LookupError("there is no snapshot yet")
        reader = SnapshotReader(self._disk, self._folder, kept)
        return kept.snapshot, _Pieces(reader, self._on_aside, self._aside)

    def install(self, effect: Install) -> None:
        """Queue a write: the received snapshot is in force, and the log after it is empty."""
        kept = self._received
        if kept is None or kept.snapshot != effect.snapshot:
            raise ValueError(f"no snapshot of index {effect.snapshot.index} has been received")
        self._kept, self._received = kept, None
        self._queue.put(_Write([Installed(kept)], 0, effect.token))

    async def close(self) -> None:
        """Write what is queued, and release the data directory."""
        self._closing.set()
        if self._writer:
            self._queue.put(None)
            await self._on_aside(self._writer.join)
        self._aside.shutdown()
        self._log.close()
        self._disk.close(self._lock)

    def abandon(self) -> None:
        """Release the data directory, before `start`."""
        self._aside.shutdown()
        self._log.close()
        self._disk.close(self._lock)

    def _on_aside(self, do: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._aside, do, *arguments)

    # The rest runs on the writing thread.

    def _run(self) -> None:
        try:
            while writes := self._next():
                while writes := writes[self._write(writes) :]:
                    if self._closing.wait(RETRY_S):
                        return self._seal()  # nothing may be written after what did not fit
            self._seal()
        except BaseException as error:  # noqa: BLE001 - the state of the disk is unknown
            with suppress(RuntimeError):  # the loop has been closed
                self._tell(self._failed, error)

    def _next(self) -> list[_Write]:
        """Everything that is queued, up to the size of a batch; empty when the journal closes."""
        write = self._wait()
        writes = []
        size = 0
        while write:
            writes.append(write)
            size += write.size
            if size >= BATCH_BYTES:
                break
            try:
                write = self._queue.get_nowait()
            except queue.Empty:
                break
            if write is None:
                self._queue.put(None)
        return writes

    def _seal(self) -> None:
        with suppress(OSError):
            self._log.seal()

    def _wait(self) -> _Write | None:
        """Wait for a write. Meanwhile, or between writes, check the disk for space: a write finds a
        full disk only when the log has used what it has written ahead."""
        timeout_s = IDLE_S
        while True:
            if time.monotonic() >= self._look_at:
                with suppress(OSError):  # the next write finds out what is wrong
                    self.full = not self._has_space()
                self._look_at = time.monotonic() + (RETRY_S if self.full else LOOK_S)
            try:
                return self._queue.get(timeout=timeout_s)
            except queue.Empty:
                if timeout_s == IDLE_S:
                    self._seal()
                timeout_s = RETRY_S if self.full else LOOK_S

    def _write(self, writes: list[_Write]) -> int:
        """Write as much of this to disk as there is space for. Returns how many writes that is."""
        written = 0
        while written < len(writes):
            some = writes[written : written + 1] if self.full else writes[written:]
            records: list[Record] = []
            done: list[asyncio.Future[None]] = []
            token = size = 0
            for write in some:
                records += write.records
                size += write.size
                token = max(token, write.token)
                if write.done:
                    done.append(write.done)
            try:
                if records:
                    self._log.append(records)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self.full, self._look_at = True, time.monotonic() + RETRY_S
                if not self._reserved():
                    break
                self._disk.remove(self._folder / "reserve")
                continue
            written += len(some)
            self._tell(self._report, token, size, done)
            if self._log.unused:
                self._remove(self._log.take_unused())
        return written

    def _has_space(self) -> bool:
        """Whether the reserve is there, or can be restored, and the log can still grow."""
        return self._restore_reserve() and self._disk.free(self._folder) >= self._ahead_bytes

    def _restore_reserve(self) -> bool:
        """Restore the reserve, if there is space for it."""
        if self._reserved() >= self._reserve_bytes:
            return True
        new = self._folder / "reserve.new"
        fd = -1
        try:
            fd = self._disk.create(new)
            self._disk.allocate(fd, self._reserve_bytes)
            self._disk.rename(new, self._folder / "reserve")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._disk.remove(new)
            return False
        finally:
            if fd >= 0:
                self._disk.close(fd)
        return True

    def _reserved(self) -> int:
        try:
            fd = self._disk.open(self._folder / "reserve")
        except FileNotFoundError:
            return 0
        try:
            return self._disk.size(fd)
        finally:
            self._disk.close(fd)

    def _remove(self, unused: list[Path]) -> None:
        """Remove files that nothing refers to. If that fails, the next opening removes them."""

        def remove() -> None:
            for path in unused:
                with suppress(OSError):
                    self._disk.remove(path)

        with suppress(RuntimeError):
            self._aside.submit(remove)

    def _report(self, token: int, size: int, done: list[asyncio.Future[None]]) -> None:
        self.queued -= size
        if token:
            self._persisted(token)
        for future in done:
            if not future.done():
                future.set_result(None)


class _Storing(SnapshotWriter):
    """A snapshot that is written in steps."""

    def __init__(self, disk: FileSystem, folder: Path, snapshot: Snapshot) -> None:
        super().__init__(disk, folder, snapshot)
        self._synced = 0

    def step(self, pieces: Iterator[bytes]) -> bool:
        """Write some of the pieces. Returns False when there are no more."""
        until = time.monotonic() + STEP_S
        enough = self.bytes + STEP_BYTES
        for piece in pieces:
            self.write(piece)
            if self.bytes - self._synced > SYNC_BYTES:
                self.sync()
                self._synced = self.bytes
            if self.bytes > enough or time.monotonic() > until:
                return True
        return False


class _Pieces(AsyncIterator[bytes]):
    """The pieces of a snapshot, read a few at a time."""

    def __init__(
        self,
        reader: SnapshotReader,
        run: Callable[[Callable[[], list[bytes]]], Awaitable[list[bytes]]],
        aside: ThreadPoolExecutor,
    ) -> None:
        self._reader = reader
        self._run = run
        self._aside = aside
        self._ready: list[bytes] = []

    async def __anext__(self) -> bytes:
        if not self._ready:
            self._ready = await self._run(self._read)
            self._ready.reverse()
        if not self._ready:
            await self.aclose()
            raise StopAsyncIteration
        return self._ready.pop()

    def _read(self) -> list[bytes]:
        pieces: list[bytes] = []
        size = 0
        while size < STEP_BYTES and (piece := self._reader.read()) is not None:
            pieces.append(piece)
            size += len(piece)
        return pieces

    async def aclose(self) -> None:
        self._close()

    def _close(self) -> None:
        try:  # after a read that may be in progress
            self._aside.submit(self._reader.close)
        except RuntimeError:
            self._reader.close()

    def __del__(self) -> None:
        self._close()
