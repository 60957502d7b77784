"""Sessions with ZooKeeper, for the store's loop.

A `ZooKeeperSession` is kept up by kazoo, and replaced by a new one if it expires. A store has one
for everything that is not bound to a lease. A `LeaseSession` is a lease:

- It is never replaced: once it is lost, or was not renewed for its time, no connection is opened
  for it again. kazoo by itself would connect with a new session, and take what the old one held for
  its own.
- It is not pinged. Only `renew` keeps it alive, so a lease ends when doyen stops renewing it, even
  if kazoo's thread still runs.
- To close it, servers are asked for it until one answers. If several in a row accept a connection
  and do not answer, the session is left to expire: servers count every attempt to connect as a sign
  of life, so a client that cannot hear them would keep its own session alive for ever.

kazoo runs a thread per connection. What happens there is posted to the loop; nothing on the loop
waits for a thread. Methods that kazoo's thread calls say so.

Imports kazoo, the connection beside it and the errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

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
from kazoo.protocol.serialization import (
    CheckVersion,
    Exists,
    GetChildren,
    GetData,
    SetData,
    Transaction,
)
from kazoo.protocol.states import KazooState

from doyen._waiting import LoopCalls, retrieve, shared
from doyen.errors import LeaseGone, OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable
from doyen.stores.zookeeper.connection import (
    CloseSession,
    KazooHandler,
    RemoveWatches,
    ZooKeeperAddress,
    make_client,
    stop_client,
)

__all__ = ["ForeignSession", "LeaseSession", "ZooKeeperSession"]

_READS = (Exists, GetChildren, GetData)
_ANSWERS = (NoNodeError, NodeExistsError, BadVersionError)
"""Regular answers of a server, which the caller interprets."""
_NOT_DONE = (ConnectionClosedError, NotReadOnlyCallError, SessionMovedError, ThrottledOpError)

CONNECT_ATTEMPTS = 3
"""How many unanswered connections it takes until a session that is to be closed is left to expire.
A server that has just been started may accept one connection and never answer on it."""
OUTLIVES = 2.0
"""After this many times its length without a sign of life a session has ended for certain."""
_SHORTEST_S = 0.4
_WARRANT = struct.Struct("!Qd16s")
"""The number of a session, its length and its password."""
IN_FLIGHT = 64
"""The most requests in flight ahead of a renewal on the same connection."""


class _PendingRequests:
    """Requests without an answer. If none is answered for `patience_s`, the server is silent."""

    def __init__(
        self, now: Callable[[], float], patience_s: float, on_silence: Callable[[], None]
    ) -> None:
        self.patience_s = patience_s
        self._now = now
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._sent: deque[float] = deque()
        self._heard_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def sent(self) -> None:
        self._sent.append(self._now())
        if self._timer is None:
            self._timer = self._loop.call_later(self.patience_s, self._check)

    def answered(self) -> None:
        """A request has its answer, or has failed."""
        self._sent.popleft()
        self.heard()

    def heard(self) -> None:
        self._heard_at = self._now()

    def idle_s(self) -> float:
        """For how long nothing was heard, 0 while an answer is expected."""
        return 0.0 if self._sent else self._now() - self._heard_at

    def _check(self) -> None:
        self._timer = None
        if self._sent:
            silent_s = self._now() - max(self._sent[0], self._heard_at)
            if silent_s >= self.patience_s:
                self._on_silence()
            wait_s = max(self.patience_s - silent_s, self.patience_s / 4)
            self._timer = self._loop.call_later(wait_s, self._check)


class ZooKeeperSession:
    """A session that is kept up, and replaced by a new one if it expires."""

    is_lease: ClassVar[bool] = False

    def __init__(
        self,
        address: ZooKeeperAddress,
        *,
        timeout_s: float,
        on_up: Callable[[], None] = lambda: None,
        on_down: Callable[[], None] = lambda: None,
        taken_over: tuple[int, bytes] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.address = address
        self.id = ""
        self.granted_s = 0.0
        self.up = False
        self.lost_because: str | None = None
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when kazoo has stopped, after `end`."""
        self.requests = _PendingRequests(self._now, timeout_s / 6, self._break_off)
        self._on_up, self._on_down = on_up, on_down
        self._opened: asyncio.Future[None] = loop.create_future()
        self._opened.add_done_callback(retrieve)  # a foreign session is not waited for
        self._stopping = False
        self._calls = LoopCalls(asyncio.get_running_loop())
        self._handler = KazooHandler(self)
        self._client = make_client(self, timeout_s, self._handler, taken_over)

    async def open(self) -> None:
        """Begin the session. Raises with each server's reason if there is none in time, and at once
        if every server refuses the connection. A lease's session waits: its store was there."""
        self._client.start_async()
        try:
            async with asyncio.timeout(self.address.connect_timeout_s):
                await shared(self._opened)
        except TimeoutError as error:
            raise StoreUnavailable(
                f"no session with ZooKeeper within {self.address.connect_timeout_s:g} s:"
                f" {self._handler.reasons()}"
            ) from error

    def send(self, request: Any) -> asyncio.Future[Any]:
        """Send a request, in order with all others of this session. The future has its answer.

        A regular answer that is negative (no such znode, it exists already, another version) is
        raised as kazoo's own exception.
        """
        return self._send(request, writes=not isinstance(request, _READS))

    def barrier(self, path: str) -> asyncio.Future[Any]:
        """An empty transaction. It is carried out after everything that was acknowledged before it
        was sent."""
        return self._send(Transaction([CheckVersion(path, -1)]), writes=False)

    def unwatch(self, path: str, kind: int) -> None:
        """Have the server remove a watch that is no longer needed."""
        if self.up:
            watchers = self._client._data_watchers if kind == 2 else self._client._child_watchers
            watchers.pop(path, None)
            self._send(RemoveWatches(path, kind), writes=False)

    def probe(self, idle_s: float) -> None:
        """If nothing was heard for `idle_s`, send a request, so that a dead connection is
        noticed."""
        if self.up and self.requests.idle_s() >= idle_s:
            self.send(Exists("/", None))

    def _send(self, request: Any, *, writes: bool) -> asyncio.Future[Any]:
        if reason := self.over():
            raise LeaseGone(f"the session {self.id} has ended: {reason}")
        if not self.up:
            raise StoreUnavailable(f"no connection to ZooKeeper: {self._handler.reasons()}")
        return self._request(request, writes=writes)

    def _request(self, request: Any, *, writes: bool) -> asyncio.Future[Any]:
        answer = _PendingAnswer(self, writes=writes)
        self.requests.sent()
        self._client._call(request, answer)
        return answer.future

    async def transact(self, *requests: Any, then: Callable[[], None] = lambda: None) -> list[Any]:
        """Several requests as one: all or none. Raises the answer of the one that failed. `then` is
        called when they have been sent."""
        answer = self.send(Transaction(requests))
        then()
        results: list[Any] = await answer
        for result in results:
            if isinstance(result, Exception) and not isinstance(
                result, RolledBackError | RuntimeInconsistency
            ):
                raise self.translate(result, writes=True)
        return results

    def over(self) -> str | None:
        """Why the session can no longer be used; None if it can. Any thread."""
        return self.lost_because

    def end(self, reason: str) -> asyncio.Future[None]:
        """Stop kazoo, which closes the session if there is a connection. Does not wait for it."""
        self.lost_because = self.lost_because or reason
        if not self._stopping:
            self._stopping = True
            stop_client(self._client, lambda: self.post(partial(self.ended.set_result, None)))
        return self.ended

    def forked(self) -> None:
        """In the child of a fork: the connection belongs to the parent."""
        self.lost_because = "it belongs to the parent process"
        self._handler.close()

    def post(self, call: Callable[[], object]) -> None:
        """Call something on the loop, in order. Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed without closing the store
            self._calls.put(call)

    def translate(self, error: Exception, *, writes: bool) -> Exception:
        """The error of a failed request. With `writes` it could have changed something."""
        if isinstance(error, _ANSWERS):
            answer: Exception = error
            return answer
        translated = _translate(error, writes, self.id if self.is_lease else None)
        translated.__cause__ = error
        return translated

    def may_connect(self) -> str | None:
        """Why no connection may be made; None if it may. kazoo's thread."""
        return self.over()

    def connect_unanswered(self) -> None:
        """A server has accepted a connection and does not answer. kazoo's thread."""

    def connected(self, session: int, granted_s: float) -> None:
        """A connection has been made. kazoo's thread."""
        self.id, self.granted_s = _name(session), granted_s
        self.post(self._went_up)

    def state_changed(self, state: str) -> None:
        """kazoo's thread, before it does anything else."""
        if state != KazooState.CONNECTED:
            self.post(self._went_down)

    def refused(self) -> None:
        """Every server has refused the connection. kazoo's thread."""
        if not self.is_lease:
            error = StoreUnavailable(f"no session with ZooKeeper: {self._handler.reasons()}")
            self.post(partial(self._not_opened, error))

    def finished(self, error: Exception | None) -> None:
        """kazoo's thread has ended."""
        if error is not None:
            self.post(partial(self._not_opened, self.translate(error, writes=False)))

    def _not_opened(self, error: Exception) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)

    def _went_up(self) -> None:
        if self.lost_because is None:
            self.up = True
            self.requests.heard()
            if not self._opened.done():
                self._opened.set_result(None)
            self._on_up()

    def _went_down(self) -> None:
        if self.up:
            self.up = False
            self._on_down()

    def _break_off(self) -> None:
        """The server is silent: leave it for another."""
        if self.up:
            self._handler.break_off()

    def _now(self) -> float:
        return self.address.clock.now()


class LeaseSession(ZooKeeperSession):
    """A session that is a lease: kept alive by renewals alone, never replaced."""

    is_lease = True

    def __init__(
        self,
        address: ZooKeeperAddress,
        *,
        timeout_s: float,
        taken_over: tuple[int, bytes] | None = None,
    ) -> None:
        super().__init__(address, timeout_s=timeout_s, taken_over=taken_over)
        self.until = math.inf
        """When the session has ended by this client's clock, because it was not renewed."""
        self.slots = asyncio.Semaphore(IN_FLIGHT)
        self._expired = False
        """ZooKeeper has reported that the session has expired."""
        self._closing = False
        """ZooKeeper is to close the session as soon as there is a connection."""
        self._unanswered = 0
        """How many connections in a row were accepted and not answered."""
        self._unanswered_at = -math.inf

    def warrant(self) -> bytes:
        """What `ForeignSession` needs."""
        number, password = self._client._session_id, self._client._session_passwd
        return _WARRANT.pack(number % 2**64, self.granted_s, password)

    def renew(self, path: str) -> asyncio.Future[Any]:
        """Write to the znode at `path`: the renewal counts once a majority has the write."""
        answer = self.send(SetData(path, b"", -1))
        self.until = self._now() + self.granted_s
        return answer

    def over(self) -> str | None:
        if self.lost_because is None and not self.up and self._now() >= self.until:
            return "it was not renewed for its time"
        return self.lost_because

    @property
    def ending(self) -> bool:
        return self._closing or self._stopping

    def revoke(self, reason: str) -> asyncio.Future[None]:
        """Close the session. The future is done when it has ended for ZooKeeper too, however long
        that takes: after an outage, what the session holds is removed when a server is back, not
        only when the session's time is over."""
        self.lost_because = self.lost_because or reason
        if self._expired:
            return self.end(reason)
        if not self.ending:
            self._closing = True
            if self.up:
                self._close()
        return self.ended

    @property
    def _seeks_close(self) -> bool:
        return self._closing and not self._stopping and not self._expired

    def _close(self) -> None:
        """Request the end. Without an answer, it is requested again on the next connection."""
        self._request(CloseSession(), writes=True).add_done_callback(self._close_answered)

    def _close_answered(self, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self.end("")

    def may_connect(self) -> str | None:
        if not self._seeks_close:
            return self.over()
        rests = self._now() < self._unanswered_at + OUTLIVES * self.granted_s
        return "it is left to expire" if rests and self._unanswered >= CONNECT_ATTEMPTS else None

    def connect_unanswered(self) -> None:
        self._unanswered, self._unanswered_at = self._unanswered + 1, self._now()

    def connected(self, session: int, granted_s: float) -> None:
        """Raises if the session differs from the one that was granted. kazoo's thread."""
        name = _name(session)
        if self.id and (name, granted_s) != (self.id, self.granted_s):
            self.lost_because = f"the server offers {name} for {granted_s:g} s instead"
            raise ConnectionDropped(self.lost_because)
        self._unanswered = 0
        super().connected(session, granted_s)

    def state_changed(self, state: str) -> None:
        if state == KazooState.LOST and not self._stopping:
            self._expired = True
            self.lost_because = self.lost_because or "ZooKeeper has expired it"
        super().state_changed(state)

    def _went_up(self) -> None:
        if self._seeks_close:
            self.up = True
            self.requests.heard()
            self._close()
        else:
            super()._went_up()

    def _went_down(self) -> None:
        super()._went_down()
        if self._expired:
            self.end("")


class ForeignSession(LeaseSession):
    """The session of a process that has died, taken over in order to close it.

    To connect renews a session. The shortest length is requested, so that a session which could
    not be closed ends soon after.
    """

    def __init__(self, address: ZooKeeperAddress, warrant: bytes) -> None:
        number, granted_s, password = _WARRANT.unpack(warrant)
        signed = number - 2**64 if number >= 2**63 else number
        super().__init__(address, timeout_s=_SHORTEST_S, taken_over=(signed, password))
        self.id, self.granted_s = _name(number), granted_s
        self.requests.patience_s = granted_s / 6

    def close(self) -> asyncio.Future[None]:
        """Connect and close the session. The future is done when it has ended for ZooKeeper."""
        self._client.start_async()
        return self.revoke("its holder has died")

    def connected(self, session: int, granted_s: float) -> None:
        self._unanswered = 0
        ZooKeeperSession.connected(self, session, granted_s)


class _PendingAnswer:
    """The object that kazoo sets the answer of a request on. Passes it from its thread to the
    loop."""

    __slots__ = ("_error", "_session", "_value", "_writes", "future")

    def __init__(self, session: ZooKeeperSession, *, writes: bool) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # A caller with several requests in flight may stop at the first error.
        self.future.add_done_callback(retrieve)
        self._session = session
        self._writes = writes
        self._value: Any = None
        self._error: Exception | None = None

    def set(self, value: Any) -> None:
        self._value = value
        self._session.post(self._settle)

    def set_exception(self, error: Exception) -> None:
        if self._error is None:  # kazoo fails the requests of a client that is closed twice
            self._error = error
            self._session.post(self._settle)

    def _settle(self) -> None:
        self._session.requests.answered()
        if self.future.done():
            return
        if self._error is None:
            self.future.set_result(self._value)
        else:
            self.future.set_exception(self._session.translate(self._error, writes=self._writes))


def _name(session: int) -> str:
    return f"0x{session % 2**64:x}"


def _translate(error: Exception, writes: bool, lease: str | None) -> StoreError:
    reason = str(error) or type(error).__name__
    match error:
        case NoAuthError():
            return StoreUnusable(
                "ZooKeeper refuses: the access list of a znode does not include this client."
                " Check user and password, or have an administrator change the list"
            )
        case AuthFailedError() | SessionClosedRequireSaslError() | SASLException():
            reason = str(error.__cause__ or error) or type(error).__name__
            return StoreUnusable(
                f"ZooKeeper does not accept the credentials: {reason}; check user and password"
            )
        case InvalidACLError():
            return StoreUnusable("acl=creator needs a user that ZooKeeper has authenticated")
        case UnimplementedError():
            return StoreUnusable("this ZooKeeper is too old: version 3.5 or later is needed")
        case QuotaExceededError():
            return StoreUnusable("a quota of ZooKeeper's is exhausted: have it raised")
        case SessionExpiredError() if lease and not isinstance(error, ConnectionClosedError):
            return LeaseGone(f"ZooKeeper has expired the session {lease}")
    if writes and not isinstance(error, _NOT_DONE):
        return OutcomeUnknown(f"the connection broke before ZooKeeper answered: {reason}")
    return StoreUnavailable(f"ZooKeeper did not carry out the request: {reason}")
