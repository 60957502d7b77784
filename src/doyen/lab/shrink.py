"""Reduction of a failing run: fewer and shorter faults, fewer clients and servers, less time.

Faults are dropped by delta debugging, in halves and then in smaller and smaller parts, as long as a
violation of the same kind remains. A smaller plan has other latencies and other random outcomes of
crashes, so each is run with several (`Plan.noise`) before it counts as one that does not fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from doyen.lab.outcome import RunOutcome
from doyen.lab.plan import Fault, Plan

Run = Callable[[Plan], RunOutcome]

NOISES = 3


class _Search:
    def __init__(self, run: Run, plan: Plan, first: RunOutcome, tries: int) -> None:
        self.run = run
        self.plan = plan
        self.outcome = first
        self.kinds = {violation.kind for violation in first.violations}
        self.tries = tries

    def take(self, plan: Plan) -> bool:
        """Continue from this plan if it fails as well."""
        for noise in dict.fromkeys([self.plan.noise, *range(NOISES)]):
            if self.tries <= 0:
                return False
            self.tries -= 1
            tried = plan.replace(noise=noise)
            outcome = self.run(tried)
            if any(violation.kind in self.kinds for violation in outcome.violations):
                self.plan, self.outcome = tried, outcome
                return True
        return False


def shrink(run: Run, plan: Plan, *, tries: int = 600) -> tuple[Plan, RunOutcome]:
    """The smallest plan found that fails in the same way, and its outcome."""
    first = run(plan)
    if first.ok:
        raise ValueError("this plan does not fail, so it cannot be reduced")
    search = _Search(run, plan, first, tries)
    size = None
    while size != _size(search.plan) and search.tries > 0:
        size = _size(search.plan)
        _end_sooner(search)
        _drop_faults(search)
        _simplify(search)
        _shorten(search)
    return search.plan, search.outcome


def _size(plan: Plan) -> tuple[int, int, int, float]:
    return plan.nodes, len(plan.faults), plan.clients, plan.for_s


def _end_sooner(search: _Search) -> None:
    """End the run right after the violation."""
    at = search.outcome.violations[0].at
    if at + 0.1 < search.plan.for_s:
        for_s = round(at + 0.05, 3)
        kept = tuple(fault for fault in search.plan.faults if fault.at < for_s)
        search.take(search.plan.replace(for_s=for_s, faults=kept))


def _drop_faults(search: _Search) -> None:
    part = max(1, len(search.plan.faults) // 2)
    while search.plan.faults:
        dropped = False
        at = 0
        while at < len(search.plan.faults):
            faults = search.plan.faults
            if search.take(search.plan.replace(faults=faults[:at] + faults[at + part :])):
                dropped = True
            else:
                at += part
        if part == 1 and not dropped:
            return
        part = max(1, part // 2)


def _simplify(search: _Search) -> None:
    """Find the fewest clients, then the fewest servers."""
    for clients in range(search.plan.clients):
        if search.take(search.plan.replace(clients=clients)):
            break
    plan = search.plan
    mentioned = {name for fault in plan.faults for name in fault.nodes if name.startswith("n")}
    for nodes in range(3, plan.nodes):
        smaller = plan.replace(nodes=nodes)
        if mentioned <= set(smaller.names) and search.take(smaller):
            break


def _shorten(search: _Search) -> None:
    for at in range(len(search.plan.faults)):
        for shorter in _shorter(search.plan.faults[at]):
            faults: Sequence[Fault] = search.plan.faults
            search.take(search.plan.replace(faults=(*faults[:at], shorter, *faults[at + 1 :])))


def _shorter(fault: Fault) -> Iterator[Fault]:
    if fault.for_s > 0.1:
        yield msgspec.structs.replace(fault, for_s=round(fault.for_s / 4, 3))
        yield msgspec.structs.replace(fault, for_s=round(fault.for_s / 2, 3))
    if len(fault.nodes) > 2:
        yield msgspec.structs.replace(fault, nodes=fault.nodes[:2])
