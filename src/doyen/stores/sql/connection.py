"""One connection to a database: made when it is needed, dropped when it is in doubt.

Calls on a link take turns. A call that is cancelled before its turn is never sent. One that is
cancelled later takes the connection with it: the server carries it out whole or not at all, and
the next call gets a new connection instead of waiting for an answer that may never come. Making a
connection outlasts the patience of whoever needs it first, so that a host that does not answer
is passed over in the end.

The links of one store use one server, their `Primary`. Every message ends with a query of who
answers it. If that is another server than before, there was a failover: all links drop their
connections to the old one, and an answer that comes on a dropped connection does not count. A
leader thus never renews its lease on one server while its record is taken over on another.

What an error means is the engine's knowledge. Imports the error tree and the standard library.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar
from urllib.parse import unquote

from doyen.errors import ConfigError, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.stores.port import StoreURL

__all__ = [
    "Given",
    "Primary",
    "Row",
    "SqlAddress",
    "SqlConnection",
    "SqlConnectionLost",
    "TryAgain",
    "WrongServer",
]

C = TypeVar("C")

Row = Sequence[Any]
Given = Mapping[str, object]
Host = tuple[str, int | None]

_TRIES = 20
_PAUSE_S = 0.005
_PATIENCE_S = 1.0


class TryAgain(StoreUnavailable):
    """The database has undone the transaction in favour of another: it is to be sent again."""


class WrongServer(StoreUnavailable):
    """Nothing was done, because this server is not the one that can; another connection is due."""


class SqlConnectionLost(Exception):
    """The connection has ended, or is of no more use, with a call under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlAddress:
    """Where the servers are, and who asks."""

    hosts: tuple[Host, ...]
    user: str | None
    password: str | None
    database: str

    @classmethod
    def of(cls, url: StoreURL) -> SqlAddress:
        """Take apart `scheme://user:password@h1:p1,h2:p2/database`."""
        who, _, where = url.parts.netloc.rpartition("@")
        user, _, password = who.partition(":")
        hosts = []
        for part in where.split(","):
            name, separator, port = part.rpartition(":")
            if not separator or port.endswith("]"):
                name, port = part, ""
            if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ConfigError(f"a port is a number from 1 to 65535, not {port!r}")
            hosts.append((unquote(name.strip("[]")), int(port) if port else None))
        return cls(
            hosts=tuple(hosts),
            user=unquote(user) or None,
            password=unquote(password) or None,
            database=unquote(url.parts.path.strip("/")),
        )

    def text(self, default_port: int) -> str:
        """For people, without the password."""
        return ", ".join(
            f"{host or 'localhost'}:{port or default_port}" for host, port in self.hosts
        )


class Primary:
    """The server that all links of one store use, and how to ask a server who it is."""

    def __init__(self, who: str) -> None:
        self.who = who
        """A query of four columns: the incarnation of the server; what it has in common with the
        primaries before and after it; which of these it is; whether it can be written to."""
        self.incarnation = ""
        self._lineage, self._order = "", 0
        self._host: tuple[str, int | None] | None = None
        self._links: list[SqlConnection[Any]] = []

    def join(self, link: SqlConnection[Any]) -> None:
        """Have a link leave its server when another has become the primary."""
        self._links.append(link)

    def first(self, hosts: Sequence[Host]) -> Sequence[Host]:
        """The hosts in the order in which to try them: first where the primary was last."""
        return sorted(hosts, key=lambda host: host != self._host)

    def met(self, answer: Row, host: Host | None = None) -> str:
        """A server has said who it is; its incarnation. Raises `WrongServer` if it was deposed."""
        incarnation, lineage = _text(answer[0]), _text(answer[1])
        order, writable = int(answer[2]), bool(answer[3])
        if not writable:
            raise WrongServer("it is read-only: a replica?")
        if lineage == self._lineage and order < self._order:
            raise WrongServer("it was the primary before a failover, and is not any more")
        self._host = host or self._host
        self._lineage, self._order = lineage, order
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            for link in self._links:
                link.leave_others(incarnation)
        return incarnation


class SqlConnection(ABC, Generic[C]):
    """A connection, its turns, and its end."""

    def __init__(
        self, engine: str, address: SqlAddress, timeout_s: float, primary: Primary
    ) -> None:
        self.where = address.text(self.port)
        self._engine = engine
        self._hosts = address.hosts
        self._timeout_s = timeout_s
        self._primary = primary
        primary.join(self)
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._connection: C | None = None
        self._at = ""
        """The incarnation of the server at the other end."""
        self._connecting: asyncio.Task[tuple[C, str]] | None = None
        self._executions: set[asyncio.Task[list[list[Row]]]] = set()
        self._closed = False

    port: ClassVar[int]
    """Where servers listen if the URL does not say."""

    @abstractmethod
    async def reach(self, host: str, port: int) -> C:
        """A new connection. Raises a `StoreError`, or what `translate` understands."""

    @abstractmethod
    async def execute(self, connection: C, text: str, given: Given) -> list[list[Row]]:
        """Send one message; the rows of each query in it."""

    @abstractmethod
    def transaction(self, script: str, *, early: bool) -> str:
        """A message that carries out these statements in one transaction, durably when answered.

        With `early`, others may see it before it is durable, if the engine can do that in order:
        whatever builds on it is then durable only if it is. Nobody waits for the disk in the turn
        of another then. Not for records: who finds its own there must be able to count on it.
        """

    @abstractmethod
    def translate(self, error: Exception) -> Exception:
        """What an error means: a `StoreError` if nothing was done, or `SqlConnectionLost`."""

    @abstractmethod
    def hang_up(self, connection: C) -> None:
        """End a connection at once. A call under way on it fails, or has its answer already; this
        is then called again when it has ended."""

    def usable(self, connection: C) -> bool:
        """Whether nothing is known to be wrong with a connection that has been idle."""
        return True

    def greeting(self) -> str:
        """What is sent first on a new connection."""
        return ""

    def arrived(self, connection: C) -> None:
        """A new connection is in use from now on. Raises what `translate` understands."""

    async def read(self, query: str, given: Given) -> list[Row]:
        """Ask something."""
        try:
            return await self._send(query, given)
        except SqlConnectionLost as error:
            raise StoreUnavailable(f"{self.where}: {error}") from error

    async def write(self, script: str, given: Given, *, early: bool = False) -> list[Row]:
        """Have statements carried out in one transaction."""
        message = self.transaction(script, early=early)
        for _ in range(_TRIES):
            try:
                return await self._send(message, given)
            except TryAgain:
                await asyncio.sleep(random.uniform(0, _PAUSE_S))
            except SqlConnectionLost as error:
                raise OutcomeUnknown(
                    f"{self.where}: the connection ended with a transaction under way ({error})"
                ) from error
        raise StoreUnavailable(
            f"{self.where} undid a transaction {_TRIES} times in favour of others"
        )

    async def close(self) -> None:
        """End everything. Idempotent."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        connection, self._connection = self._connection, None
        if connection is not None:
            await self.farewell(connection)
        if self._executions:  # their connections were hung up, and are released as they end
            await asyncio.wait(self._executions, timeout=_PATIENCE_S)

    async def farewell(self, connection: C) -> None:
        """End a connection in good order, if that can be done at once."""
        self.hang_up(connection)

    def drop(self, connection: C) -> None:
        """Have nothing more to do with a connection."""
        if self._connection is connection:
            self._connection = None
        self.hang_up(connection)

    def leave_others(self, incarnation: str) -> None:
        """Drop the connection if it leads to another server than this."""
        if self._connection is not None and self._at != incarnation:
            self.drop(self._connection)

    async def connected(self) -> C:
        """The connection; a new one if there is none."""
        while True:
            self._require_open()
            if self._connection is not None:
                if self.usable(self._connection):
                    return self._connection
                self.drop(self._connection)
            connecting = self._begin_to_connect()
            await asyncio.wait({connecting})
            if not connecting.cancelled():
                connecting.result()

    def reconnect(self) -> None:
        """Have a connection made if there is none, without waiting for it: a link that is not used
        would not notice that another server has become the primary."""
        if not self._closed and (self._connection is None or not self.usable(self._connection)):
            self._begin_to_connect()

    def _begin_to_connect(self) -> asyncio.Task[tuple[C, str]]:
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
            self._connecting.add_done_callback(self._arrived)
        return self._connecting

    async def _connect(self) -> tuple[C, str]:
        """A connection to the first host that is the primary, and its incarnation."""
        causes = []
        for host, port in self._primary.first(self._hosts):
            where = f"{host or 'localhost'}:{port or self.port}"
            try:
                connection = await self.reach(host, port or self.port)
                try:
                    async with asyncio.timeout(self._timeout_s):
                        *_, (who,) = await self._carry_out(
                            connection, f"{self.greeting()}{self._primary.who}", {}
                        )
                    return connection, self._primary.met(who, (host, port))
                except BaseException:
                    self.hang_up(connection)
                    raise
            except TimeoutError:
                causes.append(f"{where} did not answer within {self._timeout_s:g} s")
            except Exception as error:
                meaning = self.translate(error)
                if not isinstance(meaning, SqlConnectionLost | StoreUnavailable):
                    raise meaning from error
                causes.append(f"{where}: {meaning}")
        raise StoreUnavailable(f"no connection to {self._engine}: {'; '.join(causes)}")

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnusable("this store has been closed; open another")

    def _arrived(self, connecting: asyncio.Task[tuple[C, str]]) -> None:
        self._connecting = None
        if connecting.cancelled() or connecting.exception() is not None:
            return
        connection, at = connecting.result()
        if self._closed or at != self._primary.incarnation:
            self.hang_up(connection)
            return
        self._connection, self._at = connection, at
        try:
            self.arrived(connection)
        except Exception as error:
            if not isinstance(self.translate(error), SqlConnectionLost):
                raise
            self.drop(connection)

    async def _send(self, text: str, given: Given) -> list[Row]:
        async with self._turn:
            connection = await self.connected()
            try:
                *answers, (who,) = await self._carry_out(
                    connection, f"{text}; {self._primary.who}", given
                )
            except Exception as error:
                meaning = self.translate(error)
                if isinstance(meaning, SqlConnectionLost | WrongServer):
                    self.drop(connection)
                raise meaning from error
            self._require_primary(connection, who)
            return answers[-1] if answers else []

    async def _carry_out(self, connection: C, text: str, given: Given) -> list[list[Row]]:
        """Send a message; if the caller is cancelled meanwhile, drop the connection."""
        execution = self._loop.create_task(self.execute(connection, text, given))
        self._executions.add(execution)
        execution.add_done_callback(self._executions.discard)
        try:
            await asyncio.wait({execution})  # a shield reports later failures, from 3.14 on
        except asyncio.CancelledError:
            self.drop(connection)
            execution.add_done_callback(lambda done: self._left_alone(done, connection))
            raise
        return execution.result()

    def _require_primary(self, connection: C, who: Row) -> None:
        """An answer counts if it comes from the server that all links use now."""
        if connection is not self._connection:
            raise SqlConnectionLost("the answer came when another server had become the primary")
        try:
            incarnation = self._primary.met(who)
        except WrongServer as error:
            self.drop(connection)
            raise SqlConnectionLost(str(error)) from error
        if incarnation != self._at:
            self.drop(connection)
            raise SqlConnectionLost("another server than before has answered")

    def _left_alone(self, execution: asyncio.Task[list[list[Row]]], connection: C) -> None:
        """A call that nobody waits for has ended, perhaps well."""
        self.hang_up(connection)
        if not execution.cancelled():
            execution.exception()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes | bytearray) else str(value)
