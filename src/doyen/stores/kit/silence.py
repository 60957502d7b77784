"""What a handle has seen of others' leases, and whom it tells of changes: for stores that keep
time by a server's clock and in which somebody has to end what is over (SQL, Redis).

*Sightings.* A lease may be ended by somebody other than its holder only after its renewal counter
was seen unchanged for a whole ttl, counted on this process's boot-time clock from the arrival of
the first answer that showed it: the holder's own count began when it sent that renewal, which was
earlier. An answer of another incarnation of the server may lack renewals that the one before had
confirmed, so all sightings are void then. The server's clock must agree; if it stands before the
renewal or a whole ttl after it, it has been stepped or the lease is over, and in both cases it has
nothing to say against what was seen.

*Monitors.* While something is watched, the leases that own it are looked at: once per renewal,
just after it is due, and oftener when it does not come. So the sighting of the last renewal is
young when its holder falls silent, and at the end of the ttl nobody has to begin to observe.

*Together.* After an outage of the store, the leases of everybody who lost theirs are left in it.
Whoever begins to observe a lease whose renewal is late, or the first one after the store had failed
to answer, observes all leases of the same election from then on. So their ttls run out at the same
time and not one after the other, and all that are over can be ended at once (`ripe`).

*Changes.* Where the engine notifies, `changed` is called. Where it does not, the store is asked at
intervals, while anything is watched, for the paths that have changed since the last time
(`changes`). A store that cannot say which gives a counter; only if that has moved are the scopes
compared. Then a thing made and undone between two looks goes unnoticed, though somebody may have
read it meanwhile and wait for its end: good enough only beside notifications that are rarely lost.

Everything runs on the store's loop. Imports events, the error tree and the standard library.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

from doyen.errors import StoreError

__all__ = ["Changes", "LeaseObserver", "LeaseRow", "LeaseVerdict", "Survey", "Tables"]

log = logging.getLogger("doyen")

RENEWED_BY = 0.4
"""The share of its ttl by which a healthy lease has been renewed: a third, and a fifth of that."""
LOOK_AGAIN = 0.1
"""The share of the ttl after which a renewal that is late is looked for again."""
_SETTLE_S = 0.004
"""Those who were told of a change go first; what we must know of it can wait."""
_RETRY_S = 0.2
_PATIENCE_S = 2.0
_LONGEST_PAUSE_S = 0.5
"""Between two questions for changes, unless `poll_s` is longer. An answer may have been slow only
because the server stood still, and changes that come after that are to be noticed soon."""
_GRAIN_S = 0.001
_RIPE = 500
"""How many leases are looked at in one query."""
_FORGET_AFTER = 10
"""A lease that was not met for so many of its ttls is forgotten."""


class LeaseRow(NamedTuple):
    """A lease as the store shows it. Without a ttl: the row is not there."""

    lease: str
    ttl_us: int | None
    counter: int
    age_us: int
    incarnation: str
    standing_s: float | None = None
    """How long the counter is known to have stood already, where the store can date all leases."""


class Survey(NamedTuple):
    """What stands in a scope: by lease, how much and the latest version of it."""

    standing: frozenset[tuple[str | None, int, int]]
    owners: frozenset[str]


_NOTHING = Survey(frozenset(), frozenset())


class LeaseVerdict(NamedTuple):
    """Whether a lease is over; if not, when to look again, and what is left of it at least."""

    over: bool
    look_after_s: float
    remaining_s: float


Changes = Callable[[int | None], Awaitable[tuple[int, Sequence[str] | None]]]
"""Given a position, the present one and the paths that have changed in between; None instead of
them if they are not known, or not any more."""


class Tables(Protocol):
    """What the lookout asks of the store."""

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]: ...

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]: ...

    async def seal(self, lease: str, counter: int) -> None: ...

    async def position(self) -> int: ...


@dataclass(slots=True)
class _Sighting:
    counter: int
    since: float
    ttl_s: float
    last: float
    late: bool = False
    """The renewal that should have followed this one is overdue."""
    together: bool = False
    """The other leases of its elections have been observed since then as well."""


@dataclass(slots=True, eq=False)
class _Scope:
    name: str
    watches: dict[_Watch, None] = field(default_factory=dict)
    survey: Survey | None = None
    """What was last seen to stand there."""


@dataclass(slots=True, eq=False)
class _Monitor:
    lease: str
    look_at: float
    scopes: set[str] = field(default_factory=set)


class _Watch:
    """One watch, as its user holds it."""

    __slots__ = ("_lookout", "_notify", "_scope", "open")

    def __init__(self, lookout: LeaseObserver, scope: _Scope, notify: Callable[[], None]) -> None:
        self._lookout = lookout
        self._scope = scope
        self._notify = notify
        self.open = True
        scope.watches[self] = None

    def fire(self) -> None:
        if self.open:
            self._notify()

    def close(self) -> None:
        if self.open:
            self.open = False
            del self._scope.watches[self]
            if not self._scope.watches:
                self._lookout.leave(self._scope)


class LeaseObserver:
    """The sightings, monitors and watches of one handle. With `poll_s`, changes are asked for."""

    def __init__(
        self,
        tables: Tables,
        now: Callable[[], float],
        poll_s: float | None,
        changes: Changes | None = None,
    ) -> None:
        self._tables = tables
        self._now = now
        self._poll_s = poll_s
        self._changes = changes
        self._position: int | None = None
        """Up to where changes have been asked for, while they are."""
        self._loop = asyncio.get_running_loop()
        self._incarnation = ""
        self._seen: dict[str, _Sighting] = {}
        self._scopes: dict[str, _Scope] = {}
        self._monitors: dict[str, _Monitor] = {}
        self._dirty: set[str] = set()
        self._failed = False
        """The store has failed to answer since leases were last observed together."""
        self._stirred = asyncio.Event()
        self._settling: asyncio.TimerHandle | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def watching(self) -> bool:
        return bool(self._scopes)

    def judge(self, row: LeaseRow) -> LeaseVerdict:
        """Note a lease as it has just been seen, and say what that means."""
        if row.ttl_us is None:
            return LeaseVerdict(True, 0.0, 0.0)
        now, ttl_s, age_s = self._now(), row.ttl_us / 1e6, row.age_us / 1e6
        if row.incarnation != self._incarnation:
            self._seen.clear()
            self._incarnation = row.incarnation
        sighting = self._seen.pop(row.lease, None)
        if sighting is None or sighting.counter != row.counter:
            sighting = _Sighting(row.counter, now, ttl_s, now)
        if row.standing_s is not None:
            sighting.since = min(sighting.since, now - row.standing_s)
            sighting.together = True
        sighting.last = now
        self._seen[row.lease] = sighting  # last in order: the first is the one not met for longest
        self._forget_before(now)
        by_clock_s = ttl_s - age_s if 0 <= age_s < ttl_s else 0.0
        left_s = max(sighting.since + ttl_s - now, by_clock_s)
        due_s = RENEWED_BY * ttl_s - age_s
        sighting.late = not 0 < due_s <= RENEWED_BY * ttl_s
        if sighting.late:
            due_s = LOOK_AGAIN * ttl_s
        verdict = LeaseVerdict(left_s <= 0, min(due_s, left_s) + _GRAIN_S, left_s)
        monitor = self._monitors.get(row.lease)
        if monitor is not None:
            monitor.look_at = now + verdict.look_after_s
        return verdict

    def _forget_before(self, now: float) -> None:
        while self._seen:
            lease, oldest = next(iter(self._seen.items()))
            if now - oldest.last < _FORGET_AFTER * oldest.ttl_s:
                return
            del self._seen[lease]

    def ripe(self) -> list[str]:
        """Leases that may be over by now: no renewal has been seen for a ttl. Look at them again,
        and judge, before ending any."""
        now = self._now()
        ripe = (lease for lease, seen in self._seen.items() if seen.since + seen.ttl_s <= now)
        return list(islice(ripe, _RIPE))

    @property
    def incarnation(self) -> str:
        """Of the server that all present sightings come from."""
        return self._incarnation

    def proven(self, lease: str, counter: int) -> bool:
        """Whether a lease may be ended on the present incarnation of the server, because no renewal
        after this one was seen there for a ttl."""
        seen = self._seen.get(lease)
        return (
            seen is not None and seen.counter == counter and seen.since + seen.ttl_s <= self._now()
        )

    def forget(self, leases: Iterable[str]) -> None:
        """These leases were ended, or have been renewed: what was seen of them is out of date."""
        for lease in leases:
            self._seen.pop(lease, None)

    async def watch(self, name: str, notify: Callable[[], None]) -> _Watch:
        scope = self._scopes.get(name)
        if scope is None:
            scope = self._scopes[name] = _Scope(name)
        watch = _Watch(self, scope, notify)
        if self._poll_s is None:
            self._mark({name})
            return watch
        try:  # what is to be told is what comes after this
            if self._changes is None:
                self._take_over(await self._tables.survey([name]))
            else:
                await self._begin_to_ask(self._changes)
                self._mark({name})
        except BaseException:
            watch.close()
            raise
        self._start("poll", self._poll)
        return watch

    async def _begin_to_ask(self, changes: Changes) -> None:
        if self._position is None:
            position, _ = await changes(None)
            if self._position is None:  # or another has begun meanwhile, from further back
                self._position = position

    def leave(self, scope: _Scope) -> None:
        """Nobody here watches the scope any more."""
        del self._scopes[scope.name]
        self._dirty.discard(scope.name)
        self._own(scope, _NOTHING)

    def follow(self, leases: Iterable[str]) -> None:
        """See to it that leases which may be over are ended, though nobody watches them."""
        for lease in leases:
            self._monitors.setdefault(lease, _Monitor(lease, self._now()))
        self._stir()

    def changed(self, path: str) -> None:
        """Something at this path has changed: tell everyone in whose scope that is."""
        names = set()
        while path:
            if path in self._scopes:
                names.add(path)
            path = path.rpartition("/")[0]
        self._tell(names)
        self._mark(names)

    def all_changed(self) -> None:
        """For a while nothing was heard: anything may have changed."""
        self._tell(self._scopes)
        self._mark(self._scopes)

    def close(self) -> None:
        self._closed = True
        for scope in list(self._scopes.values()):
            for watch in list(scope.watches):
                watch.close()
        self._monitors.clear()
        for task in self._tasks.values():
            task.cancel()
        if self._settling is not None:
            self._settling.cancel()

    def _tell(self, names: Iterable[str]) -> None:
        for name in names:
            for watch in self._scopes[name].watches:
                self._loop.call_soon(watch.fire)

    def _mark(self, names: Iterable[str]) -> None:
        """Have the owners of these scopes found out, soon."""
        self._dirty.update(names)
        if self._dirty and self._settling is None and not self._closed:
            self._settling = self._loop.call_later(_SETTLE_S, self._settled)

    def _settled(self) -> None:
        self._settling = None
        self._stir()

    def _stir(self) -> None:
        self._stirred.set()
        self._start("observe", self._observe)

    def _start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if not self._closed and name not in self._tasks:
            self._tasks[name] = self._loop.create_task(self._run(name, run))

    async def _run(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await run()
        except Exception:
            log.exception("doyen no longer looks after what is watched in this store")
        finally:
            del self._tasks[name]  # in the same step as the last look at whether to go on

    async def _observe(self) -> None:
        """Look at what is due, until there is nothing left to look after."""
        while self._monitors or self._dirty:
            next_s = min(
                (monitor.look_at - self._now() for monitor in self._monitors.values()), default=None
            )
            try:
                async with asyncio.timeout(None if next_s is None else max(next_s, 0.0)):
                    await self._stirred.wait()
            except TimeoutError:
                pass
            self._stirred.clear()
            dirty, self._dirty = self._dirty & self._scopes.keys(), set()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    if dirty:
                        self._take_over(await self._tables.survey(sorted(dirty)))
                    await self._look()
            except (StoreError, TimeoutError) as error:
                log.debug("leases could not be looked at: %s", error)
                self._failed = True
                self._dirty |= dirty & self._scopes.keys()
                await asyncio.sleep(_RETRY_S)
                self._stirred.set()

    async def _look(self) -> None:
        soon = self._now() + _GRAIN_S
        due = [monitor for monitor in self._monitors.values() if monitor.look_at <= soon]
        if not due:
            return
        for row in await self._tables.look([monitor.lease for monitor in due]):
            if self.judge(row).over:
                if row.ttl_us is not None:
                    await self._tables.seal(row.lease, row.counter)
                monitor = self._monitors.pop(row.lease, None)
                if monitor is not None:
                    self._mark(monitor.scopes & self._scopes.keys())
        await self._look_together(due)

    async def _look_together(self, due: Sequence[_Monitor]) -> None:
        """Begin to observe the leases that stand beside those that may be over."""
        doubted = []
        elections: set[str] = set()
        for monitor in due:
            sighting = self._seen.get(monitor.lease)
            if sighting is None or sighting.together or not monitor.scopes:
                continue  # a lease that is only followed stands in no election yet
            if sighting.late or self._failed:
                doubted.append(sighting)
                elections |= {_election(scope) for scope in monitor.scopes}
        if elections:
            self._failed = False
            surveys = await self._tables.survey(sorted(elections))
            # Those seen before as well: what was seen then may be an earlier renewal.
            owners = sorted({owner for survey in surveys.values() for owner in survey.owners})
            for start in range(0, len(owners), _RIPE):
                for row in await self._tables.look(owners[start : start + _RIPE]):
                    self.judge(row)
        for sighting in doubted:
            sighting.together = True

    async def _poll(self) -> None:
        """Ask whether anything has changed, at intervals that leave the server most of its time."""
        pause_s = self._poll_s or 0.0
        while self._scopes:
            await asyncio.sleep(pause_s)
            began = self._loop.time()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    if self._changes is None:
                        await self._compare()
                    else:
                        await self._ask(self._changes)
            except (StoreError, TimeoutError) as error:
                log.debug("changes could not be asked for: %s", error)
            took_s = self._loop.time() - began
            pause_s = max(self._poll_s or 0.0, min(4 * took_s, _LONGEST_PAUSE_S))
        self._position = None

    async def _ask(self, changes: Changes) -> None:
        position, paths = await changes(self._position)
        if paths is not None:
            for path in paths:
                self.changed(path)
        elif position != self._position:
            self.all_changed()
        self._position = position

    async def _compare(self) -> None:
        position = await self._tables.position()
        if position != self._position:
            self._take_over(await self._tables.survey(sorted(self._scopes)))
            self._position = position

    def _take_over(self, surveys: dict[str, Survey]) -> None:
        for name, survey in surveys.items():
            scope = self._scopes.get(name)
            if scope is not None:
                before = scope.survey
                self._own(scope, survey)
                if (
                    self._poll_s is not None
                    and self._changes is None
                    and before not in (None, survey)
                ):
                    self._tell({name})

    def _own(self, scope: _Scope, survey: Survey) -> None:
        """Keep an eye on exactly the leases that own something in the scope."""
        before, scope.survey = scope.survey or _NOTHING, survey
        for lease in before.owners - survey.owners:
            monitor = self._monitors.get(lease)
            if monitor is not None:
                monitor.scopes.discard(scope.name)
                if not monitor.scopes:
                    del self._monitors[lease]
        for lease in survey.owners:
            monitor = self._monitors.get(lease)
            if monitor is None or not monitor.scopes:  # not observed, or for no election so far
                monitor = self._monitors[lease] = _Monitor(lease, self._now())
                self._stir()
            monitor.scopes.add(scope.name)


def _election(scope: str) -> str:
    """The prefix that all keys of an election have in common: its kind and its name."""
    return "/".join(scope.split("/")[:2])
