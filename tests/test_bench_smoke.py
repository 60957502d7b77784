"""Every bench runs with tiny parameters and reports its figures. Times are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIGURES = {
    "crash": 2,
    "handover": 2,
    "transfer": 2,
    "loss": 2,
    "frozen": 6,
    "valid": 1,
    "import": 2,
    "forwarding": 5,
    "herd": 1,
    "many": 3,
    "idle": 4,
    "lab": 3,
    "writes": 2,
    "outages": 4,
    "etcd_api": 4,
    "upkeep": 3,
    "soak": 1,
    "members": 2,
    "config": 1,
    "shards": 5,
    "page": 6,
    "warden": 3,
    "frameworks": 1,
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


SHORT = ("config", "forwarding", "handover", "herd", "import", "lab", "valid")
"""Benches that take little with tiny parameters. The others are part of the campaign."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.chaos] * (name not in SHORT)) for name in FIGURES],
)
def test_a_bench_runs_and_reports(name: str) -> None:
    done = bench(name, "--quick", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["machine"]["cores"] >= 1
    assert len(report["figures"]) == FIGURES[name]
    for figure in report["figures"]:
        assert figure["bench"] == name
        assert figure["name"]
        assert figure["unit"]
        assert figure["value"] >= 0
        assert figure["met"] in (None, True, False)
        assert (figure["met"] is None) == (figure["limit"] is None)
        # Unlike times, these counts are the same on every machine.
        if name == "herd" or figure["name"].endswith(", fenced"):
            assert figure["met"], figure


def test_there_is_a_list_of_benches() -> None:
    listed = bench("--list").stdout.splitlines()
    assert {line.split()[0] for line in listed} == {*FIGURES, "engines", "partitioners"}


def test_an_unknown_bench_is_refused_by_name() -> None:
    done = bench("nonsense")
    assert done.returncode == 2
    assert "no bench 'nonsense'; there are crash, " in done.stderr
