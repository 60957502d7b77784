"""Semaphores: n slots, each held by one at a time, and one line for all of them.

A slot is what an election is: the creation of its record decides, and the revision of the record is
the token. Tokens of different slots do not compare, so a resource is fenced by slot and token.

- The first in line takes a free slot. The holder of a slot has left the line, so that the next
  candidate can take another slot.
- After a creation whose outcome is unknown, the same slot is claimed again until there is an
  answer, before another slot is tried. Otherwise one candidate could hold two.
- The number of slots is a document in the store, written by the first candidate. Candidates with
  another number are refused: if they disagreed, there could be more holders than either allows.
"""

from __future__ import annotations

from doyen.election.attempt import Attempt
from doyen.election.candidate import Candidacy, Claiming
from doyen.errors import ConfigError, Conflict, LeaseGone, StoreUnavailable
from doyen.events import Waiting
from doyen.manage.documents import Document
from doyen.model import Entry, leader_key, size_key, slots_key
from doyen.stores.port import Watch

__all__ = ["SlotClaiming"]


class SlotClaiming(Claiming):
    """The state of an attempt that tries to get a slot of a semaphore."""

    def __init__(self, attempt: Attempt, candidacy: Candidacy) -> None:
        super().__init__(attempt, candidacy)
        self._watch: Watch | None = None
        self._agreed = False
        self._in_doubt: int | None = None
        """The slot whose creation was sent and has no answer yet."""

    async def win(self) -> Entry:
        """Wait in line and claim slots until one is this attempt's own."""
        attempt = self.attempt
        await self._agree()
        await self._join()
        while True:
            attempt.wakeup.woken = False
            if attempt.keepalive.lost_because is not None:
                raise LeaseGone(attempt.keepalive.lost_because)
            record = None
            if self._in_doubt is not None:
                record = await self._claim(self._in_doubt)
            elif await self._is_my_turn():
                record = await self._take()
            if record is not None:
                attempt.core.tasks.start(attempt.leave_line())
                return record

    def close(self) -> None:
        super().close()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    async def _agree(self) -> None:
        """Compare the number of slots with that in the store, and write it if there is none."""
        if self._agreed:
            return
        settings = self.attempt.settings
        document = Document(self.attempt.core.calls, size_key(settings.election))
        found = await document.read()
        if found is None:
            try:
                found = await document.write({"slots": settings.slots}, expect=None)
            except Conflict:
                found = await document.read()
        if found is not None and found.body.get("slots") != settings.slots:
            raise ConfigError(
                f"the semaphore {settings.election!r} has {found.body.get('slots')} slots in this"
                f" store, not {settings.slots}: use that number everywhere, or another name"
            )
        self._agreed = True

    async def _is_my_turn(self) -> bool:
        ahead = await self._ahead()
        if ahead is not None:
            await self._wait_behind(ahead)
        return ahead is None

    async def _take(self) -> Entry | None:
        """Claim a free slot. If there is none, wait until one may have become free."""
        attempt, core, settings = self.attempt, self.attempt.core, self.attempt.settings
        slots = slots_key(settings.election)
        if self._watch is None:
            self._watch = await core.call(core.store.watch(slots, attempt.wakeup.wake))
        records = {entry.key: entry for entry in await core.call(core.store.list(slots))}
        for slot in range(settings.slots):
            record = records.get(leader_key(f"{settings.election}/{slot}", "semaphores"))
            if record is None or attempt.is_mine(record):
                return await self._claim(slot)
            if await core.deletions.delete_left_over(record):
                return None
        candidacy = self._candidacy
        if not candidacy.behind:
            candidacy.behind = f"its {settings.slots} slots are taken"
            waiting = Waiting(**settings.identity, behind=candidacy.behind, joined=True)
            core.telemetry.emit(waiting)
        candidacy.error = None
        await candidacy.sleep(attempt)
        return None

    async def _claim(self, slot: int) -> Entry | None:
        """Create the record of a slot; None if another has it."""
        attempt, store = self.attempt, self.attempt.core.store
        attempt.choose_slot(slot)
        before, self._in_doubt = self._in_doubt, slot
        try:
            creation = await attempt.write(
                store.create(attempt.record_key, attempt.record_value(), attempt.keepalive.lease)
            )
        except StoreUnavailable:
            self._in_doubt = before
            raise
        self._in_doubt = None
        return creation.entry if creation.won or attempt.is_mine(creation.entry) else None
