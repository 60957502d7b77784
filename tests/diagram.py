"""Draws the layers of the package from the import contract in pyproject.toml.

    python tests/diagram.py        # writes docs/layers.svg

import-linter checks the same contract, so the picture shows what the code may import. A test
compares the file with what is drawn here.
"""

from __future__ import annotations

import re
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "layers.svg"
CONTRACT = "imports point downward"

WIDTH, MARGIN, GAP = 1080, 16, 8
ROW, TALL = 52, 34
COLOURS = {
    "quorum": "#dbeafe",
    "stores": "#dcfce7",
    "election": "#fef3c7",
    "lease": "#ffedd5",
    "lab": "#ede9fe",
    "cli": "#f3f4f6",
}
PLAIN = "#ffffff"


def layers() -> list[list[str]]:
    """The modules of each layer, from the top down."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (contract,) = [each for each in tools["importlinter"]["contracts"] if each["name"] == CONTRACT]
    return [[part.strip() for part in re.split(r"[|:]", layer)] for layer in contract["layers"]]


def _box(module: str, left: float, top: float, width: float) -> str:
    name = module.removeprefix("doyen.")
    colour = COLOURS.get(name.split(".")[0], PLAIN)
    return (
        f'<rect x="{left:.1f}" y="{top}"'
        f' width="{width:.1f}" height="{TALL}" rx="5" fill="{colour}" stroke="#374151"/>'
        f'<text x="{left + width / 2:.1f}" y="{top + TALL / 2 + 4:.0f}">{escape(name)}</text>'
    )


def svg() -> str:
    rows = layers()
    height = len(rows) * ROW + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="ui-monospace, monospace" font-size="12" text-anchor="middle">',
        "<title>Layers of doyen: a module imports only what stands below it</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for index, modules in enumerate(rows):
        top = MARGIN + index * ROW
        whole = WIDTH - 2 * MARGIN
        sizes = [max(9, len(module) - len("doyen.") + 2) for module in modules]
        room = whole - GAP * (len(modules) - 1)
        left = float(MARGIN)
        for module, size in zip(modules, sizes, strict=True):
            width = room * size / sum(sizes)
            out.append(_box(module, left, top, width))
            left += width + GAP
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg())
