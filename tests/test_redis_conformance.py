"""Redis and Valkey pass the conformance suite of all stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import servers
from doyen.model import leader_key, line_key, order_key
from doyen.testing import LinkedStoreConformance, StoreHarness
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


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Redis]:
    with servers.Redis() as server:
        yield server


class TestRedis(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self, server: servers.Redis) -> StoreHarness:
        return Harness(server)


@pytest.fixture(scope="module")
def valkey() -> Iterator[servers.Valkey]:
    with servers.Valkey() as server:
        yield server


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
