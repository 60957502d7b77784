"""Whole nodes and candidates in the lab: real drivers, connections, keyspace, sessions, elections.

Mutants of nodes show that its checkers detect failures.
"""

from __future__ import annotations

import gc
import signal
from functools import cache
from itertools import count, groupby
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.msgpack import decode

import mutants_nodes as nodes
from doyen.lab.client_checker import ClientChecker, RequestStart
from doyen.lab.narration import narrate
from doyen.lab.outcome import RunOutcome
from doyen.lab.plan import Fault, Plan
from doyen.lab.protocols import known
from doyen.lab.quorum import QuorumWorld
from doyen.lab.quorum_plan import HOLDER, KINDS, NAMED, draw
from doyen.lab.reference import Reference
from doyen.lab.runner import replay, run, save
from doyen.lab.shrink import shrink
from doyen.quorum.consensus.core import (
    CoreEvent,
    Effect,
    EntryKind,
    LogEntry,
    Membership,
    Received,
)
from doyen.quorum.consensus.raft import Raft
from doyen.quorum.keyspace import commands
from doyen.quorum.keyspace.versions import NEWEST
from doyen.quorum.node.peers import Peers
from doyen.quorum.node.replicated import KEYSPACE, Command, encode_batch

CALM = Plan(
    protocol="raft",
    nodes=3,
    seed=1,
    for_s=12.0,
    world="quorum",
    clients=2,
    compact_every=10,
    tail_entries=0,
)


def test_one_seed_gives_one_run() -> None:
    for seed in range(2):
        one = run("raft", 3, seed, for_s=8, world="quorum")
        other = run("raft", 3, seed, for_s=8, world="quorum")
        assert one.trace_hash == other.trace_hash
        assert one.events == other.events


def test_nothing_breaks_among_five() -> None:
    """For three nodes, `test_the_lab_detects` checks that the original does not fail."""
    for seed in range(3):
        outcome = run("raft", 5, seed, for_s=10, world="quorum")
        assert outcome.ok, (seed, outcome.violations)


@pytest.mark.parametrize("protocol", ["zab", "viewstamped", "paxos", "smallest-id"])
def test_every_protocol_carries_sessions(protocol: str) -> None:
    outcome = run(protocol, 3, 2, for_s=8, world="quorum")
    assert outcome.ok, outcome.violations


def test_every_run_has_snapshots_and_installs() -> None:
    """Nodes are down for so long that they need a snapshot; leases end in several steps; and
    watches are resumed."""
    for seed in (3, 9):
        world = QuorumWorld(draw("raft", 3, seed, for_s=10))
        assert world.run().ok
        nodes = world.participants.nodes()
        assert sum(node.snapshots for node in nodes) > 5
        assert sum(node.installs for node in nodes) > 0
        assert world.log.reference.keyspace.version == NEWEST
        assert len(world.clients.watches) >= 2
        assert world.clients.answers > 50
        assert world.clients.entries_carried > 10
        assert any(lease.ended < inf for lease in world.log.reference.keyspace.leases.values())


SERVED_S = {"crash": 1.0, "power": 4.0, "pause": 4.0, "partition": 4.0, "full": 2.5}
"""The longest time without an answer because of a fault of the leader for 3 s."""


def test_a_node_that_has_lost_its_data_is_refused_until_it_is_added_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = CALM.replace(faults=(Fault("wipe", 4.0, 3.0, ("n3",)),))
    outcome, lines = narrate(plan)
    assert outcome.ok
    back = [line for line in lines if "n3 is back" in line or ("follow" in line and "n3" in line)]
    assert ["back" in line for line in back[-2:]] == [True, False]
    assert float(back[-1].split()[0]) > 7.0
    nodes.one_id(monkeypatch)
    assert [each.kind for each in QuorumWorld(plan).run().violations] == ["identity"]


def test_a_founder_that_loses_its_data_before_the_founding_has_lost_nothing() -> None:
    faults = (Fault("partition", 0.0, 3.0, ("n3",)), Fault("wipe", 1.0, 4.0, ("n3",)))
    outcome, lines = narrate(CALM.replace(faults=faults))
    assert outcome.ok, outcome.violations
    assert any(line.startswith("   5.") and "n3 follow n1" in line for line in lines)


def test_the_id_of_a_lost_data_directory_is_not_recorded_for_the_next_one() -> None:
    """The leader does not notice the end of the node's process, because it is cut off. The member
    id that it has received is not that of the node that is added under the same name."""
    faults = (Fault("partition", 3.9, 4.0, ("n3",)), Fault("wipe", 4.0, 2.0, ("n3",)))
    outcome = QuorumWorld(CALM.replace(faults=faults)).run()
    assert outcome.ok, outcome.violations


@pytest.mark.parametrize("node", ["n1", "leader"])
def test_a_node_on_an_older_copy_of_its_data_is_refused(
    monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """What a follower has on disk is known from its acknowledgements; what a leader has, from its
    own messages."""
    plan = CALM.replace(faults=(Fault("rollback", 4.0, 3.0, (node,)),))
    assert QuorumWorld(plan).run().ok
    nodes.older_copy_accepted(monkeypatch)
    assert [each.kind for each in QuorumWorld(plan).run().violations] == ["identity"]


def test_a_new_node_joins_and_becomes_a_voter() -> None:
    plan = CALM.replace(for_s=8.0, faults=(Fault("churn", 3.0, 1.0, ("n1",), 1.0),))
    world = QuorumWorld(plan)
    assert world.run().ok
    leader = decode(
        [each for each in world.log.cluster.committed if each.kind is EntryKind.MEMBERSHIP][
            -1
        ].data,
        type=Membership,
    )
    assert "n4" in leader.voters


def test_writes_of_a_new_cluster_are_carried_out_once_though_a_member_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections of clients break all the time, so large writes are sent again."""
    ends = (Fault("reset", 0.9, 0.0, ("n3", each)) for each in ("n1", "n2"))
    pairs = [("k1", "n1"), ("k2", "n1"), ("k1", "n2"), ("k2", "n2")]
    broken = (Fault("reset", 1.4 + 0.011 * each, 0.0, pairs[each % 4]) for each in range(909))
    plan = CALM.replace(
        seed=8, for_s=13.0, faults=(Fault("partition", 0.8, 12.0, ("n3",)), *ends, *broken)
    )
    assert QuorumWorld(plan).run().ok
    nodes.raised_late(monkeypatch)
    assert [each.kind for each in QuorumWorld(plan).run().violations] == ["twice"]


def test_a_node_that_was_down_catches_up_with_a_leader_that_joined_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not know the leader's address, which is in the entries that it lacks. No snapshot is
    due, so the leader sends them only after an answer."""
    faults = (
        Fault("crash", 2.0, 6.0, ("n1",)),
        Fault("churn", 3.0, 0.0, ("n2",), 1.0),
        Fault("transfer", 5.0, 0.0, ("n4",)),
    )
    plan = CALM.replace(for_s=9.0, faults=faults, compact_every=10_000)
    outcome, lines = narrate(plan)
    assert outcome.ok, outcome.violations
    assert any("n1 follows n4" in line for line in lines)
    monkeypatch.setattr(Peers, "_dialled_by", lambda *_: None)
    monkeypatch.setattr("doyen.lab.quorum.LIVENESS_S", 3.0)
    assert [each.text for each in QuorumWorld(plan).run().violations] == [
        "3 s after all faults had ended, voter n1 has not caught up with the leader"
    ]


def test_a_sync_that_was_to_fail_does_not_fail_after_all_faults_have_ended() -> None:
    """A node without a majority syncs nothing. It would end its process long after the faults, and
    the bounds on what follows them would not hold. Found by hunting."""
    apart = (Fault("partition", 4.0, 60.0, (each,)) for each in ("n1", "n2", "n3"))
    disks = (Fault("fsync", 11.9, 0.1, (each,)) for each in ("n1", "n2", "n3"))
    outcome, lines = narrate(CALM.replace(faults=(*apart, *disks)))
    assert outcome.ok, outcome.violations
    assert "fails at the next sync" in "".join(lines)
    assert "ends its own process" not in "".join(lines)


def test_a_calm_quorum_elects_and_serves() -> None:
    world, outcome = calm((4.0,))
    assert outcome.ok
    assert world.terms.count > 1
    assert outcome.statistics.writes > 50
    assert outcome.statistics.leaders == 1


def nothing(at: float) -> Fault:
    """A fault without an effect, except for the turn of the loop that it takes."""
    return Fault("reset", at, 0.0, ("n1",))


@cache
def calm(at: tuple[float, ...]) -> tuple[QuorumWorld, RunOutcome]:
    world = QuorumWorld(CALM.replace(faults=tuple(map(nothing, at))))
    return world, world.run()


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_is_reported_has_an_effect_and_stops_service_for_a_bounded_time(
    kind: str,
) -> None:
    amount = {"slow": 0.3, "loss": 0.3, "stall": 0.5, "crash": 0.0, "power": 0.0}.get(kind, 1.0)
    targets = {"loss": (), "slow": ("leader", "n1", "n2"), "reset": ("leader", "n1", "n2")}
    fault = Fault(kind, 4.0, 3.0, targets.get(kind, ("leader",)), amount)
    if kind in ("oneway", "bridge"):
        fault = Fault(kind, 4.0, 3.0, ("n1", "leader", "n2"))
    world = QuorumWorld(CALM.replace(faults=(fault,)))
    reported: list[float] = []
    world.on_report = lambda at, subject, predicate: reported.append(at)
    rough = world.run()
    assert 4.0 in reported
    assert rough.ok
    assert world.service.longest_s < SERVED_S.get(kind, 4.0)
    unchanged = [calm(at)[1].trace_hash for at in ((4.0,), (4.0, 7.0))]
    # Nothing depends on wall time, so a jump of it changes nothing.
    assert (rough.trace_hash in unchanged) == (kind == "jump")


def test_a_voter_that_does_not_catch_up_is_detected() -> None:
    class Deaf(Raft):
        """n3 ignores all messages."""

        def handle(self, event: CoreEvent, now: float) -> list[Effect]:
            deaf = self.id == "n3" and isinstance(event, Received)
            return [] if deaf else super().handle(event, now)

    outcome = QuorumWorld(CALM.replace(for_s=3.0), known("raft").replace(make=Deaf)).run()
    assert [each.text for each in outcome.violations] == [
        "60 s after all faults had ended, voter n3 has not caught up with the leader"
    ]


def test_an_interrupted_run_leaves_nothing_behind() -> None:
    """Also the tasks of dead and paused processes, which cannot end by themselves, are ended."""
    faults = (Fault("power", 2.0, 99.0, ("n2",)), Fault("pause", 3.0, 99.0, ("n1",)))
    world = QuorumWorld(CALM.replace(faults=faults))

    def interrupt(at: float, subject: str, predicate: str) -> None:
        if predicate == "is paused":
            signal.raise_signal(signal.SIGINT)

    world.on_report = interrupt
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            world.run()
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("kind", NAMED)
def test_a_fault_that_is_drawn_only_on_request_is_reported(kind: str) -> None:
    outcome, lines = narrate(CALM.replace(for_s=4.5, faults=(Fault(kind, 4.0, 0.2, ("n1",)),)))
    assert outcome.ok
    assert any(line.startswith("   4.000 s  ") for line in lines)


def test_the_term_of_a_holder_that_is_cut_off_ends_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = CALM.replace(faults=(Fault("partition", 4.0, 7.0, (HOLDER,)),))
    outcome, lines = narrate(plan)
    assert outcome.ok
    assert sum("is elected" in line for line in lines) > 1
    nodes.answer_ignored(monkeypatch)
    assert [each.kind for each in QuorumWorld(plan).run().violations] == ["two terms"]


# What the checkers must detect.


MUTANTS: list[tuple[nodes.Mutant, int, tuple[str, ...]]] = [
    (nodes.on_the_wall_clock, 1, ("jump", "crash")),
    (nodes.removed_by_another, 2, KINDS),
    (nodes.announced_unread, 2, KINDS),
    (nodes.not_extended, 1, KINDS),
    (nodes.renewed_by_a_read, 0, KINDS),
    (nodes.era_ignored, 0, KINDS),
    (nodes.confirmed_without_an_era, 2, KINDS),
    (nodes.never_ended, 1, KINDS),
    (nodes.ended_late, 1, KINDS),
    (nodes.seen_until_removed, 3, KINDS),
    (nodes.removed_by_key, 3, KINDS),
    (nodes.updated_without_its_lease, 0, KINDS),
    (nodes.updated_in_any_version, 310, KINDS),
    (nodes.ends_left_out, 3, KINDS),
    (nodes.done_again, 0, KINDS),
    (nodes.large_done_again, 5, ("crash", "reset")),
    (nodes.results_left_out, 0, KINDS),
    (nodes.renamed, 7, KINDS),
    (nodes.not_synced, 0, ("power", "crash")),
    (nodes.unknown_skipped, 1, ("older", "crash")),
    (nodes.read_while_behind, 9, KINDS),
    (nodes.large_in_results, 2, KINDS),
    (nodes.deaf_when_resumed, 1, KINDS),
    (nodes.never_too_old, 1, ("partition",)),
    (nodes.ends_without_notification, 0, KINDS),
    (nodes.history_left_out, 1, KINDS),
    (nodes.failed_notification, 0, KINDS),
    (nodes.carried_too_late, 0, KINDS),
    (nodes.installed_without_notification, 83, ("partition",)),
    (nodes.quota_ignored, 2, KINDS),
    (nodes.no_deletes_when_full, 2, KINDS),
    (nodes.no_ends_when_full, 9, KINDS),
    (nodes.one_id, 0, ("wipe",)),
    (nodes.lifted_by_anyone, 0, KINDS),
    (nodes.peers_by_any_secret, 0, KINDS),
]
SEEDS = 60


def outcome_of(seed: int, kinds: tuple[str, ...] = KINDS) -> RunOutcome:
    return QuorumWorld(draw("raft", 3, seed, kinds=kinds, for_s=15)).run()


@cache
def unbroken(seed: int, kinds: tuple[str, ...]) -> RunOutcome:
    """Several mutants have the same seed."""
    return outcome_of(seed, kinds)


@pytest.mark.parametrize(("broken", "pinned", "kinds"), MUTANTS)
def test_the_lab_detects(
    broken: nodes.Mutant, pinned: int, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the mutant some seed ends in a violation; without it the same seed does not."""
    with monkeypatch.context() as patch:
        broken(patch)
        seeds = [pinned, *range(SEEDS)]
        seed = next(seed for seed in seeds if not outcome_of(seed, kinds).ok)
    assert unbroken(seed, kinds).ok


def test_no_mutant_of_nodes_is_left_out() -> None:
    tried = {broken.__name__ for broken, _, _ in MUTANTS}
    tried |= {
        "answer_ignored",
        "older_copy_accepted",
        "raised_late",
    }  # each is detected by a plan of its own above
    tried |= {"one_position"}  # detected in `test_quorum_watches`
    tried |= {"refused_while_behind"}  # detected in `test_node_lists`
    there = {
        name
        for name, each in vars(nodes).items()
        if getattr(each, "__module__", "") == nodes.__name__ and callable(each)
    }
    assert there == tried


def test_leases_outlive_a_change_of_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder is cut off while the quorum's leader is replaced. Its lease must not end before
    its term."""
    plans = [
        CALM.replace(
            faults=(
                Fault("partition", at, 3.0, (HOLDER,)),
                Fault("crash", at + 0.1, 0.5, ("leader",)),
            )
        )
        for at in (3.0, 5.0)
    ]
    assert all(QuorumWorld(plan).run().ok for plan in plans)
    nodes.not_extended(monkeypatch)
    kinds = [each.kind for plan in plans for each in QuorumWorld(plan).run().violations]
    assert kinds == ["lease", "lease"]


def test_a_node_is_removed_and_added_again_and_leads() -> None:
    """Meanwhile proposals and candidates continue; no entry is lost."""
    plan = CALM.replace(
        for_s=20.0,
        faults=(Fault("churn", 3.0, 3.0, ("n3",)), Fault("transfer", 15.0, 0.0, ("n3",))),
    )
    world = QuorumWorld(plan)
    leaders: list[str] = []
    world.on_report = lambda at, subject, predicate: leaders.extend(
        [subject] * predicate.startswith("leads")
    )
    assert world.run().ok
    changes = [entry for entry in world.log.cluster.committed if entry.kind is EntryKind.MEMBERSHIP]
    voters = [decode(entry.data, type=Membership).voters for entry in changes]
    # Member ids are recorded in entries of their own.
    assert [len(each) for each, _ in groupby(voters)] == [3, 2, 3]
    assert leaders[-1] == "n3"


def test_a_failure_is_reduced_and_can_be_replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes.removed_by_another(monkeypatch)
    plan = next(
        plan
        for plan in (draw("raft", 3, seed, for_s=10) for seed in range(SEEDS))
        if not QuorumWorld(plan).run().ok
    )
    smaller, outcome = shrink(lambda each: QuorumWorld(each).run(), plan, tries=12)
    assert len(smaller.faults) <= len(plan.faults)
    path = tmp_path / "run.json"
    save(path, outcome)
    again, _, same = replay(path)
    assert same
    assert again.violations == outcome.violations


def test_a_run_leaves_nothing_behind() -> None:
    """Hunts run thousands of seeds in a process. Nodes that crash have commands under way."""

    def worlds() -> int:
        gc.collect()
        return sum(type(kept) is QuorumWorld for kept in gc.get_objects())

    before = worlds()
    assert run("raft", nodes=3, seed=1, world="quorum", for_s=10).ok
    assert worlds() == before


def test_a_write_may_fail_by_a_state_between_two_commands_of_one_entry() -> None:
    """Commands of several clients share a log entry: one creates, one finds the key taken, and one
    ends the lease. Found by hunting, as a read that the log contradicted."""
    reference, numbers = Reference(slice_keys=1, result_value=1), count(1)

    def entry(*wanted: commands.KeyspaceCommand) -> LogEntry:
        bodies = map(commands.encode, wanted)
        batch = [Command(f"c{next(numbers)}", 1, 1, KEYSPACE, body) for body in bodies]
        return LogEntry(1, EntryKind.COMMANDS, encode_batch(batch))

    took = entry(commands.Create("k", b"1", 2), commands.Put("k", b"2", 0), commands.Revoke(2))
    log = [entry(commands.RaiseVersion(NEWEST), commands.Grant(5.0), commands.Grant(5.0))]
    reference.advance([*log, took], 1.0)
    assert reference.keys.at("k", 1) is reference.keys.at("k", 2) is None
    failed: list[str] = []
    world = SimpleNamespace(
        loop=SimpleNamespace(time=lambda: 1.0),
        service=SimpleNamespace(answered=lambda: None),
        fail=lambda kind, text: failed.append(kind),
    )
    checker = ClientChecker(world, reference)  # type: ignore[arg-type]
    checker.version_differed(RequestStart(0.0, 1), "k", None)
    assert not failed
    checker.version_differed(RequestStart(0.0, 2), "k", None)
    assert failed == ["read"]
