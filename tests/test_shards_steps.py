"""The steps of the controller, one by one, and against a model of members that obey the plan."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen.manage.health import _Raised
from doyen.manage.shards.plan import NO_MEMBER, Move, ShardPlan
from doyen.manage.shards.planner import choose_owners, targets
from doyen.manage.shards.slots import BodyFailures, log_shard_error
from doyen.manage.shards.spec import ShardSpec
from doyen.manage.shards.steps import SeenMember, eligible, next_plan

SPEC = ShardSpec(count=6)


def seen(names: str, **about: Any) -> dict[str, SeenMember]:
    return {name: SeenMember(ord(name), **about) for name in names}


def settled(spec: ShardSpec, names: str, plan: ShardPlan | None = None) -> ShardPlan:
    """The plan after members have carried out all moves."""
    members = seen(names)
    plan = next_plan(spec, plan or ShardPlan(), members, {}, 0.0)
    while plan.moves:
        holders = {shard: move.to for shard, move in plan.moves.items()}
        plan = next_plan(spec, plan, members, holders, 0.0)
    return plan


def test_the_first_plan_assigns_everything_at_once() -> None:
    plan = next_plan(SPEC, ShardPlan(), seen("ab"), {}, 0.0)
    assert plan.loads() == {"a": 3, "b": 3}
    assert plan.generation == 1
    assert not plan.moves
    assert next_plan(SPEC, plan, seen("ab"), {}, 1.0) == plan


def test_a_move_has_two_phases() -> None:
    plan = next_plan(SPEC, settled(SPEC, "a"), seen("ab"), {}, 0.0)
    (shard, move), *_ = plan.moves.items()
    assert plan.owners[shard] == "a"
    assert move.to == "b"
    assert plan.planned("a", 97, shard, target_ready=False)
    assert not plan.planned("b", 98, shard, target_ready=False)
    members = seen("a") | seen("b", prepared=frozenset({move.id}))
    plan = next_plan(SPEC, plan, members, {shard: "a"}, 0.0)
    assert plan.moves[shard].ready
    assert plan.owners[shard] == "a"
    assert plan.planned("b", 98, shard, target_ready=True)
    assert not plan.planned("b", 99, shard, target_ready=True), "another incarnation"
    assert not plan.planned("a", 97, shard, target_ready=True)
    plan = next_plan(SPEC, plan, members, {shard: "b"}, 0.0)
    assert shard not in plan.moves
    assert plan.owners[shard] == "b"


def moving(spec: ShardSpec = SPEC) -> tuple[ShardPlan, int, Move]:
    plan = next_plan(spec, settled(spec, "a"), seen("ab"), {}, 0.0)
    shard = min(plan.moves)
    return plan, shard, plan.moves[shard]


def test_moves_at_once_is_a_limit() -> None:
    spec = replace(SPEC, count=40, moves_at_once=3)
    plan, _, _ = moving(spec)
    assert len(plan.moves) == 3
    assert len(next_plan(spec, plan, seen("ab"), {}, 0.0).moves) == 3


def test_an_ending_that_is_stuck_leaves_the_budget() -> None:
    spec = replace(SPEC, count=40, moves_at_once=1)
    plan, shard, move = moving(spec)
    members = seen("a") | seen("b", prepared=frozenset({move.id}))
    plan = next_plan(spec, plan, members, {shard: "a"}, 0.0)
    plan = next_plan(spec, plan, members, {shard: "a"}, spec.ending_s)
    assert plan.moves[shard].stuck
    assert len(plan.moves) == 2


def test_preparing_for_too_long_aborts_the_move() -> None:
    plan, shard, _ = moving()
    plan = next_plan(SPEC, plan, seen("ab"), {}, SPEC.prepare_s - 0.1)
    assert shard in plan.moves
    plan = next_plan(SPEC, plan, seen("ab"), {}, 0.2)
    assert shard not in plan.moves
    assert plan.owners[shard] == "a"
    assert plan.slow[shard] == ("b",)
    assert not plan.failed
    died = next_plan(SPEC, plan, seen("b"), {}, 0.0)
    assert died.owners[shard] == "b", "rather than none"
    assert not died.slow
    restarted = seen("a") | {"b": SeenMember(1000)}
    assert not next_plan(SPEC, plan, restarted, {}, 0.0).slow


def test_a_target_that_came_back_has_not_prepared() -> None:
    plan, shard, move = moving()
    back = seen("a") | {"b": SeenMember(1000, prepared=frozenset({move.id}))}
    plan = next_plan(SPEC, plan, back, {shard: "a"}, 0.0)
    assert plan.moves[shard].incarnation == 1000
    assert plan.moves[shard].id != move.id
    assert not plan.moves[shard].ready


def test_the_target_takes_over_from_a_source_that_dies() -> None:
    plan, _shard, _ = moving()
    plan = next_plan(SPEC, plan, seen("b"), {}, 0.0)
    assert set(plan.owners) == {"b"}
    assert not plan.moves


def test_a_body_that_fails_on_a_target_sends_the_shard_back() -> None:
    plan, shard, move = moving()
    members = seen("a") | seen("b", prepared=frozenset({move.id}), failed={shard: "boom"})
    plan = next_plan(SPEC, plan, members, {}, 0.0)
    assert plan.owners[shard] == "a"
    assert shard not in plan.moves


def test_only_the_shards_of_a_dead_member_move() -> None:
    spec = ShardSpec(count=100)
    before = settled(spec, "abcd")
    after = settled(spec, "abc", before)
    changed = [n for n in range(100) if before.owners[n] != after.owners[n]]
    assert changed == [n for n in range(100) if before.owners[n] == "d"]


def test_grace_is_counted_in_the_plan() -> None:
    spec = replace(SPEC, grace_s=10.0)
    plan = settled(spec, "ab")
    plan = next_plan(spec, plan, seen("a"), {}, 1.0)
    assert plan.grace == {"b": 10.0}
    assert plan.loads()["b"] == 3
    plan = ShardPlan.decode(json.loads(json.dumps(plan.encode())))  # read by another controller
    plan = next_plan(spec, plan, seen("a"), {}, 9.0)
    assert plan.grace == {"b": 1.0}
    assert plan.loads()["b"] == 3
    assert next_plan(spec, plan, seen("ab"), {}, 5.0).grace == {}
    assert next_plan(spec, plan, seen("a"), {}, 5.0).loads() == {"a": 6}


def test_a_newcomer_gets_nothing_that_is_kept_for_another() -> None:
    spec = replace(SPEC, grace_s=10.0)
    plan = next_plan(spec, settled(spec, "ab"), seen("ac"), {}, 0.0)
    assert plan.loads() == {"a": 2, "b": 3, "c": 1}
    assert {move.to for move in plan.moves.values()} == {"c"}


def test_a_drained_member_keeps_its_shards_until_others_are_ready() -> None:
    spec = replace(SPEC, weights={"b": 0})
    plan = next_plan(spec, settled(SPEC, "ab"), seen("ab"), {}, 0.0)
    assert [plan.owners[shard] for shard in plan.moves] == ["b"] * 3
    assert {move.to for move in plan.moves.values()} == {"a"}


def test_with_weight_zero_everywhere_nothing_moves_and_the_plan_says_why() -> None:
    plan = settled(SPEC, "ab")
    after = next_plan(replace(SPEC, weights={"a": 0, "b": 0}), plan, seen("ab"), {}, 0.0)
    assert after.owners == plan.owners
    assert "0 eligible members" in after.note
    assert "weight 0: a, b" in after.note


def test_nothing_is_assigned_below_min_members() -> None:
    spec = replace(SPEC, min_members=2)
    plan = next_plan(spec, ShardPlan(), seen("a"), {}, 0.0)
    assert set(plan.owners) == {NO_MEMBER}
    assert "2 are needed" in plan.note
    plan = next_plan(spec, plan, seen("ab"), {}, 0.0)
    assert plan.loads() == {"a": 3, "b": 3}
    plan = next_plan(spec, plan, seen("a"), {}, 0.0)
    assert plan.loads() == {"a": 6}, "once it has started, fewer are enough"
    plan = next_plan(spec, plan, {}, {}, 0.0)
    assert not any(next_plan(spec, plan, seen("b"), {}, 0.0).owners), "it starts again"


def test_a_body_that_keeps_failing_is_moved_and_then_set_aside() -> None:
    plan = settled(SPEC, "abc")
    first = plan.owners[0]
    rest = "abc".replace(first, "")
    plan = next_plan(SPEC, plan, seen(rest) | seen(first, failed={0: "boom"}), {}, 0.0)
    second = plan.owners[0]
    assert second in rest
    assert plan.failed[0] == (first,)
    members = seen("abc", failed={0: "bang"})
    plan = next_plan(SPEC, plan, members, {}, 0.0)
    assert plan.owners[0] == NO_MEMBER
    assert plan.aside == {0: "bang"}
    assert next_plan(SPEC, plan, members, {}, 0.0) == plan
    plan = next_plan(replace(SPEC, retry=1), plan, members, {}, 0.0)
    assert plan.owners[0] != NO_MEMBER, "old reports do not count"
    assert not plan.aside


def test_a_shard_that_failed_on_one_member_is_tried_on_it_before_it_is_set_aside() -> None:
    """Nothing is left without an owner in silence."""
    spec = ShardSpec(count=1)
    plan = next_plan(spec, settled(spec, "a"), seen("b") | seen("a", failed={0: "boom"}), {}, 0.0)
    assert plan.owners == ("b",)
    assert plan.failed == {0: ("a",)}
    plan = next_plan(spec, plan, seen("a"), {}, 0.0)
    assert plan.owners == ("a",)
    plan = next_plan(spec, plan, seen("a", failed={0: "boom"}), {}, 0.0)
    assert plan.aside == {0: "boom"}
    assert plan.owners == (NO_MEMBER,)
    assert next_plan(spec, plan, seen("a"), {}, 0.0) == plan
    came = next_plan(spec, plan, seen("ac"), {}, 0.0)
    assert came.owners == ("c",)
    assert not came.aside
    restarted = next_plan(spec, plan, {"a": SeenMember(1000)}, {}, 0.0)
    assert restarted.owners == ("a",)
    assert not restarted.failed


def test_a_drained_member_keeps_a_shard_that_fails_on_all_others() -> None:
    spec = ShardSpec(count=1)
    members = seen("b") | seen("a", failed={0: "boom"})
    plan = next_plan(spec, settled(spec, "a"), members, {}, 0.0)
    drained = next_plan(replace(spec, weights={"b": 0}), plan, members, {}, 0.0)
    assert drained.owners == ("b",)
    assert not drained.moves


@pytest.mark.parametrize("shard", [-1, 6])
def test_a_report_about_a_shard_that_does_not_exist_is_ignored(shard: int) -> None:
    members = seen("b") | seen("a", failed={shard: "boom"})
    plan = next_plan(SPEC, settled(SPEC, "a"), members, {}, 0.0)
    assert set(plan.owners) == {"a"}
    assert not plan.failed
    assert ShardPlan.decode(plan.encode()) == plan


def test_pause_freezes_the_plan() -> None:
    plan, _, _ = moving()
    frozen = next_plan(replace(SPEC, paused=True, count=9), plan, {}, {}, 99.0)
    assert replace(frozen, note="") == plan
    assert frozen.note.startswith("paused: nothing is assigned")
    assert frozen.note.endswith("; owners that are gone: a")


def test_the_weights_in_force_are_shown() -> None:
    spec = replace(SPEC, weights={"a": 0})
    plan = next_plan(spec, settled(SPEC, "ab"), seen("a") | seen("b"), {}, 0.0)
    assert [plan.members[name].weight for name in "ab"] == [0, 1]
    nobody = replace(SPEC, weights={"a": 0, "b": 0})
    plan = next_plan(nobody, settled(SPEC, "ab"), seen("a") | seen("b"), {}, 0.0)
    assert plan.note.startswith("nothing is assigned anew, and owners keep their shards: 0 elig")


def test_a_new_count_is_a_new_generation() -> None:
    plan = settled(SPEC, "ab")
    more = next_plan(replace(SPEC, count=8), plan, seen("ab"), {}, 0.0)
    assert more.generation == 2
    assert more.count == 8
    assert more.owners[:6] == plan.owners
    fewer = next_plan(replace(SPEC, count=2), more, seen("ab"), {}, 0.0)
    assert fewer.generation == 3
    assert fewer.count == 2


def test_with_a_barrier_no_record_stands_between_two_generations() -> None:
    spec = replace(SPEC, barrier=True)
    plan = settled(spec, "ab")
    spec = replace(spec, count=8)
    closed = next_plan(spec, plan, seen("ab"), {0: "a"}, 0.0)
    assert not closed.open
    assert closed.generation == 1
    assert not any(closed.planned("a", 97, n, target_ready=False) for n in range(8))
    assert next_plan(spec, closed, seen("ab"), {0: "a"}, 0.0) == closed
    opened = next_plan(spec, closed, seen("ab"), {}, 0.0)
    assert opened.open
    assert opened.generation == 2
    assert opened.count == 8


def test_rebalance_makes_loads_equal_once() -> None:
    spec = ShardSpec(count=10)
    plan = settled(spec, "ab", settled(spec, "a"))
    assert plan.loads() == {"a": 6, "b": 4}
    plan = settled(replace(spec, rebalance=1), "ab", plan)
    assert plan.loads() == {"a": 5, "b": 5}
    assert plan.rebalanced == 1


def test_a_stated_zone_can_be_overruled() -> None:
    spec = replace(SPEC, standbys=1, zones={"c": "x"})
    members = seen("ac", zone="liar") | seen("b", zone="y")
    assert eligible(spec, members)["c"].zone == "x"


class Model:
    """Members that obey the plan, with delays: prepare, end, claim."""

    def __init__(self, seed: int, count: int) -> None:
        self.rng = random.Random(seed)
        self.spec = ShardSpec(count=count, moves_at_once=self.rng.choice([1, 3, 50]))
        self.plan = ShardPlan()
        self.members: dict[str, SeenMember] = {}
        self.records: dict[int, str] = {}
        self.revision = 0
        self.handovers = 0

    def late(self) -> bool:
        return self.rng.random() < 0.3

    def turn(self) -> None:
        """Every member does what it is entitled to do, some of it later."""
        for shard in range(self.plan.count):
            move = self.plan.moves.get(shard)
            if move and move.to in self.members and not self.late():
                member = self.members[move.to]
                self.members[move.to] = member._replace(prepared=member.prepared | {move.id})
        entitled = {
            shard: name
            for shard in range(self.plan.count)
            for name, member in self.members.items()
            if self.plan.planned(name, member.incarnation, shard, target_ready=self.ready(shard))
        }
        for shard, name in list(self.records.items()):
            if entitled.get(shard) != name and not self.late():
                del self.records[shard]
                self.handovers += 1
        for shard, name in entitled.items():
            if shard not in self.records and not self.late():
                self.records[shard] = name

    def ready(self, shard: int) -> bool:
        move = self.plan.moves.get(shard)
        target = self.members.get(move.to) if move else None
        return bool(
            move
            and target
            and target.incarnation == move.incarnation
            and move.id in target.prepared
        )

    def join(self, name: str) -> None:
        self.revision += 1
        self.members[name] = SeenMember(self.revision, self.rng.choice([1, 1, 2]))

    def die(self, name: str) -> None:
        self.members.pop(name, None)
        self.records = {shard: who for shard, who in self.records.items() if who != name}

    def step(self) -> None:
        self.plan = ShardPlan.decode(json.loads(json.dumps(self.plan.encode())))
        self.plan = next_plan(self.spec, self.plan, self.members, dict(self.records), 0.2)

    def calm(self) -> None:
        for _ in range(40 + 10 * self.spec.count):
            before = self.plan, self.members.copy(), self.records.copy()
            self.step()
            self.turn()
            done = not self.plan.moves and len(self.records) == self.spec.count
            if done and (self.plan, self.members, self.records) == before:
                break


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30))
def test_after_any_history_everything_is_owned_and_nothing_moves(seed: int, count: int) -> None:
    model = Model(seed, count)
    for _ in range(40):
        match model.rng.randrange(6):
            case 0:
                model.join(model.rng.choice("abcde"))
            case 1:
                model.die(model.rng.choice("abcde"))
            case 2:
                weights = {model.rng.choice("abcde"): model.rng.choice([0, 1, 2])}
                model.spec = model.spec.change(weights=weights)
            case 3:
                model.step()
            case _:
                model.turn()
    model.spec = model.spec.change(weights={})
    model.join("f")
    model.calm()
    assert set(model.records) == set(range(count))
    assert dict(enumerate(model.plan.owners)) == model.records
    assert not model.plan.moves
    assert not model.plan.note
    found = eligible(model.spec, model.members)
    for name, target in targets(count, found).items():
        assert target.low <= model.plan.loads().get(name, 0) <= target.high
    quiet = model.plan
    model.step()
    assert model.plan == quiet


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from(["join", "leave", "drain"]))
def test_one_change_costs_the_moves_that_the_planner_needs(
    seed: int, count: int, change: str
) -> None:
    model = Model(seed, count)
    for name in "abcd":
        model.join(name)
    model.calm()
    before = list(model.plan.owners)
    if change == "join":
        model.join("e")
    elif change == "leave":
        model.die("a")
    else:
        model.spec = model.spec.change(weights={"a": 0})
    found = eligible(model.spec, model.members)
    wanted = choose_owners(before, found)
    needed = sum(
        old != new and old in model.members for old, new in zip(before, wanted, strict=True)
    )
    model.handovers = 0
    model.calm()
    assert model.handovers == needed


def test_a_controller_that_forgets_moves_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: every step begins without the moves that are under way."""
    step = Model.step

    def forget(self: Model) -> None:
        self.plan = replace(self.plan, moves={})
        step(self)

    monkeypatch.setattr(Model, "step", forget)
    with pytest.raises(AssertionError):
        for seed in range(20):
            test_one_change_costs_the_moves_that_the_planner_needs.hypothesis.inner_test(  # type: ignore[attr-defined]
                seed, 20, "join"
            )


class Indescribable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("a detached object")

    __str__ = __repr__


def test_an_exception_that_cannot_be_described_is_reported_by_its_type() -> None:
    failures = BodyFailures()
    failures.ended(3, Indescribable(), ran_s=0.0, now=0.0, limit=1)
    assert failures.given_up == {3: "Indescribable"}
    assert str(_Raised(Indescribable())) == "Indescribable"
    log_shard_error("shard_body_failed", "set", 3, Indescribable())
