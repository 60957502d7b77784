"""The quorum of `doyen up`: three nodes, each a process, which can be killed and frozen.

The leader is known from the output of the nodes. Only `start` and `stop` wait; `tick` checks
everything once.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from doyen.cli.up.node import ELECTION_S, command
from doyen.cli.up.processes import ChildProcess, Kind, ProcessGroup, Stopped, never
from doyen.errors import StoreUnavailable

SIZE = 3
THAW_AFTER_S = 4 * ELECTION_S
START_WITHIN_S = 20.0


class NodeProcess(ChildProcess):
    """One node, with what it has printed about itself."""

    def __init__(self, name: str, address: str, directory: Path) -> None:
        super().__init__(name, directory)
        self.address = address
        self.listening = False
        self.generation = 0
        self.role = "starting"
        self._partial = b""

    def read_output(self) -> bool:
        """Read the output of the node; whether there was any."""
        if self.process is None or self.process.stdout is None:
            return False
        try:
            output = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._partial = (self._partial + output).split(b"\n")
        for line in lines:
            event = json.loads(line)
            self.listening |= event["event"] == "listening"
            if event["event"] == "role":
                self.role, self.generation = event["role"], event["generation"]
        return bool(output)


@dataclass(frozen=True, slots=True)
class NodeLeaderChange:
    """A new leader of the quorum, and the fault that was injected into the one before it."""

    to: str
    generation: int
    struck: str
    seconds: float

    def story(self) -> str:
        took = f" after {self.seconds * 1000:.0f} ms" if self.struck else ""
        before = f"node {self.struck}, " if self.struck else ""
        return f"{before}node {self.to} leads the quorum (generation {self.generation}){took}"


class NodeGroup(ProcessGroup[NodeProcess]):
    """Three nodes with their data in one directory."""

    def __init__(self, directory: Path) -> None:
        self.servers = [
            NodeProcess(f"n{number}", address, directory)
            for number, address in enumerate(_addresses(SIZE), 1)
        ]
        super().__init__(self.servers, thaw_after_s=THAW_AFTER_S)
        self._directory = directory
        self.changes: list[NodeLeaderChange] = []
        self._struck: tuple[str, float] | None = None

    @property
    def url(self) -> str:
        return f"doyen://{','.join(server.address for server in self.servers)}"

    @property
    def leader(self) -> NodeProcess | None:
        """The leader, by the output of the nodes."""
        leading = [each for each in self.servers if each.role == "leading" and each.alive]
        return max(leading, key=lambda each: each.generation, default=None)

    @property
    def healthy(self) -> bool:
        """Whether there is a leader and all nodes run."""
        return self.leader is not None and all(
            each.listening and each.frozen_at is None for each in self.servers
        )

    def start(self, stopping: Callable[[], bool] = never) -> None:
        """Start the nodes; return when all of them listen. Raises `Stopped` when `stopping`."""
        for server in self.servers:
            self._start(server)
        give_up = self.now() + START_WITHIN_S
        while not all(server.listening for server in self.servers):
            if stopping():
                raise Stopped
            self.tick()
            dead = [each for each in self.servers if each.process is None]
            if dead or self.now() >= give_up:
                error = (dead or self.servers)[0].last_error_line()
                raise StoreUnavailable(f"the quorum does not start: {error}")
            time.sleep(0.01)

    def tick(self) -> None:
        """Read output, and reap, thaw and start nodes where due."""
        for server in self.servers:
            while server.read_output():
                pass
        self._reap()
        self._restart()
        now = self.now()
        leader = self.leader
        if leader is not None and (
            not self.changes or leader.generation > self.changes[-1].generation
        ):
            struck, at = self._struck or ("", now)
            self._struck = None
            self.changes.append(NodeLeaderChange(leader.name, leader.generation, struck, now - at))

    def _start(self, server: NodeProcess) -> None:
        server.listening = False
        server.role = "starting"
        peers = {each.name: each.address for each in self.servers}
        started = command(server.name, peers, self._directory)
        process = server.start(started, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)

    def _note_end(self, server: NodeProcess, code: int) -> None:
        super()._note_end(server, code)
        server.role = "dead"

    def _note_fault(self, kind: Kind, server: NodeProcess) -> None:
        if server is self.leader:
            self._struck = f"{server.name} {kind}", self.now()

    def _ask_to_end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()


def _addresses(count: int) -> list[str]:
    """Different free ports on this machine."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
