"""Connections to Redis: one connection, the server that is the master, scripts that it runs.

Requests are sent as they come, and responses are matched to them in order. The end of the
connection is noticed when it happens, not at the next request. A request whose caller is cancelled
is still carried out as a whole. If the server has been silent for a while at that time, the
connection is dropped, because a slow server cannot be told from a connection that is broken.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,  # noqa: A004 - redis-py's, which is not the standard library's
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from doyen._waiting import retrieve, shared
from doyen.errors import OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.stores.kit.failover import ConnectionLost, answer_within, connect_cause, failover
from doyen.stores.kit.lifecycle import CLOSED
from doyen.stores.kit.streams import write_joined
from doyen.stores.kit.url import Host
from doyen.stores.redis.scripts import KEYS, SCRIPTS

_REDIRECTIONS = 3
_DIGESTS = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in SCRIPTS.items()}

_TEMPORARY = (OutOfMemoryError, ClusterDownError, TryAgainError, AskError)
_TEMPORARY_WORDS = ("BUSY", "MISCONF", "NOREPLICAS", "OOM", "LOADING", "MASTERDOWN")

_OLDEST = (6, 0)
_SILENT_S = 0.25

Command = Sequence[str | bytes | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """The servers, the login and the database. With a `service`, the hosts are sentinels."""

    hosts: tuple[Host, ...]
    user: str | None = None
    password: str | None = None
    database: int = 0
    service: str | None = None
    sentinel_user: str | None = None
    sentinel_password: str | None = None
    tls: Mapping[str, Any] | None = None
    connect_timeout_s: float = 3.0

    def __str__(self) -> str:
        hosts = ", ".join(map(str, self.hosts))
        return hosts if self.service is None else f"{self.service} by the sentinels {hosts}"


class _Socket(Connection):
    """A connection of redis-py that can be closed at once. Over TLS, redis-py waits for the
    server's close_notify, or leaves that to the loop. It may never arrive, and the loop may be
    about to end."""

    _opened: asyncio.WriteTransport | None = None

    async def _connect(self) -> None:
        self._abort()
        await super()._connect()  # type: ignore[no-untyped-call]
        if self._writer is not None:
            write_joined(self._writer)
            self._opened = self._writer.transport

    def _abort(self) -> None:
        if self._opened is not None:
            self._opened.abort()
            self._opened = None

    async def end(self) -> None:
        self._abort()
        await self.disconnect(nowait=True)

    async def call(self, *commands: Command) -> list[Any]:
        """Send commands before the connection is in use, and return their responses."""
        await self.send_packed_command(self.pack_commands(commands), check_health=False)
        return [await self.read_response() for _ in commands]


class _TLSSocket(_Socket, SSLConnection):
    """The same, over TLS."""


async def _connect(
    address: RedisAddress, host: Host, user: str | None, password: str | None, database: int
) -> _Socket:
    kind = _Socket if address.tls is None else _TLSSocket
    connection = kind(
        host=host.name,
        port=host.port,
        db=database,
        username=user,
        password=password,
        socket_timeout=None,
        socket_connect_timeout=address.connect_timeout_s,
        protocol=2,
        **(address.tls or {}),
    )
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
    except BaseException as error:
        await connection.end()
        if isinstance(error, AuthenticationError):
            raise _login_refused(host, error) from error
        if isinstance(error, ResponseError):
            raise StoreUnusable(f"{host}: {error} (database {database})") from error
        if isinstance(error, RedisError | OSError):
            cause = _cause(error)
            if "invalid DB index" in cause or "out of range" in cause:
                raise StoreUnusable(f"{host} has no database {database}") from error
            if "CERTIFICATE_VERIFY_FAILED" in cause:
                raise StoreUnusable(f"{host}: {cause}") from error
            raise StoreUnavailable(f"{host}: {cause}") from error
        raise
    return connection


async def _ask_sentinel(address: RedisAddress, sentinel: Host, service: str) -> Host:
    """The master of a service, according to a sentinel."""
    connection = await _connect(
        address, sentinel, address.sentinel_user, address.sentinel_password, 0
    )
    try:
        (found,) = await connection.call(["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service])
    except RedisError as error:
        raise StoreUnavailable(f"the sentinel {sentinel}: {error}") from error
    finally:
        await connection.end()
    if not found:
        raise StoreUnavailable(f"the sentinel {sentinel} knows no master called {service!r}")
    return Host(found[0].decode(), int(found[1]))


@dataclass(slots=True, eq=False)
class RedisConnection:
    """One connection to a master, and the requests in flight on it."""

    host: Host
    run: str
    """The run id of the server. A restarted server has another one."""
    incarnation: str
    """Differs if the server may have lost writes that an earlier one confirmed."""
    on_push: Callable[[Any], None] | None = None
    """Receives what the server sends while no request is in flight, errors included."""
    open: bool = True
    received_at: float = 0.0
    ended: asyncio.Task[None] = field(init=False)
    """Done when the connection has ended."""
    _socket: _Socket = field(kw_only=True)
    _requests: deque[tuple[asyncio.Future[Any], float]] = field(default_factory=deque)
    """For each response that is awaited, the time at which its request was sent."""

    def __post_init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def to_master(cls, address: RedisAddress, host: Host) -> RedisConnection:
        """A connection to a server, which must be a master of a supported version."""
        connection = await _connect(address, host, address.user, address.password, address.database)
        try:
            try:
                sections = await connection.call(["INFO", "server"], ["INFO", "replication"])
            except NoPermissionError as error:
                raise StoreUnusable(f"{host}: {error}; doyen needs INFO") from error
            except AuthenticationError as error:
                raise _login_refused(host, error) from error
            except RedisError as error:
                raise StoreUnavailable(f"{host}: {error}") from error
            facts = {name: fact for section in sections for name, fact in facts_in(section).items()}
            version = facts.get("redis_version", "0")
            if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
                raise StoreUnusable(f"{host} runs Redis {version}; doyen needs 6.0 or later")
            if facts.get("role") != "master":
                master = f"{facts.get('master_host')}:{facts.get('master_port')}"
                raise StoreUnavailable(
                    f"{host} is a replica of {master}: name all the servers in the URL, or"
                    " their sentinels (redis+sentinel://)"
                )
        except BaseException:
            await connection.end()
            raise
        run = facts["run_id"]
        return cls(host, run, f"{run} {facts.get('master_replid')}", _socket=connection)

    async def send(self, *commands: Command) -> list[Any]:
        """Send commands in one write, and return their responses. Raises the first error."""
        if not self.open or not self._socket.is_connected:
            raise StoreUnavailable(f"{self.host}: the connection has ended")
        loop = asyncio.get_running_loop()
        packed = self._socket.pack_commands(commands)  # raises for text that UTF-8 cannot carry
        responses = [loop.create_future() for _ in commands]
        self._requests.extend((response, loop.time()) for response in responses)
        try:
            await self._socket.send_packed_command(packed, check_health=False)
            return [await response for response in responses]
        except BaseException as error:
            for response in responses:
                response.add_done_callback(retrieve)
            if isinstance(error, ConnectionError):
                raise ConnectionLost(str(error)) from error
            if isinstance(error, asyncio.CancelledError) and self._silent_s() > _SILENT_S:
                self.drop()
            raise

    async def post(self, command: Command) -> None:
        """Send a command whose response goes to `on_push`."""
        if self.open and self._socket.is_connected:
            await self._socket.send_packed_command(
                self._socket.pack_command(*command), check_health=False
            )

    def drop(self) -> None:
        """End the connection. Requests in flight fail."""
        self.open = False
        self.ended.cancel()

    async def close(self) -> None:
        self.drop()
        await asyncio.wait({self.ended})

    def _silent_s(self) -> float:
        """For how long the oldest request in flight has been without a response."""
        if not self._requests:
            return 0.0
        since = max(self._requests[0][1], self.received_at)
        return asyncio.get_running_loop().time() - since

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        lost = ConnectionLost("dropped, because the server did not respond")
        try:
            while True:
                try:
                    received = await self._socket.read_response(disconnect_on_error=False)
                except ResponseError as error:
                    received = error
                self.received_at = loop.time()
                if self.on_push is not None and not self._requests:
                    self.on_push(received)
                    continue
                response, _ = self._requests.popleft()
                if response.done():
                    continue
                if isinstance(received, Exception):
                    response.set_exception(received)
                else:
                    response.set_result(received)
        except (RedisError, OSError) as error:
            lost = ConnectionLost(str(error))
            lost.__cause__ = error
        finally:
            self.open = False
            for response, _ in self._requests:
                if not response.done():
                    response.set_exception(lost)
            await self._socket.end()


class RedisMaster:
    """Finds the master for all connections of one store, which therefore agree on it: when one of
    them finds that another server is the master, the others leave the old one. A leader thus never
    renews its lease on one server while its record is taken over on another."""

    def __init__(self, address: RedisAddress) -> None:
        self.address = address
        self.run = ""
        """The run id of the server that was last found to be the master. Connections to another
        server are out of date."""
        self.moved: Host | None = None
        """The server that has doyen's slot, according to the cluster."""

    async def connect(self) -> RedisConnection:
        """A connection to the master."""
        hosts = self.address.hosts if self.moved is None else (self.moved, *self.address.hosts)
        summary = "no connection to a Redis master: "
        try:
            connection = await failover(hosts, self._ask, summary=summary)
        except StoreUnavailable:
            self.moved = None
            raise
        self.run = connection.run
        return connection

    async def _ask(self, host: Host) -> RedisConnection:
        async with answer_within(self.address.connect_timeout_s, host):
            if self.address.service is not None:
                host = await _ask_sentinel(self.address, host, self.address.service)
            return await RedisConnection.to_master(self.address, host)

    async def connect_to(self, host: Host) -> RedisConnection:
        """A connection to the server that a cluster names for one request."""
        async with answer_within(self.address.connect_timeout_s, host):
            return await RedisConnection.to_master(self.address, host)


class ScriptRunner:
    """Runs scripts at the master, on one connection at a time, made when it is needed. Connecting
    goes on if the caller that needed it first gives up. Nothing is sent twice, except a script that
    the server has not cached."""

    def __init__(self, master: RedisMaster, prefix: str) -> None:
        self.where = str(master.address)
        self._master = master
        self._prefix = prefix
        self._keys: Command = (len(KEYS), *(prefix + key for key in KEYS), prefix)
        self._connection: RedisConnection | None = None
        self._connecting: asyncio.Task[RedisConnection] | None = None
        self._closed = False

    async def connected(self) -> RedisConnection:
        """The connection to the master, made anew if there is none."""
        if self._closed:
            raise StoreUnusable(CLOSED)
        if self._connection is not None and self._connection.open:
            if self._connection.run == self._master.run:
                return self._connection
            self._connection.drop()
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._master.connect())
            self._connecting.add_done_callback(self._on_connected)
        return await shared(self._connecting)

    def _on_connected(self, connecting: asyncio.Task[RedisConnection]) -> None:
        self._connecting = None
        if connecting.cancelled() or connecting.exception() is not None:
            return
        if self._closed:
            connecting.result().drop()
        else:
            self._connection = connecting.result()

    async def command(self, *command: str) -> Any:
        """A command that is not a script. Raises `ResponseError` if it is refused."""
        try:
            return (await (await self.connected()).send(command))[0]
        except ConnectionLost as error:
            raise StoreUnavailable(f"{self.where}: {error}") from error

    async def run(
        self, script: str, *given: str | bytes, wait: Sequence[Command] = (), reads: bool = False
    ) -> tuple[list[Any], RedisConnection]:
        """Run a script, and the command `wait` after it, which waits for replicas. Returns their
        responses, and the connection that gave them. A script that `reads` changes nothing."""
        how: Command = ("EVALSHA", _DIGESTS[script])
        try:
            for _ in range(_REDIRECTIONS):
                connection = await self.connected()
                command: Command = (*how, *self._keys, connection.run, *given)
                try:
                    return await connection.send(command, *wait), connection
                except NoScriptError:
                    how = ("EVAL", SCRIPTS[script])
                except MovedError as error:  # a subclass of AskError, so it comes first
                    self._master.moved = _redirected(error, connection)
                    connection.drop()
                except AskError as error:
                    host = _redirected(error, connection)
                    return await self._run_at(host, SCRIPTS[script], given, wait)
                except ResponseError as error:
                    raise self._translate(error, connection) from error
        except ConnectionLost as error:
            if reads:
                raise StoreUnavailable(f"{self.where}: {error}") from error
            raise OutcomeUnknown(
                f"{self.where}: the connection ended before the response ({error})"
            ) from error
        raise StoreUnavailable(f"{self.where}: no server has accepted the script")

    async def _run_at(
        self, host: Host, script: str, given: Sequence[str | bytes], wait: Sequence[Command]
    ) -> tuple[list[Any], RedisConnection]:
        """Run a script at the server to which doyen's slot is being moved. It has the keys already
        but does not own the slot, so only this one request is for it."""
        connection = await self._master.connect_to(host)
        command: Command = ("EVAL", script, *self._keys, connection.run, *given)
        try:
            return (await connection.send(("ASKING",), command, *wait))[1:], connection
        except ResponseError as error:
            raise self._translate(error, connection) from error
        finally:
            connection.drop()

    def _translate(self, error: ResponseError, connection: RedisConnection) -> Exception:
        """Map an error response to an exception of the port."""
        host, text = connection.host, str(error)
        if isinstance(error, ReadOnlyError) or "READONLY" in text:
            connection.drop()
            return StoreUnavailable(f"{host} has become a replica: another is master now")
        if isinstance(error, _TEMPORARY) or any(word in text for word in _TEMPORARY_WORDS):
            return StoreUnavailable(f"{host}: {text}")
        if isinstance(error, NoPermissionError) or "NOPERM" in text or "can't" in text:
            return StoreUnusable(
                f"{host}: {text}; doyen's user needs"
                f" ~{self._prefix}* &{self._prefix}* +@all -@dangerous +info"
            )
        return StoreUnusable(f"{host}: {text}")

    async def close(self) -> None:
        """End the connection, and the attempt to make one. Idempotent."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        if self._connection is not None:
            await self._connection.close()


def _redirected(error: AskError, connection: RedisConnection) -> Host:
    """The server that a redirection names; without a host it is the one that redirects."""
    return Host(error.host or connection.host.name, error.port)


def facts_in(info: bytes) -> dict[str, str]:
    """The response to INFO as a table."""
    lines = info.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _login_refused(host: Host, error: Exception) -> StoreUnusable:
    return StoreUnusable(
        f"{host} refuses the login ({error}): correct redis://user:password@... in the URL"
    )


def _cause(error: BaseException) -> str:
    """The operating system's error, if there is one: redis-py's own messages vary."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, OSError):
        at = at.__cause__ or at.__context__
    return connect_cause(at or error)
