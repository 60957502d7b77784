"""Counts of injected faults, elections and violations.

`fault` marks a method that injects a fault. A call is counted if it is not part of another fault
and not part of the cleanup.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Tally:
    """Counts since the start of this process."""

    faults: int = 0
    elections: int = 0
    violations: int = 0


tally = Tally()
_this_thread = threading.local()


@contextmanager
def tidying() -> Iterator[None]:
    """Do not count faults within this block."""
    before = getattr(_this_thread, "tidying", False)
    _this_thread.tidying = True
    try:
        yield
    finally:
        _this_thread.tidying = before


def fault(method: Callable[P, T]) -> Callable[P, T]:
    @wraps(method)
    def counted(*arguments: P.args, **options: P.kwargs) -> T:
        if not getattr(_this_thread, "tidying", False):
            tally.faults += 1
        with tidying():
            return method(*arguments, **options)

    return counted
