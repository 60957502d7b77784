"""The lab: one seed gives one run, every fault does something, and what breaks is found, made small
and told. That its checkers can see is shown on broken variants, here and in `test_lab_mutants`."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen.errors import ConfigError
from doyen.lab import runner
from doyen.lab.checkers import Violation
from doyen.lab.disk import Rotten, SimulatedDisk
from doyen.lab.linearizability import Operation, linearizable, witnessed
from doyen.lab.plan import KINDS, LEADER, PLOTS, Fault, Plan, Weather, draw, stream
from doyen.lab.protocols import PROTOCOLS, known
from doyen.lab.runner import (
    FoundFailure,
    HuntProgress,
    compare,
    hunt,
    hunt_mutant,
    keep,
    kinds_of,
    replay,
    run,
    save,
)
from doyen.lab.server import SimulatedServer
from doyen.lab.shrink import shrink
from doyen.lab.story import tell
from doyen.lab.world import RunOutcome, Statistics, World, run_plan
from doyen.quorum.consensus.common import Peer
from doyen.quorum.consensus.core import CoreEvent, Effect, EntryKind, LogEntry, Persist, Send
from doyen.quorum.consensus.smallest_id import SmallestId, Stand
from doyen.quorum.consensus.zab import Zab

CALM = Plan(protocol="raft", nodes=5, seed=1, for_s=6.0)


class ComparesNothing(SmallestId):
    """Votes for anybody."""

    def _far_enough(self, candidate: Stand) -> bool:
        return True


BROKEN = known("smallest-id").but(make=ComparesNothing)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_seed_gives_one_run(protocol: str) -> None:
    for seed in range(2):
        one = run(protocol, 5, seed, for_s=10)
        other = run(protocol, 5, seed, for_s=10)
        assert one.trace_hash == other.trace_hash
        assert one.events == other.events
        assert one.trace_hash != run(protocol, 5, seed + 1, for_s=10).trace_hash


def test_one_seed_gives_one_run_in_every_process() -> None:
    """No order rests on the hashes of strings, which differ from process to process."""
    code = "from doyen.lab.runner import run; print(run('raft', 5, 3, for_s=10).trace_hash)"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in (1, 2)
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_breaks(protocol: str) -> None:
    for seed in range(15):
        outcome = run(protocol, 3 + seed % 3, seed, for_s=12)
        assert outcome.ok, (seed, outcome.violations)


@pytest.mark.parametrize("plot", PLOTS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_plot_breaks_anything(protocol: str, plot: str) -> None:
    for seed in range(3):
        outcome = run(protocol, 3 + seed, seed, plot)
        assert outcome.ok, (seed, outcome.violations)
        assert outcome.statistics.faults > 0


def test_a_calm_cluster_elects_once_and_serves() -> None:
    outcome = run_plan(CALM)
    figures = outcome.statistics
    assert outcome.ok
    assert figures.leaders == 1
    assert figures.first_leader_s is not None
    assert figures.writes > 20
    assert figures.reads > 20
    assert figures.available_share > 0.5


def fault(kind: str) -> Fault:
    """One of this kind, of which something must be seen."""
    match kind:
        case "slow":
            return Fault(kind, 2.0, 3.0, (LEADER, "n1", "n2"), 0.3)
        case "loss" | "duplicate" | "reorder":
            return Fault(kind, 2.0, 3.0, (), 0.4)
        case "stall" | "jump":
            return Fault(kind, 2.0, 3.0, (LEADER,), 3.0)
        case "rate":
            return Fault(kind, 2.0, 3.0, (LEADER,), 0.1)
        case "oneway":
            return Fault(kind, 2.0, 3.0, (LEADER, "n1", "n2", "n3", "n4", "n5"))
        case "bridge":
            return Fault(kind, 2.0, 3.0, ("n1", LEADER, "n2"))
        case "reset":
            return Fault(kind, 2.0, 0.0, (LEADER, "n1", "n2"))
        case "churn":
            return Fault(kind, 2.0, 3.0, ("n1",), 1.0)
        case "transfer":
            return Fault(kind, 2.0)
        case _:
            return Fault(kind, 2.0, 3.0, (LEADER,))


def believed(plan: Plan) -> list[str]:
    """Everything that roles and fates were, without the times."""
    return [line.partition(" s  ")[2] for line in tell(plan)[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_does_something(kind: str) -> None:
    faults = [fault(kind)]
    if kind == "ballot":
        faults += [Fault("reset", 2.5, 0.0, (LEADER, name)) for name in CALM.names]
        faults += [Fault("crash", 2.6, 0.5, (LEADER,))]
        faults[0] = Fault(kind, 2.0, 0.5, CALM.names)
    if kind == "bridge":
        faults += [Fault(kind, 2.0, 3.0, ("n2", LEADER, "n1"))]
    calm = run_plan(CALM)
    rough = run_plan(CALM.but(faults=tuple(faults)))
    assert calm.ok
    assert rough.ok
    assert calm.trace_hash != rough.trace_hash


def test_whoever_is_cut_off_gives_up_leading() -> None:
    cut = Fault("partition", 2.0, 3.0, (LEADER,))
    story = believed(CALM.but(faults=(cut,)))
    leaders = [line for line in story if " leads in " in line]
    assert len(leaders) == 2
    leader = leaders[0].split()[0]
    assert story.index(f"{leader} can reach nobody else") < story.index(leaders[1])


def test_a_story_says_a_thing_once_and_nothing_of_nothing() -> None:
    """Who asks for votes is looking; and who is cut off from nobody is not cut off."""
    story = believed(CALM.but(faults=(Fault("oneway", 2.0, 1.0, ("n1",)),)))
    assert any("asks for votes" in line for line in story)
    assert not any("is looking" in line or "heard" in line for line in story)
    story = believed(CALM.but(faults=(Fault("oneway", 2.0, 1.0, ("n1", "n2")),)))
    assert story.index("n1 is no longer heard by n2") < story.index("n1 is heard again")


def test_the_end_of_a_process_is_told_and_that_of_a_machine_is_not() -> None:
    """A leader whose process dies is replaced at once; a silent one after the timeout."""

    def took(kind: str) -> float:
        outcome, lines = tell(CALM.but(faults=(Fault(kind, 2.0, 9.0, (LEADER,)),)))
        assert outcome.ok
        led = [float(line.split()[0]) for line in lines if " leads in " in line]
        return led[1] - 2.0

    assert took("crash") < 0.3
    assert took("power") > 0.9


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_somebody_leads_though_messages_are_slower_than_supposed(protocol: str) -> None:
    """There and back takes more than an election timeout: patience has to grow."""
    slow = Weather(latency_s=0.7 * CALM.election_timeout_s, spread=0.0)
    plan = Plan(protocol=protocol, nodes=3, seed=1, for_s=30.0, clients=0, weather=slow)
    first_leader_s = run_plan(plan).statistics.first_leader_s
    assert first_leader_s is not None
    assert first_leader_s < plan.for_s


class SendsAllAgain(Zab):
    """Whatever a peer says it lacks, it is sent all of it, every time."""

    def _may_go_back(self, peer: Peer, last: int) -> bool:
        return True


def test_a_flood_is_seen() -> None:
    plan = draw("zab", 3, 5021740)
    broken = run_plan(plan, known("zab").but(make=SendsAllAgain))
    assert [each.kind for each in broken.violations] == ["flood"]
    assert run_plan(plan).ok


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nobody_duels_where_messages_are_slow_and_steady(protocol: str) -> None:
    """Whoever has promised another its vote gives it the time to win."""
    slow = Weather(latency_s=0.1 * CALM.election_timeout_s, spread=0.1)
    for seed in range(10):
        plan = Plan(protocol=protocol, nodes=2 + seed % 4, seed=seed, for_s=5.0, weather=slow)
        outcome = run_plan(plan)
        assert outcome.ok, outcome.violations
        assert outcome.statistics.leaders == 1, plan


def test_a_client_that_nobody_answers_asks_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """By chance alone it may ask the same few again and again, dead as they are."""
    asked: list[str] = []
    monkeypatch.setattr(SimulatedServer, "asked", lambda host, request: asked.append(host.id))
    for seed in range(20):
        world = World(msgspec.structs.replace(CALM, seed=seed, clients=1))
        asked.clear()
        world.clients[0].begin()
        world._go(10 * CALM.patience_s)
        assert set(asked) == set(world.hosts)


def test_a_rotten_disk_keeps_a_server_from_starting() -> None:
    rot = Fault("rot", 2.0, 0.5, ("n2",))
    assert any("n2 refuses to start" in line for line in believed(CALM.but(faults=(rot,))))


def test_a_majority_never_rots() -> None:
    rot = [Fault("rot", 2.0 + number / 10, 0.1, (f"n{number}",)) for number in range(1, 6)]
    outcome, lines = tell(CALM.but(faults=tuple(rot)))
    assert outcome.ok
    assert sum("refuses to start" in line for line in lines) == 2


def test_a_full_disk_accepts_nothing() -> None:
    full = [Fault("full", 1.9, 4.1, (name,)) for name in CALM.names]
    assert (
        run_plan(CALM).statistics.writes
        > 1.5 * run_plan(CALM.but(faults=tuple(full))).statistics.writes
    )


def test_servers_come_and_go() -> None:
    churn = [Fault("churn", 2.0 + number / 2, 0.0, ("n1",), 1.0) for number in range(4)]
    story = believed(CALM.but(faults=tuple(churn)))
    assert any(line.endswith("voters n1, n2, n3, n4, n5, n6") for line in story)


def test_snapshots_stand_for_what_was_applied() -> None:
    """Whoever was away for long is brought up by a snapshot, and goes on from there."""
    plan = CALM.but(
        pause_s=0.02,
        compact_every=20,
        faults=(Fault("power", 1.5, 3.0, ("n2",)), Fault("crash", 5.0, 0.2, ("n2",))),
    )
    world = World(plan)
    assert world.run().ok
    assert world.hosts["n2"].disk.base > 0


# Disks.


def entries(*generations: int) -> tuple[LogEntry, ...]:
    return tuple(LogEntry(generation, EntryKind.COMMANDS, b"") for generation in generations)


def test_a_disk_keeps_what_was_synced_and_a_beginning_of_the_rest() -> None:
    kept = set()
    for seed in range(50):
        disk = SimulatedDisk()
        disk.queue += [
            Persist(1, "first", 1, entries(1, 1)),
            Persist(2, "second", 2, entries(2)),
            Persist(3, None, 3, entries(2)),
        ]
        assert disk.settle(1) == 1
        disk.crash(stream(seed, "disk"))
        found = disk.recover()
        kept.add((found.state, *(entry.generation for entry in found.entries)))
    assert kept == {("first", 1, 1), ("second", 1, 2), ("second", 1, 2, 2)}


def test_a_rotten_disk_gives_nothing() -> None:
    disk = SimulatedDisk()
    disk.flip(stream(1, "disk"))
    with pytest.raises(Rotten):
        disk.recover()


# Linearizability.


def operation(
    client: int, value: int | None, began: int, ended: float, result: int | None
) -> Operation:
    made = Operation(client, 1, 0, value, began)
    made.ended, made.result = ended, result
    return made


def test_a_stale_read_has_no_explanation() -> None:
    writes = [operation(1, 7, 1, 2, None), operation(1, 8, 3, 4, 7)]
    assert linearizable([*writes, operation(2, None, 3, 4, 7)]) is None
    assert linearizable([*writes, operation(2, None, 5, 6, 7)]) is not None
    assert linearizable([*writes, operation(2, None, 5, 6, 8)]) is None


def test_an_unanswered_write_may_have_been_carried_out_or_not() -> None:
    lost = operation(1, 7, 1, float("inf"), None)
    for seen in (None, 7):
        assert linearizable([lost, operation(2, None, 2, 3, seen)]) is None
    went_away = [operation(2, None, 2, 3, 7), operation(2, None, 4, 5, None)]
    assert linearizable([lost, *went_away]) is not None


@st.composite
def histories(draw: Any) -> list[Operation]:
    """A few clients, one request each or two, any answers."""
    times = draw(st.permutations(range(8)))
    ops = []
    for number in range(4):
        began, ended = sorted(times[2 * number : 2 * number + 2])
        value = draw(st.sampled_from([None, number + 1]))
        result = draw(st.sampled_from([None, 1, 2, 3, 4]))
        open_end = draw(st.booleans()) and draw(st.booleans())
        ops.append(operation(number, value, began, float("inf") if open_end else ended, result))
    return ops


def dumb(history: list[Operation], value: int | None = None) -> bool:
    """Every order, one after the other."""
    if all(op.ended == float("inf") for op in history):
        return True
    for op in history:
        if any(other.ended < op.began for other in history):
            continue
        if op.ended < float("inf") and op.result != value:
            continue
        rest = [other for other in history if other is not op]
        if dumb(rest, value if op.value is None else op.value):
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(history=histories())
def test_the_search_agrees_with_trying_everything(history: list[Operation]) -> None:
    assert (linearizable(history) is None) == dumb(history)


@settings(max_examples=200, deadline=None)
@given(history=histories(), places=st.permutations(range(4)))
def test_what_the_log_explains_is_explained(history: list[Operation], places: list[int]) -> None:
    for op, place in zip(history, places, strict=True):
        op.position = place
    if witnessed(history) is None:
        assert dumb(history)


# What breaks is found, made small, told and kept.


def test_no_disk_rots_that_a_stopped_servers_members_need() -> None:
    """n1 knows, and will when it is back, that n1 and n3 are all there is; nobody else does."""
    plan = Plan(
        protocol="raft",
        nodes=3,
        seed=37730,
        for_s=20.0,
        clients=0,
        weather=Weather(latency_s=0.0003, spread=0.8, fsync_s=0.02),
        election_timeout_s=1.0,
        heartbeat_s=0.4,
        compact_every=10,
        faults=(
            Fault("fsync", 1.9082, 1.012, ("leader",)),
            Fault("churn", 2.8054, 1.062, ("n2",)),
            Fault("pause", 2.8208, 3.22, ("n1",)),
            Fault("pause", 5.8609, 9.757, ("leader",)),
            Fault("fsync", 12.0659, 4.476, ("leader",)),
            Fault("fsync", 12.6415, 2.787, ("n2",)),
            Fault("rot", 14.8576, 2.41, ("n3",)),
        ),
    )
    assert run_plan(plan).ok


def test_a_hunt_finds_what_is_broken() -> None:
    found = hunt_mutant(BROKEN, limit_s=60)
    assert found is not None
    seed, outcome = found
    assert outcome.violations
    assert run("smallest-id", outcome.plan.nodes, seed).ok


def test_a_hunt_leaves_no_seed_out() -> None:
    assert (
        hunt(["smallest-id"], range(21), limit_s=600, faults="none", for_s=1.0).progress.seeds == 21
    )


def test_a_hunt_ends_when_its_time_is_up() -> None:
    assert hunt(["raft"], range(80), limit_s=0.001, for_s=60.0).progress.seeds < 8


def test_nobody_hunts_for_whoever_has_gone() -> None:
    context = multiprocessing.get_context("spawn")
    leash, held = context.Pipe(duplex=False)
    with held:
        worker = context.Process(target=led_and_busy, args=(leash,))
        worker.start()
        leash.close()
        assert worker.is_alive()
    worker.join(30)
    assert worker.exitcode == 1


def led_and_busy(leash: Any) -> None:
    runner._on_a_leash(leash)
    hunt_mutant(known("raft"), limit_s=60)


class Here(Executor):
    """Does at once, in this process, what it is given; and is interrupted at some point."""

    def __init__(self, interrupted_by: object = None) -> None:
        self._interrupted_by = interrupted_by

    def submit(self, do: Any, /, *given: Any, **others: Any) -> Future[Any]:
        done: Future[Any] = Future()
        if do is not self._interrupted_by:
            done.set_result(do(*given, **others))
        return done


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "known", lambda name: BROKEN)
    monkeypatch.setattr(runner, "_workers", lambda jobs: Here())


@pytest.mark.usefixtures("failing")
def test_what_a_hunt_finds_is_reduced_and_told() -> None:
    told: list[FoundFailure] = []
    seen: list[int] = []
    done = hunt(
        ["smallest-id"],
        range(1000),
        tell=told.append,
        progress=lambda progress: seen.append(progress.found),
        stop_at=1,
    )
    assert told == done.found
    assert done.progress.found == len(told) >= 1
    assert seen[-1] == len(told)
    first = told[0]
    assert first.story[-1].endswith(first.outcome.violations[0].text)
    drawn = draw("smallest-id", runner.nodes_for(first.seed), first.seed)
    assert len(first.outcome.plan.faults) < len(drawn.faults)


@pytest.mark.usefixtures("failing")
def test_what_a_hunt_had_found_when_it_was_interrupted_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_workers", lambda jobs: Here(interrupted_by=runner.reduce))
    told: list[FoundFailure] = []

    def interrupt(progress: HuntProgress) -> None:
        if progress.found:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hunt(["smallest-id"], range(1000), tell=told.append, progress=interrupt)
    assert told
    assert not told[0].outcome.ok
    assert not told[0].story


def test_what_was_found_is_told_though_nobody_is_left_to_reduce_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pool:
        def submit(self, work: Callable[..., object], *given: object) -> Future[object]:
            if work is runner.reduce:
                raise BrokenProcessPool
            done: Future[object] = Future()
            done.set_result((HuntProgress(seeds=1), [failed]))
            return done

    failed = run_plan(CALM)
    monkeypatch.setattr(runner, "_workers", lambda jobs: nullcontext(Pool()))
    told: list[FoundFailure] = []
    with pytest.raises(BrokenProcessPool):
        hunt(["raft"], range(8), tell=told.append)
    assert [each.outcome for each in told] == [failed]


def broken_plan() -> Plan:
    return next(
        plan
        for plan in (draw("smallest-id", 5, seed) for seed in range(115, 300))
        if not run_plan(plan, BROKEN).ok
    )


def test_what_fails_is_made_small_and_can_be_run_again(tmp_path: Path) -> None:
    plan = broken_plan()
    smaller, outcome = shrink(lambda each: run_plan(each, BROKEN), plan, tries=80)
    assert not outcome.ok
    assert len(smaller.faults) < len(plan.faults) / 2
    assert outcome.trace_hash == run_plan(smaller, BROKEN).trace_hash

    told, story = tell(smaller, BROKEN)
    assert told.trace_hash == outcome.trace_hash
    assert any("votes for" in line for line in story)
    path = tmp_path / "run.json"
    save(path, told, story)
    again, same_story, same = replay(path, BROKEN)
    assert same
    assert same_story == story
    assert again.violations == outcome.violations
    assert not replay(path)[2], "the same plan, unbroken, is another run"


def test_shrinking_takes_the_fewest_clients_and_servers_at_once() -> None:
    tried: list[Plan] = []

    def fails(plan: Plan) -> RunOutcome:
        tried.append(plan)
        found = [Violation("always", 20.0, "")]
        return RunOutcome(
            plan=plan, events=0, trace_hash="", violations=found, statistics=Statistics()
        )

    smallest, _ = shrink(fails, Plan(protocol="raft", nodes=7, seed=1, for_s=20.0))
    assert (smallest.clients, smallest.nodes) == (0, 3)
    assert len(tried) == 3, "as it is, without clients, with three servers"


def test_a_plan_that_does_not_fail_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match="does not fail"):
        shrink(run_plan, CALM)


def test_a_file_that_is_no_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a run"):
        replay(path)


def edited(**changes: object) -> dict[str, Any]:
    plan: dict[str, Any] = {**msgspec.to_builtins(CALM), **changes}
    return {"plan": plan, "trace_hash": "", "violations": [], "story": []}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"protocol": "rafft"}, "no protocol 'rafft'"),
        ({"world": "moon"}, "no world 'moon'"),
        ({"nodes": 0}, "`int` >= 1 - at `$.plan.nodes`"),
        ({"keys": 0}, "`$.plan.keys`"),
        ({"pause_s": 0}, "`$.plan.pause_s`"),
        ({"faults": [{"kind": "flood", "at": 1.0}]}, "no fault 'flood' in the world 'cores'"),
        ({"faults": [{"kind": "seesaw", "at": 1.0, "nodes": ["n1"]}]}, "'seesaw' is a plot"),
        ({"faults": [{"kind": "crash", "at": 1.0}]}, "'crash' at 1 s befalls nobody"),
        ({"faults": [{"kind": "crash", "at": -1.0}]}, "`$.plan.faults[0].at`"),
        ({"faults": [{"kind": "rate", "at": 1.0, "nodes": ["n1"]}]}, "stops a clock"),
        (
            {"world": "quorum", "faults": [{"kind": "rot", "at": 1.0, "nodes": ["n1"]}]},
            "no fault 'rot' in the world 'quorum'",
        ),
    ],
)
def test_a_file_that_no_seed_would_give_is_refused(
    changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    """It would seem to be a defect of the protocol's."""
    path = tmp_path / "run.json"
    path.write_bytes(msgspec.json.encode(edited(**changes)))
    with pytest.raises(ConfigError) as refused:
        replay(path)
    assert complaint in str(refused.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b'{"trace_hash": "\xff"}')
    with pytest.raises(ConfigError, match="is not a run"):
        replay(path)


def test_a_failure_takes_no_other_ones_file(tmp_path: Path) -> None:
    one, other = run_plan(CALM), run_plan(CALM.but(nodes=3))
    first = keep(tmp_path, one)
    assert first.name == "lab-raft-1.json"
    assert keep(tmp_path, one) == first
    second = keep(tmp_path, other)
    assert second.name == "lab-raft-1-2.json"
    assert keep(tmp_path, other) == second
    assert replay(first)[2]
    assert replay(second)[2]


def test_plans_are_data() -> None:
    plan = draw("raft", 5, 7)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_a_hunt_on_several_processes() -> None:
    seen: list[HuntProgress] = []
    done = hunt(["raft", "smallest-id"], range(8), jobs=2, for_s=3, progress=seen.append)
    assert not done.found
    assert done.progress.seeds == 16
    assert seen


def test_protocols_side_by_side() -> None:
    rows = compare(["raft", "smallest-id"], nodes=3, seeds=range(2), faults="crash", for_s=5)
    assert [row.protocol for row in rows] == ["raft", "smallest-id"]
    assert all(row.bytes_per_s > row.messages_per_s > 0 and row.violations == 0 for row in rows)


def test_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="no fault 'flood'"):
        kinds_of("flood")
    with pytest.raises(ConfigError, match="no protocol 'rafft'"):
        run("rafft")
    assert kinds_of("crash,partition") == ("partition", "crash")
    with pytest.raises(ConfigError, match="name it alone"):
        kinds_of("crash,seesaw")
    with pytest.raises(ConfigError, match="is for bare cores"):
        run(faults="seesaw", world="quorum")
    with pytest.raises(ConfigError, match="no fault 'rot' in the world 'quorum'"):
        run(faults="rot", world="quorum")
    with pytest.raises(ConfigError, match="no world 'moon'"):
        run(world="moon")
    with pytest.raises(ConfigError, match="'all' goes with nothing else"):
        kinds_of("all,crash")


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one node, not 0"):
        run(nodes=0)
    with pytest.raises(ConfigError, match="at least one process, not 0"):
        hunt(jobs=0)
    with pytest.raises(ConfigError, match="one seed or more"):
        compare(["raft"], seeds=[])
    with pytest.raises(ConfigError, match="'churn' is an order"):
        compare(["raft"], faults="churn,crash")


# Checkers can see: a host that breaks its word.


def test_a_driver_that_reorders_is_seen() -> None:
    """Acknowledgements that do not wait for the disk are not on a majority's disks when counted."""
    world = World(CALM.but(weather=msgspec.structs.replace(CALM.weather, fsync_s=0.2)))

    def hasty(host: SimulatedServer, effect: Send) -> None:
        host._send(msgspec.structs.replace(effect, after=0))

    for host in world.hosts.values():
        host._doing[Send] = partial(hasty, host)
    outcome = world.run()
    assert [violation.kind for violation in outcome.violations] == ["durability"]


def test_a_core_that_raises_is_a_finding() -> None:
    class Raises(SmallestId):
        def handle(self, event: CoreEvent, now: float) -> list[Effect]:
            if self.commit > 3:
                raise ValueError("enough")
            return super().handle(event, now)

    plan = CALM.but(protocol="smallest-id")
    outcome = run_plan(plan, known("smallest-id").but(make=Raises))
    assert outcome.violations[0].kind == "defect"
    assert "enough" in outcome.violations[0].text
