"""Every command has a complete help text that fits a terminal, its examples are valid, and its
options are completed in every shell.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from candidates import Capture
from doyen.cli import COMMANDS, main, parsers
from doyen.cli._output import Exit
from doyen.cli.completion import words

WITHIN_S = 30.0

each_command = pytest.mark.parametrize("name", COMMANDS)
each_shell = pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@cache
def parser_of(name: str) -> argparse.ArgumentParser:
    return parsers(name)[1][name]


def section(text: str, heading: str) -> list[str]:
    """The lines under a heading, without their indentation."""
    _, found, after = text.partition(f"\n{heading}:\n")
    assert found, f"there is no section {heading!r}"
    return [line.strip() for line in after.partition("\n\n")[0].splitlines()]


@each_command
def test_a_command_explains_itself(name: str) -> None:
    text = parser_of(name).format_help()
    summary, prose = text.split("\n\n")[1:3]
    assert summary.replace("\n", " ") == f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}."
    assert len(prose.split()) >= 10, "a paragraph says what it does"
    assert section(text, "exit codes")
    examples = section(text, "examples")
    assert any(line.startswith(f"doyen {name}") or f"(doyen {name}" in line for line in examples)
    assert max(map(len, text.splitlines())) <= 80


@each_command
def test_exit_codes_are_documented(name: str) -> None:
    """Each exit code has a meaning, and the text refers to the common ones."""
    codes = section(parser_of(name).format_help(), "exit codes")
    assert any("doyen --help" in line for line in codes)
    assert any(re.match(r"\d+ ", line) for line in codes)
    known = {*Exit, 126, 127, 141}
    assert {int(code) for line in codes for code in re.findall(r"^\d+(?=  )", line)} <= known


@each_command
def test_every_option_is_explained_with_its_default(name: str) -> None:
    for action in parser_of(name)._actions:
        assert action.help, action.dest
        takes_a_value = action.option_strings and action.nargs != 0
        if takes_a_value and not action.required:
            assert "default" in action.help, action.option_strings


@each_command
def test_every_command_has_json(name: str) -> None:
    assert "--json" in parser_of(name)._option_string_actions


def examples() -> Iterator[tuple[str, str]]:
    for name in ("", *COMMANDS):
        top, commands = parsers(*filter(None, [name]))
        text = (commands[name] if name else top).format_help()
        for line in section(text, "examples"):
            if not line.startswith("#"):
                for command in re.findall(r"\bdoyen( [^|>&;)]+)", line):
                    yield f"{name or 'doyen'}: {line}", command


@pytest.mark.parametrize("command", [pytest.param(text, id=where) for where, text in examples()])
def test_examples_are_right(command: str) -> None:
    arguments = shlex.split(command)
    parsers(arguments[0])[0].parse_args(arguments)


def test_every_line_of_an_example_is_one() -> None:
    assert len({where for where, _ in examples()}) == sum(
        not line.startswith("#")
        for name in ("", *COMMANDS)
        for line in section(
            (parsers(*filter(None, [name]))[1].get(name) or parsers()[0]).format_help(), "examples"
        )
    )


@each_command
def test_help_of_a_command(name: str, capsys: Capture) -> None:
    assert main(["help", name]) == 0
    said = capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == said
    assert main(["help", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"command": name, "help": said}


def test_help_of_all(capsys: Capture) -> None:
    assert main(["help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n    {name}" in said for name in COMMANDS)
    assert section(said, "exit codes")
    assert section(said, "environment")
    assert max(map(len, said.splitlines())) <= 80
    with pytest.raises(SystemExit) as ended:
        main(["help", "nonsense"])
    assert ended.value.code == 2


# Completion


@cache
def completion(shell: str) -> str:
    from doyen.cli.completion import _SHELLS

    return _SHELLS[shell]()


@each_shell
def test_the_script_is_printed(shell: str, capsys: Capture) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == completion(shell)
    assert main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shell": shell, "script": completion(shell)}


@each_shell
def test_every_command_and_option_is_named(shell: str) -> None:
    known = set(re.findall(r"[\w-]+", completion(shell)))
    for name, taken in words().items():
        assert not name or name in known
        for word in taken:
            for flag in word.flags:
                spelled = flag if shell != "fish" else flag.lstrip("-")
                assert spelled in known, (name, flag)


@each_shell
def test_the_shell_reads_the_script(shell: str, tmp_path: Path) -> None:
    """For the shells that are installed; bash always is."""
    if shutil.which(shell) is None:
        assert shell != "bash"
        return
    file = tmp_path / "script"
    file.write_text(completion(shell))
    result = subprocess.run([shell, "-n", str(file)], capture_output=True, timeout=WITHIN_S)
    assert (result.returncode, result.stderr) == (0, b"")


def completed(*typed: str, cwd: Path | None = None) -> set[str]:
    """What bash offers for the last word."""
    program = (
        f"{completion('bash')}\n"
        f"COMP_WORDS=({shlex.join(['doyen', *typed])}); COMP_CWORD={len(typed)}; _doyen\n"
        'for each in "${COMPREPLY[@]}"; do echo "$each"; done'
    )
    result = subprocess.run(
        ["bash", "--norc", "-c", program], capture_output=True, text=True, timeout=WITHIN_S, cwd=cwd
    )
    assert result.stderr == ""
    return set(result.stdout.splitlines())


def test_bash_completes_commands_and_options() -> None:
    assert completed("") >= set(COMMANDS)
    assert completed("re") == {"resign"}
    assert completed("--v") == {"--version"}
    assert completed("resign", "billing", "--") >= {"--wait", "--force", "--yes", "--json"}
    assert completed("transfer", "--t") == {"--to"}
    assert completed("transfer", "billing", "--to", "") == set(), "nobody can know"
    assert completed("completion", "") >= {"bash", "zsh", "fish"}
    assert completed("help", "tr") == {"transfer"}
    assert completed("nonsense", "--") == set()


@each_command
def test_bash_completes_every_option_of_every_command(name: str) -> None:
    flags = {flag for word in words()[name] for flag in word.flags if flag.startswith("--")}
    assert completed(name, "--") == flags


def test_bash_completes_files_where_files_are_meant(tmp_path: Path) -> None:
    (tmp_path / "a log.jsonl").touch()
    (tmp_path / "other").touch()
    assert completed("verify", "a", cwd=tmp_path) == {"a log.jsonl"}
    assert completed("verify", "--to", cwd=tmp_path) == {"--tolerance"}
    assert completed("run", "--audit", "", cwd=tmp_path) == {"a log.jsonl", "other"}
    assert completed("run", "--audit", "=", cwd=tmp_path) == {"a log.jsonl", "other"}
    assert completed("run", "--audit", "=", "o", cwd=tmp_path) == {"other"}
    assert completed("run", "e", "--", "cat", "o", cwd=tmp_path) == {"other"}
    assert "bash" in completed("run", "e", "--", "ba", cwd=tmp_path)
