"""Redis keeps the promises that every store makes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import servers
from doyen.store import Store, open_store
from doyen.testing import StoreConformance, StoreHarness


class Harness(StoreHarness):
    ttl_s = 0.5

    def __init__(self, server: servers.Redis) -> None:
        super().__init__()
        self._server = server

    async def open(self) -> Store:
        return await open_store(self._server.url, self.context())

    async def restart(self) -> None:
        await asyncio.to_thread(self._server.restart)


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Redis]:
    with servers.Redis() as server:
        yield server


class TestRedis(StoreConformance):
    @pytest.fixture
    def store_harness(self, server: servers.Redis) -> StoreHarness:
        return Harness(server)
