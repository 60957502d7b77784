"""The recorder: what a page is given to draw is what happened in the run."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from doyen.lab import recorder as recording
from doyen.lab import recording_tables, runner
from doyen.lab.narration import make_world
from doyen.lab.observer import Fate
from doyen.lab.pages.film import FilmedTranscript, record_run, record_scenario
from doyen.lab.phrases import phrase, reason, voter_view
from doyen.lab.plan import DROP, Fault, Latencies, Plan
from doyen.lab.protocols import PROTOCOLS, known
from doyen.lab.recording_tables import ARRIVED, DOWN, FATES, FOLLOWING, LEADING, LogRows
from doyen.lab.scenarios import SCENARIOS
from doyen.lab.scenarios.elections import herd
from doyen.quorum.consensus.core import Message, Recovered
from doyen.quorum.consensus.raft.messages import Vote, VoteReply
from mutants_raft import ComparesNothing

QUIET = Plan(
    protocol="raft",
    nodes=3,
    seed=5,
    for_s=4.0,
    clients=1,
    pause_s=0.5,
    latencies=Latencies(latency_s=0.02),
)
BROKEN = known("raft").replace(make=ComparesNothing)
FAILING = Plan(
    protocol="raft",
    nodes=5,
    seed=1,
    for_s=4.347,
    clients=0,
    keys=8,
    latencies=Latencies(latency_s=0.01, spread=0.1, fsync_s=0.02),
    heartbeat_s=0.4,
    message_bytes=1,
    compact_every=400,
    tail_entries=0,
    faults=(
        Fault("partition", 0.7348, 2.1853, ("n1", "n5", "n4")),
        Fault("partition", 1.2995, 1.656, ("n1",)),
    ),
)
"""A run, found by a hunt and reduced, in which servers that compare no logs lose an entry."""
TIMED = re.compile(r" *\d+\.\d{3} s  ")
"""The beginning of a line that tells what happened when."""


@cache
def scene_of(plan: Plan = QUIET, *, broken: bool = False) -> dict[str, Any]:
    """The recording of a plan, as a page reads it."""
    _, _, film = record_run(plan, BROKEN if broken else None)
    scene: dict[str, Any] = json.loads(json.dumps(film))["scenes"][0]
    return scene


def rows(scene: dict[str, Any], kind: str) -> list[list[Any]]:
    return [row for row in scene["messages"] if scene["kinds"][row[4]]["name"] == kind]


@pytest.mark.parametrize("world", ["cores", "quorum"])
def test_a_run_that_is_recorded_is_the_same_run(world: str) -> None:
    plan = runner.plan_for(world, "raft", 3, 7, for_s=4.0)
    assert record_run(plan)[0].trace_hash == make_world(plan).run().trace_hash


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_is_drawn(protocol: str) -> None:
    """Each message has a sentence, with a value for each placeholder, and none comes from a
    docstring by default."""
    scene = scene_of(runner.plan_for("cores", protocol, 3, 3, for_s=4.0))
    assert any(role == LEADING for _, _, role, _ in scene["roles"])
    assert any(committed >= 0 for *_, committed, _ in scene["logs"])
    for row in scene["messages"]:
        kind = scene["kinds"][row[4]]
        assert kind["says"].count("{") == len(row) - 8
        assert kind["category"] in ("votes", "entries", "heartbeats")
    assert {kind["category"] for kind in scene["kinds"]} == {"votes", "entries", "heartbeats"}


def test_a_message_arrives_after_it_was_sent_and_answers_one_that_arrived() -> None:
    scene = scene_of()
    assert all(row[0] < row[1] for row in scene["messages"] if FATES[row[5]] == ARRIVED)
    replies = rows(scene, "vote reply")
    assert replies
    for reply in replies:
        request = scene["messages"][reply[6]]
        assert scene["kinds"][request[4]]["name"] == "vote"
        assert (request[2], request[3]) == (reply[3], reply[2])
        assert request[1] <= reply[0]


def test_roles_change_in_order_and_name_the_leader() -> None:
    scene = scene_of()
    for one, two in pairwise(scene["roles"]):
        assert one[1] <= two[1]
    leader = next(row for row in scene["roles"] if row[2] == LEADING)
    assert scene["labels"][leader[3]] == "leads, generation 1"
    name = scene["lanes"][leader[0]]
    followers = {row[0] for row in scene["roles"] if scene["labels"][row[3]] == f"follows {name}"}
    assert len(followers) == 2


def test_the_log_grows_under_each_lane_and_is_committed_later() -> None:
    scene = scene_of()
    by_lane: dict[int, list[list[int]]] = {lane: [] for lane in range(3)}
    for row in scene["logs"]:
        by_lane[row[0]].append(row)
    for entries in by_lane.values():
        assert [row[1] for row in entries] == list(range(1, len(entries) + 1))
        assert all(written < committed for *_, written, committed, _ in entries)
    assert len({len(entries) for entries in by_lane.values()}) == 1


def test_entries_that_are_cut_off_end() -> None:
    log_rows: list[list[int]] = []
    log = LogRows(0, log_rows, [])
    log.write(1, 1, [1, 1, 1], keep=False)
    log.commit(2, 1, [1])
    log.write(3, 2, [2], keep=False)
    assert log_rows == [
        [0, 1, 1, 1, 2, -1],
        [0, 2, 1, 1, -1, 3],
        [0, 3, 1, 1, -1, 3],
        [0, 2, 2, 3, -1, -1],
    ]
    log.end(4)
    assert [row[5] for row in log_rows] == [4, 3, 3, 4]


def test_cuts_crashes_pauses_and_clocks_are_recorded() -> None:
    faults = (
        Fault("partition", 1.0, 0.5, ("n1",)),
        Fault("oneway", 1.8, 0.4, ("n2", "n3")),
        Fault("crash", 2.0, 0.5, ("n2",)),
        Fault("pause", 2.2, 0.5, ("n3",)),
        Fault("rate", 2.5, 0.5, ("n1",), 2.0),
        Fault("jump", 2.6, 0.0, ("n1",), 1.0),
        Fault("slow", 2.7, 0.2, ("n1", "n2"), 0.05),
        Fault("loss", 3.0, 0.5, (), 0.4),
    )
    scene = scene_of(QUIET.replace(faults=faults))
    spans = {(kind, lane, label) for kind, lane, _, _, label, *_ in scene["spans"]}
    assert {
        ("cut", 0, "cut off from everybody"),
        ("cut", 1, "cut off from n1"),
        ("cut", 1, "cannot send to n3"),
        ("cut", 2, "does not hear n2"),
        ("paused", 2, "paused"),
        ("clock", 0, "clock runs at 2 times the true rate"),
        ("weather", -1, "n1 and n2: 50 ms late"),
        ("weather", -1, "the network loses 40%"),
    } <= spans
    assert [1_000_000, 1_500_000] in [span[2:4] for span in scene["spans"]]
    down = [row[1] for row in scene["roles"] if row[0] == 1 and row[2] == DOWN and row[1]]
    assert down == [2_000_000]
    assert any("jumps 1 s" in label for _, _, label in scene["marks"])
    fates = {FATES[row[5]] for row in scene["messages"]}
    assert {ARRIVED, Fate.CUT, Fate.LOST} <= fates
    assert "n2 is killed" in [text for _, _, text in scene["story"]]


def test_a_message_is_dropped_by_its_number_and_all_before_it_stays_the_same() -> None:
    before = scene_of()
    number = next(
        place
        for place, row in enumerate(before["messages"])
        if before["kinds"][row[4]]["name"] == "vote"
    )
    sent = before["messages"][number][0] / 1e6
    after = scene_of(QUIET.replace(faults=(Fault(DROP, sent, amount=number + 1),)))
    assert after["messages"][:number] == before["messages"][:number]
    dropped = after["messages"][number]
    assert dropped[0] == before["messages"][number][0]
    assert FATES[dropped[5]] == Fate.DROPPED
    assert any(text == f"the network drops message {number + 1}" for _, _, text in after["story"])


def test_why_a_vote_was_refused_ignored_or_should_have_been() -> None:
    core = known("raft").make(
        "n4",
        make_world(QUIET).membership,  # type: ignore[union-attr]
        Recovered(),
        settings=known("raft").make_settings(QUIET),
        jitter=lambda: 0.0,
        now=0.0,
    )
    view = voter_view(core)._replace(last=4, last_generation=1, generation=1)
    short, long = Vote(2, 3, 1), Vote(2, 4, 1)
    yes, no = VoteReply(2, True), VoteReply(2, False)
    assert reason(view, "n3", short, no).startswith(
        "n4's log ends at entry 4 of generation 1, n3's"
    )
    assert "this server does not" in reason(view, "n3", short, yes)
    assert "had a vote to give" in reason(view, "n3", long, yes)
    voted = view._replace(vote="n5", generation=2)
    assert reason(voted, "n3", long, no) == "n4 has given its vote of generation 2 to n5."
    content = view._replace(leader="n1")
    assert reason(content, "n3", long, None) == "n4 hears n1, which leads generation 1."
    assert "is later" in reason(view._replace(generation=7), "n3", long, no)


def test_a_failing_run_shows_its_violation_and_the_vote_that_broke_the_rule() -> None:
    scene = scene_of(FAILING, broken=True)
    (violation,) = scene["violations"]
    assert "leads generation 2 without entry 1" in violation["text"]
    assert [scene["lanes"][lane] for lane in violation["lanes"]] == ["n2"]
    assert scene["end"] == violation["at"]
    assert scene["story"][-1][1] == "violation"
    reasons = {scene["reasons"][row[7]] for row in rows(scene, "vote reply") if row[7] >= 0}
    assert any("The rule is to refuse such a candidate" in text for text in reasons)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "herd"])
def test_every_scenario_has_scenes_that_tell_its_story(name: str) -> None:
    result, film = record_scenario(name)
    assert result.ok
    assert film["facts"] == [[fact.text, fact.held] for fact in result.facts]
    assert any(scene["messages"] for scene in film["scenes"])
    told = [line for scene in film["scenes"] for line in scene["story"] if line[1] != "note"]
    noted = [line for line in film["notes"] if TIMED.match(line)]
    assert len(told) + len(noted) == len([line for line in result.lines if TIMED.match(line)])


def test_a_crowd_that_nobody_could_follow_is_not_a_scene() -> None:
    """Of ten, a hundred and a thousand candidates, only the ten are drawn, for each recipe."""
    transcript = FilmedTranscript()
    herd(transcript, most=100)
    scenes, notes = transcript.scenes()
    assert [len(scene["lanes"]) for scene in scenes] == [3, 12, 3, 12]
    assert scenes[1]["title"] == "10 wait, and all watch one key."
    assert scenes[3]["title"] == "10 wait, and each watches one."
    woken = [len(rows(scene, "notification")) for scene in scenes]
    assert woken[1] > woken[3]
    assert any("waiting   notified" in note for note in notes)


def test_requests_to_a_store_are_messages_and_terms_are_roles() -> None:
    _, film = record_scenario("paused-leader")
    (scene,) = film["scenes"]
    assert scene["lanes"] == ["the store", "server1", "server2"]
    led = [
        (scene["lanes"][lane], scene["labels"][label])
        for lane, _, role, label in scene["roles"]
        if role == LEADING
    ]
    assert [name for name, _ in led] == ["server1", "server2"]
    assert all(text.startswith("leads, token ") for _, text in led)
    assert any(span[0] == "paused" and span[1] == 1 for span in scene["spans"])
    answers = rows(scene, "answer to create")
    assert {row[8] for row in answers} >= {"created"}
    assert {kind["category"] for kind in scene["kinds"]} >= {"changes", "renewals", "notifications"}


def test_a_process_that_leads_several_elections_leads_until_the_last_of_them_ends() -> None:
    clock = [0.0]
    observed = recording.Recorder(lambda: clock[0], (), others=("a",))
    observed.started("a", None, None)
    for token, election in (
        (4, "controller"),
        (7, "shards/orders-0"),
        (None, "controller"),
        (None, "shards/orders-0"),
    ):
        clock[0] += 1.0
        observed.term_changed("a", token, election=election)
    scene = observed.finish()
    assert [(at // 1_000_000, scene["labels"][label]) for _, at, _, label in scene["roles"]][
        2:
    ] == [
        (1, "leads, token 4"),
        (2, "leads controller and shards/orders-0"),
        (3, "leads shards/orders-0"),
        (4, "waits"),
    ]


def test_a_mutant_and_the_sound_protocol_are_two_scenes() -> None:
    _, film = record_scenario("vote-without-log")
    mutant, sound = film["scenes"]
    assert mutant["title"].startswith("The mutant")
    assert sound["title"].startswith("Unchanged Raft")
    assert [len(mutant["violations"]), len(sound["violations"])] == [1, 0]


def test_candidates_of_whole_nodes_have_lanes_and_clients_have_none() -> None:
    scene = scene_of(runner.plan_for("quorum", "raft", 3, 7, for_s=6.0))
    assert scene["lanes"][:6] == ["n1", "n2", "n3", "c1", "c2", "c3"]
    assert not [name for name in scene["lanes"] if name.startswith("k")]
    assert any(role == FOLLOWING and lane >= 3 for lane, _, role, _ in scene["roles"])
    assert any(scene["labels"][label].startswith("leads, token") for *_, label in scene["roles"])


def test_the_size_of_a_recording_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_tables, "MOST_MESSAGES", 20)
    _, _, film = record_run(QUIET)
    (scene,) = film["scenes"]
    assert len(scene["messages"]) == 20
    assert scene["first"] == len(scene_of()["messages"]) - 20
    assert all(-1 <= row[6] < 20 for row in scene["messages"])


def test_a_message_without_a_phrase_speaks_by_its_docstring() -> None:
    class Greeting(Message, frozen=True):
        """The sender greets {everybody}. It expects nothing."""

    assert phrase("raft", Greeting(1)).says == "The sender greets (everybody)."
