"""`redis://user:password@h1:p1,h2:p2/0`: Redis 6 and later, and Valkey.

    redis://h1,h2,h3/0                     the one that is the master, of those named
    redis+sentinel://h1,h2,h3/mymaster/0   the master that the sentinels name
    rediss://… rediss+sentinel://…         the same over TLS
    ?prefix=doyen            all keys begin with {doyen}:
    ?token_floor=N           raise the revision counter to N, after a move or a restore
    ?replicas=N              a write is confirmed only if N replicas have it; otherwise its outcome
                             is unknown
    ?poll_s=5                how often to look for changes as well, in case a notification is lost
    ?connect_timeout_s=3     how long a host may take to answer before the next one is tried
    ?tls=true&ca=…&cert=…&key=…   files of the authority, of the client's certificate and its key
    ?sentinel_user=…&sentinel_password=…   the login at the sentinels, if they need one

    scripts     the data, and the scripts that read and change it
    connection  connections to servers, the one that is the master, and running scripts there
    subscriber  the connection on which notifications of changes arrive
    store       the Store port
    diagnosis   what a server's settings mean

Invariants:

- *Each call is one script.* The server runs scripts one after another, each as a whole. A client
  that dies or is cancelled leaves nothing half done, and no call depends on the state of a
  connection.
- *A lease has ended when its fields are gone*, and not before. Its entries go in the same script.
  It is removed by its holder, or by a client that has seen its renewal counter unchanged for a
  whole ttl on its own clock, when the server's clock agrees, and only if the counter is still the
  same. A stepped server clock therefore ends no lease early, and a lease that has ended cannot be
  renewed.
- *Tokens grow across restarts and failovers*, see `scripts`. A failover of Redis may still lose the
  last writes. Two candidates may then lead at a time, and the token tells them apart.

Only the URL is handled here, so that the client library is imported when it is needed.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.kit import url as options
from doyen.stores.kit.lifecycle import opened
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.stores.redis.store import RedisStore

PORT = 6379
SENTINEL_PORT = 26379
_OPTIONS = (
    *options.TLS_OPTIONS,
    "prefix",
    "token_floor",
    "replicas",
    "poll_s",
    "connect_timeout_s",
    "sentinel_user",
    "sentinel_password",
)


async def open_store(url: StoreURL, context: Context) -> RedisStore:
    """Open the store at `url`."""
    with options.requires("redis", "redis-py"):
        from doyen.stores.redis.connection import RedisAddress
        from doyen.stores.redis.scripts import LARGEST
        from doyen.stores.redis.store import RedisStore
    sentinel = url.parts.scheme.endswith("+sentinel")
    url.refuse_unknown(*_OPTIONS)
    if not sentinel and any(name.startswith("sentinel_") for name in url.options):
        raise ConfigError("sentinel_user and sentinel_password go with redis+sentinel://")
    prefix = url.options.get("prefix", "doyen")
    if not re.fullmatch(r"[^{}\s]+", prefix):
        raise ConfigError(f"prefix is a name without braces and spaces, not {prefix!r}")
    user, password = options.login(url)
    service, database = _path(url, sentinel)
    address = RedisAddress(
        hosts=options.hosts(url, SENTINEL_PORT if sentinel else PORT, empty="localhost"),
        user=user or None,
        password=password or None,
        database=database,
        service=service,
        sentinel_user=url.options.get("sentinel_user"),
        sentinel_password=url.options.get("sentinel_password"),
        tls=_tls(url),
        connect_timeout_s=options.number(url, "connect_timeout_s", 3, 0.1, 60),
    )
    floor = options.whole_number(url, "token_floor", 0, LARGEST)
    store = RedisStore(
        address,
        context,
        prefix=f"{{{prefix}}}:",
        replicas=options.whole_number(url, "replicas", 0, 100),
        poll_s=options.number(url, "poll_s", 5, 0.05, 60),
    )
    return await opened(store, store.open(floor))


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


def _tls(url: StoreURL) -> dict[str, str | bool] | None:
    """The options of redis-py for TLS; None if the connection is not encrypted."""
    secure = url.parts.scheme.startswith("rediss")
    if secure and url.options.get("tls") == "false":
        raise ConfigError("rediss:// uses TLS: write redis:// for tls=false")
    files = options.tls_files(url, default="true" if secure else "", implied=False)
    if files is None:
        return None
    given = {"ssl_ca_certs": files.ca, "ssl_certfile": files.cert, "ssl_keyfile": files.key}
    paths = {name: path for name, path in given.items() if path}
    for path in paths.values():
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{path} cannot be read: ca, cert and key are files")
    return {"ssl_check_hostname": True, **paths}
