"""A server as one process: started on free ports with temporary data, and ended without a trace.

A `Server` is ready when it answers by its own protocol. It can be killed, frozen, thawed and
restarted on its data; a server that forks is treated with all its descendants. Leaving its `with`
block ends the process and removes the folder.

If this process dies without cleaning up, even by SIGKILL, the janitor does it.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self, TypeVar

from .clock import OwnClock
from .folders import held_folder, release_folder
from .janitor import family_of, is_running, janitor, send_signal
from .tally import fault, tidying

HOST = "127.0.0.1"
READY_WITHIN_S = 60.0
STOPPED_WITHIN_S = 10.0
STARTS = 3
"""Attempts at a first start: somebody else may have taken a port since it was chosen."""

PORTS = range(12000, 32000)
"""Below the ports that the kernel hands to outgoing connections: none of those can take the place
of a server that is down for a moment."""

BLOCK = 100
"""How many ports a process claims at a time, for as long as it runs."""

LISTENING = "0A"
"""The kernel's word for it in its tables of sockets."""

_running: dict[int, Server] = {}


class ServerFailed(Exception):
    """A server did not start, or did not answer in time. Its log is in the message."""


class _Ports:
    """Ports that no other process of the tests on this machine gives out.

    A block of them is claimed by an abstract Unix socket with the block's name. Such names belong
    to the network namespace, as ports do, and are free again when the process has ended.
    """

    def __init__(self) -> None:
        self._owner = 0
        self._left: list[int] = []

    def take(self) -> int:
        if self._owner != os.getpid():  # after a fork the blocks are the parent's
            self._owner, self._left = os.getpid(), []
        if not self._left:
            self._left = self._claim()
        return self._left.pop()

    def _claim(self) -> list[int]:
        blocks = [*range(PORTS.start, PORTS.stop, BLOCK)]
        random.shuffle(blocks)
        for first in blocks:
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0doyen-tests-ports-{first}")
            except OSError:
                claim.close()
                continue
            claim.detach()  # open until this process ends
            return random.sample(range(first, first + BLOCK), BLOCK)
        raise ServerFailed(f"all ports from {PORTS.start} to {PORTS.stop} have been given out")


_ports = _Ports()


def free_port() -> int:
    """A port that nobody listens on, not given out before by any process that still runs."""
    while True:
        port = _ports.take()
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port


def running() -> list[Server]:
    """The servers of this process that have been started and not closed."""
    return list(_running.values())


class Server(ABC):
    """One server process. Subclasses say how it is run, asked and addressed."""

    engine: str
    stop_signal = signal.SIGTERM
    port_count = 1
    _prepared: bool
    user: str | None = None
    """Whose process it is, where we are root and the server refuses to be."""

    def __init__(self, *, own_clock: bool = False) -> None:
        self._own_clock = own_clock
        self._process: subprocess.Popen[bytes] | None = None
        self.frozen = False
        self._settle()

    @property
    @abstractmethod
    def url(self) -> str:
        """The address that doyen opens this store by."""

    @abstractmethod
    def command(self) -> list[str]:
        """The command line that runs the server on its ports and in its folder."""

    @abstractmethod
    def ping(self) -> None:
        """Ask the server something by its own protocol; raise if it is not ready."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Leave a mark, by the server's own protocol: both are plain words, the key a new one."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The mark that was left."""

    def prepare(self) -> None:
        """What must be in the folder before the first start."""
        return

    def environment(self) -> dict[str, str]:
        """Additions to the environment."""
        return {}

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerFailed(f"{self.engine} is not running")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def log_tail(self, lines: int = 30) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def start(self) -> Self:
        """Start the server and wait until it answers."""
        self.launch()
        self.await_ready()
        return self

    def launch(self) -> None:
        """Start the server without waiting for it."""
        if not self._prepared:
            self.prepare()
            self._prepared = True
        with self.log.open("ab") as log:
            self._process = self.spawn(self.command(), stdout=log)
        _running[id(self)] = self
        janitor.hold_process(self.pid)

    def spawn(
        self, command: list[str], stdout: BinaryIO, stdin: BinaryIO | None = None
    ) -> subprocess.Popen[bytes]:
        user = self._owner
        clock = self.clock.environment() if self.clock else {}
        own = {"TMPDIR": str(self.folder), **self.environment(), **clock}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, **own},
            stdin=stdin or subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is for pytest
            user=user,
            group="nogroup" if user else None,
            extra_groups=[] if user else None,
        )

    def await_ready(self, within_s: float = READY_WITHIN_S) -> None:
        give_up = time.monotonic() + within_s
        while True:
            try:
                self.ping()
                if self.port in ports_of(family_of(self.pid)):
                    return
                raise ValueError("another server answers on its port")
            except (OSError, ValueError) as failure:
                if not self.alive:
                    raise self._failure("ended while starting") from failure
                if time.monotonic() > give_up:
                    raise self._failure(f"not ready after {within_s:g} s") from failure
            time.sleep(0.02)

    @fault
    def stop(self) -> None:
        """End the server in its own orderly way; its data stay. Idempotent."""
        if self._process is None:
            return
        self.thaw()
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    @fault
    def kill(self) -> None:
        """End the server and all its descendants at once; its data stay. Idempotent."""
        if self._process is None:
            return
        family = family_of(self.pid)
        for pid in family:
            send_signal(pid, signal.SIGKILL)
        self._process.wait()
        while any(is_running(pid) for pid in family):
            time.sleep(0.005)
        janitor.release_process(self.pid)
        self._process = None
        self.frozen = False

    @fault
    def freeze(self) -> None:
        """Stop the server and all its descendants in their tracks; sockets stay open."""
        self.frozen = True
        stopped: set[int] = set()
        while new := [pid for pid in family_of(self.pid) if pid not in stopped]:
            for pid in new:
                send_signal(pid, signal.SIGSTOP)
            stopped.update(new)
        # A thread that runs on another core goes on for a moment.
        while not all(map(stands_still, stopped)):
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let a frozen server go on. Idempotent."""
        if self.frozen:
            self.frozen = False
            for pid in reversed(family_of(self.pid)):
                send_signal(pid, signal.SIGCONT)

    @fault
    def restart(self) -> None:
        """Kill the server if it runs; start it on its ports and data; wait until it answers."""
        self.kill()
        self.start()

    @fault
    def step_clock(self, seconds: float) -> None:
        """Move the server's wall clock from where it is; for a server with a clock of its own."""
        if self.clock is None:
            raise ServerFailed(f"{self.engine} was not given a clock of its own")
        self.clock.step(seconds)

    @tidying()
    def close(self) -> None:
        """End the server and remove all it has left. Idempotent."""
        self.kill()
        _running.pop(id(self), None)
        release_folder(self.folder)

    def __enter__(self) -> Self:
        return start_or_close(self, [self])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def lost_its_port(self) -> bool:
        """Whether the server ended because somebody else listens where it should."""
        return not self.alive and "in use" in self.log_tail()

    @tidying()
    def start_over(self) -> None:
        """Forget everything, as if never started: other ports, an empty folder."""
        self.kill()
        release_folder(self.folder)
        self._settle()

    def _settle(self) -> None:
        self.ports = tuple(free_port() for _ in range(self.port_count))
        self.folder = held_folder(f"doyen-{self.engine}-", self._owner)
        self.clock = OwnClock(self.folder) if self._own_clock else None
        self._prepared = False

    @property
    def _owner(self) -> str | None:
        return self.user if os.geteuid() == 0 else None

    def _failure(self, what: str) -> ServerFailed:
        return ServerFailed(f"{self.engine} {what}; the end of its log:\n{self.log_tail()}")


class Startable(Protocol):
    """A server, or several that start together."""

    def start(self) -> Self: ...

    def close(self) -> None: ...


Whole = TypeVar("Whole", bound=Startable)


def start_or_close(whole: Whole, servers: Sequence[Server]) -> Whole:
    """Start, on other ports if one was taken since it was chosen; leave nothing if that fails."""
    for attempt in range(STARTS):
        try:
            return whole.start()
        except BaseException as failure:
            taken = any(server.lost_its_port() for server in servers)
            if not isinstance(failure, ServerFailed) or not taken or attempt == STARTS - 1:
                whole.close()
                raise
            for server in servers:
                server.start_over()
    raise AssertionError("unreachable")


def ports_of(pids: Sequence[int]) -> set[int]:
    """The TCP ports that processes listen on."""
    sockets = set()
    for pid in pids:
        try:
            sockets |= {os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
        except FileNotFoundError:
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in sockets:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def stands_still(pid: int) -> bool:
    """Whether every thread of it is stopped, or it is gone."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(each / "stat").read_text().rpartition(")")[2].split()[0] for each in threads]
    except OSError:
        return True
    return all(state in "TtZX" for state in states)
