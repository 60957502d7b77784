"""Observes a store, once for all pages, and writes what it sees to the board.

- All elections and locks are listed once per second: that is how new ones are found. If there are
  many, the pause grows with what a listing costs, so that it takes a small share of the time.
- There is one watch for each election. After a notification that election alone is read.
- The store does not notify of renewals, so the leases of the elections that a page shows are
  looked at about once per second, each of them once, however many elections share it.
- Every call tells whether the store answers. If it does not, the board says since when; what it
  shows stays, as last known. A store may answer, and refuse or not manage to list a part of what
  it has: then the board says of that part since when.

A listing that began before an election was read on its own is older, and is ignored for it.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar
from urllib.parse import unquote

from doyen.election.core import SessionCore
from doyen.election.trail import decode_trail
from doyen.errors import StoreError, StoreUnusable
from doyen.events import LeaseEnded, Record
from doyen.events.log_lines import log_line
from doyen.model import Claim, Entry, Kind, Order, Version, is_name, leader_key, trail_key
from doyen.stores.port import Watch
from doyen.web.board import Board
from doyen.web.terms import ElectionRow, LeaseSight, clipped, row_key
from doyen.web.trail import recorded_terms

__all__ = ["Hub"]

T = TypeVar("T")
log = logging.getLogger("doyen")

LISTED: tuple[Kind, ...] = ("elections", "locks", "semaphores")
SURVEY_S = 1.0
"""The shortest pause between two listings of all elections."""
SHARE = 10.0
"""A long listing is followed by a pause of this many times what it took."""
SHORT = 1000
"""A listing of no more entries than this costs little, even if a busy machine takes long for it."""
PROBE_S = 1.0
"""How often the store is asked whether it answers, and leases are looked at."""
PROBE_LEAST_S = 0.1
"""The shortest pause between two such looks, if what is shown changes."""
SILENT_S = 1.5
"""After this time without an answer, and a call that failed, the store counts as unreachable."""
FAILING_S = 3.0
"""After this time without a complete reading of a part of the page, and only errors, the page says
so."""
READERS = 16
"""How many elections are read at a time, or get their watch."""
FORGET_S = 24 * 3600.0
"""How long an election without leader and candidates stays on the page."""
IDLE = 1000
"""How many of those stay on the page. A program may use ever new names for its locks."""
TRAIL_S = 10.0
"""How long after a change the trail of an election is read again: leaders write it in the
background, and on a busy store that takes a while."""
SAMPLES = 300
"""How many looks at one lease are kept."""


@dataclass(slots=True, eq=False)
class WatchedScope:
    """One election or lock, or a semaphore with all its slots: what one watch covers."""

    kind: Kind
    path: str
    watch: Watch | None = None
    rows: dict[str, str] = field(default_factory=dict)
    """Its rows: their keys, and their names."""
    read_from: float = -1.0
    """When the newest read that was taken in had begun."""
    had: tuple[tuple[str, Version], ...] = ()
    """The entries that it had then, and their versions."""
    queued: bool = False
    reading: bool = False
    again: bool = False


@dataclass(slots=True)
class PartHealth:
    """Whether a part of the page can be read: the list of elections, a panel, an audit log."""

    read_at: float | None = None
    """When it was last read completely, on the wall clock."""
    failing_from: float | None = None
    """Since when every attempt has failed, on the boot-time clock."""
    error: str = ""


class Hub:
    """Observes one store. Used on the loop of its session."""

    def __init__(self, core: SessionCore, board: Board) -> None:
        self.core = core
        self.board = board
        self._now = core.runtime.clock.now
        self._scopes: dict[str, WatchedScope] = {}
        self._queue: asyncio.Queue[WatchedScope] = asyncio.Queue()
        self._survey_now = asyncio.Event()
        self._unwatched = asyncio.Event()
        self._probe_now = asyncio.Event()
        self._answered_at = board.wall()
        self._answered = self._now()
        """The same on the boot-time clock, which does not jump."""
        self._parts: dict[str, PartHealth] = {}
        self._since: float | None = None
        self._error = ""
        self._times: deque[float] = deque(maxlen=200)
        self._trails: dict[str, float] = {}
        """When the trail of an election was read last."""
        self._entries_tell: bool | None = None
        """Whether entries say what is left of their leases; None until one was seen."""
        self.samples: dict[str, deque[tuple[float, float]]] = {}
        """For leases that are shown: when each was looked at, and what was left of it."""

    async def run(self) -> None:
        """Observe until cancelled."""
        workers = [self._read_changed() for _ in range(READERS)]
        async with asyncio.TaskGroup() as tasks:
            for work in (self._survey(), self._watch_all(), self._probe(), *workers):
                tasks.create_task(work)

    def close(self) -> None:
        for scope in self._scopes.values():
            if scope.watch is not None:
                scope.watch.close()

    @property
    def watches(self) -> int:
        """How many watches it has in the store."""
        return sum(scope.watch is not None for scope in self._scopes.values())

    # Whether the store answers.

    async def call(self, request: Awaitable[T]) -> T:
        """Make one store call, and note whether the store answers."""
        began = self._now()
        try:
            result = await self.core.call(request)
        except StoreError as error:
            self._error = str(error)
            raise
        self._times.append(self._now() - began)
        self._answered_at, self._answered = self.board.wall(), self._now()
        if self._since is not None:
            self._since = None
            self._survey_now.set()
            self._tell_health()
        return result

    async def _get(self, key: str) -> Entry | None:
        """Read one entry. A task of this that is cancelled before it begins has made no request."""
        return await self.call(self.core.store.get(key))

    def part_read(self, part: str) -> None:
        """A part of the page was read completely."""
        self._parts[part] = PartHealth(self.board.wall())

    def part_failed(self, part: str, error: Exception) -> None:
        """A part of the page could not be read."""
        its = self._parts.setdefault(part, PartHealth())
        its.error = str(error)
        if its.failing_from is None:
            its.failing_from = self._now()

    def _stale_parts(self) -> list[list[Any]]:
        """The parts that cannot be read: name, when they were last read, and the error."""
        return [
            [part, its.read_at and round(its.read_at, 3), clipped(its.error)]
            for part, its in self._parts.items()
            if its.failing_from is not None and self._now() - its.failing_from >= FAILING_S
        ]

    def _tell_health(self) -> None:
        times = sorted(self._times)
        self.board.set(
            "health",
            {
                "reachable": self._since is None,
                "as_of": round(self._answered_at, 3),
                "since": self._since,
                "error": clipped(self._error) if self._since is not None else "",
                "p50_ms": round(statistics.median(times) * 1000, 2) if times else None,
                "p99_ms": round(times[int(len(times) * 0.99)] * 1000, 2) if times else None,
                "watches": self.watches,
                "stale": self._stale_parts(),
            },
        )

    async def _probe(self) -> None:
        """Once per second: does the store answer, and what is left of the leases that are shown?"""
        key = leader_key("doyen dash")
        while True:
            try:
                await self._get(key)
                await self._look_at_leases()
                await self._read_trails()
                self.part_read("leases")
            except StoreUnusable:
                raise  # it has to be opened again
            except StoreError as error:
                if self._now() - self._answered <= SILENT_S:
                    self.part_failed("leases", error)
                elif self._since is None:
                    self._since = self._answered_at
            self._tell_health()
            await asyncio.sleep(PROBE_LEAST_S)
            try:
                async with asyncio.timeout(PROBE_S / (1 if self._since is None else 2)):
                    await self._probe_now.wait()
            except TimeoutError:
                pass
            self._probe_now.clear()

    def shown_changed(self) -> None:
        """A page shows other elections, or they have changed: look at their leases at once."""
        self._probe_now.set()

    async def _look_at_leases(self) -> None:
        shown: dict[str, Entry] = {}
        for key in self.board.shown():
            row = self.board.rows.get(key)
            if row is not None and row.record is not None and row.record.lease is not None:
                shown.setdefault(row.record.lease, row.record)
        failed: StoreError | None = None
        known = await self.remaining(shown) if self._entries_tell is not True else {}
        if shown and not known and self._entries_tell is not False:
            looks = (self._get(entry.key) for entry in shown.values())
            answers = await asyncio.gather(*looks, return_exceptions=True)
            for found in answers:
                if isinstance(found, Entry):
                    self._entries_tell = found.remaining_s is not None
                    self._sight(found, sample=True)
            failed = next((each for each in answers if isinstance(each, StoreError)), None)
        for lease, left_s in known.items():
            self._sight(shown[lease]._replace(remaining_s=left_s), sample=True)
        self.samples = {lease: self.samples[lease] for lease in shown if lease in self.samples}
        self._tell_leases(shown)
        if failed is not None:
            raise failed

    async def _read_trails(self) -> None:
        """Read the trails of elections that are shown: once, and again after a change, when the
        leaders have had time to write."""
        now = self.board.wall()
        rows = [self.board.rows[key] for key in self.board.shown() if key in self.board.rows]
        due = [
            row
            for row in rows
            if row.kind == "elections"
            and self._trails.get(row.key, -inf) < row.changed_at + TRAIL_S
            and is_name(row.name)  # others are not of doyen, and have no trail
        ][:READERS]
        reads = (self._get(trail_key(row.name)) for row in due)
        answers = await asyncio.gather(*reads, return_exceptions=True)
        for row, found in zip(due, answers, strict=True):
            if isinstance(found, BaseException):
                continue
            self._trails[row.key] = now
            settled = now >= row.changed_at + TRAIL_S
            if found is not None and row.learn(
                recorded_terms(decode_trail(found.value)), settled=settled
            ):
                self.board.row_changed(row.key)

    async def remaining(self, leases: Collection[str]) -> Mapping[str, float]:
        """What is left of leases, where the store tells that apart from entries."""
        if not leases:
            return {}
        return await self.core.calls.remaining([*leases])

    def _sight(self, entry: Entry, *, sample: bool = False) -> None:
        """Note what is left of the lease of an entry."""
        if entry.lease is None or entry.remaining_s is None:
            return
        now, before = self.board.wall(), self.board.leases.get(entry.lease)
        stated = Claim.decode(entry.value).ttl_s
        ttl_s = stated or max(entry.remaining_s, before.ttl_s if before else 0.0)
        self.board.leases[entry.lease] = LeaseSight(entry.remaining_s, now, ttl_s)
        if sample:
            kept = self.samples.setdefault(entry.lease, deque(maxlen=SAMPLES))
            kept.append((round(now, 2), round(entry.remaining_s, 2)))

    def _tell_leases(self, shown: Iterable[str]) -> None:
        sights = {}
        for lease in shown:
            sight = self.board.leases.get(lease)
            if sight is not None:
                sights[lease] = [round(sight.remaining_s, 2), round(sight.at, 2), sight.ttl_s]
        self.board.set("leases", sights)

    def on_event(self, record: Record) -> None:
        """A sink of the session: the store has found that a lease ended."""
        event = record.event
        if isinstance(event, LeaseEnded):
            sight = self.board.leases.get(event.lease)
            if sight is None:
                sight = self.board.leases[event.lease] = LeaseSight(0.0, record.wall, 0.0)
            sight.ended = event.cause

    # All elections.

    async def _survey(self) -> None:
        while True:
            self._survey_now.clear()
            began = self._now()
            pause_s = SURVEY_S
            try:
                found = [await self._list(kind) for kind in LISTED]
                self.part_read("elections")
                self._forget()
                if sum(found) > SHORT:
                    pause_s = max(SURVEY_S, SHARE * (self._now() - began))
            except StoreError as error:
                self.part_failed("elections", error)
                log.debug("%s", log_line(event="listing_failed", error=error))
            try:
                async with asyncio.timeout(pause_s):
                    await self._survey_now.wait()
            except TimeoutError:
                pass

    async def _list(self, kind: Kind) -> int:
        """Take in all elections of one kind. Returns how many entries there are."""
        began = self._now()
        entries = await self.call(self.core.store.list(kind))
        found: dict[str, list[Entry]] = {
            path: [] for path, scope in self._scopes.items() if scope.kind == kind
        }
        for entry in entries:
            _, _, rest = entry.key.partition("/")
            found.setdefault(f"{kind}/{rest.partition('/')[0]}", []).append(entry)
        for number, (path, its) in enumerate(found.items()):
            scope = self._scopes.get(path)
            if scope is None:
                scope = self._scopes[path] = WatchedScope(kind, path)
                self._unwatched.set()
            self._take(scope, its, began)
            if number % 500 == 499:
                await asyncio.sleep(0)
        return len(entries)

    def _forget(self) -> None:
        """Forget elections that have had no candidate for a long time, all but the last of those
        that have none now, and leases of no leader."""
        now, board = self.board.wall(), self.board
        idle: list[tuple[bool, float, WatchedScope]] = []
        for scope in self._scopes.values():
            rows = [board.rows[key] for key in scope.rows if key in board.rows]
            if not scope.had and all(row.idle for row in rows):
                changed_at = max((row.changed_at for row in rows), default=-inf)
                idle.append((scope.kind == "elections", changed_at, scope))
        idle.sort(key=lambda each: each[:2])  # locks before elections, the oldest first
        for number, (_, changed_at, scope) in enumerate(idle):
            if len(idle) - number > IDLE or now - changed_at > FORGET_S:
                self._forget_scope(scope)
        kept = {row.record.lease for row in board.rows.values() if row.record is not None}
        for lease in board.leases.keys() - kept:
            if now - board.leases[lease].at > 60:
                del board.leases[lease]

    def _forget_scope(self, scope: WatchedScope) -> None:
        del self._scopes[scope.path]
        if scope.watch is not None:
            scope.watch.close()
        for key in scope.rows:
            self._trails.pop(key, None)
            if self.board.rows.pop(key, None) is not None:
                self.board.row_changed(key)

    async def _watch_all(self) -> None:
        """Give every election its watch. A listing afterwards covers what changed before."""
        while True:
            await self._unwatched.wait()
            self._unwatched.clear()
            waiting = deque(scope for scope in self._scopes.values() if scope.watch is None)
            failed = False

            async def watch(waiting: deque[WatchedScope] = waiting) -> None:
                nonlocal failed
                while waiting:
                    scope = waiting.popleft()
                    notify = self._notifier(scope)
                    try:
                        scope.watch = await self.call(self.core.store.watch(scope.path, notify))
                    except StoreError as error:
                        failed = True
                        self.part_failed("changes", error)
                        log.debug("%s", log_line(event="watch_failed", key=scope.path, error=error))
                        self._unwatched.set()
                        await asyncio.sleep(self.core.calls.retry_pause())
                    else:
                        if not self._is_known(scope):  # forgotten meanwhile
                            scope.watch.close()

            await asyncio.gather(*(watch() for _ in range(READERS)))
            if not failed:
                self.part_read("changes")
            self._survey_now.set()

    def _is_known(self, scope: WatchedScope) -> bool:
        return self._scopes.get(scope.path) is scope

    def _notifier(self, scope: WatchedScope) -> Callable[[], None]:
        def notify() -> None:
            if not scope.queued:
                scope.queued = True
                self._queue.put_nowait(scope)

        return notify

    async def _read_changed(self) -> None:
        """Read elections that have changed, one after the other."""
        while True:
            scope = await self._queue.get()
            scope.queued = False
            if scope.reading:
                scope.again = True
                continue
            scope.reading = True
            try:
                began = self._now()
                self._take(scope, await self.call(self.core.store.list(scope.path)), began)
            except StoreError:
                scope.again = True
                await asyncio.sleep(self.core.calls.retry_pause())
            finally:
                scope.reading = False
            if scope.again:
                scope.again = False
                self._notifier(scope)()

    def _take(self, scope: WatchedScope, entries: list[Entry], began: float) -> None:
        """Take in what a scope has, unless something newer is known."""
        if began < scope.read_from or not self._is_known(scope):
            return
        first = scope.read_from < 0
        scope.read_from = began
        has = tuple((entry.key, entry.version) for entry in entries)
        if has == scope.had and not first:
            return
        scope.had = has
        board, now = self.board, self.board.wall()
        looks = _looks(scope, entries)
        held = {entry.lease for entry in entries if entry.lease is not None}
        for name in dict.fromkeys([*looks, *scope.rows.values()]):
            key = row_key(scope.kind, name)
            record, tickets, order = looks.get(name, (None, [], None))
            row = board.rows.get(key)
            new = row is None
            if row is None:
                row = board.rows[key] = ElectionRow(scope.kind, name)
                scope.rows[key] = name
            current = row.current
            lease = board.leases.get(current.lease) if current and current.lease else None
            if row.look(record, tickets, order, now, first=first and new, lease=lease, held=held):
                board.row_changed(key)
                if board.is_shown(key):
                    self.shown_changed()
        for entry in entries:
            if entry.key.endswith("/leader"):
                self._sight(entry)


def _looks(
    scope: WatchedScope, entries: list[Entry]
) -> dict[str, tuple[Entry | None, list[Entry], Order | None]]:
    """What the entries of a scope say about each name: the record, the tickets, the order."""
    name = unquote(scope.path.partition("/")[2])
    records: dict[str, Entry] = {}
    orders: dict[str, Order] = {}
    tickets: list[Entry] = []
    for entry in entries:
        rest = entry.key[len(scope.path) + 1 :].split("/")
        if rest[0] == "line" and len(rest) > 1:
            tickets.append(entry)
            continue
        its = name
        if scope.kind == "semaphores":
            if rest[0] != "slots" or len(rest) < 3:
                continue
            its, rest = f"{name}/{rest[1]}", rest[2:]
        if rest == ["leader"]:
            records[its] = entry
        elif rest == ["leader", "order"] and (order := Order.decode(entry.value)) is not None:
            orders[its] = order
    if scope.kind == "semaphores":
        return {
            its: (records.get(its), tickets if position == 0 else [], orders.get(its))
            for position, its in enumerate(sorted({*records, *orders}))
        }
    if not entries:
        return {}
    return {name: (records.get(name), tickets, orders.get(name))}
