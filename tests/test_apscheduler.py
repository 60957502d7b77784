"""APScheduler: jobs run in the leader only, and are finished before the next one leads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from apscheduler.schedulers.background import BackgroundScheduler

from doyen.errors import ConfigError
from doyen.integrations import apscheduler as integration
from doyen.integrations.apscheduler import Leadership
from framework_crew import PROMPT_S, crew
from support import until_blocking


def test_jobs_are_handed_over(tmp_path: Path) -> None:
    with crew("apscheduler", tmp_path) as processes:
        term = processes.next_term()
        took_s, after = processes.hand_over(term)
        assert took_s < PROMPT_S
        assert processes.ended_before(term, after)
        processes.judge()


Make = Callable[..., tuple[Leadership, BackgroundScheduler]]


@pytest.fixture
def make(store: str) -> Iterator[Make]:
    made: list[BackgroundScheduler] = []

    def make(**options: Any) -> tuple[Leadership, BackgroundScheduler]:
        made.append(BackgroundScheduler())
        return Leadership(made[-1], "e", store, **options), made[-1]

    yield make
    for scheduler in made:
        if scheduler.running:
            scheduler.shutdown()


def handed_over(make: Make, linger_s: float) -> list[str]:
    """Have a leader with a running job hand over to another. The job goes on until that runs one,
    or so long. Returns what happened."""
    happened: list[str] = []
    (first, jobs), (second, others) = make(name="first"), make(name="second")
    running, begun = threading.Event(), threading.Event()

    def slow() -> None:
        running.set()
        until_blocking(lambda: not first.leads)
        begun.wait(linger_s)
        happened.append("the first job has ended")

    def other() -> None:
        happened.append("the second job runs")
        begun.set()

    jobs.add_job(slow, misfire_grace_time=None)
    others.add_job(other, "interval", seconds=0.02)
    first.start()
    assert running.wait(20)
    # APScheduler removes the job after it has begun, and fails if it is being shut down then.
    until_blocking(lambda: not jobs.get_jobs())
    second.start()
    until_blocking(lambda: len(second.session.line("e")) == 2)
    assert not happened
    first.session.resign("e")
    until_blocking(lambda: len({*happened}) == 2)
    return [*dict.fromkeys(happened)]


def test_a_running_job_is_finished_before_the_next_one_leads(make: Make) -> None:
    assert handed_over(make, 0.1) == ["the first job has ended", "the second job runs"]


def test_the_test_above_notices_if_nobody_waits(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration._Jobs, "_running", lambda _: False)
    assert handed_over(make, 20) == ["the second job runs", "the first job has ended"]


def test_a_running_job_is_finished_also_while_the_scheduler_is_shut_down(make: Make) -> None:
    """As by a handler of SIGTERM that shuts it down, while the term is being released."""
    (first, jobs), (second, _) = make(name="first"), make(name="second")
    running, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        running.set()
        assert go_on.wait(20)

    jobs.add_job(slow, misfire_grace_time=None)
    first.start()
    assert running.wait(20)
    second.start()
    until_blocking(lambda: len(second.session.line("e")) == 2)
    ending = [threading.Thread(target=jobs.shutdown), threading.Thread(target=first.close)]
    ending[0].start()
    until_blocking(lambda: not jobs.running)
    ending[1].start()
    until_blocking(lambda: not first.leads)
    assert not second.wait(0.3)  # the time in which it would have been elected
    go_on.set()
    assert second.wait(20)
    for each in ending:
        each.join()


def taken_over(make: Make) -> list[str]:
    """Have a process take over with a job that was due before. Returns what it ran."""
    (first, jobs), (second, others) = make(), make()
    ran: list[str] = []
    for scheduler, name in ((jobs, "first"), (others, "second")):
        options: Any = {"args": [name], "id": "hourly", "misfire_grace_time": None}
        scheduler.add_job(ran.append, "interval", hours=1, **options)
        scheduler.add_job(ran.append, args=[f"{name} once"], id="once", misfire_grace_time=None)
    first.start()
    until_blocking(lambda: "first once" in ran)
    second.start()
    until_blocking(lambda: len(second.session.line("e")) == 2)
    job = others.get_job("hourly")
    job.modify(next_run_time=job.next_run_time - timedelta(hours=1))  # when another led
    first.close()
    until_blocking(lambda: "second once" in ran)
    # APScheduler removes the job after it has begun, and fails if it is being shut down then.
    until_blocking(lambda: others.get_job("once") is None)
    others.shutdown()
    return [each for each in ran if each.startswith("second")]


def test_runs_that_were_due_before_the_election_are_left_out(make: Make) -> None:
    assert taken_over(make) == ["second once"]


def test_the_test_above_notices_if_they_are_not(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration._Jobs, "_leave_out_earlier_runs", lambda _: None)
    assert sorted(taken_over(make)) == ["second", "second once"]


def test_a_scheduler_that_is_started_without_its_leadership_is_paused(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    leader, scheduler = make()
    ran: list[int] = []
    scheduler.add_job(ran.append, "interval", seconds=0.01, args=[1])
    with caplog.at_level(logging.ERROR, logger="doyen"):
        scheduler.start()
        until_blocking(lambda: "call leader.start()" in caplog.text)
    scheduler.shutdown()
    assert not ran
    assert not leader.leads


def test_a_store_that_cannot_be_used_starts_nothing() -> None:
    scheduler = BackgroundScheduler()
    with pytest.raises(ConfigError):
        Leadership(scheduler, "e", "nonsense://").start()
    assert not scheduler.running
