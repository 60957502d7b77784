"""Immutable values: what their users know from frozen dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from doyen import Leader, Member, PastTerm, Unreachable
from doyen.events import Elected, Waiting
from doyen.lease.timing import Timing

LEADER = Leader("billing", "server1", 7, {"zone": "a"}, since=1.5)


def test_they_are_made_by_place_or_by_name_and_have_defaults() -> None:
    assert Leader("e", "a", 1).meta == {}
    assert Leader("e", "a", 1).meta is not Leader("e", "a", 1).meta
    assert PastTerm(name="a", token=1, since=2.0) == PastTerm("a", 1, 2.0, None, "")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), {}),
        (("e", "a"), {}),
        (("e", "a", 1), {"token": 2}),
        (("e", "a", 1), {"tokens": 2}),
        (("e", "a", 1, {}, "elections", 0.0, 0.0, 0.0, False, 1), {}),
    ],
)
def test_other_arguments_than_the_fields_are_refused(
    given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=r"Leader\(election"):
        Leader(*given, **named)


def test_options_and_events_are_given_by_name() -> None:
    positional: Any = Timing
    with pytest.raises(TypeError, match="Timing"):
        positional(6.0)
    with pytest.raises(TypeError, match="token"):
        Elected(election="e", name="a", lease="l", valid_until=1.0)  # type: ignore[call-arg]


def test_fields_that_are_not_compared_make_no_difference() -> None:
    other = dataclasses.replace(LEADER, since=None, remaining_s=3.0)
    assert other == LEADER
    assert other.since is None
    assert dataclasses.replace(LEADER, token=8) != LEADER
    assert Leader("e", "a", 1) != ("e", "a", 1)
    waiting = Waiting(election="e", name="a", behind="b")
    assert waiting == dataclasses.replace(waiting, joined=True)
    assert hash(waiting) == hash(dataclasses.replace(waiting, joined=True))
    with pytest.raises(TypeError, match="unhashable"):
        hash(LEADER)


def test_they_do_not_change() -> None:
    value: Any = copy.copy(LEADER)
    with pytest.raises(dataclasses.FrozenInstanceError, match="token"):
        value.token = 8
    with pytest.raises(dataclasses.FrozenInstanceError, match="more"):
        value.more = 8
    with pytest.raises(dataclasses.FrozenInstanceError, match="token"):
        del value.token
    assert value == LEADER


def test_the_standard_library_takes_them_for_dataclasses() -> None:
    assert dataclasses.is_dataclass(LEADER)
    assert [each.name for each in dataclasses.fields(Member)][:2] == ["name", "incarnation"]
    assert dataclasses.asdict(PastTerm("a", 1, 2.0))["since"] == 2.0
    assert str(inspect.signature(PastTerm)).startswith("(name: 'str', token: 'int', since")
    assert Unreachable[Leader](1.0, LEADER) == Unreachable(1.0, LEADER)
    for each in (LEADER, Unreachable(1.0, LEADER, "gone"), Timing(), Waiting(election="e",
                 name="a", behind="b", joined=True)):  # fmt: skip
        assert repr(pickle.loads(pickle.dumps(each))) == repr(copy.deepcopy(each)) == repr(each)


def test_they_match_by_place_and_by_name() -> None:
    match LEADER:
        case Leader("billing", name, token=token):
            assert (name, token) == ("server1", 7)
        case _:
            pytest.fail("no match")


def test_they_show_their_fields() -> None:
    assert repr(PastTerm("a", 1, 2.0)) == (
        "PastTerm(name='a', token=1, since=2.0, until=None, end='', reason='', leads=False)"
    )
