"""Loops that would spin: a campaign never entered, a body that ends at once. Locks by calls."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

import doyen
from support import Place, now, virtual


@virtual
async def test_a_campaign_that_was_not_entered_is_an_error(place: Place) -> None:
    session = await place.open()
    rounds = 0
    with pytest.raises(RuntimeError, match="'e' was never entered"):
        async for _ in session.campaigns("e"):
            rounds += 1
            assert rounds < 5
    assert rounds == 1


def test_a_blocking_campaign_that_was_not_entered_is_an_error() -> None:
    with (
        doyen.connect_blocking("memory://spin") as session,
        pytest.raises(RuntimeError, match="enter it with `with campaign as term:`"),
    ):
        for _ in session.campaigns("e"):
            pass


@virtual
async def test_a_body_that_ends_at_once_is_slowed_down(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    session = await place.open()
    began: list[float] = []
    async for campaign in session.campaigns("e", name="a"):
        async with campaign:
            began.append(now())
        if len(began) == 10:
            break
    gaps = [round(after - before, 3) for before, after in itertools.pairwise(began)]
    assert gaps == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    warned = [each for each in caplog.messages if "event=body_ended_at_once" in each]
    assert len(warned) == 1
    assert "election=e" in warned[0]


@virtual
async def test_a_body_that_works_is_not_slowed_down(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A longer body begins the pauses anew, and a loss is followed by none."""
    session = await place.open()
    began: list[float] = []
    lengths = [0.0, 0.0, 0.2, 0.0, 0.1]
    async for campaign in session.campaigns("e", name="a"):
        async with campaign:
            began.append(now())
            await asyncio.sleep(lengths[len(began) - 1])
        if len(began) == len(lengths):
            break
    gaps = [round(after - before, 3) for before, after in itertools.pairwise(began)]
    assert gaps == [0.1, 0.2, 0.2, 0.1]
    caplog.clear()
    lost = 0
    async for campaign in session.campaigns("e", name="a"):
        async with campaign:
            if lost == 3:
                break
            lost += 1
            await session.resign("e", force=True)
            await asyncio.sleep(60.0)
    assert not [each for each in caplog.messages if "event=body_ended_at_once" in each]


def test_a_blocking_body_is_slowed_down_too(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    monkeypatch.setattr("doyen.blocking.time", SimpleNamespace(sleep=paused.append))
    with doyen.connect_blocking("memory://slow") as session:
        for campaign in session.campaigns("e"):
            with campaign:
                pass
            if len(paused) == 3:
                break
    assert paused == [0.1, 0.2, 0.4]


@virtual
async def test_a_campaign_that_was_not_elected_is_no_spin(place: Place) -> None:
    """Who gives up after `wait_s` may go on in the loop."""
    leading, waiting = await place.open(), await place.open()
    tries = 0
    async with leading.campaign("e"):
        async for campaign in waiting.campaigns("e", wait_s=1.0):
            with pytest.raises(doyen.NotElected):
                await campaign.__aenter__()
            tries += 1
            if tries == 3:
                break
    assert now() == 3.0


@virtual
async def test_locks_are_acquired_and_released_by_calls(place: Place) -> None:
    session, other = await place.open(), await place.open()
    lock, same = session.lock("m", name="a"), other.lock("m", name="b")
    assert not await lock.locked()
    term = await lock.acquire()
    assert term.valid
    assert lock.term is term
    assert await same.locked()
    assert await same.acquire(wait_s=0.0) is None
    began = now()
    assert await same.acquire(wait_s=2.0) is None
    assert now() - began == 2.0
    asyncio.get_running_loop().call_later(1.0, lambda: asyncio.ensure_future(lock.release()))
    after = await same.acquire(wait_s=60.0)
    assert after is not None
    assert after.token > term.token
    assert not term.valid
    assert lock.term is None
    await same.release()
    with pytest.raises(RuntimeError, match="acquire comes before release"):
        await same.release()
    async with lock as again:  # the object may be used again, as a scope too
        assert again.token > after.token
        with pytest.raises(doyen.AlreadyCampaigning):
            await lock.acquire(wait_s=1.0)
    assert not await lock.locked()


@virtual
async def test_a_lock_that_was_lost_says_so_at_its_release(place: Place) -> None:
    """Nothing is cancelled: there is no scope."""
    session = await place.open()
    lock = session.lock("m")
    term = await lock.acquire()
    place.end_lease(session)
    await asyncio.sleep(10.0)
    assert not term.valid
    with pytest.raises(doyen.LeadershipLost):
        await lock.release()
    await lock.acquire()
    await lock.release()


@virtual
async def test_tasks_share_a_lock(place: Place) -> None:
    session = await place.open()
    lock = session.lock("m")
    inside = [0, 0]

    async def by_calls() -> None:
        await lock.acquire()
        try:
            await work()
        finally:
            await lock.release()

    async def by_scope() -> None:
        async with lock:
            await work()

    async def work() -> None:
        inside[0] += 1
        inside[1] = max(inside)
        await asyncio.sleep(1.0)
        inside[0] -= 1

    await asyncio.gather(*(each() for each in [by_calls, by_scope] * 3))
    assert inside == [0, 1]
    assert now() >= 6.0


def test_blocking_locks_are_acquired_and_released_by_calls() -> None:
    url = "memory://blocking-lock"
    with doyen.connect_blocking(url) as session, doyen.connect_blocking(url) as other:
        lock, same = session.lock("m"), other.lock("m")
        term = lock.acquire()
        assert lock.locked()
        assert same.acquire(wait_s=0.0) is None
        assert lock.term is term
        lock.release()
        assert not lock.locked()
        with same as held:
            assert held.token > term.token
            assert same.term is held
        with pytest.raises(RuntimeError, match="acquire comes before release"):
            lock.release()
        wrong: Any = "soon"
        with pytest.raises(doyen.ConfigError, match="wait_s"):
            lock.acquire(wait_s=wrong)
