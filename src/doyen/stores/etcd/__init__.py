"""`etcd://`: an etcd cluster, through its v3 API.

    etcd://h1,h2:2379,h3/app/doyen         members and the prefix of all keys, default /doyen
    etcd://user:password@h1                percent-encode what a URL could misread
    ?tls=true &ca=FILE &cert=FILE &key=FILE
    ?connect_timeout_s=3                   how long one member may take to answer at first
    ?token_floor=N                         refuse a cluster whose revision is below N

A lease is etcd's lease; the leader record is created by a transaction, if absent; its creation
revision is the token. A ticket's key tells its rank, and its creation revision its place within
the rank. The parts:

    rpc        the messages and methods, from rpc.proto
    cluster    members, connections, failover, tokens of users, what errors mean
    reads      reads that come together go together
    leases     renewal, on a stream of its own
    watches    notification, on another
    store      the port: keys and transactions

The client library is grpcio, the extra `etcd`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.stores.etcd.store import EtcdStore

__all__ = ["open_store"]

PORT = 2379

# Before grpc is imported: its own support for forks crashes one child in five while calls are
# under way. Without it a child is safe as long as it leaves gRPC alone, and `refuse_after_fork`
# sees to that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


async def open_store(url: StoreURL, context: Context) -> EtcdStore:
    """Open the store at `url`: one member answers, and the keys can be read."""
    del context  # etcd counts its leases itself, and does not say whose have ended
    url.refuse_unknown("tls", "ca", "cert", "key", "connect_timeout_s", "token_floor")
    try:
        import grpc

        from doyen.stores.etcd.connection import Credentials, EtcdCluster, refuse_after_fork
        from doyen.stores.etcd.store import EtcdStore
    except ImportError as error:
        raise ConfigError(f'etcd:// needs grpcio ({error}): pip install "doyen[etcd]"') from error

    refuse_after_fork()
    who, _, hosts = url.parts.netloc.rpartition("@")
    user, _, password = who.partition(":")
    files = {name: _file(url, name) for name in ("ca", "cert", "key")}
    tls = None
    if _tls(url):
        if (files["cert"] is None) != (files["key"] is None):
            raise ConfigError("etcd:// needs cert= and key= together: a certificate and its key")
        tls = grpc.ssl_channel_credentials(files["ca"], files["key"], files["cert"])
    store = EtcdStore(
        EtcdCluster(
            list(_members(hosts)),
            Credentials(user=unquote(user), password=unquote(password), tls=tls),
            connect_timeout_s=_number(url, "connect_timeout_s", 3.0),
        ),
        prefix=unquote(url.parts.path).rstrip("/") or "/doyen",
    )
    try:
        await store.open(int(_number(url, "token_floor", 0)))
    except BaseException:
        await store.close()
        raise
    return store


def _members(hosts: str) -> Iterator[str]:
    """`h1,h2:p,[::1]` with each member's port."""
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        if not port.isdigit():  # no port, or the end of an address in brackets
            name, port = host, str(PORT)
        if not name or (":" in name and not name.startswith("[")):
            raise ConfigError(
                f"{host!r} is not a host: etcd://h1,h2:2379,[::1]:2379, the port being optional"
            )
        yield f"{name}:{port}"


def _tls(url: StoreURL) -> bool:
    """Whether to speak TLS: if asked, or if given anything that only TLS has a use for."""
    value = url.options.get("tls", "")
    implied = any(name in url.options for name in ("ca", "cert", "key"))
    if value not in ("", "true", "false"):
        raise ConfigError(f"tls= is true or false, not {value!r}")
    if value == "false" and implied:
        raise ConfigError("tls=false goes with none of ca=, cert= and key=")
    return value == "true" or implied


def _number(url: StoreURL, name: str, default: float) -> float:
    text = url.options.get(name, str(default))
    try:
        number = float(text)
    except ValueError as error:
        raise ConfigError(f"{name}= is a number, not {text!r}") from error
    if not 0 <= number < 2**62:
        raise ConfigError(f"{name}= is out of range: {text}")
    return number


def _file(url: StoreURL, name: str) -> bytes | None:
    path = url.options.get(name)
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}={path} cannot be read: {error.strerror}") from error
