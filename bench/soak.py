"""An hour at the default ttl with every core busy: is leadership ever lost with nothing failing?"""

from __future__ import annotations

import os
import time
from collections import Counter

from bench.crew import Crew
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


def soak(*, minutes: float = 2.0, load: bool = False, candidates: int = 3) -> list[Figure]:
    """One leader and some candidates; every loss, whoever reports it, is a spurious one."""
    seen: Counter[str] = Counter()
    valid_until: dict[str, float] = {}
    slack_s = float("inf")
    with Crew() as crew:
        for number in range(candidates + 1):
            crew.start(f"candidate-{number}", "candidate", events=WATCHED)
        if load:
            for number in range(os.cpu_count() or 1):
                crew.start_command(f"spinner-{number}", ["-I", "-S", "-c", SPIN])
        crew.wait("entered")
        give_up = time.monotonic() + minutes * 60
        while (left_s := give_up - time.monotonic()) > 0:
            for report in crew.take(min(left_s, 5.0)):
                seen[report["kind"]] += 1
                lease = report.get("lease", "")
                if report["kind"] in ("granted", "renewed"):
                    if lease in valid_until:
                        slack_s = min(slack_s, valid_until[lease] - report["at"])
                    valid_until[lease] = report["valid_until"]
                elif report["kind"] in LOSSES:
                    print(report, flush=True)
    return [
        Figure(
            name=f"soak of {minutes:g} min, {'all cores loaded' if load else 'no load'}",
            value=sum(seen[kind] for kind in LOSSES),
            unit="spurious losses",
            limit=0,
            details={
                "renewals": seen["renewed"],
                "unsure": seen["unsure"],
                "least_left_at_renewal_s": slack_s,
                "terms": seen["elected"],
                "candidates": candidates + 1,
            },
        )
    ]
