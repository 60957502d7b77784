"""Reading audit logs: what all lines together say, gathered in one pass and in any order.

Nothing is judged here. What cannot be used is kept aside with the reason; a torn line costs only
itself, even when a whole one was appended to it. Memory grows with terms and leases, not with
lines. Pure, but for `read`; may import errors.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from doyen.errors import ConfigError

__all__ = [
    "Evidence",
    "EvidenceFact",
    "Ignored",
    "Instant",
    "LeaseFacts",
    "LogLine",
    "MissingEvents",
    "OpenTerm",
    "TermKey",
    "Where",
    "earlier",
    "later",
    "read",
]

_OPENING = b'{"event":'
"""How every line begins. Inside a JSON string the quotes would be escaped, so it appears nowhere
else: the reader finds a whole line that was appended to a torn one."""


class Where(NamedTuple):
    """A line of evidence."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class LogLine(NamedTuple):
    """One line of a log, as it was read."""

    where: Where
    text: bytes


class Ignored(NamedTuple):
    """A line that could not be used, and why."""

    where: Where
    why: str


class Instant(NamedTuple):
    """A moment, on both clocks of the process that wrote it down."""

    boot: str
    at: float
    wall: float

    def moved_to(self, at: float) -> Instant:
        """The moment when this process's boot-time clock showed `at`."""
        return Instant(self.boot, at, self.wall + (at - self.at))

    def since(self, other: Instant) -> float:
        """Seconds from `other` to here: on the boot-time clock if it is the same one."""
        return self.at - other.at if self.boot == other.boot else self.wall - other.wall

    def __str__(self) -> str:
        try:
            moment = datetime.fromtimestamp(self.wall, UTC)
        except (OverflowError, ValueError, OSError):
            return f"{self.wall:.3f}"
        return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d}Z"


class EvidenceFact(NamedTuple):
    """Something that a line says: a moment, what it was, and where it stands."""

    when: Instant
    what: str
    where: Where

    def as_dict(self) -> dict[str, Any]:
        return {**self.when._asdict(), "what": self.what, "where": str(self.where)}


class MissingEvents(NamedTuple):
    """Events of one session that are not in the log."""

    session: str
    since: Instant
    until: Instant
    events: int


def read(paths: Iterable[str | os.PathLike[str]]) -> Iterator[LogLine]:
    """The lines of files, one by one."""
    for path in paths:
        name = os.fspath(path)
        try:
            with open(name, "rb") as file:
                for number, text in enumerate(file, 1):
                    yield LogLine(Where(name, number), text)
        except OSError as error:
            raise ConfigError(f"the audit log {name} cannot be read: {error.strerror}") from error


_HUGE = 1e15
"""No time in seconds is beyond this; it keeps infinities and nonsense out of the sums."""


class _Malformed(Exception):
    """The line is JSON, but not one of ours."""


def _text(raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise _Malformed(f"no usable {name!r}")
    return value


def _number(raw: dict[str, Any], name: str) -> float:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_HUGE < value < _HUGE:
        raise _Malformed(f"no usable {name!r}")
    return float(value)


def _moment(raw: dict[str, Any], name: str, now: Instant) -> Instant:
    """A moment on the writer's clock. Minus infinity is how it writes "already over"."""
    if raw.get(name) == float("-inf"):
        return now
    return now.moved_to(_number(raw, name))


def _whole(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Malformed(f"no usable {name!r}")
    return value


@dataclass(slots=True)
class LeaseFacts:
    """What all lines together say of one lease."""

    sessions: set[str] = field(default_factory=set)
    deadline: EvidenceFact | None = None
    """The latest it was confirmed for."""
    given_up: EvidenceFact | None = None
    """The earliest its own session stopped counting on it."""
    counted_on: EvidenceFact | None = None
    """The latest its own session still counted on it."""
    died: list[tuple[str, EvidenceFact]] = field(default_factory=list)
    """By which session, and when, its holder was proved dead."""
    expired: EvidenceFact | None = None
    """The earliest somebody found it expired."""


def later(one: EvidenceFact | None, other: EvidenceFact) -> EvidenceFact:
    return other if one is None or other.when.since(one.when) > 0 else one


def earlier(one: EvidenceFact | None, other: EvidenceFact) -> EvidenceFact:
    return other if one is None or other.when.since(one.when) < 0 else one


def _once(facts: list[EvidenceFact], fact: EvidenceFact) -> None:
    """The same log may be given twice, or copied."""
    if all(other.when != fact.when for other in facts):
        facts.append(fact)


class OpenTerm(NamedTuple):
    """A term of which only the beginning is looked at yet."""

    name: str
    lease: str
    pid: int
    start: EvidenceFact


TermKey = tuple[str, int, str]
"""Election, token, session."""


class Evidence:
    """Everything the lines say, gathered in one pass and in no particular order."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.lines = 0
        self.ignored: list[Ignored] = []
        self.unreadable = 0
        """Ignored lines that may have been events. Not those in which a file ends: their process
        was killed as it wrote, or is still at it."""
        self.missing: dict[MissingEvents, None] = {}
        self.processes: set[tuple[str, int]] = set()
        self.wall_offsets: dict[str, tuple[float, float]] = {}
        self.last_sign: dict[str, EvidenceFact] = {}
        self.leases: defaultdict[str, LeaseFacts] = defaultdict(LeaseFacts)
        self.begun: defaultdict[TermKey, list[OpenTerm]] = defaultdict(list)
        self.resigned: defaultdict[TermKey, list[EvidenceFact]] = defaultdict(list)
        self.lost: defaultdict[TermKey, list[EvidenceFact]] = defaultdict(list)
        self.told: dict[TermKey, Instant] = {}
        """When a lost term's body was told. A process that was paused is told late."""
        self.overruns: defaultdict[TermKey, list[EvidenceFact]] = defaultdict(list)

    def take(self, line: LogLine) -> None:
        where, text = line
        self.files.add(where.file)
        if not text.strip():
            return
        self.lines += 1
        try:
            raw = self._parse(where, text)
            if raw is not None:
                self._record(where, raw)
        except _Malformed as malformed:
            self._ignore(where, f"not a line of an audit log: {malformed}")

    def _parse(self, where: Where, text: bytes) -> dict[str, Any] | None:
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            whole = text.rfind(_OPENING)
            if whole > 0:
                self._ignore(where, "torn: another line begins inside it")
                return self._parse(where, text[whole:])
            if text.endswith(b"\n"):
                self._ignore(where, "not JSON")
            else:
                self.ignored.append(Ignored(where, "torn: the file ends inside it"))
            return None
        if not isinstance(raw, dict):
            raise _Malformed("not an object")
        return raw

    def _ignore(self, where: Where, why: str) -> None:
        self.ignored.append(Ignored(where, why))
        self.unreadable += 1

    def _record(self, where: Where, raw: dict[str, Any]) -> None:
        kind, session, pid = _text(raw, "event"), _text(raw, "session"), _whole(raw, "pid")
        now = Instant(_text(raw, "boot"), _number(raw, "at"), _number(raw, "wall"))
        fact = EvidenceFact(now, kind, where)
        match kind:
            case "granted" | "renewed" | "elected" | "unsure":
                self._counting(raw, fact, session)
            case "leaselost":
                ended = _moment(raw, "ended_at", now)
                facts = self._own_lease(_text(raw, "lease"), session)
                gave_up = EvidenceFact(ended, f"its lease was lost ({raw.get('reason')})", where)
                facts.given_up = earlier(facts.given_up, gave_up)
                facts.counted_on = later(facts.counted_on, gave_up)
            case "leaseended":
                self._other_lease(raw, fact, session)
            case "lost":
                key, lease = self._term_key(raw, session), _text(raw, "lease")
                ended = _moment(raw, "ended_at", now)
                lost = EvidenceFact(ended, f"lost ({raw.get('reason')})", where)
                _once(self.lost[key], lost)
                self.told[key] = now
                facts = self._own_lease(lease, session)
                facts.counted_on = later(facts.counted_on, lost)
            case "resigned":
                _once(self.resigned[self._term_key(raw, session)], fact)
            case "overrun":
                _once(self.overruns[self._term_key(raw, session)], fact)
            case "gap":
                since = now if raw.get("since") is None else _moment(raw, "since", now)
                gap = MissingEvents(session, since, now, _whole(raw, "missed"))
                self.missing[gap] = None  # once, though the same log may be given twice
        self.processes.add((now.boot, pid))
        self.last_sign[session] = later(self.last_sign.get(session), fact)
        offset = now.wall - now.at
        low, high = self.wall_offsets.get(now.boot, (offset, offset))
        self.wall_offsets[now.boot] = (min(low, offset), max(high, offset))

    def _counting(self, raw: dict[str, Any], fact: EvidenceFact, session: str) -> None:
        """The session says that its lease is good."""
        lease = _text(raw, "lease")
        if fact.what == "unsure":
            if raw.get("remaining_s") != float("-inf") and _number(raw, "remaining_s") > 0:
                facts = self._own_lease(lease, session)
                facts.counted_on = later(facts.counted_on, fact)
            return
        until = _moment(raw, "valid_until", fact.when)
        if fact.what == "elected":
            begun = OpenTerm(_text(raw, "name"), lease, _whole(raw, "pid"), fact)
            known = self.begun[self._term_key(raw, session)]
            if all(other.start.when != fact.when for other in known):
                known.append(begun)
        facts = self._own_lease(lease, session)
        deadline = EvidenceFact(until, f"the last deadline of its lease ({fact.what})", fact.where)
        facts.deadline = later(facts.deadline, deadline)
        facts.counted_on = later(facts.counted_on, fact)

    def _other_lease(self, raw: dict[str, Any], fact: EvidenceFact, session: str) -> None:
        """The session says that somebody's lease has ended."""
        lease, cause = _text(raw, "lease"), _text(raw, "cause")
        told = EvidenceFact(fact.when, f"found {cause} by session {session}", fact.where)
        facts = self.leases[lease]
        if cause == "died":
            facts.died.append((session, told))
        elif cause == "expired":
            facts.expired = earlier(facts.expired, told)
        else:
            raise _Malformed(f"unknown cause {cause!r}")

    def _own_lease(self, lease: str, session: str) -> LeaseFacts:
        facts = self.leases[lease]
        facts.sessions.add(session)
        return facts

    def _term_key(self, raw: dict[str, Any], session: str) -> TermKey:
        return _text(raw, "election"), _whole(raw, "token"), session
