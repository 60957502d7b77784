"""Fenced resources refuse the tokens of earlier terms with an error that names both tokens."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from doyen.errors import ConfigError, StaleToken
from doyen.fencing import GuardedFile, SQLGuard


@dataclass(frozen=True)
class Term:
    token: int


Connect = Callable[..., sqlite3.Connection]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    opened: list[sqlite3.Connection] = []

    def connect(**options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = sqlite3.connect(
            tmp_path / "app.db", timeout=0.05, **options
        )
        opened.append(connection)
        return connection

    with closing(connect()) as first:
        SQLGuard().create(first)
        first.execute("CREATE TABLE ledger (entry TEXT)")
        first.commit()
    yield connect
    for connection in opened:
        connection.close()


def entries(connection: sqlite3.Connection) -> list[str]:
    return [entry for (entry,) in connection.execute("SELECT entry FROM ledger")]


def test_an_equal_or_later_token_passes(connect: Connect) -> None:
    connection = connect()
    for token in (3, 3, 4, Term(4), Term(9)):
        with connection:
            SQLGuard().check(connection, "billing", token)
            connection.execute("INSERT INTO ledger VALUES ('paid')")
    assert entries(connection) == ["paid"] * 5


def test_an_earlier_token_is_refused_and_its_writes_roll_back(connect: Connect) -> None:
    new, old = connect(), connect()
    with new:
        SQLGuard().check(new, "billing", 8)
    old.execute("INSERT INTO ledger VALUES ('stale')")
    with (
        pytest.raises(
            StaleToken, match="'billing' refuses token 7, because it has seen the later token 8"
        ),
        old,
    ):
        SQLGuard().check(old, "billing", Term(7))
    assert entries(new) == []


def test_a_token_that_was_rolled_back_was_not_seen(connect: Connect) -> None:
    connection = connect()
    SQLGuard().check(connection, "billing", 8)
    connection.rollback()
    with connection:
        SQLGuard().check(connection, "billing", 7)


def test_resources_are_apart(connect: Connect) -> None:
    connection = connect()
    with connection:
        SQLGuard().check(connection, "billing", 8)
        SQLGuard().check(connection, "mail", 1)


def test_the_check_keeps_others_out_until_the_commit(connect: Connect) -> None:
    old, new = connect(), connect()
    SQLGuard().check(old, "billing", 7)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        SQLGuard().check(new, "billing", 8)
    new.rollback()
    old.commit()
    with new:
        SQLGuard().check(new, "billing", 8)


AUTOCOMMIT: list[dict[str, Any]] = [{"isolation_level": None}]
TRANSACTIONAL: list[dict[str, Any]] = [{"isolation_level": "IMMEDIATE"}]
if sys.version_info >= (3, 12):
    AUTOCOMMIT.append({"autocommit": True})
    TRANSACTIONAL.append({"autocommit": False})


@pytest.mark.parametrize("options", AUTOCOMMIT, ids=str)
def test_outside_a_transaction_the_check_is_refused(
    connect: Connect, options: dict[str, Any]
) -> None:
    connection = connect(**options)
    for token in (7, 6):
        with pytest.raises(ConfigError, match="BEGIN IMMEDIATE"):
            SQLGuard().check(connection, "billing", token)


@pytest.mark.parametrize("options", AUTOCOMMIT, ids=str)
def test_an_explicit_transaction_is_one(connect: Connect, options: dict[str, Any]) -> None:
    connection = connect(**options)
    connection.execute("BEGIN IMMEDIATE")
    SQLGuard().check(connection, "billing", 7)
    connection.execute("COMMIT")
    connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(StaleToken):
        SQLGuard().check(connection, "billing", 6)
    connection.execute("ROLLBACK")


@pytest.mark.parametrize("options", TRANSACTIONAL, ids=str)
def test_other_transactional_modes(connect: Connect, options: dict[str, Any]) -> None:
    connection = connect(**options)
    SQLGuard().check(connection, "billing", 7)
    connection.commit()
    with pytest.raises(StaleToken):
        SQLGuard().check(connection, "billing", 6)
    connection.rollback()


def test_the_callers_row_factory_is_its_own(connect: Connect) -> None:
    connection = connect()
    connection.row_factory = lambda _cursor, row: {"row": row}
    SQLGuard().check(connection, "billing", 7)
    with pytest.raises(StaleToken, match="7"):
        SQLGuard().check(connection, "billing", 6)


@pytest.mark.parametrize("table", ["", "a b", "a;b", "1a", "a.b.c", 'a"b'])
def test_odd_table_names_are_refused(table: str) -> None:
    with pytest.raises(ConfigError, match="table"):
        SQLGuard(table)


def test_other_connections_are_refused() -> None:
    connection: Any = object()
    with pytest.raises(ConfigError, match=r"works with connections of sqlite3.*not with a object"):
        SQLGuard().check(connection, "billing", 1)


@pytest.mark.parametrize("token", [-1, 2**63, True, "7", 7.0, None])
def test_malformed_tokens_are_refused(connect: Connect, tmp_path: Path, token: Any) -> None:
    with pytest.raises(ConfigError, match="token"):
        SQLGuard().check(connect(), "billing", token)
    with pytest.raises(ConfigError, match="token"):
        GuardedFile(tmp_path / "state").write(token, b"")


@pytest.fixture
def file(tmp_path: Path) -> GuardedFile:
    return GuardedFile(tmp_path / "state.json")


def test_a_new_guarded_file_has_no_token(file: GuardedFile) -> None:
    assert file.token is None
    with pytest.raises(FileNotFoundError):
        file.read()


def test_writing_and_appending(file: GuardedFile) -> None:
    file.append(3, b"one")
    file.append(3, b" two")
    assert (file.read(), file.token) == (b"one two", 3)
    file.write(Term(10), b"three")
    assert (file.read(), file.token) == (b"three", 10)


def test_an_earlier_token_is_refused(file: GuardedFile) -> None:
    file.write(10, b"new")
    for refused in (file.write, file.append):
        with pytest.raises(
            StaleToken,
            match=r"state\.json' refuses token 9, because it has seen the later token 10",
        ):
            refused(9, b"old")
    assert (file.read(), file.token) == (b"new", 10)


def test_appending_nothing_claims_the_file(file: GuardedFile) -> None:
    file.write(1, b"kept")
    file.append(2, b"")
    assert file.read() == b"kept"
    with pytest.raises(StaleToken):
        file.write(1, b"lost")


def test_nothing_piles_up_beside_the_file(file: GuardedFile) -> None:
    for token in range(20):
        file.write(token, b"x")
    fence = file.path.with_name("state.json.fence")
    assert [found.name for found in fence.iterdir()] == ["19.claim"]


def test_the_files_mode_is_kept(file: GuardedFile) -> None:
    file.write(1, b"secret")
    file.path.chmod(0o640)
    file.write(2, b"secret too")
    assert file.path.stat().st_mode & 0o777 == 0o640


def test_what_others_leave_in_the_fence_is_not_ours(file: GuardedFile) -> None:
    file.write(1, b"x")
    (file.path.with_name("state.json.fence") / "note.claim").touch()
    file.write(2, b"y")
    assert file.token == 2
