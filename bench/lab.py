"""The speed of the lab on one core, with all checks enabled."""

from __future__ import annotations

import time
from statistics import median

from bench.figures import Figure
from doyen.lab.plan import Plan
from doyen.lab.protocols import PROTOCOLS
from doyen.lab.runner import run
from doyen.lab.world import run_plan

__all__ = ["lab"]

CORES, NODES, IDLE = 100_000, 15_000, 500
"""Events per second of bare cores, turns per second of whole nodes, speed relative to real time."""


def _rate(protocol: str, world: str, seeds: int) -> float:
    """Events per second of processor time, under all faults."""
    run(protocol, 5, 0, for_s=1.0, world=world)
    began = time.process_time()
    events = sum(run(protocol, 5, seed, world=world).events for seed in range(seeds))
    return events / (time.process_time() - began)


def _idle(hours: float) -> float:
    """The speed of five idle Raft servers relative to real time."""
    plan = Plan(protocol="raft", nodes=5, seed=1, for_s=hours * 3600, clients=0)
    began = time.process_time()
    outcome = run_plan(plan)
    assert outcome.ok, outcome.violations
    return outcome.statistics.virtual_s / (time.process_time() - began)


def lab(seeds: int = 100, hours: float = 1.0) -> list[Figure]:
    """Events per second in the lab, and its speed relative to real time."""
    rates = {name: _rate(name, "cores", seeds) for name in PROTOCOLS}
    return [
        Figure(
            name="lab: bare cores, the slowest protocol",
            value=min(rates.values()),
            unit="events/s",
            limit=CORES,
            at_least=True,
            details={name: round(rate) for name, rate in rates.items()},
        ),
        Figure(
            name="lab: whole nodes",
            value=_rate("raft", "quorum", max(1, seeds // 10)),
            unit="turns/s",
            limit=NODES,
            at_least=True,
        ),
        Figure(
            name="lab: five idle servers of Raft",
            value=median(_idle(hours) for _ in range(3)),
            unit="times real time",
            limit=IDLE,
            at_least=True,
        ),
    ]
