"""`systemd-analyze`, which checks units. No manager has to run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .fetch import Debian, Recipe, obtain

RECIPE = Recipe(
    engine="systemd",
    variable="DOYEN_SYSTEMD_ANALYZE",
    name="systemd-analyze",
    found=("usr/bin/systemd-analyze",),
    minimum=(247,),
    sources=(Debian(("systemd",)),),
)


def verify_units(*units: Path) -> str:
    """What is wrong with these units; empty if nothing is."""
    program = obtain(RECIPE)
    environ = program.environment()
    if program.tree is not None:
        private = ":".join(f"{program.tree}/{each}" for each in ("usr/lib/systemd", "lib/systemd"))
        environ["LD_LIBRARY_PATH"] = f"{environ['LD_LIBRARY_PATH']}:{private}"
        environ["SYSTEMD_UNIT_PATH"] = f"{program.tree}/lib/systemd/system:{units[0].parent}:"
    result = subprocess.run(
        [program.path, "verify", "--man=no", *units],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # The units of the machine, on which these depend, are none of our business.
    folders = {str(unit.parent) for unit in units}
    lines = [line for line in result.stderr.splitlines() if any(map(line.__contains__, folders))]
    return "\n".join(lines) or ("" if result.returncode == 0 else result.stderr)
