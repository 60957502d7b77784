"""Semaphores: at most n holders, and one line. Rules one by one, then random faults and an oracle.

That the oracle can see is shown at the end, on variants of the code with one rule broken each.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import doyen
from doyen import AlreadyCampaigning, LeadershipLost, NotElected, OrderFailed, Session, Term
from doyen.election.attempt import Attempt
from doyen.errors import ConfigError, OutcomeUnknown
from doyen.events import Elected
from doyen.manage.semaphore import SlotClaiming
from doyen.model import Entry, encode_json, line_key, size_key, slots_key
from doyen.testing.faults import Faults, LostCall, Stray, Unanswered
from support import TTL_S as PLACE_TTL_S
from support import Place, until, virtual
from swarm import (
    TTL_S,
    NotReached,
    Oracle,
    Process,
    SafetyViolated,
    World,
    assert_oracle_sees,
    is_record,
)

REQUEST_S = PLACE_TTL_S / 6


class Holder:
    """Holds a slot of `pool` until it is stopped."""

    def __init__(self, session: Session, name: str, n: int = 2) -> None:
        self.term: Term | None = None
        self.name = name
        self.task = asyncio.create_task(self._hold(session, n))

    async def _hold(self, session: Session, n: int) -> None:
        try:
            async with session.semaphore("pool", n, name=self.name) as self.term:
                await asyncio.sleep(10_000)
        except LeadershipLost:
            pass

    @property
    def holds(self) -> bool:
        return self.term is not None and self.term.valid

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


def line(place: Place) -> int:
    return len(place.server.list(line_key("pool", "semaphores")))


@virtual
async def test_n_hold_it_at_a_time_and_the_next_one_gets_the_slot_that_is_free(
    place: Place,
) -> None:
    holders = []
    for name in "abcd":
        holders.append(Holder(await place.open(), name))
        await until(lambda: holders[-1].holds or line(place))
    a, b, c, d = holders
    assert [each.holds for each in holders] == [True, True, False, False]
    await until(lambda: line(place) == 2)
    assert a.term is not None
    assert b.term is not None
    assert (a.term.slot, b.term.slot) == (0, 1)
    await b.stop()
    await until(lambda: c.holds)
    assert c.term is not None
    assert c.term.slot == 1
    assert c.term.token > b.term.token
    assert not d.holds
    await asyncio.gather(a.stop(), c.stop())
    await until(lambda: d.holds)
    await d.stop()
    names = [event.election for event in place.seen(Elected) if isinstance(event, Elected)]
    assert names == ["pool/0", "pool/1", "pool/1", "pool/0"]


@virtual
async def test_another_number_of_slots_is_refused(place: Place) -> None:
    session, other = await place.open(), await place.open()
    async with session.semaphore("pool", 2):
        with pytest.raises(ConfigError, match="has 2 slots in this store, not 3"):
            async with other.semaphore("pool", 3):
                pass
    with pytest.raises(ConfigError, match="1 to 1000 slots"):
        session.semaphore("pool", 0)
    with pytest.raises(ConfigError, match="has a line"):
        session.semaphore("pool", 2, recipe="race")


@virtual
async def test_a_scope_may_hold_several_slots_but_does_not_wait_for_itself(place: Place) -> None:
    session = await place.open()
    async with session.semaphore("pool", 2) as one, session.semaphore("pool", 2) as two:
        assert {one.slot, two.slot} == {0, 1}
        with pytest.raises(AlreadyCampaigning):
            async with session.semaphore("pool", 2):
                pass


@virtual
async def test_who_does_not_get_a_slot_in_time_is_told_why(place: Place) -> None:
    a = Holder(await place.open(), "a", n=1)
    await until(lambda: a.holds)
    session = await place.open()
    with pytest.raises(NotElected, match="a slot of the semaphore 'pool' in time: its 1 slots"):
        async with session.semaphore("pool", 1, wait_s=1):
            pass
    await a.stop()


@virtual
async def test_the_holder_of_a_slot_can_be_looked_at_and_ordered_to_resign(place: Place) -> None:
    session = await place.open()
    a = Holder(await place.open(), "a")
    await until(lambda: a.holds)
    leader = await session.leader("pool/0", kind="semaphores")
    assert leader is not None
    assert leader.name == "a"
    with pytest.raises(OrderFailed, match="slot 1 of the semaphore 'pool' has no holder"):
        await session.resign("pool/1", kind="semaphores")
    with pytest.raises(OrderFailed, match="cannot be transferred"):
        await session.transfer("pool/0", kind="semaphores", to="b")
    with pytest.raises(ConfigError, match="as in 'pool/0'"):
        await session.leader("pool", kind="semaphores")
    assert (await session.resign("pool/0", kind="semaphores")).name == "a"
    assert not a.holds


@pytest.mark.parametrize(
    "fault", [LostCall(), Unanswered(), Stray(after_s=1.5 * REQUEST_S)], ids=str
)
@virtual
async def test_after_an_unknown_outcome_the_same_slot_is_settled_first(
    place: Place, fault: LostCall | Unanswered | Stray
) -> None:
    faults = Faults()
    session = await place.open(faults)
    faults.next("create", fault)
    async with session.semaphore("pool", 3) as term:
        await asyncio.sleep(2 * PLACE_TTL_S)
        records = [entry.key for entry in place.server.list(slots_key("pool"))]
        assert records == ["semaphores/pool/slots/0/leader"]
        assert term.slot == 0
        assert line(place) == 0


def test_blocking_code_takes_slots_too() -> None:
    with doyen.connect_blocking("memory://semaphores") as session:
        with session.semaphore("pool", 2) as one, session.semaphore("pool", 2) as two:
            assert {one.slot, two.slot} == {0, 1}
        with session.semaphore("pool", 2) as three:
            assert three.slot == 0


# Under random faults.

SLOTS = 3


class SemaphoreOracle(Oracle):
    """Besides: at most n hold it at a time."""

    def look(self) -> None:
        super().look()
        if len(self._valid) > SLOTS:
            self.object(f"valid at once: {self._valid}")

    def holders(self) -> int:
        return sum(term.valid for term in self._bodies.values())


class Taker(Process):
    """Takes slots over and over; some ask for another number of slots."""

    world: SemaphoreWorld

    async def act(self, session: Session) -> None:
        world, rng = self.world, self.world.rng
        while True:
            slots = SLOTS if world.fair or rng.random() < 0.9 else SLOTS + 1
            try:
                async with session.semaphore("swarm", slots, name=self.name) as term:
                    with world.oracle.body(term):
                        longest = 100_000 if world.fair else world.body_s
                        await asyncio.sleep(rng.uniform(0, 1) * longest)
            except LeadershipLost:
                pass
            except (ConfigError, OutcomeUnknown):
                await asyncio.sleep(0.1)


class SemaphoreWorld(World):
    oracle: SemaphoreOracle

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.server.oracle = self.oracle = SemaphoreOracle()
        self.fair = False
        document = {"schema": 1, "version": 1, "id": "first", "token": 0, "slots": SLOTS}
        self.server.put(size_key("swarm"), encode_json(document), None)

    def start(self) -> None:
        self.started += 1
        self.processes.append(Taker(self, f"p{self.started}"))

    async def settle(self) -> None:
        """In fair weather every slot is held, by a body each, and the others are in line."""
        self.fair = True
        self.calm()
        while len(self.processes) < SLOTS + 2:
            self.start()
        self.calm()
        await asyncio.sleep(self.body_s + 5 * TTL_S)
        if self.oracle.holders() != SLOTS:
            raise NotReached(f"{self.oracle.holders()} hold a slot")
        records = [each for each in self.server.list(slots_key("swarm")) if is_record(each.key)]
        # An attempt has two tickets if an enqueue whose outcome was unknown was carried out late.
        waiting = {json.loads(each.value)["attempt"] for each in self._tickets()}
        if (len(records), len(waiting)) != (SLOTS, len(self.processes) - SLOTS):
            raise NotReached("slots or tickets were left behind")

    async def end(self) -> None:
        await super().end()
        if self._tickets() or self.server.list(slots_key("swarm")):
            raise NotReached("slots or tickets outlive those who left")

    def _tickets(self) -> list[Entry]:
        return self.server.list(line_key("swarm", "semaphores"))


def run_semaphore_world(seed: int, *, candidates: int = 5, steps: int = 30) -> SemaphoreWorld:
    world = SemaphoreWorld(seed)

    async def live() -> None:
        await world.trouble(candidates, steps)
        await world.settle()
        await world.end()

    world.watch_over(live())
    return world


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_semaphores_in_much_trouble(seed: int) -> None:
    assert run_semaphore_world(seed).oracle.terms > 0


def another_slot_after_doubt(patch: pytest.MonkeyPatch) -> None:
    """After an unknown outcome another slot is tried, and the first one is forgotten."""
    claim = SlotClaiming._claim

    async def forget(self: SlotClaiming, slot: int) -> Entry | None:
        try:
            return await claim(self, slot)
        finally:
            self._in_doubt = None
            self.attempt.record_keys = (self.attempt.record_key,)

    async def take(self: SlotClaiming) -> Entry | None:
        own, self.attempt.id = self.attempt.id, self.attempt.id + "x"
        self.attempt.keepalive.attempts.add(self.attempt.id)
        try:
            return await taken(self)
        finally:
            self.attempt.keepalive.attempts.add(own)

    taken = SlotClaiming._take
    patch.setattr(SlotClaiming, "_claim", forget)
    patch.setattr(SlotClaiming, "_take", take)


def holders_stay_in_line(patch: pytest.MonkeyPatch) -> None:
    """Who holds a slot keeps its ticket, so the next one waits for it."""

    async def stay(self: Attempt) -> None:
        pass

    patch.setattr(Attempt, "leave_line", stay)


def taken_slots_are_entered(patch: pytest.MonkeyPatch) -> None:
    """A creation that was not won is believed to be."""
    claim = SlotClaiming._claim

    async def believe(self: SlotClaiming, slot: int) -> Entry | None:
        entry = await claim(self, slot)
        return entry or await self.attempt.get(self.attempt.record_key)

    patch.setattr(SlotClaiming, "_claim", believe)
    patch.setattr(Attempt, "is_mine", lambda self, entry: True)


def number_not_agreed(patch: pytest.MonkeyPatch) -> None:
    """Everybody uses the number that it asks for."""

    async def agree(self: SlotClaiming) -> None:
        pass

    patch.setattr(SlotClaiming, "_agree", agree)


SEEDS = 40
"""Worlds to try until one shows what is broken."""


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (another_slot_after_doubt, NotReached),
        (holders_stay_in_line, NotReached),
        (taken_slots_are_entered, SafetyViolated),
        (number_not_agreed, SafetyViolated),
    ],
)
def test_the_oracle_sees(
    broken: Callable[[pytest.MonkeyPatch], None],
    error: type[SafetyViolated | NotReached],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_oracle_sees(broken, monkeypatch, run_semaphore_world, range(SEEDS), error)
