"""The event queue of a simulated cluster: virtual time, and the order of everything that happens.

Every event has a number of its own, so two events at the same instant have a defined order. `trace`
is a running hash of what every core received and how it changed: two runs with the same trace are
the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

LIMIT = 200_000
"""A queue grows beyond this only if a protocol answers its own messages with ever more of them."""


class QueueOverflow(Exception):
    """More events are pending than any sound protocol causes."""


class EventQueue:
    """Pending events in order of time."""

    __slots__ = ("heap", "now", "processed", "seq", "trace")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self.now = 0.0
        self.processed = 0
        self.seq = 0
        """The number of the event pushed last."""
        self.trace = 0

    def push(self, at: float, call: Callable[[Any], object], argument: Any) -> None:
        self.seq += 1
        heappush(self.heap, (at, self.seq, call, argument))

    def push_after(self, delay_s: float, call: Callable[[Any], object], argument: Any) -> None:
        self.push(self.now + delay_s, call, argument)

    def run_until(self, end: float) -> None:
        """Process every event up to this time."""
        heap = self.heap
        count = 0
        try:
            while heap and heap[0][0] <= end:
                at, _, call, argument = heappop(heap)
                self.now = at
                count += 1
                call(argument)
                if not count & 0x3FFF and len(heap) > LIMIT:
                    raise QueueOverflow
        finally:
            self.processed += count
        self.now = end
