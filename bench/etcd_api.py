"""etcd's API on a quorum, compared with a real etcd: the same client, in the same run.

Three nodes of each run on this machine, with their default durability and timeouts. The client is
gRPC's own for Python; it calls the node that leads, except where nodes are killed.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from bench.figures import Figure, spread
from bench.outages import etcd_cluster, p99
from doyen.quorum.etcd_api import rpc

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import servers
from etcd_door import DoorCluster, EtcdClient

__all__ = ["etcd_api"]

VALUE = b"." * 100
PROCESSES = 4
STREAMS = 10
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


async def _watched(address: str, watchers: int, changes: int) -> list[float]:
    """The time from the begin of a write until each watch of its key is told, in ms."""
    samples: list[float] = []
    began = 0.0
    told = asyncio.Event()
    left = 0
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(STREAMS)]
    # Responses are not decoded: this client must not be slower than the server.
    streams = [channel.stream_stream(rpc.WATCH.path)() for channel in channels]
    create = rpc.WATCH.request(create_request={"key": b"watched"}).SerializeToString()
    for stream in streams:
        for _ in range(watchers // STREAMS):
            await stream.write(create)
        for _ in range(watchers // STREAMS):
            assert rpc.WATCH.response.FromString(await stream.read()).created

    async def listen(stream: Any) -> None:
        nonlocal left
        while (response := await stream.read()) is not grpc.aio.EOF:
            if b"watched" in response:
                samples.append((time.perf_counter() - began) * 1e3)
                left -= 1
                if not left:
                    told.set()

    listening = [asyncio.create_task(listen(stream)) for stream in streams]
    async with EtcdClient(address) as writer:
        for number in range(changes):
            told.clear()
            left = watchers // STREAMS * STREAMS
            began = time.perf_counter()
            await writer.call(rpc.PUT, key=b"watched", value=b"%d" % number)
            await told.wait()
            await asyncio.sleep(0.05)
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)
    for channel in channels:
        await channel.close()
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
        told = [asyncio.run(_watched(_leader(each), watchers, changes)) for each in both]
        yield Figure(
            name=f"etcd API: {watchers} watches of a key told, p99",
            value=p99(told[0]),
            unit="ms",
            limit=50.0,
            details={"p50": f"{statistics.median(told[0]):.1f} ms", "etcd": f"{p99(told[1]):.1f}"},
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
