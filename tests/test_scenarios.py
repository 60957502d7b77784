"""The scenarios: the transcript and the facts of each, and that the facts could fail.

`DOYEN_REWRITE=1 pytest tests/test_scenarios.py` rewrites the transcripts. Explain the differences.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import doyen
import story
from doyen.cli import main
from doyen.election.leader import Leading
from doyen.lab.checkers import ViolationFound
from doyen.lab.protocols import known
from doyen.lab.scenarios import SCENARIOS, ScenarioResult, core_world, run_scenario
from doyen.lab.scenarios.configurations import config_change
from doyen.lab.scenarios.controllers import controller
from doyen.lab.scenarios.elections import GuardedRegister, herd, master_row, paused_leader
from doyen.lab.scenarios.ensembles import by_ids_alone, no_majority
from doyen.lab.scenarios.groups import publishing, registration
from doyen.lab.scenarios.logs import (
    AsPrinted,
    CountsWhoIsUp,
    quorum_anomaly,
    vote_without_log,
    votes_too_early,
)
from doyen.lab.scenarios.store_world import StoreWorld, run_store_world
from doyen.lab.scenarios.transcript import Transcript
from doyen.manage import roster
from doyen.manage.config import ConfigStore
from doyen.manage.documents import Versioned
from doyen.manage.publishing import ListPublisher
from doyen.manage.registration import MemberAttempt
from doyen.manage.roster import Roster
from doyen.quorum.consensus.core import Making
from doyen.quorum.consensus.invariants import InvariantBroken
from doyen.quorum.consensus.raft import Raft
from doyen.quorum.consensus.smallest_id import SmallestId
from mutants_raft import ReadsWithoutRounds
from mutants_shards import moved_too_much, unclaimed
from mutants_zab import ForgetsCurrentEpoch

TRANSCRIPTS = Path(__file__).parent / "transcripts" / "scenarios"
DOCUMENT = Path(__file__).parents[1] / "docs" / "scenarios.md"

WITH_TIMEOUTS = [
    *("five-servers", "restarted-cluster", "no-majority", "quorum-anomaly"),
    *("partition-heals", "votes-too-early", "vote-without-log"),
]
"""The scenarios whose servers draw random timeouts."""

result_of = cache(run_scenario)
each_scenario = pytest.mark.parametrize("name", SCENARIOS)


def text(name: str, result: ScenarioResult) -> str:
    scenario = SCENARIOS[name]
    facts = [f"{'✓' if fact.held else '✗'} {fact.text}" for fact in result.facts]
    return "\n".join([scenario.title, f"({scenario.source})", "", *result.lines, "", *facts, ""])


@each_scenario
def test_what_it_teaches_holds(name: str) -> None:
    result = result_of(name)
    assert result.facts
    assert [fact.text for fact in result.facts if not fact.held] == []
    assert result.ok
    assert result.as_dict()["ok"]


@pytest.mark.parametrize("seed", range(2, 6))
def test_the_facts_hold_with_other_seeds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other random timeouts the times differ, but the facts hold."""
    monkeypatch.setattr(core_world, "SEED", seed)
    for name in WITH_TIMEOUTS:
        assert [fact.text for fact in run_scenario(name).facts if not fact.held] == [], name


@each_scenario
def test_its_transcript(name: str) -> None:
    """The file was written by another process, so the transcript is the same in every process."""
    path = TRANSCRIPTS / f"{name}.txt"
    transcript = text(name, result_of(name))
    if os.environ.get("DOYEN_REWRITE"):
        path.write_text(transcript, encoding="utf-8")
    assert transcript == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "herd"])
def test_its_transcript_is_the_same_twice_in_one_process(name: str) -> None:
    assert run_scenario(name) == result_of(name)


def test_the_transcript_of_a_crowd_is_the_same_twice() -> None:
    assert result_with(partial(herd, most=100)) == result_with(partial(herd, most=100))


def test_there_is_no_transcript_without_a_scenario() -> None:
    assert {path.stem for path in TRANSCRIPTS.glob("*.txt")} == {*SCENARIOS}


@each_scenario
def test_the_document_names_it(name: str) -> None:
    assert f"`doyen lab scenario {name}`: " in DOCUMENT.read_text()


def test_the_example_in_the_document_is_the_transcript() -> None:
    printed = text("paused-leader", result_of("paused-leader")).splitlines()
    example = next(block for block in story.blocks(DOCUMENT) if "✓" in block.text)
    assert [line for line in example.text.splitlines() if line not in printed] == []


@each_scenario
def test_its_lines_are_few_and_short(name: str) -> None:
    lines = result_of(name).lines
    assert 3 <= len(lines) <= 40
    assert all(len(line) <= 120 for line in lines)
    assert SCENARIOS[name].title[-1] not in ".!"


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "scenario"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in SCENARIOS)
    assert main(["lab", "scenario", "five-servers"]) == 0
    printed = capsys.readouterr().out
    assert all(line in printed for line in result_of("five-servers").lines)
    assert main(["lab", "scenario", "five-servers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result_of("five-servers").as_dict()


def result_with(run: Callable[[Transcript], None]) -> ScenarioResult:
    transcript = Transcript()
    run(transcript)
    return transcript.end()


def only_majorities(me: str, reach: Mapping[str, Sequence[str]]) -> str | None:
    """The model's rule without the part that is broken."""
    elected = by_ids_alone(me, reach)
    return elected if elected != me or 2 * (1 + len(reach[me])) > len(reach) else None


SOUND: dict[str, tuple[Callable[[Transcript], None], list[str]]] = {
    "a majority of all is counted": (
        partial(no_majority, rule=only_majorities),
        ["by numbers alone"],
    ),
    "the row has a lease": (partial(master_row, row_ttl_s=5.0), ["a minute after"]),
    "all stand in line": (
        partial(herd, crowded="line", most=100),
        ["all 100 that", "the store received"],
    ),
    "readers write back": (partial(quorum_anomaly, repair=True), ["with a quorum", "the lab's"]),
    "all five count": (partial(votes_too_early, early=Raft), ["counting only"]),
    "logs are compared": (partial(vote_without_log, printed=Raft), ["as printed"]),
    "a name has one holder": (partial(registration, last_wins=False), ["in the model"]),
    "lists are compared": (partial(publishing, careless=False), ["without the comparison"]),
    "it is written first": (partial(config_change, notifies_first=False), ["notified before"]),
    "plans are compared": (partial(controller, careless=False), ["without the comparison"]),
}


@pytest.mark.parametrize("what", SOUND)
def test_the_facts_about_broken_parts_fail_with_sound_parts(what: str) -> None:
    """A scenario asserts that a part is broken. That fails if the part is replaced by a sound
    one."""
    run, beginnings = SOUND[what]
    not_held = [fact.text for fact in result_with(run).facts if not fact.held]
    assert len(not_held) == len(beginnings)
    for text, beginning in zip(not_held, beginnings, strict=True):
        assert text.startswith(beginning)


def test_a_guarded_register_refuses_the_late_write() -> None:
    with closing(GuardedRegister()) as register:
        result = result_with(partial(paused_leader, bare=register))
    not_held = [fact.text for fact in result.facts if not fact.held]
    assert len(not_held) == 2, "both registers refuse the write"
    assert not_held[0].startswith("the file without a guard")


class AloneIsEnough(SmallestId):
    """Considers one server a majority."""

    def __init__(self, *given: Any, **others: Any) -> None:
        super().__init__(*given, **others)
        self._majority = self._followers.majority = 1


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
def test_the_facts_fail_with_broken_parts(
    name: str, mutant: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_world, "known", lambda protocol: known(protocol).replace(make=mutant))
    try:
        assert not run_scenario(name).ok
    except (InvariantBroken, ViolationFound):
        pass


def names_are_shared(patch: pytest.MonkeyPatch) -> None:
    """A process takes the entry of another for its own."""
    patch.setattr(MemberAttempt, "is_mine", lambda self, entry: True)


def health_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """A leader does not ask whether its member may lead."""
    patch.setattr(Leading, "_check_eligibility", lambda self: None)


def a_new_leader_does_not_write(patch: pytest.MonkeyPatch) -> None:
    """The publisher of a later leader leaves the list as it is."""
    publish = ListPublisher._publish

    async def only_the_first(self: ListPublisher, roster: Roster) -> None:
        current = await self._current()
        if current is None or current.token == self.term.token:
            await publish(self, roster)

    patch.setattr(ListPublisher, "_publish", only_the_first)


def the_history_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A writer replaces the current version without a copy of it."""

    async def skip(self: ConfigStore[Any], current: Versioned, known: object = None) -> None:
        pass

    patch.setattr(ConfigStore, "_copy", skip)


def nobody_is_suspected(patch: pytest.MonkeyPatch) -> None:
    """An observer does not look at renewals."""
    patch.setattr(roster, "SUSPECT_AFTER", 2.0)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("registration", names_are_shared),
        ("leader-switch", health_is_ignored),
        ("publishing", a_new_leader_does_not_write),
        ("config-change", the_history_is_not_kept),
        ("fault-detection", health_is_ignored),
        ("fault-detection", nobody_is_suspected),
        ("controller", moved_too_much),
        ("controller", unclaimed),
    ],
)
def test_the_facts_fail_if_a_rule_of_the_product_is_broken(
    name: str, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert not run_scenario(name).ok


@pytest.mark.parametrize("late", [False, True])
def test_an_error_in_a_process_fails_its_scenario(late: bool) -> None:
    def fail() -> None:
        raise ZeroDivisionError("in the process")

    async def run(session: doyen.Session) -> None:
        if late:
            asyncio.get_running_loop().call_later(1, fail)
            await asyncio.Event().wait()
        fail()

    async def main(world: StoreWorld) -> None:
        world.start("server1", run)
        await asyncio.sleep(2)

    with pytest.raises(ExceptionGroup) as failed:
        run_store_world(Transcript(), main)
    assert "in the process" in repr(failed.value)
