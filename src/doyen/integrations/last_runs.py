"""When each task of a schedule ran last, for the next leader.

A schedule that is kept in the memory of a process does not know what other processes have run. So
the leader writes the times to the store, as a configuration, and its successor goes on from there.
A write names the version that this process knows, so that a leader that was frozen cannot undo what
a later one has written.
"""

from __future__ import annotations

import logging

import doyen.manage.config_session  # noqa: F401 - loaded now, and not when a successor takes over
from doyen.blocking import BlockingSession
from doyen.errors import BadDocument, Conflict, DoyenError
from doyen.events.log_lines import log_line

__all__ = ["LastRuns"]

log = logging.getLogger("doyen")


class LastRuns:
    """The last runs of the tasks of one schedule, as one leader reads and writes them."""

    def __init__(self, session: BlockingSession, schedule: str) -> None:
        """Read them. Raises `StoreUnavailable` and the like."""
        self._schedule = schedule
        self._config = session.config(schedule, history=1)
        document = self._config.get()
        self._version = 0 if document is None else document.version
        value = {} if document is None else document.value
        if not isinstance(value, dict):
            raise BadDocument(f"configuration {schedule!r} is not about the runs of a schedule")
        self.times: dict[str, float] = {name: float(at) for name, at in value.items()}
        """In seconds since 1970."""

    def note(self, times: dict[str, float]) -> None:
        """Tasks have run. A store that does not answer is logged; the next call makes up for it."""
        self.times |= times
        try:
            self._version = self._config.set(self.times, if_version=self._version).version
        except Conflict:
            pass  # another leads by now
        except DoyenError as error:
            line = log_line(
                event="runs_not_recorded",
                schedule=self._schedule,
                error=error,
                effect="a successor may run these tasks again",
                tasks=",".join(sorted(times)),
            )
            log.warning("%s", line)
