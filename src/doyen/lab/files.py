"""A node's data directory in memory, and the real journal on it, driven by timers.

`Files` is one directory. It distinguishes what was written from what was synced. `after_crash`
returns what the next process finds: everything that was synced, and a random part of the rest, by
name and by sector.

`LabJournal` is `FileJournal` without its threads. A timer does the work of the writing thread after
`sync_s`, and the work of the snapshot thread is done at once. Segments, frames,
recovery, the reserve and snapshots are the journal's own code.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from doyen.quorum.consensus.core import Snapshot
from doyen.quorum.node.data_directory import DirectoryIdentity
from doyen.quorum.node.framed_files import FileSystem, SyncFailed
from doyen.quorum.node.journal import RETRY_S, FileJournal

DATA_DIRECTORY = Path("data")
SECTOR = 64
SEGMENT_BYTES = 16 << 10
"""Small, so that a run has many segments."""
AHEAD_BYTES = 1 << 10
RESERVE_BYTES = 8 << 10
SEALED = 0.3
"""The probability that a batch is sealed before the next one arrives."""


class _File:
    __slots__ = ("data", "synced")

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = bytes(data)

    def surviving(self, rng: random.Random, luck: str) -> bytes:
        if luck == "all" or self.synced == self.data:
            return bytes(self.data)
        if luck == "none":
            return self.synced
        size = rng.choice((len(self.synced), len(self.data)))
        new, old = bytes(self.data[:size]).ljust(size, b"\0"), self.synced[:size].ljust(size, b"\0")
        kept = rng.choice((0.1, 0.5, 0.9))
        return b"".join(
            (new if rng.random() < kept else old)[at : at + SECTOR] for at in range(0, size, SECTOR)
        )


class Files(FileSystem):
    """One directory in memory."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self._files = {name: _File(data) for name, data in (files or {}).items()}
        self._synced_names = dict(self._files)
        self._open: dict[int, _File] = {}
        self._fds = 0
        self._room: int | None = None
        """The bytes that are left; None if there is no limit."""
        self.sync_fails = False
        """Whether the next sync fails, and what it would have written is lost."""

    def after_crash(self, rng: random.Random) -> Files:
        """What the next process finds."""
        luck = rng.choice(("none", "all", "torn"))
        names = dict(self._synced_names)
        for name in sorted(self._files.keys() | names.keys()):
            now = self._files.get(name)
            if now is not names.get(name) and (
                luck == "all" or (luck == "torn" and rng.random() < 0.5)
            ):
                if now is None:
                    del names[name]
                else:
                    names[name] = now
        return Files({name: file.surviving(rng, luck) for name, file in names.items()})

    def copy(self) -> Files:
        """What a crash leaves that loses everything that was not synced."""
        return Files({name: file.synced for name, file in self._synced_names.items()})

    @property
    def empty(self) -> bool:
        return not self._files

    def fill(self, full: bool) -> None:
        """Make the disk full, or remove the limit."""
        self._room = 0 if full else None

    def _take(self, more: int) -> None:
        if self._room is not None:
            if more > self._room:
                raise OSError(errno.ENOSPC, "no space left on device")
            self._room -= more

    def free(self, folder: Path) -> int:
        return 1 << 40 if self._room is None else self._room

    def make_folder(self, path: Path) -> None:
        pass

    def names(self, folder: Path) -> list[str]:
        return sorted(self._files)

    def create(self, path: Path) -> int:
        self._files[path.name] = _File()
        return self._descriptor(path)

    def open(self, path: Path, *, write: bool = False) -> int:
        if path.name not in self._files:
            raise FileNotFoundError(path)
        return self._descriptor(path)

    def _descriptor(self, path: Path) -> int:
        self._fds += 1
        self._open[self._fds] = self._files[path.name]
        return self._fds

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)

    def size(self, fd: int) -> int:
        return len(self._open[fd].data)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return bytes(self._open[fd].data[offset : offset + size])

    def write(self, fd: int, data: bytes, offset: int) -> None:
        held = self._open[fd].data
        end = offset + len(data)
        if end > len(held):
            self._take(end - len(held))
            held += bytes(end - len(held))
        held[offset:end] = data

    def cut(self, fd: int, size: int) -> None:
        del self._open[fd].data[size:]

    def sync(self, fd: int, path: Path) -> None:
        file = self._open[fd]
        if self.sync_fails:
            self.sync_fails = False
            file.data[:] = file.synced
            raise SyncFailed(f"{path} could not be synced: input/output error")
        if file.synced != file.data:
            file.synced = bytes(file.data)

    def sync_folder(self, path: Path) -> None:
        self._synced_names = dict(self._files)

    def rename(self, old: Path, new: Path) -> None:
        self._files[new.name] = self._files.pop(old.name)

    def remove(self, path: Path) -> None:
        file = self._files.pop(path.name, None)
        if file is not None and self._room is not None:
            self._room += len(file.data)

    def allocate(self, fd: int, size: int) -> None:
        held = self._open[fd].data
        self._take(size - len(held))
        held += bytes(size - len(held))

    def lock(self, fd: int) -> bool:
        return True


class _Inline:
    """Replaces the journal's thread for snapshots: it runs each call at once."""

    def submit(self, do: Callable[..., Any], *arguments: Any) -> None:
        do(*arguments)

    def shutdown(self) -> None:
        pass


class LabJournal(FileJournal):
    """The journal of a simulated node."""

    def __init__(
        self,
        files: Files,
        identity: DirectoryIdentity,
        state: Any,
        *,
        sync_s: float,
        rng: random.Random,
        before_effect: Callable[[], None],
        count: Callable[[str], None],
    ) -> None:
        super().__init__(
            DATA_DIRECTORY,
            identity,
            state,
            segment_bytes=SEGMENT_BYTES,
            ahead_bytes=AHEAD_BYTES,
            reserve_bytes=RESERVE_BYTES,
            disk=files,
        )
        self._aside: Any = _Inline()
        self._queue: Any = SimpleNamespace(put=self._take_in)  # to the writing thread
        self._writes: list[Any] = []
        self._busy = False
        self._rng = rng
        self._before_effect = before_effect
        self.sync_s = sync_s
        self._count = count

    def start(
        self, persisted: Callable[[int], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._persisted, self._failed = persisted, failed
        self._loop = asyncio.get_running_loop()
        self._tell = lambda report, *arguments: report(*arguments)

    async def take_snapshot(self, snapshot: Snapshot, pieces: Iterator[bytes]) -> None:
        """Take it after a delay: what is applied meanwhile must not be part of it."""
        await asyncio.sleep(self.sync_s)
        await super().take_snapshot(snapshot, pieces)
        self._count("snapshot")

    def install(self, effect: Any) -> None:
        super().install(effect)
        self._count("install")

    def _take_in(self, write: Any) -> None:
        self._before_effect()
        self._writes.append(write)
        if not self._busy:
            self._busy = True
            self._loop.call_later(self.sync_s, self._work)

    def _work(self) -> None:
        """Do the work of the writing thread up to the point where it would wait."""
        writes, self._writes, self._busy = self._writes, [], False
        try:
            left = writes[self._write(writes) :]
            if not left and self._rng.random() < SEALED:
                self._seal()
            if self.full and not left:
                self.full = not self._has_space()
        except Exception as error:  # noqa: BLE001 - as on the thread: what is on disk is unknown
            self._failed(error)
            return
        self._writes[:0] = left
        if left or self.full:
            self._busy = True
            self._loop.call_later(RETRY_S, self._work)
        elif self._writes and not self._busy:
            self._busy = True
            self._loop.call_later(self.sync_s, self._work)

    def _on_aside(self, do: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            done.set_result(do(*arguments))
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            done.set_exception(error)
        return done
