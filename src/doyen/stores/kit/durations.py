"""Durations as people write them: `5`, `2.5s`, `500ms`, `10m`, `1h30m`.

Imports nothing of doyen.
"""

from __future__ import annotations

import re

__all__ = ["UNITS", "parse_duration"]

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
"""The units, in seconds."""
_NUMBER = r"(\d+\.?\d*|\.\d+)"
_PARTS = re.compile(rf"{_NUMBER}\s*(ms|s|m|h|d)\s*")


def parse_duration(text: str) -> float:
    """The duration in seconds. A number without a unit is in seconds. Raises `ValueError`.

    >>> parse_duration("1h30m"), parse_duration("500ms"), parse_duration("2.5")
    (5400.0, 0.5, 2.5)
    """
    text = text.strip()
    if re.fullmatch(rf"{_NUMBER}(e[-+]?\d+)?", text):
        return float(text)
    if not text or _PARTS.sub("", text):
        raise ValueError(f"{text!r} is not a duration, such as 5, 2.5s, 500ms, 10m or 1h")
    return sum(float(number) * UNITS[unit] for number, unit in _PARTS.findall(text))
