"""The controller of a set of shards: an elected leader that writes the plan.

Every member of the set is a candidate. The one that is elected first rewrites the plan under its
own token: from then on a write of its predecessor fails, because each write names the version that
it replaces. Then it takes one step after another: read, compute the next plan, and write it if it
differs. There is at most one write in `settle_s`.

Only the controller writes the plan. If another program has deleted it or written something
else, the controller restores it: as it knows it, or else from the records of the shards. A spec
that was deleted or cannot be read is left alone, because only people know what they want; the plan
says so.

The controller is the one process that watches the records of all shards. When they have not changed
for a ttl, it checks once that each shard has one, and names those that do not in the plan.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from doyen.election.attempt import Wakeup
from doyen.election.candidate import Candidacy
from doyen.election.core import SessionCore
from doyen.election.options import CampaignSettings
from doyen.errors import (
    BadDocument,
    ConfigError,
    Conflict,
    LeadershipLost,
    OutcomeUnknown,
    StaleToken,
    StoreError,
    StoreUnavailable,
)
from doyen.events.log_lines import log_line
from doyen.manage.documents import Document, Versioned
from doyen.manage.roster import read_members
from doyen.manage.shards.plan import NO_MEMBER, ShardPlan
from doyen.manage.shards.spec import PLAN_BYTES, ShardSpec, check_weight
from doyen.manage.shards.steps import SeenMember, next_plan, unheld
from doyen.model import Claim, Entry, Member, leader_key, members_key, shards_key
from doyen.stores.port import Watch
from doyen.term import Term

__all__ = ["Controller", "UnreadLog", "control", "group_of", "read_holders", "seen_members"]

log = logging.getLogger("doyen")

ASIDE_FROM = 500
"""From this number of shards on, plans are computed on another thread."""
TICK_S = 1.0
"""How often to look at moves and members that are waited for if nothing changes."""
LINGER_S, LONGEST_LINGER_S = 0.5, 5.0
"""While moves are not complete, the next plan waits until none was written and no record has
changed for `LINGER_S`, and no longer than `LONGEST_LINGER_S` after the last plan."""
QUIET_S = 0.05
"""A plan is not written this soon after a record was created: its owner reads the plan before it
begins, and would have to wait until all members have read the new one. While records keep changing
and nothing else does, the controller reads nothing: its requests would compete with those of the
owners whose shards are being moved."""
LOOKS = 4
"""How many times per `settle_s` to check whether records still change."""
CHECK_AFTER_TTLS = 10
"""If records keep changing, they are checked after this many ttls."""
COUNTED_S = 10.0
"""How often at least a plan is written while shards are kept for members that have gone: the next
controller goes on with the seconds left that are in the plan. At first it is written more often, so
that controllers that follow one another quickly do not all begin with the same number."""
GETS_AT_ONCE = 32
"""More records than this are read by one list."""
SPEC_UNREAD = "the spec cannot be read, and the plan stays as it is"


def group_of(name: str) -> str:
    """The group of a set's members, which is also the name of the election of its controller."""
    return f"shards/{name}"


def seen_member(member: Member) -> SeenMember:
    """What the entry of a member says. A member whose entry has an unexpected value gets the weight
    0."""
    meta: Mapping[str, Any] = member.meta
    try:
        weight = float(meta.get("weight", 1.0))
        check_weight(weight)
        return SeenMember(
            member.incarnation,
            weight if member.state == "up" else 0.0,
            str(meta.get("zone", "")),
            str(meta.get("address", "")),
            frozenset(map(int, meta.get("prepared", ()))),
            {int(shard): str(error) for shard, error in meta.get("failed", {}).items()},
            int(meta.get("retry", 0)),
        )
    except (TypeError, ValueError, AttributeError, OverflowError):
        return SeenMember(member.incarnation, 0.0)


async def seen_members(core: SessionCore, name: str) -> dict[str, SeenMember]:
    """The live members of a set of shards. One that is not up has the weight 0."""
    roster = await read_members(core, group_of(name))
    return {each.name: seen_member(each) for each in roster.members.values()}


async def read_holders(core: SessionCore, name: str) -> dict[int, str]:
    """Who holds the leader record of each shard that has one."""
    prefix = shards_key(name, "at")
    holders = {}
    for entry in await core.call(core.store.list(prefix)):
        shard, _, rest = entry.key[len(prefix) + 1 :].partition("/")
        if rest == "leader" and shard.isdecimal():
            holders[int(shard)] = Claim.decode(entry.value).name
    return holders


class UnreadLog:
    """Logs that a document of a set of shards cannot be read, once for each error."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = ""

    def report(self, error: Exception) -> None:
        if str(error) != self._last:
            self._last = str(error)
            log.warning("%s", log_line(event="shards_unread", set=self._name, error=error))

    def clear(self) -> None:
        """Everything can be read."""
        self._last = ""


class Controller:
    """One term of a controller. Used on doyen's loop."""

    def __init__(self, core: SessionCore, name: str, term: Term) -> None:
        self._core = core
        self._name = name
        self._term = term
        self._spec = Document(core.calls, shards_key(name, "spec"))
        self._plan = Document(core.calls, shards_key(name, "plan"))
        self._wakeup = Wakeup()
        self._news = True
        """Something else than a record may have changed since the last step."""
        self._watches: dict[str, Watch] = {}
        self._known: Versioned | None = None
        """The plan that this controller has written."""
        self._current = ShardPlan()
        """The plan that follows from it."""
        self._stepped_at = 0.0
        self._said: Mapping[str, SeenMember] = {}
        """What the members said in the last step, except for the moves they are prepared for."""
        self._took_over_at = 0.0
        self._written_at = 0.0
        self._records_at = 0.0
        """When a record changed last, and when one did first after they were checked."""
        self._records_since = 0.0
        self._checking: asyncio.TimerHandle | None = None
        self._check_due = False
        self._plan_changed = asyncio.Event()
        self._overwritten = False
        """The plan is not what this controller has written."""
        self._unread = UnreadLog(name)

    async def run(self) -> None:
        """Control until the term is over."""
        calls = self._core.calls
        guarding = asyncio.ensure_future(self._guard_plan())
        try:
            while True:
                try:
                    if self._known is None or self._overwritten:
                        await self._take_over()
                    pause_s = await self._step()
                except (Conflict, StoreUnavailable, OutcomeUnknown) as error:
                    log.debug("%s", log_line(event="plan_unwritten", set=self._name, error=error))
                    self._known = None
                    self._news = True
                    self._records_changed()  # what was found in them may not have been written
                    pause_s = calls.retry_pause()
                except BadDocument as error:
                    self._unread.report(error)
                    pause_s = calls.retry_pause()
                    until = asyncio.get_running_loop().time() + calls.timing.ttl_s
                    await self._wakeup.sleep(until)
                await asyncio.sleep(pause_s)
        finally:
            guarding.cancel()
            await asyncio.gather(guarding, return_exceptions=True)
            if self._checking is not None:
                self._checking.cancel()
            for watch in self._watches.values():
                watch.close()

    async def _take_over(self) -> None:
        """Rewrite the plan under this term's token, whatever it says."""
        core = self._core
        self._known, self._overwritten = None, False
        entry = await core.call(core.store.get(self._plan.key))
        self._stepped_at = core.runtime.clock.now()
        known = None if entry is None else await self._read_to_take_over(entry)
        if known is None:
            asked = await self._spec.read()
            if asked is None:
                return
            self._current = await self._restored(ShardSpec.decode(asked.body), entry)
            known = entry and Versioned.unreadable(entry)
        await self._write(known)
        self._took_over_at = self._written_at

    async def _read_to_take_over(self, entry: Entry) -> Versioned | None:
        """Read the plan; None if another program than a controller has written it. Such a program
        is also one that writes a token of the future: there is no later leader than this one."""
        core = self._core
        try:
            known = Versioned.decode(entry)
            plan = ShardPlan.decode(known.body)
        except BadDocument as error:
            self._unread.report(error)
        else:
            if known.token <= self._term.token:
                self._current = plan
                return known
        record = await core.call(core.store.get(leader_key(group_of(self._name))))
        if record is None or record.revision != self._term.token:
            raise StaleToken(f"another controller of {self._name!r} has been elected")
        return None

    async def _restored(self, spec: ShardSpec, entry: Entry | None) -> ShardPlan:
        """The plan in place of one that cannot be read or is gone. With a barrier the shards begin
        in another generation if it is not known which one the present owners are of."""
        if self._current.generation:
            return self._current
        holders = await read_holders(self._core, self._name)
        if entry is None and not holders:
            return ShardPlan()  # the first one
        owners = tuple(holders.get(shard, NO_MEMBER) for shard in range(spec.count))
        generation = self._term.token  # higher than that of every earlier plan
        return ShardPlan(
            generation=generation, open=not spec.barrier, started=bool(holders), owners=owners
        )

    async def _guard_plan(self) -> None:
        """Have the plan restored when it is not one of this controller any more."""
        while True:
            await self._plan_changed.wait()
            self._plan_changed.clear()
            known = self._known
            try:
                found = await self._plan.read(known)
                overwritten = found is None or found.token != self._term.token
            except BadDocument:
                overwritten = True
            except StoreError:
                self._plan_changed.set()
                await asyncio.sleep(self._core.calls.retry_pause())
                continue
            if overwritten and known is not None:
                self._overwritten = True
                self._note_news()

    async def _write(self, expect: Versioned | None) -> None:
        self._term.check()
        body = self._current.encode()
        if (size := len(json.dumps(body, separators=(",", ":")))) > PLAN_BYTES:
            raise ConfigError(
                f"the plan of {self._name!r} would take {size} bytes, more than {PLAN_BYTES}: use"
                " fewer shards or standbys, or shorter names and addresses"
            )
        self._known = await self._plan.write(body, expect=expect, token=self._term.token)
        self._written_at = asyncio.get_running_loop().time()

    async def _step(self) -> float:
        """Take one step, and return for how long to wait before the next."""
        core = self._core
        for scope, notify in {
            self._spec.key: self._note_news,
            members_key(group_of(self._name)): self._note_news,
            shards_key(self._name, "at"): self._records_changed,
            self._plan.key: self._plan_changed.set,
        }.items():
            if scope not in self._watches:
                self._watches[scope] = await core.call(core.store.watch(scope, notify))
                notify()  # it may have changed before
        quiet_s = self._quiet_in_s(asyncio.get_running_loop().time())
        if self._current.moves and quiet_s > 0 and not self._news:
            return quiet_s
        self._wakeup.woken = self._news = False
        try:
            asked = await self._spec.read()
            if asked is None and self._known is None:
                await self._wakeup.sleep(math.inf)  # the set has not been created yet
                return 0.0
            if asked is None:
                raise BadDocument(
                    f"{self._spec.key} was deleted by another program. To create it again, use"
                    f" 'doyen shards {self._name} create COUNT'"
                )
            spec = ShardSpec.decode(asked.body)
        except BadDocument as error:
            await self._note(f"{SPEC_UNREAD}: {error}")
            raise
        self._unread.clear()
        if self._current.note.startswith(SPEC_UNREAD):
            await self._note("")
        members = await seen_members(core, self._name)
        checking, known = self._check_due, self._current
        records = await self._records(all_of_them=checking)
        if checking:
            self._check_due = False
            known = replace(known, unheld=unheld(known, members, records))
        now = core.runtime.clock.now()
        # What members say about moves is in the records too, once these are complete.
        said = {name: each._replace(prepared=frozenset()) for name, each in members.items()}
        if not checking and (asked.version, said) == (known.spec, self._said):
            loop_now = asyncio.get_running_loop().time()
            if self._is_moving(spec, records, loop_now):
                await self._wakeup.sleep(loop_now + spec.settle_s)
                return spec.settle_s / LOOKS
            if known.moves and (quiet_s := self._quiet_in_s(loop_now)) > 0:
                return quiet_s
        compute = partial(next_plan, spec, known, members, records, now - self._stepped_at)
        if spec.count < ASIDE_FROM:
            plan = compute()
        else:
            plan = await core.runtime.aside(compute, lambda _: None)
        plan = replace(plan, spec=asked.version)
        self._stepped_at, self._said = now, said
        # The same shards may have lost their records again, so they are named again.
        missing = checking and bool(plan.unheld)
        counted = bool(plan.grace) and self._is_count_due(asyncio.get_running_loop().time())
        changed = missing or counted or plan.significant() != self._current.significant()
        self._current = plan
        if changed or self._known is None:
            await self._write(self._known)
        if changed and not plan.open:
            return spec.settle_s  # perhaps there is no record any more
        waits = self._depends_on_records() or bool(plan.grace)
        await self._wakeup.sleep(asyncio.get_running_loop().time() + TICK_S if waits else math.inf)
        return spec.settle_s

    async def _note(self, note: str) -> None:
        """Have the plan say this to people."""
        if self._known is not None and self._current.note != note:
            self._current = replace(self._current, note=note)
            await self._write(self._known)

    def _is_count_due(self, now: float) -> bool:
        """Whether the seconds for which shards are kept have not been written for long."""
        pause_s = max((self._written_at - self._took_over_at) / 2, TICK_S)
        return now >= self._written_at + min(pause_s, COUNTED_S)

    def _is_moving(self, spec: ShardSpec, records: Mapping[int, str], now: float) -> bool:
        """Whether moves are under way, so that the step can wait until all of them are complete:
        every member reads each plan."""
        longest_s = min(LONGEST_LINGER_S, max(LINGER_S, min(spec.prepare_s, spec.ending_s)))
        return (
            any(records.get(shard) != move.to for shard, move in self._current.moves.items())
            and now < max(self._written_at, self._records_at) + LINGER_S
            and now < self._written_at + longest_s
        )

    def _quiet_in_s(self, now: float) -> float:
        """How long to wait until the owner of the record that was created last has begun. Records
        that change all the time are not waited for."""
        return min(self._records_at + QUIET_S, self._written_at + LONGEST_LINGER_S) - now

    def _depends_on_records(self) -> bool:
        return bool(self._current.moves) or not self._current.open

    def _note_news(self) -> None:
        self._news = True
        self._wakeup.wake()

    def _records_changed(self) -> None:
        """Take a step if the plan depends on records, and check them when they are at rest."""
        now = asyncio.get_running_loop().time()
        self._records_at = now
        if self._checking is None:
            self._records_since = now
            self._check_later()
        if self._depends_on_records():
            self._wakeup.wake()

    def _check_later(self) -> None:
        """Have the records checked, unless one has changed within the last ttl."""
        loop, ttl_s = asyncio.get_running_loop(), self._core.calls.timing.ttl_s
        latest = self._records_since + CHECK_AFTER_TTLS * ttl_s
        due = min(self._records_at + ttl_s, latest)
        if loop.time() < due:
            self._checking = loop.call_at(due, self._check_later)
            return
        self._checking = None
        self._check_due = True
        self._wakeup.wake()

    async def _records(self, *, all_of_them: bool) -> dict[int, str]:
        """The holders of the records that the next step depends on, or of all of them."""
        core, plan = self._core, self._current
        if all_of_them or not plan.open or len(plan.moves) > GETS_AT_ONCE:
            return await read_holders(core, self._name)
        shards = list(plan.moves)
        entries = await asyncio.gather(*map(self._record, shards))
        return {
            shard: Claim.decode(entry.value).name
            for shard, entry in zip(shards, entries, strict=True)
            if entry is not None
        }

    async def _record(self, shard: int) -> Entry | None:
        core = self._core
        return await core.call(core.store.get(leader_key(f"{self._name}/{shard}", "shards")))


async def control(core: SessionCore, name: str, member: str) -> None:
    """Be a candidate for the controller of a set, and control in each term, until cancelled or the
    session is closed."""
    settings = CampaignSettings(election=group_of(name), name=member)
    while not core.closed:
        candidacy = Candidacy(core, settings)
        try:
            term = await candidacy.win()
            await _control(Controller(core, name, term), term)
        except (StaleToken, LeadershipLost) as error:
            log.debug("%s", log_line(event="controller_ended", set=name, error=error))
        except Exception as error:  # such as that no thread can be started
            expected = isinstance(error, StoreError | ConfigError)
            line = log_line(event="controller_failed", set=name, error=error)
            log.warning("%s", line, exc_info=None if expected else error)
            await asyncio.sleep(core.calls.timing.ttl_s)
        finally:
            core.runtime.start(candidacy.leave())


async def _control(controller: Controller, term: Term) -> None:
    """Run a controller until it fails or its term is over. It has ended when this returns."""
    controlling = asyncio.ensure_future(controller.run())
    over = asyncio.ensure_future(term.lost())
    try:
        await asyncio.wait({controlling, over}, return_when=asyncio.FIRST_COMPLETED)
        if controlling.done():
            controlling.result()
    finally:
        for task in (controlling, over):
            task.cancel()
        await asyncio.gather(controlling, over, return_exceptions=True)
