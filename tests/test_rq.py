"""RQ: of several cron schedulers only the leader enqueues jobs, once each."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from redis import Redis, RedisError
from rq import Queue, cron_scheduler_registry
from rq.cron import CronScheduler
from rq.exceptions import SchedulerNotFound

import doyen
import servers
from doyen.integrations.last_runs import LastRuns
from doyen.integrations.rq import LeaderCronScheduler
from framework_crew import PROMPT_S, crew
from support import until_blocking


def test_schedulers_are_handed_over(tmp_path: Path, redis: servers.Redis) -> None:
    with crew("rq", tmp_path, REDIS_PORT=str(redis.port)) as processes:
        term = processes.next_term()
        took_s, after = processes.hand_over(term)
        assert took_s < PROMPT_S
        assert processes.ended_before(term, after)
        terminated = next(each for each in processes.processes if each.pid == term.pid)
        assert terminated.wait(60) == 0
        processes.judge()
        # At most one job for each second.
        times = [line.at for line in processes.lines if line.what == "work"]
        assert all(later - at > 0.5 for at, later in itertools.pairwise(times))


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of signals that a program has, restored when the test ends."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.fixture
def terminated_at_once(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler gets SIGTERM after its first round."""

    def stop(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(LeaderCronScheduler, "heartbeat", stop)


@pytest.mark.usefixtures("terminated_at_once")
def test_a_leader_goes_on_where_the_last_one_stopped(store: str, redis: servers.Redis) -> None:
    with doyen.connect_blocking(store) as session:
        LastRuns(session, "e", 1).note({"ran": 1e9 + datetime.now(UTC).timestamp()})
    connection = Redis(port=redis.port)
    scheduler = LeaderCronScheduler(connection, "e", store, logging_level="CRITICAL")
    for name in ("ran", "never ran"):
        scheduler.register(print, "of-this-test", interval=3600, name=name)
    scheduler.start()
    assert len(Queue("of-this-test", connection=connection)) == 1
    with doyen.connect_blocking(store) as session:
        at = LastRuns(session, "e", 10**9).times["never ran"]
    assert abs(datetime.now(UTC).timestamp() - at) < timedelta(hours=1).total_seconds()


@pytest.mark.usefixtures("terminated_at_once")
@pytest.mark.parametrize("answers", [True, False])
def test_a_leader_has_resigned_when_it_leaves_the_registry_of_rq(
    store: str, redis: servers.Redis, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    left: list[bool] = []
    unregister = cron_scheduler_registry.unregister

    def noted(scheduler: CronScheduler, pipeline: Any = None) -> None:
        with doyen.connect_blocking(store) as session:
            left.append(session.leader("e") is None)
        if not answers:
            raise RedisError("Redis does not answer")
        unregister(scheduler, pipeline)

    monkeypatch.setattr(cron_scheduler_registry, "unregister", noted)
    connection = Redis(port=redis.port)
    scheduler = LeaderCronScheduler(connection, "e", store, logging_level="CRITICAL")
    scheduler.register(print, "of-this-test", interval=3600)
    scheduler.start()
    assert left == [True]
    listed = {each.name for each in CronScheduler.all(connection)}
    assert (scheduler.name not in listed) is answers


def test_schedulers_that_are_registered_are_shown(store: str, redis: servers.Redis) -> None:
    """As for RQ's own class, whose `fetch` makes an instance with the arguments of that class."""
    connection = Redis(port=redis.port)
    scheduler = LeaderCronScheduler(connection, "e", store, logging_level="CRITICAL")
    scheduler.register(print, "of-this-test", interval=3600)
    scheduler.register_birth()
    try:
        assert scheduler.name in {each.name for each in LeaderCronScheduler.all(connection)}
        fetched = LeaderCronScheduler.fetch(scheduler.name, connection)
        assert fetched.pid == os.getpid()
        assert [job.name for job in fetched.get_jobs()] == ["builtins.print"]
        with pytest.raises(SchedulerNotFound):
            LeaderCronScheduler.fetch("nobody", connection)
    finally:
        CronScheduler.register_death(scheduler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_scheduler_that_waits_is_stopped_as_a_leader_is(
    store: str, redis: servers.Redis, number: signal.Signals
) -> None:
    scheduler = LeaderCronScheduler(Redis(port=redis.port), "e", store, logging_level="CRITICAL")
    with doyen.connect_blocking(store) as session, session.campaign("e"):

        def stop() -> None:
            until_blocking(lambda: len(session.line("e")) == 2)
            os.kill(os.getpid(), number)

        stopper = threading.Thread(target=stop)
        stopper.start()
        scheduler.start()
        stopper.join()
        assert len(session.line("e")) == 1


def test_a_leader_that_was_frozen_cannot_undo_what_a_later_one_wrote(store: str) -> None:
    with doyen.connect_blocking(store) as session:
        earlier, later = LastRuns(session, "e", 1), LastRuns(session, "e", 2)
        later.note({"task": 2.0})
        earlier.note({"task": 1.0})
        assert LastRuns(session, "e", 3).times == {"task": 2.0}
        LastRuns(session, "e", 1).note({"task": 1.0})
        assert LastRuns(session, "e", 3).times == {"task": 2.0}


def test_a_leader_goes_on_after_a_write_whose_outcome_was_not_known(store: str) -> None:
    with doyen.connect_blocking(store) as session:
        runs = LastRuns(session, "e", 1)
        runs.note({"task": 1.0})
        known = runs._known
        runs.note({"task": 2.0})
        runs._known = known
        runs.note({"task": 3.0})
        assert LastRuns(session, "e", 2).times == {"task": 3.0}
