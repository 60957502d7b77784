"""Mutants of shards: each breaks one rule, which the oracle must detect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from doyen.errors import Conflict
from doyen.manage.shards import controller, planner, steps
from doyen.manage.shards.claims import Claims
from doyen.manage.shards.controller import Controller
from doyen.manage.shards.moves import Moves
from doyen.manage.shards.owner import ShardOwner
from doyen.manage.shards.plan import ShardPlan
from doyen.manage.shards.slots import Slot, Stage

Mutant = Callable[[pytest.MonkeyPatch], None]


def unread(patch: pytest.MonkeyPatch) -> None:
    """An owner does not read the plan again after winning."""
    confirm = Claims._confirm

    async def skip() -> None:
        return

    async def without_reading(self: Claims) -> None:
        self._plan.read = skip  # type: ignore[method-assign]
        try:
            await confirm(self)
        finally:
            del self._plan.read

    patch.setattr(Claims, "_confirm", without_reading)


def released_early(patch: pytest.MonkeyPatch) -> None:
    """An owner deletes its record when its term is over, while the body still runs."""
    release = ShardOwner._release

    def hasty(self: ShardOwner, slot: Slot, reason: str) -> None:
        running = slot.stage is Stage.RUNNING
        release(self, slot, reason)
        if running and slot.attempt is not None:
            slot.attempt.leave()

    patch.setattr(ShardOwner, "_release", hasty)


def two_bodies(patch: pytest.MonkeyPatch) -> None:
    """An owner forgets a shard whose term is over although its body still runs, and claims it
    again."""
    follow = ShardOwner._follow_plan

    def forget(self: ShardOwner) -> None:
        for shard, slot in list(self.slots.items()):
            if slot.leading is not None and not slot.leading.term.valid:
                del self.slots[shard]
        follow(self)

    def gone(self: ShardOwner, slot: Slot) -> None:
        if self.slots.get(slot.shard) is slot:
            del self.slots[slot.shard]
        self._empty.set()
        self._due.look_again()

    patch.setattr(ShardOwner, "_follow_plan", forget)
    patch.setattr(ShardOwner, "_gone", gone)


def unclaimed(patch: pytest.MonkeyPatch) -> None:
    """An owner runs a shard without having created its record."""
    from doyen.election.attempt import Attempt

    patch.setattr(Attempt, "is_mine", lambda self, entry: True)


def moves_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A controller forgets at each step which moves are under way."""
    step = steps.next_plan

    def forget(spec: Any, plan: ShardPlan, *rest: Any) -> ShardPlan:
        return step(spec, replace(plan, moves={}), *rest)

    patch.setattr(controller, "next_plan", forget)


def grace_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A controller begins grace anew."""
    step = steps.next_plan

    def forget(spec: Any, plan: ShardPlan, *rest: Any) -> ShardPlan:
        return step(spec, replace(plan, grace={}), *rest)

    patch.setattr(controller, "next_plan", forget)


def moved_too_much(patch: pytest.MonkeyPatch) -> None:
    """The planner assigns everything anew."""

    def anew(current: list[str], members: Any, **_: Any) -> list[str]:
        names = sorted(members)
        return [names[shard % len(names)] for shard in range(len(current))]

    patch.setattr(steps, "choose_owners", anew)


def banned_for_good(patch: pytest.MonkeyPatch) -> None:
    """A member that has prepared too slowly never gets the shard, even if no other can."""
    choose = planner.choose_owners

    def strict(current: Any, members: Any, *, slow: Any, **rest: Any) -> list[str]:
        wanted = choose(current, members, slow=slow, **rest)
        barred = {shard for shard, names in slow.items() if set(members) <= set(names)}
        return ["" if shard in barred else name for shard, name in enumerate(wanted)]

    patch.setattr(steps, "choose_owners", strict)
    patch.setattr(steps._Step, "_remaining", lambda self, banned: dict(banned))


def stays_with_unread_plan(patch: pytest.MonkeyPatch) -> None:
    """A shard that was won waits for the plan to be read, also after its member began to leave."""
    patch.setattr(ShardOwner, "_leave", _unless_won(ShardOwner._leave))


def _unless_won(leave: Callable[[ShardOwner, Slot], None]) -> Callable[[ShardOwner, Slot], None]:
    def stubborn(self: ShardOwner, slot: Slot) -> None:
        if slot.stage is Stage.WON and not slot.wanted and self.plan.watched.stale:
            self._claims._won.append(slot)
        else:
            leave(self, slot)

    return stubborn


def one_phase(patch: pytest.MonkeyPatch) -> None:
    """A new owner claims without being ready, and the old one does not let go."""
    patch.setattr(Moves, "is_ready", lambda self, move: move.to == self._member)


def barrier_ignored(patch: pytest.MonkeyPatch) -> None:
    """A controller opens the next generation although records stand."""
    step = steps.next_plan

    def hasty(spec: Any, plan: ShardPlan, members: Any, records: Any, elapsed_s: float) -> Any:
        return step(spec, plan, members, {} if not plan.open else records, elapsed_s)

    patch.setattr(controller, "next_plan", hasty)


def untokened(patch: pytest.MonkeyPatch) -> None:
    """A controller writes over whatever is there, even a plan of a later token."""

    async def over(self: Controller, expect: Any) -> None:
        while True:
            expect = await self._plan.read()
            try:
                body, last = self._current.encode(), expect and expect._replace(token=0)
                self._known = await self._plan.write(body, expect=last, token=self._term.token)
                return
            except Conflict:
                continue

    patch.setattr(Controller, "_write", over)


def never_looks(patch: pytest.MonkeyPatch) -> None:
    """An owner that waits for a record does not notice that it has gone."""
    patch.setattr(Claims, "_record_changed", lambda self, slot: None)


def trusting(patch: pytest.MonkeyPatch) -> None:
    """An owner ends terms because the plan says that they have no record, without reading it."""

    async def believe(self: ShardOwner) -> None:
        for shard in self.plan.unheld:
            leading = self.slots[shard].leading
            if leading is not None:
                leading.term._lose("the plan says so")
        self.plan.unheld = []

    patch.setattr(ShardOwner, "_look_at_unheld", believe)
