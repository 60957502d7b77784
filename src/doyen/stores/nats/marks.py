"""How long renewals have been unchanged, for all leases together. Pure.

A mark is a position of the stream of renewals, with the time at which this process learned that the
stream had reached it. Every renewal up to a position was written before that time. If it is still
the last one of its lease, it has been unchanged since then at least, whether or not this process
has looked at the lease before. After an outage one mark therefore dates all the leases that did not
survive it, and they expire at the same time, a ttl later.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ["Marks"]

RESOLUTION_S = 0.01
_MARKS = 512


class Marks:
    """The marks of one client. Those of another incarnation are discarded, and so are all marks if
    the stream has gone back."""

    def __init__(self) -> None:
        self._incarnation = ""
        self._positions: list[int] = []
        self._times: list[float] = []

    def note(self, incarnation: str, position: int, now: float) -> None:
        """Note that the stream has reached `position`."""
        if incarnation != self._incarnation or (self._positions and position < self._positions[-1]):
            self._incarnation = incarnation
            self._positions.clear()
            self._times.clear()
        if self._positions and position == self._positions[-1]:
            return
        if len(self._times) > 1 and now - self._times[-2] < RESOLUTION_S:
            # Replace the last of two marks that are this close. The renewals that it dated look
            # younger by less than RESOLUTION_S, and never older.
            self._positions.pop()
            self._times.pop()
        self._positions.append(position)
        self._times.append(now)
        if len(self._positions) > _MARKS:
            half = _MARKS // 2
            self._positions[:half] = self._positions[1:half:2]
            self._times[:half] = self._times[1:half:2]

    def age_s(self, incarnation: str, now: float) -> float:
        """The age of the latest mark."""
        if incarnation != self._incarnation or not self._times:
            return float("inf")
        return now - self._times[-1]

    def position(self, incarnation: str, before: float) -> int:
        """A position that the stream had reached at a time; the highest that is known."""
        if incarnation != self._incarnation:
            return 0
        index = bisect_right(self._times, before)
        return self._positions[index - 1] if index else 0

    def unchanged_s(self, incarnation: str, sequence: int, now: float) -> float:
        """For how long the message with this sequence has been in the stream, at least."""
        if incarnation != self._incarnation:
            return 0.0
        index = bisect_left(self._positions, sequence)
        return now - self._times[index] if index < len(self._times) else 0.0
