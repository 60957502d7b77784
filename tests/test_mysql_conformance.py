"""MariaDB passes the conformance suite of all stores."""

from __future__ import annotations

import pytest

import servers
from doyen.testing import LinkedStoreConformance, StoreHarness
from linked import RelationalHarness


class Harness(RelationalHarness):
    tables = "doyen.doyen_"
    foreign = "x'ff00'"


class TestMySQL(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self, mysql: servers.MariaDB) -> StoreHarness:
        return Harness(mysql)
