"""Members of a set of shards on links that fail, by seed: one valid owner for each shard at any
instant; and once all is calm, every shard is owned, loads are balanced and nothing moves.

The world and its oracle are in `shards_world`. That the oracle can see is shown at the end, on
variants of the code with one rule broken each.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen.manage.shards.planner import targets
from doyen.manage.shards.steps import SeenMember, eligible
from mutants_shards import (
    Mutant,
    banned_for_good,
    barrier_ignored,
    moved_too_much,
    moves_forgotten,
    never_looks,
    one_phase,
    released_early,
    stays_with_unread_plan,
    unclaimed,
)
from shards_world import FarewellWorld, ShardWorld, SlowWorld, VandalWorld
from support import until
from swarm import TTL_S, NotReached, SafetyViolated, assert_oracle_sees, reached

CALM_S = 20 * TTL_S
"""Within this time after the last fault everything is owned: leases expire, members join again,
moves are prepared or aborted, and bodies end."""


def run_world(
    seed: int,
    *,
    steps: int = 40,
    barrier: bool | None = None,
    of: type[ShardWorld] = ShardWorld,
) -> ShardWorld:
    """Run a world to its end: trouble, then calm."""
    world = of(seed, barrier=barrier)

    async def live() -> None:
        await world.trouble(4, steps)
        world.start()
        world.ask_for_rest()
        world.calm()
        await asyncio.sleep(2 * TTL_S)  # until the leases of processes that crashed have expired
        async with reached("every shard is owned as planned", CALM_S):
            await until(world.is_settled, CALM_S + 1)
        plan, begun = world.current(), world.oracle.begun
        members = {
            name: SeenMember(each.incarnation, each.weight) for name, each in plan.members.items()
        }
        for name, target in targets(plan.count, eligible(world.spec, members)).items():
            unfit = plan.slow or plan.failed  # and so other members have more
            if not unfit and not target.low <= (load := plan.loads().get(name, 0)) <= target.high:
                raise NotReached(f"{name} owns {load} shards")
        await asyncio.sleep(3 * TTL_S)
        # A check of the records may have come upon one that was just being created.
        now = replace(world.current(), unheld=plan.unheld)
        if now != plan or world.oracle.begun != begun:
            raise SafetyViolated("something moved although nothing happened")
        await world.end()

    world.watch_over(live())
    return world


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_members_come_and_go_in_much_trouble(seed: int) -> None:
    assert run_world(seed).oracle.begun > 0


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_plan_that_is_overwritten_is_restored(seed: int) -> None:
    assert run_world(seed, of=VandalWorld).oracle.begun > 0


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_members_that_prepared_too_slowly_own_shards_rather_than_none(seed: int) -> None:
    assert run_world(seed, of=SlowWorld).oracle.begun > 0


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_members_leave_without_a_controller_and_without_a_plan(seed: int) -> None:
    assert run_world(seed, of=FarewellWorld).oracle.begun > 0


def test_one_seed_gives_one_run() -> None:
    def trace(seed: int) -> list[list[str]]:
        return [process.faults.trace for process in run_world(seed, steps=15).processes]

    assert trace(7) == trace(7)


@pytest.mark.chaos
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_many_seeds(seed: int) -> None:
    assert run_world(seed, steps=100).oracle.begun > 0
    assert run_world(seed, steps=100, of=VandalWorld).oracle.begun > 0
    assert run_world(seed, steps=100, of=SlowWorld).oracle.begun > 0
    assert run_world(seed, steps=100, of=FarewellWorld).oracle.begun > 0


@pytest.mark.parametrize(
    ("mutant", "barrier", "error"),
    [
        (released_early, False, SafetyViolated),
        (unclaimed, False, SafetyViolated),
        (moves_forgotten, False, NotReached),
        (moved_too_much, False, NotReached),
        (one_phase, False, NotReached),
        (barrier_ignored, True, SafetyViolated),
        (never_looks, False, NotReached),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_oracle_sees(
    mutant: Mutant,
    barrier: bool,
    error: type[SafetyViolated | NotReached],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutants that need a schedule which hardly occurs by chance are in `test_shards`."""
    run = partial(run_world, barrier=barrier)
    assert_oracle_sees(mutant, monkeypatch, run, range(12), error)


@pytest.mark.parametrize(
    ("mutant", "of"),
    [(banned_for_good, SlowWorld), (stays_with_unread_plan, FarewellWorld)],
    ids=lambda value: value.__name__,
)
def test_the_oracle_sees_what_is_not_reached(
    mutant: Mutant, of: type[ShardWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_oracle_sees(mutant, monkeypatch, partial(run_world, of=of), range(12), NotReached)
