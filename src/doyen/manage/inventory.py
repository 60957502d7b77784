"""Everything that a store has: elections, locks, semaphores, barriers, groups, shards and
configurations, by name.

A name without entries is not listed: an election exists while it has a leader or a candidate. A
value that cannot be read, because a later release or another program wrote it, is reported with its
error and hides nothing else.

Each kind is below a prefix of its own (see `doyen.model`), which is listed and watched as a whole.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from doyen.election.core import SessionCore
from doyen.election.queries import leader_of, line_of, observe
from doyen.errors import BadDocument, ConfigError
from doyen.manage.documents import Versioned
from doyen.manage.roster import Roster, roster_of
from doyen.manage.shards.routing import ShardMap, map_of
from doyen.model import (
    Candidate,
    Claim,
    Entry,
    Kind,
    Leader,
    Line,
    Member,
    Unreachable,
    finite,
    segment_number,
)

__all__ = [
    "INVENTORY_KINDS",
    "BarrierState",
    "ConfigState",
    "Inventory",
    "InventoryKind",
    "SemaphoreState",
    "ShardSetState",
    "observe_inventory",
    "read_inventory",
]

InventoryKind = Literal[
    "elections", "locks", "semaphores", "barriers", "groups", "shards", "configs"
]
INVENTORY_KINDS: tuple[InventoryKind, ...] = get_args(InventoryKind)
_PREFIX: Mapping[InventoryKind, str] = {"groups": "members", "configs": "config"}
"""The prefixes of the kinds that are not their own names."""
SETTLE_S = 0.1
"""How long an observer waits after a change before it reads, so that changes that come together
cost one read."""


@dataclass(frozen=True, slots=True)
class SemaphoreState:
    """A semaphore as it is seen from outside."""

    slots: int
    """How many it has; 0 if that cannot be read."""
    holders: Mapping[int, Leader]
    """Who holds which slot."""
    waiting: tuple[Candidate, ...]
    """In order."""


@dataclass(frozen=True, slots=True)
class BarrierState:
    """A barrier as it is seen from outside."""

    n: int
    """How many it waits for; 0 if that cannot be read."""
    arrived: int
    """How many have arrived and not passed yet."""
    passed: int
    """How many times it was passed."""


@dataclass(frozen=True, slots=True)
class ConfigState:
    """The current version of a configuration, without its value."""

    version: int
    author: str
    at: float
    """When it was written, on the wall clock of its author."""
    kept: int
    """How many earlier versions the store has."""
    subscribers: int
    """How many have acknowledged a version."""
    error: str = ""
    """Why the document cannot be read."""


@dataclass(frozen=True, slots=True)
class ShardSetState:
    """A set of shards: its plan, and who owns its shards."""

    map: ShardMap
    owners: Mapping[int, str]
    """The member that has the record of each shard. It may differ from the plan for a while."""
    count: int
    """How many shards were asked for; 0 if that cannot be read."""
    error: str = ""
    """Why the plan cannot be read."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything that a store has, in the order of names.

    >>> seen = Inventory(elections={"billing": Line(Leader("billing", "server1", 7))})
    >>> [(name, line.leader.name) for name, line in seen.elections.items() if line.leader]
    [('billing', 'server1')]
    """

    elections: Mapping[str, Line] = field(default_factory=dict)
    locks: Mapping[str, Line] = field(default_factory=dict)
    semaphores: Mapping[str, SemaphoreState] = field(default_factory=dict)
    barriers: Mapping[str, BarrierState] = field(default_factory=dict)
    groups: Mapping[str, tuple[Member, ...]] = field(default_factory=dict)
    shards: Mapping[str, ShardSetState] = field(default_factory=dict)
    configs: Mapping[str, ConfigState] = field(default_factory=dict)
    as_of: float = field(default=0.0, compare=False)
    """When it was read, on the wall clock of the reader."""

    def __len__(self) -> int:
        return sum(len(getattr(self, kind)) for kind in INVENTORY_KINDS)


class _Found(NamedTuple):
    """An entry, and the segments of its key after the name."""

    rest: list[str]
    entry: Entry


async def read_inventory(
    core: SessionCore, kinds: Iterable[InventoryKind] = INVENTORY_KINDS
) -> Inventory:
    """What the store has of these kinds."""
    chosen = _checked(kinds)
    as_of = core.runtime.clock.wall()
    parts = await asyncio.gather(*(_read(core, kind) for kind in chosen))
    return Inventory(**dict(zip(chosen, parts, strict=True)), as_of=as_of)


async def observe_inventory(
    core: SessionCore,
    deliver: Callable[[Inventory | Unreachable[Inventory]], None],
    kinds: Iterable[InventoryKind] = INVENTORY_KINDS,
) -> None:
    """Deliver what the store has, once all kinds have been read, and again after every change,
    until cancelled. After a change, only its kind is read again."""
    chosen = _checked(kinds)
    parts: dict[str, Mapping[str, Any]] = {}
    last: Inventory | None = None
    unreachable = False

    def changed(
        kind: InventoryKind, part: Mapping[str, Any] | Unreachable[Mapping[str, Any]]
    ) -> None:
        nonlocal last, unreachable
        if isinstance(part, Unreachable):
            parts.clear()  # each is read again before the next inventory
            if not unreachable:
                unreachable = True
                deliver(Unreachable(part.since, last, part.error))
            return
        parts[kind] = part
        if len(parts) == len(chosen):
            unreachable = False
            last = Inventory(**parts, as_of=core.runtime.clock.wall())
            deliver(last)

    async def observe_kind(kind: InventoryKind) -> None:
        prefix = _PREFIX.get(kind, kind)
        await observe(
            core.calls,
            [prefix],
            lambda: _read(core, kind),
            lambda part: changed(kind, part),
            settle_s=SETTLE_S,
        )

    try:
        async with asyncio.TaskGroup() as tasks:
            for kind in chosen:
                tasks.create_task(observe_kind(kind))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def _checked(kinds: Iterable[InventoryKind]) -> list[InventoryKind]:
    chosen = list(dict.fromkeys(kinds))
    for kind in chosen:
        if kind not in INVENTORY_KINDS:
            raise ConfigError(f"a kind is one of {', '.join(INVENTORY_KINDS)}, not {kind!r}")
    return chosen


async def _read(core: SessionCore, kind: InventoryKind) -> Mapping[str, Any]:
    prefix = _PREFIX.get(kind, kind)
    entries = await core.call(core.store.list(prefix))
    return part_of(kind, entries, core.runtime.clock.now())


def part_of(kind: InventoryKind, entries: Iterable[Entry], now: float) -> Mapping[str, Any]:
    """What the entries of one kind describe, by name."""
    from urllib.parse import unquote  # imported late, as in `model`

    by_name: dict[str, list[_Found]] = {}
    for entry in entries:
        _, name, *rest = entry.key.split("/")
        if not rest:
            continue  # not a key of doyen
        by_name.setdefault(unquote(name), []).append(_Found(rest, entry))
    parts = {}
    for name in sorted(by_name):
        state = _STATE[kind](name, by_name[name], now)
        if state is not None:
            parts[name] = state
    return parts


def _line(name: str, found: list[_Found], kind: Kind) -> Line | None:
    record = next((each.entry for each in found if each.rest == ["leader"]), None)
    tickets = [each.entry for each in found if len(each.rest) == 2 and each.rest[0] == "line"]
    return line_of(name, record, tickets, kind) if record or tickets else None


def _semaphore(name: str, found: list[_Found], _: float) -> SemaphoreState:
    holders, tickets, slots = {}, [], 0
    for each in found:
        match each.rest:
            case ["slots", slot, "leader"] if (number := segment_number(slot)) is not None:
                holders[number] = leader_of(f"{name}/{slot}", each.entry, "semaphores")
            case ["line", _]:
                tickets.append(each.entry)
            case ["size"]:
                slots = _whole(_body(each.entry).get("slots"))
    # The holder of a slot may still have its ticket.
    have = {Claim.decode(each.entry.value).attempt for each in found if each.rest[0] == "slots"}
    waiting = [each for each in tickets if Claim.decode(each.value).attempt not in have]
    line = line_of(name, None, waiting, "semaphores")
    return SemaphoreState(slots, dict(sorted(holders.items())), line.candidates)


def _barrier(_name: str, found: list[_Found], _: float) -> BarrierState:
    state: Mapping[str, Any] = {}
    attempts: set[str] = set()
    for each in found:
        if each.rest == ["state"]:
            state = _body(each.entry)
        elif each.rest[0] == "line":
            attempts.add(_arrived(each.entry))
    raw = state.get("passed")
    times = {who: _whole(time) for who, time in raw.items()} if isinstance(raw, dict) else {}
    arrived = len(attempts - {""} - set(times))
    return BarrierState(_whole(state.get("n")), arrived, max(times.values(), default=0))


def _arrived(ticket: Entry) -> str:
    """The attempt that arrived with a ticket; empty if it has not, or has gone."""
    try:
        raw = json.loads(ticket.value)
        return str(raw["attempt"]) if raw["mark"] == "arrived" else ""
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def _group(_: str, found: list[_Found], now: float) -> tuple[Member, ...] | None:
    roster: Roster = roster_of((each.entry for each in found if len(each.rest) == 1), now)
    return tuple(roster.members.values()) or None


def _shards(name: str, found: list[_Found], _: float) -> ShardSetState:
    plan, count, owners, error = map_of(name, None), 0, {}, ""
    for each in found:
        match each.rest:
            case ["plan"]:
                try:
                    plan = map_of(name, Versioned.decode(each.entry))
                except BadDocument as problem:
                    error = str(problem)
            case ["spec"]:
                count = _whole(_body(each.entry).get("count"))
            case ["at", shard, "leader"] if (number := segment_number(shard)) is not None:
                owners[number] = Claim.decode(each.entry.value).name
    return ShardSetState(plan, dict(sorted(owners.items())), count, error)


def _config(_: str, found: list[_Found], _now: float) -> ConfigState | None:
    current = next((each.entry for each in found if each.rest == ["current"]), None)
    if current is None:
        return None
    kept = sum(each.rest[0] == "history" for each in found)
    subscribers = sum(each.rest[0] == "applied" for each in found)
    try:
        document = Versioned.decode(current)
    except BadDocument as problem:
        return ConfigState(0, "", 0.0, kept, subscribers, str(problem))
    try:
        author, at = str(document.body["author"]), finite(document.body["at"])
        if at is None:
            raise ValueError("its time is not a number")
    except (KeyError, ValueError) as problem:
        return ConfigState(
            document.version, "", 0.0, kept, subscribers, f"it is not a configuration: {problem!r}"
        )
    # The current version may have been copied to the history already.
    earlier = kept - any(each.rest == ["history", str(document.version)] for each in found)
    return ConfigState(document.version, author, at, earlier, subscribers)


def _body(entry: Entry) -> Mapping[str, Any]:
    try:
        return Versioned.decode(entry).body
    except BadDocument:
        return {}


def _whole(value: object) -> int:
    return value if type(value) is int else 0


_STATE: Mapping[InventoryKind, Callable[[str, list[_Found], float], Any]] = {
    "elections": lambda name, found, _: _line(name, found, "elections"),
    "locks": lambda name, found, _: _line(name, found, "locks"),
    "semaphores": _semaphore,
    "barriers": _barrier,
    "groups": _group,
    "shards": _shards,
    "configs": _config,
}
