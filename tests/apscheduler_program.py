"""The program of `test_apscheduler.py`: a job that records its work, in the leader only."""

from __future__ import annotations

import os

from apscheduler.schedulers.blocking import BlockingScheduler

import doyen
from doyen.integrations.apscheduler import Leadership
from framework_crew import TTL_S, recording

if __name__ == "__main__":
    scheduler = BlockingScheduler()
    leader = Leadership(
        scheduler,
        "e",
        lambda: doyen.connect_blocking(os.environ["STORE"], ttl_s=TTL_S, wait_s=10),
    )

    def work() -> None:
        term = leader.term
        if term is not None:
            with recording(term) as book:
                book.write("work")

    scheduler.add_job(work, "interval", seconds=0.02)
    leader.start()
