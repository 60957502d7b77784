"""Which leases were not renewed for a while: the beginning of the stream of renewals. Pure.

The stream keeps the last renewal of each lease only, in the order in which they were written. What
stands before a position are therefore the leases that were not renewed since the stream reached it,
and usually there are none. A client that reads the stream from its beginning up to such a position
learns about all leases with one or two requests, however many there are.

A position never gets another message, so what was read once is read again only where a renewal
was found, to see whether it is still the last one of its lease. Delete markers, which stay for an
hour, are passed once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from doyen.stores.nats.jetstream import StoredMessage

__all__ = ["OldRenewals"]


class OldRenewals:
    """What a client knows of the stream of renewals.

    Invariant: of each lease in `known`, the last renewal is the one in `_last`, a later one that is
    after `_read_to`, or, without one in `_last`, after `_read_to`.
    """

    def __init__(self, read_to: int) -> None:
        """Everything up to `read_to` counts as read: it concerns leases that are not known yet."""
        self._read_to = read_to
        self._last: dict[str, StoredMessage] = {}
        self._positions: list[tuple[int, str]] = []
        """The positions of `_last` with their leases, sorted, and some that have been replaced."""
        self.known: set[str] = set()
        """The leases of which a renewal was seen."""

    def found(self, lease: str, last: StoredMessage | None) -> None:
        """The last message of a lease, as it was read. Responses may arrive in another order than
        that of the requests: an earlier renewal does not replace a later one."""
        before = self._last.get(lease)
        if last is None or last.deleted:
            self.known.discard(lease)
            self._last.pop(lease, None)
        elif before is None or before.sequence < last.sequence:
            self.known.add(lease)
            self._last[lease] = last
            insort(self._positions, (last.sequence, lease))

    def unchanged(self, lease: str) -> StoredMessage | None:
        """The renewal that was the last one of a lease when the stream was read; None if there is
        a later one, which was not read."""
        return self._last.get(lease)

    def next_to_read(self, after: int, until: int) -> int | None:
        """The position to read from, when everything up to `after` was read this time; None if
        nothing is left up to `until`."""
        first = max(after, self._read_to) + 1
        index = bisect_left(self._positions, (after + 1,))
        beyond = index
        while beyond < len(self._positions) and not self._is_last(*self._positions[beyond]):
            beyond += 1
        del self._positions[index:beyond]
        position = first
        if index < len(self._positions):
            position = min(first, self._positions[index][0])
        return position if position <= until else None

    def read(self, start: int, end: int) -> None:
        """There is no message from `start` up to, but not including, `end`. `start` is what
        `next_to_read` returned."""
        passed = slice(*(bisect_left(self._positions, (each,)) for each in (start, end)))
        for position, lease in self._positions[passed]:
            if self._is_last(position, lease):
                del self._last[lease]
        del self._positions[passed]
        self._read_to = max(self._read_to, end - 1)

    def _is_last(self, position: int, lease: str) -> bool:
        last = self._last.get(lease)
        return last is not None and last.sequence == position

    def went_back(self, position: int) -> bool:
        """Whether the stream, which is at `position`, has lost what was read."""
        return position < self._read_to

    def forget_all_but(self, leases: Iterable[str]) -> None:
        """Forget leases that have ended."""
        self.known.intersection_update(leases)
        ended = self._last.keys() - self.known
        if ended:
            for lease in ended:
                del self._last[lease]
            self._positions = sorted((each.sequence, lease) for lease, each in self._last.items())
