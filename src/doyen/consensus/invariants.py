"""What must hold of a core at every step, and of a cluster of them.

Imports `core` only: any protocol can be held to this.
"""

from __future__ import annotations

__all__ = ["IllegalEvent", "InvariantBroken"]


class InvariantBroken(Exception):
    """Something that can never be so, is: a defect, or a disk or peer that has lied."""


class IllegalEvent(Exception):
    """A driver has told a core what cannot be."""
