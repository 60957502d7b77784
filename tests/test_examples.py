"""The examples, as the real processes that a reader would start."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

import doyen
from support import until_blocking

EXAMPLES = Path(__file__).parents[1] / "examples"
PATIENCE_S = 30.0

NAME = "/SystemExpert/leader"
ELECTION = "New leader election happening."
LEADER = "I am the leader."
FOLLOWER = "I am a follower."
ENDED = "(its output has ended)"

FAILING = f"""
import asyncio, pathlib, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import leader_election

async def do_work():
    if pathlib.Path("fail-" + sys.argv[1]).exists():
        raise OSError("the printer is on fire")
    await asyncio.sleep(0.01)

leader_election.do_work = do_work
asyncio.run(leader_election.main(*sys.argv[1:]))
"""


class Servers:
    """Some servers on one store, and what they say, in order."""

    def __init__(self, folder: Path, store: str = "") -> None:
        self._folder, self._store = folder, store or f"sqlite://{folder}/election.db"
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.said: list[tuple[str, str]] = []

    def start(self, name: str, *program: str) -> None:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-W", "error", *program, name, self._store],
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes[name] = process
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.put((name, line.strip()))
        self._lines.put((name, ENDED))

    def who_said(self, line: str) -> list[str]:
        return [name for name, said in self.said if said == line]

    def hear_until(self, condition: Callable[[], bool]) -> None:
        deadline = monotonic() + PATIENCE_S
        while not condition():
            try:
                self.said.append(self._lines.get(timeout=max(0.0, deadline - monotonic())))
            except queue.Empty:
                pytest.fail(f"waited in vain; heard: {self.said}")

    def next_leader(self) -> str:
        """Wait until one more server has said that it leads; tell which."""
        before = len(self.who_said(LEADER))
        self.hear_until(lambda: len(self.who_said(LEADER)) > before)
        return self.who_said(LEADER)[before]

    def all_stand_in_line(self) -> None:
        """Wait until all have joined the election: from then on the order is settled."""
        with doyen.connect_blocking(self._store) as session:
            until_blocking(lambda: len(session.line(NAME)) == len(self._processes))

    def signal(self, name: str, signum: signal.Signals) -> int:
        """Signal a server and wait for its end."""
        process = self._processes[name]
        process.send_signal(signum)
        try:
            return process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # makes faulthandler print its threads
            process.wait()
            self.hear_until(lambda: name in self.who_said(ENDED))
            pytest.fail(f"{name} did not end on {signum.name}; heard: {self.said}")

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    servers.stop()


def start_three(servers: Servers, *program: str) -> str:
    """Start three servers; one leads, two follow. Tells who leads."""
    names = {"server1", "server2", "server3"}
    for name in sorted(names):
        servers.start(name, *program)
    servers.hear_until(
        lambda: (
            {*servers.who_said(LEADER), *servers.who_said(FOLLOWER)} == names
            and len({*servers.who_said(FOLLOWER)}) == 2
        )
    )
    servers.all_stand_in_line()
    (leader,) = servers.who_said(LEADER)
    assert leader not in servers.who_said(FOLLOWER)
    assert {*servers.who_said(ELECTION)} == names
    return leader


def crash(servers: Servers, leader: str) -> None:
    assert servers.signal(leader, signal.SIGKILL) == -signal.SIGKILL


def interrupt(servers: Servers, leader: str) -> None:
    assert servers.signal(leader, signal.SIGINT) == 1


@pytest.mark.parametrize("end", [crash, interrupt])
def test_another_leads_after(servers: Servers, end: Callable[[Servers, str], None]) -> None:
    leaders = [start_three(servers, str(EXAMPLES / "leader_election.py"))]
    for _ in range(2):
        end(servers, leaders[-1])
        leaders.append(servers.next_leader())
    assert sorted(leaders) == ["server1", "server2", "server3"]


def test_another_leads_after_an_exception_in_the_work(servers: Servers, tmp_path: Path) -> None:
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    first = start_three(servers, str(program))
    (tmp_path / f"fail-{first}").touch()
    second = servers.next_leader()
    (tmp_path / f"fail-{second}").touch()
    third = servers.next_leader()
    assert len({first, second, third}) == 3

    # The first has not given up; as the only one whose work succeeds it leads again.
    (tmp_path / f"fail-{first}").unlink()
    (tmp_path / f"fail-{third}").touch()
    servers.hear_until(lambda: servers.who_said(LEADER)[-1] == first)
