"""`doyen://`: a quorum of doyen's own nodes.

    doyen://h1:7400,h2:7400,h3:7400        some or all of the nodes; a client needs one that serves
    doyen://secret@h1:7400,h2:7400         with the shared secret, percent-encoded
    ?secret_file=FILE                      or the secret from a file
    ?tls=true &ca=FILE &cert=FILE &key=FILE
    ?cluster=NAME                          refuse nodes of any other cluster
    ?connect_timeout_s=3                   how long one node may take to accept a connection
    ?token_floor=N                         raise tokens above N

Every node serves: it forwards writes to the leader, and reads are linearizable. The parts:

    store        the port
    connection   requests in flight and watches, across connections to one node at a time
    dialling     how a node is reached
    diagnosis    the findings of `doyen doctor`

Frames and messages are those of `doyen.quorum.protocol`, which needs msgspec, the extra `quorum`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.kit.lifecycle import opened
from doyen.stores.kit.url import (
    TLS_OPTIONS,
    hosts,
    number,
    read_file,
    requires,
    tls_files,
    whole_number,
)
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.quorum.protocol.security import Security
    from doyen.stores.quorum.store import QuorumStore

__all__ = ["make_store", "open_store"]

PORT = 7400


async def open_store(url: StoreURL, context: Context) -> QuorumStore:
    """Open the store at `url`: at least one node serves."""
    del context  # the quorum keeps the clocks of its leases itself
    store = make_store(url)
    return await opened(store, store.open(whole_number(url, "token_floor")))


def make_store(url: StoreURL) -> QuorumStore:
    """The store at `url`, not connected yet. Needs a running loop."""
    url.refuse_unknown(*TLS_OPTIONS, "secret_file", "cluster", "connect_timeout_s", "token_floor")
    with requires("quorum", "msgspec", "doyen"):
        from doyen.quorum.protocol.security import parse_address
        from doyen.stores.quorum.store import QuorumStore

    if url.parts.path.strip("/"):
        raise ConfigError(f"doyen:// has no paths: remove {url.parts.path!r}")
    nodes = [str(host) for host in hosts(url, PORT)]
    for node in nodes:
        parse_address(node)
    return QuorumStore(
        nodes,
        _security(url),
        cluster=url.options.get("cluster", ""),
        connect_timeout_s=number(url, "connect_timeout_s", 3.0),
    )


def _security(url: StoreURL) -> Security:
    from doyen.quorum.protocol.security import TLS, Security

    files = tls_files(url, combined=True)
    tls = TLS(certificate=files.cert, key=files.key, authority=files.ca) if files else None
    secret = unquote(url.parts.netloc.rpartition("@")[0]).encode()
    if secret and "secret_file" in url.options:
        raise ConfigError("a secret is given in the URL or by secret_file, not both")
    secret = secret or (read_file(url, "secret_file") or b"").strip()
    security = Security(secret=secret or None, tls=tls)
    security.dialling  # noqa: B018 - reports unusable files now
    return security
