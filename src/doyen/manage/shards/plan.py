"""The plan of a set of shards: what the controller has decided. Pure; imports the errors only.

In memory, owners and standbys are names. In the document they are indices into a table of names, so
that a plan for 10,000 shards with two standbys takes less than 100 KB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from doyen.errors import BadDocument

__all__ = ["Move", "PlannedMember", "ShardPlan"]

NO_MEMBER = ""
"""In place of a name: the shard has no owner, or no such standby."""


SLOW_S = 1.0
"""An old owner that has been ending for this long is slow."""


class PlannedMember(NamedTuple):
    """What the plan says about a member, for clients to route by."""

    incarnation: int = 0
    zone: str = ""
    address: str = ""
    weight: float = 1.0


class Move(NamedTuple):
    """A shard on its way from its owner to another member."""

    to: str
    incarnation: int
    """Of `to`. A member that has come back under the same name has not prepared."""
    id: int
    """Distinguishes it from every other move of this set."""
    ready: bool = False
    """`to` is prepared, and the old owner is ending. The document says so when that takes long."""
    stuck: bool = False
    """The old owner has been ending for too long."""
    age_s: float = 0.0
    """Since it began, or since it was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What the controller has decided."""

    generation: int = 0
    """Raised with every change of the count. 0: nothing has been planned yet."""
    open: bool = True
    """False between two generations with `barrier`: no member may own a shard."""
    started: bool = False
    """`min_members` were eligible, and since then at least one has been."""
    spec: int = 0
    """The version of the spec from which it was made."""
    owners: tuple[str, ...] = ()
    """The planned owner of each shard, or `NO_MEMBER`."""
    standbys: tuple[tuple[str, ...], ...] = ()
    """The first standby of each shard, the second standby of each shard, and so on."""
    members: Mapping[str, PlannedMember] = field(default_factory=dict)
    moves: Mapping[int, Move] = field(default_factory=dict)
    last_move: int = 0
    """The highest move id that was ever used."""
    grace: Mapping[str, float] = field(default_factory=dict)
    """Members that have gone, and the seconds for which their shards were still to be kept for them
    when the plan was written."""
    failed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The members on which the body of a shard kept failing. One that has restarted is not among
    them any more."""
    slow: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The members that prepared for a shard for longer than `prepare_s`, as above."""
    aside: Mapping[int, str] = field(default_factory=dict)
    """Shards that are set aside because their body failed on several members or on all, and the
    last error."""
    unheld: tuple[int, ...] = ()
    """Shards that were found without a leader record, at a time when none had changed for a while.
    Their owners read the records. There may be more."""
    retry: int = 0
    rebalanced: int = 0
    """The values of the spec's `retry` and `rebalance` that were carried out."""
    failures: int = 3
    """The value of the spec's `failures`, for the owners."""
    note: str = ""
    """Why nothing is assigned, if nothing is."""

    @property
    def count(self) -> int:
        return len(self.owners)

    def planned(self, member: str, incarnation: int, shard: int, *, target_ready: bool) -> bool:
        """Whether a member may own a shard.

        During a move these are the old owner, until the new one is ready, and the new one, once
        `target_ready` says that it is.
        """
        if not self.open or not 0 <= shard < self.count:
            return False
        move = self.moves.get(shard)
        if move is not None and target_ready:
            return (move.to, move.incarnation) == (member, incarnation)
        return self.owners[shard] == member

    def owned_by(self, member: str) -> list[int]:
        """The shards of which a member is the planned owner."""
        found, start = [], -1
        try:
            while True:
                start = self.owners.index(member, start + 1)
                found.append(start)
        except ValueError:
            return found

    def loads(self) -> dict[str, int]:
        """How many shards each member owns or is about to own."""
        loads: dict[str, int] = {}
        for shard, owner in enumerate(self.owners):
            name = self.moves[shard].to if shard in self.moves else owner
            loads[name] = loads.get(name, 0) + 1
        return loads

    def significant(self) -> ShardPlan:
        """The plan without what changes only because time passes. That a new owner is
        ready is worth a write, which every member reads, only if the old one takes a while to
        end."""
        return replace(
            self,
            grace=dict.fromkeys(self.grace, 0.0),
            moves={
                shard: move._replace(age_s=0.0, ready=move.ready and move.age_s >= SLOW_S)
                for shard, move in self.moves.items()
            },
        )

    def encode(self) -> dict[str, Any]:
        """The body of the document. Empty fields are left out."""
        mentioned = {owner for column in (self.owners, *self.standbys) for owner in column}
        mentioned.update(move.to for move in self.moves.values())
        names = sorted((mentioned | set(self.members)) - {NO_MEMBER})
        index = {name: position for position, name in enumerate(names)} | {NO_MEMBER: -1}

        def indices(column: Iterable[str]) -> list[int]:
            return [index[name] for name in column]

        body = {
            "generation": self.generation,
            "open": self.open,
            "started": self.started,
            "spec": self.spec,
            "names": names,
            "owners": indices(self.owners),
            "standbys": [indices(column) for column in self.standbys],
            "members": {name: list(about) for name, about in sorted(self.members.items())},
            "moves": {
                str(shard): {**move._asdict(), "age_s": round(move.age_s, 3)}
                for shard, move in sorted(self.moves.items())
            },
            "last_move": self.last_move,
            "grace": {name: round(left_s, 3) for name, left_s in sorted(self.grace.items())},
            "failed": {str(shard): list(names) for shard, names in sorted(self.failed.items())},
            "slow": {str(shard): list(names) for shard, names in sorted(self.slow.items())},
            "aside": {str(shard): error for shard, error in sorted(self.aside.items())},
            "unheld": list(self.unheld),
            "retry": self.retry,
            "rebalanced": self.rebalanced,
            "failures": self.failures,
            "note": self.note,
        }
        return {name: value for name, value in body.items() if value or name in _ALWAYS}

    @classmethod
    def decode(cls, body: Mapping[str, Any]) -> ShardPlan:
        """Read a document. Raises `BadDocument` if it is not a plan."""
        try:
            names = [str(name) for name in body["names"]]
            named = [*names, NO_MEMBER]  # the index -1

            def column(indices: list[int]) -> tuple[str, ...]:
                if any(not -1 <= each < len(names) for each in set(indices)):
                    raise ValueError("an index is outside the table of names")
                return tuple(map(named.__getitem__, indices))

            plan = cls(
                generation=int(body["generation"]),
                open=bool(body["open"]),
                started=bool(body.get("started")),
                spec=int(body.get("spec", 0)),
                owners=column(body["owners"]),
                standbys=tuple(column(each) for each in body.get("standbys", ())),
                members={
                    str(name): PlannedMember(
                        int(about[0]), str(about[1]), str(about[2]), float(about[3])
                    )
                    for name, about in body.get("members", {}).items()
                },
                moves={
                    int(shard): Move(
                        str(move["to"]),
                        int(move["incarnation"]),
                        int(move["id"]),
                        bool(move["ready"]),
                        bool(move["stuck"]),
                        float(move["age_s"]),
                    )
                    for shard, move in body.get("moves", {}).items()
                },
                last_move=int(body.get("last_move", 0)),
                grace={str(who): float(left) for who, left in body.get("grace", {}).items()},
                failed=_names_by_shard(body.get("failed", {})),
                slow=_names_by_shard(body.get("slow", {})),
                aside={int(shard): str(error) for shard, error in body.get("aside", {}).items()},
                unheld=tuple(map(int, body.get("unheld", ()))),
                retry=int(body.get("retry", 0)),
                rebalanced=int(body.get("rebalanced", 0)),
                failures=int(body.get("failures", 3)),
                note=str(body.get("note", "")),
            )
            plan._check()
        except _NOT_A_PLAN as error:
            raise BadDocument(
                f"this is not the plan of shards: {error!r}. A running controller replaces it"
            ) from error
        return plan

    def _check(self) -> None:
        """Raise `ValueError` if parts of the plan contradict one another."""
        if any(len(column) != self.count for column in self.standbys):
            raise ValueError("the lists of standbys do not have one entry for each shard")
        numbered = {*self.moves, *self.failed, *self.slow, *self.aside, *self.unheld}
        if any(not 0 <= shard < self.count for shard in numbered):
            raise ValueError(f"there are the shards 0 to {self.count - 1} only")
        if any(not math.isfinite(move.age_s) for move in self.moves.values()):
            raise ValueError("the age of a move is a number")
        if not all(map(math.isfinite, self.grace.values())):
            raise ValueError("grace is a number of seconds")


def _names_by_shard(raw: Mapping[str, Iterable[str]]) -> dict[int, tuple[str, ...]]:
    return {int(shard): tuple(map(str, names)) for shard, names in raw.items()}


_NOT_A_PLAN = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
_ALWAYS = frozenset({"generation", "open", "names", "owners"})
