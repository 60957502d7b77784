"""etcd keeps the promises that every store makes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from doyen.store import Store, open_store
from doyen.testing import StoreConformance, StoreHarness
from servers.etcd import Etcd


class Harness(StoreHarness):
    ttl_s = 1.0

    def __init__(self, server: Etcd) -> None:
        super().__init__()
        self._server = server

    async def open(self) -> Store:
        return await open_store(self._server.url, self.context())

    async def restart(self) -> None:
        await asyncio.to_thread(self._server.restart)


@pytest.fixture(scope="module")
def server() -> Iterator[Etcd]:
    with Etcd() as server:
        yield server


class TestEtcd(StoreConformance):
    @pytest.fixture
    def store_harness(self, server: Etcd) -> StoreHarness:
        return Harness(server)
