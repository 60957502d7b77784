"""`doyen line`, once and live, on a real store, on a terminal and with pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import ANY

import pytest

import doyen
from candidates import DOYEN, WITHIN_S, Capture, Following, candidates, following
from doyen.cli import main
from doyen.cli._output import Table, printable


def test_the_line_in_order_as_text_and_as_json(store: str, capsys: Capture) -> None:
    with candidates(store, "server1", "server2") as started:
        started.add("server3", "--priority", "10")
        with doyen.connect_blocking(store) as session:
            leader = session.leader("billing")
        assert leader is not None
        assert main(["line", "billing", "--store", store]) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"server1 leads billing, token {leader.token}; 2 waiting",
            "",
            "#  name     state  priority",
            "1  server3  waits        10",
            "2  server1  leads         0",
            "3  server2  waits         0",
        ]
        assert main(["line", "billing", "--json", "--store", store]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["election"] == "billing"
        assert printed["leader"] == {
            "name": "server1",
            "token": leader.token,
            "since": ANY,
            "meta": {},
        }
        assert [list(each.values()) for each in printed["line"]] == [
            [1, "server3", 10, False, {}],
            [2, "server1", 0, True, {}],
            [3, "server2", 0, False, {}],
        ]
        assert list(printed["line"][0]) == ["position", "name", "priority", "leads", "meta"]


def test_line_without_a_leader_exits_with_1(store: str, capsys: Capture) -> None:
    assert main(["line", "billing", "--store", store]) == 1
    assert capsys.readouterr().out == "billing has no leader; none waiting\n"
    assert main(["line", "billing", "--json", "--store", store]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"election": "billing", "kind": "elections", "leader": None, "line": []}


def test_a_leader_without_a_ticket_is_not_listed_as_waiting(store: str, capsys: Capture) -> None:
    with doyen.connect_blocking(store) as session, session.campaign("e", name="a", recipe="race"):
        assert main(["line", "e", "--store", store]) == 0
    assert capsys.readouterr().out.endswith("; none waiting\n")


def test_meta_and_odd_names_are_shown_and_harmless(store: str, capsys: Capture) -> None:
    """Names come from other processes and must not contain control sequences in the output."""
    with (
        doyen.connect_blocking(store) as session,
        session.campaign("e", name="\x1b[2J[red]日本\n", meta={"url": "http://é", "a": "\x9b"}),
    ):
        assert main(["line", "e", "--store", store]) == 0
        out = capsys.readouterr().out
        assert main(["line", "e", "--store", store, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["line"][0]["name"] == "\x1b[2J[red]日本\n"
    *_, headings, row = out.splitlines()
    assert headings == "#  name                state  priority  meta"
    assert row == r'1  \x1b[2J[red]日本\n  leads         0  {"url": "http://é", "a": "\x9b"}'


def test_tables_are_aligned_by_what_is_seen() -> None:
    table = Table(["a", ">b", "c"], [["日本", "1", "x"], ["e\u0301", "100", ""]])
    assert str(table).splitlines() == ["a       b  c", "日本    1  x", "e\u0301     100"]
    assert printable({"b": [1]}) == '{"b": [1]}'


@contextmanager
def at_terminal(*options: str, term: str = "xterm") -> Iterator[Following]:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*DOYEN, "line", *options, "--watch"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": term, "COLUMNS": "80", "LINES": "24"},
    ) as process:
        os.close(theirs)
        try:
            yield Following(process, ours)
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def test_every_change_is_printed_anew_in_a_pipe(store: str) -> None:
    with following("line", "billing", "--store", store, "--watch") as watch:
        assert watch.until(r"none waiting\n\n").startswith(time.strftime("%Y-"))
        with candidates(store, "server1") as started:
            watch.until(r"server1 leads billing, token \d+; none waiting\n\n.* leads +0\n\n")
            started.add("server2")
            watch.until(r"; 1 waiting\n\n.*\n1  server1  leads +0\n2  server2  waits +0\n\n")
            assert main(["transfer", "billing", "--to", "server2", "--store", store]) == 0
            watch.until(r"server2 leads billing")
        watch.until(r"billing has no leader; none waiting\n")
        assert watch.interrupt() == 0


def test_json_lines(store: str) -> None:
    with following("line", "billing", "--json", "--store", store, "--watch") as watch:
        first = json.loads(watch.until("\n"))
        assert (first["leader"], first["line"]) == (None, [])
        assert first["at"][:2] == "20"
        with doyen.connect_blocking(store) as session, session.campaign("billing", name="a"):
            watch.until(r'"position": 1, "name": "a", "priority": 0, "leads": true')


def test_it_ends_by_sigpipe_when_its_output_is_closed(store: str) -> None:
    with following("line", "billing", "--store", store, "--watch") as watch:
        watch.until("\n\n")
        assert watch.close_output() == 128 + signal.SIGPIPE


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_live_view_that_gives_the_cursor_back(store: str, end: signal.Signals) -> None:
    pytest.importorskip("rich")
    with at_terminal("billing", "--store", store) as watch:
        assert "\x1b[?25l" in watch.until("billing has no leader"), "the cursor is out of the way"
        with candidates(store, "server1"):
            watch.until("server1 leads billing.*Ctrl-C ends.*priority.*server1.*leads")
        watch.until("billing has no leader")
        watch.process.send_signal(end)
        watch.until(re.escape("\x1b[?25h"))
        assert watch.process.wait(WITHIN_S) == (0 if end == signal.SIGINT else 128 + end)


def test_a_dumb_terminal_is_written_to_line_by_line(store: str) -> None:
    with at_terminal("billing", "--store", store, term="dumb") as watch:
        watch.until("none waiting")
        assert "\x1b" not in watch.seen
        with doyen.connect_blocking(store) as session, session.campaign("billing", name="a"):
            watch.until("a leads billing")
        assert watch.interrupt() == 0
