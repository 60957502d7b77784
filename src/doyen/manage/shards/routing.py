"""The map of a set of shards, for clients: from a key to its shard, its owner and its address."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from doyen.election.core import SessionCore
from doyen.errors import BadDocument, DoyenError
from doyen.manage.documents import Document, Versioned
from doyen.manage.shards.plan import NO_MEMBER, Move, PlannedMember, ShardPlan
from doyen.model import Unreachable, shards_key

__all__ = ["Route", "ShardMap", "observe_map", "read_map", "shard_of"]


def shard_of(key: str | bytes, count: int) -> int:
    """The shard of a key: the first 8 bytes of its BLAKE2b hash, as a big-endian number, modulo the
    number of shards.

    >>> shard_of("customer-17", 64)
    17
    """
    from hashlib import blake2b  # costs more than the rest of the import

    raw = key.encode() if isinstance(key, str) else key
    return int.from_bytes(blake2b(raw, digest_size=8).digest()) % count


class Route(NamedTuple):
    """Where a request for a key goes."""

    shard: int
    owner: str
    """Empty if the shard has no owner at present."""
    address: str
    generation: int
    """To be sent with the request: by it the owner recognises a client with an old map."""


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Who is planned to own which shard. Owners that are about to change are still the old ones."""

    shards: str
    """The name of the set."""
    generation: int
    """Raised with every change of the number of shards. 0: nothing has been planned yet."""
    version: int
    """Raised with every change of the plan."""
    open: bool
    """False between two generations: no shard has an owner."""
    owners: tuple[str, ...]
    standbys: tuple[tuple[str, ...], ...] = ()
    members: Mapping[str, PlannedMember] = field(default_factory=dict)
    moves: Mapping[int, Move] = field(default_factory=dict)
    aside: Mapping[int, str] = field(default_factory=dict)
    failed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The members on which the body of a shard kept failing."""
    slow: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The members that prepared for a shard for longer than `prepare_s`."""
    grace: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    spec: int = 0
    """The version of the spec that the plan follows."""
    regressed: bool = False
    """It is older than a map that was observed before: the store has lost confirmed writes."""

    @property
    def count(self) -> int:
        """The number of shards."""
        return len(self.owners)

    def owner(self, shard: int) -> str:
        """The owner of a shard; empty if it has none."""
        return self.owners[shard] if self.open else NO_MEMBER

    def owned_by(self, member: str) -> list[int]:
        """The shards of a member."""
        return [shard for shard, owner in enumerate(self.owners) if owner == member]

    def route(self, key: str | bytes) -> Route:
        """The shard of a key, its owner, and the owner's address."""
        if not self.owners:
            raise DoyenError(f"the set of shards {self.shards!r} has no plan yet")
        shard = shard_of(key, self.count)
        owner = self.owner(shard)
        member = self.members.get(owner)
        return Route(shard, owner, member.address if member else "", self.generation)


def map_of(name: str, version: Versioned | None, *, regressed: bool = False) -> ShardMap:
    """The map that a plan describes."""
    plan = ShardPlan() if version is None else ShardPlan.decode(version.body)
    return ShardMap(
        name,
        plan.generation,
        0 if version is None else version.version,
        plan.open,
        plan.owners,
        plan.standbys,
        plan.members,
        plan.moves,
        plan.aside,
        plan.failed,
        plan.slow,
        plan.grace,
        plan.note,
        plan.spec,
        regressed,
    )


async def read_map(core: SessionCore, name: str) -> ShardMap:
    """The current map, read from the store."""
    return map_of(name, await Document(core.calls, shards_key(name, "plan")).read())


async def observe_map(
    core: SessionCore, name: str, deliver: Callable[[ShardMap | Unreachable[ShardMap]], None]
) -> None:
    """Deliver the current map, then every change, until cancelled. A plan that cannot be read is
    passed over: the last map stays in force."""

    last: ShardMap | None = None

    def changed(version: Versioned | BadDocument | None, regressed: bool) -> None:
        nonlocal last
        if isinstance(version, BadDocument):
            return
        with contextlib.suppress(BadDocument):
            last = map_of(name, version, regressed=regressed)
            deliver(last)

    def unreachable(seen: Unreachable[Any]) -> None:
        deliver(Unreachable(seen.since, last, seen.error))

    await Document(core.calls, shards_key(name, "plan")).observe(changed, unreachable)
