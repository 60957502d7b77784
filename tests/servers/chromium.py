"""Chromium without a display, fetched as the servers are, for tests of the web pages."""

from __future__ import annotations

import os
from pathlib import Path

from .fetch import Debian, Program, Recipe, obtain
from .folders import held_folder

__all__ = ["chromium", "chromium_environment"]

RECIPE = Recipe(
    engine="chromium",
    variable="DOYEN_CHROMIUM_BIN",
    name="chromium",
    minimum=(120,),
    found=("usr/lib/chromium/chromium-headless-shell",),
    sources=(Debian(("chromium-headless-shell", "fonts-dejavu-core", "fonts-dejavu-extra")),),
)
FONTS = """\
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
<dir>/usr/share/fonts</dir><dir>{tree}/usr/share/fonts</dir>
<cachedir>{folder}</cachedir>
<alias><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
<alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""


def chromium() -> Program:
    """The browser. Raises `Unavailable` or `Skipped`."""
    return obtain(RECIPE)


def chromium_environment(program: Program) -> dict[str, str]:
    """The environment in which the browser finds its libraries and fonts, with a home directory of
    its own."""
    folder = held_folder("doyen-chromium-")
    fonts: Path = folder / "fonts.conf"
    fonts.write_text(FONTS.format(tree=program.tree or "/nowhere", folder=folder))
    libraries = program.environment().get("LD_LIBRARY_PATH", "")
    private = [f"{each}/pulseaudio" for each in libraries.split(":") if each]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join([libraries, *private]),
        "FONTCONFIG_FILE": str(fonts),
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "XDG_CACHE_HOME": str(folder),
    }
