"""Members of a group: joining it, and staying on its list.

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
import json
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypedDict, cast

from doyen.election.core import SessionCore
from doyen.election.options import default_name
from doyen.errors import (
    ConfigError,
    LeaseGone,
    NameTaken,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
)
from doyen.events import Listed, Unlisted
from doyen.lease.keepalive import Keepalive
from doyen.manage.health import HealthCheck, Inspection
from doyen.model import Entry, MemberState, Meta, challenges_key, encode_json, member_key
from doyen.stores.port import Watch

__all__ = [
    "GroupMember",
    "MemberOptions",
    "MemberSettings",
    "MemberView",
    "Registration",
]

SCHEMA = 1
MEMBER_BYTES = 4096
"""Limit for the value of a member, so that a published list of many members is not too large."""
LONGEST_TTL_S = 86_400.0
"""An entry that states a longer ttl than a day is not one of a member: nobody waits that long for a
name."""
ANSWERS = 8
"""How many of those who ask for its name a member answers at a time."""


class MemberOptions(TypedDict, total=False):
    """The options of a member."""

    name: str
    """Name of the member, unique in its group. Default: host name and process id."""
    meta: Meta
    """Information about the member for others to read, such as its address."""
    health: HealthCheck
    """Called again and again. The member is unhealthy if it returns False, raises, or takes longer
    than its limit. A coroutine function runs on the caller's loop, another on a thread."""
    health_every_s: float
    """The pause between two health checks. Default 5 s."""
    health_limit_s: float
    """The longest time that a health check may take. Default 5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    """The options of a member, checked and completed; see `MemberOptions`."""

    group: str
    name: str = ""
    meta: Meta = field(default_factory=dict)
    health: HealthCheck | None = None
    health_every_s: float = 5.0
    health_limit_s: float = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or default_name())
        object.__setattr__(self, "meta", _checked_meta(self.meta))
        member_key(self.group, self.name)
        if self.health is not None and not callable(self.health):
            raise ConfigError(f"health is a function without arguments, not {self.health!r}")
        for option in ("health_every_s", "health_limit_s"):
            seconds = getattr(self, option)
            if not isinstance(seconds, int | float) or not 0.001 <= seconds < float("inf"):
                raise ConfigError(f"{option} is 0.001 s or more, not {seconds!r}")


def _checked_meta(meta: object) -> Meta:
    try:
        checked = dict(cast("Mapping[str, Any]", meta))
        size = len(encode_json(checked))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"meta maps names to what JSON can represent, not {meta!r}: {error}"
        ) from error
    if size > MEMBER_BYTES:
        raise ConfigError(
            f"the meta of a member takes {size} bytes, more than {MEMBER_BYTES}: store large values"
            " elsewhere, and put a reference to them into meta"
        )
    return checked


class MemberValue(NamedTuple):
    """The value of a member's entry. `name`, `attempt` and `meta` are as in a claim."""

    name: str
    attempt: str
    session: str
    by: str
    """Host name and process id, to say who holds a name."""
    ttl_s: float
    since: float
    state: MemberState
    reason: str
    meta: Meta
    answered: tuple[str, ...] = ()
    """The ids of the challenges that it has answered."""

    def encode(self) -> bytes:
        return encode_json({"schema": SCHEMA, **self._asdict()})

    @classmethod
    def decode(cls, value: bytes) -> MemberValue | None:
        """Read the value of a member; None if it is not one."""
        try:
            raw = json.loads(value)
            ttl_s, since = float(raw["ttl_s"]), float(raw["since"])
            if not 0 < ttl_s <= LONGEST_TTL_S or not math.isfinite(since):
                return None
            state = str(raw["state"])
            if state not in ("up", "unhealthy", "draining"):
                state = "unhealthy"  # of a later release: it is not known to be up
            return cls(
                str(raw["name"]),
                str(raw["attempt"]),
                str(raw["session"]),
                str(raw["by"]),
                ttl_s,
                since,
                cast("MemberState", state),
                str(raw.get("reason", "")),
                dict(raw.get("meta") or {}),
                tuple(map(str, raw.get("answered", ()))),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None


class Challenge:
    """Asks the holder of a name whether it is alive, by an entry under the lease of who asks.

    Each attempt asks each incarnation under an id of its own: a challenge may be deleted late, and
    must not take the next one with it. A holder that is asked again has answered already.
    """

    def __init__(
        self, core: SessionCore, prefix: str, attempt: str, holder: Entry, keepalive: Keepalive
    ) -> None:
        self.id = f"{attempt}-{holder.revision}"
        self._core = core
        self._key = f"{prefix}/{self.id}"
        self._keepalive = keepalive
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


class Registration:
    """Keeps one member on the list of its group. Used on doyen's loop, except for `__init__`."""

    def __init__(self, core: SessionCore, settings: MemberSettings) -> None:
        self.core = core
        self.settings = settings
        self.key = member_key(settings.group, settings.name)
        self._challenges = challenges_key(settings.group, settings.name)
        self._inspection = (
            None
            if settings.health is None
            else Inspection(core, settings.health, settings.health_limit_s)
        )
        self._by = default_name()
        self._since = core.runtime.clock.wall()
        # What the entry should be.
        self._meta = settings.meta
        self._unhealthy = ""
        self._draining = False
        self._failed = ""
        self._left = False
        # What the entry is.
        self._keepalive: Keepalive | None = None
        self._attempt = ""
        self._entry: Entry | None = None
        self._refused = ""
        """Why it cannot join again, such as that another member has its name."""
        self._doubt_ends = 0.0
        """Until then a creation whose outcome is unknown may still be carried out."""
        self._challenged = False
        """Another process may have asked whether this member is alive."""
        self._answered: tuple[str, ...] = ()
        self._watches: list[Watch] = []
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        """The entry is what it should be."""
        self._joined: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._listeners: dict[object, Callable[[], None]] = {}

    @property
    def incarnation(self) -> int | None:
        """None while it is not on the list, or may not be because its lease is not valid or it is
        leaving. Any thread."""
        entry, keepalive = self._entry, self._keepalive
        if entry is None or keepalive is None or self._left or self._failed:
            return None
        valid = self.core.runtime.clock.now() < keepalive.valid_until
        return entry.revision if valid else None

    @property
    def state(self) -> MemberState:
        return "unhealthy" if self._unhealthy else "draining" if self._draining else "up"

    @property
    def reason(self) -> str:
        return self._unhealthy

    @property
    def ineligible_because(self) -> str:
        """Why it must not lead; empty if it may."""
        name = f"the member {self.settings.name!r} of {self.settings.group!r}"
        if self._left:
            return f"{name} has left"
        if self._failed:
            return f"{name} has failed: {self._failed}"
        if self._refused:
            return self._refused
        if self._unhealthy:
            return f"{name} is unhealthy: {self._unhealthy}"
        return f"{name} is draining" if self._draining else ""

    def on_eligibility(self, owner: object, listener: Callable[[], None]) -> None:
        """Have `listener` called when the eligibility may have changed."""
        self._listeners[owner] = listener

    def forget(self, owner: object) -> None:
        self._listeners.pop(owner, None)

    async def join(self) -> None:
        """Join the group. Returns once the member is on its list; raises `NameTaken`."""
        if self._inspection is not None:
            self._unhealthy = await self._inspection.examine()
        self._joined = asyncio.get_running_loop().create_future()
        self._tasks.append(self.core.tasks.start(self._keep()))
        if self._inspection is not None:
            self._tasks.append(self.core.tasks.start(self._examine(self._inspection)))
        await self._joined

    async def update(self, meta: Meta) -> None:
        """Replace the meta. Returns once the store has it."""
        self._meta = _checked_meta(meta)
        await self._desired()

    async def drain(self, draining: bool) -> None:
        self._draining = draining
        await self._desired()

    async def fail(self, reason: str) -> None:
        """Leave the list for good, although the scope goes on."""
        self._failed = reason
        await self._desired()

    async def leave(self) -> None:
        """Leave the list. Returns when the entry is deleted, or after three request timeouts; it is
        then deleted in the background for as long as the lease lives."""
        self._left = True
        waiting = asyncio.ensure_future(self._desired())
        await asyncio.wait({waiting}, timeout=3 * self.core.calls.timing.request_timeout_s)
        waiting.cancel()

    async def _desired(self) -> None:
        """Something else is desired: wait until the entry is like that."""
        self._changed()
        if any(not task.done() for task in self._tasks):
            await self._settled.wait()

    async def _examine(self, inspection: Inspection) -> None:
        while not self._left:
            await asyncio.sleep(self.settings.health_every_s)
            unhealthy = await inspection.examine()
            if unhealthy != self._unhealthy:
                self._unhealthy = unhealthy
                self._changed()

    def _changed(self) -> None:
        """What the entry should be has changed."""
        self._settled.clear()
        self._wake.set()
        self._tell()

    async def _keep(self) -> None:
        """Step by step make the entry what it should be, until the member has left."""
        calls = self.core.calls
        try:
            while not self.core.closed:
                self._wake.clear()
                pause_s = 0.0
                try:
                    if not await self._step():
                        continue
                except LeaseGone as error:
                    if self._keepalive is not None:
                        self._keepalive.lose(str(error))
                except (StoreUnavailable, OutcomeUnknown):
                    pause_s = calls.retry_pause()
                except (NameTaken, StoreError) as error:
                    if self._joined is not None and not self._joined.done():
                        self._joined.set_exception(error)
                        return
                    self._unlisted(str(error))
                    self._refused = str(error)
                    self._tell()
                    await self._sleep(calls.timing.ttl_s)
                else:
                    if self._wake.is_set():
                        continue
                    self._settled.set()
                    doubtful_s = self._doubt_ends - self.core.runtime.clock.now()
                    if self._left and doubtful_s <= 0:
                        return
                    await self._sleep(doubtful_s if self._left else None)
                if pause_s:
                    await asyncio.sleep(pause_s)
        finally:
            self._settled.set()
            self._end()

    async def _sleep(self, limit_s: float | None) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _step(self) -> bool:
        """Make the next step. True if nothing is left to do."""
        core, store = self.core, self.core.store
        keepalive = self._keepalive
        if keepalive is None or keepalive.lose_if_expired() or keepalive.lost_because is not None:
            if keepalive is not None:
                self._unlisted(f"its lease was lost: {keepalive.lost_because}")
            if self._left:
                return True  # with the lease, everything bound to it has ended or will
            keepalive = self._adopt(await core.leases.shared())
        for scope, notify in (
            (self._challenges, self._note_challenge),
            (self.key, self._wake.set),
        )[len(self._watches) :]:
            self._watches.append(await core.call(store.watch(scope, notify)))
        entry = await core.call(store.get(self.key))
        if self._left or self._failed:
            self._unlisted(self._failed or "it has left", planned=True)
            if entry is not None and self._is_mine(entry):
                await core.deletions.delete(entry)
            return True
        value = self._value(keepalive)
        if entry is None or not self._is_mine(entry):
            self._unlisted("its entry was removed by another process")
        if entry is None:
            entry = await self._create(value, keepalive)
        if not self._is_mine(entry):
            await self._wait_for_name(entry, keepalive)
            return False
        if self._challenged:
            await self._answer()
            value = self._value(keepalive)
        if entry.value != value:
            updated = await core.call(store.update(entry, value))
            if updated is None:
                return False
            entry = updated
        self._listed(entry)
        return not self._challenged

    def _note_challenge(self) -> None:
        self._challenged = True
        if self._entry is not None:  # otherwise it is one that asks itself
            self._wake.set()

    async def _answer(self) -> None:
        """Have the entry name those who ask whether this member is alive."""
        from urllib.parse import unquote  # as in `model`

        self._challenged = False
        try:
            asked = await self.core.call(self.core.store.list(self._challenges))
        except StoreError:
            self._challenged = True
            raise
        attempts = (unquote(entry.key.rpartition("/")[2]) for entry in asked[-ANSWERS:])
        self._answered = tuple(attempts) or self._answered

    def _adopt(self, keepalive: Keepalive) -> Keepalive:
        """Go on under a new lease, as a new attempt."""
        self._end_attempt()
        self._keepalive = keepalive
        self._attempt = self.core.next_attempt()
        keepalive.attempts.add(self._attempt)
        keepalive.on_loss(self, lambda _: self.core.runtime.post(self._wake.set))
        return keepalive

    def _end_attempt(self) -> None:
        if self._keepalive is not None:
            self._keepalive.forget(self)
            self._keepalive.attempts.discard(self._attempt)

    def _value(self, keepalive: Keepalive) -> bytes:
        return MemberValue(
            self.settings.name,
            self._attempt,
            self.core.id,
            self._by,
            keepalive.lease.ttl_s,
            self._since,
            self.state,
            self.reason[:200],
            self._meta,
            self._answered,
        ).encode()

    async def _create(self, value: bytes, keepalive: Keepalive) -> Entry:
        before = self._doubt_ends
        self._doubt_ends = self.core.runtime.clock.now() + 2 * keepalive.lease.ttl_s
        try:
            creation = await self.core.call(
                self.core.store.create(self.key, value, keepalive.lease)
            )
        except (StoreUnavailable, LeaseGone):
            self._doubt_ends = before
            raise
        self._doubt_ends = before
        return creation.entry

    def _is_mine(self, entry: Entry) -> bool:
        value = MemberValue.decode(entry.value)
        return (
            self._keepalive is not None
            and entry.lease == self._keepalive.lease.id
            and value is not None
            and value.attempt == self._attempt
        )

    async def _wait_for_name(self, entry: Entry, keepalive: Keepalive) -> None:
        """Another entry has the name. Returns when it is gone; raises `NameTaken` if its holder
        answers, or has it still after the longest time that a dead one could."""
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
        challenge = Challenge(core, self._challenges, self._attempt, entry, keepalive)
        try:
            while not (self._left or self._failed or keepalive.lost_because):
                self._wake.clear()
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
        who = "an entry that is not a member" if value is None else f"{value.by} {value.meta}"
        return NameTaken(
            f"the name {self.settings.name!r} in the group {self.settings.group!r} is taken:"
            f" incarnation {entry.revision} of {who} {proof}; choose another name, or stop it"
        )

    def _listed(self, entry: Entry) -> None:
        """The entry is what it should be."""
        new = self._entry is None or self._entry.version != entry.version
        self._entry = entry
        if self._joined is not None and not self._joined.done():
            self._joined.set_result(None)
        if self._refused:
            self._refused = ""
        if new:
            self._tell()
            self.core.telemetry.emit(
                Listed(
                    group=self.settings.group,
                    name=self.settings.name,
                    incarnation=entry.revision,
                    lease=entry.lease or "",
                    state=self.state,
                    reason=self.reason,
                )
            )

    def _unlisted(self, reason: str, *, planned: bool = False) -> None:
        """Its entry is gone, if there was one."""
        if self._entry is None:
            return
        gone, self._entry = self._entry, None
        self.core.telemetry.emit(
            Unlisted(
                group=self.settings.group,
                name=self.settings.name,
                incarnation=gone.revision,
                reason=reason,
            ),
            planned=planned,
        )

    def _tell(self) -> None:
        for listener in list(self._listeners.values()):
            listener()

    def _end(self) -> None:
        self._end_attempt()
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()


class MemberView:
    """What code inside the scope of a member can read. Any thread."""

    def __init__(self, registration: Registration) -> None:
        self._registration = registration

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name!r} in {self.group!r}, {self.state}>"

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._registration.settings.group

    @property
    def name(self) -> str:
        """The name of the member."""
        return self._registration.settings.name

    @property
    def incarnation(self) -> int | None:
        """Its incarnation; None while it is not on the list, such as between a lost lease and the
        next."""
        return self._registration.incarnation

    @property
    def state(self) -> MemberState:
        """up, unhealthy or draining."""
        return self._registration.state

    @property
    def ineligible_because(self) -> str:
        """Why campaigns with `member=` do not lead at present; empty if they may."""
        return self._registration.ineligible_because

    def on_eligibility(self, owner: object, listener: Callable[[], None]) -> None:
        """Have `listener` called on doyen's thread when the eligibility may have changed."""
        self._registration.on_eligibility(owner, listener)

    def forget(self, owner: object) -> None:
        """Remove the listener that `owner` registered with `on_eligibility`."""
        self._registration.forget(owner)


class GroupMember(MemberView):
    """A member of a group, for the code inside its scope. Made by `Session.member`."""

    async def update(self, meta: Meta) -> None:
        """Replace the meta. Returns once the store has it."""
        await self._do(partial(self._registration.update, meta))

    async def drain(self) -> None:
        """Announce that this member is about to leave: it does not lead any more."""
        await self._do(partial(self._registration.drain, True))

    async def resume(self) -> None:
        """Undo `drain`."""
        await self._do(partial(self._registration.drain, False))

    async def fail(self, reason: str) -> None:
        """Leave the list because this process is broken. The scope goes on; it does not join
        again."""
        await self._do(partial(self._registration.fail, reason))

    async def _do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        core = self._registration.core
        await core.runtime.do(core.run(work))
