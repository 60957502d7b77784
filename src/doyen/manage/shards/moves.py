"""The moves of shards to a member and from it.

A shard is moved in two phases: the new owner prepares and says so in its entry, then the old one
releases it. While shards are to move from here, the members are watched, to see when the new
owners are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from doyen.election.core import SessionCore
from doyen.manage.shards.controller import group_of, seen_members
from doyen.manage.shards.following import WatchedKeys
from doyen.manage.shards.plan import Move, ShardPlan
from doyen.manage.shards.slots import Bodies, log_shard_error
from doyen.manage.shards.steps import SeenMember
from doyen.model import members_key

__all__ = ["Moves", "calm_after"]

TURN = 3
LONGEST_ENDING_S, LONGEST_PAUSE_S = 0.1, 0.2
"""Shards whose new owner is ready are released one at a time: the next after `TURN` times as long
as it took to delete the record, which is about when the new owner has its own, or after a while if
the body takes long to end. While a busy store deletes the record, nothing else is released: the new
owner needs that store too. If all were released at once, the requests of all new owners would
compete, and every shard would be without an owner until the last is done."""
CALM_S, READS, LONGEST_CALM_S = 0.05, 10, 0.5
"""No turn begins this soon after a plan was read, or `READS` times as long as it took to read it.
All members read a plan at the same time. A new owner that had to wait for the processor or the
store would leave its shard without an owner for longer. The plan is not written so often that this
delays a move by much. Nor does one begin, for `LONGEST_CALM_S`, before all new owners of this
member's shards are ready: each of them writes that to the store, and others read it."""
READY_LOOK_S = 0.01
"""How often to check whether the new owners are ready."""


def calm_after(read_took_s: float) -> float:
    """How long to release no shard after a plan was read.

    >>> calm_after(0.001), calm_after(0.02), calm_after(2.0)
    (0.05, 0.2, 0.5)
    """
    return min(max(CALM_S, READS * read_took_s), LONGEST_CALM_S)


class Moves:
    """What one member knows of the moves. Used on doyen's loop."""

    def __init__(
        self,
        core: SessionCore,
        shards: str,
        member: str,
        bodies: Bodies,
        *,
        changed: Callable[[], None],
        ended: Callable[[int], None],
    ) -> None:
        """`changed` is called when the members may have changed, `ended` with each shard for
        which a preparation has ended."""
        self.members = WatchedKeys(core, members_key(group_of(shards)), changed)
        self.outgoing: dict[int, None] = {}
        """The shards that wait for their turn to be released."""
        self.ending: tuple[int, float] | None = None
        """The one whose turn it is, and since when."""
        self.held_back = False
        """All members are reading a plan: no turn begins."""
        self._core = core
        self._shards = shards
        self._member = member
        self._bodies = bodies
        self._on_ended = ended
        self._others: Mapping[str, SeenMember] = {}
        """The members to which shards of this one are moved."""
        self._prepared: dict[int, bool] = {}
        """The moves to this member, by id, and whether it is prepared for them. One for which it
        has not begun to prepare is not in it."""
        self._preparing: set[int] = set()
        """The shards for which a preparation runs, perhaps for a move that was aborted."""

    async def read_members(self, plan: ShardPlan) -> bool:
        """While shards are to move from here, see which new owners are ready. False if nothing had
        to be read."""
        if not any(plan.owners[shard] == self._member for shard in plan.moves):
            self.members.close()
            return False
        await self.members.watch()
        if not self.members.stale:
            return False
        with self.members.reading():
            self._others = await seen_members(self._core, self._shards)
        return True

    def is_ready(self, move: Move) -> bool:
        """Whether the new owner is prepared."""
        if move.to == self._member:
            return self._prepared.get(move.id, False)
        target = self._others.get(move.to)
        return (
            target is not None
            and target.incarnation == move.incarnation
            and move.id in target.prepared
        )

    def are_ready(self, plan: ShardPlan) -> bool:
        """Whether the new owners of all shards that move from here are prepared."""
        moves = plan.moves.items()
        return all(self.is_ready(move) for n, move in moves if plan.owners[n] == self._member)

    def prepare(self, plan: ShardPlan, incarnation: int) -> list[int]:
        """Prepare for what is to come, once at a time for each shard. Returns the ids of the moves
        that this member is prepared for."""
        coming = {
            move.id: shard
            for shard, move in plan.moves.items()
            if (move.to, move.incarnation) == (self._member, incarnation)
        }
        for move, shard in coming.items():
            if move not in self._prepared and shard not in self._preparing:
                self._prepared[move] = False
                self._preparing.add(shard)
                self._bodies.prepare(shard, partial(self._prepare_ended, move, shard))
        self._prepared = {move: done for move, done in self._prepared.items() if move in coming}
        return [move for move, done in self._prepared.items() if done]

    def _prepare_ended(self, move: int, shard: int, error: BaseException | None) -> None:
        self._preparing.discard(shard)
        if error is not None:
            log_shard_error("shard_prepare_failed", self._shards, shard, error)
        elif move in self._prepared:
            self._prepared[move] = True
        self._on_ended(shard)

    def next_turn(self) -> int | None:
        """The shard that may be released now. The caller sets `ending` if it does."""
        if self.ending is not None or self.held_back or not self.outgoing:
            return None
        shard = next(iter(self.outgoing))
        del self.outgoing[shard]
        return shard
