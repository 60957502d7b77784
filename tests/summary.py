"""The summary of `make chaos`: for each engine the duration of its trials and the numbers of
faults, elections and violations. It is printed even if trials fail.

The run has a time limit: when it is exceeded, every trial that has not begun fails. With workers of
pytest-xdist and `--dist loadgroup`, the same worker runs all trials of an engine.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from engines import CLUSTERS, ENGINES
from servers.tally import Tally, tally

LIMIT_S = 90 * 60.0
PROPERTY = "chaos"
NAMES = sorted({*ENGINES, *CLUSTERS}, key=len, reverse=True)


@dataclass
class Row:
    """The totals of the trials of one engine."""

    trials: int = 0
    failed: int = 0
    length_s: float = 0.0
    faults: int = 0
    elections: int = 0
    violations: int = 0


def engine_of(item: pytest.Item) -> str:
    """The engine that a test names in its parameters, its marker or its module."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    for value in parameters:
        name = getattr(value, "engine", value)
        if name in NAMES:
            return str(name)
    marker = item.get_closest_marker("chaos")
    if marker is not None and "engine" in marker.kwargs:
        return str(marker.kwargs["engine"])
    return next((name for name in NAMES if name in item.nodeid.partition("::")[0]), "other")


class Summary:
    """The pytest plugin that collects and prints the summary."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._ends_at = time.monotonic() + limit_s
        self._began_at = 0.0
        self._before = Tally()
        self._failed: set[str] = set()
        self.rows: dict[str, Row] = defaultdict(Row)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(pytest.mark.xdist_group(engine_of(item)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._began_at, self._before = time.monotonic(), replace(tally)
        if self._began_at > self._ends_at:
            pytest.fail(
                f"not run: the time limit of {self._limit_s / 60:g} minutes is exceeded",
                pytrace=False,
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            done = {
                each.name: getattr(tally, each.name) - getattr(self._before, each.name)
                for each in fields(Tally)
            }
            spent = {"engine": engine_of(item), "length_s": time.monotonic() - self._began_at}
            report.user_properties.append((PROPERTY, {**spent, **done}))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        result: dict[str, Any] = dict(report.user_properties).get(PROPERTY, {})  # type: ignore[assignment]
        if result:
            row = self.rows[result["engine"]]
            row.trials += 1
            row.failed += report.nodeid in self._failed
            for name in ("length_s", "faults", "elections", "violations"):
                setattr(row, name, getattr(row, name) + result[name])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("summary per engine")
        for line in self.table():
            terminalreporter.write_line(line)

    def table(self) -> list[str]:
        heads = ("engine", "trials", "failed", "length", "faults", "elections", "violations")
        lines: list[tuple[str, ...]] = [heads]
        whole = Row()
        for engine, row in sorted(self.rows.items()):
            lines.append(_cells(engine, row))
            for each in fields(Row):
                setattr(whole, each.name, getattr(whole, each.name) + getattr(row, each.name))
        lines.append(_cells("all", whole))
        widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
        return [
            "  ".join(
                cell.rjust(width) if at else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]


def _cells(engine: str, row: Row) -> tuple[str, ...]:
    minutes, seconds = divmod(round(row.length_s), 60)
    counts = (row.faults, row.elections, row.violations)
    return engine, str(row.trials), str(row.failed), f"{minutes}:{seconds:02}", *map(str, counts)
