"""The handles of one process on a local store share a connection and its thread, and nothing
else."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import doyen
from doyen.errors import LeaseGone, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.events import Event, LeaseEnded
from doyen.model import Entry
from doyen.stores.port import Watch
from doyen.stores.sqlite.connection import LocalConnection, user
from doyen.stores.sqlite.database import DatabaseThread, _threads
from doyen.stores.sqlite.inbox import Inbox
from doyen.stores.sqlite.leases import LeaseFileVerdict, LocalLeases
from doyen.stores.sqlite.store import SQLiteStore
from doyen.stores.sqlite.watches import LocalWatches
from support import until_blocking
from test_sqlite import Failing, opened, stores, until
from test_sqlite_batches import lock_is_waited_for, write_lock

TTL_S = 60.0


def threads() -> int:
    return sum(thread.name == "doyen-sqlite" for thread in threading.enumerate())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The level of each commit from now on."""
    levels: list[str] = []
    commit = LocalConnection.commit

    def noted(self: LocalConnection) -> None:
        commit(self)
        levels.append(self.synchronous)

    monkeypatch.setattr(LocalConnection, "commit", noted)
    return levels


async def test_the_sessions_of_a_process_have_one_thread_until_the_last_is_closed(
    tmp_path: Path,
) -> None:
    url, before = f"sqlite://{tmp_path}/x.db", threads()
    sessions = [doyen.connect(url, ttl_s=TTL_S) for _ in range(30)]
    for session in sessions:
        await session.__aenter__()
    assert threads() == before + 1
    scopes = [session.member("g", name=f"m{n}") for n, session in enumerate(sessions)]
    await asyncio.gather(*(scope.__aenter__() for scope in scopes))
    assert len(await sessions[0].members("g")) == 30
    await asyncio.gather(*(scope.__aexit__(None, None, None) for scope in scopes))
    for session in sessions[:-1]:
        await session.__aexit__(None, None, None)
    assert threads() == before + 1
    assert await sessions[-1].members("g") == []
    await sessions[-1].__aexit__(None, None, None)
    assert threads() == before


async def test_what_many_handles_do_at_once_is_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.db"
    handles = [await opened(path) for _ in range(30)]
    leases = [await handle.grant(TTL_S) for handle in handles]
    for handle, lease in zip(handles, leases, strict=True):
        await handle.enqueue("line", b"", lease)  # from now on it takes part
    commits = counted(monkeypatch)
    with write_lock(path, *handles):
        creating = [asyncio.ensure_future(handles[0].create("k/0", b"", leases[0]))]
        await lock_is_waited_for(handles[0])
        creating += [
            asyncio.ensure_future(handles[n].create(f"k/{n}", b"", leases[n])) for n in range(1, 30)
        ]
        await asyncio.sleep(0)
    assert all(creation.won for creation in await asyncio.gather(*creating))
    assert commits == ["NORMAL"]
    found = [entry.lease for entry in await handles[0].list("k")]
    assert sorted(map(str, found)) == sorted(lease.id for lease in leases)
    for handle in handles:
        await handle.close()


async def test_a_write_notifies_the_watches_of_all_handles_after_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.db"
    handles = [await opened(path) for _ in range(10)]
    monkeypatch.setattr(DatabaseThread, "_is_joinable", lambda self: False)
    another = await opened(path)  # as another process
    assert len({handle._database.thread for handle in (*handles, another)}) == 2
    seen: list[bytes | None] = []

    async def look(handle: SQLiteStore) -> None:
        entry = await handle.get("k")
        seen.append(None if entry is None else entry.value)

    tasks: list[asyncio.Task[None]] = []
    for handle in (*handles, another):

        def notified(handle: SQLiteStore = handle) -> None:
            tasks.append(asyncio.ensure_future(look(handle)))

        await handle.watch("k", notified)
    commits = counted(monkeypatch)
    entry = await handles[0].put("k", b"1", if_version=None)
    await until(lambda: len(seen) == 11, "all have read it")
    assert set(seen) == {b"1"}
    # The write, and what the other process reads under the lock.
    assert sorted(commits) == ["FULL", "NORMAL"]
    seen.clear()
    commits.clear()
    assert entry is not None
    writing = asyncio.ensure_future(another.put("k", b"2", if_version=entry.version))
    await asyncio.sleep(0)
    until_blocking(lambda: commits)  # no inbox is read before all have their message
    with write_lock(path, *handles):
        await lock_is_waited_for(handles[0])
        await until(lambda: len(tasks) == 22, "all have been notified")
        await asyncio.sleep(0)
    await writing
    await until(lambda: len(seen) == 11, "all have read it")
    assert set(seen) == {b"2"}
    assert sorted(commits) == ["FULL", "NORMAL"]
    for handle in (*handles, another):
        await handle.close()


async def test_the_entry_is_read_once_for_the_watchers_of_all_handles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.db"
    handles = [await opened(path) for _ in range(10)]
    monkeypatch.setattr(DatabaseThread, "_is_joinable", lambda self: False)
    another = await opened(path)  # as another process
    carried: list[bytes | None] = []
    watches: dict[SQLiteStore, Watch] = {}
    for handle in handles:

        def notified(handle: SQLiteStore = handle) -> None:
            entry = handle.carried(watches[handle])
            carried.append(None if entry is None else entry.value)

        watches[handle] = await handle.watch_entry("k", notified)
    commits = counted(monkeypatch)
    refreshing: list[LocalWatches] = []
    refresh = LocalWatches._refresh

    def refreshed(self: LocalWatches, scopes: dict[int, str], notify: bool = True) -> None:
        refresh(self, scopes, notify)
        refreshing.append(self)

    monkeypatch.setattr(LocalWatches, "_refresh", refreshed)

    entry: Entry | None = None
    for writer, value in ((another, b"1"), (handles[0], b"2"), (another, b"3")):
        version = None if entry is None else entry.version
        writing = asyncio.ensure_future(writer.put("k", value, if_version=version))
        if writer is another:
            await asyncio.sleep(0)
            until_blocking(lambda: commits)  # no inbox is read before all have their message
            with write_lock(path, *handles):
                await lock_is_waited_for(handles[0])
                await until(lambda: len(refreshing) == 10, "all have their message")
                refreshing.clear()
        entry = await writing
        await until(lambda: len(carried) == 10, "all have been notified")
        assert set(carried) == {value}
        assert sorted(commits) == (["FULL"] if writer is handles[0] else ["FULL", "NORMAL"])
        carried.clear()
        commits.clear()

    # A refresh that fails is not waited for: each watcher reads, and gets the error itself.
    monkeypatch.setattr(LocalConnection, "begin", _unavailable)
    another._inbox.send(handles[1]._inbox.name, [1])
    await until(lambda: bool(carried), "the watcher has been notified")
    assert carried == [None]
    monkeypatch.undo()
    for handle in (*handles, another):
        await handle.close()


def _unavailable(*_: object, **__: object) -> None:
    raise StoreUnavailable("a process hangs")


async def test_what_is_carried_is_not_older_than_what_was_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refresh for the message of another process, and a write of this one, are committed before
    the loop delivers either."""
    path = tmp_path / "x.db"
    handle = await opened(path)
    monkeypatch.setattr(DatabaseThread, "_is_joinable", lambda self: False)
    another = await opened(path)
    changed = asyncio.Event()
    watch = await handle.watch_entry("k", changed.set)
    commits = counted(monkeypatch)
    writing = asyncio.ensure_future(another.put("k", b"1", if_version=None))
    await asyncio.sleep(0)
    until_blocking(lambda: commits)
    handle._watches._on_message()
    until_blocking(lambda: len(commits) == 2)  # the refresh
    entry = await writing
    assert entry is not None
    own = handle._database.submit(lambda tables: tables.put("k", b"2", entry.version))
    until_blocking(lambda: len(commits) == 3)
    await own
    await changed.wait()
    await asyncio.sleep(0)
    found = handle.carried(watch) or await handle.get("k")
    assert found is not None
    assert found.value == b"2"
    await handle.close()
    await another.close()


async def test_each_handle_has_its_own_leases_and_hears_of_the_end_of_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.db"
    ended: dict[str, list[Event]] = {"first": [], "second": []}
    owner = await opened(path)
    first = await opened(path, ended["first"].append)
    second = await opened(path, ended["second"].append)
    lease = await owner.grant(TTL_S)
    assert (await owner.create("k", b"v", lease)).won
    notified: list[str] = []
    await first.watch("k", lambda: notified.append("first"))
    await second.watch("k", lambda: notified.append("second"))
    assert not (await first.create("k", b"", await first.grant(TTL_S))).won
    owner._leases.release_all()  # as if its process had died
    await until(lambda: set(notified) == {"first", "second"}, "both are notified")
    assert await first.get("k") is None
    assert await second.get("k") is None
    assert ended["first"] == [LeaseEnded(lease=lease.id, cause="died")]
    for handle in (owner, first, second):
        await handle.close()


async def test_a_handle_opens_what_is_at_the_path_now(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    before = await opened(path)
    await before.put("k", b"before", if_version=None)
    for file in ("x.db", "x.db-wal", "x.db-shm"):
        os.rename(tmp_path / file, tmp_path / f"old-{file}")
    after = await opened(path)
    assert await after.get("k") is None
    assert await after.put("k", b"after", if_version=None)
    with pytest.raises(StoreUnusable, match="replaced while in use"):
        await before.get("k")
    again = await opened(path)
    assert again._database.thread is after._database.thread
    await again.close()
    await before.close()
    found = await after.get("k")
    assert found is not None
    assert found.value == b"after"
    await after.close()


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="the system does not list locks")
async def test_after_only_the_database_was_removed_its_old_handles_do_not_disturb_new_ones(
    tmp_path: Path,
) -> None:
    """The -shm file stays. If the old connection were open beside the new one, SQLite would empty
    that file under it, and the locks of the new one would go when the old one is closed."""
    path = tmp_path / "x.db"
    before = await opened(path)
    lease = await before.grant(TTL_S)
    assert (await before.create("k", b"", lease)).won
    path.unlink()
    after = await opened(path)
    assert await after.put("k", b"after", if_version=None)
    for _ in range(2):
        with pytest.raises(StoreUnusable, match="replaced while in use"):
            await before.get("k")
        with pytest.raises(LeaseGone, match="replaced while"):
            await before.renew(lease)
    await before.close()
    assert user(str(path)) == os.getpid()
    found = await after.get("k")
    assert found is not None
    assert found.value == b"after"
    await after.close()


_HOLD = """
import asyncio, sys
from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, open_store

async def main():
    store = await open_store(sys.argv[1], Context(SystemClock(), lambda event: None))
    await store.put("k", b"", if_version=None)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await store.close()

asyncio.run(main())
"""


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="the system does not list locks")
async def test_no_new_database_is_made_beside_the_log_of_one_that_others_use(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.db"
    holding = [sys.executable, "-c", _HOLD, f"sqlite://{path}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(holding, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        path.unlink()
        for _ in range(2):
            with pytest.raises(StoreUnusable, match=f"process {process.pid} still uses .*-shm"):
                await opened(path)
        assert not path.exists()
        process.communicate()
    store = await opened(path)
    assert await store.get("k") is None
    await store.close()


async def test_the_inbox_of_one_that_gave_up_opening_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(tmp_path / "x.db")
    made, go_on, inboxes = threading.Event(), threading.Event(), list[Inbox]()
    make = Inbox.make

    def slow(self: Inbox) -> None:
        inboxes.append(self)
        made.set()
        assert go_on.wait(10)
        make(self)

    monkeypatch.setattr(Inbox, "make", slow)
    impatient = asyncio.ensure_future(opened(tmp_path / "x.db"))
    await asyncio.to_thread(made.wait, 10)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    go_on.set()
    assert await store.get("k") is None  # after the admission
    assert os.listdir(tmp_path / "x.db.sessions") == [f"{store._inbox.name}.inbox"]
    assert inboxes[0].fd == -1
    await store.close()


async def test_without_a_thread_all_that_open_fail_and_a_later_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name != "doyen-sqlite":
            start(self)
            return
        raise RuntimeError("can't start new thread")

    path = tmp_path / "x.db"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        outcomes = await asyncio.gather(*(opened(path) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    assert "limit of threads" in str(outcomes[0])
    store = await opened(path)
    await store.close()


async def test_a_record_that_was_created_is_told_though_a_lease_cannot_be_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the candidate would take the failure of a look for that of its write."""
    first, second = [await opened(tmp_path / "x.db") for _ in range(2)]
    leases = [await handle.grant(TTL_S) for handle in (first, second)]
    await first.enqueue("line", b"", leases[0])
    ticket = await second.enqueue("line", b"", leases[1])
    judge = LocalLeases.judge

    def exhausted(self: LocalLeases, lease: str) -> LeaseFileVerdict:
        if lease == leases[0].id:
            raise OSError(errno.EMFILE, "Too many open files")
        return judge(self, lease)

    with monkeypatch.context() as patch:
        patch.setattr(LocalLeases, "judge", exhausted)
        looked = await second.create_and_look("record", b"", leases[1], ticket, "other")
    assert looked.creation.won
    assert isinstance(looked.failure, StoreUnavailable)
    found = await first.get("record")
    assert found is not None
    assert found.revision == looked.creation.entry.revision
    for handle in (first, second):
        await handle.close()


async def test_the_row_of_a_closed_watch_goes_even_if_a_transaction_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(tmp_path / "x.db")
    watch = await store.watch("k", lambda: None)
    watch.close()

    def failing(self: LocalConnection) -> None:
        raise OutcomeUnknown("the disk failed")

    with monkeypatch.context() as patch:
        patch.setattr(LocalConnection, "commit", failing)
        with pytest.raises(OutcomeUnknown):
            await store.put("k", b"", if_version=None)
    for key in ("k", "another"):
        assert await store.put(key, b"", if_version=None)
    looking = sqlite3.connect(tmp_path / "x.db")
    assert looking.execute("SELECT count(*) FROM watches").fetchone() == (0,)
    looking.close()
    await store.close()


async def test_a_handle_whose_inbox_was_removed_does_not_fail_the_others(tmp_path: Path) -> None:
    first, second = [await opened(tmp_path / "x.db") for _ in range(2)]
    (tmp_path / "x.db.sessions" / f"{first._inbox.name}.inbox").unlink()
    failed, written = await asyncio.gather(
        first.put("a", b"", if_version=None),
        second.put("b", b"", if_version=None),
        return_exceptions=True,
    )
    assert isinstance(failed, StoreUnusable)
    assert not isinstance(written, BaseException)
    assert written is not None
    assert await second.get("a") is None
    await first.close()
    await second.close()


async def test_handles_that_open_at_once_share_a_thread_or_its_failure(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    handles = await asyncio.gather(*(opened(path) for _ in range(5)))
    assert len({handle._database.thread for handle in handles}) == 1
    await asyncio.gather(*(handle.close() for handle in handles))
    path.write_bytes(b"this is not a database" * 100)
    outcomes = await asyncio.gather(*(opened(path) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(outcome, StoreUnusable) for outcome in outcomes)
    assert len({id(outcome) for outcome in outcomes}) == 3
    path.unlink()
    again = await opened(path)
    await again.close()
    assert not [key for key in _threads if key[2] == str(path)]


async def test_one_that_gives_up_opening_does_not_fail_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, entered, go_on = tmp_path / "x.db", threading.Event(), threading.Event()
    real = LocalConnection.open

    def slow(self: LocalConnection) -> None:
        entered.set()
        assert go_on.wait(10)
        real(self)

    monkeypatch.setattr(LocalConnection, "open", slow)
    impatient = asyncio.ensure_future(opened(path))
    patient = asyncio.ensure_future(opened(path))
    await asyncio.to_thread(entered.wait, 10)
    impatient.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    store = await patient
    assert await store.put("k", b"", if_version=None)
    assert os.listdir(tmp_path / "x.db.sessions") == [f"{store._inbox.name}.inbox"]
    await store.close()


async def test_a_handle_whose_admission_failed_is_not_alive_and_tries_again(tmp_path: Path) -> None:
    async with stores(tmp_path / "x.db") as (first,):
        connection = first._database.connection
        make, made = Inbox.make, []

        def fails_once(inbox: Inbox) -> None:
            make(inbox)
            made.append(inbox)
            if len(made) == 1:
                connection.execute = Failing(connection.execute, "COMMIT", sqlite3.SQLITE_FULL)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Inbox, "make", fails_once)
            async with stores(tmp_path / "x.db") as (second,):
                await second.enqueue("line", b"", await second.grant(TTL_S))
        assert len(made) == 2, "the admission was repeated"
        assert len(await first.list("line")) == 0
