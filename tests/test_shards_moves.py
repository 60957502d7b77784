"""When shards are prepared and let go, and when plans are computed and written, in virtual time."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from doyen.manage.shards import controller
from doyen.manage.shards.moves import CALM_S
from doyen.manage.shards.owner import ShardOwner
from doyen.manage.shards.plan import ShardPlan
from doyen.manage.shards.slots import ShardTerm
from doyen.manage.shards.steps import next_plan
from doyen.testing.faults import Faults, Late, Odds
from support import Place, now, until, virtual
from test_shards import Jobs


@virtual
async def test_a_member_lets_go_when_all_have_had_time_to_read_the_plan(place: Place) -> None:
    jobs = Jobs(place)
    session = await jobs.create(12, moves_at_once=4)
    replaced, read_at, ended_at = ShardOwner._plan_replaced, [0.0], list[float]()

    def noted(self: ShardOwner, earlier: ShardPlan) -> None:
        replaced(self, earlier)
        if self.settings.name == "a":
            read_at.append(now())

    async def body(term: ShardTerm) -> None:
        try:
            await jobs.forever(term)
        finally:
            ended_at.append(now() - read_at[-1])

    jobs.body = body
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardOwner, "_plan_replaced", noted)
        await jobs.join("a")
        await jobs.join("b")
        await jobs.settled(12)
        ended_at.clear()
        await session.shards("jobs").drain("a")
    assert len(ended_at) >= 5
    assert min(ended_at) >= CALM_S * 0.999
    assert min(ended_at) < 2 * CALM_S
    await jobs.settled(12)


@virtual
async def test_no_plan_is_computed_while_moves_are_under_way_and_nothing_else_is_new(
    place: Place,
) -> None:
    jobs = Jobs(place)
    session = await jobs.create(12, moves_at_once=4)
    jobs.ending_s = 0.04
    for name in ("a", "b"):
        await jobs.join(name)
    await jobs.settled(12)
    in_vain: list[bool] = []

    def counted(spec: Any, plan: ShardPlan, members: Any, records: Any, elapsed_s: float) -> Any:
        moves = plan.moves.items()
        in_vain.append(any(records.get(shard) != move.to for shard, move in moves))
        return next_plan(spec, plan, members, records, elapsed_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "next_plan", counted)
        await session.shards("jobs").drain("a")
        assert 2 <= len(in_vain) <= 5
        assert not any(in_vain)
        await jobs.settled(12)
        # Whoever comes or goes is noticed all the same.
        jobs.ending_s = 0.3
        await session.shards("jobs").drain("a", undo=True)
        await until(lambda: bool(jobs.plan().moves))
        await jobs.join("c")
        asked = now()
        await until(lambda: "c" in jobs.plan().members)
        assert now() - asked < controller.LINGER_S
    await jobs.settled(12)


@virtual
async def test_no_plan_is_written_while_the_last_new_owner_begins(place: Place) -> None:
    """Before its body begins it reads the plan, and all members would read a new one then."""
    jobs = Jobs(place)
    session = await jobs.create(60, moves_at_once=3)
    began_at, quiet_s = [0.0], list[float]()

    async def body(term: ShardTerm) -> None:
        began_at.append(now())
        await jobs.forever(term)

    def noted(spec: Any, plan: ShardPlan, *observed: Any) -> Any:
        if plan.moves:
            quiet_s.append(now() - began_at[-1])
        return next_plan(spec, plan, *observed)

    jobs.body = body
    for n, name in enumerate(("a", "b")):
        await jobs.join(name, Faults(seed=n, odds=Odds(late=1.0, delay_s=0.02)))
    await jobs.settled(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "next_plan", noted)
        await session.shards("jobs").drain("a")
    assert len(quiet_s) >= 3
    assert min(quiet_s) >= controller.QUIET_S / 2  # the record stands before the body begins
    await jobs.settled(60)


@virtual
async def test_a_controller_reads_little_while_records_keep_changing(place: Place) -> None:
    """Its requests would compete with those of the owners whose shards are on the move."""
    jobs, reads = Jobs(place), list[float]()
    session = await jobs.create(60, moves_at_once=30)
    seen_members = controller.seen_members

    async def noted(*of: Any) -> Any:
        reads.append(now())
        return await seen_members(*of)

    for n, name in enumerate(("a", "b")):
        await jobs.join(name, Faults(seed=n, odds=Odds(late=1.0, delay_s=0.012)))
    await jobs.settled(60)
    began = now()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "seen_members", noted)
        await session.shards("jobs").drain("a")
    assert now() - began > 12 * controller.QUIET_S
    assert len(reads) <= 5, [read - began for read in reads]
    await jobs.settled(60)


@virtual
async def test_nothing_is_let_go_before_all_new_owners_are_ready(place: Place) -> None:
    """They write that to the store, and others read it. One that takes long is not waited for."""
    jobs, ended_at, prepare_s = Jobs(place), list[float](), 0.3
    session = await jobs.create(12, moves_at_once=12)

    async def prepare(shard: int) -> None:
        await asyncio.sleep(prepare_s)

    async def body(term: ShardTerm) -> None:
        try:
            await jobs.forever(term)
        finally:
            ended_at.append(now())

    async def first_ends_after_s() -> float:
        await session.shards("jobs").drain("a", undo=True)
        await until(lambda: jobs.loads().get("a", 0) >= 3)
        await jobs.settled(12)
        ended_at.clear()
        await session.shards("jobs").drain("a", anyway=True)
        await until(lambda: bool(jobs.plan().moves))
        planned = now()
        assert {move.to for move in jobs.plan().moves.values()} == {"b", "c"}
        await until(lambda: bool(ended_at))
        return ended_at[0] - planned

    jobs.body = body
    await jobs.join("a")
    await jobs.join("b")
    await jobs.join("c", prepare=prepare)
    await jobs.settled(12)
    assert 0.29 < await first_ends_after_s() < 0.4
    prepare_s = 2.0
    assert 0.45 < await first_ends_after_s() < 0.6


@virtual
async def test_a_drain_is_undone_although_there_is_no_member(place: Place) -> None:
    jobs = Jobs(place)
    session = await jobs.create(4)
    shards = session.shards("jobs")
    await shards.drain("a", anyway=True)
    began = now()
    await shards.drain("a", undo=True)
    assert now() - began < 1.0
    spec = await shards.spec()
    assert spec is not None
    assert not spec.weights


@virtual
async def test_nothing_is_let_go_while_a_slow_store_deletes_a_record(place: Place) -> None:
    """What takes long to end by itself is not waited for."""
    jobs, faults, asked_at, ended_at = Jobs(place), Faults(), list[float](), list[float]()
    session = await jobs.create(8, moves_at_once=4)
    ending_s = 0.0

    async def body(term: ShardTerm) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            asked_at.append(now())
            await asyncio.sleep(ending_s)
            ended_at.append(now())

    async def drain() -> list[float]:
        """The pauses between bodies that are asked to end."""
        for name in ("a", "b"):
            await session.shards("jobs").drain(name, undo=True)
        await until(lambda: sorted(jobs.plan().loads().values()) in ([4, 4], [3, 5]))
        await until(lambda: not jobs.plan().moves)
        asked_at.clear()
        faults.next("delete", *[Late(before_s=0.3)] * (4 if ending_s == 0.0 else 0))
        await session.shards("jobs").drain("a", wait_s=30.0)
        return [later - earlier for earlier, later in pairwise(asked_at[:4])]

    jobs.body = body
    await jobs.join("a", faults)
    await jobs.join("b")
    assert min(await drain()) >= 0.3
    ending_s = 1.0
    assert max(await drain()) < 0.3
    assert ended_at


@virtual
async def test_a_shard_is_prepared_once_at_a_time(place: Place) -> None:
    """Also if one move after another of this shard is aborted while it is prepared."""
    jobs = Jobs(place)
    session = await jobs.create(2)
    preparing: list[int] = []
    begun = 0

    async def prepare(shard: int) -> None:
        nonlocal begun
        begun += 1
        assert shard not in preparing
        preparing.append(shard)
        await asyncio.sleep(10.0)
        preparing.remove(shard)

    await jobs.join("a")
    await jobs.settled(2)
    await jobs.join("b", prepare=prepare)
    shards = session.shards("jobs")
    await shards.configure(pins={0: "b"})
    for weights in ({"b": 0}, {}, {"b": 0}, {}):
        await until(lambda: (0 in jobs.plan().moves) is bool(weights))  # noqa: B023
        await shards.configure(weights=weights)
    await shards.move(0, to="b")
    assert begun == 2, "once for a move that was aborted, and once for the last one"


@virtual
async def test_a_member_that_prepared_too_slowly_gets_the_shards_that_no_other_can_own(
    place: Place,
) -> None:
    jobs = Jobs(place)
    session = await jobs.create(4, prepare_s=2.0)
    pause_s = 5.0

    async def prepare(shard: int) -> None:
        await asyncio.sleep(pause_s)

    await jobs.join("a")
    await jobs.settled(4)
    faults = Faults()
    await jobs.join("b", faults, prepare=prepare)
    await until(lambda: len(jobs.plan().slow) > 0)
    pause_s = 0.0
    await session.shards("jobs").drain("a")
    assert jobs.loads() == {"b": 4}
    await session.shards("jobs").drain("a", undo=True)
    await session.shards("jobs").rebalance()
    await until(lambda: jobs.loads() == {"a": 2, "b": 2})
    faults.cut()
    await until(lambda: jobs.loads() == {"a": 4})


@virtual
async def test_few_plans_are_written_while_shards_are_kept_for_a_member(place: Place) -> None:
    """Every member reads each plan."""
    jobs = Jobs(place)
    session = await jobs.create(6, grace_s=120.0)
    await jobs.join("b")
    async with jobs.member("a"):
        await until(lambda: len(jobs.loads()) == 2)
        await jobs.settled()
    await asyncio.sleep(20.0)
    before = await session.shard_map("jobs")
    await asyncio.sleep(60.0)
    after = await session.shard_map("jobs")
    assert after.version - before.version <= 10
    assert 50.0 < before.grace["a"] - after.grace["a"] < 70.0
    await until(lambda: jobs.loads() == {"b": 6}, 45.0)
