"""The SQL guard on PostgreSQL and MySQL, through blocking and asynchronous clients."""

from __future__ import annotations

import asyncio
import inspect
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import asyncmy
import psycopg
import pymysql
import pytest
from asyncmy.cursors import DictCursor as AsyncDictCursor
from psycopg.rows import dict_row
from pymysql.cursors import DictCursor

import servers
from doyen.errors import ConfigError, StaleToken
from doyen.fencing import SQLGuard, SQLTokens
from servers.mariadb import DATABASE, PASSWORD, USER


class Client:
    """A database with one of its client libraries. Asynchronous clients are run to completion."""

    def __init__(self, name: str, server: servers.Server) -> None:
        self.name = name
        self.table = f"fence_{uuid.uuid4().hex[:8]}"
        self.guard = SQLGuard(self.table)
        self._server = server
        self._runner = asyncio.Runner()
        self._opened: list[Any] = []

    @property
    def asynchronous(self) -> bool:
        return self.name in ("psycopg async", "asyncmy")

    def connect(self, **options: Any) -> Any:
        host, port = "127.0.0.1", self._server.port
        whole: dict[str, Any] = {"host": host, "port": port, "user": USER, "password": PASSWORD}
        whole |= {"database": DATABASE}
        match self.name:
            case "psycopg":
                connection: Any = psycopg.connect(self._server.url, **options)
            case "psycopg async":
                connection = self.do(psycopg.AsyncConnection.connect(self._server.url, **options))
            case "pymysql":
                connection = pymysql.connect(**whole, **options)
            case _:
                connection = self.do(_asyncmy(**whole, **options))
        self._opened.append(connection)
        return connection

    def do(self, result: Any) -> Any:
        """The result, awaited if necessary."""

        async def wait() -> Any:
            return await result

        return self._runner.run(wait()) if inspect.isawaitable(result) else result

    def create(self, connection: Any) -> None:
        call = self.guard.create_async if self.asynchronous else self.guard.create
        self.do(call(connection))

    def check(self, connection: Any, resource: str, token: int) -> None:
        call = self.guard.check_async if self.asynchronous else self.guard.check
        self.do(call(connection, resource, token))

    def execute(self, connection: Any, text: str) -> Any:
        cursor = connection.cursor()
        self.do(cursor.execute(text))
        rows = self.do(cursor.fetchall()) if cursor.description else None
        self.do(cursor.close())
        return rows

    def close(self) -> None:
        for connection in self._opened:
            closing = getattr(connection, "ensure_closed", connection.close)
            self.do(closing())
        self._runner.close()


async def _asyncmy(**options: Any) -> Any:
    return await asyncmy.connect(**options)


CLIENTS = ["psycopg", "psycopg async", "pymysql", "asyncmy"]


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    engine = "postgresql" if request.param.startswith("psycopg") else "mysql"
    client = Client(request.param, request.getfixturevalue(engine))
    connection = client.connect()
    client.create(connection)
    client.create(connection)
    client.execute(connection, f"CREATE TABLE {client.table}_ledger (entry INTEGER)")
    client.do(connection.commit())
    yield client
    client.close()


def test_an_equal_or_later_token_passes_and_an_earlier_one_rolls_back(client: Client) -> None:
    new, old = client.connect(), client.connect()
    for token in (3, 3, 8):
        client.check(new, "billing", token)
        client.execute(new, f"INSERT INTO {client.table}_ledger VALUES ({token})")
        client.do(new.commit())
    client.execute(old, f"INSERT INTO {client.table}_ledger VALUES (7)")
    with pytest.raises(
        StaleToken, match="'billing' refuses token 7, because it has seen the later token 8"
    ):
        client.check(old, "billing", 7)
    client.do(old.rollback())
    rows = client.execute(new, f"SELECT entry FROM {client.table}_ledger ORDER BY entry")
    assert [tuple(row) for row in rows] == [(3,), (3,), (8,)]


def test_a_token_seen_by_another_after_our_transaction_began_counts(client: Client) -> None:
    """In MySQL a transaction reads from a snapshot of its beginning, unless it locks the row."""
    new, old = client.connect(), client.connect()
    client.execute(old, f"SELECT * FROM {client.table}")
    client.check(new, "billing", 8)
    client.do(new.commit())
    with pytest.raises(StaleToken):
        client.check(old, "billing", 7)
    client.do(old.rollback())


def test_a_token_that_was_rolled_back_was_not_seen(client: Client) -> None:
    connection = client.connect()
    client.check(connection, "billing", 8)
    client.do(connection.rollback())
    client.check(connection, "billing", 7)
    client.do(connection.commit())


def test_resources_are_apart_and_case_counts(client: Client) -> None:
    connection = client.connect()
    for resource, token in (("billing", 8), ("Billing", 1), ("billing ", 2), ("mail", 3)):
        client.check(connection, resource, token)
    client.do(connection.commit())


def test_outside_a_transaction_the_check_is_refused(client: Client) -> None:
    connection = client.connect(autocommit=True)
    for token in (7, 6):
        with pytest.raises(ConfigError, match="execute BEGIN before the check"):
            client.check(connection, "billing", token)
    client.execute(connection, "BEGIN")
    client.check(connection, "billing", 9)
    client.execute(connection, "COMMIT")


def test_the_callers_rows_are_its_own(client: Client) -> None:
    options: dict[str, Any] = {"row_factory": dict_row}
    if client.name == "pymysql":
        options = {"cursorclass": DictCursor}
    elif client.name == "asyncmy":
        options = {"cursor_cls": AsyncDictCursor}
    connection = client.connect(**options)
    client.check(connection, "billing", 7)
    with pytest.raises(StaleToken):
        client.check(connection, "billing", 6)


def test_the_wrong_kind_of_call_is_refused(client: Client) -> None:
    connection = client.connect()
    with pytest.raises(ConfigError, match="asynchronous"):
        if client.asynchronous:
            client.guard.check(connection, "billing", 7)
        else:
            client.do(client.guard.check_async(connection, "billing", 7))


@pytest.mark.parametrize("name", ["psycopg", "pymysql"])
def test_a_service_keeps_its_tokens_in_a_table(name: str, request: pytest.FixtureRequest) -> None:
    engine = "postgresql" if name == "psycopg" else "mysql"
    client = Client(name, request.getfixturevalue(engine))
    tokens = SQLTokens(lambda: closing(client.connect()), client.table)
    tokens.create()
    assert [tokens.see("orders", token) for token in (7, 6, 8, 8)] == [7, 7, 8, 8]


@pytest.mark.parametrize("name", ["psycopg", "pymysql"])
def test_the_row_is_locked_from_the_check_to_the_commit(
    name: str, request: pytest.FixtureRequest
) -> None:
    """The successor's check waits for the old leader's commit, so it comes last."""
    engine = "postgresql" if name == "psycopg" else "mysql"
    client = Client(name, request.getfixturevalue(engine))
    old, new = client.connect(), client.connect()
    client.create(old)
    old.commit()
    client.check(old, "billing", 7)
    passed = threading.Event()

    def succeed() -> None:
        client.guard.check(new, "billing", 8)
        passed.set()

    successor = threading.Thread(target=succeed)
    successor.start()
    assert not passed.wait(0.2)
    client.execute(old, f"SELECT token FROM {client.table}")
    old.commit()
    successor.join(10)
    assert passed.is_set()
    new.commit()
    with pytest.raises(StaleToken):
        client.check(old, "billing", 7)
    client.close()
