"""Delivering the events of a session to its sinks, and log lines to the handlers of `logging`.

Delivery must never delay a renewal, so no sink runs on doyen's event loop. Each sink has a
`DeliveryQueue`, emptied by a thread of its own, so that a sink that blocks delays no other. While a
queue is full, events for this sink are dropped, and a `Gap` that counts them takes their place. If
a sink raises, that is logged, and the sink is called again for the next event.

Each sink receives the events of a session in the order in which they were emitted. The session
waits until the audit log has written an event that other processes may act on (`Event.awaited`), as
long as the log keeps up: its loop does, within an allowance, and beyond that what gives up a record
or a lease. So a process that is killed right after it resigned has recorded that.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from doyen._waiting import LoopEvent
from doyen.events import Event, Record, Renewed, Sink
from doyen.events.log_lines import LogfmtLine, LogReporter, log_line
from doyen.lease.clock import Clock

log = logging.getLogger("doyen")
_CHILDREN = ("audit", "consul", "nats", "quorum.node", "warden", "zookeeper")
LOGGERS = ("doyen", *(f"doyen.{child}" for child in _CHILDREN))
"""The loggers of all code that runs on doyen's threads. A filter of a logger does not see the lines
of its child loggers, so each is named; `tests/test_house.py` checks that none is missing."""
T = TypeVar("T")

QUEUED = 8192
"""The greatest number of events in the queue of one sink."""
FLUSH_S = 1.0
"""How long the end of a session, and the end of the process, wait for queues to empty."""
SOON_S = 0.001
AWAIT_S = 0.025
AWAIT_SHARE = 0.05
"""How long doyen's loop waits for audit logs: at most `AWAIT_S` at once, and at most this share of
its time. What is given up waits for as long again, and the loop does not."""


class DirectOutlet:
    """An outlet without a queue, which calls the sink at once. For virtual time."""

    def __init__(self, sink: Sink, finish: Callable[[], None] = lambda: None) -> None:
        self._sink = sink
        self._finish = finish

    def put(self, record: Record) -> None:
        try:
            self._sink(record)
        except Exception:
            log.exception("%s", log_line(event="sink_failed", on=record.event.log_name))

    def flush(self, within_s: float) -> bool:
        return True

    async def delivered(self, within_s: float) -> None:
        pass

    async def close(self, within_s: float) -> None:
        self._finish()


class Backlog(Generic[T]):
    """A queue of at most `limit` items, with a gap in the place of items that were dropped.

    The newest items are dropped, so that the items before the gap are complete. `merge` makes the
    gap from the dropped item and the gap at the end of the queue, if there is one.
    """

    def __init__(self, limit: int, merge: Callable[[T | None, T], T]) -> None:
        self._limit = limit
        self._merge = merge
        self._items: deque[T] = deque()
        self._full = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> bool:
        """Append an item; False if it was dropped."""
        if len(self._items) < self._limit:
            self._items.append(item)
            self._full = False
            return True
        # The queue is full; one more place is reserved for the gap.
        self._items.append(self._merge(self._items.pop() if self._full else None, item))
        self._full = True
        return False

    def take(self) -> T:
        """Remove and return the oldest item."""
        item = self._items.popleft()
        self._full = self._full and bool(self._items)
        return item


class DeliveryQueue(Generic[T]):
    """A bounded queue whose own thread calls `deliver` with each item.

    The thread starts with the first item and ends when the queue is closed and empty. If it cannot
    be started, items are kept and the next item tries again; without `keep_unstarted` they are
    refused. In the child of a fork, which does not have the thread, items are refused.
    """

    def __init__(
        self,
        deliver: Callable[[T], None],
        *,
        merge: Callable[[T | None, T], T],
        name: str,
        finish: Callable[[], None] = lambda: None,
        limit: int | None = None,
        keep_unstarted: bool = True,
    ) -> None:
        """`merge` is that of `Backlog`. `finish` is called after the last delivery."""
        self._deliver = deliver
        self._keep_unstarted = keep_unstarted
        self._finish = finish
        self._name = name
        self._backlog = Backlog(QUEUED if limit is None else limit, merge)
        self._changed = threading.Condition()
        self._delivering = False
        self._dropping = False
        self._closing = False
        self._ended = False
        self._on_end: list[Callable[[], None]] = []
        self._on_idle: dict[LoopEvent, None] = {}
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def put(self, item: T) -> bool:
        """Queue an item; False if it was refused, because the queue is closed, has no thread or
        belongs to the parent process."""
        if self._pid != os.getpid():
            return False
        with self._changed:
            if self._closing or not (self._started() or self._keep_unstarted):
                return False
            queued = self._backlog.put(item)
            first_dropped = not queued and not self._dropping
            self._dropping = not queued
            self._changed.notify_all()
        if first_dropped:
            log.error(
                "%s", log_line(event="queue_full", queue=self._name, effect="items are dropped")
            )
        return True

    def _started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with contextlib.suppress(RuntimeError):  # too many, or the interpreter is ending
                thread.start()
                self._thread = thread
                _running.add(self)
        return self._thread is not None

    def flush(self, within_s: float) -> bool:
        """Block until all items have been delivered; False if `within_s` passed first."""
        if self._pid != os.getpid():
            return False  # the lock may have been held by a thread that the child does not have
        with self._changed:
            return self._changed.wait_for(self._idle, within_s)

    async def delivered(self, within_s: float) -> None:
        """The same, without blocking the loop."""
        idle = LoopEvent()
        with self._changed:
            if self._idle():
                return
            self._on_idle[idle] = None
        try:
            await idle.set_within(within_s)
        finally:
            with self._changed:
                self._on_idle.pop(idle, None)

    def _idle(self) -> bool:
        return not self._delivering and not self._backlog

    def _run(self) -> None:
        while True:
            with self._changed:
                self._delivering = False
                if not self._backlog:
                    self._changed.notify_all()
                    for idle in self._on_idle:
                        idle.set_soon()
                    if self._closing:
                        break
                    self._changed.wait()
                    continue
                item = self._backlog.take()
                self._delivering = True
            try:
                self._deliver(item)
            except BaseException:  # including SystemExit: the thread is needed for later items
                log.exception("%s", log_line(event="delivery_failed", queue=self._name, item=item))
        _running.discard(self)
        self._end()

    def shut(self, on_end: Callable[[], None] | None = None) -> None:
        """Accept no more items. `on_end` is called, on any thread, when all are delivered."""
        with self._changed:
            if on_end is not None and not self._ended:
                self._on_end.append(on_end)
                on_end = None
            self._closing = True
            self._changed.notify_all()
            threaded = self._thread is not None
        if on_end is not None:
            on_end()
        if not threaded:
            if self._backlog:
                self._log_lost(len(self._backlog), "no thread could be started to deliver them")
            self._end()

    def _log_lost(self, items: int, reason: str) -> None:
        line = log_line(event="items_not_delivered", queue=self._name, items=items, reason=reason)
        log.error("%s", line)

    def _end(self) -> None:
        self._finish()
        with self._changed:
            self._ended = True
            waiting, self._on_end = self._on_end, []
        for on_end in waiting:
            on_end()

    def join(self, within_s: float) -> None:
        """After `shut`: block until the thread has ended or `within_s` has passed."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(within_s)

    async def close(self, within_s: float) -> None:
        """Accept no more items, and wait up to `within_s` for delivery. Delivery of the remaining
        items goes on after that, as long as the process lives."""
        ended = LoopEvent()
        self.shut(ended.set_soon)
        if not await ended.set_within(within_s):
            items = len(self._backlog) + self._delivering
            self._log_lost(items, f"delivery took longer than {within_s:g} s")


_delaying: weakref.WeakSet[Telemetry] = weakref.WeakSet()
"""Those that deliver events after `SOON_S`, which the process may not live to see."""
Outlet = DirectOutlet | DeliveryQueue[Record]
_running: set[DeliveryQueue[Any]] = set()
"""The queues that have a thread."""


def _flush_all() -> None:
    """At the end of the process: give all queues together `FLUSH_S` to empty."""
    give_up = time.monotonic() + FLUSH_S
    for telemetry in list(_delaying):
        if telemetry._pid == os.getpid():  # not those of the parent of a fork
            telemetry._deliver_due(max(0.0, give_up - time.monotonic()))
    for queue in list(_running):
        queue.flush(max(0.0, give_up - time.monotonic()))


atexit.register(_flush_all)


class WaitAllowance:
    """Limits how long doyen's loop waits for audit logs. All sessions share one allowance, because
    they share the loop. What was used is restored over time, at the rate `AWAIT_SHARE`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left_s = AWAIT_S
        self._at = clock.now()

    def flush(self, audit: Outlet) -> None:
        """Wait for an audit log for as long as the allowance permits."""
        began = self._clock.now()
        refilled = self._left_s + AWAIT_SHARE * (began - self._at)
        self._at, self._left_s = began, min(AWAIT_S, refilled)
        if self._left_s > 0:
            audit.flush(self._left_s)
            self._left_s -= self._clock.now() - began


class Telemetry:
    """The events of one session: adds time and origin, logs them and delivers them to sinks."""

    def __init__(
        self,
        clock: Clock,
        session: str,
        sinks: Iterable[Sink] = (),
        *,
        audit: Outlet | None = None,
        outlet: Callable[[Sink], Outlet] = DirectOutlet,
        allowance: WaitAllowance | None = None,
        threads: bool = False,
    ) -> None:
        """`outlet` makes the outlet of each of the `sinks`. `audit` is the outlet of the audit log,
        for which awaited events wait within the `allowance`. `threads`: the sinks, and the handlers
        of `logging`, are called on threads of their own."""
        self._clock = clock
        self._session = session
        self._audit = audit
        self._outlets = [*([audit] if audit else []), *map(outlet, sinks)]
        self._soon = threads and audit is None
        if self._soon:
            _delaying.add(self)
        self._pid = os.getpid()
        self._allowance = allowance or WaitAllowance(clock)
        self._log = LogReporter()
        self._due: deque[Callable[[], None]] = deque()
        """What is done in a moment: deliveries, and what follows them."""
        self._delivering = threading.Lock()
        """Held by the thread that delivers what is due, so that the order is kept."""

    def emit(self, event: Event | Callable[[], Event], *, planned: bool = False) -> None:
        """Deliver an event, or one that is made when it is delivered. May be called on any thread;
        blocks for an awaited event only, and for `AWAIT_S` at most. A `planned` event is logged at
        level info, not as a warning.

        On a loop, an event without an audit log is delivered after `SOON_S`, or before the next
        event of another thread. Delivery wakes threads, which would compete with what is urgent
        now. Nothing is urgent after a renewal, so it costs an idle candidate no second wake-up.
        """
        now, wall = self._clock.now(), self._clock.wall()
        calm = isinstance(event, Renewed)
        self._do_in_turn(lambda: self._deliver(event, now, wall, planned), calm=calm)

    def _do_in_turn(self, act: Callable[[], None], *, calm: bool = False) -> None:
        """Do it after what is due. `calm`: nothing else is urgent now, so do it at once if nothing
        is due."""
        if not self._soon:
            act()
            return
        self._due.append(act)
        if calm and len(self._due) == 1:
            self._deliver_due()
            return
        try:
            # For each event, since the loop may be closed before the timer of an earlier one.
            asyncio.get_running_loop().call_later(SOON_S, self._deliver_due)
        except RuntimeError:  # no loop runs on this thread
            self._deliver_due()

    def _deliver_due(self, within_s: float = 0.0) -> None:
        """Do what is due. If another thread does this, it also does what was added since;
        `within_s` is how long to wait for it."""
        while self._due and self._delivering.acquire(timeout=within_s):
            try:
                while self._due:
                    self._due.popleft()()
            finally:
                self._delivering.release()

    def _deliver(
        self, event: Event | Callable[[], Event], at: float, wall: float, planned: bool
    ) -> None:
        if not isinstance(event, Event):
            event = event()
        record = Record(event, at, wall, self._session, self._pid)
        self._log.report(record, planned=planned)
        for outlet in self._outlets:
            outlet.put(record)
        if event.awaited and self._audit is not None:
            self._allowance.flush(self._audit)

    def left(self, *, election_kind: str, election: str, name: str) -> None:
        """A candidate ended its campaign, which no event says if it was never elected."""
        self._do_in_turn(lambda: self._log.left(election_kind, election, name))

    @property
    def is_written(self) -> bool:
        """Whether the audit log, if there is one, has written every event."""
        return self._audit is None or self._audit.flush(0.0)

    async def written(self) -> None:
        """Wait until the audit log has written every event, for `AWAIT_S` at most, without blocking
        the loop. What ends in the log is given up after this."""
        if self._audit is not None and not self.is_written:
            await self._audit.delivered(AWAIT_S)

    def flush(self, within_s: float = FLUSH_S) -> None:
        """Block until every sink has received all events, for `within_s` per sink at most."""
        self._deliver_due(within_s)
        for outlet in self._outlets:
            outlet.flush(within_s)

    async def close(self) -> None:
        """Accept no more events, and wait `FLUSH_S` at most for delivery."""
        self._deliver_due(FLUSH_S)
        await asyncio.gather(*(outlet.close(FLUSH_S) for outlet in self._outlets))


class LogRelay(logging.Filter):
    """Takes doyen's log lines before any handler sees them, and handles them on a thread.

    A handler may write to a full pipe or a slow disk, which on doyen's loop would delay renewals.
    The relay is the first filter of each logger, so that the filters of users see each line once,
    on that thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines = DeliveryQueue(
            _handle, merge=_lines_missing, name="doyen-log", keep_unstarted=False
        )
        for name in LOGGERS:
            logging.getLogger(name).filters.insert(0, self)

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(_relaying, "now", False) or not self._lines.put(record)

    def flush(self, within_s: float) -> None:
        self._lines.flush(within_s)

    def close(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self)
        self._lines.shut()
        self._lines.join(FLUSH_S)


_relaying = threading.local()
"""`now` is set on the threads of relays. There may be two of them: a session may be opened while
the last one is being closed."""


def _handle(line: logging.LogRecord) -> None:
    _relaying.now = True
    try:
        logging.getLogger(line.name).handle(line)
    except Exception:  # noqa: BLE001 - reported as logging reports errors of other handlers
        logging.Handler().handleError(line)


def _lines_missing(gap: logging.LogRecord | None, line: logging.LogRecord) -> logging.LogRecord:
    before = gap.msg.fields["lines"] if gap is not None and isinstance(gap.msg, LogfmtLine) else 0
    lines = before + 1 if isinstance(before, int) else 1
    reason = "the handlers of logging did not keep up"
    text = log_line(event="log_lines_dropped", lines=lines, reason=reason)
    return logging.getLogRecordFactory()(
        "doyen", logging.WARNING, line.pathname, line.lineno, text, (), None
    )
