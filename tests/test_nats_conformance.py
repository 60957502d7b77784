"""NATS passes the conformance suite of all stores."""

from __future__ import annotations

import json

import pytest

import servers
from doyen.model import leader_key, line_key, order_key
from doyen.stores.nats.view import subject_of
from doyen.testing import LinkedStoreConformance, StoreHarness
from fixtures import shared
from linked import ServerHarness
from servers import wire


class Harness(ServerHarness):
    ttl_s = 1.0
    server: servers.Nats

    async def deface(self, name: str) -> None:
        paths = (leader_key(name), order_key(name), f"{line_key(name)}/stray")
        for kind, key in (*(("entries", path) for path in paths), ("leases", "stray"), ("x", "y")):
            wire.nats_request(self.server.port, subject_of("doyen", kind, key), b"\xff stray")

    async def forget(self, key: str) -> None:
        body = json.dumps({"filter": subject_of("doyen", "entries", key)}).encode()
        wire.nats_request(self.server.port, "$JS.API.STREAM.PURGE.KV_doyen", body)


server = shared(servers.Nats)


class TestNats(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self, server: servers.Nats) -> StoreHarness:
        return Harness(server)
