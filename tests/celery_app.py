"""The application of `test_celery.py`: what beat sends is recorded, in the leader only."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import before_task_publish

from doyen.integrations import background
from doyen.integrations.celery import LeaderScheduler
from framework_crew import TTL_S, Book

app = Celery("crew", broker="memory://")
app.conf.update(
    beat_scheduler="celery_app:RecordedScheduler",
    beat_schedule={"often": {"task": "work", "schedule": 0.02}},
    doyen_store=os.environ.get("STORE"),
    doyen_election="e",
    doyen_options={"ttl_s": TTL_S, "wait_s": 10},
)
sending: list[Book] = []


@before_task_publish.connect(weak=False)
def record(**_: Any) -> None:
    """A task is being sent to the broker."""
    (leader,) = background._made
    book = Book(leader.term) if leader.term is not None else None
    if book is not None and book.write("begin"):
        book.write("work")
        sending.append(book)


class RecordedScheduler(LeaderScheduler):
    """Records that a task has been sent."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        super().apply_entry(entry, producer)
        while sending:
            sending.pop().write("end")
