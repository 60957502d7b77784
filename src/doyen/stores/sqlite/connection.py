"""The connection of one handle: its file, its transactions, and the meaning of SQLite's errors.

It waits for the write lock itself, with much shorter pauses than SQLite's busy handler. If no other
process commits for `PATIENCE_S`, it fails with an error that names the process that holds the lock.

Only SQLite may open the database and its companion files in this process, because closing any
descriptor of them drops SQLite's locks. Other code uses only `stat` on them. The connection is
closed before the process forks (`forks`) and opened again when it is next needed.
"""

from __future__ import annotations

import fcntl
import os
import random
import sqlite3
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal
from urllib.parse import quote

from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable
from doyen.stores.sqlite.forks import FileId, connections, inherited
from doyen.stores.sqlite.location import translate_os
from doyen.stores.sqlite.tables import APPLICATION_ID, MIGRATION, SCHEMA, SCHEMA_VERSION

__all__ = ["OPEN_PATIENCE_S", "PATIENCE_S", "Durability", "LocalConnection", "ends_transaction"]

Durability = Literal["NORMAL", "FULL"]
"""Whether a commit is on disk before it is confirmed (FULL), or in order (NORMAL)."""

PATIENCE_S = 0.5
"""How long to wait for the write lock while no other process commits. It is below the request
timeout at the default ttl, so that the error names the process that holds the lock. A handle with
shorter leases waits for a shorter time."""
OPEN_PATIENCE_S = 5.0
"""The same while a store is opened. A caller of `open` does not try again, as candidates do, and on
a busy disk a commit of another process can take more than `PATIENCE_S`."""
_YIELDS = 4
"""Tries before the first pause: a watcher is woken just before the writer's commit."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.00005, 0.002
_LONGEST_LOG = 10_000
"""At how many pages SQLite copies the log to the database within a commit. It happens only if the
handle has not done so before."""
_ROOM = 1000
"""How many pages a transaction may write at most that must not reach this length."""
_INDEX = struct.Struct("=I12xI76xI4x4I")
"""The beginning of the -shm file: its version, the number of frames in the log, how many of them
have been copied to the database, and the marks of readers, each of which is the number of frames in
the log that some read, but the first (walformat, "The WAL-Index File Format")."""
_INDEX_VERSION = 3007000
_HEADER = 48
"""The length of the header of the index. The -shm file begins with two copies of it."""
_WRITE_LOCK, _MARK_LOCK, _USE_LOCK = 120, 123, 128
"""The bytes of the -shm file that SQLite locks to write; to use a mark, exclusively to move it (the
first one, that of readers of the database only; those of the others follow); and for as long as it
uses the file (walformat, "WAL locks")."""
_LOCK = struct.Struct("hhqqi0q")
"""`struct flock`: kind, origin, first byte, number of bytes, process."""
_GIVEN_UP_S = 10.0
"""After how long SQLite gives up what it waits for whatever its timeout (SQLITE_PROTOCOL)."""
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)

_unsynced: set[FileId] = set()
"""Files of which this process could not force a write to disk. The kernel reports that once, and
may have dropped the data: a later write that succeeds does not show that what precedes it is on
disk."""
_NO_FILE: FileId = (-1, -1)
_UNSYNCED = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)


class LocalConnection:
    """A connection to the database at one path. Used on the thread of its database, and on the loop
    while that one does not; any thread may close it while neither is inside SQLite."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.patience_s = PATIENCE_S
        self.execute: Callable[..., sqlite3.Cursor]
        self.synchronous: Durability | Literal[""] = ""
        """The level of the connection. A new one may have any."""
        self._connection: sqlite3.Connection | None = None
        self._file: FileId | None = None
        """The file that was opened first."""
        self._index: tuple[int, FileId] | None = None
        """SQLite's own descriptor of the -shm file, once it was looked for; -1 if not found."""

    def inside(self) -> AbstractContextManager[None]:
        """Around every use on the database's thread, which may have to wait."""
        return connections().inside(self)

    def forked(self) -> None:
        """In a forked child, if the connection could not be closed before: SQLite must not use it,
        not even to close it at the exit of the interpreter, so it is never freed."""
        if self._connection is not None:
            with suppress(ImportError):
                import ctypes

                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))

    def disconnect(self) -> bool:
        """Close the connection; False if SQLite refuses. It is opened again when it is next
        needed."""
        if self._connection is not None:
            try:
                self._connection.close()
            except sqlite3.Error:
                return False
            self._connection = self._index = None
        return True

    def close(self) -> None:
        """Close it for good. No transaction is open."""
        with self.inside():
            self.disconnect()
        connections().forget(self)

    def file(self) -> FileId | None:
        with suppress(FileNotFoundError):
            return self._file or _file_at(self.path)
        return None

    @property
    def opened(self) -> bool:
        """Whether a file was opened, now or earlier."""
        return self._file is not None

    def retire(self) -> bool:
        """If another file, or none, is at the path, do not open it again: the kernel may give the
        number of the earlier file to a new one."""
        if self.opened and not self.in_place():
            self._file = _NO_FILE
            return True
        return False

    def in_place(self) -> bool:
        """Whether the open file is still the one at the path."""
        try:
            return _file_at(self.path) == self._file
        except FileNotFoundError:
            return False

    def open(self) -> None:
        """Open or create the database, in WAL mode."""
        _refuse_removed(self.path)
        self._connect("rwc")
        new = self._is_new()
        mode = self._patiently("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise StoreUnusable(f"{self.path} cannot be put into WAL mode (it stays {mode})")
        if new:
            self._create()
        elif self._patiently("PRAGMA user_version") < SCHEMA_VERSION:
            self._migrate()

    def _sync(self, level: Durability) -> None:
        if level != self.synchronous:
            self.execute(f"PRAGMA synchronous = {level}")
            self.synchronous = level

    def commit(self) -> None:
        try:
            self.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._note_unsynced(error)
            unwritten = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_WRITE
            if unwritten or _code(error) != sqlite3.SQLITE_IOERR:
                raise
            # The WAL may contain the whole transaction, which would then be applied after a crash.
            raise OutcomeUnknown(
                f"the disk failed while {self.path} was committing ({error}):"
                " check the disk, then read the current state"
            ) from error

    def save(self) -> None:
        """Copy the log to the database."""
        try:
            self.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.OperationalError as error:
            self._note_unsynced(error)
            raise

    def _note_unsynced(self, error: sqlite3.OperationalError) -> None:
        if getattr(error, "sqlite_errorcode", 0) in _UNSYNCED and self._file is not None:
            _unsynced.add(self._file)

    def roll_back(self) -> None:
        try:
            if self._connection is not None and self._connection.in_transaction:
                self.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # SQLite has already rolled back

    def begin(
        self,
        level: Durability | None,
        *,
        patience_s: float | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin a transaction, waiting for the lock with short, growing, jittered pauses, while it
        is wanted. Without a level it only reads."""
        if level is not None and self._file in _unsynced:
            raise StoreUnusable(
                f"the disk failed to confirm a write to {self.path}, so it is not known what is on"
                " disk, and this process writes nothing more to it: check the disk and the kernel's"
                " log, then start all processes that use the file again; if the file is restored,"
                " open it with token_floor above the highest token ever issued"
            )
        patience_s = self.patience_s if patience_s is None else patience_s
        pause_s = _PAUSE_S
        yields = _YIELDS
        limit = committed = None
        while self._is_held_up(self._read_index()) or not self._try_begin(level):
            now = time.monotonic()
            if limit is None or now >= limit:
                latest = self._data_version()
                if limit is not None and latest == committed:
                    raise StoreUnavailable(_who_writes(self.path, patience_s))
                limit, committed = now + patience_s, latest
            if not wanted():
                raise StoreUnavailable("the operations were cancelled")
            if yields:
                yields -= 1
                time.sleep(0)
                continue
            self._pause(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        if self._index is None:
            self._index = _descriptor_of(self.path + "-shm")

    def begin_at_once(self) -> Literal["begun", "busy", "long"]:
        """Begin a transaction that writes, if neither its beginning has to wait for the write lock
        ("busy") nor its commit for the disk ("long"). Any thread, if no other is inside.

        With `NORMAL`, a commit waits for the disk only if it is the first in the log, or the first
        after all of the log was copied to the database, as SQLite then begins the log anew and
        syncs its header; or if it makes the log so long that SQLite copies it. How much was copied
        is in the -shm file. While this connection has the write lock, that amount can only grow,
        and no other process can make the log begin anew.
        """
        if self._connection is None or self._index is None or self._file in _unsynced:
            return "long"
        index = self._read_index()
        if not index or _is_torn(index):  # if its writer is dead, SQLite would read the whole log
            return "long"
        # SQLite can still sleep here, for `_GIVEN_UP_S` at most, if a process comes to one of the
        # places of `_is_held_up` after they were read, and is stopped there before BEGIN has passed
        # them: within microseconds.
        if self._is_held_up(index) or not self._try_begin("NORMAL"):
            return "busy"
        if self._appends():
            return "begun"
        self.roll_back()
        return "long"

    def _appends(self) -> bool:
        """Whether a commit of this transaction only adds to the log."""
        index = self._read_index()
        if not index:
            return False
        version, frames, copied, *_ = _INDEX.unpack(index)
        return bool(version == _INDEX_VERSION and copied < frames < _LONGEST_LOG - _ROOM)

    def _read_index(self) -> bytes:
        """The beginning of the -shm file; empty if it cannot be read."""
        descriptor, file = self._index or (-1, _NO_FILE)
        with suppress(OSError):
            status = os.fstat(descriptor)
            # Code that closes all descriptors may have caused the number to be used again.
            if (status.st_dev, status.st_ino) == file:
                index = os.pread(descriptor, _INDEX.size, 0)
                return index if len(index) == _INDEX.size else b""
        return b""

    def _is_held_up(self, index: bytes) -> bool:
        """Whether a process makes BEGIN of others sleep inside SQLite, whatever their timeout: it
        has written one of the two copies of the header of the index, or moves the mark that SQLite
        would use (walTryBeginRead). That takes it microseconds, unless it is stopped."""
        if not index:
            return False
        if _is_torn(index):
            return self._is_locked(_WRITE_LOCK, fcntl.F_RDLCK)
        _, frames, copied, *marks = _INDEX.unpack(index)
        if frames == copied and not self._is_locked(_MARK_LOCK, fcntl.F_RDLCK):
            return False
        mark, number = max((mark, n) for n, mark in enumerate((0, *marks)) if mark <= frames)
        if mark < frames and not all(
            self._is_locked(_MARK_LOCK + n, fcntl.F_WRLCK) for n in range(1, len(marks) + 1)
        ):
            return False  # SQLite moves that one
        return self._is_locked(_MARK_LOCK + number, fcntl.F_RDLCK)

    def _is_locked(self, byte: int, against: int) -> bool:
        """Whether a lock of another process excludes one of this kind on a byte of the -shm file,
        which can be read."""
        descriptor, _ = self._index or (-1, _NO_FILE)
        asked = _LOCK.pack(against, os.SEEK_SET, byte, 1, 0)
        with suppress(OSError):
            found: int = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0]
            return found != fcntl.F_UNLCK
        return False

    def _data_version(self) -> int | None:
        """A number that changes whenever another connection commits; None if it cannot be read."""
        if self._is_held_up(self._read_index()):
            return None
        try:
            (version,) = self.execute("PRAGMA data_version").fetchone()
        except sqlite3.OperationalError:
            return None
        return int(version)

    def _try_begin(self, level: Durability | None) -> bool:
        try:
            if level is None:
                self.execute("BEGIN")
                self.execute("SELECT 1 FROM counter").fetchone()
            else:
                self._sync(level)
                self.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if _code(error) not in _BUSY:
                raise
            self.roll_back()
            return False
        return True

    def _connect(self, mode: Literal["rw", "rwc"]) -> None:
        """Open a connection. With "rwc" the file is created if it does not exist."""
        with suppress(FileNotFoundError):
            if inherited(_file_at(self.path)):
                raise StoreUnusable(
                    f"{self.path} cannot be used in this process: it was forked while its parent"
                    " was writing to that file, and the disk did not answer; start this process"
                    " again, or start it without a fork"
                )
        # Another thread may close it before a fork, while this one is not inside SQLite.
        self._connection = sqlite3.connect(
            f"file://{quote(os.fsencode(self.path))}?mode={mode}",
            uri=True,
            timeout=0,
            isolation_level=None,
            cached_statements=256,
            check_same_thread=False,
        )
        self.execute = self._connection.execute
        self.execute(f"PRAGMA wal_autocheckpoint = {_LONGEST_LOG}").fetchone()
        self.synchronous = ""
        self._file = self._file or _file_at(self.path)

    def reconnect(self) -> None:
        """Open the connection again if it was closed before a fork."""
        if self._connection is None:
            with suppress(FileNotFoundError):
                if _file_at(self.path) == self._file:
                    self._connect("rw")
                    return
            raise self.replaced()

    def _pause(self, seconds: float) -> None:
        """Wait, outside SQLite. No transaction is open."""
        connections().leave(self)
        try:
            time.sleep(seconds * random.uniform(0.5, 1.5))
        finally:
            connections().enter(self)
        self.reconnect()

    def replaced(self) -> StoreUnusable:
        return StoreUnusable(
            f"{self.path} or its directory was removed or replaced while in use, so other"
            " processes may use another file: connect again, and after a restore set"
            " token_floor above the highest token ever issued"
        )

    def _is_new(self) -> bool:
        """Whether the database is empty; raises if it is not ours to use."""
        # The application id is read last: if another process is creating the store at this moment
        # and its tables are visible, then so is the id.
        tables = self._patiently("SELECT count(*) FROM sqlite_master")
        version = self._patiently("PRAGMA user_version")
        application = self._patiently("PRAGMA application_id")
        if application == APPLICATION_ID:
            if version > SCHEMA_VERSION:
                raise StoreUnusable(
                    f"{self.path} was written by a newer doyen (schema {version}, this one supports"
                    f" {SCHEMA_VERSION}): upgrade doyen here, or choose another path"
                )
            return False
        if application or version or tables:
            raise StoreUnusable(
                f"{self.path} is an SQLite database of another application:"
                " choose another path for the store"
            )
        return True

    def _create(self) -> None:
        self.begin("FULL", patience_s=OPEN_PATIENCE_S)
        if self._is_new():
            for statement in SCHEMA:
                self.execute(statement)
        self.commit()

    def _migrate(self) -> None:
        self.begin("FULL", patience_s=OPEN_PATIENCE_S)
        if self._patiently("PRAGMA user_version") < SCHEMA_VERSION:
            for statement in MIGRATION:
                self.execute(statement)
        self.commit()

    def _patiently(self, statement: str) -> Any:
        """The single value of a statement, retried while another process holds the lock."""
        limit = time.monotonic() + OPEN_PATIENCE_S
        while True:
            try:
                (value,) = self.execute(statement).fetchone()
                return value
            except sqlite3.OperationalError as error:
                if _code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL):
                    raise
                if time.monotonic() >= limit:
                    raise StoreUnavailable(_who_writes(self.path, OPEN_PATIENCE_S)) from error
            self._pause(_LONGEST_PAUSE_S)

    def translate(self, error: BaseException, *, copy: bool = False) -> BaseException:
        """The error as doyen's own; a copy if several callers raise it, as raising adds a
        traceback."""
        if isinstance(error, OSError):
            translated: StoreError = translate_os(error, self.path)
        elif isinstance(error, sqlite3.Error) and _code(error):
            translated = _meaning(error, self.path)
        elif copy and isinstance(error, StoreError):
            translated = type(error)(*error.args)
        else:
            return error
        translated.__cause__ = error
        return translated


def _file_at(path: str) -> FileId:
    status = os.stat(path)
    return (status.st_dev, status.st_ino)


def _descriptor_of(path: str) -> tuple[int, FileId]:
    """A descriptor of this process that refers to the file. It belongs to SQLite: no other code may
    open the file, or close the descriptor."""
    with suppress(OSError):
        file = _file_at(path)
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                status = os.fstat(int(name))
                if (status.st_dev, status.st_ino) == file:
                    return int(name), file
    return -1, _NO_FILE


def _is_torn(index: bytes) -> bool:
    """Whether the two copies of the header of the index differ: a process is writing it, or has
    ended while it did."""
    return index[:_HEADER] != index[_HEADER : 2 * _HEADER]


def _code(error: BaseException) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


_OF_ONE_STATEMENT = {
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_RANGE,
    0,  # raised by the Python module: an argument that SQLite cannot store
}


def ends_transaction(error: Exception) -> bool:
    """Whether an error of one operation is also that of all others in its transaction."""
    return isinstance(error, sqlite3.Error) and _code(error) not in _OF_ONE_STATEMENT


def _meaning(error: sqlite3.Error, path: str) -> StoreError:
    """Map an error of SQLite to an exception that names cause and remedy."""
    code = _code(error)
    if code == sqlite3.SQLITE_NOTADB:
        return StoreUnusable(
            f"{path} is not an SQLite database: choose another path, or move that file away"
        )
    if code == sqlite3.SQLITE_CORRUPT:
        return StoreUnusable(
            f"the database {path} is damaged ({error}): stop all candidates, move it away or"
            " restore it, and open it with token_floor above the highest token ever issued"
        )
    if code == sqlite3.SQLITE_PROTOCOL:
        return StoreUnavailable(_who_writes(path, _GIVEN_UP_S))
    if code == sqlite3.SQLITE_FULL:
        return StoreUnavailable(
            f"no space left for the database: free space on the file system of {path};"
            " nothing was written"
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return StoreUnusable(
            f"{path} cannot be opened for writing ({error}): every candidate must be able to"
            f" read and write it and to create files in {os.path.dirname(path)}"
        )
    if code == sqlite3.SQLITE_IOERR:
        return StoreUnavailable(
            f"the disk failed under {path} ({error}): check its space and its health;"
            " nothing was written"
        )
    return StoreUnusable(f"{path}: {error}")


def _who_writes(path: str, waited_s: float) -> str:
    """Name the process that holds the write lock."""
    begin = f"for {waited_s:g} s {path} has been locked for writing by "
    pid = writer(path)
    if pid is None:
        return begin + "another process; if that lasts, look for one that hangs"
    if pid == os.getpid():
        return begin + f"this process ({pid}), in another session or outside doyen"
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition(" (")[2].rpartition(") ")
    except OSError:
        return begin + f"process {pid}"
    if rest[:1] in ("T", "t"):
        return (
            begin
            + f"process {pid} ({name}), which is stopped: continue it (kill -CONT {pid}) or kill it"
        )
    return begin + f"process {pid} ({name}): if it hangs, kill it"


def writer(path: str) -> int | None:
    """The process that holds SQLite's write lock, or moves the mark of a reader, according to
    /proc/locks."""
    marks = _MARK_LOCK + 1, _MARK_LOCK + 4
    return _locked_by(path, "WRITE", _WRITE_LOCK) or _locked_by(path, "WRITE", *marks)


def user(path: str) -> int | None:
    """A process in which SQLite uses the -shm file, according to /proc/locks."""
    return _locked_by(path, "READ", _USE_LOCK)


def _locked_by(
    path: str, kind: Literal["READ", "WRITE"], first: int, until: int | None = None
) -> int | None:
    """The process that has a lock on one of these bytes of the -shm file."""
    try:
        inode = str(os.stat(path + "-shm").st_ino)
        with open("/proc/locks", encoding="ascii") as table:
            for line in table:
                fields = line.split()
                if len(fields) != 8 or fields[3] != kind or fields[5].split(":")[2] != inode:
                    continue
                last = float("inf") if fields[7] == "EOF" else int(fields[7])
                overlaps = int(fields[6]) <= (until or first) and first <= last
                if overlaps and int(fields[4]) > 0:
                    return int(fields[4])
    except OSError:
        pass
    return None


def _refuse_removed(path: str) -> None:
    """Raise if the database was removed and its companion files were not, while a process uses
    them: SQLite would take the index of its log for that of the new database."""
    pid = user(path)
    # SQLite makes the companion files when the database is no longer empty.
    if pid is not None and pid != os.getpid() and not _size(path):
        raise StoreUnusable(
            f"{path} was removed, and process {pid} still uses {path}-wal and {path}-shm: stop all"
            " processes that use the store, remove these files too, and start again with"
            " token_floor above the highest token ever issued"
        )


def _size(path: str) -> int:
    with suppress(FileNotFoundError):
        return os.stat(path).st_size
    return 0
