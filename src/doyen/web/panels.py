"""Groups, shards, configurations and nodes of a quorum, read from the store for the board.

Each panel is read again after a pause, and at once after a notification where one watch covers the
panel. If there is much to list, the pause grows with what a reading costs. A reading that fails, or
waits for a node that does not answer, costs nothing.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

from doyen.errors import BadDocument, StoreError
from doyen.events.log_lines import log_line
from doyen.manage.applied import Applied
from doyen.manage.documents import Versioned
from doyen.manage.members import MemberValue
from doyen.manage.roster import SUSPECT_AFTER
from doyen.manage.shards.plan import ShardPlan
from doyen.manage.shards.spec import ShardSpec
from doyen.model import Claim, Entry, finite, segment_number
from doyen.stores.port import Watch
from doyen.web.hub import SHARE, SHORT, Hub
from doyen.web.terms import clipped, value_text

__all__ = ["ConfigPanel", "GroupPanel", "NodePanel", "PagePanel", "ShardPanel", "panels_of"]

log = logging.getLogger("doyen")

SETTLE_S = 0.05
BEATS = 12
"""How many renewals of a member are shown."""
GONE_S = 120.0
"""How long a member that has gone is shown."""
NODE_S = (1.0, 3.0)
"""How long a node may take to tell its status, at least and at most. The others are shown no more
often than that."""


class PagePanel:
    """Keeps one topic of the board up to date."""

    topic: str
    prefix: str = ""
    """The prefix of its keys, which it watches."""
    every_s = 1.0
    """The shortest pause between two readings."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._changed = asyncio.Event()
        self._watch: Watch | None = None
        self._listed = 0
        """How many entries the last reading listed."""

    async def run(self) -> None:
        """Read again and again, until cancelled."""
        now = self.hub.core.runtime.clock.now
        try:
            while True:
                self._changed.clear()
                began, pause_s = now(), self.every_s
                try:
                    if self.prefix and self._watch is None:
                        watching = self.hub.core.store.watch(self.prefix, self._changed.set)
                        self._watch = await self.hub.call(watching)
                    self.hub.board.set(self.topic, await self.read())
                    self.hub.part_read(self.topic)
                    if self._listed > SHORT:
                        pause_s = max(pause_s, SHARE * (now() - began))
                except StoreError as error:
                    self.hub.part_failed(self.topic, error)
                    log.debug("%s", log_line(event="panel_failed", panel=self.topic, error=error))
                cost_s = now() - began
                try:
                    async with asyncio.timeout(pause_s):
                        await self._changed.wait()
                        await asyncio.sleep(max(SETTLE_S, 2 * cost_s))
                except TimeoutError:
                    pass
        finally:
            if self._watch is not None:
                self._watch.close()

    async def read(self) -> Any:
        """The value of the topic."""
        raise NotImplementedError

    async def entries(self, prefix: str) -> list[Entry]:
        """The entries below a prefix."""
        entries = await self.hub.call(self.hub.core.store.list(prefix))
        self._listed = len(entries)
        return entries


@dataclass(slots=True)
class HeardMember:
    """A member of a group, with the history of its renewals as far as they were seen."""

    group: str
    name: str
    incarnation: int
    value: MemberValue
    heard: float | None = None
    """When it renewed last, on the wall clock; None if the store does not tell."""
    beats: deque[str] = field(default_factory=lambda: deque(maxlen=BEATS))
    looked: float | None = None
    """When the store was last asked, on the wall clock. Since then it may have renewed."""
    silent_s: float = 0.0
    """The longest silence that was seen since the last renewal."""
    gone_at: float | None = None

    def look(self, entry: Entry, now: float) -> None:
        if entry.remaining_s is None:
            return
        ttl_s, self.looked = self.value.ttl_s, now
        heard = now - max(0.0, ttl_s - entry.remaining_s)
        if self.heard is None:
            self.heard = heard
        elif heard - self.heard > 0.1 * ttl_s:
            # Renewals between two looks are not seen, so the distance of two that were seen says
            # nothing about silence.
            self.beats.append("l" if self.silent_s > SUSPECT_AFTER * ttl_s else "o")
            self.heard, self.silent_s = heard, 0.0
        self.silent_s = max(self.silent_s, now - self.heard)

    def as_dict(self) -> dict[str, Any]:
        value = self.value
        return {
            "group": clipped(self.group),
            "name": clipped(self.name),
            "incarnation": self.incarnation,
            "state": value.state,
            "reason": clipped(value.reason),
            "by": clipped(value.by, 100),
            "ttl": value.ttl_s,
            "since": round(value.since, 1),
            "heard": None if self.heard is None else round(self.heard, 2),
            "looked": None if self.looked is None else round(self.looked, 2),
            "beats": "".join(self.beats),
            "gone": self.gone_at,
            "meta": clipped(value_text(dict(value.meta)), 500),
        }


class GroupPanel(PagePanel):
    """The members of all groups: their state, and when they were last heard."""

    topic, prefix, every_s = "members", "members", 1.0

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self._members: dict[str, HeardMember] = {}

    async def read(self) -> list[dict[str, Any]]:
        entries = await self.entries("members")
        untold = [entry.lease for entry in entries if entry.lease and entry.remaining_s is None]
        left = await self.hub.remaining(dict.fromkeys(untold))
        now = self.hub.board.wall()
        alive = set()
        for entry in entries:
            value = MemberValue.decode(entry.value)
            parts = entry.key.split("/")
            if value is None or entry.lease is None or len(parts) != 3:
                continue
            alive.add(entry.key)
            member = self._members.get(entry.key)
            if member is None or member.incarnation != entry.revision:
                group, name = unquote(parts[1]), unquote(parts[2])
                member = HeardMember(group, name, entry.revision, value)
                self._members[entry.key] = member
            member.value = value
            if entry.remaining_s is None:
                entry = entry._replace(remaining_s=left.get(entry.lease))  # noqa: PLW2901
            member.look(entry, now)
        for key, member in list(self._members.items()):
            if key not in alive:
                member.gone_at = member.gone_at or round(now, 1)
                if now - member.gone_at > GONE_S:
                    del self._members[key]
        return [self._members[key].as_dict() for key in sorted(self._members)]


class ShardPanel(PagePanel):
    """The sets of shards: planned and actual owners, moves, and what is asked of the set."""

    topic, prefix, every_s = "shards", "shards", 5.0

    async def read(self) -> list[dict[str, Any]]:
        entries = await self.entries("shards")
        sets: dict[str, dict[str, Any]] = {}
        for entry in entries:
            _, name, *rest = entry.key.split("/")
            if not rest:
                continue  # not a key of doyen
            its = sets.setdefault(name, {"at": {}})
            match rest:
                case ["spec" | "plan" as part]:
                    its[part] = entry
                case ["at", shard, "leader"] if (number := segment_number(shard)) is not None:
                    its["at"][number] = (Claim.decode(entry.value).name, entry.revision)
        return [_shard_set(unquote(name), its) for name, its in sorted(sets.items())]


def _shard_set(name: str, its: dict[str, Any]) -> dict[str, Any]:
    plan, spec, error = ShardPlan(), None, ""
    try:
        if "plan" in its:
            plan = ShardPlan.decode(Versioned.decode(its["plan"]).body)
        if "spec" in its:
            spec = ShardSpec.decode(Versioned.decode(its["spec"]).body)
    except BadDocument as bad:
        error = str(bad)
    count = plan.count or (spec.count if spec else 0)
    at: dict[int, tuple[str, int]] = its["at"]
    everyone = {owner for owner, _ in at.values()} | set(plan.members) | set(plan.owners)
    everyone |= {move.to for move in plan.moves.values()}
    names = sorted(everyone - {""})
    index = {each: number for number, each in enumerate(names)}

    def owner_of(shard: int) -> int:
        return index.get(plan.owners[shard], -1) if 0 <= shard < plan.count else -1

    return {
        "name": clipped(name),
        "count": count,
        "generation": plan.generation,
        "open": plan.open,
        "names": [clipped(each) for each in names],
        "members": [each in plan.members for each in names],
        "drained": [each for each in names if spec and spec.weights.get(each) == 0],
        "planned": [index.get(owner, -1) for owner in plan.owners],
        "owners": [index.get(at[n][0], -1) if n in at else -1 for n in range(count)],
        "tokens": [at[n][1] if n in at else 0 for n in range(count)],
        "moves": [
            [n, owner_of(n), index.get(move.to, -1), _way(move)]
            for n, move in sorted(plan.moves.items())
        ],
        "aside": {str(n): clipped(why) for n, why in plan.aside.items()},
        "grace": {clipped(who): left_s for who, left_s in plan.grace.items()},
        "paused": bool(spec and spec.paused),
        "note": clipped(plan.note or error),
    }


def _way(move: Any) -> str:
    if move.stuck:
        return "stuck: the old owner has not ended"
    return "the old owner is ending" if move.ready else "the new owner prepares"


class ConfigPanel(PagePanel):
    """The configurations: their current version, and how many subscribers have applied it."""

    topic, every_s = "configs", 3.0

    async def read(self) -> list[dict[str, Any]]:
        entries = await self.entries("config")
        by_name: dict[str, list[Entry]] = {}
        for entry in entries:
            _, name, *rest = entry.key.split("/")
            if rest:
                by_name.setdefault(name, []).append(entry)
        shown = (_config(unquote(name), its) for name, its in sorted(by_name.items()))
        return [each for each in shown if each is not None]


def _config(name: str, entries: list[Entry]) -> dict[str, Any] | None:
    parts = {tuple(entry.key.split("/")[2:]): entry for entry in entries}
    current = parts.get(("current",))
    if current is None:
        return None
    applied = [Applied.decode(entry) for path, entry in parts.items() if path[0] == "applied"]
    try:
        version = Versioned.decode(current)
    except BadDocument as bad:
        return {"name": clipped(name), "error": clipped(str(bad))}
    kept = [path[1] for path in parts if path[0] == "history" and len(path) == 2]
    return {
        "name": clipped(name),
        "version": version.version,
        "author": clipped(str(version.body.get("author", "")), 100),
        "at": finite(version.body.get("at")),
        # The history may have a copy of the current version.
        "versions": len({str(version.version), *kept}),
        "subscribers": len(applied),
        "applied": sum(each.version == version.version for each in applied),
        "refused": sum(
            each.refused is not None and each.refused.version == version.version for each in applied
        ),
    }


async def config_detail(hub: Hub, name: str, version: int | None) -> dict[str, Any] | None:
    """One configuration with its history, and what changed from the version before `version`."""
    from doyen.model import config_key

    entries = await hub.call(hub.core.store.list(config_key(name)))
    versions: dict[int, Versioned] = {}
    applied = []
    for entry in entries:
        part = entry.key.split("/")[2:3]
        if part == ["applied"]:
            applied.append(Applied.decode(entry))
        elif part in (["current"], ["history"]):
            try:
                decoded = Versioned.decode(entry)
            except BadDocument:
                continue
            versions[decoded.version] = decoded
    if not versions:
        return None
    numbers = sorted(versions)
    chosen = version if version in versions else numbers[-1]
    before = max((each for each in numbers if each < chosen), default=None)
    old = [] if before is None else _lines(versions[before])
    new = _lines(versions[chosen])
    return {
        "name": name,
        "version": chosen,
        "before": before,
        "history": [
            {
                "version": each,
                "author": clipped(str(versions[each].body.get("author", "")), 100),
                "at": finite(versions[each].body.get("at")),
            }
            for each in reversed(numbers)
        ],
        "applied": [
            {
                "name": clipped(each.name),
                "version": each.version,
                "refused": None
                if each.refused is None
                else [each.refused.version, clipped(each.refused.reason)],
            }
            for each in sorted(applied)
        ],
        "diff": _diff(old, new),
    }


LINES = 2000
"""How many lines of a document are compared and sent."""


def _lines(version: Versioned) -> list[str]:
    lines = value_text(version.body.get("value"), indent=2).splitlines()
    return [clipped(line, 1000) for line in lines[:LINES]] + (["…"] if len(lines) > LINES else [])


def _diff(old: list[str], new: list[str]) -> list[list[str]]:
    """Lines of the new document and those that are gone: [sign, text].

    >>> _diff(["{", '  "a": 1', "}"], ["{", '  "a": 2', "}"])
    [[' ', '{'], ['-', '  "a": 1'], ['+', '  "a": 2'], [' ', '}']]
    """
    if not old:
        return [["+", line] for line in new]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    found: list[list[str]] = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            found += [[" ", line] for line in old[a:b]]
        else:
            found += [["-", line] for line in old[a:b]]
            found += [["+", line] for line in new[c:d]]
    return found


class _Inspected(Protocol):
    def inspect(self, within_s: float) -> Awaitable[Any]: ...


class NodePanel(PagePanel):
    """The nodes of a quorum."""

    topic, every_s = "nodes", 1.0

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self._within_s = NODE_S[1]
        self._names: dict[str, str] = {}
        """Of the nodes, by their address."""

    async def read(self) -> dict[str, Any]:
        from doyen.stores.quorum.diagnosis import outsiders, remarks

        store: _Inspected = self.hub.core.store  # type: ignore[assignment]
        now = self.hub.core.runtime.clock.now
        began = now()
        states = await store.inspect(self._within_s)
        # One that does not answer has more time from look to look, in case it is slow.
        silent = any(state.condition is None for state in states)
        wanted_s = 1.5 * self._within_s if silent else 4 * (now() - began)
        self._within_s = min(NODE_S[1], max(NODE_S[0], wanted_s))
        for state in states:
            if name := state.condition.node if state.condition else state.node:
                self._names[state.address] = name
        up = [state.condition for state in states if state.condition is not None]
        leads = max(
            (each for each in up if each.role == "leading"),
            key=lambda each: each.generation,
            default=None,
        )
        outside = outsiders(states)
        return {
            "generation": max((each.generation for each in up), default=0),
            "leader": None if leads is None else leads.node,
            "voters": [] if leads is None else list(leads.voters),
            "remarks": [clipped(line) for line in remarks(states)],
            "nodes": sorted(
                (self._node(state, leads, outside) for state in states),
                key=lambda node: node["node"],
            ),
        }

    def _node(self, state: Any, leads: Any, outside: set[str]) -> dict[str, Any]:
        node = state.condition
        if node is None:
            name = self._names.get(state.address, state.address)
            return {"node": name, "address": state.address, "silent": clipped(state.silent_because)}
        role = {"leading": "leader", "following": "follower"}.get(node.role, node.role)
        if node.node in node.learners:
            role = "learner"
        return {
            "node": clipped(node.node, 100),
            "address": clipped(state.address, 100),
            "role": "outside" if node.node in outside else role,
            "generation": node.generation,
            "commit": node.commit,
            "applied": node.applied,
            "lag": max(0, leads.commit - node.applied) if leads is not None else None,
            "full": node.full,
            "keys": node.keys,
            "clients": node.clients,
            "watches": node.watches,
            "bytes": node.bytes,
            "quota": node.quota,
            "alarm": node.alarm,
            "disk_free": node.disk_free,
            "disk_total": node.disk_bytes,
            "sync_ms": round(node.sync_p99_s * 1000, 2),
            "version": node.version,
        }


def panels_of(hub: Hub) -> list[PagePanel]:
    """The panels for this store."""
    panels: list[Callable[[Hub], PagePanel]] = [GroupPanel, ShardPanel, ConfigPanel]
    if hasattr(hub.core.store, "inspect"):
        panels.append(NodePanel)
    return [panel(hub) for panel in panels]
