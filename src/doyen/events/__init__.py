"""The events of a session: what happened, as typed values.

Logs, the audit log, metrics and dashboards receive the same events. An event is delivered as a
`Record`, which adds when and where, to *sinks*: callables that take a `Record`.
`doyen.events.telemetry` delivers them.

Of doyen, this module imports only the model and the base of values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, dataclass_transform

from doyen._values import Value, field
from doyen.model import Kind

__all__ = [
    "CampaignEvent",
    "Elected",
    "Event",
    "ForeignLeader",
    "Gap",
    "Granted",
    "Hindered",
    "LeaseEnded",
    "LeaseLost",
    "Listed",
    "Lost",
    "Overrun",
    "PublishFailed",
    "Record",
    "Renewed",
    "Resigned",
    "Sink",
    "Unlisted",
    "Unsure",
    "Unwarded",
    "Waiting",
    "Warded",
    "merge_gap",
]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Event(Value, kw_only=True):
    """The base of all events."""

    level: ClassVar[int] = logging.DEBUG
    log_name: ClassVar[str]
    """What the log calls it; the audit log uses `kind`."""
    awaited: ClassVar[bool] = False
    """Other processes may act on it, so the session waits until the audit log has written it."""

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


class CampaignEvent(Event):
    """The base of the events of a campaign."""

    election: str
    """The name of the election or lock."""
    election_kind: Kind = "elections"
    name: str
    """The name of the candidate."""


class Granted(Event):
    """The session has a new lease."""

    log_name: ClassVar[str] = "lease_granted"
    lease: str
    ttl_s: float
    valid_until: float


class Renewed(Event):
    """The store confirmed a renewal. Terms on this lease are valid until `valid_until`, a time on
    the boot-time clock."""

    log_name: ClassVar[str] = "lease_renewed"
    lease: str
    valid_until: float
    took_s: float = 0.0
    """How long the store took to confirm it."""


class Unsure(Event):
    """A renewal failed and the deadline has not passed. Terms are still valid."""

    level: ClassVar[int] = logging.WARNING
    log_name: ClassVar[str] = "renewal_failed"
    lease: str
    remaining_s: float
    error: str


class LeaseLost(Event):
    """The session lost its lease, by its deadline or because the store ended it. `ended_at` is when
    validity ended."""

    level: ClassVar[int] = logging.WARNING
    log_name: ClassVar[str] = "lease_lost"
    lease: str
    reason: str
    ended_at: float


class LeaseEnded(Event):
    """This process found that another session's lease had ended: by time, or by proof of death.

    It is emitted before any process can act on it. Several processes may emit it for one lease.
    """

    level: ClassVar[int] = logging.INFO
    log_name: ClassVar[str] = "lease_ended"
    awaited: ClassVar[bool] = True
    lease: str
    cause: Literal["died", "expired"]


class Waiting(CampaignEvent):
    """A candidate waits in line. `behind` names the candidate before it, or the leader. `joined` is
    true for the first such event of a campaign."""

    log_name: ClassVar[str] = "candidate_waiting"
    behind: str
    joined: bool = field(default=False, compare=False)


class ForeignLeader(CampaignEvent):
    """A candidate found that a candidate of another program leads. It led at an instant between
    `since`, when the store was asked, and this event."""

    log_name: ClassVar[str] = "foreign_leader"
    leader: str
    """How it shows itself."""
    token: int
    since: float


class Hindered(CampaignEvent):
    """A candidate's request to the store failed. The candidate tries again."""

    level: ClassVar[int] = logging.WARNING
    log_name: ClassVar[str] = "campaign_hindered"
    error: str


class Elected(CampaignEvent):
    """A term began."""

    level: ClassVar[int] = logging.INFO
    log_name: ClassVar[str] = "elected"
    awaited: ClassVar[bool] = True
    token: int
    lease: str
    valid_until: float


class Lost(CampaignEvent):
    """A term ended before its body did. `ended_at` is when it stopped being valid. If the leader
    obeyed an order to resign or to transfer, the log line is at level info."""

    level: ClassVar[int] = logging.WARNING
    log_name: ClassVar[str] = "leadership_lost"
    awaited: ClassVar[bool] = True
    token: int
    lease: str
    reason: str
    ended_at: float


class Resigned(CampaignEvent):
    """A term's body has ended and the leader resigns. It is emitted before the leader record is
    deleted."""

    level: ClassVar[int] = logging.INFO
    log_name: ClassVar[str] = "resigned"
    awaited: ClassVar[bool] = True
    token: int
    lease: str


class Overrun(CampaignEvent):
    """The body of a term was still running at the end of its stop budget. Another leader may have
    been elected since."""

    level: ClassVar[int] = logging.ERROR
    log_name: ClassVar[str] = "overrun"
    awaited: ClassVar[bool] = True
    token: int
    lease: str


class Listed(Event):
    """A member of this session is on the list of its group, or its state there has changed. It has
    a new incarnation if it had to join again."""

    level: ClassVar[int] = logging.INFO
    log_name: ClassVar[str] = "member_listed"
    group: str
    name: str
    incarnation: int
    lease: str
    state: str
    reason: str


class Unlisted(Event):
    """A member of this session is no longer on the list of its group. Unless it has left or failed,
    it joins again."""

    level: ClassVar[int] = logging.WARNING
    log_name: ClassVar[str] = "member_unlisted"
    group: str
    name: str
    incarnation: int
    reason: str


class PublishFailed(Event):
    """The list of a group cannot be published, or cannot be read, for a reason that does not pass,
    such as its size. It is tried again after the next change."""

    level: ClassVar[int] = logging.WARNING
    log_name: ClassVar[str] = "publish_failed"
    group: str
    error: str


class Warded(Event):
    """A warden watches over the session: it ends the leases at once if this process dies."""

    log_name: ClassVar[str] = "warden_found"
    warden: int
    """Its process id."""


class Unwarded(Event):
    """The session was to have a warden, or had one, and has none now. If this process dies, its
    leases expire. It is tried again."""

    level: ClassVar[int] = logging.WARNING
    log_name: ClassVar[str] = "warden_missing"
    reason: str


class Gap(Event):
    """Events were dropped because this sink did not keep up or failed to write."""

    level: ClassVar[int] = logging.WARNING
    log_name: ClassVar[str] = "events_dropped"
    missed: int
    """The number of dropped events."""
    since: float
    """The time of the first of them, on the boot-time clock. The time of the record is that of the
    last."""


class Record(NamedTuple):
    """An event with its time and origin. `at` is on the boot-time clock and comparable within one
    boot only; `wall` is on the wall clock."""

    event: Event
    at: float
    wall: float
    session: str
    pid: int

    def fields(self) -> dict[str, Any]:
        return {"event": self.event.kind, **vars(self.event)}


Sink = Callable[[Record], None]


def merge_gap(gap: Record | None, record: Record) -> Record:
    """Return a gap that also counts `record`, which is dropped and may be a gap itself."""
    event = record.event
    missed, since = (event.missed, event.since) if isinstance(event, Gap) else (1, record.at)
    if gap is not None and isinstance(gap.event, Gap):
        missed, since = missed + gap.event.missed, gap.event.since
    merged = Gap(missed=missed, since=since)
    return Record(merged, record.at, record.wall, record.session, record.pid)
