"""The plan that a member of a set of shards follows: it is watched, and read after each change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

from doyen.election.core import SessionCore
from doyen.errors import BadDocument
from doyen.events.log_lines import log_line
from doyen.manage.documents import Document, Versioned, went_back
from doyen.manage.shards.plan import ShardPlan
from doyen.model import shards_key
from doyen.stores.port import Watch

__all__ = ["FollowedPlan", "WatchedKeys"]

log = logging.getLogger("doyen")


class WatchedKeys:
    """A key with those below it, and whether they may have changed since they were read."""

    def __init__(self, core: SessionCore, scope: str, changed: Callable[[], None]) -> None:
        self.stale = True
        self._core = core
        self._scope = scope
        self._changed = changed
        self._watch: Watch | None = None

    async def watch(self) -> None:
        """Watch them, if that is not done yet."""
        if self._watch is None:
            self._watch = await self._core.call(self._core.store.watch(self._scope, self._notify))
            self.stale = True

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a read. If it fails, they are still to be read."""
        self.stale = False
        try:
            yield
        except BaseException:
            self.stale = True
            raise

    def _notify(self) -> None:
        self.stale = True
        self._changed()


class FollowedPlan:
    """The plan as a member has last read it. Used on doyen's loop."""

    def __init__(
        self,
        core: SessionCore,
        shards: str,
        member: str,
        *,
        slots: Container[int],
        changed: Callable[[], None],
        replaced: Callable[[ShardPlan], None],
    ) -> None:
        """`changed` is called when the plan in the store may have changed, `replaced` with the
        earlier plan when another has been read."""
        self.current = ShardPlan()
        self.mine: list[int] = []
        """The shards that the plan gives to this member, now or after a move."""
        self.unheld: list[int] = []
        """The shards of this member's slots that have no record, according to the plan."""
        self.took_s = 0.0
        """How long it took to read the plan."""
        self.watched = WatchedKeys(core, shards_key(shards, "plan"), changed)
        self.shards = shards
        self._member = member
        self._slots = slots
        self._replaced = replaced
        self._document = Document(core.calls, shards_key(shards, "plan"))
        self._version: Versioned | None = None
        self._reading = asyncio.Lock()

    async def read(self) -> None:
        """Read the plan. Reads do not overtake one another."""
        async with self._reading:
            before, began = self._version, asyncio.get_running_loop().time()
            with self.watched.reading():
                version = await self._document.read(before)
                if version is None and before is not None:
                    raise BadDocument(
                        f"{self._document.key} was deleted by another program; no shard begins"
                        " until a controller has written it again"
                    )
                if version is None or (before is not None and version.id == before.id):
                    return
                plan = ShardPlan.decode(version.body)
            if before is not None and went_back(before, version):
                line = log_line(
                    event="plan_went_back",
                    set=self.shards,
                    version=version.version,
                    before=before.version,
                    effect="the store has lost confirmed writes; the older plan is followed",
                )
                log.warning("%s", line)
            earlier, self.current, self._version = self.current, plan, version
            self.took_s = asyncio.get_running_loop().time() - began
            self.mine = plan.owned_by(self._member)
            self.mine += [n for n, move in plan.moves.items() if move.to == self._member]
            self.unheld = [shard for shard in plan.unheld if shard in self._slots]
            self._replaced(earlier)
