"""ZooKeeper keeps the promises that every store makes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import servers
from doyen.store import Store, open_store
from doyen.testing import StoreConformance, StoreHarness


class Harness(StoreHarness):
    ttl_s = 0.6

    def __init__(self, server: servers.ZooKeeper | servers.ZooKeeperEnsemble) -> None:
        super().__init__()
        self._server = server

    async def open(self) -> Store:
        return await open_store(f"{self._server.url}/doyen/tests", self.context())

    async def restart(self) -> None:
        if isinstance(self._server, servers.ZooKeeper):
            await asyncio.to_thread(self._server.restart)


@pytest.fixture(scope="module")
def server() -> Iterator[servers.ZooKeeper]:
    with servers.ZooKeeper() as server:
        yield server


class TestZooKeeper(StoreConformance):
    @pytest.fixture
    def store_harness(self, server: servers.ZooKeeper) -> StoreHarness:
        return Harness(server)


@pytest.fixture(scope="module")
def ensemble() -> Iterator[servers.ZooKeeperEnsemble]:
    with servers.ZooKeeperEnsemble() as ensemble:
        yield ensemble


@pytest.mark.chaos
class TestZooKeeperEnsemble(StoreConformance):
    """The same among three servers: what is written through one is read through another."""

    @pytest.fixture
    def store_harness(self, ensemble: servers.ZooKeeperEnsemble) -> StoreHarness:
        return Harness(ensemble)
