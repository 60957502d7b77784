"""Spurious losses of leadership over a long time, at the default ttl and optionally with load.

Several engines run at once, each with its own server and election.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import ExitStack

from bench.crew import Crew, Report
from bench.engines import ENGINES
from bench.figures import Figure

__all__ = ["soak"]

SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""

WATCHED = ["elected", "granted", "leaseended", "leaselost", "lost", "overrun", "renewed", "unsure"]
LOSSES = ("leaselost", "lost", "leaseended")


class Watch:
    """The reports of the candidates of one engine."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.slack_s = float("inf")
        self._valid_until: dict[str, float] = {}

    def add(self, report: Report) -> None:
        kind = report["kind"]
        self.seen[kind] += 1
        if kind in ("granted", "renewed"):
            lease = report["lease"]
            if lease in self._valid_until:
                self.slack_s = min(self.slack_s, self._valid_until[lease] - report["at"])
            self._valid_until[lease] = report["valid_until"]
        elif kind in LOSSES:
            print(report, flush=True)

    @property
    def losses(self) -> int:
        return sum(self.seen[kind] for kind in LOSSES)


def soak(
    *, minutes: float = 2.0, load: bool = False, candidates: int = 3, only: str = "sqlite"
) -> list[Figure]:
    """A leader and some candidates on each engine without faults: every loss is spurious."""
    watches = {name: Watch() for name in only.split(",")}
    with Crew() as crew, ExitStack() as stack:
        for name in watches:
            url = crew.url if name == "sqlite" else stack.enter_context(ENGINES[name].start()).url
            for number in range(candidates + 1):
                crew.start(f"{name}-{number}", "candidate", url=url, events=WATCHED)
            crew.wait("entered")
        if load:
            for number in range(os.cpu_count() or 1):
                crew.start_command(f"spinner-{number}", ["-I", "-S", "-c", SPIN])
        give_up = time.monotonic() + minutes * 60
        while (left_s := give_up - time.monotonic()) > 0:
            for report in crew.take(min(left_s, 5.0)):
                watches[report["who"].partition("-")[0]].add(report)
    return [
        Figure(
            name=f"{name}: soak of {minutes:g} min, {'all cores loaded' if load else 'no load'}",
            value=watch.losses,
            unit="spurious losses",
            limit=0,
            details={
                "renewals": watch.seen["renewed"],
                "unsure": watch.seen["unsure"],
                "least_left_at_renewal_s": watch.slack_s,
                "terms": watch.seen["elected"],
                "candidates": candidates + 1,
            },
        )
        for name, watch in watches.items()
    ]
