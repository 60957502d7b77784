"""Plots as SVG, written by hand: no library, and the same bytes for the same data.

    bars       protocols side by side, one group of bars per figure
    lines      how something grows, several series, either axis in decades if need be
    save_plot  `.svg` as it is; `.png` through matplotlib, where that is installed

Imports the errors and the standard library; matplotlib when a PNG is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from msgspec import Struct

from doyen.errors import ConfigError

__all__ = ["Plot", "bars", "lines", "save_plot"]

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 70
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568")


class Plot(Struct, frozen=True, kw_only=True):
    """What is to be seen."""

    title: str
    x_label: str = ""
    y_label: str = ""
    series: dict[str, list[tuple[float, float]]]
    names: tuple[str, ...] = ()
    """Of the places on the x axis; with them, the series are bars."""
    log_x: bool = False
    log_y: bool = False


def bars(title: str, rows: Mapping[str, Mapping[str, float]], *, y_label: str = "") -> Plot:
    """One group for each row, one bar in it for each of its figures."""
    names = tuple(rows)
    figures = list(dict.fromkeys(name for row in rows.values() for name in row))
    series = {
        figure: [(float(at), rows[name].get(figure, 0.0)) for at, name in enumerate(names)]
        for figure in figures
    }
    return Plot(title=title, y_label=y_label, series=series, names=names)


def lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
) -> Plot:
    """One line for each series of points."""
    return Plot(
        title=title,
        x_label=x_label,
        y_label=y_label,
        series={name: list(points) for name, points in series.items()},
        log_x=log_x,
        log_y=log_y,
    )


class _Axis:
    """From values to places on the paper."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool) -> None:
        self._log = log
        positive = [value for value in values if value > 0] or [1.0]
        if log:
            low = math.floor(math.log10(min(positive)))
            high = max(low + 1, math.ceil(math.log10(max(positive))))
            self.ticks = [10.0**power for power in range(low, high + 1)]
            self._low, self._high = float(low), float(high)
        else:
            top = max([*values, 0.0]) or 1.0
            step = 10 ** math.floor(math.log10(top))
            step = next(each for each in (step / 5, step / 2, step, step * 2) if top / each <= 6)
            count = math.ceil(top / step - 1e-9)
            self.ticks = [step * number for number in range(count + 1)]
            self._low, self._high = 0.0, step * count
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        if self._log:
            value = math.log10(max(value, 10.0**self._low))
        share = (value - self._low) / (self._high - self._low)
        return round(self._start + share * (self._end - self._start), 1)


def svg(plot: Plot) -> str:
    """The plot as a document."""
    ys = [y for points in plot.series.values() for _, y in points]
    y_axis = _Axis(ys, HEIGHT - BOTTOM, TOP, log=plot.log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 22, plot.title, size=15),
        _text(WIDTH / 2, HEIGHT - 30, plot.x_label),
        f'<text x="16" y="{HEIGHT / 2}" text-anchor="middle"'
        f' transform="rotate(-90 16 {HEIGHT / 2})">{escape(plot.y_label)}</text>',
    ]
    for tick in y_axis.ticks:
        y = y_axis.place(tick)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
    parts += _bars(plot, y_axis) if plot.names else _lines(plot, y_axis)
    for number, name in enumerate(plot.series):
        x = LEFT + 130 * number
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{HEIGHT - 18}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 15, HEIGHT - 9, name, anchor="start"))
    return "\n".join([*parts, "</svg>", ""])


def _bars(plot: Plot, y_axis: _Axis) -> list[str]:
    parts = []
    group = (WIDTH - LEFT - RIGHT) / len(plot.names)
    width = round(group * 0.8 / len(plot.series), 1)
    floor = HEIGHT - BOTTOM
    for at, name in enumerate(plot.names):
        parts.append(_text(LEFT + group * (at + 0.5), floor + 16, name))
    for number, points in enumerate(plot.series.values()):
        for x, y in points:
            left = round(LEFT + group * (x + 0.1) + width * number, 1)
            top = y_axis.place(y)
            parts.append(
                f'<rect x="{left}" y="{top}" width="{width}" height="{round(floor - top, 1)}"'
                f' fill="{COLOURS[number % len(COLOURS)]}"/>'
            )
    return parts


def _lines(plot: Plot, y_axis: _Axis) -> list[str]:
    xs = [x for points in plot.series.values() for x, _ in points]
    x_axis = _Axis(xs, LEFT, WIDTH - RIGHT, log=plot.log_x)
    floor = HEIGHT - BOTTOM
    parts = [_text(x_axis.place(tick), floor + 16, f"{tick:g}") for tick in x_axis.ticks]
    for number, points in enumerate(plot.series.values()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [(x_axis.place(x), y_axis.place(y)) for x, y in points]
        path = " ".join(f"{x},{y}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in placed]
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12) -> str:
    return (
        f'<text x="{round(x, 1)}" y="{round(y, 1)}" text-anchor="{anchor}"'
        f' font-size="{size}">{escape(text)}</text>'
    )


def save_plot(plot: Plot, path: Path) -> None:
    """Write it, in the form that the name asks for."""
    if path.suffix == ".svg":
        path.write_text(svg(plot))
    elif path.suffix == ".png":
        _save_png(plot, path)
    else:
        raise ConfigError(f"{path.name}: a plot is an .svg or a .png")


def _save_png(plot: Plot, path: Path) -> None:
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError as error:
        raise ConfigError("a PNG needs matplotlib: install it, or ask for an .svg") from error
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100))
    axes = figure.subplots()
    width = 0.8 / len(plot.series)
    for number, (name, points) in enumerate(plot.series.items()):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        if plot.names:
            axes.bar([x + width * number for x in xs], ys, width, label=name)
        else:
            axes.plot(xs, ys, marker="o", label=name)
    if plot.names:
        axes.set_xticks(range(len(plot.names)), plot.names)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.set_xscale("log" if plot.log_x else "linear")
    axes.set_yscale("log" if plot.log_y else "linear")
    axes.legend()
    figure.savefig(path, dpi=150)
