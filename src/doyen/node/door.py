"""The door of a node: the sockets it listens on, and who comes in.

Peers, clients and plain HTTP share a port; the first byte tells them apart (a frame begins with 0,
a request with a letter). Where the port speaks TLS, all of them do; `http_only` opens a second port
for probes that have no certificate.

    door = Door(me, security, peers=peers.admit, clients=service.admit,
                pages={"/healthz": lambda: (200, "text/plain", b"ok\\n")})
    port = await door.listen("127.0.0.1", 7400)
    await door.close()

`peers` and `clients` are called with a `Link` that has proved who it is; they let it in with
`link.welcome(on_frames, on_end)` or send it away with `link.refuse(fault, text)`. From then on it
is theirs: `link.send`, `await link.drain()`, `link.pause()`, `link.closed` (`doyen.quorum.link`).

Strangers are kept small: each has `handshake_s` for everything, TLS included, up to the end of the
handshake or of the request; of more than `max_strangers` at a time, the one that has taken longest
is shown out; more than `max_clients` are refused. Pages are for anyone who can reach the port.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from doyen.errors import ConfigError
from doyen.quorum.link import BOUND, HANDSHAKE_S, KEEPALIVE_S, End, Link, Tally
from doyen.quorum.wire import Fault, Identity, Listener, Security, check_exposure

__all__ = ["Door", "Page"]

log = logging.getLogger("doyen")

Page = Callable[[], tuple[int, str, bytes]]
"""Status, content type, body."""

MAX_STRANGERS = 512
MAX_CLIENTS = 10_000
MAX_REQUEST = 8192
BACKLOG = 1024
ACCEPTED_AT_ONCE = 64
"""More would hold up the loop, heartbeats and all."""


class Door:
    """Listens, and hands over who has proved who they are."""

    def __init__(
        self,
        me: Identity,
        security: Security,
        *,
        peers: Callable[[Link], None],
        clients: Callable[[Link], None],
        pages: Mapping[str, Page],
        insecure: bool = False,
        tally: Tally | None = None,
        handshake_s: float = HANDSHAKE_S,
        keepalive_s: float = KEEPALIVE_S,
        client_bound: int = BOUND,
        max_strangers: int = MAX_STRANGERS,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        self.me = me
        self.security = security
        self.pages = pages
        self.tally = tally or Tally()
        self.handshake_s = handshake_s
        self.keepalive_s = keepalive_s
        self.client_bound = client_bound
        self._peers = peers
        self._clients = clients
        self._insecure = insecure
        self._max_strangers = max_strangers
        self._max_clients = max_clients
        self._servers: list[asyncio.Server] = []
        self._strangers: dict[Visitor, None] = {}
        self._inside: set[Link] = set()
        self._closed = False
        self._context = security.listening

    @property
    def strangers(self) -> int:
        """Connections that have not yet said who they are."""
        return len(self._strangers)

    @property
    def clients(self) -> int:
        return len(self._inside)

    async def listen(self, host: str, port: int, *, http_only: bool = False) -> int:
        """Listen there too; 0 takes a free port. Gives the port."""
        if not http_only:
            check_exposure(host, self.security, insecure=self._insecure)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except OSError as error:
            raise ConfigError(f"cannot listen on {host!r}: {error.strerror}") from error
        for family, *_, where in sorted(set(found), key=repr):
            listening = _bind(family, (*where[:1], port, *where[2:]))
            port = listening.getsockname()[1]
            self._servers.append(
                await loop.create_server(
                    lambda: Visitor(self, http_only), sock=listening, backlog=ACCEPTED_AT_ONCE
                )
            )
            # The loop takes its own figure for both; how many may wait in the kernel is another.
            listening.listen(BACKLOG)
        return port

    def enter(self, visitor: Visitor) -> bool:
        """A stranger is at the door."""
        if self._closed:
            return False
        self._strangers[visitor] = None
        if len(self._strangers) > self._max_strangers:
            longest = next(iter(self._strangers))
            longest.turn_away(Fault.CROWDED, "too many connections that do not say who they are")
        return True

    def leave(self, visitor: Visitor) -> None:
        """A stranger has gone, or is none any more."""
        self._strangers.pop(visitor, None)

    def admit(self, link: Link) -> None:
        """Somebody has proved who they are."""
        if self._closed:
            link.abort()
        elif link.role == "peer":
            self._peers(link)
        elif len(self._inside) >= self._max_clients:
            link.refuse(Fault.CROWDED, f"{self._max_clients} clients are here already")
        else:
            self._inside.add(link)
            link.when_gone(self._inside.discard)
            self._clients(link)

    async def close(self) -> None:
        """Listen no more, send strangers away, and end the clients' links."""
        self._closed = True
        for server in self._servers:
            server.close()
        for visitor in list(self._strangers):
            visitor.turn_away(None, "")
        for link in list(self._inside):
            link.close()
        for link in list(self._inside):
            await link.wait()


def _bind(family: int, where: tuple[Any, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(where)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {where[0]} port {where[1]}: {error.strerror}"
        ) from error
    return listening


class Visitor(asyncio.Protocol):
    """A connection until one knows what it wants."""

    def __init__(self, door: Door, http_only: bool) -> None:
        self._door = door
        self._http_only = http_only
        self._transport: Any = None
        self._link: Link | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        self._request = b""
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if not self._door.enter(self):
            self._transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(
            self._door.handshake_s, self.turn_away, Fault.DEADLINE, "took too long to greet"
        )
        if self._door._context is not None and not self._http_only:
            self._transport.pause_reading()
            self._task = loop.create_task(self._secure())

    async def _secure(self) -> None:
        """TLS begins here rather than in the server, so that who is slow about it is counted."""
        loop = asyncio.get_running_loop()
        context = self._door._context
        assert context is not None
        try:
            secured = await loop.start_tls(
                self._transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=self._door.handshake_s,
            )
        except (OSError, EOFError) as error:
            if not self._over:
                self.turn_away(Fault.TLS, f"TLS failed: {error}")
        else:
            if secured is None:
                self._end()
                return
            self._transport, self._task = secured, None
            if self._early:
                self.data_received(b"".join(self._early))

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        if self._task is not None:
            self._early.append(data)  # TLS is there, and its transport not yet in our hands
        elif self._request or data[:1].isalpha():
            self._read_request(data)
        elif data[0] == 0 and not self._http_only:
            self._make_link(data)
        else:
            tls = data[0] == 0x16
            self.turn_away(
                Fault.TLS if tls else Fault.GARBAGE,
                "spoke TLS, which this port does not" if tls else "spoke neither HTTP nor ours",
            )

    def _make_link(self, data: bytes) -> None:
        door = self._door
        link = Link(
            Listener(door.me, door.security.secret),
            door.tally,
            admit=door.admit,
            keepalive_s=door.keepalive_s,
            bound=door.client_bound,
        )
        link.greeted.add_done_callback(lambda _: self._end())
        self._link = link
        self._transport.set_protocol(link)
        link.connection_made(self._transport)
        link.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def turn_away(self, fault: Fault | None, text: str) -> None:
        """Show the stranger out."""
        if self._over:
            return
        if fault is not None:
            where = self._transport.get_extra_info("peername") or ("?",)
            self._door.tally.note(fault, f"{where[0]}: {text}")
        self._end()
        if self._link is not None:
            self._link.abort(End.FAULT)
        else:
            self._transport.abort()

    def _end(self) -> None:
        self._over = True
        self._door.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()

    # HTTP: one small request, one answer, the end.

    def _read_request(self, data: bytes) -> None:
        self._request += data
        if len(self._request) > MAX_REQUEST:
            self._answer(431, "text/plain", b"too much\n")
        elif b"\r\n\r\n" in self._request:
            self._answer(*self._page())

    def _page(self) -> tuple[int, str, bytes]:
        method, _, rest = self._request.split(b"\r\n", 1)[0].partition(b" ")
        target, _, version = rest.partition(b" ")
        if not version.startswith(b"HTTP/1."):
            return 400, "text/plain", b"not a request\n"
        if method not in {b"GET", b"HEAD"}:
            return 405, "text/plain", b"GET only\n"
        page = self._door.pages.get(target.partition(b"?")[0].decode("latin-1"))
        if page is None:
            return 404, "text/plain", b"no such page\n"
        try:
            return page()
        except Exception:
            log.exception("no page at %s", target)
            return 500, "text/plain", b"the node could not say\n"

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        reason = HTTPStatus(status).phrase
        head = (
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        if self._request.startswith(b"HEAD "):
            body = b""
        self._transport.write(head.encode("latin-1") + body)
        self._transport.close()
        self._request = b"-"
