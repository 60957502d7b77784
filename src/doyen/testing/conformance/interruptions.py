"""Promises that hold when calls are cancelled, answers are lost and requests arrive late."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any

import pytest

from doyen.errors import LeaseGone, OutcomeUnknown, StoreError
from doyen.model import Claim, leader_key, line_key, order_key
from doyen.testing.conformance.harness import (
    StoreHarness,
    leased,
    listed,
    promise,
    put,
    read,
    whole_update,
)
from doyen.testing.faults import Faults, FaultyStore, Stray, Unanswered


class InterruptionConformance:
    """Promises about interrupted calls."""

    @promise
    async def test_cancelled_calls_are_atomic(self, h: StoreHarness) -> None:
        """A cancelled call has its full effect or none. Nothing that it wrote outlives its lease,
        and the store remains usable."""
        store, other = await h.client(), await h.client()
        for patience in range(8):
            name = h.name(f"c{patience}")
            key, order, line = leader_key(name), order_key(name), line_key(name)
            lease = await store.grant(h.ttl_s * 60)
            before = await put(store, order, b"before")
            await _cancelled(store.create(key, b"whole", lease), patience)
            await _cancelled(store.enqueue(line, b"whole", lease), patience)
            await _cancelled(store.put(order, b"after", if_version=before.version), patience)
            held = (await store.create(f"{key}/held", b"before", lease)).entry
            await _cancelled(store.update(held, b"after"), patience)
            await _cancelled(store.renew(lease), patience)
            assert (await store.create(key, b"whole", lease)).entry.value == b"whole"
            assert await listed(store, line) in ([], [b"whole"])
            final = await read(store, order)
            assert (final.value == b"before") == (final.version == before.version)
            assert final.value in (b"before", b"after")
            whole_update(await read(store, held.key), held)
            await store.revoke(lease)
            await h.shows(other, key, None)
            await h.shows(other, held.key, None)
            assert await listed(store, line) == []

    @promise
    async def test_a_cancelled_revoke_is_atomic(self, h: StoreHarness) -> None:
        """A cancelled `revoke` has ended the lease completely, or has not changed it."""
        store, other = await h.client(), await h.client()
        for patience in range(4):
            name = h.name(f"r{patience}")
            key, line = leader_key(name), line_key(name)
            lease = await store.grant(h.ttl_s * 60)
            await store.create(key, b"v", lease)
            await store.enqueue(line, b"v", lease)
            await _cancelled(store.revoke(lease), patience)
            try:
                await store.renew(lease)
            except LeaseGone:
                await h.shows(other, key, None)
                assert await listed(store, line) == []
            await store.revoke(lease)
            await h.shows(other, key, None)

    @promise
    async def test_a_lost_answer_is_resolved_by_reading_the_attempt_id(
        self, h: StoreHarness
    ) -> None:
        """A `create` that was carried out without an answer is found by reading the key and
        comparing the attempt id. Repeating it is refused with the same entry."""
        faults = Faults()
        store = FaultyStore(await h.client(), faults)
        other, other_lease = await leased(h)
        lease = await store.grant(h.ttl_s * 60)
        mine = Claim("me", uuid.uuid4().hex, {})
        key = leader_key(h.name())
        faults.next("create", Unanswered(raises=True))
        with pytest.raises(OutcomeUnknown):
            await store.create(key, mine.encode(), lease)
        await h.shows(store, key, mine.encode())
        found = await read(store, key)
        assert Claim.decode(found.value).attempt == mine.attempt
        assert found.lease == lease.id
        again = await store.create(key, mine.encode(), lease)
        assert not again.won
        assert again.entry.revision == found.revision
        assert not (await other.create(key, b"other", other_lease)).won

    @promise
    async def test_an_update_without_an_answer_is_whole(self, h: StoreHarness) -> None:
        """An `update` that was carried out without an answer shows when the key is read, and does
        not succeed a second time."""
        faults = Faults()
        store = FaultyStore(await h.client(), faults)
        lease = await store.grant(h.ttl_s * 60)
        entry = (await store.create(leader_key(h.name()), b"before", lease)).entry
        faults.next("update", Unanswered(raises=True))
        with pytest.raises(OutcomeUnknown):
            await store.update(entry, b"after")
        await h.shows(store, entry.key, b"after")
        found = await read(store, entry.key)
        whole_update(found, entry)
        assert await store.update(entry, b"twice") is None
        assert await store.update(found, b"again") is not None

    @promise
    async def test_a_late_request_of_a_revoked_lease_has_no_effect(self, h: StoreHarness) -> None:
        """A `create` or `enqueue` that arrives after its lease was revoked writes nothing."""
        faults = Faults()
        inner = await h.client()
        store, other = FaultyStore(inner, faults), await h.client()
        key, line = leader_key(h.name()), line_key(h.name())
        lease = await store.grant(h.ttl_s * 60)
        late = Stray(after_s=h.ttl_s / 10)
        faults.next("create", late)
        faults.next("enqueue", late)
        calls = [
            asyncio.create_task(store.create(key, b"late", lease)),
            asyncio.create_task(store.enqueue(line, b"late", lease)),
        ]
        await asyncio.sleep(0)
        await store.revoke(lease)
        for call in calls:
            try:
                await call
            except LeaseGone:
                continue
            pytest.fail("a request of a revoked lease was accepted")
        await h.shows(other, key, None)
        assert await other.list(line) == []

    @promise
    async def test_entries_without_a_lease_are_durable(self, h: StoreHarness) -> None:
        """A `put` is durable: it survives its writer's leases, its writer and a restart."""
        store, lease = await leased(h)
        key = order_key(h.name())
        written = await put(store, key, b"kept")
        await store.revoke(lease)
        await h.shows(store, key, b"kept")
        await h.close_clients()
        await h.restart()
        store = await h.client()
        entry = await read(store, key)
        assert (entry.value, entry.revision) == (b"kept", written.revision)
        assert await store.delete(key, if_version=entry.version)


async def _cancelled(call: Coroutine[Any, Any, object], patience: int) -> None:
    """Start a call, run `patience` iterations of the loop, and cancel the call."""
    task = asyncio.create_task(call)
    for _ in range(patience):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except (asyncio.CancelledError, StoreError):
        pass
