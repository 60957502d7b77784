"""The scenarios of the documents: what each tells and asserts, and that it could fail.

`DOYEN_REWRITE=1 pytest tests/test_scenarios.py` writes the narrations anew; explain the difference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import story
from doyen.cli import main
from doyen.lab.checkers import Broken
from doyen.lab.protocols import known
from doyen.lab.scenarios import SCENARIOS, Played, act, stage
from doyen.lab.scenarios.controllers import Broker, controller
from doyen.lab.scenarios.elections import GuardedRegister, herd, master_row, paused_leader
from doyen.lab.scenarios.ensembles import by_ids_alone, no_majority
from doyen.lab.scenarios.logs import (
    AsPrinted,
    CountsWhoIsUp,
    quorum_anomaly,
    vote_without_log,
    votes_too_early,
)
from doyen.lab.scenarios.play import Script
from doyen.quorum.consensus.core import Making
from doyen.quorum.consensus.invariants import InvariantBroken
from doyen.quorum.consensus.raft import Raft
from doyen.quorum.consensus.smallest_id import SmallestId
from mutants_raft import ReadsWithoutRounds
from mutants_zab import ForgetsCurrentEpoch

FOLDER = Path(__file__).parent / "transcripts" / "scenarios"
DOCUMENT = Path(__file__).parents[1] / "docs" / "lab.md"

STAGED = [
    *("five-servers", "restarted-cluster", "no-majority", "quorum-anomaly"),
    *("partition-heals", "votes-too-early", "vote-without-log"),
]
"""Those whose servers draw their timeouts."""

acted = cache(act)
each_scenario = pytest.mark.parametrize("name", SCENARIOS)


def text(name: str, played: Played) -> str:
    scenario = SCENARIOS[name]
    facts = [f"{'✓' if fact.held else '✗'} {fact.text}" for fact in played.facts]
    return "\n".join([scenario.title, f"({scenario.source})", "", *played.lines, "", *facts, ""])


@each_scenario
def test_what_it_teaches_holds(name: str) -> None:
    played = acted(name)
    assert played.facts
    assert [fact.text for fact in played.facts if not fact.held] == []
    assert played.ok
    assert played.as_dict()["ok"]


@pytest.mark.parametrize("seed", range(2, 6))
def test_it_holds_by_no_coincidence(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other chances the servers tell of other times; what is asserted holds all the same."""
    monkeypatch.setattr(stage, "SEED", seed)
    for name in STAGED:
        assert [fact.text for fact in act(name).facts if not fact.held] == [], name


@each_scenario
def test_its_narration(name: str) -> None:
    """Written by another process, so this is also the proof that it tells the same every time."""
    path = FOLDER / f"{name}.txt"
    told = text(name, acted(name))
    if os.environ.get("DOYEN_REWRITE"):
        path.write_text(told, encoding="utf-8")
    assert told == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "herd"])
def test_it_tells_the_same_twice_in_one_process(name: str) -> None:
    assert act(name) == acted(name)


def test_a_crowd_tells_the_same_twice() -> None:
    assert performed(partial(herd, most=100)) == performed(partial(herd, most=100))


def test_there_is_no_narration_of_what_is_gone() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {*SCENARIOS}


@each_scenario
def test_the_document_says_how_to_see_it(name: str) -> None:
    assert f"`doyen lab scenario {name}`: " in DOCUMENT.read_text()


def test_the_example_in_the_document_is_what_is_told() -> None:
    told = text("paused-leader", acted("paused-leader")).splitlines()
    example = next(block for block in story.blocks(DOCUMENT) if "✓" in block.text)
    assert [line for line in example.text.splitlines() if line not in told] == []


@each_scenario
def test_it_can_be_read(name: str) -> None:
    lines = acted(name).lines
    assert 3 <= len(lines) <= 40
    assert all(len(line) <= 120 for line in lines)
    assert SCENARIOS[name].title[-1] not in ".!"


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "scenario"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in SCENARIOS)
    assert main(["lab", "scenario", "five-servers"]) == 0
    told = capsys.readouterr().out
    assert all(line in told for line in acted("five-servers").lines)
    assert main(["lab", "scenario", "five-servers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == acted("five-servers").as_dict()


def performed(perform: Callable[[Script], None]) -> Played:
    script = Script()
    perform(script)
    return script.end()


def only_majorities(me: str, reach: Mapping[str, Sequence[str]]) -> str | None:
    """The model's rule without the sentence that breaks it."""
    elected = by_ids_alone(me, reach)
    return elected if elected != me or 2 * (1 + len(reach[me])) > len(reach) else None


SOUND: dict[str, tuple[Callable[[Script], None], list[str]]] = {
    "a majority of all is counted": (
        partial(no_majority, rule=only_majorities),
        ["by numbers alone"],
    ),
    "the row has a lease": (partial(master_row, row_ttl_s=5.0), ["a minute after"]),
    "all stand in line": (
        partial(herd, crowded="line", most=100),
        ["all 100 who", "the store was"],
    ),
    "readers write back": (partial(quorum_anomaly, repair=True), ["with a quorum", "the lab's"]),
    "all five count": (partial(votes_too_early, early=Raft), ["counting only"]),
    "logs are compared": (partial(vote_without_log, printed=Raft), ["as printed"]),
    "brokers know epochs": (partial(controller, credulous=Broker), ["without epochs"]),
}


@pytest.mark.parametrize("what", SOUND)
def test_with_the_sound_in_place_of_the_broken_it_would_say_so(what: str) -> None:
    """That something is broken is a fact like any other: it does not hold of what is sound."""
    perform, beginnings = SOUND[what]
    not_held = [fact.text for fact in performed(perform).facts if not fact.held]
    assert len(not_held) == len(beginnings)
    for told, beginning in zip(not_held, beginnings, strict=True):
        assert told.startswith(beginning)


def test_a_register_with_a_guard_would_not_take_the_late_write() -> None:
    with closing(GuardedRegister()) as register:
        played = performed(partial(paused_leader, bare=register))
    not_held = [fact.text for fact in played.facts if not fact.held]
    assert len(not_held) == 2, "neither does only one of the two refuse"
    assert not_held[0].startswith("the file that takes no token")


class AloneIsEnough(SmallestId):
    """Takes one for a majority."""

    def __init__(self, *given: Any, **others: Any) -> None:
        super().__init__(*given, **others)
        self._majority = 1


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("restarted-cluster", ForgetsCurrentEpoch),
        ("no-majority", AloneIsEnough),
        ("quorum-anomaly", ReadsWithoutRounds),
        ("partition-heals", CountsWhoIsUp),
        ("votes-too-early", CountsWhoIsUp),
        ("vote-without-log", AsPrinted),
    ],
)
def test_with_the_broken_in_place_of_the_sound_it_would_say_so(
    name: str, mutant: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "known", lambda protocol: known(protocol).but(make=mutant))
    try:
        assert not act(name).ok
    except (InvariantBroken, Broken):
        pass
