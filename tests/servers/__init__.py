"""Real servers for the tests, without privileges: fetched, started, subjected to faults, stopped.

    with servers.Etcd() as etcd:
        doyen.connect(etcd.url)

Every server has `url`, `port` and `pid`, and can `kill`, `freeze`, `thaw`, `stop`, `restart`
(on its data). A cluster has `members`, and `leader()` returns the one that leads. `Proxy` sits
between a client and a server and injects network faults. `Lan` is a network of hosts that can be
partitioned.
"""

from __future__ import annotations

from .consul import Consul, ConsulCluster
from .etcd import Etcd, EtcdCluster
from .fetch import Skipped, Unavailable
from .galera import GaleraCluster, GaleraMember
from .haproxy import HAProxy
from .lan import Lan
from .mariadb import MariaDB
from .nats import Nats
from .pgbouncer import PgBouncer
from .postgres import Postgres, PostgresStandby
from .process import Server, ServerFailed, free_port, running
from .proxy import Proxy
from .quorum import Quorum, QuorumCluster, QuorumNode
from .redis import Redis, RedisReplica, RedisSentinel, Valkey
from .zookeeper import ZooKeeper, ZooKeeperEnsemble

__all__ = [
    "Consul",
    "ConsulCluster",
    "Etcd",
    "EtcdCluster",
    "GaleraCluster",
    "GaleraMember",
    "HAProxy",
    "Lan",
    "MariaDB",
    "Nats",
    "PgBouncer",
    "Postgres",
    "PostgresStandby",
    "Proxy",
    "Quorum",
    "QuorumCluster",
    "QuorumNode",
    "Redis",
    "RedisReplica",
    "RedisSentinel",
    "Server",
    "ServerFailed",
    "Skipped",
    "Unavailable",
    "Valkey",
    "ZooKeeper",
    "ZooKeeperEnsemble",
    "free_port",
    "running",
]
