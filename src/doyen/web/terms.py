"""The terms of one election or lock, as an observer of the store saw them. Pure.

A term begins when its leader record is first seen and ends when the record is gone or has another
token. The store does not say why a record is gone. What was known just before usually tells: an
order to the leader, the end of its lease, or a lease that was still running.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from doyen.events.reasons import loss_cause
from doyen.model import Claim, Entry, Kind, Order, is_name

__all__ = [
    "ElectionRow",
    "EndCause",
    "LeaseSight",
    "SeenTerm",
    "clipped",
    "ordered_end",
    "row_key",
    "value_text",
]

TERMS = 60
"""How many terms of an election are kept."""
NAME = 300
"""How many characters of a name are sent for a list; details have all of it."""
RECENT_S = 3.0
"""How old a look at a lease may be to tell how a term ended. Those of leaders that a page shows are
looked at more often."""
NEARLY_OVER_S = 0.3
"""A lease that has no more than this left when its record disappears has run out."""

EndCause = Literal["", "expired", "died", "resigned", "transferred", "released", "lost", "ended"]
"""Why a term ended; empty while it lasts. A leader that resigned by itself has released the
election; `resigned` was ordered. `ended` is used if nothing is known but that it did."""

FAILED: frozenset[str] = frozenset({"expired", "died", "lost"})
"""The causes that are failures."""


def ordered_end(reason: str) -> EndCause | None:
    """How a term ended that was lost for this reason, if by an order; None if there was none.

    >>> ordered_end("'ops' ordered it to resign"), ordered_end("no renewal was confirmed in time")
    ('resigned', None)
    """
    match loss_cause(reason):
        case "ordered":
            return "resigned"
        case "transferred":
            return "transferred"
    return None


def clipped(text: str, limit: int = NAME) -> str:
    """A text of limited length.

    >>> clipped("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def value_text(value: object, indent: int | None = None) -> str:
    """A value of others as text.

    >>> value_text("a"), value_text({"a": 1})
    ('a', '{"a": 1}')
    """
    if isinstance(value, str) and indent is None:
        return value
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=indent is not None)
    except RecursionError:
        return "nested too deeply to be shown"


def row_key(kind: str, name: str) -> str:
    """The key of a row, which a page sends back: that of a name that doyen does not give is short.

    >>> row_key("elections", "billing"), len(row_key("elections", "x" * 10_000))
    ('elections/billing', 77)
    """
    if is_name(name):
        return f"{kind}/{name}"
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{kind}/{name[:50]}…{digest[:16]}"


@dataclass(slots=True)
class LeaseSight:
    """What is known of a lease: what was left of it when it was last looked at."""

    remaining_s: float
    at: float
    """When it was looked at, on the wall clock."""
    ttl_s: float
    ended: Literal["", "expired", "died"] = ""

    def left(self, now: float) -> float:
        """What is left of it if it was not renewed since."""
        return self.remaining_s - (now - self.at)


@dataclass(slots=True)
class SeenTerm:
    """A term: who led, with which token, from when to when, and why it ended."""

    name: str
    token: int
    since: float
    exact: bool = True
    """False if it had begun before it was first seen: it began at `since` or earlier."""
    until: float | None = None
    cause: EndCause = ""
    why: str = ""
    lease: str | None = None

    def as_list(self) -> list[Any]:
        """For the page, in the order that `timeline.js` reads."""
        return [
            clipped(self.name),
            self.token,
            round(self.since, 3),
            None if self.until is None else round(self.until, 3),
            self.cause,
            self.why,
            self.exact,
        ]


@dataclass(slots=True)
class ElectionRow:
    """One election, lock or slot of a semaphore: who leads, who waits, and its past terms."""

    kind: Kind
    name: str
    terms: list[SeenTerm] = field(default_factory=list)
    record: Entry | None = None
    waiting: tuple[Claim, ...] = ()
    """The line in order, without the leader."""
    order: Order | None = None
    """The last order that was seen for the present term."""
    changed_at: float = 0.0

    @property
    def key(self) -> str:
        return row_key(self.kind, self.name)

    @property
    def current(self) -> SeenTerm | None:
        """The term that has not ended."""
        return self.terms[-1] if self.terms and self.terms[-1].until is None else None

    @property
    def idle(self) -> bool:
        """Whether there is neither a leader nor a candidate."""
        return self.record is None and not self.waiting

    def look(
        self,
        record: Entry | None,
        tickets: Sequence[Entry],
        order: Order | None,
        now: float,
        *,
        first: bool,
        lease: LeaseSight | None = None,
        held: Iterable[str] = (),
    ) -> bool:
        """Take in what the store has now. True if anything that a page shows has changed.

        `first`: nothing was known before, so a term that is there began earlier. `lease` is what
        is known of the lease of the term that was current. `held` are leases that are certainly
        alive.
        """
        claims = {claim.attempt: claim for claim in (Claim.decode(each.value) for each in tickets)}
        leading = None if record is None else Claim.decode(record.value)
        if leading is not None:
            claims.pop(leading.attempt, None)
        waiting = tuple(claims.values())
        before = self.record
        unchanged = (
            waiting == self.waiting
            and (before and (before.revision, before.value))
            == (record and (record.revision, record.value))
            and not first
        )
        if order is not None:
            self.order = order
        term = self.current
        if term is not None and (record is None or record.revision != term.token):
            self._end(term, now, lease, held)
        if record is not None and leading is not None and self.current is None:
            # The record says when it was created. What was seen to begin is dated by the clock
            # that also dates its end.
            stated = leading.since if first else None
            since = now if stated is None else min(now, stated)
            self._begin(leading.name, record, since, exact=not first or stated is not None)
        elif term is not None and leading is not None and term is self.current:
            term.lease = record.lease if record else None
        self.record, self.waiting = record, waiting
        if not unchanged:
            self.changed_at = now
        return not unchanged

    def _begin(self, name: str, record: Entry, since: float, *, exact: bool) -> None:
        if any(each.token == record.revision for each in self.terms):
            # An outdated replica has answered in between: the term goes on.
            self.terms = [each for each in self.terms if each.token <= record.revision]
            last = self.terms[-1]
            last.until, last.cause, last.why = None, "", ""
            return
        if self.order is not None and self.order.token < record.revision:
            self.order = None
        self.terms.append(SeenTerm(name, record.revision, since, exact, lease=record.lease))
        del self.terms[:-TERMS]

    def _end(
        self, term: SeenTerm, now: float, lease: LeaseSight | None, held: Iterable[str]
    ) -> None:
        term.until = now
        term.cause, term.why = self._cause(term, now, lease, held)
        self.order = None

    def _cause(
        self, term: SeenTerm, now: float, lease: LeaseSight | None, held: Iterable[str]
    ) -> tuple[EndCause, str]:
        name, order = clipped(term.name, 60), self.order
        if lease is not None and not lease.ended and now - lease.at > RECENT_S:
            lease = None  # it may have been renewed since: no page shows it
        if order is not None and order.token == term.token:
            by = clipped(order.by, 60)
            if order.rank is not None:
                return "transferred", f"{name} was preempted by {by}, which has a higher priority."
            if order.successor:
                return "transferred", f"{name} handed over, on the order of {by}."
            return "resigned", f"{name} resigned, on the order of {by}."
        if lease is not None and lease.ended == "died":
            return "died", f"The process of {name} ended; the kernel reported it at once."
        if lease is not None and (lease.ended or lease.left(now) <= NEARLY_OVER_S):
            return (
                "expired",
                f"No renewal by {name} reached the store in time, and its lease ran out:"
                " its process was killed or frozen, or could not reach the store.",
            )
        if lease is not None or (term.lease is not None and term.lease in held):
            return "released", f"{name} resigned: its work had ended, or it was stopped."
        return "ended", f"{name} resigned, or its lease ended; the store does not tell which."

    def learn(self, terms: Iterable[SeenTerm], *, settled: bool = False) -> bool:
        """Take in terms from an audit log or a trail. They know more than an observer. `settled`:
        leaders have had the time to record the ends of their terms."""
        by_token = {term.token: term for term in self.terms}
        changed = False
        for known in terms:
            seen = by_token.get(known.token)
            if seen is None:
                if known.until is None and self.record is None:
                    continue  # begun and not seen yet, or already over: the store will tell
                by_token[known.token] = SeenTerm(
                    known.name, known.token, known.since, True, known.until, known.cause, known.why
                )
                changed = True
                continue
            if not seen.exact or seen.since != known.since:
                seen.since, seen.exact, changed = known.since, True, True
            if known.cause == "expired" and seen.cause:
                # The observer of the end of the lease knew this already. A lease that was still
                # running, of a leader that has recorded no end, was ended for it.
                name = clipped(seen.name, 60)
                if settled and seen.cause == "released":
                    seen.cause, changed = "died", True
                    seen.why = (
                        f"{name} recorded no end, and its lease had not run out:"
                        " its process was killed."
                    )
                elif settled and seen.cause == "ended":
                    seen.cause, changed = "expired", True
                    seen.why = (
                        f"{name} recorded no end: its process was killed or frozen, or could not"
                        " reach the store."
                    )
                continue
            if seen.until is not None and known.until not in (None, seen.until):
                seen.until, changed = known.until, True
                if seen.cause not in ("resigned", "transferred"):  # the order is known
                    seen.cause, seen.why = known.cause, known.why
        if changed:
            self.terms = sorted(by_token.values(), key=lambda term: term.token)[-TERMS:]
        return changed

    def as_dict(self) -> dict[str, Any]:
        """The row for the page."""
        record, current = self.record, self.current
        claim = None if record is None else Claim.decode(record.value)
        return {
            "key": self.key,
            "kind": self.kind,
            "name": clipped(self.name),
            "leader": None if claim is None else clipped(claim.name),
            "token": record.revision if record else (self.terms[-1].token if self.terms else None),
            "lease": record.lease if record else None,
            "ttl": None if claim is None else claim.ttl_s,
            "host": clipped(_host(claim), 100),
            "line": len(self.waiting),
            "next": [clipped(each.name, 60) for each in self.waiting[:3]],
            "ordered": bool(self.order and current and self.order.token == current.token),
            "terms": [term.as_list() for term in self.terms],
        }


def _host(claim: Claim | None) -> str:
    """What the meta of a leader says about where it runs, to filter by."""
    if claim is None:
        return ""
    values = (claim.meta.get(name) for name in ("host", "address", "url"))
    return next((str(value) for value in values if value), "")
