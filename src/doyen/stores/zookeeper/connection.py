"""One session with ZooKeeper, through kazoo, for the store's loop.

kazoo runs a thread per connection. Its callbacks run on that thread here, since all they do is to
wake the loop; nothing on the loop ever waits for a thread.

What kazoo leaves open is closed by the two classes that it is run with:

- A session that a lease stands on is never replaced: once it is lost, or has gone without a
  renewal for its time, no connection is opened for it again. kazoo by itself would connect with a
  new session, and what the old one held would look like its own.
- Such a session is not pinged. Only `renew` keeps it alive, so a lease ends when the heart stops,
  whatever kazoo's thread is still able to do.
- A server that has fallen silent is left for another one, by breaking off the connection. kazoo
  notices by its pings alone, and puts those off for as long as there are requests to send.
- A session that is to be closed is let alone for as long as it may live, if servers are reached
  and do not answer: they take every attempt to connect for a sign of life, and one who cannot hear
  them would keep its session for ever.
- What the server grants (the length of the session) is known, and checked at every reconnect.
- Requests that wait are sent together, what has arrived is read together, and the loop is woken
  once for all of it; kazoo takes a system call or three, and a change of threads, for each.

Imports kazoo; the errors and the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionClosedError,
    ConnectionDropped,
    InvalidACLError,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotReadOnlyCallError,
    QuotaExceededError,
    RolledBackError,
    RuntimeInconsistency,
    SASLException,
    SessionClosedRequireSaslError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
    UnimplementedError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import (
    CheckVersion,
    Exists,
    GetChildren,
    GetData,
    Transaction,
    int_struct,
    write_string,
)
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.retry import KazooRetry

from doyen._waiting import shared
from doyen.errors import LeaseGone, OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable
from doyen.lease.clock import Clock

__all__ = ["ZooKeeperAddress", "ZooKeeperSession"]

log = logging.getLogger("doyen")

_ANSWERS = (NoNodeError, NodeExistsError, BadVersionError)
"""What a server may rightly say; those who ask decide what it means."""
_READS = (Exists, GetChildren, GetData)
_NOT_DONE = (ConnectionClosedError, NotReadOnlyCallError, SessionMovedError, ThrottledOpError)

_HEAD = struct.Struct("!iii")
_CHUNK = 65536

ATTEMPTS = 3
"""So often a session that is to be closed is asked for in vain: a server that has just been started
may take a connection and never answer on it."""
OUTLIVES = 2.0
"""After so many times its length without a sign of life a session has ended for certain."""
IN_FLIGHT = 64
"""So many requests at most are under way ahead of a renewal on the same connection."""


@dataclass(frozen=True, slots=True)
class ZooKeeperAddress:
    """Where the servers are, and who we are to them."""

    hosts: tuple[tuple[str, int], ...]
    clock: Clock
    connect_timeout_s: float = 5.0
    tls: ssl.SSLContext | None = None
    digest: str = ""
    sasl: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.hosts)


class ZooKeeperSession:
    """A session. With `lease` it ends with its connection's last renewal; without, it is kept up,
    and replaced by a new one if it must be."""

    def __init__(
        self,
        address: ZooKeeperAddress,
        *,
        timeout_s: float,
        lease: bool,
        on_up: Callable[[], None] = lambda: None,
        on_down: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.lease = lease
        self.session = ""
        self.granted_s = 0.0
        self.until = math.inf
        """When the session has ended by our own account, for want of a renewal."""
        self.lost_because: str | None = None
        self.up = False
        self.patience_s = timeout_s / 6
        """How long a request may go unanswered before the server is taken to be silent."""
        self.slots = asyncio.Semaphore(IN_FLIGHT)
        self._loop = asyncio.get_running_loop()
        self._on_up, self._on_down = on_up, on_down
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] | None = None
        self._expired = False
        """By ZooKeeper's own word."""
        self._closing = False
        """Over for us, and to be closed once there is a connection."""
        self._stopping = False
        self._unanswered = 0
        """How often servers were asked for the session, and have not answered."""
        self._asked_at = -math.inf
        self._inbox: deque[Callable[[], object]] = deque()
        self._woken = False
        self._sent: deque[float] = deque()
        self._heard_at = -math.inf
        self._alarm: asyncio.TimerHandle | None = None
        self._handler = _Handler(self)
        self._client = _client(self, timeout_s, self._handler)

    async def open(self) -> None:
        """Have a session. Raises with each server's own reason if there is none in time."""
        self._client.start_async()
        try:
            async with asyncio.timeout(self.address.connect_timeout_s):
                await shared(self._opened)
        except TimeoutError as error:
            raise StoreUnavailable(
                f"no session with ZooKeeper within {self.address.connect_timeout_s:g} s:"
                f" {self._handler.troubles()}"
            ) from error

    def send(self, request: Any) -> asyncio.Future[Any]:
        """Make a request now, in order with all others on this wire; its answer is the future's.

        An answer of the server's that is a matter of course (no such node, it exists already,
        another version) is raised as kazoo's own exception.
        """
        return self._send(request, writes=not isinstance(request, _READS))

    def barrier(self, path: str) -> asyncio.Future[Any]:
        """An empty transaction: it is done after all that was acknowledged before it was sent."""
        return self._send(Transaction([CheckVersion(path, -1)]), writes=False)

    def _send(self, request: Any, *, writes: bool) -> asyncio.Future[Any]:
        self.require_up()
        return self._request(request, writes=writes)

    def _request(self, request: Any, *, writes: bool) -> asyncio.Future[Any]:
        answer = _Answer(self, writes=writes)
        self._sent.append(self._now())
        if self._alarm is None:
            self._alarm = self._loop.call_later(self.patience_s, self._listen)
        self._client._call(request, answer)
        return answer.future

    async def transact(self, *requests: Any) -> list[Any]:
        """Several requests as one: all or none. Raises the answer of the one that failed."""
        results: list[Any] = await self.send(Transaction(requests))
        for result in results:
            if isinstance(result, Exception) and not isinstance(
                result, RolledBackError | RuntimeInconsistency
            ):
                raise self.meaning(result, writes=True)
        return results

    def settled(self) -> None:
        """A request has its answer, of whatever kind."""
        self._sent.popleft()
        self._heard_at = self._now()

    def unwatch(self, path: str, kind: int) -> None:
        """Have the server forget a watch that nobody waits for any more."""
        if self.up:
            watchers = self._client._data_watchers if kind == 2 else self._client._child_watchers
            watchers.pop(path, None)
            self._send(_RemoveWatches(path, kind), writes=False)

    def require_up(self) -> None:
        if reason := self.over():
            raise LeaseGone(f"the session {self.session} has ended: {reason}")
        if not self.up:
            raise StoreUnavailable(f"no connection to ZooKeeper: {self._handler.troubles()}")

    def over(self) -> str | None:
        """Why nothing more can be done in this session, if so. Any thread."""
        if self.lost_because is None and not self.up and self._now() >= self.until:
            return "it was not renewed for its time"
        return self.lost_because

    def probe(self, idle_s: float) -> None:
        """If nothing has been heard for a while, ask something, so that silence is noticed."""
        if self.up and not self._sent and self._now() - self._heard_at >= idle_s:
            self.send(Exists("/", None))

    def end(self, reason: str, *, patiently: bool = False) -> asyncio.Future[None]:
        """End the session: nothing more is done in it. With patience the future tells that it has
        ended for ZooKeeper too, however long that takes: a server that is away is told when it
        comes back, and what the session holds goes then, not only when its time is over."""
        self.lost_because = self.lost_because or reason
        self.ended = self.ended or self._loop.create_future()
        if not patiently or self._expired:
            self._stop(self.ended)
        elif not self._closing and not self._stopping:
            self._closing = True
            if self.up:
                self._close()
        return self.ended

    def _close(self) -> None:
        """Ask for the end. Without an answer, ask again when there is another connection."""
        self._request(_CloseSession(), writes=True).add_done_callback(self._closed)

    def _closed(self, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self._closing = False
            self.end("")

    def _stop(self, ended: asyncio.Future[None]) -> None:
        if self._stopping:
            return
        self._stopping = True

        def stop() -> None:
            with contextlib.suppress(Exception):  # a connection that is gone is what we want
                self._client.stop()
                self._client.close()
            self.post(partial(ended.set_result, None))

        threading.Thread(target=stop, name="doyen-zookeeper-end", daemon=True).start()

    def may_connect(self) -> str | None:
        """Why not, if not. kazoo's thread."""
        if not self._closing:
            return self.over()
        rests = self._now() < self._asked_at + OUTLIVES * self.granted_s
        return "it is left to expire" if rests and self._unanswered >= ATTEMPTS else None

    def unanswered(self) -> None:
        """A server was asked for the session, and does not answer. kazoo's thread."""
        self._unanswered, self._asked_at = self._unanswered + 1, self._now()

    def forked(self) -> None:
        """In the child of a fork: the connection is the parent's."""
        self.lost_because = "it belongs to the parent process"
        self._handler.close()

    def post(self, call: Callable[[], object]) -> None:
        """Have something called on the loop, in order. Any thread."""
        self._inbox.append(call)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop was closed without closing the store
                self._loop.call_soon_threadsafe(self._attend)

    def _attend(self) -> None:
        # Cleared first: who comes after this wakes the loop again, who came before is seen below.
        self._woken = False
        while self._inbox:
            self._inbox.popleft()()

    def connected(self, session: int, granted_s: float) -> None:
        """A connection has been made. Raises if the session is not the one it was. kazoo's
        thread."""
        name = f"0x{session % 2**64:x}"
        if self.lease and self.session and (name, granted_s) != (self.session, self.granted_s):
            self.lost_because = f"the server at hand offers {name} for {granted_s:g} s instead"
            raise ConnectionDropped(self.lost_because)
        self.session, self.granted_s = name, granted_s
        self._unanswered = 0
        self.post(self._went_up)

    def state_changed(self, state: str) -> None:
        """kazoo's thread, before it does anything more."""
        if state == KazooState.LOST and self.lease and not self._stopping:
            self._expired, self._closing = True, False
            self.lost_because = self.lost_because or "ZooKeeper has expired it"
        if state != KazooState.CONNECTED:
            self.post(self._went_down)

    def finished(self, error: Exception | None) -> None:
        """kazoo's thread has come to its end."""

        def tell() -> None:
            if not self._opened.done() and error is not None:
                self._opened.set_exception(self.meaning(error, writes=False))

        self.post(tell)

    def _went_up(self) -> None:
        if self.lost_because is not None and not self._closing:
            return
        self.up, self._heard_at = True, self._now()
        if self._closing:
            self._close()
            return
        if not self._opened.done():
            self._opened.set_result(None)
        self._on_up()

    def _went_down(self) -> None:
        if self.up:
            self.up = False
            self._on_down()
        if self._expired:
            self.end("")

    def _listen(self) -> None:
        """Break off a connection whose server has been asked and says nothing at all."""
        self._alarm = None
        if self._sent:
            silent_s = self._now() - max(self._sent[0], self._heard_at)
            if self.up and silent_s >= self.patience_s:
                self._handler.break_off()
            wait_s = max(self.patience_s - silent_s, self.patience_s / 4)
            self._alarm = self._loop.call_later(wait_s, self._listen)

    def meaning(self, error: Exception, writes: bool) -> Exception:
        """kazoo's errors, in ours."""
        if isinstance(error, _ANSWERS):
            answer: Exception = error
            return answer
        translated = self._translated(error, writes)
        translated.__cause__ = error
        return translated

    def _translated(self, error: Exception, writes: bool) -> StoreError:
        match error:
            case NoAuthError():
                return StoreUnusable(
                    "ZooKeeper refuses: the access list of a znode here does not name us."
                    " Check user and password, or have an administrator change the list"
                )
            case AuthFailedError() | SessionClosedRequireSaslError() | SASLException():
                why = str(error.__cause__ or error) or type(error).__name__
                return StoreUnusable(f"ZooKeeper does not accept who we say we are: {why}")
            case InvalidACLError():
                return StoreUnusable("acl=creator needs a user that ZooKeeper knows us as")
            case UnimplementedError():
                return StoreUnusable("this ZooKeeper is too old: version 3.5 or later is needed")
            case QuotaExceededError():
                return StoreUnusable("a quota of ZooKeeper's is exhausted: have it raised")
            case SessionExpiredError() if self.lease and not isinstance(
                error, ConnectionClosedError
            ):
                return LeaseGone(f"ZooKeeper has expired the session {self.session}")
            case _:
                why = str(error) or type(error).__name__
                if writes and not isinstance(error, _NOT_DONE):
                    return OutcomeUnknown(f"the connection broke before ZooKeeper answered: {why}")
                return StoreUnavailable(f"ZooKeeper did not do it: {why}")

    def _now(self) -> float:
        return self.address.clock.now()


class _Answer:
    """What kazoo hands an answer to: from its thread to the loop."""

    __slots__ = ("_error", "_value", "_wire", "_writes", "future")

    def __init__(self, wire: ZooKeeperSession, *, writes: bool) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Of several that were asked at once the first to fail speaks for all.
        self.future.add_done_callback(_look)
        self._wire = wire
        self._writes = writes
        self._value: Any = None
        self._error: Exception | None = None

    def set(self, value: Any) -> None:
        self._value = value
        self._wire.post(self._settle)

    def set_exception(self, error: Exception) -> None:
        if self._error is None:  # of a client that is being closed kazoo says so twice
            self._error = error
            self._wire.post(self._settle)

    def _settle(self) -> None:
        self._wire.settled()
        if self.future.done():
            return
        if self._error is None:
            self.future.set_result(self._value)
        else:
            self.future.set_exception(self._wire.meaning(self._error, self._writes))


def _look(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's view of threads and sockets: callbacks at once, and connections as we allow."""

    def __init__(self, wire: ZooKeeperSession) -> None:
        super().__init__()
        self._wire = wire
        self.ahead = bytearray()
        """What has been read from the connection and not been taken yet."""
        self._socket: socket.socket | None = None
        self._server = ""
        self._avoided: dict[str, float] = {}
        self._troubles: dict[str, str] = {}

    def start(self) -> None:
        """No threads of its own; kazoo calls completions at once where there are none."""

    def stop(self) -> None:
        """Nothing was started."""

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def create_connection(
        self, address: tuple[str, int], hostname: str | None = None, **_: object
    ) -> socket.socket:
        wire = self._wire
        if reason := wire.may_connect():
            raise ConnectionRefusedError(reason)
        self._server = f"{hostname or address[0]}:{address[1]}"
        if self._avoided.get(self._server, 0.0) > wire.address.clock.now():
            raise ConnectionRefusedError("it did not answer a moment ago")
        made = socket.create_connection(address, self._wait_s)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if wire.address.tls is not None:
                made = wire.address.tls.wrap_socket(made, server_hostname=hostname)
        except BaseException:
            made.close()
            raise
        self._socket = made
        self.ahead.clear()
        return made

    def select(
        self,
        readers: list[Any],
        writers: list[Any],
        _: list[Any],
        timeout_s: float | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """As kazoo's own, but what was read ahead counts as readable, and nobody waits for long in
        the middle of a message or of a handshake: kazoo would for as long as the session."""
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
        """How long a server may take for what it should do at once. One that has just been started
        may take a connection and never answer on it."""
        wait_s = min(2.0, max(0.2, 1.5 * self._wire.patience_s))
        return min(wait_s, self._wire.address.connect_timeout_s)

    def break_off(self) -> None:
        """End the connection from our side, and try another server first. The loop's thread."""
        if len(self._wire.address.hosts) > 1:
            silent_until = self._wire.address.clock.now() + 4 * self._wire.patience_s
            self._avoided[self._server] = silent_until
        self._troubles[self._server] = "it does not answer"
        made = self._socket
        if made is not None:
            # By a copy of the descriptor: a TLS socket may not be shut down in mid-read.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(made.fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def failed(self, error: BaseException) -> None:
        """The attempt to connect came to nothing."""
        self._troubles[self._server or "?"] = str(error) or type(error).__name__

    def succeeded(self) -> None:
        self._troubles.clear()
        self._avoided.clear()

    def troubles(self) -> str:
        """Each server's reason."""
        told = dict(self._troubles)
        if not told:
            return f"{self._wire.address} could not be reached"
        return "; ".join(f"{server}: {why}" for server, why in sorted(told.items()))


class _Connection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection, telling what it has been granted."""

    wire: ZooKeeperSession
    error: Exception | None = None
    _xid: int

    def _connect(self, host: str, address: str, port: int) -> tuple[float, float]:
        handler, client = self.wire._handler, self.client
        # What was asked while there was no connection fails now, instead of being done who knows
        # when.
        client._notify_pending(KeeperState.CONNECTING)
        if client._stopped.is_set():
            raise ConnectionDropped("it is being ended")
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
                self.wire.unanswered()
            raise
        session, _ = client.client_id
        # kazoo keeps two thirds of what was granted.
        self.wire.connected(session, round(read_timeout_ms * 1.5) / 1000)
        handler.succeeded()
        return read_timeout_ms, connect_timeout_ms

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        """Send all that waits."""
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
        if not self.wire.lease:
            super()._send_ping(connect_timeout)

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        except Exception as error:
            log.exception("kazoo's connection has failed")
            self.error = error
        finally:
            self.wire.finished(self.error)


class _Calm(logging.LoggerAdapter[logging.Logger]):
    """kazoo warns of whatever ends a connection; what matters of that is told by our events."""

    def log(self, level: int, msg: object, *args: Any, **options: Any) -> None:
        super().log(logging.INFO if level == logging.WARNING else level, msg, *args, **options)


def _client(wire: ZooKeeperSession, timeout_s: float, handler: _Handler) -> Any:
    address = wire.address
    retry = KazooRetry(
        max_tries=-1, delay=0.05, backoff=1.5, max_delay=min(1.0, max(0.1, timeout_s / 12))
    )
    client = KazooClient(
        logger=_Calm(logging.getLogger("doyen.zookeeper")),
        hosts=str(address),
        timeout=(math.ceil(timeout_s * 1000) + 0.5) / 1000,
        handler=handler,
        connection_retry=retry,
        auth_data=[("digest", address.digest)] if address.digest else None,
    )
    connection = _Connection(
        client, retry.copy(), logger=client.logger, sasl_options=dict(address.sasl) or None
    )
    connection.wire = wire
    client._connection = connection
    client.add_listener(wire.state_changed)
    return client


@dataclass(frozen=True, slots=True)
class _CloseSession:
    """As kazoo's own request, but with an answer."""

    type = -11

    def serialize(self) -> bytes:
        return b""

    def deserialize(self, _: bytes, __: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _RemoveWatches:
    """A request that kazoo lacks. The kinds: 1 children, 2 data."""

    path: str
    kind: int
    type = 18

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(self.kind))

    def deserialize(self, _: bytes, __: int) -> bool:
        return True
