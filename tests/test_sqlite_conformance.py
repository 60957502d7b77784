"""The conformance suite on the local store. Some of the handles share a connection, as those of one
process do, and some do not."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from doyen.stores.port import Store, open_store
from doyen.stores.sqlite.database import _threads
from doyen.testing import StoreConformance, StoreHarness


class Harness(StoreHarness):
    ttl_s = 0.4

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._number = count(1)

    async def open(self) -> Store:
        if next(self._number) % 2 == 0:
            _threads.clear()  # what is open is not found
        return await open_store(f"sqlite://{self._path}", self.context())


class TestSQLite(StoreConformance):
    @pytest.fixture
    def store_harness(self, tmp_path: Path) -> StoreHarness:
        return Harness(tmp_path / "x.db")
