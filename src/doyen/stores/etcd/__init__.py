"""`etcd://`: an etcd cluster, through its v3 API.

    etcd://h1,h2:2379,h3/app/doyen         members and the prefix of all keys, default /doyen
    etcd://user:password@h1                percent-encode reserved characters
    ?tls=true &ca=FILE &cert=FILE &key=FILE
    ?connect_timeout_s=3                   deadline of the first answer of a member
    ?token_floor=N                         refuse a cluster whose revision is below N
    ?layout=concurrency                    share a line with etcdctl and Go's concurrency package

A lease is etcd's lease. The leader record is created by a transaction, if absent; its creation
revision is the token. A ticket's key has its rank, and its creation revision is its place within
the rank. The parts:

    rpc         the messages and methods, from rpc.proto
    connection  channels to members, login, failover, errors
    leases      renewal, on a stream of its own
    watches     notification, on another
    store       the port: keys and transactions
    concurrency the port in the layout of Go's concurrency package

The client library is grpcio, the extra `etcd`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.stores.kit import url as options
from doyen.stores.kit.lifecycle import opened
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.stores.etcd.store import EtcdStore

# Set before grpc is imported. gRPC's own support for forks crashes one child in five while calls
# are in flight. Without it, a child is safe as long as it does not use gRPC, which
# `refuse_after_fork` ensures.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


async def open_store(url: StoreURL, context: Context) -> EtcdStore:
    """Open the store at `url`: one member answers, and the keys can be read."""
    del context  # etcd keeps the time of its leases, and does not report whose have ended
    url.refuse_unknown(*options.TLS_OPTIONS, "connect_timeout_s", "token_floor", "layout")
    with options.requires("etcd", "grpcio"):
        from doyen.stores.etcd.concurrency import ConcurrencyStore
        from doyen.stores.etcd.connection import EtcdCluster
        from doyen.stores.etcd.store import EtcdStore

    cluster = EtcdCluster(url)
    prefix = unquote(url.parts.path).rstrip("/")
    if options.choice(url, "layout", "", "", "concurrency"):
        store: EtcdStore = ConcurrencyStore(cluster, prefix=prefix)
    else:
        store = EtcdStore(cluster, prefix=prefix or "/doyen")
    return await opened(store, store.open(options.whole_number(url, "token_floor")))
