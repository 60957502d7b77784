"""Redis and Valkey keep the promises that every store makes."""

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


@pytest.fixture(scope="module")
def valkey() -> Iterator[servers.Valkey]:
    with servers.Valkey() as server:
        yield server


class TestValkey(StoreConformance):
    @pytest.fixture
    def store_harness(self, valkey: servers.Valkey) -> StoreHarness:
        return Harness(valkey)


def test_the_doctor_names_valkey(valkey: servers.Valkey) -> None:
    async def main() -> None:
        harness = Harness(valkey)
        store = await harness.client()
        try:
            first, *_ = await store.diagnose()
            assert first.text.startswith("Valkey ")
        finally:
            await harness.close_clients()

    asyncio.run(main())
