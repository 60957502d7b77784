"""Leases as files: held by a kernel lock, renewed by a plain write, ended by an unlink.

A lease is three files in the store's directory, named by an id that is never reused:

    <id>.lease   the time of the last renewal; locked with flock while the owner lives
    <id>.alive   a FIFO that the owner keeps open and never writes; it ends with the owner
    <id>.seal    created by a process that finds the lease expired, before it acts on that

**A lease has ended if and only if `<id>.lease` is gone.** A process that establishes that a lease
is over unlinks the file. Unlinking is atomic, visible to all processes and never undone. Rows that
are bound to a missing lease are void.

A lease is over in two cases. Its owner is dead: within one boot, that is the case when a shared
lock on the file can be acquired. (The lock is shared so that two processes that try at once do not
mistake each other for the owner.) Or it has expired: the last renewal is older than the ttl on the
boot-time clock. If it was written under another boot id, neither locks nor clocks can be compared;
then the file must stay unchanged for a full ttl.

Expiry must not race with a renewal, and no lock may be needed that a frozen owner could hold:

    owner:  write the renewal, then check for the seal      (found: the renewal does not count)
    judge:  create the seal, then read the renewal again    (renewed: not over; otherwise unlink)

Each writes before it reads, so at least one notices the other. Files are removed in the order
lease, alive, seal, and the owner checks for the seal before it checks whether its file was
unlinked, so it cannot miss both.

A renewal needs no database and waits for nothing: it is a few system calls. `judge` may be called
from any thread, everything else from the store's loop. Threads that find a lease over at the same
time take turns, so each handle reports the end at most once.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import secrets
import struct
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

from doyen.errors import LeaseGone, StoreUnavailable
from doyen.stores.sqlite.location import SessionsDirectory

__all__ = ["LeaseFileVerdict", "LocalLeases"]

_RECORD = struct.Struct("<8sQ16sddQ")  # mark, counter, boot, renewed at, ttl, pid
_CHECK = struct.Struct("<I")
_SIZE = _RECORD.size + _CHECK.size
_MARK = b"doyen\0\0\1"

_READS = 64
"""Attempts to read a file that is being written; the write takes only microseconds."""
UNREADABLE_S = 60.0
"""A file that stays unreadable was damaged on disk. Its lease is over if the file is not locked and
does not change for this long."""
_GRANT_TRIES = 16


class LeaseFile(NamedTuple):
    """The contents of a lease file."""

    counter: int
    boot: bytes
    renewed_at: float
    ttl_s: float
    pid: int

    @property
    def expires_at(self) -> float:
        return self.renewed_at + self.ttl_s

    def encode(self) -> bytes:
        body = _RECORD.pack(_MARK, *self)
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, raw: bytes) -> LeaseFile | None:
        body, check = raw[: _RECORD.size], raw[_RECORD.size :]
        if len(raw) != _SIZE or _CHECK.pack(zlib.crc32(body)) != check:
            return None
        mark, *fields = _RECORD.unpack(body)
        return cls(*fields) if mark == _MARK else None


class LeaseFileVerdict(NamedTuple):
    """Whether a lease has ended; if not, when to check again."""

    ended: bool
    wait_s: float = math.inf
    remaining_s: float | None = None


_ENDED = LeaseFileVerdict(ended=True)
_OVER = LeaseFileVerdict(ended=True)
"""As `_ENDED`, if this handle found that the lease is over."""


class _Held:
    """A lease of this process: its descriptors, and the contents last written."""

    __slots__ = ("alive", "fd", "identity", "record")

    def __init__(self, fd: int, alive: int, record: LeaseFile) -> None:
        self.fd = fd
        self.alive = alive
        self.record = record
        status = os.fstat(fd)
        self.identity = (status.st_dev, status.st_ino)

    def links(self) -> int | None:
        """How many links to the file exist, 0 if it was unlinked. None if the descriptor does not
        refer to it: code that closes all descriptors of a process may have caused its number to be
        reused."""
        try:
            status = os.fstat(self.fd)
        except OSError:
            return None
        return status.st_nlink if (status.st_dev, status.st_ino) == self.identity else None


class LocalLeases:
    """The leases in the directory of one store, as one handle holds and judges them."""

    def __init__(
        self,
        directory: SessionsDirectory,
        *,
        now: Callable[[], float],
        boot: str,
        ended: Callable[[str, Literal["died", "expired"]], None],
    ) -> None:
        self._directory = directory
        self._now = now
        self._boot = hashlib.sha256(boot.encode()).digest()[:16]
        self._tell_ended = ended
        self._held: dict[str, _Held] = {}
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._ending = threading.Lock()
        self._reported: set[str] = set()
        """Leases of dead owners whose end was reported, and which this handle left to others."""
        self.looks_only = True
        """The handle has not asked for a record or a ticket, so it takes no part in elections. It
        treats a dead owner's lease as ended, and leaves its files and rows to a handle that takes
        part: that one finds the death itself, and records it before it acts on it. Without that
        record, `verify` would take the next term for an overlap with the dead owner's."""

    def grant(self, ttl_s: float) -> str:
        """Grant a lease and hold it."""
        for _ in range(_GRANT_TRIES):
            lease = secrets.token_hex(8)
            held = self._found(lease, ttl_s)
            if held is not None:
                self._held[lease] = held
                return lease
        raise StoreUnavailable(
            f"no new lease file in {self._directory.path} could be locked: try again"
        )

    def _found(self, lease: str, ttl_s: float) -> _Held | None:
        """Create the files of a lease; None if another process removed them meanwhile as
        leftovers."""
        path, fifo = self._directory.file(lease, "lease"), self._directory.file(lease, "alive")
        held, alive = None, -1
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._directory.mode)
        try:
            os.fchmod(fd, self._directory.mode)
            os.mkfifo(fifo)
            os.chmod(fifo, self._directory.mode)
            alive = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
            # The kernel closes the highest descriptor of a dying process first, so the lock is free
            # when the end of the FIFO is noticed.
            above = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, alive + 1)
            os.close(fd)
            fd = above
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            record = LeaseFile(1, self._boot, self._now(), ttl_s, os.getpid())
            os.pwrite(fd, record.encode(), 0)
            if os.fstat(fd).st_nlink == 1:
                held = _Held(fd, alive, record)
        except BlockingIOError:
            pass
        finally:
            if held is None:
                self._close(fd, alive)
                self.end(lease)
        return held

    def renew(self, lease: str) -> None:
        """Restart the ttl of the lease, from an instant before the write."""
        held = self._held.get(lease)
        if held is None:
            raise LeaseGone(f"lease {lease} has been released, or was granted by another session")
        now = self._now()
        if now >= held.record.expires_at:
            late_s = now - held.record.expires_at
            raise LeaseGone(f"lease {lease} ran out {late_s:.3f} s before it could be renewed")
        self._verify(held, lease)
        record = held.record._replace(counter=held.record.counter + 1, renewed_at=now)
        os.pwrite(held.fd, record.encode(), 0)
        held.record = record
        self._verify(held, lease)

    def _verify(self, held: _Held, lease: str) -> None:
        """Check that the lease has no seal and then that its file was not unlinked."""
        try:
            os.stat(self._directory.file(lease, "seal"))
        except FileNotFoundError:
            pass
        else:
            raise LeaseGone(f"lease {lease} had run out and was declared ended")
        links = held.links()
        if links is None:
            raise LeaseGone(f"the descriptor of lease {lease} was closed by this process")
        if links == 0:
            raise LeaseGone(f"lease {lease} was ended by another session, or its files removed")

    def end(self, lease: str) -> None:
        """End a lease, of this or another process. The first file that is removed ends it."""
        self._remove(lease, "lease", "alive", "seal")

    def _remove(self, lease: str, *parts: str) -> None:
        for part in parts:
            with suppress(FileNotFoundError):
                os.unlink(self._directory.file(lease, part))

    def holds(self, lease: str) -> bool:
        return lease in self._held

    def release(self, lease: str) -> None:
        """Close the descriptors of a held lease; to others this looks like the owner's death."""
        held = self._held.pop(lease, None)
        if held is not None:
            self._close(held.fd, held.alive)

    def release_all(self) -> None:
        for lease in list(self._held):
            self.release(lease)

    def proof(self, lease: str) -> tuple[int, ...]:
        held = self._held.get(lease)
        return () if held is None else (held.fd, held.alive)

    def alive_path(self, lease: str) -> str:
        """The FIFO that ends with the owner."""
        return self._directory.file(lease, "alive")

    def judge(self, lease: str) -> LeaseFileVerdict:
        """Whether a lease has ended. A lease that is found to be over is ended, unless this handle
        only looks."""
        verdict = self.judge_only(lease)
        if verdict is _OVER:
            self.clear_remains(lease)
        return verdict

    def judge_only(self, lease: str) -> LeaseFileVerdict:
        """`judge`, but the other files of a lease that is over are left to `clear_remains`."""
        held = self._held.get(lease)
        if held is not None and held.links():
            left_s = held.record.expires_at - self._now()
            if left_s > 0:
                return LeaseFileVerdict(False, left_s, left_s)
        try:
            fd = os.open(self._directory.file(lease, "lease"), os.O_RDONLY)
        except FileNotFoundError:
            self._seen.pop(lease, None)
            self._reported.discard(lease)
            return _ENDED
        try:
            raw, record = _read(fd)
            if record is not None and record.boot == self._boot:
                return self._by_lock_or_clock(lease, fd, record)
            return self._by_change(lease, fd, raw, record)
        finally:
            os.close(fd)

    def _by_lock_or_clock(self, lease: str, fd: int, record: LeaseFile) -> LeaseFileVerdict:
        if _owner_is_dead(fd):
            return self._over(lease, fd, "died")
        left_s = record.expires_at - self._now()
        if left_s <= 0:
            self._seal(lease)
            _, again = _read(fd)
            if again is None:
                return LeaseFileVerdict(False, record.ttl_s)
            left_s = again.expires_at - self._now()
            if left_s <= 0:
                return self._over(lease, fd, "expired")
        return LeaseFileVerdict(False, left_s, left_s)

    def _by_change(
        self, lease: str, fd: int, raw: bytes, record: LeaseFile | None
    ) -> LeaseFileVerdict:
        """Neither locks nor clocks can be compared: the file must be unchanged for its ttl."""
        ttl_s = UNREADABLE_S if record is None else record.ttl_s
        now = self._now()
        seen, since = self._seen.setdefault(lease, (raw, now))
        if seen != raw:
            self._seen[lease] = (raw, since := now)
        left_s = since + ttl_s - now
        if left_s > 0:
            return LeaseFileVerdict(False, left_s)
        if record is None and not _owner_is_dead(fd):
            return LeaseFileVerdict(False, UNREADABLE_S)
        self._seal(lease)
        if _read(fd)[0] != raw:
            return LeaseFileVerdict(False, ttl_s)
        return self._over(lease, fd, "expired")

    def _over(self, lease: str, fd: int, cause: Literal["died", "expired"]) -> LeaseFileVerdict:
        self._seen.pop(lease, None)
        if self.looks_only and cause == "died":
            with self._ending:
                if lease not in self._reported:
                    self._reported.add(lease)
                    self._tell_ended(lease, cause)
            return _ENDED
        with self._ending:
            if lease not in self._held and os.fstat(fd).st_nlink > 0:
                # Report the end before the unlink, so that no other process can act on it before it
                # is reported, even if this process is killed in between.
                self._tell_ended(lease, cause)
            self._remove(lease, "lease")
        return _OVER

    def _seal(self, lease: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        os.close(os.open(self._directory.file(lease, "seal"), flags, self._directory.mode))

    def clear_remains(self, lease: str) -> None:
        """Remove the remaining files of a lease that has ended."""
        # The lease file of a new lease is created before the others.
        if not os.path.exists(self._directory.file(lease, "lease")):
            self.end(lease)

    @staticmethod
    def _close(*descriptors: int) -> None:
        for fd in descriptors:
            with suppress(OSError):
                os.close(fd)


def _read(fd: int) -> tuple[bytes, LeaseFile | None]:
    raw = b""
    for _ in range(_READS):
        raw = os.pread(fd, _SIZE + 1, 0)
        record = LeaseFile.decode(raw)
        if record is not None:
            return raw, record
    return raw, None


def _owner_is_dead(fd: int) -> bool:
    """Whether a shared lock can be acquired, so that no process holds the exclusive one. Closing
    `fd` releases it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
