"""The local store with real processes that are killed, stopped, out of disk space, or forked.

Run as a program, this file is one such process: it opens the store and executes commands, one JSON
object per line.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import queue
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from doyen.errors import DoyenError, StoreUnavailable
from doyen.events import Event, LeaseEnded
from doyen.lease.clock import SystemClock
from doyen.model import Entry, Lease, order_key
from doyen.stores.port import Context, Store, open_store
from doyen.stores.sqlite.connection import LocalConnection
from doyen.stores.sqlite.store import SQLiteStore
from doyen.stores.sqlite.tables import Transaction
from frozen import freeze
from servers.process import is_stopped

TTL_S = 60.0
BOUND_S = 20.0


class OtherProcess:
    """Another process that executes commands on the store."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, f"sqlite://{path}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"ended": True})

    def send_command(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return self._answers.get(timeout=BOUND_S)

    def ask(self, command: str, **arguments: Any) -> Any:
        self.send_command(command, **arguments)
        answer = self.answer()
        assert "error" not in answer, answer
        return answer["result"]

    def error(self, command: str, **arguments: Any) -> tuple[str, str]:
        self.send_command(command, **arguments)
        answer = self.answer()
        return answer["error"], answer["message"]

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                pass


@contextmanager
def other_processes(path: Path, count: int = 1, *arguments: str) -> Iterator[list[OtherProcess]]:
    processes = [OtherProcess(path, *arguments) for _ in range(count)]
    try:
        for other in processes:
            assert other.answer() == {"result": "ready"}
        yield processes
    finally:
        for other in processes:
            other.close()


@asynccontextmanager
async def opened(path: Path, events: list[Event] | None = None) -> AsyncIterator[SQLiteStore]:
    emit: Callable[[Event], None] = (lambda event: None) if events is None else events.append
    store = await open_store(f"sqlite://{path}", Context(SystemClock(), emit))
    assert isinstance(store, SQLiteStore)
    try:
        yield store
    finally:
        await store.close()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < limit, f"{what}: not within {BOUND_S} s"
        time.sleep(0.001)


def verify(path: Path) -> None:
    """Check the integrity of the database after all processes have ended."""
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


# Death and silence


def test_a_killed_owner_is_succeeded_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    async def main(owner: OtherProcess) -> None:
        events: list[Event] = []
        async with opened(path, events) as store:
            token = owner.ask("create", key="k")
            lease = await store.grant(TTL_S)
            notified = asyncio.Event()
            await store.watch("k", notified.set)
            assert not (await store.create("k", b"mine", lease)).won
            owner.kill()
            async with asyncio.timeout(BOUND_S):  # a third of the ttl
                await notified.wait()
            won, entry = await store.create("k", b"mine", lease)
            assert won
            assert entry.revision > token
            assert [type(event) for event in events] == [LeaseEnded]
            assert isinstance(events[0], LeaseEnded)
            assert events[0].cause == "died"

    with other_processes(path) as (owner,):
        asyncio.run(main(owner))
    verify(path)


def test_a_handle_that_only_looks_leaves_the_proof_of_a_death_to_those_that_take_part(
    tmp_path: Path,
) -> None:
    """Otherwise the audit logs would show that another leads, and not that the first has died."""
    path = tmp_path / "x.db"

    async def main(owner: OtherProcess) -> None:
        seen: list[Event] = []
        events: list[Event] = []
        async with opened(path, seen) as page:
            owner.ask("create", key="k")
            notified = asyncio.Event()
            await page.watch("k", notified.set)
            owner.kill()
            async with asyncio.timeout(BOUND_S):
                await notified.wait()
            assert await page.get("k") is None
            assert await page.get("k") is None
        async with opened(path) as late:
            assert await late.get("k") is None
            # As `doyen resign` does it, which has no audit log.
            order = await late.grant(TTL_S)
            assert (await late.create(order_key("k"), b"", order)).won
            assert await late.get("k") is None
            await late.revoke(order)
        async with opened(path, events) as store:
            lease = await store.grant(TTL_S)
            assert (await store.create("k", b"mine", lease)).won
        assert [getattr(event, "cause", None) for event in seen] == ["died"]
        assert events == seen

    with other_processes(path) as (owner,):
        asyncio.run(main(owner))
    verify(path)


def test_a_watch_notices_an_owner_that_died_before_it(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    async def main(owner: OtherProcess) -> None:
        async with opened(path) as store:
            owner.ask("create", key="k")
            await store.get("k")
            owner.kill()
            notified = asyncio.Event()
            await store.watch("k", notified.set)
            async with asyncio.timeout(BOUND_S):
                await notified.wait()
            assert await store.get("k") is None

    with other_processes(path) as (owner,):
        asyncio.run(main(owner))


def test_a_stopped_owner_is_succeeded_after_its_ttl_and_stays_deposed(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    async def main(owner: OtherProcess) -> None:
        events: list[Event] = []
        async with opened(path, events) as store:
            token = owner.ask("create", key="k")
            lease = await store.grant(TTL_S)
            notified = asyncio.Event()
            await store.watch("k", notified.set)
            owner.ask("renew")
            freeze(owner.process.pid, path)
            async with asyncio.timeout(BOUND_S):
                while not (creation := await store.create("k", b"mine", lease)).won:
                    await notified.wait()
                    notified.clear()
            assert creation.entry.revision > token
            assert [getattr(event, "cause", None) for event in events] == ["expired"]
            owner.send_signal(signal.SIGCONT)
            assert owner.error("renew")[0] == "LeaseGone"
            assert owner.error("renew")[0] == "LeaseGone"
            assert owner.error("create", key="other")[0] == "LeaseGone"
            entry = await store.get("k")
            assert entry is not None
            assert entry.value == b"mine"

    with other_processes(path, 1, "--ttl=2") as (owner,):
        asyncio.run(main(owner))


def test_a_process_stopped_in_a_transaction_is_named_and_blocks_no_renewal(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    async def main(frozen: OtherProcess) -> None:
        async with opened(path) as store:
            lease = await store.grant(5.0)
            assert (await store.create("mine", b"v", lease)).won
            notified = asyncio.Event()
            await store.watch("theirs", notified.set)
            frozen.send_command("stop_in_transaction", key="theirs")
            await asyncio.to_thread(wait_for, lambda: is_stopped(frozen.pid), "the other stops")
            write = asyncio.create_task(store.create("other", b"v", lease))
            while not write.done():
                await store.renew(lease)
                await asyncio.sleep(0.02)
            with pytest.raises(StoreUnavailable) as caught:
                await write
            assert f"process {frozen.pid} (" in str(caught.value)
            assert f"which is stopped: continue it (kill -CONT {frozen.pid})" in str(caught.value)
            assert await store.get("mine") is not None  # reads go on
            assert await store.get("theirs") is None
            notified.clear()  # watchers are notified before the commit, and again after it
            frozen.send_signal(signal.SIGCONT)
            assert frozen.answer()["result"]
            await store.renew(lease)
            async with asyncio.timeout(BOUND_S):
                await notified.wait()  # sent before the commit; the reader retries until after it
            assert (await store.create("other", b"v", lease)).won

    with other_processes(path) as (frozen,):
        asyncio.run(main(frozen))
    verify(path)


# Wake-ups


@pytest.mark.parametrize("how", ["notified before the commit", "notified after the commit"])
def test_a_writer_killed_right_after_its_commit_has_notified_watches(
    tmp_path: Path, how: str
) -> None:
    """The second order is the broken one. It shows that the test can fail."""
    path = tmp_path / "x.db"
    after = how == "notified after the commit"

    async def main(writer: OtherProcess) -> None:
        async with opened(path) as store:
            notified = asyncio.Event()
            await store.watch("k", notified.set)
            writer.send_command("put_and_die", key="k", wake_after_commit=after)
            assert await asyncio.to_thread(writer.answer) == {"ended": True}
            assert await store.get("k") is not None
            if after:
                # The writer is dead and sends nothing more.
                await store.put("flush", b"", if_version=None)
                assert not notified.is_set()
            else:
                async with asyncio.timeout(BOUND_S):
                    await notified.wait()

    with other_processes(path) as (writer,):
        asyncio.run(main(writer))
    verify(path)


def test_killed_writers_lose_no_notification_and_no_revision(tmp_path: Path) -> None:
    """Writers are killed at random times. A watcher that waits for notifications and then reads
    reaches every final state, and acknowledged revisions only grow."""
    path = tmp_path / "x.db"
    chance = random.Random(7)
    keys = [f"k/{number}" for number in range(3)]

    async def main() -> None:
        async with opened(path) as store:
            shown: dict[str, int | None] = {}
            reads = 0

            async def follow(key: str) -> None:
                nonlocal reads
                changed = asyncio.Event()
                await store.watch(key, changed.set)
                while True:
                    changed.clear()
                    entry = await store.get(key)
                    shown[key] = None if entry is None else entry.revision
                    reads += 1
                    await changed.wait()

            followers = [asyncio.create_task(follow(key)) for key in keys]
            acknowledged = 0
            for _ in range(25):
                writer = OtherProcess(path)
                try:
                    assert (await asyncio.to_thread(writer.answer)) == {"result": "ready"}
                    writer.send_command("churn", keys=keys, seed=chance.randrange(1000))
                    first = await asyncio.to_thread(writer.answer)
                    assert first["revision"] > acknowledged
                    await asyncio.sleep(chance.uniform(0, 0.03))
                    writer.kill()
                    revisions = [first["revision"]]
                    while "revision" in (answer := writer.answer()):
                        revisions.append(answer["revision"])
                    assert all(earlier < later for earlier, later in pairwise(revisions))
                    acknowledged = revisions[-1]
                finally:
                    writer.close()

                async def settled() -> bool:
                    for key in keys:
                        entry = await store.get(key)
                        if shown.get(key, 0) != (None if entry is None else entry.revision):
                            return False
                    return True

                async with asyncio.timeout(BOUND_S):
                    while not await settled():  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
            assert reads > 3
            for task in followers:
                task.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    asyncio.run(main())
    verify(path)


# Many processes


def create_result(other: OtherProcess, key: str) -> dict[str, Any]:
    """The result of a `create`. It is repeated if the others kept the database locked for too long,
    as may happen on a busy machine: then nothing was written."""
    while (answer := other.answer()).get("error") == "StoreUnavailable":
        other.send_command("try", key=key)
    result: dict[str, Any] = answer["result"]
    return result


def test_of_many_processes_that_open_a_new_store_and_race_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.db"
    with other_processes(path, 6) as processes:
        for round_ in range(20):
            for other in processes:
                other.send_command("try", key=f"k/{round_}")
            answers = [create_result(other, f"k/{round_}") for other in processes]
            assert sum(answer["won"] for answer in answers) == 1
            assert len({answer["revision"] for answer in answers}) == 1
        tokens = processes[0].ask("revisions", prefix="k")
        assert len(set(tokens)) == 20
    verify(path)


def test_a_line_of_processes_advances_as_each_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with other_processes(path, 6) as processes:
        for other in processes:
            other.ask("enqueue", line="line")
        for other in processes:
            other.send_command("wait_for_head")
        for other in processes:
            assert other.answer() == {"result": "head"}
            other.kill()


# Fork


def test_a_forked_child_closes_the_lock_without_releasing_it(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    async def main(parent: OtherProcess) -> None:
        async with opened(path) as store:
            token = parent.ask("create", key="k")
            code, message = parent.ask("fork")
            assert code == 7
            assert "opened before a fork" in message
            assert "connect again in the child" in message
            entry = await store.get("k")
            assert entry is not None
            assert entry.revision == token
            parent.ask("renew")
            assert parent.ask("create", key="k2") > token
            child = parent.ask("fork_and_stay")
            parent.kill()
            async with asyncio.timeout(BOUND_S):
                while await store.get("k") is not None:  # noqa: ASYNC110 (the child holds nothing)
                    await asyncio.sleep(0.001)
            os.kill(child, signal.SIGKILL)

    with other_processes(path) as (parent,):
        asyncio.run(main(parent))
    verify(path)


# Disks and permissions


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system; the next test limits file sizes")
    point = tmp_path / "small"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(point)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this root may not mount; the next test limits file sizes")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_a_full_disk_refuses_writes_until_space_is_freed(small_disk: Path) -> None:
    async def main() -> None:
        async with opened(small_disk / "x.db") as store:
            lease = await store.grant(TTL_S)
            assert (await store.create("k", b"v", lease)).won
            filler = small_disk / "filler"
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(b"x" * 4096):
                    pass
            with pytest.raises(StoreUnavailable, match="free space on the file system"):
                await _fill(store)
            await store.renew(lease)  # renewals need no space
            assert await store.get("k") is not None
            with pytest.raises(StoreUnavailable, match="free space"):
                await store.grant(TTL_S)
            before = len(await store.list("big"))
            filler.unlink()
            assert (await store.create("k2", b"v", lease)).won
            assert len(await store.list("big")) == before

    asyncio.run(main())
    verify(small_disk / "x.db")


async def _fill(store: Store) -> None:
    for number in range(1000):
        await store.put(f"big/{number}", b"x" * 4000, if_version=None)


def test_a_file_size_limit_refuses_writes_and_leaves_no_partial_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with other_processes(path, 1, "--file-size=200000") as (other,):
        answer = other.ask("fill")
        assert answer["error"] == "StoreUnavailable"
        assert "nothing was written" in answer["message"]
        assert other.ask("revisions", prefix="big") == answer["revisions"]
        other.ask("renew")
    verify(path)


def test_without_permission_the_error_names_user_and_access() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "x.db"

        async def create() -> None:
            async with opened(path) as store:
                await store.put("k", b"v", if_version=None)

        def refusal(at: Path) -> str:
            other = OtherProcess(at, "--nobody")
            try:
                answer = other.answer()
                assert answer["error"] == "StoreUnusable"
                return str(answer["message"])
            finally:
                other.close()

        asyncio.run(create())
        path.chmod(0o444)
        folder.chmod(0o555)
        try:
            assert f"read and write it and to create files in {folder}" in refusal(path)
            assert "cannot be opened for writing" in refusal(folder / "new.db")
            assert "cannot be created (Permission denied)" in refusal(folder / "sub" / "x.db")
        finally:
            folder.chmod(0o755)


# The other process


class _Commands:
    """The commands that the other process can execute."""

    def __init__(self, store: SQLiteStore, lease: Lease, forks: Forks) -> None:
        self._forks = forks
        self._store = store
        self._lease = lease
        self._ticket: Entry | None = None

    async def renew(self) -> None:
        await self._store.renew(self._lease)

    async def create(self, key: str) -> int:
        won, entry = await self._store.create(key, b"theirs", self._lease)
        assert won
        return entry.revision

    async def try_(self, key: str) -> dict[str, Any]:
        won, entry = await self._store.create(key, b"theirs", self._lease)
        return {"won": won, "revision": entry.revision}

    async def revisions(self, prefix: str) -> list[int]:
        return [entry.revision for entry in await self._store.list(prefix)]

    async def enqueue(self, line: str) -> None:
        self._ticket = await self._store.enqueue(line, b"", self._lease)

    async def wait_for_head(self) -> str:
        assert self._ticket is not None
        while (ahead := await self._store.ahead(self._ticket)) is not None:
            gone = asyncio.Event()
            watch = await self._store.watch(ahead.key, gone.set)
            if await self._store.get(ahead.key) is not None:
                await gone.wait()
            watch.close()
        return "head"

    async def stop_in_transaction(self, key: str) -> bool:
        finish = Transaction.finish

        def stopping(tables: Transaction, *arguments: Any) -> None:
            finish(tables, *arguments)
            Transaction.finish = finish  # type: ignore[method-assign]
            # Stop this thread: otherwise it might go on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

        Transaction.finish = stopping  # type: ignore[method-assign, assignment]
        return (await self._store.create(key, b"v", self._lease)).won

    async def put_and_die(self, key: str, wake_after_commit: bool) -> None:
        commit = LocalConnection.commit

        def dying(connection: LocalConnection) -> None:
            commit(connection)
            os.kill(os.getpid(), signal.SIGKILL)

        LocalConnection.commit = dying  # type: ignore[method-assign, assignment]
        if wake_after_commit:
            self._store._inbox.send = lambda name, tags: True  # type: ignore[method-assign]
        await self._store.put(key, b"v", if_version=None)

    async def leave_and_die(self, how: str) -> None:
        notify = Transaction.notify

        def dying(tables: Transaction, *, committed: bool) -> None:
            assert committed
            assert tables._reached
            os.kill(os.getpid(), signal.SIGKILL)
            notify(tables, committed=committed)

        entry = await self._store.get("k")
        assert entry is not None
        Transaction.notify = dying  # type: ignore[method-assign, assignment]
        if how == "create":
            await self._store.create("k/2", b"v", self._lease)
        self._store.delete_now([entry])

    async def create_and_stop(self, key: str, now: bool) -> None:
        def stopping(tables: Transaction, *, committed: bool) -> None:
            assert committed
            # This thread too, which might otherwise go on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

        Transaction.notify = stopping  # type: ignore[method-assign, assignment]
        if now:
            self._store.create_and_look_now(key, b"v", self._lease, None, "order")
            await asyncio.sleep(0)
        else:
            await self._store.create(key, b"v", self._lease)

    async def churn(self, keys: list[str], seed: int) -> None:
        chance = random.Random(seed)
        while True:
            key = chance.choice(keys)
            entry = await self._store.get(key)
            if entry is not None and chance.random() < 0.5:
                await self._store.delete(key)
            elif entry is not None:
                await self._store.put(key, b"v", if_version=entry.version)
            elif chance.random() < 0.5:
                created = await self._store.put(key, b"v", if_version=None)
                if created is not None:
                    reply({"revision": created.revision})
            else:
                won, created = await self._store.create(key, b"v", self._lease)
                if won:
                    reply({"revision": created.revision})

    async def fill(self) -> dict[str, Any]:
        try:
            await _fill(self._store)
        except DoyenError as error:
            revisions = [entry.revision for entry in await self._store.list("big")]
            return {**_error_answer(error), "revisions": revisions}
        return {}

    async def fork(self) -> Any:
        asked: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._forks.put((self._store, asked))
        return await asyncio.wrap_future(asked)

    async def fork_and_stay(self) -> int:
        pid = os.fork()
        if pid == 0:
            self._store.forked()
            os.close(1)
            signal.pause()
        return pid


Forks = queue.SimpleQueue[tuple[SQLiteStore, "concurrent.futures.Future[Any]"] | None]


def _fork(store: SQLiteStore) -> tuple[int, str]:
    """Fork as a program does: on another thread than that of the store."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store.forked()
        store.forked()
        try:
            store.get("k").send(None)
        except DoyenError as error:
            os.write(writing, str(error).encode())
        sys.exit(7)  # a full exit: finalisers run, and must not touch what belongs to the parent
    os.close(writing)
    with os.fdopen(reading) as message:
        text = message.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def reply(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _error_answer(error: DoyenError) -> dict[str, str]:
    return {"error": type(error).__name__, "message": str(error)}


async def _serve_commands(url: str, ttl_s: float, forks: Forks) -> None:
    try:
        store = await open_store(url, Context(SystemClock(), lambda event: None))
    except DoyenError as error:
        reply(_error_answer(error))
        return
    assert isinstance(store, SQLiteStore)
    commands = _Commands(store, await store.grant(ttl_s), forks)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    reply({"result": "ready"})
    while line := await reader.readline():
        arguments = json.loads(line)
        name = arguments.pop("command")
        try:
            reply({"result": await getattr(commands, name.replace("try", "try_"))(**arguments)})
        except DoyenError as error:
            reply(_error_answer(error))
    await store.close()


def _main(url: str, *options: str) -> None:
    ttl_s = TTL_S
    for option in options:
        name, _, value = option.partition("=")
        if name == "--ttl":
            ttl_s = float(value)
        elif name == "--file-size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(value), int(value)))
        elif name == "--nobody" and os.geteuid() == 0:
            os.seteuid(65534)
    forks: Forks = queue.SimpleQueue()

    def run() -> None:
        try:
            asyncio.run(_serve_commands(url, ttl_s, forks))
        finally:
            forks.put(None)

    thread = threading.Thread(target=run)
    thread.start()
    while (wanted := forks.get()) is not None:
        wanted[1].set_result(_fork(wanted[0]))
    thread.join()


if __name__ == "__main__":
    _main(*sys.argv[1:])
