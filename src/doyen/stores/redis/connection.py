"""Connections to the Redis server that is the master now.

A `RedisConnection` is one connection: commands go out as they come, answers are matched to them in
order, and its end is known when it comes, not at the next call. A call that is cancelled is carried
out all the same, whole; if the server has been silent meanwhile, the wire is given up, because
nobody can tell a slow server from a connection that leads nowhere.

A `MasterConnection` makes a wire when it is needed. Making one outlasts the patience of whoever
needs it first. Links of one address agree on the master: whoever has asked last knows best, and the
others follow. A leader thus never renews its lease with one server while its record is taken over
on another. Nothing is ever sent twice, except a script that the server did not know.

Imports redis-py, the port's errors and the standard library.
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

from doyen._waiting import shared
from doyen.errors import OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.stores.redis.scripts import KEYS, SCRIPTS

__all__ = ["PORT", "SENTINEL_PORT", "MasterConnection", "RedisAddress", "RedisConnection"]

PORT = 6379
SENTINEL_PORT = 26379
_OLDEST = (6, 0)
_SILENT_S = 0.25
_REDIRECTIONS = 3
_DIGESTS = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in SCRIPTS.items()}

_PASSING = (OutOfMemoryError, ClusterDownError, TryAgainError, AskError)
_PASSING_WORDS = ("BUSY", "MISCONF", "NOREPLICAS", "OOM", "LOADING", "MASTERDOWN")

Command = Sequence[str | bytes | int]


class RedisConnectionLost(Exception):
    """The connection has ended with a call under way."""


class _Plain(Connection):
    """A connection that can be let go at once. Over TLS, redis-py waits for the other side's
    farewell, or leaves the loop to do so; it may never come, and the loop may be about to end."""

    _way: asyncio.WriteTransport | None = None

    async def _connect(self) -> None:
        self._abandon()
        await super()._connect()  # type: ignore[no-untyped-call]
        self._way = self._writer.transport if self._writer is not None else None

    def _abandon(self) -> None:
        if self._way is not None:
            self._way.abort()
            self._way = None

    async def end(self) -> None:
        self._abandon()
        await self.disconnect(nowait=True)


class _Secured(_Plain, SSLConnection):
    """The same, over TLS."""


@dataclass(slots=True, kw_only=True)
class RedisAddress:
    """Where the servers are, and who asks. With a `service`, the hosts are sentinels."""

    hosts: tuple[tuple[str, int], ...]
    user: str | None = None
    password: str | None = None
    database: int = 0
    service: str | None = None
    sentinel_user: str | None = None
    sentinel_password: str | None = None
    tls: Mapping[str, Any] | None = None
    connect_timeout_s: float = 3.0
    moved: tuple[str, int] | None = None
    """Where a cluster says that our slot is."""
    run: str = ""
    """Of the server that was last found to be the master. Wires to another are out of date."""

    def __str__(self) -> str:
        hosts = ", ".join(f"{host}:{port}" for host, port in self.hosts)
        return hosts if self.service is None else f"{self.service} by the sentinels {hosts}"

    async def reach(self) -> RedisConnection:
        """A wire to the master."""
        failures = []
        for host, port in self._candidates():
            try:
                async with asyncio.timeout(self.connect_timeout_s):
                    master = host, port
                    if self.service is not None:
                        master = await self._ask_sentinel(host, port, self.service)
                    wire = await self._master(*master)
                    self.run = wire.run
                    return wire
            except StoreUnavailable as error:
                failures.append(error)
            except TimeoutError as error:
                failure = StoreUnavailable(
                    f"{host}:{port} does not answer within {self.connect_timeout_s:g} s"
                )
                failure.__cause__ = error
                failures.append(failure)
        self.moved = None
        causes = "; ".join(map(str, failures))
        raise StoreUnavailable(f"no connection to a Redis master: {causes}") from failures[0]

    async def visit(self, host: str, port: int) -> RedisConnection:
        """A wire to the server that a cluster names for one call."""
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                return await self._master(host, port)
        except TimeoutError as error:
            raise StoreUnavailable(
                f"{host}:{port} does not answer within {self.connect_timeout_s:g} s"
            ) from error

    def _candidates(self) -> Sequence[tuple[str, int]]:
        return self.hosts if self.moved is None else (self.moved, *self.hosts)

    async def _ask_sentinel(self, host: str, port: int, service: str) -> tuple[str, int]:
        wire = await self._connect(host, port, self.sentinel_user, self.sentinel_password, 0)
        try:
            (found,) = await wire.send(["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service])
        except (ResponseError, RedisConnectionLost) as error:
            raise StoreUnavailable(f"the sentinel {host}:{port}: {error}") from error
        finally:
            await wire.close()
        if not found:
            raise StoreUnavailable(f"the sentinel {host}:{port} knows no master called {service!r}")
        return found[0].decode(), int(found[1])

    async def _master(self, host: str, port: int) -> RedisConnection:
        wire = await self._connect(host, port, self.user, self.password, self.database)
        try:
            try:
                server, replication = await wire.send(["INFO", "server"], ["INFO", "replication"])
            except NoPermissionError as error:
                raise StoreUnusable(f"{wire.where}: {error}; doyen needs INFO") from error
            except (ResponseError, RedisConnectionLost) as error:
                if isinstance(error.__cause__, AuthenticationError):
                    raise _refused(wire.where, error) from error
                raise StoreUnavailable(f"{wire.where}: {error}") from error
            wire.learn({**facts_in(server), **facts_in(replication)})
        except BaseException:
            await wire.close()
            raise
        return wire

    async def _connect(
        self, host: str, port: int, user: str | None, password: str | None, database: int
    ) -> RedisConnection:
        kind = _Plain if self.tls is None else _Secured
        connection = kind(
            host=host,
            port=port,
            db=database,
            username=user,
            password=password,
            socket_timeout=None,
            socket_connect_timeout=self.connect_timeout_s,
            protocol=2,
            **(self.tls or {}),
        )
        where = f"{host}:{port}"
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException as error:
            await connection.end()
            if isinstance(error, AuthenticationError):
                raise _refused(where, error) from error
            if isinstance(error, ResponseError):
                raise StoreUnusable(f"{where}: {error} (database {database})") from error
            if isinstance(error, RedisError | OSError):
                cause = _cause(error)
                if "invalid DB index" in cause or "out of range" in cause:
                    raise StoreUnusable(f"{where} has no database {database}") from error
                if "CERTIFICATE_VERIFY_FAILED" in cause:
                    raise StoreUnusable(f"{where}: {cause}") from error
                raise StoreUnavailable(f"{where}: {cause}") from error
            raise
        return RedisConnection(connection, where, host)


@dataclass(slots=True)
class _Expected:
    answer: asyncio.Future[Any]
    sent_at: float


@dataclass(slots=True, eq=False)
class RedisConnection:
    """One connection. With `hear`, whatever arrives is told there, errors too."""

    connection: _Plain
    where: str
    host: str
    run: str = ""
    """What tells one life of a server from another."""
    incarnation: str = ""
    """Differs if a server may have lost what an earlier one confirmed."""
    hear: Callable[[Any], None] | None = None
    open: bool = True
    heard_at: float = 0.0
    _expected: deque[_Expected] = field(default_factory=deque)
    _reading: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self._reading = asyncio.get_running_loop().create_task(self._read())

    def learn(self, facts: Mapping[str, str]) -> None:
        """Take note of what the server says of itself; refuse one that cannot be used."""
        version = facts.get("redis_version", "0")
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            raise StoreUnusable(f"{self.where} runs Redis {version}; doyen needs 6.0 or later")
        if facts.get("role") != "master":
            master = f"{facts.get('master_host')}:{facts.get('master_port')}"
            raise StoreUnavailable(
                f"{self.where} is a replica of {master}: name all the servers in the URL, or"
                " their sentinels (redis+sentinel://)"
            )
        self.run = facts["run_id"]
        self.incarnation = f"{self.run} {facts.get('master_replid')}"

    async def send(self, *commands: Command) -> list[Any]:
        """Send commands in one piece; their answers. Raises the first that is an error."""
        if not self.open or not self.connection.is_connected:
            raise StoreUnavailable(f"{self.where}: the connection has ended")
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in commands]
        for answer in answers:
            answer.add_done_callback(_looked_at)
            self._expected.append(_Expected(answer, loop.time()))
        try:
            packed = self.connection.pack_commands(commands)
            await self.connection.send_packed_command(packed, check_health=False)
            return [await answer for answer in answers]
        except ConnectionError as error:
            raise RedisConnectionLost(str(error)) from error
        except asyncio.CancelledError:
            if self._silent_s() > _SILENT_S:
                self.drop()
            raise

    async def say(self, command: Command) -> None:
        """Send something whose answer is heard like everything else."""
        if self.open and self.connection.is_connected:
            await self.connection.send_packed_command(
                self.connection.pack_command(*command), check_health=False
            )

    def drop(self) -> None:
        """Have nothing more to do with this connection."""
        self.open = False
        self._reading.cancel()

    async def close(self) -> None:
        self.drop()
        await asyncio.wait({self._reading})

    @property
    def ended(self) -> asyncio.Task[None]:
        """Done when the connection has ended."""
        return self._reading

    def _silent_s(self) -> float:
        if not self._expected:
            return 0.0
        since = max(self._expected[0].sent_at, self.heard_at)
        return asyncio.get_running_loop().time() - since

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        lost = RedisConnectionLost("given up, because no answer came")
        try:
            while True:
                try:
                    answer = await self.connection.read_response(disconnect_on_error=False)
                except ResponseError as error:
                    answer = error
                self.heard_at = loop.time()
                if self.hear is not None:
                    self.hear(answer)
                    continue
                expected = self._expected.popleft().answer
                if expected.done():
                    continue
                if isinstance(answer, Exception):
                    expected.set_exception(answer)
                else:
                    expected.set_result(answer)
        except (RedisError, OSError) as error:
            lost = RedisConnectionLost(str(error))
            lost.__cause__ = error
        finally:
            self.open = False
            for left in self._expected:
                if not left.answer.done():
                    left.answer.set_exception(lost)
            await self.connection.end()


class MasterConnection:
    """A wire to the master, made when it is needed."""

    def __init__(self, address: RedisAddress, prefix: str) -> None:
        self.where = str(address)
        self._address = address
        self._prefix = prefix
        self._wire: RedisConnection | None = None
        self._reaching: asyncio.Task[RedisConnection] | None = None
        self._closed = False

    async def wire(self) -> RedisConnection:
        if self._closed:
            raise StoreUnusable("this store has been closed; open another")
        if self._wire is not None and self._wire.open:
            if self._wire.run == self._address.run:
                return self._wire
            self._wire.drop()
        if self._reaching is None:
            self._reaching = asyncio.get_running_loop().create_task(self._address.reach())
            self._reaching.add_done_callback(self._reached)
        return await shared(self._reaching)

    def _reached(self, reaching: asyncio.Task[RedisConnection]) -> None:
        self._reaching = None
        if reaching.cancelled() or reaching.exception() is not None:
            return
        if self._closed:
            reaching.result().drop()
        else:
            self._wire = reaching.result()

    async def read(self, script: str, *given: str | bytes) -> tuple[Any, RedisConnection]:
        """Carry out a script that changes nothing; its answer, and who gave it."""
        try:
            answers, wire = await self._run(script, given, None)
        except RedisConnectionLost as error:
            raise StoreUnavailable(f"{self.where}: {error}") from error
        return answers[0], wire

    async def write(
        self, script: str, *given: str | bytes, wait: Command | None = None
    ) -> tuple[list[Any], RedisConnection]:
        """Carry out a script, and perhaps wait for replicas; the answers, and who gave them."""
        try:
            return await self._run(script, given, wait)
        except RedisConnectionLost as error:
            raise OutcomeUnknown(
                f"{self.where}: the connection ended with a call under way ({error})"
            ) from error

    async def ask(self, *command: str) -> Any:
        """A command that is no script. Raises `ResponseError` if it is refused."""
        try:
            return (await (await self.wire()).send(command))[0]
        except RedisConnectionLost as error:
            raise StoreUnavailable(f"{self.where}: {error}") from error

    async def _run(
        self, script: str, given: Sequence[str | bytes], wait: Command | None
    ) -> tuple[list[Any], RedisConnection]:
        how: Command = ("EVALSHA", _DIGESTS[script])
        for _ in range(_REDIRECTIONS):
            wire = await self.wire()
            try:
                return await wire.send(*self._commands(how, wire, given, wait)), wire
            except NoScriptError:
                how = ("EVAL", SCRIPTS[script])
            except MovedError as error:  # a kind of AskError, so it comes first
                self._address.moved = _named(error, wire)
                wire.drop()
            except AskError as error:
                return await self._ask(_named(error, wire), script, given, wait)
            except ResponseError as error:
                raise self._meaning(error, wire) from error
        raise StoreUnavailable(f"{self.where} did not take a script, nor say who does")

    def _commands(
        self,
        how: Command,
        wire: RedisConnection,
        given: Sequence[str | bytes],
        wait: Command | None,
    ) -> list[Command]:
        keys = [self._prefix + key for key in KEYS]
        script: Command = (*how, len(keys), *keys, self._prefix, wire.run, *given)
        return [script] if wait is None else [script, wait]

    async def _ask(
        self,
        where: tuple[str, int],
        script: str,
        given: Sequence[str | bytes],
        wait: Command | None,
    ) -> tuple[list[Any], RedisConnection]:
        """Our slot is being moved, and its keys are at another server already, which does not own
        it yet: this one call is for that server, the next is again for the one that sent us."""
        wire = await self._address.visit(*where)
        commands = self._commands(("EVAL", SCRIPTS[script]), wire, given, wait)
        try:
            return (await wire.send(("ASKING",), *commands))[1:], wire
        except ResponseError as error:
            raise self._meaning(error, wire) from error
        finally:
            wire.drop()

    def _meaning(self, error: ResponseError, wire: RedisConnection) -> Exception:
        text = str(error)
        if isinstance(error, ReadOnlyError) or "READONLY" in text:
            wire.drop()
            return StoreUnavailable(f"{wire.where} has become a replica: another is master now")
        if isinstance(error, _PASSING) or any(word in text for word in _PASSING_WORDS):
            return StoreUnavailable(f"{wire.where}: {text}")
        if isinstance(error, NoPermissionError) or "NOPERM" in text or "can't" in text:
            return StoreUnusable(
                f"{wire.where}: {text}; doyen's user needs"
                f" ~{self._prefix}* &{self._prefix}* +@all -@dangerous +info"
            )
        return StoreUnusable(f"{wire.where}: {text}")

    async def close(self) -> None:
        """End everything. Idempotent."""
        self._closed = True
        if self._reaching is not None:
            self._reaching.cancel()
            await asyncio.wait({self._reaching})
        if self._wire is not None:
            await self._wire.close()


def _named(error: AskError, wire: RedisConnection) -> tuple[str, int]:
    """The server that a redirection names; without a host it is the one that sent us."""
    return error.host or wire.host, error.port


def facts_in(info: bytes) -> dict[str, str]:
    """The answer of INFO as a table."""
    lines = info.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _cause(error: BaseException) -> str:
    """What the system said, if it was the system: redis-py's own words vary."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, OSError):
        at = at.__cause__ or at.__context__
    return str(at or error)


def _refused(where: str, error: Exception) -> StoreUnusable:
    return StoreUnusable(
        f"{where} refuses us ({error}): correct redis://user:password@... in the URL"
    )


def _looked_at(answer: asyncio.Future[Any]) -> None:
    """Nobody may be left to look at it; that is no reason to complain."""
    if not answer.cancelled():
        answer.exception()
