"""Programs that run on the main thread of the leader: how they are interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import doyen
from doyen import LeadershipLost, Term
from doyen.errors import ConfigError, NotElected
from doyen.integrations import programs
from doyen.integrations.programs import TERMINATED, Interrupted, current_term, lead
from support import until_blocking

LONG_S = 30.0


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """The default for SIGTERM, and no handler left behind."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGURG)
    yield
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGURG)) == handlers
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def meanwhile() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Do something on another thread while this one leads."""
    threads: list[threading.Thread] = []

    def start(call: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=call))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def connect(store: str) -> Callable[[], doyen.BlockingSession]:
    return partial(doyen.connect_blocking, store, ttl_s=5)


def resign(store: str) -> None:
    with doyen.connect_blocking(store) as session:
        until_blocking(lambda: session.leader("e"))
        session.resign("e")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def sleep() -> None:
    threading.Event().wait(LONG_S)


def sleep_on_a_loop() -> None:
    asyncio.run(asyncio.sleep(LONG_S))


def sleep_whatever_happens() -> None:
    while True:
        try:
            sleep()
        except Exception:  # noqa: BLE001 - what many programs do
            pytest.fail("the interrupt was caught")


@pytest.mark.parametrize("wait", [sleep, sleep_on_a_loop, sleep_whatever_happens])
def test_a_loss_interrupts_the_program_which_runs_again_in_the_next_term(
    store: str, meanwhile: Any, wait: Callable[[], None]
) -> None:
    terms: list[Term] = []
    cleaned: list[int] = []

    def program(term: Term) -> str:
        assert current_term() is term
        terms.append(term)
        if len(terms) == 2:
            return "done"
        meanwhile(lambda: resign(store))
        try:
            wait()
        finally:
            cleaned.append(term.token)
        return "not interrupted"

    assert lead(connect(store), "e", program) == "done"
    assert [term.token for term in terms] == sorted({term.token for term in terms})
    assert cleaned == [terms[0].token]
    with pytest.raises(LeadershipLost, match="there is no term"):
        current_term()


def test_a_handler_that_the_program_installs_is_called_instead(store: str, meanwhile: Any) -> None:
    rounds: list[threading.Event] = []

    def program(term: Term) -> int:
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        rounds.append(stop)
        if len(rounds) == 1:
            meanwhile(lambda: resign(store))
        else:
            terminate()
        assert stop.wait(LONG_S)
        return len(rounds)

    assert lead(connect(store), "e", program) == 2


def test_after_a_loss_nothing_more_is_run_with_once(store: str, meanwhile: Any) -> None:
    def program(term: Term) -> None:
        meanwhile(lambda: resign(store))
        sleep()

    with pytest.raises(LeadershipLost):
        lead(connect(store), "e", program, once=True)


def test_sigterm_ends_the_program_and_the_term(store: str) -> None:
    cleaned = False

    def program(term: Term) -> None:
        nonlocal cleaned
        try:
            terminate()
            sleep()
        finally:
            cleaned = True

    with pytest.raises(Interrupted) as ended:
        lead(connect(store), "e", program)
    assert (ended.value.code, cleaned) == (TERMINATED, True)
    with doyen.connect_blocking(store) as session:
        assert session.leader("e") is None


def test_sigterm_ends_the_wait_to_be_elected(store: str, meanwhile: Any) -> None:
    def terminate_when_in_line(session: doyen.BlockingSession) -> None:
        until_blocking(lambda: len(session.line("e")) == 2)
        terminate()

    with doyen.connect_blocking(store) as session, session.campaign("e"):
        meanwhile(partial(terminate_when_in_line, session))
        with pytest.raises(Interrupted) as ended:
            lead(connect(store), "e", lambda term: pytest.fail("elected"))
        assert ended.value.code == TERMINATED
        until_blocking(lambda: len(session.line("e")) == 1)


def test_a_handler_that_was_there_is_kept(store: str) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    try:
        lead(connect(store), "e", lambda term: terminate())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [signal.SIGTERM]


def test_errors_of_the_program_and_of_the_campaign_are_raised(store: str) -> None:
    def fail(term: Term) -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        lead(connect(store), "e", fail)
    with (
        doyen.connect_blocking(store) as session,
        session.campaign("e"),
        pytest.raises(NotElected),
    ):
        lead(connect(store), "e", fail, wait_s=0)
    with pytest.raises(ConfigError):
        lead(lambda: pytest.fail("connected"), "", fail)


def test_on_another_thread_the_program_watches_its_term(store: str) -> None:
    ended: list[bool] = []

    def program(term: Term) -> None:
        resigning = threading.Thread(target=lambda: resign(store))
        resigning.start()
        ended.append(term.wait_lost(LONG_S))

    def run() -> None:
        with pytest.raises(LeadershipLost):
            lead(connect(store), "e", program, once=True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == [True]


def test_a_program_that_is_not_interrupted_would_outlive_its_term(
    store: str, meanwhile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would notice it if nothing were interrupted."""
    monkeypatch.setattr(programs._Interrupts, "_on_loss", lambda *_: None)
    outlived: list[bool] = []

    def program(term: Term) -> None:
        if not outlived:
            meanwhile(lambda: resign(store))
            assert term.wait_lost(LONG_S)
            threading.Event().wait(0.1)  # the time in which it would have been interrupted
            outlived.append(not term.valid)

    lead(connect(store), "e", program)
    assert outlived == [True]
