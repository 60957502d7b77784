"""A sorted map whose picture can be taken in no time, however large it is.

Keys stand in small blocks that never change: whoever changes the map puts another block in the
place of one. So a picture is the list of blocks of that instant, nobody waits for it, and another
thread may read it while the map goes on changing.

Blocks are made of tuples, because Python's collector lets go of tuples in which it has nothing to
follow: a map of a million keys, all of them plain, does not make it pause.

Invariants: no block is empty; the keys of a block ascend, and so do the blocks. Pure; imports
nothing of doyen.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

__all__ = ["Block", "Ordered"]

FULL = 32
"""A block that grows beyond this is split. To change one costs as much as to copy it."""

K = TypeVar("K", int, str)
V = TypeVar("V")


Block: TypeAlias = tuple[tuple[K, ...], tuple[V, ...]]
"""Some keys, in order, and what stands at them."""


class Ordered(Generic[K, V]):
    """A map in the order of its keys.

    >>> ordered = Ordered[str, int]()
    >>> ordered.put("b", 2); ordered.put("a", 1)
    >>> picture = ordered.picture()
    >>> ordered.remove("a")
    >>> [keys for keys, _ in picture], list(ordered.upward(""))
    ([('a', 'b')], [('b', 2)])
    """

    __slots__ = ("_blocks", "_firsts", "_size")

    def __init__(self) -> None:
        self._blocks: list[Block[K, V]] = []
        self._firsts: list[K] = []
        self._size = 0

    def append(self, keys: Sequence[K], values: Sequence[V]) -> None:
        """Take these in; they stand in order, behind everything there is."""
        step = FULL * 3 // 4
        for at in range(0, len(keys), step):
            upto = at + step
            self._blocks.append((tuple(keys[at:upto]), tuple(values[at:upto])))
            self._firsts.append(keys[at])
        self._size += len(keys)

    def __len__(self) -> int:
        return self._size

    def get(self, key: K) -> V | None:
        """What stands at `key`, or None."""
        return self.seek(key)[2]

    def seek(self, key: K) -> tuple[int, int, V | None]:
        """Where `key` stands, or would, for `put`; and what stands there."""
        index = bisect_right(self._firsts, key) - 1
        if index < 0:
            return 0, 0, None
        keys, values = self._blocks[index]
        at = bisect_left(keys, key)
        if at < len(keys) and keys[at] == key:
            return index, at, values[at]
        return index, at, None

    def put(self, key: K, value: V, sought: tuple[int, int, V | None] | None = None) -> None:
        """Have `value` stand at `key`. `sought` is what `seek` gave for it, if nothing has
        changed since."""
        index, at, standing = sought or self.seek(key)
        if not self._blocks:
            self.append([key], [value])
            return
        keys, values = self._blocks[index]
        if standing is not None:
            changed = list(values)
            changed[at] = value
            self._blocks[index] = keys, tuple(changed)
            return
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
        """Have nothing stand at `key`, where something does."""
        index, at, standing = self.seek(key)
        if standing is None:
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

    def upward(self, key: K) -> Iterator[tuple[K, V]]:
        """Everything from `key` on. The map must not change meanwhile."""
        index = max(bisect_right(self._firsts, key) - 1, 0)
        for keys, values in self._blocks[index : index + 1]:
            at = bisect_left(keys, key)
            yield from zip(keys[at:], values[at:], strict=True)
        for later in range(index + 1, len(self._blocks)):
            yield from zip(*self._blocks[later], strict=True)

    def downward(self, key: K) -> Iterator[tuple[K, V]]:
        """Everything before `key`, the nearest first. The map must not change meanwhile."""
        last = bisect_left(self._firsts, key) - 1
        for index in range(last, -1, -1):
            keys, values = self._blocks[index]
            at = bisect_left(keys, key) if index == last else len(keys)
            yield from zip(reversed(keys[:at]), reversed(values[:at]), strict=True)

    def picture(self) -> list[Block[K, V]]:
        """The map as it is now, in blocks that never change."""
        return self._blocks.copy()

    def detail(self, key: K, beyond: K) -> list[Block[K, V]]:
        """Those blocks of a picture in which something from `key` on and below `beyond` may
        stand."""
        first = max(bisect_right(self._firsts, key) - 1, 0)
        return self._blocks[first : bisect_left(self._firsts, beyond)]

    def _split(self, index: int) -> None:
        keys, values = self._blocks[index]
        # Keys that count up, as tickets and leases do, leave full blocks behind.
        ascending = index == len(self._blocks) - 1
        half = FULL - FULL // 8 if ascending else FULL // 2
        self._blocks[index] = keys[:half], values[:half]
        self._blocks.insert(index + 1, (keys[half:], values[half:]))
        self._firsts.insert(index + 1, keys[half])
