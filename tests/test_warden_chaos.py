"""The long trials of wardens on every engine: leaders are killed and frozen, and so are wardens.

The audit logs prove that there were never two leaders at a time. A leader whose warden is well is
replaced long before its ttl.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from contest import Candidate, Contest, sound
from engines import ENGINES, SLACK_S, Trial, on_trial, worst_s
from servers.tally import tally

pytestmark = pytest.mark.chaos

TTL_S = 8.0
SOON_S = 4.0
"""On a loaded machine, and half of the ttl."""


@pytest.fixture(scope="module", params=sorted(ENGINES))
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    with on_trial(request.param) as trial:
        yield trial


def warden_of(contest: Contest, candidate: Candidate) -> int:
    contest.wait("it has no warden", lambda: contest.seen(candidate, "warded"))
    warden: int = contest.seen(candidate, "warded")[-1]["warden"]
    return warden


def test_leaders_and_their_wardens_are_killed_and_frozen(trial: Trial, tmp_path: Path) -> None:
    chance = random.Random(trial.server.url.partition(":")[0])
    bound_s = worst_s(trial.server.url, TTL_S) + SLACK_S
    with Contest(trial.server, tmp_path, ttl_s=TTL_S, warden="process") as contest:
        contest.leader()
        faults = ["none", "none", "killed", "frozen"]
        chance.shuffle(faults)
        for fault in ["none", *faults]:
            leader, _ = contest.leader()
            warden = warden_of(contest, leader)
            if fault != "none":
                os.kill(warden, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
                tally.faults += 1
            took_s = contest.failover_s(Candidate.kill)
            assert took_s <= (SOON_S if fault == "none" else bound_s), fault
            with suppress(ProcessLookupError):
                os.kill(warden, signal.SIGCONT)
            contest.join()
        report = contest.report()
    sound(report, 6)


def test_frozen_leaders_are_killed_and_replaced(trial: Trial, tmp_path: Path) -> None:
    with Contest(
        trial.server, tmp_path, ttl_s=TTL_S, warden="process", frozen_after_s=0.5
    ) as contest:
        contest.leader()
        for _ in range(3):
            leader, _ = contest.leader()
            warden_of(contest, leader)
            assert contest.failover_s(Candidate.freeze) <= SOON_S
            leader.process.wait(SOON_S)
            contest.join()
        began = time.monotonic()
        contest.settle(2.0)  # nobody who is well is killed
        assert time.monotonic() - began < TTL_S
        report = contest.report()
    sound(report, 4)
