"""The clock on which the leader counts leases.

Grants and ends of leases are in the log. Renewals are not, since every one would be written to
disk. The leader keeps the deadlines in memory, on its own boot-time clock:

- The time of a lease begins when this leader first sees it; for all existing leases that is its
  election. An earlier leader confirmed its renewals before that, so no lease ends early because the
  leader changed. A lease may live for up to twice its ttl and the election.
- A renewal counts from its arrival. It extends the lease at once, since a longer time does no harm,
  and is confirmed only after a majority has shown that this leader still leads (`confirmed`).
- A lease that `due` has returned is not renewed any more, since its end is on the way. `due` may be
  called only when every renewal that has arrived has been handed in.
- After a pause of the process, renewals may be waiting that were not handed in. A lease that would
  be due then is kept once more, for as long as the pause, up to its ttl. A pause is a long time
  without a call of `look` or `due` although a lease is due.

A new leader takes in the leases in slices, so that a million of them do not block it. Leases that
are taken in later get more time, not less. Pure: every instant is an argument.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from math import inf

from doyen.quorum.keyspace.state import Keyspace

SLICE = 4096
"""Leases that are taken in at a time."""
AT_ONCE = 256
"""Leases that one command ends."""
EXAMINED = 512
"""Leases that one call of `due` examines: most of them may have been renewed."""
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
        # One item per lease. A renewal does not move it; it is moved when it comes first.
        self._heap: list[tuple[float, int]] = []
        self.ending: dict[int, None] = {}
        self._spared: set[int] = set()
        """Leases that were kept once more after a pause, and not renewed since."""
        self._looked_at = -inf
        self._woke_at = -inf
        """The end of the latest pause of the process."""
        self._slept_s = 0.0
        """How long that pause was."""

    @property
    def next_deadline(self) -> float:
        """When `due` may return a lease."""
        return self._heap[0][0] if self._heap else inf

    def take_in(self, now: float) -> bool:
        """Begin the time of leases not seen before. Returns whether there are more of them."""
        taken = 0
        for lease, ttl_s in islice(self._keyspace.leases(after=self.taken_in), SLICE):
            taken += 1
            self.taken_in = lease
            until = now + ttl_s
            self._until[lease] = until
            heappush(self._heap, (until, lease))
        if len(self._heap) > 2 * self._keyspace.lease_count + SLICE:
            self._tidy()
        if taken == SLICE:
            return True
        self.taken_in = max(self.taken_in, self._keyspace.newest_lease)
        return False

    def renew(self, lease: int, now: float) -> bool:
        """A renewal arrives. Returns False if it is too late."""
        ttl_s = self._keyspace.lease(lease)
        if ttl_s is None or lease in self.ending:
            return False
        if lease <= self.taken_in:  # or its time has not begun
            self._until[lease] = max(self._until[lease], now + ttl_s)
            self._spared.discard(lease)
        return True

    def left(self, lease: int, now: float) -> float | None:
        """What is left of a lease; None if it has ended, or its time has not begun."""
        until = self._until.get(lease)
        if until is None or not self.confirmed(lease):
            return None
        return max(0.0, until - now)

    def confirmed(self, lease: int) -> bool:
        """Whether a renewal counts, now that a majority has confirmed the leader."""
        return lease not in self.ending and self._keyspace.lease(lease) is not None

    def look(self, now: float) -> None:
        """Notice whether the process has paused. To be called at short intervals while leases are
        due and `due` is not called."""
        slept_s = now - max(self.next_deadline, self._looked_at)
        if slept_s > OVERSLEPT_S:
            self._slept_s, self._woke_at = slept_s, now
        self._looked_at = now

    def due(self, now: float) -> tuple[int, ...]:
        """Leases whose time is over, at most `AT_ONCE`: call it until `next_deadline` is later.
        They are not renewed again."""
        self.look(now)
        heap = self._heap
        found: list[int] = []
        for _ in range(EXAMINED):
            if not heap or heap[0][0] > now or len(found) == AT_ONCE:
                break
            lease = heap[0][1]
            ttl_s = self._keyspace.lease(lease)
            if ttl_s is None:
                heappop(heap)
                self._forget(lease)
                continue
            if self._until[lease] <= self._woke_at and lease not in self._spared:
                self._spared.add(lease)
                self._until[lease] = self._woke_at + min(self._slept_s, ttl_s)
            if self._until[lease] > now:
                heapreplace(heap, (self._until[lease], lease))
            else:
                heappop(heap)
                self.ending[lease] = None
                found.append(lease)
        return tuple(found)

    def settle(self) -> None:
        """Forget leases that have ended."""
        for lease in [lease for lease in self.ending if self._keyspace.lease(lease) is None]:
            self._forget(lease)

    def _forget(self, lease: int) -> None:
        self._until.pop(lease, None)
        self.ending.pop(lease, None)
        self._spared.discard(lease)

    def _tidy(self) -> None:
        """Forget leases that were revoked before their time."""
        alive = self._keyspace.lease
        self._until = {
            lease: until for lease, until in self._until.items() if alive(lease) is not None
        }
        self._spared &= self._until.keys()
        self._heap = [
            (until, lease) for lease, until in self._until.items() if lease not in self.ending
        ]
        heapify(self._heap)
