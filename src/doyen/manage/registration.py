"""Joining a group, and staying on its list.

A member is an entry `members/<group>/<name>`, created under the session's lease. The creation
decides who has the name, and its revision is the incarnation. When the lease ends, the store
removes the entry; a session that goes on joins again under its new lease, as a new incarnation.

- A name that is taken is waited for, because its holder may be dead and its lease not yet expired.
  Meanwhile the holder is asked, by an entry `challenges/<group>/<name>/<id>`. It watches that
  key, and if it is alive it answers in its own entry; then the name is refused.
- The state of a member (up, unhealthy, draining) is written to its entry by `update`. One task
  compares what the entry should be with what it is and makes the next step; an unknown outcome is
  resolved because the next step begins with a read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Literal

from doyen.election.attempt import Wakeup
from doyen.election.core import SessionCore
from doyen.election.options import default_name
from doyen.errors import LeaseGone, NameTaken, OutcomeUnknown, StoreError, StoreUnavailable
from doyen.events import Listed, Unlisted
from doyen.events.log_lines import log_line
from doyen.events.reasons import INELIGIBLE
from doyen.lease.keepalive import Keepalive
from doyen.manage.health import Inspection
from doyen.manage.members import MemberSettings, MemberValue, checked_meta
from doyen.model import Entry, MemberState, Meta, challenges_key, encode_json, member_key
from doyen.stores.port import Watch

__all__ = ["Registration"]

ANSWERS = 8
"""How many challenges a member answers at a time."""


class DesiredEntry:
    """What the entry of a member should be."""

    def __init__(self, core: SessionCore, settings: MemberSettings) -> None:
        self.meta = settings.meta
        self.unhealthy = ""
        """Why it is unhealthy; empty if it is healthy."""
        self.draining = False
        self.failed = ""
        self.left = False
        self._name = settings.name
        self._session = core.id
        self._by = default_name()
        self._since = core.runtime.clock.wall()

    @property
    def absent(self) -> bool:
        """There should be none."""
        return self.left or bool(self.failed)

    @property
    def state(self) -> MemberState:
        return "unhealthy" if self.unhealthy else "draining" if self.draining else "up"

    def value(self, attempt: MemberAttempt, answered: tuple[str, ...]) -> bytes:
        return MemberValue(
            self._name,
            attempt.id,
            self._session,
            self._by,
            attempt.keepalive.lease.ttl_s,
            self._since,
            self.state,
            self.unhealthy[:200],
            self.meta,
            answered,
        ).encode()


class MemberAttempt:
    """One attempt to be on the list, under one lease."""

    def __init__(self, core: SessionCore, keepalive: Keepalive, lost: Callable[[], None]) -> None:
        self.id = core.next_attempt()
        self.keepalive = keepalive
        keepalive.attempts.add(self.id)
        keepalive.on_loss(self, lost)

    def is_mine(self, entry: Entry) -> bool:
        """Whether this attempt wrote the entry, under its own lease."""
        value = MemberValue.decode(entry.value)
        return (
            entry.lease == self.keepalive.lease.id
            and value is not None
            and value.attempt == self.id
        )

    def end(self) -> None:
        self.keepalive.forget(self)
        self.keepalive.attempts.discard(self.id)


class Challenge:
    """Asks the holder of a name whether it is alive, by an entry under the lease of the asking
    attempt.

    Each attempt has an id of its own for each incarnation that it asks: the deletion of a challenge
    may be carried out late, and must not delete the next one. A holder that is asked again under
    the same id has answered already.
    """

    def __init__(
        self, core: SessionCore, prefix: str, attempt: MemberAttempt, holder: Entry
    ) -> None:
        self.id = f"{attempt.id}-{holder.revision}"
        self._core = core
        self._key = f"{prefix}/{self.id}"
        self._keepalive = attempt.keepalive
        self._made = False

    async def make(self) -> None:
        if not self._made:
            await self._core.call(self._core.store.create(self._key, b"", self._keepalive.lease))
            self._made = True

    def withdraw(self) -> None:
        """Delete it in the background, for as long as the lease lives."""
        self._core.tasks.start(self._withdraw())

    async def _withdraw(self) -> None:
        core = self._core
        while self._keepalive.lost_because is None and not core.closed:
            try:
                await core.call(core.store.delete(self._key))
                return
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(core.calls.retry_pause())


class Answers:
    """The answers of a member to challenges."""

    def __init__(self, core: SessionCore, prefix: str) -> None:
        self.due = False
        """Another process may have asked."""
        self.answered: tuple[str, ...] = ()
        """The ids of the challenges that its entry is to name."""
        self._core = core
        self.prefix = prefix

    async def read(self) -> None:
        """Read the challenges."""
        from urllib.parse import unquote  # imported late, as in `model`

        self.due = False
        try:
            asked = await self._core.call(self._core.store.list(self.prefix))
        except StoreError:
            self.due = True
            raise
        ids = (unquote(entry.key.rpartition("/")[2]) for entry in asked[-ANSWERS:])
        self.answered = tuple(ids) or self.answered


class Listing:
    """Whether a member is on the list. Emits events, and notifies listeners of changes of its
    eligibility."""

    def __init__(self, core: SessionCore, settings: MemberSettings) -> None:
        self.entry: Entry | None = None
        self.refused = ""
        """Why it cannot join again, such as that another member has its name."""
        self._incarnation: int | None = None
        """The last one, if it was on the list."""
        self._telemetry = core.telemetry
        self._settings = settings
        self._listeners: dict[object, Callable[[], None]] = {}

    def on_eligibility(self, owner: object, listener: Callable[[], None]) -> None:
        """Have `listener` called when the eligibility may have changed."""
        self._listeners[owner] = listener

    def forget(self, owner: object) -> None:
        self._listeners.pop(owner, None)

    def tell(self) -> None:
        for listener in list(self._listeners.values()):
            listener()

    def listed(self, entry: Entry, desired: DesiredEntry) -> None:
        """The entry is what it should be."""
        new = self.entry is None or self.entry.version != entry.version
        self.entry, self._incarnation = entry, entry.revision
        self.refused = ""
        if new:
            self.tell()
            self._telemetry.emit(
                Listed(
                    group=self._settings.group,
                    name=self._settings.name,
                    incarnation=entry.revision,
                    lease=entry.lease or "",
                    state=desired.state,
                    reason=desired.unhealthy,
                )
            )

    def refuse(self, reason: str) -> None:
        """It cannot join, or cannot join again."""
        if self.entry is None and self._incarnation is not None and reason != self.refused:
            self._emit_unlisted(self._incarnation, reason)
        self.unlisted(reason)
        self.refused = reason
        self.tell()

    def unlisted(self, reason: str, *, planned: bool = False) -> None:
        """Its entry is gone, if there was one."""
        if self.entry is None:
            return
        gone, self.entry = self.entry, None
        self._emit_unlisted(gone.revision, reason, planned=planned)

    def _emit_unlisted(self, incarnation: int, reason: str, *, planned: bool = False) -> None:
        group, name = self._settings.group, self._settings.name
        event = Unlisted(group=group, name=name, incarnation=incarnation, reason=reason)
        self._telemetry.emit(event, planned=planned)


class Registration:
    """Keeps one member on the list of its group. Used on doyen's loop, except for `__init__`."""

    def __init__(self, core: SessionCore, settings: MemberSettings) -> None:
        self.core = core
        self.settings = settings
        self.key = member_key(settings.group, settings.name)
        self.listing = Listing(core, settings)
        self._inspection = (
            None
            if settings.health is None
            else Inspection(core, settings.health, settings.health_limit_s)
        )
        self._desired = DesiredEntry(core, settings)
        self._answers = Answers(core, challenges_key(settings.group, settings.name))
        self._attempt: MemberAttempt | None = None
        self._doubt_ends = 0.0
        """Until then a creation whose outcome is unknown may still be carried out."""
        self._watches: list[Watch] = []
        self._wakeup = Wakeup()
        self._settled = asyncio.Event()
        """The entry is what it should be."""
        self._joined: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def incarnation(self) -> int | None:
        """None while it is not on the list, or may not be because its lease is not valid or it is
        leaving. Any thread."""
        entry, attempt = self.listing.entry, self._attempt
        if entry is None or attempt is None or self._desired.absent:
            return None
        valid = self.core.runtime.clock.now() < attempt.keepalive.valid_until
        return entry.revision if valid else None

    @property
    def state(self) -> MemberState | Literal["failed"]:
        return "failed" if self._desired.failed else self._desired.state

    @property
    def ineligible_because(self) -> str:
        """Why it must not lead; empty if it may."""
        name = f"{INELIGIBLE}{self.settings.name!r} of {self.settings.group!r}"
        desired = self._desired
        if desired.left:
            return f"{name} has left"
        if desired.failed:
            return f"{name} has failed: {desired.failed}"
        if self.listing.refused:
            return self.listing.refused
        if desired.unhealthy:
            return f"{name} is unhealthy: {desired.unhealthy}"
        return f"{name} is draining" if desired.draining else ""

    async def join(self) -> None:
        """Join the group. Returns once the member is on its list; raises `NameTaken`."""
        if self._inspection is not None:
            self._desired.unhealthy = await self._inspection.examine()
        self._joined = asyncio.get_running_loop().create_future()
        self._tasks.append(self.core.tasks.start(self._keep()))
        if self._inspection is not None:
            self._tasks.append(self.core.tasks.start(self._examine(self._inspection)))
        await self._joined

    async def update(self, meta: Meta) -> None:
        """Replace the meta. Returns once the store has it."""
        self._desired.meta = checked_meta(meta)
        await self._until_settled()

    async def drain(self, draining: bool) -> None:
        self._desired.draining = draining
        await self._until_settled()

    async def fail(self, reason: str) -> None:
        """Leave the list for good, although the scope goes on."""
        self._desired.failed = reason or "no reason was given"
        await self._until_settled()

    async def leave(self) -> None:
        """Leave the list. Returns when the entry is deleted, or after three request timeouts; it is
        then deleted in the background for as long as the lease lives."""
        self._desired.left = True
        waiting = asyncio.ensure_future(self._until_settled())
        await asyncio.wait({waiting}, timeout=3 * self.core.calls.timing.request_timeout_s)
        waiting.cancel()

    async def _until_settled(self) -> None:
        """Something else is desired: wait until the entry is like that."""
        self._changed()
        if any(not task.done() for task in self._tasks):
            await self._settled.wait()

    async def _examine(self, inspection: Inspection) -> None:
        desired = self._desired
        while not desired.left:
            await asyncio.sleep(self.settings.health_every_s)
            unhealthy = await inspection.examine()
            if unhealthy != desired.unhealthy:
                desired.unhealthy = unhealthy
                self._changed()

    def _changed(self) -> None:
        """What the entry should be has changed."""
        self._settled.clear()
        self._wakeup.wake()
        self.listing.tell()

    async def _keep(self) -> None:
        """Step by step make the entry what it should be, until the member has left."""
        calls = self.core.calls
        try:
            while not self.core.closed:
                self._wakeup.woken = False
                pause_s = 0.0
                try:
                    if not await self._step():
                        continue
                except LeaseGone as error:
                    if self._attempt is not None:
                        self._attempt.keepalive.lose(str(error))
                except (StoreUnavailable, OutcomeUnknown):
                    pause_s = calls.retry_pause()
                except (NameTaken, StoreError) as error:
                    if self._joined is not None and not self._joined.done():
                        self._joined.set_exception(error)
                        return
                    self.listing.refuse(str(error))
                    await self._sleep(calls.timing.ttl_s)
                else:
                    if self._wakeup.woken:
                        continue
                    self._settled.set()
                    doubtful_s = self._doubt_ends - self.core.runtime.clock.now()
                    if self._desired.left and doubtful_s <= 0:
                        return
                    await self._sleep(doubtful_s if self._desired.left else math.inf)
                if pause_s:
                    await asyncio.sleep(pause_s)
        finally:
            self._settled.set()
            self._end()

    async def _sleep(self, limit_s: float) -> None:
        await self._wakeup.sleep(asyncio.get_running_loop().time() + limit_s)

    async def _step(self) -> bool:
        """Make the next step. True if nothing is left to do."""
        core, store, listing, answers = self.core, self.core.store, self.listing, self._answers
        attempt = self._attempt
        if attempt is not None:
            attempt.keepalive.lose_if_expired()
        if attempt is None or attempt.keepalive.lost_because is not None:
            if attempt is not None:
                listing.unlisted(f"its lease was lost: {attempt.keepalive.lost_because}")
            if self._desired.left:
                return True  # with the lease, everything bound to it has ended or will
            attempt = await self._next_attempt(attempt)
        for scope, notify in (
            (answers.prefix, self._note_challenge),
            (self.key, self._wakeup.wake),
        )[len(self._watches) :]:
            self._watches.append(await core.call(store.watch(scope, notify)))
        entry = await core.call(store.get(self.key))
        if self._desired.absent:
            listing.unlisted(self._desired.failed or "it has left", planned=True)
            if entry is not None and attempt.is_mine(entry):
                await core.deletions.delete(entry)
            return True
        value = self._desired.value(attempt, answers.answered)
        if entry is None or not attempt.is_mine(entry):
            listing.unlisted("its entry was removed by another process")
        if entry is None:
            entry = await self._create(value, attempt)
        if not attempt.is_mine(entry):
            await self._wait_for_name(entry, attempt)
            return False
        if answers.due:
            await answers.read()
            value = self._desired.value(attempt, answers.answered)
        if entry.value != value:
            updated = await core.call(store.update(entry, value))
            if updated is None:
                return False
            entry = updated
        if self._joined is not None and not self._joined.done():
            self._joined.set_result(None)
        listing.listed(entry, self._desired)
        return not answers.due

    def _note_challenge(self) -> None:
        self._answers.due = True
        if self.listing.entry is not None:  # without an entry, the challenge may be its own
            self._wakeup.wake()

    async def _next_attempt(self, last: MemberAttempt | None) -> MemberAttempt:
        """Go on under a new lease."""
        keepalive = await self.core.leases.shared()
        if last is not None:
            last.end()
        self._attempt = MemberAttempt(self.core, keepalive, self._wakeup.wake)
        return self._attempt

    async def _create(self, value: bytes, attempt: MemberAttempt) -> Entry:
        lease, before = attempt.keepalive.lease, self._doubt_ends
        self._doubt_ends = self.core.runtime.clock.now() + 2 * lease.ttl_s
        try:
            creation = await self.core.call(self.core.store.create(self.key, value, lease))
        except (StoreUnavailable, LeaseGone):
            self._doubt_ends = before
            raise
        self._doubt_ends = before
        return creation.entry

    async def _wait_for_name(self, entry: Entry, attempt: MemberAttempt) -> None:
        """Another entry has the name. Returns when it is gone; raises `NameTaken` if its holder
        answers, or still has it after the longest time for which the lease of a dead holder
        lives."""
        core, value = self.core, MemberValue.decode(entry.value)
        if value is not None and value.session == core.id:
            holder = core.leases.find(entry.lease)
            if holder is None or holder.lost_because or value.attempt not in holder.attempts:
                # Of an earlier attempt of this session, under a lease that has been lost.
                await core.deletions.delete(entry)
                return
        limits, timing = core.store.capabilities, core.calls.timing
        ttl_s = timing.ttl_s if value is None else value.ttl_s
        until = asyncio.get_running_loop().time() + timing.request_timeout_s
        until += ttl_s * limits.expiry_factor * (1 + timing.drift) + limits.notice_s
        challenge = Challenge(core, self._answers.prefix, attempt, entry)
        try:
            while not (self._desired.absent or attempt.keepalive.lost_because):
                self._wakeup.woken = False
                try:
                    await challenge.make()
                    await self._sleep(ttl_s / 10)
                    found = await core.call(core.store.get(self.key))
                except (StoreUnavailable, OutcomeUnknown):
                    await asyncio.sleep(core.calls.retry_pause())
                    continue
                if found is None or found.revision != entry.revision:
                    return
                holder_says = MemberValue.decode(found.value)
                if holder_says is not None and challenge.id in holder_says.answered:
                    raise self._name_taken(found, "is alive")
                if asyncio.get_running_loop().time() >= until:
                    raise self._name_taken(found, f"still holds it after {ttl_s:g} s and more")
        finally:
            challenge.withdraw()

    def _name_taken(self, entry: Entry, proof: str) -> NameTaken:
        value = MemberValue.decode(entry.value)
        who = "an entry that is not a member" if value is None else value.by
        if value is not None and value.meta:
            who += f" ({_as_pairs(value.meta)})"
        return NameTaken(
            f"the name {self.settings.name!r} in the group {self.settings.group!r} is taken:"
            f" incarnation {entry.revision} of {who} {proof}; choose another name, or stop that"
            " process"
        )

    def _end(self) -> None:
        if self._attempt is not None:
            self._attempt.end()
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()


def _as_pairs(meta: Meta) -> str:
    """
    >>> _as_pairs({"address": "http://h:80", "zone": "in the cellar", "ports": [1, 2]})
    'address=http://h:80 zone="in the cellar" ports="[1,2]"'
    """
    return log_line(
        **{
            name: value if isinstance(value, str) else encode_json(value).decode()
            for name, value in meta.items()
        }
    )
