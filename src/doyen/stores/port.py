"""The Store port: what doyen requires of a store.

Every promise is about a single key, so that every engine can keep it. What an engine cannot do is
declared in its `Capabilities` and checked when it is opened. Sessions and elections never ask which
adapter they use.

Safety depends on `create` alone: one atomic write decides the election. Everything else orders
candidates, notifies them, or serves queries.

Rules for all methods:

- A store belongs to one event loop and is called only from it. A lease is used through the store
  that granted it.
- A call that was certainly not carried out raises `StoreUnavailable`; one that may have been raises
  `OutcomeUnknown`. Adapters need no timeouts: the caller bounds each call and treats a cancelled
  call as `OutcomeUnknown`. A cancelled call either has no effect or has its full effect, now or
  later.
- `StoreUnusable` is raised where a retry cannot help.
- An entry bound to a lease that has ended is treated as absent even before it is removed: no method
  returns it.

A third-party store is an entry point in the group `doyen.stores`, whose name is the URL scheme and
whose object is a callable `open_store(url, context)`. The conformance suite in `doyen.testing`
checks it against this port.
"""

from __future__ import annotations

import asyncio
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from doyen._values import Value
from doyen.errors import ConfigError, StoreError, StoreUnusable, did_you_mean
from doyen.events import Event
from doyen.lease.clock import Clock
from doyen.lease.timing import DEFAULT_TTL_S
from doyen.model import Entry, Finding, Lease, Version

if TYPE_CHECKING:
    from urllib.parse import SplitResult

__all__ = [
    "Capabilities",
    "Context",
    "Creation",
    "Looked",
    "Store",
    "StoreURL",
    "Watch",
    "open_store",
]


class Capabilities(Value, kw_only=True):
    """What an engine can do, and the figures from which the worst case is computed."""

    proof_of_death: bool = False
    """The kernel reports the end of a process, so it is known at once."""
    linearizable_reads: bool = True
    """`get` and `list` return every write that was confirmed before they began."""
    durable: bool = True
    """A confirmed write is never lost. Engines that replicate asynchronously may lose some in a
    failover, so sessions check later that what they deleted has not come back."""
    renewals_lag: bool = False
    """A confirmed renewal proves only that a majority has the renewal before it."""
    ttl_default_s: float = DEFAULT_TTL_S
    ttl_min_s: float = 0.1
    ttl_step_s: float | None = None
    """Granted ttls are rounded up to a multiple of this."""
    expiry_factor: float = 1.0
    """The engine may keep a lease up to this many times its ttl."""
    notice_s: float = 0.0
    """The longest delay of a notification when nothing fails."""
    one_process: bool = False
    """The entries exist in one process only, and end with it."""
    layout: str = ""
    """The layout of another program, if the entries have that: its candidates wait in the same
    elections. Each candidate then needs a lease of its own."""
    has_line: bool = True
    """Candidates can wait in a line. Otherwise all of them try, as in the recipe `race`."""
    value_bytes: int = 1_000_000
    """The largest value."""
    value_limit: str = "the limit of doyen for every store"
    """What the engine calls that limit."""


class Creation(NamedTuple):
    """The result of `create`: whether it created the entry, and the entry that exists now."""

    won: bool
    entry: Entry


class Looked(NamedTuple):
    """The result of `create_and_look`."""

    creation: Creation
    ahead: Entry | None = None
    """The ticket directly ahead."""
    other: Entry | None = None
    """The entry at the other key."""
    failure: StoreError | None = None
    """Why the two are not known, if they are not."""


class Watch(Protocol):
    """A standing request for notifications. Closing takes effect at once and is idempotent."""

    def close(self) -> None:
        """`notify` is not called after this."""
        ...


class Context(Value):
    """What a store receives when it is opened."""

    clock: Clock
    emit: Callable[[Event], None]
    create: bool = True
    """Whether to create what the store needs and lacks: a file, tables, a bucket. Otherwise
    `StoreUnusable` is raised, with the place where nothing was found."""
    ends_only: bool = False
    """Only `end` and `close` will be called, perhaps after a long time. The adapter connects, and
    leaves out what runs by itself, such as watching for leases that have expired."""


class Store(ABC):
    """Compare-and-swap, leases and notifications on keys."""

    capabilities: Capabilities

    @abstractmethod
    async def grant(self, ttl_s: float) -> Lease:
        """Grant a lease of at least `ttl_s`; the lease states the granted ttl.

        The store counts from an instant not earlier than the call. The id is never reused.
        """

    @abstractmethod
    async def renew(self, lease: Lease) -> None:
        """Restart the ttl of the lease, from an instant not earlier than the call.

        Returns only if a majority of the store has the renewal (with `renewals_lag`: the renewal
        before it). Raises `LeaseGone` if the lease has ended; an ended lease never revives. Must
        not queue behind other calls of this store.
        """

    @abstractmethod
    async def revoke(self, lease: Lease) -> None:
        """End the lease. Everything bound to it is gone when this returns. Idempotent."""

    def warrant(self, lease: Lease) -> bytes:
        """What another process needs, besides the URL, to end `lease` with `end`: 200 bytes at
        most. Empty if no other process can end it."""
        return b""

    async def end(self, warrant: bytes) -> None:
        """End the lease that a store of the same URL, in any process, gave this warrant for.

        Everything bound to it is gone when this returns. Returns also if the lease had ended
        before. Raises `StoreUnusable` if the warrant is void here, for instance because it is of
        another cluster.
        """
        raise StoreUnusable("a store of this kind cannot end the leases of other processes")

    async def rehearse(self) -> None:
        """Do once what `end` does, without effect, so that the first `end` is as fast as later
        ones."""
        warrant = self.warrant(Lease("0", 1.0))
        if warrant:
            await self.end(warrant)

    async def remaining(self, leases: Sequence[str]) -> Mapping[str, float]:
        """What is left of these leases, in seconds, according to the store.

        For stores that know it, although their entries do not have `remaining_s`. Of a lease that
        has ended, nothing is left: 0.0. A store that cannot tell returns an empty mapping.
        """
        return {}

    @abstractmethod
    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        """Create `key`, bound to `lease`, if it does not exist. Atomic and durable.

        An entry whose lease has ended does not exist. An existing entry is left unchanged and
        returned, with `won` false. The revision of a new entry is greater than that of every entry
        ever created at this key, across releases, restarts and restores. Raises `LeaseGone` if
        `lease` has ended.
        """

    @abstractmethod
    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        """Write an entry without a lease. Atomic and durable.

        With `if_version=None` the key must not exist; otherwise the entry must have that version.
        Returns None if the condition does not hold.
        """

    async def put_relaxed(
        self, key: str, value: bytes, *, if_version: Version | None
    ) -> Entry | None:
        """As `put`, but a crash of the machine may undo it, if the store is on this machine."""
        return await self.put(key, value, if_version=if_version)

    @abstractmethod
    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        """Replace the value of an entry that is bound to a lease of this store, if it still has the
        version of `entry`. Atomic and durable.

        The entry keeps its lease and the revision of its creation. Returns None if the entry has
        another version or is gone, for instance because its lease has ended, and if it is not bound
        to a lease.
        """

    @abstractmethod
    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        """Delete `key`, if it has `if_version` where that is given. Returns whether it did."""

    @abstractmethod
    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        """Take a ticket at the end of `line`, behind every ticket of the same or a higher rank.

        Tickets are ordered by rank, highest first, then by arrival. The store chooses the key of
        the ticket, directly below `line`, and never reuses it. Raises `LeaseGone`.
        """

    @abstractmethod
    async def ahead(self, ticket: Entry) -> Entry | None:
        """The ticket directly before `ticket`, or None if it is at the head of its line.

        Raises `TicketGone` if `ticket` itself no longer exists.
        """

    @abstractmethod
    async def get(self, key: str) -> Entry | None:
        """The entry at `key`, or None."""

    async def create_and_look(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked:
        """`create`, and at the same time `ahead(ticket)` and `get(other)`. Without a ticket nothing
        is ahead.

        A candidate that is probably the next sends these at once. They are not one step: each is
        carried out at some time during the call. An adapter may need fewer requests for them.
        Raises what `create` raises; the result has the errors of the others.
        """

        async def look() -> Entry | None:
            return None if ticket is None else await self.ahead(ticket)

        creation, ahead, found = await asyncio.gather(
            self.create(key, value, lease), look(), self.get(other), return_exceptions=True
        )
        if isinstance(creation, BaseException):
            raise creation
        for read in (ahead, found):
            if isinstance(read, StoreError):
                return Looked(creation, failure=read)
            if isinstance(read, BaseException):
                raise read
        assert not isinstance(ahead, BaseException)
        assert not isinstance(found, BaseException)
        return Looked(creation, ahead, found)

    def create_and_look_now(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked | None:
        """`create_and_look`, if nothing has to be waited for; otherwise nothing is done, and the
        result is None. Few stores can do that: those whose data are in this machine's memory."""
        return None

    def delete_now(self, entries: Sequence[Entry]) -> bool:
        """`delete` each of these by its version, if nothing has to be waited for. False if that was
        not done, or not all of it. They are bound to leases of this handle."""
        return False

    def begin_deletion(self, entries: Sequence[Entry]) -> asyncio.Future[Any] | None:
        """Begin to `delete` each of these by its version, in one request; the future is done when
        they are deleted, and has the error otherwise. None if nothing was begun.

        An adapter overrides this only if the request is on its way sooner than by `delete`.
        """
        return None

    @abstractmethod
    async def list(self, prefix: str) -> list[Entry]:
        """All entries whose keys begin with `prefix` and a `/`; tickets of a line in order."""

    async def head(self, line: str) -> Entry | None:
        """The first ticket of `line`."""
        return next(iter(await self.list(line)), None)

    @abstractmethod
    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        """Call `notify` after every change at `scope` or below it, until closed.

        Level-triggered: every change after `watch` has returned is followed by a notification, but
        notifications may be merged, late or spurious. The end of a lease counts as a change of
        everything bound to it, even before that is removed. *Watch, then read, then wait* therefore
        never misses the final state. `notify` is called on the store's loop and must not block.
        """

    async def watch_entry(self, key: str, notify: Callable[[], None]) -> Watch:
        """`watch` for one key. Its notifications may carry the entry, for `carried`."""
        return await self.watch(key, notify)

    def carried(self, watch: Watch) -> Entry | None:
        """The entry as of the last notification of a watch that `watch_entry` began. None if that
        did not carry it, or if it was taken before: then the watcher reads.

        It is not a linearizable read: a later version may have been written by now, of which
        another notification follows. After the connection was lost, it may also be an earlier one
        than the watcher has read since.
        """
        return None

    def proof(self, lease: Lease) -> tuple[int, ...]:
        """Descriptors that prove this process alive while any copy of them is open.

        A supervisor that outlives its parent holds copies; until it closes them, the process is not
        considered dead. Empty where the store has no proof of death.
        """
        return ()

    async def diagnose(self) -> Sequence[Finding]:
        """Findings for `doyen doctor`: the engine's version and its known defects, unsafe modes,
        where it stores data and how full that is. Changes nothing.
        """
        return []

    def forked(self) -> None:
        """Called in the child after a fork: release what must not be shared, without touching what
        the parent still uses."""
        return

    @abstractmethod
    async def close(self) -> None:
        """Release all resources of the store in this process. Idempotent."""


def split_url(text: str) -> SplitResult:
    """`urlsplit` for URLs that name several hosts.

    Recent Python releases refuse brackets that do not enclose the whole host, such as
    `h1,[::1]:2379`. The adapter parses the hosts.
    """
    from urllib.parse import urlsplit

    scheme, separator, rest = text.partition("://")
    if not separator:
        return urlsplit(text)
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    return urlsplit(f"{scheme}://{rest[len(netloc) :]}")._replace(netloc=netloc)


_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[\da-f:]+\]):(\d+)(?=[/,?]|$)", re.IGNORECASE)
_PORTS = {
    "2181": "zookeeper",
    "2379": "etcd",
    "3306": "mysql",
    "4222": "nats",
    "5432": "postgresql",
    "6379": "redis",
    "7400": "doyen",
    "8500": "consul",
}
"""The usual ports, and the schemes of their stores."""

SECRET_USERS = ("doyen", "nats")
"""Schemes whose URLs have a secret in the place of the user."""


def cuts_a_secret(parts: SplitResult) -> bool:
    """Whether the place of the hosts has the beginning of a secret, which should have had its `/`,
    `?` or `#` escaped. In doubt it is one, because what is hidden does no harm."""
    name, colon, after = parts.netloc.partition(":")
    if not parts.netloc or "@" in parts.netloc or "[" in name:
        return False
    if colon and after.partition(",")[0].isdecimal():  # a port
        return False
    return "@" in parts.geturl() and (bool(colon) or parts.scheme in SECRET_USERS)


class StoreURL(Value):
    """A parsed store URL. `options` are those of the query; the adapter knows all of them."""

    text: str
    parts: SplitResult
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> StoreURL:
        from urllib.parse import parse_qsl  # imported late, as in `model`

        parts = split_url(text)
        parts = parts._replace(scheme=canonical_scheme(parts.scheme))
        host = _HOST_AND_PORT.match(text) if parts.scheme not in _BUILT_IN else None
        if host and parts.scheme not in (known := _known()):
            scheme = _PORTS.get(host[1], "redis")
            raise ConfigError(
                f"the URL of the store is a host without a scheme: write {scheme}://{text}, or the"
                f" scheme of another store; known schemes: {', '.join(known)}"
            )
        if not parts.scheme:
            raise ConfigError(
                f"{text!r} is not a store URL: it must start with a scheme,"
                f" such as sqlite:///var/lib/doyen.db; known schemes: {', '.join(_known())}"
            )
        if parts.scheme in {*_BUILT_IN} - {"memory", "sqlite"}:
            if "://" not in text:
                raise ConfigError(
                    f"the URL of the store has no // after {parts.scheme}: write"
                    f" {parts.scheme}://h1"
                )
            if ":" in parts.netloc and cuts_a_secret(parts):
                raise ConfigError(
                    "the password in the URL of the store has a /, ? or #, which ends it: write"
                    " %2F, %3F or %23 instead"
                )
        return cls(text, parts, dict(parse_qsl(parts.query, keep_blank_values=True)))

    def refuse_unknown(self, *known: str) -> None:
        """Raise `ConfigError` if the URL has an option that the adapter does not know."""
        for name in self.options:
            if name not in known:
                raise ConfigError(
                    f"{self.parts.scheme}:// has no option {name!r}{did_you_mean(name, known)};"
                    f" known options: {', '.join(known) or 'none'}"
                )


Opener = Callable[[StoreURL, Context], Awaitable[Store]]

_BUILT_IN = {
    "consul": "doyen.stores.consul",
    "doyen": "doyen.stores.quorum",
    "etcd": "doyen.stores.etcd",
    "memory": "doyen.stores.memory",
    "mysql": "doyen.stores.sql.mysql",
    "nats": "doyen.stores.nats",
    "postgresql": "doyen.stores.sql.postgresql",
    "redis": "doyen.stores.redis",
    "redis+sentinel": "doyen.stores.redis",
    "rediss": "doyen.stores.redis",
    "rediss+sentinel": "doyen.stores.redis",
    "sqlite": "doyen.stores.sqlite",
    "zookeeper": "doyen.stores.zookeeper",
}


_ALIASES = {
    "mariadb": "mysql",
    "mysql2": "mysql",
    "pgsql": "postgresql",
    "postgres": "postgresql",
    "sqlite3": "sqlite",
    "valkey": "redis",
    "valkeys": "rediss",
    "zk": "zookeeper",
}
"""Schemes of other programs for the same servers."""


def canonical_scheme(scheme: str) -> str:
    """doyen's name for a scheme that other programs use. The driver that SQLAlchemy and others name
    is left out, because doyen has its own.

    >>> canonical_scheme("postgres"), canonical_scheme("mysql+pymysql"), canonical_scheme("etcd")
    ('postgresql', 'mysql', 'etcd')
    """
    base = scheme.partition("+")[0]
    known = _ALIASES.get(base, base)
    return known if known in ("postgresql", "mysql") else _ALIASES.get(scheme, scheme)


def _known() -> list[str]:
    from importlib.metadata import entry_points  # costs more than the rest of the import

    names = {*_BUILT_IN, *(point.name for point in entry_points(group="doyen.stores"))}
    return sorted(names)


_OTHER_PROTOCOLS = {
    "http": "write etcd://, or consul://, before the hosts",
    "https": "write etcd://, or consul://, before the hosts, and ?tls=true after them",
    "tls": "write nats:// before the hosts, and ?tls=true after them",
}


def _opener(scheme: str) -> Opener:
    module = _BUILT_IN.get(scheme)
    if module is not None:
        opener: Opener = import_module(module).open_store
        return opener
    from importlib.metadata import entry_points

    for point in entry_points(group="doyen.stores", name=scheme):
        loaded: Opener = point.load()
        return loaded
    known = _known()
    advice = f", {_OTHER_PROTOCOLS[scheme]}" if scheme in _OTHER_PROTOCOLS else ""
    raise ConfigError(
        f"no store for {scheme}://{advice or did_you_mean(scheme, [*known, *_ALIASES])};"
        f" known schemes: {', '.join(known)}"
    )


def adapter_loaded(url: str) -> bool:
    """Whether `open_store` would import nothing."""
    module = _BUILT_IN.get(canonical_scheme(url.partition(":")[0]), "")
    found = sys.modules.get(module)
    return found is not None and (
        not hasattr(found, "__path__") or f"{module}.store" in sys.modules
    )


def load_adapter(url: str) -> None:
    """Import the adapter for the scheme of `url` and its client library, on any thread. What
    cannot be imported is reported by `open_store`."""
    module = _BUILT_IN.get(canonical_scheme(url.partition(":")[0]))
    if module is not None:
        with suppress(ImportError, ConfigError):
            if hasattr(import_module(module), "__path__"):
                import_module(f"{module}.store")


async def open_store(url: str, context: Context) -> Store:
    """Import the adapter for the scheme of `url` and open the store."""
    parsed = StoreURL.parse(url)
    opener = _opener(parsed.parts.scheme)
    try:
        return await opener(parsed, context)
    except StoreError as error:
        if remedy := tls_remedy(parsed, str(error).lower()):
            raise type(error)(f"{error}; {remedy}") from error
        raise


_STRICT = (
    "the certificate lacks an extension that RFC 5280 requires and that Python checks from 3.13"
    " on: reissue the authority's certificate with basicConstraints=critical,CA:true,"
    " keyUsage=critical,keyCertSign,cRLSign and subjectKeyIdentifier=hash, and those that it signs"
    " with authorityKeyIdentifier=keyid and subjectKeyIdentifier=hash"
)
_UNVERIFIED = {
    "key usage": _STRICT,
    "key identifier": _STRICT,
    "basic constraints": _STRICT,
    "not valid for": "the server's certificate must have the URL's host in its subjectAltName",
    "has expired": "renew the certificate",
}
_CLOSED = "socket closed"
"""What gRPC reports if the server closes the connection because only one of the two sides uses
TLS."""
_EXPECTS_TLS = (
    "the server may expect TLS: set tls=true, and ca= to the file of the authority that signed its"
    " certificate"
)
_REFUSED = ("alert", "client certificate", "tsi_", "access denied")
_HUNG_UP = (
    "reset by peer",
    "eof",
    "broken pipe",
    "closed the connection",
    "connection closed",
    "connection lost",
)


def tls_remedy(url: StoreURL, cause: str) -> str:
    """What to do if a store could not be opened because of TLS; `cause` is the error in lower case.

    Client libraries describe this differently, and a server that refuses a client certificate often
    just closes the connection.
    """
    encrypted = bool({"tls", "ca", "cert"} & set(url.options)) or url.parts.scheme[-2:] == "ss"
    if not encrypted or url.options.get("tls") == "false":
        return _EXPECTS_TLS if _CLOSED in cause else ""
    if f"handshake read failed ({_CLOSED})" in cause:
        return "the server may not use TLS: leave out tls=, ca=, cert= and key="
    if "certificate verify failed" in cause or "certificate_verify_failed" in cause:
        trust = "set ca= to the file of the authority that signed the server's certificate"
        return next((text for words, text in _UNVERIFIED.items() if words in cause), trust)
    if any(words in cause for words in (*_REFUSED, *_HUNG_UP)):
        return (
            "the server may require a client certificate: set cert= and key= to the files of one"
            " that is signed by an authority that the server trusts"
        )
    return ""
