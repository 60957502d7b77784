"""The database of a handle: a thread that executes its operations in batches.

All handles on one file that belong to one loop share a connection and its thread. That thread
executes all pending operations in one transaction, those that arrive while it waits for the write
lock included. A thousand candidates, of one session or of a thousand sessions of one process,
therefore cost few commits, and a slow disk never blocks the loop on which leases are renewed. Each
handle keeps its own leases, inbox and watches.

The brief operations of a handover are executed on the loop if nothing is queued, the thread does
not use the connection, the write lock is free, and the commit does not wait for the disk
(`LocalConnection.begin_at_once`). Like a renewal, such a commit writes only to the kernel's memory.
A transaction that turns out to concern many rows or processes is rolled back, and left to the
thread.

Commits that put a value (not a relaxed one), or raise the ceiling of the numbers, are on disk
before they are confirmed (`synchronous=FULL`). Others can be lost, from the last one on, when the
machine crashes (`NORMAL`); what that means for tokens is in `tables`. The log is copied to the
database when there is nothing else to do.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar, cast

from doyen._waiting import retrieve
from doyen.errors import StoreError, StoreUnavailable
from doyen.stores.sqlite.connection import (
    OPEN_PATIENCE_S,
    PATIENCE_S,
    Durability,
    LocalConnection,
    ends_transaction,
)
from doyen.stores.sqlite.forks import connections
from doyen.stores.sqlite.inbox import Inbox
from doyen.stores.sqlite.leases import LocalLeases
from doyen.stores.sqlite.location import SessionsDirectory
from doyen.stores.sqlite.tables import (
    DurableNeeded,
    HandleChanges,
    TooLong,
    Transaction,
    WriteNeeded,
)

__all__ = ["Database", "DatabaseThread"]

T = TypeVar("T")

_BATCH = 256
_SAVE_AFTER = 100
"""After so many of its own commits a connection copies the log to the database as soon as it has
been idle for `_IDLE_S`. The copy waits for the disk, and an operation that arrives meanwhile waits
for the copy."""
_IDLE_S = 1.0
_SAVE_AT_LATEST = 1000
"""After so many it does not wait until it is idle."""
_BRIEF_BATCH = 8
"""How many operations the loop executes itself at most, in one transaction."""
_TRIES = 20
"""In how many further turns the loop tries to get the write lock before the thread waits for it."""
_SOON_S = 0.001
"""How long an operation waits for the next one, with which it is to share a transaction; and how
long the other handles wait to be notified of a write after which a body begins."""


@dataclass(slots=True, eq=False)
class _Operation:
    """A pending operation of a handle on the tables, and the future of its result."""

    handle: Database
    run: Callable[[Transaction], Any]
    answer: asyncio.Future[Any]
    writes: bool
    durable: bool
    brief: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Admission(_Operation):
    """The admission of a handle. It has a transaction of its own."""

    patience_s: float | None = None


class Database:
    """The database as one handle uses it. `submit` is called from the loop, as is `deliver`."""

    def __init__(
        self,
        path: str,
        loop: asyncio.AbstractEventLoop,
        directory: SessionsDirectory,
        leases: LocalLeases,
        inbox: Inbox,
    ) -> None:
        self.leases = leases
        self.inbox = inbox
        self.directory = directory
        self.stale: set[int] = set()
        """Tags of watches that were closed; their rows go with the next write. Both threads use it,
        by calls that are atomic."""
        self.carrying: frozenset[int] = frozenset()
        """Tags of scopes whose entry is read for their watchers. Both threads read it, so it is
        replaced and never changed."""
        self.deliver: Callable[[HandleChanges], None] = lambda changes: None
        """Receives what each write transaction that was committed has changed for this handle."""
        self.serves = False
        """Whether the database was opened."""
        self.patience_s = PATIENCE_S
        """How long to wait for the write lock while no other process commits."""
        self.left = False
        """Whether the handle was closed."""
        self.thread = DatabaseThread.of(path, loop)
        self._loop = loop

    @property
    def connection(self) -> LocalConnection:
        return self.thread.connection

    async def open(self) -> None:
        """Open the database, unless another handle has, and make the inbox."""
        await self.thread.admit(self)
        self.serves = True

    def submit(
        self,
        run: Callable[[Transaction], T],
        *,
        writes: bool = True,
        durable: bool = False,
        brief: bool = False,
    ) -> asyncio.Future[T]:
        """Queue an operation. Cancelling the future prevents it only before its transaction
        begins. `brief`: it may be executed on the loop."""
        answer: asyncio.Future[T] = self._loop.create_future()
        self.thread.submit(_Operation(self, run, answer, writes, durable, brief))
        return answer

    def execute_now(self, run: Callable[[Transaction], T], *, last: bool = False) -> T | None:
        """Execute a brief operation that writes, on the loop, if nothing has to be waited for; None
        if it was not executed. `last`: others are notified when the caller has gone on."""
        operation = _Operation(self, run, self._loop.create_future(), True, False, brief=True)
        if self.left or not self.thread.execute_now(operation, last=last):
            return None
        return cast("T", operation.answer.result())

    def submit_later(self, run: Callable[[Transaction], T]) -> asyncio.Future[T]:
        """Queue an operation that writes together with the next, before it, or in a moment."""
        answer: asyncio.Future[T] = self._loop.create_future()
        self.thread.submit_later(_Operation(self, run, answer, True, False, brief=True))
        return answer

    def drop_stale(self) -> None:
        """Have the rows of closed watches removed in a moment, if nothing is written before."""
        self.submit_later(_nothing).add_done_callback(retrieve)

    async def close(self) -> None:
        """Leave the thread. It ends with the last handle."""
        if not self.left:
            self.left = True
            await self.thread.dismiss(self)

    def in_place(self) -> bool:
        """Whether the open files are still those at the path."""
        return self.connection.in_place() and self.inbox.in_place()

    def alone(self) -> bool:
        """Whether no other handle is known to be alive. Under the write lock."""
        files = self.directory.files().items()
        return not self.inbox.any_other_read(name for name, parts in files if "inbox" in parts)


class DatabaseThread:
    """A connection with its thread, shared by handles. Its public methods are called from the
    loop."""

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        self.connection = LocalConnection(path)
        self.sweeping: asyncio.Future[None] | None = None
        """Removes leftovers of dead processes, for all handles that are about to take part."""
        self._loop = loop
        self._users = 0
        self._handles: Mapping[str, Database] = {}
        """The handles that were admitted, by inbox. Both threads read it, so it is replaced and
        never changed."""
        self._queue: SimpleQueue[_Operation | Literal["wake"] | None] = SimpleQueue()
        self._queued = 0
        """How many operations were put into the queue and are not answered. Of the loop."""
        self._using = threading.Lock()
        """Held by the one thread that uses the connection now. The loop never waits for it."""
        self._turn: list[_Operation] = []
        """Operations of this turn of the loop that it will execute itself, if it can."""
        self._has_executed = False
        """An operation was executed on the loop in this turn."""
        self._later: list[_Operation] = []
        self._undelivered: deque[Transaction] = deque()
        """Transactions whose changes the handles have not applied yet. Of the loop."""
        self._first: _Operation | None = None
        """An operation that was taken from the queue, and belongs to the next batch."""
        self._thread = threading.Thread(target=self._serve, name="doyen-sqlite", daemon=True)
        self._opened: asyncio.Future[None] | None = None
        """Done when the connection was opened, or could not be."""
        self._failure: BaseException | None = None
        """Why it could not be opened."""
        self._ended: asyncio.Future[None] = loop.create_future()
        self._seen = 0
        """The latest number that a transaction of this connection has seen."""
        self._unsaved = 0
        """Commits since this connection has last copied the log to the database."""
        self._is_low = False
        """Half of the reserved numbers are used."""

    @classmethod
    def of(cls, path: str, loop: asyncio.AbstractEventLoop) -> DatabaseThread:
        """The thread for a new handle, which must be dismissed in the end."""
        key = (os.getpid(), id(loop), path)
        thread = _threads.get(key)
        if thread is None or not thread._is_joinable():
            thread = _threads[key] = cls(path, loop)
        thread._users += 1
        return thread

    def _is_joinable(self) -> bool:
        """Whether a new handle would open the same file."""
        return self._failure is None and (not self.connection.opened or self.connection.in_place())

    async def admit(self, handle: Database) -> None:
        """Admit a handle. For the first one, the thread is started and opens the connection."""
        starts = self._opened is None
        if self._opened is None:
            self._opened = self._loop.create_future()
            try:
                self._thread.start()
            except RuntimeError as error:
                self._failure = StoreUnavailable(
                    f"no thread can be started for {self.connection.path} ({error}): raise the"
                    " limit of threads (ulimit -u, or the limit of the container)"
                )
                self._opened.set_result(None)
        if not self._opened.done():
            await asyncio.wait({self._opened})
        if self._failure is not None:
            raise self.connection.translate(self._failure, copy=not starts)
        # Other handles are served between the tries.
        patience_s = OPEN_PATIENCE_S if starts else None
        give_up_at = self._loop.time() + OPEN_PATIENCE_S
        while True:
            answer: asyncio.Future[None] = self._loop.create_future()
            admission = _Admission(handle, _nothing, answer, True, False, patience_s=patience_s)
            self._put([admission])
            try:
                await answer
                break
            except StoreUnavailable:
                if starts or self._loop.time() >= give_up_at:
                    raise
        self._handles = {**self._handles, handle.inbox.name: handle}

    def submit(self, operation: _Operation) -> None:
        self._submit_later_ones()
        self._submit([operation])

    def submit_later(self, operation: _Operation) -> None:
        if not self._later:
            self._loop.call_later(_SOON_S, self._submit_later_ones)
        self._later.append(operation)

    def _submit_later_ones(self) -> None:
        later, self._later = self._later, []
        self._submit(later)

    def _submit(self, operations: list[_Operation]) -> None:
        if self._queued or not all(operation.brief for operation in operations):
            self._put(operations)
            return
        if operations and not self._turn:
            self._loop.call_soon(self._end_turn, _TRIES)
        self._turn += operations

    def _put(self, operations: list[_Operation]) -> None:
        """Have the thread execute these, and before them those of this turn."""
        operations, self._turn = [*self._turn, *operations], []
        self._queued += len(operations)
        for operation in operations:
            self._queue.put(operation)

    def _end_turn(self, tries: int) -> None:
        """Execute the operations of this turn, on the loop if nothing has to be waited for. A lock
        that is not free now often is in one of the next turns: a watcher is woken just before the
        writer's commit."""
        batch = self._turn
        if not batch:
            return
        outcome = self._try_here(batch)
        if outcome == "long" or (outcome == "busy" and not tries):
            self._put([])
        elif outcome == "busy":
            os.sched_yield()
            self._loop.call_soon(self._end_turn, tries - 1)
        else:
            self._turn = []
            self._answer_here(batch, outcome)

    def execute_now(self, operation: _Operation, *, last: bool) -> bool:
        """Execute an operation in this instant, and before it those that were to share its
        transaction; False if it was not executed. Not twice in a turn of the loop: operations that
        come together share a transaction."""
        if self._queued or self._turn or self._has_executed:
            return False
        batch = [*self._later, operation]
        outcome = self._try_here(batch)
        if outcome == "busy" or outcome == "long":
            return False
        self._later = []
        self._has_executed = True
        self._loop.call_soon(self._rest)
        self._answer_here(batch, outcome, last=last)
        return True

    def _rest(self) -> None:
        self._has_executed = False

    def _try_here(self, batch: list[_Operation]) -> Transaction | Literal["busy", "long"] | None:
        """Execute operations on the loop, where neither another thread or process nor the disk may
        be waited for. A handover is then not delayed by two changes of threads. If that is not
        possible, nothing was done: another process has the write lock ("busy"), or the thread has
        to execute them ("long")."""
        if len(batch) > _BRIEF_BATCH or not self._using.acquire(blocking=False):
            return "long"
        try:
            if not connections().enter_now(self.connection):
                return "long"
            try:
                return self._carry_out_here(batch)
            finally:
                connections().leave(self.connection)
        finally:
            self._using.release()

    def _answer_here(
        self, batch: list[_Operation], committed: Transaction | None, *, last: bool = False
    ) -> None:
        if committed is not None and not last:
            committed.notify(committed=True)
        self._settle_all(batch)
        if committed is not None:
            self._undelivered.append(committed)
            if last:  # the caller may lead now: its body goes first
                self._loop.call_later(_SOON_S, self._deliver)
            else:
                self._loop.call_soon(self._deliver)
        if self._is_low or self._unsaved in (_SAVE_AFTER, _SAVE_AT_LATEST):
            self._queue.put("wake")

    async def dismiss(self, handle: Database) -> None:
        """A handle was closed. With the last one, what is queued is executed, the connection is
        closed and the thread ends."""
        self._handles = {name: each for name, each in self._handles.items() if each is not handle}
        self._users -= 1
        if self._users:
            return
        for key in [key for key, thread in list(_threads.items()) if thread is self]:
            del _threads[key]
        self._submit_later_ones()
        self._put([])
        if self._thread.ident is not None:
            self._queue.put(None)
            await self._ended
            self._thread.join()

    def _serve(self) -> None:
        """The database thread."""
        try:
            connections().close_replaced()
            with self.connection.inside():
                self.connection.open()
        except BaseException as error:  # noqa: BLE001 (raised by admit)
            self.connection.close()
            self._failure = self.connection.translate(error)
            self._post(_settle, self._opened, None, None)
            self._post(_settle, self._ended, None, None)
            return
        self._post(_settle, self._opened, None, None)
        while batch := self._take():
            with self._using, self.connection.inside():
                committed = self._carry_out(batch)
            self._post(self._answer, batch, committed)
            self._keep_house()
        self.connection.close()
        self._post(_settle, self._ended, None, None)

    def _take(self) -> list[_Operation]:
        """All pending operations, or one admission; empty when the last handle was closed."""
        first, self._first = self._first or self._next(), None
        if first is None:
            return []
        if isinstance(first, _Admission):
            return [first]
        return [first, *self._pending(_BATCH - 1)]

    def _next(self) -> _Operation | None:
        while True:
            unsaved = self._unsaved
            try:
                operation = self._queue.get(timeout=_IDLE_S if unsaved >= _SAVE_AFTER else None)
            except Empty:
                if self._unsaved == unsaved:
                    with self._using, self.connection.inside():
                        self._save()
                continue
            if operation != "wake":
                return operation
            self._keep_house()

    def _pending(self, number: int) -> Iterator[_Operation]:
        """The operations that are in the queue by now, up to an admission."""
        for _ in range(number):
            if self._first is not None:
                return
            try:
                operation = self._queue.get_nowait()
            except Empty:
                return
            if operation == "wake":
                continue  # the thread is awake
            if operation is None:
                self._queue.put(None)
                return
            if isinstance(operation, _Admission):
                self._first = operation
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
        self._queued -= len(batch)
        self._settle_all(batch)
        if committed is not None:
            self._undelivered.append(committed)
            self._deliver()

    def _settle_all(self, batch: list[_Operation]) -> None:
        for operation in batch:
            _settle(operation.answer, operation.result, operation.error)
            if isinstance(operation, _Admission) and operation.handle.left:
                operation.handle.inbox.close()
                operation.handle.inbox.remove()

    def _deliver(self) -> None:
        """Have the handles apply what was committed, in that order."""
        while self._undelivered:
            committed = self._undelivered.popleft()
            committed.notify(committed=True)
            for changes in committed.changes.values():
                changes.handle.deliver(changes)
            for handle in [*self._handles.values()][:1]:
                for inbox in committed.readerless:
                    drop = partial(Transaction.drop_inbox, inbox=inbox, send=handle.inbox.send)
                    handle.submit(drop).add_done_callback(retrieve)

    def _carry_out(self, batch: list[_Operation]) -> Transaction | None:
        """Execute the operations. Returns the transaction if it wrote and was committed."""
        wanted = [operation for operation in batch if not operation.answer.cancelled()]
        if not wanted:
            return None
        if isinstance(wanted[0], _Admission):
            self._admit(wanted[0])
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
            self._fail(wanted, error)
            return None

    def _carry_out_here(
        self, batch: list[_Operation]
    ) -> Transaction | Literal["busy", "long"] | None:
        """`_carry_out`, on the loop, as far as that is possible without waiting."""
        wanted = [operation for operation in batch if not operation.answer.cancelled()]
        if not wanted:
            return None
        try:
            begun = self.connection.begin_at_once()
            if begun != "begun":
                return begun
            return self._perform(wanted, brief=True)
        except (DurableNeeded, TooLong):
            self.connection.roll_back()
            return "long"
        except Exception as error:  # noqa: BLE001 (raised by every operation of the batch)
            self._fail(wanted, error)
            return None

    def _fail(self, batch: list[_Operation], error: Exception) -> None:
        self.connection.roll_back()
        for operation in batch:
            operation.result = None
            operation.error = self.connection.translate(error, copy=True)

    def _keep_house(self) -> None:
        """Do work that waits for the disk while no operation is waiting: reserve numbers before
        they are needed, and copy the log to the database. If this fails, it is done when it is
        needed."""
        if not self._is_low and self._unsaved < _SAVE_AT_LATEST:
            return
        with self._using, self.connection.inside():
            try:
                self.connection.reconnect()
                if self._is_low:
                    self._is_low = False
                    self._write([], [], durable=True)
            except (sqlite3.Error, OSError, StoreError):
                self.connection.roll_back()
            if self._unsaved >= _SAVE_AT_LATEST:
                self._save()

    def _save(self) -> None:
        """Copy the log to the database. If it fails, SQLite does it when it has become long."""
        self._unsaved = 0
        try:
            self.connection.reconnect()
            self.connection.save()
        except (sqlite3.Error, OSError, StoreError):
            self.connection.roll_back()

    def _attempt(self, batch: list[_Operation], tables: Transaction) -> None:
        """Execute each operation. Its error is its own, unless the whole transaction is lost."""
        for operation in batch:
            tables.act_for(operation.handle)
            try:
                operation.result, operation.error = operation.run(tables), None
            except (WriteNeeded, DurableNeeded, TooLong):
                raise
            except Exception as error:
                if ends_transaction(error):
                    raise
                operation.error = self.connection.translate(error)

    def _read(self, batch: list[_Operation]) -> None:
        self._begin(batch, None)
        self._attempt(self._in_place(batch), self._transaction(writable=False))
        self.connection.execute("COMMIT")

    def _write(
        self, wanted: list[_Operation], batch: list[_Operation], *, durable: bool = False
    ) -> Transaction:
        """Execute the operations `wanted`. If there are any, those that join them are executed too,
        and added to both lists."""
        durable = durable or any(operation.durable for operation in wanted)
        self._begin(wanted, "FULL" if durable else "NORMAL")
        if wanted:
            self._join(wanted, batch)
        tables = self._perform(wanted)
        tables.notify(committed=True)
        return tables

    def _perform(self, batch: list[_Operation], *, brief: bool = False) -> Transaction:
        """Execute the operations in the transaction that has begun, and commit it. The caller then
        notifies."""
        present = self._in_place(batch)
        tables = self._transaction(writable=True, brief=brief)
        self._attempt(present, tables)
        try:
            tables.finish(self._handles)
            self.connection.commit()
        except BaseException:
            tables.notify(committed=False)
            raise
        self._seen = max(self._seen, tables.latest or 0)
        self._unsaved += 1
        self._is_low |= tables.is_low
        return tables

    def _in_place(self, batch: list[_Operation]) -> list[_Operation]:
        """The operations of handles whose files are still at the path. Others fail: what other
        processes do is in other files."""
        if not self.connection.in_place():
            raise self.connection.replaced()
        lost = {each for each in {each.handle for each in batch} if not each.inbox.in_place()}
        for operation in batch if lost else ():
            if operation.handle in lost:
                operation.error = self.connection.replaced()
        return [each for each in batch if each.handle not in lost] if lost else batch

    def _begin(self, batch: list[_Operation], level: Durability | None) -> None:
        """Begin a transaction, unless all callers stop waiting for it."""

        def wanted() -> bool:
            return not batch or not all(operation.answer.cancelled() for operation in batch)

        patience_s = max((each.handle.patience_s for each in batch), default=PATIENCE_S)
        patience_s = min(patience_s, self.connection.patience_s)
        self.connection.begin(level, patience_s=patience_s, wanted=wanted)

    def _transaction(self, *, writable: bool, brief: bool = False) -> Transaction:
        return Transaction(
            self.connection.execute,
            writable=writable,
            brief=brief,
            durable=self.connection.synchronous == "FULL",
            seen=self._seen,
        )

    def _admit(self, admission: _Admission) -> None:
        """Make the inbox of a handle. If no other is alive, the numbers begin at the ceiling."""
        handle = admission.handle
        try:
            self.connection.reconnect()
            handle.directory.make()
            self.connection.begin(
                "NORMAL",
                patience_s=admission.patience_s,
                wanted=lambda: not admission.answer.cancelled(),
            )
            if not self.connection.in_place():
                raise self.connection.replaced()
            if handle.alone():
                tables = self._transaction(writable=True)
                tables.begin_at_ceiling()
                tables.finish({})  # changes the counter only: no watcher to notify
            handle.inbox.make()  # `_answer` removes it if the handle was closed meanwhile
            self.connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 (raised by admit)
            # Before the next handle may look: this one is not alive, and may be admitted again.
            handle.inbox.close()
            handle.inbox.remove()
            self.connection.roll_back()
            admission.error = self.connection.translate(error)


_threads: dict[tuple[int, int, str], DatabaseThread] = {}
"""By process, loop and path. The child of a fork has none of them."""


def _nothing(_: Transaction) -> None:
    pass


def _settle(answer: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
