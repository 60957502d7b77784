"""The tutorial and the how-to, acted out: what readers are told to type, and what they then see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from story import Block, Story, blocks

DOCS = Path(__file__).parents[1] / "docs"


def stories() -> Iterator[tuple[str, list[Block]]]:
    """The tutorial as a whole, and each task of the how-to."""
    yield "tutorial", [*blocks(DOCS / "tutorial.md")]
    howto = [*blocks(DOCS / "howto.md")]
    for section in dict.fromkeys(block.section for block in howto):
        told = [block for block in howto if block.section == section]
        if any(block.terminal for block in told):
            yield section, told


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    story = Story(tmp_path)
    yield story
    story.close()


@pytest.mark.parametrize("told", [pytest.param(told, id=title) for title, told in stories()])
def test_it_happens_as_it_is_told(told: list[Block], story: Story) -> None:
    story.tell(told)


@pytest.mark.parametrize(
    ("typed", "seen"), [("echo two", "one"), ("echo two; echo one", "one\ntwo"), ("false", None)]
)
def test_a_story_that_is_not_true_fails(
    typed: str, seen: str | None, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("story.PATIENCE_S", 0.5)
    told = [Block("here", "sh", f"# terminal 1\n{typed}\n", "")]
    if seen is not None:
        told.append(Block("there", "text", seen, ""))
    with pytest.raises(AssertionError, match=r"was not to be seen|did not succeed"):
        story.tell(told)


def test_every_file_is_used() -> None:
    """A block that is only saved is run by another."""
    for path in DOCS.glob("*.md"):
        told = [*blocks(path)]
        for block in told:
            if block.file:
                module = block.file.removesuffix(".py")
                uses = (f"python {block.file}", f"from {module} import")
                assert any(use in other.text for other in told for use in uses), block.where
