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
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

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

    SQLite for now, through `sqlite3`. There every writer waits for every other, so a process
    paused inside its transaction holds the others up until it goes on or dies.
    """

    def __init__(self, table: str = "doyen_fence") -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", table, re.ASCII):
            raise ConfigError(f"a table's name has letters, digits and underscores, not {table!r}")
        self._table = table

    def create(self, connection: sqlite3.Connection) -> None:
        """Create the table if it is not there. Like any statement, it takes effect on commit."""
        _sqlite(connection).execute(
            f"CREATE TABLE IF NOT EXISTS {self._table}"
            " (resource VARCHAR(200) PRIMARY KEY NOT NULL, token BIGINT NOT NULL)"
        )

    def check(self, connection: sqlite3.Connection, resource: str, token: int | HasToken) -> None:
        """Raise `StaleToken` if `resource` has seen a later token; else remember this one.

        The open transaction is the guard: outside one, `ConfigError` is raised.
        """
        number = _token_of(token)
        cursor = _sqlite(connection)
        cursor.execute(
            f"INSERT INTO {self._table} (resource, token) VALUES (?, ?)"
            " ON CONFLICT (resource) DO UPDATE SET token = excluded.token"
            f" WHERE {self._table}.token <= excluded.token",
            (resource, number),
        )
        # Asked afterwards, since in sqlite3's default mode the statement itself begins one.
        if not connection.in_transaction:
            raise ConfigError(
                "the token was checked outside a transaction, where it protects nothing:"
                " this connection is in autocommit mode, so execute BEGIN IMMEDIATE before the"
                " check, and COMMIT after the writes"
            )
        if cursor.rowcount < 1:
            cursor.execute(f"SELECT token FROM {self._table} WHERE resource = ?", (resource,))
            raise _stale(resource, number, cursor.fetchone()[0])


def _sqlite(connection: sqlite3.Connection) -> sqlite3.Cursor:
    if not isinstance(connection, sqlite3.Connection):
        raise ConfigError(
            f"SQLGuard works with a sqlite3.Connection, not a {type(connection).__name__};"
            " other databases are not covered yet"
        )
    cursor = connection.cursor()
    cursor.row_factory = None  # the caller's may return anything
    return cursor


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
