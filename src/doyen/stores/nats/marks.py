"""How long a renewal has been standing: judged for all leases together, from positions of the
stream of renewals.

A mark is a position that the stream had reached, and the instant at which that was known here.
Every renewal up to that position was written before that instant, so one that is still the last of
its lease has been standing since then at least, whether or not this process has ever looked at the
lease. After an outage one mark therefore dates all the leases that did not survive it, and they
are over at the same time, a ttl later.

A server that was started again may lack renewals that were confirmed before: marks made with
another incarnation are void, and so are all if the stream has gone back.

Pure. Imports the standard library.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Marks"]

GRAIN_S = 0.01
_KEPT = 512


class Marks:
    """Positions of a stream, and since when each is known to have been reached."""

    def __init__(self) -> None:
        self._incarnation = ""
        self._positions: list[int] = []
        self._times: list[float] = []

    def note(self, incarnation: str, position: int, now: float) -> None:
        """The stream is known to have reached `position`."""
        if incarnation != self._incarnation or (self._positions and position < self._positions[-1]):
            self._incarnation = incarnation
            self._positions.clear()
            self._times.clear()
        if self._positions and position == self._positions[-1]:
            return
        if len(self._times) > 1 and now - self._times[-2] < GRAIN_S:
            # Two marks are that close already. The later one gives way, which makes what it dated
            # look younger by less than GRAIN_S, and never older.
            self._positions.pop()
            self._times.pop()
        self._positions.append(position)
        self._times.append(now)
        if len(self._positions) > _KEPT:
            half = _KEPT // 2
            self._positions[:half] = self._positions[1:half:2]
            self._times[:half] = self._times[1:half:2]

    def age_s(self, incarnation: str, now: float) -> float:
        """How old the latest mark is."""
        if incarnation != self._incarnation or not self._times:
            return float("inf")
        return now - self._times[-1]

    def standing_s(self, incarnation: str, sequence: int, now: float) -> float:
        """How long the message with this sequence has been in the stream, at least."""
        if incarnation != self._incarnation:
            return 0.0
        place = bisect_left(self._positions, sequence)
        return now - self._times[place] if place < len(self._times) else 0.0
