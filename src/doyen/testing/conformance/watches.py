"""Promises about watches: every change after `watch` has returned causes a notification."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from doyen.errors import LeaseGone
from doyen.model import Entry, leader_key, line_key, order_key
from doyen.testing.conformance.harness import StoreHarness, leased, promise, put


class WatchConformance:
    """Promises about watches and notifications."""

    @promise
    async def test_every_kind_of_change_notifies(self, h: StoreHarness) -> None:
        """A watch notifies of a creation, an update, a put, a deletion, a ticket and a revoked
        lease, if the key or its prefix is watched, by the writing client or by another."""
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

        async def notified(what: str, *places: str) -> None:
            for place in places:
                await h.notified(events[place], f"{what} ({place})")

        created = (await writer.create(key, b"v", lease)).entry
        await notified("a creation", "record", "all", "own")
        await writer.update(created, b"w")
        await notified("an update", "record", "all", "own")
        entry = await put(writer, order, b"1")
        await notified("a put", "order", "all", "own")
        entry = await put(writer, order, b"2", entry.version)
        await notified("another put", "order", "all", "own")
        await writer.delete(order, if_version=entry.version)
        await notified("a deletion", "order", "all", "own")
        await writer.enqueue(line, b"t", lease)
        await notified("a ticket", "line", "all", "own")
        await writer.revoke(lease)
        await notified("a revoked lease", "record", "line", "all", "own")

    @promise
    async def test_expiry_notifies_without_a_reader_or_writer(self, h: StoreHarness) -> None:
        """Watches are notified of an expiry even if no client reads or writes meanwhile."""
        holder, other = await h.client(), await h.client()
        key, line = leader_key(h.name()), line_key(h.name())
        lease = await holder.grant(h.ttl_s)
        await holder.create(key, b"v", lease)
        ticket = await holder.enqueue(line, b"t", lease)
        for scope in (key, ticket.key):
            event = asyncio.Event()
            watch = await other.watch(scope, event.set)
            while await other.get(scope) is not None:
                await h.notified(event, f"the expiry of the lease that {scope} is bound to")
            watch.close()

    @promise
    async def test_expiry_after_renewals_notifies(self, h: StoreHarness) -> None:
        """A timer that was set for the first expiry is set again after renewals."""
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
            except LeaseGone:  # the machine was slow; the notification is still required
                break
        while await other.get(key) is not None:
            await h.notified(event, "the expiry of a lease that had been renewed")

    @promise
    async def test_the_end_of_one_of_many_leases_notifies(self, h: StoreHarness) -> None:
        """If many entries under one prefix have a lease each, watches of the prefix are notified of
        the end of every lease, also of the latest."""
        holder, other = await h.client(), await h.client()
        prefix = f"members/{h.name()}"
        for number in range(h.crowd - 1):
            lease = await holder.grant(h.ttl_s * 60)
            assert (await holder.create(f"{prefix}/{number:04}", b"", lease)).won
        event = asyncio.Event()
        await other.watch(prefix, event.set)
        last = f"{prefix}/{h.crowd:04}"
        await holder.create(last, b"", await holder.grant(h.ttl_s))
        while await other.get(last) is not None:
            await h.notified(event, f"the expiry of one of {h.crowd} leases")
        assert len(await other.list(prefix)) == h.crowd - 1

    @promise
    async def test_watch_read_wait_never_misses_the_final_state(self, h: StoreHarness) -> None:
        """*Watch, then read, then wait* reaches the final state in every interleaving."""
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
                    await h.notified(changed, f"the last write to {key} (seed {seed})")
                watch.close()

            first, second = (write, wait) if chance.random() < 0.5 else (wait, write)
            task = asyncio.create_task(first())
            await _yield(chance.randrange(6))
            await second()
            await task

    @promise
    async def test_what_notifications_carry_reaches_the_final_value(self, h: StoreHarness) -> None:
        """A watcher of an entry that reads only if its last notification carried nothing reaches
        the final value, whether another client writes or its own."""
        writers = [await h.client() for _ in range(3)]
        watcher = writers[0]
        for seed in range(10):
            chance = random.Random(seed)
            key = order_key(h.name(str(seed)))
            entry = await put(watcher, key, b"first")
            changed = asyncio.Event()
            watch = await watcher.watch_entry(key, changed.set)

            async def write(
                chance: random.Random = chance, key: str = key, entry: Entry = entry
            ) -> None:
                for value in (b"passing", b"passing by", b"final"):
                    writer = chance.choice(writers)
                    entry = await put(writer, key, value, entry.version)
                    await _yield(chance.randrange(6))

            writing = asyncio.create_task(write())
            while entry.value != b"final":
                await h.notified(changed, f"the last write to {key} (seed {seed})")
                found = watcher.carried(watch) or await watcher.get(key)
                assert found is not None
                entry = found
            await writing
            watch.close()

    @promise
    async def test_the_end_of_a_lease_notifies_watchers_of_an_entry(self, h: StoreHarness) -> None:
        """A watcher of an entry is notified of the expiry of its lease, even if no client reads or
        writes meanwhile."""
        holder, watcher = await h.client(), await h.client()
        key = order_key(h.name())
        await holder.create(key, b"v", await holder.grant(h.ttl_s))
        changed = asyncio.Event()
        watch = await watcher.watch_entry(key, changed.set)
        while watcher.carried(watch) or await watcher.get(key) is not None:
            await h.notified(changed, "the expiry of the lease of an entry")

    @promise
    async def test_an_entry_created_and_deleted_after_the_watch_notifies(
        self, h: StoreHarness
    ) -> None:
        """A client that read an entry created after the watch began is notified of its deletion,
        although the state is then the same as at the beginning."""
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
                await h.notified(changed, "the deletion of the entry that was read")
                seen = await other.get(key)
            watch.close()

    @promise
    async def test_waiting_for_the_one_ahead_never_hangs(self, h: StoreHarness) -> None:
        """Candidates that each watch only the ticket ahead get their turns in order."""
        waiters = [await leased(h) for _ in range(h.racers)]
        line = line_key(h.name())
        served: list[int] = []
        tickets = [
            await store.enqueue(line, str(number).encode(), lease)
            for number, (store, lease) in enumerate(waiters)
        ]

        async def wait_in_line(number: int) -> None:
            (store, lease), ticket = waiters[number], tickets[number]
            while (ahead := await store.ahead(ticket)) is not None:
                gone = asyncio.Event()
                watch = await store.watch(ahead.key, gone.set)
                if await store.get(ahead.key) is not None:
                    await h.notified(gone, "the ticket ahead was removed")
                watch.close()
            served.append(number)
            if number % 2:
                await store.revoke(lease)
            else:
                assert await store.delete(ticket.key, if_version=ticket.version)

        await asyncio.gather(*map(wait_in_line, reversed(range(h.racers))))
        assert served == list(range(h.racers))

    @promise
    async def test_a_closed_watch_does_not_notify(self, h: StoreHarness) -> None:
        """No call of `notify` begins after the watch was closed: by `close`, by `close` within
        `notify`, or by closing the store. Closing twice has no further effect."""
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
        spurious = len(calls)  # notifications before the watches were closed
        entry = await put(writer, key, b"0")
        await h.notified(live, "a write")
        notified_once = _true_when(lambda: "once" in calls)
        await h.within("the watch that closes itself was notified", notified_once)
        for number in range(5):
            entry = await put(writer, key, str(number).encode(), entry.version)
            await h.notified(live, "another write")
        assert set(calls[spurious:]) <= {"once"}
        assert calls.count("once") == 1

    @promise
    async def test_one_client_may_have_many_watches(self, h: StoreHarness) -> None:
        """Each of many watches of one client is notified, even if some have the same scope. Closing
        one does not affect the others."""
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
            await h.notified(events[key, 1 - number % 2], "a write to one of many watched keys")


async def _yield(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def _true_when(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def reached() -> bool:
        return condition()

    return reached
