"""What must hold of a core at every step, and of a cluster of them.

    check(core)               of one server, at any instant
    check_step(before, core)  of one server, from one event to the next
    Cluster                   of all of them: looked at from above, as no server can

`ClusterView` is told what servers do, not what they are: it keeps each one's log as its `Persist`
and `Install` effects make it, so that any protocol can be held to it. It is incremental: an event
in which nothing is written costs a few comparisons.

- *Election safety*: at most one leader in a generation, who leads it once, with the votes of a
  majority; and one vote per server in each, which a restart does not undo.
- *Log matching*: an entry of one generation at one index is the same everywhere, and so is all
  before it.
- *Leader completeness*: whoever leads has everything that was ever committed.
- *State machine safety*: what one server applies at an index, no other ever differs from; each
  applies in order, without gaps, once in its life.

Everything raises `InvariantBroken`. Imports `core` only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from doyen.quorum.consensus.core import (
    Committed,
    Core,
    Effect,
    Install,
    LogEntry,
    Persist,
    Recovered,
    Role,
    Send,
    Snapshot,
)

__all__ = [
    "ClusterView",
    "CoreFacts",
    "IllegalEvent",
    "InvariantBroken",
    "check",
    "check_step",
    "facts",
]


class InvariantBroken(Exception):
    """Something that can never be so, is: a defect, or a disk or peer that has lied."""


class IllegalEvent(Exception):
    """A driver has told a core what cannot be."""


class CoreFacts(NamedTuple):
    """What `check_step` has to remember of a core."""

    role: Role
    generation: int
    leader: str | None
    commit: int
    vote: str | None


def facts(core: Core) -> CoreFacts:
    vote = getattr(core, "vote", None)
    return CoreFacts(core.role, core.generation, core.leader, core.commit, vote)


def check(core: Core) -> None:
    """Of one server, at any instant; and what its protocol adds (a method `check`)."""
    if (core.role is Role.LEADING) != (core.leader == core.id):
        raise InvariantBroken(f"{core.id} is {core.role} and takes {core.leader} for the leader")
    if (core.role is Role.FOLLOWING) != (core.leader is not None and core.leader != core.id):
        raise InvariantBroken(f"{core.id} is {core.role} and takes {core.leader} for the leader")
    if core.next_deadline != core.next_deadline:
        raise InvariantBroken(f"{core.id}: the next deadline is not a number")
    own: Callable[[], None] | None = getattr(core, "check", None)
    if own is not None:
        own()


def check_step(before: CoreFacts, core: Core) -> None:
    """Of one server, from one event to the next."""
    name = core.id
    if core.generation < before.generation:
        raise InvariantBroken(
            f"{name}: from generation {before.generation} back to {core.generation}"
        )
    if core.commit < before.commit:
        raise InvariantBroken(f"{name}: commit from {before.commit} back to {core.commit}")
    if core.generation == before.generation:
        if before.leader is not None and core.leader not in (None, before.leader):
            raise InvariantBroken(
                f"{name}: {before.leader} and {core.leader} lead generation {core.generation}"
            )
        vote = getattr(core, "vote", None)
        if before.vote is not None and vote != before.vote:
            raise InvariantBroken(
                f"{name}: voted for {before.vote} and {vote} in generation {core.generation}"
            )
    elif before.role is Role.LEADING and core.role is Role.LEADING:
        raise InvariantBroken(
            f"{name}: leads {core.generation} straight after {before.generation}, elected by nobody"
        )


class _Mirror:
    """One server's log, as its effects have made it: the generation at each index."""

    __slots__ = ("applied", "base", "base_generation", "commit", "generation", "generations")

    def __init__(self, generation: int, recovered: Recovered) -> None:
        snapshot = recovered.snapshot
        self.generation = generation
        self.base = self.applied = self.commit = snapshot.index if snapshot is not None else 0
        self.base_generation = snapshot.generation if snapshot is not None else 0
        self.generations = [entry.generation for entry in recovered.entries]

    def at(self, index: int) -> int | None:
        """None if there is no such entry; of what a snapshot stands for, only the last is known."""
        place = index - self.base - 1
        if place < 0:
            return self.base_generation if place == -1 else None
        return self.generations[place] if place < len(self.generations) else None


class ClusterView:
    """All servers of a cluster, seen from above.

    `started` and `crashed` tell of their lives, `stepped` what each event has led to, and `sent`
    which messages have left (a `Send` that waits for a disk may never). A protocol in which a
    value can be chosen anew in a later generation is compared by what entries hold: `ballots`.
    """

    def __init__(
        self, *, ballots: bool = False, vote_in: Callable[[Send], Any] | None = None
    ) -> None:
        self.committed: list[LogEntry] = []
        self.leaders: dict[int, str] = {}
        self._committed_in: list[int] = []
        """In which generation each index was first known to be committed. Whoever was elected in
        an earlier one, however late it learns of that, need not have it."""
        self._ballots = ballots
        self._vote_in = vote_in
        self.majorities = True
        """Whether the votes of a leader are counted; without, one sees what comes of too few."""
        self._mirrors: dict[str, _Mirror] = {}
        self._leading: dict[str, int] = {}
        self._entries: dict[tuple[int, int], tuple[int | None, LogEntry]] = {}
        self._votes: dict[tuple[str, int], str] = {}
        self._bound: dict[str, int] = {}
        """The latest generation in which each server has given its vote."""

    def started(self, core: Core, recovered: Recovered) -> None:
        bound = self._bound.get(core.id, 0)
        if core.generation < bound:
            raise InvariantBroken(
                f"{core.id} has voted in generation {bound}, and is back in {core.generation}"
            )
        self._mirrors[core.id] = _Mirror(core.generation, recovered)

    def crashed(self, name: str) -> None:
        self._leading.pop(name, None)
        self._mirrors.pop(name, None)

    def stepped(self, core: Core, effects: Iterable[Effect]) -> None:
        """The core has handled an event."""
        name = core.id
        mirror = self._mirrors[name]
        if core.generation < mirror.generation or core.commit < mirror.commit:
            raise InvariantBroken(
                f"{name} went back: generation {mirror.generation} to {core.generation}, "
                f"commit {mirror.commit} to {core.commit}"
            )
        mirror.generation = core.generation
        mirror.commit = core.commit
        for effect in effects:
            kind = type(effect)
            if kind is Persist:
                if effect.first:  # type: ignore[attr-defined]
                    self._wrote(name, mirror, effect)  # type: ignore[arg-type]
            elif kind is Committed:
                self._applied(name, mirror, effect)  # type: ignore[arg-type]
            elif kind is Install:
                self._installed(name, mirror, effect.snapshot)  # type: ignore[attr-defined]
        if core.role is Role.LEADING:
            if self._leading.get(name) != core.generation:
                self._elected(core, mirror)
        elif name in self._leading:
            del self._leading[name]

    def sent(self, name: str, effect: Send) -> None:
        """A message has left. `vote_in(effect)`: the generation and the candidate, if it binds
        its sender to one."""
        vote = self._vote_in(effect) if self._vote_in is not None else None
        if vote is not None:
            generation, candidate = vote
            candidate = candidate or name
            before = self._votes.setdefault((name, generation), candidate)
            if before != candidate:
                raise InvariantBroken(
                    f"{name} votes for {before} and for {candidate} in generation {generation}"
                )
            self._bound[name] = max(generation, self._bound.get(name, 0))

    def _elected(self, core: Core, mirror: _Mirror) -> None:
        name, generation = core.id, mirror.generation
        leader = self.leaders.get(generation)
        if leader == name:
            raise InvariantBroken(f"{name} leads generation {generation} for the second time")
        if leader is not None:
            raise InvariantBroken(f"{leader} and {name} both lead generation {generation}")
        if self._vote_in is not None and self.majorities:
            voters = core.membership.voters
            votes = sum(self._votes.get((each, generation)) == name for each in voters)
            votes += name in voters and (name, generation) not in self._votes
            if votes < core.membership.majority:
                raise InvariantBroken(
                    f"{name} leads generation {generation} with {votes} votes of {len(voters)}"
                )
        self.leaders[generation] = name
        self._leading[name] = generation
        if not self._ballots:
            index = bisect_left(self._committed_in, generation)
            if index:
                self._has(name, index)

    def _has(self, name: str, index: int) -> None:
        """The leader has the committed entry at this index; with log matching, all before it."""
        mirror = self._mirrors[name]
        entry = self.committed[index - 1]
        if index >= mirror.base and mirror.at(index) != entry.generation:
            raise InvariantBroken(
                f"{name} leads generation {mirror.generation} without entry {index} of generation "
                f"{entry.generation}, which is committed; it has {mirror.at(index)} there"
            )

    def _wrote(self, name: str, mirror: _Mirror, effect: Persist) -> None:
        first = effect.first
        place = first - mirror.base - 1
        if place < 0 or place > len(mirror.generations):
            raise InvariantBroken(
                f"{name} writes entries at {first}; its log is {mirror.base + 1} to "
                f"{mirror.base + len(mirror.generations)}"
            )
        if first <= mirror.commit and not self._ballots and not effect.keep:
            kept = self.committed[first - 1 : mirror.commit]
            if list(effect.entries[: len(kept)]) != kept:
                raise InvariantBroken(f"{name} cuts its log at {first}, below what is committed")
        rest = mirror.generations[place + len(effect.entries) :] if effect.keep else []
        previous = mirror.at(first - 1)
        for index, entry in enumerate(effect.entries, first):
            if not self._ballots:
                self._match(name, index, previous, entry)
            previous = entry.generation
        mirror.generations[place:] = [entry.generation for entry in effect.entries] + rest

    def _match(self, name: str, index: int, previous: int | None, entry: LogEntry) -> None:
        before = self._entries.setdefault((index, entry.generation), (previous, entry))
        if before[0] != previous or (before[1] is not entry and before[1] != entry):
            raise InvariantBroken(
                f"{name}: entry {index} of generation {entry.generation} after one of {previous} "
                f"differs from what another wrote there, after one of {before[0]}"
            )

    def _applied(self, name: str, mirror: _Mirror, effect: Committed) -> None:
        if effect.first != mirror.applied + 1:
            raise InvariantBroken(f"{name} applies {effect.first} after {mirror.applied}")
        known = len(self.committed)
        for index, entry in enumerate(effect.entries, effect.first):
            if index > known:
                self.committed.append(entry)
                before = self._committed_in[-1] if self._committed_in else 0
                self._committed_in.append(max(before, mirror.generation))
            elif not self._same(self.committed[index - 1], entry):
                raise InvariantBroken(
                    f"{name} applies {entry} at {index}; another, {self.committed[index - 1]}"
                )
        mirror.applied += len(effect.entries)
        if mirror.applied > known and not self._ballots:
            for other, led in self._leading.items():
                if led > mirror.generation:
                    self._has(other, mirror.applied)

    def _same(self, one: LogEntry, other: LogEntry) -> bool:
        if one is other or one == other:
            return True
        return self._ballots and (one.kind, one.data) == (other.kind, other.data)

    def _installed(self, name: str, mirror: _Mirror, snapshot: Snapshot) -> None:
        index = snapshot.index
        if index <= mirror.applied:
            raise InvariantBroken(
                f"{name} goes back from {mirror.applied} to a snapshot of {index}"
            )
        if index > len(self.committed):
            raise InvariantBroken(f"{name} installs a snapshot up to {index}, committed by nobody")
        if self.committed[index - 1].generation != snapshot.generation:
            raise InvariantBroken(f"{name} installs a snapshot of another history at {index}")
        mirror.base = mirror.applied = index
        mirror.base_generation = snapshot.generation
        mirror.generations = []
