"""The documentation builds as a site: every page is in its contents, and it needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest

import pictures
import recording
from doyen import TermState

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
CONTENTS = ROOT / "docs/README.md"


def listed() -> list[Path]:
    """The pages in the contents, in order."""
    links = re.findall(r"^- \[.+?\]\((.+?)\)", CONTENTS.read_text(), re.MULTILINE)
    return [(CONTENTS.parent / link).resolve() for link in links]


def test_every_page_is_in_the_contents_once() -> None:
    # A page of a framework is in the contents by its place in the tree.
    rest = (ROOT / "docs/frameworks").glob("*.md")
    assert sorted([CONTENTS, *{*listed(), *rest}]) == PAGES
    assert len({*listed()}) == len(listed())


@pytest.mark.parametrize(
    ("path", "drawn"), [pytest.param(*each, id=each[0].name) for each in pictures.files().items()]
)
def test_pictures_are_as_they_are_drawn(path: Path, drawn: str) -> None:
    assert path.read_text() == drawn, "run python tests/pictures.py"


def test_the_recording_has_moving_rows_and_one_still() -> None:
    shown: list[recording.Frame] = [
        (0.0, [(("a", ""),), (("one", "green"),)]),
        (1.0, [(("a", ""),), (("two", "dim"),)]),
    ]
    rows = recording.rows_over_time(shown)
    assert [(row.pieces[0][0], row.start_s, row.end_s) for row in rows] == [
        ("one", 0.0, 1.0),
        ("a", 0.0, recording.LASTS_S),
        ("two", 1.0, recording.LASTS_S),
    ]
    drawn = fromstring(recording.svg(shown, still_s=0.5))
    texts = [each for each in drawn.iter() if each.tag.endswith("text")]
    still = ["".join(each.itertext()) for each in texts if each.get("visibility") == "visible"]
    assert still == ["one", "a"]
    assert sum(each.tag.endswith("animate") for each in drawn.iter()) == 2


def test_the_recording_shows_what_its_keys_did() -> None:
    drawn = "".join(fromstring(recording.PICTURE.read_text()).itertext())
    for key, meaning in recording.KEYS.values():
        assert f"pressed {key}: {meaning}" in drawn
    for outcome in ("killed", "frozen", "asked to resign"):
        assert re.search(rf"server\d {outcome}, server\d leads \(token \d+\) after", drawn)


def test_the_picture_of_a_term_has_all_its_states() -> None:
    drawn = pictures.term_states(str)
    assert all(f">{state.value}<" in drawn for state in TermState)


def test_figures_of_the_matrix_are_those_of_the_stores() -> None:
    """What the comparison says in seconds, the page of the store says, too."""
    text = (ROOT / "docs/choosing.md").read_text()
    rows = re.findall(r"^\| \[.+?\]\((stores/\w+\.md)\) \| (.*)$", text, re.MULTILINE)
    assert len(rows) == 2 * len([*(ROOT / "docs/stores").glob("*.md")])
    for page, row in rows:
        said = (ROOT / "docs" / page).read_text()
        for figure in re.findall(r"[\d.]+ s\b|`doyen\[\w+\]`|3\.\d+\.\d+", row):
            assert figure.strip("`") in said, (page, figure)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text()
    (options,) = re.findall(r"python -m sphinx (.*) -d build/doctrees \. build/docs", makefile)
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options.split(), "-d", folder / "trees", ROOT, folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    assert not built.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    first = (site / "README.html").read_text()
    for page in (path.relative_to(ROOT).with_suffix(".html") for path in PAGES):
        assert (site / page).exists(), page
        assert str(page) == "README.html" or f'internal" href="{page}"' in first, page
    assert 'lang="en"' in first
    assert 'lang="zh-Hans"' in (site / "README.zh.html").read_text()
    assert 'lang="zh-Hans"' in (site / "docs/zh/tutorial.html").read_text()
    assert 'url=README.html"' in (site / "index.html").read_text()


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["'](?:https?:)?//""")
    styled = re.compile(r"""<link[^>]*\shref=["'](?:https?:)?//""")
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not loaded.search(text), page
        assert not styled.search(text), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""url\(["']?(?:https?:)?//|@import""", sheet.read_text()), sheet
