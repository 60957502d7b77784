"""ARCHITECTURE.md is true: its picture is that of the import contract, and its functions exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import diagram

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "doyen").rglob("*.py"))
WALKS = re.compile(r"^\d+\. `(?P<file>[\w/]+\.py)` `(?P<name>[\w.]+)`", re.M)
STEPS = [*WALKS.finditer((ROOT / "ARCHITECTURE.md").read_text())]


def definitions(path: Path) -> set[str]:
    """The qualified names of the functions and classes of a file."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(path.read_text()), "")
    return found


def test_the_picture_is_that_of_the_import_contract() -> None:
    assert diagram.PICTURE.read_text() == diagram.svg(), "run: python tests/diagram.py"


def test_every_module_is_in_a_layer() -> None:
    named = {module for layer in diagram.layers() for module in layer}
    packages = {"doyen", "doyen.stores", "doyen.quorum", "doyen.election", "doyen.lease"}
    for path in SOURCES:
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        module = module.removesuffix(".__init__")
        parents = {module.rsplit(".", depth)[0] for depth in range(module.count(".") + 1)}
        assert module in packages or named & (parents | {module}), f"{module} is in no layer"


def test_there_are_three_walks() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    walks = [part for part in text.split("\n### ") if WALKS.search(part)]
    assert len(walks) == 3


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step['file']}:{step['name']}")
def test_the_functions_of_the_walks_exist(step: re.Match[str]) -> None:
    assert step["name"] in definitions(ROOT / "src" / "doyen" / step["file"])


def test_a_public_class_name_has_one_home() -> None:
    """Messages and events of the consensus protocols keep the names of their papers, which they may
    share with each other and with no other class."""
    homes: dict[str, set[str]] = defaultdict(set)
    messages = {"Message", "CoreEvent"}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                if "consensus" in path.parts and bases & messages:
                    messages.add(node.name)
                    homes[node.name].add("consensus")
                else:
                    homes[node.name].add(str(path))
    assert not [name for name, places in homes.items() if len(places) > 1]
