"""How long a quorum accepts no writes, compared with etcd: leader killed, frozen, or transferring.

Three nodes of each run on this machine with their default timeouts. The client was connected
before, to any of the nodes.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.crew import now
from bench.figures import Figure, spread
from doyen.errors import StoreError
from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, Store, open_store
from doyen.stores.quorum.store import QuorumStore

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import servers
from served import Quorum, Served

__all__ = ["etcd_cluster", "outages", "served"]

ELECTION_S = 1.0
"""The default election timeout of doyen and of etcd."""
ETCD_PATIENCE_S = 0.2
VALUE = b"." * 100

p50 = statistics.median


def p99(samples: Sequence[float]) -> float:
    """The 99th percentile. Of fewer than a hundred samples, the largest."""
    return sorted(samples)[len(samples) * 99 // 100]


def etcd_cluster() -> servers.EtcdCluster:
    """etcd with its default durability and timeouts."""
    return servers.EtcdCluster(
        unsafe_no_fsync="false", heartbeat_interval="100", election_timeout="1000"
    )


async def _open(url: str) -> Store:
    return await open_store(url, Context(SystemClock(), lambda event: None))


async def _write(store: Store) -> None:
    key = f"bench/{random.getrandbits(60):x}"
    if await store.put(key, VALUE, if_version=None) is None:
        raise AssertionError(f"{key} existed already")


async def _until_written(
    store: Store, gone: Callable[[], bool], patience_s: float | None = None
) -> float:
    """Write repeatedly until a write succeeds that was begun after `gone()` was true, so that the
    old leader had no part in it. Returns the time. A write that takes longer than `patience_s` is
    cancelled and repeated."""
    while True:
        begun_after = gone()
        try:
            async with asyncio.timeout(patience_s):
                await _write(store)
        except (StoreError, TimeoutError):
            await asyncio.sleep(0.001)
            continue
        if begun_after:
            return now()


async def _outage(
    url: str, strike: Callable[[], Callable[[], bool]], patience_s: float | None = None
) -> float:
    """How long a client that was connected before cannot write, in ms. `strike` injects the fault
    and returns a function that tells whether it has taken effect."""
    store = await _open(url)
    try:
        await _write(store)
        await asyncio.sleep(random.uniform(0.05, 0.2))
        began = now()
        return (await _until_written(store, strike(), patience_s) - began) * 1e3
    finally:
        await store.close()


def _killed(node: Served) -> Callable[[], bool]:
    node.process.kill()
    return lambda: node.process.poll() is not None


@contextmanager
def served() -> Iterator[Quorum]:
    """Three `doyen serve` processes, one of which leads."""
    with (
        tempfile.TemporaryDirectory(prefix="doyen-bench-") as folder,
        Quorum(Path(folder)) as quorum,
    ):
        quorum.leader()
        yield quorum


def _settled(quorum: Quorum) -> Served:
    """The leader, once all nodes follow it."""
    leader = quorum.leader()
    asyncio.run(_written(quorum.url))
    for node in quorum.nodes.values():
        asyncio.run(_written(f"doyen://{node.address}"))
    return leader


async def _written(url: str) -> None:
    store = await _open(url)
    try:
        await _until_written(store, lambda: True)
    finally:
        await store.close()


def _kills(quorum: Quorum, trials: int) -> Iterator[float]:
    for _ in range(trials):
        leader = _settled(quorum)
        yield asyncio.run(_outage(quorum.url, partial(_killed, leader)))
        leader.process.wait()
        quorum.start(leader.name)


def _freezes(quorum: Quorum, trials: int) -> Iterator[float]:
    for _ in range(trials):
        leader = _settled(quorum)
        yield asyncio.run(_outage(quorum.url, partial(_at_once, leader.freeze)))
        leader.thaw()


async def _transfers(quorum: Quorum, trials: int) -> tuple[list[float], list[float]]:
    """The duration of transfers, and of the longest write meanwhile, both in ms."""
    store = await _open(quorum.url)
    assert isinstance(store, QuorumStore)
    took, waited = [], []
    for _ in range(trials):
        await asyncio.sleep(random.uniform(0.02, 0.05))
        states = [each.condition for each in await store.inspect()]
        others = [each.node for each in states if each and each.leader != each.node]
        began = now()
        moving = asyncio.ensure_future(store.administer("transfer", random.choice(others)))
        longest = 0.0
        while not moving.done():
            begun = now()
            await _write(store)
            longest = max(longest, now() - begun)
        await moving
        took.append((now() - began) * 1e3)
        waited.append(longest * 1e3)
    await store.close()
    return took, waited


async def _etcd_outages(trials: int) -> dict[str, list[float]]:
    """The same for etcd, with doyen's adapter. A member of etcd without a leader holds a write for
    seconds, so the client uses a short timeout."""
    found: dict[str, list[float]] = {"killed": [], "frozen": []}
    with etcd_cluster() as cluster:
        for _ in range(trials):
            for how, gaps in found.items():
                leader = cluster.leader()
                await _written(cluster.url)
                strike = leader.kill if how == "killed" else leader.freeze
                striking = partial(_at_once, strike)
                gaps.append(await _outage(cluster.url, striking, ETCD_PATIENCE_S))
                if how == "killed":
                    leader.start()
                else:
                    leader.thaw()
    return found


def _at_once(strike: Callable[[], object]) -> Callable[[], bool]:
    strike()
    return lambda: True


def outages(
    *,
    trials: int = 40,
    freezes: int = 20,
    transfers: int = 40,
    etcd_trials: int = 5,
    peers: bool = True,
) -> list[Figure]:
    """How long a quorum accepts no writes: leader killed, frozen, or transferring."""
    with served() as quorum:
        killed = [*_kills(quorum, trials)]
        frozen = [*_freezes(quorum, freezes)]
        _settled(quorum)
        handed, waited = asyncio.run(_transfers(quorum, transfers))
    beside = asyncio.run(_etcd_outages(etcd_trials)) if peers else {}
    etcd = {how: {"etcd_ms": spread(gaps, 0)} for how, gaps in beside.items()}
    frozen_limit = 2 * ELECTION_S * 1e3
    return [
        Figure(
            name="leader killed, until a write",
            value=p50(killed),
            unit="ms, p50",
            limit=50.0,
            details={"ms": spread(killed, 1), **etcd.get("killed", {})},
        ),
        Figure(name="leader killed, until a write", value=p99(killed), unit="ms, p99", limit=150.0),
        Figure(
            name="leader frozen, until a write",
            value=p99(frozen),
            unit="ms, p99",
            limit=frozen_limit,
            details={"ms": spread(frozen, 0), **etcd.get("frozen", {})},
        ),
        Figure(
            name="orderly transfer",
            value=p50(handed),
            unit="ms, p50",
            limit=10.0,
            details={"ms": spread(handed, 2), "longest_write_ms": spread(waited, 2)},
        ),
    ]
