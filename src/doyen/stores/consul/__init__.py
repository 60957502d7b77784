"""`consul://`: a Consul datacentre, through its HTTP API.

    consul://h1,h2:8500/app/doyen          agents and the prefix of all keys, default /doyen
    consul://:TOKEN@h1                     an ACL token; else CONSUL_HTTP_TOKEN is used
    ?token_file=FILE                       or the token in a file
    ?tls=true &ca=FILE &cert=FILE &key=FILE
    ?connect_timeout_s=3                   how long one agent may take to answer at first
    ?token_floor=N                         refuse a datacentre whose index is below N

A lease is a session without health checks: what ends it is its ttl alone, never the opinion that
the agents have of the node. Its behaviour is `delete`, so all that is bound to it goes with it in
one step. The leader record is created by a transaction (absent, then locked by the session); its
creation index is the token. The parts:

    agents     connections, failover, what errors mean
    watches    notification, by few blocking queries
    store      the port: keys, sessions and transactions
    diagnosis  what `doyen doctor` says

The HTTP library is httpcore2, the extra `consul`.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.stores.consul.store import ConsulStore

__all__ = ["open_store"]

PORT = 8500
TLS_PORT = 8501


async def open_store(url: StoreURL, context: Context) -> ConsulStore:
    """Open the store at `url`: an agent answers, knows a leader, and lets us make sessions."""
    del context  # Consul counts its sessions itself
    url.refuse_unknown("tls", "ca", "cert", "key", "connect_timeout_s", "token_file", "token_floor")
    try:
        from doyen.stores.consul.client import Agents
        from doyen.stores.consul.store import ConsulStore
    except ImportError as error:
        raise ConfigError(
            f'consul:// needs httpcore2 ({error}): pip install "doyen[consul]"'
        ) from error

    who, _, hosts = url.parts.netloc.rpartition("@")
    tls = _tls(url)
    store = ConsulStore(
        Agents(
            list(_hosts(hosts, TLS_PORT if tls else PORT)),
            token=_token(url, who),
            tls=tls,
            connect_timeout_s=_number(url, "connect_timeout_s", 3.0),
        ),
        prefix=unquote(url.parts.path).strip("/") or "doyen",
    )
    try:
        await store.open(int(_number(url, "token_floor", 0)))
    except BaseException:
        await store.close()
        raise
    return store


def _hosts(hosts: str, default_port: int) -> Iterator[str]:
    """`h1,h2:p,[::1]` with each agent's port."""
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        if not port.isdigit():  # no port, or the end of an address in brackets
            name, port = host, str(default_port)
        if not name or (":" in name and not name.startswith("[")):
            raise ConfigError(
                f"{host!r} is not a host: consul://h1,h2:8500,[::1]:8500, the port being optional"
            )
        yield f"{name}:{port}"


def _token(url: StoreURL, who: str) -> str:
    """The ACL token: from the URL, from a file, or from where Consul's own tools look."""
    user, _, password = who.partition(":")
    if user:
        raise ConfigError("consul:// has no users: an ACL token is written consul://:TOKEN@host")
    path = url.options.get("token_file")
    if path is not None:
        try:
            return Path(path).read_text().strip()
        except OSError as error:
            raise ConfigError(f"token_file={path} cannot be read: {error.strerror}") from error
    return unquote(password) or os.environ.get("CONSUL_HTTP_TOKEN", "")


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
        raise ConfigError("consul:// needs cert= and key= together: a certificate and its key")
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
