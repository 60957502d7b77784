"""The command line imports commands when they are used, and every error ends in one line of text
and an exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import doyen
from candidates import Capture, complaints
from doyen import cli
from doyen.cli import _output
from doyen.errors import (
    AlreadyCampaigning,
    ConfigError,
    LeadershipLost,
    NotElected,
    OutcomeUnknown,
    SessionClosed,
    StaleToken,
    StoreUnavailable,
    StoreUnusable,
)

Play = Callable[[Callable[[argparse.Namespace], int]], None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Replace the command `leader` by a function."""

    def play(run: Callable[[argparse.Namespace], int]) -> None:
        def configure(parser: argparse.ArgumentParser) -> None:
            _output.add_store_option(parser)

        module: Any = SimpleNamespace(MANUAL="", configure=configure, run=run)
        monkeypatch.setitem(sys.modules, "doyen.cli.leader", module)

    monkeypatch.delenv("DOYEN_DEBUG", raising=False)
    return play


def raiser(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(_args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a"), 2),
        (StoreUnavailable("a"), 69),
        (StoreUnusable("a"), 69),
        (OutcomeUnknown("a"), 69),
        (SessionClosed("a"), 69),
        (NotElected("a"), 75),
        (AlreadyCampaigning("a"), 75),
        (LeadershipLost("a"), 75),
        (StaleToken("a"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_raised_becomes_a_line_and_a_code(
    play: Play, capsys: Capture, error: Exception, code: int
) -> None:
    play(raiser(error))
    assert cli.main(["leader"]) == code
    assert capsys.readouterr() == ("", "doyen: a\n")


def test_a_message_is_one_line(play: Play, capsys: Capture) -> None:
    play(raiser(ConfigError("first,\n  second")))
    cli.main(["leader"])
    play(raiser(ConfigError()))
    cli.main(["leader"])
    assert capsys.readouterr().err == "doyen: first, second\ndoyen: ConfigError\n"


def test_the_traceback_is_there_for_the_asking(
    play: Play, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(raiser(ConfigError("a")))
    monkeypatch.setenv("DOYEN_DEBUG", "1")
    assert cli.main(["leader"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("doyen: a\n")


def test_an_interrupt_is_130(play: Play) -> None:
    play(raiser(KeyboardInterrupt()))
    assert cli.main(["leader"]) == 130


def test_an_interrupt_during_the_imports_shows_no_traceback() -> None:
    program = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "doyen.errors":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in background
runpy.run_module("doyen", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", program, "leader"], capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


def test_an_unexpected_exception_is_not_hidden(play: Play) -> None:
    play(raiser(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["leader"])


def test_every_command_has_json(play: Play, capsys: Capture) -> None:
    def run(args: argparse.Namespace) -> int:
        if args.json:
            _output.print_json({"name": "ü"})
        else:
            _output.console().print("name", "[bold]ü[/bold]", style="bold")
        return 7

    play(run)
    assert cli.main(["leader", "--json"]) == 7
    assert json.loads(capsys.readouterr().out) == {"name": "ü"}
    assert cli.main(["leader"]) == 7
    assert capsys.readouterr().out == "name [bold]ü[/bold]\n"


def test_a_command_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "absent", "is not there")
    assert cli.main(["absent"]) == 2
    assert "'absent' is missing from this installation" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["verify", "--nonsense"]])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


def test_no_command_prints_the_help(capsys: Capture) -> None:
    assert cli.main([]) == 2
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in cli.COMMANDS)
    assert all(f"  {code.value} " in out for code in _output.Exit)


def test_the_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"doyen {doyen.__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "doyen", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, f"doyen {doyen.__version__}\n"), result.stderr


def python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; from doyen.cli import main; {code}"]


def test_help_imports_no_command() -> None:
    code = "\ntry:\n  main(['--help'])\nexcept SystemExit:\n  print(*sys.modules, file=sys.stderr)"
    result = subprocess.run(python(code), capture_output=True, text=True, timeout=60)
    loaded = set(result.stderr.split())
    assert "doyen.cli" in loaded
    assert not loaded & {"rich", "sqlite3", *(f"doyen.cli.{name}" for name in cli.COMMANDS)}


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    log.write_bytes(b"garbage\n")
    command = python(f"sys.exit(main(['verify', {str(log)!r}]))")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as out:
        result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=60)
    assert (result.returncode, result.stderr) == (141, b"")


def test_a_terminal_with_few_letters_gets_what_it_can() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "doyen", "lab", "scenario", "five-servers"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "\\u2713 server1 alone stays LOOKING" in result.stdout


def test_an_output_that_cannot_be_written_is_a_line_and_a_code() -> None:
    command = python("sys.exit(main(['help']))")
    with open("/dev/full", "wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    said = b"doyen: operating system error: [Errno 28] No space left on device\n"
    assert (result.returncode, result.stderr) == (71, said)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_change_no_code(tmp_path: Path, closed: str) -> None:
    url = f"sqlite:{tmp_path}/d.db"
    writes = "echo said; echo complained >&2; read line; exit 3"
    code = f"sys.exit(main(['run', 'e', '--store', {url!r}, '--', 'sh', '-c', {writes!r}]))"
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *python(code)]
    result = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert result.returncode == 3
    assert result.stdout == (b"" if ">&- " in f"{closed} ".replace("2>&-", "") else b"said\n")
    complained = "" if "2>&-" in closed else "complained\n"
    assert complaints(result.stderr.decode()) == complained


def test_an_empty_option_is_not_the_default(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["leader", "--store", "", "e"]) == 2
    assert "--store is empty" in capsys.readouterr().err
    url = f"sqlite:{tmp_path}/d.db"
    assert cli.main(["run", "e", "--store", url, "--name", "", "--", "true"]) == 2
    assert "--name is empty" in capsys.readouterr().err
