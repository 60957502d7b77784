"""Tasks that outlive their callers: shared waiting, groups of background tasks; admission of few at
a time; events and calls between threads.

Imports the standard library only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

__all__ = [
    "Admission",
    "BackgroundTasks",
    "LoopCalls",
    "LoopEvent",
    "log_failure",
    "outlast",
    "retrieve",
    "shared",
]

T = TypeVar("T")
log = logging.getLogger("doyen")


async def shared(future: asyncio.Future[T]) -> T:
    """Wait for a future that others may wait for too. Cancelling the waiter does not cancel it.

    `asyncio.shield` does the same, but from Python 3.14 on it reports to the loop's exception
    handler every failure that comes after the waiter was cancelled. A caller that has given up,
    for example because its timeout expired, has no use for the outcome, so nothing is reported
    here.
    """
    if not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            future.add_done_callback(retrieve)
            raise
    return future.result()


async def outlast(future: asyncio.Future[Any]) -> None:
    """Wait until the future is done, even if the waiter is cancelled meanwhile."""
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            continue


class LoopEvent(asyncio.Event):
    """An event of the running loop that any thread may set."""

    def __init__(self) -> None:
        super().__init__()
        self._home = asyncio.get_running_loop()

    def set_soon(self) -> None:
        """Any thread. Does nothing if the loop has been closed."""
        with suppress(RuntimeError):
            self._home.call_soon_threadsafe(self.set)

    async def set_within(self, seconds: float) -> bool:
        """Wait until it is set; False if that takes longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self.wait()
        return self.is_set()


class Admission:
    """A limited number of places on a loop. Tasks that wait for a place get it in the order of
    their arrival.

    A task that leaves passes its place directly to the next one. `asyncio.Semaphore` searches for
    the next one among the tasks that it has woken and that have not run yet. With thousands of
    waiting tasks this search took a quarter of the total time.
    """

    __slots__ = ("_free", "_waiting")

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: deque[asyncio.Future[None]] = deque()

    def full(self) -> bool:
        return not self._free

    def enter_now(self) -> bool:
        """Take a place; False if there is none."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def enter(self) -> None:
        """Wait for a place, and take it."""
        if self.enter_now():
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except BaseException:
            if not place.cancel() and not place.cancelled():
                self.leave()  # it was given the place, and then cancelled
            raise

    def leave(self) -> None:
        """Give the place to the next."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._free += 1

    async def __aenter__(self) -> None:
        await self.enter()

    async def __aexit__(self, *_: object) -> None:
        self.leave()


class LoopCalls:
    """Calls that any thread has a loop make, in the order in which they were put.

    Only the first of several waiting calls wakes the loop. A wake-up is a system call, and after it
    the woken thread competes for the interpreter. With one wake-up for each call, the threads would
    take turns at every call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, at_once: int | None = None) -> None:
        """`at_once`: how many calls are made in one turn of the loop; by default all that wait."""
        self.loop = loop
        self._at_once = at_once
        self._waiting: deque[Callable[[], object]] = deque()
        self._stopped = False
        self._made = 0
        """How often the loop has made calls."""
        self._woken_for = -1
        """If it equals `_made`, the loop will make calls again."""

    def put(self, call: Callable[[], object]) -> None:
        """Raises RuntimeError if the loop has been closed."""
        # No lock: the handler of a signal may interrupt this call anywhere, with another call, by
        # waiting for that, or by an exception. So the wake-up is noted after it has happened. Two
        # threads may both wake the loop, which does no harm.
        self._waiting.append(call)
        made = self._made
        if self._woken_for != made or self.loop.is_closed():
            try:
                self.loop.call_soon_threadsafe(self._make)
            except RuntimeError:
                with suppress(ValueError, IndexError):  # taken already, or being taken
                    self._waiting.remove(call)
                raise
            self._woken_for = made

    def stop(self) -> None:
        """Make no more calls. On the loop, which is about to be closed."""
        self._stopped = True

    def taken(self) -> Iterator[Callable[[], object]]:
        """Remove the calls that wait. For a loop that has been closed: it makes none of them, and
        every later `put` is refused."""
        with suppress(IndexError):
            while True:
                yield self._waiting.popleft()

    def _make(self) -> None:
        try:
            self._made += 1
            for _ in range(0 if self._stopped else self._at_once or len(self._waiting)):
                if not self._waiting:
                    return
                try:
                    self._waiting.popleft()()
                except Exception as error:  # noqa: BLE001 (reported as asyncio reports it)
                    context = {"message": "a call failed", "exception": error}
                    self.loop.call_exception_handler(context)
        finally:  # a call, or the handler of a signal, may raise SystemExit
            if self._waiting and self._woken_for != self._made and not self._stopped:
                self._woken_for = self._made
                self.loop.call_soon(self._make)


class BackgroundTasks:
    """Tasks without a caller. A failure is logged; `cancel` ends all that still run."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        # A dict keeps the order of creation, a set would not: one seed must give one run.
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        log_failure(task)

    async def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def log_failure(task: asyncio.Task[Any]) -> None:
    """Log the exception of a task that has no caller to raise it to."""
    if not task.cancelled() and task.exception() is not None:
        log.error("event=background_task_failed", exc_info=task.exception())


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception of a future as retrieved, or asyncio would log that it never was."""
    if future.done() and not future.cancelled():
        future.exception()
