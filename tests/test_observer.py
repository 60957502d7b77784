"""`LeaseObserver`: when a lease counts as expired, and how soon watches are notified of it.

Runs in virtual time, on simulated tables whose server clock can be stepped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doyen.errors import StoreUnavailable
from doyen.lease.clock import VirtualClock
from doyen.stores.kit.expiry import LeaseRow
from doyen.stores.kit.observer import LeaseObserver, Survey
from doyen.testing import run_virtual
from support import runner

TTL_S = 10.0
LEASE = "lease"


@dataclass
class Tables:
    """One scope `e`, in which one lease owns an entry while it is alive."""

    clock: VirtualClock
    counter: int = 0
    renewed_at: float = 0.0
    step_s: float = 0.0
    """By how much the clock of the database is off."""
    incarnation: str = "first"
    alive: bool = True
    failing: bool = False
    looks: list[float] = field(default_factory=list)
    expired_at: float | None = None
    observer: LeaseObserver | None = None
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
        entries = [(LEASE, 1, 1)] if self.alive else []
        owners = [LEASE] if self.alive else []
        return {scope: Survey(frozenset(entries), frozenset(owners)) for scope in scopes}

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]:
        self._work()
        self.looks.append(self.clock.now())
        return [self.row() if self.alive else LeaseRow(lease, None, -1, 0, "") for lease in leases]

    async def expire(self, lease: str, counter: int) -> None:
        self._work()
        if self.alive and counter == self.counter:
            self.alive = False
            self.expired_at = self.clock.now()
            if self.observer is not None and not self.polled:
                self.observer.changed("e/leader")

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


with_tables = runner(virtually)


def judged(tables: Tables, observer: LeaseObserver) -> bool:
    return observer.judge(tables.row()).over


@with_tables
async def test_a_lease_expires_after_being_observed_unchanged_for_a_ttl(tables: Tables) -> None:
    observer = LeaseObserver(tables, tables.clock.now)
    tables.clock.advance(1000)
    assert not judged(tables, observer), "the lease was observed for the first time"
    tables.clock.advance(TTL_S - 0.01)
    assert not judged(tables, observer)
    tables.clock.advance(0.01)
    assert judged(tables, observer)


@pytest.mark.parametrize("change", ["renewed", "server replaced", "counter went back"])
@with_tables
async def test_observations_before_a_change_do_not_count(tables: Tables, change: str) -> None:
    """After a failover, a server may lack renewals that its predecessor had confirmed."""
    observer = LeaseObserver(tables, tables.clock.now)
    tables.counter = 7
    judged(tables, observer)
    tables.clock.advance(TTL_S - 1)
    match change:
        case "renewed":
            tables.counter, tables.renewed_at = 8, tables.now() - TTL_S
        case "server replaced":
            tables.incarnation = "second"
        case "counter went back":
            tables.counter = 6
    assert not judged(tables, observer)
    tables.clock.advance(TTL_S - 0.01)
    assert not judged(tables, observer)
    tables.clock.advance(0.01)
    assert judged(tables, observer)


@pytest.mark.parametrize("step_s", [-3600.0, -TTL_S / 2, TTL_S / 2, 3600.0])
@with_tables
async def test_a_stepped_clock_ends_nothing_early_and_delays_little(
    tables: Tables, step_s: float
) -> None:
    observer = LeaseObserver(tables, tables.clock.now)
    tables.renew()
    judged(tables, observer)
    tables.step_s = step_s
    seen_at = tables.clock.now()
    while not judged(tables, observer):
        tables.clock.advance(0.1)
    assert TTL_S <= tables.clock.now() - seen_at <= 2 * TTL_S


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
def test_no_lease_expires_within_a_ttl_of_its_renewal(
    script: list[tuple[str, float, float]],
) -> None:
    """Whatever steps the clock of the database makes, and at any times of observation."""

    async def test(tables: Tables) -> None:
        observer = LeaseObserver(tables, tables.clock.now)
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
            if judged(tables, observer):
                assert tables.clock.now() - renewed >= TTL_S

    virtually(test)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("poll_s", [None, 0.05])
@with_tables
async def test_a_watch_notices_an_expiry_in_time(
    tables: Tables, seed: int, poll_s: float | None
) -> None:
    """When a holder stops renewing, the watch is notified within the ttl plus the jitter of two
    renewals. Until then there is about one read per renewal."""
    observer = tables.observer = LeaseObserver(tables, tables.clock.now)
    if poll_s is not None:
        observer.poll_paths(poll_s, tables.changes)
    tables.polled = poll_s is not None
    notified: list[float] = []
    await observer.watch("e/leader", lambda: notified.append(tables.clock.now()))
    chance = random.Random(seed)
    renewals, last = 60, 0.0
    for _ in range(renewals):
        tables.renew()
        last = tables.clock.now()
        await asyncio.sleep(TTL_S / 3 * (1 + chance.uniform(-0.2, 0.2)))
    assert not notified, "a notification for a live lease"
    assert len(tables.looks) <= renewals * 1.1 + 2
    await asyncio.sleep(TTL_S)
    assert tables.expired_at is not None
    assert notified
    took_s = notified[0] - last
    assert TTL_S <= took_s <= TTL_S * 1.14 + 0.01 + (poll_s or 0)
    observer.close()


@with_tables
async def test_a_failing_database_is_retried(tables: Tables) -> None:
    observer = tables.observer = LeaseObserver(tables, tables.clock.now)
    notified = asyncio.Event()
    await observer.watch("e/leader", notified.set)
    await asyncio.sleep(1)
    tables.failing = True
    await asyncio.sleep(3 * TTL_S)
    assert tables.expired_at is None
    tables.failing = False
    await notified.wait()
    observer.close()


@with_tables
async def test_without_watches_no_lease_is_read(tables: Tables) -> None:
    observer = tables.observer = LeaseObserver(tables, tables.clock.now)
    observer.poll_counter(0.05, tables.position)
    watch = await observer.watch("e/leader", lambda: None)
    await asyncio.sleep(TTL_S / 2)
    watch.close()
    await asyncio.sleep(1)
    looked = len(tables.looks)
    tables.renew()
    await asyncio.sleep(10 * TTL_S)
    assert len(tables.looks) == looked
    assert tables.alive


@with_tables
async def test_leases_no_longer_observed_are_forgotten(tables: Tables) -> None:
    observer = LeaseObserver(tables, tables.clock.now)
    for number in range(100):
        observer.judge(tables.row()._replace(lease=str(number)))
    tables.clock.advance(100 * TTL_S)
    judged(tables, observer)
    assert list(observer._observed) == [LEASE]


@pytest.mark.parametrize("fails", [False, True])
@with_tables
async def test_a_server_that_was_slow_once_is_soon_polled_again(
    tables: Tables, fails: bool
) -> None:
    """One slow answer does not mean that the server is overloaded. A change after it is noticed
    within the longest polling interval."""
    slow = False

    async def changes(since: int | None) -> tuple[int, Sequence[str] | None]:
        if slow:
            await asyncio.sleep(1.9)
            if fails:
                raise StoreUnavailable("no")
        return await tables.changes(since)

    observer = LeaseObserver(tables, tables.clock.now)
    observer.poll_paths(0.05, changes)
    notified = asyncio.Event()
    watch = await observer.watch("e", notified.set)
    slow = True
    await asyncio.sleep(1.0)
    slow = False
    await asyncio.sleep(1.1)
    notified.clear()
    tables.alive = False
    changed_at = tables.clock.now()
    await notified.wait()
    assert tables.clock.now() - changed_at <= 0.6
    watch.close()
    observer.close()


@pytest.mark.parametrize("poll_s", [None, 0.1])
@with_tables
async def test_a_failed_survey_of_owners_is_retried(tables: Tables, poll_s: float | None) -> None:
    """The store fails just after a watch began, so that no lease is known to observe yet."""
    observer = tables.observer = LeaseObserver(tables, tables.clock.now)
    if poll_s is not None:
        observer.poll_paths(poll_s, tables.changes)
    notified = asyncio.Event()
    await observer.watch("e", notified.set)
    tables.failing = True
    await asyncio.sleep(1.0)
    tables.failing = False
    async with asyncio.timeout(3 * TTL_S):
        await notified.wait()
    assert tables.expired_at is not None
    observer.close()


class Line:
    """Tables with a line of tickets, each with its own lease. `expire` ends leases."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.renewed: dict[str, tuple[int, float]] = {}
        """The counter of each lease and the time of its last change."""
        self.tickets: list[tuple[str, str]] = []
        self.observers: list[LeaseObserver] = []
        self.incarnation = "first"
        self.failing = False

    def grant(self, lease: str) -> str:
        self.renewed[lease] = (0, self.clock.now())
        path = f"elections/e/line/{len(self.tickets):04}"
        self.tickets.append((path, lease))
        return path

    def renew(self, lease: str) -> None:
        self.renewed[lease] = (self.renewed[lease][0] + 1, self.clock.now())

    def ahead(self, path: str) -> tuple[str, str] | None:
        earlier = [
            ticket for ticket in self.tickets if ticket[0] < path and ticket[1] in self.renewed
        ]
        return earlier[-1] if earlier else None

    def row(self, lease: str) -> LeaseRow:
        if lease not in self.renewed:
            return LeaseRow(lease, None, -1, 0, "")
        counter, at = self.renewed[lease]
        age_us = round((self.clock.now() - at) * 1e6)
        return LeaseRow(lease, round(TTL_S * 1e6), counter, age_us, self.incarnation)

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]:
        await asyncio.sleep(0.001)
        if self.failing:
            raise StoreUnavailable("no")
        return {
            scope: Survey(
                frozenset(),
                frozenset(
                    lease
                    for path, lease in self.tickets
                    if lease in self.renewed and (path == scope or path.startswith(f"{scope}/"))
                ),
            )
            for scope in scopes
        }

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]:
        await asyncio.sleep(0.001)
        return [self.row(lease) for lease in leases]

    async def expire(self, lease: str, counter: int) -> None:
        await asyncio.sleep(0.001)
        if lease in self.renewed and self.renewed[lease][0] == counter:
            assert self.clock.now() - self.renewed[lease][1] >= TTL_S, "a live lease was ended"
            del self.renewed[lease]
            for path, owner in self.tickets:
                if owner == lease:
                    for observer in self.observers:
                        observer.changed(path)

    async def lead(
        self,
        lease: str,
        seen_before: Sequence[LeaseRow] = (),
        *,
        noticed: bool = False,
        stale: Sequence[str] = (),
    ) -> None:
        """Take a ticket, keep its lease alive, and return when it is at the head of the line. The
        `stale` leases are observed from the beginning, as a store does when it is opened."""
        observer = LeaseObserver(self, self.clock.now)
        self.observers.append(observer)
        if stale:
            observer.follow(stale)
            await asyncio.sleep(0.01)
        for row in seen_before:
            observer.judge(row)
        if noticed:
            self.failing = True
            watch = await observer.watch("elections/e/line/0000", lambda: None)
            await asyncio.sleep(0.1)
            watch.close()
            self.failing = False
        path = self.grant(lease)
        keepalive = asyncio.create_task(self._renew_regularly(lease))
        try:
            while (ahead := self.ahead(path)) is not None:
                row = self.row(ahead[1])
                if observer.judge(row).over:
                    await self.expire(row.lease, row.counter)
                    continue
                notified = asyncio.Event()
                watch = await observer.watch(ahead[0], notified.set)
                if self.ahead(path) == ahead:
                    await notified.wait()
                watch.close()
        finally:
            keepalive.cancel()
            observer.close()
            self.observers.remove(observer)

    async def _renew_regularly(self, lease: str) -> None:
        while True:
            await asyncio.sleep(TTL_S / 3)
            self.renew(lease)


@pytest.mark.parametrize("candidates", [2, 6, 40])
@pytest.mark.parametrize(
    ("silent_s", "replaced", "noticed", "within"),
    [
        (TTL_S, False, False, 1.05),
        (TTL_S, True, False, 1.05),
        (0.0, False, True, 1.05),
        (0.0, True, True, 1.05),
        (0.0, False, False, 1.5),
    ],
)
def test_leases_that_stopped_together_expire_together(
    candidates: int, silent_s: float, replaced: bool, noticed: bool, within: float
) -> None:
    """After an outage every candidate has lost its lease and has a new ticket behind the old ones.
    There is a leader a ttl later, whatever the number of candidates. If the old leases were
    renewed recently and the observers saw no failure of the store, it takes up to 1.5 ttl."""

    async def test() -> None:
        line = Line(clock)
        for number in range(candidates):
            line.grant(f"old {number}")
        seen_before = [line.row(f"old {number}") for number in range(candidates)]
        for number in range(candidates):
            line.renew(f"old {number}")
            clock.advance(TTL_S / 3 / candidates)
        clock.advance(silent_s)
        if replaced:
            line.incarnation = "second"
        began = clock.now()
        candidacies = [
            asyncio.create_task(line.lead(f"new {number}", seen_before, noticed=noticed))
            for number in range(candidates)
        ]
        done, _ = await asyncio.wait(candidacies, return_when=asyncio.FIRST_COMPLETED)
        (first,) = done
        first.result()
        assert clock.now() - began <= TTL_S * within + 0.01 * candidates
        for task in candidacies:
            task.cancel()
        await asyncio.gather(*candidacies, return_exceptions=True)

    clock = VirtualClock()
    run_virtual(test(), clock=clock)


def test_a_lease_followed_since_opening_does_not_delay_the_others() -> None:
    """Two candidates have died. When a third arrives, the lease of the one in line is past its ttl
    and the lease of the leader is not. The third leads a ttl later, because it observes both
    leases from the beginning instead of one after the other."""

    async def test() -> None:
        line = Line(clock)
        line.grant("leader")
        line.grant("in line")
        clock.advance(TTL_S * 0.6)
        line.renew("leader")
        clock.advance(TTL_S * 0.5)
        began = clock.now()
        await line.lead("new", stale=["in line"])
        assert clock.now() - began <= TTL_S * 1.05

    clock = VirtualClock()
    run_virtual(test(), clock=clock)


class Members:
    """Many leases under one prefix, each renewed in its own rhythm."""

    def __init__(self, clock: VirtualClock, count: int) -> None:
        self._clock = clock
        self._chance = random.Random(count)
        self.leases = {f"m{n}": self._chance.uniform(-TTL_S / 3, 0.0) for n in range(count)}
        """When each was last renewed."""
        self.counters = dict.fromkeys(self.leases, 0)
        self.silent: set[str] = set()
        self.looks = 0
        self.ended: dict[str, float] = {}

    async def renew(self) -> None:
        while True:
            await asyncio.sleep(TTL_S / 100)
            now = self._clock.now()
            for lease in self.leases.keys() - self.silent:
                if now - self.leases[lease] > TTL_S / 3 * self._chance.uniform(0.9, 1.1):
                    self.leases[lease], self.counters[lease] = now, self.counters[lease] + 1

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]:
        return {scope: Survey(frozenset(), frozenset(self.leases)) for scope in scopes}

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]:
        self.looks += 1
        now = self._clock.now()
        return [
            LeaseRow(
                lease,
                round(TTL_S * 1e6),
                self.counters[lease],
                round((now - self.leases[lease]) * 1e6),
                "server",
            )
            for lease in leases
        ]

    async def expire(self, lease: str, counter: int) -> None:
        assert self.counters[lease] == counter
        del self.leases[lease]
        self.ended[lease] = self._clock.now()


@pytest.mark.parametrize("count", [1, 200, 1000])
def test_many_leases_are_looked_at_together(count: int) -> None:
    """The queries of a watch do not grow with the number of leases, and each end is noticed."""
    clock = VirtualClock()

    async def test() -> None:
        members = Members(clock, count)
        renewing = asyncio.create_task(members.renew())
        observer = LeaseObserver(members, clock.now)
        await observer.watch("members/g", lambda: None)
        await asyncio.sleep(10 * TTL_S)
        assert not members.ended
        assert members.looks <= 10 * 12
        dead = f"m{count - 1}"
        members.silent.add(dead)
        renewed_at = members.leases[dead]
        await asyncio.sleep(2 * TTL_S)
        assert TTL_S <= members.ended.pop(dead) - renewed_at <= 1.6 * TTL_S
        assert not members.ended
        observer.close()
        renewing.cancel()

    run_virtual(test, clock=clock)
