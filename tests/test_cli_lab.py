"""`doyen lab`: what the lab finds, shown to people and to programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from doyen.cli import main
from doyen.lab import protocols
from doyen.lab.protocols import known
from mutants_raft import ComparesNothing

BROKEN = known("raft").but(make=ComparesNothing)


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(["lab", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_run_is_the_same_twice(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "--nodes", "3", "--seed", "7", "--for", "5s"]
    one, two = (told(capsys, *arguments) for _ in range(2))
    assert one["ok"]
    assert (one["protocol"], one["nodes"], one["seed"], one["for_s"]) == ("raft", 3, 7, 5.0)
    assert one["trace_hash"] == two["trace_hash"]
    assert main(["lab", *arguments, "--tell"]) == 0
    out = capsys.readouterr().out
    assert one["trace_hash"] in out
    assert "everything held" in out


def test_a_run_is_written_down_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "run.json")
    one = told(capsys, "run", "--nodes", "3", "--for", "3s", "--save", file)
    again = told(capsys, "replay", file)
    assert again["same"]
    assert again["trace_hash"] == one["trace_hash"]
    assert main(["lab", "replay", str(tmp_path / "nothing")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_a_hunt_shows_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["hunt", "--limit", "1s", "--jobs", "1", "--for", "2s", "--out", str(tmp_path)]
    hunted = told(capsys, *arguments)
    assert hunted["seeds"] > 0
    assert hunted["failures"] == []
    assert main(["lab", *arguments]) == 0
    assert "nothing was found" in capsys.readouterr().out


def test_what_breaks_is_reduced_told_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from doyen.lab import runner, story, world

    for module in (runner, protocols, story, world):
        monkeypatch.setattr(module, "known", lambda name: BROKEN, raising=False)
    monkeypatch.chdir(tmp_path)
    for seed in range(200):
        if main(["lab", "run", "--seed", str(seed), "--nodes", "3"]) == 1:
            break
    out = capsys.readouterr().out
    assert "BROKEN at" in out
    assert f"doyen lab replay lab-raft-{seed}.json" in out
    assert main(["lab", "replay", f"lab-raft-{seed}.json"]) == 1


def test_protocols_side_by_side_in_a_table_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    arguments = ["compare", "--protocols", "raft,smallest-id", "--seeds", "1", "--for", "3s"]
    arguments += ["--nodes", "3", "--faults", "crash"]
    rows = told(capsys, *arguments, "--plot", str(plot))["rows"]
    assert [row["protocol"] for row in rows] == ["raft", "smallest-id"]
    assert all(row["violations"] == 0 for row in rows)
    drawn = ElementTree.fromstring(plot.read_text())
    assert "smallest-id" in "".join(drawn.itertext())
    assert main(["lab", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("protocol")


def test_a_change_of_leader_costs_the_same_however_many_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "scale.svg"
    costs = told(capsys, "scale", "--most", "100", "--plot", str(plot))["costs"]
    assert "candidates" in "".join(ElementTree.fromstring(plot.read_text()).itertext())
    by_what: dict[str, set[int]] = {}
    for cost in costs:
        by_what.setdefault(cost["what"], set()).add(cost["messages"])
        if cost["what"] in ("resigns", "dies"):
            assert cost["seconds"] <= 8 * cost["one_way_s"]
    assert len(by_what["resigns"]) == len(by_what["dies"]) == 1
    assert max(by_what["resigns, race"]) > 5 * min(by_what["resigns, race"])
    assert main(["lab", "scale", "--most", "10"]) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "--protocol", "gossip"], "no protocol 'gossip'; there are raft"),
        (["run", "--faults", "locusts"], "no fault 'locusts'"),
        (
            ["compare", "--protocols", "raft", "--seeds", "1", "--for", "1s", "--plot", "x.gif"],
            "gif",
        ),
        (["scenario", "nonsense"], "no scenario 'nonsense'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *arguments]) == 2
    assert complaint in capsys.readouterr().err
