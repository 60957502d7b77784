"""A histogram with fixed buckets. One thread adds to it, and any may read it."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Histogram"]

BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0,
)  # fmt: skip
"""From what a sync of a fast disk takes to what a failover of a slow store does."""


class Histogram:
    """Counts durations in buckets.

    >>> seen = Histogram()
    >>> seen.add(0.0002); seen.add(3.0)
    >>> seen.count, seen.sum_s, seen.cumulative()[:2]
    (2, 3.0002, [(0.0001, 0), (0.00025, 1)])
    """

    __slots__ = ("_counts", "count", "sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.count = 0
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.count += 1
        self.sum_s += seconds

    def quantile(self, share: float) -> float:
        """A bound that this share of the durations did not exceed; 0 if there are none.

        >>> seen = Histogram()
        >>> for n in range(100): seen.add(0.002 if n else 0.7)
        >>> seen.quantile(0.99), seen.quantile(1.0)
        (0.0025, 1.0)
        """
        buckets = self.cumulative()
        _, total = buckets[-1]
        reached = (bound for bound, count in buckets if count >= share * total)
        return min(next(reached), BOUNDS_S[-1]) if total else 0.0

    def cumulative(self) -> list[tuple[float, int]]:
        """For each bound, how many durations were not longer; the last bound is infinite."""
        total, buckets = 0, []
        for bound, count in zip((*BOUNDS_S, float("inf")), [*self._counts], strict=True):
            total += count
            buckets.append((bound, total))
        return buckets
