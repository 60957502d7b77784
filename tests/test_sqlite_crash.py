"""Tokens of the local store after a crash of the machine, which loses what is not on disk.

The disk is simulated: while stores are in use it notes how much of SQLite's log is durable. That is
what commits with `synchronous=FULL`, and checkpoints, have waited for. A crash leaves the database
as it is, and the log cut at any frame after that. A log that was removed may come back, because
nobody waits for the disk when a name is removed. Numbers that were confirmed before the crash must
never be confirmed again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from doyen.errors import StoreUnusable
from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, Store, open_store
from doyen.stores.sqlite import database, tables
from doyen.stores.sqlite.connection import LocalConnection
from doyen.stores.sqlite.database import DatabaseThread
from doyen.stores.sqlite.forks import connections
from doyen.stores.sqlite.store import SQLiteStore
from doyen.stores.sqlite.tables import Transaction
from test_sqlite_batches import lock_is_waited_for, write_lock

TTL_S = 30.0
LOG_HEADER, FRAME_HEADER = 32, 24


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handles of these tests stand for processes, which share no connection."""
    monkeypatch.setattr(DatabaseThread, "_is_joinable", lambda self: False)


class Disk:
    """The files of a store, and how much of the log is durable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = Path(f"{path}-wal")
        self._salt, self._durable = b"", 0
        self._removed = b""
        """The last log that SQLite removed."""

    def content(self) -> bytes:
        return self.log.read_bytes() if self.log.exists() else b""

    def synced(self) -> None:
        """What the log contains is on disk, and that there is this log and no other."""
        content = self.content()
        self._salt, self._durable = content[16:24], _ends(content)[-1]
        self._removed = b""

    def closed(self, before: bytes) -> None:
        """A connection was closed. If it was the last, the log was copied and removed."""
        if not self.log.exists():
            self._removed = before

    def crashes(self, to: Path) -> Iterator[Path]:
        """What may be left after a crash now."""
        data, content = self.path.read_bytes(), self.content()
        ends = _ends(content)
        # A log that was begun anew has another salt. Of it only the header is durable.
        first = self._durable if content[16:24] == self._salt else min(LOG_HEADER, ends[-1])
        ends = [end for end in ends if end >= first]
        within = [sum(pair) // 2 for pair in pairwise(ends)][-1:]
        logs = [content[:end] for end in ends + within] + [self._removed] * bool(self._removed)
        for number, log in enumerate(logs):
            left = to / f"{number}"
            left.mkdir(parents=True)
            (left / "doyen.db").write_bytes(data)
            (left / "doyen.db-wal").write_bytes(log)
            yield left / "doyen.db"


def _ends(content: bytes) -> list[int]:
    """Where a log may be cut: before its first frame and after each."""
    if len(content) < LOG_HEADER:
        return [0]
    (page,) = struct.unpack(">I", content[8:12])
    ends = [LOG_HEADER]
    while content[ends[-1] + 8 : ends[-1] + 16] == content[16:24]:
        ends.append(ends[-1] + FRAME_HEADER + page)
    return ends


@contextmanager
def simulated(disk: Disk) -> Iterator[None]:
    commit, save, disconnect = (
        LocalConnection.commit,
        LocalConnection.save,
        LocalConnection.disconnect,
    )

    def noted_commit(self: LocalConnection) -> None:
        commit(self)
        if Path(self.path) == disk.path and self.synchronous == "FULL":
            disk.synced()

    def noted_save(self: LocalConnection) -> None:
        save(self)
        if Path(self.path) == disk.path:
            disk.synced()

    def noted_disconnect(self: LocalConnection) -> bool:
        before = disk.content()
        done = disconnect(self)
        if Path(self.path) == disk.path:
            disk.closed(before)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalConnection, "commit", noted_commit)
        patch.setattr(LocalConnection, "save", noted_save)
        patch.setattr(LocalConnection, "disconnect", noted_disconnect)
        patch.setattr(database, "_SAVE_AFTER", 25)
        patch.setattr(database, "_SAVE_AT_LATEST", 250)
        patch.setattr(database, "_IDLE_S", 0.0)
        yield


async def opened(path: Path) -> SQLiteStore:
    store = await open_store(f"sqlite://{path}", Context(SystemClock(), lambda event: None))
    assert isinstance(store, SQLiteStore)
    return store


async def numbers(store: Store, count: int, *, puts: bool = True) -> list[int]:
    """Take numbers of each kind. A put is on disk before it is confirmed."""
    lease = await store.grant(TTL_S)
    taken = []
    for each in range(count):
        taken.append((await store.create(f"record/{each}", b"", lease)).entry.revision)
        taken.append((await store.enqueue("line", b"", lease)).revision)
        put = await store.put(f"document/{taken[-1]}", b"", if_version=None) if puts else None
        taken += [put.revision] if put else []
    await store.revoke(lease)
    return taken


async def history(disk: Disk, to: Path) -> int:
    """Processes take numbers, die, close, fork, and begin anew. The machine crashes after each
    step, in every way that it can. Returns the number of crashes."""
    confirmed: list[int] = []
    crashes = 0
    stores: list[SQLiteStore] = []

    async def crash() -> None:
        nonlocal crashes
        assert sorted(set(confirmed)) == confirmed, "twice without a crash"
        for left in disk.crashes(to / "crash"):
            crashes += 1
            after = await opened(left)
            again = await numbers(after, 1)
            await after.close()
            assert min(again) > confirmed[-1], "a number was confirmed again after a crash"
        shutil.rmtree(to / "crash")

    with simulated(disk):
        try:
            for how in ("killed", "forks", "closed"):
                stores += [await opened(disk.path) for _ in range(2)]
                for step in range(3):
                    confirmed += await numbers(stores[step % 2], 4, puts=step == 1)
                    key = f"note/{confirmed[-1]}"
                    relaxed = await stores[step % 2].put_relaxed(key, b"", if_version=None)
                    confirmed += [relaxed.revision] if relaxed else []
                    await crash()
                if how == "forks":
                    connections().before_fork()
                    connections().after_fork()
                    confirmed += await numbers(stores[0], 1, puts=False)
                    await crash()
                while stores:
                    if how == "killed":  # the kernel closes its files
                        stores[-1]._inbox.close()
                        stores[-1]._database.serves = False
                    await stores.pop().close()
                    if how != "killed":
                        await crash()
        finally:
            for store in stores:
                await store.close()
    return crashes


def run() -> int:
    # In memory: what is on disk is simulated, and to wait for the real one takes long.
    with TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        place = Path(directory)
        return asyncio.run(history(Disk(place / "doyen.db"), place))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK", 20)


def test_numbers_grow_whatever_a_crash_of_the_machine_loses(small_blocks: None) -> None:
    assert run() > 100


def without_reserving(patch: pytest.MonkeyPatch) -> None:
    def count(self: Any) -> int:
        self._revision = self._latest() + 1
        self._ceiling = max(self._ceiling, self._revision)
        return int(self._revision)

    patch.setattr(Transaction, "_next", count)


def counting_on_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transaction, "begin_at_ceiling", lambda self: None)


def reserving_without_the_disk(patch: pytest.MonkeyPatch) -> None:
    sync = LocalConnection._sync
    patch.setattr(LocalConnection, "_sync", lambda self, level: sync(self, "NORMAL"))
    make = Transaction.__init__

    def durable(self: Transaction, *args: Any, **options: Any) -> None:
        make(self, *args, **{**options, "durable": True})

    patch.setattr(Transaction, "__init__", durable)


@pytest.mark.parametrize(
    "mutant", [without_reserving, counting_on_after_a_crash, reserving_without_the_disk]
)
def test_the_mutants_confirm_a_number_again(
    mutant: Callable[[pytest.MonkeyPatch], None],
    small_blocks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="after a crash"):
        run()


async def test_no_number_is_skipped_when_all_processes_close(tmp_path: Path) -> None:
    confirmed = []
    for _ in range(3):
        first, second = await opened(tmp_path / "doyen.db"), await opened(tmp_path / "doyen.db")
        confirmed += await numbers(first, 1)
        await first.close()
        confirmed += await numbers(second, 1)
        await second.close()
    assert confirmed == [*range(1, len(confirmed) + 1)]


async def test_a_database_of_the_first_version_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "doyen.db"
    before = await opened(path)
    await numbers(before, 1)
    await before.close()
    old = sqlite3.connect(path, isolation_level=None)
    old.execute("CREATE TABLE meta (only INTEGER PRIMARY KEY CHECK (only = 1), revision INTEGER)")
    old.execute("INSERT INTO meta VALUES (1, 70)")
    old.execute("DROP TABLE counter")
    old.execute("PRAGMA user_version = 1")
    store = await opened(path)
    assert (await numbers(store, 1))[0] == 71
    with pytest.raises(sqlite3.OperationalError, match="no such table: meta"):
        old.execute("UPDATE meta SET revision = 71")  # a process of the version before
    old.execute("PRAGMA user_version = 3")
    old.close()
    await store.close()
    with pytest.raises(StoreUnusable, match="newer doyen"):
        await opened(path)


async def test_a_transaction_keeps_its_level_when_the_process_forks_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(tmp_path / "doyen.db")
    lease = await store.grant(TTL_S)
    await store.create("a", b"", lease)
    levels = []
    commit = LocalConnection.commit

    def noted(self: LocalConnection) -> None:
        levels.append(self.execute("PRAGMA synchronous").fetchone()[0])
        commit(self)

    monkeypatch.setattr(LocalConnection, "commit", noted)
    for durable in (True, False):
        with write_lock(tmp_path / "doyen.db", store):
            waiting = asyncio.ensure_future(
                store.put("b", b"", if_version=None) if durable else store.enqueue("c", b"", lease)
            )
            await lock_is_waited_for(store)
            connections().before_fork()
            connections().after_fork()
        assert await waiting is not None
    assert levels == [2, 1]
    await store.close()


async def test_only_a_relaxed_put_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(tmp_path / "doyen.db")
    levels = []
    commit = LocalConnection.commit

    def noted(self: LocalConnection) -> None:
        levels.append(self.synchronous)
        commit(self)

    monkeypatch.setattr(LocalConnection, "commit", noted)
    written = await store.put("a", b"1", if_version=None)
    assert written is not None
    assert await store.put_relaxed("a", b"2", if_version=None) is None
    replaced = await store.put_relaxed("a", b"2", if_version=written.version)
    assert replaced is not None
    assert await store.get("a") == replaced
    assert levels == ["FULL", "NORMAL", "NORMAL"]
    await store.close()


async def test_numbers_are_reserved_and_saved_after_a_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection may be closed between the answer and what follows it."""
    monkeypatch.setattr(tables, "BLOCK", 4)
    monkeypatch.setattr(database, "_SAVE_AFTER", 1)
    monkeypatch.setattr(database, "_SAVE_AT_LATEST", 1)
    store = await opened(tmp_path / "doyen.db")
    post = DatabaseThread._post

    def forking(self: DatabaseThread, *args: Any) -> None:
        post(self, *args)
        if self.connection._connection is not None:
            connections().before_fork()
            connections().after_fork()

    monkeypatch.setattr(DatabaseThread, "_post", forking)
    confirmed = await numbers(store, 5)
    assert confirmed == [*range(1, 16)]
    await store.close()
