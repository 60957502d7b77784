"""The local store within one process: leases, watches, failures, cancellation, closing."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doyen.errors import (
    ConfigError,
    LeaseGone,
    OutcomeUnknown,
    StoreUnavailable,
    StoreUnusable,
    TicketGone,
)
from doyen.events import Event, LeaseEnded
from doyen.lease.clock import Clock, SystemClock, VirtualClock
from doyen.stores.port import Context, open_store
from doyen.stores.sqlite import connection as connection_module
from doyen.stores.sqlite.connection import PATIENCE_S, LocalConnection
from doyen.stores.sqlite.database import DatabaseThread
from doyen.stores.sqlite.store import SQLiteStore
from doyen.stores.sqlite.tables import Transaction

TTL_S = 60.0


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handles of these tests stand for processes, which share no connection."""
    monkeypatch.setattr(DatabaseThread, "_is_joinable", lambda self: False)


async def opened(
    path: Path,
    emit: Callable[[Event], None] = lambda event: None,
    clock: Clock | None = None,
    query: str = "",
) -> SQLiteStore:
    store = await open_store(f"sqlite://{path}{query}", Context(clock or SystemClock(), emit))
    assert isinstance(store, SQLiteStore)
    return store


@asynccontextmanager
async def stores(
    path: Path,
    count: int = 1,
    clock: Clock | None = None,
    emit: Callable[[Event], None] = lambda event: None,
    query: str = "",
) -> AsyncIterator[list[SQLiteStore]]:
    handles = [await opened(path, emit, clock, query) for _ in range(count)]
    try:
        yield handles
    finally:
        for store in handles:
            await store.close()


async def until(condition: Callable[[], bool], what: str, within_s: float = 10.0) -> None:
    """Wait for a condition that must become true without further calls."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 (the condition has no event)
                await asyncio.sleep(0.001)
    except TimeoutError:
        pytest.fail(f"{what}: not within {within_s} s")


# Revisions


async def test_tokens_grow_across_restarts_and_from_the_floor(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    async def create(query: str = "") -> int:
        async with stores(path, query=query) as (store,):
            lease = await store.grant(TTL_S)
            won, entry = await store.create("k", b"v", lease)
            assert won
            await store.revoke(lease)
            return entry.revision

    tokens = [await create(), await create()]
    tokens += [await create("?token_floor=1000"), await create("?token_floor=5")]
    assert tokens == sorted(set(tokens))
    assert tokens[1] < 1000 < tokens[2]


async def test_ranks_order_the_line_and_are_checked(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        ranks = [0, -5, 7, 7, 1 << 30, -(1 << 30), 0]
        tickets = [await store.enqueue("line", b"", lease, rank=rank) for rank in ranks]
        order = [entry.key for entry in await store.list("line")]
        by_rank = sorted(zip(ranks, tickets, strict=True), key=lambda pair: -pair[0])
        assert order == [ticket.key for _, ticket in by_rank]
        for rank in (1 << 31, -(1 << 31)):
            with pytest.raises(ConfigError, match="a rank is between"):
                await store.enqueue("line", b"", lease, rank=rank)


# Leases of dead processes


async def test_the_entries_of_a_dead_lease_are_gone_for_every_method(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    ended: list[Event] = []
    async with stores(path) as (first,), stores(path, emit=ended.append) as (survivor,):
        lease, own = await first.grant(TTL_S), await survivor.grant(TTL_S)
        ahead = await first.enqueue("line", b"1", lease)
        mine = await survivor.enqueue("line", b"2", own)
        for key in ("a/1", "a/2", "b"):
            assert (await first.create(key, b"v", lease)).won
        notified: list[None] = []
        watch = await survivor.watch("b", lambda: notified.append(None))
        before = await survivor.ahead(mine)
        assert before is not None
        assert before.key == ahead.key
        first._leases.release(lease.id)

        assert await survivor.ahead(mine) is None
        assert await survivor.get("a/1") is None
        assert await survivor.list("a") == []
        assert [entry.key for entry in await survivor.list("line")] == [mine.key]
        with pytest.raises(TicketGone):
            await survivor.ahead(ahead)
        assert (await survivor.create("b", b"v", own)).won
        with pytest.raises(LeaseGone):
            await first.create("c", b"v", lease)
        with pytest.raises(LeaseGone):
            await first.enqueue("line", b"v", lease)
        await until(lambda: bool(notified), "the watch is notified")
        assert ended == [LeaseEnded(lease=lease.id, cause="died")]
        watch.close()


def test_the_first_ticket_of_a_handle_removes_leftovers_of_dead_processes(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    async def leave() -> None:
        store = await opened(path)
        lease = await store.grant(TTL_S)
        await store.create("k", b"v", lease)
        await store.watch("k", lambda: None)
        store._watches.close()
        store._inbox.close()
        store._leases.release_all()
        await store._database.close()
        folder = path.with_name("x.db.sessions")
        assert len(list(folder.iterdir())) == 3
        for part in ("alive", "seal"):
            (folder / f"0123456789abcdef.{part}").touch()

    async def look() -> None:
        folder = path.with_name("x.db.sessions")
        async with stores(path) as (store,):
            before = len(list(folder.iterdir()))
            assert await store.get("k") is None
            assert len(list(folder.iterdir())) == before  # it only looks
            lease = await store.grant(TTL_S)
            await store.enqueue("line", b"", lease)
            assert await store.get("k") is None
            kept = {file.suffix: file.stem for file in folder.iterdir()}
            assert kept.keys() == {".inbox", ".lease", ".alive"}
            assert kept[".lease"] == kept[".alive"] == lease.id
            await store.revoke(lease)
        assert list(folder.iterdir()) == []

    asyncio.run(leave())
    asyncio.run(look())
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT * FROM entries").fetchall() == []
        assert connection.execute("SELECT * FROM watches").fetchall() == []
    connection.close()


def test_leases_of_another_boot_are_observed_by_those_who_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.db"

    async def leave() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("doyen.stores.sqlite.store.boot_id", lambda: "the last boot")
            async with stores(path) as (store,):
                lease = await store.grant(0.2)
                await store.create("k", b"v", lease)

    async def look() -> None:
        ended: list[Event] = []
        clock = VirtualClock()
        async with stores(path, clock=clock, emit=ended.append) as (store,):
            await store.enqueue("line", b"", await store.grant(TTL_S))
            assert await store.get("k") is not None
            clock.advance(0.19)
            assert await store.get("k") is not None
            clock.advance(0.01)
            await until(lambda: bool(ended), "the lease of the last boot is ended")
            assert await store.get("k") is None

    asyncio.run(leave())
    asyncio.run(look())


# Watches


async def test_a_change_notifies_watches_of_the_key_and_its_prefixes(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db", 2) as (writer, reader):
        notified: list[str] = []

        def notify(watch: str) -> None:
            assert asyncio.current_task() is not test, "notified from within put"
            notified.append(watch)

        test = asyncio.current_task()
        for store, name in ((reader, "reader"), (writer, "writer")):
            for scope in ("a", "a/b", "a/b/c", "a/b/cc", "ab"):
                await store.watch(scope, partial(notify, f"{name} {scope}"))
        entry = await writer.put("a/b/c", b"1", if_version=None)
        assert entry is not None
        expected = {f"{name} {s}" for name in ("reader", "writer") for s in ("a", "a/b", "a/b/c")}
        await until(lambda: set(notified) >= expected, "all watches are notified")
        assert set(notified) == expected
        notified.clear()
        assert await writer.delete("a/b/c")
        await until(lambda: set(notified) >= expected, "all watches are notified of the deletion")


async def test_a_closed_watch_does_not_notify_and_needs_no_transaction(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db", 2) as (writer, reader):
        notified: list[str] = []
        first = await reader.watch("k", lambda: notified.append("first"))
        second = await reader.watch("k", lambda: notified.append("second"))
        await writer.put("k", b"1", if_version=None)
        await until(lambda: set(notified) == {"first", "second"}, "both watches are notified")
        notified.clear()
        first.close()
        first.close()
        await writer.delete("k")
        await until(lambda: notified == ["second"], "the open watch is notified")
        await _rows(reader, "watches")  # after this, the reader has no write of its own to make
        second.close()
        assert await _rows(reader, "watches") == 1
        await reader.put("other", b"", if_version=None)
        assert await _rows(reader, "watches") == 0
        await writer.put("k", b"2", if_version=None)
        assert notified == ["second"]
        again = await reader.watch("k", lambda: notified.append("again"))
        await writer.delete("k")
        await until(lambda: notified == ["second", "again"], "a new watch works")
        again.close()


async def test_the_row_of_a_closed_watch_goes_although_its_handle_only_reads(
    tmp_path: Path,
) -> None:
    """Writers would notify the handle of every change, and each was kept for its next write."""
    async with stores(tmp_path / "x.db", 2) as (writer, reader):
        (await reader.watch("k", lambda: None)).close()
        for _ in range(3):
            assert writer._inbox.send(reader._inbox.name, {1})
            reader._watches._on_message()
        assert len(reader._database.stale) == 1
        await until(lambda: not reader._database.stale, "the row is removed")
        assert await _rows(reader, "watches") == 0


async def _rows(store: SQLiteStore, table: str) -> int:
    def count(tables: Transaction) -> int:
        return int(tables._execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    return await store._database.submit(count, writes=False)


async def test_a_full_inbox_notifies_every_watch(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db", 2) as (writer, reader):
        notified: list[str] = []
        await reader.watch("quiet", lambda: notified.append("quiet"))
        await reader.watch("noisy", lambda: notified.append("noisy"))
        noisy, quiet = (reader._watches._scopes["noisy"].tag, reader._watches._scopes["quiet"].tag)
        capacity = reader._inbox._capacity
        assert capacity % 8 == 0
        # All sent before the loop runs again, so that nothing is read in between.
        assert writer._inbox.send(reader._inbox.name, [noisy] * (capacity // 8))
        assert writer._inbox.send(reader._inbox.name, [quiet])
        await until(lambda: {"noisy", "quiet"} <= set(notified), "both watches are notified")
        notified.clear()
        assert writer._inbox.send(reader._inbox.name, [noisy] * (capacity // 8 - 1))
        await until(lambda: bool(notified), "one watch is notified")
        await asyncio.sleep(0)
        assert set(notified) == {"noisy"}


async def test_the_inbox_of_a_dead_process_is_removed_with_its_rows(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db", 2) as (writer, reader):
        await reader.watch("k", lambda: None)
        reader._loop.remove_reader(reader._inbox.fd)
        reader._inbox.close()
        await writer.put("k", b"1", if_version=None)
        assert await _rows(writer, "watches") == 0
        names = os.listdir(tmp_path / "x.db.sessions")
        assert names == [f"{writer._inbox.name}.inbox"]


async def test_expiry_notifies_by_a_timer_that_follows_renewals(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with stores(tmp_path / "x.db", 2, clock) as (owner, watcher):
        lease = await owner.grant(0.2)
        assert (await owner.create("k", b"v", lease)).won
        notified = asyncio.Event()
        watch = await watcher.watch("k", notified.set)
        for _ in range(6):
            clock.advance(0.1)
            await owner.renew(lease)
            await asyncio.sleep(0.1)
            assert not notified.is_set()
        clock.advance(0.2)
        async with asyncio.timeout(10):
            await notified.wait()
        assert await watcher.get("k") is None
        with pytest.raises(LeaseGone):
            await owner.renew(lease)
        watch.close()


async def test_a_watched_lease_has_one_monitor_and_others_none(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db", 2) as (owner, watcher):
        lease = await owner.grant(TTL_S)
        for number in range(50):
            await owner.create(f"k/{number}", b"v", lease)
        before = len(os.listdir("/proc/self/fd"))
        watches = [await watcher.watch(f"k/{number}", lambda: None) for number in range(50)]
        watches.append(await watcher.watch("k", lambda: None))
        await asyncio.sleep(0)
        assert len(watcher._watches._monitors) == 1
        assert len(os.listdir("/proc/self/fd")) == before + 1
        for watch in watches:
            watch.close()
        assert watcher._watches._monitors == {}
        assert len(os.listdir("/proc/self/fd")) == before


async def test_a_failed_refresh_of_a_watch_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores(tmp_path / "x.db", 2) as (writer, reader):
        notified = asyncio.Event()
        await reader.watch("k", notified.set)
        blocked = 3
        real = DatabaseThread._begin

        def begin(self: Any, *args: Any) -> None:
            nonlocal blocked
            if self is reader._database.thread and blocked:
                blocked -= 1
                raise StoreUnavailable("locked")
            real(self, *args)

        monkeypatch.setattr(DatabaseThread, "_begin", begin)
        monkeypatch.setattr(reader._database.connection, "_appends", lambda: False)
        await writer.put("k", b"v", if_version=None)
        async with asyncio.timeout(10):
            await notified.wait()
            notified.clear()
            await notified.wait()  # again, since what was read meanwhile may be outdated
        assert blocked == 0


# The database thread


async def test_ten_thousand_candidates_share_a_few_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = 0
    real = LocalConnection.commit

    def commit(self: Any) -> None:
        nonlocal commits
        commits += 1
        real(self)

    monkeypatch.setattr(LocalConnection, "commit", commit)
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)

        async def candidate(number: int) -> bool:
            ticket = await store.enqueue(f"e/{number}/line", b"v", lease)
            assert await store.ahead(ticket) is None
            await store.watch(f"e/{number}/leader", lambda: None)
            return (await store.create(f"e/{number}/leader", b"v", lease)).won

        async with asyncio.timeout(30):
            assert all(await asyncio.gather(*map(candidate, range(2000))))
    assert commits < 200


async def test_a_cancelled_call_has_its_full_effect_or_none(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        for number in range(100):
            task = asyncio.create_task(store.create(f"k/{number}", b"v", lease))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for entry in await store.list("k"):
            assert entry.value == b"v"
            assert entry.lease == lease.id
        watching = asyncio.create_task(store.watch("w", lambda: None))
        await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert store._watches._scopes == {}
        await store.put("x", b"", if_version=None)
        assert await _rows(store, "watches") == 0


async def test_a_failed_operation_does_not_affect_others_in_its_transaction(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        await store.get("warm")
        answers = await asyncio.gather(
            store.create("a", b"v", lease),
            store.create("\udcff", b"v", lease),
            store.create("b", object(), lease),  # type: ignore[arg-type]
            store.create("c", None, lease),  # type: ignore[arg-type]
            store.create("d", b"v", lease),
            return_exceptions=True,
        )
        kinds = [isinstance(answer, BaseException) for answer in answers]
        assert kinds == [False, True, True, True, False]
        assert {entry.key for entry in await store.list("")} == set()
        assert await store.get("a") is not None
        assert await store.get("d") is not None
        assert await store.get("b") is None


class Failing:
    """Wraps `execute` of a connection and fails one statement."""

    def __init__(self, execute: Callable[..., Any], statement: str, code: int) -> None:
        self._execute = execute
        self._statement = statement
        self._code = code
        self.left = 1

    def __call__(self, statement: str, *args: Any) -> Any:
        if self.left and statement.startswith(self._statement):
            self.left -= 1
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorcode = self._code
            raise error
        return self._execute(statement, *args)


@pytest.mark.parametrize(
    ("statement", "code", "kind", "message"),
    [
        ("COMMIT", sqlite3.SQLITE_IOERR_FSYNC, OutcomeUnknown, "failed while .* was committing"),
        ("COMMIT", sqlite3.SQLITE_IOERR_WRITE, StoreUnavailable, "nothing was written"),
        ("COMMIT", sqlite3.SQLITE_FULL, StoreUnavailable, "free space on the file system"),
        ("INSERT", sqlite3.SQLITE_FULL, StoreUnavailable, "nothing was written"),
        ("INSERT", sqlite3.SQLITE_IOERR_WRITE, StoreUnavailable, "check its space and its health"),
        ("INSERT", sqlite3.SQLITE_PROTOCOL, StoreUnavailable, "for 10 s .* locked for writing by"),
        ("BEGIN", sqlite3.SQLITE_READONLY, StoreUnusable, "must be able to read and write it"),
        ("BEGIN", sqlite3.SQLITE_CANTOPEN, StoreUnusable, "create files in"),
        ("BEGIN", sqlite3.SQLITE_CORRUPT, StoreUnusable, "restore it"),
    ],
)
async def test_database_errors_are_mapped_and_leave_no_partial_writes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    code: int,
    kind: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr(connection_module, "_unsynced", set())
    async with stores(tmp_path / "x.db") as (store,):
        lease = await store.grant(TTL_S)
        await store.enqueue("line", b"", lease)  # from now on it takes part
        connection = store._database.connection
        connection.execute = Failing(connection.execute, statement, code)
        answers = await asyncio.gather(
            *(store.create(f"k/{number}", b"v", lease) for number in range(3)),
            return_exceptions=True,
        )
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        assert failed
        assert len({id(error) for error in failed}) == len(failed)
        for error in failed:
            assert isinstance(error, kind)
            assert isinstance(error.__cause__, Exception)
        with pytest.raises(kind, match=message):
            raise failed[0]
        won = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert len(await store.list("k")) == len(won)
        if code == sqlite3.SQLITE_IOERR_FSYNC:
            return
        assert (await store.create("again", b"v", lease)).won


async def test_nothing_is_written_after_the_disk_failed_to_confirm_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a failed fsync once. What it has dropped, a later one does not write."""
    monkeypatch.setattr(connection_module, "_unsynced", set())
    path, ended = tmp_path / "x.db", "the disk failed to confirm a write .* start all processes"
    async with stores(path, 2) as (store, other), stores(tmp_path / "y.db") as (elsewhere,):
        lease = await store.grant(TTL_S)
        assert (await store.create("first", b"v", lease)).won
        connection = store._database.connection
        connection.execute = Failing(
            connection.execute, "PRAGMA wal_ch", sqlite3.SQLITE_IOERR_FSYNC
        )
        monkeypatch.setattr("doyen.stores.sqlite.database._SAVE_AT_LATEST", 0)
        with suppress(StoreUnusable):  # the log is copied in vain, after this or before
            await store.put("k", b"v", if_version=None)
        for handle in (store, other):
            with pytest.raises(StoreUnusable, match=ended):
                await handle.put("k2", b"v", if_version=None)
            assert await handle.get("first") is not None
        await store.renew(lease)
        with pytest.raises(StoreUnusable, match=ended):
            await opened(path)
        assert await elsewhere.put("k", b"v", if_version=None)
        await store.revoke(lease)
        assert await other.get("first") is None


async def test_a_lock_timeout_needs_a_time_without_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.db"
    async with stores(path) as (store,):
        connection = store._database.connection
        versions = iter([1, 2, 3, 4, 4])
        refusals = 0
        clock = SimpleNamespace(now=0.0)
        timing = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda seconds: None)
        monkeypatch.setattr(connection_module, "time", timing)

        def busy(level: str | None) -> bool:
            nonlocal refusals
            refusals += 1
            clock.now += PATIENCE_S / 4
            return False

        connection._try_begin = busy  # type: ignore[method-assign]
        connection._data_version = lambda: next(versions)  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="locked for writing by another process"):
            await store.put("k", b"v", if_version=None)
        assert next(versions, None) is None
        assert refusals == 1 + 4 * 4
        del connection._try_begin, connection._data_version  # so that it can be closed


async def test_a_lock_is_waited_for_less_than_a_request_of_a_short_lease_may_take(
    tmp_path: Path,
) -> None:
    """Otherwise the caller would give up before it learns who holds the lock."""
    async with stores(tmp_path / "x.db") as (store,):
        await store.grant(TTL_S)
        lease = await store.grant(1.2)  # requests of such a session time out after 0.2 s
        blocking = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
        blocking.execute("BEGIN IMMEDIATE")
        with pytest.raises(
            StoreUnavailable, match=r"for 0.12 s .* locked for writing by this process"
        ):
            await store.create("k", b"v", lease)
        blocking.execute("COMMIT")
        blocking.close()


async def test_reads_work_while_another_connection_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with stores(path) as (store,):
        await store.put("k", b"v", if_version=None)
        begun, done = threading.Event(), threading.Event()

        def occupy() -> None:
            connection = sqlite3.connect(path, isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
            begun.set()
            done.wait(10)
            connection.execute("ROLLBACK")
            connection.close()

        occupier = asyncio.create_task(asyncio.to_thread(occupy))
        await asyncio.to_thread(begun.wait, 10)
        assert await store.get("k") is not None
        assert len(await store.list("")) == 0
        with pytest.raises(StoreUnavailable, match="this process"):
            await store.put("k2", b"v", if_version=None)
        done.set()
        await occupier
        assert await store.put("k2", b"v", if_version=None)


# Closing


def test_a_closed_store_raises_and_leaves_nothing_open(tmp_path: Path) -> None:
    async def test() -> None:
        before = os.listdir("/proc/self/fd")
        async with stores(tmp_path / "x.db") as (store,):
            lease = await store.grant(TTL_S)
            await store.create("k", b"v", lease)
            await store.watch("k", lambda: None)
            late = asyncio.create_task(store.get("k"))
            await asyncio.sleep(0)
            await store.close()
        await late  # calls made before close are answered
        for call in (
            store.grant(1),
            store.renew(lease),
            store.get("k"),
            store.watch("k", lambda: None),
        ):
            with pytest.raises(StoreUnusable, match="has been closed"):
                await call
        assert os.listdir("/proc/self/fd") == before
        assert list((tmp_path / "x.db.sessions").glob("*.inbox")) == []

    asyncio.run(test())
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "doyen-sqlite"]


async def test_revoking_ends_the_lease_even_if_the_database_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores(tmp_path / "x.db", 2) as (owner, watcher):
        lease = await owner.grant(TTL_S)
        assert (await owner.create("k", b"v", lease)).won
        notified = asyncio.Event()
        await watcher.watch("k", notified.set)

        def begin(batch: object, how: str) -> None:
            raise StoreUnavailable("stuck")

        monkeypatch.setattr(owner._database.thread, "_begin", begin)
        await owner.revoke(lease)
        async with asyncio.timeout(10):
            await notified.wait()
        assert await watcher.get("k") is None
        await owner.revoke(lease)


def test_a_loop_may_end_without_closing_the_store(tmp_path: Path) -> None:
    kept: list[SQLiteStore] = []

    async def test() -> None:
        store = await opened(tmp_path / "x.db")
        kept.append(store)
        store._database.submit(lambda tables: tables.get("k"), writes=False)

    asyncio.run(test())
    store = kept[0]
    thread = store._database.thread
    thread._queue.put(None)
    thread._thread.join(10)
    assert not thread._thread.is_alive()
    store._inbox.close()
    asyncio.run(_use(tmp_path / "x.db"))


async def _use(path: Path) -> None:
    async with stores(path) as (store,):
        await store.put("after", b"v", if_version=None)
