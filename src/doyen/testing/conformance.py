"""The conformance suite: every promise of the Store port, as a test that any store can be put to.

A store's author writes a harness (how to open a client of one and the same store) and one fixture,
and inherits the tests:

    import pytest
    from doyen.testing import StoreConformance, StoreHarness

    class Harness(StoreHarness):
        async def open(self):
            return await open_store("mystore://localhost", self.context())

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store_harness(self):
            return Harness()

The same tests run in virtual time (override `run`) and against real servers. They wait for what
must come, within bounds, and never rely on something not having come yet; where the machine was
too slow for a statement about time, they start again. Each test uses names of its own, so a shared
server is fine.

Imports the port, the model, fault injection and pytest.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from doyen.clock import Clock, SystemClock
from doyen.errors import LeaseGone, OutcomeUnknown, StoreError, TicketGone
from doyen.model import Claim, Entry, Lease, leader_key, line_key, order_key
from doyen.store import Context, Store
from doyen.testing.faults import Faults, FaultyStore, Stray, Unanswered

__all__ = ["StoreConformance", "StoreHarness"]


class StoreHarness(ABC):
    """How the suite reaches one store. A harness serves one test."""

    ttl_s: float = 1.0
    """The ttl that tests ask for. As short as the store and the machine can keep to."""
    patience_s: float = 10.0
    """How long to wait for what must come, beyond the time the store itself may take."""
    racers: int = 8
    """How many clients race each other."""
    clock: Clock = SystemClock()

    def __init__(self) -> None:
        self._opened: list[Store] = []
        self._names = uuid.uuid4().hex[:12]

    @abstractmethod
    async def open(self) -> Store:
        """Open another independent client of the same store, on the running loop."""

    async def elapse(self, seconds: float) -> None:
        """Let time pass, for the store as well."""
        await asyncio.sleep(seconds)

    async def restart(self) -> None:
        """Stop the store and start it again, if that can be done. Every client is closed."""
        return

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one test's coroutine on an event loop of the right kind."""
        asyncio.run(main())

    def context(self) -> Context:
        return Context(self.clock, lambda _: None)

    async def client(self) -> Store:
        """A client that is closed when the test ends."""
        store = await self.open()
        self._opened.append(store)
        return store

    async def close_clients(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    def name(self, name: str = "e") -> str:
        """An election of this test alone."""
        return f"{self._names}-{name}"

    async def within(self, what: str, reached: Callable[[], Awaitable[bool]]) -> None:
        """Look until it is so; fail if it does not come to be within the store's own bounds."""
        deadline = self.now() + self._bound_s()
        while not await reached():
            if self.now() > deadline:
                pytest.fail(f"within {self._bound_s():g} s it did not come to pass that {what}")
            await self.elapse(self.ttl_s / 20)

    async def told(self, event: asyncio.Event, what: str) -> None:
        """Wait to be told, looking at nothing meanwhile."""
        try:
            async with asyncio.timeout(self._bound_s()):
                await event.wait()
        except TimeoutError:
            pytest.fail(f"no notification within {self._bound_s():g} s of this: {what}")
        event.clear()

    async def shows(self, store: Store, key: str, value: bytes | None) -> None:
        """The store shows this value at `key`: at once, if its reads are linearizable."""

        async def so() -> bool:
            entry = await store.get(key)
            return (None if entry is None else entry.value) == value

        if store.capabilities.linearizable_reads:
            assert await so(), f"a read did not show {value!r}, which had been acknowledged"
        else:
            await self.within(f"{key} reads {value!r}", so)

    async def unhurried(self, attempt: Callable[[], Awaitable[bool]]) -> None:
        """Repeat a statement about time until the machine was quick enough to make it."""
        for _ in range(10):
            if await attempt():
                return
        pytest.fail(f"this machine is too slow for a ttl of {self.ttl_s} s: raise the harness's")

    def slow(self, since: float) -> bool:
        """Whether so much of the ttl has passed that the lease may rightly have ended."""
        return self.now() - since > 0.8 * self.ttl_s

    def now(self) -> float:
        """Seconds on the loop's clock."""
        return asyncio.get_running_loop().time()

    def _bound_s(self) -> float:
        store = self._opened[0].capabilities
        return self.ttl_s * store.expiry_factor + store.notice_s + self.patience_s


Body = Callable[[Any, StoreHarness], Coroutine[Any, Any, None]]
Test = Callable[[Any, StoreHarness], None]


def _promise(body: Body) -> Test:
    """Make a test of a coroutine: run by the harness, with its clients closed at the end."""

    def test(self: StoreConformance, store_harness: StoreHarness) -> None:
        async def main() -> None:
            try:
                await body(self, store_harness)
            finally:
                await store_harness.close_clients()

        store_harness.run(main)

    test.__name__, test.__qualname__, test.__doc__ = (
        body.__name__,
        body.__qualname__,
        body.__doc__,
    )
    return test


async def _leased(h: StoreHarness) -> tuple[Store, Lease]:
    """A client, and a lease that is long enough not to end during the test."""
    store = await h.client()
    return store, await store.grant(h.ttl_s * 60)


async def _listed(store: Store, prefix: str) -> list[bytes]:
    return [entry.value for entry in await store.list(prefix)]


class StoreConformance:
    """The promises of the Store port. Inherit, and give a fixture `store_harness`."""

    # Leases

    @_promise
    async def test_a_lease_is_at_least_what_was_asked(self, h: StoreHarness) -> None:
        """`grant` gives at least the ttl that was asked, and says what it gave."""
        store = await h.client()
        for ttl_s in (h.ttl_s, h.ttl_s * 1.5, store.capabilities.ttl_min_s / 2):
            lease = await store.grant(ttl_s)
            assert lease.ttl_s >= ttl_s
            assert lease.ttl_s >= store.capabilities.ttl_min_s
            await store.revoke(lease)

    @_promise
    async def test_lease_ids_are_never_used_again(self, h: StoreHarness) -> None:
        """No two leases share an id, whoever asks and whatever became of the earlier ones."""
        a, b = await h.client(), await h.client()
        seen: list[str] = []
        for store in (a, b) * 5:
            lease = await store.grant(h.ttl_s * 60)
            seen.append(lease.id)
            if len(seen) % 2:
                await store.revoke(lease)
        assert len(set(seen)) == len(seen)

    @_promise
    async def test_entries_live_as_long_as_their_lease(self, h: StoreHarness) -> None:
        """A lease does not end before its ttl, counted from the call of `grant`."""
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

        await h.unhurried(attempt)

    @_promise
    async def test_renewal_extends_the_lease(self, h: StoreHarness) -> None:
        """`renew` begins the lease's time anew, as often as it is called."""
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

        await h.unhurried(attempt)

    @_promise
    async def test_expiry_removes_everything_bound_to_the_lease(self, h: StoreHarness) -> None:
        """When a lease is not renewed, its record and its tickets are gone, for every reader."""
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

    @_promise
    async def test_revoking_removes_everything_at_once(self, h: StoreHarness) -> None:
        """When `revoke` has returned, nothing bound to the lease is left; twice is as once."""
        holder, lease = await _leased(h)
        _, bystander = await _leased(h)
        other = await h.client()
        key, line = leader_key(h.name()), line_key(h.name())
        await holder.create(key, b"v", lease)
        await holder.enqueue(line, b"mine", lease)
        await holder.enqueue(line, b"theirs", bystander)
        await holder.revoke(lease)
        await h.shows(other, key, None)
        assert await _listed(holder, line) == [b"theirs"]
        await holder.revoke(lease)

    @_promise
    async def test_a_revoked_lease_never_revives(self, h: StoreHarness) -> None:
        """After `revoke`, the lease's `renew`, `create` and `enqueue` raise `LeaseGone`."""
        store, lease = await _leased(h)
        await store.revoke(lease)
        await self._is_gone(h, store, lease)

    @_promise
    async def test_an_expired_lease_never_revives(self, h: StoreHarness) -> None:
        """Once anybody has seen a lease ended, its holder can do nothing with it any more."""
        holder, other = await h.client(), await h.client()
        lease = await holder.grant(h.ttl_s)
        key = leader_key(h.name())
        await holder.create(key, b"v", lease)

        async def gone() -> bool:
            return await other.get(key) is None

        await h.within("the entry of an expired lease is gone", gone)
        await self._is_gone(h, holder, lease)
        assert await other.get(key) is None

    async def _is_gone(self, h: StoreHarness, store: Store, lease: Lease) -> None:
        attempts: list[Callable[[], Awaitable[object]]] = [
            lambda: store.renew(lease),
            lambda: store.create(leader_key(h.name("after")), b"v", lease),
            lambda: store.enqueue(line_key(h.name("after")), b"v", lease),
        ]
        for attempt in attempts:
            try:
                await attempt()
            except LeaseGone:
                continue
            pytest.fail("a lease that had ended was accepted")
        assert await store.get(leader_key(h.name("after"))) is None
        assert await store.list(line_key(h.name("after"))) == []

    @_promise
    async def test_remaining_time_is_sane(self, h: StoreHarness) -> None:
        """Where a store tells what is left of a lease, it is above 0 and at most what it keeps."""
        store = await h.client()
        lease = await store.grant(h.ttl_s * 20)
        most_s = lease.ttl_s * store.capabilities.expiry_factor + 0.001
        created = (await store.create(leader_key(h.name()), b"v", lease)).entry
        ticket = await store.enqueue(line_key(h.name()), b"t", lease)
        await h.elapse(h.ttl_s / 10)
        later = await store.get(created.key)
        assert later is not None
        for entry in (created, ticket, later):
            assert entry.remaining_s is None or 0 < entry.remaining_s <= most_s
        if created.remaining_s is not None and later.remaining_s is not None:
            assert later.remaining_s < created.remaining_s
        unbound = await store.put(order_key(h.name()), b"o", if_version=None)
        assert unbound is not None
        assert unbound.lease is None
        assert unbound.remaining_s is None

    # The one atomic write

    @_promise
    async def test_of_many_racers_exactly_one_wins(self, h: StoreHarness) -> None:
        """However many create a key at once, one wins, and the others are shown its entry."""
        racers = [await _leased(h) for _ in range(h.racers)]
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

    @_promise
    async def test_a_refused_create_leaves_what_stands_there(self, h: StoreHarness) -> None:
        """A `create` that is refused changes nothing, whoever makes it, the holder included."""
        a, a_lease = await _leased(h)
        b, b_lease = await _leased(h)
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

    @_promise
    async def test_create_succeeds_over_an_entry_whose_lease_expired(self, h: StoreHarness) -> None:
        """ "Nothing stands there" includes an entry whose lease has ended by time."""
        holder = await h.client()
        other, other_lease = await _leased(h)
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

    @_promise
    async def test_put_succeeds_over_an_entry_whose_lease_ended(self, h: StoreHarness) -> None:
        """`put` with no version takes the end of a lease for absence too."""
        store, lease = await _leased(h)
        key = order_key(h.name())
        first = (await store.create(key, b"old", lease)).entry
        assert await store.put(key, b"new", if_version=None) is None
        await store.revoke(lease)
        second = await store.put(key, b"new", if_version=None)
        assert second is not None
        assert second.revision > first.revision
        await h.shows(store, key, b"new")

    @_promise
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

        store, lease = await _leased(h)
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
        store, lease = await _leased(h)
        await create(store, lease)
        assert all(before < after for before, after in pairwise(seen)), f"revisions were {seen}"

    @_promise
    async def test_tokens_grow_from_client_to_client(self, h: StoreHarness) -> None:
        """Leadership passed on among many clients gives each successor a higher revision."""
        racers = [await _leased(h) for _ in range(h.racers)]
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

    # Versions

    @_promise
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

    @_promise
    async def test_a_version_is_not_valid_for_a_later_entry(self, h: StoreHarness) -> None:
        """A version of an entry that was deleted does not match its successor."""
        store, lease = await _leased(h)
        key = leader_key(h.name())
        old = (await store.create(key, b"same", lease)).entry
        assert await store.delete(key, if_version=old.version)
        new = (await store.create(key, b"same", lease)).entry
        assert new.version != old.version
        assert not await store.delete(key, if_version=old.version)
        assert await store.put(key, b"x", if_version=old.version) is None
        await h.shows(store, key, b"same")

    @_promise
    async def test_delete_follows_the_version(self, h: StoreHarness) -> None:
        """`delete` with a stale version, or of nothing, does nothing and says so."""
        store, lease = await _leased(h)
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

    @_promise
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

    @_promise
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

    # Lines

    @_promise
    async def test_a_line_is_ordered_by_rank_then_by_arrival(self, h: StoreHarness) -> None:
        """Tickets stand by rank, highest first, and within a rank as they came."""
        racers = [await _leased(h) for _ in range(4)]
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
            assert await _listed(store, line) == expected
            head = await store.head(line)
            assert head is not None
            assert head.value == expected[0]

    @_promise
    async def test_each_ticket_knows_the_one_ahead(self, h: StoreHarness) -> None:
        """`ahead` walks the line from any ticket to the head, whoever asks."""
        racers = [await _leased(h) for _ in range(3)]
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

    @_promise
    async def test_the_line_closes_up(self, h: StoreHarness) -> None:
        """When tickets go, by delete or with their lease, those behind see the next one ahead."""
        (a, a_lease), (b, b_lease), (c, c_lease) = [await _leased(h) for _ in range(3)]
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

    @_promise
    async def test_an_expired_ticket_is_gone_for_its_holder_too(self, h: StoreHarness) -> None:
        """Once others see a ticket gone, its holder's `ahead` raises `TicketGone`."""
        holder = await h.client()
        other, other_lease = await _leased(h)
        lease = await holder.grant(h.ttl_s)
        line = line_key(h.name())
        ticket = await holder.enqueue(line, b"old", lease)
        behind = await other.enqueue(line, b"new", other_lease)

        async def at_the_head() -> bool:
            return await other.ahead(behind) is None

        await h.within("an expired ticket is no longer ahead of anybody", at_the_head)
        with pytest.raises(TicketGone):
            await holder.ahead(ticket)
        assert await _listed(other, line) == [b"new"]

    @_promise
    async def test_a_late_higher_rank_goes_ahead(self, h: StoreHarness) -> None:
        """A ticket of higher rank takes its place before those that wait already."""
        store, lease = await _leased(h)
        line = line_key(h.name())
        low = await store.enqueue(line, b"low", lease, rank=-1)
        middle = await store.enqueue(line, b"middle", lease)
        assert await store.ahead(middle) is None
        high = await store.enqueue(line, b"high", lease, rank=1)
        for ticket, before in ((high, None), (middle, high), (low, middle)):
            ahead = await store.ahead(ticket)
            assert (ahead and ahead.key) == (before and before.key)

    @_promise
    async def test_ticket_keys_lie_under_the_line_and_are_never_reused(
        self, h: StoreHarness
    ) -> None:
        """A ticket's key is one segment under its line, and no later ticket ever has it."""
        store, lease = await _leased(h)
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

    @_promise
    async def test_concurrent_arrivals_each_get_a_place(self, h: StoreHarness) -> None:
        """Clients that enqueue at once all get tickets, in one order that all agree on; each
        client's own tickets stand in the order it took them."""
        racers = [await _leased(h) for _ in range(h.racers)]
        line = line_key(h.name())

        async def arrive(racer: int) -> None:
            store, lease = racers[racer]
            for number in range(4):
                await store.enqueue(line, f"{racer}.{number}".encode(), lease)

        await asyncio.gather(*map(arrive, range(h.racers)))
        orders = [await _listed(store, line) for store, _ in racers]
        assert all(order == orders[0] for order in orders)
        assert len(set(orders[0])) == len(orders[0]) == 4 * h.racers
        for racer in range(h.racers):
            own = [value for value in orders[0] if value.startswith(f"{racer}.".encode())]
            assert own == sorted(own)

    # Reading

    @_promise
    async def test_clients_see_each_others_writes(self, h: StoreHarness) -> None:
        """What one client wrote and was told of, another reads."""
        a, lease = await _leased(h)
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

    @_promise
    async def test_names_do_not_reach_into_each_other(self, h: StoreHarness) -> None:
        """However odd two names are, neither sees the other's record, order or line."""
        store, lease = await _leased(h)
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
            assert await _listed(store, line_key(full)) == [value, value]
            under = leader_key(full).removesuffix("/leader")
            assert await _listed(store, under) == [value] * 4

    @_promise
    async def test_names_of_dots_are_names(self, h: StoreHarness) -> None:
        """An election may be called `.` or `..`: its keys are not directions."""
        store, lease = await _leased(h)
        for name in (".", ".."):
            ticket = await store.enqueue(line_key(name), h.name().encode(), lease)
            assert h.name().encode() in await _listed(store, line_key(name))
            assert await store.delete(ticket.key, if_version=ticket.version)

    @_promise
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

    # Watching

    @_promise
    async def test_every_kind_of_change_is_told(self, h: StoreHarness) -> None:
        """A watch tells of creation, writing, deletion, a ticket, and the revoking of a lease:
        whether the key itself is watched or what it lies under, by others or by oneself."""
        writer, lease = await _leased(h)
        other = await h.client()
        key, order, line = leader_key(h.name()), order_key(h.name()), line_key(h.name())
        under = key.removesuffix("/leader")
        events: dict[str, asyncio.Event] = {}
        for place, store, scope in (
            ("record", other, key),
            ("order", other, order),
            ("line", other, line),
            ("all", other, under),
            ("own", writer, under),
        ):
            events[place] = asyncio.Event()
            await store.watch(scope, events[place].set)

        async def told(what: str, *places: str) -> None:
            for place in places:
                await h.told(events[place], f"{what} ({place})")

        await writer.create(key, b"v", lease)
        await told("a creation", "record", "all", "own")
        entry = await writer.put(order, b"1", if_version=None)
        await told("a put", "order", "all", "own")
        assert entry is not None
        entry = await writer.put(order, b"2", if_version=entry.version)
        await told("another put", "order", "all", "own")
        assert entry is not None
        await writer.delete(order, if_version=entry.version)
        await told("a deletion", "order", "all", "own")
        await writer.enqueue(line, b"t", lease)
        await told("a ticket", "line", "all", "own")
        await writer.revoke(lease)
        await told("a revoked lease", "record", "line", "all", "own")

    @_promise
    async def test_expiry_is_told_though_nobody_removes_anything(self, h: StoreHarness) -> None:
        """The end of a lease is told to who watches, with no reader or writer to notice it."""
        holder, other = await h.client(), await h.client()
        key, line = leader_key(h.name()), line_key(h.name())
        lease = await holder.grant(h.ttl_s)
        await holder.create(key, b"v", lease)
        ticket = await holder.enqueue(line, b"t", lease)
        for scope in (key, ticket.key):
            event = asyncio.Event()
            watch = await other.watch(scope, event.set)
            while await other.get(scope) is not None:
                await h.told(event, f"the expiry of the lease that {scope} is bound to")
            watch.close()

    @_promise
    async def test_a_renewed_lease_that_then_expires_is_told(self, h: StoreHarness) -> None:
        """A wake-up that was set for the first expiry is set again for the real one."""
        holder, other = await h.client(), await h.client()
        key = leader_key(h.name())
        lease = await holder.grant(h.ttl_s)
        await holder.create(key, b"v", lease)
        event = asyncio.Event()
        await other.watch(key, event.set)
        for _ in range(6):
            await h.elapse(h.ttl_s / 4)
            try:
                await holder.renew(lease)
            except LeaseGone:  # the machine was slow; the end is to be told all the same
                break
        while await other.get(key) is not None:
            await h.told(event, "the expiry of a lease that had been renewed")

    @_promise
    async def test_watch_read_wait_never_misses_the_final_state(self, h: StoreHarness) -> None:
        """*Watch, then read, then wait* reaches the final state, whatever the interleaving."""
        (a, a_lease), (b, b_lease) = await _leased(h), await _leased(h)
        watcher = await h.client()

        for seed in range(25):
            chance = random.Random(seed)
            key = leader_key(h.name(str(seed)))

            async def write(chance: random.Random = chance, key: str = key) -> None:
                for _ in range(chance.randrange(1, 8)):
                    store, lease = chance.choice(((a, a_lease), (b, b_lease)))
                    if chance.random() < 0.5:
                        await store.create(key, b"passing", lease)
                    else:
                        await store.delete(key)
                    await _yield(chance.randrange(4))
                await a.delete(key)
                await _yield(chance.randrange(4))
                assert (await b.create(key, b"final", b_lease)).won

            async def wait(key: str = key, seed: int = seed) -> None:
                changed = asyncio.Event()
                watch = await watcher.watch(key, changed.set)
                while (entry := await watcher.get(key)) is None or entry.value != b"final":
                    await h.told(changed, f"the last write to {key} (seed {seed})")
                watch.close()

            first, second = (write, wait) if chance.random() < 0.5 else (wait, write)
            task = asyncio.create_task(first())
            await _yield(chance.randrange(6))
            await second()
            await task

    @_promise
    async def test_waiting_for_the_one_ahead_never_hangs(self, h: StoreHarness) -> None:
        """A line of waiters, each watching only the ticket ahead of it, empties in order."""
        waiters = [await _leased(h) for _ in range(h.racers)]
        line = line_key(h.name())
        served: list[int] = []
        tickets = [
            await store.enqueue(line, str(number).encode(), lease)
            for number, (store, lease) in enumerate(waiters)
        ]

        async def stand(number: int) -> None:
            (store, lease), ticket = waiters[number], tickets[number]
            while (ahead := await store.ahead(ticket)) is not None:
                gone = asyncio.Event()
                watch = await store.watch(ahead.key, gone.set)
                if await store.get(ahead.key) is not None:
                    await h.told(gone, "the ticket ahead went")
                watch.close()
            served.append(number)
            if number % 2:
                await store.revoke(lease)
            else:
                assert await store.delete(ticket.key, if_version=ticket.version)

        await asyncio.gather(*map(stand, reversed(range(h.racers))))
        assert served == list(range(h.racers))

    @_promise
    async def test_a_closed_watch_is_silent(self, h: StoreHarness) -> None:
        """No call of `notify` begins after `close`, which may be called twice, or from `notify`,
        or by closing the store."""
        writer = await h.client()
        watching, leaving = await h.client(), await h.open()
        key = order_key(h.name())
        calls: list[str] = []
        live = asyncio.Event()
        closed = await watching.watch(key, lambda: calls.append("closed"))
        await leaving.watch(key, lambda: calls.append("store closed"))

        def once() -> None:
            calls.append("once")
            closing.close()

        closing = await watching.watch(key, once)
        await watching.watch(key, live.set)
        closed.close()
        closed.close()
        await leaving.close()
        await leaving.close()
        entry = await writer.put(key, b"0", if_version=None)
        await h.told(live, "a write")
        await h.within("the watch that closes itself was told", _true_when(lambda: bool(calls)))
        for number in range(5):
            assert entry is not None
            entry = await writer.put(key, str(number).encode(), if_version=entry.version)
            await h.told(live, "another write")
        assert calls == ["once"]

    @_promise
    async def test_one_client_may_watch_much(self, h: StoreHarness) -> None:
        """Many watches of one client, some on the same scope, are each told; closing one leaves
        the others."""
        writer, watching = await h.client(), await h.client()
        keys = [order_key(h.name(str(number))) for number in range(20)]
        events = {(key, copy): asyncio.Event() for key in keys for copy in range(2)}
        watches = {
            (key, copy): await watching.watch(key, event.set)
            for (key, copy), event in events.items()
        }
        for number, key in enumerate(keys):
            watches[key, number % 2].close()
        for number, key in enumerate(keys):
            await writer.put(key, b"v", if_version=None)
            await h.told(events[key, 1 - number % 2], "a write to one of many watched keys")

    # What goes wrong

    @_promise
    async def test_cancelled_calls_leave_no_half(self, h: StoreHarness) -> None:
        """A call that is cancelled is done or not done: what it wrote is whole, nothing of it
        outlives its lease, and the store goes on working."""
        store, other = await h.client(), await h.client()
        for patience in range(8):
            name = h.name(f"c{patience}")
            key, order, line = leader_key(name), order_key(name), line_key(name)
            lease = await store.grant(h.ttl_s * 60)
            before = await store.put(order, b"before", if_version=None)
            assert before is not None
            await _cancelled(store.create(key, b"whole", lease), patience)
            await _cancelled(store.enqueue(line, b"whole", lease), patience)
            await _cancelled(store.put(order, b"after", if_version=before.version), patience)
            await _cancelled(store.renew(lease), patience)
            assert (await store.create(key, b"whole", lease)).entry.value == b"whole"
            assert await _listed(store, line) in ([], [b"whole"])
            final = await store.get(order)
            assert final is not None
            assert (final.value == b"before") == (final.version == before.version)
            assert final.value in (b"before", b"after")
            await store.revoke(lease)
            await h.shows(other, key, None)
            assert await _listed(store, line) == []

    @_promise
    async def test_a_cancelled_revoke_is_whole(self, h: StoreHarness) -> None:
        """A `revoke` that is cancelled leaves the lease ended, or as it was."""
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
                assert await _listed(store, line) == []
            await store.revoke(lease)
            await h.shows(other, key, None)

    @_promise
    async def test_a_lost_answer_is_found_by_reading_ones_own_attempt(
        self, h: StoreHarness
    ) -> None:
        """A `create` that was done and not answered is found by a read of one's own attempt id;
        trying again is refused with one's own entry, and yields no second one."""
        faults = Faults()
        store = FaultyStore(await h.client(), faults)
        other, other_lease = await _leased(h)
        lease = await store.grant(h.ttl_s * 60)
        mine = Claim("me", uuid.uuid4().hex)
        key = leader_key(h.name())
        faults.next("create", Unanswered(told=True))
        with pytest.raises(OutcomeUnknown):
            await store.create(key, mine.encode(), lease)
        await h.shows(store, key, mine.encode())
        found = await store.get(key)
        assert found is not None
        assert Claim.decode(found.value).attempt == mine.attempt
        assert found.lease == lease.id
        again = await store.create(key, mine.encode(), lease)
        assert not again.won
        assert again.entry.revision == found.revision
        assert not (await other.create(key, b"other", other_lease)).won

    @_promise
    async def test_a_request_that_lands_late_revives_nothing(self, h: StoreHarness) -> None:
        """A `create` or `enqueue` that arrives after its lease was revoked leaves nothing."""
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

    @_promise
    async def test_what_is_not_bound_to_a_lease_stays(self, h: StoreHarness) -> None:
        """A `put` is durable: it outlives its writer's leases, its writer and a restart."""
        store, lease = await _leased(h)
        key = order_key(h.name())
        written = await store.put(key, b"kept", if_version=None)
        assert written is not None
        await store.revoke(lease)
        await h.shows(store, key, b"kept")
        await h.close_clients()
        await h.restart()
        store = await h.client()
        entry = await store.get(key)
        assert entry is not None
        assert (entry.value, entry.revision) == (b"kept", written.revision)
        assert await store.delete(key, if_version=entry.version)


async def _yield(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def _cancelled(call: Coroutine[Any, Any, object], patience: int) -> None:
    """Begin a call, let the loop turn a few times, and cancel it if it has not ended."""
    task = asyncio.create_task(call)
    await _yield(patience)
    task.cancel()
    try:
        await task
    except (asyncio.CancelledError, StoreError):
        pass


def _true_when(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def reached() -> bool:
        return condition()

    return reached
