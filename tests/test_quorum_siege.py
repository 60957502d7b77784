"""Bad neighbours of a quorum that serves: strangers, liars, thieves and bores, at the doors of real
`doyen serve` processes under load.

After each of them the same node leads, in the same generation, and clients are served; in the end
their history is judged (see `history`). What a single door makes of each is in test_bad_peers.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import socket
import struct
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.msgpack import encode

from candidates import DOYEN, eventually
from doyen.errors import StoreUnusable
from doyen.lease.clock import SystemClock
from doyen.quorum.protocol.frames import MAX_FRAME, ConnectionRefused, frame
from doyen.quorum.protocol.handshake import ClientHandshake, ConnectionIdentity
from doyen.quorum.protocol.requests import REQUEST, IdentifyClient, Scan, Write
from doyen.quorum.protocol.security import Security
from doyen.stores.port import Context, open_store
from neighbours import Caller, call
from nodes import addresses
from trials import SECRET, Member, Trial

CLUSTER = "doyen"
KNOWING = Security(secret=SECRET.encode(), peer_secret=SECRET.encode())


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    with Trial(tmp_path_factory.mktemp("siege"), serve=True) as trial:
        yield trial
        assert trial.judge().count("replace")


@pytest.fixture(autouse=True)
def _undisturbed(trial: Trial) -> Iterator[None]:
    leader = trial.leader()
    generation = leader.generation
    yield
    trial.progress(30)
    assert trial.leader() is leader
    assert leader.generation == generation


def where(trial: Trial) -> list[tuple[str, int]]:
    found = [address.rsplit(":", 1) for address in trial.peers.values()]
    return [(host, int(port)) for host, port in found]


def faults(trial: Trial) -> dict[str, int]:
    """What the nodes have counted, all together."""
    counted: dict[str, int] = {}
    for address in trial.peers.values():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            lines = answer.read().decode()
        for kind, count in re.findall(r'connection_faults_total\{kind="(\w+)"\} (\d+)', lines):
            counted[kind] = counted.get(kind, 0) + int(count)
    return counted


async def test_nodes_of_another_cluster_and_nodes_without_the_secret(trial: Trial) -> None:
    context = Context(SystemClock(), lambda event: None)
    secret = SECRET.replace(" ", "%20")
    for address in trial.peers.values():
        for url in (
            f"doyen://{secret}@{address}?cluster=another",
            f"doyen://a%20long%20guess%20at%20it@{address}",
            f"doyen://{address}",
        ):
            with pytest.raises(StoreUnusable):
                await open_store(url, context)
        for me, security in (
            (ConnectionIdentity("another", "n2", 7), KNOWING),
            (ConnectionIdentity(CLUSTER, "n2", 7), Security(peer_secret=b"a long guess at it")),
            (ConnectionIdentity(CLUSTER, "", 7), KNOWING),
        ):
            with pytest.raises(ConnectionRefused):
                await call(address, me, "peer", security=security)


def test_garbage(trial: Trial) -> None:
    chance = random.Random(3)
    before = faults(trial)
    hello = ClientHandshake(ConnectionIdentity(CLUSTER, "n2", 7), "peer").begin()
    words = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000,
        b"POST /leader HTTP/1.1\r\n\r\n",
        struct.pack(">IB", 2**32 - 1, 1),
        struct.pack(">IB", MAX_FRAME, 1) + bytes(100_000),
        hello + hello,
        hello + frame(REQUEST, b"\xc1" * 1000),
        *(chance.randbytes(chance.randrange(1, 4000)) for _ in range(60)),
        *(bytes(4) + chance.randbytes(200) for _ in range(20)),
    ]
    for at in where(trial):
        for word in words:
            with socket.create_connection(at, timeout=10) as stranger, suppress(ConnectionError):
                stranger.sendall(word)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(65536):
                    pass
    least = sum(before.values()) + 100
    eventually(lambda: sum(faults(trial).values()) > least, "the garbage is counted")


async def test_authenticated_clients_that_send_garbage(trial: Trial) -> None:
    """They are let in, say something outrageous, and are shown out."""
    for address in trial.peers.values():
        for payload in (
            b"",
            b"\xc1" * 50,
            b"\x90",
            b"\xdd\xff\xff\xff\xff",
            bytes(MAX_FRAME - 100),
        ):
            caller = await client(address)
            caller.link.send(REQUEST, payload)
            await ended(caller)
        caller = await client(address)
        caller.link.send(REQUEST, encode(IdentifyClient("a client of ours")))
        caller.link.send(REQUEST, encode(Write(1, [1], [b"\xc1 not a command"])))
        caller.link.send(99, b"a kind of frame that there is not")
        await ended(caller)


async def client(address: str) -> Caller:
    return await call(address, ConnectionIdentity(CLUSTER, "", 7), "client", security=KNOWING)


async def ended(caller: Caller) -> None:
    async with asyncio.timeout(30):
        await caller.link.wait()


async def test_slow_lorises(trial: Trial) -> None:
    """More than may wait at a door, each with a byte now and then; friends come in all the same."""
    with many(trial, 700) as strangers:
        for _ in range(3):
            for stranger in strangers:
                with suppress(ConnectionError):
                    stranger.send(b"\0")
            trial.progress(20)
        for address in trial.peers.values():
            friend = await client(address)
            friend.link.abort()


@contextmanager
def many(trial: Trial, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        doors = where(trial)
        yield [
            stack.enter_context(socket.create_connection(doors[number % len(doors)], timeout=10))
            for number in range(count)
        ]


def test_ten_thousand_connections_opened_and_dropped(trial: Trial) -> None:
    reset = struct.pack("ii", 1, 0)
    words = [b"", b"\0", b"GET ", b"\x80"]
    doors = where(trial)
    for number in range(10_000):
        with socket.create_connection(doors[number % 3], timeout=30) as stranger:
            if word := words[number % 4]:
                stranger.send(word)
            if number % 2:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)


def test_a_client_that_never_reads(trial: Trial) -> None:
    """It asks for everything, again and again: the node takes nothing more from it, and keeps
    little for it."""
    leader = trial.leader()
    before = resident_bytes(leader)

    async def ask(address: str) -> None:
        caller = await client(address)
        caller.link.pause()
        caller.link.send(REQUEST, encode(IdentifyClient("a client of ours")))
        number = 0
        async with asyncio.timeout(60):
            while caller.link.send(REQUEST, encode(Scan(number, "h" * 1000))):
                number -= 1
                if number % 200 == 0:
                    await asyncio.sleep(0)
        caller.link.abort()

    asyncio.run(ask(leader.address))
    assert resident_bytes(leader) - before < 64 << 20


def resident_bytes(node: Member) -> int:
    assert node.process is not None
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{node.process.pid}/status").read_text())
    return int(line) * 1024


def test_a_thief_of_a_name(trial: Trial, tmp_path: Path) -> None:
    """A second process that has a follower's name, and knows everything else: once with an empty
    folder, once with a copy of that follower's."""
    victim = trial.followers()[0]
    shutil.copytree(trial.data(victim.name), tmp_path / "copied")
    (tmp_path / "secret").write_text(SECRET)
    for folder in ("empty", "copied"):
        peers = {**trial.peers, victim.name: addresses(1)[0]}
        command = [*DOYEN, "serve", "--json", "--id", victim.name]
        command += ["--peers", ",".join(f"{peer}={at}" for peer, at in peers.items())]
        command += ["--data-dir", str(tmp_path / folder)]
        command += ["--peer-secret-file", str(tmp_path / "secret"), "--found"]
        before = faults(trial)
        with (tmp_path / "log").open("w") as log:
            thief = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            eventually(lambda: faults(trial) != before, "the thief is noticed")  # noqa: B023
            trial.progress(50)
            assert thief.poll() is None or thief.returncode == 69
        finally:
            thief.kill()
            thief.wait()
