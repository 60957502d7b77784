"""A wall clock of its own for a server written in C, to be stepped while it runs.

Only the wall clock is its own: durations go by the kernel's monotonic clock as before.
"""

from __future__ import annotations

from pathlib import Path

from .fetch import Debian, Recipe, obtain
from .folders import readable

RECIPE = Recipe(
    engine="faketime",
    variable="DOYEN_FAKETIME_LIB",
    name="libfaketimeMT.so.1",
    found=("usr/lib/*/faketime/libfaketimeMT.so.1",),
    sources=(Debian(("libfaketime",), dependencies=False),),
)


class OwnClock:
    """The offset is in a file that the server's libc calls look at."""

    def __init__(self, folder: Path) -> None:
        self._library = readable(obtain(RECIPE)).path
        self._file = folder / "clock"
        self._offset_s = 0.0
        self.step(0.0)

    def step(self, seconds: float) -> None:
        """Move the clock, forward or back, from where it is."""
        self._offset_s += seconds
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{self._offset_s:+f}s\n")
        fresh.chmod(0o644)
        fresh.rename(self._file)

    def environment(self) -> dict[str, str]:
        return {
            # An allocator that asks for the time while it starts must not come before libc's.
            "LD_PRELOAD": f"{self._library}:libc.so.6",
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
