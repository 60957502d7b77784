"""Barriers: nobody passes before n have arrived. Single rules, then random faults and an oracle.

That the oracle can see is shown at the end, on variants of the code with one rule broken each.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import doyen
from doyen import NotArrived, Session
from doyen.errors import ConfigError, OutcomeUnknown
from doyen.manage import barrier as module
from doyen.manage.barrier import _Party, _Ticket
from doyen.manage.documents import Versioned
from doyen.model import barrier_key
from doyen.testing.faults import Faults, LostCall, Stray, Unanswered
from support import TTL_S as PLACE_TTL_S
from support import Place, core_of, run_in_place, soon, until, virtual
from swarm import TTL_S, Oracle, Process, World, assert_oracle_sees, reached

REQUEST_S = PLACE_TTL_S / 6


def line(place: Place) -> int:
    return len(place.server.list(f"{barrier_key('b')}/line"))


@virtual
async def test_nobody_passes_before_all_have_arrived(place: Place) -> None:
    sessions = [await place.open() for _ in range(3)]
    first = [asyncio.create_task(session.barrier("b", 3)) for session in sessions[:2]]
    await asyncio.sleep(PLACE_TTL_S)
    assert not any(task.done() for task in first)
    assert await sessions[2].barrier("b", 3) == 1
    assert await asyncio.gather(*first) == [1, 1]
    assert await asyncio.gather(*(session.barrier("b", 3) for session in sessions)) == [2, 2, 2]


@virtual
async def test_one_session_may_arrive_more_than_once(place: Place) -> None:
    session = await place.open()
    assert await asyncio.gather(*(session.barrier("b", 4) for _ in range(4))) == [1] * 4


@virtual
async def test_of_more_than_n_exactly_n_pass(place: Place) -> None:
    session = await place.open()
    five = [asyncio.create_task(session.barrier("b", 2)) for _ in range(5)]
    await asyncio.sleep(1)
    assert sorted(task.result() for task in five if task.done()) == [1, 1, 2, 2]
    assert await session.barrier("b", 2) == 3
    await asyncio.gather(*five)


@virtual
async def test_who_gives_up_is_not_counted(place: Place) -> None:
    session, other = await place.open(), await place.open()
    with pytest.raises(NotArrived, match="1 of 2 had arrived"):
        await session.barrier("b", 2, wait_s=1)
    assert line(place) == 0
    waiting = asyncio.create_task(other.barrier("b", 2))
    await asyncio.sleep(1)
    assert not waiting.done()
    assert await session.barrier("b", 2) == await waiting == 1


@virtual
async def test_who_dies_is_not_counted(place: Place) -> None:
    faults = Faults()
    session, other = await place.open(faults), await place.open()
    dying = asyncio.create_task(session.barrier("b", 2))
    await until(lambda: line(place) == 1)
    faults.cut()
    await until(lambda: line(place) == 0)
    waiting = asyncio.create_task(other.barrier("b", 2))
    await asyncio.sleep(1)
    assert not waiting.done()
    faults.heal()
    assert await dying == await waiting == 1


@pytest.mark.parametrize("cut_s", [3.6, 4.0, 4.4, 4.8, 5.2, 5.6, 6.0, 6.4])
def test_a_party_on_a_new_lease_is_counted_once(cut_s: float) -> None:
    """Its lease is lost for it, and the store still has its ticket there."""

    async def returns(place: Place) -> None:
        faults = Faults()
        session, other = await place.open(faults), await place.open()
        waiting = asyncio.create_task(session.barrier("b", 2))
        await asyncio.sleep(1)
        faults.cut()
        await asyncio.sleep(cut_s)
        faults.heal()
        await asyncio.sleep(2 * PLACE_TTL_S)
        assert not waiting.done()
        assert line(place) == 1
        assert await other.barrier("b", 2) == await waiting == 1

    run_in_place(returns)


@virtual
async def test_another_n_is_refused(place: Place) -> None:
    session = await place.open()
    assert await session.barrier("b", 1) == 1
    with pytest.raises(ConfigError, match="is for 1 in this store, not 2"):
        await session.barrier("b", 2)
    with pytest.raises(ConfigError, match="1 to 256"):
        await session.barrier("b", 0)


@pytest.mark.parametrize("operation", ["enqueue", "update", "put"])
@pytest.mark.parametrize(
    "fault", [LostCall(), Unanswered(), Stray(after_s=1.5 * REQUEST_S)], ids=str
)
@virtual
async def test_lost_responses_are_resolved(
    place: Place, operation: str, fault: LostCall | Unanswered | Stray
) -> None:
    faults = Faults()
    session, other = await place.open(faults), await place.open()
    faults.next(operation, fault)
    both = await asyncio.gather(session.barrier("b", 2), other.barrier("b", 2))
    assert [*both] == [1, 1]
    await asyncio.sleep(2 * PLACE_TTL_S)
    assert line(place) == 0


def test_blocking_code_arrives_too() -> None:
    with doyen.connect_blocking("memory://barriers") as session:
        assert session.barrier("b", 1) == 1
        with pytest.raises(NotArrived):
            session.barrier("c", 2, wait_s=0.05)


# Under random faults.

N = 3


class BarrierOracle(Oracle):
    """Each time the barrier is passed, exactly n do, and each of them has arrived and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: dict[str, str] = {}
        """Sessions that have arrived, with the names of their processes."""
        self.counted: dict[str, int] = {}
        """By session: the last time that it was counted in."""
        self.times = 0

    def state(self, value: bytes) -> None:
        by_time: dict[int, list[str]] = {}
        for attempt, time in json.loads(value)["passed"].items():
            by_time.setdefault(time, []).append(attempt.rpartition("-")[0])
        newest = max(by_time, default=0)
        if newest <= self.times:
            return
        those = by_time[newest]
        if newest != self.times + 1 or len(set(those)) != N:
            self.object(f"{those} passed at time {newest} after {self.times}")
        for session in those:
            if session not in self.inside:
                self.object(f"{session} was counted at time {newest} and had not arrived")
            self.counted[session] = newest
        self.times = newest


class Arriving(Process):
    """Arrives over and over; some give up."""

    world: BarrierWorld

    async def act(self, session: Session) -> None:
        oracle, rng, last = self.world.oracle, self.world.rng, 0
        me = core_of(session).id
        while True:
            await asyncio.sleep(rng.expovariate(2))
            wait_s = None if self.world.fair or rng.random() < 0.5 else rng.uniform(0.01, TTL_S)
            oracle.inside[me] = self.name
            try:
                passed = await session.barrier("swarm", N, wait_s=wait_s)
                if passed != oracle.counted.get(me) or passed <= last:
                    oracle.object(f"{self.name} passed at {passed}, after {last}: {oracle.counted}")
                last = passed
                oracle.somebody_leads.set()
            except NotArrived:
                if oracle.counted.get(me, 0) > last:
                    oracle.object(f"{self.name} gave up and is counted at {oracle.counted[me]}")
            except OutcomeUnknown:
                last = oracle.counted.get(me, 0)
                await asyncio.sleep(2 * TTL_S)  # it may still be counted
            del oracle.inside[me]


class BarrierWorld(World):
    """A lease is lost for its holder 0.5 s before it ends in the store, and an outage lasts about
    as long as a lease lives. So a party may arrive on a new lease while the store still has the
    ticket on its lease before."""

    happenings: ClassVar = {**World.happenings, "outage": 3}
    oracle: BarrierOracle

    def __init__(self, seed: int) -> None:
        super().__init__(seed, stop_budget_s=0.5)
        self.server.oracle = self.oracle = BarrierOracle()
        self.fair = False
        changed = self.server._changed

        def look(key: str) -> None:
            changed(key)
            if key.endswith("/state"):
                self.oracle.state(self.server._entries[key].value)

        self.server._changed = look  # type: ignore[method-assign]

    def outage(self, _: Process) -> None:
        took_s = self.rng.uniform(0.5, 1) * TTL_S
        for process in self.processes:
            process.faults.cut()
            soon(took_s, process.faults.heal)

    def start(self) -> None:
        self.started += 1
        self.processes.append(Arriving(self, f"p{self.started}"))


def run_barrier_world(seed: int, *, candidates: int = 4, steps: int = 20) -> BarrierWorld:
    world = BarrierWorld(seed)

    async def live() -> None:
        await world.trouble(candidates, steps)
        for _ in range(N):
            world.start()
        world.fair = True
        world.calm()
        await asyncio.sleep(5 * TTL_S)
        world.oracle.somebody_leads.clear()
        async with reached("the barrier is passed", 5 * TTL_S):
            await world.oracle.somebody_leads.wait()
        await world.end()

    world.watch_over(live())
    return world


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_barriers_in_much_trouble(seed: int) -> None:
    assert run_barrier_world(seed).oracle.times > 0


def unmarked_tickets_count(patch: pytest.MonkeyPatch) -> None:
    """A ticket counts from its creation on, also if its party never knew of it."""
    patch.setattr(_Ticket, "arrived", property(lambda self: self.mark != "gone"))


def given_up_without_the_state(patch: pytest.MonkeyPatch) -> None:
    """Who gives up deletes its ticket and does not wait for a release that has counted it."""

    async def withdraw(self: _Party) -> int | None:
        try:
            async with asyncio.timeout(0.5):
                await self._mark_as_gone()
        except (OutcomeUnknown, TimeoutError):
            pass
        return None

    patch.setattr(_Party, "withdraw", withdraw)


def those_who_passed_count_again(patch: pytest.MonkeyPatch) -> None:
    """Tickets that stand after their parties have passed count for the next time."""
    release = _Party._release

    async def forget(self: _Party, state: object, those: list[str], waiting: set[str]) -> None:
        await release(self, state, those, set())  # type: ignore[arg-type]

    patch.setattr(_Party, "_release", forget)
    patch.setattr(module, "REMEMBERED", 1)


def one_too_few(patch: pytest.MonkeyPatch) -> None:
    """It is passed when one is still missing."""
    attempt, read, release = _Party._try, _Party._state, _Party._release

    async def early(self: _Party) -> int | None:
        full = self._n

        async def state() -> Versioned:
            self._n = full
            found = await read(self)
            self._n = full - 1
            return found

        async def let_pass(*args: Any) -> None:
            self._n = full
            await release(self, *args)

        patch.setattr(self, "_state", state)
        patch.setattr(self, "_release", let_pass)
        try:
            return await attempt(self)
        finally:
            self._n = full

    patch.setattr(_Party, "_try", early)


def an_attempt_for_each_lease(patch: pytest.MonkeyPatch) -> None:
    """A party on a new lease counts beside its ticket on the lease before."""
    begin = _Party._begin

    async def anew(self: _Party) -> None:
        before = self._keepalive
        await begin(self)
        if before not in (None, self._keepalive):
            self._attempt = self._core.next_attempt()

    patch.setattr(_Party, "_begin", anew)


SEEDS = 60


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        (unmarked_tickets_count, 90),
        (given_up_without_the_state, 0),
        (those_who_passed_count_again, 0),
        (one_too_few, 0),
        (an_attempt_for_each_lease, 0),
    ],
)
def test_the_oracle_sees(
    broken: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(first, first + SEEDS)
    assert_oracle_sees(broken, monkeypatch, run_barrier_world, seeds)


def marks_come_late(patch: pytest.MonkeyPatch) -> None:
    """Who gives up marks only tickets that it had marked, so a mark under way counts later."""

    async def marked_only(self: _Party) -> None:
        core = self._core
        for ticket in await self._tickets():
            if ticket.arrived and ticket.attempt == self._attempt:
                value = _Ticket.encode(ticket.attempt, "gone")
                await core.call(core.store.update(ticket.entry, value))

    patch.setattr(_Party, "_mark_as_gone", marked_only)


@pytest.mark.parametrize("broken", [False, True])
def test_a_mark_that_is_carried_out_late_does_not_count(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The party gives up while its mark is under way, and its ticket stands for a while."""
    if broken:
        marks_come_late(monkeypatch)

    async def late(place: Place) -> None:
        faults = Faults()
        session, other = await place.open(faults), await place.open()
        faults.next("update", Stray(after_s=0.3 * REQUEST_S))
        faults.next("delete", LostCall())
        with pytest.raises(NotArrived):
            await session.barrier("b", 2, wait_s=0.1 * REQUEST_S)
        waiting = asyncio.create_task(other.barrier("b", 2))
        await asyncio.sleep(PLACE_TTL_S)
        assert waiting.done() is broken
        waiting.cancel()
        await asyncio.wait({waiting})

    run_in_place(late)
