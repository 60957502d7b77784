"""The conformance suite: every promise of the Store port as a test, for any store.

The author of a store writes a harness, which opens independent clients of the same store, and one
fixture, and inherits the tests:

    import pytest
    from doyen.testing import StoreConformance, StoreHarness

    class Harness(StoreHarness):
        async def open(self):
            return await open_store("mystore://localhost", self.context())

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store_harness(self):
            return Harness()

For a store that is reached over a network, inherit `LinkedStoreConformance` and derive the harness
from `LinkedHarness`. The suite then also cuts the network, resets connections and writes foreign
values.

The same tests run in virtual time (override `run`) and against real servers. They wait a bounded
time for what must happen and never rely on an event being late. A test of timing is repeated if the
machine was too slow for it. Each test uses election names of its own, so tests may share a
server.

Imports the port, the model, fault injection and pytest.
"""

from __future__ import annotations

from doyen.testing.conformance.entries import EntryConformance
from doyen.testing.conformance.harness import StoreHarness
from doyen.testing.conformance.interruptions import InterruptionConformance
from doyen.testing.conformance.leases import LeaseConformance
from doyen.testing.conformance.lines import LineConformance
from doyen.testing.conformance.network import BreakableConnection, LinkedHarness, NetworkConformance
from doyen.testing.conformance.updates import UpdateConformance
from doyen.testing.conformance.watches import WatchConformance

__all__ = [
    "BreakableConnection",
    "LinkedHarness",
    "LinkedStoreConformance",
    "StoreConformance",
    "StoreHarness",
]


class StoreConformance(
    LeaseConformance,
    EntryConformance,
    UpdateConformance,
    LineConformance,
    WatchConformance,
    InterruptionConformance,
):
    """The promises of the Store port. Inherit it and define a fixture `store_harness`."""


class LinkedStoreConformance(StoreConformance, NetworkConformance):
    """The promises of the Store port, including those that hold when the network fails.

    The fixture `store_harness` returns a `LinkedHarness`.
    """
