"""Many candidates in one election, and many elections on one session."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from bench.crew import Crew
from bench.figures import Figure, spread
from doyen.lease.timing import DEFAULT_TTL_S, Timing

__all__ = ["herd", "many"]

PATIENCE_S = 300.0


def herd(*, processes: int = 10, sessions: int = 100, changes: int = 20) -> list[Figure]:
    """Candidates wait in line, each in its own session, and the leader resigns repeatedly.

    A candidate counts as woken if the store notifies one of its watches. The candidate that
    resigned campaigns again, so the length of the line is constant.
    """
    gaps_ms, per_change = [], []
    with Crew() as crew:
        names = [f"p{number}" for number in range(processes)]
        for name in names:
            crew.start(name, "herd", sessions=sessions, ttl_s=4 * DEFAULT_TTL_S)
            crew.wait("ready", name, PATIENCE_S)
        leader = crew.wait("entered")["who"]
        _counts(crew, names)
        for _ in range(changes):
            crew.send(leader, "resign")
            resigned = crew.wait("resigned", leader)
            entered = crew.wait("entered")
            gaps_ms.append((entered["at"] - resigned["at"]) * 1e3)
            leader = entered["who"]
            # A thundering herd would arrive at once: a quarter of a second is a hundred handovers.
            losses = [report for report in crew.take(0.25) if report["kind"] == "loss"]
            if losses:
                raise RuntimeError(f"candidates lost their leases: {losses[0]['what']}")
            per_change.append(_counts(crew, names))
    woken = [counts["woken"] for counts in per_change]
    creates = [counts["create"] for counts in per_change]
    return [
        Figure(
            name=f"{processes * sessions} candidates, woken per change",
            value=max(woken),
            unit="candidates, worst",
            limit=1,
            details={
                "changes": changes,
                "woken": sum(woken),
                "creates": sum(creates),
                "layout": f"{processes} processes of {sessions} sessions",
                "handover_ms": spread(gaps_ms),
                "calls_per_change": _mean(per_change),
            },
        )
    ]


def _counts(crew: Crew, names: list[str]) -> Counter[str]:
    total: Counter[str] = Counter()
    for name in names:
        crew.send(name, "count")
    for name in names:
        total.update(crew.wait("counts", name)["counts"])
    return total


def _mean(counts: list[Counter[str]]) -> dict[str, float]:
    names = sorted({name for each in counts for name in each} - {"renew", "resigned", "woken"})
    return {name: statistics.mean(each[name] for each in counts) for name in names}


def many(
    *, elections: int = 10_000, traced: int = 2_000, settle_s: float = 2.0, hold_s: float = 15.0
) -> list[Figure]:
    """Many elections led by one session: the time to win them, and their cost while led.
    Memory includes everything that an election needs, the caller's task included."""
    held = _many(elections=elections, settle_s=settle_s, hold_s=hold_s, traced=False)
    objects = _many(elections=traced, settle_s=settle_s, hold_s=0.0, traced=True)
    renewals = held["calls"].pop("renew", 0)
    timing = Timing()
    alone = held["held_s"] / (timing.renew_every_s * (1 - timing.renew_jitter)) + 1
    kib = {"resident": held["bytes_each"] / 1024, "objects": objects["bytes_each"] / 1024}
    return [
        Figure(
            name=f"{elections} elections, acquired in",
            value=held["took_s"],
            unit="s",
            limit=10.0,
            details={"per_s": round(elections / held["took_s"]), "released_s": held["released_s"]},
        ),
        Figure(
            name=f"{elections} elections, renewals",
            value=renewals,
            unit=f"in {held['held_s']:.0f} s",
            limit=round(alone, 1),
            details={
                "limit": "what one lease renews at most",
                "other_calls": held["calls"] or "none",
                "cpu_share": held["cpu_share"],
            },
        ),
        Figure(
            name=f"{elections} elections, memory of each",
            value=max(kib.values()),
            unit="KiB",
            limit=8.0,
            details={"resident_kib": kib["resident"], "objects_kib": kib["objects"]},
        ),
    ]


def _many(**options: Any) -> dict[str, Any]:
    with Crew() as crew:
        crew.start("many", "many", **options)
        held = crew.wait("held", within_s=PATIENCE_S)
        held["released_s"] = crew.wait("released", within_s=PATIENCE_S)["took_s"]
        return held
