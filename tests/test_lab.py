"""The lab: one seed gives one run, every fault has an effect, and failures are found, reduced and
narrated. Broken variants, here and in `test_lab_mutants`, show that the checkers detect
failures."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen.errors import ConfigError
from doyen.lab import runner
from doyen.lab.disk import CorruptDisk, SimulatedDisk
from doyen.lab.linearizability import Operation, linearizable, witnessed
from doyen.lab.narration import narrate
from doyen.lab.outcome import RunOutcome, Statistics, Violation
from doyen.lab.plan import FAULT_SEQUENCES, KINDS, LEADER, Fault, Latencies, Plan, draw, stream
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
from doyen.lab.server import ServerProcess, SimulatedServer
from doyen.lab.shrink import shrink
from doyen.lab.world import World, run_plan
from doyen.quorum.consensus.common import Peer
from doyen.quorum.consensus.core import CoreEvent, Effect, EntryKind, LogEntry, Persist, Send
from doyen.quorum.consensus.smallest_id import SmallestId, Stand
from doyen.quorum.consensus.zab import Zab

CALM = Plan(protocol="raft", nodes=5, seed=1, for_s=6.0)


class ComparesNothing(SmallestId):
    """Votes for every candidate."""

    def _far_enough(self, candidate: Stand) -> bool:
        return True


BROKEN = known("smallest-id").replace(make=ComparesNothing)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_seed_gives_one_run(protocol: str) -> None:
    for seed in range(2):
        one = run(protocol, 5, seed, for_s=10)
        other = run(protocol, 5, seed, for_s=10)
        assert one.trace_hash == other.trace_hash
        assert one.events == other.events
        assert one.trace_hash != run(protocol, 5, seed + 1, for_s=10).trace_hash


def test_one_seed_gives_one_run_in_every_process() -> None:
    """No order depends on the hashes of strings, which differ from process to process."""
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


@pytest.mark.parametrize("sequence", FAULT_SEQUENCES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_fault_sequence_breaks_anything(protocol: str, sequence: str) -> None:
    for seed in range(3):
        outcome = run(protocol, 3 + seed, seed, sequence)
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
    """A fault of this kind that must have a visible effect."""
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


def narration_of(plan: Plan) -> list[str]:
    """The narration of a run, without the times."""
    return [line.partition(" s  ")[2] for line in narrate(plan)[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_has_an_effect(kind: str) -> None:
    faults = [fault(kind)]
    if kind == "ballot":
        faults += [Fault("reset", 2.5, 0.0, (LEADER, name)) for name in CALM.names]
        faults += [Fault("crash", 2.6, 0.5, (LEADER,))]
        faults[0] = Fault(kind, 2.0, 0.5, CALM.names)
    if kind == "bridge":
        faults += [Fault(kind, 2.0, 3.0, ("n2", LEADER, "n1"))]
    calm = run_plan(CALM)
    rough = run_plan(CALM.replace(faults=tuple(faults)))
    assert calm.ok
    assert rough.ok
    assert calm.trace_hash != rough.trace_hash


def test_a_leader_that_is_cut_off_steps_down() -> None:
    cut = Fault("partition", 2.0, 3.0, (LEADER,))
    lines = narration_of(CALM.replace(faults=(cut,)))
    leaders = [line for line in lines if " leads in " in line]
    assert len(leaders) == 2
    leader = leaders[0].split()[0]
    assert lines.index(f"{leader} cannot reach the others") < lines.index(leaders[1])


def test_a_narration_has_no_redundant_lines() -> None:
    """A server that asks for votes looks for a leader; and a cut without links is no cut."""
    lines = narration_of(CALM.replace(faults=(Fault("oneway", 2.0, 1.0, ("n1",)),)))
    assert any("asks for votes" in line for line in lines)
    assert not any("looks for a leader" in line or "send" in line for line in lines)
    lines = narration_of(CALM.replace(faults=(Fault("oneway", 2.0, 1.0, ("n1", "n2")),)))
    assert lines.index("n1 cannot send to n2") < lines.index("n1 can send to n2 again")


def test_peers_notice_the_end_of_a_process_but_not_a_power_loss() -> None:
    """A leader whose process dies is replaced at once; one that loses power after the timeout."""

    def took(kind: str) -> float:
        outcome, lines = narrate(CALM.replace(faults=(Fault(kind, 2.0, 9.0, (LEADER,)),)))
        assert outcome.ok
        led = [float(line.split()[0]) for line in lines if " leads in " in line]
        return led[1] - 2.0

    assert took("crash") < 0.3
    assert took("power") > 0.9


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_leader_is_elected_though_messages_are_slower_than_the_timeout(protocol: str) -> None:
    """A round trip takes more than an election timeout, so the timeout has to grow."""
    slow = Latencies(latency_s=0.7 * CALM.election_timeout_s, spread=0.0)
    plan = Plan(protocol=protocol, nodes=3, seed=1, for_s=30.0, clients=0, latencies=slow)
    first_leader_s = run_plan(plan).statistics.first_leader_s
    assert first_leader_s is not None
    assert first_leader_s < plan.for_s


class SendsAllAgain(Zab):
    """Sends a peer all entries that it lacks, every time it says so."""

    def _may_go_back(self, peer: Peer, last: int) -> bool:
        return True


def test_a_flood_is_detected() -> None:
    plan = draw("zab", 3, 5021740)
    broken = run_plan(plan, known("zab").replace(make=SendsAllAgain))
    assert [each.kind for each in broken.violations] == ["flood"]
    assert run_plan(plan).ok


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_candidates_do_not_compete_when_messages_are_slow_and_steady(protocol: str) -> None:
    """A server that has voted for another gives it the time to win."""
    slow = Latencies(latency_s=0.1 * CALM.election_timeout_s, spread=0.1)
    for seed in range(10):
        plan = Plan(protocol=protocol, nodes=2 + seed % 4, seed=seed, for_s=5.0, latencies=slow)
        outcome = run_plan(plan)
        assert outcome.ok, outcome.violations
        assert outcome.statistics.leaders == 1, plan


def test_a_client_without_an_answer_tries_every_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """At random it might try the same dead servers again and again."""
    asked: list[str] = []
    monkeypatch.setattr(
        SimulatedServer, "receive_request", lambda server, _: asked.append(server.id)
    )
    for seed in range(20):
        world = World(msgspec.structs.replace(CALM, seed=seed, clients=1))
        asked.clear()
        world.clients[0].begin()
        world.run_until(10 * CALM.patience_s)
        assert set(asked) == set(world.servers)


def test_a_server_with_a_corrupt_disk_does_not_start() -> None:
    rot = Fault("rot", 2.0, 0.5, ("n2",))
    assert any("n2 refuses to start" in line for line in narration_of(CALM.replace(faults=(rot,))))


def test_a_majority_is_never_corrupted() -> None:
    rot = [Fault("rot", 2.0 + number / 10, 0.1, (f"n{number}",)) for number in range(1, 6)]
    outcome, lines = narrate(CALM.replace(faults=tuple(rot)))
    assert outcome.ok
    assert sum("refuses to start" in line for line in lines) == 2


def test_a_full_disk_accepts_nothing() -> None:
    full = [Fault("full", 1.9, 4.1, (name,)) for name in CALM.names]
    assert (
        run_plan(CALM).statistics.writes
        > 1.5 * run_plan(CALM.replace(faults=tuple(full))).statistics.writes
    )


def test_servers_join_and_leave() -> None:
    churn = [Fault("churn", 2.0 + number / 2, 0.0, ("n1",), 1.0) for number in range(4)]
    lines = narration_of(CALM.replace(faults=tuple(churn)))
    assert any(line.endswith("voters to n1, n2, n3, n4, n5, n6") for line in lines)


def test_snapshots_hold_what_was_applied() -> None:
    """A server that was down for long receives a snapshot, and continues from there."""
    plan = CALM.replace(
        pause_s=0.02,
        compact_every=20,
        faults=(Fault("power", 1.5, 3.0, ("n2",)), Fault("crash", 5.0, 0.2, ("n2",))),
    )
    world = World(plan)
    assert world.run().ok
    assert world.servers["n2"].disk.base > 0


# Disks.


def entries(*generations: int) -> tuple[LogEntry, ...]:
    return tuple(LogEntry(generation, EntryKind.COMMANDS, b"") for generation in generations)


def test_a_disk_keeps_what_was_synced_and_a_prefix_of_the_rest() -> None:
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


def test_a_corrupt_disk_returns_nothing() -> None:
    disk = SimulatedDisk()
    disk.flip(stream(1, "disk"))
    with pytest.raises(CorruptDisk):
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


def test_an_unanswered_write_may_have_been_executed_or_not() -> None:
    lost = operation(1, 7, 1, float("inf"), None)
    for seen in (None, 7):
        assert linearizable([lost, operation(2, None, 2, 3, seen)]) is None
    went_away = [operation(2, None, 2, 3, 7), operation(2, None, 4, 5, None)]
    assert linearizable([lost, *went_away]) is not None


@st.composite
def histories(draw: Any) -> list[Operation]:
    """Four clients with one request each, and arbitrary answers."""
    times = draw(st.permutations(range(8)))
    ops = []
    for number in range(4):
        began, ended = sorted(times[2 * number : 2 * number + 2])
        value = draw(st.sampled_from([None, number + 1]))
        result = draw(st.sampled_from([None, 1, 2, 3, 4]))
        open_end = draw(st.booleans()) and draw(st.booleans())
        ops.append(operation(number, value, began, float("inf") if open_end else ended, result))
    return ops


def try_all(history: list[Operation], value: int | None = None) -> bool:
    """Whether some order explains a history: tries every order."""
    if all(op.ended == float("inf") for op in history):
        return True
    for op in history:
        if any(other.ended < op.began for other in history):
            continue
        if op.ended < float("inf") and op.result != value:
            continue
        rest = [other for other in history if other is not op]
        if try_all(rest, value if op.value is None else op.value):
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(history=histories())
def test_the_search_agrees_with_trying_everything(history: list[Operation]) -> None:
    assert (linearizable(history) is None) == try_all(history)


@settings(max_examples=200, deadline=None)
@given(history=histories(), places=st.permutations(range(4)))
def test_what_the_log_explains_is_explained(history: list[Operation], places: list[int]) -> None:
    for op, place in zip(history, places, strict=True):
        op.position = place
    if witnessed(history) is None:
        assert try_all(history)


# Failures are found, reduced, narrated and saved.


def test_no_disk_is_corrupted_that_the_membership_of_a_stopped_server_needs() -> None:
    """Only n1 has the membership of n1 and n3 alone, and will have it when it is back."""
    plan = Plan(
        protocol="raft",
        nodes=3,
        seed=37730,
        for_s=20.0,
        clients=0,
        latencies=Latencies(latency_s=0.0003, spread=0.8, fsync_s=0.02),
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


def test_workers_of_a_hunt_end_with_their_parent() -> None:
    context = multiprocessing.get_context("spawn")
    watched, held = context.Pipe(duplex=False)
    with held:
        worker = context.Process(target=run_as_worker, args=(watched,))
        worker.start()
        watched.close()
        assert worker.is_alive()
    worker.join(30)
    assert worker.exitcode == 1


def run_as_worker(watched: Any) -> None:
    runner._end_with_parent(watched)
    hunt_mutant(known("raft"), limit_s=60)


class Here(Executor):
    """Runs each call at once in this process, except one that never completes."""

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
def test_what_a_hunt_finds_is_reduced_and_reported() -> None:
    reported: list[FoundFailure] = []
    seen: list[int] = []
    done = hunt(
        ["smallest-id"],
        range(1000),
        on_failure=reported.append,
        progress=lambda progress: seen.append(progress.found),
        stop_at=1,
    )
    assert reported == done.found
    assert done.progress.found == len(reported) >= 1
    assert seen[-1] == len(reported)
    first = reported[0]
    seed = first.outcome.plan.seed
    assert first.narration[-1].endswith(first.outcome.violations[0].text)
    drawn = draw("smallest-id", runner.nodes_for(seed), seed)
    assert len(first.outcome.plan.faults) < len(drawn.faults)


@pytest.mark.usefixtures("failing")
def test_what_a_hunt_had_found_when_it_was_interrupted_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_workers", lambda jobs: Here(interrupted_by=runner.reduce))
    reported: list[FoundFailure] = []

    def interrupt(progress: HuntProgress) -> None:
        if progress.found:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hunt(["smallest-id"], range(1000), on_failure=reported.append, progress=interrupt)
    assert reported
    assert not reported[0].outcome.ok
    assert not reported[0].narration


def test_what_was_found_is_reported_though_no_worker_is_left_to_reduce_it(
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
    reported: list[FoundFailure] = []
    with pytest.raises(BrokenProcessPool):
        hunt(["raft"], range(8), on_failure=reported.append)
    assert [each.outcome for each in reported] == [failed]


def broken_plan() -> Plan:
    return next(
        plan
        for plan in (draw("smallest-id", 5, seed) for seed in range(115, 300))
        if not run_plan(plan, BROKEN).ok
    )


def test_a_failure_is_reduced_and_can_be_replayed(tmp_path: Path) -> None:
    plan = broken_plan()
    smaller, outcome = shrink(lambda each: run_plan(each, BROKEN), plan, tries=80)
    assert not outcome.ok
    assert len(smaller.faults) < len(plan.faults) / 2
    assert outcome.trace_hash == run_plan(smaller, BROKEN).trace_hash

    narrated, narration = narrate(smaller, BROKEN)
    assert narrated.trace_hash == outcome.trace_hash
    assert any("votes for" in line for line in narration)
    path = tmp_path / "run.json"
    save(path, narrated, narration)
    again, same_narration, same = replay(path, BROKEN)
    assert same
    assert same_narration == narration
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


@pytest.mark.parametrize("content", [b"{}", b'{"trace_hash": "\xff"}'], ids=["JSON", "not text"])
def test_a_file_that_is_not_a_run_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a run"):
        replay(path)


def edited(**changes: object) -> dict[str, Any]:
    plan: dict[str, Any] = {**msgspec.to_builtins(CALM), **changes}
    return {"plan": plan, "trace_hash": "", "violations": [], "story": []}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"protocol": "rafft"}, "unknown protocol 'rafft'"),
        ({"world": "moon"}, "unknown world 'moon'"),
        ({"nodes": 0}, "`int` >= 1 - at `$.plan.nodes`"),
        ({"keys": 0}, "`$.plan.keys`"),
        ({"pause_s": 0}, "`$.plan.pause_s`"),
        ({"faults": [{"kind": "flood", "at": 1.0}]}, "unknown fault 'flood' in the world 'cores'"),
        (
            {"faults": [{"kind": "seesaw", "at": 1.0, "nodes": ["n1"]}]},
            "'seesaw' is a fault sequence",
        ),
        ({"faults": [{"kind": "crash", "at": 1.0}]}, "'crash' at 1 s names no nodes"),
        ({"faults": [{"kind": "crash", "at": -1.0}]}, "`$.plan.faults[0].at`"),
        ({"faults": [{"kind": "rate", "at": 1.0, "nodes": ["n1"]}]}, "stops a clock"),
        (
            {"world": "quorum", "faults": [{"kind": "rot", "at": 1.0, "nodes": ["n1"]}]},
            "unknown fault 'rot' in the world 'quorum'",
        ),
    ],
)
def test_a_file_that_no_seed_would_give_is_refused(
    changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    """Its failure would look like a defect of the protocol."""
    path = tmp_path / "run.json"
    path.write_bytes(msgspec.json.encode(edited(**changes)))
    with pytest.raises(ConfigError) as refused:
        replay(path)
    assert complaint in str(refused.value)


def test_a_failure_does_not_overwrite_the_file_of_another(tmp_path: Path) -> None:
    one, other = run_plan(CALM), run_plan(CALM.replace(nodes=3))
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


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: kinds_of("flood"), "unknown fault 'flood'"),
        (lambda: run("rafft"), "unknown protocol 'rafft'"),
        (lambda: kinds_of("crash,seesaw"), "name it alone"),
        (lambda: run(faults="seesaw", world="quorum"), "is for bare cores"),
        (lambda: run(faults="rot", world="quorum"), "unknown fault 'rot' in the world 'quorum'"),
        (lambda: run(world="moon"), "unknown world 'moon'"),
        (lambda: kinds_of("all,crash"), "'all' cannot be combined"),
        (lambda: run(nodes=0), "at least one node, not 0"),
        (lambda: hunt(jobs=0), "at least one process, not 0"),
        (lambda: compare(["raft"], seeds=[]), "at least one seed"),
        (lambda: compare(["raft"], faults="churn,crash"), "'churn' is a request"),
    ],
)
def test_unknown_names_and_invalid_numbers_are_refused(
    call: Callable[[], object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        call()


def test_kinds_of_faults_have_one_order() -> None:
    assert kinds_of("crash,partition") == ("partition", "crash")


# The checkers detect a driver that breaks its contract.


def test_a_driver_that_reorders_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledgements that do not wait for the disk are not on a majority's disks when counted."""
    world = World(CALM.replace(latencies=msgspec.structs.replace(CALM.latencies, fsync_s=0.2)))

    send = ServerProcess._send

    def send_at_once(process: ServerProcess, effect: Send) -> None:
        send(process, msgspec.structs.replace(effect, after=0))

    monkeypatch.setattr(ServerProcess, "_send", send_at_once)
    outcome = world.run()
    assert [violation.kind for violation in outcome.violations] == ["durability"]


def test_an_exception_of_a_core_is_a_violation() -> None:
    class Raises(SmallestId):
        def handle(self, event: CoreEvent, now: float) -> list[Effect]:
            if self.commit > 3:
                raise ValueError("enough")
            return super().handle(event, now)

    plan = CALM.replace(protocol="smallest-id")
    outcome = run_plan(plan, known("smallest-id").replace(make=Raises))
    assert outcome.violations[0].kind == "defect"
    assert "enough" in outcome.violations[0].text
