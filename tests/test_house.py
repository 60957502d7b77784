"""Rules of the code base as tests. import-linter checks the import layers (pyproject.toml)."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import doyen
from doyen.events.telemetry import LOGGERS

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OTHERS = sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "bench").rglob("*.py")])
ALL = SOURCES + TESTS + OTHERS

PUBLIC = [
    "AlreadyCampaigning",
    "BadDocument",
    "BlockingConfig",
    "BlockingSession",
    "BlockingSubscription",
    "Candidate",
    "CommandFailed",
    "Config",
    "ConfigDocument",
    "ConfigError",
    "Conflict",
    "DoyenError",
    "Inventory",
    "Leader",
    "LeadershipLost",
    "Line",
    "Member",
    "MemberChange",
    "Missed",
    "NameTaken",
    "Node",
    "NotApplied",
    "NotArrived",
    "NotElected",
    "OrderFailed",
    "OutcomeUnknown",
    "PastTerm",
    "Published",
    "Reachable",
    "Regressed",
    "Session",
    "SessionClosed",
    "ShardMap",
    "ShardSpec",
    "ShardTerm",
    "StaleMap",
    "StaleToken",
    "StateMachine",
    "StoreError",
    "StoreUnavailable",
    "StoreUnusable",
    "Subscription",
    "Term",
    "TermState",
    "Unreachable",
    "connect",
    "connect_blocking",
    "while_leader",
]

MAX_LINES = 800
MAX_POLL_S = 0.05
UNDONE = "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def of_each(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test for all files: thousands of tests would take longer than the checks."""

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            failed = {}
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    failed[name_of(path)] = str(error)
            assert not failed

        test.__doc__ = check.__doc__
        return test

    return decorate


each_source = of_each(SOURCES)
each_test = of_each(TESTS)
each_file = of_each(ALL)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def uses(path: Path, module: str, names: set[str]) -> list[str]:
    """The places where a file uses `module.name` or imports the name from the module."""
    found = []
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=attr):
                hit = owner == module and attr in names
            case ast.ImportFrom(module=owner, names=imported):
                hit = owner == module and not names.isdisjoint(alias.name for alias in imported)
            case _:
                hit = False
        if hit:
            found.append(f"{name_of(path)}:{node.lineno}")  # type: ignore[attr-defined]
    return found


def test_the_public_names_are_frozen() -> None:
    assert doyen.__all__ == PUBLIC


def test_the_version_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert doyen.__version__ == project["version"]


def test_the_extra_all_has_every_extra_for_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {*project["optional-dependencies"]} - {"all", "dev", "docs", "testing"}
    assert project["optional-dependencies"]["all"] == [f"doyen[{','.join(sorted(extras))}]"]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_docstrings(name: str) -> None:
    thing: Any = getattr(doyen, name)
    assert thing.__doc__, "has no docstring"
    assert not thing.__doc__.startswith(f"{name}("), (
        "has only the docstring that dataclass generates"
    )
    if inspect.isclass(thing):
        for attribute, value in vars(thing).items():
            if inspect.isfunction(value) or isinstance(value, property):
                assert attribute.startswith("_") or inspect.getdoc(value), f"{name}.{attribute}"


@each_file
def test_modules_have_docstrings(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), "the module has no docstring"


@each_file
def test_files_are_short_and_finished(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES, f"more than {MAX_LINES} lines"
    assert not re.search(UNDONE, text), "finish the work, or open an issue and remove the marker"


@each_source
def test_only_the_clock_reads_the_wall_clock(path: Path) -> None:
    """The command line may read it as well, to show it to users."""
    if path.name != "clock.py" and "cli" not in path.parts:
        assert not uses(path, "time", {"time", "time_ns", "gmtime", "localtime", "ctime"})
        assert not uses(path, "datetime", {"now", "utcnow", "today"})


@each_source
def test_asyncio_shield_is_not_used(path: Path) -> None:
    """From Python 3.14 on, `asyncio.shield` logs an error that is raised after the waiter was
    cancelled. `doyen._waiting.shared` does not."""
    assert not uses(path, "asyncio", {"shield"})


@each_test
def test_tests_do_not_sleep(path: Path) -> None:
    """Tests use virtual time. With real processes they wait for events or poll in short steps.

    A test may block the loop on purpose, to test the effect. ruff requires a marker for that.
    """
    polls = path.read_text().count("noqa: ASYNC251 - ")
    for loop in ast.walk(tree_of(path)):
        if isinstance(loop, ast.While):
            for node in loop.body:
                match node:
                    case ast.Expr(
                        ast.Call(
                            ast.Attribute(ast.Name("time"), "sleep"), [ast.Constant(float(pause))]
                        )
                    ) if pause <= MAX_POLL_S:
                        polls += 1
    assert len(uses(path, "time", {"sleep"})) <= polls


def test_every_logger_of_the_doyen_thread_is_relayed() -> None:
    """A line on any other logger could block the loop of the doyen thread. Nodes and commands have
    loops of their own."""
    used = set()
    for path in (ROOT / "src/doyen").rglob("*.py"):
        if path.relative_to(ROOT / "src/doyen").parts[0] not in ("node", "cli", "lab"):
            used |= set(re.findall(r'getLogger\("(doyen[a-z.]*)"\)', path.read_text()))
    assert used <= set(LOGGERS)


def test_the_guard_imports_only_the_standard_library() -> None:
    """The guard is run by path and isolated: importing doyen or another package would fail."""
    guard = ROOT / "src/doyen/supervise/guard.py"
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree_of(guard))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "doyen"]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


def test_importing_doyen_loads_no_store_or_tool() -> None:
    """Stores, store clients and tools are imported on first use, whatever public name is used."""
    code = (
        "import sys, doyen; [getattr(doyen, name) for name in doyen.__all__]; print(*sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(result.stdout.split())
    heavy = {"hypothesis", "msgspec", "pytest", "rich", "sqlite3", "_sqlite3", "ctypes", "uvloop"}
    adapters = {"memory", "sqlite", "etcd", "zookeeper", "consul", "sql", "redis", "nats", "quorum"}
    lazy = {"audit", "cli", "fencing", "supervise", "testing"}
    lazy |= {f"stores.{name}" for name in adapters}
    lazy |= {f"quorum.{name}" for name in ("consensus", "keyspace", "protocol")}
    assert not loaded & (heavy | {f"doyen.{name}" for name in lazy})


def test_the_type_marker_is_shipped() -> None:
    assert (ROOT / "src/doyen/py.typed").exists()
