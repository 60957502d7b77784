"""Nodes for tests: three in this process, or each in a process of its own, told what to do.

Run as a program (`python nodes.py n1 PEERS FOLDER ELECTION_S`), it is one node that obeys its
standard input, a line each, and answers in JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import doyen
from doyen.quorum.node.proposals import ProposalLimits
from servers import free_port

PATIENCE_S = 30.0
LONG_ELECTION_S = 3.0
"""For tests that tell a handover from an election timeout: longer than a busy machine takes for
the former."""
SNAPSHOT_ENTRIES = 50


class Notes(doyen.StateMachine):
    """Keeps everything, in order."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def apply(self, command: bytes) -> int:
        if command == b"fail":
            raise ValueError("as asked")
        self.kept.append(command)
        return len(self.kept)

    def snapshot(self) -> Iterator[bytes]:
        return iter([msgspec.msgpack.encode(self.kept)])

    def restore(self, pieces: Iterable[bytes]) -> None:
        self.kept = msgspec.msgpack.decode(b"".join(pieces), type=list[bytes])


def addresses(count: int) -> list[str]:
    """Free ports, all different, that no connection is given in passing: a node that restarts
    finds its own free again."""
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


def three() -> dict[str, str]:
    return {f"n{number}": where for number, where in enumerate(addresses(3), 1)}


def often(node: doyen.Node) -> doyen.Node:
    """A node that takes snapshots often."""
    limits = ProposalLimits(snapshot_entries=SNAPSHOT_ENTRIES)
    node._options = dataclasses.replace(node._options, limits=limits)
    return node


async def until(condition: Callable[[], Any], within_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0.005)


class Process:
    """A node in a process of its own."""

    def __init__(
        self, name: str, peers: dict[str, str], folder: Path, election_s: float = 1.0
    ) -> None:
        self.name = name
        self._arguments = [name, json.dumps(peers), str(folder / name), str(election_s)]
        self.start()

    def start(self) -> None:
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        assert self.answer() == "running"

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._answers.put(line)

    def ask(self, what: str, *given: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, *given]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self._answers.get(timeout=PATIENCE_S))

    def tell(self, what: str, *given: Any) -> Any:
        self.ask(what, *given)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=PATIENCE_S)
        self.close()
        return code

    def close(self) -> None:
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass


class Quorum:
    """Three processes."""

    def __init__(self, folder: Path, election_s: float = 1.0) -> None:
        self.peers = three()
        self.nodes = {name: Process(name, self.peers, folder, election_s) for name in self.peers}

    def leader(self, *, but: str | None = None) -> Process:
        """Whoever leads, once all who run say the same."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            said = {
                node.tell("standing")[1]
                for node in self.nodes.values()
                if node.process.poll() is None
            }
            if len(said) == 1 and (name := said.pop()) not in (None, but):
                return self.nodes[name]
            time.sleep(0.01)
        raise TimeoutError("there is no leader")

    def close(self) -> None:
        for node in self.nodes.values():
            if node.process.poll() is None:
                node.kill()


async def _obey(name: str, peers: dict[str, str], folder: str, election_s: float) -> None:
    loop = asyncio.get_running_loop()
    stopped = loop.create_future()
    loop.add_signal_handler(signal.SIGTERM, stopped.set_result, None)
    notes = Notes()
    async with often(
        doyen.Node(
            name, peers=peers, data_dir=folder, machine=notes, found=True, election_s=election_s
        )
    ) as node:
        print(json.dumps("running"), flush=True)

        def read() -> None:
            for line in sys.stdin:
                asyncio.run_coroutine_threadsafe(_do(node, notes, *json.loads(line)), loop)

        threading.Thread(target=read, daemon=True).start()
        await stopped


async def _do(node: doyen.Node, notes: Notes, what: str, *given: Any) -> None:
    answer: Any = None
    try:
        match what:
            case "standing":
                answer = [node.role, node.leader, node.generation]
            case "write":
                answer = await asyncio.gather(*(node.propose(each.encode()) for each in given))
            case "read":
                await node.barrier()
                answer = [each.decode() for each in notes.kept]
            case "transfer":
                await node.transfer(*given)
            case "snapshot":
                answer = node.status().snapshot
    except doyen.DoyenError as error:
        answer = {"error": repr(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_obey(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
