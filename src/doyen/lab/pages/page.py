"""Puts a film, the script and the style sheet into one HTML file that loads nothing.

The file's own policy forbids everything that it does not contain: scripts and styles run only if
their hash is the one of the parts below, so that no text of a film can become either.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from doyen.errors import ConfigError

SCRIPTS = {
    "player": ("elements", "scene", "picture", "panels", "controls", "doing", "loading"),
    "comparison": ("comparison",),
    "index": ("index",),
}
"""The parts of the script of each page, in their order."""


@cache
def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _script(name: str) -> str:
    folder = f"{name}/" if len(SCRIPTS[name]) > 1 else ""
    parts = "\n".join(_part(f"{folder}{part}.js") for part in SCRIPTS[name])
    return f"'use strict';\n(() => {{\n{parts}}})();\n"


def page(film: dict[str, Any], *, name: str = "player", connect: bool = False) -> str:
    """A page that shows a film. `name` is that of its script; with `connect` it may send requests
    to the server that it comes from.

    >>> page({"title": "</script>"}).count("</script>")
    2
    """
    style, script = _part("page.css"), _script(name)
    fields = {
        "policy": escape(policy(style, script, connect=connect)),
        "title": escape(f"doyen lab: {film['title']}"[:200]),
        "style": style,
        "film": json_in_html(film),
        "script": script,
    }
    head, *rest = _part(f"{name}.html").split("{{")
    parts = [head]
    for piece in rest:
        field, _, text = piece.partition("}}")
        parts += [fields[field], text]
    return "".join(parts)


def policy(style: str, script: str, *, connect: bool) -> str:
    """The content security policy of a page with this style sheet and this script."""
    rules = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "connect-src": "'self'" if connect else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{rule} {source}" for rule, source in rules.items())


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def json_in_html(value: Any) -> str:
    """JSON that cannot end the element that it stands in.

    >>> json_in_html("</script><!--")
    '"\\\\u003c/script>\\\\u003c!--"'
    """
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def write_page(path: Path, film: dict[str, Any], *, name: str = "player") -> None:
    """Write a page into a file."""
    check_name(path)
    path.write_text(page(film, name=name), encoding="utf-8")


def check_name(path: Path) -> None:
    """Refuse a file that is not called a page."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"a page is an .html file, not {path.suffix or path.name!r}")
