"""Mistakes on the command line are explained: misspelt commands and options, a forgotten name or
`--`, and durations."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest

from candidates import DOYEN, Capture
from doyen import cli
from doyen.cli import _output
from doyen.stores.kit.durations import parse_duration


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["leadr", "e"], "did you mean leader?"),
        (["leader", "e", "--stor", "sqlite:x.db"], "did you mean --store?"),
        (["leader", "e", "--stor=sqlite:x.db"], "did you mean --store?"),
        (["cluster", "statu"], "did you mean status?"),
        (["cluster", "status", "--jsn"], "did you mean --json?"),
        (["completion", "bsh"], "did you mean bash?"),
        (["run", "e", "--tt", "5", "--", "true"], "did you mean --ttl?"),
        (["run", "--tt", "5", "e", "true"], "did you mean --ttl?"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_a_suggestion_for_what_is_misspelt(
    arguments: list[str], suggestion: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert suggestion in capsys.readouterr().err


def test_nothing_similar_no_suggestion(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["leader", "e", "--zzz"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "explained"),
    [
        (
            ["--", "python", "worker.py"],
            "the name of the election is missing before --: doyen run ELECTION -- python worker.py",
        ),
        (
            ["billing", "python", "worker.py"],
            "-- is missing before the command: doyen run billing -- python worker.py",
        ),
        (
            ["billing", "--ttl", "5", "python", "worker 1.py"],
            "-- is missing before the command: doyen run billing -- python 'worker 1.py'",
        ),
        (
            ["billing", "python", "-u", "worker.py", "--port", "80", "--verbose"],
            "doyen run billing -- python -u worker.py --port 80 --verbose",
        ),
        (["billing"], "the command is missing: doyen run billing -- CMD"),
        (["--ttl=5"], "the election and the command are missing: doyen run ELECTION -- CMD"),
        (["billing", "--"], "the command is missing after --: doyen run billing -- CMD"),
        (
            ["billing", "python", "--", "worker.py"],
            "only the name of the election comes before --, not also 'python'",
        ),
        (["--once", "--store", "x", "--", "sleep", "1"], "the name of the election is missing"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_run_explains_what_was_forgotten(
    arguments: list[str], explained: str, capsys: Capture
) -> None:
    assert cli.main(["run", *arguments]) == 2
    assert explained in capsys.readouterr().err


def test_what_is_right_is_run(tmp_path: Path, capsys: Capture) -> None:
    store = f"sqlite://{tmp_path}/d.db"
    command = ["sh", "-c", "exit 3", "--", "--ttl"]
    # In a process of its own, because `run` ignores signals from the moment its end is decided.
    arguments = ["run", "--store", store, "e", "--ttl=5s", "--once", "--", *command]
    assert subprocess.run([*DOYEN, *arguments], timeout=60).returncode == 3
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--help"])
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5.0),
        ("2.5", 2.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("5s", 5.0),
        ("500ms", 0.5),
        ("10m", 600.0),
        ("1h", 3600.0),
        ("1h30m", 5400.0),
        (" 1d ", 86400.0),
        ("1h 5s", 3605.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert _output.seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "5 apples", "-5", "-5s", "s", "inf", "nan", "5s5", "1e9h"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)
    with pytest.raises(argparse.ArgumentTypeError):
        _output.seconds(text)


def test_every_time_of_every_command_is_a_duration() -> None:
    _, commands = cli.parsers(*cli.COMMANDS)
    checked = 0
    for name, parser in commands.items():
        for action in _all_actions(parser):
            times = ("SECONDS", "TIME")
            if action.metavar in times or action.dest.endswith("_s"):
                assert action.metavar == "TIME", f"{name} {action.option_strings}"
                checked += 1
                if name != "serve":  # which also reads files and variables, and converts them later
                    assert callable(action.type)
                    assert action.type("1h") == 3600.0
    assert checked > 10


def _all_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    found = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found += _all_actions(each)
    return found
