"""`nats://`: NATS with JetStream, its key-value buckets.

    nats://h1,h2:4222/doyen                servers and the name of the bucket, default doyen
    nats://user:password@h1                or nats://token@h1; ?creds=FILE for an account's
    ?tls=true &ca=FILE &cert=FILE &key=FILE
    ?replicas=3                            of a bucket that is created here, default 1
    ?connect_timeout_s=3                   how long the servers may take to answer at first
    ?token_floor=N                         refuse a bucket below sequence N; make one above N

Two buckets: one for entries and leases, of which every client keeps a copy, and one for renewals,
which is not copied. The leader record is written only if its key is free, and the sequence of that
write is the token. No clock of a server is used: a client ends another's lease when it has seen
no renewal for a whole ttl. The parts:

    jetstream  connections of nats-py, requests to JetStream, and what its errors mean
    buckets    the buckets: created if missing, and again if they were lost
    view       what the messages of a bucket mean
    consumer   the messages of a bucket, in order
    mirror     the copy of the bucket, fed by a consumer
    marks, renewals
               which leases were not renewed for how long
    leases     leases: granted, renewed, observed, ended
    store      the port

The client library is nats-py, the extra `nats`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.kit import url as options
from doyen.stores.kit.lifecycle import opened
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.stores.nats.store import NatsStore

PORT = 4222


async def open_store(url: StoreURL, context: Context) -> NatsStore:
    """Open the store at `url`: connect to JetStream, and create the buckets if they are missing."""
    url.refuse_unknown(
        *options.TLS_OPTIONS, "creds", "replicas", "connect_timeout_s", "token_floor"
    )
    with options.requires("nats", "nats-py"):
        from doyen.stores.nats.jetstream import NatsAddress
        from doyen.stores.nats.store import NatsStore

    bucket = unquote(url.parts.path).strip("/") or "doyen"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", bucket):
        raise ConfigError(
            f"{bucket!r} cannot be the name of a bucket: letters, digits, - and _ only"
        )
    tls = options.tls_files(url)
    client = {"tls": tls.context() if tls else None, "user_credentials": _creds(url)}
    user, password = options.login(url)
    if password is not None:
        client |= {"user": user, "password": password}
    elif user:
        client |= {"token": user}
    address = NatsAddress(
        hosts=tuple(map(str, options.hosts(url, PORT))),
        options={name: value for name, value in client.items() if value is not None},
        connect_timeout_s=options.number(url, "connect_timeout_s", 3.0),
    )
    store = NatsStore(address, context, bucket=bucket)
    opening = store.open(
        replicas=options.whole_number(url, "replicas"),
        floor=options.whole_number(url, "token_floor"),
    )
    return await opened(store, opening)


def _creds(url: StoreURL) -> str | None:
    path = url.options.get("creds")
    if path is not None and not Path(path).is_file():
        raise ConfigError(f"creds={path}: there is no such file")
    return path
