"""What a session opens, watches or listens for is given back; nothing is asked for in vain."""

from __future__ import annotations

import asyncio
from functools import partial

from doyen.session import OBSERVED
from doyen.stores.port import Store
from support import TTL_S, Place, keepalive_of, lead_until_set, soon, until, virtual


@virtual
async def test_outside_a_task_nothing_is_entered(place: Place) -> None:
    """A loss cancels the body's task. Without one the campaign is refused, before it stands."""
    session = await place.open()
    raised: list[BaseException] = []

    def without_a_task() -> None:
        entering = session.campaign("e").__aenter__()
        try:
            entering.send(None)
        except BaseException as error:  # noqa: BLE001 - it is what we came for
            raised.append(error)
        finally:
            entering.close()

    soon(0.0, without_a_task)
    await asyncio.sleep(1)
    (error,) = raised
    assert isinstance(error, RuntimeError)
    assert "entered from a task" in str(error)
    assert (place.line(), place.holder(), place.events) == ([], None, [])


@virtual
async def test_listeners_for_renewals_end_with_their_term(place: Place) -> None:
    """One lease serves many terms, one after the other."""
    session = await place.open()
    async with session.campaign("e"):
        pass
    before = len(keepalive_of(session)._renewal_listeners)
    deadlines: list[float] = []
    for _ in range(5):
        async with session.campaign("e") as term:
            term._on_renewal(deadlines.append)
            deadlines.clear()
            await asyncio.sleep(TTL_S)
            assert deadlines == sorted(set(deadlines))
            assert deadlines
    count = len(deadlines)
    await asyncio.sleep(TTL_S)
    assert len(deadlines) == count
    assert len(keepalive_of(session)._renewal_listeners) == before


@virtual
async def test_cancelled_at_every_instant_of_opening(place: Place) -> None:
    """Between any two turns of the loop: what was opened is closed again."""
    turns, entered = 0, False
    while not entered:
        turns += 1
        assert turns < 100
        closed: list[bool] = []
        session = place.session(wrap=partial(_reports_closing, closed))
        task = asyncio.create_task(session.__aenter__())
        for _ in range(turns - 1):
            await asyncio.sleep(0)
        entered = task.done()
        task.cancel()
        await asyncio.wait({task})
        if entered:
            await session.__aexit__()
        elif turns > 1:  # before that nothing was begun
            assert closed, turns
    assert turns > 2


def _reports_closing(closed: list[bool], store: Store) -> Store:
    close = store.close

    async def closing() -> None:
        await close()
        closed.append(True)

    store.close = closing  # type: ignore[method-assign]
    return store


@virtual
async def test_a_slow_observer_keeps_the_newest(place: Place) -> None:
    """What waits for an observer is bounded; in the end it knows who leads."""
    watcher, session, stop = await place.open(), await place.open(), asyncio.Event()
    leaders = watcher.observe("e")
    assert await anext(leaders) is None
    for number in range(2 * OBSERVED):
        async with session.campaign("e", name=f"leader {number}"):
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
    last = asyncio.create_task(lead_until_set(session, stop, name="last"))
    await asyncio.sleep(0.1)
    seen = [await anext(leaders) for _ in range(OBSERVED)]
    assert seen[-1]
    assert seen[-1].name == "last"
    change = asyncio.create_task(anext(leaders))
    await asyncio.sleep(1)
    assert not change.done()
    stop.set()
    await last
    await until(change.done)
    assert change.result() is None
    await leaders.aclose()
