"""`doyen leader` and `doyen watch` on a real store, with text and JSON output."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import doyen
from doyen.cli import main

DOYEN = [sys.executable, "-c", "from doyen.cli import main; raise SystemExit(main())"]
WITHIN_S = 20.0


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/doyen.db"


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
            "leader": {"name": "server1", "token": term.token, "meta": {"port": 80}},
        }


def test_leader_without_a_leader_exits_with_1(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["leader", "billing", "--store", store]) == 1
    assert capsys.readouterr().out == "billing has no leader\n"
    assert main(["leader", "billing", "--store", store, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"election": "billing", "leader": None}


class Watching:
    """A `doyen watch` whose output is a pipe."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdout is not None
        self.stdout = process.stdout
        self._seen = b""

    def line(self) -> str:
        """The next line, as soon as it is written."""
        deadline = time.monotonic() + WITHIN_S
        while b"\n" not in self._seen:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no line; so far: {self._seen!r}"
            if select.select([self.stdout], [], [], left_s)[0]:
                read = os.read(self.stdout.fileno(), 4096)
                assert read, "watch ended"
                self._seen += read
        line, _, self._seen = self._seen.partition(b"\n")
        return line.decode()

    def end(self) -> tuple[int, bytes]:
        assert self.process.stderr is not None
        return self.process.wait(WITHIN_S), self.process.stderr.read()


@contextmanager
def watching(*options: str) -> Iterator[Watching]:
    process = subprocess.Popen(
        [*DOYEN, "watch", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        try:
            yield Watching(process)
        finally:
            process.kill()


def test_watch_prints_every_change_in_a_pipe_until_interrupted(store: str) -> None:
    with watching("billing", "--store", store) as watch:
        assert watch.line().endswith("billing has no leader")
        with doyen.connect_blocking(store) as session:
            with session.campaign("billing", name="server1") as term:
                line = watch.line()
                assert line.endswith(f" server1 leads billing, token {term.token}")
                assert line.startswith(time.strftime("%Y-"))
            assert watch.line().endswith("billing has no leader")
        watch.process.send_signal(signal.SIGINT)
        assert watch.end() == (0, b"")


def test_watch_writes_json_lines(store: str) -> None:
    with watching("billing", "--json", "--store", store) as watch:
        assert json.loads(watch.line())["leader"] is None
        with (
            doyen.connect_blocking(store) as session,
            session.campaign("billing", name="server1") as term,
        ):
            printed = json.loads(watch.line())
    assert printed["leader"] == {"name": "server1", "token": term.token, "meta": {}}
    assert printed["election"] == "billing"
    assert printed["at"][:2] == "20"


def test_watch_ends_by_sigpipe_when_its_output_is_closed(store: str) -> None:
    """It ends at once, and not only at the next change, which may never come."""
    with watching("billing", "--store", store) as watch:
        watch.line()
        watch.stdout.close()
        assert watch.end() == (128 + signal.SIGPIPE, b"")
