"""APScheduler: jobs that run only in the leader.

    scheduler = BackgroundScheduler()
    scheduler.add_job(pay, "interval", minutes=1)

    leader = Leadership(scheduler, "billing", "postgresql://db/app")
    leader.start()  # instead of scheduler.start()

The scheduler is started paused, resumed when this process is elected, and paused when its term
ends. The rules are those of `doyen.integrations.background`, and these:

- Jobs that run when the term ends are finished, not cancelled. No other candidate is elected before
  that, unless it takes longer than the stop budget: a long job has to look at `leader.leads`.
- With a job store that processes share, such as a database, a run that was due while there was no
  leader is made up for, within `misfire_grace_time`, and none is made twice. A job store in memory
  does not know what other processes have run, so runs that were due before this process was elected
  are left out. A job that runs once (`date`) is run by the first leader that has it.

For APScheduler 3; needs the extra `apscheduler`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any, Self, Unpack

from doyen.blocking import BlockingSession
from doyen.election.options import CampaignOptions
from doyen.events.log_lines import log_line
from doyen.integrations import needing
from doyen.integrations.background import BackgroundLeadership, Fail, OnFailure
from doyen.lease.clock import SystemClock
from doyen.term import Term

with needing("apscheduler"):
    from apscheduler.events import (
        EVENT_JOB_ERROR,
        EVENT_JOB_EXECUTED,
        EVENT_JOB_MISSED,
        EVENT_SCHEDULER_SHUTDOWN,
        EVENT_SCHEDULER_STARTED,
    )
    from apscheduler.jobstores.memory import MemoryJobStore
    from apscheduler.schedulers import SchedulerNotRunningError
    from apscheduler.schedulers.base import BaseScheduler
    from apscheduler.triggers.date import DateTrigger

__all__ = ["Leadership"]

log = logging.getLogger("doyen")
LOOK_S = 0.1
"""How often running jobs are checked, in case their event does not arrive."""


class SchedulerLeadership(BackgroundLeadership):
    """Leadership of an election, for a scheduler of APScheduler.

        leader = Leadership(scheduler, "billing", "postgresql://db/app")

    `store` is a URL as for `connect`, or a function that returns a session, for further options:
    `lambda: doyen.connect_blocking(URL, ttl_s=5)`. Options are those of `Session.campaign`.
    """

    def __init__(
        self,
        scheduler: BaseScheduler,
        election: str,
        store: str | Callable[[], BlockingSession] | None = None,
        *,
        on_failure: OnFailure = "unhealthy",
        **options: Unpack[CampaignOptions],
    ) -> None:
        super().__init__(election, store, on_failure=on_failure, **options)
        self._scheduler = scheduler
        self._jobs = _Jobs(scheduler)
        self._works.append(self._jobs)
        scheduler.add_listener(self._started, EVENT_SCHEDULER_STARTED)
        scheduler.add_listener(self._shut_down, EVENT_SCHEDULER_SHUTDOWN)

    def open(self) -> Self:
        """The same as `start`. Does nothing if this process has started it before."""
        if self._mine is None:
            super().open()
            try:
                self._scheduler.start(paused=True)
            except BaseException:
                self._jobs.started.set()
                self.close()
                raise
        return self

    def start(self) -> None:
        """Start the scheduler, and campaign. Returns when `scheduler.start()` would: a
        `BlockingScheduler` runs until it is shut down. `scheduler.shutdown()` ends both."""
        self.open()

    def _started(self, event: object) -> None:
        if self._mine is None:
            self._scheduler.pause()
            line = log_line(
                event="scheduler_paused",
                election=self.election,
                reason="it was started without its leadership, so jobs would run everywhere",
                remedy="call leader.start() instead of scheduler.start()",
            )
            log.error("%s", line)
        self._jobs.shut_down.clear()
        self._jobs.started.set()

    def _shut_down(self, event: object) -> None:
        self._jobs.shut_down.set()
        self.close()


class _Jobs:
    """The jobs of a scheduler, as work of a leader."""

    def __init__(self, scheduler: BaseScheduler) -> None:
        self._scheduler = scheduler
        self.started = threading.Event()
        """The scheduler has been started, or never will be."""
        self.shut_down = threading.Event()
        """The scheduler does not run: all executors have been shut down."""
        self.shut_down.set()
        self._ended = threading.Event()
        ends = EVENT_JOB_EXECUTED | EVENT_JOB_ERROR | EVENT_JOB_MISSED
        scheduler.add_listener(lambda event: self._ended.set(), ends)

    def begin(self, term: Term, fail: Fail) -> None:
        self.started.wait()
        self._leave_out_earlier_runs()
        self._scheduler.resume()

    def end(self, term: Term) -> None:
        try:
            self._scheduler.pause()
        except SchedulerNotRunningError:
            self.shut_down.wait()  # a shutdown waits for jobs by default
            return
        with self._scheduler._jobstores_lock:
            pass  # wait for jobs that are being submitted
        while self._running():
            self._ended.wait(LOOK_S)
            self._ended.clear()

    def _running(self) -> bool:
        executors = [*self._scheduler._executors.values()]
        return any(count > 0 for each in executors for count in [*each._instances.values()])

    def _leave_out_earlier_runs(self) -> None:
        scheduler: Any = self._scheduler
        now = datetime.fromtimestamp(SystemClock().wall(), scheduler.timezone)
        with scheduler._jobstores_lock:
            stores = [
                each for each in scheduler._jobstores.values() if type(each) is MemoryJobStore
            ]
            due = [job for store in stores for job in store.get_due_jobs(now)]
        for job in due:
            if isinstance(job.trigger, DateTrigger):
                continue
            following = job.trigger.get_next_fire_time(None, now)
            if following is None:
                job.remove()
            else:
                job.modify(next_run_time=following)


Leadership = SchedulerLeadership
