"""`zookeeper://`: a ZooKeeper ensemble, through kazoo.

    zookeeper://h1,h2:2181,h3/app          servers, and the znode that all others lie under
    zookeeper://user:password@h1           by digest; percent-encode what a URL could misread
    ?sasl=DIGEST-MD5                       the same user and password by SASL, or
    ?sasl=GSSAPI &service=zookeeper &principal=me@REALM
    ?acl=creator|open                      who may touch what we create: whoever has our name and
                                           password (the default with a user), or everybody
    ?tls=true &ca=FILE &cert=FILE &key=FILE &check_hostname=true
    ?connect_timeout_s=5                   how long a session may take to begin
    ?token_floor=N                         tokens begin above N; the same for all candidates

A lease is a session; a ticket is an ephemeral sequential znode; the leader record is an ephemeral
znode, and the number of the transaction that created it is the token. The parts:

    paths      where keys lie in ZooKeeper's tree
    wire       one session: kazoo's thread, made to keep our rules
    lookout    watches
    store      the port
    diagnosis  what `doyen doctor` is told

The client library is kazoo, the extra `zookeeper`.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    from doyen.stores.zookeeper.store import ZooKeeperStore

__all__ = ["open_store"]

PORT = 2181
_TLS = ("ca", "cert", "key", "check_hostname")
_SASL = ("service", "principal")


async def open_store(url: StoreURL, context: Context) -> ZooKeeperStore:
    """Open the store at `url`: a session begins, and the chroot may be used."""
    url.refuse_unknown("tls", *_TLS, "sasl", *_SASL, "acl", "connect_timeout_s", "token_floor")
    try:
        from doyen.stores.zookeeper.connection import ZooKeeperAddress
        from doyen.stores.zookeeper.store import ZooKeeperStore
    except ImportError as error:
        raise ConfigError(
            f'zookeeper:// needs kazoo ({error}): pip install "doyen[zookeeper]"'
        ) from error
    who, _, hosts = url.parts.netloc.rpartition("@")
    user, _, password = (unquote(part) for part in who.partition(":"))
    sasl = _sasl(url, user, password)
    known = bool(user or sasl)
    acl = _one_of(url, "acl", "creator" if known else "open", "creator", "open")
    if acl == "creator" and not known:
        raise ConfigError("acl=creator needs a user: zookeeper://user:password@host")
    address = ZooKeeperAddress(
        tuple(_servers(hosts)),
        context.clock,
        connect_timeout_s=_number(url, "connect_timeout_s", 5.0),
        tls=_tls(url),
        digest=f"{user}:{password}" if user and not sasl else "",
        sasl=sasl,
    )
    store = ZooKeeperStore(
        address,
        chroot=_chroot(url),
        private=acl == "creator",
        token_floor=int(_number(url, "token_floor", 0)),
    )
    try:
        await store.open()
    except BaseException:
        await store.close()
        raise
    return store


def _servers(hosts: str) -> Iterator[tuple[str, int]]:
    """`h1,h2:p,[::1]` with each server's port."""
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        if not port.isdigit():  # no port, or the end of an address in brackets
            name, port = host, str(PORT)
        if not name or (":" in name and not name.startswith("[")):
            raise ConfigError(
                f"{host!r} is not a host: zookeeper://h1,h2:2181,[::1]:2181, the port is optional"
            )
        yield name, int(port)


def _chroot(url: StoreURL) -> str:
    path = unquote(url.parts.path).rstrip("/")
    names = path.split("/")[1:]
    if not all(name.isprintable() and name not in ("", ".", "..") for name in names):
        raise ConfigError(f"{path!r} is not a path of ZooKeeper's, such as /app/doyen")
    if names[:1] == ["zookeeper"]:
        raise ConfigError("/zookeeper is for ZooKeeper's own use: choose another path")
    return path


def _sasl(url: StoreURL, user: str, password: str) -> dict[str, str]:
    mechanism = _one_of(url, "sasl", "", "", "DIGEST-MD5", "GSSAPI")
    given = {name: url.options[name] for name in _SASL if name in url.options}
    if not mechanism:
        if given:
            raise ConfigError(f"{', '.join(given)}= is of use with sasl= only")
        return {}
    try:
        import puresasl  # noqa: F401 - kazoo needs it, and would say so on its thread
    except ImportError as error:
        raise ConfigError('sasl= needs pure-sasl: pip install "kazoo[sasl]"') from error
    if mechanism == "DIGEST-MD5":
        if not user:
            raise ConfigError("sasl=DIGEST-MD5 needs a user: zookeeper://user:password@host")
        given |= {"username": user, "password": password}
    elif user:
        raise ConfigError("sasl=GSSAPI takes its user from the ticket cache, not from the URL")
    return {"mechanism": mechanism, **given}


def _tls(url: StoreURL) -> ssl.SSLContext | None:
    """How to speak TLS: if asked, or if given anything that only TLS has a use for."""
    given = [name for name in _TLS if name in url.options]
    wanted = _one_of(url, "tls", "true" if given else "false", "true", "false")
    if wanted == "false":
        if given:
            raise ConfigError(f"tls=false does not go with {', '.join(given)}=")
        return None
    ca, cert, key = (url.options.get(name) for name in ("ca", "cert", "key"))
    if bool(cert) != bool(key):
        raise ConfigError("cert= and key= go together: a certificate and its key")
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise ConfigError(f"ca={ca} cert={cert} key={key}: {error}") from error
    context.check_hostname = _one_of(url, "check_hostname", "true", "true", "false") == "true"
    return context


def _one_of(url: StoreURL, name: str, default: str, *allowed: str) -> str:
    value = url.options.get(name, default)
    if value not in allowed:
        raise ConfigError(f"{name}= is {' or '.join(filter(None, allowed))}, not {value!r}")
    return value


def _number(url: StoreURL, name: str, default: float) -> float:
    text = url.options.get(name, str(default))
    try:
        number = float(text)
    except ValueError as error:
        raise ConfigError(f"{name}= is a number, not {text!r}") from error
    if not 0 <= number < 2**62:
        raise ConfigError(f"{name}= is out of range: {text}")
    return number
