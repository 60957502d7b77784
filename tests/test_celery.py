"""Celery: of several beats only the leader sends tasks, and its successor goes on from there."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.apps.beat import Beat
from celery.beat import Service
from celery.signals import before_task_publish

import doyen
from doyen.integrations import last_runs
from doyen.integrations.celery import LeaderScheduler
from doyen.integrations.last_runs import LastRuns
from doyen.integrations.signals import Uninterrupted
from framework_crew import PROMPT_S, crew
from support import until_blocking


def test_beats_are_handed_over(tmp_path: Path) -> None:
    with crew("celery", tmp_path) as processes:
        term = processes.next_term()
        took_s, after = processes.hand_over(term)
        assert took_s < PROMPT_S
        assert processes.ended_before(term, after)
        terminated = next(each for each in processes.processes if each.pid == term.pid)
        assert terminated.wait(60) == 0
        processes.judge()


Make = Callable[..., LeaderScheduler]
TTL_S = 3.0
"""A sixth of it is the stop budget."""


@pytest.fixture
def make(store: str) -> Iterator[Make]:
    made: list[LeaderScheduler] = []

    def make(**schedule: float) -> LeaderScheduler:
        app = Celery("app", broker="memory://")
        app.conf.update(doyen_store=store, doyen_options={"ttl_s": TTL_S})
        app.conf.beat_schedule = {
            name: {"task": name, "schedule": seconds} for name, seconds in schedule.items()
        }
        made.append(LeaderScheduler(app=app))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def sent() -> Iterator[list[str]]:
    names: list[str] = []

    def record(sender: str, **_: Any) -> None:
        names.append(sender)

    before_task_publish.connect(record)
    yield names
    before_task_publish.disconnect(record)


def lead(scheduler: LeaderScheduler) -> None:
    """Have the scheduler tick until it leads, and once more."""
    until_blocking(lambda: scheduler.tick() > 0)


def taken_over(make: Make, sent: list[str]) -> list[str]:
    """Have a beat take over that was started long ago. Returns what it sends."""
    first, second = make(hourly=3600), make(hourly=3600)
    for each in (first, second):  # both have been started an hour ago
        entry = each.schedule["hourly"]
        entry.last_run_at -= timedelta(hours=1)
    lead(first)
    assert sent == ["hourly"]
    assert second.tick() == 0
    first.close()
    lead(second)
    return sent[1:]


def test_a_successor_goes_on_where_the_leader_stopped(make: Make, sent: list[str]) -> None:
    assert taken_over(make, sent) == []


def test_the_test_above_notices_if_it_does_not(
    make: Make, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_runs.LastRuns, "note", lambda *_: None)
    assert taken_over(make, sent) == ["hourly"]


def test_a_beat_whose_candidacy_has_failed_ends(make: Make) -> None:
    scheduler = make(hourly=3600)
    lead(scheduler)
    leader = scheduler._leader
    assert leader is not None
    leader._life._fail(ValueError("wrong"))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="wrong"):
        scheduler.tick()


def test_a_task_that_is_being_sent_is_sent_before_another_leads(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    first, second = make(often=0.001), make(often=0.001)
    sending, go_on = threading.Event(), threading.Event()

    def slow(self: LeaderScheduler, *_: Any, **__: Any) -> None:
        happened.append("first" if self is first else "second")
        if self is first:
            sending.set()
            assert go_on.wait(20)
            happened.append("first has sent it")

    monkeypatch.setattr(LeaderScheduler, "apply_async", slow)
    ticking = threading.Thread(
        target=lambda: until_blocking(lambda: first.tick() or sending.is_set())
    )
    ticking.start()
    assert sending.wait(20)
    assert second.tick() == 0
    leader = first._leader
    assert leader is not None
    closing = threading.Thread(target=leader.close)
    closing.start()
    until_blocking(lambda: not leader.leads)
    assert second.tick() == 0
    go_on.set()
    ticking.join()
    closing.join()
    until_blocking(lambda: second.tick() >= 0 and "second" in happened)
    assert happened[:3] == ["first", "first has sent it", "second"]


@contextlib.contextmanager
def handled_by_celery(scheduler: LeaderScheduler) -> Iterator[None]:
    """Have Celery's own handler of SIGTERM, which closes the scheduler and raises SystemExit."""
    service = Service(scheduler.app)
    service.__dict__["scheduler"] = scheduler
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    Beat(app=scheduler.app).install_sync_handler(service)
    installed = signal.getsignal(signal.SIGTERM)
    try:
        yield
        assert signal.getsignal(signal.SIGTERM) is installed, "not restored"
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def stopped_while_sending(
    scheduler: LeaderScheduler, monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]
) -> list[str]:
    """Have SIGTERM come while a task is being sent, which takes as long as `wait`. Returns what
    has happened when beat has ended."""
    happened: list[str] = []

    def send(*_: Any, **__: Any) -> None:
        happened.append("begun")
        signal.raise_signal(signal.SIGTERM)
        wait()
        happened.append("sent")

    monkeypatch.setattr(scheduler, "apply_async", send)
    with handled_by_celery(scheduler):
        with pytest.raises(SystemExit):
            until_blocking(lambda: scheduler.tick() < 0)
        scheduler.close()  # as beat does when it ends
    return happened


def test_sigterm_waits_for_the_task_that_is_being_sent(
    make: Make, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make(often=0.001)
    with doyen.connect_blocking(store) as session:

        def still_leads() -> None:
            leader = scheduler._leader
            assert leader is not None
            until_blocking(lambda: not leader.leads)  # it is to be released
            assert session.leader(scheduler.election) is not None

        assert stopped_while_sending(scheduler, monkeypatch, still_leads) == ["begun", "sent"]
        assert session.leader(scheduler.election) is None
        assert "often" in LastRuns(session, scheduler.election, 10**9).times


def test_the_test_above_notices_if_sigterm_interrupts_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uninterrupted, "handle", lambda self, handler, *args: handler(*args))
    assert stopped_while_sending(make(often=0.001), monkeypatch, lambda: None) == ["begun"]


@pytest.mark.parametrize("hurry", ["a second signal", "the stop budget"])
def test_a_task_that_is_not_sent_in_time_is_interrupted(
    make: Make, monkeypatch: pytest.MonkeyPatch, hurry: str
) -> None:
    def hang() -> None:
        if hurry == "a second signal":
            signal.raise_signal(signal.SIGTERM)
        assert not threading.Event().wait(20)

    assert stopped_while_sending(make(often=0.001), monkeypatch, hang) == ["begun"]
