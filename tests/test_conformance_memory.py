"""The memory store keeps the port's promises, in virtual time, and so it does behind faults."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from doyen.clock import VirtualClock
from doyen.store import Store
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.testing import Faults, FaultyStore, Odds, StoreConformance, StoreHarness, run_virtual


class MemoryHarness(StoreHarness):
    ttl_s = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.virtual = VirtualClock()
        self.clock = self.virtual
        self.server = MemoryServer(self.virtual)

    async def open(self) -> Store:
        return MemoryStore(self.server, self.context())

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        run_virtual(main, clock=self.virtual)


class TestMemory(StoreConformance):
    @pytest.fixture
    def store_harness(self) -> MemoryHarness:
        return MemoryHarness()


class FaultyHarness(MemoryHarness):
    """Memory behind fault injection: every call and notification is late, by up to ttl/100."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.faults = Faults(seed, Odds(late=1.0, delay_s=self.ttl_s / 100))

    async def open(self) -> Store:
        return FaultyStore(await super().open(), self.faults)


@pytest.mark.parametrize("seed", range(3))
class TestFaulty(StoreConformance):
    """Fault injection does only what the port allows."""

    @pytest.fixture
    def store_harness(self, seed: int) -> FaultyHarness:
        return FaultyHarness(seed)
