"""Candidates as processes of their own, under `doyen run`, for tests of the command line."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

import doyen
from frozen import freeze

DOYEN = [sys.executable, "-c", "from doyen.cli import main; raise SystemExit(main())"]
IDLE = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
WITHIN_S = 30.0

Capture = pytest.CaptureFixture[str]


def eventually(reached: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


class Candidates:
    """The candidates of one election. They stand in line in the order in which they are added."""

    def __init__(self, store: str, election: str = "billing") -> None:
        self.store = store
        self.election = election
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def add(self, name: str, *options: str) -> None:
        """Start one, and wait until it stands in line."""
        options = ("--name", name, "--store", self.store, "--ttl", "60", *options)
        process = subprocess.Popen(
            [*DOYEN, "run", self.election, *options, "--", *IDLE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._running[name] = process
        with doyen.connect_blocking(self.store) as session:
            eventually(
                lambda: name in [each.name for each in session.line(self.election)],
                f"{name} stands in line",
            )
            eventually(lambda: session.leader(self.election), "somebody leads")

    def freeze(self, name: str) -> None:
        freeze(self._running[name].pid, urlsplit(self.store).path)

    def thaw(self, name: str) -> None:
        self._running[name].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        late = []
        for name, process in self._running.items():
            try:
                process.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                late.append(name)
                process.kill()
                process.wait()
        assert not late, f"{late} did not end on SIGTERM"


@contextmanager
def candidates(store: str, *names: str) -> Iterator[Candidates]:
    """Candidates in this order; they are gone in the end."""
    started = Candidates(store)
    try:
        for name in names:
            started.add(name)
        yield started
    finally:
        started.stop()


def complaints(errors: str) -> str:
    """What a command wrote to standard error, apart from the line that states its store."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("doyen: store "))


class Following:
    """A command whose output is read as it is written, from a pipe or a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], out: int) -> None:
        self.process = process
        self._out = out
        self.seen = ""

    def until(self, pattern: str) -> str:
        """The output up to the end of the pattern, which is then discarded."""
        deadline = time.monotonic() + WITHIN_S
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{pattern!r} is not in {self.seen!r}"
            if select.select([self._out], [], [], left_s)[0]:
                read = os.read(self._out, 65536)
                assert read, f"it ended: {self.seen!r}"
                self.seen += read.decode()
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def close_output(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.end()

    def end(self) -> int:
        """Wait for the end. Nothing but the store was stated on standard error."""
        try:
            code = self.process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # makes faulthandler print its threads
            self.process.wait()
            errors = self.process.stderr.read().decode() if self.process.stderr else ""
            pytest.fail(f"it did not end within {WITHIN_S:g} s:\n{self.seen}{errors}")
        if self.process.stderr is not None:
            assert complaints(self.process.stderr.read().decode()) == ""
        return code


@contextmanager
def following(*arguments: str) -> Iterator[Following]:
    """A command of `doyen` that prints until it is ended."""
    with subprocess.Popen(
        [DOYEN[0], "-X", "faulthandler", *DOYEN[1:], *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        try:
            yield Following(process, process.stdout.fileno())
        finally:
            process.kill()
