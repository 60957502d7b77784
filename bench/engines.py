"""How long an election is without a leader on every engine, compared with other libraries.

Three values are shown for each engine: doyen, other libraries in their own idiom at the same ttl,
and the *floor*, the minimum of any handover on this engine: one write that deletes the record, the
notification of the waiting client, and one write that creates the record. The floor is measured
with doyen's adapter, without an election and without doyen's thread. It is measured twice: between
two processes, as every handover is, alternately with the handovers; and between two connections of
one process, which does not become idle in between.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.crew import Crew, now
from bench.failover import Contest
from bench.figures import Figure, spread
from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, Store, open_store

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import servers
from engines import SLACK_S, worst_s

__all__ = ["ENGINES", "engines"]

TIMES_FLOOR = 1.5


@dataclass(frozen=True)
class Engine:
    """An engine under measurement."""

    start: Callable[[], servers.Server]
    ttl_s: float = 2.0
    peers: tuple[str, ...] = ()


ENGINES = {
    "etcd": Engine(servers.Etcd, peers=("etcd3", "tooz-etcd")),
    "zookeeper": Engine(servers.ZooKeeper, peers=("kazoo", "tooz-zookeeper")),
    "postgresql": Engine(
        lambda: servers.Postgres(fsync="on"), peers=("advisory", "tooz-postgresql")
    ),
    "mysql": Engine(servers.MariaDB),
    "consul": Engine(lambda: servers.Consul(session_ttl_min="1s")),
    "redis": Engine(servers.Redis, peers=("tooz-redis",)),
    "nats": Engine(servers.Nats),
}


class OnEngine(Contest):
    """A leader and a waiting candidate on a running server."""

    def __init__(self, crew: Crew, kind: str, server: servers.Server, ttl_s: float) -> None:
        self._server, self._ttl_s = server, ttl_s
        super().__init__(crew, kind)

    def _start(self, who: str) -> str:
        if self._kind == "doyen":
            options = {"url": self._server.url, "events": ["waiting"], "ttl_s": self._ttl_s}
            return self._crew.start(who, "async-candidate", **options)
        if self._kind == "bare":
            return self._crew.start(who, "bare", url=self._server.url)
        from bench.peers import PEER, interpreter

        command = [PEER, self._kind, who, str(self._server.port), str(self._ttl_s)]
        return self._crew.start_command(who, command, interpreter(self._kind))


async def floor_ms(url: str, trials: int) -> list[float]:
    """Delete, be notified, create: on two connections, from the first call to the last answer."""
    context = Context(SystemClock(), lambda event: None)
    one, two = [await open_store(url, context) for _ in range(2)]
    stores: tuple[Store, Store] = (one, two)
    leases = [await store.grant(10.0) for store in stores]
    took = []
    entry = (await one.create("elections/floor/leader", b"", leases[0])).entry
    for trial in range(trials):
        holder, waiter = stores[trial % 2], stores[(trial + 1) % 2]
        notified = asyncio.Event()
        watch = await waiter.watch(entry.key, notified.set)
        await asyncio.sleep(0.02)
        notified.clear()
        began = now()
        freeing = asyncio.ensure_future(holder.delete(entry.key, if_version=entry.version))
        while True:
            await notified.wait()
            notified.clear()
            creation = await waiter.create(entry.key, b"", leases[(trial + 1) % 2])
            if creation.won:
                break
        took.append((now() - began) * 1e3)
        entry = creation.entry
        watch.close()
        await freeing
        for store, lease in zip(stores, leases, strict=True):
            await store.renew(lease)
    for store, lease in zip(stores, leases, strict=True):
        await store.revoke(lease)
        await store.close()
    return took


def engines(
    *, trials: int = 40, crashes: int = 6, only: str = "", peers: bool = True
) -> list[Figure]:
    """Crash failover and handover on every engine, compared with other libraries and the floor.

    `only`: names of engines, separated by commas.
    """
    figures = []
    for name in only.split(",") if only else ENGINES:
        engine = ENGINES[name]
        with engine.start() as server:
            kinds = ("doyen", *engine.peers) if peers else ("doyen",)
            figures += measure(name, server, engine.ttl_s, kinds, trials, crashes)
    return figures


def measure(
    name: str,
    server: servers.Server,
    ttl_s: float,
    kinds: tuple[str, ...],
    trials: int,
    crashes: int,
) -> list[Figure]:
    """The figures of one engine."""
    in_one = asyncio.run(floor_ms(server.url, trials))
    handed: dict[str, list[float]] = {}
    crashed: dict[str, list[float]] = {}
    stuck: list[str] = []
    with Crew() as crew, Crew() as bare:
        floor = OnEngine(bare, "bare", server, ttl_s)
        for kind in kinds:
            contest = OnEngine(crew, kind, server, ttl_s)
            slow = kind != "doyen"  # other libraries poll, so fewer trials
            try:
                for _ in range(min(trials, 10) if slow else trials):
                    contest.handover()
                    if not slow:
                        floor.handover()
                bare.dismiss()
                handed[kind], contest.gaps_ms = contest.gaps_ms, []
                for _ in range(min(crashes, 3) if slow else crashes):
                    contest.crash()
                crashed[kind] = contest.gaps_ms
            except TimeoutError:
                if not slow:
                    raise
                stuck.append(kind)
            crew.dismiss()
    floors = floor.gaps_ms
    worst = worst_s(server.url, ttl_s)
    p50 = statistics.median
    ours = max(crashed["doyen"]) / 1e3
    others: dict[str, Any] = {kind: spread(gaps, 0) for kind, gaps in crashed.items()}
    beside: dict[str, Any] = {kind: spread(gaps, 1) for kind, gaps in handed.items()}
    return [
        Figure(
            name=f"{name}: crash failover",
            value=ours,
            unit="s, max",
            limit=round(worst + SLACK_S, 3),
            details={"ttl_s": ttl_s, **{f"{kind}_ms": each for kind, each in others.items()}},
        ),
        Figure(
            name=f"{name}: handover",
            value=p50(handed["doyen"]),
            unit="ms, p50",
            limit=round(TIMES_FLOOR * p50(floors), 2),
            details={
                "times_floor": round(p50(handed["doyen"]) / p50(floors), 2),
                "floor_ms": spread(floors, 1),
                "times_floor_in_one_process": round(p50(handed["doyen"]) / p50(in_one), 2),
                "floor_in_one_process_ms": spread(in_one, 1),
                **{f"{kind}_ms": each for kind, each in beside.items()},
                **dict.fromkeys(stuck, "hung: no candidate took over within a minute"),
            },
        ),
    ]
