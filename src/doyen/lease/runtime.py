"""doyen's thread: one event loop on which all store I/O of the process runs, and the watchdog.

Code that blocks the caller's loop cannot delay renewals, because they run on this loop. Public
classes reach it through a `ThreadRuntime`; tests and the lab use `InlineRuntime`, where everything
shares one (virtual-time) loop.

Reporting never blocks the loop: sinks have queues and threads of their own, and so have the
handlers of `logging` (see `doyen.events.telemetry`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from doyen._waiting import LoopCalls, log_failure, outlast, retrieve, shared
from doyen.errors import SessionClosed
from doyen.events import Sink, merge_gap
from doyen.events.telemetry import DeliveryQueue, DirectOutlet, LogRelay, Outlet, WaitAllowance
from doyen.lease.clock import Clock, SystemClock
from doyen.lease.keepalive import Keepalive

__all__ = ["InlineRuntime", "Outcome", "Runtime", "ThreadRuntime", "Watchdog"]

T = TypeVar("T")
log = logging.getLogger("doyen")

CLOSED = "the session is closed; connect again"
ADMITTED = 64
"""How many calls of other threads are made in one turn of doyen's loop. Renewals do not wait behind
a large number of them."""
GIVE_WAY_S, GIVE_WAY_EVERY_S = 0.0001, 0.01
"""How long doyen's loop leaves the interpreter to the thread of a new leader, and how often at
most. It is too short to matter to a renewal."""
SLICE_S = 0.1
"""How long after the end of a suspend a passed deadline may go unnoticed."""


class Watchdog:
    """A thread that declares leases lost at their deadline.

    It does no I/O and waits for no other thread, so terms end in time even if everything else in
    the process is stuck. It decides by the boot-time clock. Thread waits use the monotonic clock,
    which halts while the machine is suspended, so it waits in short slices. All methods may be
    called from any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watched: set[Keepalive] = set()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="doyen-watchdog", daemon=True)
        self._thread.start()

    def watch(self, keepalive: Keepalive) -> None:
        """Declare the lease lost when its deadline passes."""
        with self._changed:
            self._watched.add(keepalive)
            self._changed.notify()

    def unwatch(self, keepalive: Keepalive) -> None:
        with self._changed:
            self._watched.discard(keepalive)

    def stop(self) -> None:
        """End the thread, and wait for its end unless called on it."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                if not self._watched:
                    self._changed.wait()
                    continue
                wait = min(each.valid_until for each in self._watched) - self._clock.now()
                if wait > 0:
                    self._changed.wait(min(wait, SLICE_S))
                    continue
                due = [each for each in self._watched if each.valid_until <= self._clock.now()]
                self._watched.difference_update(due)
            for keepalive in due:
                if not keepalive.lose_if_expired():
                    self.watch(keepalive)


class InlineRuntime:
    """What `ThreadRuntime` does, on the caller's loop: for virtual time. One seed gives one run."""

    is_process = False
    """Whether sessions end with this process, and descriptors can be waited for. In a simulation
    one process has the sessions of many simulated ones."""

    def __init__(self, clock: Clock, seed: int = 0) -> None:
        self.clock = clock
        self.random = random.Random(seed)
        self.pid = os.getpid()
        self.audit_wait = WaitAllowance(clock)
        self._loop = asyncio.get_running_loop()
        self._timers: dict[Keepalive, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def do(
        self,
        work: Coroutine[Any, Any, T],
        undo: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        return await self._task(work)

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        return await shared(self._task(work))

    async def obtain(
        self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]]
    ) -> T:
        task = self._task(work)
        return await _obtained(task, task.cancel, lambda result: self._task(undo(result)))

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        self._task(work).add_done_callback(log_failure)

    def post(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)

    def watch(self, keepalive: Keepalive) -> None:
        if keepalive.lose_if_expired() or keepalive.lost_because is not None:
            self.unwatch(keepalive)
            return
        wait = min(SLICE_S, max(0.0, keepalive.valid_until - self.clock.now()))
        self._timers[keepalive] = self._loop.call_later(wait, self.watch, keepalive)

    def after_reply(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)

    def unwatch(self, keepalive: Keepalive) -> None:
        timer = self._timers.pop(keepalive, None)
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


class _Work:
    """A coroutine on its way to doyen's loop."""

    task: asyncio.Task[Any] | None = None
    cancelled = False

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], failed: Callable[[BaseException], None]
    ) -> None:
        """`failed` is called if the coroutine does not end normally, perhaps on another thread, and
        perhaps twice."""
        self.coroutine = coroutine
        self.failed = failed

    def __call__(self) -> None:
        """Begin. On doyen's loop."""
        self.task = asyncio.get_running_loop().create_task(self.coroutine)
        self.task.add_done_callback(self._done)
        if self.cancelled:
            self.task.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():  # by its caller, or at the end of the loop
            self.failed(CancelledError() if self.cancelled else SessionClosed(CLOSED))
        elif (error := task.exception()) is not None:
            self.failed(error)

    def refuse(self) -> None:
        """doyen's loop has been closed before the work was begun. Any thread."""
        self.coroutine.close()
        self.failed(SessionClosed(CLOSED))

    def cancel(self) -> None:
        """On doyen's loop."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


async def _replied(
    work: Coroutine[Any, Any, T], reply: Callable[[T], None], then: Callable[[], None]
) -> None:
    """Run `work`, and reply with its result before anything else is done on this loop, because
    other work would compete with the caller's thread for the interpreter. Call `then` in the same
    step, because other work may hang."""
    reply(await work)
    then()


def _fulfil_once(result: asyncio.Future[T], value: T) -> None:
    if not result.done():
        result.set_result(value)


def _reply_failure(
    caller: LoopCalls,
    result: asyncio.Future[T],
    work: Coroutine[Any, Any, T],
    error: BaseException,
) -> None:
    """Hand the error of `work` to the caller's loop."""
    work.close()  # the task may have been cancelled before it began
    with suppress(RuntimeError):  # the caller's loop has been closed
        caller.put(partial(_fail_once, result, error))


def _fail_once(result: asyncio.Future[T], error: BaseException) -> None:
    if result.done():
        return
    if isinstance(error, CancelledError):
        result.cancel()
    else:
        result.set_exception(error)


def _log_error(work: Coroutine[Any, Any, Any], error: BaseException) -> None:
    """`log_failure`, for work without a caller."""
    work.close()
    if not isinstance(error, CancelledError | SessionClosed):
        log.error("event=background_task_failed", exc_info=error)


class Outcome(Generic[T]):
    """The result or error of work on doyen's loop, for threads that wait for it.

    doyen's loop takes no lock here that a waiting thread may hold, unlike in a `Future` of
    `concurrent.futures`: the handler of a signal may interrupt that thread anywhere, to wait or to
    raise, and the loop would wait as long, or for ever.
    """

    def __init__(
        self, cancel: Callable[[], None], on_done: Callable[[], None] = lambda: None
    ) -> None:
        """`cancel` cancels the work; `on_done` is called when there is an outcome, on any thread,
        perhaps twice."""
        self._cancel = cancel
        self._on_done = on_done
        self._reached: deque[tuple[Any, BaseException | None]] = deque()
        """The first one counts."""
        self._waiting: deque[threading.Lock] = deque()
        """Each is released to wake a thread."""

    def reach(self, result: Any, error: BaseException | None) -> None:
        """Any thread. Does nothing if there is an outcome already."""
        self._reached.append((result, error))
        # They stay in the list. The exception of a signal handler may end this before a thread is
        # woken; the end of the work wakes it then.
        for woken in list(self._waiting):
            with suppress(RuntimeError):  # it has been released
                woken.release()
        self._on_done()

    @property
    def done(self) -> bool:
        return bool(self._reached)

    def cancel(self) -> None:
        """Cancel the work, and do not wait for its end. Any thread."""
        if not self._reached:
            self._cancel()  # first, because the end of the work also wakes those that wait
            self.reach(None, CancelledError())

    def wait(self, within_s: float = -1) -> tuple[T, BaseException | None]:
        """Block until there is an outcome; raises `TimeoutError` after `within_s`."""
        woken = threading.Lock()
        woken.acquire()
        self._waiting.append(woken)
        if not self._reached and not woken.acquire(timeout=within_s):
            raise TimeoutError
        return self._reached[0]

    def result(self, within_s: float = -1) -> T:
        """Block for the result; raises the error, and `CancelledError` if the work was cancelled.
        Any thread, also several."""
        result, error = self.wait(within_s)
        if error is not None:
            raise error
        return result


def _reach_failure(outcome: Outcome[T], work: Coroutine[Any, Any, T], error: BaseException) -> None:
    work.close()
    outcome.reach(None, error)


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised to the waiter
        future.set_exception(error)


def _undo(undo: Callable[[T], None], future: Future[T]) -> None:
    if future.exception() is None:
        undo(future.result())


async def _obtained(
    future: asyncio.Future[T],
    cancel: Callable[[], object],
    undo: Callable[[T], asyncio.Future[None]],
) -> T:
    """Implements `Runtime.obtain` for a future."""
    try:
        await asyncio.wait({future})
    except asyncio.CancelledError:
        cancel()
        await outlast(future)
        if not future.cancelled() and future.exception() is None:
            await outlast(undo(future.result()))
        raise
    return future.result()


class _Users:
    """How many use a runtime. `changed` has what follows it: its first element counts, because to
    append to a list is atomic."""

    __slots__ = ("changed", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.changed: list[_Users] = []


class ThreadRuntime:
    """The process's doyen thread and watchdog, shared by all its sessions.

    Both are daemon threads: a process that exits without closing its sessions is not delayed. The
    loop runs until the last user has released it.

    Users are counted without a lock. The handler of a signal may interrupt the thread that has the
    lock, and close a session, or wait for a thread that does.
    """

    is_process = True
    _shared: ClassVar[list[ThreadRuntime]] = []
    """The first one is the process's, as long as it has users. Another thread that has started one
    at the same time ends its own."""

    def __init__(self) -> None:
        self.clock: Clock = SystemClock()
        self.random = random.Random()
        self.pid = os.getpid()
        self.audit_wait = WaitAllowance(self.clock)
        self._users = _Users(1)
        self._loop = asyncio.new_event_loop()
        self._calls = LoopCalls(self._loop, ADMITTED)
        self._callers = threading.local()
        """The loop of each thread, and the calls that it is to make."""
        self._log = LogRelay()
        self._after_reply: deque[Callable[[], None]] = deque()
        self._gave_way_at = 0.0
        self._watchdog = Watchdog(self.clock)
        self.watch = self._watchdog.watch
        self.unwatch = self._watchdog.unwatch
        self._thread = threading.Thread(target=self._run, name="doyen", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> ThreadRuntime:
        """The process's runtime, started if it does not run. Pair with `release`."""
        while True:
            for runtime in cls._shared[:1]:
                if runtime._change_users(1):
                    return runtime
                runtime._forget()  # its last user is about to
            mine = cls()
            cls._shared.append(mine)
            if cls._shared[0] is mine:
                return mine
            mine.release()

    def retain(self) -> None:
        """Raises `SessionClosed` if the last user has released it."""
        if not self._change_users(1):
            raise SessionClosed(CLOSED)

    def _change_users(self, by: int) -> int | None:
        """The number of users after this change; None if there were none, which is for ever. Any
        thread; a change that another overtakes is tried again."""
        while True:
            users = self._users
            if users.changed:
                self._users = users.changed[0]
            elif not users.number:
                return None
            else:
                changed = _Users(users.number + by)
                users.changed.append(changed)
                if users.changed[0] is changed:
                    return changed.number

    def _forget(self) -> None:
        with suppress(ValueError):  # another thread has
            self._shared.remove(self)

    def release(self) -> None:
        """Ends the threads if this was the last user."""
        if self._change_users(-1) != 0:
            return
        self._forget()
        self._watchdog.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._loop.close()
        # Calls that other threads have put meanwhile. From now on `put` refuses them.
        for call in self._calls.taken():
            if isinstance(call, _Work):
                call.refuse()
        self._log.close()

    def outlet(
        self, sink: Sink, name: str = "doyen-sink", finish: Callable[[], None] = lambda: None
    ) -> Outlet:
        """Deliver events to a sink without blocking doyen's loop. `finish` is called once the
        outlet has been closed and everything is delivered."""
        return DeliveryQueue(DirectOutlet(sink).put, merge=merge_gap, name=name, finish=finish)

    async def aside(self, call: Callable[[], T], undo: Callable[[T], None]) -> T:
        """Make a call that may block, on another thread. If the caller is cancelled meanwhile,
        `undo` is called with the result."""
        # Not in an executor: the interpreter's exit would wait for a call that hangs.
        called: Future[T] = Future()
        threading.Thread(
            target=_fulfil, args=(called, call), name="doyen-aside", daemon=True
        ).start()
        arriving = asyncio.wrap_future(called)
        try:
            await asyncio.wait({arriving})
        except asyncio.CancelledError:
            arriving.add_done_callback(retrieve)
            called.add_done_callback(partial(_undo, undo))
            raise
        return arriving.result()

    def flush_log(self, within_s: float) -> None:
        """Block until the handlers of `logging` have all lines, or the time has passed."""
        self._log.flush(within_s)

    @classmethod
    def forked(cls) -> None:
        """In the child of a fork: its threads do not exist there."""
        cls._shared.clear()

    async def do(
        self,
        work: Coroutine[Any, Any, T],
        undo: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        """Run `work` on doyen's loop; cancelling the caller cancels it. If the caller's loop has
        been closed before there is a result, which then needs another owner, `undo` is run on
        it."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        submitted = self._submit_for(result, work, undo)
        try:
            return await result
        except (asyncio.CancelledError, GeneratorExit):  # the task may be garbage-collected
            self.post(submitted.cancel)
            raise

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on doyen's loop to its end, whatever happens to the caller."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._submit_for(result, work)
        return await result

    async def obtain(
        self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]]
    ) -> T:
        """Run `work`, whose result needs an owner. A caller that is cancelled cancels the work and
        waits for its end; if there is a result nevertheless, or the caller's loop has been closed,
        `undo` is run on it."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        submitted = self._submit_for(result, work, undo)
        return await _obtained(
            result,
            lambda: self.post(submitted.cancel),
            lambda obtained: asyncio.ensure_future(self.finish(undo(obtained))),
        )

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` on doyen's loop and do not wait for it. Any thread."""
        self._submit(work, partial(_log_error, work))

    def submit(
        self, work: Coroutine[Any, Any, T], on_done: Callable[[], None] = lambda: None
    ) -> Outcome[T]:
        """Run `work` on doyen's loop. The outcome may be used on any thread."""
        outcome: Outcome[T] = Outcome(lambda: self.post(submitted.cancel), on_done)
        submitted = self._submit_blocking(outcome, work)
        return outcome

    def after_reply(self, call: Callable[[], None]) -> None:
        """Make a call once the caller has the result of the work that is under way, in the same
        step of the loop; in the next turn at the latest. On the loop."""
        self._after_reply.append(call)
        self._loop.call_soon(self._call_after_reply)

    def _go_on(self) -> None:
        """A result was handed to the caller's thread. The calls that are left wake other threads,
        so pause first to let the caller's thread run."""
        if self._after_reply and self.clock.now() - self._gave_way_at >= GIVE_WAY_EVERY_S:
            time.sleep(GIVE_WAY_S)
            self._gave_way_at = self.clock.now()
        self._call_after_reply()

    def _call_after_reply(self) -> None:
        while self._after_reply:
            self._after_reply.popleft()()

    def _submit_for(
        self,
        result: asyncio.Future[T],
        work: Coroutine[Any, Any, T],
        undo: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    ) -> _Work:
        caller = self._caller()
        replied = _replied(work, partial(self._reply, caller, result, undo), self._go_on)
        return self._submit(replied, partial(_reply_failure, caller, result, work))

    def _reply(
        self,
        caller: LoopCalls,
        result: asyncio.Future[T],
        undo: Callable[[T], Coroutine[Any, Any, None]] | None,
        value: T,
    ) -> None:
        """Hand the result of a task to the caller's loop."""
        try:
            caller.put(partial(_fulfil_once, result, value))
        except RuntimeError:  # the caller's loop has been closed
            if undo is not None:
                self.start(undo(value))

    def _submit_blocking(self, outcome: Outcome[T], work: Coroutine[Any, Any, T]) -> _Work:
        replied = _replied(work, lambda result: outcome.reach(result, None), self._go_on)
        return self._submit(replied, partial(_reach_failure, outcome, work))

    def _submit(
        self, work: Coroutine[Any, Any, Any], failed: Callable[[BaseException], None]
    ) -> _Work:
        submitted = _Work(work, failed)
        try:
            self._calls.put(submitted)
        except RuntimeError:
            if not self._loop.is_closed():
                raise  # of the handler of a signal
            submitted.refuse()
        return submitted

    def _caller(self) -> LoopCalls:
        """The calls to the running loop."""
        loop, calls = asyncio.get_running_loop(), getattr(self._callers, "calls", None)
        if calls is None or calls.loop is not loop:
            calls = self._callers.calls = LoopCalls(loop)
        return calls

    def do_blocking(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on doyen's loop and block for its result. An interrupt cancels it."""
        outcome = self.submit(work)
        try:
            return outcome.result()
        except BaseException:
            outcome.cancel()
            raise

    def obtain_blocking(
        self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]]
    ) -> T:
        """As `obtain`. A second interrupt ends the wait."""
        outcome: Outcome[T] = Outcome(lambda: None)
        submitted = self._submit_blocking(outcome, work)
        try:
            return outcome.result()
        except BaseException:
            self.post(submitted.cancel)
            obtained, error = outcome.wait()
            if error is None:
                self.finish_blocking(undo(obtained))
            raise

    def finish_blocking(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on doyen's loop to its end. An interrupt ends only the wait."""
        return self.submit(work).result()

    def post(self, call: Callable[[], None]) -> None:
        """Call on doyen's loop soon. Any thread; does nothing once the loop is closed."""
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            self._calls.put(call)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # Work that began in the last turns would have no turn in which to end.
        self._calls.stop()
        leftover = asyncio.all_tasks(self._loop)
        for task in leftover:
            task.cancel()
        # In any case a few turns, for the callbacks of tasks that have ended.
        turns = self._loop.create_task(asyncio.sleep(0))
        self._loop.run_until_complete(asyncio.wait({*leftover, turns}))


Runtime = InlineRuntime | ThreadRuntime
"""Where doyen's own coroutines run."""
