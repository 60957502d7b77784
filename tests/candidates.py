"""Candidates as processes of their own, under `doyen run`, for tests of the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import doyen
from frozen import freeze

DOYEN = [sys.executable, "-c", "from doyen.cli import main; raise SystemExit(main())"]
IDLE = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
WITHIN_S = 30.0


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
        for process in self._running.values():
            try:
                process.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
