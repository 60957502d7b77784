"""Promises of a store that is reached over a network, when the network or the server fails.

The suite reaches such a store directly and through connections that it can break. The harness of a
network store derives from `LinkedHarness`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import pytest

from doyen.errors import LeaseGone, OutcomeUnknown, StoreError, StoreUnavailable, TicketGone
from doyen.model import Lease, leader_key, line_key, order_key
from doyen.stores.port import Creation, Store
from doyen.testing.conformance.harness import (
    StoreHarness,
    leased,
    listed,
    promise,
    put,
    read,
    whole_update,
)


class BreakableConnection(Protocol):
    """The network path of one client to the store, which the suite can break."""

    async def open(self) -> Store:
        """Open a client that reaches the store by this path."""
        ...

    async def cut(self, *, answers_only: bool = False) -> None:
        """Hold back all traffic without closing connections. It is delivered after `heal`."""
        ...

    async def reset(self) -> None:
        """Reset every connection, as a server does when it drops a client."""
        ...

    async def delay(self, answers_s: float) -> None:
        """Delay everything that the store sends by `answers_s`."""
        ...

    async def heal(self) -> None:
        """End every fault."""
        ...


class LinkedHarness(StoreHarness):
    """How the suite reaches a store over a network."""

    dead_leases: int = 200
    """The number of leases of crashed clients that the store has to cope with."""
    rounds: int = 3
    """How often clients compete for the same key."""

    @abstractmethod
    async def link(self) -> BreakableConnection:
        """Create a network path for one client. The harness closes it together with its clients."""

    async def forget(self, key: str) -> None:
        """Purge the history of `key`, as the store does by itself eventually.

        Needed for engines that keep markers of deleted keys. For others this does nothing.
        """
        return

    @abstractmethod
    async def deface(self, name: str) -> None:
        """Write foreign values among doyen's leases, and at the record, the order and the line of
        the election `name`, as another program or an operator might."""

    async def linked(self, link: BreakableConnection) -> Store:
        store = await link.open()
        self._opened.append(store)
        return store

    async def works(self, what: str, call: Callable[[], Awaitable[object]]) -> None:
        """Assert that the call, retried as doyen retries it, succeeds within the store's bounds."""

        async def succeeds() -> bool:
            try:
                async with asyncio.timeout(self.ttl_s):
                    await call()
            except (StoreUnavailable, OutcomeUnknown, TimeoutError):
                return False
            return True

        await self.within(what, succeeds)


class NetworkConformance:
    """Promises of stores that are reached over a network."""

    @promise
    async def test_a_race_for_a_key_with_forgotten_history(self, h: LinkedHarness) -> None:
        """Of clients that compete for a key whose history was purged, exactly one wins, although
        notifications arrive late. Its revision is higher than all earlier ones."""
        links = [await h.link() for _ in range(h.racers)]
        clients = [await h.linked(link) for link in links]
        leases = [await client.grant(h.ttl_s * 60) for client in clients]
        key = leader_key(h.name())
        highest = 0
        for client in clients:
            await client.watch(key, lambda: None)
        for turn in range(h.rounds):
            first = await clients[turn % h.racers].create(key, b"before", leases[turn % h.racers])
            assert first.won
            assert first.entry.revision > highest
            assert await clients[turn % h.racers].delete(key, if_version=first.entry.version)
            await h.forget(key)
            for link in links[1:]:
                await link.delay(h.ttl_s / 50)

            async def race(number: int) -> Creation:
                await asyncio.sleep(number * h.ttl_s / 400)
                return await clients[number].create(key, b"%d" % number, leases[number])

            outcomes = await asyncio.gather(*map(race, range(h.racers)))
            winners = [made for made in outcomes if made.won]
            assert len(winners) == 1, f"{len(winners)} of {h.racers} clients won"
            assert winners[0].entry.revision > first.entry.revision
            highest = winners[0].entry.revision
            for link in links[1:]:
                await link.heal()
            for client in clients:
                await h.shows(client, key, winners[0].entry.value)
            assert await clients[0].delete(key, if_version=winners[0].entry.version)

    @promise
    async def test_foreign_values_affect_only_their_own_keys(self, h: LinkedHarness) -> None:
        """A foreign value at one of doyen's keys causes a clear error for calls that use this key.
        It affects no other keys, watches or renewals, of clients opened before or after it."""
        store, lease = await leased(h)
        well, spoilt = h.name("well"), h.name("spoilt")
        notified = asyncio.Event()
        await store.watch(leader_key(well), notified.set)
        await h.deface(spoilt)
        later, later_lease = await leased(h)
        for client, own in ((store, lease), (later, later_lease)):
            await h.works("the lease is renewed", partial(client.renew, own))
            async with asyncio.timeout(h.patience_s):
                made = await client.create(leader_key(well), b"v", own)
                ticket = await client.enqueue(line_key(well), b"t", own)
                assert await client.ahead(ticket) is None
                await h.notified(notified, "a record was created")
                assert made.won
                assert await client.delete(leader_key(well), if_version=made.entry.version)
                assert await client.delete(ticket.key, if_version=ticket.version)
            for call in (
                client.get(leader_key(spoilt)),
                client.get(order_key(spoilt)),
                client.list(line_key(spoilt)),
                client.create(leader_key(spoilt), b"v", own),
                client.enqueue(line_key(spoilt), b"t", own),
            ):
                await _ends(h, call)
            await h.works("the lease is renewed", partial(client.renew, own))

    @promise
    async def test_calls_during_a_silent_network_cut(self, h: LinkedHarness) -> None:
        """Calls whose requests or answers do not arrive end when they are cancelled. After the cut
        the client works again, and each call has had its full effect or none."""
        other = await h.client()
        for answers_only in (False, True):
            link = await h.link()
            store = await h.linked(link)
            lease, short = await store.grant(h.ttl_s * 60), await store.grant(h.ttl_s * 60)
            key, order = (of(h.name(f"s{answers_only}")) for of in (leader_key, order_key))
            line = line_key(h.name(f"s{answers_only}"))
            ticket = await store.enqueue(line, b"first", lease)
            old = await put(store, order, b"before")
            doomed = await put(store, f"{order}2", b"doomed")
            held = (await store.create(f"{key}/held", b"before", lease)).entry
            await link.cut(answers_only=answers_only)
            await asyncio.gather(
                *(
                    _given_up(h, call)
                    for call in (
                        store.renew(lease),
                        store.create(key, b"whole", lease),
                        store.put(order, b"after", if_version=old.version),
                        store.update(held, b"after"),
                        store.delete(f"{order}2", if_version=doomed.version),
                        store.enqueue(line, b"second", lease),
                        store.ahead(ticket),
                        store.get(order),
                        store.list(line),
                        store.watch(key, lambda: None),
                        store.grant(h.ttl_s * 60),
                        store.revoke(short),
                    )
                )
            )
            await link.heal()
            await h.works("the lease is renewed again", partial(store.renew, lease))
            made = await _insist(h, partial(store.create, key, b"whole", lease))
            assert made.entry.value == b"whole"
            await h.shows(other, key, b"whole")
            now = await read(other, order)
            assert (now.value == b"before") == (now.version == old.version)
            assert now.value in (b"before", b"after")
            whole_update(await read(other, held.key), held)
            assert await listed(other, line) in ([b"first"], [b"first", b"second"])
            await h.works("the lease is revoked", partial(store.revoke, lease))
            await h.shows(other, key, None)
            assert await listed(other, line) == []

    @promise
    async def test_a_client_recovers_after_its_connections_are_reset(
        self, h: LinkedHarness
    ) -> None:
        """A client reconnects by itself after its connections were reset. It can renew its lease,
        and its watches are notified of later changes."""
        link = await h.link()
        store, other = await h.linked(link), await h.client()
        lease = await store.grant(h.ttl_s * 60)
        other_lease = await other.grant(h.ttl_s * 60)
        key, notified = leader_key(h.name()), asyncio.Event()
        await store.watch(key, notified.set)
        for turn in range(2):
            calls = [
                asyncio.create_task(_ends(h, call))
                for call in (store.get(key), store.renew(lease), store.list(line_key(h.name())))
            ]
            await asyncio.sleep(0)
            await link.reset()
            await asyncio.gather(*calls)
            await h.works("the lease is renewed", partial(store.renew, lease))
            await h.works("a read is answered", partial(store.get, key))
            notified.clear()
            made = await other.create(key, b"%d" % turn, other_lease)
            assert made.won
            await h.notified(notified, "a record was created after the connection broke")
            assert await other.delete(key, if_version=made.entry.version)

    @promise
    async def test_leases_of_crashed_clients(self, h: LinkedHarness) -> None:
        """While many leases of crashed clients expire, live leases are renewed in time, the entries
        of the crashed clients are removed, and a new client can use the store."""
        store, lease = await leased(h)
        crashed = await h.client()
        line = line_key(h.name("dead"))
        granted = 0
        while granted < h.dead_leases:
            batch = min(100, h.dead_leases - granted)
            leases = await asyncio.gather(*(_grant(h, crashed) for _ in range(batch)))
            if granted == 0:
                await _bind(crashed, line, leases[:10])
            granted += batch
            await _in_time(h, store, lease)
        gone = asyncio.Event()

        async def line_is_empty() -> bool:
            return await listed(store, line) == []

        async def keep_renewing() -> None:
            while not gone.is_set():
                await _in_time(h, store, lease)
                await h.elapse(h.ttl_s / 5)

        renewing = asyncio.create_task(keep_renewing())
        await h.within("the tickets of the crashed clients are gone", line_is_empty)
        later, later_lease = await leased(h)
        assert (await later.create(leader_key(h.name()), b"v", later_lease)).won
        gone.set()
        await renewing


async def _grant(h: LinkedHarness, store: Store) -> Lease:
    """Grant a lease. A server that many clients ask at once may drop some of their connections, and
    on a slow machine a lease may expire before its grant is complete."""
    while True:
        try:
            return await store.grant(h.ttl_s)
        except (LeaseGone, OutcomeUnknown, StoreUnavailable):
            await h.elapse(h.ttl_s / 50)


async def _bind(store: Store, line: str, leases: list[Lease]) -> None:
    for lease in leases:
        # On a slow machine the lease may have expired already, or its connection been dropped.
        with suppress(LeaseGone, OutcomeUnknown):
            await store.enqueue(line, b"dead", lease)


async def _in_time(h: LinkedHarness, store: Store, lease: Lease) -> None:
    """Assert that a renewal is answered within the patience of the suite."""
    async with asyncio.timeout(h.patience_s):
        await store.renew(lease)


async def _ends(h: LinkedHarness, call: Coroutine[Any, Any, object]) -> None:
    """Assert that the call succeeds or raises an error of the port, and does not hang."""
    try:
        async with asyncio.timeout(h.patience_s):
            await call
    except TimeoutError:
        pytest.fail(f"{_name(call)} hung for {h.patience_s:g} s")
    except StoreError:
        pass


async def _given_up(h: LinkedHarness, call: Coroutine[Any, Any, object]) -> None:
    """Cancel the call after some time and assert that it ends at once."""
    task = asyncio.ensure_future(call)
    await asyncio.wait({task}, timeout=h.ttl_s / 4)
    task.cancel()
    await asyncio.wait({task}, timeout=h.patience_s)
    assert task.done(), f"{_name(call)} did not end when it was cancelled"
    if not task.cancelled():
        error = task.exception()
        assert error is None or isinstance(error, StoreError | TicketGone), repr(error)


def _name(call: Coroutine[Any, Any, object]) -> str:
    return str(getattr(call, "__qualname__", call))


async def _insist(h: LinkedHarness, call: Callable[[], Awaitable[Creation]]) -> Creation:
    answers: list[Creation] = []

    async def ask() -> None:
        answers.append(await call())

    await h.works("the record is created", ask)
    return answers[-1]
