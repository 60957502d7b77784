"""One connection to a database at a time: made when it is needed, dropped when it is in doubt.

Calls on an `SqlConnection` take turns. A call that is cancelled before its turn is never sent. A
call that is cancelled later drops the connection: the server carries it out as a whole or not at
all, and the next call gets a new connection instead of waiting for a response that may never come.
Connecting goes on if the caller that needed it first gives up, so that hosts which do not respond
are passed over in the end.

All connections of one store use one server, their `Primary`. Every message ends with a query for
the identity of the server. If it differs from before, there was a failover: all connections leave
the old server, and a response that arrives on a dropped connection does not count. A leader thus
never renews its lease on one server while its record is taken over on another.

What is particular to an engine is in its `SqlEngine` and its `ServerConnection`. Imports the kit of
the stores, the error tree and the standard library.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from traceback import clear_frames
from typing import Any, ClassVar
from urllib.parse import unquote

from doyen._waiting import retrieve
from doyen.errors import OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.stores.kit import url as options
from doyen.stores.kit.failover import ConnectionLost
from doyen.stores.kit.lifecycle import CLOSED
from doyen.stores.kit.url import Host
from doyen.stores.port import StoreURL

__all__ = [
    "Given",
    "Primary",
    "Row",
    "ServerConnection",
    "SqlConnection",
    "SqlEngine",
    "TransactionUndone",
    "WrongServer",
    "release_frames",
    "text_of",
]

Row = Sequence[Any]
Given = Mapping[str, object]

_ATTEMPTS = 20
_PAUSE_S = 0.005
_CLOSE_S = 1.0


class TransactionUndone(StoreUnavailable):
    """The database has rolled back the transaction because of another one. It can be retried."""


class WrongServer(StoreUnavailable):
    """Nothing was written, because this server is not the primary. Connect again."""


class ServerConnection(ABC):
    """One connection of an engine's client library."""

    incarnation = ""
    """The incarnation of the server."""
    used_at = 0.0
    """When the last message was sent, by the loop's time."""

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether the connection is still open, as far as is known."""

    def begin(self) -> None:
        """Called when the connection is in use. Raises errors that `SqlEngine.translate` knows."""
        return

    @abstractmethod
    async def execute(self, text: str, given: Given) -> list[list[Row]]:
        """Send one message, and return the rows of each query in it."""

    @abstractmethod
    def hang_up(self) -> None:
        """End the connection at once. A call in flight on it fails, unless its response has
        arrived."""

    async def close(self) -> None:
        """End the connection in an orderly way, if that can be done at once."""
        self.hang_up()


class SqlEngine(ABC):
    """What is particular to an engine: `scheme://user:password@h1:p1,h2:p2/database`."""

    name: ClassVar[str]

    def __init__(self, url: StoreURL, default_port: int, least_timeout_s: float = 1) -> None:
        self.hosts = options.hosts(url, default_port, empty="")
        self.user, self.password = options.login(url)
        self.database = unquote(url.parts.path.strip("/"))
        self.where = ", ".join(map(_shown, self.hosts))
        self.timeout_s = options.number(url, "connect_timeout_s", 3, least_timeout_s, 60)

    @abstractmethod
    async def connect(self, host: Host) -> ServerConnection:
        """A new connection. Raises a `StoreError`, or an error that `translate` knows."""

    @abstractmethod
    def transaction(self, script: str, *, early: bool) -> str:
        """A message that runs these statements in one transaction, which is durable when the
        response arrives.

        With `early`, others may see it before it is durable, if the engine commits in order:
        whatever builds on it is then durable only if it is. Other transactions then do not wait for
        the disk. This must not be used for records: a client that finds its own record must be able
        to rely on it.
        """

    @abstractmethod
    def translate(self, error: Exception) -> Exception:
        """Map an error: a `StoreError` if nothing was done, or `ConnectionLost`."""

    def greeting(self) -> str:
        """What is sent first on a new connection."""
        return ""


def _shown(host: Host) -> str:
    return str(host if host.name else host._replace(name="localhost"))


def release_frames(error: BaseException) -> None:
    """Release what a failed attempt to connect still refers to. Client libraries leave cycles of
    references, which last until the next garbage collection: psycopg a socket with each attempt
    that times out or is cancelled, asyncmy 80 kB of buffers with each that fails."""
    chain: BaseException | None = error
    while chain is not None:
        clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


class Primary:
    """The server that all connections of one store use."""

    def __init__(self, identity_query: str) -> None:
        self.identity_query = identity_query
        """A query of four columns: the incarnation of the server; an id that it has in common with
        the primaries before and after it; its number among these; whether it can be written to."""
        self.incarnation = ""
        self.host: Host | None = None
        self.connections: list[SqlConnection] = []
        """They leave their server when another one has become the primary."""
        self._lineage, self._order = "", 0

    def accept(self, identity: Row) -> str:
        """Take the server with this identity for the primary, and return its incarnation. Raises
        `WrongServer` if it is a replica, or was the primary before a failover."""
        incarnation, lineage = text_of(identity[0]), text_of(identity[1])
        order, writable = int(identity[2]), bool(identity[3])
        if not writable:
            raise WrongServer("it is read-only: a replica?")
        if lineage == self._lineage and order < self._order:
            raise WrongServer("it was the primary before a failover, and is not any more")
        self._lineage, self._order = lineage, order
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            for connection in self.connections:
                connection.leave_others(incarnation)
        return incarnation


class SqlConnection:
    """A connection to the primary, replaced when it ends."""

    def __init__(self, engine: SqlEngine, primary: Primary) -> None:
        self.engine = engine
        self.where = engine.where
        self.primary = primary
        primary.connections.append(self)
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._present: ServerConnection | None = None
        self._connecting: asyncio.Task[ServerConnection] | None = None
        self._executions: set[asyncio.Task[list[list[Row]]]] = set()
        self._closed = False

    @property
    def present(self) -> ServerConnection | None:
        """The connection, if there is one that is not known to have ended."""
        return self._present if self._present is not None and self._present.usable else None

    async def read(self, query: str, given: Given) -> list[Row]:
        """Run a query that changes nothing."""
        try:
            return _last(await self._send(query, given))
        except ConnectionLost as error:
            raise StoreUnavailable(f"{self.where}: {error}") from error

    async def write(
        self, script: str, given: Given, *, early: bool = False, then: str = ""
    ) -> list[Row]:
        """Run statements in one transaction, and after it statements without a result. Returns the
        rows of the last query in the transaction."""
        return _last(await self.write_all(script, given, early=early, then=then))

    async def write_all(
        self, script: str, given: Given, *, early: bool = False, then: str = ""
    ) -> list[list[Row]]:
        """The same; returns the rows of each query in the transaction."""
        message = self.engine.transaction(script, early=early) + (then and f"; {then}")
        for _ in range(_ATTEMPTS):
            try:
                return await self._send(message, given)
            except TransactionUndone:
                await asyncio.sleep(random.uniform(0, _PAUSE_S))
            except ConnectionLost as error:
                raise OutcomeUnknown(
                    f"{self.where}: the connection ended during a transaction ({error})"
                ) from error
        raise StoreUnavailable(
            f"{self.where} rolled back a transaction {_ATTEMPTS} times because of others"
        )

    async def close(self) -> None:
        """End everything. Idempotent."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        present, self._present = self._present, None
        if present is not None:
            await present.close()
        if self._executions:  # on connections that were hung up
            await asyncio.wait(self._executions, timeout=_CLOSE_S)

    def leave_others(self, incarnation: str) -> None:
        """Drop the connection if it leads to another server than this."""
        if self._present is not None and self._present.incarnation != incarnation:
            self._drop(self._present)

    async def connected(self) -> ServerConnection:
        """The connection; a new one if there is none."""
        while not self._closed:
            if (present := self.present) is not None:
                return present
            connecting = self._connect_in_background()
            await asyncio.wait({connecting})
            if not connecting.cancelled():
                connecting.result()
        raise StoreUnusable(CLOSED)

    def reconnect(self) -> None:
        """Begin to connect if there is no connection. One that is not used would not notice that
        another server has become the primary."""
        if not self._closed and self.present is None:
            self._connect_in_background()

    def _drop(self, connection: ServerConnection) -> None:
        if self._present is connection:
            self._present = None
        connection.hang_up()

    def _connect_in_background(self) -> asyncio.Task[ServerConnection]:
        if self._present is not None:
            self._drop(self._present)
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
            self._connecting.add_done_callback(self._on_connected)
        return self._connecting

    async def _connect(self) -> ServerConnection:
        """A connection to the first host that is the primary. The last primary is tried first."""
        engine, primary, timeout_s = self.engine, self.primary, self.engine.timeout_s
        causes = []
        for host in sorted(engine.hosts, key=lambda host: host != primary.host):
            try:
                connection = await engine.connect(host)
                try:
                    async with asyncio.timeout(timeout_s):
                        *_, (identity,) = await self._execute(
                            connection, f"{engine.greeting()}{primary.identity_query}", {}
                        )
                    connection.incarnation = primary.accept(identity)
                except BaseException:
                    connection.hang_up()
                    raise
                primary.host = host
                return connection
            except TimeoutError:
                causes.append(f"{_shown(host)} did not answer within {timeout_s:g} s")
            except Exception as error:
                meaning = engine.translate(error)
                if not isinstance(meaning, ConnectionLost | StoreUnavailable):
                    raise meaning from error
                causes.append(f"{_shown(host)}: {meaning}")
        raise StoreUnavailable(f"no connection to {engine.name}: {'; '.join(causes)}")

    def _on_connected(self, connecting: asyncio.Task[ServerConnection]) -> None:
        self._connecting = None
        if connecting.cancelled() or connecting.exception() is not None:
            return
        connection = connecting.result()
        if self._closed or connection.incarnation != self.primary.incarnation:
            connection.hang_up()
            return
        self._present = connection
        try:
            connection.begin()
        except Exception as error:
            if not isinstance(self.engine.translate(error), ConnectionLost):
                raise
            self._drop(connection)

    async def _send(self, text: str, given: Given) -> list[list[Row]]:
        async with self._turn:
            connection = await self.connected()
            try:
                *results, (identity,) = await self._execute(
                    connection, f"{text}; {self.primary.identity_query}", given
                )
            except Exception as error:
                meaning = self.engine.translate(error)
                if isinstance(meaning, ConnectionLost | WrongServer):
                    self._drop(connection)
                raise meaning from error
            self._require_primary(connection, identity)
            return results

    async def _execute(
        self, connection: ServerConnection, text: str, given: Given
    ) -> list[list[Row]]:
        """Send a message. If the caller is cancelled before the response, drop the connection."""
        connection.used_at = self._loop.time()
        execution = self._loop.create_task(connection.execute(text, given))
        self._executions.add(execution)
        execution.add_done_callback(self._executions.discard)
        try:
            await asyncio.wait({execution})  # asyncio.shield logs later failures, from 3.14 on
        except asyncio.CancelledError:
            self._drop(connection)
            execution.add_done_callback(retrieve)
            raise
        return execution.result()

    def _require_primary(self, connection: ServerConnection, identity: Row) -> None:
        """Accept a response only if it comes from the server that all connections use now."""
        if self._present is not connection:
            raise ConnectionLost("the response came after another server had become the primary")
        try:
            if self.primary.accept(identity) == connection.incarnation:
                return
        except WrongServer as error:
            self._drop(connection)
            raise ConnectionLost(str(error)) from error
        self._drop(connection)
        raise ConnectionLost("another server than before has responded")


def _last(results: Sequence[list[Row]]) -> list[Row]:
    return results[-1] if results else []


def text_of(value: Any) -> str:
    """A text column: some drivers return bytes."""
    return value.decode() if isinstance(value, bytes | bytearray) else str(value)
