"""The database of one handle: a thread that executes its operations in batches.

All SQL runs on one thread, which executes all pending operations in one transaction, those that
arrive while it waits for the write lock included. A thousand candidates of one session therefore
cost few commits, and a slow disk never blocks the loop on which leases are renewed. Commits that
put a value (not a relaxed one), or raise the ceiling of the numbers, are on disk before they are
confirmed (`synchronous=FULL`). Others can be lost, from the last one on, when the machine crashes
(`NORMAL`); what that means for tokens is in `tables`. The log is copied to the database between two
batches, when the callers have their answers.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from doyen.errors import StoreError
from doyen.stores.sqlite.connection import (
    OPEN_PATIENCE_S,
    Durability,
    LocalConnection,
    ends_transaction,
)
from doyen.stores.sqlite.inbox import Inbox
from doyen.stores.sqlite.leases import LocalLeases
from doyen.stores.sqlite.location import SessionsDirectory
from doyen.stores.sqlite.tables import DurableNeeded, Transaction, WriteNeeded

__all__ = ["Database"]

T = TypeVar("T")

_BATCH = 256
_SAVED_AFTER = 100
"""After how many of its own commits a handle copies the log to the database."""
_LATER_S = 0.001
"""How long an operation waits that is to share the transaction of the next."""


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
    ) -> None:
        self.connection = LocalConnection(path)
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
        self._queue: SimpleQueue[_Operation | None] = SimpleQueue()
        self._later: list[_Operation] = []
        self._first: _Operation | None = None
        """An operation that was taken from the queue, and belongs to the next batch."""
        self._thread = threading.Thread(target=self._serve, name="doyen-sqlite", daemon=True)
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
        self._submit_later_ones()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Operation(run, answer, writes, durable))
        return answer

    def submit_later(self, run: Callable[[Transaction], T]) -> asyncio.Future[T]:
        """Queue an operation that writes together with the next, before it, or in a moment."""
        answer: asyncio.Future[T] = self._loop.create_future()
        if not self._later:
            self._loop.call_later(_LATER_S, self._submit_later_ones)
        self._later.append(_Operation(run, answer, writes=True, durable=False))
        return answer

    def _submit_later_ones(self) -> None:
        later, self._later = self._later, []
        for operation in later:
            self._queue.put(operation)

    async def close(self) -> None:
        """Execute what is queued, close the connection and end the thread."""
        self._submit_later_ones()
        if self._thread.ident is not None:
            self._queue.put(None)
            await self._ended
            self._thread.join()

    def in_place(self) -> bool:
        """Whether the open files are still those at the path."""
        try:
            return self.connection.in_place() and self._inbox.in_place()
        except FileNotFoundError:
            return False

    def _serve(self) -> None:
        """The database thread."""
        try:
            with self.connection.inside():
                self._start()
        except BaseException as error:  # noqa: BLE001 (raised by open)
            self.connection.close()
            self._post(_settle, self._opened, None, self.connection.translate(error))
            self._post(_settle, self._ended, None, None)
            return
        self.serves = True
        self._post(_settle, self._opened, None, None)
        while batch := self._take():
            with self.connection.inside():
                committed = self._carry_out(batch)
            self._post(self._answer, batch, committed)
            if committed is not None:
                with self.connection.inside():
                    self._keep_house(committed)
        self.connection.close()
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
        durable = self.connection.synchronous == "FULL"
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
            self.connection.reconnect()
            if not any(operation.writes for operation in wanted):
                try:
                    self._read(wanted)
                    return None
                except WriteNeeded:
                    self.connection.roll_back()
            try:
                return self._write(wanted, batch)
            except DurableNeeded:
                self.connection.roll_back()
                return self._write(wanted, batch, durable=True)
        except Exception as error:  # noqa: BLE001 (raised by every operation of the batch)
            self.connection.roll_back()
            for operation in wanted:
                operation.result = None
                operation.error = self.connection.translate(error, copy=True)
            return None

    def _keep_house(self, committed: Transaction) -> None:
        """What waits for the disk, while nobody waits for it: reserve numbers before they are
        needed, and copy the log to the database. If it fails, it is done when it is needed."""
        self._unsaved += 1
        try:
            self.connection.reconnect()
            if committed.is_low:
                self._write([], [], durable=True)
            if self._unsaved >= _SAVED_AFTER:
                self._unsaved = 0
                self.connection.save()
        except (sqlite3.Error, OSError, StoreError):
            self.connection.roll_back()

    def _attempt(self, batch: list[_Operation], tables: Transaction) -> None:
        """Execute each operation. Its error is its own, unless the whole transaction is lost."""
        for operation in batch:
            try:
                operation.result, operation.error = operation.run(tables), None
            except (WriteNeeded, DurableNeeded):
                raise
            except Exception as error:
                if ends_transaction(error):
                    raise
                operation.error = self.connection.translate(error)

    def _read(self, batch: list[_Operation]) -> None:
        self._begin(batch, None)
        if not self.in_place():  # what others do is in another file
            raise self.connection.replaced()
        self._attempt(batch, self._transaction(writable=False))
        self.connection.execute("COMMIT")

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
            raise self.connection.replaced()
        tables = self._transaction(writable=True)
        self._attempt(wanted, tables)
        tables.finish(self.stale, self._inbox.send)
        self.connection.commit()
        self._seen = max(self._seen, tables.latest or 0)
        return tables

    def _begin(self, batch: list[_Operation], level: Durability | None) -> None:
        """Begin a transaction, unless all callers stop waiting for it."""

        def wanted() -> bool:
            return not batch or not all(operation.answer.cancelled() for operation in batch)

        self.connection.begin(level, wanted=wanted)

    def _transaction(self, *, writable: bool) -> Transaction:
        return Transaction(
            self.connection.execute,
            self._leases,
            self._inbox.name,
            writable=writable,
            durable=self.connection.synchronous == "FULL",
            seen=self._seen,
        )

    def alone(self) -> bool:
        """Whether no other handle is known to be alive. Under the write lock."""
        files = self._directory.files().items()
        return not self._inbox.any_other_read(name for name, parts in files if "inbox" in parts)

    def _start(self) -> None:
        """Open or create the database, and make the inbox."""
        connection = self.connection
        connection.open()
        self._directory.make()
        connection.begin("NORMAL", patience_s=OPEN_PATIENCE_S)
        if self.alone():
            tables = self._transaction(writable=True)
            tables.begin_at_ceiling()
            tables.finish(self.stale, self._inbox.send)
        self._inbox.make()
        connection.execute("COMMIT")


def _settle(answer: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
