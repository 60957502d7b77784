"""The spec of a set of shards: what people ask for. Pure; imports the errors only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from doyen.errors import BadDocument, ConfigError

__all__ = ["PLAN_BYTES", "ShardSpec"]

PLAN_BYTES = 256 * 1024
"""The largest plan. Every engine accepts a value of this size."""
_BYTES_PER_INDEX = 4
"""An index into the table of names, with its comma, for up to a thousand members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """What people ask of a set of shards. Unchanged fields have their defaults.

    >>> ShardSpec(count=64, pins={7: "server2"}).weight("server1", 2.0)
    2.0
    """

    count: int
    """How many shards there are, numbered from 0."""
    pins: Mapping[int, str] = field(default_factory=dict)
    """Preferred owners. A shard is elsewhere only while its preferred owner is not eligible."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of members, instead of those that they state. A weight of 0 drains a member."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """Zones of members, instead of those that they state."""
    standbys: int = 0
    """How many standbys each shard has. Standbys are in other zones than the owner, if there are
    other zones."""
    moves_at_once: int = 16
    """How many shards may be on their way from one live owner to another. At most 256 are on their
    way to one member."""
    prepare_s: float = 30.0
    """How long a new owner may prepare before its move is aborted."""
    ending_s: float = 10.0
    """How long an old owner may take to end. A move that takes longer is reported as stuck, and no
    longer counts against `moves_at_once`."""
    grace_s: float = 0.0
    """How long the shards of a member that has gone are kept for its return."""
    min_members: int = 1
    """Nothing is assigned before this many members are eligible; again so after all have gone."""
    failures: int = 3
    """How many times in a row a body may fail on one member before its shard is moved."""
    settle_s: float = 0.2
    """The plan is written at most this often, so that changes that come together share a write."""
    barrier: bool = False
    """When the count changes, end all terms before any shard of the new count has an owner. It is
    needed if the count decides which keys belong to a shard."""
    paused: bool = False
    """Keep the plan as it is."""
    retry: int = 0
    """Raised to try shards again that were set aside."""
    rebalance: int = 0
    """Raised to have loads made as equal as possible, once."""

    def __post_init__(self) -> None:
        whole = {"count": 1, "standbys": 0, "moves_at_once": 1, "min_members": 1, "failures": 1}
        for name, least in {**whole, "retry": 0, "rebalance": 0}.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} is an integer of {least} or more, not {value!r}")
        for name, least_s in {
            "prepare_s": 0.001, "ending_s": 0.001, "grace_s": 0.0, "settle_s": 0.001
        }.items():  # fmt: skip
            value = getattr(self, name)
            if not _is_number(value) or value < least_s:
                raise ConfigError(f"{name} is {least_s:g} s or more, not {value!r}")
        for name in ("barrier", "paused"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} is true or false, not {getattr(self, name)!r}")
        for shard, member in self.pins.items():
            if type(shard) is not int or shard < 0:
                raise ConfigError(f"pins are by shard number, from 0 on, not {shard!r}")
            _check_name(member)
        for member, weight in self.weights.items():
            _check_name(member)
            check_weight(weight)
        for member, zone in self.zones.items():
            _check_name(member)
            if not isinstance(zone, str):
                raise ConfigError(f"a zone is a string, not {zone!r}")
        size = self.count * (1 + self.standbys) * _BYTES_PER_INDEX
        if size > PLAN_BYTES:
            raise ConfigError(
                f"the plan of {self.count} shards with {self.standbys} standbys would take about"
                f" {size} bytes, more than {PLAN_BYTES}: use fewer shards or standbys, or several"
                " sets"
            )

    def weight(self, member: str, stated: float) -> float:
        """The weight of a member that states its weight as `stated`."""
        return self.weights.get(member, stated)

    def change(self, **changes: Any) -> ShardSpec:
        """A copy with some fields changed. Raises `ConfigError` for an unknown field."""
        known = {each.name for each in fields(self)}
        for name in changes:
            if name not in known:
                raise ConfigError(
                    f"a spec has no field {name!r}; it has {', '.join(sorted(known))}"
                )
        return replace(self, **changes)

    def encode(self) -> dict[str, Any]:
        """The body of the document. Fields that have their default are left out."""
        default = asdict(ShardSpec(count=self.count))
        body = {name: value for name, value in asdict(self).items() if value != default[name]}
        if self.pins:
            body["pins"] = {str(shard): self.pins[shard] for shard in sorted(self.pins)}
        return {"count": self.count, **body}

    @classmethod
    def decode(cls, body: Mapping[str, Any]) -> ShardSpec:
        """Read a document. Raises `BadDocument` if it is not a spec."""
        try:
            known = {each.name for each in fields(cls)}
            given = {name: value for name, value in body.items() if name in known}
            given["pins"] = {int(shard): who for shard, who in given.get("pins", {}).items()}
            return cls(**given)
        except (TypeError, ValueError, AttributeError) as error:
            raise BadDocument(f"this is not the spec of shards: {error}") from error


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _check_name(member: object) -> None:
    if not isinstance(member, str) or not member:
        raise ConfigError(f"a member's name is a string, not {member!r}")


def check_weight(weight: object) -> None:
    """Raise `ConfigError` unless this is a weight."""
    if not _is_number(weight) or not 0 <= weight <= 1e6:  # type: ignore[operator]
        raise ConfigError(f"a weight is a number from 0 to 1,000,000, not {weight!r}")
