"""Asking a store for changes at intervals, while anything is watched.

For engines without notifications, and for those whose notifications may be lost. There are two ways
to ask:

- `ChangedPaths`: the store returns the paths that have changed since a position.
- `ChangedCounter`: the store returns a counter, and the scopes are compared when it has moved. That
  misses an entry that was created and deleted between two comparisons, although another client may
  have read it and wait for its end; it is good enough only beside notifications that are rarely
  lost.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Protocol

from doyen.errors import StoreError
from doyen.events.log_lines import log_line

log = logging.getLogger("doyen")

_HASTIEST_S, _HASTY_S = 0.001, 0.005
"""The shortest and the longest pause between two queries while a change is expected."""
_LONGEST_PAUSE_S = 0.5
"""The longest pause between two queries, unless `every_s` is longer. A response may have been slow
only because the server was paused; later changes should be noticed soon."""

Changes = Callable[[int | None], Awaitable[tuple[int, Sequence[str] | None]]]
"""Given a position, returns the current one and the paths that have changed in between, or None
instead of the paths if they are not known."""


class Watched(Protocol):
    """The watches of a store, which are notified of changes."""

    patience_s: float
    """The deadline of a query."""

    @property
    def scopes(self) -> Collection[str]: ...

    def changed(self, path: str) -> None: ...

    def all_changed(self) -> None: ...

    async def compare(self, scopes: Collection[str]) -> None: ...


class Polling(ABC):
    """Asks for changes from the first watch until there is none left."""

    def __init__(self, watched: Watched, every_s: float) -> None:
        self._watched = watched
        self._every_s = every_s
        self._position: int | None = None
        """The position up to which changes have been asked for, while anything is watched."""
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, float] = {}
        """Paths that are about to change, and since when that is expected, by the loop's time."""
        self._hurry = asyncio.Event()

    @abstractmethod
    async def begin(self, scope: str) -> None:
        """Changes of this scope after this call are noticed, while `run` runs."""

    @abstractmethod
    async def _ask(self) -> None:
        """Ask for the changes since `_position`."""

    def expect(self, path: str) -> None:
        """This path will probably change: ask often, until it has, or for three times the patience,
        which is the ttl."""
        self._expected[path] = self._loop.time()
        self._loop.call_later(_HASTY_S, self._hurry.set)  # the watchers act first

    def has_changed(self, path: str) -> None:
        """This path is no longer expected to change."""
        self._expected.pop(path, None)

    async def run(self) -> None:
        """Ask while anything is watched, pausing four times as long as the last query took."""
        pause_s = self._every_s
        while self._watched.scopes:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._hasty(pause_s)):
                    await self._hurry.wait()
            self._hurry.clear()
            began = self._loop.time()
            try:
                async with asyncio.timeout(self._watched.patience_s):
                    await self._ask()
            except (StoreError, TimeoutError) as error:
                log.debug("%s", log_line(event="changes_unreadable", reason=error))
            took_s = self._loop.time() - began
            pause_s = max(self._every_s, min(4 * took_s, _LONGEST_PAUSE_S))
        self._position = None

    def _hasty(self, pause_s: float) -> float:
        """The pause, or a short one while a change is expected: a tenth of the time since then."""
        now = self._loop.time()
        since = now - 3 * self._watched.patience_s
        self._expected = {path: at for path, at in self._expected.items() if at >= since}
        if not self._expected:
            return pause_s
        expected_s = now - max(self._expected.values())
        return min(pause_s, max(_HASTIEST_S, min(expected_s / 10, _HASTY_S)))


class ChangedPaths(Polling):
    """For a store that knows which paths have changed."""

    def __init__(self, watched: Watched, every_s: float, changes: Changes) -> None:
        super().__init__(watched, every_s)
        self._changes = changes

    async def begin(self, scope: str) -> None:
        if self._position is None:
            position, _ = await self._changes(None)
            if self._position is None:  # else another watch began at an earlier position
                self._position = position

    async def _ask(self) -> None:
        position, paths = await self._changes(self._position)
        for path in paths or ():
            self._watched.changed(path)
        if paths is None and position != self._position:
            self._watched.all_changed()
        self._position = position


class ChangedCounter(Polling):
    """For a store that knows only that something has changed."""

    def __init__(
        self, watched: Watched, every_s: float, counter: Callable[[], Awaitable[int]]
    ) -> None:
        super().__init__(watched, every_s)
        self._counter = counter

    async def begin(self, scope: str) -> None:
        await self._watched.compare([scope])

    async def _ask(self) -> None:
        position = await self._counter()
        if position != self._position:
            await self._watched.compare(self._watched.scopes)
        self._position = position
