"""What a line promises: one order, and each ticket knows the one ahead."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from doyen.errors import TicketGone
from doyen.model import line_key
from doyen.testing.conformance.harness import StoreHarness, leased, listed, promise


class Lines:
    """Promises about lines and tickets."""

    @promise
    async def test_a_line_is_ordered_by_rank_then_by_arrival(self, h: StoreHarness) -> None:
        """Tickets stand by rank, highest first, and within a rank as they came."""
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
    async def test_each_ticket_knows_the_one_ahead(self, h: StoreHarness) -> None:
        """`ahead` walks the line from any ticket to the head, whoever asks."""
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
    async def test_the_line_closes_up(self, h: StoreHarness) -> None:
        """When tickets go, by delete or with their lease, those behind see the next one ahead."""
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
        """Once others see a ticket gone, its holder's `ahead` raises `TicketGone`."""
        holder = await h.client()
        other, other_lease = await leased(h)
        lease = await holder.grant(h.ttl_s)
        line = line_key(h.name())
        ticket = await holder.enqueue(line, b"old", lease)
        behind = await other.enqueue(line, b"new", other_lease)

        async def at_the_head() -> bool:
            return await other.ahead(behind) is None

        await h.within("an expired ticket is no longer ahead of anybody", at_the_head)
        with pytest.raises(TicketGone):
            await holder.ahead(ticket)
        assert await listed(other, line) == [b"new"]

    @promise
    async def test_a_late_higher_rank_goes_ahead(self, h: StoreHarness) -> None:
        """A ticket of higher rank takes its place before those that wait already."""
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
        """A ticket's key is one segment under its line, and no later ticket ever has it."""
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
    async def test_concurrent_arrivals_each_get_a_place(self, h: StoreHarness) -> None:
        """Clients that enqueue at once all get tickets, in one order that all agree on; each
        client's own tickets stand in the order it took them."""
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
