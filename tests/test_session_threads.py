"""Sessions on doyen's own threads: what only threads can show, on the system's clock.

The times are such that a busy machine can keep them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import doyen
import doyen.audit
from doyen import LeadershipLost
from doyen.blocking import BlockingSession
from doyen.election.core import SessionCore
from doyen.election.options import SessionSettings
from doyen.events import Record, Renewed
from doyen.lease.clock import SystemClock
from doyen.lease.runtime import InlineRuntime, ThreadRuntime
from doyen.stores.memory import MemoryStore
from doyen.stores.port import Context
from doyen.testing.faults import Faults, Late
from support import core_of, gather_leaders, real_server, real_session, until, until_blocking


async def test_a_blocked_loop_does_not_cost_the_leader_its_term() -> None:
    """The caller's loop stands still for longer than the ttl; doyen renews on its own thread."""
    session = doyen.connect("memory://blocked", ttl_s=1.0)
    async with session, session.campaign("e") as term:
        time.sleep(1.5)  # noqa: ASYNC251 - this is what is on trial
        assert term.valid
        await asyncio.sleep(0)
        assert term.valid


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end of a pipe that nobody reads: whoever writes to it waits."""
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, bytes(4096))
    os.set_blocking(full, True)
    yield full
    os.close(unread)  # whoever waits there has an error now
    until_blocking(lambda: not doyens_threads())  # what they hold back is not the next test's
    os.close(full)


def doyens_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("doyen")]


@pytest.mark.parametrize("stuck", ["audit", "log", "sink"])
def test_a_blocking_sink_costs_no_lease(full_pipe: int, stuck: str) -> None:
    """An audit log, a logging handler or a sink of the user's that hangs for ever."""
    renewals = 0

    def count(record: Record) -> None:
        nonlocal renewals
        renewals += isinstance(record.event, Renewed)

    def hang(_: object) -> None:
        with contextlib.suppress(OSError):
            os.write(full_pipe, b"x")

    class Hanging(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            hang(record)

    handler = Hanging()
    logger, level = logging.getLogger("doyen"), logging.getLogger("doyen").level
    sinks = (count, hang) if stuck == "sink" else (count,)
    audit = f"/proc/self/fd/{full_pipe}" if stuck == "audit" else None
    if stuck == "log":
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        settings = SessionSettings(url="memory://stuck", ttl_s=0.6, audit=audit, sinks=sinks)
        began = time.monotonic()
        with BlockingSession(settings) as session, session.campaign("e") as term:
            until_blocking(lambda: renewals >= 6)
            assert term.valid
        assert time.monotonic() < began + 10.0
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_log_lines_reach_the_handlers_in_order_before_the_session_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "doyen")
    with doyen.connect_blocking("memory://logged") as session, session.campaign("e"):
        pass
    kinds = [line.getMessage().split()[0] for line in caplog.records]
    events = ["store_opened", "lease_granted", "elected", "resigned"]
    assert kinds == [f"event={event}" for event in events]
    assert {line.threadName for line in caplog.records} == {"doyen"}
    assert not doyens_threads()


def test_log_lines_that_are_dropped_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doyen.events.telemetry.QUEUED", 5)
    logged, go_on = [], threading.Event()

    class Stuck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            go_on.wait(20.0)
            logged.append(record.getMessage())

    logger, handler = logging.getLogger("doyen"), Stuck()
    logger.addHandler(handler)
    runtime = ThreadRuntime.acquire()
    try:
        for number in range(20):
            logger.warning("line %d", number)
        go_on.set()
        runtime.flush_log(20.0)
    finally:
        runtime.release()
        logger.removeHandler(handler)
    assert logged[:2] == ["line 0", "line 1"]
    dropped = int(logged[-1].partition("event=log_lines_dropped lines=")[2].split()[0])
    assert len(logged) - 1 + dropped == 21  # with the line that says that lines are dropped


async def test_renewing_on_the_callers_loop_would_lose_it() -> None:
    """The same on one loop: what the thread is for."""
    clock = SystemClock()
    store = MemoryStore(real_server(), Context(clock, lambda event: None))
    settings = SessionSettings(url="memory://", ttl_s=1.0)
    async with doyen.Session(settings, InlineRuntime(clock), store) as session:
        with pytest.raises(LeadershipLost):
            async with session.campaign("e") as term:
                time.sleep(1.5)  # noqa: ASYNC251 - this is what is on trial
                assert not term.valid


async def test_the_watchdog_trips_although_doyens_own_loop_hangs() -> None:
    """A store adapter that blocks, say: the body is ended in time by a thread that does no I/O."""
    async with doyen.connect("memory://hung", ttl_s=1.0) as session:
        release = threading.Event()

        def hang() -> None:
            release.wait(30)

        try:
            with pytest.raises(LeadershipLost, match="no renewal was confirmed in time"):
                async with session.campaign("e") as term:
                    deadline = term.valid_until
                    core_of(session).runtime.post(hang)
                    try:
                        await asyncio.sleep(30)
                    finally:
                        told_at = SystemClock().now()
                        release.set()
            assert deadline <= told_at < deadline + 1.0
        finally:
            release.set()


async def test_a_term_is_watched_if_doyens_loop_hangs_just_after_the_caller_was_told() -> None:
    """In what was to be done next on the loop, as files of the store are opened there."""
    release = threading.Event()
    runtime = ThreadRuntime.acquire()
    done: list[str] = []

    def hang() -> None:
        release.wait(10)
        done.append("hung")

    async def work() -> str:
        asyncio.get_running_loop().call_soon(hang)
        runtime.after_reply(partial(done.append, "watched"))
        return "elected"

    try:
        assert await runtime.do(work()) == "elected"
        await until(lambda: done)
        assert done == ["watched"]
    finally:
        release.set()
        runtime.release()


async def test_a_closed_loop_does_not_break_the_watchdog() -> None:
    """One body's loop is closed in mid-term. The watchdog's word to it goes nowhere; the body
    next to it, on the same lease, is notified all the same."""
    server, faults = real_server(), Faults()

    async with real_session(server, faults, ttl_s=1.0) as session:
        gone = asyncio.new_event_loop()
        abandoned = await asyncio.to_thread(
            gone.run_until_complete, session.campaign("abandoned").__aenter__()
        )
        gone.close()
        with pytest.raises(LeadershipLost):
            async with session.campaign("e"):
                faults.cut()
                await asyncio.sleep(30)
        assert not abandoned.valid
        faults.heal()
        async with session.campaign("e", wait_s=5):
            pass
        # That scope can never be left; it would keep doyen's thread for ever.
        core_of(session).runtime.release()


async def test_sessions_share_one_thread_that_ends_with_the_last() -> None:
    def threads() -> list[str]:
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("doyen"))

    first, second = doyen.connect("memory://x"), doyen.connect("memory://y")
    async with first, second, first.campaign("e"), second.campaign("e"):
        assert threads() == ["doyen", "doyen-watchdog"]
    assert threads() == []


async def test_a_connection_cancelled_half_way_leaves_no_thread(tmp_path: Path) -> None:
    for _ in range(20):
        entering = asyncio.create_task(doyen.connect(f"sqlite:///{tmp_path}/d.db").__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
    assert not ThreadRuntime._shared


def test_a_session_cancelled_when_it_had_been_opened_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was opened on doyen's thread, and the caller's loop had not seen it yet."""
    opened: queue.SimpleQueue[SessionCore] = queue.SimpleQueue()
    opening = SessionCore.open

    async def tell(*args: Any, **options: Any) -> SessionCore:
        core = await opening(*args, **options)
        opened.put(core)
        return core

    monkeypatch.setattr(SessionCore, "open", tell)

    async def main() -> None:
        entering = asyncio.create_task(doyen.connect(f"sqlite:///{tmp_path}/d.db").__aenter__())
        await asyncio.sleep(0)
        core = opened.get(timeout=20.0)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        with pytest.raises(doyen.SessionClosed):
            core.check_open()

    before = set(threading.enumerate())
    asyncio.run(main())
    assert not ThreadRuntime._shared
    assert set(threading.enumerate()) <= before


def test_an_interrupt_when_the_session_had_been_opened_closes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[SessionCore] = []
    opening, caller = SessionCore.open, threading.get_ident()

    async def interrupted(*args: Any, **options: Any) -> SessionCore:
        opened.append(await opening(*args, **options))
        await until(lambda: sys._current_frames()[caller].f_code.co_name == "wait", 20)
        os.kill(os.getpid(), signal.SIGINT)
        with contextlib.suppress(asyncio.CancelledError):  # which comes too late
            await asyncio.sleep(20.0)
        return opened[0]

    monkeypatch.setattr(SessionCore, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        doyen.connect_blocking("memory://interrupted").__enter__()
    with pytest.raises(doyen.SessionClosed):
        opened[0].check_open()
    assert not ThreadRuntime._shared


async def test_a_body_that_outlives_its_session_still_ends_in_loss() -> None:
    """doyen's thread goes on until the last scope is left."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        async with session.campaign("e"):
            entered.set()
            try:
                await asyncio.sleep(30)
            finally:
                await leave.wait()

    async with doyen.connect("memory://outlived", ttl_s=0.5) as session:
        task = asyncio.create_task(body())
        await entered.wait()
    leave.set()
    with pytest.raises(LeadershipLost, match="the session was closed"):
        await task
    assert not ThreadRuntime._shared


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
async def test_the_whole_way_on_real_threads(scheme: str, tmp_path: Path) -> None:
    url = "memory://whole" if scheme == "memory" else f"sqlite:///{tmp_path}/doyen.db"
    seen: list[str | None] = []
    tokens: list[int] = []

    async def candidate(name: str) -> None:
        async with doyen.connect(url, ttl_s=2.0) as session:
            for _ in range(2):
                async with session.campaign("e", name=name) as term:
                    tokens.append(term.token)
                    leader = await session.leader("e")
                    assert leader is not None
                    assert (leader.name, leader.token) == (name, term.token)

    async with doyen.connect(url, ttl_s=2.0) as watcher:
        watching = asyncio.create_task(gather_leaders(watcher, seen))
        await until(lambda: seen == [None], 10)
        await asyncio.gather(*(candidate(name) for name in "abc"))
        await until(lambda: len(seen) > 1 and seen[-1] is None, 10)
        watching.cancel()
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 6


def test_a_second_cancellation_does_not_stop_the_closing_on_threads() -> None:
    server, faults = real_server(), Faults()

    async def use() -> None:
        async with real_session(server, faults, ttl_s=2.0) as session, session.campaign("e"):
            faults.next("delete", Late(before_s=0.2))
            faults.next("revoke", Late(before_s=0.2))
            entered.set()
            await asyncio.sleep(30)

    async def main() -> None:
        task = asyncio.create_task(use())
        await entered.wait()
        while not task.done():
            task.cancel()
            await asyncio.sleep(0.01)
        assert task.cancelled()

    entered = asyncio.Event()
    asyncio.run(main())
    assert server._leases == {}
    assert not ThreadRuntime._shared


async def test_an_audit_log_that_hangs_on_opening_does_not_block_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system whose server is gone. Whoever gives up leaves no file open."""
    asked, back, closed = threading.Event(), threading.Event(), threading.Event()

    class Hanging(doyen.audit.AuditLog):
        def __init__(self, path: str) -> None:
            asked.set()
            back.wait(20)
            super().__init__(path)

        def close(self) -> None:
            super().close()
            closed.set()

    monkeypatch.setattr(doyen.audit, "AuditLog", Hanging)

    async with doyen.connect("memory://x") as session, session.campaign("e") as term:
        opening = asyncio.ensure_future(
            doyen.connect("memory://y", audit=tmp_path / "audit").__aenter__()
        )
        assert await asyncio.to_thread(asked.wait, 20)
        async with asyncio.timeout(20):
            await session.leader("e")
            opening.cancel()
            await asyncio.wait({opening})
        assert opening.cancelled()
        assert term.valid
        back.set()
        assert await asyncio.to_thread(closed.wait, 20)
