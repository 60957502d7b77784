"""Docker Compose, which checks compose files. No Docker daemon has to run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .fetch import Debian, Recipe, obtain

RECIPE = Recipe(
    engine="compose",
    variable="DOYEN_DOCKER_COMPOSE",
    name="docker-compose",
    found=("usr/libexec/docker/cli-plugins/docker-compose", "usr/bin/docker-compose"),
    minimum=(2, 20),
    version=("version", "--short"),
    sources=(Debian(("docker-compose",), suite="trixie"),),
)


def check_compose(file: Path) -> str:
    """What is wrong with a compose file; empty if nothing is."""
    program = obtain(RECIPE)
    result = subprocess.run(
        [program.path, "--file", file, "config", "--quiet"],
        cwd=file.parent,
        env={**os.environ, **program.environment()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return result.stderr.strip() if result.returncode or result.stderr else ""
