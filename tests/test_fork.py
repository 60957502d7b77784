"""After a fork the child leads nothing and harms nothing; the parent goes on leading."""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import doyen
from doyen import BlockingSession, SessionClosed, Term, TermState
from doyen.election.options import SessionSettings
from doyen.events import Hindered, Record
from doyen.events.telemetry import DeliveryQueue
from doyen.lease.clock import SystemClock
from doyen.lease.runtime import ThreadRuntime
from doyen.stores.port import Context, open_store
from doyen.stores.sqlite import forks
from doyen.stores.sqlite.forks import connections
from doyen.stores.sqlite.store import SQLiteStore
from doyen.stores.sqlite.tables import Transaction
from support import core_of, keepalive_of, until_blocking

# From 3.12 on Python warns of forks in a process with threads, which is what is on trial here.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

numbers = count()


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://fork-{next(numbers)}"
    return f"sqlite:///{tmp_path}/doyen.db"


def in_child(check: Callable[[], None], timeout_s: int = 20) -> None:
    """Run `check` in a forked child and fail if it failed there."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(timeout_s)  # a child that hangs is killed
        try:
            check()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(writing, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert (os.waitstatus_to_exitcode(status), said) == (0, "")


def renewals(session: Any) -> Callable[[], int]:
    """How often the session has been renewed from now on."""
    seen: list[float] = []
    keepalive_of(session).on_renewal(seen.append)
    return lambda: len(seen)


def refused(session: BlockingSession) -> None:
    for use in (
        lambda: session.leader("e"),
        lambda: session.campaign("other").__enter__(),
        lambda: next(session.observe("e")),
    ):
        with pytest.raises(SessionClosed, match=r"belongs to process \d+, which .*connect again"):
            use()


def test_the_child_leads_nothing_and_the_parent_goes_on(url: str) -> None:
    with doyen.connect_blocking(url, ttl_s=1.5) as session:
        with session.campaign("e", name="parent") as term:

            def check() -> None:
                assert not term.valid
                assert term.state is TermState.LOST
                assert term.remaining_s == 0
                with pytest.raises(doyen.LeadershipLost, match="belongs to the parent process"):
                    term.check()
                assert term.wait_lost(20), "no thread of the child would end the wait"
                assert "belongs to the parent" in asyncio.run(term.lost())
                refused(session)

            renewed = renewals(session)
            in_child(check)
            # The child's end has released nothing that is the parent's.
            assert term.valid
            leader = session.leader("e")
            assert leader is not None
            assert leader.token == term.token
            until_blocking(lambda: renewed() >= 3)
            assert term.state is TermState.LEADER
        assert session.leader("e") is None


def test_leaving_the_scopes_in_the_child_releases_nothing(url: str) -> None:
    """The child runs on to the end of both `with` blocks, as a careless worker does."""
    session = doyen.connect_blocking(url, ttl_s=1.5)
    parent = os.getpid()
    child = None
    try:
        with session, session.campaign("e", name="parent") as term:
            renewed = renewals(session)
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                until_blocking(lambda: renewed() >= 2)
                assert term.valid
                assert session.leader("e") is not None
    except SessionClosed as error:
        if os.getpid() == parent:
            raise
        os._exit(0 if "belongs to the parent process" in str(error) else 3)
    finally:
        if os.getpid() != parent:
            os._exit(4)
    assert child is not None
    assert term.state is TermState.ENDED


def test_a_child_that_exits_within_the_scopes_exits_as_it_wants(url: str) -> None:
    parent, child, code = os.getpid(), 0, 9
    try:
        with doyen.connect_blocking(url) as session, session.campaign("e") as term:
            child = os.fork()
            if not child:
                sys.exit(7)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert term.valid
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    finally:
        if os.getpid() != parent:
            os._exit(8)
    assert code == 7


def test_the_child_may_connect_for_itself(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/doyen.db"
    with (
        doyen.connect_blocking(url, ttl_s=2) as session,
        session.campaign("e", name="parent") as term,
    ):

        def check() -> None:
            with doyen.connect_blocking(url, ttl_s=2) as own:
                leader = own.leader("e")
                assert leader is not None
                assert (leader.name, leader.token) == ("parent", term.token)
                with pytest.raises(doyen.NotElected, match="'parent' leads"):
                    own.campaign("e", wait_s=0).__enter__()
                with own.campaign("other", name="child") as mine:
                    assert mine.valid

        in_child(check)
        assert term.valid


def test_reporting_in_the_parent_does_not_delay_a_child(tmp_path: Path) -> None:
    """The queues of the parent have no thread in the child, and their locks may be held there."""
    audit = tmp_path / "audit.jsonl"
    handler = logging.FileHandler(tmp_path / "log")
    logger = logging.getLogger("doyen")
    stuck = threading.Event()

    def sink(_: Record) -> None:
        stuck.wait(20)

    settings = SessionSettings(url="memory://reports", ttl_s=5, audit=audit, sinks=(sink,))
    logger.addHandler(handler)
    try:
        with BlockingSession(settings) as session, session.campaign("e"):
            queues = [*core_of(session).telemetry._outlets, session._runtime._log._lines]
            locks = [queue._changed for queue in queues if isinstance(queue, DeliveryQueue)]
            assert len(locks) == 3

            def check() -> None:
                logger.warning("the child speaks for itself")
                core_of(session).telemetry.emit(Hindered(election="e", name="n", error="x"))
                atexit._run_exitfuncs()

            holding, forked = threading.Event(), threading.Event()

            def hold() -> None:
                with locks[0], locks[1], locks[2]:
                    holding.set()
                    forked.wait(20)

            holder = threading.Thread(target=hold)
            holder.start()
            assert holding.wait(20)
            try:
                in_child(check)
            finally:
                forked.set()
                stuck.set()
                holder.join()
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert "the child speaks for itself" in (tmp_path / "log").read_text()
    assert b"hindered" not in audit.read_bytes()


def test_the_child_may_connect_asynchronously(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/doyen.db"
    with doyen.connect_blocking(url, ttl_s=2) as session, session.campaign("e") as term:

        async def connect() -> None:
            async with doyen.connect(url, ttl_s=2) as own, own.campaign("other") as mine:
                assert mine.valid

        in_child(lambda: asyncio.run(connect()))
        assert term.valid


class Child:
    """A forked process with a session of its own. Step by step it leads an election and ends."""

    def __init__(self, url: str, election: str) -> None:
        self._reports, reporting = os.pipe()
        waiting, self._orders = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._orders)
            signal.alarm(20)
            try:
                with doyen.connect_blocking(url, ttl_s=2) as own:
                    os.write(reporting, b"open")
                    os.read(waiting, 1)
                    with own.campaign(election, name="child") as term:
                        os.write(reporting, b"leads")
                        os.read(waiting, 1)
                        os.write(reporting, b"still valid, " if term.valid else b"lost, ")
                    os.write(reporting, b"ended")
            except BaseException as error:  # noqa: BLE001 - told to the parent
                os.write(reporting, repr(error).encode())
            finally:
                os._exit(0)
        os.close(reporting)
        os.close(waiting)
        assert self.said() == "open"

    def said(self) -> str:
        return os.read(self._reports, 4000).decode()

    def lead(self) -> None:
        os.write(self._orders, b"x")
        assert self.said() == "leads"

    def end(self) -> None:
        os.close(self._orders)
        with open(self._reports) as reports:
            assert reports.read() == "still valid, ended"
        os.waitpid(self.pid, 0)


def test_the_parents_end_does_not_take_the_database_from_the_child(tmp_path: Path) -> None:
    """SQLite in the child would rely on locks of the parent, which end with the parent's close:
    the child would go on with a log that others no longer read, and both would lead."""
    url = f"sqlite:///{tmp_path}/doyen.db"
    with doyen.connect_blocking(url, ttl_s=2) as session:
        assert session.leader("e") is None
        child = Child(url, "e")
    child.lead()
    with (
        doyen.connect_blocking(url, ttl_s=2) as other,
        pytest.raises(doyen.NotElected, match="'child' leads"),
    ):
        other.campaign("e", wait_s=0).__enter__()
    child.end()


def submit(session: BlockingSession, write: Callable[[Transaction], None]) -> None:
    """Have the thread of the session's database execute `write`."""

    def submitted() -> None:
        store = core_of(session).store
        assert isinstance(store, SQLiteStore)
        store._database.submit(write)

    session._runtime.post(submitted)


def test_a_fork_waits_for_a_transaction(tmp_path: Path) -> None:
    """A lock that the parent held during the fork would never become free in the child."""
    url = f"sqlite:///{tmp_path}/doyen.db"
    with doyen.connect_blocking(url, ttl_s=2) as session:
        began = threading.Event()

        def write(_: Transaction) -> None:
            began.set()
            deadline = time.monotonic() + 10
            while not connections().forking and time.monotonic() < deadline:
                time.sleep(0.001)

        submit(session, write)
        assert began.wait(20)
        child = Child(url, "e")
        child.lead()
        leader = session.leader("e")
        assert leader is not None
        assert leader.name == "child"
        child.end()


def test_a_file_whose_write_outlasts_the_patience_of_a_fork_is_refused_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "FORK_WAIT_S", 0.05)
    url = f"sqlite:///{tmp_path}/doyen.db"
    with doyen.connect_blocking(url, ttl_s=2) as session:
        began, forked = threading.Event(), threading.Event()

        def write(_: Transaction) -> None:
            began.set()
            forked.wait(20)

        submit(session, write)
        assert began.wait(20)

        def check() -> None:
            with pytest.raises(doyen.StoreUnusable, match="forked while its parent was writing"):
                doyen.connect_blocking(url, ttl_s=2).open()
            with doyen.connect_blocking(f"sqlite:///{tmp_path}/other.db") as own:
                assert own.leader("e") is None

        try:
            in_child(check)
        finally:
            forked.set()
        assert session.leader("e") is None


def test_a_file_that_was_replaced_during_a_fork_is_not_opened_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/doyen.db"
    with doyen.connect_blocking(url, ttl_s=2) as session:
        assert session.leader("e") is None

        def check() -> None:
            (tmp_path / "doyen.db").rename(tmp_path / "moved.db")

        in_child(check)
        with pytest.raises(doyen.StoreUnusable, match="removed or replaced while in use"):
            session.leader("e")
        assert not (tmp_path / "doyen.db").exists()


async def test_a_store_that_is_being_closed_is_abandoned_in_the_child(tmp_path: Path) -> None:
    url, context = f"sqlite:///{tmp_path}/doyen.db", Context(SystemClock(), lambda _: None)
    store = await open_store(url, context)
    assert isinstance(store, SQLiteStore)
    inbox = store._inbox.fd
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    assert store._inbox.fd == inbox  # it has been told to close, and has not begun

    def check() -> None:
        store.forked()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(inbox)

    in_child(check)
    await closing


def test_a_fork_under_load_leaves_no_lock_held_in_the_child(url: str) -> None:
    """Whatever doyen's threads were doing at that instant, holding locks above all."""
    with doyen.connect_blocking(url, ttl_s=1.5) as session, session.campaign("e") as term:
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                with session.campaign("busy"):
                    pass

        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads:
            thread.start()

        def check() -> None:
            assert not term.valid
            with (
                doyen.connect_blocking(f"memory://child-{os.getpid()}") as own,
                own.campaign("e") as mine,
            ):
                assert mine.valid

        try:
            for _ in range(5):
                in_child(check)
        finally:
            stop.set()
            for thread in threads:
                thread.join(10)
        assert term.valid


def child_of_multiprocessing(term: Term, answers: Any) -> None:
    answers.put((term.valid, term.state.value, not ThreadRuntime._shared))


def test_multiprocessing_by_fork() -> None:
    context = multiprocessing.get_context("fork")
    with (
        doyen.connect_blocking(f"memory://fork-{next(numbers)}") as session,
        session.campaign("e") as term,
    ):
        answers = context.SimpleQueue()
        process = context.Process(target=child_of_multiprocessing, args=(term, answers))
        process.start()
        assert answers.get() == (False, "lost", True)
        process.join(20)
        assert process.exitcode == 0
        assert term.valid


def test_a_session_closed_before_the_fork_has_no_effect() -> None:
    with doyen.connect_blocking(f"memory://fork-{next(numbers)}") as session:
        pass

    def check() -> None:
        with pytest.raises(SessionClosed, match="connect again"):
            session.leader("e")

    in_child(check)
