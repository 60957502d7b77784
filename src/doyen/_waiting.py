"""Tasks that outlive their callers: shared waiting, groups of background tasks; events for threads.

Imports the standard library only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["BackgroundTasks", "LoopEvent", "log_failure", "outlast", "retrieve", "shared"]

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
