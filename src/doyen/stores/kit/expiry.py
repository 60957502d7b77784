"""When the lease of another client may be ended: judged by observing its renewals.

For engines that keep no leases of their own, so that clients have to end those that are over (SQL,
Redis, NATS). The rule:

- A lease may be ended by a client other than its holder only after its renewal counter was observed
  unchanged for a whole ttl. The time is counted on this process's boot-time clock, from the arrival
  of the first response that showed this counter. The holder counts from the instant at which it
  sent that renewal, which is earlier, so its own deadline has passed by then.
- A response from another incarnation of the server may lack renewals that the previous one had
  confirmed. It voids all observations.
- The server's clock can only delay this: while it shows a time within one ttl after the renewal,
  the lease is not over. A clock that shows an earlier time was stepped, and does not count.

Pure: time is passed in, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

RENEWED_BY = 0.4
"""The share of its ttl by which a healthy lease has been renewed: a third, plus 20 % jitter."""
LOOK_AGAIN = 0.1
"""The share of the ttl after which an overdue renewal is looked for again."""
GRAIN_S = 0.001
"""The shortest wait before a lease is looked at again."""
AT_ONCE = 500
"""How many leases are looked at in one query."""
FORGET_AFTER = 10
"""A lease that was not observed for this many of its ttls is forgotten."""


class LeaseRow(NamedTuple):
    """A lease as the store shows it. `ttl_us` is None if the row does not exist."""

    lease: str
    ttl_us: int | None
    counter: int
    age_us: int
    incarnation: str
    unchanged_s: float | None = None
    """How long the counter is known to be unchanged, for stores that can date all renewals."""


class LeaseVerdict(NamedTuple):
    """Whether a lease is over; if not, when to look again and the least time that it has left."""

    over: bool
    look_after_s: float
    remaining_s: float


@dataclass(slots=True)
class Observation:
    """The last renewal of a lease that was observed."""

    counter: int
    since: float
    ttl_s: float
    last: float
    late: bool = False
    """The next renewal is overdue."""
    together: bool = False
    """The other leases of the same elections have been observed since then as well."""


class LeaseObservations:
    """What one handle has observed of the leases of others."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._incarnation = ""
        self._observed: dict[str, Observation] = {}
        """In the order of the last observation: the first is the oldest."""

    @property
    def incarnation(self) -> str:
        """The incarnation of the server from which all current observations come."""
        return self._incarnation

    def judge(self, row: LeaseRow) -> LeaseVerdict:
        """Record a lease as the store has just shown it, and judge it."""
        if row.ttl_us is None:
            return LeaseVerdict(True, 0.0, 0.0)
        now, ttl_s, age_s = self._now(), row.ttl_us / 1e6, row.age_us / 1e6
        if row.incarnation != self._incarnation:
            self._observed.clear()
            self._incarnation = row.incarnation
        observed = self._observed.pop(row.lease, None)
        if observed is None or observed.counter != row.counter:
            observed = Observation(row.counter, now, ttl_s, now)
        if row.unchanged_s is not None:
            observed.since = min(observed.since, now - row.unchanged_s)
            observed.together = True
        observed.last = now
        self._observed[row.lease] = observed
        self._forget_before(now)
        by_clock_s = ttl_s - age_s if 0 <= age_s < ttl_s else 0.0
        left_s = max(observed.since + ttl_s - now, by_clock_s)
        due_s = RENEWED_BY * ttl_s - age_s
        observed.late = not 0 < due_s <= RENEWED_BY * ttl_s
        if observed.late:
            due_s = LOOK_AGAIN * ttl_s
        return LeaseVerdict(left_s <= 0, min(due_s, left_s) + GRAIN_S, left_s)

    def _forget_before(self, now: float) -> None:
        while self._observed:
            lease, oldest = next(iter(self._observed.items()))
            if now - oldest.last < FORGET_AFTER * oldest.ttl_s:
                return
            del self._observed[lease]

    def ripe(self) -> list[str]:
        """Leases for which no renewal was observed for a ttl. Look at them again, and judge them,
        before ending any."""
        now = self._now()
        ripe = (lease for lease, seen in self._observed.items() if seen.since + seen.ttl_s <= now)
        return list(islice(ripe, AT_ONCE))

    def proven(self, lease: str, counter: int) -> bool:
        """Whether a lease may be ended on this incarnation of the server, because no renewal after
        this one was observed there for a ttl."""
        seen = self._observed.get(lease)
        return (
            seen is not None and seen.counter == counter and seen.since + seen.ttl_s <= self._now()
        )

    def forget(self, leases: Iterable[str]) -> None:
        """Discard the observations of leases that were ended or renewed."""
        for lease in leases:
            self._observed.pop(lease, None)
