"""The summary of `make chaos` is complete, and printed even if trials fail."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers.tally import fault, tally, tidying

TRIALS = """
import pytest
from servers.tally import fault, tally, tidying

class Server:
    @fault
    def kill(self): pass

    @fault
    def restart(self): self.kill()

    @tidying()
    def close(self): self.kill()

@pytest.mark.parametrize("engine", ["etcd", "redis"])
def test_param(engine):
    server = Server()
    server.kill()
    server.restart()
    server.close()
    tally.elections += 3

@pytest.mark.chaos(engine="galera")
def test_marked():
    Server().kill()
    tally.violations += 1
    assert False

@pytest.fixture
def broken():
    raise OSError

def test_that_cannot_begin(broken): pass
"""


def run(folder: Path, *options: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    (folder / "test_zookeeper_trials.py").write_text(TRIALS)
    (folder / "conftest.py").write_text(
        "import summary\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'chaos(engine): a trial')\n"
        f"    config.pluginmanager.register(summary.Summary({limit_s}))\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )


def table(output: str) -> dict[str, list[str]]:
    """The cells of the summary by engine, without the duration, which depends on the machine."""
    lines = iter(output.splitlines())
    while "summary per engine" not in next(lines):
        pass
    cells = itertools.takewhile(lambda line: len(line) == 7, map(str.split, lines))
    return {line[0]: [*line[1:3], *line[4:]] for line in cells}


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.chaos)])
def test_every_engine_has_a_row(tmp_path: Path, workers: str) -> None:
    result = run(tmp_path, "--numprocesses", workers, "--dist", "loadgroup")
    assert result.returncode == 1
    assert table(result.stdout) == {
        "engine": ["trials", "failed", "faults", "elections", "violations"],
        "etcd": ["1", "0", "2", "3", "0"],
        "galera": ["1", "1", "1", "0", "1"],
        "redis": ["1", "0", "2", "3", "0"],
        "zookeeper": ["1", "1", "0", "0", "0"],
        "all": ["4", "2", "5", "6", "1"],
    }


def test_a_run_over_its_time_limit_fails_and_prints_the_summary(tmp_path: Path) -> None:
    result = run(tmp_path, "-k", "param", limit_s=0.0)
    assert result.returncode == 1
    assert "not run: the time limit of 0 minutes is exceeded" in result.stdout
    assert table(result.stdout)["all"] == ["2", "2", "0", "0", "0"]


def test_nested_faults_count_once() -> None:
    @fault
    def inner() -> None: ...

    @fault
    def outer() -> None:
        inner()

    before = tally.faults
    outer()
    with tidying():
        outer()
    assert tally.faults == before + 1
