"""The documents say what is true: their code runs, their figures, commands and links are right."""

from __future__ import annotations

import doctest
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from doyen.timing import Timing

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
PATIENCE_S = 60.0


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a language in all documents, with where they stand."""
    for path in DOCUMENTS:
        text = path.read_text()
        for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path.name}:{line}", found[1]


@pytest.mark.parametrize("code", [pytest.param(code, id=where) for where, code in blocks("python")])
def test_code_in_the_documents_runs(code: str, tmp_path: Path) -> None:
    program = tmp_path / "block.py"
    program.write_text(code)
    result = subprocess.run(
        [sys.executable, "-W", "error", program.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr


def test_there_is_code_in_the_documents() -> None:
    assert {where.partition(":")[0] for where, _ in blocks("python")} >= {
        "README.md",
        "guarantees.md",
    }


def modules_with_examples() -> Iterator[str]:
    for path in sorted((ROOT / "src").rglob("*.py")):
        if ">>>" in path.read_text():
            parts = path.relative_to(ROOT / "src").with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


@pytest.mark.parametrize("module", [*modules_with_examples()])
def test_examples_in_docstrings_are_right(module: str) -> None:
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(import_module(module)):
        runner.run(example, clear_globs=False)
        # An example shows what matters; tidying up is left to us.
        for value in example.globs.values():
            if isinstance(value, sqlite3.Connection):
                value.close()
    assert runner.tries
    assert not runner.failures


def test_the_table_of_times_is_that_of_the_defaults() -> None:
    """Rows of the form: | `name` | what it is | default | 1.234 s |"""
    text = (ROOT / "docs/guarantees.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) (?:s|%) \|$", text, re.MULTILINE))
    timing = Timing()
    expected = {
        "ttl_s": timing.ttl_s,
        "drift": 100 * timing.drift,
        "stop_budget_s": timing.stop_budget_s,
        "renew_every_s": timing.renew_every_s,
        "renew_jitter": 100 * timing.renew_jitter,
        "request_timeout_s": timing.request_timeout_s,
        "retry_every_s": timing.retry_every_s,
        "validity_s": timing.validity_s,
        "margin_s": timing.margin_s,
        "worst_failover_s": timing.worst_failover_s(),
    }
    assert {name: float(value) for name, value in rows.items()} == pytest.approx(
        expected, abs=0.0051
    )


@cache
def help_of(*command: str) -> str:
    program = "from doyen.cli import main; raise SystemExit(main())"
    result = subprocess.run(
        [sys.executable, "-c", program, *command, "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 0, f"there is no such command: doyen {' '.join(command)}"
    return result.stdout


def commands() -> Iterator[tuple[str, str]]:
    for where, text in blocks("sh"):
        for line in text.splitlines():
            found = re.search(r"\bdoyen (\w+)(.*?)(?: -- .*)?$", line.partition("#")[0])
            if found:
                yield where, f"{found[1]}{found[2]}"


@pytest.mark.parametrize("command", [pytest.param(text, id=where) for where, text in commands()])
def test_commands_in_the_documents_exist(command: str) -> None:
    name, *rest = command.split()
    known = help_of(name)
    for option in rest:
        if option.startswith("-"):
            assert option.partition("=")[0] in re.findall(r"--?[\w-]+", known)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target
