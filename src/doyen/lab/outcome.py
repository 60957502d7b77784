"""The result of a run: what did not hold, and the figures."""

from __future__ import annotations

from math import inf

from msgspec import Struct

from doyen.lab.plan import Plan


class Violation(Struct, frozen=True):
    """Something that must hold and did not, and when."""

    kind: str
    at: float
    text: str


class Statistics(Struct, kw_only=True):
    """The figures of a run."""

    events: int = 0
    virtual_s: float = 0.0
    messages: int = 0
    bytes: int = 0
    """Counted only on request, because encoding every message is slow."""
    first_leader_s: float | None = None
    leaders: int = 0
    """The number of generations that had a leader."""
    commits: int = 0
    writes: int = 0
    reads: int = 0
    available_share: float = 0.0
    """The share of the tenths of a second under faults in which a request was answered."""
    healed_s: float | None = None
    """The time from the end of all faults until the cluster had recovered."""
    faults: int = 0


def time_or(value_s: float | None, most_s: float) -> float:
    """A time of the figures, or `most_s` if it never came.

    >>> time_or(0.0, 20.0), time_or(None, 20.0)
    (0.0, 20.0)
    """
    return most_s if value_s is None else value_s


class RunOutcome(Struct, kw_only=True):
    """The result of a run."""

    plan: Plan
    events: int
    trace_hash: str
    violations: list[Violation]
    statistics: Statistics

    @property
    def ok(self) -> bool:
        return not self.violations


class Measurements:
    """Collects the figures of a run while it lasts."""

    def __init__(self) -> None:
        self.statistics = Statistics()
        self.healed_at = inf
        """When all faults ended."""
        self.last_tenth = -1
        """The tenth of a second of the last answer."""
        self._tenths: set[int] = set()

    def elected(self, now: float) -> None:
        if self.statistics.first_leader_s is None:
            self.statistics.first_leader_s = round(now, 4)

    def answered(self, now: float, *, writes: bool) -> None:
        if writes:
            self.statistics.writes += 1
        else:
            self.statistics.reads += 1
        self.last_tenth = int(now * 10)
        if now < self.healed_at:
            self._tenths.add(self.last_tenth)

    def recovered(self, now: float) -> None:
        """The cluster works again after the end of all faults."""
        self.statistics.healed_s = round(now - self.healed_at, 3)

    def outcome(
        self,
        plan: Plan,
        violations: list[Violation],
        *,
        trace: int,
        events: int,
        virtual_s: float,
        messages: int,
        leaders: int,
        commits: int,
        faults_s: float,
    ) -> RunOutcome:
        """The result. `faults_s` is how long the phase of faults lasted."""
        figures = self.statistics
        figures.events, figures.virtual_s, figures.messages = events, round(virtual_s, 3), messages
        figures.leaders, figures.commits = leaders, commits
        share = len(self._tenths) / max(1, int(faults_s * 10))
        figures.available_share = round(min(1.0, share), 4)
        return RunOutcome(
            plan=plan,
            events=events,
            trace_hash=f"{trace & (1 << 64) - 1:016x}",
            violations=violations,
            statistics=figures,
        )
