"""The next plan: a pure function of what is asked for, what is planned and what is observed.

A controller that dies in the middle of anything leaves a plan from which its successor takes the
next step. Nothing that a step needs is kept elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from doyen.manage.shards.plan import NO_MEMBER, Move, PlannedMember, ShardPlan
from doyen.manage.shards.planner import Eligible, choose_owners, choose_standbys
from doyen.manage.shards.spec import ShardSpec

__all__ = ["MOVES_TO_ONE", "SeenMember", "eligible", "next_plan", "unheld"]

FAILED_ON = 2
"""On how many members a body has to keep failing before its shard is set aside."""
MOVES_TO_ONE = 256
"""How many shards are on their way to one member at a time: it reports that it is prepared for them
in its entry, which has a limit."""
UNHELD = 32
"""How many shards without a record a plan names at a time."""


class SeenMember(NamedTuple):
    """A live member, as its entry in the store describes it."""

    incarnation: int
    weight: float = 1.0
    zone: str = ""
    address: str = ""
    prepared: frozenset[int] = frozenset()
    """The ids of moves for which it has prepared."""
    failed: Mapping[int, str] = {}
    """Shards whose body keeps failing on it, and the last error."""
    retry: int = 0
    """The value of `retry` in the plan to which `failed` refers."""


Members = Mapping[str, SeenMember]
Banned = Mapping[int, tuple[str, ...]]
"""Members that should not get a shard, by shard."""


def eligible(spec: ShardSpec, members: Members) -> dict[str, Eligible]:
    """The members that may be given shards."""
    return {
        name: Eligible(weight, spec.zones.get(name, member.zone))
        for name, member in sorted(members.items())
        if (weight := spec.weight(name, member.weight)) > 0
    }


def unheld(plan: ShardPlan, members: Members, records: Mapping[int, str]) -> tuple[int, ...]:
    """The first shards that have a live owner according to the plan, and no leader record."""
    if not plan.open:
        return ()
    missing = (
        shard
        for shard, owner in enumerate(plan.owners)
        if shard not in records and owner in members and shard not in plan.moves
    )
    return tuple(islice(missing, UNHELD))


def next_plan(
    spec: ShardSpec, plan: ShardPlan, members: Members, records: Mapping[int, str], elapsed_s: float
) -> ShardPlan:
    """The plan that follows `plan`, which is returned unchanged if there is nothing to do.

    `records` has the holder of each leader record that exists: those of shards that are being
    moved, and all of them while the plan is not open. `elapsed_s` is the time since the last step.
    """
    if spec.paused and plan.generation:
        return replace(plan, note=_while_paused(plan, members))
    if not plan.open or plan.count != spec.count:
        if plan.open and plan.generation and spec.barrier:
            return replace(plan, open=False, moves={})
        if not plan.open and records:
            return plan
        plan = _resized(plan, spec.count)
    return _Step(spec, plan, members, records, elapsed_s).result()


def _while_paused(plan: ShardPlan, members: Members) -> str:
    gone = sorted(set(plan.owners) - {NO_MEMBER} - set(members))
    note = "paused: nothing is assigned or moved until the set is resumed"
    return f"{note}; owners that are gone: {', '.join(gone)}" if gone else note


def _resized(plan: ShardPlan, count: int) -> ShardPlan:
    def resized(column: tuple[str, ...]) -> tuple[str, ...]:
        return (*column[:count], *[NO_MEMBER] * (count - len(column)))

    return replace(
        plan,
        generation=plan.generation + 1,
        open=True,
        owners=resized(plan.owners),
        standbys=tuple(map(resized, plan.standbys)),
        moves={shard: move for shard, move in plan.moves.items() if shard < count},
        failed={shard: names for shard, names in plan.failed.items() if shard < count},
        slow={shard: names for shard, names in plan.slow.items() if shard < count},
        aside={shard: error for shard, error in plan.aside.items() if shard < count},
        unheld=(),
    )


class _Step:
    """One step within a generation."""

    def __init__(
        self,
        spec: ShardSpec,
        plan: ShardPlan,
        members: Members,
        records: Mapping[int, str],
        elapsed_s: float,
    ) -> None:
        self.spec, self.plan, self.members, self.records = spec, plan, members, records
        self.elapsed_s = elapsed_s
        self.owners = list(plan.owners)
        self.moves: dict[int, Move] = {}
        self.eligible = eligible(spec, members)
        retry = spec.retry != plan.retry
        self.failed = {} if retry else self._remaining(plan.failed)
        self.slow = {} if retry else self._remaining(plan.slow)
        self.aside = {} if retry else {n: e for n, e in plan.aside.items() if self._is_spent(n)}
        self.grace = self._grace()

    def result(self) -> ShardPlan:
        self._continue_moves()
        self._take_from_the_gone()
        self._take_from_the_failed()
        note, rebalanced, last_move = "", self.plan.rebalanced, self.plan.last_move
        standbys = self.plan.standbys
        started = bool(self.eligible) and (
            self.plan.started or len(self.eligible) >= self.spec.min_members
        )
        if not started:
            note = self._why_nothing_is_assigned()
        else:
            pending = self._assign()
            last_move = max([last_move, *(move.id for move in self.moves.values())])
            if not pending and not self.moves:
                rebalanced = self.spec.rebalance
            standbys = choose_standbys(
                self.owners, self.eligible, self.spec.standbys, self.plan.standbys
            )
        about = {name: self.plan.members[name] for name in self.grace if name in self.plan.members}
        for name, member in self.members.items():
            zone = self.spec.zones.get(name, member.zone)
            weight = self.spec.weight(name, member.weight)
            about[name] = PlannedMember(member.incarnation, zone, member.address, weight)
        return replace(
            self.plan,
            owners=tuple(self.owners),
            standbys=standbys,
            members=about,
            moves=self.moves,
            last_move=last_move,
            started=started,
            grace=self.grace,
            failed=self._except_owners(self.failed),
            slow=self._except_owners(self.slow),
            aside=self.aside,
            retry=self.spec.retry,
            rebalanced=rebalanced,
            failures=self.spec.failures,
            note=note,
        )

    def _remaining(self, banned: Banned) -> dict[int, tuple[str, ...]]:
        """The members that are still banned from shards. One that has restarted is not."""
        incarnations = {name: each.incarnation for name, each in self.plan.members.items()}
        same = {
            name
            for name, each in self.members.items()
            if incarnations.get(name) == each.incarnation
        }
        return _filtered(banned, lambda _, name: name in same)

    def _except_owners(self, banned: Banned) -> dict[int, tuple[str, ...]]:
        """A member that has got the shard nevertheless is not banned from it any more."""
        return _filtered(banned, lambda shard, name: name != self.owners[shard])

    def _is_spent(self, shard: int) -> bool:
        """Whether the body of a shard has failed on too many members to try another one."""
        failed_on = self.failed.get(shard, ())
        return len(failed_on) >= FAILED_ON or not set(self.eligible) - set(failed_on)

    def _grace(self) -> dict[str, float]:
        """The owners that have gone and whose shards are still kept for them."""
        left: dict[str, float] = {}
        for name in sorted(set(self.owners) - {NO_MEMBER} - set(self.members)):
            known = self.plan.grace.get(name)
            left_s = self.spec.grace_s if known is None else known - self.elapsed_s
            if left_s > 0:
                left[name] = left_s
        return left

    def _continue_moves(self) -> None:
        """Complete moves, abort those that cannot be completed, and note those that are stuck."""
        for shard, move in self.plan.moves.items():
            target, source = self.members.get(move.to), self.owners[shard]
            if self.records.get(shard) == move.to:
                self.owners[shard] = move.to
                continue
            if (
                target is None
                or target.incarnation != move.incarnation
                or move.to not in self.eligible
            ):
                continue
            if source not in self.members:
                self.owners[shard] = move.to
                continue
            ready = move.id in target.prepared
            age_s = move.age_s + self.elapsed_s if ready == move.ready else 0.0
            if shard in target.failed:
                _ban(self.failed, shard, move.to)
                continue
            if not ready and age_s >= self.spec.prepare_s:
                _ban(self.slow, shard, move.to)
                continue
            stuck = ready and (move.stuck or age_s >= self.spec.ending_s)
            self.moves[shard] = move._replace(ready=ready, stuck=stuck, age_s=age_s)

    def _take_from_the_gone(self) -> None:
        for shard, owner in enumerate(self.owners):
            if owner and owner not in self.members and owner not in self.grace:
                self.owners[shard] = NO_MEMBER

    def _take_from_the_failed(self) -> None:
        for name, member in sorted(self.members.items()):
            if member.retry != self.plan.retry or self.spec.retry != self.plan.retry:
                continue
            for shard, error in sorted(member.failed.items()):
                if not 0 <= shard < len(self.owners) or self.owners[shard] != name:
                    continue
                _ban(self.failed, shard, name)
                self.moves.pop(shard, None)
                self.owners[shard] = NO_MEMBER
                if self._is_spent(shard):
                    self.aside[shard] = error

    def _assign(self) -> bool:
        """Give every shard an owner, and begin moves. Returns whether moves are left to begin."""
        spec, moves, owners = self.spec, self.moves, self.owners
        reached = [moves[shard].to if shard in moves else name for shard, name in enumerate(owners)]
        wanted = choose_owners(
            reached,
            self.eligible,
            pins=spec.pins,
            banned=self.failed,
            slow=self.slow,
            kept={
                shard
                for shard, name in enumerate(reached)
                if name in self.grace or shard in self.aside
            },
            standbys=self.plan.standbys,
            exact=spec.rebalance != self.plan.rebalanced,
        )
        budget = spec.moves_at_once - sum(not move.stuck for move in moves.values())
        coming = Counter(move.to for move in moves.values())
        next_id = self.plan.last_move + 1
        pending = False
        for shard, name in enumerate(wanted):
            if name in (reached[shard], NO_MEMBER):
                continue
            if owners[shard] == NO_MEMBER:
                owners[shard] = name
            elif shard in moves or budget <= 0 or coming[name] >= MOVES_TO_ONE:
                pending = True
            else:
                moves[shard] = Move(name, self.members[name].incarnation, next_id)
                next_id += 1
                coming[name] += 1
                budget -= 1
        return pending

    def _why_nothing_is_assigned(self) -> str:
        found, owned = len(self.eligible), any(self.owners)
        kept = " anew, and owners keep their shards" if owned else ""
        drained = [name for name in sorted(self.members) if name not in self.eligible]
        return (
            f"nothing is assigned{kept}: {found} eligible members, and"
            f" {self.spec.min_members} are needed"
            + (f"; with weight 0: {', '.join(drained)}" if drained else "")
        )


def _filtered(banned: Banned, keep: Callable[[int, str], bool]) -> dict[int, tuple[str, ...]]:
    left = {n: tuple(name for name in names if keep(n, name)) for n, names in banned.items()}
    return {shard: names for shard, names in left.items() if names}


def _ban(banned: dict[int, tuple[str, ...]], shard: int, member: str) -> None:
    banned[shard] = tuple(dict.fromkeys((*banned.get(shard, ()), member)))
