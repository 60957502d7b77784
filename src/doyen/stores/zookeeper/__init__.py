"""`zookeeper://`: a ZooKeeper ensemble, through kazoo.

    zookeeper://h1,h2:2181,h3/app          servers, and the parent znode of all others
    zookeeper://user:password@h1           by digest; percent-encode reserved characters
    ?sasl=DIGEST-MD5                       the same user and password by SASL, or
    ?sasl=GSSAPI &service=zookeeper &principal=me@REALM
    ?acl=creator|open                      access to the znodes that doyen creates: this user (the
                                           default with a user), or every client
    ?tls=true &ca=FILE &cert=FILE &key=FILE &check_hostname=true
    ?connect_timeout_s=5                   deadline for a session to begin
    ?token_floor=N                         tokens begin above N; the same for all candidates
    ?layout=kazoo                          share a line with kazoo's Election and Lock

A lease is a session; a ticket is an ephemeral sequential znode; the leader record is an ephemeral
znode, and the number of the transaction that created it is the token. The parts:

    paths       the znodes of keys
    connection  kazoo's client, adapted to the rules of doyen's sessions
    session     one session, for the store itself or as a lease; kazoo's errors as doyen's
    watches     watches that stay
    store       the port
    recipes     the port in the layout of kazoo's recipes
    diagnosis   findings for `doyen doctor`

The client library is kazoo, the extra `zookeeper`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.kit import url as options
from doyen.stores.kit.lifecycle import opened
from doyen.stores.port import Context, StoreURL

if TYPE_CHECKING:
    import ssl

    from doyen.stores.zookeeper.store import ZooKeeperStore

__all__ = ["open_store"]

_SASL = ("service", "principal")


async def open_store(url: StoreURL, context: Context) -> ZooKeeperStore:
    """Open the store at `url`: a session begins, and the chroot may be used."""
    url.refuse_unknown(
        *options.TLS_OPTIONS,
        *("check_hostname", "sasl", *_SASL, "acl", "connect_timeout_s", "token_floor", "layout"),
    )
    with options.requires("zookeeper", "kazoo"):
        from doyen.stores.zookeeper.connection import ZooKeeperAddress
        from doyen.stores.zookeeper.recipes import KazooStore
        from doyen.stores.zookeeper.store import ZooKeeperStore

    user, password = options.login(url)
    sasl = _sasl(url, user, password or "")
    known = bool(user or sasl)
    acl = options.choice(url, "acl", "creator" if known else "open", "creator", "open")
    if acl == "creator" and not known:
        raise ConfigError("acl=creator needs a user: zookeeper://user:password@host")
    address = ZooKeeperAddress(
        options.hosts(url, 2181),
        context.clock,
        connect_timeout_s=options.number(url, "connect_timeout_s", 5.0),
        tls=_tls(url),
        digest=f"{user}:{password or ''}" if user and not sasl else "",
        sasl=sasl,
    )
    kind = KazooStore if options.choice(url, "layout", "", "", "kazoo") else ZooKeeperStore
    store = kind(
        address,
        chroot=_chroot(url),
        private=acl == "creator",
        token_floor=options.whole_number(url, "token_floor"),
    )
    if context.ends_only:
        return store  # which connects with the sessions that it is to close
    return await opened(store, store.open(create=context.create))


def _chroot(url: StoreURL) -> str:
    path = unquote(url.parts.path).rstrip("/")
    names = path.split("/")[1:]
    if not all(name.isprintable() and name not in ("", ".", "..") for name in names):
        raise ConfigError(f"{path!r} is not a path of a znode, such as /app/doyen")
    if names[:1] == ["zookeeper"]:
        raise ConfigError("/zookeeper is reserved for ZooKeeper's own use: choose another path")
    return path


def _sasl(url: StoreURL, user: str, password: str) -> dict[str, str]:
    mechanism = options.choice(url, "sasl", "", "", "DIGEST-MD5", "GSSAPI")
    given = {name: url.options[name] for name in _SASL if name in url.options}
    if not mechanism:
        if given:
            raise ConfigError(f"{' and '.join(given)} can only be used with sasl")
        return {}
    try:
        import puresasl  # noqa: F401 - kazoo imports it later, on its thread
    except ImportError as error:
        raise ConfigError('sasl needs pure-sasl: pip install "kazoo[sasl]"') from error
    if mechanism == "DIGEST-MD5":
        if not user:
            raise ConfigError("sasl=DIGEST-MD5 needs a user: zookeeper://user:password@host")
        given |= {"username": user, "password": password}
    elif user:
        raise ConfigError("sasl=GSSAPI takes the user from the ticket cache, not from the URL")
    return {"mechanism": mechanism, **given}


def _tls(url: StoreURL) -> ssl.SSLContext | None:
    check_hostname = options.choice(url, "check_hostname", "true", "true", "false") == "true"
    implied = "true" if "check_hostname" in url.options else ""
    files = options.tls_files(url, default=implied)
    if files is None:
        if implied:
            raise ConfigError("tls=false goes without check_hostname")
        return None
    context = files.context()
    context.check_hostname = check_hostname
    return context
