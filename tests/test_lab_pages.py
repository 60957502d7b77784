"""Pages of the lab as files: what the commands write, and that nothing in them can be executed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from candidates import Capture
from doyen.cli import main
from doyen.lab import narration, protocols, runner, world
from doyen.lab.outcome import RunOutcome, Statistics
from doyen.lab.pages.comparison import comparison_film
from doyen.lab.pages.film import record_run
from doyen.lab.pages.page import page
from doyen.lab.plan import Latencies, Plan
from doyen.lab.runner import FoundFailure
from doyen.lab.world import run_plan
from test_lab_recorder import BROKEN, FAILING

HOSTILE = ("</script><script>alert(1)</script>", "<!--<img src=x onerror=alert(1)>", "é\u202eabc")


def film_in(text: str) -> Any:
    """The data of a page, as its script reads them."""
    found = re.search(r'<script type="application/json" id="film">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def scripts(text: str) -> list[str]:
    return re.findall(r"<script>(.*?)</script>", text, re.S)


def test_a_page_is_one_file_that_loads_nothing_and_runs_only_its_own_script(
    tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "run.html"
    arguments = ["lab", "run", "--seed", "3", "--nodes", "3", "--for", "3s", "--html", str(file)]
    assert main(arguments) == 0
    assert f"the page is in {file}" in capsys.readouterr().out
    text = file.read_text()
    assert film_in(text)["command"].startswith("doyen lab run --protocol raft --nodes 3 --seed 3")
    addresses = re.findall(r"""(?:https?:)?//[\w.-]+\.\w+""", text)
    assert {each for each in addresses if "w3.org" not in each} == set()
    assert not re.findall(r"\bon\w+=|javascript:| src=|@import|url\(", text)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in unescape(policy).split("; "))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == "'none'"
    (script,) = scripts(text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"


def test_text_of_a_film_is_never_html() -> None:
    _, _, film = record_run(Plan(protocol="raft", nodes=3, seed=1, for_s=1.0))
    film["title"] = HOSTILE[0]
    film["scenes"][0]["lanes"] = list(HOSTILE)
    text = page(film)
    assert film_in(text)["scenes"][0]["lanes"] == list(HOSTILE)
    assert len(re.findall(r"</?script", text)) == 4
    assert "<img" not in text
    assert "<title>doyen lab: &lt;/script&gt;" in text


def test_a_scenario_a_replay_and_a_comparison_have_pages(tmp_path: Path, capsys: Capture) -> None:
    lesson, run, again = (tmp_path / name for name in ("lesson.html", "run.json", "again.html"))
    assert main(["lab", "scenario", "five-servers", "--html", str(lesson)]) == 0
    assert film_in(lesson.read_text())["title"].startswith("ZooKeeper's five servers")
    small = ["--nodes", "3", "--for", "2s"]
    assert main(["lab", "run", *small, "--save", str(run)]) == 0
    assert main(["lab", "replay", str(run), "--html", str(again)]) == 0
    assert film_in(again.read_text())["command"] == f"doyen lab replay {run}"
    plots = tmp_path / "plots.html"
    both = ["--protocols", "raft,paxos", "--seeds", "2", "--faults", "crash", "--html", str(plots)]
    assert main(["lab", "compare", *small, *both]) == 0
    compared = film_in(plots.read_text())
    assert compared["protocols"] == ["raft", "paxos"]
    assert [len(values) for values in compared["figures"][0]["values"]] == [2, 2]
    capsys.readouterr()
    for wrong in (["--html", "x.txt"], ["--html", str(tmp_path / "no" / "x.html")]):
        assert main(["lab", "scenario", "five-servers", *wrong]) == 2
    assert main(["lab", "scenario", "--html", "x.html"]) == 2
    err = capsys.readouterr().err
    assert "a page is an .html file" in err
    assert "name the scenario" in err


def test_a_failure_that_was_reduced_has_a_page_beside_its_file(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runner, protocols, narration, world):
        monkeypatch.setattr(module, "known", lambda name: BROKEN, raising=False)
    outcome, story = narration.narrate(FAILING)
    found = FoundFailure(outcome=outcome, narration=story)

    def hunt(*given: object, on_failure: Any, **others: object) -> None:
        on_failure(found)
        on_failure(runner.unreduced(run_plan(FAILING.replace(seed=2, for_s=0.1))))

    monkeypatch.setattr(runner, "hunt", hunt)
    assert main(["lab", "hunt", "--out", str(tmp_path)]) == 1
    shown = tmp_path / "lab-raft-1.html"
    assert f"the page is in {shown}" in capsys.readouterr().out
    film = film_in(shown.read_text())
    assert film["command"] == f"doyen lab replay {tmp_path / 'lab-raft-1.json'}"
    assert "without entry 1" in film["scenes"][0]["violations"][0]["text"]
    assert [each.name for each in tmp_path.glob("*.html")] == ["lab-raft-1.html"]


def test_twenty_thousand_events_are_below_five_megabytes() -> None:
    """The bound holds for the events of a busy run: few of them are quiet."""
    film = busy_film()
    assert film["events"] >= 20_000
    assert len(page(film).encode()) < 5_000_000


def busy_film() -> dict[str, Any]:
    """A run of more than 20,000 events."""
    plan = Plan(
        protocol="raft",
        nodes=5,
        seed=1,
        for_s=14.0,
        pause_s=0.02,
        latencies=Latencies(latency_s=0.004),
    )
    return record_run(plan)[2]


def test_what_healed_at_once_is_not_what_never_did() -> None:
    plan = Plan(protocol="raft", nodes=3, seed=1, for_s=8.0)
    at_once = Statistics(first_leader_s=0.0, healed_s=0.0, virtual_s=1.0)
    runs = [
        RunOutcome(plan=plan, events=1, trace_hash="", violations=[], statistics=figures)
        for figures in (at_once, Statistics(virtual_s=1.0))
    ]
    film = comparison_film({"raft": runs})
    assert [figure["values"] for figure in film["figures"][:2]] == [[[0.0, 8.0]], [[0.0, 8.0]]]
    summed = runner.summarize("raft", runs[:1])
    assert (summed.first_leader_s, summed.healed_s) == (0.0, 0.0)
