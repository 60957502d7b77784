"""The program of `test_rq.py`: a cron scheduler that records what it enqueues as leader."""

from __future__ import annotations

import os
from typing import Any

from redis import Redis

import doyen
from doyen.integrations.programs import current_term
from doyen.integrations.rq import LeaderCronScheduler
from framework_crew import TTL_S, recording


class Recording(LeaderCronScheduler):
    """Records its terms and what it enqueues."""

    def enqueue_jobs(self) -> list[Any]:
        with recording(current_term()) as book:
            enqueued = super().enqueue_jobs()
            if enqueued:
                book.write("work")
        return enqueued


if __name__ == "__main__":
    scheduler = Recording(
        Redis(port=int(os.environ["REDIS_PORT"])),
        "e",
        lambda: doyen.connect_blocking(os.environ["STORE"], ttl_s=TTL_S, wait_s=10),
        logging_level="CRITICAL",
    )
    scheduler.register(print, "default", interval=1)
    scheduler.start()
