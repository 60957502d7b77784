"""The values that pass between layers: what a store holds, who leads, and the keys they live at.

Nothing here does anything; everything is frozen.

Keys are paths of `/`-separated segments. A segment that comes from a user is percent-encoded, so
no name, however odd, can reach into another's keys. Adapters may lay keys out in their engine as
they like (ZooKeeper tickets stand directly under the election's path, as its recipe has it), as
long as the port's promises hold.

    elections/<name>/leader                  the leader record
    elections/<name>/leader/order            what somebody asks of the holder
    elections/<name>/leader/ready/<attempt>  an heir's word that it is ready
    elections/<name>/line/<ticket>           the line of candidates
    elections/<name>/mail/<attempt>          an order's word to its heir
    locks/<name>/…                           the same for a lock
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from doyen.errors import ConfigError

__all__ = [
    "Candidate",
    "Claim",
    "Entry",
    "Finding",
    "Kind",
    "Leader",
    "Lease",
    "Level",
    "Line",
    "Meta",
    "Order",
    "Version",
    "leader_key",
    "line_key",
    "mail_key",
    "order_key",
    "ready_key",
]

Version = Hashable
"""Opaque: compared for equality by the store that made it, never ordered."""

Kind = Literal["elections", "locks"]

CLAIM_BYTES = 64 * 1024
"""What a candidate may say of itself at most: everybody in its line reads it, on any engine."""

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
class Candidate:
    """One who stands in the line of an election."""

    name: str
    priority: int
    leads: bool
    meta: Meta = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """The line of an election, in order, and who leads it. A leader by the recipe `race` has no
    place in the line."""

    leader: Leader | None
    candidates: tuple[Candidate, ...] = ()


Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something worth knowing about a store or a configuration, and what to do about it."""

    level: Level
    subject: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """The value of tickets and leader records: who, and in which attempt.

    The attempt id is unique to one candidacy on one lease. It is how a candidate recognises its
    own write after an answer was lost.
    """

    name: str
    attempt: str
    meta: Meta = field(default_factory=dict)
    rank: int = 0

    def encode(self) -> bytes:
        try:
            encoded = _encode(
                {"name": self.name, "attempt": self.attempt, "meta": self.meta, "rank": self.rank}
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"meta must be something JSON can carry: {error}") from error
        if len(encoded) > CLAIM_BYTES:
            raise ConfigError(
                f"name and meta take {len(encoded)} bytes, more than {CLAIM_BYTES}: keep what is"
                " large elsewhere, and put where it is into meta"
            )
        return encoded

    @classmethod
    def decode(cls, value: bytes) -> Claim:
        """Read a claim; one written by something else yields its text as the name."""
        try:
            raw = json.loads(value)
            return cls(
                str(raw["name"]),
                str(raw["attempt"]),
                dict(raw.get("meta") or {}),
                int(raw.get("rank", 0)),
            )
        except (ValueError, TypeError, KeyError):
            return cls(value.decode("utf-8", "replace"), "")


@dataclass(frozen=True, slots=True)
class Order:
    """What somebody asks of a leader: to let go, perhaps in favour of an heir.

    Orders, and the mail that tells an heir of one, are bound to the lease of whoever gives them:
    nobody obeys the dead.
    """

    token: int
    """The term it is meant for. In any other it means nothing."""
    by: str
    heir: str = ""
    """The attempt that is to follow, once it has said that it is ready; empty: who is next."""
    rank: int | None = None
    """Set by an heir that claims its priority. A leader of the same or a higher one ignores it."""

    def encode(self) -> bytes:
        return _encode({"token": self.token, "by": self.by, "heir": self.heir, "rank": self.rank})

    @classmethod
    def decode(cls, value: bytes) -> Order | None:
        """Read an order; None if it is not one."""
        try:
            raw = json.loads(value)
            rank = raw.get("rank")
            return cls(
                int(raw["token"]),
                str(raw["by"]),
                str(raw.get("heir", "")),
                None if rank is None else int(rank),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=_mapping, allow_nan=False).encode()


def _mapping(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON serialisable")


def _path(name: object, kind: Kind) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the name of an election is a string of 1 to 200 bytes, not {name!r}")
    if not name.isprintable():  # which also keeps out what UTF-8 cannot carry
        raise ConfigError(f"the name of an election has only printable characters, not {name!r}")
    if (size := len(name.encode())) > 200:
        raise ConfigError(
            f"the name of an election is a string of 1 to 200 bytes, not of {size}: {name[:20]!r}…"
        )
    from urllib.parse import quote  # a tenth of what importing doyen would cost

    return f"{kind}/{quote(name, safe='')}"


def leader_key(name: str, kind: Kind = "elections") -> str:
    """
    >>> leader_key("/app/leader_election")
    'elections/%2Fapp%2Fleader_election/leader'
    """
    return f"{_path(name, kind)}/leader"


def order_key(name: str, kind: Kind = "elections") -> str:
    return f"{leader_key(name, kind)}/order"


def ready_key(name: str, attempt: str, kind: Kind = "elections") -> str:
    return f"{leader_key(name, kind)}/ready/{attempt}"


def line_key(name: str, kind: Kind = "elections") -> str:
    return f"{_path(name, kind)}/line"


def mail_key(name: str, attempt: str, kind: Kind = "elections") -> str:
    return f"{_path(name, kind)}/mail/{attempt}"
