"""A server as one process, started on free ports with a temporary directory.

A `Server` is ready when it answers by its own protocol. It can be killed, frozen, thawed and
restarted on its data. Signals go to all its descendants as well. Leaving its `with` block ends the
process and removes the directory. If this process dies before that, even by SIGKILL, the janitor
cleans up.
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
from typing import Any, BinaryIO, Protocol, Self, TypeVar

from .clock import OwnClock
from .fetch import Recipe, obtain
from .folders import held_folder, readable, release_folder
from .janitor import family_of, is_running, janitor, send_signal
from .tally import fault, tidying

HOST = "127.0.0.1"
READY_WITHIN_S = 60.0
STOPPED_WITHIN_S = 10.0
STARTS = 3
"""Attempts at a first start: another program may have taken a port after it was chosen."""

PORTS = range(12000, 32000)
"""Below the ephemeral ports of the kernel, so that no outgoing connection takes the port of a
server that is being restarted."""

BLOCK = 100
"""The number of ports that a process claims at a time, until it ends."""

LISTENING = "0A"
"""The code of the state in /proc/net/tcp."""

_running: dict[int, Server] = {}


class ServerFailed(Exception):
    """A server did not start, or did not answer in time. Its log is in the message."""


class _Ports:
    """Ports that no other test process on this machine uses.

    A block of ports is claimed by an abstract Unix socket with the name of the block. Such names
    belong to the network namespace, as ports do, and are released when the process ends.
    """

    def __init__(self) -> None:
        self._owner = 0
        self._left: list[int] = []

    def take(self) -> int:
        if self._owner != os.getpid():  # after a fork the blocks belong to the parent
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
        raise ServerFailed(f"all ports from {PORTS.start} to {PORTS.stop} are in use by tests")


_ports = _Ports()


def free_port() -> int:
    """A free port that was not returned before by any running test process."""
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
    """One server process. Subclasses define its command, protocol and URL."""

    engine: str
    recipe: Recipe | None = None
    """Where its program comes from; None if it runs on this interpreter."""
    scheme: str
    stop_signal = signal.SIGTERM
    port_count = 1
    _prepared: bool
    user: str | None = None
    """The user that runs the server if the tests run as root and the server refuses to."""

    def __init__(self, *, own_clock: bool = False, **options: Any) -> None:
        """Options are settings of the server. With `own_clock` its wall clock can be stepped."""
        if self.recipe is not None:
            self._program = obtain(self.recipe)
        self.options = options
        self._own_clock = own_clock
        self._process: subprocess.Popen[bytes] | None = None
        self.frozen = False
        self._allocate()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """The store URL for doyen."""
        return f"{self.scheme}://{self.address}"

    @abstractmethod
    def command(self) -> list[str]:
        """The command that runs the server on its ports and in its directory."""

    @abstractmethod
    def ping(self) -> None:
        """Send a request by the server's own protocol. Raise an error if it is not ready."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Write a new key by the server's own protocol. Key and value are plain ASCII words."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Read a value that was written by `put`."""

    def prepare(self) -> None:
        """Prepare the directory before the first start."""
        return

    def environment(self) -> dict[str, str]:
        """Additions to the environment."""
        return {} if self.recipe is None else self._program.environment()

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
            if self.user:
                self._program = readable(self._program)
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
            start_new_session=True,  # Ctrl-C in the terminal must reach only pytest
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
        """Shut the server down regularly. Its data are kept. Idempotent."""
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
        """Kill the server and all its descendants. Its data are kept. Idempotent."""
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
        """Stop the server and all its descendants by SIGSTOP. Sockets stay open."""
        self.frozen = True
        stopped: set[int] = set()
        while new := [pid for pid in family_of(self.pid) if pid not in stopped]:
            for pid in new:
                send_signal(pid, signal.SIGSTOP)
            stopped.update(new)
        # A thread on another core may run on for a moment.
        while not all(map(is_stopped, stopped)):
            time.sleep(0.001)

    def thaw(self) -> None:
        """Continue a frozen server. Idempotent."""
        if self.frozen:
            self.frozen = False
            for pid in reversed(family_of(self.pid)):
                send_signal(pid, signal.SIGCONT)

    @fault
    def restart(self) -> None:
        """Kill the server if it runs, start it on the same ports and data, and wait for it."""
        self.kill()
        self.start()

    @fault
    def step_clock(self, seconds: float) -> None:
        """Step the wall clock of a server that was created with `own_clock`."""
        if self.clock is None:
            raise ServerFailed(f"{self.engine} has no own clock: create it with own_clock=True")
        self.clock.step(seconds)

    @tidying()
    def close(self) -> None:
        """End the server and remove its directory. Idempotent."""
        self.kill()
        _running.pop(id(self), None)
        release_folder(self.folder)

    def __enter__(self) -> Self:
        return start_or_close(self, [self])

    def __exit__(self, *_: object) -> None:
        self.close()

    def lost_its_port(self) -> bool:
        """Whether the server ended because its port was in use."""
        return not self.alive and "in use" in self.log_tail()

    @tidying()
    def start_over(self) -> None:
        """Begin again with other ports and an empty directory."""
        self.kill()
        release_folder(self.folder)
        self._allocate()

    def _allocate(self) -> None:
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
    """Start, with other ports if one was taken after it was chosen. Close everything on failure."""
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


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped, or it has ended."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(each / "stat").read_text().rpartition(")")[2].split()[0] for each in threads]
    except OSError:
        return True
    return all(state in "TtZX" for state in states)
