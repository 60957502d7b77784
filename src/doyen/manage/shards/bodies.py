"""Runs the bodies of shards where users want them: as tasks on their loop, or on threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from doyen.lease.runtime import Runtime
from doyen.manage.shards.slots import ShardTerm

__all__ = ["LoopBodies", "Prepare", "ShardBody", "ThreadBodies"]

ShardBody = Callable[[ShardTerm], Any]
"""Called for each shard that is owned. A coroutine function, or with a blocking session an ordinary
function."""
Prepare = Callable[[int], Any]
"""Called with the number of a shard before the shard is moved here; a function as for
`ShardBody`."""
Ended = Callable[[BaseException | None], None]


class LoopBodies:
    """Runs each body as a task on the loop on which this is made. The end of its term cancels
    it."""

    def __init__(self, runtime: Runtime, body: ShardBody, prepare: Prepare | None) -> None:
        self._runtime = runtime
        self._body = body
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, term: ShardTerm, ended: Ended) -> None:
        if not self._soon(self._begin, partial(self._body, term), ended, term):
            ended(None)

    def prepare(self, shard: int, done: Ended) -> None:
        if self._prepare is None:
            done(None)
        elif not self._soon(self._begin, partial(self._prepare, shard), done, None):
            done(RuntimeError("the event loop is closed"))

    def _soon(self, call: Callable[..., object], *args: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            return False  # the loop has been closed, and nothing runs on it any more
        return True

    def _begin(
        self, make: Callable[[], Awaitable[object]], ended: Ended, term: ShardTerm | None
    ) -> None:
        task = self._loop.create_task(_run(make))
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, ended))
        if term is not None:
            term.on_end(lambda: self._cancel(task))

    def _cancel(self, task: asyncio.Task[object]) -> None:
        self._soon(task.cancel)

    def _done(self, ended: Ended, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        self._runtime.post(partial(ended, error))


async def _run(make: Callable[[], Awaitable[object]]) -> object:
    return await make()


class ThreadBodies:
    """Runs each body on a thread of its own. It has to end when `term.valid` turns false."""

    def __init__(
        self,
        runtime: Runtime,
        body: ShardBody,
        prepare: Prepare | None,
    ) -> None:
        self._runtime = runtime
        self._body = body
        self._prepare = prepare

    def start(self, term: ShardTerm, ended: Ended) -> None:
        self._begin(partial(self._body, term), ended, f"{term.shards}/{term.shard}")

    def prepare(self, shard: int, done: Ended) -> None:
        if self._prepare is None:
            done(None)
        else:
            self._begin(partial(self._prepare, shard), done, f"prepare {shard}")

    def _begin(self, call: Callable[[], object], ended: Ended, name: str) -> None:
        thread = threading.Thread(target=self._run, args=(call, ended), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many threads
            self._runtime.post(partial(ended, error))

    def _run(self, call: Callable[[], object], ended: Ended) -> None:
        error: BaseException | None = None
        try:
            call()
        except BaseException as raised:  # noqa: BLE001 - reported by the owner
            error = raised
        with contextlib.suppress(RuntimeError):
            self._runtime.post(partial(ended, error))
