"""Connections to the members of an etcd cluster: login, failover, and checks of every answer.

An `EtcdClient` has a channel to one member at a time, and moves on to the next when that one fails
or does not answer. A store has three clients: one for ordinary calls, one for renewals, one for
watches, so that none of them queues behind another. They share the `EtcdCluster`, which checks:

- Every answer must come from one and the same cluster. Two clusters behind one URL would elect two
  leaders.
- Once a revision has been seen, no later request may be answered from an earlier one. Revisions
  are tokens; a cluster restored from an old snapshot would give them out again.

The first request on a channel is `Status`, after the login. A call that fails later was therefore
sent, and its outcome is unknown unless etcd or gRPC says otherwise. Reads are repeated at every
other member; so is whatever was certainly not carried out.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
from collections.abc import AsyncIterator, Callable
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
from doyen.stores.kit import url as options
from doyen.stores.kit.failover import answer_within, failover
from doyen.stores.kit.lifecycle import CLOSED
from doyen.stores.port import StoreURL

Metadata = tuple[tuple[str, str], ...]

OLDEST = (3, 4)
UNANSWERED_S = 0.1
"""A call that is cancelled earlier than this is no evidence that the member does not answer."""
DRAIN_S = 10.0
"""How long the calls in flight on a channel may go on after the client has moved on."""

_OPTIONS = [
    # By default, all channels of a process share the connections to one address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    # Detects half-open connections while nothing is requested. etcd allows one ping in 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
]

_REQUIRE_LEADER = ("hasleader", "true")
"""A member whose cluster has no leader then fails calls and ends streams instead of hanging."""

_NOT_DONE = (
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
    "failed to connect to all addresses",
    "errors resolving",
    "DNS resolution failed",
)
_OUTCOME_UNKNOWN = {
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

    gRPC's threads do not exist in the child, and its descriptors are the parent's. Using it crashes
    the child, or takes responses that are for the parent.
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
    """etcd does not accept the login token, or wants one."""


class Denied(StoreUnusable):
    """etcd accepts the login, and does not permit the request."""


class EtcdLogin:
    """A user, and the token that etcd has issued for it. Without a user there is no token."""

    def __init__(self, user: str = "", password: str = "") -> None:
        self.user = user
        self.token = ""
        self._password = password
        self._authenticating = asyncio.Lock()

    def metadata(self) -> Metadata:
        return (_REQUIRE_LEADER, ("token", self.token)) if self.token else (_REQUIRE_LEADER,)

    async def authenticate(self, channel: EtcdChannel, stale: str | None = None) -> None:
        """Get a token, unless there is one that differs from `stale`."""
        async with self._authenticating:
            if not self.user or self.token not in ("", stale):
                return
            request = rpc.AuthenticateRequest(name=self.user, password=self._password)
            try:
                self.token = (await channel.ask_once(rpc.AUTHENTICATE, request)).token
            except StoreUnusable as error:
                if "authentication is not enabled" in str(error):
                    return  # once it is, requests are refused and this is called again
                if "authentication failed" in str(error):
                    raise StoreUnusable(
                        f"etcd at {channel.member} knows no user {self.user!r} with this"
                        " password: correct the URL"
                    ) from error
                raise


class EtcdCluster:
    """What the clients of one store share: the members, the login, and what answers have shown."""

    def __init__(self, url: StoreURL) -> None:
        """`url` names the members, the login and the TLS files. Needs a running loop."""
        refuse_after_fork()
        user, password = options.login(url)
        self.members = [str(host) for host in options.hosts(url, 2379)]
        self.first = random.randrange(len(self.members))
        """Where this client begins, so that not all begin at the first member of the URL."""
        self.login = EtcdLogin(user, password or "")
        self.tls: grpc.ChannelCredentials | None = None
        if options.tls_files(url) is not None:
            ca, cert, key = (options.read_file(url, name) for name in ("ca", "cert", "key"))
            self.tls = grpc.ssl_channel_credentials(ca, key, cert)
        self.connect_timeout_s = options.number(url, "connect_timeout_s", 3.0)
        self.revision = 0
        """The highest that an answer has shown."""
        self._id = 0

    async def inspect(self, member: str) -> EtcdMemberState:
        """The status of one member, asked on a channel of its own."""
        channel = EtcdChannel(self, member)
        try:
            status = await channel.status()
        except StoreError as error:
            return EtcdMemberState(member=member, error=str(error))
        finally:
            await channel.close()
        return EtcdMemberState(
            member=member,
            version=status.version,
            learner=status.isLearner,
            has_leader=bool(status.leader),
            alarms=tuple(status.errors),
        )

    def require_same(self, member: str, header: Any) -> None:
        """Refuse an answer from another cluster than that of all earlier answers."""
        if self._id not in (0, header.cluster_id):
            raise StoreUnusable(
                f"etcd at {member} belongs to another cluster ({header.cluster_id:x}) than the"
                f" rest ({self._id:x}): all members named in the URL must be of one cluster"
            )
        self._id = header.cluster_id


class EtcdChannel:
    """A gRPC channel to one member."""

    def __init__(self, cluster: EtcdCluster, member: str) -> None:
        self.member = member
        self._cluster = cluster
        self.channel = (
            grpc.aio.insecure_channel(member, options=_OPTIONS)
            if cluster.tls is None
            else grpc.aio.secure_channel(member, cluster.tls, options=_OPTIONS)
        )
        self.created_at = asyncio.get_running_loop().time()
        self.answered_at = -math.inf
        """When the member last answered anything, on the loop's clock."""
        self.checked = False
        """The member can be used."""
        self._calls: dict[Method, Any] = {}
        self._checking: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Check once, for all that wait, that the member can be used."""
        if self._checking is None:
            self._checking = asyncio.get_running_loop().create_task(self._check())
        await shared(self._checking)

    async def _check(self) -> None:
        status = await self.status()
        version = tuple(int(part) for part in status.version.split(".")[:2])
        if version < OLDEST:
            raise StoreUnusable(
                f"etcd at {self.member} is version {status.version};"
                f" doyen needs {'.'.join(map(str, OLDEST))} or later"
            )
        if status.isLearner:
            raise StoreUnavailable(f"etcd at {self.member} is a learner, which serves no requests")
        self._cluster.require_same(self.member, status.header)
        self.checked = True

    async def status(self) -> Any:
        """Log in if necessary, then get the member's status."""
        try:
            async with answer_within(self._cluster.connect_timeout_s, f"etcd at {self.member}"):
                await self._cluster.login.authenticate(self)
                return await self.ask(rpc.STATUS, rpc.StatusRequest())
        except OutcomeUnknown as error:  # the request changes nothing
            raise StoreUnavailable(str(error)) from error

    async def ask(self, method: Method, request: Any) -> Any:
        """One call, repeated with a new token if the login has expired."""
        login, token = self._cluster.login, self._cluster.login.token
        try:
            return await self.ask_once(method, request, login.metadata())
        except LoginExpired:
            if not login.user:
                raise
            await login.authenticate(self, stale=token)
            return await self.ask_once(method, request, login.metadata())

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
            raise _translate(error, self.member) from error
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                raise
            raise OutcomeUnknown(f"the connection to etcd at {self.member} was closed") from None
        self.answered_at = asyncio.get_running_loop().time()
        return answer

    def stream(self, method: Method) -> EtcdStream:
        """A call with any number of requests and responses."""
        call = self.channel.stream_stream(method.path, _serialise, method.answer.FromString)
        metadata = self._cluster.login.metadata()
        return EtcdStream(self, lambda requests: call(requests, metadata=metadata))

    async def close(self, grace_s: float | None = None) -> None:
        await self.channel.close(grace_s)


class EtcdStream:
    """A bidirectional stream, until either side ends it."""

    def __init__(self, channel: EtcdChannel, call: Callable[[AsyncIterator[Any]], Any]) -> None:
        self._channel = channel
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._call = call(self._outgoing())

    def send(self, request: Any) -> None:
        self._requests.put_nowait(request)

    async def read(self) -> Any:
        """The next response. Raises `StoreUnavailable` if the stream has ended."""
        member = self._channel.member
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            failure = _translate(error, member)
            raise (
                failure if isinstance(failure, LoginExpired) else StoreUnavailable(str(failure))
            ) from error
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                raise
            answer = grpc.aio.EOF
        if answer is grpc.aio.EOF:
            raise StoreUnavailable(f"etcd at {member} has ended the stream")
        self._channel.answered_at = asyncio.get_running_loop().time()
        return answer

    def end(self) -> None:
        """Idempotent."""
        self._requests.put_nowait(None)
        self._call.cancel()

    async def _outgoing(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            yield request


class EtcdClient:
    """Requests of one kind, on a channel to one member at a time."""

    def __init__(self, cluster: EtcdCluster) -> None:
        self._cluster = cluster
        self._next = cluster.first
        self._channel: EtcdChannel | None = None
        self._draining: dict[EtcdChannel, asyncio.Task[None]] = {}
        self._closed = False

    async def channel(self) -> EtcdChannel:
        """A channel to a member that answers. If the current member does not, its error is raised,
        and the next call of this method tries the next member."""
        while True:
            if self._closed:
                raise StoreUnusable(CLOSED)
            if self._channel is None:
                members = self._cluster.members
                self._channel = EtcdChannel(self._cluster, members[self._next % len(members)])
            channel = self._channel
            if channel.checked:
                return channel
            began = asyncio.get_running_loop().time()
            try:
                await channel.ready()
            except asyncio.CancelledError:
                self.call_cancelled(began)
                raise
            except StoreError:
                self.move_on(channel)
                raise

    def call_cancelled(self, began: float) -> None:
        """A call was cancelled. If the member has not answered anything since it began, move on to
        the next."""
        channel, now = self._channel, asyncio.get_running_loop().time()
        if (
            channel is not None
            and channel.created_at <= began
            and channel.answered_at < began
            and now - began >= UNANSWERED_S
        ):
            self.move_on(channel)

    def move_on(self, channel: EtcdChannel) -> None:
        """Leave a channel for the next member. Calls in flight on it may still be answered."""
        if channel is self._channel:
            self._channel = None
            self._next += 1
            closing = asyncio.get_running_loop().create_task(channel.close(DRAIN_S))
            self._draining[channel] = closing
            closing.add_done_callback(lambda _: self._draining.pop(channel, None))

    async def call(self, method: Method, request: Any, *, reads: bool = False) -> Any:
        """Call at one member after another, as long as nothing can be carried out twice."""
        cluster = self._cluster

        async def attempt(_: str) -> Any:
            channel = self._channel
            if channel is None or not channel.checked:
                channel = await self.channel()
            began, known = asyncio.get_running_loop().time(), cluster.revision
            try:
                answer = await channel.ask(method, request)
            except asyncio.CancelledError:
                self.call_cancelled(began)
                raise
            except (StoreUnavailable, OutcomeUnknown):
                self.move_on(channel)
                raise
            cluster.require_same(channel.member, answer.header)
            if 0 < answer.header.revision < known:
                self.move_on(channel)
                raise _went_back(channel.member, known, answer.header.revision, reads=reads)
            cluster.revision = max(cluster.revision, answer.header.revision)
            return answer

        return await failover(cluster.members, attempt, repeatable=reads)

    async def close(self) -> None:
        """Close every channel; calls in flight end in `OutcomeUnknown`. Idempotent."""
        self._closed = True
        channels = [*self._draining, *([self._channel] if self._channel else [])]
        self._channel = None
        for draining in self._draining.values():
            draining.cancel()
        await asyncio.gather(*(channel.close() for channel in channels))


def _went_back(member: str, known: int, revision: int, *, reads: bool) -> StoreError:
    """The error for an answer with an earlier revision than one before. A read may be stale
    (etcd#20418) and is repeated at another member. The answer to a write cannot be."""
    reason = f"etcd at {member} has gone back from revision {known} to {revision}"
    if reads:
        return OutcomeUnknown(reason)
    return StoreUnusable(
        f"{reason}: it was restored from an older snapshot, or emptied, and would give out tokens"
        " again. Restore it with etcdutl's --bump-revision, then connect again"
    )


def _translate(error: grpc.aio.AioRpcError, member: str) -> StoreError:
    """The error of a failed call."""
    # The traceback refers to the call, and the call to its channel. A closed channel would go on
    # connecting for as long as the error is referenced.
    error.__traceback__ = None
    details = error.details() or error.code().name.lower()
    # gRPC lists a chain of causes. The last is the most specific.
    reason = details.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
    reason = re.sub(r"^ipv[46]:\S+: Failed to connect to remote host: ", "", reason)
    if any(phrase in details for phrase in _NOT_DONE):
        return StoreUnavailable(f"etcd at {member}: {reason}")
    if error.code() in _OUTCOME_UNKNOWN:
        return OutcomeUnknown(f"etcd at {member}: {reason}")
    return refusal(reason, member)


def refusal(reason: str, member: str) -> StoreError:
    """The error of a request that etcd refused for this reason."""

    def mentions(*phrases: str) -> bool:
        return any(phrase in reason for phrase in phrases)

    if mentions("requested lease not found"):
        return LeaseGone("etcd has ended the lease")
    if mentions("database space exceeded"):
        return StoreUnavailable(
            f"etcd at {member} accepts no writes, because its space quota is exhausted: compact and"
            " defragment it, then disarm the alarm"
        )
    if mentions("too many requests"):
        return StoreUnavailable(f"etcd at {member}: {reason}")
    if mentions("permission denied"):
        return Denied(
            f"etcd at {member} does not permit this: grant the user read and write access to"
            " every key that begins with the URL's path and a slash"
        )
    if mentions("invalid auth token", "user name is empty", "revision of auth store is old"):
        return LoginExpired(
            f"etcd at {member} requires a user and a password, as in etcd://user:password@host"
            f" ({reason})"
        )
    return StoreUnusable(f"etcd at {member} refuses this: {reason}")


def _this_task_is_cancelled() -> bool:
    """Whether a `CancelledError` is for this task. gRPC also raises it for the calls of a channel
    that is closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _serialise(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
