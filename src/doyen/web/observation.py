"""The observation of one store from opening it to the end: a session, its hub and its panels.

A store that does not answer at first is tried again; meanwhile the board says so.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

from doyen.election.options import SessionSettings
from doyen.errors import OrderFailed, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.events import Record
from doyen.lease.clock import SystemClock
from doyen.lease.runtime import InlineRuntime
from doyen.session import Session
from doyen.web.actions import ProcessControls
from doyen.web.board import Board
from doyen.web.hub import SILENT_S, Hub
from doyen.web.panels import panels_of
from doyen.web.terms import clipped
from doyen.web.trail import AuditTrail

__all__ = ["StoreObservation", "only_error"]

AGAIN_S = 1.0
"""The pause before a store that could not be opened is tried again."""
PROCESSES_S = 0.2
"""How often the processes of `doyen up` are looked at."""


def only_error(error: BaseException) -> BaseException:
    """The one error of a group of tasks."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class StoreObservation:
    """What the server needs to know of a store."""

    def __init__(
        self,
        url: str,
        *,
        shown_url: str = "",
        audit: Sequence[Path] = (),
        controls: ProcessControls | None = None,
    ) -> None:
        self.url = url
        self.shown_url = shown_url or url
        self.controls = controls
        self.session: Session | None = None
        self.hub: Hub | None = None
        self._clock = SystemClock()
        self.board = Board(self._clock.wall)
        self._opened = False
        self.tried = asyncio.Event()
        """The store was opened, or does not answer."""
        self._audit = audit

    async def run(self) -> None:
        """Observe until cancelled. Raises `ConfigError` or `StoreUnusable` at once."""
        began = self._clock.wall()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tell_silence(began))
            if self.controls is not None:
                tasks.create_task(self._watch_processes(self.controls))
            while True:
                try:
                    await self._observe()
                except (StoreUnavailable, OutcomeUnknown) as error:
                    self.tried.set()
                    self._tell_unreachable(began, str(error))
                except (StoreUnusable, BaseExceptionGroup) as error:
                    why = only_error(error)
                    if not self._opened or not isinstance(why, StoreUnusable):
                        raise
                    self._tell_unreachable(began, str(why))  # as a file that was replaced
                await asyncio.sleep(AGAIN_S)

    async def _tell_silence(self, began: float) -> None:
        """Say so if the store takes long to answer at first: an attempt may last for seconds."""
        await asyncio.sleep(SILENT_S)
        if not self.tried.is_set():
            self._tell_unreachable(began, "it has not answered yet")

    def _tell_unreachable(self, since: float, error: str) -> None:
        as_of = self.board.topics.get("health", {}).get("as_of")
        self.board.set(
            "health",
            {
                "reachable": False,
                "as_of": as_of,
                "since": since if as_of is None else as_of,
                "error": clipped(error),
            },
        )

    async def _observe(self) -> None:
        def sink(record: Record) -> None:
            if self.hub is not None:
                self.hub.on_event(record)

        runtime = InlineRuntime(self._clock, secrets.randbits(64))
        session = Session(SessionSettings(self.url, sinks=(sink,), create=False), runtime)
        async with session:
            hub = Hub(session._opened, self.board)
            self.session, self.hub = session, hub
            self.tried.set()
            self._opened = True
            self.board.forget_rows()  # of a store that was there before
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(hub.run())
                    for panel in panels_of(hub):
                        tasks.create_task(panel.run())
                    if self._audit:
                        trail = AuditTrail(
                            self._audit, self.board, readable=hub.part_read, failed=hub.part_failed
                        )
                        tasks.create_task(trail.run())
            finally:
                self.session = self.hub = None
                hub.close()

    async def _watch_processes(self, controls: ProcessControls) -> None:
        while True:
            self.board.set("processes", controls.processes())
            if self.hub is not None and controls.silent_s() < SILENT_S:
                self.hub.part_read("processes")
            elif self.hub is not None:
                self.hub.part_failed("processes", OrderFailed("`doyen up` does not respond"))
            await asyncio.sleep(PROCESSES_S)
