"""doyen's own thread, and the watchdog that trips at the deadline.

All store I/O runs on one event loop in one thread per process, so that code which blocks the
caller's loop cannot starve renewals. Public classes reach it through a `Runtime`; tests and the
lab use `InlineRuntime`, where everything shares one (virtual-time) loop.

The watchdog is a second thread that does no I/O at all. It decides by the boot-time clock, and
since thread waits use the monotonic clock, which halts while the machine is suspended, it waits in
short slices.

Nothing that reports blocks either of them. Sinks have queues and threads of their own (see
`doyen.telemetry`), and while the threads run, a third one hands doyen's log lines to the handlers
of `logging`, which may write to a full pipe or a slow disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from doyen._waiting import shared
from doyen.events import Sink, merge_gap
from doyen.lease.clock import Clock, SystemClock
from doyen.lease.keepalive import Heart
from doyen.telemetry import FLUSH_S, DeliveryQueue, DirectOutlet, Outlet, WaitAllowance

__all__ = ["InlineRuntime", "LogRelay", "Runtime", "ThreadRuntime", "outlast"]

T = TypeVar("T")
log = logging.getLogger("doyen")

ADMITTED = 64
"""How many new pieces of work begin in one turn of doyen's loop."""
SLICE_S = 0.1
"""How long after waking from suspend a deadline may go unnoticed by the watchdog."""
LOGGERS = (
    *("doyen", "doyen.audit", "doyen.consul", "doyen.nats", "doyen.quorum.node", "doyen.zookeeper"),
)
"""The loggers of what runs on doyen's threads. A filter of a logger does not see the lines of its
children, so each is named; `tests/test_house.py` compares."""


class Runtime(Protocol):
    """Where doyen's own coroutines run."""

    clock: Clock
    random: random.Random
    pid: int
    audit_wait: WaitAllowance

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on doyen's loop; cancelling the caller cancels it."""
        ...

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on doyen's loop to its end, whatever happens to the caller."""
        ...

    async def obtain(
        self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]]
    ) -> T:
        """Run `work`, whose result must be given back. A caller that is cancelled cancels it and
        waits for its end; if there is a result all the same, it is undone."""
        ...

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` on doyen's loop and do not wait for it. Any thread."""
        ...

    def post(self, call: Callable[[], None]) -> None:
        """Call on doyen's loop soon. Any thread; a loop that is gone is passed over."""
        ...

    def watch(self, heart: Heart) -> None:
        """Trip the heart when its deadline passes."""
        ...

    def unwatch(self, heart: Heart) -> None: ...

    def outlet(
        self, sink: Sink, name: str = "doyen-sink", finish: Callable[[], None] = lambda: None
    ) -> Outlet:
        """The way to a sink, which must not block doyen's loop. `finish` is called when the outlet
        has been closed and everything delivered."""
        ...

    async def aside(self, call: Callable[[], T], undo: Callable[[T], None]) -> T:
        """Make a call that may block, elsewhere than on doyen's loop. If the caller is cancelled
        meanwhile, what it returns in the end is undone."""
        ...

    def flush_log(self, within_s: float) -> None:
        """Block until the handlers of `logging` have what was logged, or the time is over."""
        ...

    def retain(self) -> None:
        """One user more: doyen's loop runs until the last has released it."""
        ...

    def release(self) -> None:
        """One user less."""
        ...


class InlineRuntime:
    """Everything on the caller's loop: for virtual time. One seed gives one run."""

    def __init__(self, clock: Clock, seed: int = 0) -> None:
        self.clock = clock
        self.random = random.Random(seed)
        self.pid = os.getpid()
        self.audit_wait = WaitAllowance(clock)
        self._loop = asyncio.get_running_loop()
        self._timers: dict[Heart, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._task(work)

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        return await shared(self._task(work))

    async def obtain(
        self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]]
    ) -> T:
        task = self._task(work)
        return await _obtained(task, task.cancel, lambda result: self._task(undo(result)))

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        self._task(work).add_done_callback(_report)

    def post(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)

    def watch(self, heart: Heart) -> None:
        if heart.lose_if_expired() or heart.lost_because is not None:
            self.unwatch(heart)
            return
        wait = min(SLICE_S, max(0.0, heart.valid_until - self.clock.now()))
        self._timers[heart] = self._loop.call_later(wait, self.watch, heart)

    def unwatch(self, heart: Heart) -> None:
        timer = self._timers.pop(heart, None)
        if timer is not None:
            timer.cancel()

    def outlet(
        self, sink: Sink, name: str = "doyen-sink", finish: Callable[[], None] = lambda: None
    ) -> Outlet:
        return DirectOutlet(sink, finish)

    async def aside(self, call: Callable[[], T], undo: Callable[[T], None]) -> T:
        return call()

    def flush_log(self, within_s: float) -> None:
        pass

    def retain(self) -> None:
        pass

    def release(self) -> None:
        pass  # the loop is the caller's


Tell = Callable[[asyncio.Task[Any]], None]
"""Called on doyen's loop with the task of some work, once it is done."""


class _Work:
    """A coroutine on its way to doyen's loop."""

    __slots__ = ("_cancelled", "_coroutine", "_task", "_tell")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], tell: Tell) -> None:
        self._coroutine = coroutine
        self._tell = tell
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._coroutine)
        self._task.add_done_callback(self._tell)
        if self._cancelled:
            self._task.cancel()

    def cancel(self) -> None:
        """On doyen's loop."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()


class _Answer(Generic[T]):
    """The outcome of work, on its way back to the loop that asked for it."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def tell(self, task: asyncio.Task[T]) -> None:
        _take_note(task)
        try:
            self._loop.call_soon_threadsafe(self._settle, task)
        except RuntimeError:
            pass  # that loop has been closed, and nobody waits there

    def _settle(self, task: asyncio.Task[T]) -> None:
        if self.future.done():
            return
        if task.cancelled():
            self.future.cancel()
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def _settle(future: Future[T], task: asyncio.Task[T]) -> None:
    _take_note(task)
    if task.cancelled():
        future.cancel()
    if future.set_running_or_notify_cancel():
        error = task.exception()
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
        future.set_exception(error)


def _undo(undo: Callable[[T], None], future: Future[T]) -> None:
    if future.exception() is None:
        undo(future.result())


def _report(task: asyncio.Task[Any]) -> None:
    """Of work that nobody waits for, only the log can tell that it failed."""
    if not task.cancelled() and task.exception() is not None:
        log.error("a background task of doyen failed", exc_info=task.exception())


def _take_note(task: asyncio.Future[Any]) -> None:
    """The error is the caller's to see; asyncio need not complain if it no longer waits."""
    if not task.cancelled():
        task.exception()


class LogRelay(logging.Filter):
    """Takes doyen's log lines before any handler sees them, and hands them on from a thread.

    It comes before the filters of the user, so that these see each line once, on that thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines = DeliveryQueue(
            _hand_on, merge=_lines_missing, name="doyen-log", keep_unstarted=False
        )
        for name in LOGGERS:
            logging.getLogger(name).filters.insert(0, self)

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(_handing_on, "now", False) or not self._lines.put(record)

    def flush(self, within_s: float) -> None:
        self._lines.flush(within_s)

    def close(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self)
        self._lines.shut()
        self._lines.join(FLUSH_S)


_handing_on = threading.local()
"""`now` is set on the threads of relays. There may be two: while the last session is being closed,
another may be opened."""


def _hand_on(line: logging.LogRecord) -> None:
    _handing_on.now = True
    try:
        logging.getLogger(line.name).handle(line)
    except Exception:  # noqa: BLE001 - a handler that raises is reported as logging reports others
        logging.Handler().handleError(line)


def _lines_missing(gap: logging.LogRecord | None, line: logging.LogRecord) -> logging.LogRecord:
    before = gap.args[0] if gap is not None and isinstance(gap.args, tuple) else 0
    return logging.getLogRecordFactory()(
        "doyen",
        logging.WARNING,
        line.pathname,
        line.lineno,
        "%d log lines were dropped: the handlers of logging did not keep up",
        (before + 1,) if isinstance(before, int) else (1,),
        None,
    )


async def _obtained(
    future: asyncio.Future[T],
    cancel: Callable[[], object],
    undo: Callable[[T], asyncio.Future[None]],
) -> T:
    """The result of `future`; if the caller is cancelled, what `Runtime.obtain` says."""
    try:
        await asyncio.wait({future})
    except asyncio.CancelledError:
        cancel()
        await outlast(future)
        if not future.cancelled() and future.exception() is None:
            await outlast(undo(future.result()))
        raise
    return future.result()


async def outlast(future: asyncio.Future[Any]) -> None:
    """Wait for the future, whoever cancels us meanwhile."""
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            continue


class ThreadRuntime:
    """The process's doyen thread and watchdog, shared by all its sessions.

    Both are daemons: a process that ends without closing its sessions is not held up, and its end
    is itself the proof that its terms are over.
    """

    _shared: ThreadRuntime | None = None
    _shared_lock = threading.Lock()

    def __init__(self) -> None:
        self.clock: Clock = SystemClock()
        self.random = random.Random()
        self.pid = os.getpid()
        self.audit_wait = WaitAllowance(self.clock)
        self._users = 0
        self._loop = asyncio.new_event_loop()
        self._intake: deque[_Work] = deque()
        self._intake_lock = threading.Lock()
        self._hearts: set[Heart] = set()
        self._changed = threading.Condition()
        self._stopped = False
        self._log = LogRelay()
        self._threads = [
            threading.Thread(target=self._run, name="doyen", daemon=True),
            threading.Thread(target=self._watch, name="doyen-watchdog", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def acquire(cls) -> ThreadRuntime:
        """The process's runtime, started if need be. Pair with `release`."""
        with cls._shared_lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared._users += 1
            return cls._shared

    def retain(self) -> None:
        with self._shared_lock:
            self._users += 1

    def release(self) -> None:
        with self._shared_lock:
            self._users -= 1
            if self._users:
                return
            ThreadRuntime._shared = None
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._loop.close()
        self._log.close()

    def outlet(
        self, sink: Sink, name: str = "doyen-sink", finish: Callable[[], None] = lambda: None
    ) -> Outlet:
        return DeliveryQueue(DirectOutlet(sink).put, merge=merge_gap, name=name, finish=finish)

    async def aside(self, call: Callable[[], T], undo: Callable[[T], None]) -> T:
        # Not in an executor: the end of the process would wait for a call that hangs.
        called: Future[T] = Future()
        threading.Thread(
            target=_fulfil, args=(called, call), name="doyen-aside", daemon=True
        ).start()
        arriving = asyncio.wrap_future(called)
        try:
            await asyncio.wait({arriving})
        except asyncio.CancelledError:
            arriving.add_done_callback(_take_note)
            called.add_done_callback(partial(_undo, undo))
            raise
        return arriving.result()

    def flush_log(self, within_s: float) -> None:
        self._log.flush(within_s)

    @classmethod
    def forked(cls) -> None:
        """In the child: the threads did not come along."""
        cls._shared = None
        cls._shared_lock = threading.Lock()

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        answer = _Answer[T]()
        handed_in = self._hand_in(work, answer.tell)
        try:
            return await answer.future
        except asyncio.CancelledError:
            self.post(handed_in.cancel)
            raise

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        answer = _Answer[T]()
        self._hand_in(work, answer.tell)
        return await answer.future

    async def obtain(
        self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]]
    ) -> T:
        answer = _Answer[T]()
        handed_in = self._hand_in(work, answer.tell)
        return await _obtained(
            answer.future,
            lambda: self.post(handed_in.cancel),
            lambda result: asyncio.ensure_future(self.finish(undo(result))),
        )

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        self._hand_in(work, _report)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on doyen's loop; the future is any thread's."""
        future: Future[T] = Future()
        handed_in = self._hand_in(work, partial(_settle, future))

        def given_up(future: Future[T]) -> None:
            if future.cancelled():
                self.post(handed_in.cancel)

        future.add_done_callback(given_up)
        return future

    def _hand_in(self, work: Coroutine[Any, Any, Any], tell: Tell) -> _Work:
        handed_in = _Work(work, tell)
        with self._intake_lock:
            self._intake.append(handed_in)
            first = len(self._intake) == 1
        if first:
            self._loop.call_soon_threadsafe(self._admit)
        return handed_in

    def _admit(self) -> None:
        """Begin what was handed in, a little in each turn of the loop: however much comes at once,
        renewals need not wait for it."""
        for _ in range(ADMITTED):
            self._intake[0].begin(self._loop)
            with self._intake_lock:
                self._intake.popleft()
                if not self._intake:
                    return
        self._loop.call_soon(self._admit)

    def do_blocking(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on doyen's loop and block for its result; an interrupt cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def obtain_blocking(
        self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]]
    ) -> T:
        """As `obtain`. A second interrupt ends the waiting."""
        future: Future[T] = Future()
        handed_in = self._hand_in(work, partial(_settle, future))
        try:
            return future.result()
        except BaseException:
            self.post(handed_in.cancel)
            wait([future])
            if not future.cancelled() and future.exception() is None:
                self.finish_blocking(undo(future.result()))
            raise

    def finish_blocking(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on doyen's loop to its end; an interrupt ends only the waiting."""
        return self.submit(work).result()

    def post(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # stopped meanwhile: nobody is left to tell

    def watch(self, heart: Heart) -> None:
        with self._changed:
            self._hearts.add(heart)
            self._changed.notify()

    def unwatch(self, heart: Heart) -> None:
        with self._changed:
            self._hearts.discard(heart)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        leftover = asyncio.all_tasks(self._loop)
        for task in leftover:
            task.cancel()
        if leftover:
            self._loop.run_until_complete(asyncio.wait(leftover))

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                if not self._hearts:
                    self._changed.wait()
                    continue
                wait = min(heart.valid_until for heart in self._hearts) - self.clock.now()
                if wait > 0:
                    self._changed.wait(min(wait, SLICE_S))
                    continue
                due = [heart for heart in self._hearts if heart.valid_until <= self.clock.now()]
                self._hearts.difference_update(due)
            for heart in due:
                if not heart.lose_if_expired():
                    self.watch(heart)
