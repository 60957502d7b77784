"""Where a service keeps the highest token that it has seen of each resource.

`see` remembers a token if it is the highest, and returns the highest: one atomic step, durable when
it returns. Implementations keep it in memory, in files and in a table; a service can bring its own.
May import errors only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from doyen.errors import StaleToken
from doyen.fencing.files import GuardedFile
from doyen.fencing.sql import SQLGuard

__all__ = ["FileTokens", "MemoryTokens", "SQLTokens", "SeenTokens"]


class SeenTokens(Protocol):
    """The highest token seen of each resource. `see` may be a coroutine function; otherwise it is
    called on any thread, by several at a time."""

    def see(self, resource: str, token: int) -> int | Awaitable[int]:
        """Remember the token if it is the highest, and return the highest."""
        ...


class MemoryTokens:
    """Kept in memory, for what is itself kept in the memory of one process.

    >>> tokens = MemoryTokens()
    >>> [tokens.see("cache", token) for token in (7, 6, 8)]
    [7, 7, 8]

    After a restart it knows no token, so the first request passes with whatever token it has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._highest: dict[str, int] = {}

    def see(self, resource: str, token: int) -> int:
        """Remember the token if it is the highest, and return the highest."""
        with self._lock:
            highest = max(token, self._highest.get(resource, token))
            self._highest[resource] = highest
            return highest


class FileTokens:
    """Kept in a directory on a local disk, for the processes of one machine.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     tokens = FileTokens(folder)
    ...     [tokens.see("orders", token) for token in (7, 6, 8)]
    [7, 7, 8]
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(os.path.abspath(directory))

    def see(self, resource: str, token: int) -> int:
        """Remember the token if it is the highest, and return the highest."""
        file = GuardedFile(self._directory / f"{quote(resource, safe='')}.token")
        try:
            durable = int(file.read())  # visible only once the token in it is durable
        except FileNotFoundError:
            self._directory.mkdir(parents=True, exist_ok=True)
            durable = -1
        if durable < token:
            try:
                file.write(token, b"%d" % token)
            except StaleToken:
                pass
        return max(token, durable, file.token or 0)


class SQLTokens:
    """Kept in the table of a `SQLGuard`, for services of several machines.

    >>> import sqlite3
    >>> from contextlib import closing
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     tokens = SQLTokens(lambda: closing(sqlite3.connect(f"{folder}/app.db")))
    ...     tokens.create()
    ...     [tokens.see("orders", token) for token in (7, 6, 8)]
    [7, 7, 8]

    `connect` returns a context manager that gives a blocking connection, such as
    `psycopg_pool.ConnectionPool.connection`.
    """

    def __init__(
        self, connect: Callable[[], AbstractContextManager[Any]], table: str = "doyen_fence"
    ) -> None:
        self._connect = connect
        self._guard = SQLGuard(table)

    def create(self) -> None:
        """Create the table if it does not exist."""
        with self._connect() as connection:
            self._guard.create(connection)
            connection.commit()

    def see(self, resource: str, token: int) -> int:
        """Remember the token if it is the highest, and return the highest."""
        with self._connect() as connection:
            highest = self._guard.see(connection, resource, token)
            connection.commit()
            return highest
