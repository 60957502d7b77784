"""Three nodes, each a process: killed, stopped, started again, under load."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes import LONG_ELECTION_S, PATIENCE_S, SNAPSHOT_ENTRIES, Process, Quorum, three

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def quorum(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Quorum]:
    quorum = Quorum(tmp_path, getattr(request, "param", 1.0))
    yield quorum
    quorum.close()


_numbers = itertools.count()


class Writer:
    """Writes one note after another through a node, on a thread, until told to stop."""

    def __init__(self, node: Process) -> None:
        self._node = node
        self._stopped = threading.Event()
        self.acknowledged: dict[str, int] = {}
        self.failed: list[object] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            number = next(_numbers)
            notes = [f"{self._node.name}-{number}-{each}" for each in range(5)]
            answer = self._node.tell("write", *notes)
            if isinstance(answer, list):
                self.acknowledged |= dict(zip(notes, answer, strict=True))
            else:
                self.failed.append(answer)

    def stop(self) -> dict[str, int]:
        self._stopped.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.acknowledged


def check(quorum: Quorum, acknowledged: dict[str, int]) -> list[str]:
    """Everything that was acknowledged is where it was said to be, on every node, once."""
    notes = {name: node.tell("read") for name, node in quorum.nodes.items()}
    kept: list[str] = notes["n1"]
    for each in notes.values():
        shorter = min(len(each), len(kept))
        assert each[:shorter] == kept[:shorter]
    assert len({*kept}) == len(kept)
    assert acknowledged
    for note, place in acknowledged.items():
        assert kept[place - 1] == note
    return kept


@pytest.mark.parametrize("quorum", [LONG_ELECTION_S], indirect=True)
def test_a_killed_leader_is_replaced_at_once(quorum: Quorum) -> None:
    acknowledged: dict[str, int] = {}
    took: list[float] = []
    for round_ in range(3):
        leader = quorum.leader()
        other = next(node for node in quorum.nodes.values() if node is not leader)
        writer = Writer(other)
        deadline = time.monotonic() + PATIENCE_S
        while len(writer.acknowledged) < 20 and time.monotonic() < deadline:
            time.sleep(0.005)
        leader.kill()
        began = time.monotonic()
        before = len(writer.acknowledged)
        while len(writer.acknowledged) < before + 20 and time.monotonic() < deadline:
            time.sleep(0.005)
        took.append(time.monotonic() - began)
        note = f"after-{round_}"
        acknowledged |= writer.stop() | {note: other.tell("write", note)[0]}
        assert not writer.failed
        leader.start()
    check(quorum, acknowledged)
    assert min(took) < LONG_ELECTION_S, "the election timeout was waited for"


def test_a_rolling_restart_loses_nothing(quorum: Quorum) -> None:
    quorum.leader()
    acknowledged: dict[str, int] = {}
    for name, node in quorum.nodes.items():
        others = [each for each in quorum.nodes.values() if each is not node]
        if quorum.leader() is not node:
            assert node.tell("transfer", name) is None
        writers = [Writer(other) for other in others]
        assert node.stop() == 0
        node.start()
        for writer in writers:
            acknowledged |= writer.stop()
            assert not writer.failed
        assert len(node.tell("read")) >= len(acknowledged)
    check(quorum, acknowledged)


def test_nodes_killed_at_once_keep_their_data(quorum: Quorum) -> None:
    leader = quorum.leader()
    writer = Writer(leader)
    deadline = time.monotonic() + PATIENCE_S
    while len(writer.acknowledged) < 100 and time.monotonic() < deadline:
        time.sleep(0.005)
    acknowledged = writer.stop()
    for node in quorum.nodes.values():
        node.kill()
    for node in quorum.nodes.values():
        node.start()
    quorum.leader()
    check(quorum, acknowledged)


def test_a_follower_that_was_away_is_sent_a_snapshot(quorum: Quorum) -> None:
    leader = quorum.leader()
    away = next(node for node in quorum.nodes.values() if node is not leader)
    away.kill()
    acknowledged: dict[str, int] = {}
    for number in range(4500):  # more entries than a leader keeps behind its snapshot
        note = f"note-{number}"
        acknowledged[note] = leader.tell("write", note)[0]
    assert leader.tell("snapshot") > SNAPSHOT_ENTRIES
    away.start()
    kept = check(quorum, acknowledged)
    assert len(kept) == len(acknowledged)
    assert away.tell("snapshot") > SNAPSHOT_ENTRIES


def test_the_example_counts(tmp_path: Path) -> None:
    """The replicated counter, as three processes; the one that leads is killed."""
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import replicated_counter
pause = asyncio.sleep
asyncio.sleep = lambda _: pause(0.01)
asyncio.run(replicated_counter.main(sys.argv[1], {three()!r}, {str(tmp_path)!r}))
"""
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", program, name], stdout=subprocess.PIPE, text=True
        )
        for name in ("n1", "n2", "n3")
    }
    try:
        leading = ""
        totals: list[int] = []
        for name, process in processes.items():
            assert process.stdout is not None
            line = process.stdout.readline()
            totals.append(int(line.partition(":")[0]))
            if "leading" in line:
                leading = name
        processes[leading].kill()
        other = next(process for name, process in processes.items() if name != leading)
        assert other.stdout is not None
        lines = [other.stdout.readline() for _ in range(200)]
        counted = [int(line.partition(":")[0]) for line in lines]
        assert counted == sorted({*counted})
        assert counted[-1] > max(totals)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
