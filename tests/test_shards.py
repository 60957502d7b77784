"""Sets of shards in virtual time: members, the controller, moves, and what people ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from doyen import ConfigError, OrderFailed, Session
from doyen.election.attempt import Attempt
from doyen.errors import (
    Conflict,
    NameTaken,
    StaleMap,
    StaleToken,
    StoreUnavailable,
)
from doyen.manage.documents import Document, Versioned
from doyen.manage.shards import controller
from doyen.manage.shards.claims import CLAIMS_AT_LEAST, CLAIMS_AT_ONCE, ClaimPace, Claims
from doyen.manage.shards.controller import Controller
from doyen.manage.shards.plan import ShardPlan
from doyen.manage.shards.routing import ShardMap
from doyen.manage.shards.scopes import OwnedShards
from doyen.manage.shards.slots import ShardTerm
from doyen.model import Claim, Entry, members_key, shards_key
from doyen.stores.memory import MemoryStore
from doyen.stores.port import Creation
from doyen.testing.faults import Faults, Late
from mutants_shards import grace_forgotten, two_bodies, unread, untokened
from support import TTL_S, Place, core_of, keepalive_of, known, now, until, virtual


class Jobs:
    """Members of the set `jobs` and what they run."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.running: dict[int, ShardTerm] = {}
        self.log: list[tuple[str, int]] = []
        self.ending_s = 0.0
        self.overlaps: list[int] = []
        """Shards of which two bodies ran at once."""
        self.body: Callable[[ShardTerm], Any] = self.forever

    async def forever(self, term: ShardTerm) -> None:
        if term.shard in self.running:
            self.overlaps.append(term.shard)
        self.running[term.shard] = term
        self.log.append((term.name, term.shard))
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            while True:
                try:
                    await asyncio.sleep(self.ending_s)
                    break
                except asyncio.CancelledError:
                    continue
            self.running.pop(term.shard, None)

    def owners(self) -> dict[int, str]:
        return {shard: term.name for shard, term in self.running.items() if term.valid}

    def loads(self) -> dict[str, int]:
        names = list(self.owners().values())
        return {name: names.count(name) for name in sorted(set(names))}

    def records(self) -> dict[int, str]:
        entries = self.place.server.list(shards_key("jobs", "at"))
        return {int(each.key.split("/")[3]): Claim.decode(each.value).name for each in entries}

    def plan(self) -> ShardPlan:
        entry = self.place.server.get(shards_key("jobs", "plan"))
        assert entry is not None
        return ShardPlan.decode(Versioned.decode(entry).body)

    async def create(self, count: int = 6, **spec: Any) -> Session:
        session = await self.place.open()
        await session.shards("jobs").configure(count=count, **spec)
        return session

    async def join(
        self, name: str, faults: Faults | None = None, **options: Any
    ) -> tuple[Session, OwnedShards]:
        session = await self.place.open(faults)
        scope = session.own_shards("jobs", self.body, name=name, **options)
        return session, await self.place.sessions.enter_async_context(scope)

    @asynccontextmanager
    async def member(self, name: str, **options: Any) -> AsyncIterator[OwnedShards]:
        async with (
            self.place.session() as session,
            session.own_shards("jobs", self.body, name=name, **options) as owned,
        ):
            yield owned

    async def settled(self, count: int = 6, within_s: float = 30.0) -> None:
        """The controller knows all members, every shard runs, and no move is under way."""
        listed = members_key("shards/jobs")
        await until(
            lambda: (
                len(self.owners()) == count
                and len(self.plan().members) == len(self.place.server.list(listed))
                and not self.plan().moves
                and self.owners() == dict(enumerate(self.plan().owners))
            ),
            within_s,
        )


@virtual
async def test_shards_are_shared_out_and_run(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(6)
    _, first = await jobs.join("a")
    await jobs.settled()
    assert jobs.loads() == {"a": 6}
    await jobs.join("b")
    await jobs.settled()
    assert jobs.loads() == {"a": 4, "b": 2}
    assert sorted(first.terms) == [n for n, name in jobs.owners().items() if name == "a"]
    term = jobs.running[0]
    assert (term.shards, term.shard, term.generation) == ("jobs", 0, 1)
    assert term.valid


@virtual
async def test_a_move_starts_the_new_owner_when_the_old_one_has_ended(place: Place) -> None:
    jobs = Jobs(place)
    jobs.ending_s = 3.0
    session = await jobs.create(2)
    await jobs.join("a")
    await jobs.settled(2)
    await jobs.join("b")
    token = jobs.running[1].token
    began = now()
    await session.shards("jobs").move(1, to="b")
    assert now() - began >= 3.0
    assert jobs.owners() == {0: "a", 1: "b"}
    assert jobs.running[1].token > token
    assert jobs.plan().owners[1] == "b"


@virtual
async def test_prepare_runs_before_the_old_owner_ends(place: Place) -> None:
    jobs = Jobs(place)
    session = await jobs.create(2)
    prepared: list[int] = []

    async def prepare(shard: int) -> None:
        await asyncio.sleep(5.0)
        assert jobs.owners()[shard] == "a", "it ended too early"
        prepared.append(shard)

    await jobs.join("a")
    await jobs.settled(2)
    await jobs.join("b", prepare=prepare)
    await session.shards("jobs").move(0, to="b")
    assert prepared == [0]


@virtual
async def test_preparing_for_too_long_leaves_the_shard_where_it_is(place: Place) -> None:
    jobs = Jobs(place)
    session = await jobs.create(2, prepare_s=5.0)

    async def prepare(shard: int) -> None:
        await asyncio.sleep(1000.0)

    await jobs.join("a")
    await jobs.settled(2)
    await jobs.join("b", prepare=prepare)
    with pytest.raises(OrderFailed, match="owned by 'a'; it was prepared too slowly on 'b'"):
        await session.shards("jobs").move(0, to="b", wait_s=20.0)
    assert jobs.owners() == {0: "a", 1: "a"}
    assert not jobs.plan().moves
    assert jobs.plan().slow[0] == ("b",)


@virtual
async def test_a_death_moves_only_the_shards_of_the_dead(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(30)
    await jobs.join("a")
    await jobs.join("b")
    faults = Faults()
    await jobs.join("c", faults)
    await jobs.settled(30)
    before = jobs.owners()
    faults.cut()
    began = now()
    await until(lambda: set(jobs.owners().values()) == {"a", "b"} and len(jobs.owners()) == 30)
    assert now() - began < TTL_S + 1.0
    assert all(jobs.owners()[n] == name for n, name in before.items() if name != "c")
    faults.heal()
    await until(lambda: jobs.loads().get("c", 0) >= 9)
    await jobs.settled(30)


@virtual
async def test_a_lease_that_ends_costs_all_terms_and_nothing_else(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(4)
    session, _ = await jobs.join("a")
    await jobs.settled(4)
    tokens = {shard: term.token for shard, term in jobs.running.items()}
    place.end_lease(session)
    await until(
        lambda: jobs.running and all(jobs.running[n].token > tokens[n] for n in jobs.running)
    )
    await jobs.settled(4)


@pytest.mark.parametrize("mutant", [False, True])
@virtual
async def test_a_body_that_overruns_is_waited_for_in_its_own_process(
    place: Place, mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease has ended, and the next lease of the process could own the shard already."""
    if mutant:
        two_bodies(monkeypatch)
    jobs = Jobs(place)
    await jobs.create(2)
    session, _ = await jobs.join("a")
    await jobs.settled(2)
    jobs.ending_s = 20.0
    place.end_lease(session)
    await asyncio.sleep(15.0)
    jobs.ending_s = 0.0
    assert sorted(jobs.overlaps) == ([0, 1] if mutant else [])
    if not mutant:
        await jobs.settled(2)
    await asyncio.sleep(20.0)


@virtual
async def test_leaving_the_scope_ends_the_bodies_and_hands_over(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(4)
    async with jobs.member("a"):
        await jobs.join("b")
        await until(lambda: jobs.loads() == {"a": 3, "b": 1} or jobs.loads() == {"a": 2, "b": 2})
    assert "a" not in jobs.owners().values()
    await jobs.settled(4)
    assert jobs.loads() == {"b": 4}


@virtual
async def test_a_name_that_is_taken_is_refused(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(4)
    await jobs.join("a")
    with pytest.raises(NameTaken, match="the name 'a'"):
        await jobs.join("a")
    await jobs.settled(4)


@virtual
async def test_grace_keeps_shards_for_a_restart(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(6, grace_s=20.0)
    await jobs.join("b")
    async with jobs.member("a"):
        await until(lambda: len(jobs.owners()) == 6 and len(jobs.loads()) == 2)
        await jobs.settled()
        before = jobs.owners()
    await asyncio.sleep(10.0)
    assert jobs.plan().grace["a"] <= 14.0
    assert len(jobs.owners()) == sum(name == "b" for name in before.values())
    async with jobs.member("a"):
        await jobs.settled()
        assert jobs.owners() == before
    await asyncio.sleep(22.0)
    assert jobs.loads() == {"b": 6}


@pytest.mark.parametrize("mutant", [False, True])
@virtual
async def test_grace_goes_on_under_another_controller(
    place: Place, mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """⚔ The seconds left are in the plan."""
    if mutant:
        grace_forgotten(monkeypatch)
    jobs = Jobs(place)
    await jobs.create(6, grace_s=30.0)
    await jobs.join("b")
    async with jobs.member("a"):
        await until(lambda: len(jobs.loads()) == 2)
        await jobs.settled()
    left_at = now()
    names = ["c", "d", "e", "f"]
    for name in names:
        await jobs.join(name)
    session = await place.open()
    while len(jobs.owners()) < 6 and now() - left_at < 60.0:
        await asyncio.sleep(4.0)
        await session.resign("shards/jobs")
    assert (25.0 < now() - left_at < 40.0) is not mutant


@virtual
async def test_drain_empties_a_member_before_it_returns(place: Place) -> None:
    jobs = Jobs(place)
    session = await jobs.create(12, moves_at_once=2)
    await jobs.join("a")
    await jobs.join("b")
    await jobs.settled(12)
    jobs.ending_s = 0.5
    await session.shards("jobs").drain("a")
    assert jobs.loads() == {"b": 12}
    assert (await session.shards("jobs").drain("a", undo=True)).members["a"].weight == 1
    await until(lambda: jobs.loads().get("a", 0) >= 5)


@virtual
async def test_drain_waits_for_shards_that_are_on_their_way_to_the_member(place: Place) -> None:
    """⚔ It owns nothing yet, and would own one a moment after the drain has returned."""
    jobs = Jobs(place)
    session = await jobs.create(4, moves_at_once=2)
    await jobs.join("a")
    await jobs.settled(4)
    prepared = asyncio.Event()

    async def prepare(shard: int) -> None:
        await prepared.wait()

    await jobs.join("b", prepare=prepare)
    await until(lambda: bool(jobs.plan().moves))
    prepared.set()
    await session.shards("jobs").drain("b")
    assert jobs.loads() == {"a": 4}
    jobs.log.clear()
    await asyncio.sleep(TTL_S)
    assert jobs.log == []


@virtual
async def test_drain_fails_if_no_other_member_is_eligible(place: Place) -> None:
    """⚔ With who and why, and nothing is changed."""
    jobs = Jobs(place)
    session = await jobs.create(4, weights={"b": 0})
    await jobs.join("a")
    shards = session.shards("jobs")
    with pytest.raises(OrderFailed, match=r"no other member could own.*there is no other member"):
        await shards.drain("a")
    await jobs.join("b")
    await jobs.join("c", weight=0)
    with pytest.raises(OrderFailed, match="drained: b; unhealthy or of weight 0: c"):
        await shards.drain("a")
    await jobs.settled(4)
    spec = await shards.spec()
    assert spec is not None
    assert "a" not in spec.weights
    with pytest.raises(OrderFailed, match=r"'x' cannot be drained: it is not a live.*are a, b, c"):
        await shards.drain("x")
    assert await shards.spec() == spec
    await shards.drain("a", anyway=True)
    await asyncio.sleep(5.0)
    assert jobs.loads() == {"a": 4}
    assert "weight 0: a, b, c" in jobs.plan().note


@virtual
async def test_an_unhealthy_member_keeps_its_shards_until_others_are_ready(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(4)
    healthy = True
    await jobs.join("a", health=lambda: healthy)
    await jobs.settled(4)
    healthy = False
    await asyncio.sleep(20.0)
    assert jobs.loads() == {"a": 4}
    await jobs.join("b")
    await until(lambda: jobs.loads() == {"b": 4})
    assert len(jobs.log) == 8, "each shard moved once"


@virtual
async def test_a_body_that_keeps_failing_moves_on_and_is_then_set_aside(place: Place) -> None:
    jobs = Jobs(place)
    tried: list[str] = []
    broken = True

    async def body(term: ShardTerm) -> None:
        if term.shard == 2 and broken:
            tried.append(term.name)
            raise ValueError("no such table")
        await jobs.forever(term)

    jobs.body = body
    session = await jobs.create(4)
    await jobs.join("a")
    await jobs.join("b")
    await jobs.join("c")
    await until(lambda: jobs.plan().aside, 200.0)
    assert len(set(tried)) == 2
    assert len(tried) == 6
    assert "no such table" in jobs.plan().aside[2]
    assert sorted(jobs.owners()) == [0, 1, 3]
    broken = False
    await session.shards("jobs").retry()
    await jobs.settled(4)


@virtual
async def test_a_body_that_returns_is_run_again(place: Place) -> None:
    jobs = Jobs(place)
    rounds: list[int] = []

    async def body(term: ShardTerm) -> None:
        rounds.append(term.token)

    jobs.body = body
    await jobs.create(1)
    await jobs.join("a")
    await until(lambda: len(rounds) == 3)
    assert rounds == sorted(set(rounds))
    assert not jobs.plan().failed


@virtual
async def test_min_members_are_waited_for(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(4, min_members=2)
    await jobs.join("a")
    await asyncio.sleep(10.0)
    assert not jobs.owners()
    assert "2 are needed" in jobs.plan().note
    await jobs.join("b")
    await jobs.settled(4)
    assert jobs.loads() == {"a": 2, "b": 2}


@virtual
async def test_pause_keeps_the_plan(place: Place) -> None:
    jobs = Jobs(place)
    session = await jobs.create(4)
    await jobs.join("a")
    await jobs.settled(4)
    await session.shards("jobs").configure(paused=True)
    await jobs.join("b")
    await asyncio.sleep(10.0)
    assert jobs.loads() == {"a": 4}
    await session.shards("jobs").configure(paused=False)
    await until(lambda: jobs.loads().get("b", 0) >= 1)


@pytest.mark.parametrize("barrier", [False, True])
@virtual
async def test_the_count_changes_under_running_owners(place: Place, barrier: bool) -> None:
    jobs = Jobs(place)
    jobs.ending_s = 2.0
    session = await jobs.create(4, barrier=barrier)
    await jobs.join("a")
    await jobs.join("b")
    await jobs.settled(4)
    before = {shard: term.token for shard, term in jobs.running.items()}
    seen: set[frozenset[int]] = set()

    async def watch() -> None:
        while True:
            seen.add(frozenset(term.generation for term in jobs.running.values()))
            await asyncio.sleep(0.05)

    watching = asyncio.ensure_future(watch())
    await session.shards("jobs").configure(count=10)
    await jobs.settled(10)
    watching.cancel()
    kept = [n for n in before if jobs.running[n].token == before[n]]
    assert jobs.plan().generation == 2
    if barrier:
        assert kept == []
        assert frozenset({1, 2}) not in seen
        assert frozenset() in seen
    else:
        assert len(kept) >= 3
    await session.shards("jobs").configure(count=3)
    await jobs.settled(3)
    assert sorted(jobs.records()) == [0, 1, 2]


async def paused_with_an_old_plan(place: Place) -> Jobs:
    """A member sends its claims by the plan of generation 1. They are carried out when the plan is
    of generation 2, of which the member has not been notified."""
    jobs = Jobs(place)
    faults = Faults()
    session = await jobs.create(4, barrier=True)
    _, controller = await jobs.join("c", weight=0)
    _, owned = await jobs.join("a", faults, control=False)
    await until(lambda: jobs.plan().members.keys() == {"a", "c"})
    faults.next("create", *[Late(before_s=0.9)] * 4)
    await until(lambda: len(owned._owner.slots) == 4)
    watch = owned._owner.plan.watched._watch
    assert watch is not None
    watch.close()
    await session.shards("jobs").configure(count=2)
    await asyncio.sleep(0.7)
    assert jobs.plan().generation == 2
    assert not jobs.running
    await asyncio.sleep(3.0)
    del controller
    return jobs


@virtual
async def test_a_process_that_paused_with_an_old_plan_lets_go(place: Place) -> None:
    """⚔ After winning and before its body it reads the plan again."""
    jobs = await paused_with_an_old_plan(place)
    assert {shard: term.generation for shard, term in jobs.running.items()} == {0: 2, 1: 2}
    assert sorted(jobs.records()) == [0, 1]


@virtual
async def test_without_reading_again_it_would_run(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread(monkeypatch)
    jobs = await paused_with_an_old_plan(place)
    assert {shard: term.generation for shard, term in jobs.running.items()} == dict.fromkeys(
        range(4), 1
    )


@pytest.mark.parametrize("mutant", [False, True])
@virtual
async def test_a_paused_controller_cannot_write_after_its_successor_did(
    place: Place, mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """⚔ The first act of a controller is to rewrite the plan under its own token."""
    if mutant:
        untokened(monkeypatch)
    jobs = Jobs(place)
    session = await jobs.create(4)
    terms: list[Any] = [SimpleNamespace(token=token, check=lambda: None) for token in (7, 9)]
    paused, successor = (Controller(core_of(session), "jobs", term) for term in terms)
    await paused._take_over()
    await successor._take_over()
    refused: type[Exception] | None = None
    for _ in range(2):
        try:
            await paused._write(paused._known)
        except (Conflict, StaleToken) as error:
            refused = type(error)
            with pytest.raises(StaleToken):
                await paused._take_over()
    assert refused is (None if mutant else Conflict)
    entry = place.server.get(shards_key("jobs", "plan"))
    assert entry is not None
    assert Versioned.decode(entry).token == (7 if mutant else 9)


@virtual
async def test_clients_route_by_the_map(place: Place) -> None:
    jobs = Jobs(place)
    session = await jobs.create(4)
    _, owned = await jobs.join("a", address="http://a:1", zone="x")
    await jobs.settled(4)
    shard_map = await session.shard_map("jobs")
    route = shard_map.route("customer-17")
    assert route == (route.shard, "a", "http://a:1", 1)
    assert owned.check_route(route.shard, route.generation) is owned.terms[route.shard]
    await session.shards("jobs").configure(count=7)
    await jobs.settled(7)
    with pytest.raises(StaleMap, match="the current one is 2") as refused:
        owned.check_route(route.shard, route.generation)
    assert refused.value.generation == 2
    with pytest.raises(StaleMap, match="does not own shard 99"):
        owned.check_route(99, 2)


@virtual
async def test_the_map_is_observed(place: Place) -> None:
    jobs = Jobs(place)
    session = await place.open()
    seen: list[ShardMap] = []

    async def observe() -> None:
        async for shard_map in session.observe_shards("jobs"):
            seen.append(known(shard_map))  # noqa: PERF401 - it never ends

    observing = asyncio.ensure_future(observe())
    await until(lambda: seen)
    assert seen[0].generation == 0
    with pytest.raises(Exception, match="no plan yet"):
        seen[0].route("x")
    await jobs.create(4)
    await jobs.join("a")
    await jobs.settled(4)
    await asyncio.sleep(1.0)
    assert seen[-1].owners == ("a",) * 4
    assert not any(each.regressed for each in seen)
    observing.cancel()


@virtual
async def test_rebalance_can_be_tried_first(place: Place) -> None:
    jobs = Jobs(place)
    session = await jobs.create(10)
    await jobs.join("a")
    await jobs.settled(10)
    await jobs.join("b")
    await jobs.settled(10)
    shards = session.shards("jobs")
    planned = await shards.rebalance(dry_run=True)
    assert [(each.owner, each.to) for each in planned] == [("a", "b")]
    assert jobs.loads() == {"a": 6, "b": 4}
    assert await shards.rebalance() == planned
    await until(lambda: jobs.loads() == {"a": 5, "b": 5})


@virtual
async def test_requests_that_make_no_sense_are_refused(place: Place) -> None:
    jobs = Jobs(place)
    session = await place.open()
    shards = session.shards("jobs")
    for request in (shards.configure(paused=True), shards.drain("a"), shards.move(1, to="a")):
        with pytest.raises(OrderFailed, match="there is no set of shards 'jobs'"):
            await request
    with pytest.raises(ConfigError, match="count is an integer of 1 or more"):
        await shards.configure(count=0)
    await jobs.create(4)
    await jobs.join("a")
    with pytest.raises(OrderFailed, match="'z' cannot own shards of 'jobs': it is not a live"):
        await shards.move(1, to="z")
    with pytest.raises(ConfigError, match="has the shards 0 to 3, not 9"):
        await shards.move(9, to="a")
    for options in ({"weight": -1}, {"zone": 7}, {"name": "\n"}):
        with pytest.raises(ConfigError):
            session.own_shards("jobs", jobs.body, **options)
    with pytest.raises(ConfigError, match="a set of shards"):
        session.own_shards("", jobs.body)


@virtual
async def test_a_store_without_linearizable_reads_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    limits = replace(MemoryStore.capabilities, linearizable_reads=False)
    monkeypatch.setattr(MemoryStore, "capabilities", limits)
    session = await place.open()
    with pytest.raises(ConfigError, match="shards require linearizable reads"):
        async with session.own_shards("jobs", Jobs(place).body):
            pass


@virtual
async def test_a_stuck_ending_is_reported_and_does_not_stop_other_moves(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(8, moves_at_once=1, ending_s=5.0)
    await jobs.join("a")
    await jobs.settled(8)
    jobs.ending_s = 60.0  # of the first that moves
    await jobs.join("b")
    await until(lambda: any(move.stuck for move in jobs.plan().moves.values()))
    jobs.ending_s = 0.0
    await until(lambda: jobs.loads().get("b", 0) >= 2)
    assert any(move.stuck for move in jobs.plan().moves.values())
    await jobs.settled(8, 100.0)
    assert jobs.loads() == {"a": 5, "b": 3}


@virtual
async def test_a_record_that_was_removed_ends_its_term(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(2)
    session, _ = await jobs.join("a")
    await jobs.settled(2)
    await asyncio.sleep(TTL_S)
    token = jobs.running[1].token
    place.server.delete(f"{shards_key('jobs', 'at')}/1/leader")
    await until(lambda: 1 in jobs.running and jobs.running[1].token > token, 3 * TTL_S)
    assert keepalive_of(session).lost_because is None


@virtual
async def test_a_record_that_was_removed_again_ends_its_term_again(place: Place) -> None:
    """⚔ The plan names the shard already when its record is missed for the second time."""
    jobs = Jobs(place)
    await jobs.create(2)
    await jobs.join("a")
    await jobs.settled(2)
    await asyncio.sleep(TTL_S)

    def begun(times: int) -> bool:
        return jobs.log.count(("a", 1)) == times

    for times in (2, 3):
        place.server.delete(f"{shards_key('jobs', 'at')}/1/leader")
        await until(partial(begun, times), 3 * TTL_S)


@virtual
async def test_a_missing_record_is_not_forgotten_with_a_plan_that_could_not_be_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(place)
    await jobs.create(2)
    await jobs.join("a")
    await jobs.settled(2)
    await asyncio.sleep(3 * TTL_S)
    write, refused = Document.write, list[Any]()

    async def refuse_once(self: Document, body: dict[str, Any], **rest: Any) -> Versioned:
        if body.get("unheld") and not refused:
            refused.append(body)
            raise StoreUnavailable("not now")
        return await write(self, body, **rest)

    monkeypatch.setattr(Document, "write", refuse_once)
    token = jobs.running[1].token
    place.server.delete(f"{shards_key('jobs', 'at')}/1/leader")
    await until(lambda: 1 in jobs.running and jobs.running[1].token > token, 4 * TTL_S)
    assert refused


@virtual
async def test_a_plan_that_is_read_while_records_are_looked_at_stops_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """⚔ The plan is also read for a shard that was won, and names no missing record any more."""
    found = iter([(1,)])
    monkeypatch.setattr(controller, "unheld", lambda *_: next(found, ()))
    claim, answer, looked = asyncio.Event(), asyncio.Event(), list[str]()
    create, get = Claims._find_or_create, Attempt.get

    async def create_late(self: Claims, shard: int, attempt: Attempt) -> Creation:
        if shard == 0:
            await claim.wait()
        return await create(self, shard, attempt)

    async def get_late(self: Attempt, key: str) -> Entry | None:
        looked.append(key)
        await answer.wait()
        return await get(self, key)

    monkeypatch.setattr(Claims, "_find_or_create", create_late)
    jobs = Jobs(place)
    session = await jobs.create(2)
    await jobs.join("a")
    await until(lambda: 1 in jobs.running, TTL_S)
    monkeypatch.setattr(Attempt, "get", get_late)
    await until(lambda: bool(looked), 3 * TTL_S)
    note = f"{shards_key('jobs', 'at')}/1/note"
    place.server.put(note, b"", None)
    await until(lambda: not jobs.plan().unheld, 3 * TTL_S)
    place.server.delete(note)
    claim.set()
    await until(lambda: 0 in jobs.running, TTL_S)
    answer.set()
    await session.shards("jobs").configure(count=3)
    await until(lambda: 2 in jobs.running, 3 * TTL_S)


def test_fewer_claims_are_under_way_while_the_store_does_not_keep_up() -> None:
    pace = ClaimPace()
    assert pace.limit == CLAIMS_AT_ONCE
    for _ in range(10):
        pace.failed()
    assert pace.limit == CLAIMS_AT_LEAST
    claims = 0
    while pace.limit < CLAIMS_AT_ONCE:
        pace.succeeded()
        claims += 1
    assert claims < 2 * CLAIMS_AT_ONCE


@virtual
async def test_members_do_not_hear_of_each_others_records(place: Place) -> None:
    """Each watches the plan, the members, and what it waits for. The records of all shards are
    watched by the controller alone."""
    jobs = Jobs(place)
    await jobs.create(20, min_members=3)
    owned = {name: (await jobs.join(name))[1] for name in "abc"}
    await jobs.settled(20)
    at = shards_key("jobs", "at")
    watched = place.server._watchers
    assert {scope: len(each) for scope, each in watched.items() if scope.startswith(at)} == {at: 1}
    assert sum(len(each.terms) for each in owned.values()) == 20
