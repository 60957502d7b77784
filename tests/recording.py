"""Records `doyen up` as an animated picture.

    python tests/recording.py        # runs it for about 20 s, and writes docs/pictures/up.svg

The nodes, the candidates and the faults are real, and so are the times. The picture needs no script
and no font from elsewhere, and shows one frame where pictures do not move.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from html import escape
from io import StringIO
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).parents[1] / "docs/pictures/up.svg"
COLUMNS, ROWS = 92, 19
FRAME_S = 0.2
KEYS = {
    3.0: ("k", "kill the leader"),
    7.0: ("f", "freeze the leader"),
    13.0: ("r", "have the leader resign"),
    16.0: ("K", "kill the leader of the quorum"),
}
LASTS_S = 19.0
KEY_SHOWN_S = 1.6

INK, FAINT, PAPER, CHAR, LINE = "#e5e7eb", "#9ca3af", "#111827", 8.43, 19
COLOURS = {"green": "#4ade80", "red": "#f87171", "cyan": "#22d3ee", "yellow": "#facc15"}

Piece = tuple[str, str]
"""A text and its style, in rich's words."""
Frame = tuple[float, list[tuple[Piece, ...]]]
"""When the screen showed what, row by row."""


class Shown(NamedTuple):
    """A row of the screen, and from when to when it stood there."""

    row: int
    pieces: tuple[Piece, ...]
    start_s: float
    end_s: float


def rows_over_time(frames: list[Frame]) -> list[Shown]:
    """The rows of all frames, those that do not change from one frame to the next as one."""
    shown: list[Shown] = []
    open_rows: dict[int, Shown] = {}
    for at_s, rows in frames:
        for row, pieces in enumerate(rows):
            current = open_rows.get(row)
            if current is None or current.pieces != pieces:
                if current is not None:
                    shown.append(current._replace(end_s=at_s))
                open_rows[row] = Shown(row, pieces, at_s, LASTS_S)
    return [
        each for each in [*shown, *open_rows.values()] if any(t.strip() for t, _ in each.pieces)
    ]


def svg(frames: list[Frame], still_s: float) -> str:
    """The picture. Without animation it shows the frame at `still_s`."""
    width, height = round(COLUMNS * CHAR + 32), (ROWS + 2) * LINE + 28
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14">',
        "<title>doyen up: leaders are killed and frozen, and others take over</title>",
        f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
    ]
    for each in rows_over_time(frames):
        text = "".join(_span(*piece) for piece in each.pieces)
        stands = each.start_s <= still_s < each.end_s
        out.append(
            f'<text x="16" y="{30 + each.row * LINE}" xml:space="preserve" fill="{INK}"'
            f' visibility="{"visible" if stands else "hidden"}">{text}{_timed(each)}</text>'
        )
    return "\n".join([*out, "</svg>", ""])


def _span(text: str, style: str) -> str:
    words = style.split()
    colour = next((COLOURS[word] for word in words if word in COLOURS), None)
    attributes = f' fill="{colour}"' if colour else f' fill="{FAINT}"' if "dim" in words else ""
    if "bold" in words:
        attributes += ' font-weight="bold"'
    return f"<tspan{attributes}>{escape(text)}</tspan>" if attributes else escape(text)


def _timed(each: Shown) -> str:
    if each.start_s == 0 and each.end_s == LASTS_S:
        return ""
    marks = [(0.0, "hidden"), (each.start_s, "visible"), (each.end_s, "hidden")]
    marks = [mark for mark in marks if mark[0] < LASTS_S][1 if each.start_s == 0 else 0 :]
    values = ";".join(value for _, value in marks)
    times = ";".join(f"{at_s / LASTS_S:.4f}".rstrip("0").rstrip(".") for at_s, _ in marks)
    return (
        f'<animate attributeName="visibility" calcMode="discrete" repeatCount="indefinite"'
        f' dur="{LASTS_S:g}s" values="{values}" keyTimes="{times}"/>'
    )


def record() -> list[Frame]:
    """Run three nodes and three candidates, press the keys, and note what the screen shows."""
    from rich.console import Console

    from doyen.cli.up.cluster import CandidateGroup, timing_on
    from doyen.cli.up.live import _Controls, _ScreenView
    from doyen.cli.up.quorum import NodeGroup

    console = Console(width=COLUMNS, height=ROWS, file=StringIO(), force_terminal=True)
    frames: list[Frame] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        quorum = NodeGroup(directory)
        stack.callback(quorum.stop)
        quorum.start()
        timing, worst_s = timing_on(quorum.url, 2.0)
        cluster = CandidateGroup(
            directory,
            candidates=3,
            store=quorum.url,
            timing=timing,
            worst_s=worst_s,
            quorum=quorum,
        )
        stack.callback(cluster.stop)
        controls = _Controls(cluster, str)
        view = _ScreenView(controls, console)
        while not cluster.ready:
            cluster.tick()
            time.sleep(0.02)
        begun, waiting = time.monotonic(), dict(KEYS)
        while (at_s := time.monotonic() - begun) < LASTS_S:
            cluster.tick()
            for due_s in [each for each in waiting if each <= at_s]:
                controls.press(waiting.pop(due_s)[0])
                cluster.tick()
            rows = [
                tuple(
                    (piece.text, str(piece.style or "")) for piece in line if piece.text.strip("\n")
                )
                for line in console.render_lines(view.frame(), pad=False)
            ]
            frames.append((0.0 if not frames else round(at_s, 2), [*rows, (), _pressed(at_s)]))
            threading.Event().wait(FRAME_S)
    return frames


def _pressed(at_s: float) -> tuple[Piece, ...]:
    for due_s, (key, meaning) in KEYS.items():
        if due_s <= at_s < due_s + KEY_SHOWN_S:
            return ((f" pressed {key}: {meaning}", "bold yellow"),)
    return ()


if __name__ == "__main__":
    PICTURE.write_text(svg(record(), still_s=6.0))
    sys.stdout.write(f"{PICTURE}\n")
