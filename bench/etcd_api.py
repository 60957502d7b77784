"""etcd's API on a quorum, compared with a real etcd: the same client, in the same run.

Three nodes of each run on this machine, with their default durability and timeouts. The client is
gRPC's own for Python; it calls the node that leads, except where nodes are killed.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from hpack import Encoder

from bench.figures import Figure, spread
from bench.outages import etcd_cluster, p99
from doyen.quorum.etcd_api import http2_frames as http2
from doyen.quorum.etcd_api import rpc

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import servers
from etcd_door import DoorCluster, EtcdClient

__all__ = ["etcd_api"]

VALUE = b"." * 100
PROCESSES = 4
CONNECTIONS = 10
PATIENCE_S = 0.2
"""After so long a client asks another node."""

LOAD = """
import asyncio, sys, time
sys.path[:0] = ["tests", "src"]
from doyen.quorum.etcd_api import rpc
from etcd_door import EtcdClient
async def main(address, tasks, seconds):
    done = 0
    async with EtcdClient(address) as client:
        async def write(number):
            nonlocal done
            while True:
                await client.call(rpc.PUT, key=b"load/%d" % number, value=b"." * 100)
                done += 1
        tasks = [asyncio.create_task(write(number)) for number in range(int(tasks))]
        await asyncio.sleep(0.5)
        print("ready", flush=True)
        sys.stdin.readline()
        before = done
        await asyncio.sleep(float(seconds))
        print(done - before, flush=True)
        for task in tasks: task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
asyncio.run(main(*sys.argv[1:]))
"""

Cluster = DoorCluster | servers.EtcdCluster


def _address(member: Any) -> str:
    return str(getattr(member, "door", member.address))


def _leader(cluster: Cluster) -> str:
    return _address(cluster.leader())


async def _latencies(address: str, count: int) -> list[float]:
    """The time of each write, one after the other, in ms."""
    samples = []
    async with EtcdClient(address) as client:
        for number in range(count + 20):
            began = time.perf_counter()
            await client.call(rpc.PUT, key=b"one/%d" % (number % 100), value=VALUE)
            samples.append((time.perf_counter() - began) * 1e3)
    return samples[20:]


def _throughput(address: str, in_flight: int, seconds: float) -> float:
    """Writes per second of several processes together."""
    share = str(in_flight // PROCESSES)
    command = [sys.executable, "-c", LOAD, address, share, str(seconds)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            print(file=worker.stdin, flush=True)
        return sum(int(worker.communicate()[0]) for worker in workers) / seconds
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


class _Watcher(asyncio.Protocol):
    """A connection with watches of one key. gRPC for Python takes longer to receive a response than
    a server to send it, so this reads frames, and notes when a message has arrived."""

    def __init__(self, streams: int, watches: int) -> None:
        self._numbers = range(1, 2 * streams, 2)
        self._watches = watches
        self._rest = b""
        self._data = dict.fromkeys(self._numbers, b"")
        self._transport: Any = None
        self.on_message: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        create = rpc.WATCH.request(create_request={"key": b"watched"}).SerializeToString()
        message = struct.pack(">BL", 0, len(create)) + create
        head = {
            ":method": "POST",
            ":scheme": "http",
            ":path": rpc.WATCH.path,
            ":authority": "bench",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        encoder = Encoder()
        most = {http2.INITIAL_WINDOW: http2.MAX_WINDOW}
        frames = [http2.PREFACE, http2.frame(http2.SETTINGS, 0, 0, http2.settings(most))]
        frames.append(http2.frame(http2.WINDOW_UPDATE, 0, 0, struct.pack(">L", 1 << 30)))
        for number in self._numbers:
            block = encoder.encode([*head.items()])
            frames.append(http2.frame(http2.HEADERS, http2.END_HEADERS, number, block))
            frames += [http2.frame(http2.DATA, 0, number, message)] * self._watches
        self._transport.write(b"".join(frames))

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while len(data) - at >= 9:
            size, kind = int.from_bytes(data[at : at + 3]), data[at + 3]
            flags, number = data[at + 4], int.from_bytes(data[at + 5 : at + 9])
            stop = at + 9 + size
            if stop > len(data):
                break
            if kind == http2.DATA:
                self._take(number, data[at + 9 : stop])
            elif kind in (http2.PING, http2.SETTINGS) and not flags & http2.ACK:
                payload = data[at + 9 : stop] if kind == http2.PING else b""
                self._transport.write(http2.frame(kind, http2.ACK, 0, payload))
            elif kind in (http2.RST_STREAM, http2.GOAWAY):
                raise RuntimeError(f"the server has ended a watch: {data[at:stop]!r}")
            at = stop
        self._rest = data[at:]

    def _take(self, number: int, data: bytes) -> None:
        data = self._data[number] + data
        while len(data) >= 5 and len(data) >= (stop := 5 + int.from_bytes(data[1:5])):
            self.on_message()
            data = data[stop:]
        self._data[number] = data

    def close(self) -> None:
        self._transport.abort()


async def _watched(address: str, watchers: int, changes: int, streams: int) -> list[float]:
    """The time from the begin of a write until each watch of its key is told, in ms."""
    samples: list[float] = []
    began = 0.0
    left = watchers
    told = asyncio.Event()

    def arrived() -> None:
        nonlocal left
        samples.append((time.perf_counter() - began) * 1e3)
        left -= 1
        if not left:
            told.set()

    host, port = address.split(":")
    loop = asyncio.get_running_loop()
    each = streams // CONNECTIONS
    clients = [_Watcher(each, watchers // streams) for _ in range(CONNECTIONS)]
    for client in clients:
        client.on_message = arrived
        await loop.create_connection(lambda client=client: client, host, int(port))  # type: ignore[misc]
    await told.wait()  # all watches are created
    samples.clear()
    async with EtcdClient(address) as writer:
        for number in range(changes):
            told.clear()
            left = watchers
            began = time.perf_counter()
            await writer.call(rpc.PUT, key=b"watched", value=b"%d" % number)
            await told.wait()
            await asyncio.sleep(0.05)
    for client in clients:
        client.close()
    await asyncio.sleep(0)
    return samples


async def _until_written(clients: Sequence[EtcdClient], gone: Callable[[], bool]) -> None:
    """Write, at one node after the other, until a write succeeds that was begun without the old
    leader."""
    at = 0
    while True:
        begun_after = gone()
        call = clients[at % len(clients)].call(rpc.PUT, key=b"after", value=VALUE)
        try:
            await asyncio.wait_for(call, PATIENCE_S)
        except (grpc.aio.AioRpcError, TimeoutError):
            at += 1
            await asyncio.sleep(0.001)
            continue
        if begun_after:
            return


async def _outage(cluster: Cluster) -> float:
    """How long a client that was connected to all nodes cannot write after the leader was killed,
    in ms."""
    clients = [EtcdClient(_address(member)) for member in cluster.members]
    for client in clients:
        await client.ready()
    leader = await asyncio.to_thread(cluster.leader)
    process = leader._process
    assert process is not None
    began = time.perf_counter()
    process.kill()
    await _until_written(clients, lambda: process.poll() is not None)
    took = (time.perf_counter() - began) * 1e3
    for client in clients:
        await client.__aexit__()
    await asyncio.to_thread(leader.restart)
    await _ready(cluster)
    return took


async def _ready(cluster: Cluster) -> None:
    for member in cluster.members:
        async with EtcdClient(_address(member)) as client:
            await client.ready()


def etcd_api(
    *,
    rounds: int = 5,
    calls: int = 400,
    seconds: float = 3.0,
    watchers: int = 1000,
    changes: int = 20,
    trials: int = 20,
) -> Iterable[Figure]:
    """Latency, throughput, watches and failover, of a quorum and of etcd in turn."""
    with ExitStack() as stack:
        etcd = stack.enter_context(etcd_cluster())
        ours = stack.enter_context(DoorCluster(3))
        both: list[Cluster] = [ours, etcd]
        for cluster in both:
            asyncio.run(_ready(cluster))
        samples: list[list[float]] = [[], []]
        for _ in range(rounds):
            for each, cluster in zip(samples, both, strict=True):
                each.extend(asyncio.run(_latencies(_leader(cluster), calls)))
        mine, theirs = map(statistics.median, samples)
        yield Figure(
            name="etcd API: write, one in flight, p50 against etcd",
            value=mine / theirs,
            unit="of etcd",
            limit=1.5,
            details={"ours": f"{mine:.2f} ms", "etcd": f"{theirs:.2f} ms"},
        )
        speeds: list[list[float]] = [[], []]
        for _ in range(rounds):
            for each, cluster in zip(speeds, both, strict=True):
                each.append(_throughput(_leader(cluster), 64, seconds))
        mine, theirs = map(statistics.median, speeds)
        yield Figure(
            name="etcd API: writes, 64 in flight, against etcd",
            value=mine / theirs,
            unit="of etcd",
            limit=0.7,
            at_least=True,
            details={"ours": f"{mine:.0f}/s", "etcd": f"{theirs:.0f}/s", **spread(speeds[0])},
        )
        # Few streams with many watches, and as many streams as watches.
        told = [
            [asyncio.run(_watched(_leader(each), watchers, changes, streams)) for each in both]
            for streams in (CONNECTIONS, watchers)
        ]
        yield Figure(
            name=f"etcd API: {watchers} watches of a key told, p99",
            value=max(p99(ours) for ours, _ in told),
            unit="ms",
            limit=50.0,
            details={
                f"{streams} streams": f"p50 {statistics.median(mine):.1f}, p99 {p99(mine):.1f} ms;"
                f" etcd {p99(theirs):.1f} ms"
                for streams, (mine, theirs) in zip((CONNECTIONS, watchers), told, strict=True)
            },
        )
        outages = [[asyncio.run(_outage(each)) for _ in range(trials)] for each in both]
        yield Figure(
            name="etcd API: leader killed until a write succeeds, p99",
            value=p99(outages[0]),
            unit="ms",
            limit=200.0,
            details={
                "p50": f"{statistics.median(outages[0]):.0f} ms",
                "etcd p50": f"{statistics.median(outages[1]):.0f} ms",
                "all": json.dumps([round(each) for each in sorted(outages[0])]),
            },
        )
