"""Python environments with programs that others wrote, apart from the packages of the tests."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

from .fetch import cache_directory, locked


def environment(name: str, needs: tuple[str, ...]) -> Path:
    """The directory of a virtual environment with these packages, created at the first call."""
    folder = cache_directory().with_name("clients") / name
    ready = folder / ".ready"
    wanted = "\n".join(needs)
    with locked(name):
        if not ready.exists() or ready.read_text() not in ("", wanted):
            venv.create(folder, with_pip=True, clear=True)
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, "--disable-pip-version-check", *needs], check=True)
            ready.write_text(wanted)
    return folder
