"""The clock that a quorum's leader counts leases on.

Grants and ends of leases are in the log; renewals are not, or every heartbeat would be written to
disk. Whoever leads keeps the deadlines, in memory, on its own boot-time clock:

- A lease's time begins when this leader first sees it, which for all that exist is its election.
  Whatever an earlier leader confirmed was confirmed before that, so no lease ends early because
  leaders changed; it may be kept for up to twice its ttl and the election.
- A renewal counts from its arrival. It extends the lease at once, since more time harms nobody,
  and is confirmed only by `confirmed`, after a majority has shown that this leader still led.
- What is due is not renewed any more from the moment that `due` has named it: its end is on the
  way. `due` must be asked only when everything that has arrived has been handed in.
- Whoever overslept may have renewals waiting that nobody handed in: what would be due then is
  kept, once, for as long again as was slept, within its ttl.

A new leader takes the leases in by slices, so that a million of them stop nothing; those that come
later get more time, not less. Pure: every instant is handed in.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from math import inf

from doyen.quorum.keyspace.state import Keyspace

__all__ = ["LeaseClock"]

SLICE = 4096
"""Leases taken in at a time."""
AT_ONCE = 512
"""Leases that end in one command."""
OVERSLEPT_S = 0.25


class LeaseClock:
    """Deadlines of all leases, for one leader in one era.

    >>> from doyen.quorum.keyspace.state import Grant, encode
    >>> keyspace = Keyspace()
    >>> _ = keyspace.apply(encode(Grant(5.0)))
    >>> clock = LeaseClock(keyspace)
    >>> clock.take_in(100.0)
    False
    >>> clock.renew(1, 102.0), clock.due(105.0), clock.due(107.0), clock.renew(1, 107.0)
    (True, (), (1,), False)
    """

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self.taken_in = 0
        """Leases up to this number have been seen."""
        self._until: dict[int, float] = {}
        # One item a lease. A renewal leaves it where it is; it is moved on when it comes up.
        self._heap: list[tuple[float, int]] = []
        self.ending: dict[int, None] = {}
        self._spared: set[int] = set()
        """Those kept once because we overslept, and not renewed since."""
        self._looked_at = -inf
        self._slept_s = 0.0
        self._unfinished = False
        """Whether `due` had more to name than it may at once."""

    @property
    def next_deadline(self) -> float:
        """When `due` may have something to say."""
        return self._heap[0][0] if self._heap else inf

    def take_in(self, now: float) -> bool:
        """Begin the time of leases not seen before. True if there are more of them."""
        taken = 0
        for lease, ttl_s in islice(self._keyspace.leases(after=self.taken_in), SLICE):
            taken += 1
            self.taken_in = lease
            until = self._begin(ttl_s, now)
            self._until[lease] = until
            heappush(self._heap, (until, lease))
        if len(self._heap) > 2 * self._keyspace.lease_count + SLICE:
            self._tidy()
        if taken == SLICE:
            return True
        self.taken_in = max(self.taken_in, self._keyspace.newest_lease)
        return False

    def _begin(self, ttl_s: float, now: float) -> float:
        return now + ttl_s

    def renew(self, lease: int, now: float) -> bool:
        """A renewal arrives. False if it comes too late."""
        ttl_s = self._keyspace.lease(lease)
        if ttl_s is None or lease in self.ending:
            return False
        if lease <= self.taken_in:  # or its time has not begun
            self._until[lease] = max(self._until[lease], now + ttl_s)
            self._spared.discard(lease)
        return True

    def confirmed(self, lease: int) -> bool:
        """Whether a renewal that arrived stands, now that a majority has spoken."""
        return lease not in self.ending and self._keyspace.lease(lease) is not None

    def due(self, now: float) -> tuple[int, ...]:
        """Leases whose time is over, some of them if they are many: ask until there are none. They
        are not renewed again."""
        heap = self._heap
        found: list[int] = []
        if not self._unfinished:
            self._slept_s = now - max(self.next_deadline, self._looked_at)
        slept_s, self._looked_at = self._slept_s, now
        while heap and heap[0][0] <= now and len(found) < AT_ONCE:
            lease = heap[0][1]
            ttl_s = self._keyspace.lease(lease)
            if ttl_s is None:
                heappop(heap)
                self._forget(lease)
            elif self._until[lease] > now:
                heapreplace(heap, (self._until[lease], lease))
            elif slept_s > OVERSLEPT_S and lease not in self._spared:
                self._spared.add(lease)
                self._until[lease] = until = now + min(slept_s, ttl_s)
                heapreplace(heap, (until, lease))
            else:
                heappop(heap)
                self.ending[lease] = None
                found.append(lease)
        self._unfinished = len(found) == AT_ONCE
        return tuple(found)

    def settle(self) -> None:
        """Forget those whose end has come about."""
        for lease in [lease for lease in self.ending if self._keyspace.lease(lease) is None]:
            self._forget(lease)

    def _forget(self, lease: int) -> None:
        self._until.pop(lease, None)
        self.ending.pop(lease, None)
        self._spared.discard(lease)

    def _tidy(self) -> None:
        """Let go of what was revoked long before its time."""
        alive = self._keyspace.lease
        self._until = {
            lease: until for lease, until in self._until.items() if alive(lease) is not None
        }
        self._heap = [
            (until, lease) for lease, until in self._until.items() if lease not in self.ending
        ]
        heapify(self._heap)
