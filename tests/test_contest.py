"""The measure of failovers in contests leaves out what a busy machine adds, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contest import Candidate, Contest, Place
from engines import SLACK_S, worst_s
from stalls import Waits, stalled_s, waits_of

TTL_S = 2.0


@contextmanager
def spinning(count: int) -> Iterator[list[int]]:
    """Processes that are always ready to run."""
    processes = [subprocess.Popen([sys.executable, "-Sc", "while 1: pass"]) for _ in range(count)]
    try:
        yield [each.pid for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()


BEFORE: list[Waits] = [{1: 5.0, 2: 1.0}, {3: 7.0}, {}]


@pytest.mark.parametrize(
    ("after", "expected_s"),
    [
        (BEFORE, 0.0),
        ([{1: 5.25, 2: 1.0}, {3: 7.0}, {}], 0.25),
        ([{1: 5.25, 2: 1.5}, {3: 7.0}, {}], 0.5),
        ([{1: 5.25, 2: 1.5}, {3: 7.25}, {}], 0.75),
        ([{1: 5.0, 4: 0.5}, {3: 7.0}, {}], 0.5),
        ([{2: 1.0}, {}, {5: 0.125}], 0.125),
    ],
    ids=["none", "one", "longest thread", "two processes", "new thread", "ended threads"],
)
def test_stalls_of_processes_add_up_and_those_of_threads_do_not(
    after: list[Waits], expected_s: float
) -> None:
    assert stalled_s(BEFORE, after) == expected_s


def test_a_stall_is_the_time_without_a_processor() -> None:
    """Two processes on one processor: what one of them waits, the other runs."""
    with spinning(2) as pids:
        for pid in pids:
            os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
        before = [waits_of([pid]) for pid in pids]
        began = time.monotonic()
        while stalled_s(before, after := [waits_of([pid]) for pid in pids]) < 0.2:
            assert time.monotonic() < began + 30
        assert stalled_s(before, after) <= 2 * (time.monotonic() - began)


def test_a_process_that_waits_for_input_does_not_stall() -> None:
    waiting = subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE)
    try:
        before = waits_of([waiting.pid])
    finally:
        waiting.communicate(b"\n")
    assert stalled_s([before], [waits_of([waiting.pid])]) == 0.0


def late(folder: Path) -> Callable[[str], list[str]]:
    """Candidates that take a lease for expired one ttl too late."""
    (folder / "sitecustomize.py").write_text(
        "from doyen.stores.sqlite.leases import LeaseFile\n"
        "LeaseFile.expires_at = property(lambda self: self.renewed_at + 2 * self.ttl_s)\n"
    )
    return lambda name: ["env", f"PYTHONPATH={folder}"]


@pytest.mark.chaos(engine="sqlite")
@pytest.mark.parametrize("broken", [False, True], ids=["sound", "a ttl too late"])
def test_a_successor_that_is_a_ttl_too_late_is_noticed_on_a_busy_machine(
    broken: bool, tmp_path: Path
) -> None:
    place = Place(f"sqlite://{tmp_path}/doyen.db")
    inside = late(tmp_path) if broken else lambda name: []
    with (
        Contest(place, tmp_path, ttl_s=TTL_S, inside=inside) as contest,
        spinning(3 * len(os.sched_getaffinity(0))),
    ):
        leader, _ = contest.leader()
        renewals = len(contest.seen(leader, "renewed"))
        contest.wait("no renewal", lambda: len(contest.seen(leader, "renewed")) > renewals)
        took_s = contest.failover_s(Candidate.freeze)
    assert (took_s > worst_s(place.url, TTL_S) + SLACK_S) == broken
