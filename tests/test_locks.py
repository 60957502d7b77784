"""Locks, as `leader`, `line`, `observe`, `resign`, `transfer` and the command line see them."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AsyncExitStack, aclosing
from unittest.mock import ANY

import pytest

import doyen
from candidates import Capture, following
from doyen import LeadershipLost, OrderFailed, Session, Term
from doyen.cli import main
from doyen.election.candidate import entered_campaigns
from doyen.errors import ConfigError
from doyen.events import Elected, Lost
from doyen.model import Leader
from support import TTL_S, Place, known, until, virtual


class Holder:
    """Takes the lock `x` once, and holds it until it is stopped or loses it."""

    def __init__(self, session: Session, name: str) -> None:
        self.term: Term | None = None
        self.task = asyncio.create_task(self._hold(session, name))

    async def _hold(self, session: Session, name: str) -> None:
        try:
            async with session.lock("x", name=name, meta={"of": name}) as self.term:
                await asyncio.sleep(10_000)
        except LeadershipLost:
            pass

    @property
    def holds(self) -> bool:
        return self.term is not None and self.term.valid

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


async def waiting(session: Session, *names: str) -> None:
    """Wait until these are in the line of the lock."""
    async with aclosing(session.observe_line("x", kind="locks")) as lines:
        async for line in lines:
            if [each.name for each in known(line).candidates] == [*names]:
                return


@virtual
async def test_a_lock_is_seen_apart_from_an_election_of_the_same_name(place: Place) -> None:
    session = await place.open()
    holder = Holder(await place.open(), "a")
    await until(lambda: holder.holds)
    assert holder.term is not None
    expected = Leader("x", "a", holder.term.token, {"of": "a"}, "locks")
    assert await session.leader("x", kind="locks") == expected
    assert await session.leader("x") is None
    assert [each.name for each in await session.line("x", kind="locks")] == ["a"]
    assert await session.line("x") == []
    assert [event.election_kind for event in place.seen(Elected)] == ["locks"]  # type: ignore[attr-defined]
    async with session.campaign("x", name="b"):
        leader = await session.leader("x")
        assert leader is not None
        assert (leader.name, leader.kind) == ("b", "elections")
    await holder.stop()


@virtual
async def test_every_holder_of_a_lock_is_observed(place: Place) -> None:
    session = await place.open()
    async with aclosing(session.observe("x", kind="locks")) as leaders:
        assert await anext(leaders) is None
        async with session.lock("x", name="a"):
            leader = await anext(leaders)
            assert leader
            assert (leader.name, leader.kind) == ("a", "locks")
        assert await anext(leaders) is None


@virtual
async def test_the_holder_of_a_lock_gives_it_up_or_hands_it_over_when_ordered(place: Place) -> None:
    session = await place.open()
    a, b, c = [Holder(await place.open(), name) for name in "abc"]
    await until(lambda: a.holds)
    await waiting(session, "a", "b", "c")
    with pytest.raises(OrderFailed, match="'x' has no leader"):
        await session.resign("x")
    assert (await session.transfer("x", to="c", kind="locks")).name == "c"
    assert c.holds
    assert not a.holds
    resigned = await session.resign("x", kind="locks")
    assert (resigned.name, resigned.kind) == ("c", "locks")
    await until(lambda: b.holds)
    assert [event.election_kind for event in place.seen(Lost)] == ["locks"] * 2  # type: ignore[attr-defined]
    await b.stop()


@virtual
async def test_orders_that_cannot_be_obeyed_say_that_it_is_a_lock(place: Place) -> None:
    session = await place.open()
    with pytest.raises(OrderFailed, match="the lock 'x' has no holder"):
        await session.resign("x", kind="locks")
    a = Holder(await place.open(), "a")
    await until(lambda: a.holds)
    with pytest.raises(OrderFailed, match="'a' has the lock 'x' already"):
        await session.transfer("x", to="a", kind="locks")
    with pytest.raises(OrderFailed, match="not in the line of the lock 'x'"):
        await session.transfer("x", to="z", kind="locks")
    await a.stop()


@virtual
async def test_a_lock_can_be_removed_by_force(place: Place) -> None:
    """A frozen holder does not obey; the next one in line gets the lock at once."""
    session = await place.open()
    a = Holder(await place.open(), "a")
    await until(lambda: a.holds)
    b = Holder(await place.open(), "b")
    await waiting(session, "a", "b")
    assert (await session.resign("x", kind="locks", force=True)).name == "a"
    await until(lambda: b.holds, within_s=TTL_S / 2)
    await b.stop()


@virtual
async def test_an_unknown_kind_is_refused(place: Place) -> None:
    session = await place.open()
    with pytest.raises(ConfigError, match="kind is one of 'elections', 'locks'"):
        await session.leader("x", kind="lock")  # type: ignore[arg-type]


def test_blocking_sessions_take_locks_too() -> None:
    with doyen.connect_blocking("memory://locks") as session:
        leaders = session.observe("x", kind="locks")
        lines = session.observe_line("x", kind="locks")
        assert (next(leaders), known(next(lines)).leader) == (None, None)
        with pytest.raises(LeadershipLost), session.lock("x", name="a") as term:
            leader = session.leader("x", kind="locks")
            assert leader == Leader("x", "a", term.token, {}, "locks")
            assert next(leaders) == leader
            assert [each.name for each in session.line("x", kind="locks")] == ["a"]
            with pytest.raises(OrderFailed, match="'a' has the lock"):
                session.transfer("x", to="a", kind="locks")
            with pytest.raises(OrderFailed, match="has not done so"):
                session.resign("x", kind="locks", wait_s=0.01)
            assert term.wait_lost(10)
        leaders.close()
        lines.close()


def test_the_command_line_takes_locks(store: str, capsys: Capture) -> None:
    def printed(*arguments: str, code: int = 0) -> str:
        command, *rest = arguments
        assert main([command, "x", "--lock", *rest, "--store", store]) == code
        return capsys.readouterr().out

    assert printed("leader", code=1) == "the lock x is free\n"
    assert printed("line", code=1) == "the lock x is free; none waiting\n"
    with doyen.connect_blocking(store) as session, session.lock("x", name="a") as term:
        assert printed("leader") == f"a has the lock x, token {term.token}\n"
        holder = {"name": "a", "token": term.token, "since": ANY, "meta": {}}
        expected = {"election": "x", "kind": "locks", "leader": holder}
        assert json.loads(printed("leader", "--json")) == expected
        assert printed("line").startswith(f"a has the lock x, token {term.token}; none waiting\n")
        assert json.loads(printed("line", "--json"))["kind"] == "locks"
        with following("watch", "x", "--lock", "--json", "--store", store) as watch:
            seen = json.loads(watch.until("\n"))
            assert (seen["kind"], seen["leader"]) == ("locks", holder)
            assert watch.interrupt() == 0
        assert printed("transfer", "--to", "a", code=1) == ""


def test_the_command_line_orders_the_holders_of_locks(store: str, capsys: Capture) -> None:
    async def hold(session: Session, name: str, held: asyncio.Event) -> None:
        try:
            async with session.lock("x", name=name):
                held.set()
                await asyncio.Event().wait()
        except LeadershipLost:
            pass

    async def order(*arguments: str) -> str:
        command, *rest = arguments
        code = await asyncio.to_thread(main, [command, "x", "--lock", *rest, "--store", store])
        assert code == 0
        return capsys.readouterr().out

    async def whole() -> None:
        async with doyen.connect(store) as one, doyen.connect(store) as two:
            first, second = asyncio.Event(), asyncio.Event()
            a = asyncio.create_task(hold(one, "a", first))
            await first.wait()
            b = asyncio.create_task(hold(two, "b", second))
            await waiting(one, "a", "b")
            moved = await order("transfer", "--to", "b")
            leader = await one.leader("x", kind="locks")
            assert leader is not None
            assert moved == f"a handed over: b has the lock x, token {leader.token}\n"
            resigned = await order("resign")
            assert resigned == f"b (token {leader.token}) gave up the lock x; it is free now\n"
            await asyncio.wait_for(asyncio.gather(a, b), 30)

    asyncio.run(whole())


@virtual
async def test_each_holder_of_a_shared_lock_releases_its_own(place: Place) -> None:
    """The one that lost the lock is told so, also if the next holder releases first."""
    session = await place.open()
    lock = session.lock("x")
    lost, released = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        term = await lock.acquire()
        await term.lost()
        lost.set()
        await released.wait()
        with pytest.raises(LeadershipLost):
            await lock.release()

    async def second() -> None:
        await lost.wait()
        await lock.acquire()
        await lock.release()
        assert not await lock.locked()
        released.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(first())
        group.create_task(second())
        await until(lambda: lock.term is not None)
        place.end_lease(session)


@virtual
async def test_a_task_whose_locks_are_released_by_others_keeps_nothing(place: Place) -> None:
    session = await place.open()
    lock = session.lock("x")
    for _ in range(3):
        await lock.acquire()
        await asyncio.create_task(lock.release())
    async with lock:
        assert len(entered_campaigns.get()) == 1


@virtual
async def test_a_scope_may_be_left_by_another_task(place: Place) -> None:
    """As the fixtures of test frameworks and exit stacks are."""
    session = await place.open()
    lock = session.lock("x")
    stack = AsyncExitStack()
    await asyncio.create_task(stack.enter_async_context(lock))
    assert await lock.locked()
    await stack.aclose()
    assert lock.term is None
    assert not await lock.locked()


@virtual
async def test_scopes_of_one_task_are_left_in_reverse(place: Place) -> None:
    """Whoever takes the lock again after a loss, inside the first scope, hears of both."""
    session = await place.open()
    lock = session.lock("x")
    with pytest.raises(LeadershipLost) as lost:
        async with lock as first:
            place.end_lease(session)
            try:
                await first.lost()
            except asyncio.CancelledError:
                pass
            async with lock as second:
                assert lock.term is second
            assert second.reason is None
            assert lock.term is first
    assert str(first.token) in str(lost.value)


def test_a_blocking_scope_may_be_left_by_another_thread() -> None:
    with doyen.connect_blocking("memory://left-elsewhere") as session:
        lock = session.lock("x")
        entering = threading.Thread(target=lock.__enter__)
        entering.start()
        entering.join()
        assert lock.locked()
        lock.__exit__(None, None, None)
        assert not lock.locked()
