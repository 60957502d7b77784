"""The Store port: what doyen asks of a place where candidates meet.

Every promise is about a single key, so that every engine can honour it; what an engine cannot do
is declared in its `Capabilities` and checked when it is opened. Policy (session, election) never
asks which adapter it talks to.

Safety rests on `create` alone: one atomic write decides who leads. Everything else orders
candidates, wakes them, or shows people what is there.

Rules common to all methods:

- A store belongs to one event loop and is called from it only. A lease is used through the store
  that granted it.
- A call that is known not to have been carried out raises `StoreUnavailable`; one that may have
  been raises `OutcomeUnknown`. Adapters need not time out by themselves: the caller bounds each
  call, and a call that is cancelled counts as `OutcomeUnknown`. It must then either never take
  effect or take effect as if it had not been cancelled: no half.
- `StoreUnusable` is for what trying again will not cure.
- Whatever is bound to a lease that has ended is as good as absent, even where nobody has yet
  removed it: no method returns it.

Third parties add a store with an entry point in the group `doyen.stores`: the scheme names a
callable `open_store(url, context)`. The suite in `doyen.testing` tells whether it keeps its word.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from doyen.errors import ConfigError, StoreError
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
    "Store",
    "StoreURL",
    "Watch",
    "open_store",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do, and the figures that the worst case is computed from."""

    proof_of_death: bool = False
    """The end of a process is known at once, by a kernel's word."""
    linearizable_reads: bool = True
    """`get` and `list` show every write that was acknowledged before they began."""
    durable: bool = True
    """A confirmed write is never lost. Engines that replicate asynchronously lose some in a
    failover; whether deletions are among them is then checked."""
    renewals_lag: bool = False
    """A confirmed renewal proves only that the store's majority knows the one before it."""
    ttl_default_s: float = DEFAULT_TTL_S
    ttl_min_s: float = 0.1
    ttl_step_s: float | None = None
    """Granted ttls are rounded up to a multiple of this."""
    expiry_factor: float = 1.0
    """The engine may keep a lease up to this many times its ttl."""
    notice_s: float = 0.0
    """How long after the fact a watch may be told, at worst, with nothing failing."""


class Creation(NamedTuple):
    """The answer of `create`: whether it was ours, and the entry that stands there now."""

    won: bool
    entry: Entry


class Watch(Protocol):
    """A standing request to be told of changes. Closing is immediate and idempotent."""

    def close(self) -> None:
        """No call of `notify` begins after this."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """What a store is given when it is opened."""

    clock: Clock
    emit: Callable[[Event], None]


class Store(ABC):
    """A place where candidates meet: compare-and-swap, expiry, notification."""

    capabilities: Capabilities

    @abstractmethod
    async def grant(self, ttl_s: float) -> Lease:
        """Begin a lease of at least `ttl_s`; the lease says what was granted.

        The store counts from an instant not earlier than the call. The id is never used again.
        """

    @abstractmethod
    async def renew(self, lease: Lease) -> None:
        """Begin the lease's time anew, from an instant not earlier than the call.

        Returns only if the store's majority knows it (or, with `renewals_lag`, knows the renewal
        before it). Raises `LeaseGone` if the lease has ended:
        an ended lease never revives. Must not queue behind other calls of this store.
        """

    @abstractmethod
    async def revoke(self, lease: Lease) -> None:
        """End the lease now: everything bound to it is gone when this returns. Idempotent."""

    @abstractmethod
    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        """Create `key`, bound to `lease`, if nothing stands there. Atomic and durable.

        "Nothing" includes an entry whose lease has ended. If something stands there it is left
        alone and returned, with `won` false. The new entry's revision is greater than that of
        every entry ever created at this key, across releases, restarts and restores. Raises
        `LeaseGone` if `lease` has ended.
        """

    @abstractmethod
    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        """Write an entry bound to no lease. Atomic and durable.

        With `if_version=None` only if nothing stands there; else only if what stands there has
        that version. None if refused.
        """

    @abstractmethod
    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        """Delete what stands at `key` (with that version, if given). False if it did not."""

    @abstractmethod
    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        """Take a ticket at the end of `line`, behind every ticket of the same or a higher rank.

        Tickets are ordered by rank, highest first, then by arrival. The ticket's key is the
        store's choice, directly under `line`, and never used again. Raises `LeaseGone`.
        """

    @abstractmethod
    async def ahead(self, ticket: Entry) -> Entry | None:
        """The ticket directly before `ticket`, or None if it is at the head of its line.

        Raises `TicketGone` if `ticket` itself is no longer there.
        """

    @abstractmethod
    async def get(self, key: str) -> Entry | None:
        """What stands at `key`."""

    @abstractmethod
    async def list(self, prefix: str) -> list[Entry]:
        """Every entry whose key begins with `prefix` and a `/`; the tickets of a line in order."""

    async def head(self, line: str) -> Entry | None:
        """The first ticket of `line`."""
        return next(iter(await self.list(line)), None)

    @abstractmethod
    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        """Call `notify` after every change at `scope` or under it, until closed.

        Level-triggered: of what happens after `watch` has returned, nothing stays untold, though
        calls may coalesce, come late or without cause. The end of a lease counts as a change of
        everything bound to it, whether or not anybody has removed it. So *watch, then read, then
        wait* never misses the final state. `notify` is called on the store's loop and must not
        block.
        """

    def proof(self, lease: Lease) -> tuple[int, ...]:
        """Descriptors that prove this process alive while any copy of them is open.

        For a supervisor that must outlive its parent: as long as it holds copies, no successor
        can take the process for dead. Empty where the store has no proof of death.
        """
        return ()

    async def diagnose(self) -> Sequence[Finding]:
        """What `doyen doctor` should tell people about this engine: its version, with the defects
        that one is known for; modes that are unsafe; where it keeps things, and how full that is.

        Nothing is changed by it, and nothing rests on it.
        """
        return []

    def forked(self) -> None:
        """Called in the child after a fork: let go of what must not be shared, touching nothing
        that the parent still holds."""
        return

    @abstractmethod
    async def close(self) -> None:
        """Release everything that the store holds in this process. Idempotent."""


def split_url(text: str) -> SplitResult:
    """`urlsplit` for URLs that name several hosts.

    Python refuses brackets that are not around the one and only host (from 3.14 on, and in later
    releases of earlier versions), and so `h1,[::1]:2379`. The hosts are left to the adapter.
    """
    from urllib.parse import urlsplit

    scheme, separator, rest = text.partition("://")
    if not separator:
        return urlsplit(text)
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    return urlsplit(f"{scheme}://{rest[len(netloc) :]}")._replace(netloc=netloc)


@dataclass(frozen=True, slots=True)
class StoreURL:
    """A store's address, taken apart. `options` are the query's, all consumed by the adapter."""

    text: str
    parts: SplitResult
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> StoreURL:
        from urllib.parse import parse_qsl  # as in `model`

        parts = split_url(text)
        if not parts.scheme:
            raise ConfigError(
                f"{text!r} is not a store URL: it starts with a scheme,"
                f" such as sqlite:///var/lib/doyen.db; known schemes: {_known()}"
            )
        return cls(text, parts, dict(parse_qsl(parts.query, keep_blank_values=True)))

    def refuse_unknown(self, *known: str) -> None:
        """Raise if the URL has an option that the adapter does not know."""
        for name in self.options:
            if name not in known:
                raise ConfigError(
                    f"{self.parts.scheme}:// has no option {name!r};"
                    f" it knows {', '.join(known) or 'none'}"
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


def _known() -> str:
    from importlib.metadata import entry_points  # costs more than the rest of the import

    names = {*_BUILT_IN, *(point.name for point in entry_points(group="doyen.stores"))}
    return ", ".join(sorted(names))


def _opener(scheme: str) -> Opener:
    module = _BUILT_IN.get(scheme)
    if module is not None:
        opener: Opener = import_module(module).open_store
        return opener
    from importlib.metadata import entry_points

    for point in entry_points(group="doyen.stores", name=scheme):
        loaded: Opener = point.load()
        return loaded
    raise ConfigError(f"no store for {scheme}://; known schemes: {_known()}")


async def open_store(url: str, context: Context) -> Store:
    """Open the store that `url` names, importing its adapter on the way."""
    parsed = StoreURL.parse(url)
    opener = _opener(parsed.parts.scheme)
    try:
        return await opener(parsed, context)
    except StoreError as error:
        if remedy := _tls_remedy(parsed, str(error).lower()):
            raise type(error)(f"{error}; {remedy}") from error
        raise


_STRICT = (
    "the certificate lacks an extension that RFC 5280 requires, on which Python insists from 3.13"
    " on: issue the authority's certificate again with basicConstraints=critical,CA:true,"
    " keyUsage=critical,keyCertSign,cRLSign and subjectKeyIdentifier=hash, and those that it signs"
    " with authorityKeyIdentifier=keyid and subjectKeyIdentifier=hash"
)
_UNVERIFIED = {
    "key usage": _STRICT,
    "key identifier": _STRICT,
    "basic constraints": _STRICT,
    "not valid for": "the server's certificate needs the address of the URL in its subjectAltName",
    "has expired": "renew the certificate",
}
_REFUSED = ("alert", "client certificate", "tsi_", "access denied")
_HUNG_UP = (
    "reset by peer",
    "eof",
    "broken pipe",
    "closed the connection",
    "connection closed",
    "connection lost",
)


def _tls_remedy(url: StoreURL, cause: str) -> str:
    """What to do about a store that could not be opened for its certificate's sake, or for ours.

    Libraries tell it in words of their own; a server that refuses a certificate often just hangs
    up.
    """
    encrypted = bool({"tls", "ca", "cert"} & set(url.options)) or url.parts.scheme[-2:] == "ss"
    if not encrypted or url.options.get("tls") == "false":
        return ""
    if "certificate verify failed" in cause or "certificate_verify_failed" in cause:
        trust = "ca= names the file of the authority that signed the server's certificate"
        return next((text for words, text in _UNVERIFIED.items() if words in cause), trust)
    if any(words in cause for words in (*_REFUSED, *_HUNG_UP)):
        return (
            "the server may want a certificate of ours, or another: cert= and key= name the files"
            " of one that is signed by an authority it trusts"
        )
    return ""
