"""Redis and Valkey pass the conformance suite of all stores."""

from __future__ import annotations

import pytest

import servers
from doyen.model import leader_key, line_key, order_key
from doyen.testing import LinkedStoreConformance, StoreHarness
from fixtures import shared
from linked import ServerHarness
from servers import wire


class Harness(ServerHarness):
    ttl_s = 0.5
    server: servers.Redis

    async def deface(self, name: str) -> None:
        paths = (leader_key(name), order_key(name), f"{line_key(name)}/stray")
        for path in paths:
            self._run("HSET", "entries", f"value:{path}", "stray", f"lease:{path}", "stray")
            self._run("ZADD", "index", "0", path)
            self._run("ZADD", "bound", "0", f"stray {path}")
        self._run("ZADD", "bound", "0", "stray")
        self._run("HSET", "leases", "ttl_us:stray", "x")
        self._run("ZADD", "due", "1", "stray")

    def _run(self, command: str, key: str, *words: str) -> None:
        wire.redis_command(self.server.port, command, f"{{doyen}}:{key}", *words)


server = shared(servers.Redis)


class TestRedis(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self, server: servers.Redis) -> StoreHarness:
        return Harness(server)


valkey = shared(servers.Valkey)


class TestValkey(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self, valkey: servers.Valkey) -> StoreHarness:
        return Harness(valkey)


async def test_the_doctor_names_valkey(valkey: servers.Valkey) -> None:
    harness = Harness(valkey)
    store = await harness.client()
    try:
        first, *_ = await store.diagnose()
        assert first.text.startswith("Valkey ")
    finally:
        await harness.close_clients()
