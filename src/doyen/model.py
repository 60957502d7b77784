"""The values that layers exchange, all of them immutable, and the keys under which they are stored.

Keys are paths of `/`-separated segments. A segment that comes from a user is percent-encoded, so
no name can reach into the keys of another. Adapters may map keys to their engine in their own way
(ZooKeeper tickets are directly under the election's path, as in its recipe), as long as the port's
promises hold.

    elections/<name>/leader                  the leader record
    elections/<name>/leader/order            an order to the leader
    elections/<name>/leader/ready/<attempt>  a successor's ready marker
    elections/<name>/line/<ticket>           the line of candidates
    elections/<name>/mail/<attempt>          the notice to a successor
    locks/<name>/…                           the same for a lock
    shards/<set>/at/<n>/leader               the same for a shard, without a line
    shards/<set>/spec                        what is asked of a set of shards
    shards/<set>/plan                        what its controller has decided
    members/<group>/<name>                   a member of a group
    published/<group>                        the list of members that a leader publishes
    config/<name>/current                    a configuration
    config/<name>/history/<version>          what it was before
    config/<name>/applied/<subscriber>       what a subscriber has applied
    semaphores/<name>/slots/<n>/leader       the record of one slot of a semaphore
    semaphores/<name>/line/<ticket>          the line for all its slots
    semaphores/<name>/size                   how many slots it has
    barriers/<name>/line/<ticket>            who has arrived at a barrier
    barriers/<name>/state                    who has passed it
    trails/<name>                            the last terms of an election

Imports the errors and the base of values only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from doyen._values import Value, field
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
    "Member",
    "MemberChange",
    "MemberState",
    "Meta",
    "Order",
    "PastTerm",
    "Published",
    "Reachable",
    "Unreachable",
    "Version",
]

T_co = TypeVar("T_co", covariant=True)

Version = Hashable
"""Opaque: compared for equality by the store that made it, never ordered."""

Kind = Literal["elections", "locks", "semaphores", "shards"]
"""What a name stands for. An election and a lock of the same name are independent of each other.
The name of a shard is that of its set, `/` and its number; so is that of a slot of a semaphore."""
KINDS: tuple[Kind, ...] = get_args(Kind)
LEADER: Mapping[Kind, str] = {
    "elections": "leader",
    "locks": "holder",
    "semaphores": "holder",
    "shards": "owner",
}
HAS: Mapping[Kind, str] = {
    "elections": "leads",
    "locks": "has",
    "semaphores": "has",
    "shards": "owns",
}
"""The verb for holding each kind, in messages."""

NAME_BYTES = 200
"""Limit for the name of an election, and of whatever else has a name in keys."""
CLAIM_BYTES = 64 * 1024
"""Limit for the name and meta of a candidate. Other candidates read them, on any engine."""

Meta = Mapping[str, Any]
"""Information about a candidate for others to read; anything that JSON can represent."""


class Lease(NamedTuple):
    """A time-limited claim in a store. `ttl_s` is what was *granted*, not what was requested."""

    id: str
    ttl_s: float


class Entry(NamedTuple):
    """A key with its value."""

    key: str
    value: bytes
    revision: int
    """Of the entry's creation. For a leader record this is the token."""
    version: Version
    """Changes with every write to the entry; for `if_version`."""
    lease: str | None = None
    """The id of the lease it is bound to."""
    remaining_s: float | None = None
    """What is left of that lease according to the store, if the store reports it."""


class Leader(Value):
    """Who leads an election, or holds a lock."""

    election: str
    name: str
    token: int
    meta: Meta = field(default_factory=dict)
    kind: Kind = "elections"
    since: float | None = field(default=None, compare=False)
    """When it was elected, on its own wall clock, in seconds since 1970. For display."""
    ttl_s: float | None = field(default=None, compare=False)
    """The ttl of its lease."""
    remaining_s: float | None = field(default=None, compare=False)
    """What was left of its lease when this was read, if the store tells."""
    foreign: bool = field(default=False, compare=False)
    """It is a candidate of another program, which the store's `layout=` admits."""


class Candidate(Value):
    """A candidate in the line of an election or a lock."""

    name: str
    priority: int
    leads: bool
    meta: Meta = field(default_factory=dict)
    foreign: bool = False
    """It is a candidate of another program, which the store's `layout=` admits."""


class Line(Value):
    """The line of an election, in order, and its leader. A leader with the recipe `race` is not in
    the line."""

    leader: Leader | None
    candidates: tuple[Candidate, ...] = ()
    complete: bool = True
    """False if the store does not show who waits, as with `layout=lock` on Consul."""


TermEnd = Literal["", "resigned", "lost"]


class PastTerm(Value):
    """A term of an election, as its leader recorded it in the store."""

    name: str
    """Of the leader."""
    token: int
    since: float
    """When it began, on the wall clock of the leader, in seconds since 1970."""
    until: float | None = None
    """When it ended. None if it has not ended, or its leader could not record that."""
    end: TermEnd = ""
    """How it ended; empty if that is not recorded."""
    reason: str = ""
    """Why it was lost."""
    leads: bool = False
    """The leader record shows that it has not ended."""


class Unreachable(Value, Generic[T_co]):
    """The store does not answer. An observer gets this within a ttl, and what it observes again
    when the store answers.

    It is false: code that only asks whether there is a leader takes it for "none is known".

    >>> seen = Unreachable(1_700_000_000.0, Leader("billing", "server1", 7))
    >>> bool(seen), seen.last.name
    (False, 'server1')
    """

    since: float
    """When the store last answered, on the wall clock of the observer, in seconds since 1970."""
    last: T_co | None = None
    """What was observed last. It may have changed since. None if nothing was."""
    error: str = field(default="", compare=False)
    """The error of the last request."""

    def __bool__(self) -> Literal[False]:
        return False


class Reachable(Value):
    """The store answers again. Observers of changes get this after `Unreachable`, and then what has
    changed meanwhile."""

    since: float
    """When it answered, on the wall clock of the observer, in seconds since 1970."""


MemberState = Literal["up", "unhealthy", "draining"]
SessionHealth = Literal["ok", "unsure", "lost", "closed"]


class Member(Value):
    """A member of a group, as a reader of the list sees it."""

    name: str
    incarnation: int
    """Each time that a member joins it has a higher one."""
    state: MemberState = "up"
    reason: str = ""
    """Why it is in this state; empty if it is up."""
    meta: Meta = field(default_factory=dict)
    since: float = 0.0
    """When it joined, on its own wall clock."""
    suspected: bool = False
    """Its renewals are late, according to the store. It has not ended."""
    silent_s: float | None = field(default=None, compare=False)
    """Seconds since its last renewal according to the store; None if the store does not tell."""


class MemberChange(Value):
    """A change in a group."""

    kind: Literal["joined", "changed", "suspected", "gone"]
    """`changed`: its state or meta has changed, or it is no longer suspected. A member that comes
    back under its name is another incarnation: the old one is gone, the new one has joined."""
    member: Member
    silent_s: float | None = None
    """Seconds since its last renewal according to the store; for one that is gone, since it was
    last known to be alive."""


class Published(Value):
    """The members of a group, as a leader published them."""

    group: str
    token: int
    """Of the leader that published it."""
    version: int
    members: tuple[Member, ...]
    regressed: bool = False
    """The list that the observer had before was newer: the store has lost a confirmed write, or an
    outdated replica has answered."""

    @property
    def position(self) -> tuple[int, int]:
        """Token and version. Of two lists, the one with the lower position is older."""
        return self.token, self.version


Level = Literal["ok", "note", "warning", "problem"]


class Finding(NamedTuple):
    """A property of a store or a configuration that users should know, and what to do about it."""

    level: Level
    subject: str
    text: str
    remedy: str = ""

    @classmethod
    def ok(cls, subject: str, text: str) -> Finding:
        return cls("ok", subject, text)

    @classmethod
    def note(cls, subject: str, text: str, remedy: str = "") -> Finding:
        return cls("note", subject, text, remedy)

    @classmethod
    def warning(cls, subject: str, text: str, remedy: str = "") -> Finding:
        return cls("warning", subject, text, remedy)

    @classmethod
    def problem(cls, subject: str, text: str, remedy: str) -> Finding:
        return cls("problem", subject, text, remedy)


class Claim(NamedTuple):
    """The value of tickets and leader records: the candidate and its attempt.

    The attempt id is unique to one campaign on one lease. By it a candidate recognises its own
    write after a response was lost.
    """

    name: str
    attempt: str
    meta: Meta
    rank: int = 0
    since: float | None = None
    """In a leader record: when it was created, on the wall clock of its creator. For display."""
    ttl_s: float | None = None
    """In a leader record: the ttl of its lease. For display."""

    def encode(self) -> bytes:
        name, attempt, meta, rank, since, ttl_s = self
        fields = {"name": name, "attempt": attempt, "meta": meta, "rank": rank}
        if since is not None:
            fields["since"] = since
        if ttl_s is not None:
            fields["ttl_s"] = ttl_s
        try:
            encoded = encode_json(fields)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"meta must be something that JSON can represent: {error}") from error
        if len(encoded) > CLAIM_BYTES:
            raise ConfigError(
                f"name and meta take {len(encoded)} bytes, more than {CLAIM_BYTES}: store large"
                " values elsewhere, and put a reference to them into meta"
            )
        return encoded

    @classmethod
    def decode(cls, value: bytes) -> Claim:
        """Read a claim. A value that is not a claim is used as the name of the candidate."""
        try:
            raw = json.loads(value)
            return cls(
                str(raw["name"]),
                str(raw["attempt"]),
                dict(raw.get("meta") or {}),
                int(raw.get("rank", 0)),
                *(finite(raw.get(name)) for name in ("since", "ttl_s")),
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return cls(value.decode("utf-8", "replace"), "", {})


class Order(NamedTuple):
    """A request that a leader resign, or transfer its leadership to a successor.

    An order, and the notice to its successor, are bound to a lease of the process that gives it.
    They disappear if it dies.
    """

    token: int
    """The term that the order is for. It has no effect on any other."""
    by: str
    successor: str = ""
    """The attempt that is to lead next, once it is ready. Empty: the next in line."""
    rank: int | None = None
    """Set if the order is given by its successor, which claims its priority. A leader of the same
    or a higher priority ignores it."""

    def encode(self) -> bytes:
        return encode_json(
            {"token": self.token, "by": self.by, "heir": self.successor, "rank": self.rank}
        )

    @classmethod
    def decode(cls, value: bytes) -> Order | None:
        """Read an order; None if the value is not one."""
        try:
            raw = json.loads(value)
            rank = raw.get("rank")
            return cls(
                int(raw["token"]),
                str(raw["by"]),
                str(raw.get("heir", "")),
                None if rank is None else int(rank),
            )
        except (
            *(ValueError, TypeError, KeyError, AttributeError),
            *(OverflowError, RecursionError),
        ):
            return None


def encode_json(value: object) -> bytes:
    """Compact JSON. Raises `TypeError` or `ValueError` for what JSON cannot represent."""
    return _encoder.encode(value).encode()


def finite(value: object) -> float | None:
    """A number that JSON can represent; None for everything else.

    >>> finite(1), finite("1"), finite(float("nan")), finite(10**400)
    (1.0, None, None, None)
    """
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def json_text(value: object, *, compact: bool = False) -> str:
    """JSON of what others may have written. A number that JSON does not have is null.

    >>> json_text({"a": [1, float("nan")], "b": float("inf")})
    '{"a": [1, null], "b": null}'
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, separators=separators, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=separators)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mapping(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON serialisable")


def key_segment(name: object, of: str = "an election") -> str:
    """Check and encode a name that a user gave, as one segment of a key."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the name of {of} is a string of 1 to 200 bytes, not {name!r}")
    if not name.isprintable():  # also refuses what UTF-8 cannot encode
        raise ConfigError(f"the name of {of} has only printable characters, not {name!r}")
    if (size := len(name.encode())) > NAME_BYTES:
        raise ConfigError(
            f"the name of {of} is a string of 1 to 200 bytes, not of {size}: {name[:20]!r}…"
        )
    from urllib.parse import quote  # would take a tenth of the time to import doyen

    return quote(name, safe="")


def is_name(name: str) -> bool:
    """Whether doyen accepts this name. Other programs may have written keys with any name.

    >>> is_name("billing"), is_name("bill\\ning"), is_name("x" * 10_000)
    (True, False, False)
    """
    return bool(name) and name.isprintable() and len(name.encode()) <= NAME_BYTES


def segment_number(segment: str) -> int | None:
    """The number of a shard or a slot that a segment of a key states; None if it states none.

    >>> segment_number("7"), segment_number("x"), segment_number("9" * 5000)
    (7, None, None)
    """
    return int(segment) if segment.isdecimal() and len(segment) < 10 else None


def _path(name: object, kind: Kind) -> str:
    if kind not in KINDS:
        raise ConfigError(f"kind is one of {', '.join(map(repr, KINDS))}, not {kind!r}")
    if kind == "shards" and isinstance(name, str):
        name, _, shard = name.rpartition("/")
        if not shard.isdecimal():
            raise ConfigError(f"a shard is the name of its set, / and its number, not {shard!r}")
        return f"{kind}/{key_segment(name, 'a set of shards')}/at/{shard}"
    return f"{kind}/{key_segment(name)}"


def members_key(group: str) -> str:
    return f"members/{key_segment(group, 'a group')}"


def member_key(group: str, name: str) -> str:
    return f"{members_key(group)}/{key_segment(name, 'a member')}"


def challenges_key(group: str, name: str) -> str:
    """
    >>> challenges_key("workers", "w1")
    'challenges/workers/w1'
    """
    return f"challenges/{key_segment(group, 'a group')}/{key_segment(name, 'a member')}"


def published_key(group: str) -> str:
    return f"published/{key_segment(group, 'a group')}"


def described(name: str, kind: Kind) -> str:
    """The name as messages show it, with its kind unless it is that of an election.

    >>> described("billing", "elections"), described("migration", "locks")
    ("'billing'", "the lock 'migration'")
    """
    if kind == "semaphores":
        name, _, slot = name.rpartition("/")
        return f"slot {slot} of the semaphore {name!r}"
    return repr(name) if kind == "elections" else f"the {kind.removesuffix('s')} {name!r}"


def leader_key(name: str, kind: Kind = "elections") -> str:
    """
    >>> leader_key("/app/leader_election")
    'elections/%2Fapp%2Fleader_election/leader'
    >>> leader_key("pool/2", "semaphores")
    'semaphores/pool/slots/2/leader'
    """
    if kind == "semaphores":
        semaphore, _, slot = name.rpartition("/")
        if not (slot.isascii() and slot.isdecimal()):
            raise ConfigError(f"a slot of a semaphore is named as in 'pool/0', not {name!r}")
        return f"{slots_key(semaphore)}/{slot}/leader"
    return f"{_path(name, kind)}/leader"


def slots_key(semaphore: str) -> str:
    """The prefix of the slots of a semaphore."""
    return f"semaphores/{key_segment(semaphore, 'a semaphore')}/slots"


def size_key(semaphore: str) -> str:
    """The document with the number of slots of a semaphore."""
    return f"semaphores/{key_segment(semaphore, 'a semaphore')}/size"


def barrier_key(barrier: str) -> str:
    """The prefix of a barrier's tickets and of its state."""
    return f"barriers/{key_segment(barrier, 'a barrier')}"


def trail_key(election: str) -> str:
    """The entry with the last terms of an election. It has a prefix of its own, so that a list of
    all elections does not contain all their trails."""
    return f"trails/{key_segment(election)}"


def run_key(election: str) -> str:
    """The document with the result of the last run of work that is due once per interval."""
    return f"runs/{key_segment(election)}"


def schedule_key(election: str) -> str:
    """The document with the times at which the tasks of a schedule ran last."""
    return f"schedules/{key_segment(election)}"


def order_key(name: str, kind: Kind = "elections") -> str:
    return order_key_below(leader_key(name, kind))


def order_key_below(leader: str) -> str:
    """The key of an order, from that of the leader record."""
    return f"{leader}/order"


def ready_key(name: str, attempt: str, kind: Kind = "elections") -> str:
    return f"{leader_key(name, kind)}/ready/{attempt}"


def line_key(name: str, kind: Kind = "elections") -> str:
    return f"{_path(name, kind)}/line"


def notice_key(name: str, attempt: str, kind: Kind = "elections") -> str:
    return f"{_path(name, kind)}/mail/{attempt}"


def belongs_to_order(key: str) -> bool:
    """Whether an entry is an order or the notice for its successor.

    >>> belongs_to_order(order_key("a")), belongs_to_order(notice_key("a", "1f"))
    (True, True)
    >>> belongs_to_order(leader_key("mail")), belongs_to_order(leader_key("order"))
    (False, False)
    """
    return re.search("/leader/order$|/.+/mail/[^/]+$", key) is not None


def config_key(name: str, *parts: object) -> str:
    """
    >>> config_key("billing", "history", 7)
    'config/billing/history/7'
    """
    return "/".join(["config", key_segment(name, "a configuration"), *map(str, parts)])


def shards_key(name: str, part: Literal["at", "plan", "spec"]) -> str:
    """
    >>> shards_key("my jobs", "plan"), leader_key("my jobs/7", "shards")
    ('shards/my%20jobs/plan', 'shards/my%20jobs/at/7/leader')
    """
    return f"shards/{key_segment(name, 'a set of shards')}/{part}"


_encoder = json.JSONEncoder(separators=(",", ":"), default=_mapping, allow_nan=False)
