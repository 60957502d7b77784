"""Hands doyen's log lines to the handlers of `logging` from a thread of its own.

A handler may write to a full pipe or a slow disk. Called on doyen's loop, it would delay renewals.

Imports the delivery queues of `doyen.events.telemetry`.
"""

from __future__ import annotations

import logging
import threading

from doyen.events.telemetry import FLUSH_S, DeliveryQueue

__all__ = ["LOGGERS", "LogRelay"]

LOGGERS = (
    *("doyen", "doyen.audit", "doyen.consul", "doyen.nats", "doyen.quorum.node", "doyen.zookeeper"),
)
"""The loggers of all code that runs on doyen's threads. A filter of a logger does not see the lines
of its child loggers, so each is named; `tests/test_house.py` checks that none is missing."""


class LogRelay(logging.Filter):
    """Takes doyen's log lines before any handler sees them, and handles them on a thread.

    It is the first filter of each logger, so that the filters of users see each line once, on that
    thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines = DeliveryQueue(
            _handle, merge=_lines_missing, name="doyen-log", keep_unstarted=False
        )
        for name in LOGGERS:
            logging.getLogger(name).filters.insert(0, self)

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(_relaying, "now", False) or not self._lines.put(record)

    def flush(self, within_s: float) -> None:
        self._lines.flush(within_s)

    def close(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self)
        self._lines.shut()
        self._lines.join(FLUSH_S)


_relaying = threading.local()
"""`now` is set on the threads of relays. There may be two of them: a session may be opened while
the last one is being closed."""


def _handle(line: logging.LogRecord) -> None:
    _relaying.now = True
    try:
        logging.getLogger(line.name).handle(line)
    except Exception:  # noqa: BLE001 - reported as logging reports errors of other handlers
        logging.Handler().handleError(line)


def _lines_missing(gap: logging.LogRecord | None, line: logging.LogRecord) -> logging.LogRecord:
    before = gap.args[0] if gap is not None and isinstance(gap.args, tuple) else 0
    return logging.getLogRecordFactory()(
        "doyen",
        logging.WARNING,
        line.pathname,
        line.lineno,
        "%d log lines were dropped: the handlers of logging did not keep up",
        (before + 1,) if isinstance(before, int) else (1,),
        None,
    )
