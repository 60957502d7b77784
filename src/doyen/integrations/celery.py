"""Celery: beats of which only the leader sends tasks.

    app.conf.beat_scheduler = "doyen.integrations.celery:LeaderScheduler"
    app.conf.doyen_store = "postgresql://db/app"

Start `celery beat` on every machine. The rules are those of `doyen.integrations.background`, and:

- Only the leader sends tasks. One that is being sent when the term ends is sent completely, and no
  other candidate is elected before, unless that takes longer than the stop budget.
- Celery's handler of SIGTERM and SIGINT ends the beat wherever it is, so it waits until a task that
  is being sent has been sent and recorded. After the stop budget, or a second signal, that is
  interrupted. Then the term is released, and then Celery shuts down.
- The times of the last runs are kept in the store, so a successor goes on where the leader stopped:
  what was due meanwhile is sent at once, and nothing twice. They are written after a task was sent;
  if the leader is killed in between, its successor sends that task again.

Settings of the application: `doyen_store`, a URL as for `connect`; `doyen_election`, by default
"celery-beat-" and the name of the application; `doyen_options`, a dictionary of options for
`connect`. Needs the extra `celery`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from doyen.blocking import connect_blocking
from doyen.errors import DoyenError
from doyen.events.log_lines import log_line
from doyen.integrations import needing
from doyen.integrations.background import BackgroundLeadership, Fail
from doyen.integrations.last_runs import LastRuns
from doyen.integrations.signals import Uninterrupted
from doyen.term import Term

with needing("celery"):
    from celery.beat import Scheduler

__all__ = ["LeaderScheduler", "LeadingMixin"]

log = logging.getLogger("doyen")
LOOK_S = 1.0
"""How long a beat that does not lead waits at a time, so that it can be stopped."""


class LeadingMixin:
    """Makes a scheduler of Celery send tasks only while it leads.

    class LeaderDatabaseScheduler(LeadingMixin, DatabaseScheduler): ...
    """

    app: Any
    schedule: Any
    connection: Any
    _heap: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ticking = threading.Lock()
        self._steps = Uninterrupted()
        self._restore: Callable[[], None] = lambda: None
        self._leader: BackgroundLeadership | None = None
        self._term: Term | None = None
        super().__init__(*args, **kwargs)

    @property
    def election(self) -> str:
        """The election of the beats of this application."""
        return self.app.conf.get("doyen_election") or f"celery-beat-{self.app.main or 'celery'}"

    @property
    def info(self) -> str:
        """For the banner of beat."""
        return f"    . election -> {self.election}"

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send the next task that is due, or wait to be elected."""
        leader = self._opened()
        if leader.failure is not None:
            raise leader.failure  # beat ends, and is started again
        with self._steps.step(), self._ticking:
            if leader.leads and self._goes_on(leader):
                interval: float = super().tick(*args, **kwargs)  # type: ignore[misc]
                return interval
        if leader.leads:
            return LOOK_S  # the store did not answer
        leader.wait(LOOK_S)
        return 0.0

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send a task, unless the term has ended meanwhile."""
        leader = self._leader
        if leader is None or not leader.leads:
            return
        super().apply_entry(entry, producer)  # type: ignore[misc]
        self._runs.note({entry.name: self.schedule[entry.name].last_run_at.timestamp()})

    def close(self) -> None:
        """Called by beat when it ends, and in its handler of signals too: then a tick may be
        suspended, for whose end the release waits."""
        with contextlib.ExitStack() as ends:
            ends.callback(super().close)  # type: ignore[misc]
            if self._leader is not None and not self._steps.inside:
                leader, self._leader = self._leader, None
                ends.callback(self._restore)
                leader.close()

    def _opened(self) -> BackgroundLeadership:
        if self._leader is None:
            conf = self.app.conf
            store, options = conf.get("doyen_store"), conf.get("doyen_options") or {}
            leader = BackgroundLeadership(self.election, lambda: connect_blocking(store, **options))
            leader._works.append(_Ticks(self._ticking, self._steps))
            self._restore = self._steps.guard(signal.SIGTERM, signal.SIGINT)
            try:
                self._leader = leader.open()
            except BaseException:
                self._restore()
                raise
            self._load()
        return self._leader

    def _load(self) -> None:
        """Have Celery import what it needs to send a task, so that a successor loses no time.
        Nothing is connected to the broker."""
        app = self.app
        _ = self.connection.transport, app.events, app.amqp.send_task_message, app.backend

    def _goes_on(self, leader: BackgroundLeadership) -> bool:
        """In a new term, go on where the last leader stopped. False if the store does not
        answer."""
        term = leader.term
        if term is None or term is self._term:
            return term is not None
        try:
            self._runs = LastRuns(leader.session, self.election, term.token)
        except DoyenError as error:
            line = log_line(event="runs_unknown", election=self.election, error=error)
            log.warning("%s", line)
            return False
        for name, at in self._runs.times.items():
            if name in self.schedule:
                self.schedule[name].last_run_at = datetime.fromtimestamp(at, UTC)
        self._heap = None
        self._term = term
        return True


class LeaderScheduler(LeadingMixin, Scheduler):
    """The scheduler of beat, for the leader. The schedule is that of the configuration."""


class _Ticks:
    """The ticks of a beat, as work of a leader."""

    def __init__(self, ticking: threading.Lock, steps: Uninterrupted) -> None:
        self._ticking = ticking
        self._steps = steps

    def begin(self, term: Term, fail: Fail) -> None:
        """The beat waits for the election itself."""

    def end(self, term: Term) -> None:
        if not self._ticking.acquire(timeout=term.stop_budget_s):
            self._steps.hurry()
            self._ticking.acquire()
        self._ticking.release()  # a task that was being sent has been
