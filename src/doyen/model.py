"""The values that pass between layers: what a store holds, who leads, and the keys they live at.

Nothing here does anything; everything is frozen.

Keys are paths of `/`-separated segments. A segment that comes from a user is percent-encoded, so
no name, however odd, can reach into another's keys. Adapters may lay keys out in their engine as
they like (ZooKeeper tickets stand directly under the election's path, as its recipe has it), as
long as the port's promises hold.

    elections/<name>/leader        the leader record
    elections/<name>/leader/order  what somebody asks of the holder
    elections/<name>/line/<ticket> the line of candidates
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from doyen.errors import ConfigError

__all__ = [
    "Claim",
    "Entry",
    "Leader",
    "Lease",
    "Meta",
    "Version",
    "leader_key",
    "line_key",
    "order_key",
]

Version = Hashable
"""Opaque: compared for equality by the store that made it, never ordered."""

Meta = Mapping[str, Any]
"""What a candidate tells others about itself; anything JSON can carry."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A time-limited claim in a store. `ttl_s` is what was *granted*, not what was asked."""

    id: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands at a key."""

    key: str
    value: bytes
    revision: int
    """Of the entry's creation. For a leader record this is the token."""
    version: Version
    """Changes with every write to the entry; for `if_version`."""
    lease: str | None = None
    """The id of the lease it is bound to."""
    remaining_s: float | None = None
    """What is left of that lease as the store sees it, where the store can tell."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads an election."""

    election: str
    name: str
    token: int
    meta: Meta = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """The value of tickets and leader records: who, and in which attempt.

    The attempt id is unique to one candidacy on one lease. It is how a candidate recognises its
    own write after an answer was lost.
    """

    name: str
    attempt: str
    meta: Meta = field(default_factory=dict)

    def encode(self) -> bytes:
        try:
            return json.dumps(
                {"name": self.name, "attempt": self.attempt, "meta": self.meta},
                separators=(",", ":"),
                default=_mapping,
            ).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"meta must be something JSON can carry: {error}") from error

    @classmethod
    def decode(cls, value: bytes) -> Claim:
        """Read a claim; one written by something else yields its text as the name."""
        try:
            raw = json.loads(value)
            return cls(str(raw["name"]), str(raw["attempt"]), dict(raw.get("meta") or {}))
        except (ValueError, TypeError, KeyError):
            return cls(value.decode("utf-8", "replace"), "")


def _mapping(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON serialisable")


def _election(name: str) -> str:
    if not name or len(name.encode()) > 200:
        raise ConfigError(f"an election's name is a string of 1 to 200 bytes, not {name!r}")
    if not name.isprintable():
        raise ConfigError(f"an election's name has only printable characters, not {name!r}")
    return f"elections/{quote(name, safe='')}"


def leader_key(election: str) -> str:
    """
    >>> leader_key("/app/leader_election")
    'elections/%2Fapp%2Fleader_election/leader'
    """
    return f"{_election(election)}/leader"


def order_key(election: str) -> str:
    return f"{leader_key(election)}/order"


def line_key(election: str) -> str:
    return f"{_election(election)}/line"
