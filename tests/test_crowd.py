"""Thousands of candidates on one session that all call the store at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from doyen.errors import OutcomeUnknown, StoreUnavailable
from doyen.events import Unsure
from doyen.lease.keeper import CALLS_AT_ONCE
from doyen.testing import Faults
from doyen.testing.faults import FaultyStore
from support import TTL_S, Place, core_of, now, virtual


class Queue(FaultyStore):
    """A store that serves one call at a time; renewals do not wait."""

    async def _call(self, operation: str, *rest: Any) -> Any:
        if operation != "renew":
            self.calls[operation] += 1
            async with self._counter:
                await asyncio.sleep(0.002)
        return await super()._call(operation, *rest)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.calls: Counter[str] = Counter()
        self._counter = asyncio.Lock()


@virtual
async def test_a_crowd_does_not_make_itself_late(place: Place) -> None:
    """All calls together take longer than one call may, but no candidate repeats its call."""
    session = await place.open(wrap=lambda store: Queue(store, Faults()))
    store = core_of(session).store
    assert isinstance(store, Queue)
    leading = asyncio.Semaphore(0)
    stop = asyncio.Event()

    async def lead(number: int) -> None:
        async with session.campaign(f"e{number}"):
            leading.release()
            await stop.wait()

    crowd = 1500
    assert crowd * 0.002 > TTL_S / 6 > CALLS_AT_ONCE * 0.002
    campaigns = [asyncio.create_task(lead(number)) for number in range(crowd)]
    for _ in campaigns:
        await leading.acquire()
    stop.set()
    await asyncio.gather(*campaigns)
    assert store.calls["enqueue"] == store.calls["create"] == crowd
    assert not place.seen(Unsure)


@virtual
async def test_a_call_that_is_never_admitted_fails_without_effect(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    faults.cut()
    calls = [session.leader("e") for _ in range(20 * CALLS_AT_ONCE)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {OutcomeUnknown, StoreUnavailable}
    assert now() <= 2 * TTL_S
    faults.heal()
    assert await session.leader("e") is None


@virtual
async def test_a_call_waiting_for_admission_can_be_cancelled(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    faults.cut()
    others = [asyncio.create_task(session.leader("e")) for _ in range(2 * CALLS_AT_ONCE)]
    await asyncio.sleep(0.1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await session.leader("e")
    assert now() == 0.2
    faults.heal()
    await asyncio.gather(*others, return_exceptions=True)
    assert await session.leader("e") is None
