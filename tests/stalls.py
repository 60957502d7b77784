"""How long processes waited for a processor while they were ready to run, as the kernel counts it.

Time in which a process waits for a timer, an answer or a lock is not counted: it is the process's
own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from servers.janitor import family_of

Waits = dict[int, float]
"""Seconds, by thread."""


def waits_of(pids: Iterable[int]) -> Waits:
    """What the threads of these processes have waited for a processor since they began. Empty where
    the kernel does not count it."""
    waits = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                waits[int(path.parent.name)] = int(path.read_text().split()[1]) / 1e9
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has ended
    return waits


def stalled_s(before: Iterable[Waits], after: Iterable[Waits]) -> float:
    """The delay of work that passes through groups of processes one after the other. A group counts
    with the thread that waited longest, because its threads wait at the same time."""
    return sum(
        max((waited - was.get(thread, 0.0) for thread, waited in now.items()), default=0.0)
        for was, now in zip(before, after, strict=True)
    )


class Stopwatch:
    """Measures time, less that for which this process and those below it, one after the other, were
    ready to run and got no processor: what is left is the code's own, whatever else the machine
    does."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = _family_waits()

    def elapsed_s(self) -> float:
        took_s = time.monotonic() - self._began
        after = _family_waits()
        before = [self._before.get(pid, {}) for pid in after]
        return took_s - stalled_s(before, after.values())


def _family_waits() -> dict[int, Waits]:
    return {pid: waits_of([pid]) for pid in family_of(os.getpid())}
