"""Every framework with processes that are terminated, killed and frozen: never do two work, and the
successor of one that is terminated begins at once. What would not hold is seen by the judgement."""

from __future__ import annotations

from pathlib import Path

import pytest

import servers
from framework_crew import FRAMEWORKS, TRIAL_TTL_S, crew


@pytest.mark.chaos(engine="sqlite")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_processes_that_are_terminated_frozen_and_killed(
    framework: str, tmp_path: Path, redis: servers.Redis
) -> None:
    environ = {"REDIS_PORT": str(redis.port), "TTL_S": TRIAL_TTL_S}
    with crew(framework, tmp_path, 4, **environ) as processes:
        processes.trouble(rounds=12)


@pytest.mark.parametrize(
    "ledger",
    [
        ["begin 1 7 0.1", "work 1 7 0.2", "begin 2 8 0.3", "work 1 7 0.4"],
        ["begin 2 7 0.1", "begin 1 8 0.2"],
    ],
)
def test_overlapping_work_is_seen(ledger: list[str], tmp_path: Path) -> None:
    processes = crew("click", tmp_path, 0)
    processes.ledger.write_text("\n".join([*ledger, ""]))
    with pytest.raises(AssertionError, match="after token 2"):
        processes.judge()


def test_work_that_has_not_ended_is_seen(tmp_path: Path) -> None:
    processes = crew("click", tmp_path, 0)
    for ended, lines in ((True, "end 1 7 0.2"), (False, "work 1 7 0.2")):
        processes.ledger.write_text(f"begin 1 7 0.1\n{lines}\nbegin 2 8 0.3\n")
        before, after = processes.terms
        assert processes.ended_before(before, after) is ended
