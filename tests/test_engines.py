"""Elections on every engine, with real processes that are killed, frozen and cut off.

The assertions use the audit logs of the candidates: never two leaders at a time, increasing tokens,
and a successor within the worst case computed from the capabilities of the store. Longer trials are
in test_engines_chaos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contest import Candidate, Contest, sound
from engines import ENGINES, Trial, on_trial


# Valkey is Redis in all that matters here, and is tried in test_engines_chaos.
@pytest.fixture(scope="module", params=sorted({*ENGINES} - {"valkey"}))
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    with on_trial(request.param) as trial:
        yield trial


def cut(leader: Candidate) -> None:
    assert leader.link is not None
    leader.link.cut()


def heal(leader: Candidate) -> None:
    assert leader.link is not None
    leader.link.heal()


FAULTS: dict[str, tuple[Callable[[Candidate], None], Callable[[Candidate], None] | None]] = {
    "killed": (Candidate.kill, None),
    "frozen": (Candidate.freeze, Candidate.thaw),
    "cut off": (cut, heal),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failover_when_the_leader_is(trial: Trial, fault: str, tmp_path: Path) -> None:
    inject, undo = FAULTS[fault]
    with Contest(trial, tmp_path, ttl_s=trial.ttl_s, links=fault == "cut off") as contest:
        old, _ = contest.leader()
        took_s = contest.failover_s(inject)
        if undo is not None:
            undo(old)
            contest.wait(
                "the old leader has not noticed that it lost", lambda: contest.seen(old, "lost")
            )
        report = contest.report()
    assert took_s <= trial.bound_s
    sound(report, 2)
