"""The local store with many operations and many entries: what shares a transaction, and which
leases own something in a scope."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doyen.stores.sqlite import tables
from doyen.stores.sqlite.store import SQLiteStore
from doyen.stores.sqlite.tables import SCHEMA, HandleChanges, Transaction
from test_sqlite import TTL_S, stores


@contextmanager
def write_lock(path: Path, *handles: SQLiteStore) -> Iterator[None]:
    """Hold the write lock of the database. The handles do not give up waiting for it, however slow
    this machine is."""
    for handle in handles:
        handle._database.patience_s = handle._database.connection.patience_s = 60.0
    blocking = sqlite3.connect(path, isolation_level=None)
    blocking.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        blocking.execute("COMMIT")
        blocking.close()


async def lock_is_waited_for(store: SQLiteStore) -> None:
    """Wait until the thread of the database has a batch, and pauses before it tries again to get
    the write lock."""
    connection, loop, paused = (
        store._database.connection,
        asyncio.get_running_loop(),
        asyncio.Event(),
    )
    pause = connection._pause

    def noted(seconds: float) -> None:
        loop.call_soon_threadsafe(paused.set)
        pause(seconds)

    connection._pause = noted  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        await paused.wait()
    del connection._pause


async def test_operations_that_arrive_while_the_lock_is_waited_for_share_a_transaction(
    tmp_path: Path,
) -> None:
    async with stores(tmp_path / "doyen.db", 2) as (store, other):
        lease, others = await store.grant(TTL_S), await other.grant(TTL_S)
        await store.create("before", b"", lease)  # the first creation waits for a read
        commits: list[HandleChanges] = []
        deliver = store._database.deliver

        def note(committed: HandleChanges) -> None:
            commits.append(committed)
            deliver(committed)

        store._database.deliver = note
        with write_lock(tmp_path / "doyen.db", store):
            first = asyncio.ensure_future(store.create("a/first", b"", lease))
            await lock_is_waited_for(store)
            more = [asyncio.ensure_future(store.create(f"a/{n}", b"", lease)) for n in range(20)]
            cancelled = asyncio.ensure_future(store.create("a/cancelled", b"", lease))
            await asyncio.sleep(0)
            assert store._database.thread._queue.qsize() == 21
            cancelled.cancel()
        assert all(creation.won for creation in await asyncio.gather(first, *more))
        assert len(commits) == 1
        assert len(await other.list("a")) == 21
        await other.create("a/other", b"", others)


async def test_what_must_be_on_disk_does_not_join_a_transaction_that_need_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores(tmp_path / "doyen.db") as (store,):
        lease = await store.grant(TTL_S)
        entry = (await store.create("a", b"", lease)).entry
        levels: list[str] = []
        connection = store._database.connection
        finish = Transaction.finish

        def note(self: Transaction, *args: Any) -> None:
            levels.append(connection.synchronous)
            finish(self, *args)

        monkeypatch.setattr(Transaction, "finish", note)
        with write_lock(tmp_path / "doyen.db", store):
            deleting = asyncio.ensure_future(store.delete("a", if_version=entry.version))
            await lock_is_waited_for(store)
            creating = asyncio.ensure_future(store.create("b", b"", lease))
            putting = asyncio.ensure_future(store.put("c", b"", if_version=None))
            await asyncio.sleep(0)
            assert store._database.thread._queue.qsize() == 2
        assert await deleting
        assert (await creating).won
        assert await putting is not None
        assert levels == ["NORMAL", "FULL"]


@given(st.lists(st.tuples(st.sampled_from(["s", "s/a", "s/b", "sa", "t/a"]), st.integers(0, 4))))
def test_the_owners_of_a_scope_are_the_same_by_entry_and_by_lease(
    entries: list[tuple[str, int]],
) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for statement in SCHEMA:
        connection.execute(statement)
    rows = {key: f"lease-{lease}" if lease else None for key, lease in entries}
    rows |= {f"{key}/{lease}": f"lease-{lease}" if lease else None for key, lease in entries}
    for key, lease in rows.items():
        connection.execute("INSERT INTO entries VALUES (?, '', 1, 1, ?)", (key, lease))
    owners = {
        lease for key, lease in rows.items() if lease and (key == "s" or key.startswith("s/"))
    }
    view = Transaction(connection.execute, writable=True)
    for many in (0, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Transaction, "_are_many", lambda self, found, many=many: not many)
            assert view._read_owners("s") == owners
    connection.close()
    assert tables._MANY > 1


class _Recording:
    """Passes on everything to a queue, and records what is put in."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.puts: list[Any] = []

    def put(self, item: Any) -> None:
        self.puts.append(item)
        self._queue.put(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


async def test_a_refresh_shares_the_transaction_of_those_who_were_notified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is before what they read, so that the transaction takes the write lock, which is free once
    the change is committed that they were notified of."""
    async with stores(tmp_path / "doyen.db") as (store,):
        await store.watch("k", lambda: None)
        monkeypatch.setattr(store._database.connection, "_appends", lambda: False)
        queue = _Recording(store._database.thread._queue)
        store._database.thread._queue = cast(Any, queue)
        (tag,) = store._watches._by_tag
        store._watches._refresh({tag: "k"}, notify=False)
        assert queue.puts == []
        assert await store.get("k") is None
        assert [each.writes for each in queue.puts] == [True, False]
        store._watches._refresh({tag: "k"}, notify=False)
        async with asyncio.timeout(10):
            while len(queue.puts) == 2:  # noqa: ASYNC110 - nobody reads, so a timer submits it
                await asyncio.sleep(0.001)
        assert queue.puts[2].writes
