"""A leader is stopped for longer than its ttl and continued: how much of its work is accepted?

Work items take 10 ms each and are submitted to two resources. One, a `GuardedFile`, checks tokens.
The other accepts everything. Each records what it accepted, in order. An item counts as stale if
the resource had already accepted an item of a later term.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from bench.crew import Crew
from bench.figures import Figure, spread

__all__ = ["frozen", "stale_items"]

IDIOMS = {"checked": "checks term.valid", "scope": "async scope", "unchecked": "ignores its term"}


def frozen(*, trials: int = 10, ttl_s: float = 1.0, observe_s: float = 1.0) -> list[Figure]:
    """SIGSTOP until another candidate leads, then SIGCONT: the most stale items of any trial."""
    figures = []
    for idiom, what in IDIOMS.items():
        outcomes = [
            _freeze(idiom, ttl_s, observe_s)
            for _ in range(trials if idiom != "unchecked" else min(trials, 2))
        ]
        fenced, unfenced, refused = (list(column) for column in zip(*outcomes, strict=True))
        kept = idiom != "unchecked"
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
    """Stale items at the fenced and the unfenced resource, and the number of refused items."""
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
        refused = 0 if idiom == "unchecked" else crew.wait("lost", "old")["refused"]
        time.sleep(observe_s)
        crew.kill("old")
        crew.kill("new")
        fenced, unfenced = (stale_items(crew.folder / name) for name in ("fenced", "unfenced"))
        return fenced, unfenced, refused if idiom != "unchecked" else unfenced - fenced


def stale_items(resource: Path) -> int:
    """The number of items that were accepted after an item of a later term."""
    highest = stale = 0
    for line in resource.read_text().splitlines():
        token = int(line.split()[1])
        stale += token < highest
        highest = max(highest, token)
    if not highest:
        raise RuntimeError(f"no item was submitted to {resource.name}")
    return stale
