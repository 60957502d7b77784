"""A member of a set of shards: claims the shards that are planned for it, and runs their bodies.

The owner holds a `Slot` for each shard that it claims or owns, and compares them with the plan. Its
parts know no slots but those they are given: `FollowedPlan` is the plan, `Claims` create records,
`Moves` prepare for shards and see when new owners are ready.

- A record is deleted only when the body has ended. No body of a shard begins before the one before
  it, in the same process, has ended.
- Everything else is done for the set and not for each shard: one lease, one entry in the list of
  members, a watch of the plan, and a few tasks that claim.
- That the records of shards that run still exist is checked by the controller. An owner that the
  plan tells of a missing record reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from doyen.election.attempt import Wakeup
from doyen.election.core import SessionCore
from doyen.election.leader import Leading
from doyen.election.options import CampaignSettings, OnOverrun, default_name
from doyen.errors import (
    BadDocument,
    ConfigError,
    LeaseGone,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
)
from doyen.events.reasons import REMOVED
from doyen.manage.health import HealthCheck
from doyen.manage.members import MEMBER_BYTES, MemberSettings
from doyen.manage.registration import Registration
from doyen.manage.shards.claims import Claims
from doyen.manage.shards.controller import UnreadLog, control, group_of
from doyen.manage.shards.following import FollowedPlan
from doyen.manage.shards.moves import (
    LONGEST_CALM_S,
    LONGEST_ENDING_S,
    LONGEST_PAUSE_S,
    READY_LOOK_S,
    TURN,
    Moves,
    calm_after,
)
from doyen.manage.shards.plan import ShardPlan
from doyen.manage.shards.slots import Bodies, BodyFailures, ShardTerm, Slot, Stage, log_shard_error
from doyen.manage.shards.spec import check_weight
from doyen.manage.shards.steps import MOVES_TO_ONE
from doyen.model import encode_json
from doyen.term import TermState

__all__ = ["OwnerSettings", "ShardOwner"]

REPORT_BYTES = 3072
"""What the entry of a member has room for besides its weight, zone and address: the ids of
`MOVES_TO_ONE` moves, and at least a few shards that keep failing."""
MOVED = "the plan gives it to another member"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSettings:
    """The options of a member of a set of shards, checked and completed."""

    shards: str
    name: str = ""
    weight: float = 1.0
    zone: str = ""
    address: str = ""
    health: HealthCheck | None = None
    control: bool = True
    on_overrun: OnOverrun = "report"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or default_name())
        check_weight(self.weight)
        for option in ("zone", "address"):
            if not isinstance(getattr(self, option), str):
                raise ConfigError(f"{option} is a string, not {getattr(self, option)!r}")
        self.campaign(0)
        self.member({})
        most = MEMBER_BYTES - REPORT_BYTES
        if (size := len(encode_json(self.meta({})))) > most:
            raise ConfigError(
                f"weight, zone and address take {size} bytes, more than {most}: the entry of a"
                " member has to have room for what it reports about its shards"
            )

    def campaign(self, shard: int) -> CampaignSettings:
        return CampaignSettings(
            election=f"{self.shards}/{shard}",
            kind="shards",
            name=self.name,
            recipe="race",
            on_overrun=self.on_overrun,
        )

    def member(self, state: Mapping[str, Any]) -> MemberSettings:
        return MemberSettings(
            group=group_of(self.shards), name=self.name, meta=self.meta(state), health=self.health
        )

    def meta(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the member says about itself, with what it says about shards."""
        said = {"zone": self.zone, "address": self.address, **state}
        return {"weight": self.weight, **{name: each for name, each in said.items() if each}}


class OwnEntry:
    """The entry of this member in the list: its incarnation, and what it says about shards."""

    def __init__(self, core: SessionCore, settings: OwnerSettings) -> None:
        self.registration = Registration(core, settings.member({}))
        self.incarnation = 0
        """The last one that `is_listed` found."""
        self._core = core
        self._settings = settings
        self._said: Mapping[str, Any] = {}

    def is_listed(self) -> bool:
        """Whether the member is on the list. It is not if it has lost its lease."""
        incarnation = self.registration.incarnation
        self.incarnation = incarnation or self.incarnation
        return incarnation is not None

    def say(self, prepared: list[int], failed: Mapping[int, str], retry: int) -> None:
        """Report the moves for which this member is prepared, and as many shards that keep failing
        as fit. The others follow when the plan has given these to other members."""
        reported: dict[str, str] = {}
        state = {"prepared": prepared[:MOVES_TO_ONE], "failed": reported, "retry": retry}
        room = MEMBER_BYTES - len(encode_json({"failed": {}, **self._settings.meta(state)}))
        for shard, error in sorted(failed.items()):
            room -= len(encode_json({str(shard): error}))
            if room < 0:
                break
            reported[str(shard)] = error
        if state != self._said:
            self._said = state
            self._core.tasks.start(self.registration.update(self._settings.meta(state)))


class DueShards:
    """The shards whose slot may not be what the plan says."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.all = True
        self.some: set[int] = set()

    def __bool__(self) -> bool:
        return self.all or bool(self.some)

    def look_again(self) -> None:
        self.all = True
        self.wakeup.wake()

    def look_again_at(self, shard: int) -> None:
        self.some.add(shard)
        self.wakeup.wake()

    def take(self, slots: Iterable[int], mine: Iterable[int]) -> Iterable[int]:
        due = dict.fromkeys([*slots, *mine]) if self.all else sorted(self.some)
        self.all = False
        self.some.clear()
        return due


class ShardOwner:
    """A member of a set of shards. Used on doyen's loop, except for `__init__`."""

    def __init__(self, core: SessionCore, settings: OwnerSettings, bodies: Bodies) -> None:
        if not core.store.capabilities.linearizable_reads:
            raise ConfigError(
                "shards require linearizable reads, which this store does not have: an owner could"
                " run a shard by an old plan. Use another store for them"
            )
        self.core = core
        self.settings = settings
        self.slots: dict[int, Slot] = {}
        self._entry = OwnEntry(core, settings)
        self._bodies = bodies
        self._due = DueShards()
        wake, named = self._due.wakeup.wake, (core, settings.shards, settings.name)
        self.plan = FollowedPlan(
            *named, slots=self.slots, changed=wake, replaced=self._plan_replaced
        )
        self._moves = Moves(*named, bodies, changed=wake, ended=self._due.look_again_at)
        self._claims = Claims(
            core, self.plan, settings.campaign, begin=self._begin, drop=self._leave
        )
        self._failures = BodyFailures()
        self._unread = UnreadLog(settings.shards)
        self._stopping = False
        self._empty = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def terms(self) -> dict[int, ShardTerm]:
        """The terms of the shards whose body runs."""
        return {
            shard: slot.leading.term
            for shard, slot in list(self.slots.items())
            if slot.leading is not None and isinstance(slot.leading.term, ShardTerm)
        }

    async def join(self) -> None:
        """Become a member. Returns once it is on the list; raises `NameTaken`."""
        await self._entry.registration.join()
        self._entry.registration.listing.on_eligibility(self, self._due.look_again)
        tasks = self.core.tasks
        self._tasks = [tasks.start(self._follow_changes())]
        self._tasks[0].add_done_callback(lambda _: self._empty.set())
        if self.settings.control:
            name = self.settings.name
            self._tasks.append(tasks.start(control(self.core, self.settings.shards, name)))

    async def leave(self) -> None:
        """Leave the list, end all terms, and wait until the bodies have ended and the records are
        deleted."""
        self._stopping = True
        for slot in list(self.slots.values()):
            self._release(slot, "its member leaves")
        leaving = asyncio.ensure_future(self._entry.registration.leave())
        # If the session was closed, no task is left that would end the slots.
        while self.slots and not self._tasks[0].done():
            self._empty.clear()
            await self._empty.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(leaving, *self._tasks, return_exceptions=True)
        self._entry.registration.listing.forget(self)
        self.plan.watched.close()
        self._moves.members.close()

    async def _follow_changes(self) -> None:
        """Do what the plan says, again after every change, until cancelled."""
        due, plan = self._due, self.plan
        while True:
            due.wakeup.woken = False
            try:
                await plan.watched.watch()
                if plan.watched.stale:
                    await plan.read()
                if await self._moves.read_members(plan.current):
                    due.some.update(plan.current.moves)
                if self._failures.next_time() <= asyncio.get_running_loop().time():
                    due.all = True
                if due:
                    self._follow_plan()
                if plan.unheld:
                    await self._look_at_unheld()
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(self.core.calls.retry_pause())
                continue
            except (BadDocument, StoreError) as error:
                self._unread.report(error)
                await asyncio.sleep(self.core.calls.retry_pause())
                ttl_s = self.core.calls.timing.ttl_s
                await due.wakeup.sleep(asyncio.get_running_loop().time() + ttl_s)
                continue
            self._unread.clear()
            await due.wakeup.sleep(self._failures.next_time())

    def _plan_replaced(self, earlier: ShardPlan) -> None:
        if self.plan.current.retry != earlier.retry:
            self._failures = BodyFailures()
        self._moves.members.stale = self._due.all = True
        if self.plan.current.moves and not self._moves.held_back:
            self._moves.held_back = True
            loop = asyncio.get_running_loop()
            latest = loop.time() + LONGEST_CALM_S
            loop.call_later(calm_after(self.plan.took_s), self._let_turns_begin, latest)

    def _let_turns_begin(self, latest: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < latest and not self._moves.are_ready(self.plan.current):
            loop.call_later(READY_LOOK_S, self._let_turns_begin, latest)
            return
        self._moves.held_back = False
        self._take_turns()

    def _is_planned(self, shard: int) -> bool:
        if self._stopping or shard in self._failures.given_up:
            return False
        plan = self.plan.current
        move = plan.moves.get(shard)
        ready = move is not None and self._moves.is_ready(move)
        return plan.planned(self.settings.name, self._entry.incarnation, shard, target_ready=ready)

    def _follow_plan(self) -> None:
        """Release what is not planned, claim what is, and prepare for shards that are to move here.

        A member that is not on the list, because it has lost its lease, claims nothing.
        """
        plan, listed = self.plan.current, self._entry.is_listed()
        pausing = self._failures.pausing(asyncio.get_running_loop().time())
        for shard in self._due.take(self.slots, self.plan.mine):
            slot, planned = self.slots.get(shard), self._is_planned(shard)
            if slot is not None and not planned:
                if shard in plan.moves and slot.stage is Stage.RUNNING and not self._stopping:
                    self._moves.outgoing[shard] = None
                else:
                    self._release(slot, MOVED)
            elif slot is None and planned and listed and shard not in pausing:
                slot = self.slots[shard] = Slot(shard)
                self._claims.claim(slot)
        self._take_turns()
        prepared = self._moves.prepare(plan, self._entry.incarnation)
        mine, given_up = set(self.plan.mine), self._failures.given_up
        failed = {shard: error for shard, error in given_up.items() if shard in mine}
        self._entry.say(prepared, failed, plan.retry)

    def _take_turns(self) -> None:
        """Release shards whose new owner is ready, one at a time."""
        loop = asyncio.get_running_loop()
        while (shard := self._moves.next_turn()) is not None:
            slot = self.slots.get(shard)
            if slot is not None and not self._is_planned(shard):
                turn = self._moves.ending = shard, loop.time()
                loop.call_later(LONGEST_ENDING_S, self._end_slow_turn, turn)
                self._release(slot, MOVED)

    def _end_slow_turn(self, turn: tuple[int, float]) -> None:
        """End a turn whose body takes long to end."""
        slot = self.slots.get(turn[0])
        if slot is not None and slot.leading is not None:
            self._end_turn(turn)

    def _end_turn(self, turn: tuple[int, float]) -> None:
        if turn == self._moves.ending:
            self._moves.ending = None
            self._take_turns()

    def _begin(self, slot: Slot) -> None:
        """Begin the body of a shard that was won, if the plan still gives it to this member."""
        attempt = slot.attempt
        assert attempt is not None
        record = attempt.record
        assert record is not None
        if not slot.wanted or not self._is_planned(slot.shard):
            self._leave(slot)
            return
        make_term = partial(
            ShardTerm,
            shards=self.settings.shards,
            shard=slot.shard,
            generation=self.plan.current.generation,
        )
        try:
            slot.leading = Leading(attempt, record, make_term=make_term, watched=False)
        except LeaseGone as error:
            attempt.keepalive.lose(str(error))
            self._leave(slot)
            return
        slot.stage = Stage.RUNNING
        slot.began_at = asyncio.get_running_loop().time()
        term = slot.leading.term
        assert isinstance(term, ShardTerm)
        self._bodies.start(term, partial(self._body_ended, slot))

    def _body_ended(self, slot: Slot, error: BaseException | None) -> None:
        assert slot.leading is not None
        if slot.leading.supervises:
            self.core.tasks.start(self._after_processes(slot, slot.leading, error))
            return
        shard, term = slot.shard, slot.leading.term
        now = asyncio.get_running_loop().time()
        slot.leading.body_ended()
        if slot.wanted and term.state is TermState.ENDED:
            ran_s, limit = now - slot.began_at, self.plan.current.failures
            self._failures.ended(shard, error, ran_s=ran_s, now=now, limit=limit)
            if error is not None:
                log_shard_error("shard_body_failed", self.settings.shards, shard, error)
        self._leave(slot)

    async def _after_processes(
        self, slot: Slot, leading: Leading, error: BaseException | None
    ) -> None:
        await leading.without_processes()
        self._body_ended(slot, error)

    def _release(self, slot: Slot, reason: str) -> None:
        """The shard is not this member's any more."""
        slot.wanted = False
        if slot.stage is Stage.RUNNING and slot.leading is not None:
            slot.stage = Stage.ENDING
            slot.leading.resign(reason)
        elif slot.stage is Stage.BLOCKED:
            self._leave(slot)

    def _leave(self, slot: Slot) -> None:
        """Delete the record, if there is one. There is no body, or it has ended."""
        slot.stage = Stage.ENDING
        slot.leading = None
        leaving = None if slot.attempt is None else slot.attempt.leave()
        if leaving is None:
            self._gone(slot)
        else:
            leaving.add_done_callback(lambda _: self._gone(slot))

    def _gone(self, slot: Slot) -> None:
        del self.slots[slot.shard]
        self._empty.set()
        turn, loop = self._moves.ending, asyncio.get_running_loop()
        if turn is not None and turn[0] == slot.shard:
            pause_s = min((TURN - 1) * (loop.time() - turn[1]), LONGEST_PAUSE_S)
            loop.call_later(pause_s, self._end_turn, turn)
        self._due.look_again_at(slot.shard)

    async def _look_at_unheld(self) -> None:
        """End terms whose record was removed. What the plan says may be out of date, so the records
        are read. The list is replaced by that of another plan that is read meanwhile."""
        while unheld := self.plan.unheld:
            slot = self.slots.get(unheld[-1])
            leading = None if slot is None or slot.stage is not Stage.RUNNING else slot.leading
            if leading is not None:
                record = await leading.attempt.get(leading.attempt.record_key)
                if record is None or record.revision != leading.term.token:
                    leading.term._lose(REMOVED)
            unheld.pop()
