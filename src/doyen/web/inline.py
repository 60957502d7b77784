"""Pages of one file: the modules, the style and the data are inside, and nothing is loaded.

The content security policy of such a page names the hash of its script and of its style, so a name
in the data cannot become code even if it were written into the page as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from doyen.model import json_text

__all__ = ["one_file"]

ASSETS = Path(__file__).parent / "assets"
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def one_file(
    title: str, body: str, modules: Sequence[str], styles: Sequence[str], data: Any
) -> str:
    """A page with the modules in this order, as one script. `data` is parsed by the script, from
    the element `data`.

    >>> page = one_file("t", "<p>", ["text.js"], ["style.css"], {"name": "</script><script>"})
    >>> page.count("<script"), "</script><script>" in page
    (2, False)
    """
    script = "\n".join(_module(name) for name in modules)
    style = "\n".join((ASSETS / name).read_text() for name in styles)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}';"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
    # In a script element only `<` can end the element or begin a comment.
    plain = json_text(data, compact=True).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{plain}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def _module(name: str) -> str:
    """A module without its imports and exports: the modules before it define what it imports."""
    return _EXPORT.sub("", _IMPORT.sub("", (ASSETS / name).read_text()))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
