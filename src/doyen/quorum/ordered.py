"""A sorted map whose picture can be taken in no time, however large it is.

Keys stand in blocks of a few hundred. A picture is the list of blocks of that instant; whoever
changes a block that a picture shows changes a copy. So a picture costs a pointer a block, nobody
waits for it, and another thread may read it while the map goes on changing.

Invariants: no block is empty; the keys of a block ascend, and so do the blocks; a block of an
epoch before the map's belongs to a picture and is never changed. Pure; imports nothing of doyen.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Block", "Ordered"]

FULL = 512
"""A block that grows beyond this is split."""

K = TypeVar("K", int, str)
V = TypeVar("V")


class Block(Generic[K, V]):
    """Some keys, in order, and what stands at them."""

    __slots__ = ("epoch", "keys", "values")

    def __init__(self, keys: list[K], values: list[V], epoch: int) -> None:
        self.keys: list[K] = keys
        self.values: list[V] = values
        self.epoch = epoch


class Ordered(Generic[K, V]):
    """A map in the order of its keys.

    >>> ordered = Ordered[str, int]()
    >>> ordered.put("b", 2); ordered.put("a", 1)
    >>> picture = ordered.picture()
    >>> ordered.remove("a")
    >>> [block.keys for block in picture], list(ordered.upward(""))
    ([['a', 'b']], [('b', 2)])
    """

    __slots__ = ("_blocks", "_epoch", "_firsts", "_size", "_sought")

    def __init__(self) -> None:
        self._epoch = 0
        # Where a key was found, or would stand: whoever reads one often writes it next.
        self._sought: tuple[K, int, int] | None = None
        self._blocks: list[Block[K, V]] = []
        self._firsts: list[K] = []
        self._size = 0

    def append(self, keys: list[K], values: list[V]) -> None:
        """Take these in, as they are; they stand in order, behind everything there is."""
        self._sought = None
        for at in range(0, len(keys), FULL // 2):
            upto = at + FULL // 2
            self._blocks.append(Block(keys[at:upto], values[at:upto], self._epoch))
            self._firsts.append(keys[at])
        self._size += len(keys)

    def __len__(self) -> int:
        return self._size

    def get(self, key: K) -> V | None:
        """What stands at `key`, or None."""
        if not self._blocks:
            return None
        index, at = self._seek(key)
        block = self._blocks[index]
        if at < len(block.keys) and block.keys[at] == key:
            return block.values[at]
        return None

    def put(self, key: K, value: V) -> None:
        """Have `value` stand at `key`."""
        if not self._blocks:
            self.append([key], [value])
            return
        index, at = self._seek(key)
        block = self._own(index)
        keys, values = block.keys, block.values
        if at < len(keys) and keys[at] == key:
            values[at] = value
            return
        self._sought = None
        keys.insert(at, key)
        values.insert(at, value)
        self._size += 1
        if at == 0:
            self._firsts[index] = key
        if len(keys) > FULL:
            self._split(index, block)

    def remove(self, key: K) -> None:
        """Have nothing stand at `key`, where something does."""
        if not self._blocks:
            raise KeyError(key)
        index, at = self._seek(key)
        self._sought = None
        block = self._own(index)
        if at == len(block.keys) or block.keys[at] != key:
            raise KeyError(key)
        del block.keys[at]
        del block.values[at]
        self._size -= 1
        if not block.keys:
            del self._blocks[index]
            del self._firsts[index]
        elif at == 0:
            self._firsts[index] = block.keys[0]

    def _seek(self, key: K) -> tuple[int, int]:
        """The block, of those that there are, and the place in it, where `key` stands or would."""
        sought = self._sought
        if sought is not None and sought[0] is key:
            return sought[1], sought[2]
        index = max(bisect_right(self._firsts, key) - 1, 0)
        at = bisect_left(self._blocks[index].keys, key)
        self._sought = key, index, at
        return index, at

    def upward(self, key: K) -> Iterator[tuple[K, V]]:
        """Everything from `key` on. The map must not change meanwhile."""
        index = max(bisect_right(self._firsts, key) - 1, 0)
        for block in self._blocks[index : index + 1]:
            at = bisect_left(block.keys, key)
            yield from zip(block.keys[at:], block.values[at:], strict=True)
        for later in range(index + 1, len(self._blocks)):
            yield from zip(self._blocks[later].keys, self._blocks[later].values, strict=True)

    def below(self, key: K) -> tuple[K, V] | None:
        """What stands directly before `key`."""
        index = bisect_left(self._firsts, key) - 1
        if index < 0:
            return None
        block = self._blocks[index]
        at = bisect_left(block.keys, key) - 1
        return block.keys[at], block.values[at]

    def picture(self) -> list[Block[K, V]]:
        """The map as it is now, in blocks that never change."""
        self._epoch += 1
        return self._blocks.copy()

    def _own(self, index: int) -> Block[K, V]:
        """The block, as one that no picture shows."""
        block = self._blocks[index]
        if block.epoch != self._epoch:
            block = Block(block.keys.copy(), block.values.copy(), self._epoch)
            self._blocks[index] = block
        return block

    def _split(self, index: int, block: Block[K, V]) -> None:
        # Keys that count up, as tickets and leases do, leave full blocks behind.
        ascending = index == len(self._blocks) - 1
        half = FULL - FULL // 8 if ascending else FULL // 2
        upper = Block(block.keys[half:], block.values[half:], self._epoch)
        del block.keys[half:]
        del block.values[half:]
        self._blocks.insert(index + 1, upper)
        self._firsts.insert(index + 1, upper.keys[0])
