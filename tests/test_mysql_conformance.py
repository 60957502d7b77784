"""MariaDB passes the conformance suite of all stores."""

from __future__ import annotations

import asyncio

import pytest

import servers
from doyen.model import leader_key, line_key, order_key
from doyen.testing import LinkedStoreConformance, StoreHarness
from linked import ServerHarness


class Harness(ServerHarness):
    ttl_s = 0.4
    server: servers.MariaDB

    async def restart(self) -> None:
        """The server is shared; tests that restart one start their own."""

    async def deface(self, name: str) -> None:
        paths = (leader_key(name), order_key(name), f"{line_key(name)}/stray")
        insert = "INSERT INTO doyen.doyen_leases VALUES ('stray', -1, 0, 0)"
        await asyncio.to_thread(
            self.server.query, "DELETE FROM doyen.doyen_leases WHERE id = 'stray'"
        )
        await asyncio.to_thread(self.server.query, insert)
        for path in paths:
            columns = "path, value, revision, version, lease"
            row = f"'{path}', x'ff00', -1, -1, 'stray'"
            insert = f"INSERT INTO doyen.doyen_entries ({columns}) VALUES ({row})"
            await asyncio.to_thread(self.server.query, insert)


class TestMySQL(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self, mysql: servers.MariaDB) -> StoreHarness:
        return Harness(mysql)
