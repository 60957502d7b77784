"""The conformance suite: every promise of the Store port, as a test that any store can be put to.

A store's author writes a harness (how to open a client of one and the same store) and one fixture,
and inherits the tests:

    import pytest
    from doyen.testing import StoreConformance, StoreHarness

    class Harness(StoreHarness):
        async def open(self):
            return await open_store("mystore://localhost", self.context())

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store_harness(self):
            return Harness()

A store that is reached over a network inherits `LinkedStoreConformance` instead, and its harness
`LinkedHarness`: the suite then also breaks links, kills connections and writes foreign values.

The same tests run in virtual time (override `run`) and against real servers. They wait for what
must come, within bounds, and never rely on something not having come yet; where the machine was
too slow for a statement about time, they start again. Each test uses names of its own, so a shared
server is fine.

Imports the port, the model, fault injection and pytest.
"""

from __future__ import annotations

from doyen.testing.conformance.entries import Entries
from doyen.testing.conformance.harness import StoreHarness
from doyen.testing.conformance.interruptions import InterruptionConformance
from doyen.testing.conformance.leases import LeaseConformance
from doyen.testing.conformance.lines import Lines
from doyen.testing.conformance.network import BreakableConnection, LinkedHarness, Links
from doyen.testing.conformance.watches import WatchConformance

__all__ = [
    "BreakableConnection",
    "LinkedHarness",
    "LinkedStoreConformance",
    "StoreConformance",
    "StoreHarness",
]


class StoreConformance(LeaseConformance, Entries, Lines, WatchConformance, InterruptionConformance):
    """The promises of the Store port. Inherit, and give a fixture `store_harness`."""


class LinkedStoreConformance(StoreConformance, Links):
    """The same for a store that is reached over a network, and what holds when that fails.

    The fixture `store_harness` gives a `LinkedHarness`.
    """
