"""Click and Typer: commands run in the leader only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from click.testing import CliRunner
from typer.testing import CliRunner as TyperRunner

import doyen
from doyen.errors import ConfigError
from doyen.integrations.click import current_term, lead
from framework_crew import PROMPT_S, crew


def test_commands_are_handed_over(tmp_path: Path) -> None:
    with crew("typer", tmp_path) as processes:
        term = processes.next_term()
        took_s, after = processes.hand_over(term)
        assert took_s < PROMPT_S
        assert processes.ended_before(term, after)
        terminated = next(each for each in processes.processes if each.pid == term.pid)
        assert terminated.wait(60) == 128 + signal.SIGTERM
        processes.judge()


@pytest.fixture(autouse=True)
def _store(store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment names the store."""
    monkeypatch.setenv("DOYEN_STORE", store)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@click.command()
@click.option("--amount", type=int, required=True)
@lead("e", once=True, wait_s=0)
def pay(amount: int) -> None:
    click.echo(f"{amount} with token {current_term().token}")


app = typer.Typer()


@app.command()
@lead("e", lambda: os.environ["DOYEN_STORE"])
def refund(amount: int, name: str = "nobody") -> None:
    """Pay back."""
    typer.echo(f"{amount} to {name} with token {current_term().token}")


def test_a_command_of_click_runs_with_its_term() -> None:
    result = CliRunner().invoke(pay, ["--amount", "7"])
    assert (result.exit_code, result.output[:13]) == (0, "7 with token ")
    assert CliRunner().invoke(pay, ["--amount", "many"]).exit_code == 2


def test_a_command_of_typer_runs_with_its_term() -> None:
    result = TyperRunner().invoke(app, ["5", "--name", "me"])
    assert (result.exit_code, result.output[:19]) == (0, "5 to me with token ")
    assert "Pay back." in TyperRunner().invoke(app, ["--help"]).output


def test_a_command_that_is_not_elected_exits_with_75(store: str) -> None:
    with doyen.connect_blocking(store) as session, session.campaign("e"):
        result = CliRunner().invoke(pay, ["--amount", "7"])
    assert result.exit_code == 75
    assert "Error: " in result.output


def test_mistakes_are_reported_when_the_command_is_made() -> None:
    with pytest.raises(ConfigError):
        lead("")
    with pytest.raises(TypeError, match="priorty"):
        lead("e", priorty=1)  # type: ignore[call-arg]
