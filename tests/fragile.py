"""A simulated disk that loses unsynced writes in a crash.

Files are kept in memory, and written data is kept apart from synced data. `crash_at` stops every
operation from the n-th modifying one on. `after_crash` returns the disk that the next process
finds: everything that was synced, and of the rest as much as `luck` says. Files, directory entries
and sectors survive independently of one another, which is the worst that a disk may do.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from doyen.quorum.node.framed_files import FileSystem, SyncFailed

__all__ = ["LUCK", "Crashed", "FragileDisk"]

SECTOR = 16
LUCK = ("none", "all", "torn 1", "torn 2", "torn 3")


class Crashed(Exception):
    """The simulated process has crashed."""


class Inode:
    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = bytes(data)
        self.sync_lost = False
        """Whether a sync has failed. Later syncs then succeed without effect."""

    def surviving(self, random: Random | None, everything: bool) -> bytes:
        if everything:
            return bytes(self.data)
        if random is None or self.synced == self.data:
            return self.synced
        size = random.choice((len(self.synced), len(self.data), len(self.data)))
        new, old = bytes(self.data[:size]).ljust(size, b"\0"), self.synced[:size].ljust(size, b"\0")
        kept = random.choice((0.1, 0.5, 0.9))
        return b"".join(
            (new if random.random() < kept else old)[at : at + SECTOR]
            for at in range(0, size, SECTOR)
        )


class FragileDisk(FileSystem):
    """One directory in memory."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.inodes = {name: Inode(data) for name, data in (files or {}).items()}
        self.synced_names = dict(self.inodes)
        self.open_files: dict[int, Inode] = {}
        self.operations = 0
        self.crash_at: int | None = None
        self.crashed = False
        self.room: int | None = None
        self.sync_errors = 0
        """How many of the next syncs fail. The data that they should have synced is lost."""
        self._mutex = threading.Lock()
        self._fds = 100

    def files(self) -> dict[str, bytes]:
        return {name: bytes(inode.data) for name, inode in self.inodes.items()}

    def after_crash(self, luck: str) -> FragileDisk:
        random = Random(luck) if luck.startswith("torn") else None
        everything = luck == "all"
        names = dict(self.synced_names)
        for name in sorted(self.inodes.keys() | names.keys()):
            now = self.inodes.get(name)
            if now is not names.get(name) and (everything or (random and random.random() < 0.5)):
                if now is None:
                    del names[name]
                else:
                    names[name] = now
        return FragileDisk({n: i.surviving(random, everything) for n, i in names.items()})

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._mutex:
            if self.crash_at is not None and self.operations >= self.crash_at:
                self.crashed = True
            if self.crashed:
                raise Crashed
            self.operations += 1
            yield

    def squeeze(self, room: int | None) -> None:
        """Limit the free space to `room` bytes, or remove the limit."""
        with self._mutex:
            used = sum(len(inode.data) for inode in self.inodes.values())
            self.room = None if room is None else used + room

    def _need(self, more: int) -> None:
        used = sum(len(inode.data) for inode in self.inodes.values())
        if self.room is not None and more > 0 and used + more > self.room:
            raise OSError(errno.ENOSPC, "no space left on device")

    def free(self, folder: Path) -> int:
        used = sum(len(inode.data) for inode in self.inodes.values())
        return 1 << 40 if self.room is None else max(0, self.room - used)

    def make_folder(self, path: Path) -> None:
        pass

    def names(self, folder: Path) -> list[str]:
        return sorted(self.inodes)

    def create(self, path: Path) -> int:
        with self._change():
            self.inodes[path.name] = Inode()
            return self._descriptor(path)

    def open(self, path: Path, *, write: bool = False) -> int:
        with self._mutex:
            if path.name not in self.inodes:
                raise FileNotFoundError(path)
            return self._descriptor(path)

    def _descriptor(self, path: Path) -> int:
        self._fds += 1
        self.open_files[self._fds] = self.inodes[path.name]
        return self._fds

    def close(self, fd: int) -> None:
        with self._mutex:
            del self.open_files[fd]

    def size(self, fd: int) -> int:
        return len(self.open_files[fd].data)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return bytes(self.open_files[fd].data[offset : offset + size])

    def write(self, fd: int, data: bytes, offset: int) -> None:
        with self._change():
            inode = self.open_files[fd]
            end = offset + len(data)
            more = end - len(inode.data)
            if more > 0:
                try:
                    self._need(more)
                except OSError:
                    # A full disk writes as much as fits.
                    inode.data[offset:] = data[: max(0, len(inode.data) - offset)]
                    raise
                inode.data += bytes(more)
            inode.data[offset:end] = data

    def cut(self, fd: int, size: int) -> None:
        with self._change():
            del self.open_files[fd].data[size:]

    def sync(self, fd: int, path: Path) -> None:
        with self._change():
            inode = self.open_files[fd]
            if self.sync_errors:
                # The kernel reports the error once and then marks the lost pages as clean.
                self.sync_errors -= 1
                inode.sync_lost = True
                raise SyncFailed(f"{path} could not be synced: input/output error")
            if not inode.sync_lost:
                inode.synced = bytes(inode.data)

    def sync_folder(self, path: Path) -> None:
        with self._change():
            self.synced_names = dict(self.inodes)

    def rename(self, old: Path, new: Path) -> None:
        with self._change():
            self.inodes[new.name] = self.inodes.pop(old.name)

    def remove(self, path: Path) -> None:
        with self._change():
            self.inodes.pop(path.name, None)

    def allocate(self, fd: int, size: int) -> None:
        with self._change():
            inode = self.open_files[fd]
            self._need(size - len(inode.data))
            inode.data += bytes(size - len(inode.data))

    def lock(self, fd: int) -> bool:
        return True
