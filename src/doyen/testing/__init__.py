"""Tools for testing what is built on doyen, and for testing stores.

- `run_virtual`, `VirtualLoop`: run asyncio code in virtual time, where nothing ever waits.
- `FaultyStore`, `Faults`: put faults between a caller and its store, by hand or by seed.

Importing `doyen` does not import this package.
"""

from __future__ import annotations

from doyen.testing.faults import (
    Expired,
    Fault,
    Faults,
    FaultyStore,
    Late,
    Lost,
    Odds,
    Refused,
    Stray,
    Unanswered,
)
from doyen.testing.virtual import VirtualDeadlock, VirtualLoop, run_virtual

__all__ = [
    "Expired",
    "Fault",
    "Faults",
    "FaultyStore",
    "Late",
    "Lost",
    "Odds",
    "Refused",
    "Stray",
    "Unanswered",
    "VirtualDeadlock",
    "VirtualLoop",
    "run_virtual",
]
