"""The latest changes of a keyspace, for watches that begin at a revision.

`History` keeps changes in the order of their revisions, bounded in number and size. Changes up to
its `floor` may be missing: a watch whose position is below the floor cannot be resumed from the
history, and its client has to read again.

`add` runs for every write, so it only appends. The bounds are applied at intervals and before
anything is read, which leaves the same changes as if they were applied at once: the longest suffix
within the bounds. Imports msgspec.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import islice
from operator import attrgetter
from typing import Final

from msgspec import Struct

__all__ = ["Change", "ChangeKind", "History"]

MAX_CHANGES: Final = 2**16
MAX_BYTES: Final = 16 << 20
"""About how many bytes the changes may take."""
OVERHEAD: Final = 64
"""Bytes that a change takes apart from its key, in this count."""
INDEX_BYTES: Final = 32 << 20
"""About how many bytes the index of `changed` may take."""
TRIM_EVERY: Final = 1024
"""Changes after which the bounds are applied again."""


class ChangeKind(IntEnum):
    """What happened to a key."""

    PUT = 1
    """The entry was created or replaced."""
    DELETE = 2
    END = 3
    """The entry was removed because its lease ended."""


class Change(Struct, frozen=True, array_like=True, gc=False):
    """One key changed at a revision. Several keys may change at one revision, each of them
    once."""

    revision: int
    key: str
    kind: ChangeKind
    lease: int = 0
    """The lease that the entry is or was bound to; 0 if none."""


_KEY = attrgetter("key")


class History:
    """Changes, oldest first.

    >>> history = History()
    >>> history.add(Change(1, "a/b", ChangeKind.PUT))
    >>> history.add(Change(2, "c", ChangeKind.DELETE))
    >>> [*history.latest(0)], history.changed("a", 1)
    (['c', 'a/b'], False)
    """

    def __init__(
        self, floor: int = 0, changes: Iterable[Change] = (), *, most: int | None = None
    ) -> None:
        self._most = MAX_CHANGES if most is None else most
        self._floor = floor
        self._changes: deque[Change] = deque(changes)
        self._counted = 0
        """How many of the changes, the oldest ones, are counted in `_bytes`."""
        self._bytes = 0
        self._trim_at = TRIM_EVERY
        # The last change of every scope that has one after `_indexed_from` and up to
        # `_indexed_to`: see `changed`.
        self._index: dict[str, int] = {}
        self._index_bytes = 0
        self._indexed_from = self._indexed_to = floor

    @property
    def floor(self) -> int:
        """Changes up to this revision may be missing."""
        self._trim()
        return self._floor

    def __len__(self) -> int:
        self._trim()
        return len(self._changes)

    def add(self, change: Change) -> None:
        """Add the latest change. The oldest are dropped if there are too many."""
        changes = self._changes
        changes.append(change)
        if len(changes) >= self._trim_at:
            self._trim()

    def _trim(self) -> None:
        """Apply the bounds. The loops run in C: this is a part of the cost of every write."""
        changes = self._changes
        new = len(changes) - self._counted
        self._bytes += _size(islice(reversed(changes), new), new)
        excess = len(changes) - self._most
        while excess > 0 or self._bytes > MAX_BYTES:
            dropped = [changes.popleft() for _ in range(max(excess, 1))]
            self._floor = dropped[-1].revision
            self._bytes -= _size(dropped, len(dropped))
            excess = 0
        self._counted = len(changes)
        self._trim_at = self._counted + TRIM_EVERY

    def all(self) -> list[Change]:
        """All changes as of now."""
        self._trim()
        return [*self._changes]

    def latest(self, since: int) -> Iterator[str] | None:
        """The keys that changed after `since`, latest first; None if that is too old. Nothing may
        be added meanwhile."""
        return None if since < self.floor else (change.key for change in self._latest(since))

    def after(self, since: int, scope: str = "") -> list[Change] | None:
        """The changes after `since` at a scope or below it, oldest first; everywhere if the scope
        is empty. None if that is too old."""
        if since < self.floor:
            return None
        below = f"{scope}/"
        changes = [
            change
            for change in self._latest(since)
            if not scope or change.key == scope or change.key.startswith(below)
        ]
        changes.reverse()
        return changes

    def changed(self, scope: str, since: int) -> bool:
        """Whether anything at `scope` or below it changed, or may have changed, after `since`."""
        self._extend_index()
        return since < max(self.floor, self._indexed_from) or self._index.get(scope, 0) > since

    def _latest(self, since: int) -> Iterator[Change]:
        for change in reversed(self._changes):
            if change.revision <= since:
                return
            yield change

    def _extend_index(self) -> None:
        """Bring the index up to date. Only resumed watches need it, all of a connection's at once,
        so it is not maintained by `add`."""
        floor = self.floor
        latest = self._changes[-1].revision if self._changes else floor
        if latest <= self._indexed_to:
            return
        if self._indexed_to < floor or self._index_bytes > INDEX_BYTES:
            self._index.clear()
            self._index_bytes = 0
            self._indexed_from = self._indexed_to = floor
        fresh: dict[str, int] = {}
        for change in self._latest(self._indexed_to):
            if self._index_bytes > INDEX_BYTES:
                self._index.clear()  # everything in it is older than this change
                self._indexed_from = change.revision
                break
            scope = change.key
            while scope and scope not in fresh:  # else it and all scopes above it are known
                fresh[scope] = change.revision
                self._index_bytes += len(scope) + OVERHEAD
                scope = scope.rpartition("/")[0]
        self._index.update(fresh)
        self._indexed_to = latest


def _size(changes: Iterable[Change], count: int) -> int:
    return sum(map(len, map(_KEY, changes))) + OVERHEAD * count
