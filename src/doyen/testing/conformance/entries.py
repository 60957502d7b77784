"""Promises about entries: writes are atomic, and reads return what was written."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from doyen.errors import LeaseGone
from doyen.model import Entry, Lease, leader_key, line_key, order_key
from doyen.stores.port import Store
from doyen.testing.conformance.harness import StoreHarness, leased, listed, promise, put, read


class EntryConformance:
    """Promises about entries."""

    @promise
    async def test_of_many_racers_exactly_one_wins(self, h: StoreHarness) -> None:
        """If many clients create a key at once, one wins, and the others get the winner's entry."""
        racers = [await leased(h) for _ in range(h.racers)]
        key = leader_key(h.name())
        for _ in range(5):
            results = await asyncio.gather(
                *(
                    store.create(key, f"{racer}.{shot}".encode(), lease)
                    for racer, (store, lease) in enumerate(racers)
                    for shot in range(2)
                )
            )
            winners = [result.entry for result in results if result.won]
            assert len(winners) == 1, f"{len(winners)} racers won"
            (winner,) = winners
            for _, entry in results:
                assert (entry.value, entry.revision) == (winner.value, winner.revision)
            for store, _ in racers:
                await h.shows(store, key, winner.value)
            assert await racers[0][0].delete(key, if_version=winner.version)

    @promise
    async def test_a_refused_create_changes_nothing(self, h: StoreHarness) -> None:
        """A refused `create` changes nothing, whether the holder or another client calls it."""
        a, a_lease = await leased(h)
        b, b_lease = await leased(h)
        key = leader_key(h.name())
        won = await a.create(key, b"a", a_lease)
        assert won.won
        assert (won.entry.key, won.entry.value, won.entry.lease) == (key, b"a", a_lease.id)
        for store, lease in ((b, b_lease), (a, a_lease)):
            refused = await store.create(key, b"other", lease)
            assert not refused.won
            assert refused.entry.value == b"a"
            assert refused.entry.lease == a_lease.id
            assert refused.entry.revision == won.entry.revision
        await b.revoke(b_lease)
        await h.shows(a, key, b"a")

    @promise
    async def test_create_succeeds_over_an_entry_whose_lease_expired(self, h: StoreHarness) -> None:
        """`create` treats an entry whose lease has expired as absent."""
        holder = await h.client()
        other, other_lease = await leased(h)
        lease = await holder.grant(h.ttl_s)
        key = leader_key(h.name())
        first = await holder.create(key, b"old", lease)

        async def won() -> bool:
            creation = await other.create(key, b"new", other_lease)
            assert creation.entry.value == (b"new" if creation.won else b"old")
            return creation.won

        await h.within("a create succeeds over the record of an expired lease", won)
        entry = await read(other, key)
        assert entry.lease == other_lease.id
        assert entry.revision > first.entry.revision
        with pytest.raises(LeaseGone):
            await holder.renew(lease)
        await h.shows(holder, key, b"new")

    @promise
    async def test_put_succeeds_over_an_entry_whose_lease_ended(self, h: StoreHarness) -> None:
        """`put` without a version treats an entry whose lease has ended as absent."""
        store, lease = await leased(h)
        key = order_key(h.name())
        first = (await store.create(key, b"old", lease)).entry
        assert await store.put(key, b"new", if_version=None) is None
        await store.revoke(lease)
        second = await put(store, key, b"new")
        assert second.revision > first.revision
        await h.shows(store, key, b"new")

    @promise
    async def test_revisions_grow_across_deletion_expiry_and_restart(self, h: StoreHarness) -> None:
        """Each creation of a key has a higher revision than those before it: after a deletion, a
        revocation, an expiry, a write without a lease, and a restart of the store."""
        key = leader_key(h.name())
        seen: list[int] = []

        async def create(store: Store, lease: Lease) -> Entry:
            won, entry = await store.create(key, b"v", lease)
            assert won
            seen.append(entry.revision)
            return entry

        store, lease = await leased(h)
        entry = await create(store, lease)
        assert await store.delete(key, if_version=entry.version)
        await create(store, lease)
        await store.revoke(lease)

        brief = await store.grant(h.ttl_s)
        await create(store, brief)

        await h.gone(store, key, "an expired record is gone")
        written = await put(store, key, b"p")
        seen.append(written.revision)
        assert await store.delete(key)

        entry = await create(store, await store.grant(h.ttl_s * 60))
        assert await store.delete(key, if_version=entry.version)
        await h.close_clients()
        await h.restart()
        store, lease = await leased(h)
        await create(store, lease)
        assert all(before < after for before, after in pairwise(seen)), f"revisions were {seen}"

    @promise
    async def test_tokens_grow_across_clients(self, h: StoreHarness) -> None:
        """When leadership passes between clients, each new leader gets a higher revision."""
        racers = [await leased(h) for _ in range(h.racers)]
        key, last = leader_key(h.name()), 0
        shuffled = random.Random(1)
        for turn in range(3 * h.racers):
            store, lease = racers[shuffled.randrange(h.racers)]
            # Writes to other keys must not disturb the order.
            await racers[turn % h.racers][0].put(order_key(h.name(str(turn))), b"", if_version=None)
            won, entry = await store.create(key, b"v", lease)
            assert won
            assert entry.revision > last, f"revision {entry.revision} after {last}"
            last = entry.revision
            assert await store.delete(key, if_version=entry.version)

    @promise
    async def test_put_checks_the_version(self, h: StoreHarness) -> None:
        """`put` replaces only the version that it names, and keeps the revision of the creation."""
        store = await h.client()
        key = order_key(h.name())
        first = await put(store, key, b"1")
        assert await store.put(key, b"x", if_version=None) is None
        second = await put(store, key, b"2", first.version)
        assert second.version != first.version
        assert second.revision == first.revision
        assert await store.put(key, b"x", if_version=first.version) is None
        await h.shows(store, key, b"2")
        assert await store.delete(key)
        assert await store.put(key, b"x", if_version=second.version) is None
        await h.shows(store, key, None)

    @promise
    async def test_put_over_an_entry_with_a_lease_unbinds_it(self, h: StoreHarness) -> None:
        """An entry that `put` has written is bound to no lease: it outlives the one that it had."""
        store, lease = await leased(h)
        key = leader_key(h.name())
        created = (await store.create(key, b"bound", lease)).entry
        written = await put(store, key, b"unbound", created.version)
        assert written.lease is None
        assert await store.put(key, b"x", if_version=created.version) is None
        assert await store.update(created, b"x") is None
        assert await store.update(written, b"x") is None
        await store.revoke(lease)
        await h.shows(store, key, b"unbound")
        assert (await read(store, key)).lease is None

    @promise
    async def test_a_version_is_not_valid_for_a_later_entry(self, h: StoreHarness) -> None:
        """The version of a deleted entry does not match an entry created later at the same key."""
        store, lease = await leased(h)
        key = leader_key(h.name())
        old = (await store.create(key, b"same", lease)).entry
        assert await store.delete(key, if_version=old.version)
        new = (await store.create(key, b"same", lease)).entry
        assert new.version != old.version
        assert not await store.delete(key, if_version=old.version)
        assert await store.put(key, b"x", if_version=old.version) is None
        await h.shows(store, key, b"same")

    @promise
    async def test_delete_checks_the_version(self, h: StoreHarness) -> None:
        """`delete` with a stale version, or of an absent key, changes nothing and returns False."""
        store, lease = await leased(h)
        key = leader_key(h.name())
        assert not await store.delete(key)
        entry = (await store.create(key, b"v", lease)).entry
        moved = await put(store, order_key(h.name()), b"o")
        newer = await put(store, moved.key, b"p", moved.version)
        assert not await store.delete(moved.key, if_version=moved.version)
        await h.shows(store, moved.key, b"p")
        assert await store.delete(moved.key, if_version=newer.version)
        assert await store.delete(key, if_version=entry.version)
        assert not await store.delete(key, if_version=entry.version)
        await h.shows(store, key, None)

    @promise
    async def test_concurrent_puts_lose_nothing(self, h: StoreHarness) -> None:
        """Clients increment one entry by compare-and-swap, and no increment is lost."""
        clients = [await h.client() for _ in range(h.racers)]
        key, steps = order_key(h.name()), 5
        await put(clients[0], key, b"0")

        async def count(store: Store) -> None:
            done = 0
            while done < steps:
                entry = await read(store, key)
                await asyncio.sleep(0)
                value = str(int(entry.value) + 1).encode()
                done += await store.put(key, value, if_version=entry.version) is not None

        await asyncio.gather(*map(count, clients))
        await h.shows(clients[0], key, str(steps * h.racers).encode())

    @promise
    async def test_concurrent_deletes_succeed_once(self, h: StoreHarness) -> None:
        """Of many clients that delete a key, or write to an absent key, exactly one succeeds."""
        clients = [await h.client() for _ in range(h.racers)]
        key = order_key(h.name())
        for _ in range(3):
            puts = await asyncio.gather(
                *(store.put(key, b"v", if_version=None) for store in clients)
            )
            assert sum(entry is not None for entry in puts) == 1
            version = next(entry.version for entry in puts if entry is not None)
            deletes = await asyncio.gather(
                *(store.delete(key, if_version=version) for store in clients)
            )
            assert deletes.count(True) == 1

    @promise
    async def test_clients_see_each_others_writes(self, h: StoreHarness) -> None:
        """A confirmed write of one client is read by another."""
        a, lease = await leased(h)
        b = await h.client()
        key, order = leader_key(h.name()), order_key(h.name())
        for value in (b"", b"text", bytes(range(256)), b"x" * 20_000):
            created = (await a.create(key, value, lease)).entry
            await h.shows(b, key, value)
            written = await put(a, order, value)
            await h.shows(b, order, value)
            seen = await read(b, key)
            assert (seen.revision, seen.version, seen.lease) == (
                created.revision,
                created.version,
                lease.id,
            )
            assert await b.delete(order, if_version=written.version)
            assert await b.delete(key, if_version=created.version)
            await h.shows(a, order, None)
            await h.shows(a, key, None)

    @promise
    async def test_names_are_isolated_from_each_other(self, h: StoreHarness) -> None:
        """Records, orders and lines of different names are separate, whatever the characters."""
        store, lease = await leased(h)
        names = [
            *("a", "ab", "A", "a/b", "a/", "/a", "a%2Fb", "a%", "a_", "a*", "a?", "[a]"),
            *("a b", " a", "a'", 'a"', "a;", "a\\", "a.", "a:", "a#", "ä", "a\u0308", "名前", "🗳"),
            *("a/line", "a/leader", "line", "leader", ".", "..", "~", "-", "%", "x" * 150),
        ]
        for name in names:
            value, full = name.encode(), h.name(name)
            assert (await store.create(leader_key(full), value, lease)).won
            await put(store, order_key(full), value)
            await store.enqueue(line_key(full), value, lease)
            await store.enqueue(line_key(full), value, lease)
        for name in names:
            value, full = name.encode(), h.name(name)
            await h.shows(store, leader_key(full), value)
            await h.shows(store, order_key(full), value)
            assert await listed(store, line_key(full)) == [value, value]
            under = leader_key(full).removesuffix("/leader")
            assert await listed(store, under) == [value] * 4

    @promise
    async def test_names_consisting_of_dots(self, h: StoreHarness) -> None:
        """An election may be called `.` or `..`: keys are not interpreted as paths."""
        store, lease = await leased(h)
        for name in (".", ".."):
            ticket = await store.enqueue(line_key(name), h.name().encode(), lease)
            assert h.name().encode() in await listed(store, line_key(name))
            assert await store.delete(ticket.key, if_version=ticket.version)

    @promise
    async def test_list_returns_only_keys_under_its_prefix(self, h: StoreHarness) -> None:
        """`list(p)` returns the keys that begin with `p` and a slash: not `p` itself, nor keys that
        only share the prefix `p`."""
        store = await h.client()
        prefix = f"elections/{h.name()}"
        inside = [f"{prefix}/{rest}" for rest in ("a", "a/b", "b/c", "0", "~")]
        outside = [f"{prefix}{rest}" for rest in ("", "0", "-", "x/a", "%2Fa", ".", "~/a")]
        for key in (*inside, *outside):
            await put(store, key, key.encode())
        listed = await store.list(prefix)
        assert sorted(entry.key for entry in listed) == sorted(inside)
        assert all(entry.value == entry.key.encode() for entry in listed)
        assert await store.list(f"{prefix}/nothing") == []
        assert await store.head(f"{prefix}/nothing") is None
        for key in (*inside, *outside):
            assert await store.delete(key)
