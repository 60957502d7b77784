"""The memory store keeps the port's promises, in virtual time, and so it does behind faults."""

from __future__ import annotations

import pytest

from doyen.stores.port import Store
from doyen.testing import Faults, FaultyStore, LinkedStoreConformance, Odds
from linked import VirtualHarness


class TestMemory(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self) -> VirtualHarness:
        return VirtualHarness()


class FaultyHarness(VirtualHarness):
    """Memory behind fault injection: every call and notification is late, by up to ttl/100."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.faults = Faults(seed, Odds(late=1.0, delay_s=self.ttl_s / 100))

    async def open(self) -> Store:
        return FaultyStore(await super().open(), self.faults)


@pytest.mark.parametrize("seed", range(3))
class TestFaulty(LinkedStoreConformance):
    """Fault injection does only what the port allows."""

    @pytest.fixture
    def store_harness(self, seed: int) -> FaultyHarness:
        return FaultyHarness(seed)
