"""The cluster as one client sees it: its members, who we are to it, and what its errors mean.

A `EtcdConnection` is a connection of its own to one member at a time, and moves on to the next when
that one fails or does not answer. A store has three: one for ordinary calls, one for renewals, one
for watches, so that none of them queues behind another. They share the token and two suspicions:

- Every answer must come from one and the same cluster. Two clusters behind one URL would elect two
  leaders.
- Once a revision has been seen, no later request may be answered from an earlier one. Revisions
  are tokens; a cluster restored from an old snapshot would give them out again.

A connection begins with a greeting (credentials, then `Status`), so a call that fails afterwards
was sent, unless etcd or gRPC says otherwise: its outcome is unknown. Reads may be repeated, and
are, at every other member; so is whatever was certainly not carried out.

Imports grpc, the messages and the error tree.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc import StatusCode

from doyen._waiting import shared
from doyen.errors import (
    ConfigError,
    LeaseGone,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
)
from doyen.stores.etcd import rpc
from doyen.stores.etcd.diagnosis import EtcdMemberState
from doyen.stores.etcd.rpc import Method

__all__ = [
    "Credentials",
    "Denied",
    "EtcdChannel",
    "EtcdCluster",
    "EtcdConnection",
    "LoginExpired",
    "refusal",
    "refuse_after_fork",
]

Metadata = tuple[tuple[str, str], ...]

OLDEST = (3, 4)
UNANSWERED_S = 0.1
"""A call that is cancelled after less was not given up for want of an answer."""
DRAIN_S = 10.0
"""How long the calls under way on a connection may go on after it was left."""

_OPTIONS = [
    # Or connections to one address would be shared by all channels of the process.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    # A half-open connection is noticed even when nobody asks anything. etcd allows one ping in 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
]

_WITH_A_LEADER = ("hasleader", "true")
"""Have a member that has lost its cluster's leader say so, and end streams, rather than hang."""

_NOT_DONE = (
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
    "failed to connect to all addresses",
    "errors resolving",
    "DNS resolution failed",
)
_IN_DOUBT = {
    StatusCode.UNAVAILABLE,
    StatusCode.UNKNOWN,
    StatusCode.INTERNAL,
    StatusCode.CANCELLED,
    StatusCode.ABORTED,
    StatusCode.DEADLINE_EXCEEDED,
}


_grpc_runs_in: int | None = None


def refuse_after_fork() -> None:
    """Raise in a process that was forked from one in which this module has used gRPC.

    gRPC's threads are not there, its descriptors are the parent's: using it here crashes this
    process, or takes the parent's answers.
    """
    global _grpc_runs_in
    _grpc_runs_in = _grpc_runs_in or os.getpid()
    if _grpc_runs_in != os.getpid():
        raise ConfigError(
            f"etcd:// cannot be used in a process forked from one that uses it (process"
            f" {_grpc_runs_in}), because gRPC cannot: start this process anew instead"
            " (multiprocessing's 'spawn'), or fork before connecting"
        )


class LoginExpired(StoreUnusable):
    """We are not known, or not any more."""


class Denied(StoreUnusable):
    """We are known, and may not do this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Who we are, and whom we trust."""

    user: str = ""
    password: str = field(default="", repr=False)
    tls: grpc.ChannelCredentials | None = None


class EtcdCluster:
    """What the wires of one store share."""

    def __init__(
        self, members: Sequence[str], credentials: Credentials, *, connect_timeout_s: float
    ) -> None:
        self.members = members
        self.first = random.randrange(len(members))
        """Where this client begins: not all at the member that the URL names first."""
        self.credentials = credentials
        self.connect_timeout_s = connect_timeout_s
        self.revision = 0
        """The highest that an answer has shown."""
        self._id = 0
        self._token = ""
        self._authenticating = asyncio.Lock()

    def metadata(self) -> Metadata:
        return (_WITH_A_LEADER, ("token", self._token)) if self._token else (_WITH_A_LEADER,)

    async def authenticate(self, connection: EtcdChannel, stale: str | None = None) -> None:
        """Have a token; another one than `stale`, if that is given."""
        who = self.credentials
        async with self._authenticating:
            if not who.user or self._token not in ("", stale):
                return
            request = rpc.AuthenticateRequest(name=who.user, password=who.password)
            try:
                self._token = (await connection.ask_once(rpc.AUTHENTICATE, request)).token
            except StoreUnusable as error:
                if "authentication is not enabled" in str(error):
                    return  # until it is: requests will then be refused, and we come again
                if "authentication failed" in str(error):
                    raise StoreUnusable(
                        f"etcd at {connection.member} knows no user {who.user!r} with this"
                        " password: correct the URL"
                    ) from error
                raise

    @property
    def token(self) -> str:
        return self._token

    async def inspect(self, member: str) -> EtcdMemberState:
        """What a member says of itself; on a connection of its own."""
        connection = EtcdChannel(self, member)
        try:
            status = await connection.status()
        except StoreError as error:
            return EtcdMemberState(member=member, silent_because=str(error))
        finally:
            await connection.close()
        return EtcdMemberState(
            member=member,
            version=status.version,
            learner=status.isLearner,
            has_leader=bool(status.leader),
            alarms=tuple(status.errors),
        )

    def recognise(self, member: str, header: Any) -> None:
        """Refuse an answer that comes from another cluster than all before it."""
        if self._id not in (0, header.cluster_id):
            raise StoreUnusable(
                f"etcd at {member} belongs to another cluster ({header.cluster_id:x}) than the"
                f" rest ({self._id:x}): all members named in the URL must be of one cluster"
            )
        self._id = header.cluster_id


class EtcdChannel:
    """A channel to one member."""

    def __init__(self, cluster: EtcdCluster, member: str) -> None:
        self.member = member
        self._cluster = cluster
        tls = cluster.credentials.tls
        self.channel = (
            grpc.aio.insecure_channel(member, options=_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(member, tls, options=_OPTIONS)
        )
        self.begun_at = asyncio.get_running_loop().time()
        self.heard_at = -math.inf
        """When the member last answered anything, on the loop's clock."""
        self._calls: dict[Method, Any] = {}
        self._greeting: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Greet the member, once for all who wait."""
        if self._greeting is None:
            self._greeting = asyncio.get_running_loop().create_task(self._greet())
        await shared(self._greeting)

    async def _greet(self) -> None:
        status = await self.status()
        version = tuple(int(part) for part in status.version.split(".")[:2])
        if version < OLDEST:
            raise StoreUnusable(
                f"etcd at {self.member} is version {status.version};"
                f" doyen needs {'.'.join(map(str, OLDEST))} or later"
            )
        if status.isLearner:
            raise StoreUnavailable(f"etcd at {self.member} is a learner: it answers no requests")
        self._cluster.recognise(self.member, status.header)

    async def status(self) -> Any:
        """What the member says of itself, once it knows who we are."""
        timeout_s = self._cluster.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._cluster.authenticate(self)
                return await self.ask(rpc.STATUS, rpc.StatusRequest())
        except TimeoutError as error:
            raise StoreUnavailable(
                f"etcd at {self.member} does not answer within {timeout_s:g} s"
            ) from error
        except OutcomeUnknown as error:  # of a greeting nothing remains
            raise StoreUnavailable(str(error)) from error

    async def ask(self, method: Method, request: Any) -> Any:
        """One call, with another token if that is all it takes."""
        cluster, token = self._cluster, self._cluster.token
        try:
            return await self.ask_once(method, request, cluster.metadata())
        except LoginExpired:
            if not cluster.credentials.user:
                raise
            await cluster.authenticate(self, stale=token)
            return await self.ask_once(method, request, cluster.metadata())

    async def ask_once(self, method: Method, request: Any, metadata: Metadata = ()) -> Any:
        """One call, its errors translated."""
        call = self._calls.get(method)
        if call is None:
            call = self._calls[method] = self.channel.unary_unary(
                method.path, _serialise, method.answer.FromString
            )
        try:
            answer = await call(request, metadata=metadata)
        except grpc.aio.UsageError as error:
            raise StoreUnavailable(f"the connection to etcd at {self.member} is closed") from error
        except grpc.aio.AioRpcError as error:
            raise translate(error, self.member) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC cancels the calls of a channel that is closed, and this is how it says so.
            raise OutcomeUnknown(f"the connection to etcd at {self.member} was closed") from None
        self.heard_at = asyncio.get_running_loop().time()
        return answer

    def stream(self, method: Method) -> Stream:
        """A call with requests and answers without end."""
        call = self.channel.stream_stream(method.path, _serialise, method.answer.FromString)
        return Stream(self, lambda requests: call(requests, metadata=self._cluster.metadata()))

    async def close(self, grace_s: float | None = None) -> None:
        await self.channel.close(grace_s)


class Stream:
    """Requests one way, answers the other, until either side ends it."""

    def __init__(self, connection: EtcdChannel, call: Callable[[AsyncIterator[Any]], Any]) -> None:
        self._connection = connection
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._call = call(self._outgoing())

    def send(self, request: Any) -> None:
        self._requests.put_nowait(request)

    async def read(self) -> Any:
        """The next answer. Raises `StoreUnavailable` when there will be none."""
        member = self._connection.member
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            failure = translate(error, member)
            raise (
                failure if isinstance(failure, LoginExpired) else StoreUnavailable(str(failure))
            ) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            answer = grpc.aio.EOF
        if answer is grpc.aio.EOF:
            raise StoreUnavailable(f"etcd at {member} has ended the stream")
        self._connection.heard_at = asyncio.get_running_loop().time()
        return answer

    def end(self) -> None:
        """Idempotent."""
        self._requests.put_nowait(None)
        self._call.cancel()

    async def _outgoing(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            yield request


class EtcdConnection:
    """A connection to one member at a time."""

    def __init__(self, cluster: EtcdCluster) -> None:
        self._cluster = cluster
        self._turn = cluster.first
        self._connection: EtcdChannel | None = None
        self._left: dict[EtcdChannel, asyncio.Task[None]] = {}
        self._closed = False

    async def connection(self) -> EtcdChannel:
        """A connection to a member that answers. Raises `StoreUnavailable` of the one
        whose turn it is, and it is the next one's turn then."""
        while True:
            if self._closed:
                raise StoreUnusable("this store has been closed; open another")
            if self._connection is None:
                members = self._cluster.members
                self._connection = EtcdChannel(self._cluster, members[self._turn % len(members)])
            connection, began = self._connection, self._now()
            try:
                await connection.ready()
            except asyncio.CancelledError:
                self.given_up(began)
                raise
            except StoreError:
                self.move_on(connection)
                raise
            if connection is self._connection:  # nobody has left it meanwhile
                return connection

    def given_up(self, began: float) -> None:
        """A call was given up: if nothing has been heard since it began, the next goes to another
        member."""
        connection, waited_s = self._connection, self._now() - began
        if (
            connection is not None
            and connection.begun_at <= began
            and connection.heard_at < began
            and waited_s >= UNANSWERED_S
        ):
            self.move_on(connection)

    def move_on(self, connection: EtcdChannel) -> None:
        """Leave a connection. What is under way on it may still be answered."""
        if connection is self._connection:
            self._connection = None
            self._turn += 1
            closing = asyncio.get_running_loop().create_task(connection.close(DRAIN_S))
            self._left[connection] = closing
            closing.add_done_callback(lambda _: self._left.pop(connection, None))

    async def call(self, method: Method, request: Any, *, reads: bool = False) -> Any:
        """Ask until a member answers, as long as nothing can have been done twice."""
        failures: list[str] = []
        for last in [False] * (len(self._cluster.members) - 1) + [True]:
            try:
                return await self._ask(method, request, reads=reads)
            except StoreUnavailable as error:
                failures.append(str(error))
                if last:
                    raise StoreUnavailable("; ".join(dict.fromkeys(failures))) from error
            except OutcomeUnknown as error:
                if not reads:
                    raise
                failures.append(str(error))
                if last:
                    raise StoreUnavailable("; ".join(dict.fromkeys(failures))) from error
        raise AssertionError("unreachable")

    async def _ask(self, method: Method, request: Any, *, reads: bool) -> Any:
        connection = await self.connection()
        cluster, began = self._cluster, self._now()
        known = cluster.revision
        try:
            answer = await connection.ask(method, request)
        except asyncio.CancelledError:
            self.given_up(began)
            raise
        except (StoreUnavailable, OutcomeUnknown):
            self.move_on(connection)
            raise
        cluster.recognise(connection.member, answer.header)
        if 0 < answer.header.revision < known:
            self.move_on(connection)
            raise _gone_back(connection.member, known, answer.header.revision, reads=reads)
        cluster.revision = max(cluster.revision, answer.header.revision)
        return answer

    async def close(self) -> None:
        """Close every connection; calls under way end in `OutcomeUnknown`. Idempotent."""
        self._closed = True
        connections = [*self._left, *([self._connection] if self._connection else [])]
        self._connection = None
        for draining in self._left.values():
            draining.cancel()
        await asyncio.gather(*(connection.close() for connection in connections))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def translate(error: grpc.aio.AioRpcError, member: str) -> StoreError:
    """What an error of etcd's or gRPC's means to doyen."""
    # Its traceback holds the call, and the call its channel, which would go on connecting after it
    # was closed for as long as anybody keeps the error.
    error.__traceback__ = None
    details = error.details() or error.code().name.lower()
    # Of a chain of causes, as gRPC tells it, the last.
    said = details.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
    if any(phrase in details for phrase in _NOT_DONE):
        return StoreUnavailable(f"etcd at {member}: {said}")
    if error.code() in _IN_DOUBT:
        return OutcomeUnknown(f"etcd at {member}: {said}")
    return refusal(said, member)


def refusal(said: str, member: str) -> StoreError:
    """What etcd means by refusing something in these words."""

    def says(*phrases: str) -> bool:
        return any(phrase in said for phrase in phrases)

    if says("requested lease not found"):
        return LeaseGone("etcd has ended the lease")
    if says("database space exceeded"):
        return StoreUnavailable(
            f"etcd at {member} takes no writes, its space quota is exhausted: compact and"
            " defragment it, then disarm the alarm"
        )
    if says("too many requests"):
        return StoreUnavailable(f"etcd at {member}: {said}")
    if says("permission denied"):
        return Denied(
            f"etcd at {member} does not permit this: grant the user read and write access to"
            " every key that begins with the URL's path and a slash"
        )
    if says("invalid auth token", "user name is empty", "revision of auth store is old"):
        return LoginExpired(
            f"etcd at {member} wants a user and a password, as in etcd://user:password@host"
            f" ({said})"
        )
    return StoreUnusable(f"etcd at {member} refuses this: {said}")


def _gone_back(member: str, known: int, revision: int, *, reads: bool) -> StoreError:
    """An answer of the past. A read may be stale (etcd#20418), and is asked again elsewhere; a
    write cannot be."""
    what = f"etcd at {member} has gone back from revision {known} to {revision}"
    if reads:
        return OutcomeUnknown(what)
    return StoreUnusable(
        f"{what}: it was restored from an older snapshot, or emptied, and would give out tokens"
        " again. Restore it with etcdutl's --bump-revision, then connect again"
    )


def _serialise(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
