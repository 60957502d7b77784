"""`consul://`: a Consul datacentre, through its HTTP API.

    consul://h1,h2:8500/app/doyen          agents and the prefix of all keys, default /doyen
    consul://:TOKEN@h1                     an ACL token; else CONSUL_HTTP_TOKEN is used
    ?token_file=FILE                       or the token in a file
    ?tls=true &ca=FILE &cert=FILE &key=FILE
    ?connect_timeout_s=3                   deadline of the first answer of an agent
    ?token_floor=N                         refuse a datacentre whose index is below N
    ?layout=lock                           take part in the locks of `consul lock`

A lease is a session without health checks: it ends by its ttl alone, whatever state the agents
report for the node. Its behaviour is `delete`, so everything bound to it disappears with it in one
step. The leader record is created by a transaction (absent, then locked by the session); its
creation index is the token. The parts:

    client     connections to agents, failover, errors
    watches    notification, by few blocking queries
    store      the port: keys, sessions and transactions
    lock       the port in the layout of `consul lock`
    diagnosis  findings for `doyen doctor`

The HTTP library is httpcore2, the extra `consul`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.kit import url as options
from doyen.stores.kit.lifecycle import opened
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.stores.consul.store import ConsulStore

PORT = 8500
TLS_PORT = 8501


async def open_store(url: StoreURL, context: Context) -> ConsulStore:
    """Open the store at `url`: an agent answers, has a leader, and permits sessions."""
    del context  # Consul keeps the time of its sessions
    url.refuse_unknown(
        *options.TLS_OPTIONS, "connect_timeout_s", "token_file", "token_floor", "layout"
    )
    with options.requires("consul", "httpcore2"):
        from doyen.stores.consul.client import Agents
        from doyen.stores.consul.lock import ConsulLockStore
        from doyen.stores.consul.store import ConsulStore

    tls = options.tls_files(url)
    agents = Agents(
        [str(host) for host in options.hosts(url, TLS_PORT if tls else PORT)],
        token=_token(url),
        tls=tls.context() if tls else None,
        connect_timeout_s=options.number(url, "connect_timeout_s", 3.0),
    )
    prefix = unquote(url.parts.path).strip("/")
    if options.choice(url, "layout", "", "", "lock"):
        store: ConsulStore = ConsulLockStore(agents, prefix=prefix)
    else:
        store = ConsulStore(agents, prefix=prefix or "doyen")
    return await opened(store, store.open(options.whole_number(url, "token_floor")))


def _token(url: StoreURL) -> str:
    """The ACL token: from a file, from the URL, or from the variable that Consul's tools read."""
    user, token = options.login(url)
    if user:
        raise ConfigError("consul:// has no users: an ACL token is written consul://:TOKEN@host")
    file = options.read_file(url, "token_file")
    if file is not None:
        return file.decode().strip()
    return token or os.environ.get("CONSUL_HTTP_TOKEN", "")
