"""The door of a node: the sockets it listens on, and who comes in.

Peers, clients and plain HTTP share a port; the first byte tells them apart (a frame begins with 0,
a request with a letter). Where the port speaks TLS, all of them do; `http_only` opens a second port
for probes that have no certificate.

    door = Door(me, security, peers=peers.admit, clients=service.admit,
                pages={"/healthz": lambda: (200, "text/plain", b"ok\\n")})
    port = await door.listen("127.0.0.1", 7400)
    await door.close()

`peers` and `clients` are called with a `FrameConnection` that has proved who it is; they let it in
with `link.welcome(on_frames, on_end)` or send it away with `link.refuse(fault, text)`. From then on
it is theirs: `link.send`, `await link.drain()`, `link.pause()`, `link.closed`
(`doyen.quorum.protocol.connection`).

Strangers are kept small: each has `handshake_s` for everything, TLS included, up to the end of the
handshake or of the request; of more than `max_strangers` at a time, the one that has taken longest
is shown out; more than `max_clients` are refused. Pages are for anyone who can reach the port.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from doyen.errors import StoreUnusable
from doyen.quorum.protocol.connection import (
    BOUND,
    HANDSHAKE_S,
    KEEPALIVE_S,
    ConnectionErrors,
    End,
    FrameConnection,
)
from doyen.quorum.protocol.frames import CloseReason
from doyen.quorum.protocol.handshake import ConnectionIdentity, MemberInfo, ServerHandshake
from doyen.quorum.protocol.security import Security, check_exposure

__all__ = ["Door", "Page"]

log = logging.getLogger("doyen")

Page = Callable[[], tuple[int, str, bytes]]
"""Status, content type, body."""

MAX_STRANGERS = 512
MAX_CLIENTS = 10_000
MAX_REQUEST = 8192
BACKLOG = 1024
ACCEPTED_AT_ONCE = 16
"""More would hold up the loop, heartbeats and all."""
ACCEPT_AGAIN_S = 0.05
NO_SUCH_NETWORK = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}


class Door:
    """Listens, and hands over who has proved who they are."""

    def __init__(
        self,
        me: ConnectionIdentity,
        security: Security,
        *,
        peers: Callable[[FrameConnection], None],
        clients: Callable[[FrameConnection], None],
        pages: Mapping[str, Page],
        insecure: bool = False,
        info: Callable[[], MemberInfo] = MemberInfo,
        tally: ConnectionErrors | None = None,
        handshake_s: float = HANDSHAKE_S,
        keepalive_s: float = KEEPALIVE_S,
        client_bound: int = BOUND,
        max_strangers: int = MAX_STRANGERS,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        self.me = me
        self.security = security
        self.pages = pages
        self.info = info
        self.tally = tally or ConnectionErrors()
        self.handshake_s = handshake_s
        self.keepalive_s = keepalive_s
        self.client_bound = client_bound
        self._peers = peers
        self._clients = clients
        self._insecure = insecure
        self._max_strangers = max_strangers
        self._max_clients = max_clients
        self._listening: list[socket.socket] = []
        self._strangers: dict[Visitor, None] = {}
        self._inside: set[FrameConnection] = set()
        self._closed = False
        security.listening  # noqa: B018 - files that cannot be used are found here

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
            raise StoreUnusable(f"cannot listen on {host!r}: {error.strerror}") from error
        failures: list[OSError] = []
        for family, *_, where in sorted(set(found), key=repr):
            try:
                listening = _bind(family, (where[0], port, *where[2:]))
            except OSError as error:
                failures.append(error)
                continue
            port = listening.getsockname()[1]
            self._listening.append(listening)
            loop.add_reader(listening, self._accept, listening, http_only)
        for failure in failures:
            # A machine may know a name's IPv6 address and have no IPv6.
            if len(failures) == len(set(found)) or failure.errno not in NO_SUCH_NETWORK:
                raise StoreUnusable(
                    f"cannot listen on {host or 'every address'} port {port}: "
                    f"{os.strerror(failure.errno or 0)}. Stop whatever listens there, or name"
                    " an address of this machine that is free"
                ) from failure
        return port

    def _accept(self, listening: socket.socket, http_only: bool) -> None:
        """Take in who waits. A callback, not a task: a task that is cancelled just after a
        connection was accepted would lose it without closing it."""
        try:
            for _ in range(ACCEPTED_AT_ONCE):
                arrived, where = listening.accept()
                arrived.setblocking(False)
                Visitor(self, http_only, where[0]).begin(arrived)
        except (BlockingIOError, InterruptedError):
            pass  # all of them are in
        except OSError as error:  # it was gone already, or there are no descriptors left
            self.tally.record(CloseReason.CROWDED, f"nobody could be let in: {error}")
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_AGAIN_S, self._accept_again, listening, http_only)

    def _accept_again(self, listening: socket.socket, http_only: bool) -> None:
        if listening in self._listening:
            loop = asyncio.get_running_loop()
            loop.add_reader(listening, self._accept, listening, http_only)

    def enter(self, visitor: Visitor) -> None:
        """A stranger is at the door."""
        self._strangers[visitor] = None
        if len(self._strangers) > self._max_strangers:
            longest = next(iter(self._strangers))
            longest.turn_away(
                CloseReason.CROWDED, "too many connections that do not say who they are"
            )

    def leave(self, visitor: Visitor) -> None:
        """A stranger has gone, or is none any more."""
        self._strangers.pop(visitor, None)

    def admit(self, link: FrameConnection) -> None:
        """Somebody has proved who they are."""
        if self._closed:
            link.abort()
        elif link.role == "peer":
            self._peers(link)
        elif len(self._inside) >= self._max_clients:
            link.refuse(CloseReason.CROWDED, f"{self._max_clients} clients are here already")
        else:
            self._inside.add(link)
            link.when_gone(self._inside.discard)
            self._clients(link)

    def stop_listening(self) -> None:
        """Let nobody in any more; who is in stays."""
        for listening in self._listening:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._listening.clear()

    async def close(self) -> None:
        """Listen no more, send strangers away, and end the clients' links."""
        self._closed = True
        self.stop_listening()
        strangers = list(self._strangers)
        for visitor in strangers:
            visitor.turn_away(None, "")
        for visitor in strangers:
            await visitor.wait()
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
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


class Visitor(asyncio.Protocol):
    """A connection until one knows what it wants.

    It is counted, and its time runs, from before TLS: a server of asyncio's own would show us only
    those who are through with that.
    """

    def __init__(self, door: Door, http_only: bool, where: str) -> None:
        self._door = door
        self._http_only = http_only
        self._where = where
        self._transport: Any = None
        self._link: FrameConnection | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._connecting = False
        self._request = b""
        self._over = False

    def begin(self, arrived: socket.socket) -> None:
        """Have it speak to us, over TLS if that is set."""
        loop = asyncio.get_running_loop()
        door = self._door
        self._task = loop.create_task(self._connect(arrived))
        self._deadline = loop.call_later(
            door.handshake_s, self.turn_away, CloseReason.DEADLINE, "took too long to greet"
        )
        door.enter(self)

    async def _connect(self, arrived: socket.socket) -> None:
        if self._over:
            arrived.close()
            return
        self._connecting = True
        loop = asyncio.get_running_loop()
        context = None if self._http_only else self._door.security.listening
        patience_s = self._door.handshake_s + 1 if context else None  # ours runs out first
        try:
            await loop.connect_accepted_socket(
                lambda: self, arrived, ssl=context, ssl_handshake_timeout=patience_s
            )
        except OSError as error:
            self.turn_away(
                CloseReason.TLS if context else CloseReason.GARBAGE, f"did not connect: {error}"
            )
        finally:
            self._connecting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._over:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        if self._request or data[:1].isalpha():
            self._read_request(data)
        elif data[0] == 0 and not self._http_only:
            self._make_link(data)
        else:
            tls = data[0] == 0x16
            self.turn_away(
                CloseReason.TLS if tls else CloseReason.GARBAGE,
                "spoke TLS, which this port does not" if tls else "spoke neither HTTP nor ours",
            )

    def _make_link(self, data: bytes) -> None:
        door = self._door
        link = FrameConnection(
            ServerHandshake(door.me, security=door.security, info=door.info),
            door.tally,
            admit=door.admit,
            keepalive_s=door.keepalive_s,
            bound=door.client_bound,
        )
        link.established.add_done_callback(lambda _: self._end())
        self._link = link
        self._transport.set_protocol(link)
        link.connection_made(self._transport)
        link.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def turn_away(self, fault: CloseReason | None, text: str) -> None:
        """Show the stranger out."""
        if self._over:
            return
        if fault is not None:
            self._door.tally.record(fault, f"{self._where}: {text}")
        self._end()
        if self._link is not None:
            self._link.abort(End.FAULT)
        elif self._transport is not None:
            self._transport.abort()
        elif self._connecting and self._task is not None:
            self._task.cancel()

    async def wait(self) -> None:
        """Until its connection is in the hands of a transport, or closed."""
        if self._task is not None:
            await asyncio.wait({self._task})

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
