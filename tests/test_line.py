"""The line as others see it: in order, the leader marked, every change and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import pytest

import doyen
from doyen import Session
from doyen.model import Line
from doyen.testing.faults import Faults, Late, RefusedCall
from support import Place, known, lead_until_set, real_server, real_session, until, virtual


def names(line: Line) -> list[str]:
    return [candidate.name for candidate in line.candidates]


class Observer:
    """What a session that only looks has seen so far."""

    def __init__(self, session: Session, election: str = "e") -> None:
        self.seen: list[Line] = []
        self._task = asyncio.create_task(self._look(session, election))

    async def _look(self, session: Session, election: str) -> None:
        async with aclosing(session.observe_line(election)) as lines:
            async for line in lines:
                self.seen.append(known(line))

    @property
    def last(self) -> Line:
        return self.seen[-1]

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


@virtual
async def test_every_change_of_the_line_is_reported(place: Place) -> None:
    one, two, looking = await place.open(), await place.open(), await place.open()
    observer = Observer(looking)
    await until(lambda: observer.seen)
    assert observer.last == Line(None, ())

    stop = asyncio.Event()
    first = asyncio.create_task(lead_until_set(one, stop, name="a", meta={"port": 80}))
    await until(lambda: observer.last.leader)
    second = asyncio.create_task(lead_until_set(two, stop, name="b", priority=5))
    await until(lambda: len(observer.last.candidates) == 2)
    assert names(observer.last) == ["b", "a"], "a higher priority stands ahead"
    assert [each.leads for each in observer.last.candidates] == [False, True]
    assert [each.priority for each in observer.last.candidates] == [5, 0]
    assert observer.last.candidates[1].meta == {"port": 80}
    assert await looking.line("e") == [*observer.last.candidates]

    count = len(observer.seen)
    await asyncio.sleep(60)
    assert len(observer.seen) == count, "a renewal is no change of the line"

    stop.set()
    await asyncio.gather(first, second)
    await until(lambda: observer.last == Line(None, ()))
    assert all(line != after for line, after in zip(observer.seen, observer.seen[1:], strict=False))
    await observer.stop()


@virtual
async def test_a_leader_without_a_ticket_is_seen_to_lead(place: Place) -> None:
    session, looking = await place.open(), await place.open()
    async with session.campaign("e", name="a", recipe="race") as term:
        observer = Observer(looking)
        await until(lambda: observer.seen)
        assert observer.last == Line(doyen.Leader("e", "a", term.token), ())
    await observer.stop()


@virtual
async def test_a_store_that_refuses_is_asked_again(place: Place) -> None:
    """Both watches must stand in the end, or changes of the line would go untold."""
    faults = Faults()
    faults.next("watch", Late(before_s=0), RefusedCall())
    faults.next("list", RefusedCall())
    session, looking = await place.open(), await place.open(faults)
    observer = Observer(looking)
    await until(lambda: observer.seen)
    stop = asyncio.Event()
    task = asyncio.create_task(lead_until_set(session, stop, name="a"))
    await until(lambda: names(observer.last) == ["a"])
    stop.set()
    await task
    await observer.stop()


def test_the_blocking_session_sees_the_same() -> None:
    with doyen.connect_blocking("memory://the-line") as session:
        lines = session.observe_line("e")
        assert next(lines) == Line(None, ())
        with session.campaign("e", name="a") as term:
            while (line := known(next(lines))).leader is None:
                continue
            assert line.leader == doyen.Leader("e", "a", term.token)
            assert names(line) == ["a"]
            assert session.line("e") == [*line.candidates]
    with pytest.raises(doyen.SessionClosed):
        while True:
            next(lines)


async def test_on_threads_of_its_own() -> None:
    server = real_server()
    async with real_session(server) as session, real_session(server) as looking:
        observer = Observer(looking)
        async with session.campaign("e", name="a"):
            await until(lambda: observer.seen and names(observer.last) == ["a"])
        await until(lambda: observer.last == Line(None, ()))
        await observer.stop()
