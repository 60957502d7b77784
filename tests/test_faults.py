"""Fault injection does each fault as it says, and the same run for the same seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from doyen.errors import DoyenError, LeaseGone, OutcomeUnknown, StoreUnavailable
from doyen.lease.clock import VirtualClock
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context
from doyen.testing import (
    Expired,
    Fault,
    Faults,
    FaultyStore,
    Late,
    LostCall,
    Odds,
    RefusedCall,
    Stray,
    Unanswered,
    run_virtual,
)

Body = Callable[[FaultyStore, MemoryServer, VirtualClock], Awaitable[None]]


def with_faults(faults: Faults, body: Body) -> None:
    clock = VirtualClock()

    async def main() -> None:
        server = MemoryServer(clock)
        store = FaultyStore(MemoryStore(server, Context(clock, lambda _: None)), faults)
        await body(store, server, clock)
        await store.close()

    run_virtual(main, clock=clock)


async def gave_up(call: Awaitable[object], after_s: float = 2.0) -> bool:
    try:
        async with asyncio.timeout(after_s):
            await call
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize(
    ("fault", "done"),
    [
        (LostCall(), False),
        (Unanswered(), True),
        (Stray(after_s=3.0), False),
        (Late(after_s=3.0), True),
    ],
)
def test_what_is_not_answered_hangs_until_the_caller_gives_up(fault: Fault, done: bool) -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        faults.next("put", fault)
        assert await gave_up(store.put("k", b"v", if_version=None))
        assert clock.now() == 2.0
        assert (server.get("k") is not None) == done

    with_faults(faults, body)


@pytest.mark.parametrize(
    ("fault", "error", "done"),
    [
        (RefusedCall(), StoreUnavailable, False),
        (LostCall(told=True), OutcomeUnknown, False),
        (Unanswered(told=True), OutcomeUnknown, True),
    ],
)
def test_what_is_told_is_told_at_once(fault: Fault, error: type[DoyenError], done: bool) -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        faults.next("put", fault)
        with pytest.raises(error):
            await store.put("k", b"v", if_version=None)
        assert clock.now() == 0.0
        assert (server.get("k") is not None) == done
        assert (await store.put("k", b"v", if_version=None) is None) == done

    with_faults(faults, body)


def test_a_late_request_stops_with_its_caller() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        faults.next("put", Late(before_s=3.0))
        assert await gave_up(store.put("k", b"v", if_version=None))
        await asyncio.sleep(10)
        assert server.get("k") is None
        faults.next("put", Late(before_s=3.0, after_s=1.0))
        began = clock.now()
        assert await store.put("k", b"v", if_version=None) is not None
        assert clock.now() == began + 4.0

    with_faults(faults, body)


def test_a_stray_lands_after_its_caller_has_gone_and_after_later_calls() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        first = await store.put("k", b"0", if_version=None)
        assert first is not None
        faults.next("delete", Stray(after_s=5.0))
        assert await gave_up(store.delete("k"))
        assert await store.put("k", b"1", if_version=first.version) is not None
        await asyncio.sleep(5.0)
        assert server.get("k") is None

    with_faults(faults, body)


def test_a_strays_answer_reaches_a_caller_who_waits_and_its_error_too() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        lease = await store.grant(1.0)
        faults.next("create", Stray(after_s=0.5), Stray(after_s=5.0))
        assert (await store.create("k", b"v", lease)).won
        with pytest.raises(LeaseGone):
            await store.create("k", b"v", lease)
        faults.next("create", Stray(after_s=5.0))
        assert await gave_up(store.create("k", b"v", lease))

    with_faults(faults, body)


def test_a_lease_can_end_behind_its_holders_back() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        lease = await store.grant(5.0)
        await store.create("k", b"v", lease)
        faults.next("renew", Expired())
        with pytest.raises(LeaseGone):
            await store.renew(lease)
        assert server.get("k") is None

    with_faults(faults, body)


def test_a_cut_stops_everything_and_healing_tells_every_watch() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        told: list[float] = []
        watch = await store.watch("k", lambda: told.append(clock.now()))
        closed = await store.watch("k", lambda: told.append(-1.0))
        closed.close()
        faults.cut()
        server.put("k", b"v", None)
        assert await gave_up(store.get("k"))
        assert await gave_up(store.delete("k"))
        assert await gave_up(store.watch("k", lambda: told.append(-1.0)))
        assert told == []
        assert server.get("k") is not None
        faults.heal()
        await asyncio.sleep(1.0)
        assert told == [6.0]
        assert await store.get("k") is not None
        server.delete("k")
        await asyncio.sleep(1.0)
        assert told == [6.0, 7.0]
        watch.close()

    with_faults(faults, body)


def test_a_cut_of_answers_lets_requests_through() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        faults.cut(answers_only=True)
        assert await gave_up(store.put("k", b"v", if_version=None))
        assert server.get("k") is not None

    with_faults(faults, body)


def test_what_is_on_its_way_when_the_cut_begins_is_lost() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        faults.next("put", Late(before_s=1.0), Late(after_s=1.0), Stray(after_s=1.0))
        calls = [asyncio.create_task(store.put(key, b"v", if_version=None)) for key in "abc"]
        await asyncio.sleep(0.5)
        faults.cut()
        await asyncio.sleep(5.0)
        faults.heal()
        await asyncio.sleep(5.0)
        assert [call.done() for call in calls] == [False, False, False]
        assert [server.get(key) is not None for key in "abc"] == [False, True, False]
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

    with_faults(faults, body)


def test_a_watch_whose_answer_was_lost_is_not_left_behind() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        told: list[int] = []
        faults.next("watch", Unanswered(), Stray(after_s=3.0))
        assert await gave_up(store.watch("k", lambda: told.append(1)))
        assert await gave_up(store.watch("k", lambda: told.append(2)))
        await asyncio.sleep(10.0)
        server.put("k", b"v", None)
        await asyncio.sleep(1.0)
        assert told == []
        assert server._watchers == {}

    with_faults(faults, body)


def scramble(seed: int) -> tuple[list[str], list[tuple[float, str]]]:
    """Several clients do what they like under every fault; the trace, and what was seen when."""
    clock = VirtualClock()
    odds = Odds(
        late=0.2, lost=0.1, unanswered=0.1, refused=0.1, stray=0.1, expired=0.05, delay_s=3.0
    )
    faults = Faults(seed, odds)
    seen: list[tuple[float, str]] = []

    async def client(server: MemoryServer, name: str) -> None:
        inner = MemoryStore(server, Context(clock, lambda _: None))
        store = FaultyStore(inner, faults)
        lease = server.grant(20.0)
        try:
            async with asyncio.timeout(2.0):
                await store.watch("k", lambda: seen.append((clock.now(), f"{name} told")))
        except (DoyenError, TimeoutError):
            pass
        for _ in range(20):
            try:
                async with asyncio.timeout(2.0):
                    won = (await store.create("k", name.encode(), lease)).won
                    seen.append((clock.now(), f"{name} {won}"))
                    await store.delete("k")
            except (DoyenError, TimeoutError) as error:
                seen.append((clock.now(), f"{name} {type(error).__name__}"))
        await store.close()

    async def main() -> None:
        server = MemoryServer(clock)
        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(client(server, name))

    run_virtual(main, clock=clock)
    return faults.trace, seen


def test_one_seed_is_one_run() -> None:
    runs = [scramble(seed) for seed in range(8)]
    assert [scramble(seed) for seed in range(8)] == runs
    assert len({repr(run) for run in runs}) == 8
    everything = repr(runs)
    for fault in (Late, LostCall, Unanswered, RefusedCall, Stray, Expired):
        assert fault.__name__ in everything
