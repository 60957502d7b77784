"""PostgreSQL keeps the promises that every store makes: asked directly, and through a pooler that
gives each transaction another connection."""

from __future__ import annotations

import pytest

import servers
from doyen.store import Store, open_store
from doyen.testing import StoreConformance, StoreHarness


class Harness(StoreHarness):
    ttl_s = 0.4

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    async def open(self) -> Store:
        return await open_store(self._url, self.context())


class TestPostgreSQL(StoreConformance):
    @pytest.fixture
    def store_harness(self, postgresql: servers.Postgres) -> StoreHarness:
        return Harness(postgresql.url)
