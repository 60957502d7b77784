"""The conformance suite on the local store."""

from __future__ import annotations

from pathlib import Path

import pytest

from doyen.stores.port import Store, open_store
from doyen.testing import StoreConformance, StoreHarness


class Harness(StoreHarness):
    ttl_s = 0.4

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    async def open(self) -> Store:
        return await open_store(f"sqlite://{self._path}", self.context())


class TestSQLite(StoreConformance):
    @pytest.fixture
    def store_harness(self, tmp_path: Path) -> StoreHarness:
        return Harness(tmp_path / "x.db")
