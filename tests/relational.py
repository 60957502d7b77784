"""What the tests of the relational store share: a server of either engine, with separate tables for
each test."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

import servers
from doyen.events import Event
from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, open_store
from doyen.stores.sql import mysql, postgresql
from doyen.stores.sql.store import RelationalStore
from fixtures import run_within

now = SystemClock().now


class Place:
    """Separate tables on a server of either engine."""

    def __init__(self, engine: str, server: servers.Postgres | servers.MariaDB) -> None:
        self.engine = engine
        self.server = server
        name = f"t{uuid.uuid4().hex[:10]}"
        self.option = f"schema={name}" if engine == "postgresql" else f"prefix={name}_"
        self.tables = {
            table: f"{name}.{table}" if engine == "postgresql" else f"doyen.{name}_{table}"
            for table in ("meta", "leases", "entries", "changes")
        }
        self._module = postgresql if engine == "postgresql" else mysql
        self._step = f"step_{name}" if engine == "postgresql" else f"doyen.step_{name}"

    def url(self, *options: str, through: servers.Proxy | None = None) -> str:
        url = self.server.url if through is None else through.url
        return f"{url}?{'&'.join((self.option, *options))}"

    async def open(
        self,
        *options: str,
        through: servers.Proxy | None = None,
        emit: Callable[[Event], None] = lambda event: None,
    ) -> RelationalStore:
        context = Context(SystemClock(), emit)
        store = await open_store(self.url(*options, through=through), context)
        assert isinstance(store, RelationalStore)
        return store

    @asynccontextmanager
    async def stores(self, count: int = 1, *options: str) -> AsyncIterator[list[RelationalStore]]:
        opened: list[RelationalStore] = []
        try:
            while len(opened) < count:
                opened.append(await self.open(*options))
            yield opened
        finally:
            for store in opened:
                await store.close()

    def own_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make stores that are opened from now on use a database clock that can be stepped."""
        self.server.query(f"CREATE TABLE {self._step} (us bigint)")
        self.server.query(f"INSERT INTO {self._step} VALUES (0)")
        clock = f"({self._module.CLOCK} + (SELECT us FROM {self._step}))"
        monkeypatch.setattr(self._module, "CLOCK", clock)

    def step_clock(self, seconds: float) -> None:
        self.server.query(f"UPDATE {self._step} SET us = us + {round(seconds * 1e6)}")

    def number(self, query: str) -> int:
        ((value,),) = self.server.query(query)
        return int(value or 0)

    def open_transactions(self) -> int:
        """How many transactions of doyen's connections are open on the server."""
        if self.engine == "postgresql":
            return self.number(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE application_name = 'doyen' AND xact_start IS NOT NULL"
            )
        return self.number("SELECT COUNT(*) FROM information_schema.innodb_trx")


def run(main: Callable[[], Coroutine[Any, Any, None]], within_s: float = 30.0) -> None:
    run_within(main(), within_s)


async def until(reached: Callable[[], Awaitable[object]], within_s: float = 15.0) -> float:
    """Poll until the condition holds; how long it took."""
    began = now()
    async with asyncio.timeout(within_s):
        while not await reached():  # noqa: ASYNC110 - what is waited for is not ours to signal
            await asyncio.sleep(0.01)
    return now() - began
