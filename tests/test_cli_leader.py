"""`doyen leader` and `doyen watch` on a real store, with text and JSON output."""

from __future__ import annotations

import json
import signal
import time
from unittest.mock import ANY

import pytest

import doyen
from candidates import following
from doyen.cli import main


def test_leader_is_printed_as_text_and_as_json(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        doyen.connect_blocking(store) as session,
        session.campaign("billing", name="server1", meta={"port": 80}) as term,
    ):
        assert main(["leader", "billing", "--store", store]) == 0
        words = capsys.readouterr().out
        assert words == f'server1 leads billing, token {term.token}, {{"port": 80}}\n'

        assert main(["leader", "billing", "--store", store, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {
            "election": "billing",
            "kind": "elections",
            "leader": {"name": "server1", "token": term.token, "since": ANY, "meta": {"port": 80}},
        }


def test_leader_without_a_leader_exits_with_1(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["leader", "billing", "--store", store]) == 1
    assert capsys.readouterr().out == "billing has no leader\n"
    assert main(["leader", "billing", "--store", store, "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"election": "billing", "kind": "elections", "leader": None}


def test_watch_prints_every_change_in_a_pipe_until_interrupted(store: str) -> None:
    with following("watch", "billing", "--store", store) as watch:
        assert watch.until("\n").endswith("billing has no leader\n")
        with doyen.connect_blocking(store) as session:
            with session.campaign("billing", name="server1") as term:
                line = watch.until("\n")
                assert line.endswith(f" server1 leads billing, token {term.token}\n")
                assert line.startswith(time.strftime("%Y-"))
            assert watch.until("\n").endswith("billing has no leader\n")
        assert watch.interrupt() == 0


def test_watch_writes_json_lines(store: str) -> None:
    with following("watch", "billing", "--json", "--store", store) as watch:
        assert json.loads(watch.until("\n"))["leader"] is None
        with (
            doyen.connect_blocking(store) as session,
            session.campaign("billing", name="server1") as term,
        ):
            printed = json.loads(watch.until("\n"))
    assert printed["leader"] == {"name": "server1", "token": term.token, "since": ANY, "meta": {}}
    assert printed["election"] == "billing"
    assert printed["at"][:2] == "20"
    assert printed["as_of"] == pytest.approx(time.time(), abs=10)
    assert printed["unreachable_since"] is None


def test_watch_follows_many_elections_with_a_line_for_each_change(store: str) -> None:
    with (
        doyen.connect_blocking(store) as session,
        session.campaign("a", name="server1"),
        session.lock("a", name="not an election"),
        following("watch", "--store", store) as every,
        following("watch", "b", "c", "--json", "--store", store) as some,
    ):
        every.until(r"server1 leads a, token \d+\n")
        assert [json.loads(some.until("\n"))["election"] for _ in "bc"] == ["b", "c"]
        with session.campaign("c", name="server2"):
            every.until(r"server2 leads c, token \d+\n")
            changed = json.loads(some.until("\n"))
            assert (changed["election"], changed["leader"]["name"]) == ("c", "server2")
        every.until("c has no leader\n")
        assert every.interrupt() == 0


def test_watch_ends_by_sigpipe_when_its_output_is_closed(store: str) -> None:
    """It ends at once, and not only at the next change, which may never come."""
    with following("watch", "billing", "--store", store) as watch:
        watch.until("\n")
        assert watch.close_output() == 128 + signal.SIGPIPE
