"""When a lease that a server's clock keeps may be taken for over, and how soon that is noticed: in
virtual time, on tables that are a dictionary and a clock that is stepped at will."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doyen.clock import VirtualClock
from doyen.errors import StoreUnavailable
from doyen.lookout import LeaseRow, Lookout, Survey
from doyen.testing import run_virtual

TTL_S = 10.0
LEASE = "lease"


@dataclass
class Tables:
    """One scope `e`, in which one lease owns something as long as it is there."""

    clock: VirtualClock
    counter: int = 0
    renewed_at: float = 0.0
    step_s: float = 0.0
    """How far the database's clock is off."""
    incarnation: str = "first"
    alive: bool = True
    failing: bool = False
    looks: list[float] = field(default_factory=list)
    sealed_at: float | None = None
    lookout: Lookout | None = None
    polled: bool = False

    def now(self) -> float:
        return self.clock.now() + self.step_s

    def renew(self) -> None:
        self.counter += 1
        self.renewed_at = self.now()

    def row(self) -> LeaseRow:
        age_us = round((self.now() - self.renewed_at) * 1e6)
        return LeaseRow(LEASE, round(TTL_S * 1e6), self.counter, age_us, self.incarnation)

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]:
        self._work()
        standing = [(LEASE, 1, 1)] if self.alive else []
        owners = [LEASE] if self.alive else []
        return {scope: Survey(frozenset(standing), frozenset(owners)) for scope in scopes}

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]:
        self._work()
        self.looks.append(self.clock.now())
        return [self.row() if self.alive else LeaseRow(lease, None, -1, 0, "") for lease in leases]

    async def seal(self, lease: str, counter: int) -> None:
        self._work()
        if self.alive and counter == self.counter:
            self.alive = False
            self.sealed_at = self.clock.now()
            if self.lookout is not None and not self.polled:
                self.lookout.changed("e/leader")

    async def position(self) -> int:
        self._work()
        return 0 if self.alive else 1

    def _work(self) -> None:
        if self.failing:
            raise StoreUnavailable("no")

    async def changes(self, since: int | None) -> tuple[int, Sequence[str] | None]:
        position = await self.position()
        return position, ["e/leader"] if since == position - 1 else []


def virtually(test: Callable[[Tables], Coroutine[Any, Any, None]]) -> None:
    clock = VirtualClock()
    run_virtual(test(Tables(clock)), clock=clock)


def judged(tables: Tables, lookout: Lookout) -> bool:
    return lookout.judge(tables.row()).over


def test_a_lease_is_over_after_a_whole_ttl_of_being_seen_unchanged() -> None:
    async def test(tables: Tables) -> None:
        lookout = Lookout(tables, tables.clock.now, None)
        tables.clock.advance(1000)
        assert not judged(tables, lookout), "it was only just seen"
        tables.clock.advance(TTL_S - 0.01)
        assert not judged(tables, lookout)
        tables.clock.advance(0.01)
        assert judged(tables, lookout)

    virtually(test)


@pytest.mark.parametrize("change", ["renewed", "server replaced", "counter went back"])
def test_what_was_seen_before_a_change_does_not_count(change: str) -> None:
    """A server that took over may lack renewals which the one before had confirmed."""

    async def test(tables: Tables) -> None:
        lookout = Lookout(tables, tables.clock.now, None)
        tables.counter = 7
        judged(tables, lookout)
        tables.clock.advance(TTL_S - 1)
        match change:
            case "renewed":
                tables.counter, tables.renewed_at = 8, tables.now() - TTL_S
            case "server replaced":
                tables.incarnation = "second"
            case "counter went back":
                tables.counter = 6
        assert not judged(tables, lookout)
        tables.clock.advance(TTL_S - 0.01)
        assert not judged(tables, lookout)
        tables.clock.advance(0.01)
        assert judged(tables, lookout)

    virtually(test)


@pytest.mark.parametrize("step_s", [-3600.0, -TTL_S / 2, TTL_S / 2, 3600.0])
def test_a_stepped_clock_ends_nothing_early_and_delays_little(step_s: float) -> None:
    async def test(tables: Tables) -> None:
        lookout = Lookout(tables, tables.clock.now, None)
        tables.renew()
        judged(tables, lookout)
        tables.step_s = step_s
        seen_at = tables.clock.now()
        while not judged(tables, lookout):
            tables.clock.advance(0.1)
        assert TTL_S <= tables.clock.now() - seen_at <= 2 * TTL_S

    virtually(test)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["look", "renew", "step", "replace"]),
            st.floats(0, TTL_S * 0.6),
            st.floats(-3 * TTL_S, 3 * TTL_S),
        ),
        max_size=40,
    )
)
def test_nothing_is_over_within_a_ttl_of_its_renewal(
    script: list[tuple[str, float, float]],
) -> None:
    """Whatever the database's clock does, and whenever one looks."""

    async def test(tables: Tables) -> None:
        lookout = Lookout(tables, tables.clock.now, None)
        renewed = tables.clock.now()
        tables.renew()
        for what, wait_s, step_s in script:
            tables.clock.advance(wait_s)
            match what:
                case "renew":
                    renewed = tables.clock.now()
                    tables.renew()
                case "step":
                    tables.step_s += step_s
                case "replace":
                    tables.incarnation += "'"
            if judged(tables, lookout):
                assert tables.clock.now() - renewed >= TTL_S

    virtually(test)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("poll_s", [None, 0.05])
def test_who_waits_notices_an_end_at_once(seed: int, poll_s: float | None) -> None:
    """A holder that renews as hearts do and then falls silent is found out within the ttl and the
    spread of two renewals; it costs one look per renewal."""

    async def test(tables: Tables) -> None:
        lookout = tables.lookout = Lookout(tables, tables.clock.now, poll_s, tables.changes)
        tables.polled = poll_s is not None
        told: list[float] = []
        await lookout.watch("e/leader", lambda: told.append(tables.clock.now()))
        chance = random.Random(seed)
        renewals, last = 60, 0.0
        for _ in range(renewals):
            tables.renew()
            last = tables.clock.now()
            await asyncio.sleep(TTL_S / 3 * (1 + chance.uniform(-0.2, 0.2)))
        assert not told, "a living lease was told of"
        assert len(tables.looks) <= renewals * 1.1 + 2
        await asyncio.sleep(TTL_S)
        assert tables.sealed_at is not None
        assert told
        took_s = told[0] - last
        assert TTL_S <= took_s <= TTL_S * 1.14 + 0.01 + (poll_s or 0)
        lookout.close()

    virtually(test)


def test_a_database_that_fails_for_a_while_is_asked_again() -> None:
    async def test(tables: Tables) -> None:
        lookout = tables.lookout = Lookout(tables, tables.clock.now, None)
        told = asyncio.Event()
        await lookout.watch("e/leader", told.set)
        await asyncio.sleep(1)
        tables.failing = True
        await asyncio.sleep(3 * TTL_S)
        assert tables.sealed_at is None
        tables.failing = False
        await told.wait()
        lookout.close()

    virtually(test)


def test_without_watches_nothing_is_looked_at() -> None:
    async def test(tables: Tables) -> None:
        lookout = tables.lookout = Lookout(tables, tables.clock.now, 0.05)
        watch = await lookout.watch("e/leader", lambda: None)
        await asyncio.sleep(TTL_S / 2)
        watch.close()
        await asyncio.sleep(1)
        looked = len(tables.looks)
        tables.renew()
        await asyncio.sleep(10 * TTL_S)
        assert len(tables.looks) == looked
        assert tables.alive

    virtually(test)


def test_leases_that_are_met_no_more_are_forgotten() -> None:
    async def test(tables: Tables) -> None:
        lookout = Lookout(tables, tables.clock.now, None)
        for number in range(100):
            lookout.judge(tables.row()._replace(lease=str(number)))
        tables.clock.advance(100 * TTL_S)
        judged(tables, lookout)
        assert list(lookout._seen) == [LEASE]

    virtually(test)


@pytest.mark.parametrize("poll_s", [None, 0.1])
def test_owners_that_could_not_be_found_out_are_asked_for_again(poll_s: float | None) -> None:
    """The store fails just when somebody has begun to watch: there is nothing else to look at."""

    async def test(tables: Tables) -> None:
        changes = None if poll_s is None else tables.changes
        lookout = tables.lookout = Lookout(tables, tables.clock.now, poll_s, changes)
        told = asyncio.Event()
        await lookout.watch("e", told.set)
        tables.failing = True
        await asyncio.sleep(1.0)
        tables.failing = False
        async with asyncio.timeout(3 * TTL_S):
            await told.wait()
        assert tables.sealed_at is not None
        lookout.close()

    virtually(test)
