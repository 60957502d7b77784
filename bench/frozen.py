"""A leader is stopped past its ttl and goes on: what of its work is still accepted?

Work items take 10 ms each and are handed in to two resources. One, a `GuardedFile`, checks tokens;
the other takes what comes. Each keeps what it accepted, in order. An item counts as stale if the
resource had accepted one of a later term before.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from bench.crew import Crew
from bench.figures import Figure, spread

__all__ = ["frozen"]

IDIOMS = {
    "checked": "asks term.valid",
    "scope": "async scope",
    "heedless": "ignores its term",
}


def frozen(*, trials: int = 10, ttl_s: float = 1.0, observe_s: float = 1.0) -> list[Figure]:
    """SIGSTOP until another has taken over, then SIGCONT; stale items per trial, at worst."""
    figures = []
    for idiom, what in IDIOMS.items():
        outcomes = [
            _freeze(idiom, ttl_s, observe_s)
            for _ in range(trials if idiom != "heedless" else min(trials, 2))
        ]
        fenced, unfenced, refused = (list(column) for column in zip(*outcomes, strict=True))
        kept = idiom != "heedless"
        figures += [
            Figure(
                name=f"frozen leader, {what}, fenced",
                value=max(fenced),
                unit="stale items, worst",
                limit=0,
                details={"refused": spread(refused)},
            ),
            Figure(
                name=f"frozen leader, {what}, unfenced",
                value=max(unfenced),
                unit="stale items, worst",
                limit=1 if kept else None,
                details={"items": spread(unfenced), "ttl_s": ttl_s, "watched_s": observe_s},
            ),
        ]
    return figures


def _freeze(idiom: str, ttl_s: float, observe_s: float) -> tuple[int, int, int]:
    """Stale items at the fenced resource, at the unfenced one, and how many were refused."""
    with Crew() as crew:
        options = {"idiom": idiom, "ttl_s": ttl_s, "folder": str(crew.folder)}
        crew.start("old", "working", **options)
        crew.wait("entered", "old")
        crew.start("new", "working", **options)
        crew.wait("waiting", "new")
        time.sleep(random.uniform(0.1, 0.2))
        crew.signal("old", signal.SIGSTOP)
        crew.wait("entered", "new")
        time.sleep(0.3)
        crew.signal("old", signal.SIGCONT)
        refused = 0 if idiom == "heedless" else crew.wait("lost", "old")["refused"]
        time.sleep(observe_s)
        crew.kill("old")
        crew.kill("new")
        fenced, unfenced = (_stale(crew.folder / name) for name in ("fenced", "unfenced"))
        return fenced, unfenced, refused if idiom != "heedless" else unfenced - fenced


def _stale(resource: Path) -> int:
    """How many items were accepted after one of a later term."""
    highest = stale = 0
    for line in resource.read_text().splitlines():
        token = int(line.split()[1])
        stale += token < highest
        highest = max(highest, token)
    if not highest:
        raise RuntimeError(f"nothing was handed in to {resource.name}")
    return stale
