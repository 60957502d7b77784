"""One attempt of a candidate: its lease, its id, and what it has written to the store.

All states of a campaign share the attempt, so it keeps the invariants that span them:

- An unknown outcome is not leadership. After one, only a read that shows this attempt's own id
  under this attempt's own lease proves that the write was carried out (`is_mine`). Until the
  attempt ends it counts as `in_doubt`: the write may still be carried out late, so entries that it
  would leave are looked for and removed.
- Every entry that the attempt writes is bound to its lease. When the lease ends, the store removes
  them, and the campaign goes on with a new attempt.
- On leaving, the record is deleted only after the body has ended, and only by its own version.
  After an unknown outcome, including that of an update of the record, entries left by writes that
  are carried out late are looked for and removed for one ttl.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from doyen.election.core import Deletion, SessionCore
from doyen.election.options import CampaignSettings
from doyen.errors import LeaseGone, OutcomeUnknown, StoreError, StoreUnavailable, TicketGone
from doyen.lease.keepalive import Keepalive
from doyen.model import Claim, Entry, Meta, Order, Version, leader_key, line_key
from doyen.stores.port import Watch

__all__ = ["Attempt", "Wakeup"]

T = TypeVar("T")


class Wakeup:
    """Ends a sleep early, or the next one if none is under way."""

    __slots__ = ("_sleeper", "woken")

    def __init__(self) -> None:
        self.woken = False
        """Something has changed since this was last set to False."""
        self._sleeper: asyncio.Future[None] | None = None

    def wake(self) -> None:
        self.woken = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    async def sleep(self, until: float) -> bool:
        """Sleep until woken; False if the time came first."""
        if self.woken:
            return True
        self._sleeper = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(None if until == math.inf else until):
                await self._sleeper
            return True
        except TimeoutError:
            return False
        finally:
            self._sleeper = None


class Attempt:
    """One attempt on one lease. Used on doyen's loop."""

    __slots__ = (
        *("_ended", "_since", "_updating", "_watch", "core", "id", "in_doubt", "in_turn"),
        *("keepalive", "markers", "on_change", "record", "record_key", "record_keys", "settings"),
        *("slot", "ticket", "wakeup"),
    )

    def __init__(self, core: SessionCore, settings: CampaignSettings, keepalive: Keepalive) -> None:
        self.core = core
        self.settings = settings
        self.keepalive = keepalive
        self.id = core.next_attempt()
        self.slot: int | None = None
        """The slot of a semaphore that this attempt claims or holds."""
        self.record_key = ""
        self.record_keys: tuple[str, ...] = ()
        """Keys at which this attempt may have created its record: several for a semaphore."""
        if settings.kind != "semaphores":
            self.choose_slot(None)
        self.ticket: Entry | None = None
        self.in_turn = settings.kind == "semaphores"  # a slot is taken without a ticket
        """No ticket was ahead when the record was created, as far as is known."""
        self.record: Entry | None = None
        self._since = 0.0
        self.markers: tuple[str, ...] = ()
        """Keys at which this attempt may have written an order or a ready marker."""
        self.in_doubt = False
        """The outcome of a write is unknown."""
        self._updating: Version | None = None
        """The version of the record that an update replaces whose outcome is unknown. The record
        may have another version than `record` says, now or later."""
        self.wakeup = Wakeup()
        self.on_change: Callable[[], None] = self.wakeup.wake
        """Called when the record, or an entry below it, has changed."""
        self._watch: Watch | None = None
        self._ended = False
        keepalive.attempts.add(self.id)
        keepalive.on_loss(self, self.wakeup.wake)

    @property
    def label(self) -> str:
        """The name of the election or lock; for a semaphore, that of the slot."""
        return (
            self.settings.election if self.slot is None else f"{self.settings.election}/{self.slot}"
        )

    def choose_slot(self, slot: int | None) -> None:
        """From now on the record to create is that of `slot`; None if this is not a semaphore."""
        self.slot = slot
        self.record_key = leader_key(self.label, self.settings.kind)
        if self.record_key not in self.record_keys:
            self.record_keys += (self.record_key,)

    def ticket_value(self) -> bytes:
        """The value of this attempt's ticket."""
        return self._claim(None).encode()

    def record_value(self, meta: Meta | None = None) -> bytes:
        """The value of this attempt's record. It states when the record was created, which is when
        this is called until there is a record."""
        if self.record is None:
            self._since = self.core.runtime.clock.wall()
        return self._claim(meta, self._since, self.keepalive.lease.ttl_s).encode()

    def _claim(self, meta: Meta | None, *shown_in_record: float) -> Claim:
        settings = self.settings
        meta = settings.meta if meta is None else meta
        return Claim(settings.name, self.id, meta, settings.priority, *shown_in_record)

    def is_mine(self, entry: Entry) -> bool:
        """Whether this attempt wrote the entry, under its own lease."""
        return (
            entry.lease == self.keepalive.lease.id and Claim.decode(entry.value).attempt == self.id
        )

    async def get(self, key: str) -> Entry | None:
        return await self.core.call(self.core.store.get(key))

    async def ahead(self, ticket: Entry) -> Entry | None:
        return await self.core.call(self.core.store.ahead(ticket))

    async def write(self, request: Awaitable[T]) -> T:
        """Make a call that may leave an entry of this attempt, even if its response is lost."""
        before, self.in_doubt = self.in_doubt, True
        try:
            answer = await self.core.call(request)
        except (StoreUnavailable, LeaseGone):
            self.in_doubt = before
            raise
        self.in_doubt = before
        return answer

    def write_now(self, request: Callable[[], T]) -> T:
        """`write`, for a call that returns at once."""
        before, self.in_doubt = self.in_doubt, True
        try:
            answer = request()
        except (StoreUnavailable, LeaseGone):
            self.in_doubt = before
            raise
        self.in_doubt = before
        return answer

    async def update_record(self, value: bytes) -> bool:
        """Replace the value of the record; False if the record is gone or another's.

        Only one call at a time. If an earlier one raised, or was cancelled, its update may still be
        carried out. The store accepts only one update of each version. So once a version that was
        read after such a failure has been replaced, the earlier update can no longer take effect.
        """
        store = self.core.store
        while True:
            if self._updating is not None or self.record is None:
                record = await self.get(self.record_key)
                if record is None or not self.is_mine(record):
                    return False
                self.record = record
                if record.version != self._updating:
                    self._updating = None
            if self.record.value == value and self._updating is None:
                return True
            before, self._updating = self._updating, self.record.version
            try:
                updated = await self.core.call(store.update(self.record, value))
            except StoreUnavailable:
                self._updating = before
                raise
            if updated is not None:
                self.record, self._updating = updated, None
                return True

    async def write_marker(self, key: str, value: bytes) -> Entry:
        """Create an order or a ready marker, and return the entry that is at its key then."""
        if key not in self.markers:
            self.markers += (key,)
        store = self.core.store
        return (await self.write(store.create(key, value, self.keepalive.lease))).entry

    async def remove_markers(self) -> None:
        """Delete this attempt's orders and ready markers. While a write may still be carried out,
        their keys are kept, to be looked at again the next time."""
        for key in self.markers:
            entry = await self.get(key)
            if entry is not None and entry.lease == self.keepalive.lease.id:
                order = Order.decode(entry.value)
                if order is None or order.successor == self.id:
                    store = self.core.store
                    await self.core.call(store.delete(key, if_version=entry.version))
            if not self.in_doubt:
                self.markers = tuple(each for each in self.markers if each != key)

    async def watch_record(self) -> bool:
        """Watch the record and what is below it, until the attempt ends. False if it was watched
        already."""
        if self._watch is not None:
            return False
        watch = await self.core.call(self.core.store.watch(self.record_key, self._changed))
        if self._ended or self._watch is not None:
            watch.close()  # not needed any more, or opened by a concurrent call meanwhile
        else:
            self._watch = watch
        return True

    def unwatch_record(self) -> None:
        """Do not watch the record any more."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _changed(self) -> None:
        self.on_change()

    def leave(self, successor: str = "") -> asyncio.Task[None] | None:
        """Remove what the attempt has in the store, in the background, and end it. The body, if
        there was one, has ended.

        `successor` is the key of an entry of the candidate that is to follow, if one was named.
        Returns None if there is nothing to remove.
        """
        self.keepalive.forget(self)
        self.in_doubt = self.in_doubt or self._updating is not None
        has_entries = self.ticket or self.record or self.markers or self.in_doubt
        if not has_entries or self.keepalive.lost_because is not None:
            self.end()
            return None
        begun = None
        if not successor and not self._is_out_of_turn() and self._may_remove_entries_now():
            self.unwatch_record()  # no notification of its own deletion
            entries = [entry for entry in (self.record, self.ticket) if entry is not None]
            if self.core.deletions.delete_now(entries):
                self.record = self.ticket = None
                self.end()
                return None
            begun = self.core.deletions.begin(entries)
        return self.core.tasks.start(self._leave(successor, begun))

    def _is_out_of_turn(self) -> bool:
        return not self.in_turn and (self.record is not None or self.in_doubt)

    def _may_remove_entries_now(self) -> bool:
        """Whether the record and the ticket are all that the attempt has in the store, and nothing
        has to be waited for before they are deleted."""
        if self.in_doubt or self.markers or self.core.admission.full():
            return False
        return self.record is None or self.core.telemetry.is_written

    async def _leave(self, successor: str, begun: Deletion | None) -> None:
        """`begun` is the deletion of the record and the ticket, if it is under way."""
        core, keepalive = self.core, self.keepalive
        doubt_ends = core.runtime.clock.now() + keepalive.timing.ttl_s
        out_of_turn = self._is_out_of_turn()
        try:
            if self.record is not None:
                await core.telemetry.written()
            while keepalive.lost_because is None:
                try:
                    if successor:
                        await self._let_in(successor)
                        successor = ""
                    if self.ticket is not None and out_of_turn:
                        await self._let_in_those_ahead(self.ticket)
                        out_of_turn = False
                    if begun is not None:
                        deletion, begun = begun, None
                        await core.deletions.finish(deletion)
                        self.record = self.ticket = None
                    else:
                        async with core.admission:
                            await self._remove_entries()
                except (StoreUnavailable, OutcomeUnknown):
                    await asyncio.sleep(core.calls.retry_pause())
                    continue
                except StoreError as error:
                    keepalive.lose(f"the entries of this session could not be deleted: {error}")
                    return
                if not self.in_doubt or core.runtime.clock.now() >= doubt_ends:
                    return
                await asyncio.sleep(keepalive.timing.request_timeout_s)
        finally:
            self.end()

    async def _let_in(self, successor: str) -> None:
        """Delete the record, and keep the ticket until the successor has the record, or is gone, or
        one request timeout has passed. Until then no candidate behind this ticket wakes."""
        await self._read_record()
        await self._delete(self.record)
        self.record = None
        await self._until_taken(lambda: self.get(successor))

    async def _let_in_those_ahead(self, ticket: Entry) -> None:
        """`_let_in`, for a leader that was elected out of turn, so that a ticket is still ahead of
        its own. The candidate behind would take the deletion of this ticket as a sign that it is
        the next."""
        await self.watch_record()
        await self._read_record()
        await self._delete(self.record)
        self.record = None
        with suppress(TicketGone):
            await self._until_taken(lambda: self.ahead(ticket))

    async def _until_taken(self, successor: Callable[[], Awaitable[Entry | None]]) -> None:
        """Wait until another attempt has the record, but for one request timeout at most, and only
        while there is a successor."""
        until = asyncio.get_running_loop().time() + self.core.calls.timing.request_timeout_s
        while True:
            self.wakeup.woken = False
            record, waiting = await asyncio.gather(self.get(self.record_key), successor())
            if record is not None or waiting is None or not await self.wakeup.sleep(until):
                return

    async def _remove_entries(self) -> None:
        await self._read_record()
        # The requests are sent in this order, without waiting in between. A successor that finds
        # the record before it is deleted waits for the deletion.
        await asyncio.gather(self._delete(self.record), self._delete(self.ticket))
        self.record = self.ticket = None
        if self.in_doubt and self.settings.recipe == "line":
            await self._remove_tickets()
        await self.remove_markers()

    async def _remove_tickets(self) -> None:
        line = line_key(self.settings.election, self.settings.kind)
        for ticket in await self.core.call(self.core.store.list(line)):
            if self.is_mine(ticket):
                await self._delete(ticket)

    async def _read_record(self) -> None:
        """If a write is in doubt, find out which record of this attempt exists."""
        if self.in_doubt:
            self.record = await self._remove_other_records()

    async def _remove_other_records(self) -> Entry | None:
        """Delete records of this attempt but the one that it holds, and return that one, if any."""
        held = None
        for key in self.record_keys:
            record = await self.get(key)
            if record is not None and self.is_mine(record):
                if key == self.record_key:
                    held = record
                else:
                    await self._delete(record)
        return held

    async def leave_line(self) -> None:
        """Delete the ticket and keep the record, as the holder of a slot does. After an unknown
        outcome, further tickets and records of this attempt are looked for, for one ttl:
        while this session lives, they would not expire."""
        core, keepalive = self.core, self.keepalive
        doubt_ends = core.runtime.clock.now() + keepalive.timing.ttl_s
        while keepalive.lost_because is None and not self._ended:
            try:
                await self._delete(self.ticket)
                self.ticket = None
                if self.in_doubt:
                    await self._remove_tickets()
                    await self._remove_other_records()
            except StoreError:
                await asyncio.sleep(core.calls.retry_pause())
                continue
            if not self.in_doubt or core.runtime.clock.now() >= doubt_ends:
                return
            await asyncio.sleep(keepalive.timing.request_timeout_s)

    async def _delete(self, entry: Entry | None) -> None:
        if entry is not None:
            await self.core.deletions.delete(entry)

    def end(self) -> None:
        """Stop watching, and end the lease if no other attempt shares it."""
        self._ended = True
        self.keepalive.forget(self)
        self.keepalive.attempts.discard(self.id)
        self.unwatch_record()
        self.core.leases.release(self.keepalive)
