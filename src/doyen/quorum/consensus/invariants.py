"""What must hold of a core at every step, and of a cluster of them.

    check(core)               of one server, at any instant
    check_step(before, core)  of one server, from one event to the next
    ClusterView               of all servers together

`ClusterView` follows what servers do, not how they are implemented: it maintains each server's log
from its `Persist` and `Install` effects, so that it can check any protocol. It is incremental: an
event in which nothing is written costs a few comparisons.

- *Election safety*: at most one leader in a generation, which leads it once, with the votes of a
  majority; and one vote per server in each, which a restart does not undo.
- *Log matching*: an entry of one generation at one index is the same on all servers, and so is
  everything before it.
- *Leader completeness*: a leader has everything that was ever committed.
- *State machine safety*: all servers apply the same entry at an index; each applies in order,
  without gaps, once in its life.

All checks raise `InvariantBroken`. Imports `core` only.
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


class InvariantBroken(Exception):
    """An invariant is violated: by a defect, or by a disk or a peer that returned wrong data."""


class IllegalEvent(Exception):
    """A driver has passed an impossible event to a core."""


class CoreFacts(NamedTuple):
    """What `check_step` needs of a core's state before the event."""

    role: Role
    generation: int
    leader: str | None
    commit: int
    vote: str | None


def facts(core: Core) -> CoreFacts:
    vote = getattr(core, "vote", None)
    return CoreFacts(core.role, core.generation, core.leader, core.commit, vote)


def check(core: Core) -> None:
    """Check one server at any instant, including what its protocol adds (a method `check`)."""
    leads, follows = core.leader == core.id, core.leader not in (None, core.id)
    if (core.role is Role.LEADING, core.role is Role.FOLLOWING) != (leads, follows):
        raise InvariantBroken(f"{core.id} is {core.role} with {core.leader} as its leader")
    if core.next_deadline != core.next_deadline:
        raise InvariantBroken(f"{core.id}: the next deadline is not a number")
    own: Callable[[], None] | None = getattr(core, "check", None)
    if own is not None:
        own()


def check_step(before: CoreFacts, core: Core) -> None:
    """Check one server from one event to the next."""
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
            f"{name}: leads {core.generation} directly after {before.generation}, without an"
            " election"
        )


class _Mirror:
    """One server's log as made by its effects: the generation at each index."""

    __slots__ = ("applied", "base", "base_generation", "commit", "generation", "generations")

    def __init__(self, generation: int, recovered: Recovered) -> None:
        snapshot = recovered.snapshot
        self.generation = generation
        self.base = self.applied = self.commit = snapshot.index if snapshot is not None else 0
        self.base_generation = snapshot.generation if snapshot is not None else 0
        self.generations = [entry.generation for entry in recovered.entries]

    def at(self, index: int) -> int | None:
        """The generation at an index; None if there is no such entry. Of a snapshot's entries, only
        the last one is known."""
        place = index - self.base - 1
        if place < 0:
            return self.base_generation if place == -1 else None
        return self.generations[place] if place < len(self.generations) else None


class ClusterView:
    """All servers of a cluster.

    The caller reports starts and crashes (`started`, `crashed`), the effects of each event
    (`stepped`), and the messages that were sent (`sent`); a `Send` that waits for a disk may never
    be. With `ballots`, for protocols in which a value can be chosen again in a later generation,
    entries are compared by content only.
    """

    def __init__(
        self, *, ballots: bool = False, vote_in: Callable[[Send], Any] | None = None
    ) -> None:
        self.committed: list[LogEntry] = []
        self.leaders: dict[int, str] = {}
        self._committed_in: list[int] = []
        """The generation in which each index was first known to be committed. A leader that was
        elected in an earlier one, however late it learns of that, need not have it."""
        self._ballots = ballots
        self._vote_in = vote_in
        self.majorities = True
        """Whether the votes for a leader are counted. Without, one sees the consequences of too
        few."""
        self._mirrors: dict[str, _Mirror] = {}
        self._leading: dict[str, int] = {}
        self._entries: dict[tuple[int, int], tuple[int | None, LogEntry]] = {}
        self._votes: dict[tuple[str, int], str] = {}
        self._bound: dict[str, int] = {}
        """The latest generation in which each server has voted."""

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
        """A message was sent. `vote_in(effect)` returns the generation and the candidate if it
        binds its sender to one."""
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
        """Check that the leader has the committed entry at this index and so, by log matching, all
        before."""
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
                    f"{name} applies {entry} at {index}; another server applied"
                    f" {self.committed[index - 1]}"
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
            raise InvariantBroken(
                f"{name} installs a snapshot up to {index}, which is not committed"
            )
        if self.committed[index - 1].generation != snapshot.generation:
            raise InvariantBroken(f"{name} installs a snapshot of another history at {index}")
        mirror.base = mirror.applied = index
        mirror.base_generation = snapshot.generation
        mirror.generations = []
