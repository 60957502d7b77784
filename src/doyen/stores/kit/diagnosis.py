"""Findings that several engines share.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from doyen.model import Finding, Level


class Defect(NamedTuple):
    """A defect of an engine, from one release until before another."""

    first: tuple[int, ...]
    fixed: tuple[int, ...]
    level: Level
    text: str


def version_findings(
    engine: str, version: str, servers: Iterable[str], defects: Sequence[Defect]
) -> Iterator[Finding]:
    """The defects of the version that these servers run, or that it has none."""
    running = f"{engine} {version} at {', '.join(servers)}"
    release = tuple(int(part) for part in version.partition("-")[0].split("."))
    present = [defect for defect in defects if defect.first <= release < defect.fixed]
    for defect in present:
        yield Finding(
            level=defect.level,
            subject="version",
            text=f"{running}: {defect.text}",
            remedy=f"update {engine} to {'.'.join(map(str, defect.fixed))} or later",
        )
    if not present:
        yield Finding(level="ok", subject="version", text=running)
