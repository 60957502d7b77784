"""What entries promise: one atomic write decides, and reads show it."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from doyen.errors import LeaseGone
from doyen.model import Entry, Lease, leader_key, line_key, order_key
from doyen.stores.port import Store
from doyen.testing.conformance.harness import StoreHarness, leased, listed, promise


class Entries:
    """Promises about what stands at a key."""

    @promise
    async def test_of_many_racers_exactly_one_wins(self, h: StoreHarness) -> None:
        """However many create a key at once, one wins, and the others are shown its entry."""
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
    async def test_a_refused_create_leaves_what_stands_there(self, h: StoreHarness) -> None:
        """A `create` that is refused changes nothing, whoever makes it, the holder included."""
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
        """ "Nothing stands there" includes an entry whose lease has ended by time."""
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
        entry = await other.get(key)
        assert entry is not None
        assert entry.lease == other_lease.id
        assert entry.revision > first.entry.revision
        with pytest.raises(LeaseGone):
            await holder.renew(lease)
        await h.shows(holder, key, b"new")

    @promise
    async def test_put_succeeds_over_an_entry_whose_lease_ended(self, h: StoreHarness) -> None:
        """`put` with no version takes the end of a lease for absence too."""
        store, lease = await leased(h)
        key = order_key(h.name())
        first = (await store.create(key, b"old", lease)).entry
        assert await store.put(key, b"new", if_version=None) is None
        await store.revoke(lease)
        second = await store.put(key, b"new", if_version=None)
        assert second is not None
        assert second.revision > first.revision
        await h.shows(store, key, b"new")

    @promise
    async def test_revisions_grow_however_an_entry_ended(self, h: StoreHarness) -> None:
        """Each creation of a key has a revision above all before it: after a release, a revoke, an
        expiry, a write without a lease, and a restart of the store."""
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

        async def gone() -> bool:
            return await store.get(key) is None

        await h.within("an expired record is gone", gone)
        written = await store.put(key, b"p", if_version=None)
        assert written is not None
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
    async def test_tokens_grow_from_client_to_client(self, h: StoreHarness) -> None:
        """Leadership passed on among many clients gives each successor a higher revision."""
        racers = [await leased(h) for _ in range(h.racers)]
        key, last = leader_key(h.name()), 0
        shuffled = random.Random(1)
        for turn in range(3 * h.racers):
            store, lease = racers[shuffled.randrange(h.racers)]
            # What others write meanwhile must not disturb the order.
            await racers[turn % h.racers][0].put(order_key(h.name(str(turn))), b"", if_version=None)
            won, entry = await store.create(key, b"v", lease)
            assert won
            assert entry.revision > last, f"revision {entry.revision} after {last}"
            last = entry.revision
            assert await store.delete(key, if_version=entry.version)

    @promise
    async def test_put_follows_the_version(self, h: StoreHarness) -> None:
        """`put` is done only over the version that was named; the revision is the creation's."""
        store = await h.client()
        key = order_key(h.name())
        first = await store.put(key, b"1", if_version=None)
        assert first is not None
        assert await store.put(key, b"x", if_version=None) is None
        second = await store.put(key, b"2", if_version=first.version)
        assert second is not None
        assert second.version != first.version
        assert second.revision == first.revision
        assert await store.put(key, b"x", if_version=first.version) is None
        await h.shows(store, key, b"2")
        assert await store.delete(key)
        assert await store.put(key, b"x", if_version=second.version) is None
        await h.shows(store, key, None)

    @promise
    async def test_a_version_is_not_valid_for_a_later_entry(self, h: StoreHarness) -> None:
        """A version of an entry that was deleted does not match its successor."""
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
    async def test_delete_follows_the_version(self, h: StoreHarness) -> None:
        """`delete` with a stale version, or of nothing, does nothing and says so."""
        store, lease = await leased(h)
        key = leader_key(h.name())
        assert not await store.delete(key)
        entry = (await store.create(key, b"v", lease)).entry
        moved = await store.put(order_key(h.name()), b"o", if_version=None)
        assert moved is not None
        newer = await store.put(moved.key, b"p", if_version=moved.version)
        assert newer is not None
        assert not await store.delete(moved.key, if_version=moved.version)
        await h.shows(store, moved.key, b"p")
        assert await store.delete(moved.key, if_version=newer.version)
        assert await store.delete(key, if_version=entry.version)
        assert not await store.delete(key, if_version=entry.version)
        await h.shows(store, key, None)

    @promise
    async def test_concurrent_puts_lose_nothing(self, h: StoreHarness) -> None:
        """Many clients count up one entry by compare-and-swap, and every step is counted."""
        clients = [await h.client() for _ in range(h.racers)]
        key, steps = order_key(h.name()), 5
        assert await clients[0].put(key, b"0", if_version=None) is not None

        async def count(store: Store) -> None:
            done = 0
            while done < steps:
                entry = await store.get(key)
                assert entry is not None
                await asyncio.sleep(0)
                value = str(int(entry.value) + 1).encode()
                done += await store.put(key, value, if_version=entry.version) is not None

        await asyncio.gather(*map(count, clients))
        await h.shows(clients[0], key, str(steps * h.racers).encode())

    @promise
    async def test_concurrent_deletes_succeed_once(self, h: StoreHarness) -> None:
        """Of many who delete, or who write where nothing stands, one succeeds."""
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
        """What one client wrote and was told of, another reads."""
        a, lease = await leased(h)
        b = await h.client()
        key, order = leader_key(h.name()), order_key(h.name())
        for value in (b"", b"text", bytes(range(256)), b"x" * 20_000):
            created = (await a.create(key, value, lease)).entry
            await h.shows(b, key, value)
            written = await a.put(order, value, if_version=None)
            assert written is not None
            await h.shows(b, order, value)
            seen = await b.get(key)
            assert seen is not None
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
    async def test_names_do_not_reach_into_each_other(self, h: StoreHarness) -> None:
        """However odd two names are, neither sees the other's record, order or line."""
        store, lease = await leased(h)
        names = [
            *("a", "ab", "A", "a/b", "a/", "/a", "a%2Fb", "a%", "a_", "a*", "a?", "[a]"),
            *("a b", " a", "a'", 'a"', "a;", "a\\", "a.", "a:", "a#", "ä", "a\u0308", "名前", "🗳"),
            *("a/line", "a/leader", "line", "leader", ".", "..", "~", "-", "%", "x" * 150),
        ]
        for name in names:
            value, full = name.encode(), h.name(name)
            assert (await store.create(leader_key(full), value, lease)).won
            assert await store.put(order_key(full), value, if_version=None) is not None
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
    async def test_names_of_dots_are_names(self, h: StoreHarness) -> None:
        """An election may be called `.` or `..`: its keys are not directions."""
        store, lease = await leased(h)
        for name in (".", ".."):
            ticket = await store.enqueue(line_key(name), h.name().encode(), lease)
            assert h.name().encode() in await listed(store, line_key(name))
            assert await store.delete(ticket.key, if_version=ticket.version)

    @promise
    async def test_list_ends_at_its_prefix(self, h: StoreHarness) -> None:
        """`list(p)` shows what begins with `p` and a slash: not `p` itself, nor its neighbours."""
        store = await h.client()
        prefix = f"elections/{h.name()}"
        inside = [f"{prefix}/{rest}" for rest in ("a", "a/b", "b/c", "0", "~")]
        outside = [f"{prefix}{rest}" for rest in ("", "0", "-", "x/a", "%2Fa", ".", "~/a")]
        for key in (*inside, *outside):
            assert await store.put(key, key.encode(), if_version=None) is not None
        listed = await store.list(prefix)
        assert sorted(entry.key for entry in listed) == sorted(inside)
        assert all(entry.value == entry.key.encode() for entry in listed)
        assert await store.list(f"{prefix}/nothing") == []
        assert await store.head(f"{prefix}/nothing") is None
        for key in (*inside, *outside):
            assert await store.delete(key)
