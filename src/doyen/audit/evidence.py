"""Reading audit logs: collects the facts of all lines in one pass, in any order.

No verdict is reached here. Lines that cannot be used are listed with the reason. A torn line does
not affect the others, even if a whole line was appended to it. Memory use grows with the number of
terms and leases, not of lines. Pure except for `read`; may import errors.
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

_OPENING = b'{"event":'
"""How every line begins. It cannot occur later in a line, because quotes inside a JSON string are
escaped. So the reader can find a whole line that was appended to a torn one."""


class Where(NamedTuple):
    """A line of a log: file name and line number."""

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
    """A time, on both clocks of the process that recorded it."""

    boot: str
    at: float
    wall: float

    def moved_to(self, at: float) -> Instant:
        """The time at which the boot-time clock of the same process showed `at`."""
        return Instant(self.boot, at, self.wall + (at - self.at))

    def since(self, other: Instant) -> float:
        """Seconds from `other` to this: on the boot-time clock if both have the same boot id."""
        return self.at - other.at if self.boot == other.boot else self.wall - other.wall

    def __str__(self) -> str:
        try:
            moment = datetime.fromtimestamp(self.wall, UTC)
        except (OverflowError, ValueError, OSError):
            return f"{self.wall:.3f}"
        return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d}Z"


class EvidenceFact(NamedTuple):
    """One fact from a line: when, what, and in which line."""

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
    """Yield the lines of the files, one after another."""
    for path in paths:
        name = os.fspath(path)
        try:
            with open(name, "rb") as file:
                for number, text in enumerate(file, 1):
                    yield LogLine(Where(name, number), text)
        except OSError as error:
            raise ConfigError(
                f"the audit log {name} cannot be read: {error.strerror}; check its path and"
                " permissions"
            ) from error


_HUGE = 1e15
"""Times in seconds with a greater absolute value are refused, so that sums stay finite."""


class _Malformed(Exception):
    """The line is JSON but not an event of an audit log."""


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
    """A time on the writer's boot-time clock. Minus infinity means "already over"."""
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
    """The facts about one lease."""

    sessions: set[str] = field(default_factory=set)
    deadline: EvidenceFact | None = None
    """The latest deadline that was confirmed."""
    given_up: EvidenceFact | None = None
    """The earliest time at which its own session took it for lost."""
    counted_on: EvidenceFact | None = None
    """The latest time at which its own session still took it for valid."""
    died: list[tuple[str, EvidenceFact]] = field(default_factory=list)
    """The sessions that proved the death of its holder, and when."""
    expired: EvidenceFact | None = None
    """The earliest time at which a session found it expired."""


def later(one: EvidenceFact | None, other: EvidenceFact) -> EvidenceFact:
    return other if one is None or other.when.since(one.when) > 0 else one


def earlier(one: EvidenceFact | None, other: EvidenceFact) -> EvidenceFact:
    return other if one is None or other.when.since(one.when) < 0 else one


def _once(facts: list[EvidenceFact], fact: EvidenceFact) -> None:
    """Append the fact unless it is known: the same log may be given twice."""
    if all(other.when != fact.when for other in facts):
        facts.append(fact)


class OpenTerm(NamedTuple):
    """The beginning of a term."""

    name: str
    lease: str
    pid: int
    start: EvidenceFact


TermKey = tuple[str, str, int, str]
"""Election, token, session."""


class ForeignSighting(NamedTuple):
    """A candidate of another program that led at some time from `since` to `seen`."""

    election_kind: str
    election: str
    leader: str
    token: int
    since: Instant
    seen: EvidenceFact

    def as_dict(self) -> dict[str, Any]:
        names = ("election", "election_kind", "leader", "token")
        return {**{name: getattr(self, name) for name in names}, "seen": self.seen.as_dict()}


class Evidence:
    """The facts of all lines. The order in which lines are added does not matter."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.lines = 0
        self.ignored: list[Ignored] = []
        self.unreadable = 0
        """The number of ignored lines that may have been events. An unfinished last line of a file
        is not counted: its process was killed while it wrote the line, or is still writing it."""
        self.missing: dict[MissingEvents, None] = {}
        self.processes: set[tuple[str, int]] = set()
        self.wall_offsets: dict[str, tuple[float, float]] = {}
        self.last_sign: dict[str, EvidenceFact] = {}
        self.leases: defaultdict[str, LeaseFacts] = defaultdict(LeaseFacts)
        self.begun: defaultdict[TermKey, list[OpenTerm]] = defaultdict(list)
        self.resigned: defaultdict[TermKey, list[EvidenceFact]] = defaultdict(list)
        self.lost: defaultdict[TermKey, list[EvidenceFact]] = defaultdict(list)
        self.loss_noticed: dict[TermKey, Instant] = {}
        """When the process of a lost term noticed the loss. A process that was paused notices
        late."""
        self.overruns: defaultdict[TermKey, list[EvidenceFact]] = defaultdict(list)
        self.foreign: dict[ForeignSighting, None] = {}

    def terms_without_beginning(self) -> set[TermKey]:
        """Terms whose end is in the logs while their beginning is not."""
        return (self.lost.keys() | self.resigned.keys() | self.overruns.keys()) - self.begun.keys()

    def add(self, line: LogLine) -> None:
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
                self._lease_is_valid(raw, fact, session)
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
                self.loss_noticed[key] = now
                facts = self._own_lease(lease, session)
                facts.counted_on = later(facts.counted_on, lost)
            case "resigned":
                _once(self.resigned[self._term_key(raw, session)], fact)
            case "overrun":
                _once(self.overruns[self._term_key(raw, session)], fact)
            case "foreignleader":
                election_kind, election, token, _ = self._term_key(raw, session)
                since = _moment(raw, "since", now)
                leader = _text(raw, "leader")
                self.foreign[
                    ForeignSighting(election_kind, election, leader, token, since, fact)
                ] = None
            case "gap":
                since = now if raw.get("since") is None else _moment(raw, "since", now)
                gap = MissingEvents(session, since, now, _whole(raw, "missed"))
                self.missing[gap] = None  # a dict, since the same log may be given twice
        self.processes.add((now.boot, pid))
        self.last_sign[session] = later(self.last_sign.get(session), fact)
        offset = now.wall - now.at
        low, high = self.wall_offsets.get(now.boot, (offset, offset))
        self.wall_offsets[now.boot] = (min(low, offset), max(high, offset))

    def _lease_is_valid(self, raw: dict[str, Any], fact: EvidenceFact, session: str) -> None:
        """Record that the session took its own lease for valid."""
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
        """Record that the session found another session's lease ended."""
        lease, cause = _text(raw, "lease"), _text(raw, "cause")
        found = EvidenceFact(fact.when, f"found {cause} by session {session}", fact.where)
        facts = self.leases[lease]
        if cause == "died":
            facts.died.append((session, found))
        elif cause == "expired":
            facts.expired = earlier(facts.expired, found)
        else:
            raise _Malformed(f"unknown cause {cause!r}")

    def _own_lease(self, lease: str, session: str) -> LeaseFacts:
        facts = self.leases[lease]
        facts.sessions.add(session)
        return facts

    def _term_key(self, raw: dict[str, Any], session: str) -> TermKey:
        kind = _text(raw, "election_kind") if "election_kind" in raw else "elections"
        return kind, _text(raw, "election"), _whole(raw, "token"), session
