"""MariaDB keeps the promises that every store makes."""

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


class TestMySQL(StoreConformance):
    @pytest.fixture
    def store_harness(self, mysql: servers.MariaDB) -> StoreHarness:
        return Harness(mysql.url)
