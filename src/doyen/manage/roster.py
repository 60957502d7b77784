"""The list of a group: reading it, observing it, and suspecting members whose renewals are late.

Suspicion is what an observer derives from what the store knows of a member's lease. It changes
nothing in the store. An observer that cannot read suspects no member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from doyen.election.core import SessionCore
from doyen.election.queries import observe
from doyen.manage.members import MemberValue
from doyen.model import Entry, Member, MemberChange, Reachable, Unreachable, members_key

__all__ = [
    "Roster",
    "RosterChanges",
    "changes",
    "observe_members",
    "read_members",
    "roster_of",
]

SUSPECT_AFTER = 2 / 3
"""A member is suspected after this fraction of its ttl without a renewal, which is twice the usual
time between renewals."""
SETTLE_S = 0.1
"""How long an observer waits after the last change before it reads the list, so that members that
join or leave at the same time cost one read."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of a group at one time."""

    members: Mapping[str, Member]
    at: float = field(compare=False)
    """When they were read, on the boot-time clock."""
    recheck_s: float | None = field(default=None, compare=False)
    """When to read again, because the renewals of a member may be late then."""


async def read_members(core: SessionCore, group: str, *, times: bool = False) -> Roster:
    """The members of a group, read from the store, in the order of their names. With `times`, also
    when each was last heard of, if the store tells."""
    at = core.runtime.clock.now()
    entries = await core.call(core.store.list(members_key(group)))
    leases = {each.lease: None for each in entries if each.lease and each.remaining_s is None}
    if times and leases:
        left = await core.calls.remaining([*leases])
        entries = [
            each._replace(remaining_s=left.get(each.lease or "", each.remaining_s))
            for each in entries
        ]
    return roster_of(entries, at)


def roster_of(entries: Iterable[Entry], at: float) -> Roster:
    """The members that the entries of a group describe."""
    from urllib.parse import unquote  # imported late, as in `model`

    members: dict[str, Member] = {}
    recheck_s: float | None = None
    for entry in entries:
        value = MemberValue.decode(entry.value)
        if value is None or entry.lease is None:
            continue
        name, silent_s, suspected = unquote(entry.key.rpartition("/")[2]), None, False
        if entry.remaining_s is not None:
            silent_s = max(0.0, value.ttl_s - entry.remaining_s)
            late_s = silent_s - SUSPECT_AFTER * value.ttl_s
            suspected = late_s > 0
            next_s = max(-late_s, value.ttl_s / 6) + 0.001
            recheck_s = min(recheck_s or next_s, next_s)
        members[name] = Member(
            name,
            entry.revision,
            value.state,
            value.reason,
            value.meta,
            value.since,
            suspected,
            silent_s,
        )
    return Roster(dict(sorted(members.items())), at, recheck_s)


async def observe_members(
    core: SessionCore,
    group: str,
    deliver: Callable[[Roster | Unreachable[Roster]], None],
    *,
    suspect: bool = True,
) -> None:
    """Deliver the members of a group, then every change, until cancelled.

    Without `suspect` the list is read after changes only, and no member is suspected.
    """
    await observe(
        core.calls,
        [members_key(group)],
        partial(read_members, core, group, times=suspect),
        deliver,
        settle_s=SETTLE_S,
        due=lambda roster: roster.recheck_s if suspect else None,
    )


class RosterChanges:
    """Makes changes of what an observer of a group sees."""

    def __init__(self, core: SessionCore) -> None:
        self._clock = core.runtime.clock
        self._before: Roster | None = None
        self._unreachable = False

    def of(
        self, seen: Roster | Unreachable[Roster]
    ) -> list[MemberChange | Unreachable[tuple[Member, ...]] | Reachable]:
        """What has changed since the last time."""
        if isinstance(seen, Unreachable):
            self._unreachable = True
            last = None if seen.last is None else tuple(seen.last.members.values())
            return [Unreachable(seen.since, last, seen.error)]
        back = [Reachable(self._clock.wall())] if self._unreachable else []
        self._unreachable = False
        before, self._before = self._before, seen
        return [*back, *changes(before, seen)]


def changes(before: Roster | None, now: Roster) -> list[MemberChange]:
    """What has changed from one list to the next."""
    found: list[MemberChange] = []
    last = {} if before is None else before.members
    for name, member in last.items():
        current = now.members.get(name)
        if current is None or current.incarnation != member.incarnation:
            assert before is not None
            silent_s = now.at - before.at + (member.silent_s or 0.0)
            found.append(MemberChange("gone", member, silent_s))
    for name, member in now.members.items():
        known = last.get(name)
        if known is None or known.incarnation != member.incarnation:
            found.append(MemberChange("joined", member, member.silent_s))
        elif member.suspected and not known.suspected:
            found.append(MemberChange("suspected", member, member.silent_s))
        elif member != known:
            found.append(MemberChange("changed", member, member.silent_s))
    return found
