"""What the page of `doyen lab compare` shows: every figure of every run, by protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from doyen.lab.outcome import RunOutcome, Statistics, time_or

_Figure = tuple[str, str, bool, Callable[[Statistics, float], float]]
_FIGURES: tuple[_Figure, ...] = (
    ("time to the first leader", "s", False, lambda run, most: time_or(run.first_leader_s, most)),
    ("time to heal", "s", False, lambda run, most: time_or(run.healed_s, most)),
    ("available under faults", "%", True, lambda run, _: 100 * run.available_share),
    ("messages per second", "", False, lambda run, _: run.messages / run.virtual_s),
    ("messages per write", "", False, lambda run, _: run.messages / max(1, run.writes)),
    ("bytes per second", "kB", False, lambda run, _: run.bytes / run.virtual_s / 1000),
    ("leaders", "", False, lambda run, _: run.leaders),
    ("writes answered", "", True, lambda run, _: run.writes),
)
"""Name, unit, whether more is better, and the figure of a run."""


def comparison_film(runs: Mapping[str, Sequence[RunOutcome]]) -> dict[str, Any]:
    """The object that the page draws."""
    first = next(iter(runs.values()))
    plan = first[0].plan
    return {
        "title": f"{len(runs)} protocols under the same faults",
        "chips": [f"{plan.nodes} nodes", f"{len(first)} seeds", f"{plan.for_s:g} s of faults each"],
        "seeds": [outcome.plan.seed for outcome in first],
        "protocols": list(runs),
        "violations": [
            sum(len(each.violations) for each in outcomes) for outcomes in runs.values()
        ],
        "figures": [
            {
                "name": name,
                "unit": unit,
                "more": more,
                "values": [
                    [round(of(each.statistics, plan.for_s), 4) for each in outcomes]
                    for outcomes in runs.values()
                ],
            }
            for name, unit, more, of in _FIGURES
        ],
    }
