"""The quorum of `doyen up`: three nodes, each a process, which can be killed and frozen.

The leader is known from the output of the nodes. Only `start` and `stop` wait; `tick` checks
everything once.

Invariant: when `stop` has returned, all processes that were started here have ended.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

from doyen.cli.up.node import ELECTION_S, command
from doyen.errors import StoreUnavailable
from doyen.lease.clock import SystemClock

SIZE = 3
RESTART_AFTER_S = 1.0
THAW_AFTER_S = 4 * ELECTION_S
START_WITHIN_S = 20.0
STOP_WITHIN_S = 3.0


class NodeProcess:
    """One node: its name, and the process that runs it now, if any."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.process: subprocess.Popen[bytes] | None = None
        self.killed = False
        self.frozen_at: float | None = None
        self.died_at = -math.inf
        self.listening = False
        self.generation = 0
        self.role = "starting"
        self._partial = b""

    @property
    def alive(self) -> bool:
        """Whether the process runs; it may be frozen."""
        return self.process is not None and not self.killed

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


class NodeGroup:
    """Three nodes with their data in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.now: Callable[[], float] = SystemClock().now
        self.servers = [
            NodeProcess(f"n{number}", address) for number, address in enumerate(_addresses(SIZE), 1)
        ]
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

    def start(self) -> None:
        """Start the nodes; return when all of them listen."""
        for server in self.servers:
            self._start(server)
        give_up = self.now() + START_WITHIN_S
        while not all(server.listening for server in self.servers):
            self.tick()
            dead = [each for each in self.servers if each.process is None]
            if dead or self.now() >= give_up:
                errors = self._directory / f"{(dead or self.servers)[0].name}.errors"
                raise StoreUnavailable(f"the quorum does not start: {_last_error_line(errors)}")
            time.sleep(0.01)

    def tick(self) -> None:
        """Read output, and reap, thaw and start nodes where due."""
        now = self.now()
        for server in self.servers:
            while server.read_output():
                pass
            if server.process is not None and server.process.poll() is not None:
                self._note_end(server)
            if server.frozen_at is not None and now >= server.frozen_at + THAW_AFTER_S:
                self.thaw(server)
            if server.process is None and now >= server.died_at + RESTART_AFTER_S:
                self._start(server)
        leader = self.leader
        if leader is not None and (
            not self.changes or leader.generation > self.changes[-1].generation
        ):
            struck, at = self._struck or ("", now)
            self._struck = None
            self.changes.append(NodeLeaderChange(leader.name, leader.generation, struck, now - at))

    def kill(self, server: NodeProcess) -> None:
        """Send SIGKILL. The node is restarted, with its data, after `RESTART_AFTER_S`."""
        if server.process is not None and server.alive:
            self._note_fault("killed", server)
            server.killed = True
            server.died_at = self.now()
            server.process.send_signal(SIGKILL)

    def freeze(self, server: NodeProcess) -> None:
        """Send SIGSTOP. The node is thawed after `THAW_AFTER_S`."""
        if server.process is not None and server.alive and server.frozen_at is None:
            self._note_fault("frozen", server)
            server.frozen_at = self.now()
            server.process.send_signal(SIGSTOP)

    def thaw(self, server: NodeProcess) -> None:
        """Send SIGCONT."""
        if server.process is not None and server.frozen_at is not None:
            server.frozen_at = None
            server.process.send_signal(SIGCONT)

    def stop(self) -> None:
        """End all processes."""
        running = [server for server in self.servers if server.process is not None]
        for server in running:
            self.thaw(server)
            if server.process is not None:
                server.process.terminate()
        deadline = self.now() + STOP_WITHIN_S
        for server in running:
            if server.process is not None:
                try:
                    server.process.wait(max(0.0, deadline - self.now()))
                except subprocess.TimeoutExpired:
                    server.process.kill()
                    server.process.wait()
                self._note_end(server)

    def _start(self, server: NodeProcess) -> None:
        server.killed = server.listening = False
        server.role = "starting"
        peers = {each.name: each.address for each in self.servers}
        with (self._directory / f"{server.name}.errors").open("wb") as errors:
            # A process group of its own, so that Ctrl-C in the terminal does not reach the node.
            server.process = subprocess.Popen(
                command(server.name, peers, self._directory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                process_group=0,
            )
        assert server.process.stdout is not None
        os.set_blocking(server.process.stdout.fileno(), False)

    def _note_end(self, server: NodeProcess) -> None:
        if server.process is not None and server.process.stdout is not None:
            server.process.stdout.close()
        server.process, server.frozen_at, server.role = None, None, "dead"
        server.died_at = max(server.died_at, self.now())

    def _note_fault(self, how: str, server: NodeProcess) -> None:
        if server is self.leader:
            self._struck = f"{server.name} {how}", self.now()


def _addresses(count: int) -> list[str]:
    """Different free ports on this machine."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _last_error_line(errors: Path) -> str:
    text = errors.read_text(errors="replace").strip() if errors.exists() else ""
    return text.splitlines()[-1] if text else "no error message"
