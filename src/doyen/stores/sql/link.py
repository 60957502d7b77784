"""One connection to a database: made when it is needed, dropped when it is in doubt.

Calls on a link take turns. A call that is cancelled before its turn is never sent. One that is
cancelled later takes the connection with it: the server carries it out whole or not at all, and
the next call gets a new connection instead of waiting for an answer that may never come. Making a
connection outlasts the patience of whoever needs it first, so that a host that does not answer
is passed over in the end.

What an error means is the engine's knowledge. Imports the error tree and the standard library.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

from doyen.errors import ConfigError, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.store import StoreURL

__all__ = ["Address", "ConnectionLost", "Given", "Link", "Row", "TryAgain", "WrongServer"]

C = TypeVar("C")

Row = Sequence[Any]
Given = Mapping[str, object]

_TRIES = 20
_PAUSE_S = 0.005


class TryAgain(StoreUnavailable):
    """The database has undone the transaction in favour of another: it is to be sent again."""


class WrongServer(StoreUnavailable):
    """Nothing was done, because this server is not the one that can; another connection is due."""


class ConnectionLost(Exception):
    """The connection has ended, or is of no more use, with a call under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the servers are, and who asks."""

    hosts: tuple[tuple[str, int | None], ...]
    user: str | None
    password: str | None
    database: str

    @classmethod
    def of(cls, url: StoreURL) -> Address:
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


class Link(ABC, Generic[C]):
    """A connection, its turns, and its end."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._connection: C | None = None
        self._connecting: asyncio.Task[C] | None = None
        self._closed = False

    @abstractmethod
    async def connect(self) -> C:
        """A new connection. Raises a `StoreError`."""

    @abstractmethod
    async def execute(self, connection: C, text: str, given: Given) -> list[Row]:
        """Send one message; the rows of the last query in it."""

    @abstractmethod
    def transaction(self, script: str, *, early: bool) -> str:
        """A message that carries out these statements in one transaction, durably when answered.

        With `early`, others may see it before it is durable, if the engine can do that in order:
        whatever builds on it is then durable only if it is. Nobody waits for the disk in the turn
        of another then. Not for records: who finds its own there must be able to count on it.
        """

    @abstractmethod
    def translate(self, error: Exception) -> Exception:
        """What an error means: a `StoreError` if nothing was done, or `ConnectionLost`."""

    @abstractmethod
    def hang_up(self, connection: C) -> None:
        """End a connection at once. A call under way on it fails, or has its answer already; this
        is then called again when it has ended."""

    def usable(self, connection: C) -> bool:
        """Whether nothing is known to be wrong with a connection that has been idle."""
        return True

    async def read(self, query: str, given: Given) -> list[Row]:
        """Ask something."""
        try:
            return await self._send(query, given)
        except ConnectionLost as error:
            raise StoreUnavailable(f"{self.where}: {error}") from error

    async def write(self, script: str, given: Given, *, early: bool = False) -> list[Row]:
        """Have statements carried out in one transaction."""
        message = self.transaction(script, early=early)
        for _ in range(_TRIES):
            try:
                return await self._send(message, given)
            except TryAgain:
                await asyncio.sleep(random.uniform(0, _PAUSE_S))
            except ConnectionLost as error:
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

    async def farewell(self, connection: C) -> None:
        """End a connection in good order, if that can be done at once."""
        self.hang_up(connection)

    def drop(self, connection: C) -> None:
        """Have nothing more to do with a connection."""
        if self._connection is connection:
            self._connection = None
        self.hang_up(connection)

    async def connected(self) -> C:
        """The connection; a new one if there is none."""
        self._require_open()
        if self._connection is not None:
            if self.usable(self._connection):
                return self._connection
            self.drop(self._connection)
        if self._connecting is None:
            self._connecting = self._loop.create_task(self.connect())
            self._connecting.add_done_callback(self._arrived)
        connecting = self._connecting
        await asyncio.wait({connecting})
        if connecting.cancelled():
            self._require_open()
        return connecting.result()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnusable("this store has been closed; open another")

    def _arrived(self, connecting: asyncio.Task[C]) -> None:
        self._connecting = None
        if connecting.cancelled() or connecting.exception() is not None:
            return
        if self._closed:
            self.hang_up(connecting.result())
        else:
            self._connection = connecting.result()

    async def _send(self, text: str, given: Given) -> list[Row]:
        async with self._turn:
            connection = await self.connected()
            execution = self._loop.create_task(self.execute(connection, text, given))
            try:
                return await asyncio.shield(execution)
            except asyncio.CancelledError:
                self.drop(connection)
                execution.add_done_callback(lambda done: self._left_alone(done, connection))
                raise
            except Exception as error:
                meaning = self.translate(error)
                if isinstance(meaning, ConnectionLost | WrongServer):
                    self.drop(connection)
                raise meaning from error

    def _left_alone(self, execution: asyncio.Task[list[Row]], connection: C) -> None:
        """A call that nobody waits for has ended, perhaps well."""
        self.hang_up(connection)
        if not execution.cancelled():
            execution.exception()
