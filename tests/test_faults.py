"""Each fault has its documented effect, and the same seed gives the same run."""

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
def test_an_unanswered_call_waits_until_it_is_cancelled(fault: Fault, done: bool) -> None:
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
def test_an_answered_failure_is_raised_at_once(
    fault: Fault, error: type[DoyenError], done: bool
) -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        faults.next("put", fault)
        with pytest.raises(error):
            await store.put("k", b"v", if_version=None)
        assert clock.now() == 0.0
        assert (server.get("k") is not None) == done
        assert (await store.put("k", b"v", if_version=None) is None) == done

    with_faults(faults, body)


def test_cancelling_a_late_request_stops_it() -> None:
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


def test_a_stray_call_is_carried_out_after_cancellation_and_later_calls() -> None:
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


def test_a_stray_call_returns_its_answer_or_error_to_a_waiting_caller() -> None:
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


def test_a_lease_can_end_without_its_holders_knowledge() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        lease = await store.grant(5.0)
        await store.create("k", b"v", lease)
        faults.next("renew", Expired())
        with pytest.raises(LeaseGone):
            await store.renew(lease)
        assert server.get("k") is None

    with_faults(faults, body)


def test_a_cut_stops_all_traffic_and_healing_notifies_every_watch() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        notified: list[float] = []
        watch = await store.watch("k", lambda: notified.append(clock.now()))
        closed = await store.watch("k", lambda: notified.append(-1.0))
        closed.close()
        faults.cut()
        server.put("k", b"v", None)
        assert await gave_up(store.get("k"))
        assert await gave_up(store.delete("k"))
        assert await gave_up(store.watch("k", lambda: notified.append(-1.0)))
        assert notified == []
        assert server.get("k") is not None
        faults.heal()
        await asyncio.sleep(1.0)
        assert notified == [6.0]
        assert await store.get("k") is not None
        server.delete("k")
        await asyncio.sleep(1.0)
        assert notified == [6.0, 7.0]
        watch.close()

    with_faults(faults, body)


def test_a_cut_of_answers_lets_requests_through() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        faults.cut(answers_only=True)
        assert await gave_up(store.put("k", b"v", if_version=None))
        assert server.get("k") is not None

    with_faults(faults, body)


def test_calls_in_flight_when_a_cut_begins_are_lost() -> None:
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


def test_a_watch_whose_answer_was_lost_is_removed() -> None:
    faults = Faults()

    async def body(store: FaultyStore, server: MemoryServer, clock: VirtualClock) -> None:
        notified: list[int] = []
        faults.next("watch", Unanswered(), Stray(after_s=3.0))
        assert await gave_up(store.watch("k", lambda: notified.append(1)))
        assert await gave_up(store.watch("k", lambda: notified.append(2)))
        await asyncio.sleep(10.0)
        server.put("k", b"v", None)
        await asyncio.sleep(1.0)
        assert notified == []
        assert server._watchers == {}

    with_faults(faults, body)


def scramble(seed: int) -> tuple[list[str], list[tuple[float, str]]]:
    """Run several clients under all faults. Return the trace, and the results with their times."""
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
                await store.watch("k", lambda: seen.append((clock.now(), f"{name} notified")))
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


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [scramble(seed) for seed in range(8)]
    assert [scramble(seed) for seed in range(8)] == runs
    assert len({repr(run) for run in runs}) == 8
    everything = repr(runs)
    for fault in (Late, LostCall, Unanswered, RefusedCall, Stray, Expired):
        assert fault.__name__ in everything
