"""Tables of SQL databases: the token is checked in the caller's own transaction, so that the check
and the writes commit together or not at all. May import errors only."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from doyen.errors import ConfigError
from doyen.fencing.tokens import HasToken, stale, token_of

__all__ = ["SQLGuard"]


class SQLGuard:
    """A table of the highest tokens seen, checked in the same transaction as the guarded writes.

    >>> guard = SQLGuard()
    >>> connection = sqlite3.connect(":memory:")
    >>> guard.create(connection)
    >>> with connection:
    ...     guard.check(connection, "billing", 7)
    ...     _ = connection.execute("CREATE TABLE invoices (number INTEGER)")
    >>> with connection:
    ...     guard.check(connection, "billing", 6)
    Traceback (most recent call last):
    ...
    doyen.errors.StaleToken: 'billing' refuses token 6, because it has seen the later token 7

    Guarantee: of two transactions that both pass `check` and commit, the one with the higher token
    commits last. The row is locked from the check to the commit. So check at the beginning of the
    transaction, keep it short, and roll it back on `StaleToken`.

    Works with connections of sqlite3, of psycopg and psycopg2 (PostgreSQL), and of PyMySQL,
    mysqlclient and mysql.connector (MySQL, MariaDB); `create_async` and `check_async` with those of
    psycopg, asyncmy and aiomysql. In SQLite all writers wait for each other, so a process that is
    paused inside its transaction blocks the others until it continues or dies; in the other
    databases only writers of the same resource wait.
    """

    def __init__(self, table: str = "doyen_fence") -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", table, re.ASCII):
            raise ConfigError(
                f"a table name may have letters, digits and underscores only; got {table!r}"
            )
        self._table = table

    def create(self, connection: Any) -> None:
        """Create the table if it does not exist. Takes effect on commit; in MySQL at once."""
        _drive(connection, self._creation(_engine_of(connection, asynchronous=False)))

    def check(self, connection: Any, resource: str, token: int | HasToken) -> None:
        """Raise `StaleToken` if `resource` has seen a later token; else remember this one.

        Raises `ConfigError` outside a transaction, where the check would protect nothing.
        """
        number = token_of(token)
        _refuse_if_stale(resource, number, self.see(connection, resource, number))

    def see(self, connection: Any, resource: str, token: int | HasToken) -> int:
        """Remember the token if `resource` has seen none that is later, and return the latest."""
        engine = _engine_of(connection, asynchronous=False)
        return _drive(connection, self._seeing(engine, connection, resource, token_of(token)))

    async def create_async(self, connection: Any) -> None:
        """Like `create`, for an asynchronous connection."""
        await _drive_async(connection, self._creation(_engine_of(connection, asynchronous=True)))

    async def check_async(self, connection: Any, resource: str, token: int | HasToken) -> None:
        """Like `check`, for an asynchronous connection."""
        number = token_of(token)
        engine = _engine_of(connection, asynchronous=True)
        steps = self._seeing(engine, connection, resource, number)
        _refuse_if_stale(resource, number, await _drive_async(connection, steps))

    def _creation(self, engine: _Engine) -> _Steps[None]:
        yield (
            f"CREATE TABLE IF NOT EXISTS {self._table}"
            f" (resource {engine.text} PRIMARY KEY NOT NULL, token BIGINT NOT NULL)"
            f"{engine.table_options}",
            (),
        )

    def _seeing(self, engine: _Engine, connection: Any, resource: str, number: int) -> _Steps[int]:
        mark = engine.mark
        yield (
            f"INSERT INTO {self._table} (resource, token) VALUES ({mark}, {mark})"
            f" {engine.on_conflict} token = {engine.greatest}({self._table}.token, {mark})",
            (resource, number, number),
        )
        # Checked after the statement, because with many clients it begins the transaction.
        if engine.transaction_query:
            is_open = yield (engine.transaction_query, ())
        else:
            is_open = _in_transaction(connection)
        if not is_open:
            raise ConfigError(
                "the token was checked outside a transaction, which protects nothing: this"
                f" connection is in autocommit mode, so execute {engine.begin} before the check,"
                " and COMMIT after the writes"
            )
        seen: int = yield (
            f"SELECT token FROM {self._table} WHERE resource = {mark}{engine.locking}",
            (resource,),
        )
        return seen


def _refuse_if_stale(resource: str, number: int, seen: int) -> None:
    if seen > number:
        raise stale(resource, number, seen)


_T = TypeVar("_T")
_Steps = Generator[tuple[str, tuple[object, ...]], Any, _T]
"""Yields statements to execute, and is sent the single value that each returns, if any."""


class _Engine(NamedTuple):
    """The SQL dialect of a database."""

    mark: str = "%s"
    text: str = "VARCHAR(200)"
    table_options: str = ""
    on_conflict: str = "ON CONFLICT (resource) DO UPDATE SET"
    greatest: str = "GREATEST"
    locking: str = ""
    begin: str = "BEGIN"
    transaction_query: str = ""


_SQLITE = _Engine(mark="?", greatest="MAX", begin="BEGIN IMMEDIATE")
_POSTGRESQL = _Engine(transaction_query="SELECT txid_current_if_assigned() IS NOT NULL")
_MYSQL = _Engine(
    text="VARBINARY(800)",  # text would be compared case-insensitively
    table_options=" ENGINE = InnoDB",
    on_conflict="ON DUPLICATE KEY UPDATE",
    locking=" FOR UPDATE",  # the current value, not that of the transaction's snapshot
)
_ENGINES = {
    "sqlite3": _SQLITE,
    "psycopg": _POSTGRESQL,
    "psycopg2": _POSTGRESQL,
    "pymysql": _MYSQL,
    "MySQLdb": _MYSQL,
    "mysql": _MYSQL,
    "asyncmy": _MYSQL,
    "aiomysql": _MYSQL,
}
_ASYNCHRONOUS = {"psycopg.AsyncConnection", "asyncmy.Connection", "aiomysql.Connection"}


def _engine_of(connection: object, *, asynchronous: bool) -> _Engine:
    for kind in type(connection).__mro__:
        client = kind.__module__.partition(".")[0]
        engine = _ENGINES.get(client)
        if engine is None:
            continue
        if (f"{client}.{kind.__name__}" in _ASYNCHRONOUS) is asynchronous:
            return engine
        if asynchronous:
            raise ConfigError("this connection is not asynchronous: use create and check")
        raise ConfigError("this connection is asynchronous: use create_async and check_async")
    raise ConfigError(
        "SQLGuard works with connections of sqlite3, psycopg, psycopg2, PyMySQL, mysqlclient,"
        f" mysql.connector, asyncmy and aiomysql, not with a {type(connection).__name__}"
    )


def _in_transaction(connection: Any) -> bool:
    """Whether a transaction is open, as the client of SQLite or MySQL reports it."""
    if hasattr(connection, "in_transaction"):
        return bool(connection.in_transaction)
    if hasattr(connection, "get_transaction_status"):
        return bool(connection.get_transaction_status())
    if hasattr(connection, "server_status"):
        return bool(connection.server_status & 1)  # SERVER_STATUS_IN_TRANS
    return not connection.get_autocommit()


def _drive(connection: Any, steps: _Steps[_T]) -> _T:
    cursor = _plain(connection.cursor())
    try:
        value = None
        while True:
            cursor.execute(*steps.send(value))
            value = None if cursor.description is None else _only(cursor.fetchone())
    except StopIteration as end:
        return cast(_T, end.value)
    finally:
        cursor.close()


async def _drive_async(connection: Any, steps: _Steps[_T]) -> _T:
    cursor = _plain(connection.cursor())
    try:
        value = None
        while True:
            try:
                statement = steps.send(value)
            except StopIteration as end:
                return cast(_T, end.value)
            await cursor.execute(*statement)
            value = None if cursor.description is None else _only(await cursor.fetchone())
    finally:
        await cursor.close()


def _plain(cursor: Any) -> Any:
    """The cursor without the caller's row factory, which may return rows of any type."""
    if isinstance(cursor, sqlite3.Cursor):
        cursor.row_factory = None
    elif type(cursor).__module__.partition(".")[0] == "psycopg":
        cursor.row_factory = sys.modules["psycopg.rows"].tuple_row
    return cursor


def _only(row: Any) -> Any:
    (value,) = row.values() if isinstance(row, Mapping) else row
    return value
