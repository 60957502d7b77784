"""A connection to ZooKeeper: kazoo's client, adapted to the rules of doyen's sessions.

kazoo runs a thread per connection. Its callbacks run on that thread here, since all they do is to
post to the loop. The two classes that kazoo is run with change the following:

- A connection is made only if the session permits it, and a lease's session is not pinged.
- A silent server is left for another by breaking the connection. kazoo detects silence by its pings
  alone, and postpones those while there are requests to send.
- The length of the session that the server grants is reported to the session at every connect, and
  a round in which every server refuses the connection at its end.
- Requests that wait are sent together, and what has arrived is read together. kazoo uses up to
  three system calls, and a change of threads, for each.

Imports kazoo, the clock and log lines.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kazoo.client import KazooClient
from kazoo.exceptions import AuthFailedError, ConnectionDropped, SASLException
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import int_struct, write_string
from kazoo.protocol.states import KeeperState
from kazoo.retry import ForceRetryError, KazooRetry

from doyen.events.log_lines import log_line
from doyen.lease.clock import Clock
from doyen.stores.kit.url import Host

if TYPE_CHECKING:
    from doyen.stores.zookeeper.session import ZooKeeperSession

__all__ = [
    "CloseSession",
    "KazooHandler",
    "RemoveWatches",
    "ZooKeeperAddress",
    "make_client",
    "stop_client",
]

log = logging.getLogger("doyen")

_HEAD = struct.Struct("!iii")
_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class ZooKeeperAddress:
    """The servers, and the credentials for them."""

    hosts: tuple[Host, ...]
    clock: Clock
    connect_timeout_s: float = 5.0
    tls: ssl.SSLContext | None = None
    digest: str = ""
    sasl: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return ",".join(map(str, self.hosts))


class KazooHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's access to threads and sockets. Callbacks run at once, and the session decides about
    connections."""

    def __init__(self, session: ZooKeeperSession) -> None:
        super().__init__()
        self._session = session
        self.ahead = bytearray()
        """What has been read from the connection and not been processed yet."""
        self._socket: socket.socket | None = None
        self._server = ""
        self._avoided: dict[str, float] = {}
        """Until when each silent server is passed over."""
        self._reasons: dict[str, str] = {}
        """Why there is no connection to each server."""
        self.tried = self.refused = 0
        """Connections in this round through the servers, and those of them that were refused."""

    def start(self) -> None:
        """There are no threads for callbacks: kazoo then runs completions at once."""

    def stop(self) -> None:
        """Nothing was started."""

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def create_connection(
        self, address: tuple[str, int], hostname: str | None = None, **_: object
    ) -> socket.socket:
        session = self._session
        self.tried += 1
        if reason := session.may_connect():
            raise ConnectionRefusedError(reason)
        self._server = f"{hostname or address[0]}:{address[1]}"
        if self._avoided.get(self._server, 0.0) > session.address.clock.now():
            raise ConnectionRefusedError("it did not answer a moment ago")
        try:
            made = socket.create_connection(address, self._wait_s)
        except ConnectionRefusedError:
            self.refused += 1
            raise
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if session.address.tls is not None:
                made = session.address.tls.wrap_socket(made, server_hostname=hostname)
        except BaseException:
            made.close()
            raise
        self._socket = made
        self.ahead.clear()
        return made

    def select(
        self, readers: list[Any], writers: list[Any], _: list[Any], timeout_s: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Like kazoo's own, with two differences: what was read ahead counts as readable, and in
        the middle of a message or a handshake the wait is short, not as long as the session."""
        between_messages = len(readers) == 2
        for each in readers:
            if isinstance(each, ssl.SSLSocket) and each.pending():
                return [each], [], []
            if between_messages and each is self._socket and self.ahead:
                return [each], [], []
        if not between_messages:
            timeout_s = min(timeout_s or math.inf, self._wait_s)
        poll = select.poll()
        for wanted, mask in ((readers, select.POLLIN), (writers, select.POLLOUT)):
            for each in wanted:
                poll.register(each, mask)
        ready = {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}
        return (
            [each for each in readers if each.fileno() in ready],
            [each for each in writers if each.fileno() in ready],
            [],
        )

    @property
    def _wait_s(self) -> float:
        """The deadline for a connect and for the rest of a message. A server that has just been
        started may accept a connection and never answer on it."""
        wait_s = min(2.0, max(0.2, 1.5 * self._session.requests.patience_s))
        return min(wait_s, self._session.address.connect_timeout_s)

    def break_off(self) -> None:
        """Break the connection, and try the other servers first. The loop's thread."""
        if len(self._session.address.hosts) > 1:
            silent_until = self._session.address.clock.now() + 4 * self._session.requests.patience_s
            self._avoided[self._server] = silent_until
        self._reasons[self._server] = "it does not answer"
        made = self._socket
        if made is not None:
            # Through a copy of the descriptor: a TLS socket cannot be shut down during a read.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(made.fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def failed(self, error: BaseException) -> None:
        """An attempt to connect has failed."""
        self._reasons[self._server or "?"] = str(error) or type(error).__name__

    def succeeded(self) -> None:
        self._reasons.clear()
        self._avoided.clear()

    def reasons(self) -> str:
        """Why there is no connection, for each server."""
        reasons = dict(self._reasons)
        if not reasons:
            return f"{self._session.address} could not be reached"
        return "; ".join(f"{server}: {reason}" for server, reason in sorted(reasons.items()))


class _Connection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection, which reports to the session what the server has granted."""

    session: ZooKeeperSession
    error: Exception | None = None
    _xid: int

    def _connect_loop(self, retry: KazooRetry) -> Any:
        """One round through the servers."""
        handler = self.handler
        handler.tried = handler.refused = 0
        try:
            return super()._connect_loop(retry)
        except ForceRetryError:
            if 0 < handler.tried == handler.refused:
                self.session.refused()
            raise

    def _connect(self, host: str, address: str, port: int) -> tuple[float, float]:
        handler, client = self.handler, self.client
        # Requests made without a connection fail now. Sent later, they would take effect late.
        client._notify_pending(KeeperState.CONNECTING)
        if client._stopped.is_set():
            raise ConnectionDropped("it is being closed")
        try:
            read_timeout_ms, connect_timeout_ms = super()._connect(host, address, port)
        except SASLException as error:
            self.error = error
            raise AuthFailedError(str(error)) from error
        except Exception as error:
            handler.failed(error)
            if isinstance(error, AuthFailedError):
                self.error = error
            elif isinstance(error, handler.timeout_exception):
                self.session.connect_unanswered()
            raise
        session, _ = client.client_id
        # kazoo's read timeout is two thirds of what was granted.
        self.session.connected(session, round(read_timeout_ms * 1.5) / 1000)
        handler.succeeded()
        return read_timeout_ms, connect_timeout_ms

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        """Send all requests that wait."""
        self._read_sock.recv(4096)
        queue, pending, batch = self.client._queue, self.client._pending, bytearray()
        while queue:
            request, result = queue.popleft()
            self._xid = self._xid % (2**31 - 1) + 1
            body = request.serialize()
            batch += _HEAD.pack(len(body) + 8, self._xid, request.type) + body
            pending.append((request, result, self._xid))
        if batch:
            self._write(batch, connect_timeout)

    def _read(self, length: int, timeout: float) -> bytes:
        ahead: bytearray = self.handler.ahead
        with self._socket_error_handling():
            while len(ahead) < length:
                try:
                    chunk = self._socket.recv(_CHUNK)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if not self.handler.select([self._socket], [], [], timeout)[0]:
                        raise self.handler.timeout_exception("it does not answer") from None
                    continue
                if not chunk:
                    raise ConnectionDropped("the server has closed the connection")
                ahead += chunk
        message = bytes(ahead[:length])
        del ahead[:length]
        return message

    def _send_ping(self, connect_timeout: float) -> None:
        if not self.session.is_lease:
            super()._send_ping(connect_timeout)

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        except Exception as error:
            log.exception(log_line(event="connection_failed", server=self.session.address))
            self.error = error
        finally:
            self.session.finished(self.error)


class _KazooLog(logging.LoggerAdapter[logging.Logger]):
    """Logs kazoo's warnings as information: it warns of every connection that ends, and doyen's
    events report what matters."""

    def log(self, level: int, msg: object, *args: Any, **options: Any) -> None:
        super().log(logging.INFO if level == logging.WARNING else level, msg, *args, **options)


def make_client(
    session: ZooKeeperSession,
    timeout_s: float,
    handler: KazooHandler,
    taken_over: tuple[int, bytes] | None = None,
) -> Any:
    """A client of kazoo for one session: a new one, or the one with this number and password."""
    address = session.address
    retry = KazooRetry(
        max_tries=-1, delay=0.05, backoff=1.5, max_delay=min(1.0, max(0.1, timeout_s / 12))
    )
    client = KazooClient(
        logger=_KazooLog(logging.getLogger("doyen.zookeeper")),
        hosts=str(address),
        timeout=(math.ceil(timeout_s * 1000) + 0.5) / 1000,
        client_id=taken_over,
        handler=handler,
        connection_retry=retry,
        auth_data=[("digest", address.digest)] if address.digest else None,
    )
    connection = _Connection(
        client, retry.copy(), logger=client.logger, sasl_options=dict(address.sasl) or None
    )
    connection.session = session
    client._connection = connection
    client.add_listener(session.state_changed)
    return client


def stop_client(client: Any, done: Callable[[], None]) -> None:
    """Stop a client on a thread of its own, then call `done` there."""

    def stop() -> None:
        with contextlib.suppress(Exception):  # without a connection there is nothing to stop
            client.stop()
            client.close()
        done()

    threading.Thread(target=stop, name="doyen-zookeeper-end", daemon=True).start()


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Like kazoo's own request, but with an answer."""

    type = -11

    def serialize(self) -> bytes:
        return b""

    def deserialize(self, _: bytes, __: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class RemoveWatches:
    """A request that kazoo lacks. The kinds: 1 children, 2 data."""

    path: str
    kind: int
    type = 18

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(self.kind))

    def deserialize(self, _: bytes, __: int) -> bool:
        return True
