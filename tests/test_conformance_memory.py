"""The conformance suite on the memory store in virtual time, directly and with late calls."""

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
    """A memory store with fault injection: each call and notification is up to ttl/100 late."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.faults = Faults(seed, Odds(late=1.0, delay_s=self.ttl_s / 100))

    async def open(self) -> Store:
        return FaultyStore(await super().open(), self.faults)


@pytest.mark.parametrize("seed", range(3))
class TestFaulty(LinkedStoreConformance):
    """A store with injected delays still conforms to the port."""

    @pytest.fixture
    def store_harness(self, seed: int) -> FaultyHarness:
        return FaultyHarness(seed)
