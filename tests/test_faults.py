"""Each fault has its documented effect, and the same seed gives the same run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

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


class Wrapped:
    """A store with faults around it, in virtual time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.faults = Faults()
        self.server = MemoryServer(self.clock)
        self.store: FaultyStore

    async def run(self, body: Callable[..., Awaitable[None]], given: dict[str, Any]) -> None:
        context = Context(self.clock, lambda _: None)
        self.store = FaultyStore(MemoryStore(self.server, context), self.faults)
        await body(self, **given)
        await self.store.close()


def faulty(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test from a coroutine function whose first parameter is a `Wrapped`."""

    def test(**given: Any) -> None:
        wrapped = Wrapped()
        run_virtual(wrapped.run(body, given), clock=wrapped.clock)

    parameters = [*inspect.signature(body).parameters.values()][1:]
    test.__name__, test.__doc__ = body.__name__, body.__doc__
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return test


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
@faulty
async def test_an_unanswered_call_waits_until_it_is_cancelled(
    on: Wrapped, fault: Fault, done: bool
) -> None:
    on.faults.next("put", fault)
    assert await gave_up(on.store.put("k", b"v", if_version=None))
    assert on.clock.now() == 2.0
    assert (on.server.get("k") is not None) == done


@pytest.mark.parametrize(
    ("fault", "error", "done"),
    [
        (RefusedCall(), StoreUnavailable, False),
        (LostCall(raises=True), OutcomeUnknown, False),
        (Unanswered(raises=True), OutcomeUnknown, True),
    ],
)
@faulty
async def test_an_answered_failure_is_raised_at_once(
    on: Wrapped, fault: Fault, error: type[DoyenError], done: bool
) -> None:
    on.faults.next("put", fault)
    with pytest.raises(error):
        await on.store.put("k", b"v", if_version=None)
    assert on.clock.now() == 0.0
    assert (on.server.get("k") is not None) == done
    assert (await on.store.put("k", b"v", if_version=None) is None) == done


@faulty
async def test_cancelling_a_late_request_stops_it(on: Wrapped) -> None:
    on.faults.next("put", Late(before_s=3.0))
    assert await gave_up(on.store.put("k", b"v", if_version=None))
    await asyncio.sleep(10)
    assert on.server.get("k") is None
    on.faults.next("put", Late(before_s=3.0, after_s=1.0))
    began = on.clock.now()
    assert await on.store.put("k", b"v", if_version=None) is not None
    assert on.clock.now() == began + 4.0


@faulty
async def test_a_stray_call_is_carried_out_after_cancellation_and_later_calls(on: Wrapped) -> None:
    first = await on.store.put("k", b"0", if_version=None)
    assert first is not None
    on.faults.next("delete", Stray(after_s=5.0))
    assert await gave_up(on.store.delete("k"))
    assert await on.store.put("k", b"1", if_version=first.version) is not None
    await asyncio.sleep(5.0)
    assert on.server.get("k") is None


@faulty
async def test_a_stray_call_returns_its_answer_or_error_to_a_waiting_caller(on: Wrapped) -> None:
    lease = await on.store.grant(1.0)
    on.faults.next("create", Stray(after_s=0.5), Stray(after_s=5.0))
    assert (await on.store.create("k", b"v", lease)).won
    with pytest.raises(LeaseGone):
        await on.store.create("k", b"v", lease)
    on.faults.next("create", Stray(after_s=5.0))
    assert await gave_up(on.store.create("k", b"v", lease))


@faulty
async def test_a_lease_can_end_without_its_holders_knowledge(on: Wrapped) -> None:
    lease = await on.store.grant(5.0)
    await on.store.create("k", b"v", lease)
    on.faults.next("renew", Expired())
    with pytest.raises(LeaseGone):
        await on.store.renew(lease)
    assert on.server.get("k") is None


@faulty
async def test_a_cut_stops_all_traffic_and_healing_notifies_every_watch(on: Wrapped) -> None:
    notified: list[float] = []
    watch = await on.store.watch("k", lambda: notified.append(on.clock.now()))
    closed = await on.store.watch("k", lambda: notified.append(-1.0))
    closed.close()
    on.faults.cut()
    on.server.put("k", b"v", None)
    assert await gave_up(on.store.get("k"))
    assert await gave_up(on.store.delete("k"))
    assert await gave_up(on.store.watch("k", lambda: notified.append(-1.0)))
    assert notified == []
    assert on.server.get("k") is not None
    on.faults.heal()
    await asyncio.sleep(1.0)
    assert notified == [6.0]
    assert await on.store.get("k") is not None
    on.server.delete("k")
    await asyncio.sleep(1.0)
    assert notified == [6.0, 7.0]
    watch.close()


@faulty
async def test_a_cut_of_answers_lets_requests_through(on: Wrapped) -> None:
    on.faults.cut(answers_only=True)
    assert await gave_up(on.store.put("k", b"v", if_version=None))
    assert on.server.get("k") is not None


@faulty
async def test_calls_in_flight_when_a_cut_begins_are_lost(on: Wrapped) -> None:
    on.faults.next("put", Late(before_s=1.0), Late(after_s=1.0), Stray(after_s=1.0))
    calls = [asyncio.create_task(on.store.put(key, b"v", if_version=None)) for key in "abc"]
    await asyncio.sleep(0.5)
    on.faults.cut()
    await asyncio.sleep(5.0)
    on.faults.heal()
    await asyncio.sleep(5.0)
    assert [call.done() for call in calls] == [False, False, False]
    assert [on.server.get(key) is not None for key in "abc"] == [False, True, False]
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


@faulty
async def test_a_watch_whose_answer_was_lost_is_removed(on: Wrapped) -> None:
    notified: list[int] = []
    on.faults.next("watch", Unanswered(), Stray(after_s=3.0))
    assert await gave_up(on.store.watch("k", lambda: notified.append(1)))
    assert await gave_up(on.store.watch("k", lambda: notified.append(2)))
    await asyncio.sleep(10.0)
    on.server.put("k", b"v", None)
    await asyncio.sleep(1.0)
    assert notified == []
    assert on.server._watchers == {}


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
