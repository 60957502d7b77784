"""The same API for ordinary code: on doyen's threads, the system's clock, and real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import doyen
from doyen import (
    AlreadyCampaigning,
    BlockingSession,
    ConfigError,
    LeadershipLost,
    NotElected,
    SessionClosed,
    Term,
    TermState,
)
from doyen.errors import StaleToken
from doyen.lease.runtime import ThreadRuntime
from doyen.model import Claim, line_key
from support import core_of, keepalive_of, until_blocking

names = (f"memory://blocking-{number}" for number in count())


@pytest.fixture
def url() -> str:
    return next(names)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    yield
    assert not ThreadRuntime._shared


def line(session: BlockingSession, election: str = "e") -> list[str]:
    core = core_of(session)
    tickets = session._runtime.do_blocking(core.store.list(line_key(election)))
    return [Claim.decode(ticket.value).name for ticket in tickets]


def lose(session: BlockingSession) -> None:
    keepalive_of(session).lose("the test says so")


def test_the_whole_way(url: str) -> None:
    with doyen.connect_blocking(url, ttl_s=2) as session:
        assert session.leader("e") is None
        with session.campaign("e", name="a", meta={"port": 8000}) as term:
            assert term.valid
            leader = session.leader("e")
            assert leader is not None
            assert (leader.name, leader.token, leader.meta) == ("a", term.token, {"port": 8000})
        assert term.state is TermState.ENDED
        assert session.leader("e") is None
        with session.campaign("e", name="a") as again:
            assert again.token > term.token


def test_leaving_raises_if_it_was_lost(url: str) -> None:
    with doyen.connect_blocking(url) as session:
        with (
            pytest.raises(LeadershipLost, match="'a' no longer leads 'e'"),
            session.campaign("e", name="a") as term,
        ):
            lose(session)
            assert term.wait_lost(10)
            assert not term.valid
        with pytest.raises(LeadershipLost) as lost, session.campaign("e", name="a"):
            lose(session)
            raise KeyError("of the body's own")
        assert isinstance(lost.value.__context__, KeyError)
        with pytest.raises(KeyboardInterrupt), session.campaign("e", name="a"):
            lose(session)
            raise KeyboardInterrupt
        with pytest.raises(KeyError), session.campaign("e", name="a"):
            raise KeyError


def test_campaigns_go_round_after_a_loss(url: str) -> None:
    tokens: list[int] = []
    with doyen.connect_blocking(url) as session:
        for campaign in session.campaigns("e"):
            with campaign as term:
                tokens.append(term.token)
                if len(tokens) == 3:
                    break
                lose(session)
                if len(tokens) == 2:
                    raise StaleToken("refused by the resource")
        with pytest.raises(KeyError):
            for campaign in session.campaigns("e"):
                with campaign:
                    lose(session)
                    raise KeyError
    assert tokens == sorted(set(tokens))


def test_threads_share_a_session(url: str) -> None:
    inside = 0
    tokens: list[int] = []

    def work(session: BlockingSession, name: str) -> None:
        nonlocal inside
        for _ in range(5):
            with session.campaign("e", name=name) as term:
                inside += 1
                assert inside == 1
                tokens.append(term.token)
                assert term.valid
                inside -= 1

    with doyen.connect_blocking(url) as session, ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, session, f"t{number}") for number in range(8)]:
            done.result(30)
    assert len(tokens) == 40
    assert tokens == sorted(set(tokens))


def test_waiting_has_a_bound(url: str) -> None:
    with (
        doyen.connect_blocking(url) as first,
        doyen.connect_blocking(url) as second,
        first.campaign("e", name="a"),
    ):
        for wait_s in (0, 0.05):
            with (
                pytest.raises(NotElected, match="'a' leads"),
                second.campaign("e", name="b", wait_s=wait_s),
            ):
                pytest.fail("entered without leading")
        until_blocking(lambda: line(first) == ["a"])


def test_nesting_and_entering_twice_are_refused(url: str) -> None:
    with doyen.connect_blocking(url) as session:
        with (
            session.campaign("e"),
            pytest.raises(AlreadyCampaigning, match="in this scope"),
            session.campaign("e"),
        ):
            pytest.fail("entered")
        campaign = session.campaign("e")
        with campaign:
            pass
        with pytest.raises(AlreadyCampaigning, match="entered once"):
            campaign.__enter__()
        with pytest.raises(SessionClosed, match="opened once"):
            session.__enter__()
    with pytest.raises(SessionClosed, match="connect again"):
        session.leader("e")
    with pytest.raises(SessionClosed, match="enter it with `with`"):
        doyen.connect_blocking(url).campaign("e")


def test_observing(url: str) -> None:
    seen: list[str | None] = []

    def watch(session: BlockingSession) -> None:
        for leader in session.observe("e"):
            seen.append(leader.name if leader else None)  # noqa: PERF401 - as it comes

    with ThreadPoolExecutor(1) as pool, doyen.connect_blocking(url) as other:
        with doyen.connect_blocking(url) as session:
            watching = pool.submit(watch, session)
            until_blocking(lambda: seen == [None])
            with other.campaign("e", name="a"):
                until_blocking(lambda: seen == [None, "a"])
            until_blocking(lambda: seen == [None, "a", None])
        with pytest.raises(SessionClosed, match="connect again"):
            watching.result(10)


def test_closing_ends_terms_and_waiting_threads(url: str) -> None:
    entered = threading.Event()
    terms: list[Term] = []

    def leads(session: BlockingSession) -> None:
        with session.campaign("e", name="a") as term:
            terms.append(term)
            entered.set()
            term.wait_lost(30)

    def waits(session: BlockingSession) -> None:
        with session.campaign("e", name="b"):
            pytest.fail("entered without leading")

    with ThreadPoolExecutor(2) as pool:
        with doyen.connect_blocking(url) as session:
            leading = pool.submit(leads, session)
            assert entered.wait(10)
            waiting = pool.submit(waits, session)
            until_blocking(lambda: line(session) == ["a", "b"])
        with pytest.raises(LeadershipLost, match="the session was closed"):
            leading.result(10)
        with pytest.raises(SessionClosed, match="connect again"):
            waiting.result(10)
    assert not terms[0].valid


# while_leader.


def lose_term(term: Term) -> None:
    """As the watchdog would: from another thread."""
    thread = threading.Thread(target=term._lose, args=("the test says so",))
    thread.start()
    thread.join()


def test_while_leader_returns_the_result_and_runs_again_after_a_loss(url: str) -> None:
    terms: list[Term] = []

    @doyen.while_leader("e", store=url, name="a", ttl_s=2)
    def work(term: Term, factor: int, *, plus: int) -> int:
        """Docs."""
        terms.append(term)
        if len(terms) == 1:
            lose_term(term)
        elif len(terms) == 2:
            lose_term(term)
            term.check()
        return factor * term.token + plus

    assert work(2, plus=1) == 2 * terms[-1].token + 1
    assert [term.state for term in terms] == [TermState.LOST, TermState.LOST, TermState.ENDED]
    assert (work.__name__, work.__doc__) == ("work", "Docs.")


def test_while_leader_async(url: str) -> None:
    terms: list[Term] = []

    @doyen.while_leader("e", store=url, name="a")
    async def work(term: Term, factor: int) -> int:
        terms.append(term)
        if len(terms) == 1:
            lose_term(term)
            await asyncio.sleep(30)
        return factor * term.token

    assert asyncio.run(work(2)) == 2 * terms[-1].token
    assert [term.state for term in terms] == [TermState.LOST, TermState.ENDED]


@pytest.mark.parametrize("lost", [True, False])
def test_while_leader_raises_the_functions_own_error(url: str, lost: bool) -> None:
    @doyen.while_leader("e", store=url)
    def work(term: Term) -> None:
        if lost:
            lose_term(term)
        raise KeyError

    @doyen.while_leader("e", store=url)
    async def async_work(term: Term) -> None:
        if lost:
            lose_term(term)
        raise KeyError

    with pytest.raises(KeyError):
        work()
    with pytest.raises(KeyError):
        asyncio.run(async_work())


async def test_while_leader_lets_cancellation_out(url: str) -> None:
    entered = asyncio.Event()

    @doyen.while_leader("e", store=url)
    async def work(term: Term) -> None:
        entered.set()
        await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Ctrl-C, in a process of its own.

WAITING = """
import sys, doyen
with doyen.connect_blocking(sys.argv[1], ttl_s=5) as session:
    try:
        with session.campaign("e", name="b"):
            print("entered", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.readline()
"""

LEADING = """
import sys, time, doyen
with doyen.connect_blocking(sys.argv[1], ttl_s=60) as session:
    with session.campaign("e", name="b") as term:
        print("entered", flush=True)
        time.sleep(30)
"""

LEADING_ASYNC = """
import asyncio, sys, doyen
async def main():
    async with doyen.connect(sys.argv[1], ttl_s=60) as session:
        async with session.campaign("e", name="b") as term:
            print("entered", flush=True)
            await asyncio.sleep(30)
asyncio.run(main())
"""


@pytest.fixture
def start() -> Any:
    """Starts scripts, and sees to it that none is left."""
    started: list[subprocess.Popen[str]] = []

    def run(script: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., "subprocess.Popen[str]"]


def test_interrupted_while_waiting_leaves_no_ticket(tmp_path: Path, start: Start) -> None:
    url = f"sqlite:///{tmp_path}/doyen.db"
    with doyen.connect_blocking(url, ttl_s=5) as session, session.campaign("e", name="a"):
        process = start(WAITING, url)
        until_blocking(lambda: line(session) == ["a", "b"])
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "interrupted\n"
        # The process and its session live on; the ticket alone is gone.
        until_blocking(lambda: line(session) == ["a"])
        assert process.poll() is None
        process.communicate("\n", timeout=10)
        assert process.returncode == 0


@pytest.mark.parametrize("script", [LEADING, LEADING_ASYNC])
def test_interrupted_while_leading_resigns(script: str, tmp_path: Path, start: Start) -> None:
    url = f"sqlite:///{tmp_path}/doyen.db"
    process = start(script, url)
    assert process.stdout is not None
    assert process.stdout.readline() == "entered\n"
    with doyen.connect_blocking(url, ttl_s=5) as session:
        leader = session.leader("e")
        assert leader is not None
        os.kill(process.pid, signal.SIGINT)
        with session.campaign("e", name="a", wait_s=30) as term:
            assert term.token > leader.token
    _, errors = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")


# What would run after the term.


def test_while_leader_refuses_generators(url: str) -> None:
    decorate = doyen.while_leader("e", store=url)

    def generator(term: Term) -> Any:
        yield term.valid

    async def async_generator(term: Term) -> Any:
        yield term.valid

    for function in (generator, async_generator):
        with pytest.raises(ConfigError, match="would run after the term"):
            decorate(function)


def test_while_leader_refuses_a_result_that_has_yet_to_run(url: str) -> None:
    async def work(term: Term) -> bool:
        return term.valid

    def promise(term: Term) -> object:
        return work(term)

    with pytest.raises(ConfigError, match="decorate the `async def` itself"):
        doyen.while_leader("e", store=url)(promise)()


def test_while_leader_on_a_method_wraps_it_bound(url: str) -> None:
    decorate = doyen.while_leader("e", store=url)

    class Worker:
        def work(self, term: Term, factor: int) -> int:
            return factor * term.valid

    with pytest.raises(ConfigError, match=r"wrap the bound method instead"):
        decorate(Worker.work)  # type: ignore[arg-type]
    doubled: int = decorate(Worker().work)(2)
    assert doubled == 2


def test_a_campaign_of_a_closed_session_leaves_other_sessions_alone(url: str) -> None:
    with doyen.connect_blocking(url) as closed:
        before = closed.campaign("e")
    for campaign in (before, closed.campaign("e")):
        with pytest.raises(SessionClosed, match="connect again"), campaign:
            pass
    with doyen.connect_blocking(url) as session:
        with pytest.raises(SessionClosed, match="connect again"), closed.campaign("e"):
            pass
        assert ThreadRuntime._shared == [core_of(session).runtime]
