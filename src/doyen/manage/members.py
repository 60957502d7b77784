"""A member of a group: its options, the value of its entry, and what code in its scope can do.

How it joins and stays on the list is in `registration`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, cast

from doyen._values import Value, field
from doyen.election.options import default_name
from doyen.errors import ConfigError
from doyen.manage.health import HealthCheck
from doyen.model import MemberState, Meta, encode_json, member_key

if TYPE_CHECKING:
    from doyen.manage.registration import Registration

__all__ = ["GroupMember", "MemberOptions", "MemberSettings", "MemberValue", "MemberView"]

SCHEMA = 1
MEMBER_BYTES = 4096
"""Limit for the value of a member, so that a published list of many members is not too large."""
LONGEST_TTL_S = 86_400.0
"""An entry that states a longer ttl than a day is not one of a member: no group waits that long
for a name."""


class MemberOptions(TypedDict, total=False):
    """The options of a member."""

    name: str
    """Name of the member, unique in its group. Default: host name and process id."""
    meta: Meta
    """Information about the member for others to read, such as its address."""
    health: HealthCheck
    """Called again and again. The member is unhealthy if it returns False, raises, or takes longer
    than its limit. An awaitable that it returns runs on the caller's loop; a function that is not a
    coroutine function is called on a thread."""
    health_every_s: float
    """The pause between two health checks. Default 5 s."""
    health_limit_s: float
    """The longest time that a health check may take. Default 5 s."""


class MemberSettings(Value, kw_only=True):
    """The options of a member, checked and completed; see `MemberOptions`."""

    group: str
    name: str = ""
    meta: Meta = field(default_factory=dict)
    health: HealthCheck | None = None
    health_every_s: float = 5.0
    health_limit_s: float = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or default_name())
        object.__setattr__(self, "meta", checked_meta(self.meta))
        member_key(self.group, self.name)
        if self.health is not None and not callable(self.health):
            raise ConfigError(f"health is a function without arguments, not {self.health!r}")
        for option in ("health_every_s", "health_limit_s"):
            seconds = getattr(self, option)
            if not isinstance(seconds, int | float) or not 0.001 <= seconds < float("inf"):
                raise ConfigError(f"{option} is 0.001 s or more, not {seconds!r}")


def checked_meta(meta: object) -> Meta:
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
    def state(self) -> MemberState | Literal["failed"]:
        """up, unhealthy or draining; failed after `fail`."""
        return self._registration.state

    @property
    def ineligible_because(self) -> str:
        """Why campaigns with `member=` do not lead at present; empty if they may."""
        return self._registration.ineligible_because

    def on_eligibility(self, owner: object, listener: Callable[[], None]) -> None:
        """Have `listener` called on doyen's thread when the eligibility may have changed."""
        self._registration.listing.on_eligibility(owner, listener)

    def forget(self, owner: object) -> None:
        """Remove the listener that `owner` registered with `on_eligibility`."""
        self._registration.listing.forget(owner)


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
        """Leave the list because this process is broken. The scope stays open; the member does not
        join again."""
        await self._do(partial(self._registration.fail, reason))

    async def _do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        core = self._registration.core
        await core.runtime.do(core.run(work))
