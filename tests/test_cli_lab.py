"""`doyen lab`: the output of runs, hunts, comparisons and scenarios, as text and as JSON."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from candidates import Capture
from doyen.cli import main
from doyen.lab import protocols, runner
from doyen.lab.plan import Plan
from doyen.lab.protocols import known
from doyen.lab.runner import FoundFailure
from doyen.lab.world import run_plan
from mutants_raft import ComparesNothing

BROKEN = known("raft").replace(make=ComparesNothing)


def output(capsys: Capture, *arguments: str, code: int = 0) -> Any:
    assert main(["lab", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_run_prints_its_narration_as_json(capsys: Capture) -> None:
    arguments = ["run", "--nodes", "3", "--faults", "none", "--for", "3s"]
    assert "story" not in output(capsys, *arguments)
    assert any(" leads in " in line for line in output(capsys, *arguments, "--tell")["story"])


def test_a_run_is_the_same_twice(capsys: Capture) -> None:
    arguments = ["run", "--nodes", "3", "--seed", "7", "--for", "5s"]
    one, two = (output(capsys, *arguments) for _ in range(2))
    assert one["ok"]
    assert (one["protocol"], one["nodes"], one["seed"], one["for_s"]) == ("raft", 3, 7, 5.0)
    assert one["trace_hash"] == two["trace_hash"]
    assert main(["lab", *arguments, "--tell"]) == 0
    out = capsys.readouterr().out
    assert one["trace_hash"] in out
    assert "all invariants held" in out


def test_a_run_is_written_down_and_replayed(tmp_path: Path, capsys: Capture) -> None:
    file = str(tmp_path / "run.json")
    one = output(capsys, "run", "--nodes", "3", "--for", "3s", "--save", file)
    again = output(capsys, "replay", file)
    assert again["same"]
    assert again["trace_hash"] == one["trace_hash"]
    assert main(["lab", "replay", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_hunt_shows_what_it_did(tmp_path: Path, capsys: Capture) -> None:
    """At least some seeds are run, even if the time is over before the first process has
    started."""
    arguments = ["hunt", "--limit", "0.01s", "--jobs", "1", "--for", "2s", "--out", str(tmp_path)]
    hunted = output(capsys, *arguments)
    assert hunted["seeds"] > 0
    assert hunted["failures"] == []
    assert main(["lab", *arguments]) == 0
    assert "no violation was found" in capsys.readouterr().out


def test_a_failure_is_reduced_narrated_and_saved(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from doyen.lab import narration, world

    for module in (runner, protocols, narration, world):
        monkeypatch.setattr(module, "known", lambda name: BROKEN, raising=False)
    monkeypatch.chdir(tmp_path)
    for seed in range(200):
        if main(["lab", "run", "--seed", str(seed), "--nodes", "3"]) == 1:
            break
    out = capsys.readouterr().out
    assert "VIOLATED at" in out
    assert f"doyen lab replay lab-raft-{seed}.json" in out
    assert main(["lab", "replay", f"lab-raft-{seed}.json"]) == 1

    def interrupted(plan: Plan) -> FoundFailure:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "reduce", interrupted)
    capsys.readouterr()
    again = output(capsys, "run", "--seed", str(seed), "--nodes", "3", code=130)
    assert again["file"] == f"lab-raft-{seed}-2.json"
    assert again["violations"]
    assert main(["lab", "replay", again["file"]]) == 1


def test_an_interrupted_hunt_reports_and_saves_what_it_has_found(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = runner.unreduced(run_plan(Plan(protocol="raft", nodes=3, seed=4711, for_s=1.0)))

    by = signal.SIGINT

    def hunt(*given: object, on_failure: Callable[[FoundFailure], None], **others: object) -> None:
        on_failure(failed)
        signal.raise_signal(by)

    monkeypatch.setattr(runner, "hunt", hunt)
    assert main(["lab", "hunt", "--out", str(tmp_path)]) == 130
    out = capsys.readouterr().out
    assert "interrupted" in out
    assert f"doyen lab replay {tmp_path / 'lab-raft-4711.json'}" in out
    assert main(["lab", "replay", str(tmp_path / "lab-raft-4711.json")]) == 0
    capsys.readouterr()
    monkeypatch.setattr(runner, "keep", lambda *given: (tmp_path / "no" / "such").open("xb"))
    by = signal.SIGTERM
    hunted = output(capsys, "hunt", "--out", str(tmp_path), code=143)
    assert hunted["interrupted"]
    assert [each["file"] for each in hunted["failures"]] == [None]


def test_protocols_side_by_side_in_a_table_and_a_chart(tmp_path: Path, capsys: Capture) -> None:
    chart = tmp_path / "chart.svg"
    arguments = ["compare", "--protocols", "raft,smallest-id", "--seeds", "1", "--for", "3s"]
    arguments += ["--nodes", "3", "--faults", "crash"]
    rows = output(capsys, *arguments, "--plot", str(chart))["rows"]
    assert [row["protocol"] for row in rows] == ["raft", "smallest-id"]
    assert all(row["violations"] == 0 for row in rows)
    drawn = ElementTree.fromstring(chart.read_text())
    assert "smallest-id" in "".join(drawn.itertext())
    assert main(["lab", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("protocol")


@pytest.mark.chaos
def test_charts_are_drawn_as_png_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))  # the cache directory of matplotlib
    for name, *arguments in (
        ("bars.png", "compare", "--protocols", "raft", "--seeds", "1", "--for", "1s"),
        ("lines.png", "scale", "--most", "100"),
    ):
        chart = tmp_path / name
        assert output(capsys, *arguments, "--plot", str(chart))
        head = chart.read_bytes()[:24]
        assert head.startswith(b"\x89PNG\r\n\x1a\n")
        assert int.from_bytes(head[16:20]) == 1800  # three panels wide
    monkeypatch.setattr("doyen.lab.chart.find_spec", lambda name: None)
    assert main(["lab", "compare", "--plot", str(tmp_path / "x.png")]) == 2
    assert "doyen[plot]" in capsys.readouterr().err


def test_a_change_of_leader_costs_the_same_however_many_wait(
    tmp_path: Path, capsys: Capture
) -> None:
    chart = tmp_path / "scale.svg"
    costs = output(capsys, "scale", "--most", "100", "--plot", str(chart))["costs"]
    assert "candidates" in "".join(ElementTree.fromstring(chart.read_text()).itertext())
    messages: dict[tuple[str, float], set[int]] = {}
    for cost in costs:
        messages.setdefault((cost["what"], cost["one_way_s"]), set()).add(cost["messages"])
        if cost["what"] in ("resigns", "dies"):
            assert cost["seconds"] <= 8 * cost["one_way_s"]
    for (what, _), its in messages.items():
        if what in ("resigns", "dies"):
            assert len(its) == 1
        elif what == "resigns, race":
            assert max(its) > 5 * min(its)
    assert main(["lab", "scale", "--most", "10"]) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "--protocol", "gossip"], "unknown protocol 'gossip': choose one of raft"),
        (["run", "--faults", "locusts"], "unknown fault 'locusts'"),
        (
            ["compare", "--protocols", "raft", "--seeds", "1", "--for", "1s", "--plot", "x.gif"],
            "gif",
        ),
        (["scenario", "nonsense"], "unknown scenario 'nonsense'"),
        (
            ["run", "--world", "quorum", "--faults", "rot"],
            "unknown fault 'rot' in the world 'quorum'",
        ),
        (["run", "--for", "9999h", "--save", "no/such/run.json"], "cannot be written"),
        (["compare", "--for", "9999h", "--plot", "no/such/chart.svg"], "cannot be written"),
        (["compare", "--for", "9999h", "--plot", "x"], "charts are .svg or .png files, not 'x'"),
        (["scale", "--most", "100000", "--plot", "x.gif"], "not '.gif'"),
        (["hunt", "--out", "no/such"], "the directory 'no/such' for failed runs does not exist"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str], complaint: str, capsys: Capture
) -> None:
    assert main(["lab", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--nodes", "0"],
        ["run", "--nodes", "three"],
        ["run", "--proto", "raft"],
        ["run", "--for", "0"],
        ["hunt", "--jobs", "0"],
        ["compare", "--seeds", "-1"],
        ["scale", "--most", "0"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["lab", *arguments])
    assert refused.value.code == 2
    assert "error: " in capsys.readouterr().err
