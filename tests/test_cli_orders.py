"""`doyen resign` and `doyen transfer`, on a real store with real candidates under `doyen run`."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import time
from unittest.mock import ANY

import pytest

import doyen
from candidates import DOYEN, WITHIN_S, Capture, candidates, complaints, eventually
from doyen.cli import main


def leader(store: str) -> doyen.Leader:
    with doyen.connect_blocking(store) as session:
        found = session.leader("billing")
        assert found is not None
        return found


def test_resign_prints_the_former_and_the_new_leader(store: str, capsys: Capture) -> None:
    with candidates(store, "server1", "server2"):
        first = leader(store)
        assert main(["resign", "billing", "--store", store]) == 0
        second = leader(store)
        assert capsys.readouterr().out == (
            f"server1 (token {first.token}) resigned from billing;"
            f" server2 leads now, token {second.token}\n"
        )
        assert (first.name, second.name) == ("server1", "server2")
        assert second.token > first.token

        assert main(["resign", "billing", "--store", store, "--json"]) == 0
        third = leader(store)
        assert json.loads(capsys.readouterr().out) == {
            "election": "billing",
            "kind": "elections",
            "resigned": {"name": "server2", "token": second.token, "since": ANY, "meta": {}},
            "forced": False,
            "leader": {"name": "server1", "token": third.token, "since": ANY, "meta": {}},
        }


def test_a_single_candidate_campaigns_again_after_resigning(store: str, capsys: Capture) -> None:
    with candidates(store, "server1"):
        assert main(["resign", "billing", "--store", store]) == 0
        token = leader(store).token
    assert capsys.readouterr().out.endswith(
        f"; server1 campaigned again and leads, token {token}\n"
    )


def test_resigning_without_candidates_leaves_no_leader(store: str, capsys: Capture) -> None:
    with candidates(store) as started:
        started.add("server1", "--once")
        assert main(["resign", "billing", "--store", store]) == 0
    assert capsys.readouterr().out.endswith(" resigned from billing; there is no leader now\n")


@pytest.mark.parametrize(
    "order", [["resign", "billing"], ["resign", "billing", "--force", "--yes"]], ids=" ".join
)
def test_no_leader_is_a_valid_answer(store: str, capsys: Capture, order: list[str]) -> None:
    assert main([*order, "--store", store]) == 1
    out, err = capsys.readouterr()
    assert (out, complaints(err)) == ("", "doyen: 'billing' has no leader\n")


def test_a_leader_that_does_not_obey_goes_on_until_forced(store: str, capsys: Capture) -> None:
    """The leader is frozen and its lease is valid for a minute, so it cannot obey an order. Its
    leader record can be deleted by force."""
    with candidates(store, "server1", "server2") as started:
        first = leader(store)
        started.freeze("server1")
        assert main(["resign", "billing", "--wait", "0.3", "--store", store]) == 1
        out, err = capsys.readouterr()
        assert (out, "'server1' was ordered to give up" in err) == ("", True)
        assert leader(store) == first, "nothing was taken from it"

        assert main(["resign", "billing", "--force", "--yes", "--store", store]) == 0
        second = leader(store)
        assert second.name == "server2"
        out = capsys.readouterr().out
        assert out == (
            f"the leader record of server1 (token {first.token}) in billing was deleted;"
            f" server2 leads now, token {second.token};"
            " only tokens protect against writes that server1 may still make\n"
        )
        started.thaw("server1")
        with doyen.connect_blocking(store) as session:
            eventually(
                lambda: [each.name for each in session.line("billing")] == ["server2", "server1"],
                "server1 notices and stands again, at the end of the line",
            )


def test_transfer_to_a_named_candidate(store: str, capsys: Capture) -> None:
    with candidates(store, "server1", "server2", "server3"):
        assert main(["transfer", "billing", "--to", "server3", "--store", store]) == 0
        third = leader(store)
        assert third.name == "server3"
        assert capsys.readouterr().out == (
            f"server1 handed over: server3 leads billing, token {third.token}\n"
        )
        assert main(["transfer", "billing", "--to", "server2", "--json", "--store", store]) == 0
        second = leader(store)
        assert json.loads(capsys.readouterr().out) == {
            "election": "billing",
            "kind": "elections",
            "from": {"name": "server3", "token": third.token, "since": ANY, "meta": {}},
            "leader": {"name": "server2", "token": second.token, "since": ANY, "meta": {}},
        }


def test_a_transfer_that_cannot_be_is_refused(store: str, capsys: Capture) -> None:
    with candidates(store, "server1", "server2"):
        before = leader(store)
        assert main(["transfer", "billing", "--to", "server9", "--store", store]) == 1
        assert "'server9' is not in the line of 'billing'" in capsys.readouterr().err
        assert main(["transfer", "billing", "--to", "server1", "--store", store]) == 1
        assert "leads 'billing' already" in capsys.readouterr().err
        assert leader(store) == before
    assert main(["transfer", "nothing", "--to", "x", "--store", store]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["resign", "billing", "--wait", "soon"],
        ["resign", "billing", "--wait", "-1"],
        ["resign", "billing", "--wait", "nan"],
        ["transfer", "billing"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_yes_without_force_is_a_mistake(store: str, capsys: Capture) -> None:
    assert main(["resign", "billing", "--yes", "--store", store]) == 2
    assert "--force" in capsys.readouterr().err


def test_force_without_a_terminal_needs_yes(store: str) -> None:
    with candidates(store, "server1") as started:
        result = subprocess.run(
            [*DOYEN, "resign", "billing", "--force", "--store", started.store],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        assert (result.returncode, result.stdout) == (2, "")
        assert "--yes" in result.stderr
        assert leader(store).name == "server1"


class Terminal:
    """A command that runs on a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*DOYEN, *arguments], stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.shown = ""

    def until(self, text: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.shown!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 4096).decode()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_force_asks_at_a_terminal_and_prints_the_cost(store: str, answer: str) -> None:
    with candidates(store, "server1", "server2"):
        before = leader(store)
        terminal = Terminal("resign", "billing", "--force", "--store", store)
        try:
            terminal.until("Delete the leader record of server1? [y/N] ")
            assert "only tokens protect" in terminal.shown
            assert leader(store) == before
            terminal.type(f"{answer}\n")
            terminal.until("was deleted;" if answer == "y" else "nothing was done")
            assert terminal.process.wait(WITHIN_S) == (0 if answer == "y" else 1)
        finally:
            terminal.close()
        assert leader(store).name == ("server2" if answer == "y" else "server1")


def test_force_does_not_remove_a_leader_that_was_not_confirmed(store: str) -> None:
    """The confirmation is valid only for the leader that was shown."""
    with candidates(store, "server1", "server2"):
        terminal = Terminal("resign", "billing", "--force", "--store", store)
        try:
            terminal.until("[y/N] ")
            assert main(["transfer", "billing", "--to", "server2", "--store", store]) == 0
            after = leader(store)
            terminal.type("y\n")
            terminal.until("'server1' no longer leads")
            assert terminal.process.wait(WITHIN_S) == 1
        finally:
            terminal.close()
        assert leader(store) == after
