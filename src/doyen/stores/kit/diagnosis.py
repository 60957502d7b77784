"""Findings that several engines share.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from doyen.model import Finding, Level


class Defect(NamedTuple):
    """A defect of an engine, from one release until before another, or in all later releases. The
    remedy is an update, or what `remedy` states."""

    first: tuple[int, ...]
    fixed: tuple[int, ...] | None
    level: Level
    text: str
    remedy: str = ""


def version_findings(
    engine: str, version: str, servers: Iterable[str], defects: Sequence[Defect]
) -> Iterator[Finding]:
    """The defects of the version that these servers run, or that it has none."""
    running = f"{engine} {version} at {', '.join(servers)}"
    release = tuple(int(part) for part in version.partition("-")[0].split("."))
    present = [
        defect
        for defect in defects
        if defect.first <= release and (defect.fixed is None or release < defect.fixed)
    ]
    for defect in present:
        fixed = ".".join(map(str, defect.fixed or ()))
        yield Finding(
            level=defect.level,
            subject="version",
            text=f"{running}: {defect.text}",
            remedy=defect.remedy or f"update {engine} to {fixed} or later",
        )
    if not present:
        yield Finding.ok("version", running)
