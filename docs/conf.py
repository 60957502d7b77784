"""Configuration of the documentation site: `make docs` builds it, without a network.

The pages are plain Markdown that also reads well where there is no site. So the site has no pages
of its own: its source is the repository, its first page is README.md, and its table of contents is
made from the lists in docs/README.md.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from pygments.lexers.shell import BashLexer

ROOT = Path(__file__).parents[1]
_project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "doyen"
author = "the authors of doyen"
version = release = _project["version"]

extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md"]
exclude_patterns = [".*", "bench", "build", "dist", "examples", "src", "tests"]
nitpicky = True

myst_heading_anchors = 4  # the anchors that GitHub generates
myst_links_external_new_tab = False

html_theme = "furo"
_narrow = {"code-font-size": "75%"}  # code has up to 100 columns
html_theme_options = {"light_css_variables": _narrow, "dark_css_variables": _narrow}
html_title = f"doyen {release}"
html_show_sourcelink = False
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_show_copyright = False
html_permalinks_icon = "#"
pygments_style = "friendly"
pygments_dark_style = "monokai"


def contents() -> dict[str, dict[str, str]]:
    """The groups of docs/README.md: the caption of each, and its pages with their titles."""
    groups: dict[str, dict[str, str]] = {"Documentation": {"docs/README": "Contents"}}
    for line in (ROOT / "docs/README.md").read_text().splitlines():
        if heading := re.fullmatch(r"## (.+)", line):
            groups[heading[1]] = {}
        elif item := re.match(r"- \[(.+?)\]\(([^)#:]+)\.md\)", line):
            parts: list[str] = []
            for part in PurePosixPath("docs", item[2]).parts:
                parts = parts[:-1] if part == ".." else [*parts, part]
            [*groups.values()][-1]["/".join(parts)] = item[1]
    known = {page for pages in groups.values() for page in pages}
    for path in sorted((ROOT / "docs/frameworks").glob("*.md")):
        page = path.relative_to(ROOT).with_suffix("").as_posix()
        if page not in known:
            groups["Frameworks"][page] = path.read_text().partition("\n")[0].lstrip("# ")
    return groups


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Give the first page the table of contents, which the sidebar shows."""
    if name != root_doc:
        return
    for caption, pages in contents().items():
        entries = (f"{title} </{page}>" for page, title in pages.items() if page != root_doc)
        source[0] += "\n".join(
            ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""]
        )


def add_index(app: Any, failed: Exception | None) -> None:
    """A site begins with index.html."""
    if failed is None and app.builder.name == "html":
        (Path(app.outdir) / "index.html").write_text(
            f'<!doctype html><title>doyen</title><meta http-equiv="refresh" '
            f'content="0; url={root_doc}.html"><a href="{root_doc}.html">doyen</a>\n'
        )


def set_language(app: Any, name: str, template: str, context: dict[str, Any], doc: Any) -> None:
    """Browsers choose fonts, and offer translations, by the language of a page."""
    if name.startswith("docs/zh/") or name.endswith(".zh"):
        context["language"] = "zh-Hans"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_lexer("crontab", BashLexer)
    app.connect("source-read", add_contents)
    app.connect("html-page-context", set_language)
    app.connect("build-finished", add_index)
