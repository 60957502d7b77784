"""Tools for testing what is built on doyen, and for testing stores.

- `run_virtual`, `VirtualLoop`: run asyncio code in virtual time, without waiting.
- `FaultyStore`, `Faults`: inject faults between a caller and its store, by hand or by seed.
- `ControlledStore`: leaders that lose, freeze or cannot reach their store, for tests of your own
  code; pytest has it as the fixture `doyen_store`.
- `StoreConformance`, `StoreHarness`: test a store against the port (needs pytest).
  `LinkedStoreConformance` and `LinkedHarness` are for stores that are reached over a network.

Importing `doyen` does not import this package, and this package imports each tool on first use: the
pytest plugin is loaded in every pytest run and must not slow it down.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from doyen.testing.conformance import (
        BreakableConnection,
        LinkedHarness,
        LinkedStoreConformance,
        StoreConformance,
        StoreHarness,
    )
    from doyen.testing.controlled import ControlledStore
    from doyen.testing.faults import (
        Expired,
        Fault,
        Faults,
        FaultyStore,
        Late,
        LostCall,
        Odds,
        RefusedCall,
        Stray,
        Unanswered,
    )
    from doyen.testing.virtual import VirtualDeadlock, VirtualLoop, run_virtual

__all__ = [
    "BreakableConnection",
    "ControlledStore",
    "Expired",
    "Fault",
    "Faults",
    "FaultyStore",
    "Late",
    "LinkedHarness",
    "LinkedStoreConformance",
    "LostCall",
    "Odds",
    "RefusedCall",
    "StoreConformance",
    "StoreHarness",
    "Stray",
    "Unanswered",
    "VirtualDeadlock",
    "VirtualLoop",
    "run_virtual",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in ("virtual", "faults", "controlled", "conformance"):
            found = getattr(import_module(f"doyen.testing.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
