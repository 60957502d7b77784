"""The cost of an idle candidate, and the resources of a session."""

from __future__ import annotations

import time

from bench import probes
from bench.crew import Crew
from bench.figures import Figure

__all__ = ["idle"]


def idle(*, seconds: float = 20.0, sessions: int = 5) -> list[Figure]:
    """Processor time of an idle leader and an idle candidate at the default ttl."""
    with Crew() as crew:
        crew.start("leader", "candidate", events=[])
        crew.wait("entered", "leader")
        crew.start("candidate", "candidate", events=["waiting"])
        crew.wait("waiting", "candidate")
        time.sleep(0.5)
        pids = {who: crew.pid(who) for who in ("candidate", "leader")}
        before = {who: (probes.cpu_s(pid), probes.switches(pid)) for who, pid in pids.items()}
        began = time.monotonic()
        time.sleep(seconds)
        figures = []
        for who, pid in pids.items():
            cpu_s, woken = probes.cpu_s(pid) - before[who][0], probes.switches(pid) - before[who][1]
            took_s = time.monotonic() - began
            figures.append(
                Figure(
                    name=f"idle {who}, processor",
                    value=cpu_s / took_s * 100,
                    unit="% of a core",
                    limit=0.1 if who == "candidate" else None,
                    details={
                        "wakeups_per_s": woken / took_s,
                        "threads": probes.threads(pid),
                        "descriptors": probes.descriptors(pid),
                        "rss_mib": probes.rss(pid) / 2**20,
                        "seconds": took_s,
                    },
                )
            )
        return [*figures, *_per_session(crew, sessions)]


def _per_session(crew: Crew, sessions: int) -> list[Figure]:
    crew.start("sessions", "sessions", count=sessions)
    steps = [crew.wait("opened", "sessions") for _ in range(sessions + 1)]
    nothing, first, last = steps[0], steps[1], steps[-1]

    def each(what: str) -> float:
        return float(last[what] - first[what]) / max(1, sessions - 1)

    return [
        Figure(
            name=f"{what} of a waiting session",
            value=each(what),
            unit="each",
            details={"for_the_process_once": first[what] - nothing[what] - each(what)},
        )
        for what in ("threads", "descriptors")
    ]
