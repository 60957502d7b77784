"""A sorted map whose snapshots are cheap, however large it is.

Keys are kept in small blocks that never change: a write replaces a block. A snapshot is therefore
a copy of the list of blocks, costs no copying of entries, and may be read by another thread while
the map goes on changing.

Blocks consist of tuples because CPython's garbage collector stops tracking tuples whose elements it
does not track: a map of a million plain keys does not lengthen its pauses. Lists would be faster to
write to, and are always traversed.

A value that replaces another one is kept apart (`replaced`), so that keys that are written again
and again cost no block each time. Up to `REPLACED` of them are put into their blocks together: when
there are more, and before anything is read in order, except by a snapshot, which puts them in as it
is read. Until then the value that was replaced is in its block and so in memory; a large one is
therefore replaced in its block at once (`APART`).

Invariants: no block is empty; the keys within a block ascend, and so do the blocks; every replaced
key is in a block, and its value there is not valid. Pure; imports nothing of doyen.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

__all__ = ["Block", "SortedMap"]

FULL = 32
"""A block that grows beyond this is split. A write copies one block."""

REPLACED = 2048
"""How many replaced values are kept apart. To put them into their blocks takes 5 to 9 ms if each
has a block of its own, among a million keys."""

APART = 1024
"""The largest value that may be kept in memory after it was replaced, in bytes. `REPLACED` of them
take 2 MiB, which no quota counts."""

K = TypeVar("K", int, str, bytes)
V = TypeVar("V")


_REPLACED = -1
"""The position of a key whose value is kept apart."""

Block: TypeAlias = tuple[tuple[K, ...], tuple[V, ...]]
"""Some keys, in order, and their values."""


class SortedMap(Generic[K, V]):
    """A map in the order of its keys.

    >>> numbers = SortedMap[str, int]()
    >>> numbers.put("b", 2); numbers.put("a", 1)
    >>> snapshot = numbers.blocks()
    >>> numbers.remove("a")
    >>> [keys for keys, _ in snapshot], list(numbers.ascending(""))
    ([('a', 'b')], [('b', 2)])
    """

    __slots__ = ("_blocks", "_firsts", "_places", "_size", "replaced")

    def __init__(self) -> None:
        self._blocks: list[Block[K, V]] = []
        self._firsts: list[K] = []
        self.replaced: dict[K, V] = {}
        """Values that replaced others and are not in their blocks. Any of them may be replaced in
        place."""
        self._places: dict[K, tuple[int, int]] = {}
        """Where each replaced key was when it was replaced first. Blocks may have moved since."""
        self._size = 0

    def append(self, keys: Sequence[K], values: Sequence[V]) -> None:
        """Add keys in ascending order, all greater than those in the map."""
        step = FULL * 3 // 4
        for at in range(0, len(keys), step):
            upto = at + step
            self._blocks.append((tuple(keys[at:upto]), tuple(values[at:upto])))
            self._firsts.append(keys[at])
        self._size += len(keys)

    def __len__(self) -> int:
        return self._size

    def get(self, key: K) -> V | None:
        """The value at `key`, or None."""
        return self.seek(key)[2]

    def seek(self, key: K) -> tuple[int, int, V | None]:
        """The position of `key`, or where it would be inserted, for `put`; and its value."""
        replaced = self.replaced.get(key)
        if replaced is not None:
            return _REPLACED, _REPLACED, replaced
        index = bisect_right(self._firsts, key) - 1
        if index < 0:
            return 0, 0, None
        keys, values = self._blocks[index]
        at = bisect_left(keys, key)
        if at < len(keys) and keys[at] == key:
            return index, at, values[at]
        return index, at, None

    def put(
        self,
        key: K,
        value: V,
        position: tuple[int, int, V | None] | None = None,
        apart: bool = True,
    ) -> None:
        """Set the value at `key`. `position` is the result of `seek` for it, if the map has not
        changed since. `apart`: a value that is replaced may stay in memory for now."""
        index, at, present = position or self.seek(key)
        if present is not None:
            replaced = self.replaced
            if index == _REPLACED:
                replaced[key] = value
                return
            if not apart:
                block = self._blocks[index]
                changed = list(block[1])
                changed[at] = value
                self._blocks[index] = block[0], tuple(changed)
                return
            if len(replaced) >= REPLACED:
                self._settle()
                replaced = self.replaced
            held = self._blocks[index][0][at]  # the key that is there already
            replaced[held] = value
            self._places[held] = index, at
            return
        if not self._blocks:
            self.append([key], [value])
            return
        keys, values = self._blocks[index]
        more_keys, more = list(keys), list(values)
        more_keys.insert(at, key)
        more.insert(at, value)
        self._size += 1
        self._blocks[index] = tuple(more_keys), tuple(more)
        if at == 0:
            self._firsts[index] = key
        if len(more) > FULL:
            self._split(index)

    def remove(self, key: K) -> None:
        """Remove `key`, which must be present."""
        if self.replaced.pop(key, None) is not None:
            del self._places[key]
        index, at, present = self.seek(key)
        if present is None:
            raise KeyError(key)
        keys, values = self._blocks[index]
        self._size -= 1
        if len(keys) == 1:
            del self._blocks[index]
            del self._firsts[index]
            return
        keys = keys[:at] + keys[at + 1 :]
        self._blocks[index] = keys, values[:at] + values[at + 1 :]
        self._firsts[index] = keys[0]

    def ascending(self, key: K) -> Iterator[tuple[K, V]]:
        """All items from `key` on. The map must not change meanwhile."""
        self._settle()
        index = max(bisect_right(self._firsts, key) - 1, 0)
        for keys, values in self._blocks[index : index + 1]:
            at = bisect_left(keys, key)
            yield from zip(keys[at:], values[at:], strict=True)
        for later in range(index + 1, len(self._blocks)):
            yield from zip(*self._blocks[later], strict=True)

    def descending(self, key: K) -> Iterator[tuple[K, V]]:
        """All items before `key`, the nearest first. The map must not change meanwhile."""
        self._settle()
        last = bisect_left(self._firsts, key) - 1
        for index in range(last, -1, -1):
            keys, values = self._blocks[index]
            at = bisect_left(keys, key) if index == last else len(keys)
            yield from zip(reversed(keys[:at]), reversed(values[:at]), strict=True)

    def blocks(self) -> Iterator[Block[K, V]]:
        """A snapshot of the map, which takes a tenth of a millisecond for a million keys: values
        that are kept apart are put into their blocks as these are read."""
        return _current(self._blocks.copy(), self.replaced.copy())

    def blocks_between(self, key: K, beyond: K) -> list[Block[K, V]]:
        """The blocks of a snapshot that may hold keys from `key` on and below `beyond`."""
        self._settle()
        first = max(bisect_right(self._firsts, key) - 1, 0)
        return self._blocks[first : bisect_left(self._firsts, beyond)]

    def between(self, key: K, beyond: K | None) -> list[V]:
        """The values from `key` on and below `beyond`, if there is such a bound."""
        self._settle()
        found: list[V] = []
        first = max(bisect_right(self._firsts, key) - 1, 0)
        last = len(self._blocks) if beyond is None else bisect_left(self._firsts, beyond)
        for keys, values in self._blocks[first:last]:
            start = bisect_left(keys, key) if keys[0] < key else 0
            cut = beyond is not None and keys[-1] >= beyond
            end = bisect_left(keys, beyond) if beyond is not None and cut else len(keys)
            found += values[start:end]
        return found

    def _settle(self) -> None:
        """Put the replaced values into their blocks."""
        if not self.replaced:
            return
        replaced, self.replaced = self.replaced, {}
        places, self._places = self._places, {}
        blocks, firsts = self._blocks, self._firsts
        changed: dict[int, list[V]] = {}
        for key, value in replaced.items():
            index, at = places[key]
            keys = blocks[index][0] if index < len(blocks) else ()
            if at >= len(keys) or keys[at] is not key:
                index = bisect_right(firsts, key) - 1
                at = bisect_left(blocks[index][0], key)
            if index not in changed:
                changed[index] = list(blocks[index][1])
            changed[index][at] = value
        for index, after in changed.items():
            blocks[index] = blocks[index][0], tuple(after)

    def _split(self, index: int) -> None:
        keys, values = self._blocks[index]
        # Ascending keys, such as tickets and leases, leave full blocks behind.
        last = index == len(self._blocks) - 1
        half = FULL - FULL // 8 if last else FULL // 2
        self._blocks[index] = keys[:half], values[:half]
        self._blocks.insert(index + 1, (keys[half:], values[half:]))
        self._firsts.insert(index + 1, keys[half])


def _current(blocks: list[Block[K, V]], replaced: dict[K, V]) -> Iterator[Block[K, V]]:
    for keys, values in blocks:
        if not replaced or replaced.keys().isdisjoint(keys):
            yield keys, values
        else:
            yield keys, tuple(map(replaced.get, keys, values))
