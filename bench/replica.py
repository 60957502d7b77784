"""One process of a replicated system under load: `python -m bench.replica ROLE OPTIONS`.

    node          a `doyen.Node`, which proposes to itself
    doyen-client  writes to the keyspace of a quorum, over one connection
    etcd-client   puts to etcd, over gRPC

It uses the protocol of `bench.worker`, with commands in JSON: `load` keeps a number of writes of
100 bytes in flight for some time. The other commands are described with each role.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import msgspec

import doyen
from doyen.lease.clock import SystemClock
from doyen.model import Version
from doyen.quorum.node import new_loop
from doyen.quorum.node.proposals import ProposalLimits
from doyen.stores.port import Context, open_store

BYTES = 100
KEY = 8
TICK_S = 0.002

Write = Callable[[int], Awaitable[Any]]


def report(kind: str, **fields: Any) -> None:
    line = {"who": OPTIONS["who"], "kind": kind, **fields}
    os.write(1, (json.dumps(line) + "\n").encode())


async def load(write: Write, in_flight: int, seconds: float) -> dict[str, Any]:
    """Run `in_flight` writers, each of which waits for its answer. Returns rate and latencies."""
    clock = time.perf_counter
    took: list[float] = []
    began = clock()
    end = began + seconds

    async def writer(number: int) -> None:
        while (at := clock()) < end:
            await write(number)
            took.append(clock() - at)

    await asyncio.gather(*map(writer, range(in_flight)))
    per_s = len(took) / (clock() - began)
    took.sort()
    p99, longest = took[len(took) * 99 // 100], took[-1]
    ms = {"p50_ms": statistics.median(took), "p99_ms": p99, "max_ms": longest}
    return {"per_s": per_s, **{name: value * 1e3 for name, value in ms.items()}}


class Registers(doyen.StateMachine):
    """Keeps the latest command of each key."""

    def __init__(self) -> None:
        self.latest: dict[bytes, bytes] = {}

    def apply(self, command: bytes) -> None:
        self.latest[command[:KEY]] = command

    def snapshot(self) -> Iterator[bytes]:
        return iter([msgspec.msgpack.encode([*self.latest.values()])])

    def restore(self, pieces: Iterable[bytes]) -> None:
        commands = msgspec.msgpack.decode(b"".join(pieces), type=list[bytes])
        self.latest = {command[:KEY]: command for command in commands}


class Pauses:
    """The longest time for which the loop of a node was blocked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.longest_s = self.busiest_s = 0.0
        """In elapsed time, and in processor time of the thread of the loop."""
        self._used = 0.0
        loop.call_soon_threadsafe(self._tick, None)

    def _tick(self, due: float | None) -> None:
        now, used = time.perf_counter(), time.thread_time()
        if due is not None:
            self.longest_s = max(self.longest_s, now - due)
            self.busiest_s = max(self.busiest_s, used - self._used)
        self._used = used
        self._loop.call_later(TICK_S, self._tick, now + TICK_S)


async def node(orders: asyncio.Queue[dict[str, Any]]) -> None:
    """`status`: the leader, the generation and the last snapshot. `pauses`: the longest pauses
    since the last such command."""
    member = doyen.Node(
        OPTIONS["who"],
        peers=OPTIONS["peers"],
        data_dir=OPTIONS["folder"],
        machine=Registers(),
        found=True,
    )
    limits = ProposalLimits(**OPTIONS.get("limits", {}))
    member._options = dataclasses.replace(member._options, limits=limits)
    filling = b"." * (BYTES - KEY)

    def propose(number: int) -> Awaitable[Any]:
        return member.propose(number.to_bytes(KEY) + filling)

    async with member:
        pauses = Pauses(member._inside.loop) if OPTIONS.get("pauses") else None
        report("ready")
        while order := await orders.get():
            match order["do"]:
                case "status":
                    status = member.status()
                    report(
                        "status",
                        leader=status.leader,
                        generation=status.generation,
                        snapshot=status.snapshot,
                    )
                case "pauses" if pauses is not None:
                    report("pauses", ms=pauses.longest_s * 1e3, cpu_ms=pauses.busiest_s * 1e3)
                    pauses.longest_s = pauses.busiest_s = 0.0
                case "load":
                    report("loaded", **await load(propose, order["in_flight"], order["seconds"]))


async def doyen_client(orders: asyncio.Queue[dict[str, Any]]) -> None:
    """Each writer has its own key. `fill`: write this number of keys, once each."""
    store = await open_store(OPTIONS["url"], Context(SystemClock(), lambda event: None))
    value = b"." * BYTES

    keys = [f"bench/{OPTIONS['who']}/{number}" for number in range(1024)]
    versions: dict[int, Version | None] = {}

    async def put(number: int) -> None:
        entry = await store.put(keys[number], value, if_version=versions.get(number))
        if entry is None:
            raise AssertionError("a key with a single writer has changed")
        versions[number] = entry.version

    async def fill(first: int, keys: int, step: int) -> None:
        for number in range(first, keys, step):
            await store.put(f"bench/filled/{number}", value, if_version=None)

    report("ready")
    while order := await orders.get():
        if order["do"] == "fill":
            await asyncio.gather(*(fill(first, order["keys"], 1024) for first in range(1024)))
            report("filled")
        else:
            report("loaded", **await load(put, order["in_flight"], order["seconds"]))
    await store.close()


async def etcd_client(orders: asyncio.Queue[dict[str, Any]]) -> None:
    import grpc.aio

    from doyen.stores.etcd import rpc

    # Many servers allow a hundred streams per connection, and gRPC uses one thread for each.
    channels = [
        grpc.aio.insecure_channel(OPTIONS["address"], [("grpc.use_local_subchannel_pool", 1)])
        for _ in range(4)
    ]
    calls = [
        channel.unary_unary(
            rpc.PUT.path, rpc.PutRequest.SerializeToString, rpc.PUT.answer.FromString
        )
        for channel in channels
    ]
    value = b"." * BYTES

    def put(number: int) -> Awaitable[Any]:
        call: Awaitable[Any] = calls[number % len(calls)](
            rpc.PutRequest(key=b"bench/%d" % number, value=value)
        )
        return call

    report("ready")
    while order := await orders.get():
        report("loaded", **await load(put, order["in_flight"], order["seconds"]))
    for channel in channels:
        await channel.close()


async def main(role: Callable[[asyncio.Queue[dict[str, Any]]], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(orders.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(orders.put_nowait, {})

    threading.Thread(target=listen, daemon=True).start()
    await role(orders)


if __name__ == "__main__":
    OPTIONS: dict[str, Any] = json.loads(sys.argv[2])
    ROLES = {"node": node, "doyen-client": doyen_client, "etcd-client": etcd_client}
    # gRPC has its own poller and does not profit from uvloop.
    factory = asyncio.new_event_loop if sys.argv[1] == "etcd-client" else new_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(ROLES[sys.argv[1]]))
