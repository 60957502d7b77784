"""Promises about lines: one order for all clients, and `ahead` returns the preceding ticket."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from doyen.errors import LeaseGone, StoreError, TicketGone
from doyen.model import leader_key, line_key, order_key
from doyen.testing.conformance.harness import StoreHarness, leased, listed, promise, put


class LineConformance:
    """Promises about lines and tickets."""

    @promise
    async def test_a_line_is_ordered_by_rank_then_by_arrival(self, h: StoreHarness) -> None:
        """Tickets are ordered by rank, highest first, and within a rank by arrival."""
        racers = [await leased(h) for _ in range(4)]
        line = line_key(h.name())
        ranks = [0, 0, 5, -3, 0, 5, 10, -3, 0, 1_000_000, -1_000_000, 9, 10, 99]
        arrived = []
        for number, rank in enumerate(ranks):
            store, lease = racers[number % len(racers)]
            value = f"{rank}:{number}".encode()
            ticket = await store.enqueue(line, value, lease, rank=rank)
            assert ticket.value == value
            assert ticket.lease == lease.id
            arrived.append(value)
        expected = sorted(arrived, key=lambda value: -int(value.split(b":")[0]))
        for store, _ in racers:
            assert await listed(store, line) == expected
            head = await store.head(line)
            assert head is not None
            assert head.value == expected[0]

    @promise
    async def test_ahead_returns_the_preceding_ticket(self, h: StoreHarness) -> None:
        """`ahead` leads from any ticket to the head of the line, for every client."""
        racers = [await leased(h) for _ in range(3)]
        line = line_key(h.name())
        for number in range(30):
            store, lease = racers[number % 3]
            await store.enqueue(line, str(number).encode(), lease, rank=number * 7 % 5 - 2)
        tickets = await racers[0][0].list(line)
        assert len(tickets) == 30
        for store, _ in racers:
            assert await store.ahead(tickets[0]) is None
            for before, ticket in pairwise(tickets):
                ahead = await store.ahead(ticket)
                assert ahead is not None
                assert (ahead.key, ahead.value) == (before.key, before.value)

    @promise
    async def test_removed_tickets_are_no_longer_ahead(self, h: StoreHarness) -> None:
        """When a ticket is deleted or its lease ends, `ahead` returns the ticket before it."""
        (a, a_lease), (b, b_lease), (c, c_lease) = [await leased(h) for _ in range(3)]
        line = line_key(h.name())
        first = await a.enqueue(line, b"first", a_lease)
        second = await b.enqueue(line, b"second", b_lease)
        third = await c.enqueue(line, b"third", c_lease)
        await b.revoke(b_lease)
        ahead = await c.ahead(third)
        assert ahead is not None
        assert ahead.key == first.key
        with pytest.raises(TicketGone):
            await b.ahead(second)
        assert await a.delete(first.key, if_version=first.version)
        assert await c.ahead(third) is None
        head = await a.head(line)
        assert head is not None
        assert head.key == third.key
        with pytest.raises(TicketGone):
            await a.ahead(first)

    @promise
    async def test_an_expired_ticket_is_gone_for_its_holder_too(self, h: StoreHarness) -> None:
        """Once other clients see a ticket as absent, its holder's `ahead` raises `TicketGone`."""
        holder = await h.client()
        other, other_lease = await leased(h)
        lease = await holder.grant(h.ttl_s)
        line = line_key(h.name())
        ticket = await holder.enqueue(line, b"old", lease)
        behind = await other.enqueue(line, b"new", other_lease)

        async def at_the_head() -> bool:
            return await other.ahead(behind) is None

        await h.within("an expired ticket is no longer ahead of the next one", at_the_head)
        with pytest.raises(TicketGone):
            await holder.ahead(ticket)
        assert await listed(other, line) == [b"new"]

    @promise
    async def test_a_late_higher_rank_goes_ahead(self, h: StoreHarness) -> None:
        """A ticket of higher rank goes ahead of tickets that are already in the line."""
        store, lease = await leased(h)
        line = line_key(h.name())
        low = await store.enqueue(line, b"low", lease, rank=-1)
        middle = await store.enqueue(line, b"middle", lease)
        assert await store.ahead(middle) is None
        high = await store.enqueue(line, b"high", lease, rank=1)
        for ticket, before in ((high, None), (middle, high), (low, middle)):
            ahead = await store.ahead(ticket)
            assert (ahead and ahead.key) == (before and before.key)

    @promise
    async def test_ticket_keys_lie_under_the_line_and_are_never_reused(
        self, h: StoreHarness
    ) -> None:
        """A ticket's key is one segment below its line, and no later ticket gets the same key."""
        store, lease = await leased(h)
        line = line_key(h.name())
        seen: list[str] = []
        for _ in range(5):
            tickets = [await store.enqueue(line, b"t", lease) for _ in range(3)]
            seen += (ticket.key for ticket in tickets)
            for ticket in reversed(tickets):
                assert await store.delete(ticket.key, if_version=ticket.version)
        assert len(set(seen)) == len(seen)
        for key in seen:
            assert key.startswith(f"{line}/")
            assert "/" not in key.removeprefix(f"{line}/")

    @promise
    async def test_concurrent_enqueues_each_get_a_ticket(self, h: StoreHarness) -> None:
        """Clients that enqueue at once all get tickets and see the same order, in which each
        client's own tickets are in the order of its calls."""
        racers = [await leased(h) for _ in range(h.racers)]
        line = line_key(h.name())

        async def arrive(racer: int) -> None:
            store, lease = racers[racer]
            for number in range(4):
                await store.enqueue(line, f"{racer}.{number}".encode(), lease)

        await asyncio.gather(*map(arrive, range(h.racers)))
        orders = [await listed(store, line) for store, _ in racers]
        assert all(order == orders[0] for order in orders)
        assert len(set(orders[0])) == len(orders[0]) == 4 * h.racers
        for racer in range(h.racers):
            own = [value for value in orders[0] if value.startswith(f"{racer}.".encode())]
            assert own == sorted(own)

    @promise
    async def test_create_and_look_is_three_calls_in_one(self, h: StoreHarness) -> None:
        """`create_and_look` returns what `create`, `ahead` and `get` return, and raises what
        `create` raises."""
        (a, a_lease), (b, b_lease) = [await leased(h) for _ in range(2)]
        name = h.name()
        key, order, line = leader_key(name), order_key(name), line_key(name)
        first = await a.enqueue(line, b"a", a_lease)
        second = await b.enqueue(line, b"b", b_lease)
        looked = await b.create_and_look(key, b"b", b_lease, second, order)
        assert looked.creation.won
        assert (looked.creation.entry.value, looked.creation.entry.lease) == (b"b", b_lease.id)
        assert looked.ahead is not None
        assert (looked.ahead.key, looked.ahead.value, looked.other) == (first.key, b"a", None)
        await h.shows(a, key, b"b")
        await put(a, order, b"o")
        refused = await a.create_and_look(key, b"a", a_lease, first, order)
        assert not refused.creation.won
        assert refused.creation.entry.version == looked.creation.entry.version
        assert refused.ahead is None
        assert refused.other is not None
        assert (refused.other.key, refused.other.value) == (order, b"o")
        await h.shows(b, key, b"b")
        assert await b.delete(key, if_version=looked.creation.entry.version)
        assert await a.delete(first.key, if_version=first.version)
        again = await b.create_and_look(key, b"again", b_lease, second, order)
        assert again.creation.won
        assert again.creation.entry.revision > looked.creation.entry.revision
        assert again.ahead is None
        assert again.other is not None
        without = await b.create_and_look(order_key(h.name("f")), b"", b_lease, None, key)
        assert without.creation.won
        assert without.ahead is None
        assert without.other is not None
        assert without.other.value == b"again"
        gone = await a.create_and_look(key, b"a", a_lease, first, order)
        assert isinstance(gone.failure, TicketGone)
        assert not gone.creation.won
        await b.revoke(b_lease)
        with pytest.raises(LeaseGone):
            await b.create_and_look(key, b"b", b_lease, second, order)
        await h.shows(a, key, None)

    @promise
    async def test_entries_deleted_together(self, h: StoreHarness) -> None:
        """Deletions that a client requests at the same time each have their own outcome."""
        store, lease = await leased(h)
        name = h.name()
        record = (await store.create(leader_key(name), b"r", lease)).entry
        ticket = await store.enqueue(line_key(name), b"t", lease)
        other = await store.enqueue(line_key(name), b"o", lease)
        absent = record._replace(key=leader_key(h.name("f")))
        asked = (record, ticket, absent, other, record)
        deleted = await asyncio.gather(
            *(store.delete(each.key, if_version=each.version) for each in asked)
        )
        assert deleted[1:4] == [True, False, True]
        assert {deleted[0], deleted[4]} == {True, False}
        await h.shows(store, record.key, None)
        assert not await store.list(line_key(name))

    @promise
    async def test_deletions_that_are_begun(self, h: StoreHarness) -> None:
        """What a store can begin to delete before the caller waits is deleted by its version."""
        store, lease = await leased(h)
        name = h.name()
        record = (await store.create(leader_key(name), b"r", lease)).entry
        ticket = await store.enqueue(line_key(name), b"t", lease)
        if store.begin_deletion([]) is None:
            return
        updated = await store.update(record, b"u")
        assert updated is not None
        begun = store.begin_deletion([record, ticket])
        assert begun is not None
        await begun
        await h.shows(store, record.key, b"u")
        assert not await store.list(line_key(name))
        for _ in range(2):  # it is no error if they are gone
            begun = store.begin_deletion([updated, ticket])
            assert begun is not None
            await begun
            await h.shows(store, record.key, None)
        await store.close()
        if (begun := store.begin_deletion([updated])) is not None:
            with pytest.raises(StoreError):
                await begun
