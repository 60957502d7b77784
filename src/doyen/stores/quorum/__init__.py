"""`doyen://`: a quorum of doyen's own nodes.

    doyen://h1:7400,h2:7400,h3:7400        some or all of the nodes; a client needs one that serves
    doyen://secret@h1:7400,h2:7400         percent-encode what a URL could misread
    ?secret_file=FILE                      or the secret from a file
    ?tls=true &ca=FILE &cert=FILE &key=FILE
    ?cluster=NAME                          refuse nodes of any other cluster
    ?connect_timeout_s=3                   how long one node may take to answer at first
    ?token_floor=N                         have tokens go on above N

Any node serves: it forwards writes to the one that leads and reads what is current. The parts:

    wire        a connection to one node at a time, and what is under way on it
    store       the port
    diagnosis   what `doyen doctor` should tell about the quorum

Frames and messages are `doyen.quorum`'s; they need msgspec, the extra `quorum`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.quorum.protocol.security import Security
    from doyen.stores.quorum.store import QuorumStore

__all__ = ["make_store", "open_store"]

PORT = 7400


async def open_store(url: StoreURL, context: Context) -> QuorumStore:
    """Open the store at `url`: one node serves, and its quorum answers."""
    del context  # the quorum counts its leases itself, and does not say whose have ended
    store = make_store(url)
    try:
        await store.open(int(_number(url, "token_floor", 0)))
    except BaseException:
        await store.close()
        raise
    return store


def make_store(url: StoreURL) -> QuorumStore:
    """The store at `url`, which nobody has been asked about yet. On a running loop."""
    url.refuse_unknown(
        *("tls", "ca", "cert", "key", "secret_file"),
        *("cluster", "connect_timeout_s", "token_floor"),
    )
    try:
        from doyen.stores.quorum.store import QuorumStore
    except ModuleNotFoundError as error:
        raise ConfigError(f'doyen:// needs {error.name}: pip install "doyen[quorum]"') from error

    who, _, hosts = url.parts.netloc.rpartition("@")
    if url.parts.path.strip("/"):
        raise ConfigError(f"doyen:// has no paths: remove {url.parts.path!r}")
    return QuorumStore(
        list(_nodes(hosts)),
        _security(url, unquote(who)),
        cluster=url.options.get("cluster", ""),
        connect_timeout_s=_number(url, "connect_timeout_s", 3.0),
    )


def _nodes(hosts: str) -> Iterator[str]:
    """`h1,h2:p,[::1]` with each node's port."""
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        if not port.isdigit():  # no port, or the end of an address in brackets
            name, port = host, str(PORT)
        if not name or (":" in name and not name.startswith("[")):
            raise ConfigError(
                f"{host!r} is not a node: doyen://h1:{PORT},h2:{PORT},[::1]:{PORT}, the port being"
                " optional"
            )
        yield f"{name}:{port}"


def _security(url: StoreURL, secret: str) -> Security:
    from doyen.quorum.protocol.security import TLS, Security

    given = {name: url.options.get(name) for name in ("ca", "cert", "key")}
    value = url.options.get("tls", "")
    if value not in ("", "true", "false"):
        raise ConfigError(f"tls= is true or false, not {value!r}")
    if value == "false" and any(given.values()):
        raise ConfigError("tls=false goes with none of ca=, cert= and key=")
    if given["key"] and not given["cert"]:
        raise ConfigError("key= goes with cert=: a certificate and its key")
    tls = None
    if value == "true" or any(given.values()):
        tls = TLS(certificate=given["cert"], key=given["key"], authority=given["ca"])
    path = url.options.get("secret_file")
    if path is not None:
        if secret:
            raise ConfigError("a secret is given in the URL or by secret_file=, not both")
        try:
            secret = Path(path).read_text().strip()
        except OSError as error:
            raise ConfigError(f"secret_file={path} cannot be read: {error.strerror}") from error
    security = Security(secret=secret.encode() if secret else None, tls=tls)
    security.dialling  # noqa: B018 - files that cannot be used are found now
    return security


def _number(url: StoreURL, name: str, default: float) -> float:
    text = url.options.get(name, str(default))
    try:
        number = float(text)
    except ValueError as error:
        raise ConfigError(f"{name}= is a number, not {text!r}") from error
    if not 0 <= number < 2**62:
        raise ConfigError(f"{name}= is out of range: {text}")
    return number
