"""The Chinese pages keep step with the English ones: the same headings, code, tables and links."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    ROOT / "README.zh.md": ROOT / "README.md",
    **{path: ROOT / "docs" / path.name for path in sorted((ROOT / "docs/zh").glob("*.md"))},
}
_FENCE = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)


def outline(text: str) -> list[str]:
    """The headings by their level, code blocks whole, and each row, item and paragraph by its kind,
    in order."""
    codes = iter(_FENCE.findall(text))
    kinds = []
    for part in re.split(r"\n\n+", _FENCE.sub("CODE", text).strip()):
        if part.startswith("#"):
            kinds.append(part.split()[0])
        elif part == "CODE":
            kinds.append(next(codes))
        elif part.startswith("|"):
            kinds.append(f"table of {part.count(chr(10)) + 1} rows, {part.count('|')} bars")
        elif part.startswith("- "):
            kinds.append(f"list of {len(re.findall(r'^- ', part, re.MULTILINE))}")
        else:
            kinds.append("picture" if part.startswith("![") else "paragraph")
    return kinds


def links(path: Path) -> list[str]:
    """The targets of all links, those of a translation as the page that is translated."""
    targets = re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", _FENCE.sub("", path.read_text()))
    known = {os.path.relpath(zh, ROOT): os.path.relpath(en, ROOT) for zh, en in PAGES.items()}
    found = []
    for target in filter(None, targets):
        if "://" in target:
            found.append(target)
        else:
            shown = os.path.relpath(path.parent / target, ROOT)
            found.append(known.get(shown, shown).replace(".zh.svg", ".svg"))
    return sorted({*found} - {"README.md"})


@pytest.mark.parametrize("path", PAGES, ids=lambda path: os.path.relpath(path, ROOT))
def test_a_translation_has_the_outline_of_its_page(path: Path) -> None:
    assert outline(path.read_text()) == outline(PAGES[path].read_text())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: os.path.relpath(path, ROOT))
def test_a_translation_has_the_links_of_its_page(path: Path) -> None:
    assert links(path) == links(PAGES[path])


def test_what_is_missing_is_found() -> None:
    page = "# One\n\nText.\n\n```sh\nls\n```\n\n- a\n- b\n"
    assert outline(page) == ["#", "paragraph", "```sh\nls\n```", "list of 2"]
    for broken in (
        page.replace("ls", "cd"),
        page.replace("- b\n", ""),
        page.replace("# One", "## One"),
        page.replace("Text.\n\n", ""),
    ):
        assert outline(broken) != outline(page)
