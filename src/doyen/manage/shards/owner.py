"""A member of a set of shards: claims the shards that are planned for it, and runs their bodies.

For each shard that the member claims or owns there is one `Slot`:

    claiming ── record created ──▶ won ── still planned ──▶ running ── term over ──▶ ending
        │                           │                                                  │
        └─ no longer planned ───────┴── no longer planned ─────────────────────────────┴─▶ (none)

- Exclusion is that of an election without a line: the owner holds the leader record, created
  atomically under the session's lease.
- After winning and before its body begins, the plan is read again. A process that was paused with
  an old plan, for example one of an earlier generation, lets go instead of running its body. One
  read serves all shards that were won before it began.
- A record is deleted only when the body has ended. No body of a shard begins before the one before
  it, in the same process, has ended.
- A record that another member still holds is watched, until it is gone or not planned any more. The
  records of a large set are not watched together: each change would be reported to each member.
- Everything else is done for the set and not for each shard: one lease, one entry in the list of
  members, a watch of the plan, and a few tasks that claim. The members are watched while shards are
  to move from here, to see when the new owners are ready.
- That the records of shards that run still stand is checked by the controller. An owner that the
  plan tells of a missing record reads it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from doyen.election.attempt import Attempt, Wakeup
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
from doyen.events.log_lines import log_line
from doyen.manage.documents import Document, Versioned, went_back
from doyen.manage.health import HealthCheck
from doyen.manage.members import MemberSettings, Registration
from doyen.manage.shards.controller import control, group_of, seen_members
from doyen.manage.shards.plan import Move, ShardPlan
from doyen.manage.shards.spec import check_weight
from doyen.manage.shards.steps import SeenMember
from doyen.model import members_key, shards_key
from doyen.stores.port import Creation, Watch
from doyen.term import Term, TermState

__all__ = ["Bodies", "OwnerSettings", "ShardOwner", "ShardTerm"]

log = logging.getLogger("doyen")

CLAIMS_AT_ONCE, CLAIMS_AT_LEAST = 32, 2
"""How many records a member claims at a time; fewer while the store does not keep up."""
REPORTED = 32
"""How many shards that keep failing a member reports at a time."""
STEADY_S = 60.0
"""A body that has run for this long has not failed to start; its earlier failures are forgotten."""
ENDINGS_AT_ONCE = 2
ENDING_TURN_S = 0.05
"""So many shards at a time are let go because their new owner is ready: the next when these are
gone, or after a while if their bodies take long to end. If all were let go at once, the requests of
all new owners would compete, and every shard would be without an owner until the last is done."""
PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""How long to wait before a body that ended is run again: doubled with each failure in a row."""


class ShardTerm(Term):
    """The ownership of one shard: a term, with the shard's number."""

    def __init__(self, *, shards: str, shard: int, generation: int, **term: Any) -> None:
        super().__init__(**term)
        self.shards = shards
        """The name of the set."""
        self.shard = shard
        """The number of the shard."""
        self.generation = generation
        """The generation of the plan in which the body began."""


class Bodies(Protocol):
    """Runs the code of users, on their loop or on threads. Called on doyen's loop."""

    def start(self, term: ShardTerm, ended: Callable[[BaseException | None], None]) -> None:
        """Begin the body of a shard, and end it when the term is over. `ended` is called on doyen's
        loop when it has ended, with the exception that it raised."""
        ...

    def prepare(self, shard: int, done: Callable[[BaseException | None], None]) -> None:
        """Prepare for a shard that another member still owns; `done` as above."""
        ...


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


class Stage(enum.Enum):
    CLAIMING = "claiming"
    BLOCKED = "blocked"
    """Another's record stands."""
    WON = "won"
    """The plan is to be read again before the body begins."""
    RUNNING = "running"
    ENDING = "ending"
    """The term is over and the body has not ended, or the record is being deleted."""


class Slot:
    """A shard that this member claims or owns."""

    __slots__ = ("attempt", "began_at", "changed", "leading", "shard", "stage", "wanted")

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.stage = Stage.CLAIMING
        self.attempt: Attempt | None = None
        self.leading: Leading | None = None
        self.began_at = 0.0
        self.wanted = True
        """The plan gives the shard to this member."""
        self.changed = False
        """The record, which another holds, may have changed since it was claimed."""


class ClaimPace:
    """How many records are claimed at a time: half as many after a request has failed, and twice as
    many after that many have succeeded. All members claim at once when a set is assigned. If the
    store does not keep up, requests time out, and repeating them all would keep it from
    recovering."""

    def __init__(self) -> None:
        self.limit = CLAIMS_AT_ONCE
        self._succeeded = 0

    def succeeded(self) -> None:
        self._succeeded += 1
        if self._succeeded >= self.limit:
            self.limit = min(2 * self.limit, CLAIMS_AT_ONCE)
            self._succeeded = 0

    def failed(self) -> None:
        self.limit = max(self.limit // 2, CLAIMS_AT_LEAST)
        self._succeeded = 0


class BodyFailures:
    """The bodies that ended by themselves: when each is run again, and which are given up."""

    def __init__(self) -> None:
        self.given_up: dict[int, str] = {}
        """The shards whose body has failed too often, with the last exception."""
        self._in_a_row: dict[int, int] = {}
        self._not_before: dict[int, float] = {}

    def ended(
        self, shard: int, error: BaseException | None, *, ran_s: float, now: float, limit: int
    ) -> None:
        """A body failed, or returned although its member still owns the shard."""
        if ran_s >= STEADY_S:
            self._in_a_row.pop(shard, None)
        failures = self._in_a_row.get(shard, 0) + (error is not None)
        self._in_a_row[shard] = failures
        self._not_before[shard] = now + min(PAUSE_S * 2**failures, LONGEST_PAUSE_S)
        if error is not None and failures >= limit:
            self.given_up[shard] = repr(error)[:100]

    def next_time(self) -> float:
        """When a body that ended is run again."""
        return min(self._not_before.values(), default=math.inf)

    def pausing(self, now: float) -> Collection[int]:
        """The shards whose body is not run again yet."""
        self._not_before = {n: at for n, at in self._not_before.items() if at > now}
        return self._not_before.keys()


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
        self.registration = Registration(core, settings.member({}))
        self.slots: dict[int, Slot] = {}
        self.plan = ShardPlan()
        self._bodies = bodies
        self._document = Document(core.calls, shards_key(settings.shards, "plan"))
        self._version: Versioned | None = None
        self._reading = asyncio.Lock()
        self._wakeup = Wakeup()
        self._watches: dict[str, Watch] = {}
        self._stale = dict.fromkeys(("plan", "members"), True)
        """What has changed since it was read."""
        self._due_all = True
        """All slots may not be what the plan says."""
        self._due: set[int] = set()
        """Shards whose slot may not be what the plan says."""
        self._incarnation = 0
        """The last incarnation of this member."""
        self._mine: list[int] = []
        """The shards that the plan gives to this member, now or after a move."""
        self._unheld: list[int] = []
        """Those of this member's shards that have no record, according to the plan."""
        self._others: Mapping[str, SeenMember] = {}
        """The members to which shards of this one are moved."""
        self._prepared: dict[int, bool] = {}
        """The moves to this member, by id, and whether it is prepared for them."""
        self._outgoing: dict[int, None] = {}
        """The shards that wait for their turn to be let go."""
        self._endings: set[int] = set()
        """Those whose turn it is."""
        self._failures = BodyFailures()
        self._said: dict[str, Any] = {}
        self._unread = ""
        """What was logged last about a document that cannot be read."""
        self._claims: deque[Slot] = deque()
        self._claimers = 0
        self._pace = ClaimPace()
        self._won: list[Slot] = []
        self._confirming = False
        self._stopping = False
        self._empty = asyncio.Event()
        self._abandoned = False
        """The session was closed: no task is left that would end the slots."""
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
        await self.registration.join()
        self.registration.on_eligibility(self, self._look_again)
        tasks = self.core.tasks
        self._tasks = [tasks.start(self._serve())]
        if self.settings.control:
            name = self.settings.name
            self._tasks.append(tasks.start(control(self.core, self.settings.shards, name)))

    async def leave(self) -> None:
        """Leave the list, end all terms, and wait until the bodies have ended and the records are
        deleted."""
        self._stopping = True
        for slot in list(self.slots.values()):
            self._release(slot, "its member leaves")
        leaving = asyncio.ensure_future(self.registration.leave())
        while self.slots and not self._abandoned:
            self._empty.clear()
            await self._empty.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(leaving, *self._tasks, return_exceptions=True)
        self.registration.forget(self)
        for watch in self._watches.values():
            watch.close()

    async def _serve(self) -> None:
        """Do what the plan says, again after every change, until cancelled."""
        try:
            await self._follow_changes()
        finally:
            self._abandoned = True
            self._empty.set()

    async def _follow_changes(self) -> None:
        while True:
            self._wakeup.woken = False
            try:
                await self._watch("plan", shards_key(self.settings.shards, "plan"))
                if self._stale["plan"]:
                    await self._read_plan()
                await self._read_members()
                if self._failures.next_time() <= asyncio.get_running_loop().time():
                    self._due_all = True
                if self._due_all or self._due:
                    self._follow_plan()
                if self._unheld:
                    await self._look_at_unheld()
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(self.core.calls.retry_pause())
                continue
            except (BadDocument, StoreError) as error:
                self._report_unread(error)
                await asyncio.sleep(self.core.calls.retry_pause())
                ttl_s = self.core.calls.timing.ttl_s
                await self._wakeup.sleep(asyncio.get_running_loop().time() + ttl_s)
                continue
            self._unread = ""
            await self._wakeup.sleep(self._failures.next_time())

    def _report_unread(self, error: Exception) -> None:
        if str(error) != self._unread:
            self._unread = str(error)
            line = log_line(event="shards_unread", set=self.settings.shards, error=error)
            log.warning("%s", line)

    async def _read_members(self) -> None:
        """While shards are to move from here, see which new owners are ready."""
        name, plan = self.settings.name, self.plan
        if not any(plan.owners[shard] == name for shard in plan.moves):
            if (watch := self._watches.pop("members", None)) is not None:
                watch.close()
            return
        await self._watch("members", members_key(group_of(self.settings.shards)))
        if self._stale["members"]:
            self._stale["members"] = False
            try:
                self._others = await seen_members(self.core, self.settings.shards)
            except BaseException:
                self._stale["members"] = True
                raise
            self._due.update(self.plan.moves)

    def _look_again(self) -> None:
        self._due_all = True
        self._wakeup.wake()

    def _look_again_at(self, shard: int) -> None:
        self._due.add(shard)
        self._wakeup.wake()

    async def _watch(self, part: str, scope: str) -> None:
        """Watch the plan or the members, if that is not done yet."""
        if part not in self._watches:
            watching = self.core.store.watch(scope, partial(self._changed, part))
            self._watches[part] = await self.core.call(watching)
            self._stale[part] = True

    def _changed(self, part: str) -> None:
        self._stale[part] = True
        self._wakeup.wake()

    async def _read_plan(self) -> None:
        """Read the plan. Reads do not overtake one another."""
        async with self._reading:
            self._stale["plan"] = False
            try:
                version = await self._document.read(self._version)
                before = self._version
                if version is None and before is not None:
                    raise BadDocument(
                        f"{self._document.key} was deleted by another program; no shard begins"
                        " until a controller has written it again"
                    )
                if version is None or (before is not None and version.id == before.id):
                    return
                plan = ShardPlan.decode(version.body)
            except BaseException:
                self._stale["plan"] = True
                raise
            if before is not None and went_back(before, version):
                line = log_line(
                    event="plan_went_back",
                    set=self.settings.shards,
                    version=version.version,
                    before=before.version,
                    effect="the store has lost confirmed writes; the older plan is followed",
                )
                log.warning("%s", line)
            if plan.retry != self.plan.retry:
                self._failures = BodyFailures()
            self._version, self.plan = version, plan
            self._stale["members"] = self._due_all = True
            name = self.settings.name
            self._mine = plan.owned_by(name)
            self._mine += [shard for shard, move in plan.moves.items() if move.to == name]
            self._unheld = [shard for shard in plan.unheld if shard in self.slots]

    def _is_ready(self, move: Move) -> bool:
        if move.to == self.settings.name:
            return self._prepared.get(move.id, False)
        target = self._others.get(move.to)
        return (
            target is not None
            and target.incarnation == move.incarnation
            and move.id in target.prepared
        )

    def _is_planned(self, shard: int) -> bool:
        if self._stopping or shard in self._failures.given_up:
            return False
        move = self.plan.moves.get(shard)
        ready = move is not None and self._is_ready(move)
        return self.plan.planned(self.settings.name, self._incarnation, shard, target_ready=ready)

    def _follow_plan(self) -> None:
        """Let go what is not planned, claim what is, and prepare for what is to come.

        A member that is not on the list, because it has lost its lease, claims nothing.
        """
        listed = self.registration.incarnation is not None
        self._incarnation = self.registration.incarnation or self._incarnation
        due = dict.fromkeys([*self.slots, *self._mine]) if self._due_all else sorted(self._due)
        self._due_all = False
        self._due.clear()
        pausing = self._failures.pausing(asyncio.get_running_loop().time())
        for shard in due:
            slot, planned = self.slots.get(shard), self._is_planned(shard)
            if slot is not None and not planned:
                if shard in self.plan.moves and slot.stage is Stage.RUNNING and not self._stopping:
                    self._outgoing[shard] = None
                else:
                    self._release(slot, "the plan gives it to another member")
            elif slot is None and planned and listed and shard not in pausing:
                slot = self.slots[shard] = Slot(shard)
                self._claim(slot)
        self._take_turns()
        coming = {
            move.id: shard
            for shard, move in self.plan.moves.items()
            if (move.to, move.incarnation) == (self.settings.name, self._incarnation)
        }
        for move, shard in coming.items():
            if move not in self._prepared:
                self._prepared[move] = False
                self._bodies.prepare(shard, partial(self._prepare_ended, move, shard))
        self._prepared = {move: done for move, done in self._prepared.items() if move in coming}
        self._say()

    def _take_turns(self) -> None:
        """Let go shards whose new owner is ready, a few at a time."""
        while self._outgoing and len(self._endings) < ENDINGS_AT_ONCE:
            shard = next(iter(self._outgoing))
            del self._outgoing[shard]
            slot = self.slots.get(shard)
            if slot is not None and not self._is_planned(shard):
                self._endings.add(shard)
                asyncio.get_running_loop().call_later(ENDING_TURN_S, self._end_turn, shard)
                self._release(slot, "the plan gives it to another member")

    def _end_turn(self, shard: int) -> None:
        self._endings.discard(shard)
        self._take_turns()

    def _prepare_ended(self, move: int, shard: int, error: BaseException | None) -> None:
        if error is not None:
            self._report("shard_prepare_failed", shard, error)
        elif move in self._prepared:
            self._prepared[move] = True
            self._look_again_at(shard)

    def _report(self, event: str, shard: int, error: BaseException) -> None:
        name = f"{self.settings.shards}/{shard}"
        log.error("%s", log_line(event=event, shard=name, error=repr(error)), exc_info=error)

    def _say(self) -> None:
        """Have the member's entry say what it has prepared for and what keeps failing."""
        failed = dict(sorted(self._failures.given_up.items())[:REPORTED])
        state = {
            "prepared": [move for move, done in self._prepared.items() if done],
            "failed": {str(shard): error for shard, error in failed.items()},
            "retry": self.plan.retry,
        }
        if state != self._said:
            self._said = state
            self.core.tasks.start(self.registration.update(self.settings.meta(state)))

    def _claim(self, slot: Slot) -> None:
        slot.stage = Stage.CLAIMING
        self._claims.append(slot)
        self._start_claimers()

    def _start_claimers(self) -> None:
        if self._claims and self._claimers < self._pace.limit:
            self._claimers += 1
            self.core.tasks.start(self._work())

    async def _work(self) -> None:
        """Claim until nothing is left to claim. A few of these run at a time."""
        try:
            while self._claims and self._claimers <= self._pace.limit:
                slot = self._claims.popleft()
                if slot.wanted:
                    await self._create(slot)
                else:
                    self._leave(slot)
                self._start_claimers()
        finally:
            self._claimers -= 1

    async def _create(self, slot: Slot) -> None:
        """Create the record of a shard, under the same attempt until its outcome is known. If it
        is another's, watch it and try once more."""
        core, attempt = self.core, slot.attempt
        try:
            if attempt is None or attempt.keepalive.lose_if_expired():
                if attempt is not None:
                    attempt.end()
                keepalive = await core.leases.shared()
                attempt = slot.attempt = Attempt(
                    core, self.settings.campaign(slot.shard), keepalive
                )
                attempt.on_change = partial(self._record_changed, slot)
            slot.changed = False
            creation = await self._find_or_create(slot.shard, attempt)
            won = creation.won or attempt.is_mine(creation.entry)
            if not won and await core.deletions.delete_left_over(creation.entry):
                self._claim(slot)
                return
            if not won and slot.wanted and await attempt.watch_record():
                slot.changed = True  # perhaps it has gone meanwhile
        except LeaseGone as error:
            if attempt is not None:
                attempt.keepalive.lose(str(error))
            self._claim(slot)
            return
        except (StoreUnavailable, OutcomeUnknown):
            self._pace.failed()
            await asyncio.sleep(core.calls.retry_pause())
            self._claim(slot)
            return
        except StoreError as error:
            self._report("shard_unclaimed", slot.shard, error)
            await asyncio.sleep(core.calls.timing.ttl_s)
            self._claim(slot)
            return
        self._pace.succeeded()
        if won:
            attempt.record = creation.entry
            attempt.unwatch_record()
        if not slot.wanted:
            self._leave(slot)
        elif won:
            slot.stage = Stage.WON
            self._won.append(slot)
            if not self._confirming:
                self._confirming = True
                core.tasks.start(self._confirm())
        else:
            slot.stage = Stage.BLOCKED
            if slot.changed:
                self._claim(slot)

    async def _find_or_create(self, shard: int, attempt: Attempt) -> Creation:
        """Create a record. That of a shard that is on its way here is usually still the old
        owner's: it is watched and read first, which costs less than to try to create it."""
        store = self.core.store
        if shard in self.plan.moves and await attempt.watch_record():
            standing = await attempt.get(attempt.record_key)
            if standing is not None:
                return Creation(False, standing)
        lease = attempt.keepalive.lease
        return await attempt.write(store.create(attempt.record_key, attempt.record_value(), lease))

    def _record_changed(self, slot: Slot) -> None:
        """A record that another member holds, or held, has changed."""
        slot.changed = True
        if slot.stage is Stage.BLOCKED:
            self._claim(slot)

    async def _confirm(self) -> None:
        """Read the plan again for the shards that were won, and begin those that are planned."""
        try:
            while self._won:
                won, self._won = self._won, []
                try:
                    await self._read_plan()
                except (StoreError, BadDocument):
                    self._won = won + self._won
                    await asyncio.sleep(self.core.calls.retry_pause())
                    continue
                for slot in won:
                    if slot.wanted and self._is_planned(slot.shard):
                        self._begin(slot)
                    else:
                        self._leave(slot)
        finally:
            self._confirming = False

    def _begin(self, slot: Slot) -> None:
        attempt = slot.attempt
        assert attempt is not None
        record = attempt.record
        assert record is not None
        make_term = partial(
            ShardTerm,
            shards=self.settings.shards,
            shard=slot.shard,
            generation=self.plan.generation,
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
            ran_s, limit = now - slot.began_at, self.plan.failures
            self._failures.ended(shard, error, ran_s=ran_s, now=now, limit=limit)
            if error is not None:
                self._report("shard_body_failed", shard, error)
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
            slot.leading.let_go(reason)
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
        self._end_turn(slot.shard)
        self._look_again_at(slot.shard)

    async def _look_at_unheld(self) -> None:
        """End terms whose record was removed. What the plan says may be out of date, so the records
        are read. The list is replaced by that of another plan that is read meanwhile."""
        while unheld := self._unheld:
            slot = self.slots.get(unheld[-1])
            leading = None if slot is None or slot.stage is not Stage.RUNNING else slot.leading
            if leading is not None:
                record = await leading.attempt.get(leading.attempt.record_key)
                if record is None or record.revision != leading.term.token:
                    leading.term._lose("its record was removed by another process")
            unheld.pop()
