"""The engines on which elections are tested: how each is started, and its worst-case failover."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import servers
from doyen.lease.clock import SystemClock
from doyen.lease.timing import Timing
from doyen.stores.port import Context, open_store
from servers.cluster import Cluster

SLACK_S = 0.2


@dataclass(frozen=True)
class Engine:
    """How an engine is started, and the ttl of its trials."""

    start: Callable[[], servers.Server]
    ttl_s: float
    slack_s: float = SLACK_S
    """By how much a failover may exceed the worst case, on a machine with other load."""


ENGINES = {
    "consul": Engine(lambda: servers.Consul(session_ttl_min="1s"), 1.0),
    "etcd": Engine(lambda: servers.Etcd(heartbeat_interval="20", election_timeout="200"), 2.0),
    "mysql": Engine(servers.MariaDB, 2.0),
    "nats": Engine(servers.Nats, 2.0),
    "postgresql": Engine(servers.Postgres, 2.0),
    "quorum": Engine(servers.Quorum, 2.0),
    "redis": Engine(servers.Redis, 2.0),
    "valkey": Engine(servers.Valkey, 2.0),
    "zookeeper": Engine(servers.ZooKeeper, 2.0),
}


@dataclass(frozen=True)
class ClusterEngine:
    """A cluster of an engine, and a ttl that outlasts its own elections on a busy machine too."""

    start: Callable[[], Cluster[Any]]
    ttl_s: float


CLUSTERS = {
    "consul": ClusterEngine(servers.ConsulCluster, 15.0),
    "etcd": ClusterEngine(servers.EtcdCluster, 5.0),
    "galera": ClusterEngine(servers.GaleraCluster, 10.0),
    "quorum": ClusterEngine(servers.QuorumCluster, 5.0),
    "zookeeper": ClusterEngine(servers.ZooKeeperEnsemble, 16.0),
}


@dataclass(frozen=True)
class Trial:
    """An engine with its server running."""

    engine: Engine
    server: servers.Server
    worst_s: float
    """The worst-case failover, computed from the capabilities of the store."""

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def ttl_s(self) -> float:
        return self.engine.ttl_s

    @property
    def bound_s(self) -> float:
        return self.worst_s + self.engine.slack_s


@contextmanager
def on_trial(name: str) -> Iterator[Trial]:
    """Start a server of the engine of this name."""
    engine = ENGINES[name]
    with engine.start() as server:
        yield Trial(engine, server, worst_s(server.url, engine.ttl_s))


def worst_s(url: str, ttl_s: float) -> float:
    """The worst-case failover, from the granted ttl and the capabilities of the store."""

    async def ask() -> float:
        store = await open_store(url, Context(SystemClock(), lambda event: None))
        lease = await store.grant(ttl_s)
        await store.revoke(lease)
        await store.close()
        able = store.capabilities
        timing = Timing(ttl_s=lease.ttl_s, renewals_lag=able.renewals_lag)
        return timing.worst_failover_s(expiry_factor=able.expiry_factor, notice_s=able.notice_s)

    return asyncio.run(ask())
