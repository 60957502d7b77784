"""The planner of shards against a brute-force oracle, and the encoding of specs and plans."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen.errors import BadDocument, ConfigError
from doyen.manage.shards.plan import NO_MEMBER, Move, PlannedMember, ShardPlan
from doyen.manage.shards.planner import Eligible, choose_owners, choose_standbys
from doyen.manage.shards.spec import PLAN_BYTES, ShardSpec

NAMES = ["a", "b", "c", "gone"]
ELIGIBLE = st.dictionaries(
    st.sampled_from(NAMES[:3]),
    st.builds(
        Eligible, st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0]), st.sampled_from(["", "x", "y"])
    ),
    min_size=1,
)
OWNERS = st.lists(st.sampled_from([*NAMES, NO_MEMBER]), min_size=1, max_size=6)
PINS = st.dictionaries(st.integers(0, 5), st.sampled_from(NAMES), max_size=2)


def is_balanced(
    owners: Sequence[str], members: Mapping[str, Eligible], pinned: set[int], exact: bool
) -> bool:
    """Whether each load is near the level of a vessel into which water is poured: members have
    their pinned shards at the bottom, and the others are spread evenly above."""
    free = [owner for shard, owner in enumerate(owners) if shard not in pinned]
    fixed = Counter(owners[shard] for shard in pinned)
    weight = {name: Fraction(each.weight) for name, each in members.items()}
    below = sorted(members, key=lambda name: fixed[name] / weight[name])
    level = Fraction(0)
    for last in range(1, len(below) + 1):
        content = len(free) + sum(fixed[name] for name in below[:last])
        level = content / sum((weight[name] for name in below[:last]), Fraction(0))
        if last < len(below) and level <= fixed[below[last]] / weight[below[last]]:
            break
    for name in members:
        ideal = max(Fraction(0), level * weight[name] - fixed[name])
        distance = abs(free.count(name) - ideal)
        if distance > 1 or (exact and distance >= 1):
            return False
    return True


def moved(before: Sequence[str], after: Sequence[str], members: Mapping[str, Eligible]) -> int:
    return sum(old in members and old != new for old, new in zip(before, after, strict=True))


def check(
    current: Sequence[str],
    members: Mapping[str, Eligible],
    pins: Mapping[int, str],
    exact: bool,
    choose: Callable[..., list[str]] = choose_owners,
) -> None:
    """Compare the planner with every assignment that there is."""
    pinned = {n for n, name in pins.items() if name in members and n < len(current)}
    owners = choose(current, members, pins=pins, exact=exact)

    def is_allowed(found: Sequence[str]) -> bool:
        return all(found[n] == pins[n] for n in pinned) and is_balanced(
            found, members, pinned, exact
        )

    assert set(owners) <= set(members)
    assert is_allowed(owners)
    everything = itertools.product(sorted(members), repeat=len(current))
    fewest = min(moved(current, each, members) for each in everything if is_allowed(each))
    assert moved(current, owners, members) == fewest


@settings(max_examples=300, deadline=None)
@given(OWNERS, ELIGIBLE, PINS, st.booleans())
def test_the_planner_moves_as_few_shards_as_possible(
    current: list[str], members: dict[str, Eligible], pins: dict[int, str], exact: bool
) -> None:
    check(current, members, pins, exact)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([*"abcdefg", NO_MEMBER]), min_size=1, max_size=200),
    st.dictionaries(
        st.sampled_from([*"abcdefgh"]), st.builds(Eligible, st.sampled_from([1, 2, 5]))
    ),
    st.lists(st.sampled_from([*"abcdefgh"]), min_size=200, max_size=200),
)
def test_balance_determinism_and_rest_at_any_size(
    current: list[str], members: dict[str, Eligible], standbys: list[str]
) -> None:
    """With standbys to prefer: balanced, equal for equal input, and nothing moves the next time."""
    owners = choose_owners(current, members, standbys=[standbys])
    assert owners == choose_owners(current, dict(reversed(members.items())), standbys=[standbys])
    if not members:
        assert owners == current
        return
    assert is_balanced(owners, members, set(), False)
    assert moved(current, owners, members) == moved(
        current, choose_owners(current, members), members
    )
    assert choose_owners(owners, members) == owners


def test_one_move_at_a_time_adds_up_to_the_fewest() -> None:
    """The controller makes some moves, then plans again from there."""
    members = {name: Eligible() for name in "abcd"}
    current = ["a"] * 10 + ["b"] * 9 + ["c"] * 8
    steps, fewest = 0, moved(current, choose_owners(current, members), members)
    while (wanted := choose_owners(current, members)) != current:
        shard = next(n for n, name in enumerate(current) if wanted[n] != name)
        current[shard] = wanted[shard]
        steps += 1
    assert steps == fewest


def test_preferred_shards_count() -> None:
    """A member to which half of all shards are pinned gets none of the others."""
    members = {name: Eligible() for name in "abc"}
    pins = dict.fromkeys(range(6), "a")
    owners = choose_owners([NO_MEMBER] * 12, members, pins=pins, exact=True)
    assert Counter(owners) == {"a": 6, "b": 3, "c": 3}


def test_an_orphan_goes_to_its_standby() -> None:
    members = {name: Eligible() for name in "bcd"}
    current = ["gone"] * 3 + ["b", "c", "d"] * 3
    assert choose_owners(current, members, standbys=[["d", "b", "c"]])[:3] == ["d", "b", "c"]
    assert choose_owners(current, members, standbys=[["gone"] * 3])[:3] == ["b", "c", "d"]


def test_a_member_on_which_a_shard_failed_does_not_get_it() -> None:
    members = {name: Eligible() for name in "ab"}
    assert choose_owners(["a", "a"], members, banned={0: ["a"]})[0] == "b"
    assert choose_owners(["a", "a"], members, banned={0: ["a", "b"]})[0] == NO_MEMBER
    assert choose_owners([NO_MEMBER, "a"], members, banned={0: ["a", "b"]})[0] == "b"
    assert choose_owners(["a", "a"], members, banned={0: ["a"]}, slow={0: ["b"]})[0] == "b"
    assert choose_owners(["c", "a"], members, slow={0: ["a", "b"]})[0] == "b"
    assert choose_owners(["a", "a"], members, slow={0: ["b"]}, pins={0: "b"})[0] == "a"
    assert choose_owners(["a", "a"], members, banned={0: ["b"]}, pins={0: "b"})[0] == "a"


@settings(max_examples=200, deadline=None)
@given(OWNERS, ELIGIBLE, st.integers(0, 3), st.lists(OWNERS, max_size=3))
def test_standbys_are_others_in_other_zones(
    owners: list[str], members: dict[str, Eligible], number: int, current: list[list[str]]
) -> None:
    columns = choose_standbys(owners, members, number, current)
    assert len(columns) == number
    zones = {each.zone for each in members.values()}
    for shard, owner in enumerate(owners):
        chosen = [column[shard] for column in columns if column[shard] != NO_MEMBER]
        others = {name for name in members if name != owner}
        if owner in members and len(zones) > 1:
            others = {name for name in others if members[name].zone != members[owner].zone}
        assert len(set(chosen)) == len(chosen) == min(number, len(others))
        assert set(chosen) <= others
    assert choose_standbys(owners, members, number, columns) == columns


def without_hysteresis(current: Sequence[str], members: Any, **options: Any) -> list[str]:
    return choose_owners(current, members, **options | {"exact": True})


def from_nothing(current: Sequence[str], members: Any, **options: Any) -> list[str]:
    return choose_owners([NO_MEMBER] * len(current), members, **options)


def pins_uncounted(current: Sequence[str], members: Any, **options: Any) -> list[str]:
    """Preferred shards come on top of an equal share of the others."""
    pins = options.pop("pins")
    pinned = {shard: name for shard, name in pins.items() if name in members}
    free = [owner for shard, owner in enumerate(current) if shard not in pinned]
    wanted = iter(choose_owners(free, members, **options))
    return [pinned.get(shard) or next(wanted) for shard in range(len(current))]


def round_robin(current: Sequence[str], members: Any, **_: Any) -> list[str]:
    names = sorted(members)
    return [names[shard % len(names)] for shard in range(len(current))]


def keeps_everything(current: Sequence[str], members: Any, **options: Any) -> list[str]:
    wanted = choose_owners(current, members, **options)
    return [old if old in members else new for old, new in zip(current, wanted, strict=True)]


@pytest.mark.parametrize(
    "mutant",
    [without_hysteresis, from_nothing, pins_uncounted, round_robin, keeps_everything],
)
def test_the_oracle_sees_a_wrong_planner(mutant: Callable[..., list[str]]) -> None:
    members = {"a": Eligible(), "b": Eligible(), "c": Eligible(2.0)}

    def is_seen(pins: dict[int, str], current: Sequence[str]) -> bool:
        try:
            check(current, members, pins, False, mutant)
        except AssertionError:
            return True
        return False

    assert any(
        is_seen(pins, current)
        for count, pins in ((4, {}), (5, {0: "a"}))
        for current in itertools.product("abc", repeat=count)
    )


# Documents.


def test_a_plan_for_ten_thousand_shards_with_two_standbys_is_small() -> None:
    members = {f"server-{n}.example.com": Eligible(zone=f"zone-{n % 3}") for n in range(20)}
    owners = tuple(choose_owners([NO_MEMBER] * 10_000, members))
    standbys = choose_standbys(owners, members, 2)
    about = {
        name: PlannedMember(n, "zone", f"https://{name}:8443") for n, name in enumerate(members)
    }
    plan = ShardPlan(generation=1, owners=owners, standbys=standbys, members=about)
    encoded = json.dumps(plan.encode(), separators=(",", ":")).encode()
    assert len(encoded) < 100_000 < PLAN_BYTES
    assert ShardPlan.decode(json.loads(encoded)) == plan
    assert max(Counter(standbys[0]).values()) <= 1.5 * 10_000 / 20


def test_a_plan_survives_its_document() -> None:
    plan = ShardPlan(
        generation=3,
        open=False,
        spec=12,
        owners=("a", NO_MEMBER, "b"),
        standbys=(("b", "a", NO_MEMBER),),
        members={"a": PlannedMember(7, "x", "http://a:1"), "é": PlannedMember()},
        moves={2: Move("c", 9, 4, ready=True, stuck=True, age_s=1.5)},
        last_move=4,
        grace={"b": 2.5},
        failed={1: ("a", "b")},
        slow={2: ("c",)},
        aside={1: "boom"},
        retry=1,
        rebalanced=2,
        note="why",
    )
    assert ShardPlan.decode(json.loads(json.dumps(plan.encode()))) == plan


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"generation": 1, "open": True, "names": [], "owners": [0]},
        {"generation": 1, "open": True, "names": ["a"], "owners": [-2]},
        {"generation": 1, "open": True, "names": ["a"], "owners": "0"},
        {"generation": 1, "open": True, "names": ["a"], "owners": [0], "moves": {"0": {}}},
        {"generation": 1, "open": True, "names": ["a"], "owners": [0], "standbys": [[]]},
        {"generation": 1, "open": True, "names": ["a"], "owners": [0], "failed": {"1": ["a"]}},
        {"generation": 1, "open": True, "names": ["a"], "owners": [0], "slow": {"1": ["a"]}},
        {"generation": 1, "open": True, "names": ["a"], "owners": [0], "unheld": [-1]},
        {"generation": float("inf"), "open": True, "names": [], "owners": []},
        {"generation": 1, "open": True, "names": [], "owners": [], "grace": {"a": float("nan")}},
    ],
)
def test_what_is_not_a_plan_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadDocument, match="not the plan"):
        ShardPlan.decode(body)


def test_a_spec_survives_its_document() -> None:
    spec = ShardSpec(
        count=8, pins={3: "a"}, weights={"b": 0}, zones={"a": "x"}, standbys=1, barrier=True
    )
    assert ShardSpec.decode(json.loads(json.dumps(spec.encode()))) == spec
    assert ShardSpec(count=8).encode() == {"count": 8}
    assert ShardSpec.decode({"count": 8, "of a later release": 1}) == ShardSpec(count=8)
    assert spec.change(count=9).count == 9


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"count": 0}, "count is an integer of 1 or more"),
        ({"count": True}, "count is an integer"),
        ({"count": 100_000}, "would take about 400000 bytes, more than 262144"),
        ({"count": 30_000, "standbys": 2}, "use fewer shards or standbys, or several"),
        ({"weights": {"a": -1}}, "a weight is a number from 0"),
        ({"weights": {"a": float("nan")}}, "a weight is a number from 0"),
        ({"weights": {"": 1}}, "a member's name is a string"),
        ({"zones": {"a": 1}}, "a zone is a string"),
        ({"pins": {-1: "a"}}, "pins are by shard number"),
        ({"grace_s": "soon"}, "grace_s is 0 s or more"),
        ({"paused": "yes"}, "paused is true or false"),
        ({"colour": "red"}, "has no field 'colour'"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ShardSpec(count=8).change(**changes)


@pytest.mark.parametrize(
    "body", [{}, {"count": "8"}, {"count": 8, "pins": {"x": "a"}}, {"pins": 3}]
)
def test_what_is_not_a_spec_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadDocument, match="not the spec"):
        ShardSpec.decode(body)
