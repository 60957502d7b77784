"""Charts: bars, and lines over logarithmic axes, as SVG.

PNG files are drawn by matplotlib if it is installed. Nothing else needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from itertools import cycle
from math import ceil, floor, log10
from pathlib import Path

from msgspec import Struct

from doyen.errors import ConfigError
from doyen.lab.runner import Comparison

WIDTH, HEIGHT, MARGIN = 360, 220, 48
COLOURS = ("#2a6fbb", "#c2571a", "#2f8f4e", "#8a4fa3", "#b8a12b", "#5b6770", "#c23a6b")


class Panel(Struct, kw_only=True):
    """One chart: bars by name or, with `x`, lines of points."""

    title: str
    unit: str
    series: Mapping[str, Sequence[float]]
    x: Sequence[float] = ()
    """The x coordinates of the points. With them both axes are logarithmic."""
    x_label: str = ""


def comparison_panels(rows: Sequence[Comparison]) -> list[Panel]:
    """The results of `compare`, one panel for each figure."""

    def panel(title: str, unit: str, of: Callable[[Comparison], float]) -> Panel:
        return Panel(title=title, unit=unit, series={row.protocol: [of(row)] for row in rows})

    return [
        panel("time to the first leader", "s", lambda row: row.first_leader_s),
        panel("time to heal", "s", lambda row: row.healed_s),
        panel("available under faults", "%", lambda row: 100 * row.available_share),
        panel("messages", "per s", lambda row: row.messages_per_s),
        panel("messages", "per write", lambda row: row.messages_per_write),
        panel("bytes", "kB per s", lambda row: row.bytes_per_s / 1000),
    ]


def check_format(path: Path) -> None:
    """Refuse a file name whose format cannot be drawn."""
    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise ConfigError(f"charts are .svg or .png files, not {suffix or path.name!r}")
    if suffix == ".png" and find_spec("matplotlib") is None:
        raise ConfigError(
            "a .png file needs matplotlib: pip install 'doyen[plot]', or name an .svg file"
        )


def write_chart(path: Path, panels: Sequence[Panel]) -> None:
    """Draw panels into a file, in the format of its name."""
    check_format(path)
    if path.suffix.lower() == ".svg":
        path.write_text(svg(panels))
    else:
        _png(path, panels)


def svg(panels: Sequence[Panel]) -> str:
    """All panels in rows, as an SVG document."""
    columns = min(3, len(panels)) or 1
    rows = ceil(len(panels) / columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * WIDTH}"'
        f' height="{rows * HEIGHT}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        left, top = number % columns * WIDTH, number // columns * HEIGHT
        parts.append(f'<g transform="translate({left},{top})">')
        parts.append(
            f'<text x="{WIDTH / 2:g}" y="18" text-anchor="middle" font-size="13">'
            f"{escape(panel.title)}, {escape(panel.unit)}</text>"
        )
        parts += _lines(panel) if panel.x else _bars(panel)
        parts.append("</g>")
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _bars(panel: Panel) -> list[str]:
    top, bottom = 30, HEIGHT - 30
    most = max((max(values) for values in panel.series.values()), default=0.0) or 1.0
    step = (WIDTH - 24) / max(1, len(panel.series))
    drawn = []
    for number, (name, values) in enumerate(panel.series.items()):
        height = (bottom - top - 14) * values[0] / most
        x = 12 + number * step
        middle = x + step / 2
        drawn += [
            f'<rect x="{x + step * 0.15:.1f}" y="{bottom - height:.1f}" width="{step * 0.7:.1f}"'
            f' height="{height:.1f}" fill="{COLOURS[number % len(COLOURS)]}"/>',
            f'<text x="{middle:.1f}" y="{bottom - height - 4:.1f}" text-anchor="middle">'
            f"{values[0]:.3g}</text>",
            f'<text x="{middle:.1f}" y="{bottom + 14}" text-anchor="middle">{escape(name)}</text>',
        ]
    drawn.append(f'<line x1="8" y1="{bottom}" x2="{WIDTH - 8}" y2="{bottom}" stroke="#888"/>')
    return drawn


def _lines(panel: Panel) -> list[str]:
    left, right, top, bottom = MARGIN, WIDTH - 12, 30, HEIGHT - 40
    points = [value for values in panel.series.values() for value in values if value > 0]
    x_from, x_to = _decades(panel.x)
    y_from, y_to = _decades(points or [1.0])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - x_from) / (x_to - x_from)
        up = (log10(y) - y_from) / (y_to - y_from)
        return left + across * (right - left), bottom - up * (bottom - top)

    drawn = []
    for decade in range(x_from, x_to + 1):
        x, _ = at(10.0**decade, 10.0**y_from)
        drawn += [
            f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>',
            f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{10.0**decade:g}</text>',
        ]
    for decade in range(y_from, y_to + 1):
        _, y = at(10.0**x_from, 10.0**decade)
        drawn += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>',
        ]
    drawn.append(
        f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(panel.x_label)}</text>"
    )
    for number, (name, values) in enumerate(panel.series.items()):
        colour = COLOURS[number % len(COLOURS)]
        points_drawn = [at(x, y) for x, y in zip(panel.x, values, strict=False) if y > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points_drawn)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points_drawn
        ]
        drawn.append(
            f'<text x="{left + 6}" y="{top + 12 + 13 * number}" fill="{colour}">'
            f"{escape(name)}</text>"
        )
    return drawn


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return low, max(high, low + 1)


def _png(path: Path, panels: Sequence[Panel]) -> None:
    from matplotlib.figure import Figure

    columns = min(3, len(panels)) or 1
    rows = ceil(len(panels) / columns)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    for number, panel in enumerate(panels, 1):
        axis = figure.add_subplot(rows, columns, number)
        axis.set_title(f"{panel.title}, {panel.unit}")
        for (name, values), colour in zip(panel.series.items(), cycle(COLOURS)):
            if panel.x:
                axis.loglog(panel.x[: len(values)], values, marker="o", label=name, color=colour)
            else:
                axis.bar_label(axis.bar(name, values[0], color=colour), fmt="%.3g")
        if panel.x:
            axis.set_xlabel(panel.x_label)
            axis.legend()
        else:
            axis.margins(y=0.12)
            axis.tick_params("x", labelsize="small")
    figure.savefig(path, dpi=150)
