"""The quorum of `doyen up`: three nodes, each a process, which are killed and frozen too.

Who leads them is what they say themselves. Nothing here waits but `start` and `stop`; `tick` looks
at everything once.

Invariant: once `stop` has returned, every process that was started here is gone, frozen or not.
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

__all__ = ["NodeLeaderChange", "NodeProcess", "Quorum"]

SIZE = 3
RESTART_AFTER_S = 1.0
THAW_AFTER_S = 4 * ELECTION_S
START_WITHIN_S = 20.0
STOP_WITHIN_S = 3.0


class NodeProcess:
    """One node: a name, and the process that runs it at present."""

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
        """Frozen or not."""
        return self.process is not None and not self.killed

    def hear(self) -> bool:
        """Take in what it has said; whether it was anything."""
        if self.process is None or self.process.stdout is None:
            return False
        try:
            said = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._partial = (self._partial + said).split(b"\n")
        for line in lines:
            told = json.loads(line)
            self.listening |= told["event"] == "listening"
            if told["event"] == "role":
                self.role, self.generation = told["role"], told["generation"]
        return bool(said)


@dataclass(frozen=True, slots=True)
class NodeLeaderChange:
    """A new leader of the quorum, and what had been done to the one before it."""

    to: str
    generation: int
    struck: str
    seconds: float

    def story(self) -> str:
        took = f" after {self.seconds * 1000:.0f} ms" if self.struck else ""
        before = f"node {self.struck}, " if self.struck else ""
        return f"{before}node {self.to} leads the quorum (generation {self.generation}){took}"


class Quorum:
    """Three nodes in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
        """Who leads, for all that they say."""
        leading = [each for each in self.servers if each.role == "leading" and each.alive]
        return max(leading, key=lambda each: each.generation, default=None)

    @property
    def whole(self) -> bool:
        """Somebody leads, and everybody is there."""
        return self.leader is not None and all(
            each.listening and each.frozen_at is None for each in self.servers
        )

    def start(self) -> None:
        """Start them all; return when each of them listens."""
        for server in self.servers:
            self._start(server)
        give_up = self.now() + START_WITHIN_S
        while not all(server.listening for server in self.servers):
            self.tick()
            dead = [each for each in self.servers if each.process is None]
            if dead or self.now() >= give_up:
                errors = self._folder / f"{(dead or self.servers)[0].name}.errors"
                raise StoreUnavailable(f"the quorum does not start: {_last_words(errors)}")
            time.sleep(0.01)

    def tick(self) -> None:
        """Reap, listen, thaw and start what is due."""
        now = self.now()
        for server in self.servers:
            while server.hear():
                pass
            if server.process is not None and server.process.poll() is not None:
                self._bury(server)
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
        """SIGKILL; it is started again after a moment, with what it has on disk."""
        if server.process is not None and server.alive:
            self._strike("killed", server)
            server.killed = True
            server.died_at = self.now()
            server.process.send_signal(SIGKILL)

    def freeze(self, server: NodeProcess) -> None:
        """SIGSTOP; it is thawed after a while."""
        if server.process is not None and server.alive and server.frozen_at is None:
            self._strike("frozen", server)
            server.frozen_at = self.now()
            server.process.send_signal(SIGSTOP)

    def thaw(self, server: NodeProcess) -> None:
        """SIGCONT."""
        if server.process is not None and server.frozen_at is not None:
            server.frozen_at = None
            server.process.send_signal(SIGCONT)

    def stop(self) -> None:
        """See to it that all are gone."""
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
                self._bury(server)

    def _start(self, server: NodeProcess) -> None:
        server.killed = server.listening = False
        server.role = "starting"
        peers = {each.name: each.address for each in self.servers}
        with (self._folder / f"{server.name}.errors").open("wb") as errors:
            # A group of its own: what a terminal sends to `doyen up` is not for the nodes.
            server.process = subprocess.Popen(
                command(server.name, peers, self._folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                process_group=0,
            )
        assert server.process.stdout is not None
        os.set_blocking(server.process.stdout.fileno(), False)

    def _bury(self, server: NodeProcess) -> None:
        if server.process is not None and server.process.stdout is not None:
            server.process.stdout.close()
        server.process, server.frozen_at, server.role = None, None, "dead"
        server.died_at = max(server.died_at, self.now())

    def _strike(self, how: str, server: NodeProcess) -> None:
        if server is self.leader:
            self._struck = f"{server.name} {how}", self.now()


def _addresses(count: int) -> list[str]:
    """Free ports of this machine, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _last_words(errors: Path) -> str:
    said = errors.read_text(errors="replace").strip() if errors.exists() else ""
    return said.splitlines()[-1] if said else "it says nothing"
