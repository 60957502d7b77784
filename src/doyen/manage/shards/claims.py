"""The claims of a member of a set of shards: it creates the records of those planned for it.

- Exclusion is that of an election without a line: the owner holds the leader record, created
  atomically under the session's lease.
- After winning and before its body begins, the plan is read again. A process that was paused with
  an old plan, for example one of an earlier generation, gives the shard up instead of running its
  body. One read serves all shards that were won before it began.
- A record that another member still holds is watched, until it is gone or not planned any more. The
  records of a large set are not watched together: each change would be reported to each member.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from doyen.election.attempt import Attempt
from doyen.election.core import SessionCore
from doyen.election.options import CampaignSettings
from doyen.errors import BadDocument, LeaseGone, OutcomeUnknown, StoreError, StoreUnavailable
from doyen.manage.shards.following import FollowedPlan
from doyen.manage.shards.slots import Slot, Stage, log_shard_error
from doyen.stores.port import Creation

__all__ = ["ClaimPace", "Claims"]

CLAIMS_AT_ONCE, CLAIMS_AT_LEAST = 32, 2
"""How many records a member claims at a time; fewer while the store does not keep up."""


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


class Claims:
    """Claims the shards of slots, a few at a time. Used on doyen's loop."""

    def __init__(
        self,
        core: SessionCore,
        plan: FollowedPlan,
        campaign: Callable[[int], CampaignSettings],
        *,
        begin: Callable[[Slot], None],
        drop: Callable[[Slot], None],
    ) -> None:
        """`begin` is called with each slot that was won, once the plan has been read again, `drop`
        with each that is not wanted any more."""
        self._core = core
        self._plan = plan
        self._campaign = campaign
        self._begin = begin
        self._drop = drop
        self._queue: deque[Slot] = deque()
        self._claimers = 0
        self._pace = ClaimPace()
        self._won: list[Slot] = []
        self._confirming = False

    def claim(self, slot: Slot) -> None:
        slot.stage = Stage.CLAIMING
        self._queue.append(slot)
        self._start_claimers()

    def _start_claimers(self) -> None:
        if self._queue and self._claimers < self._pace.limit:
            self._claimers += 1
            self._core.tasks.start(self._work())

    async def _work(self) -> None:
        """Claim until nothing is left to claim. A few of these run at a time."""
        try:
            while self._queue and self._claimers <= self._pace.limit:
                slot = self._queue.popleft()
                if slot.wanted:
                    await self._create(slot)
                else:
                    self._drop(slot)
                self._start_claimers()
        finally:
            self._claimers -= 1

    async def _create(self, slot: Slot) -> None:
        """Create the record of a shard, under the same attempt until its outcome is known. If it
        is another's, watch it and try once more."""
        core, attempt = self._core, slot.attempt
        try:
            if attempt is None or attempt.keepalive.lose_if_expired():
                if attempt is not None:
                    attempt.end()
                keepalive = await core.leases.shared()
                attempt = slot.attempt = Attempt(core, self._campaign(slot.shard), keepalive)
                attempt.on_change = partial(self._record_changed, slot)
            slot.changed = False
            creation = await self._find_or_create(slot.shard, attempt)
            won = creation.won or attempt.is_mine(creation.entry)
            if not won and await core.deletions.delete_left_over(creation.entry):
                self.claim(slot)
                return
            if not won and slot.wanted and await attempt.watch_record():
                slot.changed = True  # perhaps it has gone meanwhile
        except LeaseGone as error:
            if attempt is not None:
                attempt.keepalive.lose(str(error))
            self.claim(slot)
            return
        except (StoreUnavailable, OutcomeUnknown):
            self._pace.failed()
            await asyncio.sleep(core.calls.retry_pause())
            self.claim(slot)
            return
        except StoreError as error:
            log_shard_error("shard_unclaimed", self._plan.shards, slot.shard, error)
            await asyncio.sleep(core.calls.timing.ttl_s)
            self.claim(slot)
            return
        self._pace.succeeded()
        if won:
            attempt.record = creation.entry
            attempt.unwatch_record()
        if not slot.wanted:
            self._drop(slot)
        elif won:
            slot.stage = Stage.WON
            self._won.append(slot)
            if not self._confirming:
                self._confirming = True
                core.tasks.start(self._confirm())
        else:
            slot.stage = Stage.BLOCKED
            if slot.changed:
                self.claim(slot)

    async def _find_or_create(self, shard: int, attempt: Attempt) -> Creation:
        """Create a record. That of a shard that is on its way here is usually still the old
        owner's: it is watched and read first, which costs less than to try to create it."""
        store = self._core.store
        if shard in self._plan.current.moves and await attempt.watch_record():
            present = await attempt.get(attempt.record_key)
            if present is not None:
                return Creation(False, present)
        lease = attempt.keepalive.lease
        return await attempt.write(store.create(attempt.record_key, attempt.record_value(), lease))

    def _record_changed(self, slot: Slot) -> None:
        """A record that another member holds, or held, has changed."""
        slot.changed = True
        if slot.stage is Stage.BLOCKED:
            self.claim(slot)

    async def _confirm(self) -> None:
        """Read the plan again for the shards that were won, and begin those that are planned."""
        try:
            while self._won:
                won, self._won = self._won, []
                try:
                    await self._plan.read()
                except (StoreError, BadDocument):
                    self._won = [slot for slot in won if slot.wanted] + self._won
                    for slot in won:
                        if not slot.wanted:
                            self._drop(slot)
                    await asyncio.sleep(self._core.calls.retry_pause())
                    continue
                for slot in won:
                    self._begin(slot)
        finally:
            self._confirming = False
