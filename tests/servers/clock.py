"""A separate wall clock for a server written in C, which can be stepped while it runs.

Only the wall clock is replaced: durations still use the monotonic clock of the kernel.
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
    """A clock whose offset is in a file that libfaketime reads in the server process."""

    def __init__(self, folder: Path) -> None:
        self._library = readable(obtain(RECIPE)).path
        self._file = folder / "clock"
        self._offset_s = 0.0
        self.step(0.0)

    def step(self, seconds: float) -> None:
        """Step the clock forward or back relative to its current time."""
        self._offset_s += seconds
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{self._offset_s:+f}s\n")
        fresh.chmod(0o644)
        fresh.rename(self._file)

    def environment(self) -> dict[str, str]:
        return {
            # libc must come before an allocator that reads the time while it starts.
            "LD_PRELOAD": f"{self._library}:libc.so.6",
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
