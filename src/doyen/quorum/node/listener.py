"""The sockets that a node listens on, and the connections that arrive there.

Peers, clients and plain HTTP share a port; the first byte tells them apart (a frame begins with 0,
an HTTP request with a letter). Where the port uses TLS, all of them do; `http_only` opens a second
port for probes that have no certificate.

    listener = Listener(me, security, peers=peers.admit, clients=service.admit,
                        pages={"/healthz": lambda: (200, "text/plain", b"ok\\n")})
    port = await listener.listen("127.0.0.1", 7400)
    await listener.close()

`peers` and `clients` are called with a `FrameConnection` that has proved its identity. They admit
it with `connection.welcome(on_frames, on_end)` or refuse it with `connection.refuse(reason, text)`,
and own it from then on (`doyen.quorum.protocol.connection`).

Connections that have not proved their identity are bounded. Each has `handshake_s` for everything,
TLS included, up to the end of the handshake or of the HTTP request. Of more than `max_pending` of
them, the oldest is closed; more than `max_clients` clients are refused. Pages are served to anyone
who can reach the port.
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
from doyen.events.log_lines import log_line
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

log = logging.getLogger("doyen")

Page = Callable[[], tuple[int, str, bytes]]
"""Status, content type, body."""

MAX_PENDING = 512
MAX_CLIENTS = 10_000
MAX_REQUEST = 8192
BACKLOG = 1024
ACCEPTED_AT_ONCE = 16
"""More would delay the event loop, and heartbeats with it."""
ACCEPT_RETRY_S = 0.05
NO_SUCH_NETWORK = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}


class Listener:
    """Listens, and hands over connections that have proved their identity."""

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
        errors: ConnectionErrors | None = None,
        handshake_s: float = HANDSHAKE_S,
        keepalive_s: float = KEEPALIVE_S,
        client_bound: int = BOUND,
        max_pending: int = MAX_PENDING,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        self.me = me
        self.security = security
        self.pages = pages
        self.info = info
        self.errors = errors or ConnectionErrors()
        self.handshake_s = handshake_s
        self.keepalive_s = keepalive_s
        self.client_bound = client_bound
        self._peers = peers
        self._clients = clients
        self._insecure = insecure
        self._max_pending = max_pending
        self._max_clients = max_clients
        self._listening: list[socket.socket] = []
        self._pending: dict[PendingConnection, None] = {}
        self._admitted: set[FrameConnection] = set()
        self._closed = False
        security.listening  # noqa: B018 - files that cannot be used are found here

    @property
    def pending(self) -> int:
        """How many connections have not proved their identity yet."""
        return len(self._pending)

    @property
    def clients(self) -> int:
        return len(self._admitted)

    async def listen(self, host: str, port: int, *, http_only: bool = False) -> int:
        """Listen there too; 0 takes a free port. Returns the port."""
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
        """Accept waiting connections. This is a callback, since a task that is cancelled just after
        it accepted a connection would not close that."""
        try:
            for _ in range(ACCEPTED_AT_ONCE):
                arrived, where = listening.accept()
                arrived.setblocking(False)
                PendingConnection(self, http_only, where[0]).begin(arrived)
        except (BlockingIOError, InterruptedError):
            pass  # no more are waiting
        except OSError as error:  # the peer has gone already, or no descriptors are left
            self.errors.record(CloseReason.CROWDED, f"connections could not be accepted: {error}")
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_RETRY_S, self._resume_accepting, listening, http_only)

    def _resume_accepting(self, listening: socket.socket, http_only: bool) -> None:
        if listening in self._listening:
            loop = asyncio.get_running_loop()
            loop.add_reader(listening, self._accept, listening, http_only)

    def add(self, connection: PendingConnection) -> None:
        self._pending[connection] = None
        if len(self._pending) > self._max_pending:
            oldest = next(iter(self._pending))
            text = "too many connections that have not proved their identity"
            oldest.drop(CloseReason.CROWDED, text)

    def remove(self, connection: PendingConnection) -> None:
        """The connection has ended, or proved its identity."""
        self._pending.pop(connection, None)

    def admit(self, connection: FrameConnection) -> None:
        """A connection has proved its identity."""
        if self._closed:
            connection.abort()
        elif connection.role == "peer":
            self._peers(connection)
        elif len(self._admitted) >= self._max_clients:
            connection.refuse(
                CloseReason.CROWDED, f"{self._max_clients} clients are connected already"
            )
        else:
            self._admitted.add(connection)
            connection.when_gone(self._admitted.discard)
            self._clients(connection)

    def stop_listening(self) -> None:
        """Accept no more connections; those that were admitted stay."""
        for listening in self._listening:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._listening.clear()

    async def close(self) -> None:
        """Stop listening, and close pending connections and those of clients."""
        self._closed = True
        self.stop_listening()
        pending = list(self._pending)
        for connection in pending:
            connection.drop(None, "")
        for connection in pending:
            await connection.wait()
        for admitted in list(self._admitted):
            admitted.close()
        for admitted in list(self._admitted):
            await admitted.wait()


def _bind(family: int, where: tuple[Any, ...]) -> socket.socket:
    # asyncio sets TCP_NODELAY only if the protocol is named. Without it, the second of two small
    # answers waits for the peer's delayed acknowledgement of the first, 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


class PendingConnection(asyncio.Protocol):
    """A connection that has not proved its identity, or that is an HTTP request.

    It is counted, and its time limit runs, from before the TLS handshake; `asyncio.start_server`
    would show a connection only after that.
    """

    def __init__(self, listener: Listener, http_only: bool, where: str) -> None:
        self._listener = listener
        self._http_only = http_only
        self._where = where
        self._transport: Any = None
        self._connection: FrameConnection | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._connecting = False
        self._http: Any = None
        self._received = 0
        self._answered = False
        self._over = False

    def begin(self, arrived: socket.socket) -> None:
        """Start the protocol on an accepted socket, over TLS if that is set."""
        loop = asyncio.get_running_loop()
        listener = self._listener
        self._task = loop.create_task(self._connect(arrived))
        self._deadline = loop.call_later(
            listener.handshake_s, self.drop, CloseReason.DEADLINE, "the handshake took too long"
        )
        listener.add(self)

    async def _connect(self, arrived: socket.socket) -> None:
        if self._over:
            arrived.close()
            return
        self._connecting = True
        loop = asyncio.get_running_loop()
        context = None if self._http_only else self._listener.security.listening
        # A little more than the deadline of this connection, which is to end it.
        patience_s = self._listener.handshake_s + 1 if context else None
        try:
            await loop.connect_accepted_socket(
                lambda: self, arrived, ssl=context, ssl_handshake_timeout=patience_s
            )
        except OSError as error:
            self.drop(
                CloseReason.TLS if context else CloseReason.GARBAGE,
                f"did not connect: {str(error) or type(error).__name__}",
            )
        finally:
            self._connecting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._over:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._over or self._answered:
            return
        if self._http is not None or data[:1].isalpha():
            self._read_request(data)
        elif data[0] == 0 and not self._http_only:
            self._make_connection(data)
        else:
            tls = data[0] == 0x16
            self.drop(
                CloseReason.TLS if tls else CloseReason.GARBAGE,
                "sent TLS, which this port does not use" if tls else "sent neither HTTP nor frames",
            )

    def _make_connection(self, data: bytes) -> None:
        listener = self._listener
        connection = FrameConnection(
            ServerHandshake(listener.me, security=listener.security, info=listener.info),
            listener.errors,
            admit=listener.admit,
            keepalive_s=listener.keepalive_s,
            bound=listener.client_bound,
        )
        connection.established.add_done_callback(lambda _: self._end())
        self._connection = connection
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def drop(self, fault: CloseReason | None, text: str) -> None:
        """Close it, and record why."""
        if self._over:
            return
        if fault is not None:
            self._listener.errors.record(fault, f"{self._where}: {text}")
        self._end()
        if self._connection is not None:
            self._connection.abort(End.FAULT)
        elif self._transport is not None:
            self._transport.abort()
        elif self._connecting and self._task is not None:
            self._task.cancel()

    async def wait(self) -> None:
        """Wait until the socket belongs to a transport, or is closed."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _end(self) -> None:
        self._over = True
        self._listener.remove(self)
        if self._deadline is not None:
            self._deadline.cancel()

    # HTTP: one small request per connection.

    def _read_request(self, data: bytes) -> None:
        import h11  # only nodes need it

        if self._http is None:
            self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST)
        self._received += len(data)
        if self._received > MAX_REQUEST:
            self._answer(431, "text/plain", b"the request is too long\n")
            return
        try:
            self._http.receive_data(data)
            request = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._answer(error.error_status_hint, "text/plain", b"not a request\n")
            return
        if isinstance(request, h11.Request):
            answer = self._page(request.method, request.target)
            self._answer(*answer, head=request.method == b"HEAD")

    def _page(self, method: bytes, target: bytes) -> tuple[int, str, bytes]:
        if method not in {b"GET", b"HEAD"}:
            return 405, "text/plain", b"GET only\n"
        page = self._listener.pages.get(target.partition(b"?")[0].decode("latin-1"))
        if page is None:
            return 404, "text/plain", b"no such page\n"
        try:
            return page()
        except Exception:
            log.exception("%s", log_line(event="page_failed", page=target.decode("latin-1")))
            return 500, "text/plain", b"internal error: see the log of the node\n"

    def _answer(self, status: int, kind: str, body: bytes, *, head: bool = False) -> None:
        import h11

        headers = [
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        reason = HTTPStatus(status).phrase
        parts = (
            h11.Response(status_code=status, headers=headers, reason=reason.encode()),
            h11.Data(data=b"" if head else body),
            h11.EndOfMessage(),
        )
        said = b"".join(self._http.send(part) or b"" for part in parts)
        self._transport.write(said)
        self._transport.close()
        self._answered = True
