"""Health checks of a member: the user's function, called one at a time and with a time limit."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, cast

from doyen._waiting import retrieve
from doyen.election.core import SessionCore

__all__ = ["HealthCheck", "Inspection"]

HealthCheck = Callable[[], object]
"""Returns False or raises if the process is unhealthy. May be a coroutine function."""


class Inspection:
    """Runs the health check of a member, one at a time and each with a time limit."""

    def __init__(self, core: SessionCore, check: HealthCheck, limit_s: float) -> None:
        self._core = core
        self._check = check
        self._limit_s = limit_s
        self._caller: asyncio.AbstractEventLoop | None = None
        if inspect.iscoroutinefunction(self._check):
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
        except Exception as error:  # noqa: BLE001 - whatever a check raises makes it unhealthy
            return str(error) or type(error).__name__
        except asyncio.CancelledError:
            return "the health check was cancelled"
        return "the health check returned False" if healthy is False else ""

    async def _run(self) -> object:
        if self._caller is None:
            return await self._core.runtime.aside(self._check, lambda _: None)
        checking = cast("Callable[[], Any]", self._check)()
        try:
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(checking, self._caller)
            )
        except RuntimeError:
            checking.close()  # the caller's loop has been closed
            raise
