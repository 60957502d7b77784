"""Transactions of the local store that are executed on the loop, where leases are renewed: they
wait for no disk, no lock and no other thread, and are short."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from doyen.errors import StoreError, StoreUnavailable, StoreUnusable
from doyen.model import Entry, Lease
from doyen.stores.port import Store, open_store
from doyen.stores.sqlite import connection as connection_module
from doyen.stores.sqlite import database, tables
from doyen.stores.sqlite.connection import LocalConnection
from doyen.stores.sqlite.database import DatabaseThread
from doyen.stores.sqlite.forks import connections
from doyen.stores.sqlite.store import SQLiteStore
from doyen.testing import StoreConformance, StoreHarness
from servers.process import is_stopped
from test_sqlite import TTL_S, Failing, stores, until
from test_sqlite_batches import write_lock
from test_sqlite_processes import OtherProcess, opened, other_processes, verify, wait_for

# Syncs of the calling thread fail from now on: fsync, fdatasync, sync_file_range and msync, in the
# numbers of the kernel. Other threads are not concerned.
AUDIT_ARCH, SYNCS = {
    "x86_64": (0xC000003E, (74, 75, 277, 26)),
    "aarch64": (0xC00000B7, (82, 83, 84, 227)),
}[os.uname().machine]
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL_WITH_EIO = 0x7FFF0000, 0x00050005


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handles of these tests stand for processes, which share no connection."""
    monkeypatch.setattr(DatabaseThread, "_is_joinable", lambda self: False)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def refuse_syncs() -> None:
    """Have every sync of the calling thread, and of threads that it starts, fail."""
    instructions = [(LOAD, 0, 0, 0)]
    for left, number in zip(range(len(SYNCS), 0, -1), SYNCS, strict=True):
        instructions.append((JUMP_IF_EQUAL, left, 0, number))
    instructions += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL_WITH_EIO)]
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *each) for each in instructions)
    )
    program = _Program(len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0


def on_a_thread(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the test on a loop of a thread of its own."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            asyncio.run(test())
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 (raised below)
            done.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    done.result()


class Checkpointer:
    """A thread that copies the log to the database when asked, as another process would."""

    def __init__(self, path: Path) -> None:
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._ends = False
        self._thread = threading.Thread(target=self._run, args=[path])
        self._thread.start()

    def _run(self, path: Path) -> None:
        connection = sqlite3.connect(path, isolation_level=None)
        while self._asked.acquire() and not self._ends:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            self._done.release()
        connection.close()

    def checkpoint(self) -> None:
        self._asked.release()
        self._done.acquire()

    def close(self) -> None:
        self._ends = True
        self._asked.release()
        self._thread.join()


def create(store: Store, key: str, lease: Lease) -> Entry | None:
    looked = store.create_and_look_now(key, b"v", lease, None, "order")
    return None if looked is None else looked.creation.entry


async def next_turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_loop_never_waits_for_the_disk(
    tmp_path: Path, seed: int, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the log is copied to the database again and again, after which the next commit begins
    it anew and waits for the disk. The broken variant does not look whether it will."""
    chance = random.Random(seed)
    monkeypatch.setattr(database, "_SAVE_AFTER", 5)
    monkeypatch.setattr(database, "_SAVE_AT_LATEST", 15)
    monkeypatch.setattr(database, "_IDLE_S", 0.0)
    monkeypatch.setattr(connection_module, "_unsynced", set())
    if broken:
        monkeypatch.setattr(LocalConnection, "_appends", lambda self: True)
    done, refused = 0, 0

    async def test() -> None:
        nonlocal done, refused
        async with stores(tmp_path / "x.db", 2) as handles:
            checkpointer = Checkpointer(tmp_path / "x.db")
            try:
                leases = [await handle.grant(TTL_S) for handle in handles]
                for handle, lease in zip(handles, leases, strict=True):
                    await handle.enqueue("line", b"", lease)
                refuse_syncs()
                for _ in range(300):
                    number = chance.randrange(2)
                    store, lease = handles[number], leases[number]
                    if chance.random() < 0.1:
                        checkpointer.checkpoint()
                    entry = create(store, "k", lease)
                    refused += entry is None
                    if entry is None:
                        looked = await store.create_and_look("k", b"v", lease, None, "order")
                        entry = looked.creation.entry
                    await next_turn()
                    if chance.random() < 0.1:
                        checkpointer.checkpoint()
                    if store.delete_now([entry]):
                        done += 1
                    else:
                        assert await store.delete("k", if_version=entry.version)
                    await store.renew(lease)
                    await next_turn()
            finally:
                checkpointer.close()

    if broken:
        with pytest.raises(StoreError, match="disk"):
            on_a_thread(test)
    else:
        on_a_thread(test)
        assert done > 20
        assert refused > 5


async def test_a_lock_that_another_process_holds_is_waited_for_on_the_thread(
    tmp_path: Path,
) -> None:
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        ticket = await store.enqueue("line", b"", lease)
        with write_lock(tmp_path / "x.db", store):
            assert create(store, "k", lease) is None
            assert not store.delete_now([ticket])
            deleting = asyncio.ensure_future(store.delete(ticket.key, if_version=ticket.version))
            await until(lambda: store._database.thread._queued == 1, "the thread has it")
            await store.renew(lease)
            assert not deleting.done()
        assert await deleting


HOLDER = """
import fcntl, mmap, os, sqlite3, struct, sys

path, how = sys.argv[1:]
index = os.open(path + "-shm", os.O_RDWR)
if "mark" in how:
    frames, *marks = struct.unpack("=16xI80x4x4I", os.pread(index, 120, 0))
    last = max(n for n, mark in enumerate(marks, 124) if mark == frames)
    begin, number = {"all marks": (124, 4), "its mark": (last, 1), "another mark": (127, 1)}[how]
    fcntl.lockf(index, fcntl.LOCK_EX, number, begin)
else:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    header = mmap.mmap(index, 96)
    header[56] ^= 1  # the count of changes, in the second copy
print("held", flush=True)
sys.stdin.read()
if how == "header":
    header[56] ^= 1
"""


@contextmanager
def holder(path: Path, how: str) -> Iterator[int]:
    """A process that stays between the two copies of the header of the index, or where it moves the
    marks of readers, as one that is stopped there."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        if how == "dead":
            process.kill()
            process.wait()
        yield process.pid  # its standard input is closed then, and it goes on


@pytest.mark.parametrize("how", ["header", "its mark", "all marks", "dead"])
async def test_a_process_that_is_stopped_where_sqlite_would_sleep_is_not_waited_for_in_sqlite(
    tmp_path: Path, how: str
) -> None:
    """SQLite would sleep in BEGIN for 10 s, on the loop too. If a process was killed there, SQLite
    reads the whole log, which is for the thread."""
    path = tmp_path / "x.db"
    async with stores(path) as (store,):
        lease = await store.grant(TTL_S)
        ticket = await store.enqueue("line", b"", lease)
        await store.get("k")  # a mark is moved to the end of the log
        connection, begun = store._database.connection, []
        connection.patience_s = 0.01
        execute = connection.execute

        def recorded(statement: str, *arguments: Any) -> sqlite3.Cursor:
            begun.append(statement)
            return execute(statement, *arguments)

        with holder(path, how) as pid:
            connection.execute = recorded
            assert create(store, "k", lease) is None
            assert not store.delete_now([ticket])
            assert not begun
            if how != "dead":
                for request in (store.create("k", b"v", lease), store.get("k")):
                    with pytest.raises(StoreUnavailable, match=f"locked .* by process {pid} "):
                        await request
                assert not begun
        assert (await store.create("k", b"v", lease)).won
        assert await store.get("k") is not None
        assert begun


async def test_a_process_that_is_stopped_where_sqlite_goes_around_it_delays_nobody(
    tmp_path: Path,
) -> None:
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        await store.enqueue("line", b"", lease)
        await store.get("k")  # a mark is moved to the end of the log
        with holder(tmp_path / "x.db", "another mark"):
            assert create(store, "k", lease) is not None
            assert await store.get("k") is not None


async def test_what_sqlite_has_given_up_is_tried_again(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        await store.enqueue("line", b"", lease)
        connection = store._database.connection
        execute = connection.execute
        connection.execute = Failing(execute, "BEGIN IMMEDIATE", sqlite3.SQLITE_PROTOCOL)
        assert create(store, "k", lease) is None
        connection.execute = Failing(execute, "BEGIN IMMEDIATE", sqlite3.SQLITE_PROTOCOL)
        assert (await store.create("k", b"v", lease)).won


async def test_nothing_is_executed_before_what_was_queued(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        await store.enqueue("line", b"", lease)
        putting = asyncio.ensure_future(store.put("k", b"put", if_version=None))
        await asyncio.sleep(0)
        deleting = asyncio.ensure_future(store.delete("k"))
        await asyncio.sleep(0)
        assert create(store, "k", lease) is None
        assert await putting is not None
        assert await deleting
        assert create(store, "k", lease) is not None


async def test_of_many_that_come_together_one_is_executed_at_once(tmp_path: Path) -> None:
    """The others share a transaction."""
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        await store.enqueue("line", b"", lease)
        assert create(store, "k/1", lease) is not None
        assert create(store, "k/2", lease) is None
        await next_turn()
        assert create(store, "k/2", lease) is not None


async def test_nothing_is_executed_on_the_loop_while_the_process_forks(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        await store.enqueue("line", b"", lease)
        connections().before_fork()
        assert create(store, "k", lease) is None
        connections().after_fork()
        assert create(store, "k", lease) is None  # the connection was closed
        await store.put("begun", b"the log", if_version=None)
        assert create(store, "k", lease) is not None


async def test_long_transactions_are_for_the_thread(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db", 2) as (store, other):
        lease, theirs = await store.grant(TTL_S), await other.grant(TTL_S)
        await store.enqueue("line", b"", lease)
        for number in range(tables._FEW + 2):
            await other.create(f"k/{number}", b"", theirs)
        other._leases.end(theirs.id)  # as if the owner had died
        assert create(store, "k/0", lease) is None
        looked = await store.create_and_look("k/0", b"v", lease, None, "order")
        assert looked.creation.won
        assert len(await store.list("k")) == 1


async def test_numbers_are_reserved_after_transactions_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BLOCK", 100)
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        await store.enqueue("line", b"", lease)
        revisions: list[int] = []
        while len(revisions) < 300:
            entry = create(store, "k", lease)
            if entry is None:
                entry = (await store.create_and_look("k", b"v", lease, None, "o")).creation.entry
            revisions.append(entry.revision)
            await asyncio.sleep(0)
            assert store.delete_now([entry]) or await store.delete("k", if_version=entry.version)
            await asyncio.sleep(0)
        assert revisions == sorted(set(revisions))


@pytest.mark.parametrize("how", ["create", "delete"])
def test_a_leader_killed_between_its_commit_and_the_notification(tmp_path: Path, how: str) -> None:
    """The end of its lease notifies those who watch what it had."""
    path = tmp_path / "x.db"

    async def main(leader: OtherProcess) -> None:
        async with opened(path) as store:
            await asyncio.to_thread(leader.ask, "try", key="k")
            notified = asyncio.Event()
            await store.watch("k", notified.set)
            assert await store.get("k") is not None
            leader.send_command("leave_and_die", how=how)
            assert await asyncio.to_thread(leader.answer) == {"ended": True}
            async with asyncio.timeout(20):
                await notified.wait()
            assert await store.get("k") is None
            assert await store.get("k/2") is None

    with other_processes(path) as (leader,):
        asyncio.run(main(leader))
    verify(path)


@pytest.mark.parametrize("now", [False, True])
def test_a_leader_killed_after_its_record_was_read_and_before_it_has_notified(
    tmp_path: Path, now: bool
) -> None:
    """Who began to watch before the record was created, and has read it, is notified of its end."""
    path = tmp_path / "x.db"

    async def main(leader: OtherProcess) -> None:
        async with opened(path) as store:
            await asyncio.to_thread(leader.ask, "enqueue", line="line")
            notified = asyncio.Event()
            await store.watch("k", notified.set)
            leader.send_command("create_and_stop", key="k", now=now)
            await asyncio.to_thread(wait_for, lambda: is_stopped(leader.pid), "the commit")
            # The reads of a candidate: for as long as it is notified of something.
            while await store.get("k") is None or notified.is_set():
                notified.clear()
                await asyncio.sleep(0)
            leader.kill()
            async with asyncio.timeout(20):
                await notified.wait()
            assert await store.get("k") is None

    with other_processes(path) as (leader,):
        asyncio.run(main(leader))
    verify(path)


async def test_rows_of_closed_watches_go_with_the_thread_if_the_loop_has_rolled_back(
    tmp_path: Path,
) -> None:
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        names = [f"k/{number}" for number in range(tables._MANY + 1)]
        await asyncio.gather(*(store.create(name, b"", lease) for name in names))
        await store.watch("k", lambda: None)
        (await store.watch("closed", lambda: None)).close()
        assert create(store, "k/new", lease) is None  # there are many entries in a scope
        assert (await store.create_and_look("k/new", b"v", lease, None, "order")).creation.won
        connection = sqlite3.connect(tmp_path / "x.db")
        assert connection.execute("SELECT scope FROM watches").fetchall() == [("k",)]
        connection.close()


async def test_a_store_that_is_closed_executes_nothing_on_the_loop(tmp_path: Path) -> None:
    """Nor does that of a forked child."""
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        ticket = await store.enqueue("line", b"", lease)
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
        assert not store._database.left
        with pytest.raises(StoreUnusable, match="closed"):
            create(store, "k", lease)
        assert not store.delete_now([ticket])
        await closing


async def test_an_inbox_that_cannot_be_reached_fails_the_write_before_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores(tmp_path / "x.db", 2) as (store, other):
        lease = await store.grant(TTL_S)
        await store.enqueue("line", b"", lease)
        notified = asyncio.Event()
        await other.watch("k", notified.set)

        def reach(name: str) -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(store._inbox, "reach", reach)
        with pytest.raises(StoreError, match="Too many open files"):
            create(store, "k", lease)
        assert await other.get("k") is None
        monkeypatch.undo()
        assert create(store, "k", lease) is not None
        async with asyncio.timeout(10):
            await notified.wait()


class OnTheThread(StoreHarness):
    """A harness of stores that execute nothing on the loop, as where /proc does not exist."""

    ttl_s = 0.4

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    async def open(self) -> Store:
        store = await open_store(f"sqlite://{self._path}", self.context())
        assert isinstance(store, SQLiteStore)
        store._database.connection._appends = lambda: False  # type: ignore[method-assign]
        return store


class TestOnTheThread(StoreConformance):
    @pytest.fixture
    def store_harness(self, tmp_path: Path) -> StoreHarness:
        return OnTheThread(tmp_path / "x.db")


@pytest.mark.parametrize("broken", [False, True])
async def test_what_is_committed_is_applied_in_that_order(
    tmp_path: Path, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes of a transaction after which a body begins are applied a moment later, and before
    those of the next. Otherwise a watch would monitor leases that own nothing any more. The broken
    variant applies the last one first."""
    if broken:

        def last_first(self: DatabaseThread) -> None:
            while self._undelivered:
                for changes in self._undelivered.pop().changes.values():
                    changes.handle.deliver(changes)

        monkeypatch.setattr(DatabaseThread, "_deliver", last_first)
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        await store.enqueue("line", b"", lease)
        await store.watch("k", lambda: None)
        await next_turn()
        entry = create(store, "k", lease)
        assert entry is not None
        assert not store._watches._scopes["k"].owners  # the caller goes first
        await next_turn()
        assert store.delete_now([entry])
        await until(lambda: not store._database.thread._undelivered, "all is applied")
        assert store._watches._scopes["k"].owners == ({lease.id} if broken else set())


async def test_an_inbox_without_a_reader_is_removed_after_a_brief_transaction(
    tmp_path: Path,
) -> None:
    async with stores(tmp_path / "x.db", 2) as (store, dead):
        lease = await store.grant(TTL_S)
        await store.enqueue("line", b"", lease)
        await dead.watch("k", lambda: None)
        os.close(dead._inbox.fd)  # as the end of its process does
        await next_turn()
        assert create(store, "k", lease) is not None
        path = Path(dead._directory.file(dead._inbox.name, "inbox"))
        await until(lambda: not path.exists(), "the inbox is removed")
        connection = sqlite3.connect(tmp_path / "x.db")
        assert connection.execute("SELECT count(*) FROM watches").fetchone() == (0,)
        connection.close()
        dead._inbox.fd = os.open(os.devnull, os.O_RDONLY)  # for `dead` to close
