"""Many elections on one session: thousands at once are not in one another's way, nor in the way of
renewals."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from doyen.election.core import ENTERING
from doyen.errors import NotElected
from doyen.lease.runtime import ADMITTED, ThreadRuntime
from doyen.stores.port import Store
from doyen.testing.faults import Faults
from support import Place, now, until, virtual

CROWD = 3 * ENTERING


class Turns:
    """Counts how many calls of a store are under way at once, each taking a moment."""

    def __init__(self) -> None:
        self.under_way = self.most = 0

    def wrap(self, store: Store) -> Store:
        create = store.create

        async def counted(*args: Any) -> Any:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            try:
                await asyncio.sleep(0.01)
                return await create(*args)
            finally:
                self.under_way -= 1

        setattr(store, "create", counted)  # noqa: B010 - of this one store only
        return store


@virtual
async def test_a_crowd_takes_turns(place: Place) -> None:
    turns = Turns()
    session = await place.open(wrap=turns.wrap)
    entered, leave = 0, asyncio.Event()

    async def lead(number: int) -> None:
        nonlocal entered
        async with session.campaign(f"e{number}"):
            entered += 1
            await leave.wait()

    leading = [asyncio.create_task(lead(number)) for number in range(CROWD)]
    await until(lambda: entered == CROWD)
    assert 1 < turns.most <= ENTERING
    leave.set()
    await asyncio.gather(*leading)


@virtual
async def test_few_trails_are_written_while_a_crowd_enters(place: Place) -> None:
    session = await place.open(wrap=Turns().wrap)
    crowd = 14 * ENTERING
    terms = [session.campaign(f"e{number}") for number in range(crowd)]
    await asyncio.gather(*(term.__aenter__() for term in terms))
    assert len(place.server.list("trails")) < 20
    await asyncio.sleep(1.0)
    assert len(place.server.list("trails")) == crowd
    await asyncio.gather(*(term.__aexit__(None, None, None) for term in terms))


@virtual
async def test_waiting_candidates_do_not_block_admission(place: Place) -> None:
    leader, session = await place.open(), await place.open()
    async with leader.campaign("e"):

        async def stand() -> None:
            async with session.campaign("e"):
                pass

        waiting = [asyncio.create_task(stand()) for _ in range(CROWD)]
        await until(lambda: len(place.line()) == CROWD + 1)
        async with session.campaign("another", wait_s=1.0):
            pass
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@virtual
async def test_a_crowd_before_a_store_that_is_down_still_ends_in_time(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    faults.cut()
    campaigns = [session.campaign(f"e{number}", wait_s=2.0) for number in range(CROWD)]

    async def stand(campaign: Any) -> float:
        with pytest.raises(NotElected):
            async with campaign:
                pytest.fail("entered without a store")
        return now()

    ended = await asyncio.gather(*map(stand, campaigns))
    assert max(ended) <= 2.0 + 2 * session._opened.calls.timing.request_timeout_s
    faults.heal()


def test_work_begins_a_little_in_each_turn_of_the_loop() -> None:
    """However much is handed in at once; and what is cancelled before it began never runs."""
    runtime = ThreadRuntime()
    begun: list[int] = []
    blocked, all_handed_in = threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        all_handed_in.wait()

    async def begin(number: int) -> None:
        begun.append(number)

    most_in_a_turn = 0

    async def count_turns() -> None:
        nonlocal most_in_a_turn
        before = 0
        while before < len(begun) or not begun:
            before = len(begun)
            await asyncio.sleep(0)
            most_in_a_turn = max(most_in_a_turn, len(begun) - before)

    try:
        runtime.start(block())
        assert blocked.wait(20)
        futures = [runtime.submit(count_turns())]
        futures += [runtime.submit(begin(number)) for number in range(5 * ADMITTED)]
        futures[-1].cancel()
        all_handed_in.set()
        for future in futures[:-1]:
            future.result(20)
    finally:
        all_handed_in.set()
        runtime.release()
    assert begun == list(range(5 * ADMITTED - 1))
    assert most_in_a_turn <= ADMITTED
