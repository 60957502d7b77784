"""Promises about leases: they live at least their ttl, and an ended lease never comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from doyen.errors import LeaseGone, OutcomeUnknown, StoreUnavailable
from doyen.model import Lease, leader_key, line_key, order_key
from doyen.stores.port import Store
from doyen.testing.conformance.harness import StoreHarness, leased, listed, promise, put, read


class LeaseConformance:
    """Promises about leases."""

    @promise
    async def test_granted_ttl_is_at_least_the_requested_ttl(self, h: StoreHarness) -> None:
        """`grant` returns a lease with at least the requested ttl."""
        store = await h.client()
        for ttl_s in (h.ttl_s, h.ttl_s * 1.5, store.capabilities.ttl_min_s / 2):
            lease = await store.grant(ttl_s)
            assert lease.ttl_s >= ttl_s
            assert lease.ttl_s >= store.capabilities.ttl_min_s
            await store.revoke(lease)

    @promise
    async def test_lease_ids_are_never_reused(self, h: StoreHarness) -> None:
        """No two leases have the same id, even if the earlier one was revoked."""
        a, b = await h.client(), await h.client()
        seen: list[str] = []
        for store in (a, b) * 5:
            lease = await store.grant(h.ttl_s * 60)
            seen.append(lease.id)
            if len(seen) % 2:
                await store.revoke(lease)
        assert len(set(seen)) == len(seen)

    @promise
    async def test_a_lease_does_not_end_before_its_ttl(self, h: StoreHarness) -> None:
        """A lease does not end before its ttl has passed since the call of `grant`."""
        holder, other = await h.client(), await h.client()

        async def attempt() -> bool:
            began, looks = h.now(), 0
            lease = await holder.grant(h.ttl_s)
            key = leader_key(h.name(str(began)))
            assert (await holder.create(key, b"v", lease)).won
            while not h.slow(began):
                entry = await other.get(key)
                if h.slow(began):
                    break
                assert entry is not None, "the lease ended before its ttl"
                looks += 1
                await h.elapse(h.ttl_s / 10)
            return looks >= 4

        await h.retry_while_slow(attempt)

    @promise
    async def test_renewal_extends_the_lease(self, h: StoreHarness) -> None:
        """Each `renew` restarts the ttl of the lease."""
        holder, other = await h.client(), await h.client()
        span_s = 2.5 * h.ttl_s * holder.capabilities.expiry_factor

        async def attempt() -> bool:
            began = sent = h.now()
            lease = await holder.grant(h.ttl_s)
            key = leader_key(h.name(str(began)))
            await holder.create(key, b"v", lease)
            while h.now() - began < span_s:
                await h.elapse(h.ttl_s / 4)
                previous, sent = sent, h.now()
                try:
                    await holder.renew(lease)
                except LeaseGone:
                    assert h.slow(previous), "the lease ended although it was renewed"
                    return False
            entry = await other.get(key)
            if h.slow(sent):
                return False
            assert entry is not None, "the lease ended although it was renewed"
            return True

        await h.retry_while_slow(attempt)

    @promise
    async def test_expiry_removes_everything_bound_to_the_lease(self, h: StoreHarness) -> None:
        """When a lease has expired, its record and its tickets are absent for every reader."""
        holder, other = await h.client(), await h.client()
        lease = await holder.grant(h.ttl_s)
        key, line = leader_key(h.name()), line_key(h.name())
        await holder.create(key, b"v", lease)
        ticket = await holder.enqueue(line, b"t", lease)

        async def gone() -> bool:
            return await other.get(key) is None and await other.list(line) == []

        await h.within("the entries of an expired lease are gone", gone)
        assert await other.get(ticket.key) is None
        assert await other.head(line) is None

    @promise
    async def test_revoking_removes_everything_at_once(self, h: StoreHarness) -> None:
        """When `revoke` has returned, no entry bound to the lease is left. It is idempotent."""
        holder, lease = await leased(h)
        other, bystander = await leased(h)
        key, line = leader_key(h.name()), line_key(h.name())
        await holder.create(key, b"v", lease)
        await holder.enqueue(line, b"mine", lease)
        await other.enqueue(line, b"theirs", bystander)
        await holder.revoke(lease)
        await h.shows(other, key, None)
        assert await listed(holder, line) == [b"theirs"]
        await holder.revoke(lease)

    @promise
    async def test_a_warrant_ends_the_lease_of_another_client(self, h: StoreHarness) -> None:
        """When `end` has returned, nothing that is bound to the lease is left, whichever client
        called it. The lease never revives. `end` is idempotent. A store whose warrants are empty
        promises nothing."""
        holder, lease = await leased(h)
        other, bystander = await leased(h)
        ender = await h.ender()
        key, line = leader_key(h.name()), line_key(h.name())
        await holder.create(key, b"v", lease)
        await holder.enqueue(line, b"mine", lease)
        await other.enqueue(line, b"theirs", bystander)
        warrant = holder.warrant(lease)
        assert len(warrant) <= 200
        if not warrant:
            return
        await ender.end(warrant)
        await h.shows(other, key, None)
        assert await listed(other, line) == [b"theirs"]
        await ender.end(warrant)
        await self._is_gone(h, holder, lease)

    @promise
    async def test_a_warrant_ends_no_other_lease(self, h: StoreHarness) -> None:
        """The warrant of a lease that has ended has no effect on later leases of its holder, or on
        those of others."""
        holder, lease = await leased(h)
        ender = await h.ender()
        warrant = holder.warrant(lease)
        await holder.revoke(lease)
        later = await holder.grant(h.ttl_s * 60)
        key = leader_key(h.name())
        assert (await holder.create(key, b"v", later)).won
        if warrant:
            await ender.end(warrant)
        await h.shows(holder, key, b"v")
        await holder.renew(later)

    @promise
    async def test_a_revoked_lease_never_revives(self, h: StoreHarness) -> None:
        """After `revoke`, the lease's `renew`, `create` and `enqueue` raise `LeaseGone`."""
        store, lease = await leased(h)
        await store.revoke(lease)
        await self._is_gone(h, store, lease)

    @promise
    async def test_an_expired_lease_never_revives(self, h: StoreHarness) -> None:
        """Once any client has seen a lease ended, its holder can no longer use it."""
        holder, other = await h.client(), await h.client()
        lease = await holder.grant(h.ttl_s)
        key = leader_key(h.name())
        await holder.create(key, b"v", lease)

        await h.gone(other, key, "the entry of an expired lease is gone")
        await self._is_gone(h, holder, lease)
        assert await other.get(key) is None

    async def _is_gone(self, h: StoreHarness, store: Store, lease: Lease) -> None:
        attempts: list[Callable[[], Awaitable[object]]] = [
            lambda: store.renew(lease),
            lambda: store.create(leader_key(h.name("after")), b"v", lease),
            lambda: store.enqueue(line_key(h.name("after")), b"v", lease),
        ]
        for attempt in attempts:

            async def refused(attempt: Callable[[], Awaitable[object]] = attempt) -> bool:
                try:
                    await attempt()
                except LeaseGone:
                    return True
                except (StoreUnavailable, OutcomeUnknown):
                    # An engine may close the holder's connection when it ends the lease. The
                    # holder then learns of the end after it has reconnected.
                    return False
                pytest.fail("a call with an ended lease was accepted")

            await h.within("a call of the holder raises LeaseGone", refused)
        assert await store.get(leader_key(h.name("after"))) is None
        assert await store.list(line_key(h.name("after"))) == []

    @promise
    async def test_remaining_time_is_within_bounds(self, h: StoreHarness) -> None:
        """If a store reports the remaining time of a lease, it is above 0 and at most the time for
        which the store keeps the lease."""
        store = await h.client()
        lease = await store.grant(h.ttl_s * 20)
        most_s = lease.ttl_s * store.capabilities.expiry_factor + 0.001
        created = (await store.create(leader_key(h.name()), b"v", lease)).entry
        ticket = await store.enqueue(line_key(h.name()), b"t", lease)
        await h.elapse(h.ttl_s / 10)
        later = await read(store, created.key)
        (in_line,) = await store.list(line_key(h.name()))
        assert (in_line.remaining_s is None) == (later.remaining_s is None)
        for entry in (created, ticket, later, in_line):
            assert entry.remaining_s is None or 0 < entry.remaining_s <= most_s
        if created.remaining_s is not None and later.remaining_s is not None:
            assert later.remaining_s < created.remaining_s
        unbound = await put(store, order_key(h.name()), b"o")
        assert unbound.lease is None
        assert unbound.remaining_s is None
        other = await store.grant(h.ttl_s * 20)
        found = await store.remaining([lease.id, other.id])
        assert set(found) in (set(), {lease.id, other.id})
        assert all(0 < each <= most_s for each in found.values())
        await store.revoke(other)
        found = await store.remaining([other.id])
        assert found in ({}, {other.id: 0.0})
