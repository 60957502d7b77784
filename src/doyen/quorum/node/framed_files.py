"""Files of checksummed frames, and the file system functions that the journal uses.

A frame is magic, checksum, length, flag, number, payload. The first frame of a file, its head,
states what the file is and holds a random salt. The checksums of the other frames include the salt,
so bytes of another file, or a copy of one within the data, are not taken for a frame of this file.

`FileSystem` is the only way to the disk, so that tests can simulate one. Imports errors, msgspec.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import zlib
from pathlib import Path
from struct import Struct as Layout
from typing import Any

import msgspec

from doyen.errors import StoreUnusable

FORMAT = 1
FRAME_LIMIT = 64 << 20
"""The longest frame. A longer one in a file is damage."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
REMEDY = (
    "Restore this node from its peers: remove it from the cluster, delete the data directory and"
    " add it again; or restore the cluster from a backup."
)


class SyncFailed(StoreUnusable):
    """The operating system did not confirm that data is on disk. Another sync proves nothing: the
    kernel may have dropped the pages and marked them as clean."""


class FileSystem:
    """The files of the operating system."""

    def make_folder(self, path: Path) -> None:
        if not path.is_dir():
            if path.exists():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            path.mkdir(parents=True)
            self.sync_folder(path.parent)

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))

    def create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def open(self, path: Path, *, write: bool = False) -> int:
        return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        _locks.discard(fd)
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes: fewer only at the end of the file."""
        data = os.pread(fd, size, offset)
        while data and len(data) < size:
            more = os.pread(fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def write(self, fd: int, data: bytes, offset: int) -> None:
        done = os.pwrite(fd, data, offset)
        while done < len(data):
            done += os.pwrite(fd, memoryview(data)[done:], offset + done)

    def cut(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int, path: Path) -> None:
        """Raises `SyncFailed`, with the path of this file."""
        try:
            if hasattr(fcntl, "F_FULLFSYNC"):
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            else:
                os.fdatasync(fd)
        except OSError as error:
            raise SyncFailed(f"{path} could not be synced: {error}") from error

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            raise SyncFailed(f"{path} could not be synced: {error}") from error
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def allocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def free(self, folder: Path) -> int:
        """How many bytes this user may still write to the disk of a directory."""
        disk = os.statvfs(folder)
        return (disk.f_bavail if os.geteuid() else disk.f_bfree) * disk.f_frsize

    def lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _locks.add(fd)
        return True


_locks: set[int] = set()


def _close_locks_after_fork() -> None:
    """A forked child inherits the descriptors, and would keep the lock after the parent's end."""
    for fd in _locks:
        os.close(fd)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks_after_fork)


def read_all(disk: FileSystem, path: Path) -> bytes:
    fd = disk.open(path)
    try:
        return disk.read(fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def damaged(path: Path, offset: int, what: str, remedy: str = REMEDY) -> StoreUnusable:
    return StoreUnusable(f"{path} is damaged at byte {offset}: {what}. {remedy}")


def put_file(disk: FileSystem, path: Path, data: bytes) -> None:
    """Replace a file by this content, atomically."""
    new = path.with_name(path.name + ".new")
    fd = disk.create(new)
    try:
        disk.write(fd, data, 0)
        disk.sync(fd, new)
    finally:
        disk.close(fd)
    disk.rename(new, path)
    disk.sync_folder(path.parent)


MAGIC = b"\xd0yn\x01"
_FRAME = Layout("<4sIIIQ")
_CHECKED = Layout("<IIQ")
FRAME_SIZE = _FRAME.size
_COVERED = 8
"""The size of what precedes the part that the checksum covers."""

ORDINARY, HEAD, LAST, SEAL, END = range(5)


def frame(payload: bytes, flag: int, number: int, salt: int) -> bytes:
    rest = _CHECKED.pack(len(payload), flag, number) + payload
    return MAGIC + zlib.crc32(rest, salt).to_bytes(4, "little") + rest


def valid_at(data: memoryview, offset: int, salt: int) -> tuple[int, int, int] | None:
    """Flag, number and end of the frame at this offset, if there is a valid one."""
    if offset + FRAME_SIZE > len(data):
        return None
    magic, checksum, length, flag, number = _FRAME.unpack_from(data, offset)
    end = offset + FRAME_SIZE + length
    if magic != MAGIC or length > FRAME_LIMIT or end > len(data):
        return None
    if zlib.crc32(data[offset + _COVERED : end], salt) != checksum:
        return None
    return flag, number, end


def valid_after(data: bytes, offset: int, salt: int) -> int | None:
    """The offset of the next valid frame of this file."""
    view = memoryview(data)
    while (offset := data.find(MAGIC, offset)) >= 0:
        if valid_at(view, offset, salt):
            return offset
        offset += 1
    return None


def new_head(head: Any) -> tuple[int, bytes]:
    """A salt, and the first frame of a file with this head."""
    salt = secrets.randbits(32) | 1
    return salt, frame(msgspec.msgpack.encode((salt, FORMAT, head)), HEAD, 0, 0)


class FrameWriter:
    """Writes a file of frames, piece by piece. The file gets its name when it is complete."""

    def __init__(self, disk: FileSystem, path: Path, head: Any) -> None:
        self.path = path
        self.bytes = 0
        self._new = path.with_name(path.name + ".new")
        self._disk = disk
        self._number = 0
        self._fd = disk.create(self._new)
        try:
            self._salt, data = new_head(head)
            self._write(data)
        except BaseException:
            self.abandon()
            raise

    def write(self, payload: bytes, flag: int = ORDINARY) -> None:
        if len(payload) > FRAME_LIMIT:
            raise ValueError(f"a piece of {len(payload)} bytes is too long: split it")
        self._number += 1
        self._write(frame(payload, flag, self._number, self._salt))

    def sync(self) -> None:
        self._disk.sync(self._fd, self._new)

    def finish(self) -> None:
        self.write(b"", END)
        self.sync()
        self._disk.close(self._fd)
        self._fd = -1
        self._disk.rename(self._new, self.path)
        self._disk.sync_folder(self.path.parent)

    def abandon(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1
            self._disk.remove(self._new)

    def _write(self, frame: bytes) -> None:
        self._disk.write(self._fd, frame, self.bytes)
        self.bytes += len(frame)


class FrameReader:
    """Reads a complete file of frames. Opening checks its head and its end, reading each frame."""

    def __init__(self, disk: FileSystem, path: Path, head: Any, remedy: str = REMEDY) -> None:
        self.path = path
        self._disk = disk
        self._remedy = remedy
        try:
            self._fd = disk.open(path)
        except FileNotFoundError:
            raise StoreUnusable(f"{path} is missing. {remedy}") from None
        try:
            self._check(head)
        except BaseException:
            self.close()
            raise

    def _check(self, head: Any) -> None:
        size = self._disk.size(self._fd)
        start = self._disk.read(self._fd, 1 << 20, 0)
        self.salt, self.head, self._offset = read_head(self.path, start, head, self._remedy)
        last = self._disk.read(self._fd, FRAME_SIZE, max(0, size - FRAME_SIZE))
        end = valid_at(memoryview(last), 0, self.salt)
        if end is None or end[0] != END:
            raise damaged(self.path, size, "its end is missing", self._remedy)
        self.pieces = end[1] - 1
        self.bytes = size
        self._number = 0

    def read(self) -> bytes | None:
        """The next piece; None after the last."""
        start = self._disk.read(self._fd, FRAME_SIZE, self._offset)
        length = _FRAME.unpack(start)[2] if len(start) == FRAME_SIZE else FRAME_LIMIT + 1
        frame = b""
        if length <= FRAME_LIMIT:
            frame = start + self._disk.read(self._fd, length, self._offset + FRAME_SIZE)
        found = valid_at(memoryview(frame), 0, self.salt)
        if found is None or found[1] != self._number + 1:
            raise damaged(self.path, self._offset, "a checksum is wrong", self._remedy)
        if found[0] == END:
            return None
        self._number += 1
        self._offset += len(frame)
        return frame[FRAME_SIZE:]

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1


def read_head(path: Path, data: bytes, kind: Any, remedy: str = REMEDY) -> tuple[int, Any, int]:
    """The salt and the head of a file, and the offset of what follows."""
    found = valid_at(memoryview(data), 0, 0)
    if found is None or found[0] != HEAD:
        raise damaged(path, 0, "its head cannot be read", remedy)
    try:
        salt, version, head = msgspec.msgpack.decode(
            data[FRAME_SIZE : found[2]], type=tuple[int, int, msgspec.Raw]
        )
        if version > FORMAT:
            raise StoreUnusable(
                f"{path} was written by a later release of doyen (format {version}; this one"
                f" supports {FORMAT}): install that release."
            )
        return salt, msgspec.msgpack.decode(head, type=kind), found[2]
    except msgspec.MsgspecError as error:
        raise damaged(path, 0, f"its head cannot be decoded ({error})", remedy) from None
