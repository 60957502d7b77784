"""The latest changes of a keyspace, for whoever watches from a revision.

`History` keeps changes in the order of their revisions, within a bound on their number and on
their size. Changes up to its `floor` may be missing: whoever asks for what changed after a revision
below the floor is told that this is too old, and has to read again. Imports msgspec.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final

from msgspec import Struct

__all__ = ["Change", "ChangeKind", "History"]

MOST: Final = 2**16
"""How many changes are kept."""
MOST_BYTES: Final = 16 << 20
"""About how many bytes they may take."""
OVERHEAD: Final = 64
"""Bytes that a change takes apart from its key, in this count."""
INDEX_BYTES: Final = 32 << 20
"""About how many bytes the scopes may take that `changed` keeps in mind."""


class ChangeKind(IntEnum):
    """What happened to a key."""

    PUT = 1
    """Something was written, where nothing stood or over what stood."""
    DELETE = 2
    END = 3
    """It was removed because its lease ended."""


class Change(Struct, frozen=True, array_like=True, gc=False):
    """One key changed at a revision. Several keys may change at one revision, none of them
    twice."""

    revision: int
    key: str
    kind: ChangeKind
    lease: int = 0
    """The lease that the entry is bound to, or was; 0 if none."""


class History:
    """Changes, oldest first.

    >>> history = History()
    >>> history.add(Change(1, "a/b", ChangeKind.PUT))
    >>> history.add(Change(2, "c", ChangeKind.DELETE))
    >>> [change.key for change in history.after(0, "a")], history.changed("a", 1)
    (['a/b'], False)
    """

    def __init__(
        self, floor: int = 0, changes: Iterable[Change] = (), *, most: int | None = None
    ) -> None:
        self._most = MOST if most is None else most
        self.floor = floor
        """Changes up to this revision may be missing."""
        self._changes: deque[Change] = deque()
        self._bytes = 0
        # The last change of every scope that has one after `_indexed_from` and up to
        # `_indexed_to`: see `changed`.
        self._index: dict[str, int] = {}
        self._index_bytes = 0
        self._indexed_from = self._indexed_to = floor
        for change in changes:
            self.add(change)

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, change: Change) -> None:
        """Take in the latest; the oldest go if there are too many."""
        changes = self._changes
        changes.append(change)
        size = self._bytes + len(change.key) + OVERHEAD
        while len(changes) > self._most or size > MOST_BYTES:
            oldest = changes.popleft()
            size -= len(oldest.key) + OVERHEAD
            self.floor = oldest.revision
        self._bytes = size

    def picture(self) -> list[Change]:
        """All of them, as they are now."""
        return [*self._changes]

    def latest(self, since: int) -> Iterator[Change] | None:
        """Those after `since`, latest first; None if that is too old. Nothing may be added
        meanwhile."""
        return None if since < self.floor else self._latest(since)

    def after(self, since: int, scope: str = "") -> list[Change] | None:
        """Those after `since` at a scope or under it, oldest first, everywhere if it is empty; None
        if that is too old."""
        found = self.latest(since)
        if found is None:
            return None
        under = f"{scope}/"
        changes = [c for c in found if not scope or c.key == scope or c.key.startswith(under)]
        changes.reverse()
        return changes

    def changed(self, scope: str, since: int) -> bool:
        """Whether anything at `scope` or under it changed, or may have changed, after `since`."""
        self._extend_index()
        return since < max(self.floor, self._indexed_from) or self._index.get(scope, 0) > since

    def _latest(self, since: int) -> Iterator[Change]:
        for change in reversed(self._changes):
            if change.revision <= since:
                return
            yield change

    def _extend_index(self) -> None:
        """Only watches that are resumed ask for this, all of a connection's at once, so it is not
        kept up to date in between."""
        latest = self._changes[-1].revision if self._changes else self.floor
        if latest <= self._indexed_to:
            return
        if self._indexed_to < self.floor or self._index_bytes > INDEX_BYTES:
            self._index.clear()
            self._index_bytes = 0
            self._indexed_from = self._indexed_to = self.floor
        fresh: dict[str, int] = {}
        for change in self._latest(self._indexed_to):
            if self._index_bytes > INDEX_BYTES:
                self._index.clear()  # all of it is older than this
                self._indexed_from = change.revision
                break
            scope = change.key
            while scope and scope not in fresh:  # or this change and all above it are known
                fresh[scope] = change.revision
                self._index_bytes += len(scope) + OVERHEAD
                scope = scope.rpartition("/")[0]
        self._index.update(fresh)
        self._indexed_to = latest
