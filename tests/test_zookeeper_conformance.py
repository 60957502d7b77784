"""The conformance suite on ZooKeeper."""

from __future__ import annotations

import pytest

import servers
from doyen.stores.port import Store, open_store
from doyen.testing import LinkedStoreConformance, StoreConformance, StoreHarness
from fixtures import shared
from linked import ServerHarness
from servers.wire import ZooKeeperConnection

CHROOT = "/doyen/tests"


class Harness(ServerHarness):
    ttl_s = 0.6
    server: servers.ZooKeeper

    async def open_at(self, url: str) -> Store:
        return await open_store(f"{url}{CHROOT}", self.context())

    async def deface(self, name: str) -> None:
        election = f"{CHROOT}/elections/{name}"
        with ZooKeeperConnection(self.server.port) as link:
            link.create(election, b"\xff stray")
            for child in ("leader", "leader:", "guid_0000000007", "guid_stray", "stray"):
                link.create(f"{election}/{child}", b"\xff stray")
            link.create(f"{election}/leader:/order", b"\xff stray")
            link.create(f"{CHROOT}/doyen/leases/stray{name}", b"\xff stray")


server = shared(servers.ZooKeeper)


class TestZooKeeper(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self, server: servers.ZooKeeper) -> StoreHarness:
        return Harness(server)


class EnsembleHarness(StoreHarness):
    ttl_s = 0.6

    def __init__(self, ensemble: servers.ZooKeeperEnsemble) -> None:
        super().__init__()
        self._ensemble = ensemble

    async def open(self) -> Store:
        return await open_store(f"{self._ensemble.url}{CHROOT}", self.context())


ensemble = shared(servers.ZooKeeperEnsemble)


@pytest.mark.chaos
class TestZooKeeperEnsemble(StoreConformance):
    """The same on an ensemble: what is written through one server is read through another."""

    @pytest.fixture
    def store_harness(self, ensemble: servers.ZooKeeperEnsemble) -> StoreHarness:
        return EnsembleHarness(ensemble)
