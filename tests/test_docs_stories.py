"""Pages that are typed into terminals are executed: their commands print what the pages show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from story import Block, FreePorts, Story, blocks

DOCS = Path(__file__).parents[1] / "docs"


def stories() -> Iterator[tuple[str, list[Block]]]:
    """The tutorial as a whole, and each section of others that is typed into terminals."""
    yield "tutorial", [*blocks(DOCS / "tutorial.md")]
    for page in ("howto.md", "stores/quorum.md"):
        document = [*blocks(DOCS / page)]
        for section in dict.fromkeys(block.section for block in document):
            of_section = [block for block in document if block.section == section]
            if any(block.terminal for block in of_section):
                yield section, of_section


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    story = Story(tmp_path)
    yield story
    story.close()


@pytest.mark.parametrize(
    "document", [pytest.param(document, id=title) for title, document in stories()]
)
def test_the_commands_print_what_the_document_shows(document: list[Block], story: Story) -> None:
    story.run(document)


@pytest.mark.parametrize(
    ("typed", "seen"), [("echo two", "one"), ("echo two; echo one", "one\ntwo"), ("false", None)]
)
def test_a_document_with_wrong_output_fails(
    typed: str, seen: str | None, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("story.PATIENCE_S", 0.5)
    document = [Block("here", "sh", f"# terminal 1\n{typed}\n", "")]
    if seen is not None:
        document.append(Block("there", "text", seen, ""))
    with pytest.raises(AssertionError, match=r"was not printed|did not succeed"):
        story.run(document)


def test_ports_are_free_ones_and_the_same_in_all_blocks() -> None:
    ports = FreePorts()
    first, again, other = ports.in_place("n1=:7401 h:7401 h:7402 token 7401").split()[:3]
    assert (first, other) != ("n1=:7401", "h:7402")
    assert first.rpartition(":")[2] == again.rpartition(":")[2] != other.rpartition(":")[2]
    assert ports.in_place("token 7401") == "token 7401"


def test_every_file_is_used() -> None:
    """A block that is saved as a file is used by another block."""
    for path in DOCS.glob("*.md"):
        document = [*blocks(path)]
        for block in document:
            if block.file and not block.file.startswith("test_"):  # pytest finds those
                module = block.file.removesuffix(".py")
                uses = (f"python {block.file}", f"from {module} import", f"pytest {block.file}")
                assert any(use in other.text for other in document for use in uses), block.where
