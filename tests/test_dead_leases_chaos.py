"""A hundred thousand leases whose holders have crashed, on every engine.

ZooKeeper has a few hundred: each of its leases is a session with a connection of its own, and a
hundred thousand connections are more than one process may have. Consul has ten thousand: it makes
a few hundred sessions a second.
"""

from __future__ import annotations

import pytest

import servers
import test_consul_conformance
import test_etcd_conformance
import test_mysql_conformance
import test_nats_conformance
import test_postgresql_conformance
import test_quorum_conformance
import test_redis_conformance
import test_zookeeper_conformance
from doyen.testing import LinkedStoreConformance
from linked import ServerHarness

MANY = 100_000

ENGINES: dict[str, tuple[type[ServerHarness], type[servers.Server], int]] = {
    "consul": (test_consul_conformance.Harness, servers.Consul, 10_000),
    "etcd": (test_etcd_conformance.Harness, servers.Etcd, MANY),
    "mysql": (test_mysql_conformance.Harness, servers.MariaDB, MANY),
    "nats": (test_nats_conformance.Harness, servers.Nats, MANY),
    "postgresql": (test_postgresql_conformance.Harness, servers.Postgres, MANY),
    "redis": (test_redis_conformance.Harness, servers.Redis, MANY),
    "zookeeper": (test_zookeeper_conformance.Harness, servers.ZooKeeper, 300),
}


@pytest.mark.chaos
@pytest.mark.parametrize("engine", ENGINES)
def test_a_hundred_thousand_dead_leases(engine: str) -> None:
    kind, start, count = ENGINES[engine]
    with start() as server:
        harness = kind(server)
        harness.dead_leases = count
        LinkedStoreConformance().test_leases_of_crashed_clients(harness)


@pytest.mark.chaos
def test_a_hundred_thousand_dead_leases_in_a_quorum() -> None:
    with servers.QuorumCluster() as quorum:
        harness = test_quorum_conformance.Harness(quorum)
        harness.dead_leases = MANY
        LinkedStoreConformance().test_leases_of_crashed_clients(harness)
