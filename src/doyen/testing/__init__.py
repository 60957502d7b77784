"""Tools for testing what is built on doyen, and for testing stores.

- `run_virtual`, `VirtualLoop`: run asyncio code in virtual time, where nothing ever waits.

Importing `doyen` does not import this package.
"""

from __future__ import annotations

from doyen.testing.virtual import VirtualDeadlock, VirtualLoop, run_virtual

__all__ = ["VirtualDeadlock", "VirtualLoop", "run_virtual"]
