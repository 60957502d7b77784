"""PostgreSQL passes the conformance suite of all stores."""

from __future__ import annotations

import pytest

import servers
from doyen.testing import LinkedStoreConformance, StoreHarness
from linked import RelationalHarness


class Harness(RelationalHarness):
    tables = "doyen."
    foreign = "decode('ff00', 'hex')"


class TestPostgreSQL(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self, postgresql: servers.Postgres) -> StoreHarness:
        return Harness(postgresql)
