"""`doyen config`: reading, writing, editing, comparing, rolling back and watching."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import doyen
from candidates import Capture, complaints, following
from doyen.cli import main
from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, open_store


@pytest.fixture
def config(store: str, capsys: Capture) -> Callable[..., tuple[int, str, str]]:
    """Runs the command: exit code, output and errors."""

    def call(action: str, *options: str) -> tuple[int, str, str]:
        code = main(["config", action, "billing", "--store", store, *options])
        out, err = capsys.readouterr()
        return code, out, complaints(err)

    return call


Call = Callable[..., tuple[int, str, str]]


def test_a_value_is_written_and_read(config: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config("set", '{"workers": 4}') == (0, "billing is at version 1\n", "")
    assert config("get") == (0, '{\n  "workers": 4\n}\n', "")
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"workers": "mögliche"}'))
    assert config("set", "-", "--author", "ann")[0] == 0
    assert config("get")[1] == '{\n  "workers": "mögliche"\n}\n'
    assert json.loads(config("get", "--version", "1")[1]) == {"workers": 4}
    shown = json.loads(config("get", "--json")[1])
    assert shown.keys() == {"config", "version", "id", "author", "at", "value"}
    assert (shown["version"], shown["author"]) == (2, "ann")
    assert re.fullmatch(
        r".+@.+", json.loads(config("get", "--version", "1", "--json")[1])["author"]
    )


def test_control_characters_are_escaped(config: Call) -> None:
    config("set", r'"a\u009b2Jb"', "--author", "e\x1bvil")
    assert config("get")[1] == '"a\\u009b2Jb"\n'
    assert "\x1b" not in config("history")[1]


@pytest.mark.parametrize(
    ("action", "options", "code", "error"),
    [
        ("get", [], 1, "'billing' has no configuration yet: write one with doyen config set"),
        ("history", [], 1, "'billing' has no configuration yet"),
        ("diff", [], 1, "'billing' has no configuration yet"),
        ("get", ["--version", "3"], 2, "'billing' has no version 3: nothing has been written yet"),
        ("rollback", ["3"], 2, "'billing' has no version 3: nothing has been written yet"),
        ("set", ["{workers: 4}"], 2, "the value is not JSON: Expecting property name"),
        ("set", ["NaN"], 2, "the value is not JSON: JSON has no NaN; nothing was written"),
        ("set", ["[" * 50_000], 2, "the value is not JSON: it is nested too deeply"),
        ("set", ["1", "--if-version", "3"], 1, "'billing' has no version 3: nothing was written"),
        ("set", [json.dumps("x" * 10**6)], 2, "more than 1000000"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    config: Call, action: str, options: list[str], code: int, error: str
) -> None:
    found, out, err = config(action, *options)
    assert (found, out) == (code, "")
    assert error in err
    assert err.count("\n") == 1


def test_versions_are_listed_compared_and_rolled_back_to(config: Call) -> None:
    config("set", '{"workers": 4, "queue": "a"}', "--author", "ann")
    assert "is the first" in config("diff")[2]
    config("set", '{"queue": "a", "workers": 8}', "--author", "bob")
    lines = config("diff")[1].splitlines()
    assert [line for line in lines if line[0] in "+-"][2:] == ['-  "workers": 4', '+  "workers": 8']
    assert lines[0].startswith("--- version 1 by ann\t20")
    assert config("rollback", "1", "--if-version", "1")[0] == 1
    assert config("rollback", "1", "--if-version", "2") == (0, "billing is at version 3\n", "")
    assert config("diff", "--from", "1") == (0, "", "")
    assert (
        config("diff", "--from", "1", "--to", "2")[1]
        .splitlines()[1]
        .startswith("+++ version 2 by bob")
    )
    compared = json.loads(config("diff", "--json")[1])
    assert (compared["from"]["version"], compared["to"]["version"]) == (2, 3)
    listed = config("history")[1].splitlines()
    assert listed[0].split() == ["version", "written", "at", "author", "value"]
    assert [line.split()[0] for line in listed[1:]] == ["3", "2", "1"]
    assert [each["version"] for each in json.loads(config("history", "--json")[1])["history"]] == [
        3,
        2,
        1,
    ]
    code, _, err = config("set", "1", "--if-version", "2")
    assert code == 1
    assert "is at version 3, which " in err


def test_a_write_waits_for_the_subscribers(config: Call, store: str) -> None:
    assert config("set", "1", "--wait-applied", "all")[0] == 0
    with (
        doyen.connect_blocking(store) as session,
        session.config("billing").subscribe("server1") as documents,
    ):
        code, _, err = config("set", "2", "--wait-applied", "majority", "--wait", "0.01")
        assert code == 1
        assert err.startswith("doyen: version 2 of 'billing' was written and stays, but 'server1'")
        assert next(documents).version == 2
    assert config("get")[1] == "2\n"


# Editing.


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Sets an editor: a program in Python that finds the text in `text` and its round in `n`, and
    leaves what it wants to be saved in `text`."""

    def install(body: str) -> Path:
        script, rounds = tmp_path / "editor.py", tmp_path / "rounds"
        script.write_text(
            "import sys, json, pathlib\n"
            f"rounds = pathlib.Path({str(rounds)!r})\n"
            "n = len(list(rounds.iterdir())); path = pathlib.Path(sys.argv[1])\n"
            "text = path.read_text(); (rounds / str(n)).write_text(text)\n"
            f"{body}\n"
            "path.write_text(text)\n"
        )
        rounds.mkdir()
        monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")
        monkeypatch.delenv("VISUAL", raising=False)
        return rounds

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return install


Editor = Callable[[str], Path]


def kept(err: str) -> Path:
    found = re.search(r"your text is kept in (\S+)", err)
    assert found
    return Path(found[1])


def test_edit_writes_what_was_saved(config: Call, editor: Editor, tmp_path: Path) -> None:
    editor("text = text.replace('4', '8') if n else '{\"workers\": 4}'")
    assert config("edit") == (0, "billing is at version 1\n", "")
    assert config("edit", "--author", "ann")[0] == 0
    assert json.loads(config("get")[1]) == {"workers": 8}
    assert not [*tmp_path.glob("doyen-config-*")]


def test_edit_without_a_change_writes_nothing(config: Call, editor: Editor, tmp_path: Path) -> None:
    config("set", "1")
    editor("")
    assert config("edit") == (0, "nothing was changed\n", "")
    assert len(config("history")[1].splitlines()) == 2
    assert not [*tmp_path.glob("doyen-config-*")]


def interfering(store: str, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    """Another writer is faster once, while the editor is open."""
    from doyen.cli import config as command

    opened, left = command._open_editor, [value]

    def faster(path: Path) -> None:
        opened(path)
        if left:
            with doyen.connect_blocking(store) as session:
                session.config("billing", author="bob").set(left.pop())

    monkeypatch.setattr(command, "_open_editor", faster)


def test_edit_reopens_with_both_if_another_was_faster(
    config: Call, store: str, editor: Editor, monkeypatch: pytest.MonkeyPatch
) -> None:
    config("set", '{"workers": 4}')
    rounds = editor("text = '{\"workers\": 16}' if n else '{\"workers\": 8}'")
    interfering(store, monkeypatch, {"workers": 5})
    code, out, err = config("edit")
    assert (code, out) == (0, "billing is at version 3\n")
    assert "is at version 2, which 'bob' wrote" in err
    assert "both are in the editor" in err
    assert (rounds / "1").read_text() == (
        '<<<<<<< version 2 by bob\n{\n  "workers": 5\n}\n=======\n{"workers": 8}\n>>>>>>> yours\n'
    )
    assert json.loads(config("get")[1]) == {"workers": 16}


def test_edit_may_settle_for_what_the_other_wrote(
    config: Call, store: str, editor: Editor, monkeypatch: pytest.MonkeyPatch
) -> None:
    config("set", "4")
    editor("text = '5' if n else '8'")
    interfering(store, monkeypatch, 5)
    assert config("edit")[:2] == (0, "billing is at version 2\n")


@pytest.mark.parametrize(
    ("body", "code", "error", "text"),
    [
        ("text = '{workers: 8}'", 2, "is not JSON: Expecting property name", "{workers: 8}"),
        ("text = '{'", 2, "Correct it, and run doyen config set billing - with it as", "{"),
        ("text = '8' if n == 0 else text", 1, "is at version 2, which 'bob'", ">>>>>>> yours"),
        ("text = '8' if n == 0 else text + ' '", 2, "is not JSON", ">>>>>>> yours"),
        ("path.write_text('8'); sys.exit(3)", 2, "ended with 3; nothing was written", "8"),
    ],
    ids=["bad_json", "remedy", "conflict_left_alone", "markers_left", "editor_failed"],
)
def test_the_text_is_kept_if_it_cannot_be_written(
    config: Call,
    store: str,
    editor: Editor,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    code: int,
    error: str,
    text: str,
) -> None:
    config("set", "4")
    editor(body)
    interfering(store, monkeypatch, 5)
    found, out, err = config("edit")
    assert (found, out) == (code, "")
    assert error in err
    assert text in kept(err).read_text()
    assert config("get")[1] != "8\n"


def test_text_that_cannot_be_decoded_is_kept(config: Call, editor: Editor) -> None:
    config("set", "4")
    editor("path.write_bytes(b'\"caf\\xe9\"'); sys.exit()")
    code, out, err = config("edit")
    assert (code, out) == (2, "")
    remedy = r"Correct it, and run doyen config set billing - with it"
    assert re.search(rf"is not text in utf-8: .*; nothing was written\. {remedy}", err)
    assert kept(err).read_bytes() == b'"caf\xe9"'
    assert config("get")[1] == "4\n"


def test_standard_input_that_cannot_be_decoded_is_refused(
    config: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"caf\xe9"'), encoding="utf-8"))
    code, _, err = config("set", "-")
    assert code == 2
    assert "the value is not JSON: 'utf-8' codec can't decode byte 0xe9" in err


def test_an_editor_that_does_not_exist_is_named(
    config: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("VISUAL", "/no/such/editor")
    code, _, err = config("edit")
    assert code == 2
    assert "the editor '/no/such/editor' cannot be started" in err


# Watching.


def test_watch_prints_every_version_until_interrupted(store: str) -> None:
    with doyen.connect_blocking(store) as session:
        config = session.config("billing", author="ann", history=2)
        for n in range(1, 6):
            config.set({"workers": n})
        with following("config", "watch", "billing", "--store", store) as watch:
            assert watch.until("\n").endswith(' billing version 5 by ann: {"workers": 5}\n')
            config.set({"workers": 6})
            assert watch.until("\n").endswith(' billing version 6 by ann: {"workers": 6}\n')
            assert watch.interrupt() == 0
        since = ("config", "watch", "billing", "--from", "1", "--json", "--store", store)
        with following(*since) as watch:
            assert json.loads(watch.until("\n"))["missed"] == {"first": 2, "last": 3}
            assert [json.loads(watch.until("\n"))["version"] for _ in range(3)] == [4, 5, 6]
        with following("config", "watch", "billing", "--from", "9", "--store", store) as watch:
            lost = "billing was at version 9: the store has lost writes\n"
            assert watch.until("\n").endswith(lost)


def test_watch_says_that_there_is_no_configuration_yet(store: str) -> None:
    with doyen.connect_blocking(store) as session:
        config = session.config("billing", author="ann")
        with (
            following("config", "watch", "billing", "--store", store) as watch,
            following("config", "watch", "billing", "--json", "--store", store) as programs,
        ):
            assert watch.until("\n").endswith(" billing does not exist yet\n")
            absent = json.loads(programs.until("\n"))
            assert absent.pop("seen_at")
            assert absent == {"config": "billing", "change": "absent"}
            config.set(4)
            assert watch.until("\n").endswith(" billing version 1 by ann: 4\n")
            assert json.loads(programs.until("\n"))["version"] == 1


def test_what_another_program_has_written_is_replaced_by_force(config: Call, store: str) -> None:
    config("set", "1")
    config("set", "2")

    async def overwrite() -> None:
        opened = await open_store(store, Context(SystemClock(), lambda event: None))
        entry = await opened.get("config/billing/current")
        assert entry is not None
        await opened.put(entry.key, b"garbage", if_version=entry.version)
        await opened.close()

    asyncio.run(overwrite())
    code, _, err = config("set", "3")
    assert code != 0
    assert "doyen config rollback billing VERSION --force" in err
    assert config("history")[0] == 0
    # Version 2 is in the history; what was written in its place counts as 3.
    assert config("rollback", "1", "--force") == (0, "billing is at version 4\n", "")
    assert config("get")[1] == "1\n"
