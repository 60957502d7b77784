"""Health checks of a member: the user's function, called one at a time and with a time limit.

Nothing that a check raises is raised on doyen's loop or on the caller's: a `SystemExit` would end
the loop, and with doyen's all sessions of the process.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from doyen._waiting import retrieve
from doyen.election.core import SessionCore
from doyen.errors import describe

__all__ = ["HealthCheck", "Inspection"]

HealthCheck = Callable[[], object]
"""Returns False or raises if the process is unhealthy. May be a coroutine function, or return
another awaitable."""


class _Raised(NamedTuple):
    """Stands in for the result of a check that has raised this."""

    error: BaseException

    def __str__(self) -> str:
        if isinstance(self.error, asyncio.CancelledError):
            return "the health check was cancelled"
        if isinstance(self.error, Exception):
            return describe(self.error, str) or type(self.error).__name__
        return f"the health check raised {describe(self.error)}"


class Inspection:
    """Runs the health check of a member, one at a time and each with a time limit."""

    def __init__(self, core: SessionCore, check: HealthCheck, limit_s: float) -> None:
        self._core = core
        self._check = check
        self._limit_s = limit_s
        self._caller: asyncio.AbstractEventLoop | None = None
        """Awaitables run there. A blocking session has none."""
        with suppress(RuntimeError):
            self._caller = asyncio.get_running_loop()
        self._running: asyncio.Future[object] | None = None

    async def examine(self) -> str:
        """Why the process is unhealthy; empty if it is healthy."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._run())
            self._running.add_done_callback(retrieve)
        await asyncio.wait({self._running}, timeout=self._limit_s)
        if not self._running.done():
            return f"the health check has not returned within {self._limit_s:g} s"
        running, self._running = self._running, None
        try:
            healthy = running.result()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it was not carried out
            healthy = _Raised(error)
        if isinstance(healthy, _Raised):
            return str(healthy)
        return "the health check returned False" if healthy is False else ""

    async def _run(self) -> object:
        if inspect.iscoroutinefunction(self._check):
            result = self._call()
        else:
            result = await self._core.runtime.aside(self._call, lambda _: None)
        if not inspect.isawaitable(result):
            return result
        checking = _awaited(result)
        try:
            if self._caller is None:
                raise RuntimeError(
                    "the health check returned an awaitable, and a blocking session has no loop to"
                    " run it on: use an ordinary function"
                )
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(checking, self._caller)
            )
        except RuntimeError:
            checking.close()  # the caller's loop has been closed
            if inspect.iscoroutine(result):
                result.close()
            raise

    def _call(self) -> object:
        try:
            return self._check()
        except BaseException as error:  # noqa: BLE001 - whatever a check raises makes it unhealthy
            return _Raised(error)


async def _awaited(check: Awaitable[object]) -> object:
    try:
        return await check
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - as in `_call`
        return _Raised(error)
