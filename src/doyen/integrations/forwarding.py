"""Forwarding decided: which process serves a request, and what may be passed on to it.

A `LeaderView` knows the leader by observation, so no request costs a read of the store. The rules:

- A process serves a request only while its own term is valid. All others forward to the address in
  the leader record, `http://host:port` or `https://host:port`, if `trust` accepts it: otherwise a
  user who can write to the store could have requests sent anywhere.
- A forwarded request carries the token of the leader that it is meant for, and how often it was
  forwarded, signed with a secret that all processes share. A leader serves requests for its own and
  for earlier terms. A request for a later term is not executed: there is a later leader. Headers
  `doyen-*` that are not signed are dropped.
- A request is forwarded twice at most, and the second time only to a later leader than the first.
- During an election requests wait, for a bounded time and in bounded number.
- A request is sent again only if no byte of it was sent. Otherwise it may have been carried out.
- The answer of a leader that has been replaced is not waited for: it may be frozen.

May import the model, terms, queries and the session. No I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from doyen._waiting import LoopEvent
from doyen.blocking import BlockingSession
from doyen.election.queries import observe_leader
from doyen.errors import ConfigError, DoyenError, SessionClosed
from doyen.events.log_lines import log_line
from doyen.model import Leader, Unreachable
from doyen.session import Session
from doyen.term import Term

__all__ = [
    "ForwardingRules",
    "Headers",
    "LeaderView",
    "RefuseRequest",
    "SendTo",
    "ServeHere",
    "WaitForLeader",
]

MAX_HOPS = 2
CONNECT_S = 2.0
"""How long a connection to the leader may take."""
AGAIN_S = 0.2
"""How long to wait before a leader that refused a connection is tried again."""
FORWARDED_WAIT_S = 1.0
"""How long a request that was forwarded waits. A new leader may be known to others before it
serves, and a former one may be notified of its successor later than others."""
LAST_WORDS_S = 2.0
"""How long a leader that has been replaced may take to answer."""
IDLE_S = 1.0
"""How long an idle connection to the leader is kept. Servers close theirs after 2 s and more, and a
request that is sent at that moment would be lost."""
WARN_EVERY_S = 60.0
"""How often a signature that does not match is logged. Any client can send one."""
Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"expect",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_OF_THE_SERVER = frozenset({b"date", b"server"})
"""Headers of a response that the forwarding server sets itself."""
log = logging.getLogger("doyen")


class ServeHere(NamedTuple):
    """This process leads: serve the request during this term."""

    term: Term


class SendTo(NamedTuple):
    """Another process leads: send the request there."""

    leader: Leader
    scheme: str
    host: str
    port: int
    hops: int
    """How often it has been forwarded then."""

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.netloc}"


class WaitForLeader(NamedTuple):
    """There is no leader at present."""

    why: str


class RefuseRequest(NamedTuple):
    """The request is not executed."""

    status: int
    why: str


class Forwarded(NamedTuple):
    """What a signed request says about itself."""

    token: int
    hops: int


class LeaderView:
    """Who leads an election, as this process knows it. Any thread.

    view = LeaderView("billing")
    async with doyen.connect(STORE) as session, view.following(session):
        async for campaign in session.campaigns("billing", meta={"address": ADDRESS}):
            async with campaign as term:
                with view.leading(term):
                    await work()
    """

    def __init__(self, election: str) -> None:
        self.election = election
        self.leader: Leader | None = None
        """As last observed."""
        self.term: Term | None = None
        """Of this process, if it leads."""
        self.own_token = -1
        """Of the latest term that this process had."""
        self._lock = threading.Lock()
        self._waiters: set[Callable[[], None]] = set()

    @property
    def leads(self) -> bool:
        """Whether this process leads, for certain."""
        term = self.term
        return term is not None and term.valid

    @contextlib.contextmanager
    def leading(self, term: Term) -> Iterator[Term]:
        """Serve requests during this term, while the context lasts."""
        self.own_token = term.token
        self.term = term
        self._wake()
        try:
            yield term
        finally:
            if self.term is term:
                self.term = None

    @contextlib.asynccontextmanager
    async def following(self, session: Session) -> AsyncIterator[LeaderView]:
        """Observe the leader while the context lasts."""

        async def observe() -> None:
            with self._observing():
                async for leader in session.observe(self.election):
                    if not isinstance(leader, Unreachable):  # the last known one may still lead
                        self.observed(leader)

        observing = asyncio.create_task(observe())
        try:
            yield self
        finally:
            observing.cancel()
            await asyncio.wait({observing})
            self.observed(None)

    @contextlib.contextmanager
    def following_blocking(self, session: BlockingSession) -> Iterator[LeaderView]:
        """The same for code without asyncio. The leader is observed on doyen's thread."""
        core, runtime = session._opened, session._runtime

        def seen(leader: Leader | Unreachable[Leader] | None) -> None:
            if not isinstance(leader, Unreachable):
                self.observed(leader)

        async def observe() -> None:
            with self._observing():
                await observe_leader(core, self.election, "elections", seen)

        async def begin() -> asyncio.Task[None]:
            return core.tasks.start(observe())

        async def end() -> None:
            observing.cancel()
            await asyncio.wait({observing})

        runtime.retain()
        try:
            observing = runtime.do_blocking(core.run(begin))
            try:
                yield self
            finally:
                if runtime.pid == os.getpid():
                    runtime.finish_blocking(end())
        finally:
            if runtime.pid == os.getpid():  # a forked child has neither the thread nor the session
                self.observed(None)
                runtime.release()

    def forked(self) -> None:
        """In the child of a fork: what the parent knows is not kept up to date here."""
        self._lock = threading.Lock()  # a thread that no longer exists may have held it
        self._waiters = set()
        self.leader = self.term = None

    @contextlib.contextmanager
    def _observing(self) -> Iterator[None]:
        """When it ends, for whatever reason, the leader is not known any more."""
        try:
            yield
        except SessionClosed:
            pass
        except DoyenError as error:
            line = log_line(event="leader_unknown", election=self.election, error=error)
            log.warning("%s", line)
        finally:
            self.observed(None)

    def observed(self, leader: Leader | None) -> None:
        """Take this for the leader."""
        self.leader = leader
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, set()
        for wake in waiters:
            wake()

    @property
    def state(self) -> tuple[Leader | None, Term | None]:
        """Changes whenever the leader does, as far as this process knows."""
        return self.leader, self.term

    @contextlib.contextmanager
    def _waiting(
        self, seen: tuple[Leader | None, Term | None], wake: Callable[[], None]
    ) -> Iterator[None]:
        with self._lock:
            self._waiters.add(wake)
        if self.state != seen:
            wake()
        try:
            yield
        finally:
            with self._lock:
                self._waiters.discard(wake)

    async def changed(self, seen: tuple[Leader | None, Term | None], within_s: float) -> bool:
        """Wait until the state is not `seen`; False if that takes longer."""
        event = LoopEvent()
        with self._waiting(seen, event.set_soon):
            return await event.set_within(within_s)

    async def replaced(self, leader: Leader) -> None:
        """Wait until this leader no longer leads."""
        while (seen := self.state)[0] is not None and seen[0].token == leader.token:
            await self.changed(seen, 3600.0)

    def outlived(self, leader: Leader) -> Callable[[], bool]:
        """A function that tells whether this leader has been replaced, and has had time to answer.
        It has to be called from time to time."""
        since: float | None = None

        def over() -> bool:
            nonlocal since
            now = time.monotonic()
            if self.leader is not None and self.leader.token == leader.token:
                since = None
            elif since is None:
                since = now
            return since is not None and now - since >= LAST_WORDS_S

        return over

    def changed_blocking(self, seen: tuple[Leader | None, Term | None], within_s: float) -> bool:
        """The same on a thread."""
        event = threading.Event()
        with self._waiting(seen, event.set):
            return event.wait(max(0.0, within_s))


class UnverifiedRequests:
    """Logs that signatures do not match, at most once per `WARN_EVERY_S`. Any thread."""

    def __init__(self) -> None:
        self._logged_at = -math.inf
        self._more = 0
        """How many there were since."""

    def report(self, election: str) -> None:
        now = time.monotonic()
        if now - self._logged_at < WARN_EVERY_S:
            self._more += 1
            return
        more, self._more, self._logged_at = self._more or None, 0, now
        why = (
            "the signature of a forwarded request does not match, so the request is treated as one"
            " of a client: set the same secret in all processes, unless a client has sent these"
            " headers itself"
        )
        line = log_line(event="forwarding_unverified", election=election, error=why, more=more)
        log.warning("%s", line)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardingRules:
    """The settings of the middleware, and the decisions that follow from them."""

    view: LeaderView
    secret: str | bytes
    trust: Collection[str] | Callable[[str], bool]
    """Addresses that requests may be sent to, or a function that decides."""
    wait_s: float = 5.0
    """How long a request waits for a leader."""
    max_waiting: int = 100
    """How many requests wait for a leader at a time. Further ones are refused at once."""
    answer_s: float = 60.0
    """How long the leader may take to accept a part of a request, or to send a part of its
    answer."""
    local: Collection[str] = ("/health", "/healthz", "/livez", "/readyz")
    """Paths that every process serves itself."""
    redirect: bool = False
    """Answer with a redirect to the leader (307) instead of forwarding."""
    _unverified: UnverifiedRequests = field(
        default_factory=UnverifiedRequests, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if len(self._key) < 16:
            raise ConfigError("secret has 16 bytes at least, and is the same in all processes")
        if isinstance(self.trust, str):
            raise ConfigError("trust is a collection of addresses or a function, not a string")
        for name in ("wait_s", "max_waiting", "answer_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more; got {getattr(self, name)!r}")

    @property
    def _key(self) -> bytes:
        return self.secret.encode() if isinstance(self.secret, str) else self.secret

    def patience_s(self, forwarded: Forwarded | None) -> float:
        """How long a request waits for a leader."""
        return self.wait_s if forwarded is None else min(self.wait_s, FORWARDED_WAIT_S)

    @property
    def timeouts(self) -> dict[str, float]:
        """Of one exchange with the leader."""
        return {
            "connect": CONNECT_S,
            "pool": CONNECT_S,
            "read": self.answer_s,
            "write": self.answer_s,
        }

    def decide(
        self, forwarded: Forwarded | None
    ) -> ServeHere | SendTo | WaitForLeader | RefuseRequest:
        """What to do with a request now."""
        term, leader = self.view.term, self.view.leader
        if term is not None and term.valid:
            if forwarded is not None and forwarded.token > term.token:
                return RefuseRequest(
                    503, "the request is for a later leader than this process knows of"
                )
            return ServeHere(term)
        hops = 0 if forwarded is None else forwarded.hops
        if hops >= MAX_HOPS:
            return RefuseRequest(
                508, f"the request was forwarded {hops} times, and this process does not lead"
            )
        if leader is None:
            return WaitForLeader("there is no leader")
        if leader.token <= self.view.own_token:
            return WaitForLeader("the term of this process has ended")
        if forwarded is not None and leader.token <= forwarded.token:
            return WaitForLeader(
                "the address in the leader record leads to this process, which does not lead yet"
            )
        return self._route(leader, hops + 1)

    def _route(self, leader: Leader, hops: int) -> SendTo | WaitForLeader | RefuseRequest:
        address = leader.meta.get("address")
        if address is None:
            return WaitForLeader(
                'the leader record has no address: campaign with meta={"address": …}, or publish it'
            )
        if not isinstance(address, str):
            return RefuseRequest(503, "the address in the leader record is not text")
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        clean = not (parts.username or parts.password or parts.query or parts.fragment)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or port is None
            or parts.path not in ("", "/")
            or not clean
        ):
            return RefuseRequest(503, "the address in the leader record is not http(s)://host:port")
        send = SendTo(leader, parts.scheme, parts.hostname, port, hops)
        trusted = self.trust(send.origin) if callable(self.trust) else send.origin in self.trust
        return send if trusted else RefuseRequest(503, "the address of the leader is not trusted")

    def _signature(self, token: int, hops: int, method: bytes, target: bytes) -> bytes:
        text = b"\n".join((b"doyen-forward-1", b"%d %d" % (token, hops), method, signed(target)))
        return hmac.new(self._key, text, hashlib.sha256).hexdigest().encode()

    def read(
        self, headers: Iterable[tuple[bytes, bytes]], method: bytes, target: bytes
    ) -> Forwarded | None:
        """What a request says about itself, if it is signed with the secret."""
        found = {name: value for name, value in headers if name.startswith(b"doyen-")}
        try:
            token, hops = int(found[b"doyen-token"]), int(found[b"doyen-hops"])
            signature = found[b"doyen-signature"]
        except (KeyError, ValueError):
            return None
        if not hmac.compare_digest(signature, self._signature(token, hops, method, target)):
            self._unverified.report(self.view.election)
            return None
        return Forwarded(token, hops)

    def outgoing(
        self,
        send: SendTo,
        headers: Headers,
        method: bytes,
        target: bytes,
        *,
        body: bool,
        client: str | None = None,
        scheme: str = "http",
    ) -> Headers:
        """The headers of a request that is forwarded. A body without a length is sent in chunks."""
        token, hops = send.leader.token, send.hops
        kept = passed_on(headers)
        names = {name for name, _ in kept}
        if b"host" not in names:  # HTTP/1.0 does not require it
            kept.append((b"host", send.netloc.encode()))
        if body and b"content-length" not in names:
            kept.append((b"transfer-encoding", b"chunked"))
        if client:
            kept.append((b"x-forwarded-for", client.encode()))
        if b"x-forwarded-proto" not in names:
            kept.append((b"x-forwarded-proto", scheme.encode()))
        return [
            *kept,
            (b"doyen-token", b"%d" % token),
            (b"doyen-hops", b"%d" % hops),
            (b"doyen-signature", self._signature(token, hops, method, target)),
        ]


def signed(target: bytes) -> bytes:
    """What of a target is signed: the path as WSGI has it, which is without percent-encoding, and
    the query.

    >>> signed(b"/a%2Fb%20c?d=%20") == signed(b"/a/b%20c?d=%20")
    True
    """
    path, mark, query = target.partition(b"?")
    return unquote_to_bytes(path) + mark + query


def without_doyen(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers without those that only doyen may set. WSGI has `_` where a name has `-`, so that
    an application would take `doyen_token` for the token.

    >>> without_doyen([(b"doyen-token", b"7"), (b"doyen_token", b"7"), (b"host", b"h")])
    [(b'host', b'h')]
    """
    return [
        (name, value)
        for name, value in headers
        if not name.replace(b"_", b"-").startswith(b"doyen-")
    ]


def passed_on(headers: Headers) -> Headers:
    """The headers that a forwarder passes on: none that concern one connection only."""
    named = {
        each.strip().lower()
        for name, value in headers
        if name == b"connection"
        for each in value.split(b",")
    }
    return [
        (name, value)
        for name, value in without_doyen(headers)
        if name not in _HOP_BY_HOP and name not in named
    ]


def returned(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers of the leader's response that are passed on to the client."""
    lower = [(name.lower(), value) for name, value in headers]
    return [(name, value) for name, value in passed_on(lower) if name not in _OF_THE_SERVER]


def framed(headers: Headers) -> bool:
    """Whether the request has a body."""
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)


def malformed(headers: Headers, target: bytes) -> str | None:
    """Why a request is answered 400: the length of its body is stated in two ways, and servers
    differ in which one they use; or its target, after an address, would be a part of another."""
    lengths = [value for name, value in headers if name == b"content-length"]
    coded = any(name == b"transfer-encoding" for name, _ in headers)
    if len(lengths) > 1 or (lengths and (coded or not lengths[0].isdigit())):
        return "the length of the request is stated in more than one way"
    if not target.startswith(b"/"):
        return "the target of the request does not begin with /"
    return None
