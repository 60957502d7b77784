"""The documents are correct: their code runs, and their figures, commands and links are right.

A block of Python is run on its own, unless it begins with the name of a file (`# worker.py`): then
it is saved under that name for the blocks after it, which use it. The commands that readers type
in terminals are tested by `test_docs_stories.py`.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest

import doyen
import reference
import story
from doyen.cli import parsers
from doyen.lease.clock import SystemClock
from doyen.lease.timing import Timing
from doyen.stores.port import _BUILT_IN, Context, open_store
from story import Block, FreePorts

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
TRANSLATED = {ROOT / "README.zh.md", *(ROOT / "docs/zh").glob("*.md")}
"""Their code is that of the pages they translate (`test_translations.py`)."""
PATIENCE_S = 60.0


def blocks(*languages: str) -> Iterator[Block]:
    """The fenced blocks of these languages in all documents."""
    for path in (each for each in DOCUMENTS if each not in TRANSLATED):
        yield from (block for block in story.blocks(path) if block.language in languages)


def with_files() -> Iterator[tuple[Block, dict[str, str]]]:
    """The blocks that are run on their own, with the files saved before in the same document."""
    for path in (each for each in DOCUMENTS if each not in TRANSLATED):
        files = {}
        for block in story.blocks(path):
            if block.file:
                files[block.file] = block.text
            elif block.language == "python":
                yield block, {**files}


@pytest.mark.parametrize(
    ("block", "files"),
    [pytest.param(block, files, id=block.where) for block, files in with_files()],
)
def test_code_in_the_documents_runs(block: Block, files: dict[str, str], tmp_path: Path) -> None:
    ports = FreePorts()
    for name, text in {**files, "block.py": block.text}.items():
        (tmp_path / name).write_text(ports.in_place(text))
    result = subprocess.run(
        [sys.executable, "-W", "error", "block.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr


def test_the_documents_contain_code() -> None:
    assert {block.where.partition(":")[0] for block in blocks("python")} >= {
        "README.md",
        "guarantees.md",
        "howto.md",
        "tutorial.md",
    }


def modules_with_examples() -> Iterator[str]:
    for path in sorted((ROOT / "src").rglob("*.py")):
        if ">>>" in path.read_text():
            parts = path.relative_to(ROOT / "src").with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


@pytest.mark.parametrize("module", [*modules_with_examples()])
def test_examples_in_docstrings_are_correct(module: str) -> None:
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(import_module(module)):
        runner.run(example, clear_globs=False)
        # Examples do not close what they open.
        for value in example.globs.values():
            if isinstance(value, sqlite3.Connection):
                value.close()
    assert runner.tries
    assert not runner.failures


def test_the_table_of_times_matches_the_defaults() -> None:
    """Rows of the form: | `name` | what it is | default | 1.234 s |"""
    text = (ROOT / "docs/guarantees.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) (?:s|%) \|$", text, re.MULTILINE))
    timing = Timing()
    expected = {
        "ttl_s": timing.ttl_s,
        "drift": 100 * timing.drift,
        "stop_budget_s": timing.stop_budget_s,
        "renew_every_s": timing.renew_every_s,
        "renew_jitter": 100 * timing.renew_jitter,
        "request_timeout_s": timing.request_timeout_s,
        "retry_every_s": timing.retry_every_s,
        "validity_s": timing.validity_s,
        "margin_s": timing.margin_s,
        "worst_failover_s": timing.worst_failover_s(),
    }
    assert {name: float(value) for name, value in rows.items()} == pytest.approx(
        expected, abs=0.0051
    )


def commands() -> Iterator[tuple[str, list[str]]]:
    """The arguments of each `doyen` command in the documents."""
    for block in blocks("sh", "crontab"):
        for line in block.text.splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = iter(lexer)
            if "doyen" in words:
                yield block.where, [*takewhile(lambda word: word.strip("();<>|&"), words)]


@pytest.mark.parametrize("words", [pytest.param(words, id=where) for where, words in commands()])
def test_commands_in_the_documents_are_accepted(words: list[str]) -> None:
    parser, _ = parsers(words[0])
    try:
        parser.parse_args(words)
    except SystemExit:
        pytest.fail(f"doyen does not accept {shlex.join(words)}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_in_the_documents_resolve(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text()):
        leads_to = path.parent / target if target else path
        assert leads_to.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", leads_to.read_text(), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{target}#{anchor}"


def slug(heading: str) -> str:
    """The anchor that GitHub generates for a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


REFERENCE = reference.REFERENCE.read_text()


def test_the_reference_matches_the_code() -> None:
    assert reference.rewritten(REFERENCE) == REFERENCE, "run python tests/reference.py"
    assert REFERENCE.count("<!-- from the code") == len(reference.PARTS)


@pytest.mark.parametrize("name", doyen.__all__)
def test_public_names_are_in_the_reference(name: str) -> None:
    assert re.search(rf"\b{name}\b", REFERENCE)


def sources() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))


def test_every_public_method_is_in_an_example_that_is_run() -> None:
    # They need a server: test_fencing_servers.py, test_rq.py.
    servers = {"create_async", "check_async", "fetch"}
    called_by_frameworks = {"enqueue_jobs", "open_for_request", "register_death"}
    code = "\n".join(
        [
            *(block.text for block in blocks("python")),
            *(path.read_text() for path in (ROOT / "examples").glob("*.py")),
            *re.findall(r"^ *>>> (.*)$", sources(), re.MULTILINE),
        ]
    )
    stubs = "\n".join(block.text for block in blocks("pyi"))
    methods = {*re.findall(r"^    (?:async )?def ([a-z]\w*)\(", stubs, re.MULTILINE)}
    assert len(methods) > 80
    used = {*re.findall(r"(?:\.|def )(\w+)", code)}
    assert methods - used == servers | called_by_frameworks


def test_both_sessions_have_the_same_methods() -> None:
    """The reference says so."""
    both = [
        {
            name: None if isinstance(value, property) else inspect.signature(value).parameters
            for name, value in vars(kind).items()
            if not name.startswith("_")
        }
        for kind in (doyen.Session, doyen.BlockingSession)
    ]
    assert both[0] == both[1]


def test_environment_variables_are_in_the_reference() -> None:
    used = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"\bDOYEN_(?:REQUIRE_STORE|[A-Z]+)", path.read_text())
    }
    stated = re.findall(r"^\| `(DOYEN_(?:REQUIRE_STORE|[A-Z]+))[_…]*`", REFERENCE, re.MULTILINE)
    assert {*stated} == used


@pytest.mark.parametrize("scheme", sorted(_BUILT_IN))
def test_options_of_stores_are_in_the_reference(scheme: str) -> None:
    """The reference lists exactly the options that the store's error message lists."""
    context = Context(SystemClock(), emit=lambda event: None)
    with pytest.raises(doyen.ConfigError, match="known options: ") as refused:
        asyncio.run(open_store(f"{scheme}://h/p?nonsense=1", context))
    known = {*re.findall(r"\w+", str(refused.value).partition("known options: ")[2])} - {"none"}
    heading = rf"^### .*`{re.escape(scheme)}`.*\n"
    section = re.split(heading, REFERENCE, maxsplit=1, flags=re.MULTILINE)[1].partition("\n#")[0]
    assert {*re.findall(r"[?&](\w+)=", section)} == known


def texts_of_the_code() -> list[str]:
    """Every string in the code, with … for what is filled in."""

    def text(node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.JoinedStr(values=values):
                return "".join(map(text, values))
        return "…"

    return [
        text(node)
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    ]


def test_messages_in_the_troubleshooting_exist() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert messages
    texts = texts_of_the_code()
    for message in messages:
        parts = message.split("…")
        longest, pattern = max(parts, key=len), ".*".join(map(re.escape, parts))
        said = any(re.search(pattern, text) for text in texts if longest in text)
        assert said, f"doyen does not say: {message}"
