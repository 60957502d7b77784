"""The Store port on NATS: entries in a bucket of which every client keeps a copy.

One write decides an election. The leader record is written only if the key's subject has no message
yet, or if its last message is the delete marker or the void record that this client has seen. The
record is bound to a lease by a header. If that lease had ended before the write, the record is void
for all clients from the start, and its writer finds that out before `create` returns.
"""

from __future__ import annotations

import uuid
from builtins import list as list_
from collections.abc import Callable, Sequence
from dataclasses import replace

from doyen.errors import OutcomeUnknown, StoreError, TicketGone
from doyen.model import Entry, Finding, Lease, Version
from doyen.stores.kit.lifecycle import GuardedStore
from doyen.stores.nats.buckets import Buckets
from doyen.stores.nats.jetstream import PIPELINED, JetStream, NatsAddress, WrongSequence
from doyen.stores.nats.leases import NatsLeases
from doyen.stores.nats.mirror import Mirror
from doyen.stores.nats.view import CREATED, LEASE, subject_of
from doyen.stores.port import Capabilities, Context, Creation, Looked, Watch


class NatsStore(GuardedStore):
    """One handle on a bucket."""

    def __init__(self, address: NatsAddress, context: Context, *, bucket: str) -> None:
        self._bucket = bucket
        self._jetstream = JetStream(address)
        self._renewals = JetStream(address)
        self._buckets = Buckets(self._jetstream, bucket, context)
        self._mirror = Mirror(self._jetstream, self._buckets)
        self._leases = NatsLeases(
            self._jetstream, self._renewals, self._buckets, self._mirror, context
        )
        self._ends_only = context.ends_only
        # A client that has just begun to observe needs a whole ttl from then on to find a lease
        # expired. A candidate that has been waiting needs little more than the ttl in all.
        self.capabilities = Capabilities(
            expiry_factor=2.0, notice_s=0.1, durable=False, value_limit="within NATS' max_payload"
        )

    async def open(self, *, replicas: int, floor: int) -> None:
        """Connect, create missing buckets, and copy the one with the entries."""
        await self._jetstream.open()
        await self._renewals.open()
        await self._buckets.open(replicas, floor)
        if self._buckets.replicas > 1:
            self.capabilities = replace(self.capabilities, durable=True, linearizable_reads=False)
        if self._ends_only:
            return
        observer = self._leases.observer
        self._mirror.start(observer.changed, observer.all_changed)
        await self._mirror.catch_up()
        await self._leases.start()

    async def grant(self, ttl_s: float) -> Lease:
        return await self._leases.grant(max(ttl_s, self.capabilities.ttl_min_s))

    async def remaining(self, leases: Sequence[str]) -> dict[str, float]:
        return await self._leases.remaining(leases)

    async def renew(self, lease: Lease) -> None:
        await self._leases.renew(lease)

    async def revoke(self, lease: Lease) -> None:
        await self._leases.revoke(lease)

    def warrant(self, lease: Lease) -> bytes:
        return self._leases.warrant(lease)

    async def end(self, warrant: bytes) -> None:
        await self._leases.end(warrant)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        while True:
            sequence = await self._write_new(key, value, {LEASE: lease.id}, lease.id)
            if sequence is not None:
                await self._mirror.reach(sequence)
                self._leases.require(lease.id)
                return Creation(True, Entry(key, value, sequence, sequence, lease.id))
            present = await self.get(key)
            if present is not None:
                return Creation(False, present)

    async def create_and_look(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked:
        """Once the copy has the new entry, it is as new as a read would make it."""
        creation, view = await self.create(key, value, lease), self._mirror.view
        if creation.won and ticket is not None and other not in view.entries:
            line = view.under(ticket.key.rpartition("/")[0])
            if line and line[0].key == ticket.key:
                return Looked(creation)
        try:
            ahead = None if ticket is None else await self.ahead(ticket)
            return Looked(creation, ahead, await self.get(other))
        except StoreError as error:
            return Looked(creation, failure=error)

    async def _write_new(
        self, key: str, value: bytes, headers: dict[str, str], lease: str | None
    ) -> int | None:
        """Write an entry if there is none at the key; None if there is one."""
        while True:
            if lease is not None:
                self._leases.require(lease)
            if key in self._mirror.view.entries:
                await self._mirror.catch_up()
                if key in self._mirror.view.entries:
                    return None
            expected = self._mirror.view.markers.get(key, 0)
            try:
                return await self._mirror.write(self._subject(key), value, expected, headers)
            except WrongSequence:
                found = await self._jetstream.last(f"KV_{self._bucket}", self._subject(key))
                if found is not None:
                    await self._mirror.reach(found.sequence)
                self._mirror.view.correct_marker(key, expected, found)

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        if if_version is None:
            sequence = await self._write_new(key, value, {}, None)
            return None if sequence is None else Entry(key, value, sequence, sequence)
        present = await self._present(key, if_version)
        return None if present is None else await self._replace(present._replace(lease=None), value)

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        present = await self._present(entry.key, entry.version)
        if present is None or present.lease is None:
            return None
        written = await self._replace(present, value)
        if written is None:
            return None
        await self._mirror.reach(int(str(written.version)))
        if present.lease in self._mirror.view.leases:
            return written
        ended = self._mirror.view.ended.get(present.lease)
        if ended is None:
            raise OutcomeUnknown(
                f"the lease of {entry.key} ended while the entry was being updated: whether it had"
                " the new value before it was removed is unknown"
            )
        # If the lease had ended before the write, what was written is void from the start.
        return written if ended > int(str(written.version)) else None

    async def _present(self, key: str, version: Version) -> Entry | None:
        """The entry at a key, if it has this version."""
        await self._mirror.catch_up()
        present = self._mirror.view.entries.get(key)
        return present if present is not None and present.version == version else None

    async def _replace(self, present: Entry, value: bytes) -> Entry | None:
        """Write another value, with the creation and the lease of this entry, if it has not been
        written since."""
        headers = {CREATED: str(present.revision)}
        if present.lease is not None:
            headers[LEASE] = present.lease
        last = int(str(present.version))
        try:
            sequence = await self._mirror.write(self._subject(present.key), value, last, headers)
        except WrongSequence:
            return None
        return present._replace(value=value, version=sequence)

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        known = self._mirror.view.entries.get(key)
        # However old the copy is: the server compares the version, and it is used only once.
        is_known = known is not None and known.version == if_version
        while True:
            if not is_known:
                await self._mirror.catch_up()
            is_known = False
            present = self._mirror.view.entries.get(key)
            if present is None or if_version not in (None, present.version):
                return False
            try:
                await self._jetstream.delete(self._subject(key), int(str(present.version)))
                return True
            except WrongSequence:
                found = await self._jetstream.last(f"KV_{self._bucket}", self._subject(key))
            if found is not None:
                await self._mirror.reach(found.sequence)
                continue
            # An operator has purged the entry. Consumers are not notified of a purge; a delete
            # marker removes the entry from all copies.
            try:
                await self._jetstream.delete(self._subject(key), 0)
                return True
            except WrongSequence:
                continue

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        self._leases.require(lease.id)
        key = f"{line}/{rank}-{uuid.uuid4().hex}"
        sequence = await self._mirror.write(self._subject(key), value, 0, {LEASE: lease.id})
        await self._mirror.reach(sequence)
        self._leases.require(lease.id)
        return Entry(key, value, sequence, sequence, lease.id)

    async def ahead(self, ticket: Entry) -> Entry | None:
        checked = 1
        while True:
            await self._mirror.catch_up()
            line = self._mirror.view.under(ticket.key.rpartition("/")[0])
            place = next((n for n, each in enumerate(line) if each.key == ticket.key), None)
            if place is None:
                raise TicketGone(f"the ticket {ticket.key} is no longer in its line")
            if not await self._leases.expire_owners(line[max(0, place - checked) : place]):
                return line[place - 1] if place else None
            checked = min(2 * checked, PIPELINED)  # expired leases come in groups

    async def get(self, key: str) -> Entry | None:
        while True:
            await self._mirror.catch_up()
            entry = self._mirror.view.entries.get(key)
            if entry is None or not await self._leases.expire_owners([entry]):
                return entry

    async def list(self, prefix: str) -> list_[Entry]:
        while True:
            await self._mirror.catch_up()
            entries = self._mirror.view.under(prefix)
            if not await self._leases.expire_owners(entries):
                return entries

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        watch = await self._leases.observer.watch(scope, notify)
        try:
            await self._mirror.catch_up()
        except BaseException:
            watch.close()
            raise
        return watch

    async def diagnose(self) -> Sequence[Finding]:
        version = self._jetstream.version
        findings = [Finding.ok("version", f"NATS {version}")]
        if self._buckets.replicas == 1:
            findings.append(
                Finding.warning(
                    "durability",
                    "the bucket has one replica, and by default a server confirms writes"
                    " before they are on disk: if it crashes, confirmed writes may be lost and a"
                    " second leader elected; only fencing by tokens protects against that",
                    "set jetstream.sync_interval to always, or use three replicas",
                )
            )
        return findings

    async def _release(self) -> None:
        await self._leases.close()
        await self._mirror.close()
        await self._renewals.close()
        await self._jetstream.close()

    def _subject(self, key: str) -> str:
        return subject_of(self._bucket, "entries", key)
