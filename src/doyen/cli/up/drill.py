"""`doyen up` unattended: leaders are killed and frozen in turn, and in the end the audit logs are
judged.

Each kind of fault is dealt at least once, however short the run. Failover times run from the
instant before the signal to the `elected` in the successor's audit log, on one boot-time clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from doyen.audit import Report, verify
from doyen.cli.up.cluster import CandidateProcesses, Failover, InjectedFault, Kind

if TYPE_CHECKING:
    from doyen.cli.up.quorum import NodeLeaderChange

__all__ = ["Drill", "DrillResult", "duration", "judge", "summary"]

_START_WITHIN_S = 15.0
"""How long the first election may take: processes have to start."""
_PATIENCE = 3
"""How many worst cases are waited for a failover: a late one is reported with its true time."""
_LOOK_EVERY_S = 0.01

_FAULTS: tuple[Kind, ...] = ("killed", "frozen")
_LEADS_WITHIN_S = 15.0
"""How long the quorum may be without a leader of its own."""


def duration(seconds: float) -> str:
    """
    >>> duration(0.0031), duration(1.8742)
    ('3.1 ms', '1874 ms')
    """
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


class Drill:
    """Deals faults to the leaders of a cluster for a while."""

    def __init__(
        self,
        cluster: CandidateProcesses,
        *,
        for_s: float,
        stopping: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._for_s = for_s
        self._asked_to_stop = stopping
        self._tell = tell
        self._told = self._changes = 0
        self._began = cluster.now()
        self._pause_s = min(1.0, max(0.25, cluster.timing.ttl_s / 2))

    def run(self) -> list[str]:
        """Deal faults until the time is up, until stopped, or until a candidate is in trouble.

        Returns what went wrong.
        """
        if not self._until(lambda: self._cluster.ready, _START_WITHIN_S):
            return [] if self._stopping() else [self._no_start()]
        dealt = 0
        while kind := self._next(dealt):
            self._until(lambda: False, self._pause_s)
            recovery_s = self._cluster.thaw_after_s + _START_WITHIN_S
            if not self._until(lambda: self._cluster.ready, recovery_s):
                return [] if self._stopping() else [self._no_start()]
            fault = self._deal(kind)
            if fault is not None and not self._followed(fault):
                return [] if self._stopping() else [self._no_successor(fault)]
            dealt += fault is not None
            problem = self._deal_to_quorum(dealt)
            if problem is not None:
                return [] if self._stopping() else [problem]
        self._until(lambda: self._all_thawed, self._cluster.thaw_after_s)
        return []

    def _stopping(self) -> bool:
        return bool(self._cluster.troubles) or self._asked_to_stop()

    def _next(self, dealt: int) -> Kind | None:
        """The kinds in turn, each at least once; then whichever there is time for."""
        if self._stopping():
            return None
        if dealt < len(_FAULTS):
            return _FAULTS[dealt]
        in_turn = _FAULTS[dealt % len(_FAULTS)]
        return next((kind for kind in (in_turn, *_FAULTS) if self._time_for(kind)), None)

    def _deal(self, kind: Kind) -> InjectedFault | None:
        leader = self._cluster.leader
        if leader is None:
            return None
        (self._cluster.kill if kind == "killed" else self._cluster.freeze)(leader)
        return self._cluster.chronicle.pending

    def _deal_to_quorum(self, dealt: int) -> str | None:
        """Kill or freeze the node that leads the quorum; what is wrong, if nobody follows it."""
        quorum = self._cluster.quorum
        if quorum is None:
            return None
        if not self._until(lambda: quorum.whole, _LEADS_WITHIN_S):
            return f"the quorum was not whole again within {_LEADS_WITHIN_S:g} s"
        leader, count = quorum.leader, len(quorum.changes)
        if leader is not None:
            (quorum.kill if dealt % 2 else quorum.freeze)(leader)
            if not self._until(lambda: len(quorum.changes) > count, _LEADS_WITHIN_S):
                return f"nobody led the quorum within {_LEADS_WITHIN_S:g} s after {leader.name}"
        return None

    def _followed(self, fault: InjectedFault) -> bool:
        return self._until(
            lambda: self._cluster.chronicle.pending is not fault, self._cluster.worst_s * _PATIENCE
        )

    def _time_for(self, kind: Kind) -> bool:
        takes_s = self._pause_s + (self._cluster.timing.ttl_s if kind == "frozen" else 0.0)
        return self._cluster.now() - self._began + takes_s <= self._for_s

    @property
    def _all_thawed(self) -> bool:
        """And have said in their logs that they know."""
        cluster = self._cluster
        return all(
            seat.frozen_at is None
            and (not seat.alive or seat is cluster.leader or not cluster.chronicle.reign(seat.name))
            for seat in cluster.seats
        )

    def _until(self, reached: Callable[[], bool], within_s: float) -> bool:
        """Let things happen until then; False if it took too long, or the drill was stopped."""
        deadline = self._cluster.now() + within_s
        while True:
            self._cluster.tick()
            self._report()
            if reached():
                return True
            if self._stopping() or self._cluster.now() >= deadline:
                return False
            time.sleep(_LOOK_EVERY_S)

    def _report(self) -> None:
        """Tell of the changes of leadership that are new in the audit logs."""
        failovers = self._cluster.chronicle.failovers
        for failover in failovers[self._told :]:
            at_s = failover.to.at - self._began
            self._tell(f"{at_s:7.2f} s  {story(failover)}")
        self._told = len(failovers)
        if self._cluster.quorum is not None:
            changes = self._cluster.quorum.changes
            for change in changes[self._changes :]:
                self._tell(f"{self._cluster.now() - self._began:7.2f} s  {change.story()}")
            self._changes = len(changes)

    def _no_start(self) -> str:
        states = ", ".join(
            f"{seat.name} {'frozen' if seat.frozen_at is not None else 'running'}"
            if seat.alive
            else f"{seat.name} dead"
            for seat in self._cluster.seats
        )
        return (
            f"no leader with a candidate behind it within {_START_WITHIN_S:g} s ({states});"
            " if others campaign on the same store, give the drill one of its own"
        )

    def _no_successor(self, fault: InjectedFault) -> str:
        return (
            f"{fault.name} (token {fault.token}) was {fault.kind}, and nobody was elected within"
            f" {self._cluster.worst_s * _PATIENCE:.2f} s; the worst case is"
            f" {self._cluster.worst_s:.2f} s"
        )


def story(failover: Failover) -> str:
    """A change of leadership in one line."""
    to, fault = failover.to, failover.fault
    if fault is None:
        return f"{to.name} leads (token {to.token})"
    took = duration(failover.seconds)
    return f"{fault.name} {fault.kind}, {to.name} leads (token {to.token}) after {took}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """What a run has shown."""

    failovers: tuple[Failover, ...]
    report: Report
    problems: tuple[str, ...]
    candidates: int
    ttl_s: float
    worst_s: float
    work_done: int
    quorum: tuple[NodeLeaderChange, ...] = ()
    """Changes of leader of the nodes that the candidates met at."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def times(self, kind: Kind) -> list[float]:
        """The failover times after one kind of fault, in order."""
        return sorted(
            failover.seconds
            for failover in self.failovers
            if failover.fault is not None and failover.fault.kind == kind
        )

    def as_dict(self) -> dict[str, Any]:
        summaries = {kind: times for kind in _FAULTS if (times := self.times(kind))}
        return {
            "ok": self.ok,
            "problems": list(self.problems),
            "candidates": self.candidates,
            "ttl_s": self.ttl_s,
            "worst_failover_s": self.worst_s,
            "summary": {
                kind: {"count": len(times), "p50_s": statistics.median(times), "max_s": times[-1]}
                for kind, times in summaries.items()
            },
            "failovers": [
                {
                    "fault": fault.kind,
                    "name": fault.name,
                    "token": fault.token,
                    "successor": failover.to.name,
                    "successor_token": failover.to.token,
                    "failover_s": failover.seconds,
                }
                for failover in self.failovers
                if (fault := failover.fault) is not None
            ],
            "quorum": [asdict(change) for change in self.quorum],
            "work_done": self.work_done,
            "audit": self.report.as_dict(),
        }


def judge(cluster: CandidateProcesses, problems: list[str], *, bounded: bool) -> DrillResult:
    """Judge a run whose candidates have stopped, by their audit logs.

    With `bounded`, a failover beyond the worst case is a problem too; a user who freezes everyone
    is no proof against it.
    """
    report = verify([seat.audit for seat in cluster.seats if seat.audit.exists()])
    found = [*problems, *(violation.story for violation in report.violations), *cluster.troubles]
    failovers = tuple(cluster.chronicle.failovers)
    if bounded:
        late = [failover for failover in failovers if failover.seconds > cluster.worst_s]
        found += [f"{story(failover)}: later than the worst case" for failover in late]
        found += [] if report.terms else ["nobody was ever elected, so nothing is proved"]
    return DrillResult(
        failovers=failovers,
        report=report,
        problems=tuple(found),
        candidates=len(cluster.seats),
        ttl_s=cluster.timing.ttl_s,
        worst_s=cluster.worst_s,
        work_done=cluster.work_done,
        quorum=tuple(cluster.quorum.changes) if cluster.quorum else (),
    )


def summary(verdict: DrillResult) -> list[str]:
    """The verdict, for people."""
    lines = []
    for kind in _FAULTS:
        if times := verdict.times(kind):
            often = "once" if len(times) == 1 else f"{len(times)} times"
            median, longest = duration(statistics.median(times)), duration(times[-1])
            lines.append(f"{kind} {often:<9} failover p50 {median:>8}, max {longest:>8}")
    lines.append(f"worst case by the lease: {duration(verdict.worst_s)}")
    report = verdict.report
    lines.append(
        f"processes: {report.processes}, terms: {report.terms}, items of work: {verdict.work_done},"
        f" audit lines: {report.lines}"
    )
    lines += [f"note: {warning}" for warning in report.warnings]
    if verdict.ok and not report.empty:
        lines.append("Proved by the audit logs: never two leaders, and every token above the last.")
    return lines + [f"FAILED: {problem}" for problem in verdict.problems]
