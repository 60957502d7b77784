"""Promises about updates: an entry that is bound to a lease changes its value and nothing else."""

from __future__ import annotations

import asyncio
from itertools import count

from doyen.model import Entry, leader_key, line_key, order_key
from doyen.stores.port import Store
from doyen.testing.conformance.harness import StoreHarness, leased, listed, promise, put, read
from doyen.testing.faults import Expired, Faults, FaultyStore, Stray


class UpdateConformance:
    """Promises about updates."""

    @promise
    async def test_update_replaces_only_the_version_it_names(self, h: StoreHarness) -> None:
        """`update` replaces the value of the version that it names. Lease and revision stay."""
        store, lease = await leased(h)
        other = await h.client()
        key = leader_key(h.name())
        entry = created = (await store.create(key, b"0", lease)).entry
        # The same value twice: that is a write like any other.
        for value in (b"1", b"1", b"", bytes(range(256)), b"x" * 20_000):
            updated = await store.update(entry, value)
            assert updated is not None
            assert updated.key == key
            assert updated.version != entry.version
            assert await store.update(entry, b"stale") is None
            await h.shows(other, key, value)
            for seen in (updated, await read(other, key)):
                assert (seen.value, seen.version) == (value, updated.version)
                assert (seen.revision, seen.lease) == (created.revision, lease.id)
            entry = updated
        assert not await store.delete(key, if_version=created.version)
        assert not (await store.create(key, b"x", lease)).won
        assert await store.delete(key, if_version=entry.version)
        await h.shows(other, key, None)

    @promise
    async def test_update_of_an_entry_read_from_the_store(self, h: StoreHarness) -> None:
        """An entry that was read can be updated like one that a write returned."""
        store, lease = await leased(h)
        other = await h.client()
        key = leader_key(h.name())
        await store.create(key, b"0", lease)
        for number, client in enumerate((store, other, store, other), start=1):
            value = str(number).encode()
            assert await client.update(await read(client, key), value) is not None
            await h.shows(client, key, value)
        found = {entry.key: entry for entry in await store.list(key.removesuffix("/leader"))}
        assert await store.update(found[key], b"listed") is not None
        await h.shows(other, key, b"listed")
        await store.revoke(lease)
        await h.shows(other, key, None)

    @promise
    async def test_an_updated_ticket_keeps_its_place(self, h: StoreHarness) -> None:
        """A ticket can be updated, and stays where it is in its line."""
        store, lease = await leased(h)
        line = line_key(h.name())
        first = await store.enqueue(line, b"first", lease)
        second = await store.enqueue(line, b"second", lease)
        updated = await store.update(first, b"first again")
        assert updated is not None
        assert updated.key == first.key
        assert await listed(store, line) == [b"first again", b"second"]
        assert await store.ahead(updated) is None
        ahead = await store.ahead(second)
        assert ahead is not None
        assert (ahead.key, ahead.value) == (first.key, b"first again")

    @promise
    async def test_update_of_an_entry_that_is_gone(self, h: StoreHarness) -> None:
        """`update` returns None and changes nothing if the entry was deleted, created again by
        any client, or replaced by an entry without a lease."""
        store, lease = await leased(h)
        other, other_lease = await leased(h)
        key = leader_key(h.name())
        entry = (await store.create(key, b"0", lease)).entry
        versions = [entry]
        for number in range(3):
            updated = await store.update(versions[-1], str(number).encode())
            assert updated is not None
            versions.append(updated)
        assert await store.delete(key)
        for old in versions:
            assert await store.update(old, b"late") is None
        await h.shows(other, key, None)
        for client, owner in ((other, other_lease), (store, lease)):
            # As many writes as the first entry had: an engine may count the writes of each entry.
            entry = (await client.create(key, b"0", owner)).entry
            for number in range(3):
                for old in versions:
                    assert await store.update(old, b"late") is None
                updated = await client.update(entry, str(number).encode())
                assert updated is not None
                entry = updated
            for old in versions:
                assert await store.update(old, b"late") is None
            await h.shows(store, key, b"2")
            assert await client.delete(key, if_version=entry.version)
        free = await put(store, key, b"free")
        for old in (*versions, free):
            assert await store.update(old, b"late") is None
        await h.shows(other, key, b"free")

    @promise
    async def test_update_of_an_entry_without_a_lease(self, h: StoreHarness) -> None:
        """`update` does not apply to entries without a lease."""
        store = await h.client()
        entry = await put(store, order_key(h.name()), b"1")
        assert await store.update(entry, b"2") is None
        await h.shows(store, entry.key, b"1")
        assert (await read(store, entry.key)).version == entry.version

    @promise
    async def test_update_of_an_entry_whose_lease_was_revoked(self, h: StoreHarness) -> None:
        """`update` returns None once the lease has ended, also if it ended after the entry was read
        or while the request was under way."""
        faults = Faults()
        inner = await h.client()
        store, other = FaultyStore(inner, faults), await h.client()
        for number, fault in enumerate((None, Expired(), Stray(after_s=h.ttl_s / 10))):
            key = leader_key(h.name(str(number)))
            lease = await store.grant(h.ttl_s * 60)
            entry = (await store.create(key, b"0", lease)).entry
            first = await store.update(entry, b"1")
            assert first is not None
            if fault is None:
                await store.revoke(lease)
            else:
                faults.next("update", fault)
            call = asyncio.create_task(store.update(first, b"late"))
            await asyncio.sleep(0)
            if isinstance(fault, Stray):
                await inner.revoke(lease)
            assert await call is None
            await h.shows(other, key, None)
            assert await listed(other, key.removesuffix("/leader")) == []
            successor = await other.grant(h.ttl_s * 60)
            assert (await other.create(key, b"next", successor)).won
            assert await store.update(first, b"late") is None
            await h.shows(other, key, b"next")

    @promise
    async def test_an_updated_entry_ends_with_its_lease(self, h: StoreHarness) -> None:
        """An updated entry is gone when its lease has expired, and watches are notified of it. No
        update prolongs the lease, and none succeeds after its end."""
        holder, other = await h.client(), await h.client()
        lease = await holder.grant(h.ttl_s)
        key = leader_key(h.name())
        entry = (await holder.create(key, b"0", lease)).entry
        event = asyncio.Event()
        await other.watch(key, event.set)
        numbers = count(1)

        async def update_fails() -> bool:
            nonlocal entry
            updated = await holder.update(entry, str(next(numbers)).encode())
            if updated is None:
                return True
            entry = updated
            return False

        await h.within("an update returns None after its lease has expired", update_fails)
        await h.gone(other, key, "the entry of an expired lease is gone")
        await h.notified(event, "the expiry of a lease whose entry was updated")
        assert await holder.update(entry, b"late") is None
        await h.shows(holder, key, None)

    @promise
    async def test_an_updated_entry_is_gone_when_its_lease_is_revoked(
        self, h: StoreHarness
    ) -> None:
        """`revoke` removes updated entries as it removes others."""
        store, lease = await leased(h)
        other = await h.client()
        key = leader_key(h.name())
        entry = (await store.create(key, b"0", lease)).entry
        assert await store.update(entry, b"1") is not None
        await store.revoke(lease)
        await h.shows(other, key, None)

    @promise
    async def test_updates_and_the_end_of_the_lease_at_the_same_time(self, h: StoreHarness) -> None:
        """Whichever of an update and a revocation comes first, nothing is left of the entry, and a
        successor's entry is not changed."""
        store = await h.client()
        other, other_lease = await leased(h)
        for number in range(10):
            key = leader_key(h.name(str(number)))
            lease = await store.grant(h.ttl_s * 60)
            entry = (await store.create(key, b"old", lease)).entry

            async def succeed(key: str = key) -> Entry:
                while True:
                    won, made = await other.create(key, b"new", other_lease)
                    if won:
                        return made
                    await asyncio.sleep(0)

            async def update(entry: Entry = entry, number: int = number) -> None:
                for _ in range(number):
                    await asyncio.sleep(0)
                await store.update(entry, b"late")

            made, *_ = await asyncio.gather(succeed(), update(), store.revoke(lease))
            await h.shows(store, key, b"new")
            assert (await read(other, key)).version == made.version

    @promise
    async def test_concurrent_updates_lose_nothing(self, h: StoreHarness) -> None:
        """Clients increment one entry by `update`, and no increment is lost."""
        holder, lease = await leased(h)
        clients = [holder, *[await h.client() for _ in range(h.racers - 1)]]
        key, steps = leader_key(h.name()), 5
        await holder.create(key, b"0", lease)

        async def increment(store: Store) -> None:
            done = 0
            while done < steps:
                entry = await read(store, key)
                await asyncio.sleep(0)
                value = str(int(entry.value) + 1).encode()
                done += await store.update(entry, value) is not None

        await asyncio.gather(*map(increment, clients))
        await h.shows(holder, key, str(steps * h.racers).encode())
        assert (await read(holder, key)).lease == lease.id
