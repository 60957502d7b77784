"""RQ: cron schedulers of which only the leader enqueues jobs.

    scheduler = LeaderCronScheduler(Redis(), "billing", "postgresql://db/app")
    scheduler.register(pay, "default", cron="0 3 * * *")
    scheduler.start()

Start it on every machine. It runs on the main thread, as described in
`doyen.integrations.programs`. Jobs that are being enqueued when the term ends, or SIGTERM comes,
are enqueued first, and no other candidate is elected before. A second signal interrupts that. The
scheduler is removed from RQ's registry after the process has resigned, because Redis may not
answer.

The times of the last runs are kept in the store, so a successor goes on where the leader stopped:
what was due meanwhile is enqueued at once, and nothing twice. They are written after jobs were
enqueued; if the leader is killed in between, its successor enqueues those again. Needs the extra
`rq`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Unpack

from doyen.blocking import BlockingSession, connect_blocking
from doyen.election.options import CampaignOptions, CampaignSettings
from doyen.events.log_lines import log_line
from doyen.integrations import needing
from doyen.integrations.last_runs import LastRuns
from doyen.integrations.programs import Interrupted, lead
from doyen.integrations.signals import Uninterrupted
from doyen.term import Term

with needing("rq"):
    from redis import Redis, RedisError
    from redis.client import Pipeline
    from rq.cron import CronJob, CronScheduler
    from rq.exceptions import SchedulerNotFound, StopRequested

__all__ = ["LeaderCronScheduler"]

log = logging.getLogger("doyen")


class LeaderCronScheduler(CronScheduler):
    """A cron scheduler of RQ that enqueues jobs only while it leads.

        scheduler = LeaderCronScheduler(Redis(), "billing", "postgresql://db/app")

    `store` is a URL as for `connect`, or a function that returns a blocking session. Keywords are
    the options of `Session.campaign`, and `logging_level` as for `CronScheduler`.
    """

    def __init__(
        self,
        connection: Redis,
        election: str,
        store: str | Callable[[], BlockingSession] | None = None,
        *,
        logging_level: str | int = "INFO",
        **options: Unpack[CampaignOptions],
    ) -> None:
        CampaignSettings.of(election, options)  # mistakes are reported here
        super().__init__(connection, logging_level)
        self._election = election
        self._store = store
        self._options = options
        self._session: BlockingSession | None = None
        self._runs: LastRuns | None = None
        self._steps = Uninterrupted()

    def start(self) -> None:
        """Campaign, and enqueue jobs as leader, until SIGTERM or SIGINT."""
        try:
            lead(self._connect, self._election, self._lead, **self._options)
        except (Interrupted, KeyboardInterrupt, StopRequested):
            pass  # while it waited to be elected; a leader that is stopped returns as well
        finally:
            if self._runs is not None:
                self._leave_registry()

    @classmethod
    def fetch(cls, name: str, connection: Redis) -> CronScheduler:
        """What a scheduler has registered in Redis, as RQ's own class, for looking at. RQ does not
        know the election, so it cannot be started as a candidate."""
        return CronScheduler.fetch(name, connection)

    def register_death(self, pipeline: Pipeline | None = None) -> None:
        """Called by RQ at the end of a term, before it is released. `start` does it after that."""

    def _leave_registry(self) -> None:
        try:
            super().register_death()
        except SchedulerNotFound:
            pass  # it has not led for so long that its entry has expired
        except RedisError as error:
            line = log_line(event="rq_registry_not_left", election=self._election, error=error)
            log.warning("%s", line)

    def _connect(self) -> BlockingSession:
        store = self._store
        self._session = store() if callable(store) else connect_blocking(store)
        return self._session

    def _lead(self, term: Term) -> None:
        """Go on where the last leader stopped."""
        assert self._session is not None
        self._runs = LastRuns(self._session, self._election, term.token)
        for job in self.get_jobs():
            if job.name in self._runs.times:
                job.set_enqueue_time(datetime.fromtimestamp(self._runs.times[job.name], UTC))
        super().start()

    def enqueue_jobs(self) -> list[CronJob]:
        """Enqueue the jobs that are due, and record it for the next leader."""
        with self._steps.step():
            enqueued = super().enqueue_jobs()
            times = {job.name: job.latest_enqueue_time for job in enqueued}
            if self._runs is not None and times:
                self._runs.note({name: at.timestamp() for name, at in times.items() if at})
            return enqueued

    def _request_stop(self, signum: int, frame: Any) -> None:
        """RQ's handler of SIGTERM and SIGINT. It raises an exception."""
        self._steps.handle(super()._request_stop, signum, frame)
