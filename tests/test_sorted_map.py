"""The sorted map of the keyspace against a dict."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from doyen.quorum.keyspace import sorted_map
from doyen.quorum.keyspace.sorted_map import FULL, SortedMap


class Sorted(RuleBasedStateMachine):
    """The sorted map against a dict, with blocks small enough to split and disappear."""

    @initialize(items=st.dictionaries(st.integers(0, 999), st.integers(1, 9)))
    def begin(self, items: dict[int, int]) -> None:
        self.model = dict(items)
        self.real: SortedMap[int, int] = SortedMap()
        self.real.append(sorted(items), [items[key] for key in sorted(items)])
        self.pictures: list[tuple[Any, list[tuple[int, int]]]] = []

    @rule(key=st.integers(0, 999), run=st.integers(1, 700), value=st.integers(1, 9))
    def fill(self, key: int, run: int, value: int) -> None:
        for each in range(key, key + run):
            self.real.put(each, value)
            self.model[each] = value

    @rule(key=st.integers(0, 999), run=st.integers(1, 700))
    def clear(self, key: int, run: int) -> None:
        for each in range(key, key + run):
            if each in self.model:
                self.real.remove(each)
                del self.model[each]
            else:
                with pytest.raises(KeyError):
                    self.real.remove(each)

    @rule(key=st.integers(0, 999))
    def look_at_one(self, key: int) -> None:
        assert self.real.get(key) == self.model.get(key)

    @rule(key=st.integers(0, 999), to=st.integers(0, 999))
    def between(self, key: int, to: int) -> None:
        expected = [value for each, value in sorted(self.model.items()) if key <= each < to]
        assert self.real.between(key, to) == expected

    @rule()
    def take(self) -> None:
        self.pictures.append((self.real.blocks(), sorted(self.model.items())))

    @rule(key=st.integers(-1, 2000))
    def look(self, key: int) -> None:
        assert self.real.get(key) == self.model.get(key)
        assert list(self.real.ascending(key)) == sorted(
            item for item in self.model.items() if item[0] >= key
        )
        detail = [block for block, _ in self.real.blocks_between(key, key + 40)]
        found = [each for block in detail for each in block if key <= each < key + 40]
        assert found == sorted(each for each in self.model if key <= each < key + 40)
        assert all(block[-1] >= key and block[0] < key + 40 for block in detail[1:])
        below = sorted((item for item in self.model.items() if item[0] < key), reverse=True)
        assert list(self.real.descending(key)) == below

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "real"):
            assert len(self.real) == len(self.model)
            assert all(0 < len(block[0]) <= FULL for block in self.real._blocks)
            assert self.real._firsts == [block[0][0] for block in self.real._blocks]

    def teardown(self) -> None:
        for picture, expected in getattr(self, "pictures", []):
            shown = [item for each in picture for item in zip(*each, strict=True)]
            assert shown == expected


TestSorted = Sorted.TestCase
TestSorted.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_a_replaced_value_is_found_wherever_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced values are kept apart, at most so many, until something is read in order."""
    monkeypatch.setattr(sorted_map, "REPLACED", 8)
    numbers: SortedMap[int, int] = SortedMap()
    numbers.append(range(100, 300), range(100, 300))
    before = [*numbers.blocks()]
    for number in range(100, 300):
        numbers.put(number, -number)
        numbers.put(number, number + 1)
        assert len(numbers.replaced) <= 8
    for number in range(50):  # which moves the blocks of the others
        numbers.put(number, number)
    assert [numbers.get(number) for number in (50, 100, 299)] == [None, 101, 300]
    for number in [*range(50), 298]:
        numbers.remove(number)
    assert 298 not in numbers.replaced
    assert [numbers.get(number) for number in (100, 298, 299)] == [101, None, 300]
    assert [*numbers.descending(300)][:2] == [(299, 300), (297, 298)]
    assert not numbers.replaced
    assert not numbers._places
    assert [value for _, values in before for value in values] == [*range(100, 300)]


def test_a_snapshot_begins_without_putting_replaced_values_into_their_blocks() -> None:
    """That takes milliseconds if there are many. They are put in as the snapshot is read."""
    numbers: SortedMap[int, int] = SortedMap()
    numbers.append(range(300), range(300))
    for number in range(0, 300, 50):
        numbers.put(number, -number)
    held = [*numbers._blocks]
    snapshot = numbers.blocks()
    assert numbers._blocks == held
    assert len(numbers.replaced) == 6
    for number in range(0, 300, 50):
        numbers.put(number, 1)
    numbers.remove(299)
    shown = [item for block in snapshot for item in zip(*block, strict=True)]
    assert shown == [(number, number if number % 50 else -number) for number in range(300)]


def test_a_replaced_value_holds_no_key_of_its_own() -> None:
    words: SortedMap[str, int] = SortedMap()
    held, same = ("a long key" * times for times in (100, 100))
    words.put(held, 1)
    words.put(same, 2)
    words.put("a long key" * 100, 3)
    assert [(key is held, value) for key, value in words.replaced.items()] == [(True, 3)]
