"""Fencing: resources that refuse the token of an earlier term.

A lease separates leaders in time as far as clocks and schedulers allow. A process can still be
paused between its last check of `term.valid` and its write, and continue when another leads. That
write can only be refused by the resource itself, which remembers the highest token it has seen.

- `SQLGuard` checks the token in the caller's own transaction, so that the check and the writes
  commit together or not at all.
- `GuardedFile` is a file whose content only the holder of the highest token can replace.

Both take a `Term`, any object with a `token`, or the number itself. A resource must be used by one
election only, because tokens of different elections cannot be compared. May import errors only.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import stat
import sys
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from doyen.errors import ConfigError, StaleToken

__all__ = ["GuardedFile", "HasToken", "SQLGuard"]


class HasToken(Protocol):
    """An object with a token, such as a term."""

    @property
    def token(self) -> int: ...


def _token_of(token: int | HasToken) -> int:
    number = getattr(token, "token", token)
    if type(number) is not int or not 0 <= number < 2**63:
        raise ConfigError(f"a token must be an integer from 0 to 2**63 - 1; got {number!r}")
    return number


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
        engine = _engine_of(connection, asynchronous=False)
        _drive(connection, self._checking(engine, connection, resource, _token_of(token)))

    async def create_async(self, connection: Any) -> None:
        """Like `create`, for an asynchronous connection."""
        await _drive_async(connection, self._creation(_engine_of(connection, asynchronous=True)))

    async def check_async(self, connection: Any, resource: str, token: int | HasToken) -> None:
        """Like `check`, for an asynchronous connection."""
        engine = _engine_of(connection, asynchronous=True)
        steps = self._checking(engine, connection, resource, _token_of(token))
        await _drive_async(connection, steps)

    def _creation(self, engine: _Engine) -> _Steps:
        yield (
            f"CREATE TABLE IF NOT EXISTS {self._table}"
            f" (resource {engine.text} PRIMARY KEY NOT NULL, token BIGINT NOT NULL)"
            f"{engine.table_options}",
            (),
        )

    def _checking(self, engine: _Engine, connection: Any, resource: str, number: int) -> _Steps:
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
        seen = yield (
            f"SELECT token FROM {self._table} WHERE resource = {mark}{engine.locking}",
            (resource,),
        )
        if seen > number:
            raise _stale(resource, number, seen)


_Steps = Generator[tuple[str, tuple[object, ...]], Any, None]
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


def _drive(connection: Any, steps: _Steps) -> None:
    cursor = _plain(connection.cursor())
    try:
        value = None
        while True:
            cursor.execute(*steps.send(value))
            value = None if cursor.description is None else _only(cursor.fetchone())
    except StopIteration:
        return
    finally:
        cursor.close()


async def _drive_async(connection: Any, steps: _Steps) -> None:
    cursor = _plain(connection.cursor())
    try:
        value = None
        while True:
            try:
                statement = steps.send(value)
            except StopIteration:
                return
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


def _stale(resource: str, token: int, seen: int) -> StaleToken:
    return StaleToken(
        f"{resource!r} refuses token {token}, because it has seen the later token {seen}"
    )


class _Seen(NamedTuple):
    """The contents of a fence directory: claimed tokens, and drafts with their tokens."""

    claims: list[int]
    drafts: list[tuple[int, str]]


class GuardedFile:
    """A file that only the holder of the highest token seen can write.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = GuardedFile(Path(folder) / "state.json")
    ...     file.write(7, b"one")
    ...     file.append(8, b", two")
    ...     file.read(), file.token
    (b'one, two', 8)

    Guarantees, on a local file system:

    - A reader sees either the old or the new content, complete, also after a crash.
    - Once a call with a token has begun to write or has returned, calls with lower tokens raise
      `StaleToken` and do not change the file. This holds for a process that was paused at any
      point, even between its last check and its write, and after a power failure.
    - Writers with different tokens do not wait for each other, so a paused process blocks no other.
      Writers with the *same* token (processes and threads of one leader) take turns.

    A new leader that reads before it writes must first call `append(term, b"")`: after that call,
    no write of an earlier term can follow the read.

    Implementation: beside the file there is a directory `<name>.fence`, which must be moved, backed
    up and deleted together with the file. An empty file in it, the *claim*, names the highest token
    seen. A writer creates its claim, deletes the *drafts* of all lower tokens, writes its own
    draft, checks for a higher claim, and renames its draft over the file. If a lower writer created
    its draft before the higher claim, the draft is deleted and its rename fails; if after, it finds
    the claim. So no lock is needed between different tokens. Appending copies the content, so this
    is suitable for state and not for large logs.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._fence = self.path.with_name(self.path.name + ".fence")

    def read(self) -> bytes:
        """The content. Raises `FileNotFoundError` if nothing has been written."""
        return self.path.read_bytes()

    @property
    def token(self) -> int | None:
        """The highest token seen, or None."""
        try:
            return max(self._look().claims, default=None)
        except FileNotFoundError:
            return None

    def write(self, token: int | HasToken, data: bytes) -> None:
        """Replace the content, atomically and durably."""
        with self._claimed(_token_of(token)) as number:
            self._replace(number, data)

    def append(self, token: int | HasToken, data: bytes) -> None:
        """Append to the content, atomically and durably."""
        with self._claimed(_token_of(token)) as number:
            try:
                before = self.read()
            except FileNotFoundError:
                before = b""
            self._replace(number, before + data)

    @contextmanager
    def _claimed(self, token: int) -> Iterator[int]:
        """Within this context no lower token can change the file, and no other holder of the same
        token is writing."""
        if not self._fence.is_dir():
            self._fence.mkdir(exist_ok=True)
            _fsync_directory(self._fence.parent)
        self._refuse_if_stale(token)
        claim = self._fence / f"{token}.claim"
        fd = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            seen = self._refuse_if_stale(token)
            for other, name in seen.drafts:
                if other < token:
                    (self._fence / name).unlink(missing_ok=True)
            yield token
            # Only after the own claim is durable and the drafts with lower tokens are deleted.
            for other in seen.claims:
                if other < token:
                    (self._fence / f"{other}.claim").unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _replace(self, token: int, data: bytes) -> None:
        draft = self._fence / f"{token}.{uuid.uuid4().hex}.draft"
        try:
            self._write_draft(draft, data)
            _fsync_directory(self._fence)  # the claim is durable before the new content is visible
            self._refuse_if_stale(token)
            os.rename(draft, self.path)
        except FileNotFoundError:
            self._refuse_if_stale(token)
            raise
        finally:
            draft.unlink(missing_ok=True)
        _fsync_directory(self.path.parent)

    def _write_draft(self, draft: Path, data: bytes) -> None:
        try:
            mode = stat.S_IMODE(self.path.stat().st_mode)
        except FileNotFoundError:
            mode = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o666 if mode is None else mode), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _refuse_if_stale(self, token: int) -> _Seen:
        seen = self._look()
        highest = max(seen.claims, default=token)
        if highest > token:
            raise _stale(str(self.path), token, highest)
        return seen

    def _look(self) -> _Seen:
        seen = _Seen([], [])
        for name in os.listdir(self._fence):
            match name.split("."):
                case [token, "claim"] if token.isdecimal():
                    seen.claims.append(int(token))
                case [token, _, "draft"] if token.isdecimal():
                    seen.drafts.append((int(token), name))
        return seen


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
