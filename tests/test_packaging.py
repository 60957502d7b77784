"""The package: its metadata, its manual page, and what is in the wheel that users install."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import doyen
from candidates import Capture
from doyen.cli import COMMANDS, deploy, main, parsers
from doyen.cli._man import man_page

ROOT = Path(__file__).parents[1]
PATIENCE_S = 900.0
USER = """
import asyncio

import doyen
from doyen.testing import ControlledStore


async def lead() -> int:
    async with doyen.connect("memory://") as session:
        async with session.campaign("billing", name="a") as term:
            return term.token


def blocking() -> str:
    with doyen.connect_blocking("memory://") as session, session.campaign("billing") as term:
        return term.name


def controlled(store: ControlledStore) -> doyen.Leader | None:
    return store.leader("billing")


print(asyncio.run(lead()) > 0)
"""
WRONG = """
import doyen

session = doyen.connect_blocking(7)
doyen.connect_blocking("memory://", ttl_s="soon")
with session.campaign("billing", priority="high") as term:
    token: str = term.token
"""


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_workflow_runs_every_python_that_the_package_promises() -> None:
    promised = [
        each.rpartition(" ")[2]
        for each in project()["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", each)
    ]
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == promised
    assert project()["requires-python"] == f">={promised[0]}"


def test_the_package_alone_needs_nothing_and_all_is_everything() -> None:
    assert project()["dependencies"] == []
    extras = project()["optional-dependencies"]
    [everything] = extras["all"]
    named = re.search(r"\[(.*)\]", everything)
    assert named is not None
    assert {*named[1].split(",")} == {*extras} - {"all", "dev", "docs", "testing"}


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options_of(inner)


def test_the_manual_page_has_every_command_and_option(capsys: Capture) -> None:
    page = man_page()
    assert page.isascii()
    _, commands = parsers(*COMMANDS)
    shown = page.replace("\\-", "-")
    for name, parser in commands.items():
        assert f".SS doyen {name}\n" in shown
        for option in options_of(parser):
            assert option in ("-h", "--help") or f"{option}" in shown
    assert main(["help", "--man", "run"]) == 0
    alone = capsys.readouterr().out
    assert alone.startswith(".TH DOYEN-RUN 1 ")
    assert ".SH EXIT STATUS\n" in alone
    requests = {line.split()[0] for line in page.splitlines() if line.startswith(".")}
    assert requests <= {".TH", ".SH", ".SS", ".B", ".I", ".PP", ".TP", ".nf", ".fi", ".RS", ".RE"}


class Installed:
    """A fresh virtual environment with the wheel, and with nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run(sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT))
        [self.wheel] = (folder / "dist").glob("*.whl")
        [self.sdist] = (folder / "dist").glob("*.tar.gz")
        venv.create(folder / "venv", with_pip=True)
        self.pip("install", "--no-index", str(self.wheel))

    def pip(self, *words: str) -> str:
        return self.python("-m", "pip", "--disable-pip-version-check", *words)

    def python(self, *words: str) -> str:
        return self._run(str(self.folder / "venv/bin/python"), *words)

    def program(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self._done(str(self.folder / "venv/bin" / name), *words)

    def _run(self, *words: str) -> str:
        done = self._done(*words)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _done(self, *words: str) -> subprocess.CompletedProcess[str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        return subprocess.run(
            words,
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"))


@pytest.mark.chaos
def test_the_wheel_and_the_sdist_have_what_they_should(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
    sources = ROOT / "src"
    tracked = {
        str(path.relative_to(sources))
        for path in (sources / "doyen").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert tracked <= {*names}
    data = f"doyen-{doyen.__version__}.data/data/"
    assert f"{data}share/man/man1/doyen.1" in names
    assert [name for name in names if name.split("/")[0] == "tests"] == []
    with tarfile.open(installed.sdist) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "man_hook.py"} <= packed
    check = installed._done(
        sys.executable,
        "-m",
        "twine",
        "check",
        "--strict",
        str(installed.wheel),
        str(installed.sdist),
    )
    assert check.returncode == 0, check.stdout


@pytest.mark.chaos
def test_the_wheel_works_alone(installed: Installed) -> None:
    """Without any dependency: the library, the command, its completion, its files and its page."""
    listed = installed.pip("list", "--format=freeze").split()
    assert {line.partition("==")[0] for line in listed} <= {"doyen", "pip", "setuptools", "wheel"}
    (installed.folder / "user.py").write_text(USER)
    assert installed.python("user.py") == "True\n"
    store = f"sqlite://{installed.folder}/alone.db"
    ran = installed.program("doyen", "run", "e", "--store", store, "--", "echo", "leads")
    assert (ran.returncode, ran.stdout) == (0, "leads\n")
    for name in deploy.FILES:
        assert installed.program("doyen", "deploy", name).stdout
    assert installed.program("doyen", "completion", "bash").stdout
    page = installed.folder / "venv/share/man/man1/doyen.1"
    assert page.read_text() == installed.program("doyen", "help", "--man").stdout


@pytest.mark.chaos
def test_type_checkers_of_users_know_the_types(installed: Installed) -> None:
    """What is right is accepted, and what is wrong is found, by mypy and by pyright."""
    installed.pip("install", "mypy", "pyright[nodejs]")
    (installed.folder / "user.py").write_text(USER)
    (installed.folder / "wrong.py").write_text(WRONG)
    interpreter = str(installed.folder / "venv/bin/python")
    for checker in (["mypy", "--strict"], ["pyright", "--pythonpath", interpreter]):
        right = installed.program(*checker, "user.py")
        assert right.returncode == 0, right.stdout
        wrong = installed.program(*checker, "wrong.py")
        assert wrong.returncode == 1
        found = {int(number) for number in re.findall(r"wrong\.py:(\d+)", wrong.stdout)}
        assert found == {4, 5, 6, 7}, wrong.stdout
