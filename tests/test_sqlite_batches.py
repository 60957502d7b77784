"""The local store with many operations and many entries: what shares a transaction, and which
leases own something in a scope."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doyen.stores.sqlite import SQLiteStore, tables
from doyen.stores.sqlite.tables import SCHEMA, HandleChanges, Transaction
from test_sqlite import TTL_S, stores


async def taken(store: SQLiteStore) -> None:
    """Wait until the thread of the database has what was submitted, and waits for the lock."""
    await asyncio.sleep(0.01)
    while not store._database.thread._queue.empty():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)


async def test_operations_that_arrive_while_the_lock_is_waited_for_share_a_transaction(
    tmp_path: Path,
) -> None:
    async with stores(tmp_path / "doyen.db", 2) as (store, other):
        lease, others = await store.grant(TTL_S), await other.grant(TTL_S)
        commits: list[HandleChanges] = []
        deliver = store._database.deliver

        def note(committed: HandleChanges) -> None:
            commits.append(committed)
            deliver(committed)

        store._database.deliver = note
        blocking = sqlite3.connect(tmp_path / "doyen.db", isolation_level=None)
        blocking.execute("BEGIN IMMEDIATE")
        first = asyncio.ensure_future(store.create("a/first", b"", lease))
        await taken(store)
        more = [asyncio.ensure_future(store.create(f"a/{n}", b"", lease)) for n in range(20)]
        cancelled = asyncio.ensure_future(store.create("a/cancelled", b"", lease))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        blocking.execute("COMMIT")
        blocking.close()
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
        blocking = sqlite3.connect(tmp_path / "doyen.db", isolation_level=None)
        blocking.execute("BEGIN IMMEDIATE")
        deleting = asyncio.ensure_future(store.delete("a", if_version=entry.version))
        await taken(store)
        creating = asyncio.ensure_future(store.create("b", b"", lease))
        putting = asyncio.ensure_future(store.put("c", b"", if_version=None))
        await asyncio.sleep(0.01)
        blocking.execute("COMMIT")
        blocking.close()
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
            patch.setattr(Transaction, "_are_many", lambda self, scope, many=many: not many)
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


async def test_a_refresh_shares_the_transaction_of_those_who_were_notified(tmp_path: Path) -> None:
    """It is before what they read, so that the transaction takes the write lock, which is free once
    the change is committed that they were notified of."""
    async with stores(tmp_path / "doyen.db") as (store,):
        await store.watch("k", lambda: None)
        queue = _Recording(store._database.thread._queue)
        store._database.thread._queue = cast(Any, queue)
        (tag,) = store._watches._by_tag
        store._watches._refresh({tag: "k"}, again=False)
        assert queue.puts == []
        assert await store.get("k") is None
        assert [each.writes for each in queue.puts] == [True, False]
        store._watches._refresh({tag: "k"}, again=False)
        async with asyncio.timeout(10):
            while len(queue.puts) == 2:  # noqa: ASYNC110 - nobody reads, so a timer submits it
                await asyncio.sleep(0.001)
        assert queue.puts[2].writes
