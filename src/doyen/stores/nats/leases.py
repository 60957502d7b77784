"""Leases on NATS: renewals are messages, and clients find out which leases have expired.

    KV_<bucket>         leases and entries: see `view`
    KV_<bucket>_beats   one subject per lease: its last renewal, whose sequence is the counter

- Only the holder writes renewals. A lease is ended in two steps. First its renewal is deleted, if
  it is still the one that was seen unchanged for a whole ttl; from then on no renewal succeeds.
  Then the lease is deleted; from then on everything bound to it is void.
- The marks and the observer decide whether a renewal was unchanged for a ttl. The observer also
  decides when to look at which lease.
- More than a few leases are looked at together: the beginning of the stream of renewals shows those
  that were not renewed for a while (`renewals`). So N clients that watch N leases cost N requests
  at a time and not N times N.
- A lease is written before its first renewal. If its holder dies at any point, the lease is in
  every client's copy. Leases that no client waits for are checked by a sweep, a few at a time.

Renewals have a connection of their own, so that they do not queue behind other requests. Imports
the model, the observer of leases and its own package.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from doyen.errors import StoreError, StoreUnavailable
from doyen.events import LeaseEnded
from doyen.events.log_lines import log_line
from doyen.model import Entry, Lease
from doyen.stores.kit.expiry import RENEWED_BY, LeaseRow
from doyen.stores.kit.lifecycle import lease_gone
from doyen.stores.kit.observer import LeaseObserver, Survey
from doyen.stores.nats.buckets import Buckets
from doyen.stores.nats.consumer import BucketConsumer
from doyen.stores.nats.jetstream import (
    PIPELINED,
    JetStream,
    StoredMessage,
    StreamMissing,
    WrongSequence,
)
from doyen.stores.nats.marks import Marks
from doyen.stores.nats.mirror import Mirror
from doyen.stores.nats.renewals import OldRenewals
from doyen.stores.nats.view import LEASE, subject_of
from doyen.stores.port import Context

log = logging.getLogger("doyen.nats")

FEW = 4
"""So many leases are looked at one by one."""
READ_AT_ONCE = 64
"""How many old renewals are read one after the other. If there are more, for example after an
outage, leases are looked at one by one, in pipelined requests."""
MARK_S = 0.1
"""A mark older than this is replaced when leases are looked at."""
SWEEP_S = 2.0
SWEPT = 4
"""The interval of the sweep and how many leases it checks, while it finds none that has expired."""
SUCCESSOR_S = 0.05
"""How long the entries of a lease that was ended are left to those who wait for them."""
_DAMAGED_TTL_S = 60.0
"""The ttl that is assumed if neither the lease nor its renewal shows one."""


class NatsLeases:
    """The leases of a bucket: those that this client holds, and those that it observes."""

    def __init__(
        self,
        jetstream: JetStream,
        renewals: JetStream,
        buckets: Buckets,
        mirror: Mirror,
        context: Context,
    ) -> None:
        self._jetstream = jetstream
        self._renewals = renewals
        self._buckets = buckets
        self._mirror = mirror
        self._bucket = buckets.name
        self._emit = context.emit
        self._now = context.clock.now
        self._marks = Marks()
        self._created, self._replicated = "", False
        """Of the stream of renewals: when it was created, and whether it has several replicas."""
        self._old = OldRenewals(0)
        self._old_of = ""
        """The incarnation to which they belong."""
        self._looks = 0
        self._held: dict[str, int] = {}
        """The sequence of the last renewal of each lease that this client holds."""
        self._granted: dict[str, int] = {}
        """The sequence at which each lease was granted. What is bound to it was written later."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.observer = LeaseObserver(self, context.clock.now)

    async def start(self) -> None:
        """Begin to observe. The mirror is running."""
        await self._mark()
        self._tasks.add(asyncio.get_running_loop().create_task(self._sweep()))

    async def close(self) -> None:
        self.observer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def require(self, lease: str) -> None:
        """Raise `LeaseGone` if the lease has ended, as far as the copy shows."""
        if lease not in self._mirror.view.leases:
            raise lease_gone(lease)

    async def grant(self, ttl_s: float) -> Lease:
        lease = Lease(uuid.uuid4().hex, ttl_s)
        value = str(lease.ttl_s).encode()
        try:
            granted = await self._mirror.write(subject_of(self._bucket, "leases", lease.id), value)
            renewed = await self._jetstream.write(self._subject(lease.id), value, 0)
        except WrongSequence as error:
            raise lease_gone(lease.id) from error
        await self._mirror.reach(granted)
        self._held[lease.id] = renewed
        self._granted[lease.id] = granted
        return lease

    def warrant(self, lease: Lease) -> bytes:
        """What another client needs to end the lease: its id, and since when it has entries."""
        return f"{lease.id} {self._granted.get(lease.id, '')}".rstrip().encode()

    async def renew(self, lease: Lease) -> None:
        subject, value = self._subject(lease.id), str(lease.ttl_s).encode()
        while (last := self._held.get(lease.id)) is not None:
            try:
                sequence = await self._renewals.write(subject, value, last)
            except WrongSequence:
                # Only this client renews the lease. Either the lease has ended, or a renewal that
                # was not answered was carried out.
                found = await self._renewals.last(self._stream, subject)
                if found is None or found.deleted:
                    self._forget(lease.id)
                    break
                sequence = found.sequence
                done = False
            else:
                done = True
            if lease.id in self._held:  # it may have been revoked in the meantime
                self._held[lease.id] = max(sequence, self._held[lease.id])
            if done:
                return
        raise lease_gone(lease.id)

    async def revoke(self, lease: Lease) -> None:
        await self._jetstream.delete(self._subject(lease.id), None)
        self._forget(lease.id)
        await self._end(lease.id)

    def _forget(self, lease: str) -> None:
        self._held.pop(lease, None)
        self._granted.pop(lease, None)

    async def end(self, warrant: bytes) -> None:
        """End the lease of another client, without a copy of the bucket. Its entries are void from
        then on. They are deleted too; only what was written since the lease was granted is looked
        at for that."""
        lease, _, granted = warrant.decode().partition(" ")
        # In this order, but at once: the holder has died, so no renewal can come in between.
        await asyncio.gather(
            self._jetstream.delete(self._subject(lease), None),
            self._jetstream.delete(subject_of(self._bucket, "leases", lease), None),
        )
        if not granted:
            return
        # A candidate replaces the void record. If that is deleted first, it has to look again.
        await asyncio.sleep(SUCCESSOR_S)
        void: list[tuple[str, int]] = []
        since = BucketConsumer.open(self._jetstream, self._bucket, since=int(granted))
        async with since as consumer:
            while consumer.pending > 0:
                subject, message = await consumer.next()
                if message.headers.get(LEASE) == lease and not message.deleted:
                    void.append((subject, message.sequence))
        for subject, sequence in void:
            with suppress(WrongSequence):
                await self._jetstream.delete(subject, sequence)

    async def expire(self, lease: str, counter: int) -> None:
        """For the observer: end a lease, unless it was renewed after all."""
        try:
            await self._jetstream.delete(self._subject(lease), counter)
        except WrongSequence:
            return
        self._emit(LeaseEnded(lease=lease, cause="expired"))
        await self._end(lease)

    async def _end(self, lease: str) -> None:
        """Delete a lease whose renewal has been deleted. Delete its entries in the background:
        they are void already, and nothing depends on it."""
        bound = set(self._mirror.view.bound.get(lease, ()))
        sequence = await self._jetstream.delete(subject_of(self._bucket, "leases", lease), None)
        await self._mirror.reach(sequence)
        if bound:
            task = asyncio.get_running_loop().create_task(self._delete_void(bound))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _delete_void(self, keys: Iterable[str]) -> None:
        for key in keys:
            last = self._mirror.view.markers.get(key)
            if last is not None:
                try:
                    await self._jetstream.delete(subject_of(self._bucket, "entries", key), last)
                except (WrongSequence, StoreError):
                    continue

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]:
        """For the observer: the leases that own something in each scope."""
        surveys = {}
        for scope in scopes:
            here = self._mirror.view.entries.get(scope)
            entries = [*self._mirror.view.under(scope), *([here] if here else [])]
            owners = frozenset(each.lease for each in entries if each.lease is not None)
            surveys[scope] = Survey(frozenset(), owners)
        return surveys

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]:
        """For the observer: the last renewal of each lease. The server's clock is not used."""
        if self._marks.age_s(self._incarnation, self._now()) >= MARK_S:
            await self._mark()
        incarnation = self._incarnation
        together = await self._read_old(leases) if len(leases) > FEW else set()
        alone = [lease for lease in leases if lease not in together]
        found = await self._jetstream.last_of_each(self._stream, map(self._subject, alone))
        if self._incarnation != incarnation:
            raise StoreUnavailable("the server was replaced while leases were being looked at")
        renewals = dict(zip(alone, found, strict=True))
        for lease, renewal in renewals.items():
            self._old.found(lease, renewal)
        self._looks += 1
        rows = []
        for lease in leases:
            renewal = renewals[lease] if lease in renewals else self._old.unchanged(lease)
            if lease in together and renewal is None:
                rows.append(self._renewed(lease, incarnation))
            else:
                rows.append(self._row(lease, renewal, incarnation))
        for row in rows:
            if row.ttl_us is None and row.lease in self._mirror.view.leases:
                await self._end(row.lease)  # another client died between the two steps
        return rows

    async def remaining(self, leases: Sequence[str]) -> dict[str, float]:
        """What is left of leases. How long ago a renewal was written is known from when this client
        first looked after it, so more seems to be left than there is, and never less."""
        rows = await self.look(leases) if leases else ()
        return {
            row.lease: max(0.0, (row.ttl_us or 0) / 1e6 - (row.unchanged_s or 0.0)) for row in rows
        }

    def _row(self, lease: str, renewal: StoredMessage | None, incarnation: str) -> LeaseRow:
        known = self._mirror.view.leases
        if lease not in known or (renewal is not None and renewal.deleted):
            return LeaseRow(lease, None, 0, 0, incarnation)
        ttl_s = known[lease] or _ttl(renewal)
        # Without a renewal the lease is being granted, or its holder died before the first one.
        counter = 0 if renewal is None else renewal.sequence
        unchanged_s = 0.0
        if renewal is not None:
            unchanged_s = self._marks.unchanged_s(incarnation, counter, self._now())
        return LeaseRow(lease, round(ttl_s * 1e6), counter, -1, incarnation, unchanged_s)

    def _renewed(self, lease: str, incarnation: str) -> LeaseRow:
        """The row of a lease that was renewed lately. Its counter is not known; it differs from the
        one before."""
        ttl_s = self._mirror.view.leases.get(lease)
        if ttl_s is None:
            return LeaseRow(lease, None, 0, 0, incarnation)
        return LeaseRow(lease, round(ttl_s * 1e6), -self._looks, -1, incarnation, 0.0)

    async def _read_old(self, leases: Sequence[str]) -> set[str]:
        """Read the renewals that have not been replaced for longer than is usual. Returns those of
        the leases about which that tells everything: the others are to be looked at one by one."""
        ttls = self._mirror.view.leases
        known = sorted(ttl_s for lease in leases if (ttl_s := ttls.get(lease)))
        if not known:
            return set()
        usual_s = known[len(known) // 2]
        unknown = [each for each in leases if each not in self._old.known and ttls.get(each)]
        if len(unknown) > READ_AT_ONCE:
            await self._read_all()
        until = self._marks.position(self._incarnation, self._now() - RENEWED_BY * usual_s)
        if not await self._read_until(until):
            return set()
        return {
            lease
            for lease in leases
            if lease in self._old.known and (ttls.get(lease) or 0.0) >= usual_s
        }

    async def _read_until(self, until: int) -> bool:
        """Read the stream of renewals up to a position; False if too many are there."""
        old = self._old
        position = old.next_to_read(0, until)
        for _ in range(READ_AT_ONCE):
            if position is None:
                return True
            found = await self._jetstream.next(self._stream, self._subject(">"), position)
            if self._old is not old:
                return False
            if found is None or found[1].sequence > until:
                old.read(position, until + 1)
                return True
            subject, renewal = found
            lease = subject.rpartition(".")[2]
            old.read(position, renewal.sequence + 1)
            old.found(lease, renewal)
            if renewal.deleted and lease in self._mirror.view.leases:
                await self._end(lease)  # another client died between the two steps
            position = old.next_to_read(renewal.sequence, until)
        return False

    async def _read_all(self) -> None:
        """Read the last renewal of every lease, as `mirror` reads the bucket."""
        old, subjects = self._old, self._subject(">")
        old.forget_all_but(self._mirror.view.leases)
        last = await self._jetstream.last(self._stream, subjects)
        position, until = 0, last.sequence if last else 0
        async with BucketConsumer.open(self._jetstream, self._buckets.renewals) as consumer:
            while consumer.pending > 0 or position < until:
                subject, renewal = await consumer.next()
                position = renewal.sequence
                old.found(subject.rpartition(".")[2], renewal)

    @property
    def _incarnation(self) -> str:
        """Of the stream of renewals: differs if renewals that were confirmed may be lost. This is
        so after the stream was created anew and, if it has one replica, after a restart of the
        server. A server that is not the connected one may restart unnoticed (see `diagnose`)."""
        return self._created if self._replicated else f"{self._created} {self._jetstream.server_id}"

    async def _mark(self) -> None:
        server = self._jetstream.server_id
        try:
            info = await self._jetstream.call(f"STREAM.INFO.{self._stream}")
        except StreamMissing:
            await self._buckets.ensure_renewals()
            raise
        if self._jetstream.server_id == server:
            self._created = info["created"]
            self._replicated = info["config"]["num_replicas"] > 1
            position = int(info["state"]["last_seq"])
            self._marks.note(self._incarnation, position, self._now())
            if self._incarnation != self._old_of or self._old.went_back(position):
                self._old_of, self._old = self._incarnation, OldRenewals(position)

    async def _sweep(self) -> None:
        """End leases that have expired though no client waits for them.

        Every client checks a few leases at a time, from a random one on, so that many clients find
        them sooner. While most of them have expired it checks more, for a third of the time.
        """
        loop = asyncio.get_running_loop()
        due: deque[str] = deque()
        number, pause_s = SWEPT, SWEEP_S
        while True:
            await asyncio.sleep(pause_s)
            number, pause_s, began = max(SWEPT, number // 2), SWEEP_S, loop.time()
            if not due:
                due.extend(lease for lease, ttl_s in self._mirror.view.leases.items() if ttl_s)
                due.rotate(random.randrange(len(due) + 1))
            leases = [due.popleft() for _ in range(min(number, len(due)))]
            leases = [each for each in leases if each not in self._held]
            try:
                if 2 * await self.expire_if_over(leases) > len(leases):
                    number, pause_s = min(4 * number, 4 * PIPELINED), 2 * (loop.time() - began)
            except (StoreError, WrongSequence) as error:
                log.debug("%s", log_line(event="lease_sweep_failed", reason=error))

    async def expire_owners(self, entries: Iterable[Entry]) -> bool:
        """End those leases of the entries that have expired; whether there was one."""
        leases = {each.lease for each in entries if each.lease is not None}
        return await self.expire_if_over(sorted(leases)) > 0

    async def expire_if_over(self, leases: Sequence[str]) -> int:
        """End those of the leases that have expired, in pipelined requests; how many."""
        over = [row for row in await self.look(leases) if self.observer.judge(row).over]
        to_end = [row for row in over if row.ttl_us is not None]
        for start in range(0, len(to_end), PIPELINED):
            some = to_end[start : start + PIPELINED]
            ending = (self.expire(row.lease, row.counter) for row in some)
            for outcome in await asyncio.gather(*ending, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        return len(over)

    @property
    def _stream(self) -> str:
        return f"KV_{self._buckets.renewals}"

    def _subject(self, lease: str) -> str:
        return f"$KV.{self._buckets.renewals}.{lease}"


def _ttl(renewal: StoredMessage | None) -> float:
    """The ttl according to a renewal, for a lease whose own value is damaged."""
    try:
        ttl_s = float(renewal.value) if renewal else _DAMAGED_TTL_S
    except ValueError:
        return _DAMAGED_TTL_S
    return ttl_s if 0 < ttl_s < math.inf else _DAMAGED_TTL_S
