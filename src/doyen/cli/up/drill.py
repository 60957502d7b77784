"""`doyen up` unattended: kills and freezes leaders in turn, and verifies the audit logs at the end.

Each kind of fault is injected at least once, however short the run is. A failover time is the time
from just before the signal to the `elected` in the successor's audit log, on the boot-time clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from doyen.audit import Report, verify
from doyen.cli.up.cluster import CandidateGroup, Failover, InjectedFault
from doyen.cli.up.processes import Kind

if TYPE_CHECKING:
    from doyen.cli.up.quorum import NodeLeaderChange

_START_WITHIN_S = 15.0
"""How long the first election may take, including the start of the processes."""
_PATIENCE = 3
"""A failover is awaited for this many times the worst case, so that a late one is measured."""
_LOOK_EVERY_S = 0.01

_FAULTS: tuple[Kind, ...] = ("killed", "frozen")
_LEADS_WITHIN_S = 15.0
"""How long the quorum may be without a leader."""


def duration(seconds: float) -> str:
    """
    >>> duration(0.0031), duration(1.8742)
    ('3.1 ms', '1874 ms')
    """
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


class Drill:
    """Injects faults into the leaders for a given time."""

    def __init__(
        self,
        cluster: CandidateGroup,
        *,
        for_s: float,
        stopping: Callable[[], bool],
        report_line: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._for_s = for_s
        self._asked_to_stop = stopping
        self._print = report_line
        self._reported = self._changes = 0
        self._began = cluster.now()
        self._pause_s = min(1.0, max(0.25, cluster.timing.ttl_s / 2))

    def run(self) -> list[str]:
        """Inject faults until the time is over, until stopped, or until a candidate fails.

        Returns the problems that were found.
        """
        if not self._until(lambda: self._cluster.ready, _START_WITHIN_S):
            return [] if self._stopping() else [self._no_start()]
        injected = 0
        while kind := self._next(injected):
            self._until(lambda: False, self._pause_s)
            recovery_s = self._cluster.thaw_after_s + _START_WITHIN_S
            if not self._until(lambda: self._cluster.ready, recovery_s):
                return [] if self._stopping() else [self._no_start()]
            fault = self._inject(kind)
            if fault is not None and not self._followed(fault):
                return [] if self._stopping() else [self._no_successor(fault)]
            injected += fault is not None
            problem = self._inject_into_quorum(injected)
            if problem is not None:
                return [] if self._stopping() else [problem]
        self._until(lambda: self._all_thawed, self._cluster.thaw_after_s)
        return []

    def _stopping(self) -> bool:
        return bool(self._cluster.failures) or self._asked_to_stop()

    def _next(self, injected: int) -> Kind | None:
        """The next kind of fault: each in turn at least once, then as long as there is time."""
        if self._stopping():
            return None
        if injected < len(_FAULTS):
            return _FAULTS[injected]
        in_turn = _FAULTS[injected % len(_FAULTS)]
        return next((kind for kind in (in_turn, *_FAULTS) if self._time_for(kind)), None)

    def _inject(self, kind: Kind) -> InjectedFault | None:
        leader = self._cluster.leader
        if leader is None:
            return None
        (self._cluster.kill if kind == "killed" else self._cluster.freeze)(leader)
        return self._cluster.history.pending

    def _inject_into_quorum(self, injected: int) -> str | None:
        """Kill or freeze the leader of the quorum; returns a problem if no node takes over."""
        quorum = self._cluster.quorum
        if quorum is None:
            return None
        if not self._until(lambda: quorum.healthy, _LEADS_WITHIN_S):
            return (
                f"the quorum did not have a leader and all its nodes within {_LEADS_WITHIN_S:g} s"
            )
        leader, count = quorum.leader, len(quorum.changes)
        if leader is not None:
            (quorum.kill if injected % 2 else quorum.freeze)(leader)
            if not self._until(lambda: len(quorum.changes) > count, _LEADS_WITHIN_S):
                return (
                    f"no node became leader within {_LEADS_WITHIN_S:g} s after {leader.name} failed"
                )
        return None

    def _followed(self, fault: InjectedFault) -> bool:
        return self._until(
            lambda: self._cluster.history.pending is not fault, self._cluster.worst_s * _PATIENCE
        )

    def _time_for(self, kind: Kind) -> bool:
        takes_s = self._pause_s + (self._cluster.timing.ttl_s if kind == "frozen" else 0.0)
        return self._cluster.now() - self._began + takes_s <= self._for_s

    @property
    def _all_thawed(self) -> bool:
        """Whether all candidates are thawed and have recorded the loss of their terms."""
        cluster = self._cluster
        return all(
            candidate.frozen_at is None
            and (
                not candidate.alive
                or candidate is cluster.leader
                or not cluster.history.term(candidate.name)
            )
            for candidate in cluster.candidates
        )

    def _until(self, reached: Callable[[], bool], within_s: float) -> bool:
        """Run until `reached`; False if that took too long or the drill was stopped."""
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
        """Print the changes of leader that are new in the audit logs."""
        failovers = self._cluster.history.failovers
        for failover in failovers[self._reported :]:
            at_s = failover.to.at - self._began
            self._print(f"{at_s:7.2f} s  {story(failover)}")
        self._reported = len(failovers)
        if self._cluster.quorum is not None:
            changes = self._cluster.quorum.changes
            for change in changes[self._changes :]:
                self._print(f"{self._cluster.now() - self._began:7.2f} s  {change.story()}")
            self._changes = len(changes)

    def _no_start(self) -> str:
        states = ", ".join(
            f"{candidate.name} {'frozen' if candidate.frozen_at is not None else 'running'}"
            if candidate.alive
            else f"{candidate.name} dead"
            for candidate in self._cluster.candidates
        )
        return (
            f"no leader with a waiting candidate within {_START_WITHIN_S:g} s ({states});"
            " if other candidates use the same store, use another store"
        )

    def _no_successor(self, fault: InjectedFault) -> str:
        return (
            f"{fault.name} (token {fault.token}) was {fault.kind}, and no candidate was elected"
            f" within {self._cluster.worst_s * _PATIENCE:.2f} s; the worst case is"
            f" {self._cluster.worst_s:.2f} s"
        )


def story(failover: Failover) -> str:
    """A change of leader as one line of text."""
    to, fault = failover.to, failover.fault
    if fault is None:
        return f"{to.name} leads (token {to.token})"
    took = duration(failover.seconds)
    return f"{fault.name} {fault.kind}, {to.name} leads (token {to.token}) after {took}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """The result of a run."""

    failovers: tuple[Failover, ...]
    report: Report
    problems: tuple[str, ...]
    candidates: int
    ttl_s: float
    worst_s: float
    work_done: int
    quorum: tuple[NodeLeaderChange, ...] = ()
    """Changes of leader of the quorum."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def times(self, kind: Kind) -> list[float]:
        """The failover times after one kind of fault, in ascending order."""
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


def judge(cluster: CandidateGroup, problems: list[str], *, bounded: bool) -> DrillResult:
    """Verify the audit logs of a run whose candidates have stopped.

    With `bounded`, a failover that exceeds the worst case is a problem. In the live view it is not,
    because the user may have frozen all candidates.
    """
    report = verify(
        [candidate.audit for candidate in cluster.candidates if candidate.audit.exists()]
    )
    found = [*problems, *(violation.story for violation in report.violations), *cluster.failures]
    failovers = tuple(cluster.history.failovers)
    if bounded:
        late = [failover for failover in failovers if failover.seconds > cluster.worst_s]
        found += [f"{story(failover)}: this exceeds the worst case" for failover in late]
        found += [] if report.terms else ["no candidate was elected, so nothing is proved"]
    return DrillResult(
        failovers=failovers,
        report=report,
        problems=tuple(found),
        candidates=len(cluster.candidates),
        ttl_s=cluster.timing.ttl_s,
        worst_s=cluster.worst_s,
        work_done=cluster.work_done,
        quorum=tuple(cluster.quorum.changes) if cluster.quorum else (),
    )


def summary(verdict: DrillResult) -> list[str]:
    """The result as lines of text."""
    lines = []
    for kind in _FAULTS:
        if times := verdict.times(kind):
            often = "once" if len(times) == 1 else f"{len(times)} times"
            median, longest = duration(statistics.median(times)), duration(times[-1])
            lines.append(f"{kind} {often:<9} failover p50 {median:>8}, max {longest:>8}")
    lines.append(f"worst case for these times: {duration(verdict.worst_s)}")
    report = verdict.report
    lines.append(
        f"processes: {report.processes}, terms: {report.terms}, items of work: {verdict.work_done},"
        f" audit lines: {report.lines}"
    )
    lines += [f"note: {warning}" for warning in report.warnings]
    if verdict.ok and report.ok:
        lines.append(
            "Proved by the audit logs: never two leaders at a time, and tokens always increased."
        )
    return lines + [f"FAILED: {problem}" for problem in verdict.problems]
