"""Candidates of other programs: processes that take part in an election, and say when they lead."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from etcd_door import doors
from servers.consul import RECIPE
from servers.etcd import ETCDCTL
from servers.fetch import obtain
from servers.golang import built

LEADS = "leads"
BODY = f"echo {LEADS}; exec sleep 1000"
"""What a candidate that runs a command runs."""


class ForeignCandidate:
    """A process that prints a line when it leads."""

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.printed: list[str] = []

    async def line(self) -> str:
        """The next line that it prints."""
        text = await asyncio.to_thread(self._output.readline)
        assert text, f"it has ended after {self.printed}"
        self.printed.append(text.decode().strip())
        return self.printed[-1]

    async def elected(self) -> tuple[str, str]:
        """The election and the proposal that `etcdctl elect` prints."""
        key, proposal = await self.line(), await self.line()
        return key.rpartition("/")[0], proposal

    async def leads(self) -> None:
        """Wait until it leads."""
        while LEADS not in await self.line():
            pass

    async def elected_at(self) -> int:
        """The revision that the program in Go prints when it leads."""
        while not (text := await self.line()).startswith(f"{LEADS} "):
            pass
        return int(text.split()[2])

    async def leader(self) -> tuple[int, str]:
        """The revision and the proposal of the leader that the observer in Go prints."""
        _, _, revision, proposal = (await self.line()).split()
        return int(revision), proposal

    def say(self, text: str) -> None:
        """Write a line to its standard input."""
        self._input.write(f"{text}\n".encode())
        self._input.flush()

    def signal(self, number: signal.Signals) -> None:
        """To it and to what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def interrupt(self) -> None:
        """Interrupt it and what it has started, as a terminal does."""
        self.signal(signal.SIGINT)

    async def resign(self) -> None:
        """Interrupt it, and wait for its end."""
        self.interrupt()
        await asyncio.to_thread(self._process.wait)
        self.kill()

    def kill(self) -> None:
        """Kill it and what it has started."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._input.close()
        self._output.close()


class Others(ABC):
    """A server, and the other program whose candidates take part there."""

    url: str
    ttl_s = 30.0
    """Of leases of both kinds. It outlasts a stall of the machine, where it does not matter."""
    least_ttl_s = 2.0
    shown = "theirs"
    """How its candidates show themselves, as a regular expression."""
    has_line = True
    patience_s = 60.0

    def __init__(self) -> None:
        self.started: list[ForeignCandidate] = []

    @abstractmethod
    def command(self, name: str, body: str) -> ForeignCandidate:
        """A candidate that leads until it is interrupted."""

    def candidate(self, name: str, body: str = BODY) -> ForeignCandidate:
        return self.keep(self.command(name, body))

    def ours(self, name: str, body: str = BODY, url: str = "") -> ForeignCandidate:
        """`doyen run` as a process."""
        store = ["--store", url or self.url, "--ttl", f"{self.ttl_s:g}", "--name", "process"]
        command = [sys.executable, "-m", "doyen", "run", *store, name, "--", "sh", "-c", body]
        return self.keep(ForeignCandidate(command))

    def keep(self, started: ForeignCandidate) -> ForeignCandidate:
        self.started.append(started)
        return started

    def close(self) -> None:
        for each in self.started:
            each.kill()


class Etcdctl(Others):
    """`etcdctl lock`, whose value is empty, so that its lease is shown; `etcdctl elect` has a
    proposal."""

    shown = "[0-9a-f]+"

    def __init__(self, address: str) -> None:
        super().__init__()
        self.url = f"etcd://{address}?layout=concurrency"
        self._endpoint = address

    def run(self, *arguments: str) -> ForeignCandidate:
        command = [str(obtain(ETCDCTL).path), *arguments]
        return self.keep(
            ForeignCandidate(command, ETCDCTL_API="3", ETCDCTL_ENDPOINTS=self._endpoint)
        )

    def command(self, name: str, body: str) -> ForeignCandidate:
        return self.run("lock", f"--ttl={self.ttl_s:.0f}", name, "--", "sh", "-c", body)


class Go(Etcdctl):
    """Go's concurrency package."""

    shown = "theirs"

    def command(self, name: str, body: str) -> ForeignCandidate:
        return self._start("elect", name, "theirs", f"{self.ttl_s:.0f}", body)

    def mutex(self, name: str) -> ForeignCandidate:
        return self.keep(self._start("lock", name, f"{self.ttl_s:.0f}"))

    def observer(self, name: str) -> ForeignCandidate:
        return self.keep(self._start("observe", name))

    def _start(self, *arguments: str) -> ForeignCandidate:
        return ForeignCandidate([str(go_candidate()), self._endpoint, *arguments])


def go_candidate() -> Path:
    """The program in Go, built at the first call. The fixture `go_program` calls it in time."""
    return built(Path(__file__).with_name("candidate.go"))


class Kazoo(Others):
    """kazoo's `Election`, in a process of its own."""

    PROGRAM = """
import subprocess, sys
from kazoo.client import KazooClient

def lead():
    subprocess.run(["sh", "-c", sys.argv[3]])

client = KazooClient(sys.argv[1], timeout=float(sys.argv[4]))
client.start()
try:
    client.Election(sys.argv[2], "theirs").run(lead)
except KeyboardInterrupt:
    client.stop()
"""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.url = f"zookeeper://{address}/app?layout=kazoo"
        self._address = address

    def command(self, name: str, body: str) -> ForeignCandidate:
        given = [f"{self._address}/app", name, body, str(self.ttl_s)]
        return ForeignCandidate([sys.executable, "-c", self.PROGRAM, *given])


class ConsulLock(Others):
    """`consul lock`, whose session has a name. It lives for 15 to 30 s after its end, and is
    followed by a lock-delay of 15 s."""

    least_ttl_s = 10.0
    has_line = False
    patience_s = 180.0

    def __init__(self, address: str) -> None:
        super().__init__()
        self.url = f"consul://{address}?layout=lock"
        self._address = address

    def command(self, name: str, body: str) -> ForeignCandidate:
        options = [f"-http-addr={self._address}", "-name=theirs", name, body]
        return ForeignCandidate([str(obtain(RECIPE).path), "lock", *options])


@asynccontextmanager
async def others_on(engine: str, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """The engine, and `go` after it for candidates in Go instead of etcdctl."""
    engine, _, kind = engine.partition(" ")
    etcd: Callable[[str], Others] = Go if kind else Etcdctl
    if engine == "quorum":
        async with doors(request.getfixturevalue("tmp_path")) as quorum:
            others = etcd(quorum.addresses[0])
            try:
                yield others
            finally:
                others.close()
        return
    kinds: dict[str, Callable[[str], Others]] = {
        "etcd": etcd,
        "zookeeper": Kazoo,
        "consul": ConsulLock,
    }
    others = kinds[engine](request.getfixturevalue(engine).address)
    try:
        yield others
    finally:
        others.close()
