"""A figure: one measured value, its limit, and details."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Figure", "spread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured value. Without a limit it is informative."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False
    """The limit is a minimum instead of a maximum."""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": round(self.value, 6),
            "unit": self.unit,
            "limit": self.limit,
            "at_least": self.at_least,
            "met": self.met,
            "details": self.details,
        }

    def line(self) -> str:
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        head = f"{self.name:<44} {self.value:>9.4g} {self.unit:<22} {self._limit:<8} {verdict:<7}"
        return f"{head} {self._details}".rstrip()

    def row(self) -> str:
        """A row of a Markdown table."""
        limit = self._limit if self.met is not False else f"{self._limit}, **missed**"
        return f"| {self.name} | {self.value:.3g} {self.unit} | {limit} | {self._details} |"

    @property
    def _limit(self) -> str:
        if self.limit is None:
            return ""
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"

    @property
    def _details(self) -> str:
        return "; ".join(f"{name} {_shown(value)}" for name, value in self.details.items())


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_shown(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def spread(samples: Sequence[float], digits: int = 3) -> dict[str, float]:
    """The distribution of samples: minimum, quartiles, median and maximum."""
    low, high = min(samples), max(samples)
    quarters = statistics.quantiles(samples, n=4) if len(samples) > 1 else [low, low, low]
    parts = {"min": low, "p25": quarters[0], "p50": statistics.median(samples)}
    parts |= {"p75": quarters[2], "max": high}
    return {"n": len(samples)} | {name: round(value, digits) for name, value in parts.items()}
