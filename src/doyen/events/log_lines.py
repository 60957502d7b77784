"""doyen's log lines: `key=value` pairs, with quotes around values that need them.

`log_line` formats one line. `LogReporter` writes the events of one session to the logger `doyen`.
Times in these lines are wall-clock times in UTC; boot-time values of events are converted.
"""

from __future__ import annotations

import json
import logging
import math
import re
from typing import ClassVar

from doyen.events import (
    CampaignEvent,
    Elected,
    Event,
    Granted,
    Hindered,
    LeaseLost,
    Record,
    Renewed,
    Unsure,
    Waiting,
)

__all__ = ["LogReporter", "LogfmtLine", "OutageEnded", "iso_time", "log_line"]

log = logging.getLogger("doyen")

_BARE = r"[\w.:/@+-]+"  # compiled on first use
_BOOT_TIMES = frozenset({"ended_at", "since", "valid_until"})
"""Fields of events that are times on the boot-time clock."""


class LogfmtLine(str):
    """A formatted log line, and its fields, for programs that show it to a user in other words."""

    fields: dict[str, object]


def log_line(**fields: object) -> LogfmtLine:
    """Format a log line. Fields that are None are left out.

    >>> log_line(event="leadership_lost", election="x", reason="the lease expired")
    'event=leadership_lost election=x reason="the lease expired"'
    """
    given = {name: value for name, value in fields.items() if value is not None}
    line = LogfmtLine(" ".join(f"{name}={_quoted(str(value))}" for name, value in given.items()))
    line.fields = given
    return line


def _quoted(text: str) -> str:
    return text if re.fullmatch(_BARE, text) else json.dumps(text, ensure_ascii=False)


def iso_time(wall: float) -> str:
    """A wall-clock time as ISO 8601 text in UTC.

    >>> iso_time(1767225600.25)
    '2026-01-01T00:00:00.250Z'
    """
    from datetime import UTC, datetime  # costs more than the rest of the import

    try:
        moment = datetime.fromtimestamp(wall, UTC)
    except (OverflowError, ValueError, OSError):
        return str(wall)
    return f"{moment.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


class OutageEnded(Event):
    """The store answers again. For the log only: no sink receives it."""

    level: ClassVar[int] = logging.WARNING
    log_name: ClassVar[str] = "store_available"
    after_s: float


class LogReporter:
    """Writes the events of one session to the logger `doyen`, one line each.

    An outage of the store makes many renewals and requests of candidates fail. The first failure is
    logged as a warning that the store is unavailable, and further failures at level debug. When
    every lease and candidate that failed has succeeded, a warning says that the store is available
    again.
    """

    def __init__(self) -> None:
        self._down_since: float | None = None
        self._leases: set[str] = set()
        self._candidates: set[tuple[str, str, str]] = set()
        """Those that failed: kind, election and name."""

    def report(self, record: Record, *, planned: bool = False) -> None:
        """Log the event; at level info at most if it was `planned`."""
        event = record.event
        level, name = event.level, event.log_name
        if isinstance(event, Unsure | Hindered):
            if self._failed(event, record.at):
                name = "store_unavailable"
            else:
                level = logging.DEBUG
        elif self._down_since is not None:
            ended = self._succeeded(event, record.at, self._down_since)
            if ended is not None:
                self.report(record._replace(event=ended))
        if planned:
            level = min(level, logging.INFO)
        if not log.isEnabledFor(level):
            return
        fields = {
            field: _wall_time(record, value) if field in _BOOT_TIMES else value
            for field, value in vars(event).items()
            if (field, value) != ("election_kind", "elections")
        }
        try:
            log.log(level, "%s", log_line(event=name, **fields), extra={"doyen": record})
        except Exception:
            log.exception("%s", log_line(event="logging_handler_failed", on=name))

    def left(self, election_kind: str, election: str, name: str) -> None:
        """A candidate ended its campaign. The outage does not last until it succeeds."""
        self._candidates.discard((election_kind, election, name))

    def _failed(self, event: Unsure | Hindered, at: float) -> bool:
        """Note a failure; True if the outage begins with it."""
        if isinstance(event, Unsure):
            self._leases.add(event.lease)
        else:
            self._candidates.add(_candidate(event))
        if self._down_since is not None:
            return False
        self._down_since = at
        return True

    def _succeeded(self, event: Event, at: float, since: float) -> OutageEnded | None:
        """Note a success, if the event is one; returns an event if the outage ends with it."""
        match event:
            case Granted():
                self._leases.clear()
            case Renewed(lease=lease):
                self._leases.discard(lease)
            case Waiting() | Elected():
                self._candidates.discard(_candidate(event))
            case LeaseLost(lease=lease):
                self._leases.discard(lease)  # and the next success ends the outage
                return None
            case _:
                return None
        if self._leases or self._candidates:
            return None
        self._down_since = None
        return OutageEnded(after_s=round(at - since, 3))


def _candidate(event: CampaignEvent) -> tuple[str, str, str]:
    return event.election_kind, event.election, event.name


def _wall_time(record: Record, at: float) -> str:
    """The wall-clock time at which the boot-time clock showed `at`. Minus infinity stands for a
    time that had already passed when the event was emitted."""
    return iso_time(record.wall + (at - record.at if math.isfinite(at) else 0.0))
