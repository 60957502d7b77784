"""The clock that leases are counted on.

Durations are measured on the *boot-time* clock: it never jumps, and unlike the monotonic clock it
goes on while the machine is suspended, as the store's clock does. Where the system has none, the
monotonic clock is used and suspend is not covered. Wall time is for display only, never for
decisions.

A `Clock` is passed to all code that needs one. `term.valid` calls `now`, so it must be cheap: no
system call, no lock, any thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

__all__ = ["Clock", "SystemClock", "VirtualClock", "boot_id"]


class Clock(Protocol):
    """A source of time."""

    @property
    def now(self) -> Callable[[], float]:
        """Seconds on the boot-time clock, as a plain callable."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, for display and for comparing logs of different machines."""
        ...


class SystemClock:
    """The machine's clocks."""

    __slots__ = ("covers_suspend", "now")

    def __init__(self) -> None:
        boottime = getattr(time, "CLOCK_BOOTTIME", None)
        self.covers_suspend = boottime is not None
        self.now: Callable[[], float] = (
            time.monotonic if boottime is None else partial(time.clock_gettime, boottime)
        )

    def wall(self) -> float:
        return time.time()


class VirtualClock:
    """A clock moved by hand, for tests and simulation.

    `advance` lets time pass; `suspend` moves boot time only, as a suspended machine does, and not
    `monotonic`, which timers use; `step_wall` sets the wall clock, as an administrator or NTP does.

    >>> clock = VirtualClock()
    >>> clock.advance(2.0); clock.suspend(60.0)
    >>> clock.now(), clock.monotonic()
    (62.0, 2.0)
    """

    __slots__ = ("_monotonic", "_suspended", "_wall_offset")

    def __init__(self, *, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = 0.0
        self._suspended = 0.0
        self._wall_offset = wall

    def now(self) -> float:
        return self._monotonic + self._suspended

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self.now() + self._wall_offset

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._monotonic += seconds

    def suspend(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._suspended += seconds

    def step_wall(self, seconds: float) -> None:
        self._wall_offset += seconds


@cache
def boot_id() -> str:
    """Identifies one boot of one machine. Two readings of the boot-time clock may be compared only
    under the same boot id.

    A time namespace shifts the clock for the processes in it, so it is part of the id.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            kernel = file.read().strip()
        namespace = os.stat("/proc/self/ns/time").st_ino
    except OSError:
        return f"boot-{round(time.time() - time.monotonic(), -1):.0f}"
    return f"{kernel}.{namespace}"
