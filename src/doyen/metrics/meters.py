"""What is counted and measured, derived from the events of sessions. Imports no exporter.

A `SessionMeters` may be the sink of several sessions of one process. It is called on the threads of
their sinks, and read by exporters on others, so it has a lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from doyen.errors import StoreError
from doyen.events import (
    CampaignEvent,
    Elected,
    Gap,
    Granted,
    Hindered,
    LeaseLost,
    Lost,
    Overrun,
    Record,
    Renewed,
    Resigned,
    Unsure,
    Waiting,
)
from doyen.events.reasons import loss_cause
from doyen.lease.clock import Clock, SystemClock
from doyen.metrics.histogram import Histogram
from doyen.model import Line, PastTerm, Unreachable, is_name

if TYPE_CHECKING:
    from doyen.manage.inventory import Inventory
    from doyen.session import Session

__all__ = ["INSTRUMENTS", "ElectionMeter", "Instrument", "Interval", "SessionMeters"]

Cause = Literal[
    "elected", "resigned", "ordered", "ineligible", "expired", "stalled", "removed", "ended"
]
"""Why a term began or ended: see `LossCause`. A transfer counts as ordered."""


_TRANSITIONS: tuple[str, ...] = get_args(Cause)
KEPT_NAMES = 5000
"""How many candidates that do not lead, and how many elections without leader and line, are
remembered. A process may use ever new names."""
ENDS_S = 10.0
"""How often the trails of elections are read that have no leader and no candidate any more."""
LOOKS = 3
"""How often that of one is read until it says how the last term ended."""
RETIRED_S = 3600.0
"""How long an election is remembered whose last leader resigned and that has no candidate."""


class CandidateKey(NamedTuple):
    """A candidate of this process."""

    kind: str
    election: str
    name: str


class ElectionKey(NamedTuple):
    """An election or lock of the store."""

    kind: str
    election: str


class Interval(NamedTuple):
    """The time from the loss of a term, or from joining the line, to the election."""

    candidate: CandidateKey
    cause: str
    """Why it began: the cause of the loss, or `joined`."""
    began: float
    ended: float
    """On the wall clock."""
    token: int
    """Of the term that began."""


class _Held(NamedTuple):
    token: int
    lease: str


@dataclass(slots=True)
class ElectionMeter:
    """What was seen of one election or lock of the store."""

    led: bool = False
    line_length: int = 0
    leader_changes: int = 0
    without_leader_s: float = 0.0
    """The sum, up to `as_of`."""
    token: int = 0
    as_of: float = 0.0
    wanted: bool = True
    """False if its last leader resigned and it has no candidate."""
    idle_since: float | None = None
    """Since when there is neither a leader nor a line."""
    looks: int = 0
    """How often its trail has been read since then."""

    def take(self, line: Line, as_of: float) -> None:
        """Take in who leads it and who waits."""
        token = 0 if line.leader is None else line.leader.token
        self.leader_changes += bool(token) and token != self.token
        self.token = token or self.token
        self.led = line.leader is not None
        self.line_length = sum(not each.leads for each in line.candidates)
        if self.led or self.line_length:
            self.wanted, self.idle_since, self.looks = True, None, 0
        elif self.idle_since is None:
            self.idle_since = as_of

    def ended(self, terms: Sequence[PastTerm]) -> None:
        """Take in its trail, the newest term first."""
        self.looks += 1
        last = next((each for each in terms if self.token in (0, each.token)), None)
        if last is not None and self.idle_since is not None:
            ordered = last.end == "lost" and _cause_of_loss(last.reason) == "ordered"
            self.wanted = not (ordered or last.end == "resigned")


def _cause_of_loss(reason: str) -> Cause:
    cause = loss_cause(reason)
    return "ordered" if cause == "transferred" else cause


def _encodable(name: str) -> str:
    """A name that exporters can encode. One that came from a file name or an argument may not be.

    >>> _encodable("server\\udcff")
    'server\\\\udcff'
    """
    return name.encode(errors="backslashreplace").decode()


class SessionMeters:
    """Counts and measures the events of sessions.

        meters = SessionMeters()
        async with doyen.connect(url, on_event=meters) as session:
            ...

    An exporter reads it: see `doyen.metrics.prometheus` and `doyen.metrics.opentelemetry`.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._leading: dict[CandidateKey, _Held] = {}
        self._candidates: dict[CandidateKey, None] = {}
        self._valid_until: dict[str, float] = {}
        self._waiting: dict[CandidateKey, tuple[str, float]] = {}
        """Since when, on the wall clock, a candidate waits to be elected, and why."""
        self.transitions: Counter[tuple[CandidateKey, str]] = Counter()
        self.store_errors: Counter[str] = Counter()
        self.lease_losses = 0
        self.overruns = 0
        self.dropped = 0
        self.renewals = Histogram()
        self.waits = Histogram()
        """From a loss, or from joining the line, to the election."""
        self.elections: dict[ElectionKey, ElectionMeter] = {}
        self.reachable: bool | None = None
        """Whether the store answers; None if there is no observer."""
        self._as_of: Callable[[], float | None] = lambda: None
        self.on_record: list[Callable[[Record], None]] = []
        """Called with every record, for exporters that have instruments of their own."""
        self.on_interval: list[Callable[[Interval], None]] = []

    def __call__(self, record: Record) -> None:
        """The sink."""
        with self._lock:
            interval = self._count(record)
        for listener in self.on_record:
            listener(record)
        if interval is not None:
            for each in self.on_interval:
                each(interval)

    def _count(self, record: Record) -> Interval | None:
        event = record.event
        match event:
            case Granted(lease=lease, valid_until=valid_until):
                self._forget_leases()
                self._valid_until[lease] = valid_until
            case Renewed(lease=lease, valid_until=valid_until, took_s=took_s):
                self._valid_until[lease] = valid_until
                self.renewals.add(took_s)
            case Unsure():
                self.store_errors["renewal"] += 1
            case Hindered():
                self.store_errors["campaign"] += 1
            case LeaseLost(lease=lease):
                self.lease_losses += 1
                self._valid_until.pop(lease, None)
            case Overrun():
                self.overruns += 1
            case Gap(missed=missed):
                self.dropped += missed
            case _:
                pass
        return self._follow(record) if isinstance(event, CampaignEvent) else None

    def _forget_leases(self) -> None:
        """Forget leases on which no term relies and that are not renewed: no event reports that a
        lease was released."""
        now, used = self._clock.now(), {held.lease for held in self._leading.values()}
        for lease, valid_until in list(self._valid_until.items()):
            if valid_until < now and lease not in used:
                del self._valid_until[lease]

    def _follow(self, record: Record) -> Interval | None:
        """Follow a candidate from loss to election."""
        event = record.event
        assert isinstance(event, CampaignEvent)
        key = CandidateKey(event.election_kind, event.election, _encodable(event.name))
        self._candidates.pop(key, None)
        self._candidates[key] = None  # the last one
        if len(self._candidates) > KEPT_NAMES + len(self._leading):
            self._forget_candidate()
        match event:
            case Waiting(joined=joined):
                # An earlier campaign may have been given up, of which no event tells. After a loss
                # the time counts from that.
                if joined and self._waiting.get(key, ("joined",))[0] == "joined":
                    self._waiting[key] = ("joined", record.wall)
                self._waiting.setdefault(key, ("joined", record.wall))
            case Elected(token=token, lease=lease, valid_until=valid_until):
                self._leading[key] = _Held(token, lease)
                self._valid_until.setdefault(lease, valid_until)
                self.transitions[key, "elected"] += 1
                cause, began = self._waiting.pop(key, ("joined", record.wall))
                self.waits.add(max(0.0, record.wall - began))
                return Interval(key, cause, began, record.wall, token)
            case Lost(reason=reason):
                self._ended(key, _cause_of_loss(reason), record)
            case Resigned():
                self._ended(key, "resigned", record)
            case _:
                pass
        return None

    def _forget_candidate(self) -> None:
        """Forget the one that has not led for the longest time, and what was counted of it."""
        gone = next(each for each in self._candidates if each not in self._leading)
        del self._candidates[gone]
        self._waiting.pop(gone, None)
        for cause in _TRANSITIONS:
            self.transitions.pop((gone, cause), None)

    def _ended(self, key: CandidateKey, cause: Cause, record: Record) -> None:
        self._leading.pop(key, None)
        self.transitions[key, cause] += 1
        if cause == "resigned":
            self._waiting.pop(key, None)  # it may never want to lead again
        else:
            self._waiting[key] = (cause, record.wall)

    def leading(self) -> dict[CandidateKey, tuple[int, float] | None]:
        """For each candidate of this process its token and the seconds of margin that it has left,
        or None if it does not lead."""
        now = self._clock.now()
        with self._lock:
            found: dict[CandidateKey, tuple[int, float] | None] = {}
            for key in self._candidates:
                held = self._leading.get(key)
                left_s = 0.0 if held is None else self._valid_until.get(held.lease, now) - now
                found[key] = None if held is None else (held.token, left_s)
            return found

    # What only the store knows.

    async def observe(self, session: Session) -> None:
        """Observe the elections and locks of the session's store, until cancelled.

        asyncio.create_task(meters.observe(session))
        """
        self._as_of = lambda: session.as_of
        looking = asyncio.create_task(self._look_at_ends(session))
        try:
            async for seen in session.observe_inventory("elections", "locks"):
                self.saw(seen)
        finally:
            looking.cancel()
            with self._lock:
                self.reachable, self._as_of = None, lambda: None

    def saw(self, seen: Inventory | Unreachable[Inventory]) -> None:
        """Take in what an observer of the inventory has got."""
        with self._lock:
            self.reachable = not isinstance(seen, Unreachable)
            if isinstance(seen, Unreachable):
                return
            lines: dict[ElectionKey, Line] = {
                ElectionKey(kind, name): line
                for kind in ("elections", "locks")
                for name, line in getattr(seen, kind).items()
            }
            for key in lines:  # those that were seen last are the last to be forgotten
                if key in self.elections:
                    self.elections[key] = self.elections.pop(key)
            for key in {**self.elections, **lines}:
                meter = self.elections.setdefault(key, ElectionMeter(as_of=seen.as_of))
                self._advance(meter, seen.as_of)
                meter.take(lines.get(key, Line(None)), seen.as_of)
            unused = [key for key in self.elections if key not in lines]
            for key in unused[: max(0, len(unused) - KEPT_NAMES)]:
                del self.elections[key]

    async def _look_at_ends(self, session: Session) -> None:
        """Read how elections ended that have no leader and no candidate any more: whether the last
        leader resigned, which is written a moment later, or failed, which is not written."""
        while True:
            await asyncio.sleep(ENDS_S)
            self._forget_retired()
            for key, meter in self._unsettled():
                try:
                    terms = await session.history(key.election)
                except StoreError:
                    break
                with self._lock:
                    meter.ended(terms)

    def _unsettled(self) -> list[tuple[ElectionKey, ElectionMeter]]:
        with self._lock:
            return [
                (key, meter)
                for key, meter in self.elections.items()
                if key.kind == "elections"
                and meter.idle_since is not None
                and meter.wanted
                and meter.looks < LOOKS
                and is_name(key.election)  # others are not of doyen, and have no trail
            ]

    def _forget_retired(self) -> None:
        now = self._clock.wall()
        with self._lock:
            for key, meter in list(self.elections.items()):
                if not meter.wanted and now - (meter.idle_since or now) > RETIRED_S:
                    del self.elections[key]

    def _advance(self, meter: ElectionMeter, as_of: float) -> None:
        # A lock that is free lacks nothing, so this is read for elections; the caller decides.
        if not meter.led:
            meter.without_leader_s += max(0.0, as_of - meter.as_of)
        meter.as_of = max(meter.as_of, as_of)

    def seen_elections(self) -> dict[ElectionKey, ElectionMeter]:
        """What was seen of each election and lock, up to now if the store answers; nothing if
        there is no observer any more."""
        with self._lock:
            if self.reachable is None:
                return {}
            if self.reachable:
                now = self._clock.wall()
                for meter in self.elections.values():
                    self._advance(meter, now)
            return dict(self.elections)

    @property
    def answer_age_s(self) -> float | None:
        """How long ago the store answered last; None if there is no observer."""
        as_of = self._as_of()
        return None if as_of is None else max(0.0, self._clock.wall() - as_of)


Samples = Callable[[SessionMeters], Mapping[Any, float]]
"""The values of an instrument, by those of its labels."""


class Instrument(NamedTuple):
    """A gauge or a counter, as all exporters have it."""

    name: str
    unit: str
    text: str
    samples: Samples
    labels: tuple[str, ...] = ()
    counts: bool = False


def _of_terms(part: int) -> Samples:
    return lambda meters: {key: held[part] for key, held in meters.leading().items() if held}


def _of_elections(field: str, *kinds: str) -> Samples:
    return lambda meters: {
        key: 0 + getattr(each, field)  # the number of a truth value
        for key, each in meters.seen_elections().items()
        if key.kind in kinds
    }


def _of_process(field: str) -> Samples:
    return lambda meters: {} if (value := getattr(meters, field)) is None else {(): 0 + value}


CANDIDATE = ("kind", "election", "name")
ELECTION = ("kind", "election")
INSTRUMENTS = (
    Instrument(
        "doyen.leading",
        "1",
        "Whether this candidate leads.",
        lambda meters: {key: int(held is not None) for key, held in meters.leading().items()},
        CANDIDATE,
    ),
    Instrument("doyen.token", "1", "The fencing token of the term.", _of_terms(0), CANDIDATE),
    Instrument(
        "doyen.margin",
        "s",
        "How long the term stays valid without a further renewal.",
        _of_terms(1),
        CANDIDATE,
    ),
    Instrument(
        "doyen.transitions",
        "{term}",
        "Terms that began or ended, by cause.",
        lambda meters: {(*key, cause): n for (key, cause), n in dict(meters.transitions).items()},
        (*CANDIDATE, "cause"),
        counts=True,
    ),
    Instrument(
        "doyen.store.errors",
        "{error}",
        "Requests to the store that failed, by what they were for.",
        lambda meters: {(call,): count for call, count in dict(meters.store_errors).items()},
        ("call",),
        counts=True,
    ),
    Instrument(
        "doyen.lease.losses",
        "{lease}",
        "Leases of this process that were lost.",
        _of_process("lease_losses"),
        counts=True,
    ),
    Instrument(
        "doyen.overruns",
        "{term}",
        "Terms whose work ended after its stop budget.",
        _of_process("overruns"),
        counts=True,
    ),
    Instrument(
        "doyen.events.dropped",
        "{event}",
        "Events that were dropped before they came here.",
        _of_process("dropped"),
        counts=True,
    ),
    Instrument(
        "doyen.store.reachable", "1", "Whether the store answers.", _of_process("reachable")
    ),
    Instrument(
        "doyen.store.answer_age",
        "s",
        "How long ago the store answered last.",
        _of_process("answer_age_s"),
    ),
    Instrument(
        "doyen.election.led",
        "1",
        "Whether an election has a leader, or a lock a holder.",
        _of_elections("led", "elections", "locks"),
        ELECTION,
    ),
    Instrument(
        "doyen.election.wanted",
        "1",
        "Whether an election should have a leader: 0 if the last resigned and none waits.",
        _of_elections("wanted", "elections"),
        ELECTION,
    ),
    Instrument(
        "doyen.election.line_length",
        "{candidate}",
        "How many candidates wait.",
        _of_elections("line_length", "elections", "locks"),
        ELECTION,
    ),
    Instrument(
        "doyen.election.leader_changes",
        "{change}",
        "Changes of leader or holder that were seen.",
        _of_elections("leader_changes", "elections", "locks"),
        ELECTION,
        counts=True,
    ),
    Instrument(
        "doyen.election.without_leader",
        "s",
        "The time for which an election was seen without a leader.",
        _of_elections("without_leader_s", "elections"),
        ELECTION,
        counts=True,
    ),
)
