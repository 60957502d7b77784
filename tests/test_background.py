"""Processes that campaign in the background: their tasks, their failures and their end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import doyen
from doyen import LeadershipLost, SessionClosed, StaleToken, Term
from doyen.errors import ConfigError
from doyen.integrations import background
from doyen.integrations.background import BackgroundLeadership, close_all, open_all
from support import promptly, until_blocking

LINGER_S, LONG_S = 0.1, 20.0


@pytest.fixture
def make(store: str) -> Iterator[Callable[..., BackgroundLeadership]]:
    """Make a leadership that is closed when the test ends."""
    made: list[BackgroundLeadership] = []

    def make(**options: Any) -> BackgroundLeadership:
        made.append(BackgroundLeadership("e", store, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[..., BackgroundLeadership]


def handed_over(make: Make, linger_s: float) -> list[str]:
    """Have a leader hand over to another. Its task ends when the other's begins, or after so long.
    Returns what happened."""
    happened: list[str] = []
    first, second = make(name="first"), make(name="second")
    begun = threading.Event()

    @first.task
    def slow(term: Term) -> None:
        happened.append("first begins")
        term.wait_lost()
        assert not first.leads
        begun.wait(linger_s)
        happened.append("first has ended")

    @second.task
    def begin(term: Term) -> None:
        happened.append("second begins")
        begun.set()
        term.wait_lost()

    first.open().wait()
    second.open()
    until_blocking(lambda: len(second.session.line("e")) == 2)
    first.close()
    until_blocking(lambda: "second begins" in happened)
    assert second.leads
    until_blocking(lambda: "first has ended" in happened)
    return happened


def test_nobody_else_leads_before_the_tasks_have_ended(make: Make) -> None:
    assert handed_over(make, LINGER_S) == ["first begins", "first has ended", "second begins"]


def test_the_test_above_notices_if_nobody_waits(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background._Task, "end", lambda *_: None)
    assert handed_over(make, LONG_S) == ["first begins", "second begins", "first has ended"]


def test_tasks_run_again_in_the_next_term(make: Make) -> None:
    leader, terms = make(), []

    @leader.task
    def work(term: Term) -> None:
        terms.append(term)
        term.wait_lost()

    @leader.task
    def migrate(term: Term) -> None:
        """Returns, and leadership goes on."""

    with leader:
        assert leader.open() is leader
        until_blocking(lambda: terms)
        leader.session.resign("e")
        until_blocking(lambda: len(terms) == 2)
        until_blocking(lambda: leader.leads)
    assert terms[0].token < terms[1].token
    assert not leader.leads
    with pytest.raises(SessionClosed, match="call `open` first"):
        _ = leader.session
    with pytest.raises(SessionClosed, match="call `open` first"):
        leader.wait()


@pytest.mark.parametrize("error", [LeadershipLost("stopped"), StaleToken("stale")])
def test_a_task_that_lost_its_term_campaigns_again(make: Make, error: Exception) -> None:
    leader, terms = make(), []

    @leader.task
    def work(term: Term) -> None:
        terms.append(term)
        if len(terms) == 1:
            raise error
        term.wait_lost()

    leader.open()
    until_blocking(lambda: len(terms) == 2)
    assert leader.failure is None


def test_a_task_that_fails_ends_the_candidacy(
    make: Make, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    leader, ended = make(), threading.Event()

    @leader.task
    def work(term: Term) -> None:
        term.wait_lost()
        ended.set()

    @leader.task
    def fail(term: Term) -> None:
        raise ValueError("wrong")

    with caplog.at_level(logging.ERROR, logger="doyen"):
        leader.open()
        assert ended.wait(20)
        until_blocking(lambda: isinstance(leader.failure, ValueError))
    until_blocking(lambda: "candidacy_failed" in caplog.text)
    with doyen.connect_blocking(store) as session:
        until_blocking(lambda: not session.line("e"))
    assert not leader.leads


def test_a_task_may_close(make: Make, store: str) -> None:
    leader = make()
    leader.task(lambda term: leader.close())
    leader.open()
    with doyen.connect_blocking(store) as session:
        until_blocking(lambda: session.history("e") and not session.line("e"))
    assert leader.failure is None


def test_the_process_may_end_with_a_failure(make: Make) -> None:
    leader, ended = make(on_failure="exit"), threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:

        @leader.task
        def fail(term: Term) -> None:
            raise ValueError("wrong")

        leader.open()
        assert ended.wait(20)
        leader.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_releases_before_the_handler_of_the_server_has_ended(make: Make) -> None:
    leader, released = make(), []

    def completes_requests(*_: object) -> None:
        until_blocking(lambda: not leader.leads)
        released.append(True)

    before = signal.signal(signal.SIGTERM, completes_requests)
    try:
        leader.open().wait()
        os.kill(os.getpid(), signal.SIGTERM)
        until_blocking(lambda: released)
        leader.close()
        assert signal.getsignal(signal.SIGTERM) is completes_requests
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_child_opens_for_itself(make: Make, store: str) -> None:
    """As with a server that loads the application before it forks its workers."""
    leader = make(name="parent")
    view = leader.view
    leader.open().wait()
    until_blocking(lambda: view.leader)
    child = os.fork()
    if not child:
        leads, code = leader.leads or view.leads or view.leader, 1
        try:
            leader.open()
            gc.collect()  # what the parent had
            mine = leader.session.line("e")
            until_blocking(lambda: view.leader)
            assert view.leader is not None
            names = {mine[0].name, view.leader.name}
            code = 0 if not leads and names == {"parent"} else 2
            leader.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert leader.leads


def test_a_server_opens_and_closes_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_made", weakref.WeakSet())
    leaders = [make(), make()]
    open_all()
    until_blocking(lambda: any(each.leads for each in leaders))
    close_all()
    for each in leaders:
        with pytest.raises(SessionClosed):
            _ = each.session


def test_mistakes_are_reported_when_the_object_is_made(make: Make) -> None:
    with pytest.raises(ConfigError, match="on_failure"):
        make(on_failure="ignore")
    with pytest.raises(ConfigError):
        BackgroundLeadership("")

    async def work(term: Term) -> None: ...

    with pytest.raises(ConfigError, match="ordinary function"):
        make().task(work)


def test_a_store_that_cannot_be_used_is_an_error_at_once() -> None:
    leader = BackgroundLeadership("e", "nonsense://")
    with pytest.raises(ConfigError):
        leader.open()


def test_asking_is_cheap(make: Make) -> None:
    leader = make()
    leader.open().wait()

    def asking_s() -> float:
        began = time.perf_counter()
        for _ in range(100):
            assert leader.leads
        return (time.perf_counter() - began) / 100

    promptly(asking_s, 0.0001)
