"""Verifying audit logs: build terms from the evidence, compare them, and report.

Pure; may import errors and `doyen.audit.evidence`.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any, Literal

from doyen.audit.evidence import (
    Evidence,
    EvidenceFact,
    ForeignSighting,
    Ignored,
    Instant,
    LeaseFacts,
    LogLine,
    OpenTerm,
    TermKey,
    earlier,
    later,
    read,
)
from doyen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TermEvidence:
    """A term, as far as the logs show it."""

    election: str
    name: str
    token: int
    lease: str
    session: str
    pid: int
    start: EvidenceFact
    end: EvidenceFact
    election_kind: str = "elections"

    @property
    def key(self) -> TermKey:
        return self.election_kind, self.election, self.token, self.session

    @property
    def was_valid(self) -> bool:
        return self.end.when.at > self.start.when.at

    def describe(self) -> list[str]:
        start, end = self.start.when, self.end.when
        return [
            f"{self.name}, token {self.token} (pid {self.pid}, session {self.session},"
            f" lease {self.lease})",
            f"    from {start} (boot {start.at:.3f}): {self.start.what}, {self.start.where}",
            f"    to   {end} (boot {end.at:.3f}): {self.end.what}, {self.end.where}",
        ]

    def as_dict(self) -> dict[str, Any]:
        names = ("election", "election_kind", "name", "token", "lease", "session", "pid")
        plain = {name: getattr(self, name) for name in names}
        return {**plain, "start": self.start.as_dict(), "end": self.end.as_dict()}


Kind = Literal[
    "overlap",
    "token-reused",
    "token-regressed",
    "alive-after-death",
    "expired-early",
    "valid-beyond-deadline",
    "overrun",
]


@dataclass(frozen=True, slots=True)
class AuditViolation:
    """One violation of the guarantees, with the lines that show it."""

    kind: Kind
    election: str | None
    headline: str
    by_s: float
    when: Instant
    terms: tuple[TermEvidence, ...] = ()
    evidence: tuple[EvidenceFact, ...] = ()

    @property
    def story(self) -> str:
        """The violation as readable text."""
        lines = [self.headline]
        for term in self.terms:
            lines += [f"  {line}" for line in term.describe()]
        lines += [f"  {fact.when}: {fact.what}, {fact.where}" for fact in self.evidence]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "election": self.election,
            "headline": self.headline,
            "by_s": self.by_s,
            "terms": [term.as_dict() for term in self.terms],
            "evidence": [fact.as_dict() for fact in self.evidence],
        }


Verdict = Literal["proved", "disproved", "incomplete", "empty"]
"""`incomplete`: nothing contradicts the guarantees, but events are known to be missing from the
logs, or lines cannot be read. `empty`: the logs contain no term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of verifying a set of logs."""

    files: int
    lines: int
    processes: int
    elections: int
    terms: int
    never_valid: int
    """Terms whose validity had ended before `elected` was written; not counted in `terms`."""
    changes: int
    """The number of terms that began with another leader than the previous term."""
    gaps_s: tuple[float, ...]
    """The times from the end of a term to the beginning of the next, in ascending order."""
    wall_clocks_compared: bool
    tolerance_s: float
    missing: int
    """Events that could not be written in time, as counted by the `gap` lines of the logs."""
    unreadable: int
    """Lines that cannot be read: torn, damaged, or written by another program."""
    without_beginning: int
    """Terms of which the logs contain the end and not the beginning."""
    violations: tuple[AuditViolation, ...]
    warnings: tuple[str, ...]
    ignored: tuple[Ignored, ...]
    foreign: tuple[ForeignSighting, ...] = ()
    """Terms of candidates of other programs, each as it was first seen. They write no audit log, so
    the proof does not cover them; that no term of doyen overlapped when they were seen, it does."""
    held: tuple[TermEvidence, ...] = ()
    """All terms, also those that were never valid, in the order of their beginning."""

    @property
    def empty(self) -> bool:
        """Whether the logs contain no term and no violation."""
        return not (self.terms or self.never_valid or self.violations)

    @property
    def verdict(self) -> Verdict:
        if self.violations:
            return "disproved"
        if self.missing or self.unreadable or self.without_beginning:
            return "incomplete"
        return "empty" if self.empty else "proved"

    @property
    def ok(self) -> bool:
        """Whether the guarantees are proved and nothing is known to be missing."""
        return self.verdict == "proved"

    @property
    def gap_p50_s(self) -> float | None:
        return statistics.median(self.gaps_s) if self.gaps_s else None

    @property
    def gap_max_s(self) -> float | None:
        return self.gaps_s[-1] if self.gaps_s else None

    def as_dict(self) -> dict[str, Any]:
        """The report as printed by `--json`; without the times of `gaps_s`, and without `held`."""
        counts = ("files", "lines", "processes", "elections", "terms", "never_valid", "changes")
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "missing": self.missing,
            "unreadable": self.unreadable,
            "without_beginning": self.without_beginning,
            **{name: getattr(self, name) for name in counts},
            "gap_p50_s": self.gap_p50_s,
            "gap_max_s": self.gap_max_s,
            "wall_clocks_compared": self.wall_clocks_compared,
            "tolerance_s": self.tolerance_s,
            "violations": [violation.as_dict() for violation in self.violations],
            "foreign": [sighting.as_dict() for sighting in self.foreign],
            "warnings": list(self.warnings),
            "ignored": [{"where": str(where), "why": why} for where, why in self.ignored],
        }


def verify(paths: Iterable[str | os.PathLike[str]], *, tolerance_s: float = 0.0) -> Report:
    """Verify the logs at `paths` together, as the logs of one store."""
    return verify_lines(read(paths), tolerance_s=tolerance_s)


def verify_lines(lines: Iterable[LogLine], *, tolerance_s: float = 0.0) -> Report:
    """Verify lines that the caller has read.

    >>> from doyen.audit import Where
    >>> stamp = '"at":1.0,"wall":1e9,"boot":"b","pid":7,"session":"s"'
    >>> text = '{"event":"elected","election":"e","name":"n","token":1,"lease":"l",'
    >>> text += '"valid_until":5.0,' + stamp + '}'
    >>> report = verify_lines([LogLine(Where("log", 1), text.encode())])
    >>> report.ok, report.terms
    (True, 1)
    """
    if not 0 <= tolerance_s < float("inf"):
        raise ConfigError(
            f"the tolerance must be a finite number of seconds, at least 0; got {tolerance_s}"
        )
    evidence = Evidence()
    for line in lines:
        evidence.add(line)
    return _Judge(evidence, tolerance_s).report()


_FOREIGN_SHOWN = 5
_EQUAL_S = 1e-6
"""Times that are equal may differ by this much after floating-point additions."""


class _Judge:
    """Builds the terms from the evidence and compares them."""

    def __init__(self, evidence: Evidence, tolerance_s: float) -> None:
        self._seen = evidence
        self._tolerance_s = tolerance_s
        self._wall_compared = False
        self._violations: list[AuditViolation] = []
        self._warnings: list[str] = []
        self._gaps: list[float] = []
        self._changes = 0

    def report(self) -> Report:
        terms = [self._term(key, begun) for key, all_ in self._seen.begun.items() for begun in all_]
        by_lease: defaultdict[str, list[TermEvidence]] = defaultdict(list)
        for term in terms:
            by_lease[term.lease].append(term)
        terms = []
        for lease, facts in self._seen.leases.items():
            terms += self._after_proof(lease, facts, by_lease[lease])
            self._expiry(lease, facts, by_lease[lease])

        elections: defaultdict[tuple[str, str], list[TermEvidence]] = defaultdict(list)
        for term in terms:
            elections[term.election_kind, term.election].append(term)
        for election in sorted(elections):
            everyone = elections[election]
            self._reuse(everyone)
            self._compare([term for term in everyone if term.was_valid])
            self._overran(everyone)
        foreign: dict[tuple[str, str, int], ForeignSighting] = {}
        for sighting in sorted(self._seen.foreign, key=lambda each: each.seen.when.wall):
            election = sighting.election_kind, sighting.election
            foreign.setdefault((*election, sighting.token), sighting)
            self._compare_foreign(
                sighting, [term for term in elections[election] if term.was_valid]
            )
        self._warn_of_foreign(foreign.values())
        self._warn()

        seen = self._seen
        valid = sum(term.was_valid for term in terms)
        return Report(
            files=len(seen.files),
            lines=seen.lines,
            processes=len(seen.processes),
            elections=len(elections),
            terms=valid,
            never_valid=len(terms) - valid,
            changes=self._changes,
            gaps_s=tuple(sorted(self._gaps)),
            wall_clocks_compared=self._wall_compared,
            tolerance_s=self._tolerance_s,
            missing=sum(gap.events for gap in seen.missing),
            unreadable=seen.unreadable,
            without_beginning=len(seen.terms_without_beginning()),
            violations=tuple(sorted(self._violations, key=lambda found: found.when.wall)),
            warnings=tuple(self._warnings),
            ignored=tuple(seen.ignored),
            foreign=tuple(foreign.values()),
            held=tuple(sorted(terms, key=_start)),
        )

    def _after(self, one: Instant, other: Instant) -> float:
        """By how many seconds `one` is certainly after `other`; not positive if it may not be."""
        if one.boot == other.boot:
            return one.at - other.at
        self._wall_compared = True
        return one.wall - other.wall - self._tolerance_s

    def _term(self, key: TermKey, begun: OpenTerm) -> TermEvidence:
        """The term, with the end that its own process recorded."""
        kind, election, token, session = key
        facts = self._seen.leases[begun.lease]
        lost = self._seen.lost.get(key, [])
        resigned = self._seen.resigned.get(key, [])
        # Never empty: `elected` itself records a deadline.
        ends = [fact for fact in (facts.deadline, facts.given_up) if fact] + lost + resigned
        end = min(ends, key=lambda fact: fact.when.at)
        term = TermEvidence(
            election, begun.name, token, begun.lease, session, begun.pid, begun.start, end, kind
        )
        for fact in resigned if not lost else ():
            facts.counted_on = later(facts.counted_on, fact)
            if facts.deadline and fact.when.at > facts.deadline.when.at:
                self._warnings.append(
                    f"{term.name} (token {token}) of {election!r} resigned"
                    f" {fact.when.at - facts.deadline.when.at:.3f} s after its last deadline,"
                    f" {fact.where}"
                )
        for fact in lost:
            if (
                facts.deadline
                and fact.when.at > facts.deadline.when.at + _EQUAL_S
                and not self._missing(term.start.when, fact.when, {session})
            ):
                self._beyond(term, fact, facts.deadline)
        return term

    def _missing(self, start: Instant, end: Instant, sessions: Set[str] | None = None) -> bool:
        """Whether a gap overlaps the time from `start` to `end`: in the events of `sessions`, or
        of any session if that is None."""
        return any(
            gap.since.since(end) <= 0 <= gap.until.since(start)
            for gap in self._seen.missing
            if sessions is None or gap.session in sessions
        )

    def _end_is_known(self, term: TermEvidence, at: Instant) -> bool:
        """Whether no missing event can have ended the term, so that it was valid at `at`.

        The end is recorded by the term's own process or, if that was killed, by any process that
        found out. So if the process lived, only gaps of its own session matter; otherwise all do.
        """
        key = term.key
        if key in self._seen.lost or key in self._seen.resigned:
            return True
        alive = self._seen.leases[term.lease].given_up is not None
        return not self._missing(term.start.when, at, {term.session} if alive else None)

    def _beyond(self, term: TermEvidence, lost: EvidenceFact, deadline: EvidenceFact) -> None:
        by_s = lost.when.since(deadline.when)
        self._violations.append(
            AuditViolation(
                "valid-beyond-deadline",
                term.election,
                f"{term.name} took its term of {term.election!r} for valid until {by_s:.3f} s"
                " after the last deadline of its lease",
                by_s,
                lost.when,
                (term,),
                (deadline, lost),
            )
        )

    def _after_proof(
        self, lease: str, facts: LeaseFacts, terms: list[TermEvidence]
    ) -> list[TermEvidence]:
        """The terms of a lease, ended where another process proved the death of its holder.

        If the holder wrote anything that contradicts the proof, that is a violation and the terms
        stay as they are.
        """
        proofs = [fact for session, fact in facts.died if session not in facts.sessions]
        if not proofs:
            return terms
        proof = reduce(earlier, proofs)
        signs = [facts.counted_on] if facts.counted_on else []
        if any(self._after(term.end.when, proof.when) > 0 for term in terms):
            # The holder died during a term, so no later event of any kind may come from it.
            signs += [
                self._seen.last_sign[session]
                for session in facts.sessions
                if session in self._seen.last_sign
            ]
        for sign in signs:
            by_s = self._after(sign.when, proof.when)
            if by_s > 0:
                self._violations.append(
                    AuditViolation(
                        "alive-after-death",
                        terms[0].election if terms else None,
                        f"the holder of lease {lease} was declared dead but was still alive"
                        f" {by_s:.3f} s later",
                        by_s,
                        proof.when,
                        tuple(terms),
                        (proof, sign),
                    )
                )
                return terms
        ended = []
        for term in terms:
            at = term.start.when.at + proof.when.since(term.start.when)
            if at < term.end.when.at:
                end = proof._replace(when=term.start.when.moved_to(at))
                ended.append(replace(term, end=end))
            else:
                ended.append(term)
        return ended

    def _expiry(self, lease: str, facts: LeaseFacts, terms: list[TermEvidence]) -> None:
        if facts.expired is None or facts.deadline is None:
            return
        relied = facts.deadline
        if facts.given_up is not None:
            relied = earlier(relied, facts.given_up)
        by_s = self._after(relied.when, facts.expired.when)
        if by_s > 0 and not self._missing(relied.when, facts.expired.when, facts.sessions):
            concerned = [t for t in terms if t.end.when.since(facts.expired.when) > 0]
            self._violations.append(
                AuditViolation(
                    "expired-early",
                    concerned[0].election if concerned else None,
                    f"lease {lease} was declared expired {by_s:.3f} s before its holder's deadline",
                    by_s,
                    facts.expired.when,
                    tuple(concerned),
                    (facts.expired, relied),
                )
            )

    def _reuse(self, terms: list[TermEvidence]) -> None:
        first: dict[int, TermEvidence] = {}
        for term in sorted(terms, key=_start):
            other = first.setdefault(term.token, term)
            if other is not term:
                self._violations.append(
                    AuditViolation(
                        "token-reused",
                        term.election,
                        f"token {term.token} of {term.election!r} was assigned twice",
                        0.0,
                        term.start.when,
                        (other, term),
                    )
                )

    def _compare(self, terms: list[TermEvidence]) -> None:
        """Check the valid terms of one election for overlaps and token order; record gaps.

        Terms of one boot are compared on the boot-time clock only. Terms of different boots are
        compared on the wall clocks.
        """
        in_order: list[TermEvidence] = []
        boots: defaultdict[str, list[TermEvidence]] = defaultdict(list)
        for term in sorted(terms, key=lambda term: (term.start.when.at, term.token)):
            boots[term.start.when.boot].append(term)
        for in_order in boots.values():
            self._sweep(in_order, across=False)
        if len(boots) > 1:
            in_order = sorted(terms, key=_start)
            self._sweep(in_order, across=True)
        for before, after in pairwise(in_order):
            self._changes += (before.name, before.session) != (after.name, after.session)
            gap = after.start.when.since(before.end.when)
            if gap >= 0:
                self._gaps.append(gap)

    def _sweep(self, in_order: list[TermEvidence], *, across: bool) -> None:
        """Compare each term with two of the terms that began before it: the one that ends last
        and the one with the highest token. If these are in order with it, all are."""
        lasting: dict[str, TermEvidence] = {}
        highest: dict[str, TermEvidence] = {}
        for term in in_order:
            boot = term.start.when.boot
            for other_boot, other in lasting.items():
                if (other_boot != boot) == across:
                    self._overlap(other, term)
            for other_boot, other in highest.items():
                if (other_boot != boot) == across:
                    self._token_order(other, term)
            if boot not in lasting or term.end.when.at > lasting[boot].end.when.at:
                lasting[boot] = term
            if boot not in highest or term.token > highest[boot].token:
                highest[boot] = term

    def _overlap(self, first: TermEvidence, second: TermEvidence) -> None:
        until = first.end
        if self._after(until.when, second.end.when) > 0:
            until = second.end
        by_s = self._after(until.when, second.start.when)
        if by_s > 0 and not self._end_is_known(first, second.start.when):
            self._warnings.append(
                f"{first.name} (token {first.token}) and {second.name} (token {second.token}) may"
                f" both have led {first.election!r} for {by_s:.3f} s; the end of the first term"
                " may be among the missing events"
            )
        elif by_s > 0:
            clock = "boot clock" if until.when.boot == second.start.when.boot else "wall clocks"
            self._violations.append(
                AuditViolation(
                    "overlap",
                    first.election,
                    f"two leaders of {first.election!r} for {by_s:.3f} s ({clock})",
                    by_s,
                    second.start.when,
                    (first, second),
                )
            )

    def _token_order(self, first: TermEvidence, second: TermEvidence) -> None:
        by_s = self._after(second.start.when, first.start.when)
        if second.token < first.token and by_s > 0:
            self._violations.append(
                AuditViolation(
                    "token-regressed",
                    first.election,
                    f"token {second.token} of {first.election!r} was assigned {by_s:.3f} s after"
                    f" token {first.token}",
                    by_s,
                    second.start.when,
                    (first, second),
                )
            )

    def _compare_foreign(self, sighting: ForeignSighting, terms: list[TermEvidence]) -> None:
        """Check that no term of doyen covers the time in which a foreign leader was seen, and that
        the tokens of the terms before and after it are lower and higher."""
        since, seen = sighting.since, sighting.seen
        known = f"{sighting.leader!r}, a candidate of another program (token {sighting.token})"
        for term in terms:
            before, after = (
                self._after(since, term.end.when),
                self._after(term.start.when, seen.when),
            )
            inside = min(self._after(since, term.start.when), self._after(term.end.when, seen.when))
            if inside > 0 and self._end_is_known(term, seen.when):
                kind: Kind = "overlap"
                headline = f"two leaders of {term.election!r}: {term.name} and {known}"
            elif (before > 0 and term.token >= sighting.token) or (
                after > 0 and term.token <= sighting.token
            ):
                kind = "token-regressed"
                order = "before" if before > 0 else "after"
                headline = f"token {term.token} of {term.election!r} was assigned {order} {known}"
            else:
                continue
            by_s = max(inside, before, after)
            self._violations.append(
                AuditViolation(kind, term.election, headline, by_s, seen.when, (term,), (seen,))
            )

    def _warn_of_foreign(self, sightings: Iterable[ForeignSighting]) -> None:
        by_election: defaultdict[str, list[str]] = defaultdict(list)
        for each in sightings:
            by_election[each.election].append(f"{each.leader!r} (token {each.token})")
        for election, leaders in by_election.items():
            shown = ", ".join(leaders[:_FOREIGN_SHOWN])
            more = len(leaders) - _FOREIGN_SHOWN
            shown += f" and {more} more" if more > 0 else ""
            one = len(leaders) == 1
            terms, were = ("1 term", "was") if one else (f"{len(leaders)} terms", "were")
            self._warnings.append(
                f"{terms} of {election!r} {were} foreign: {shown}. Other programs write no audit"
                " log: the proof covers when they were seen, not what they did"
            )

    def _overran(self, terms: list[TermEvidence]) -> None:
        """Report work that went on past its stop budget.

        It is a violation if the process was running and noticed the loss before the next term
        began. A process that was paused notices later, and the logs cannot show what its work did
        when it resumed, so that is a warning.
        """
        if not self._seen.overruns:
            return
        for term in terms:
            key = term.key
            noticed = self._seen.loss_noticed.get(key)
            for overrun in self._seen.overruns.get(key, ()):
                rivals = [
                    other
                    for other in terms
                    if other.token > term.token
                    and other.was_valid
                    and self._after(overrun.when, other.start.when) > 0
                ]
                rival = min(rivals, key=lambda other: other.token, default=None)
                if rival is None or noticed is None or self._after(rival.start.when, noticed) <= 0:
                    into = f", into the term of {rival.name} (token {rival.token})" if rival else ""
                    self._warnings.append(
                        f"the work of {term.name} (token {term.token}) for {term.election!r} went"
                        f" on past its stop budget{into}; from then on only fencing by token"
                        f" protects against its writes, {overrun.where}"
                    )
                    continue
                by_s = self._after(overrun.when, rival.start.when)
                self._violations.append(
                    AuditViolation(
                        "overrun",
                        term.election,
                        f"the work of {term.name} was still running {by_s:.3f} s after"
                        f" {rival.name} became leader of {term.election!r}",
                        by_s,
                        overrun.when,
                        (term, rival),
                        (overrun,),
                    )
                )

    def _warn(self) -> None:
        seen = self._seen
        missing = sum(gap.events for gap in seen.missing)
        if missing:
            sessions = len({gap.session for gap in seen.missing})
            first = min((gap.since for gap in seen.missing), key=lambda when: when.wall)
            last = max((gap.until for gap in seen.missing), key=lambda when: when.wall)
            self._warnings.append(
                f"{missing} events of {sessions} sessions, from {first} to {last}, could not be"
                " written in time (the disk was full or slow, or a pipe was not read); nothing is"
                " proved about this time"
            )
        if seen.unreadable:
            these = "1 line" if seen.unreadable == 1 else f"{seen.unreadable} lines"
            self._warnings.append(
                f"{these} cannot be read (torn by a full disk or a power cut, damaged, or written"
                " by another program); what was recorded there is missing from the proof"
            )
        if cut := len(seen.ignored) - seen.unreadable:
            these = "1 file ends" if cut == 1 else f"{cut} files end"
            self._warnings.append(
                f"{these} in the middle of a line: the process was killed while it wrote the line,"
                " or is still writing it"
            )
        if cut_off := len(seen.terms_without_beginning()):
            these = "1 term ends" if cut_off == 1 else f"{cut_off} terms end"
            self._warnings.append(
                f"{these} in these logs without beginning in them: a line was deleted, or a file is"
                " missing; verify all files of the store together"
            )
        if self._wall_compared:
            for boot, (low, high) in seen.wall_offsets.items():
                if high - low > max(self._tolerance_s, 0.1):
                    self._warnings.append(
                        f"the wall clock of boot {boot} was changed by {high - low:.3f} s while"
                        " the logs were written; comparisons with other boots are uncertain by as"
                        " much"
                    )


def _start(term: TermEvidence) -> tuple[float, int]:
    return term.start.when.wall, term.token
