"""The database of one handle: its connection, its thread, and the meaning of its errors.

All SQL runs on one thread, which executes all pending operations in one transaction, those that
arrive while it waits for the write lock included. A thousand candidates of one session therefore
cost few commits, and a slow disk never blocks the loop on which leases are renewed. Commits that
put a value (not a relaxed one), or raise the ceiling of the numbers, are on disk before they are
confirmed (`synchronous=FULL`). Others can be lost, from the last one on, when the machine crashes
(`NORMAL`); what that means for tokens is in `tables`. The log is copied to the database between two
batches, when the callers have their answers.

The thread itself waits for the write lock, with much shorter pauses than SQLite's busy handler. If
no other process commits for `PATIENCE_S`, the batch fails with an error that names the process that
holds the lock.

Only SQLite may open the database and its companion files in this process, because closing any
descriptor of them drops SQLite's locks. Other code uses only `stat` on them. The connection is
closed before the process forks (`forks`) and opened again when it is next needed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable
from doyen.stores.sqlite.forks import FileId, connections, inherited
from doyen.stores.sqlite.inbox import Inbox
from doyen.stores.sqlite.leases import LocalLeases
from doyen.stores.sqlite.location import SessionsDirectory, translate_os
from doyen.stores.sqlite.tables import (
    APPLICATION_ID,
    MIGRATION,
    SCHEMA,
    SCHEMA_VERSION,
    DurableNeeded,
    Transaction,
    WriteNeeded,
)

__all__ = ["Database"]

T = TypeVar("T")

_Level = Literal["NORMAL", "FULL"]
"""Whether a commit is on disk before it is confirmed (FULL), or in order (NORMAL)."""

PATIENCE_S = 0.5
"""How long to wait for the write lock while no other process commits. It is below the request
timeout at the default ttl, so that the error names the process that holds the lock."""
OPEN_PATIENCE_S = 5.0
"""The same while a store is opened. A caller of `open` does not try again, as candidates do, and on
a busy disk a commit of another process can take more than `PATIENCE_S`."""
_BATCH = 256
_YIELDS = 4
"""Tries before the first pause: a watcher is woken just before the writer's commit."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.00005, 0.002
_SAVED_AFTER = 100
"""After how many of its own commits a handle copies the log to the database."""
_LONGEST_LOG = 10_000
"""At how many pages SQLite does so within a commit. It happens only if the former does not."""
_WRITE_LOCK = 120
"""The byte of the -shm file that SQLite locks to write (walformat, "WAL locks")."""


@dataclass(slots=True, eq=False)
class _Operation:
    """A pending operation on the tables, and the future of its result."""

    run: Callable[[Transaction], Any]
    answer: asyncio.Future[Any]
    writes: bool
    durable: bool
    result: Any = None
    error: BaseException | None = None


class Database:
    """A connection with its thread. `submit` is called from the loop, as is `deliver`."""

    def __init__(
        self,
        path: str,
        loop: asyncio.AbstractEventLoop,
        directory: SessionsDirectory,
        leases: LocalLeases,
        inbox: Inbox,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.path = path
        self.stale: deque[int] = deque()
        """Tags of watches that were closed; their rows go with the next write."""
        self.deliver: Callable[[Transaction], None] = lambda committed: None
        """Receives each write transaction that was committed."""
        self.serves = False
        """Whether the database was opened."""
        self._loop = loop
        self._directory = directory
        self._leases = leases
        self._inbox = inbox
        self._patience_s = patience_s
        self._queue: SimpleQueue[_Operation | None] = SimpleQueue()
        self._first: _Operation | None = None
        """An operation that was taken from the queue, and belongs to the next batch."""
        self._thread = threading.Thread(target=self._serve, name="doyen-sqlite", daemon=True)
        self._connection: sqlite3.Connection | None = None
        self._execute: Callable[..., sqlite3.Cursor]
        self._file: FileId | None = None
        """The file that was opened first."""
        self._synchronous: _Level | Literal[""] = ""
        """The level of the connection. A new one may have any."""
        self._seen = 0
        """The latest number that a transaction of this handle has seen."""
        self._unsaved = 0
        """Commits since this handle has last copied the log to the database."""

    async def open(self) -> None:
        """Start the thread and open the database on it."""
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._opened

    def submit(
        self, run: Callable[[Transaction], T], *, writes: bool = True, durable: bool = False
    ) -> asyncio.Future[T]:
        """Queue an operation. Cancelling the future prevents it only before its transaction
        begins."""
        answer: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Operation(run, answer, writes, durable))
        return answer

    async def close(self) -> None:
        """Execute what is queued, close the connection and end the thread."""
        if self._thread.ident is not None:
            self._queue.put(None)
            await self._ended
            self._thread.join()

    def forked(self) -> None:
        """In a forked child, if the connection could not be closed before: SQLite must not use it,
        not even to close it at the exit of the interpreter, so it is never freed."""
        if self._connection is not None:
            with suppress(ImportError):
                import ctypes

                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))

    def disconnect(self) -> bool:
        """Close the connection; False if SQLite refuses. The thread opens it again when it next
        needs it."""
        if self._connection is not None:
            try:
                self._connection.close()
            except sqlite3.Error:
                return False
            self._connection = None
        return True

    def file(self) -> FileId | None:
        with suppress(FileNotFoundError):
            return self._file or _file_at(self.path)
        return None

    def in_place(self) -> bool:
        """Whether the open files are still those at the path."""
        try:
            return _file_at(self.path) == self._file and self._inbox.in_place()
        except FileNotFoundError:
            return False

    def _serve(self) -> None:
        """The database thread."""
        try:
            with connections().inside(self):
                self._start()
        except BaseException as error:  # noqa: BLE001 (raised by open)
            self._stop()
            self._post(_settle, self._opened, None, self._translate(error))
            self._post(_settle, self._ended, None, None)
            return
        self.serves = True
        self._post(_settle, self._opened, None, None)
        while batch := self._take():
            with connections().inside(self):
                committed = self._carry_out(batch)
            self._post(self._answer, batch, committed)
            if committed is not None:
                with connections().inside(self):
                    self._keep_house(committed)
        self._stop()
        self._post(_settle, self._ended, None, None)

    def _take(self) -> list[_Operation]:
        """All pending operations; empty when the database is closed."""
        first, self._first = self._first or self._queue.get(), None
        if first is None:
            return []
        return [first, *self._pending(_BATCH - 1)]

    def _pending(self, number: int) -> Iterator[_Operation]:
        """The operations that are in the queue by now."""
        for _ in range(number):
            try:
                operation = self._queue.get_nowait()
            except Empty:
                return
            if operation is None:
                self._queue.put(None)
                return
            yield operation

    def _join(self, wanted: list[_Operation], batch: list[_Operation]) -> None:
        """Add the operations that arrived while the batch waited for the lock. How durable the
        transaction is was decided before it began."""
        durable = self._synchronous == "FULL"
        for operation in self._pending(_BATCH - len(wanted)):
            if operation.durable and not durable:
                self._first = operation
                return
            batch.append(operation)
            if not operation.answer.cancelled():
                wanted.append(operation)

    def _post(self, act: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(act, *args)
        except RuntimeError:
            pass  # the loop was closed without closing the store

    def _answer(self, batch: list[_Operation], committed: Transaction | None) -> None:
        for operation in batch:
            _settle(operation.answer, operation.result, operation.error)
        if committed is not None:
            self.deliver(committed)

    def _carry_out(self, batch: list[_Operation]) -> Transaction | None:
        """Execute the operations. Returns the transaction if it wrote and was committed."""
        wanted = [operation for operation in batch if not operation.answer.cancelled()]
        if not wanted:
            return None
        try:
            self._reconnect()
            if not any(operation.writes for operation in wanted):
                try:
                    self._read(wanted)
                    return None
                except WriteNeeded:
                    self._roll_back()
            try:
                return self._write(wanted, batch)
            except DurableNeeded:
                self._roll_back()
                return self._write(wanted, batch, durable=True)
        except Exception as error:  # noqa: BLE001 (raised by every operation of the batch)
            self._roll_back()
            for operation in wanted:
                operation.result, operation.error = None, self._translate(error, copy=True)
            return None

    def _keep_house(self, committed: Transaction) -> None:
        """What waits for the disk, while nobody waits for it: reserve numbers before they are
        needed, and copy the log to the database. If it fails, it is done when it is needed."""
        self._unsaved += 1
        try:
            self._reconnect()
            if committed.is_low:
                self._write([], [], durable=True)
            if self._unsaved >= _SAVED_AFTER:
                self._unsaved = 0
                self._save()
        except (sqlite3.Error, OSError, StoreError):
            self._roll_back()

    def _save(self) -> None:
        self._execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def _attempt(self, batch: list[_Operation], tables: Transaction) -> None:
        """Execute each operation. Its error is its own, unless the whole transaction is lost."""
        for operation in batch:
            try:
                operation.result, operation.error = operation.run(tables), None
            except (WriteNeeded, DurableNeeded):
                raise
            except Exception as error:
                if isinstance(error, sqlite3.Error) and _code(error) not in _OF_ONE_STATEMENT:
                    raise
                operation.error = self._translate(error)

    def _read(self, batch: list[_Operation]) -> None:
        self._begin(batch, None)
        if not self.in_place():  # what others do is in another file
            raise self._replaced()
        self._attempt(batch, self._transaction(writable=False))
        self._execute("COMMIT")

    def _write(
        self, wanted: list[_Operation], batch: list[_Operation], *, durable: bool = False
    ) -> Transaction:
        """Execute the operations `wanted`, and those that join them, if there are any: these are
        added to both."""
        durable = durable or any(operation.durable for operation in wanted)
        self._begin(wanted, "FULL" if durable else "NORMAL")
        if wanted:
            self._join(wanted, batch)
        if not self.in_place():
            raise self._replaced()
        tables = self._transaction(writable=True)
        self._attempt(wanted, tables)
        tables.finish(self.stale, self._inbox.send)
        self._commit()
        self._seen = max(self._seen, tables.latest or 0)
        return tables

    def _transaction(self, *, writable: bool) -> Transaction:
        return Transaction(
            self._execute,
            self._leases,
            self._inbox.name,
            writable=writable,
            durable=self._synchronous == "FULL",
            seen=self._seen,
        )

    def alone(self) -> bool:
        """Whether no other handle is known to be alive. Under the write lock."""
        files = self._directory.files().items()
        return not self._inbox.any_other_read(name for name, parts in files if "inbox" in parts)

    def _sync(self, level: _Level) -> None:
        if level != self._synchronous:
            self._execute(f"PRAGMA synchronous = {level}")
            self._synchronous = level

    def _commit(self) -> None:
        try:
            self._execute("COMMIT")
        except sqlite3.OperationalError as error:
            unwritten = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_WRITE
            if unwritten or _code(error) != sqlite3.SQLITE_IOERR:
                raise
            # The WAL may contain the whole transaction, which would then be applied after a crash.
            raise OutcomeUnknown(
                f"the disk failed while {self.path} was committing ({error}):"
                " check the disk, then read the current state"
            ) from error

    def _roll_back(self) -> None:
        try:
            if self._connection is not None and self._connection.in_transaction:
                self._execute("ROLLBACK")
        except sqlite3.Error:
            pass  # SQLite has already rolled back

    def _begin(
        self, batch: list[_Operation], level: _Level | None, *, patience_s: float | None = None
    ) -> None:
        """Begin a transaction, waiting for the lock with short, growing, jittered pauses. Without a
        level it only reads."""
        patience_s = self._patience_s if patience_s is None else patience_s
        pause_s = _PAUSE_S
        yields = _YIELDS
        limit = committed = None
        while not self._try_begin(level):
            now = time.monotonic()
            if limit is None or now >= limit:
                latest = self._data_version()
                if limit is not None and latest == committed:
                    raise StoreUnavailable(_who_writes(self.path, patience_s))
                limit, committed = now + patience_s, latest
            if batch and all(operation.answer.cancelled() for operation in batch):
                raise StoreUnavailable("the operations were cancelled")
            if yields:
                yields -= 1
                time.sleep(0)
                continue
            self._pause(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def _data_version(self) -> int | None:
        """A number that changes whenever another connection commits."""
        try:
            (version,) = self._execute("PRAGMA data_version").fetchone()
        except sqlite3.OperationalError:
            return None
        return int(version)

    def _try_begin(self, level: _Level | None) -> bool:
        try:
            if level is None:
                self._execute("BEGIN")
                self._execute("SELECT 1 FROM counter").fetchone()
            else:
                self._sync(level)
                self._execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if _code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            self._roll_back()
            return False
        return True

    def _start(self) -> None:
        """Open or create the database, in WAL mode, and make the inbox."""
        self._connect("rwc")
        new = self._is_new()
        mode = self._patiently("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise StoreUnusable(f"{self.path} cannot be put into WAL mode (it stays {mode})")
        if new:
            self._create()
        elif self._patiently("PRAGMA user_version") < SCHEMA_VERSION:
            self._migrate()
        self._directory.make()
        self._begin([], "NORMAL", patience_s=OPEN_PATIENCE_S)
        if self.alone():
            tables = self._transaction(writable=True)
            tables.begin_at_ceiling()
            tables.finish(self.stale, self._inbox.send)
        self._inbox.make()
        self._execute("COMMIT")

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
        self._execute = self._connection.execute
        self._execute(f"PRAGMA wal_autocheckpoint = {_LONGEST_LOG}").fetchone()
        self._synchronous = ""
        self._file = self._file or _file_at(self.path)

    def _reconnect(self) -> None:
        """Open the connection again if it was closed before a fork."""
        if self._connection is None:
            with suppress(FileNotFoundError):
                if _file_at(self.path) == self._file:
                    self._connect("rw")
                    return
            raise self._replaced()

    def _pause(self, seconds: float) -> None:
        """Wait, outside SQLite. No transaction is open."""
        connections().leave(self)
        try:
            time.sleep(seconds * random.uniform(0.5, 1.5))
        finally:
            connections().enter(self)
        self._reconnect()

    def _replaced(self) -> StoreUnusable:
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
        self._begin([], "FULL", patience_s=OPEN_PATIENCE_S)
        if self._is_new():
            for statement in SCHEMA:
                self._execute(statement)
        self._execute("COMMIT")

    def _migrate(self) -> None:
        self._begin([], "FULL", patience_s=OPEN_PATIENCE_S)
        if self._patiently("PRAGMA user_version") < SCHEMA_VERSION:
            for statement in MIGRATION:
                self._execute(statement)
        self._execute("COMMIT")

    def _patiently(self, statement: str) -> Any:
        """The single value of a statement, retried while another process holds the lock."""
        limit = time.monotonic() + OPEN_PATIENCE_S
        while True:
            try:
                (value,) = self._execute(statement).fetchone()
                return value
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY:
                    raise
                if time.monotonic() >= limit:
                    raise StoreUnavailable(_who_writes(self.path, OPEN_PATIENCE_S)) from error
            self._pause(_LONGEST_PAUSE_S)

    def _stop(self) -> None:
        with connections().inside(self):
            self.disconnect()  # no transaction is open, and no caller is left
        connections().forget(self)

    def _translate(self, error: BaseException, *, copy: bool = False) -> BaseException:
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


def _settle(answer: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


def _code(error: BaseException) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


_OF_ONE_STATEMENT = {
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_RANGE,
    0,  # raised by the Python module: an argument that SQLite cannot store
}


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
    """The process that holds SQLite's write lock, according to /proc/locks."""
    try:
        inode = str(os.stat(path + "-shm").st_ino)
        with open("/proc/locks", encoding="ascii") as table:
            for line in table:
                fields = line.split()
                if len(fields) != 8 or fields[3] != "WRITE" or fields[5].split(":")[2] != inode:
                    continue
                last = float("inf") if fields[7] == "EOF" else int(fields[7])
                if int(fields[6]) <= _WRITE_LOCK <= last and int(fields[4]) > 0:
                    return int(fields[4])
    except OSError:
        pass
    return None
