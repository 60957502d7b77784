"""Behaviour specific to the memory store. The rest is tested by the conformance suite."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from itertools import pairwise

import pytest

from doyen.errors import ConfigError, StoreUnusable
from doyen.events import Event, LeaseEnded
from doyen.lease.clock import SystemClock, VirtualClock
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, open_store
from doyen.testing import run_virtual


def context(clock: VirtualClock | SystemClock, events: list[Event] | None = None) -> Context:
    return Context(clock, (lambda _: None) if events is None else events.append)


def test_the_same_name_is_the_same_store_and_another_is_not() -> None:
    clock = VirtualClock()

    async def main() -> None:
        a, b, other, unnamed = [
            await open_store(url, context(clock))
            for url in ("memory://x/y", "memory://x/y", "memory://x", "memory://")
        ]
        lease = await a.grant(5)
        await a.create("k", b"v", lease)
        assert await b.get("k") is not None
        assert await other.get("k") is None
        assert await unnamed.get("k") is None

    run_virtual(main, clock=clock)


def test_each_virtual_clock_has_its_own_stores() -> None:
    async def write(clock: VirtualClock) -> bool:
        store = await open_store("memory://world", context(clock))
        return (await store.create("k", b"v", await store.grant(5))).won

    for clock in (VirtualClock(), VirtualClock()):
        assert run_virtual(write(clock), clock=clock)


def test_an_unknown_option_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="no option 'ttl'"):
            await open_store("memory://x?ttl=3", context(VirtualClock()))

    run_virtual(main)


def test_a_forked_child_has_an_empty_store() -> None:
    async def first() -> None:
        store = await open_store("memory://forked", context(SystemClock()))
        await store.put("k", b"v", if_version=None)

    async def found() -> bool:
        store = await open_store("memory://forked", context(SystemClock()))
        return await store.get("k") is not None

    asyncio.run(first())
    pid = os.fork()
    if pid == 0:
        os._exit(2 if asyncio.run(found()) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert asyncio.run(found())


def test_a_closed_store_raises_and_close_is_idempotent() -> None:
    clock = VirtualClock()

    async def main() -> None:
        store = MemoryStore(MemoryServer(clock), context(clock))
        notified: list[int] = []
        await store.watch("k", lambda: notified.append(1))
        await store.put("k", b"v", if_version=None)
        await store.close()
        await store.close()
        await asyncio.sleep(1)
        assert notified == []
        with pytest.raises(StoreUnusable, match="closed"):
            await store.get("k")

    run_virtual(main, clock=clock)


def test_expiry_after_renewals_notifies_at_the_exact_time() -> None:
    clock = VirtualClock()

    async def main() -> list[float]:
        server = MemoryServer(clock)
        holder, watcher = (MemoryStore(server, context(clock)) for _ in range(2))
        lease = await holder.grant(5.0)
        await holder.create("k", b"v", lease)
        notified: list[float] = []
        watch = await watcher.watch("k", lambda: notified.append(clock.now()))
        for _ in range(3):
            await asyncio.sleep(2.0)
            await holder.renew(lease)
        await asyncio.sleep(100.0)
        watch.close()
        return notified

    assert run_virtual(main, clock=clock) == [11.0]


def test_expiry_of_a_shorter_lease_granted_later_notifies_in_time() -> None:
    clock = VirtualClock()

    async def main() -> list[float]:
        server = MemoryServer(clock)
        holder, watcher = (MemoryStore(server, context(clock)) for _ in range(2))
        await holder.grant(50.0)
        notified: list[float] = []
        await watcher.watch("k", lambda: notified.append(clock.now()))
        await holder.create("k", b"v", await holder.grant(1.0))
        await asyncio.sleep(100.0)
        return notified

    assert run_virtual(main, clock=clock) == [0.0, 1.0]


def test_after_a_suspend_the_clock_decides_and_the_timer_follows() -> None:
    clock = VirtualClock()

    async def main() -> list[float]:
        server = MemoryServer(clock)
        store = MemoryStore(server, context(clock))
        await store.create("k", b"v", await store.grant(5.0))
        notified: list[float] = []
        await store.watch("k", lambda: notified.append(clock.monotonic()))
        await asyncio.sleep(1.0)
        clock.suspend(60.0)
        assert await store.get("k") is None
        await asyncio.sleep(0)
        return notified

    assert run_virtual(main, clock=clock) == [1.0]


def test_a_clock_slower_than_the_loops_is_waited_for() -> None:
    class Slow:
        def __init__(self, clock: VirtualClock) -> None:
            self._clock = clock

        def now(self) -> float:
            return self._clock.now() * 0.9

        def wall(self) -> float:
            return self._clock.wall()

    clock = VirtualClock()

    async def main() -> float:
        store = MemoryStore(MemoryServer(Slow(clock)), context(clock))
        await store.create("k", b"v", await store.grant(9.0))
        notified = asyncio.Event()
        await store.watch("k", notified.set)
        await notified.wait()
        assert await store.get("k") is None
        return clock.now()

    assert run_virtual(main, clock=clock) == pytest.approx(10.0)


def test_lease_ended_is_emitted_once_and_only_for_leases_of_others() -> None:
    clock = VirtualClock()

    async def main() -> None:
        server = MemoryServer(clock)
        ours: list[Event] = []
        theirs: list[Event] = []
        holder = MemoryStore(server, context(clock, theirs))
        watcher = MemoryStore(server, context(clock, ours))
        lease = await holder.grant(1.0)
        own = await watcher.grant(1.0)
        await watcher.watch("k", lambda: None)
        await asyncio.sleep(5.0)
        assert own.id != lease.id
        assert ours == [LeaseEnded(lease=lease.id, cause="expired")]
        assert theirs == []

    run_virtual(main, clock=clock)


def test_threads_share_one_server_and_notify_each_other() -> None:
    """Two loops in two threads pass a counter back and forth by watching each other's key."""
    server = MemoryServer(SystemClock())
    rounds = 200

    async def player(mine: str, other: str, first: bool) -> None:
        store = MemoryStore(server, context(SystemClock()))
        changed = asyncio.Event()
        watch = await store.watch(other, changed.set)
        async with asyncio.timeout(30):
            for number in range(rounds):
                if not first:
                    await reached(store, other, number, changed)
                entry = await store.get(mine)
                await store.put(mine, b"%d" % number, if_version=entry and entry.version)
                if first:
                    await reached(store, other, number, changed)
        watch.close()
        await store.close()

    async def reached(store: MemoryStore, key: str, number: int, changed: asyncio.Event) -> None:
        while (entry := await store.get(key)) is None or int(entry.value) < number:
            changed.clear()
            if (entry := await store.get(key)) is None or int(entry.value) < number:
                await changed.wait()

    threads = [
        threading.Thread(target=asyncio.run, args=(player("a", "b", True),)),
        threading.Thread(target=asyncio.run, args=(player("b", "a", False),)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key: int(server.get(key).value) for key in "ab"} == {"a": 199, "b": 199}  # type: ignore[union-attr]


def test_a_watch_of_a_closed_loop_does_not_break_writers() -> None:
    clock = VirtualClock()
    server = MemoryServer(clock)

    async def leave_a_watch() -> None:
        store = MemoryStore(server, context(clock))
        await store.watch("k", lambda: None)
        server.grant(5.0)

    async def write() -> None:
        store = MemoryStore(server, context(clock))
        lease = await store.grant(1.0)
        assert (await store.create("k", b"v", lease)).won
        await store.revoke(lease)

    run_virtual(leave_a_watch, clock=clock)
    run_virtual(write, clock=clock)


def test_many_elections_and_a_long_line_are_cheap() -> None:
    """A cost that grew with the number of entries would take minutes here."""
    server = MemoryServer(VirtualClock())
    lease = server.grant(5.0).id
    began = time.process_time()
    for number in range(10_000):
        server.create(f"elections/e{number}/leader", b"", lease)
    tickets = [server.enqueue("elections/e5000/line", b"", lease) for _ in range(1_000)]
    for before, ticket in pairwise(tickets):
        ahead = server.ahead(ticket.key)
        assert ahead is not None
        assert ahead.key == before.key
    assert len(server.list("elections/e5000/line")) == 1_000
    server.revoke(lease)
    assert server.list("elections") == []
    assert time.process_time() - began < 5
