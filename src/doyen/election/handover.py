"""Orders and transfers as candidates and leaders see them. `doyen.election.orders` gives them.

Nothing takes the record from a live leader. An order is an entry below the record; the leader whose
token it names ends its own term, and deletes its record once its body has ended. A transfer has two
phases, so that the election is not left without a leader if the successor is gone:

    giver       writes the order, and a notice for the successor
    successor   watches the record, and writes its ready marker for this order
    leader      having seen both, ends its term and deletes the record
    line        leaves the record to the successor for one request timeout, then goes on in order

A candidate with `preempt` gives such an order for itself.
"""

from __future__ import annotations

import asyncio

from doyen.election.attempt import Attempt
from doyen.model import Entry, Order, notice_key, order_key_below, ready_key
from doyen.stores.port import Watch
from doyen.term import Term

__all__ = [
    "Succession",
    "is_ready",
    "is_void",
    "order_to_obey",
    "ready_marker_key",
    "successor_key",
]


class Succession:
    """Whether an order names this attempt as the successor, as its candidate knows from notices."""

    def __init__(self, attempt: Attempt) -> None:
        self.order = ""
        """The lease of the order that names this attempt; empty if there is none."""
        self._attempt = attempt
        self._watch: Watch | None = None
        self._unread = False

    async def watch(self) -> bool:
        """Watch for a notice, until closed. False if it was watched already."""
        if self._watch is not None:
            return False
        core = self._attempt.core
        self._watch = await core.call(core.store.watch(self._key(), self._notified))
        self._unread = True
        return True

    def _key(self) -> str:
        settings = self._attempt.settings
        return notice_key(settings.election, self._attempt.id, settings.kind)

    def _notified(self) -> None:
        self._unread = True
        self._attempt.wakeup.wake()

    async def read(self) -> None:
        """Read the notice if it may have changed, and write the ready marker if there is one."""
        if not self._unread:
            return
        self._unread = False
        try:
            notice = await self._attempt.get(self._key())
            order = "" if notice is None else notice.lease or ""
            if not order or order != self.order:
                self.order = ""
                await self._attempt.remove_markers()
            if order:
                await asyncio.gather(self._attempt.watch_record(), self._write_ready(order))
        except BaseException:
            self._unread = True
            raise
        self.order = order

    async def _write_ready(self, order: str) -> None:
        attempt, value = self._attempt, order.encode()
        key = ready_marker_key(attempt, attempt.id)
        while (await attempt.write_marker(key, value)).value != value:
            await attempt.remove_markers()  # one for an earlier order, which was written late

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def ready_marker_key(attempt: Attempt, successor: str) -> str:
    """The key of a successor's ready marker in the election of `attempt`."""
    return ready_key(attempt.settings.election, successor, attempt.settings.kind)


def successor_key(attempt: Attempt, order: Order) -> str:
    """The key of an entry that the successor keeps until it has the record: its ready marker, or
    the order that it gave for itself."""
    if order.rank is not None:
        return order_key_below(attempt.record_key)
    return ready_marker_key(attempt, order.successor)


async def order_to_obey(attempt: Attempt, term: Term) -> Order | None:
    """The order that the leader has to obey now, if any.

    An order for an earlier term is void. It is deleted, because it would block later orders.
    """
    core, settings = attempt.core, attempt.settings
    entry = await attempt.get(order_key_below(attempt.record_key))
    if entry is None:
        return None
    if is_void(entry, term.token):
        await core.call(core.store.delete(entry.key, if_version=entry.version))
        return None
    order = Order.decode(entry.value)
    if order is None or order.token != term.token:
        return None
    if order.rank is not None:  # given by the successor itself, which is ready
        return order if order.rank > settings.priority else None
    if order.successor:
        ready = await attempt.get(ready_marker_key(attempt, order.successor))
        if not is_ready(ready, entry):
            return None
    return order


def is_void(order: Entry, token: int) -> bool:
    """Whether the entry at the key of orders is for a term before the one with this token."""
    decoded = Order.decode(order.value)
    return decoded is None or decoded.token < token


def is_ready(marker: Entry | None, order: Entry) -> bool:
    """Whether a ready marker is for this order."""
    return marker is not None and marker.value == (order.lease or "").encode()
