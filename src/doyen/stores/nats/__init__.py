"""`nats://`: NATS with JetStream, its key-value buckets.

    nats://h1,h2:4222/doyen                servers and the name of the bucket, default doyen
    nats://user:password@h1                or nats://token@h1; ?creds=FILE for an account's
    ?tls=true &ca=FILE &cert=FILE &key=FILE
    ?replicas=3                            of a bucket that is created here, default 1
    ?connect_timeout_s=3                   how long the servers may take to answer at first
    ?token_floor=N                         refuse a bucket below sequence N; make one above N

Two buckets: one for entries and leases, of which every client keeps a copy, and one for renewals,
which nobody follows. The leader record is written over nothing, or over a delete marker that was
seen; the sequence of that write is the token. No clock of a server is asked: a lease is ended by
whoever has seen its renewals cease for a whole ttl. The parts:

    link       connections, requests, what errors mean
    mirror     the copy of the bucket, and whom its changes concern
    marks      how long renewals have been standing
    store      the port: entries, leases, renewals

The client library is nats-py, the extra `nats`.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.stores.nats.store import NatsStore

__all__ = ["open_store"]


async def open_store(url: StoreURL, context: Context) -> NatsStore:
    """Open the store at `url`: JetStream answers, and the buckets are there, or are made."""
    url.refuse_unknown(
        "tls", "ca", "cert", "key", "creds", "replicas", "connect_timeout_s", "token_floor"
    )
    try:
        from doyen.stores.nats.connection import NatsAddress
        from doyen.stores.nats.store import NatsStore
    except ImportError as error:
        raise ConfigError(f'nats:// needs nats-py ({error}): pip install "doyen[nats]"') from error

    bucket = unquote(url.parts.path).strip("/") or "doyen"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", bucket):
        raise ConfigError(
            f"{bucket!r} cannot be the name of a bucket: letters, digits, - and _ only"
        )
    who, _, hosts = url.parts.netloc.rpartition("@")
    user, colon, password = who.partition(":")
    options: dict[str, object] = {"tls": _tls(url), "user_credentials": _creds(url)}
    if colon:
        options |= {"user": unquote(user), "password": unquote(password)}
    elif user:
        options |= {"token": unquote(user)}
    if not all(hosts.split(",")):
        raise ConfigError("nats:// needs a host: nats://h1,h2:4222/bucket")
    replicas, floor = (int(_number(url, name, 0)) for name in ("replicas", "token_floor"))
    store = NatsStore(
        NatsAddress(
            hosts=tuple(hosts.split(",")),
            options={name: value for name, value in options.items() if value is not None},
            connect_timeout_s=_number(url, "connect_timeout_s", 3.0),
        ),
        context,
        bucket=bucket,
    )
    try:
        await store.open(replicas=replicas, floor=floor)
    except BaseException:
        await store.close()
        raise
    return store


def _creds(url: StoreURL) -> str | None:
    path = url.options.get("creds")
    if path is not None and not Path(path).is_file():
        raise ConfigError(f"creds={path}: there is no such file")
    return path


def _tls(url: StoreURL) -> ssl.SSLContext | None:
    """Speak TLS if asked, or if given anything that only TLS has a use for."""
    value = url.options.get("tls", "")
    ca, cert, key = (url.options.get(name) for name in ("ca", "cert", "key"))
    implied = bool(ca or cert or key)
    if value not in ("", "true", "false"):
        raise ConfigError(f"tls= is true or false, not {value!r}")
    if value == "false" and implied:
        raise ConfigError("tls=false goes with none of ca=, cert= and key=")
    if value != "true" and not implied:
        return None
    if bool(cert) != bool(key):
        raise ConfigError("nats:// needs cert= and key= together: a certificate and its key")
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key)
    except OSError as error:  # of which SSLError is a kind
        raise ConfigError(f"ca=, cert= or key= cannot be used: {error}") from error
    return context


def _number(url: StoreURL, name: str, default: float) -> float:
    text = url.options.get(name, str(default))
    try:
        number = float(text)
    except ValueError as error:
        raise ConfigError(f"{name}= is a number, not {text!r}") from error
    if not 0 <= number < 2**62:
        raise ConfigError(f"{name}= is out of range: {text}")
    return number
