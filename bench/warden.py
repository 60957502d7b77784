"""Crashed and frozen leaders with a warden, beside a handover on the same engine, and its cost.

A killed process frees its memory before the kernel reports its death. This takes longer than some
engines need for a handover, so it is shown too, as `exit_ms`: from SIGKILL of a waiting candidate
until its pidfd is readable. A server on the same machine has work of its own with the connections
of the dead process: PostgreSQL ends a process for each.
"""

from __future__ import annotations

import os
import random
import select
import signal
import statistics
import time
from pathlib import Path

import servers
from bench.crew import Crew, now
from bench.engines import ENGINES, Engine, OnEngine
from bench.failover import settle
from bench.figures import Figure, spread
from bench.frozen import stale_items

__all__ = ["warden"]

TTL_S = 5.0
FROZEN_AFTER_S = 0.3
EXITS = 10
ALL = {**ENGINES, "quorum": Engine(servers.Quorum)}


class WithWarden(OnEngine):
    """A leader and a waiting candidate, each with a warden of its own."""

    def _start(self, who: str) -> str:
        return self._crew.start(
            who,
            "async-candidate",
            url=self._server.url,
            events=["waiting", "warded"],
            ttl_s=self._ttl_s,
            warden="process",
        )

    def _join(self) -> str:
        who = super()._join()
        self.wardens[who] = self._crew.wait("warded", who)["warden"]
        _wait_until_idle(self.wardens[who])
        return who

    def __init__(self, crew: Crew, server: servers.Server, ttl_s: float) -> None:
        self.wardens: dict[str, int] = {}
        super().__init__(crew, "warded", server, ttl_s)

    def exit_ms(self) -> float:
        """Kill one more candidate, and wait for the kernel's report."""
        who = self._join()
        self._crew.wait("waiting", who)
        settle()
        pidfd = os.pidfd_open(self._crew.pid(who))
        killed_at, dead = self._crew.crash(who)
        select.select([pidfd], [], [])
        took_ms = (now() - killed_at) * 1e3
        os.close(pidfd)
        self._crew.reap(dead)
        return took_ms

    @property
    def leaders_warden(self) -> int:
        return self.wardens[self._holder]


def warden(
    *, trials: int = 40, freezes: int = 10, idle_s: float = 5.0, only: str = ""
) -> list[Figure]:
    """From SIGKILL, or SIGSTOP, of the leader until a waiting candidate has entered its body.

    `only`: names of engines, separated by commas.
    """
    figures = []
    for name in only.split(",") if only else ALL:
        with ALL[name].start() as server:
            figures += _crash(name, server, trials, idle_s)
            if freezes:
                figures += _frozen(name, server, freezes)
    return figures


def _crash(name: str, server: servers.Server, trials: int, idle_s: float) -> list[Figure]:
    with Crew() as crew:
        contest = WithWarden(crew, server, TTL_S)
        for _ in range(trials):
            settle()
            contest.handover()
        handed, contest.gaps_ms = contest.gaps_ms, []
        for _ in range(trials):
            contest.crash()
        crashed = contest.gaps_ms
        exits = [contest.exit_ms() for _ in range(min(trials, EXITS))]
        memory_mib, wake_ups = _cost(contest.leaders_warden, idle_s)
    p50 = statistics.median
    return [
        Figure(
            name=f"{name}: crash with a warden",
            value=p50(crashed) / p50(handed),
            unit="times handover, p50",
            limit=2.0,
            details={
                "ms": spread(crashed, 1),
                "handover_ms": spread(handed, 1),
                "exit_ms": spread(exits, 1),
                "ttl_s": TTL_S,
            },
        ),
        Figure(
            name=f"{name}: crash with a warden, longest",
            value=sorted(crashed)[max(0, int(0.99 * len(crashed)) - 1)],
            unit="ms, p99",
            limit=50.0,
        ),
        Figure(
            name=f"{name}: memory of a warden",
            value=memory_mib,
            unit="MiB",
            limit=40.0,
            details={"wake_ups_per_s": wake_ups, "idle_s": idle_s},
        ),
    ]


def _wait_until_idle(pid: int) -> None:
    """A warden that is being started imports its client library, which takes a processor from what
    is measured."""

    def used() -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    before: list[str] = []
    while (now := used()) != before:
        before = now
        time.sleep(0.25)


def _cost(pid: int, idle_s: float) -> tuple[float, float]:
    """Resident memory of a process in MiB, and how often it wakes up in a second."""

    def wake_ups() -> int:
        found = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            status = (task / "status").read_text()
            found += int(status.partition("voluntary_ctxt_switches:")[2].split()[0])
        return found

    before = wake_ups()
    time.sleep(idle_s)
    woken = wake_ups() - before
    status = Path(f"/proc/{pid}/status").read_text()
    kib = int(status.partition("VmRSS:")[2].split()[0])
    return kib / 1024, round(woken / idle_s, 2)


def _frozen(name: str, server: servers.Server, trials: int) -> list[Figure]:
    gaps_ms, fenced, unfenced = [], [], []
    for _ in range(trials):
        with Crew() as crew:
            options = {
                "url": server.url,
                "folder": str(crew.folder),
                "idiom": "checked",
                "ttl_s": TTL_S,
                "warden": "process",
                "frozen_after_s": FROZEN_AFTER_S,
            }
            for who in ("old", "new"):
                crew.start(who, "working", **options)
                crew.wait("entered" if who == "old" else "waiting", who)
                crew.wait("warded", who)
            time.sleep(random.uniform(0.1, 0.2))
            stopped_at, old = crew.crash("old", signal.SIGSTOP)
            gaps_ms.append((crew.wait("entered", "new")["at"] - stopped_at) * 1e3)
            time.sleep(0.3)
            old.send_signal(signal.SIGCONT)  # it should be dead
            time.sleep(0.2)
            crew.reap(old)
            crew.dismiss()
            fenced.append(stale_items(crew.folder / "fenced"))
            unfenced.append(stale_items(crew.folder / "unfenced"))
    return [
        Figure(
            name=f"{name}: frozen leader, frozen_after_s={FROZEN_AFTER_S}",
            value=max(gaps_ms) / 1e3,
            unit="s, max",
            limit=0.6,
            details={
                "ms": spread(gaps_ms, 0),
                "ttl_s": TTL_S,
                "stale_fenced": max(fenced),
                "stale_unfenced": max(unfenced),
            },
        )
    ]
