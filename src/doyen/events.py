"""What happened, as typed values on one stream.

Everything that watches doyen (logs, the audit file, metrics, a dashboard) is a *sink*: a callable
that takes a `Record`. Telemetry must never cost a leader its lease, so no sink runs on doyen's
event loop. Each has an `Outlet`: a bounded queue, emptied by a thread of its own. One that blocks
delays nobody but itself. While its queue is full, events are dropped for this sink, and a `Gap`
that counts them takes their place. A sink that raises is reported to the log and called again for
the next event.

Each sink gets the events of a session in the order in which they were emitted. Events that others
may act on (`Event.awaited`) are in the audit log before whoever emits them goes on, as long as the
log keeps up: a process killed right after it let go has written that it did.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from doyen.lease.clock import Clock

__all__ = [
    "Allowance",
    "Backlog",
    "Direct",
    "Elected",
    "Event",
    "Gap",
    "Granted",
    "Hindered",
    "LeaseEnded",
    "LeaseLost",
    "Lost",
    "Outlet",
    "Overrun",
    "Queued",
    "Record",
    "Renewed",
    "Resigned",
    "Sink",
    "Telemetry",
    "Unsure",
    "Waiting",
    "log_sink",
    "missing",
]

log = logging.getLogger("doyen")
T = TypeVar("T")

QUEUED = 8192
"""How many events wait for one sink at most."""
FLUSH_S = 1.0
"""How long the closing of a session, and the end of the process, wait for sinks that are behind."""
AWAIT_S = 0.025
AWAIT_SHARE = 0.05
"""How long doyen's loop waits for the audit log: this long at once, and this share of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened."""

    level: ClassVar[int] = logging.DEBUG
    awaited: ClassVar[bool] = False
    """Others may act on it, so it is written to the audit log before its emitter goes on."""

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(Event):
    """The session has a new lease."""

    lease: str
    ttl_s: float
    valid_until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed(Event):
    """The store confirmed a renewal; terms on this lease are valid until then (boot time)."""

    lease: str
    valid_until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsure(Event):
    """Renewals are failing and the deadline has not come. Terms are still valid."""

    level: ClassVar[int] = logging.WARNING
    lease: str
    remaining_s: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(Event):
    """The session gave its lease up, or found it gone. `ended_at` is when validity ended."""

    level: ClassVar[int] = logging.WARNING
    lease: str
    reason: str
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded(Event):
    """This process established that another's lease had ended: by time, or by proof of death.

    Told before anybody can act on it; several may find it at once.
    """

    level: ClassVar[int] = logging.INFO
    awaited: ClassVar[bool] = True
    lease: str
    cause: Literal["died", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Event):
    """A candidate stands in line. `behind` is who is ahead of it, or who leads."""

    election: str
    name: str
    behind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindered(Event):
    """A candidate cannot do what it needs to at the store, and keeps trying."""

    level: ClassVar[int] = logging.WARNING
    election: str
    name: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Elected(Event):
    """A term began."""

    level: ClassVar[int] = logging.INFO
    awaited: ClassVar[bool] = True
    election: str
    name: str
    token: int
    lease: str
    valid_until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Event):
    """A term ended before its body did. `ended_at` is when it stopped being valid."""

    level: ClassVar[int] = logging.WARNING
    awaited: ClassVar[bool] = True
    election: str
    name: str
    token: int
    lease: str
    reason: str
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resigned(Event):
    """A term's body has ended and the leader lets go. Written before the record is deleted."""

    level: ClassVar[int] = logging.INFO
    awaited: ClassVar[bool] = True
    election: str
    name: str
    token: int
    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrun(Event):
    """A body went on past its stop budget: the store may name another leader meanwhile."""

    level: ClassVar[int] = logging.ERROR
    awaited: ClassVar[bool] = True
    election: str
    name: str
    token: int
    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(Event):
    """Events were dropped because this sink did not keep up, or could not be written."""

    level: ClassVar[int] = logging.WARNING
    missed: int
    """How many."""
    since: float
    """When the first of them happened, on the boot-time clock; the record is stamped with the
    time of the last."""


@dataclass(frozen=True, slots=True)
class Record:
    """An event, with when and where. `at` is boot time, comparable under one `boot_id` only."""

    event: Event
    at: float
    wall: float
    session: str
    pid: int

    def fields(self) -> dict[str, Any]:
        return {"event": self.event.kind, **asdict(self.event)}


Sink = Callable[[Record], None]


def missing(gap: Record | None, record: Record) -> Record:
    """The gap that remains when `record`, which may be a gap itself, is dropped after `gap`."""
    event = record.event
    missed, since = (event.missed, event.since) if isinstance(event, Gap) else (1, record.at)
    if gap is not None and isinstance(gap.event, Gap):
        missed, since = missed + gap.event.missed, gap.event.since
    told = Gap(missed=missed, since=since)
    return Record(told, record.at, record.wall, record.session, record.pid)


class Outlet(Protocol):
    """The way from a session to one of its sinks."""

    def put(self, record: Record) -> object:
        """Hand over an event; never blocks. Any thread."""
        ...

    def settle(self, within_s: float) -> bool:
        """Block until the sink has taken all there is; False if it has not in time."""
        ...

    async def close(self, within_s: float) -> None:
        """Take no more, and wait for what there is. What is left then is still delivered, if the
        process lives so long."""
        ...


class Direct:
    """An outlet without a queue: for virtual time, where every event is told as it happens."""

    def __init__(self, sink: Sink, finish: Callable[[], None] = lambda: None) -> None:
        self._sink = sink
        self._finish = finish

    def put(self, record: Record) -> None:
        try:
            self._sink(record)
        except Exception:
            log.exception("a telemetry sink failed on %s and was passed over", record.event.kind)

    def settle(self, within_s: float) -> bool:
        return True

    async def close(self, within_s: float) -> None:
        self._finish()


class Backlog(Generic[T]):
    """What waits for a sink: at most `limit` items, with a gap wherever some were dropped.

    The newest are dropped, not the oldest: what is kept is then a true beginning, and its end is
    marked. `merge` makes the gap, from the one that ends the queue already, if any.
    """

    def __init__(self, limit: int, merge: Callable[[T | None, T], T]) -> None:
        self._limit = limit
        self._merge = merge
        self._items: deque[T] = deque()
        self._full = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> bool:
        """False if it was dropped."""
        if len(self._items) < self._limit:
            self._items.append(item)
            self._full = False
            return True
        # The last place is the gap's.
        self._items.append(self._merge(self._items.pop() if self._full else None, item))
        self._full = True
        return False

    def take(self) -> T:
        """The oldest."""
        item = self._items.popleft()
        self._full = self._full and bool(self._items)
        return item


def _nothing() -> None:
    pass


class Queued(Generic[T]):
    """A bounded queue in front of `deliver`, emptied by a thread of its own.

    The thread starts with the first item, and ends when the queue is closed and empty. If none can
    be started, items are kept and the next one tries again; if not `keeps`, they are refused. In
    the child of a fork, where there is no such thread, nothing is taken.
    """

    def __init__(
        self,
        deliver: Callable[[T], None],
        *,
        merge: Callable[[T | None, T], T],
        name: str,
        finish: Callable[[], None] = lambda: None,
        limit: int | None = None,
        keeps: bool = True,
    ) -> None:
        self._deliver = deliver
        self._keeps = keeps
        self._finish = finish
        self._name = name
        self._backlog = Backlog(QUEUED if limit is None else limit, merge)
        self._changed = threading.Condition()
        self._busy = False
        self._behind = False
        self._closing = False
        self._ended = False
        self._at_end: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def put(self, item: T) -> bool:
        """False if it was refused: by a queue that is closed, has no thread, or is a parent's."""
        if self._pid != os.getpid():
            return False
        with self._changed:
            if self._closing or not (self._started() or self._keeps):
                return False
            taken = self._backlog.put(item)
            falls_behind = not taken and not self._behind
            self._behind = not taken
            self._changed.notify_all()
        if falls_behind:
            log.error("%s does not keep up: events are dropped there until it does", self._name)
        return True

    def _started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with contextlib.suppress(RuntimeError):  # too many, or the interpreter is ending
                thread.start()
                self._thread = thread
                _running.add(self)
        return self._thread is not None

    def settle(self, within_s: float) -> bool:
        if self._pid != os.getpid():
            return False  # a thread that no longer exists may have held the lock
        with self._changed:
            return self._changed.wait_for(self._idle, within_s)

    def _idle(self) -> bool:
        return not self._busy and not self._backlog

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                if not self._backlog:
                    self._changed.notify_all()
                    if self._closing:
                        break
                    self._changed.wait()
                    continue
                item = self._backlog.take()
                self._busy = True
            try:
                self._deliver(item)
            except BaseException:  # SystemExit, too: the thread serves all later items
                log.exception("%s failed on %s and was passed over", self._name, item)
        _running.discard(self)
        self._end()

    def shut(self, tell: Callable[[], None] = lambda: None) -> None:
        """Take no more; `tell` is called, on any thread, when all has been delivered."""
        with self._changed:
            if not self._ended:
                self._at_end.append(tell)
                tell = _nothing
            self._closing = True
            self._changed.notify_all()
            threaded = self._thread is not None
        tell()
        if not threaded:
            if self._backlog:
                log.error(
                    "%s: %d events are lost, because no thread could be started to deliver them",
                    self._name,
                    len(self._backlog),
                )
            self._end()

    def _end(self) -> None:
        self._finish()
        with self._changed:
            self._ended = True
            at_end, self._at_end = self._at_end, []
        for tell in at_end:
            tell()

    def join(self, within_s: float) -> None:
        """After `shut`: block until the thread has ended, or the time is over."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(within_s)

    async def close(self, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        self.shut(tell)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await ended.wait()
        if not ended.is_set():
            log.error(
                "%s has not taken %d events within %g s; they are lost if the process ends now",
                self._name,
                len(self._backlog) + self._busy,
                within_s,
            )


_running: set[Queued[Any]] = set()
"""The queues that have a thread."""


def _settle_all() -> None:
    """The process ends: give the sinks that are behind `FLUSH_S`, all together."""
    give_up = time.monotonic() + FLUSH_S
    for queued in list(_running):
        queued.settle(max(0.0, give_up - time.monotonic()))


atexit.register(_settle_all)


class Allowance:
    """How long doyen's loop may still wait for audit logs: of all sessions together, since they
    share the loop. It fills up again with time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left_s = AWAIT_S
        self._at = clock.now()

    def settle(self, audit: Outlet) -> None:
        """Wait for an audit log, if there is anything left to wait."""
        began = self._clock.now()
        refilled = self._left_s + AWAIT_SHARE * (began - self._at)
        self._at, self._left_s = began, min(AWAIT_S, refilled)
        if self._left_s > 0:
            audit.settle(self._left_s)
            self._left_s -= self._clock.now() - began


class Telemetry:
    """The stream of one session: stamps events and hands them to every sink, in order."""

    def __init__(
        self,
        clock: Clock,
        session: str,
        sinks: Iterable[Sink] = (),
        *,
        audit: Outlet | None = None,
        outlet: Callable[[Sink], Outlet] = Direct,
        allowance: Allowance | None = None,
    ) -> None:
        """`outlet` makes the way to each of the `sinks`; `audit` is the one that awaited events
        are waited for at, within the `allowance`."""
        self._clock = clock
        self._session = session
        self._audit = audit
        self._outlets = [*([audit] if audit else []), *map(outlet, sinks)]
        self._pid = os.getpid()
        self._allowance = allowance or Allowance(clock)

    def emit(self, event: Event) -> None:
        """Any thread; blocks for an awaited event only, and for `AWAIT_S` at most."""
        record = Record(event, self._clock.now(), self._clock.wall(), self._session, self._pid)
        log_sink(record)
        for outlet in self._outlets:
            outlet.put(record)
        if event.awaited and self._audit is not None:
            self._allowance.settle(self._audit)

    def settle(self, within_s: float = FLUSH_S) -> None:
        """Block until every sink has taken all there is, or the time is over: the process ends."""
        for outlet in self._outlets:
            outlet.settle(within_s)

    async def close(self) -> None:
        """Wait for the sinks to take what there is, for `FLUSH_S` at most."""
        await asyncio.gather(*(outlet.close(FLUSH_S) for outlet in self._outlets))


def log_sink(record: Record) -> None:
    """Standard logging, on the logger `doyen`, one line an event."""
    event = record.event
    if log.isEnabledFor(event.level):
        details = " ".join(f"{name}={value}" for name, value in asdict(event).items())
        try:
            log.log(event.level, "%s %s", event.kind, details, extra={"doyen": record})
        except Exception:
            log.exception("a logging handler failed on %s and was passed over", event.kind)
