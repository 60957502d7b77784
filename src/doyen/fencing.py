"""Fencing: resources that refuse the token of an earlier term.

A lease keeps leaders apart in time as far as clocks and schedulers allow. A process can still be
paused between its last look at `term.valid` and its write, and find on waking that another leads.
What stops that write is the resource itself, which remembers the highest token it has seen.

- `SQLGuard` is one statement in the caller's own transaction: the check and the writes commit
  together or not at all.
- `GuardedFile` is a file whose content only the holder of the highest token can replace.

Both take a `Term`, or anything with a `token`, or the number itself. One resource belongs to one
election: tokens of different elections do not compare. May import errors only.
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
    """A term, as far as fencing is concerned."""

    @property
    def token(self) -> int: ...


_TOKEN_MAX = 2**63 - 1


def _token_of(token: int | HasToken) -> int:
    number = getattr(token, "token", token)
    if type(number) is not int or not 0 <= number <= _TOKEN_MAX:
        raise ConfigError(f"a token is a whole number from 0 to 2**63 - 1, not {number!r}")
    return number


class SQLGuard:
    """A table of the highest token seen, checked in the same transaction as the writes it guards.

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
    doyen.errors.StaleToken: 'billing' has seen token 7 and refuses token 6: another has led since

    Guaranteed: of two transactions that both pass `check` and commit, the one with the higher
    token commits last. The row is locked from the check to the commit, so do it early, keep the
    transaction short, and let `StaleToken` roll it back.

    Works with connections of sqlite3, of psycopg and psycopg2 (PostgreSQL), and of PyMySQL,
    mysqlclient and mysql.connector (MySQL, MariaDB); `create_async` and `check_async` with those of
    psycopg, asyncmy and aiomysql. In SQLite every writer waits for every other, so a process paused
    inside its transaction holds the others up until it goes on or dies; elsewhere only writers of
    the same resource wait.
    """

    def __init__(self, table: str = "doyen_fence") -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", table, re.ASCII):
            raise ConfigError(f"a table's name has letters, digits and underscores, not {table!r}")
        self._table = table

    def create(self, connection: Any) -> None:
        """Create the table if it is not there. Takes effect on commit; in MySQL at once."""
        _drive(connection, self._creation(_engine_of(connection, asynchronous=False)))

    def check(self, connection: Any, resource: str, token: int | HasToken) -> None:
        """Raise `StaleToken` if `resource` has seen a later token; else remember this one.

        The open transaction is the guard: outside one, `ConfigError` is raised.
        """
        engine = _engine_of(connection, asynchronous=False)
        _drive(connection, self._checking(engine, connection, resource, _token_of(token)))

    async def create_async(self, connection: Any) -> None:
        """As `create`, on an asynchronous connection."""
        await _drive_async(connection, self._creation(_engine_of(connection, asynchronous=True)))

    async def check_async(self, connection: Any, resource: str, token: int | HasToken) -> None:
        """As `check`, on an asynchronous connection."""
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
        # Asked afterwards, since in many clients' default mode the statement itself begins one.
        if engine.asks_whether_open:
            is_open = yield (engine.asks_whether_open, ())
        else:
            is_open = _in_transaction(connection)
        if not is_open:
            raise ConfigError(
                "the token was checked outside a transaction, where it protects nothing:"
                f" this connection is in autocommit mode, so execute {engine.begin} before the"
                " check, and COMMIT after the writes"
            )
        seen = yield (
            f"SELECT token FROM {self._table} WHERE resource = {mark}{engine.locking}",
            (resource,),
        )
        if seen > number:
            raise _stale(resource, number, seen)


_Steps = Generator[tuple[str, tuple[object, ...]], Any, None]
"""Statements to execute; each is answered with the one value that it yields, if any."""


class _Engine(NamedTuple):
    """How a database wants to be asked."""

    mark: str = "%s"
    text: str = "VARCHAR(200)"
    table_options: str = ""
    on_conflict: str = "ON CONFLICT (resource) DO UPDATE SET"
    greatest: str = "GREATEST"
    locking: str = ""
    begin: str = "BEGIN"
    asks_whether_open: str = ""


_SQLITE = _Engine(mark="?", greatest="MAX", begin="BEGIN IMMEDIATE")
_POSTGRESQL = _Engine(asks_whether_open="SELECT txid_current_if_assigned() IS NOT NULL")
_MYSQL = _Engine(
    text="VARBINARY(800)",  # text would be compared without regard to case
    table_options=" ENGINE = InnoDB",
    on_conflict="ON DUPLICATE KEY UPDATE",
    locking=" FOR UPDATE",  # not as of the transaction's beginning, but as it is
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
_IN_TRANSACTION = 1


_ASYNCHRONOUS = {"psycopg.AsyncConnection", "asyncmy.Connection", "aiomysql.Connection"}


def _engine_of(connection: object, *, asynchronous: bool) -> _Engine:
    for kind in type(connection).__mro__:
        client = kind.__module__.partition(".")[0]
        engine = _ENGINES.get(client)
        if engine is None:
            continue
        if asynchronous and f"{client}.{kind.__name__}" not in _ASYNCHRONOUS:
            raise ConfigError("this connection is not asynchronous: use create and check")
        if not asynchronous and f"{client}.{kind.__name__}" in _ASYNCHRONOUS:
            raise ConfigError("this connection is asynchronous: use create_async and check_async")
        return engine
    raise ConfigError(
        "SQLGuard works with connections of sqlite3, psycopg, psycopg2, PyMySQL, mysqlclient,"
        f" mysql.connector, asyncmy and aiomysql, not with a {type(connection).__name__}"
    )


def _in_transaction(connection: Any) -> bool:
    """Whether a transaction is open, as the client of SQLite or MySQL knows it."""
    if hasattr(connection, "in_transaction"):
        return bool(connection.in_transaction)
    if hasattr(connection, "get_transaction_status"):
        return bool(connection.get_transaction_status())
    if hasattr(connection, "server_status"):
        return bool(connection.server_status & _IN_TRANSACTION)
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
    """Without the caller's row factory, which may return anything."""
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
        f"{resource!r} has seen token {seen} and refuses token {token}: another has led since"
    )


class _Seen(NamedTuple):
    """What lies in a file's fence: tokens that were claimed, and drafts by token."""

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

    Guaranteed, on a local file system:

    - A reader sees an old content or a new one, whole, whatever crashes when.
    - Once a call with a token has begun to write or returned, no call with a lower one changes
      the file: it raises `StaleToken`. That holds for a process paused at any point, even between
      its last check and its write, and through a power cut.
    - Nobody waits for the holder of another token, so a paused or hung one holds nobody up.
      Writers with the *same* token (one leader's processes and threads) take turns.

    A new leader that wants to read before it writes first says `append(term, b"")`: from then on
    nothing of an earlier term can slip in after the reading.

    How: beside the file stands a directory `<name>.fence`, which belongs to it and must be moved,
    backed up and deleted with it. In it a *claim*, an empty file, names the highest token seen. A
    writer lays its claim, throws away the *drafts* of all lower tokens, writes its own draft,
    looks whether a higher claim has appeared, and renames its draft over the file. A lower writer
    therefore either had its draft there before the higher claim, and it is thrown away, so that
    there is nothing left to rename; or it sees the claim when it looks. No lock is needed between
    tokens, and none is held. Appending copies the content: meant for state, not for large logs.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._fence = self.path.with_name(self.path.name + ".fence")

    def read(self) -> bytes:
        """The content. Raises `FileNotFoundError` if nothing was ever written."""
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
        """Add to the content, atomically and durably."""
        with self._claimed(_token_of(token)) as number:
            try:
                before = self.read()
            except FileNotFoundError:
                before = b""
            self._replace(number, before + data)

    @contextmanager
    def _claimed(self, token: int) -> Iterator[int]:
        """In here no lower token can change the file, and nobody with the same one is writing."""
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
            # Not before its own claim is durable and the drafts of those it replaces are gone.
            for other in seen.claims:
                if other < token:
                    (self._fence / f"{other}.claim").unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _replace(self, token: int, data: bytes) -> None:
        draft = self._fence / f"{token}.{uuid.uuid4().hex}.draft"
        try:
            self._write_draft(draft, data)
            _fsync_directory(self._fence)  # the claim is durable before what it protects is seen
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
