"""`redis://user:password@h1:p1,h2:p2/0`: Redis 6 and later, and Valkey.

    redis://h1,h2,h3/0                     the one that is the master, of those named
    redis+sentinel://h1,h2,h3/mymaster/0   the master that the sentinels name
    rediss://… rediss+sentinel://…         the same over TLS
    ?prefix=doyen            everything lies under {doyen}:
    ?token_floor=N           raise the revision counter to N, after a move or a restore
    ?replicas=N              a write counts only if N replicas have it; otherwise it is in doubt
    ?poll_s=5                how often what is watched is asked for as well, in case a hint is lost
    ?connect_timeout_s=3     when a host that does not answer is passed over
    ?tls=true&ca=…&cert=…&key=…   files of the authority, and of our certificate and its key
    ?sentinel_user=…&sentinel_password=…   who asks the sentinels, if they want to know

    scripts     the data, and all that is done with them at the server
    link        connections to the master, and what errors mean
    listener    the connection on which changes are heard
    store       the Store port
    diagnosis   what a server's settings mean

Invariants:

- *One script, one step.* The server carries out each call whole and one after another; a client
  that dies or is cancelled leaves no half, and nothing rests on the state of a connection.
- *A lease has ended when its hash is gone*, and not before; its entries go in the same script. It
  is removed by its holder, or by somebody who has seen its renewal counter unchanged for a whole
  ttl on a clock of their own, when the server's clock agrees, and only if the counter is still that
  one. A stepped server clock thus ends nothing early, and what has ended cannot be renewed.
- *Tokens survive the server.* See `scripts`. What a failover of Redis may lose, in spite of all,
  are the last writes; two may lead at a time then, and the token tells them apart.

Only the address is handled here, so that the client library is imported when it is needed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.stores.redis.store import RedisStore

__all__ = ["open_store"]

_OPTIONS = (
    "prefix",
    "token_floor",
    "replicas",
    "poll_s",
    "connect_timeout_s",
    "tls",
    "ca",
    "cert",
    "key",
    "sentinel_user",
    "sentinel_password",
)


async def open_store(url: StoreURL, context: Context) -> RedisStore:
    """Open the store at `url`."""
    try:
        from doyen.stores.redis.connection import PORT, SENTINEL_PORT, RedisAddress
        from doyen.stores.redis.scripts import LARGEST
        from doyen.stores.redis.store import RedisStore
    except ImportError as missing:
        raise ConfigError(
            f'redis:// needs redis-py ({missing}): pip install "doyen[redis]"'
        ) from missing
    sentinel = url.parts.scheme.endswith("+sentinel")
    url.refuse_unknown(*_OPTIONS)
    if not sentinel and any(name.startswith("sentinel_") for name in url.options):
        raise ConfigError("sentinel_user and sentinel_password go with redis+sentinel://")
    prefix = url.options.get("prefix", "doyen")
    if not re.fullmatch(r"[^{}\s]+", prefix):
        raise ConfigError(f"prefix is a name without braces and spaces, not {prefix!r}")
    who, _, where = url.parts.netloc.rpartition("@")
    user, _, password = who.partition(":")
    service, database = _path(url, sentinel)
    address = RedisAddress(
        hosts=tuple(_hosts(where, SENTINEL_PORT if sentinel else PORT)),
        user=unquote(user) or None,
        password=unquote(password) or None,
        database=database,
        service=service,
        sentinel_user=url.options.get("sentinel_user"),
        sentinel_password=url.options.get("sentinel_password"),
        tls=_tls(url),
        connect_timeout_s=_number(url, "connect_timeout_s", 3, 0.1, 60),
    )
    store = RedisStore(
        address,
        context,
        prefix=f"{{{prefix}}}:",
        replicas=int(_number(url, "replicas", 0, 0, 100)),
        poll_s=_number(url, "poll_s", 5, 0.05, 60),
    )
    try:
        await store.open(int(_number(url, "token_floor", 0, 0, LARGEST)))
    except BaseException:
        await store.close()
        raise
    return store


def _path(url: StoreURL, sentinel: bool) -> tuple[str | None, int]:
    """The name of the master, if sentinels know it, and the number of the database."""
    service, database = None, unquote(url.parts.path).strip("/")
    if sentinel:
        service, _, database = database.partition("/")
        if not service:
            raise ConfigError(
                "redis+sentinel:// needs the master's name: redis+sentinel://h1,h2,h3/mymaster"
            )
    if database and not (database.isascii() and database.isdigit()):
        raise ConfigError(f"a Redis database is a number, not {database!r}")
    return service, int(database or 0)


def _hosts(where: str, default_port: int) -> Iterator[tuple[str, int]]:
    """`h1,h2:p,[::1]` with each host's port."""
    for part in where.split(","):
        name, separator, port = part.rpartition(":")
        if not separator or port.endswith("]"):
            name, port = part, str(default_port)
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(f"a port is a number from 1 to 65535, not {port!r}")
        yield unquote(name.strip("[]")) or "localhost", int(port)


def _tls(url: StoreURL) -> dict[str, str | bool] | None:
    """What redis-py is to encrypt with; None: nothing."""
    value = url.options.get("tls", "true" if url.parts.scheme.startswith("rediss") else "")
    names = {"ssl_ca_certs": "ca", "ssl_certfile": "cert", "ssl_keyfile": "key"}
    files = {name: url.options[option] for name, option in names.items() if option in url.options}
    for file in files.values():
        if not os.access(file, os.R_OK):
            raise ConfigError(f"{file} cannot be read: ca, cert and key are files")
    if value not in ("", "true", "false"):
        raise ConfigError(f"tls is true or false, not {value!r}")
    if value == "false" and url.parts.scheme.startswith("rediss"):
        raise ConfigError("rediss:// is over TLS: say redis:// for tls=false")
    if value != "true":
        if files:
            raise ConfigError("ca, cert and key go with rediss:// or tls=true")
        return None
    if ("cert" in url.options) != ("key" in url.options):
        raise ConfigError("cert and key go together: a certificate and its key")
    return {"ssl_check_hostname": True, **files}


def _number(url: StoreURL, name: str, default: float, low: float, high: float) -> float:
    text = url.options.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ConfigError(f"{name} is a number from {low:g} to {high:g}, not {text!r}")
    return value
