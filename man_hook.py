"""Puts the manual page, which is made from the command line, into the wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = "from doyen.cli._man import man_page; print(man_page(), end='')"


class ManPage(BuildHookInterface):  # type: ignore[type-arg]
    """A hook of hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the page with the sources that are being packed."""
        if version == "editable":
            return
        made = subprocess.run(
            [sys.executable, "-S", "-c", SCRIPT],
            cwd=self.root,
            env={"PYTHONPATH": str(Path(self.root, "src")), "PYTHONDONTWRITEBYTECODE": "1"},
            check=True,
            capture_output=True,
            text=True,
        )
        page = Path(self.directory, "doyen.1")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(made.stdout)
        build_data["shared_data"][str(page)] = "share/man/man1/doyen.1"
