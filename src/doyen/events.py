"""What happened, as typed values on one stream.

Everything that watches doyen (logs, the audit file, metrics, a dashboard) is a *sink*: a callable
that takes a `Record`. Sinks are called on doyen's own threads, must be quick and must not block;
one that raises is reported to the log and otherwise ignored, so that telemetry can never cost a
leader its lease.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from doyen.clock import Clock

__all__ = [
    "Elected",
    "Event",
    "Granted",
    "Hindered",
    "LeaseEnded",
    "LeaseLost",
    "Lost",
    "Overrun",
    "Record",
    "Renewed",
    "Resigned",
    "Sink",
    "Telemetry",
    "Unsure",
    "Waiting",
    "log_sink",
]

log = logging.getLogger("doyen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened."""

    level: ClassVar[int] = logging.DEBUG

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(Event):
    """The session has a new lease."""

    lease: str
    ttl_s: float
    valid_until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed(Event):
    """The store confirmed a renewal; terms on this lease are valid until then (boot time)."""

    lease: str
    valid_until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsure(Event):
    """Renewals are failing and the deadline has not come. Terms are still valid."""

    level: ClassVar[int] = logging.WARNING
    lease: str
    remaining_s: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(Event):
    """The session gave its lease up, or found it gone. `ended_at` is when validity ended."""

    level: ClassVar[int] = logging.WARNING
    lease: str
    reason: str
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded(Event):
    """This process established that another's lease had ended: by time, or by proof of death.

    Told before anybody can act on it; several may find it at once.
    """

    level: ClassVar[int] = logging.INFO
    lease: str
    cause: Literal["died", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Event):
    """A candidate stands in line. `behind` is who is ahead of it, or who leads."""

    election: str
    name: str
    behind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindered(Event):
    """A candidate cannot do what it needs to at the store, and keeps trying."""

    level: ClassVar[int] = logging.WARNING
    election: str
    name: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Elected(Event):
    """A term began."""

    level: ClassVar[int] = logging.INFO
    election: str
    name: str
    token: int
    lease: str
    valid_until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Event):
    """A term ended before its body did. `ended_at` is when it stopped being valid."""

    level: ClassVar[int] = logging.WARNING
    election: str
    name: str
    token: int
    lease: str
    reason: str
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resigned(Event):
    """A term's body has ended and the leader lets go. Written before the record is deleted."""

    level: ClassVar[int] = logging.INFO
    election: str
    name: str
    token: int
    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrun(Event):
    """A body went on past its stop budget: the store may name another leader meanwhile."""

    level: ClassVar[int] = logging.ERROR
    election: str
    name: str
    token: int
    lease: str


@dataclass(frozen=True, slots=True)
class Record:
    """An event, with when and where. `at` is boot time, comparable under one `boot_id` only."""

    event: Event
    at: float
    wall: float
    session: str
    pid: int

    def fields(self) -> dict[str, Any]:
        return {"event": self.event.kind, **asdict(self.event)}


Sink = Callable[[Record], None]


class Telemetry:
    """The stream of one session: stamps events and hands them to every sink, in order."""

    def __init__(self, clock: Clock, session: str, sinks: Iterable[Sink] = ()) -> None:
        self._clock = clock
        self._session = session
        self._sinks = [log_sink, *sinks]
        self._pid = os.getpid()

    def emit(self, event: Event) -> None:
        record = Record(event, self._clock.now(), self._clock.wall(), self._session, self._pid)
        for sink in self._sinks:
            try:
                sink(record)
            except Exception:
                log.exception("a telemetry sink failed on %s and was passed over", event.kind)


def log_sink(record: Record) -> None:
    """Standard logging, on the logger `doyen`, one line an event."""
    event = record.event
    if log.isEnabledFor(event.level):
        details = " ".join(f"{name}={value}" for name, value in asdict(event).items())
        log.log(event.level, "%s %s", event.kind, details, extra={"doyen": record})
