"""Consul keeps the promises that every store makes."""

from __future__ import annotations

import pytest

import servers
from doyen.model import leader_key, line_key, order_key
from doyen.testing import LinkedStoreConformance, StoreHarness
from fixtures import shared
from linked import ServerHarness


class Harness(ServerHarness):
    ttl_s = 1.0
    server: servers.Consul

    async def deface(self, name: str) -> None:
        for key in (leader_key(name), order_key(name), f"{line_key(name)}/stray", "leases/stray"):
            self.server.put(f"doyen/{key}", b"\xff stray")


server = shared(lambda: servers.Consul(session_ttl_min="1s"))


class TestConsul(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self, server: servers.Consul) -> StoreHarness:
        return Harness(server)
