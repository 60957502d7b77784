"""What a watch promises: nothing that happens after it stays untold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from doyen.errors import LeaseGone
from doyen.model import leader_key, line_key, order_key
from doyen.testing.conformance.harness import StoreHarness, leased, promise


class WatchConformance:
    """Promises about notification."""

    @promise
    async def test_every_kind_of_change_is_told(self, h: StoreHarness) -> None:
        """A watch tells of creation, writing, deletion, a ticket, and the revoking of a lease:
        whether the key itself is watched or what it lies under, by others or by oneself."""
        writer, lease = await leased(h)
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

    @promise
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

    @promise
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

    @promise
    async def test_watch_read_wait_never_misses_the_final_state(self, h: StoreHarness) -> None:
        """*Watch, then read, then wait* reaches the final state, whatever the interleaving."""
        (a, a_lease), (b, b_lease) = await leased(h), await leased(h)
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

    @promise
    async def test_what_came_and_went_is_told_to_who_saw_it(self, h: StoreHarness) -> None:
        """Who saw something that was not there when the watch began is told when it is gone, even
        though all is then as it was at first."""
        writer, lease = await leased(h)
        other = await h.client()
        key = leader_key(h.name())
        for _ in range(5):
            changed = asyncio.Event()
            watch = await other.watch(key, changed.set)
            await writer.create(key, b"v", lease)
            seen = await other.get(key)
            await writer.delete(key)
            while seen is not None:
                await h.told(changed, "the end of what was seen meanwhile")
                seen = await other.get(key)
            watch.close()

    @promise
    async def test_waiting_for_the_one_ahead_never_hangs(self, h: StoreHarness) -> None:
        """A line of waiters, each watching only the ticket ahead of it, empties in order."""
        waiters = [await leased(h) for _ in range(h.racers)]
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

    @promise
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

    @promise
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


async def _yield(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def _true_when(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def reached() -> bool:
        return condition()

    return reached
