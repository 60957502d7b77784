"""RQ: of several cron schedulers only the leader enqueues jobs, once each."""

from __future__ import annotations

import itertools
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Queue

import doyen
import servers
from doyen.integrations.last_runs import LastRuns
from doyen.integrations.rq import LeaderCronScheduler
from framework_crew import PROMPT_S, crew


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


def test_a_leader_goes_on_where_the_last_one_stopped(
    store: str, redis: servers.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with doyen.connect_blocking(store) as session:
        LastRuns(session, "e-runs").note({"ran": 1e9 + datetime.now(UTC).timestamp()})
    connection = Redis(port=redis.port)
    scheduler = LeaderCronScheduler(connection, "e", store, logging_level="CRITICAL")
    for name in ("ran", "never ran"):
        scheduler.register(print, "of-this-test", interval=3600, name=name)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def stop(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(scheduler, "heartbeat", stop)  # after the first round
    try:
        scheduler.start()
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert len(Queue("of-this-test", connection=connection)) == 1
    with doyen.connect_blocking(store) as session:
        at = LastRuns(session, "e-runs").times["never ran"]
    assert abs(datetime.now(UTC).timestamp() - at) < timedelta(hours=1).total_seconds()


def test_a_leader_that_was_frozen_cannot_undo_what_a_later_one_wrote(store: str) -> None:
    with doyen.connect_blocking(store) as session:
        earlier, later = LastRuns(session, "runs"), LastRuns(session, "runs")
        later.note({"task": 2.0})
        earlier.note({"task": 1.0})
        assert LastRuns(session, "runs").times == {"task": 2.0}
