"""The conformance suite of the relational store through a pooler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import servers
from doyen.stores.port import Store, open_store
from doyen.testing import StoreConformance, StoreHarness
from relational import Place

pytestmark = pytest.mark.chaos(engine="postgresql")


class Harness(StoreHarness):
    ttl_s = 0.6

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    async def open(self) -> Store:
        return await open_store(self._url, self.context())


@pytest.fixture(scope="module")
def pooler(postgresql: servers.Postgres) -> Iterator[servers.PgBouncer]:
    with servers.PgBouncer(postgresql) as server:
        yield server


class TestAskingThroughAPooler(StoreConformance):
    @pytest.fixture
    def store_harness(
        self, postgresql: servers.Postgres, pooler: servers.PgBouncer
    ) -> StoreHarness:
        return Harness(f"{pooler.url}?{Place('postgresql', postgresql).option}")


class TestListeningBesideAPooler(StoreConformance):
    @pytest.fixture
    def store_harness(
        self, postgresql: servers.Postgres, pooler: servers.PgBouncer
    ) -> StoreHarness:
        option = Place("postgresql", postgresql).option
        return Harness(f"{pooler.url}?{option}&listen={postgresql.url}")
