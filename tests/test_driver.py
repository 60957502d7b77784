"""The driver on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from msgspec.msgpack import encode

from doyen.errors import (
    CommandFailed,
    ConfigError,
    DoyenError,
    OrderFailed,
    OutcomeUnknown,
    SessionClosed,
    StoreUnavailable,
)
from doyen.quorum.consensus.core import Accepted, Membership, Message, Propose, Received, Role
from doyen.quorum.node.admin import AdminRequest
from doyen.quorum.node.applier import SLICE_S
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.proposals import Batch, ProposalLimits, decode_results, encode_results
from doyen.quorum.node.replicated import USER, Command, Failure, ReplicatedMachines
from doyen.testing.virtual import run_virtual
from drivers import (
    VOTERS,
    Clients,
    Credulous,
    Forgetful,
    Hasty,
    Stale,
    World,
    follower_of,
    run_world,
    storm,
    with_world,
)


def test_three_nodes_agree() -> None:
    async def main() -> None:
        world = World()
        await world.boot()
        leader = await world.leader()
        assert await leader.propose(USER, b"a") == 1
        results = await asyncio.gather(*(leader.propose(USER, b"%d" % n) for n in range(100)))
        assert results == list(range(2, 102))
        for node in world.nodes.values():
            await node.barrier()
        assert len({tuple(tally.done) for tally in world.tallies.values()}) == 1
        assert not world.aborted

    run_virtual(main)


def test_followers_forward() -> None:
    async def main() -> None:
        world = World()
        await world.boot()
        await world.leader()
        follower = next(n for n in world.nodes.values() if n.role is Role.FOLLOWING)
        results = await asyncio.gather(*(follower.propose(USER, b"%d" % n) for n in range(100)))
        assert results == list(range(1, 101))
        with pytest.raises(CommandFailed, match="ValueError: as asked"):
            await follower.propose(USER, b"fail")
        await follower.barrier()
        assert len(world.tallies[follower.id].done) == 100

    run_virtual(main)


SMALL = ProposalLimits(
    snapshot_entries=40, batch_commands=3, pipeline=2, patience_s=5.0, apply_commands=4
)


def weather(
    seed: int,
    *,
    driver: type[Driver] = Driver,
    machine: type[ReplicatedMachines] = ReplicatedMachines,
    together: bool = False,
) -> tuple[World, Clients]:
    async def main() -> tuple[World, Clients]:
        limits = SMALL if seed % 2 else ProposalLimits(patience_s=3.0)
        world = World(seed, limits=limits, driver=driver, machine=machine)
        return world, await storm(world, 6.0, together=together)

    return run_virtual(main)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_or_done_twice_in_a_storm(seed: int, together: bool) -> None:
    _, people = weather(seed, together=together)
    assert not people.wrong
    assert len(people.acknowledged) > 50
    assert people.reads > 10


@pytest.mark.parametrize(
    ("driver", "machine", "seed", "symptom"),
    [
        (Stale, ReplicatedMachines, 0, "after .* was acknowledged"),
        (Driver, Forgetful, 15, "carried out twice"),
        (Credulous, ReplicatedMachines, 34, r"results of \d+ commands|is not there|differs"),
    ],
)
def test_a_storm_finds(
    driver: type[Driver], machine: type[ReplicatedMachines], seed: int, symptom: str
) -> None:
    """Each of these is wrong, and is seen to be: in this storm, or, should another version of
    something have changed the weather, in one of the next."""
    for each in (seed, *range(60)):
        with contextlib.suppress(TimeoutError, DoyenError):
            _, people = weather(each, driver=driver, machine=machine)
            if any(re.search(symptom, wrong) for wrong in people.wrong):
                return
    pytest.fail("nothing was noticed")


@pytest.mark.parametrize("driver", [Driver, Hasty])
def test_an_acknowledgement_waits_for_the_disks(driver: type[Driver]) -> None:
    """The power fails while the disks are slow. A driver that does not wait has acknowledged what
    is then gone, which the invariants see."""

    async def main() -> None:
        world = World(driver=driver)
        await world.boot()
        leader = await world.leader()
        await leader.propose(USER, b"first")
        for disk in world.disks.values():
            disk.sync_s = 5.0
        second = asyncio.ensure_future(leader.propose(USER, b"second"))
        await asyncio.sleep(0.5)
        assert second.done() == (driver is Hasty)
        for name in [*world.nodes]:
            world.crash(name, written=0)
        await asyncio.wait({second})
        await world.boot()
        if driver is Hasty:
            await world.until(lambda: world.aborted)
            assert "which is committed" in str(world.aborted[0][1])
            return
        assert isinstance(second.exception(), OutcomeUnknown)
        leader = await world.leader()
        await leader.barrier()
        assert world.tallies[leader.id].done == [b"first"]

    run_virtual(main)


@with_world
async def test_what_is_proposed_in_one_turn_is_one_entry(world: World) -> None:
    (leader,) = world.leaders()
    await leader.propose(USER, b"first")
    before = leader.core.commit
    await asyncio.gather(*(leader.propose(USER, b"%d" % n) for n in range(500)))
    assert leader.core.commit == before + 1


@with_world(limits=ProposalLimits(batch_commands=3, batch_bytes=1000))
async def test_batches_have_bounds(world: World) -> None:
    (leader,) = world.leaders()
    await leader.propose(USER, b"first")
    before = leader.core.commit
    await asyncio.gather(*(leader.propose(USER, b"%d" % n) for n in range(10)))
    assert leader.core.commit == before + 4
    await asyncio.gather(*(leader.propose(USER, bytes(600)) for n in range(4)))
    assert leader.core.commit == before + 6


@with_world(limits=ProposalLimits(pending_commands=5, pending_bytes=300, command_bytes=100))
async def test_too_many_proposals_are_refused(world: World) -> None:
    (leader,) = world.leaders()
    made = [asyncio.ensure_future(leader.propose(USER, b"%d" % n)) for n in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable, match="5 proposals are under way"):
        await leader.propose(USER, b"one too many")
    await asyncio.gather(*made)
    with pytest.raises(ConfigError, match="at most 100 bytes, not 101"):
        await leader.propose(USER, bytes(101))
    with pytest.raises(StoreUnavailable):
        await asyncio.gather(*(leader.propose(USER, bytes(90)) for n in range(4)))
    await leader.propose(USER, b"again")


@pytest.mark.parametrize("body", ["text", bytearray(b"bytes that may change"), memoryview(b"m")])
@with_world
async def test_only_bytes_are_commands(world: World, body: Any) -> None:
    """The leader would carry out what it was given, the others what they find in the log."""
    for node in world.nodes.values():
        with pytest.raises(ConfigError, match=f"bytes, not {type(body).__name__}"):
            await node.propose(USER, body)


@with_world
async def test_a_proposal_cut_off_by_another_leader_is_proposed_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We led and had entries on their way; somebody else led and cut them off; we lead again, and
    are as far along as before, before anything of that was committed."""
    (leader,) = world.leaders()
    world.cut(leader.id)
    lost = asyncio.ensure_future(leader.propose(USER, b"cut off"))
    await asyncio.sleep(0.01)
    [index] = leader.proposals.appended
    accepted = Accepted(index, leader.generation + 2)
    with monkeypatch.context() as patch:
        patch.setattr(leader.core, "handle", lambda event, now: [accepted])
        assert leader.proposals.append(Propose(b""), Batch([], [])) is None
    del leader.proposals.appended[index]
    world.heal()
    assert await asyncio.wait_for(lost, 5.0) == 1


@with_world(limits=ProposalLimits(patience_s=2.0))
async def test_without_a_majority_nothing_is_confirmed(world: World) -> None:
    (leader,) = world.leaders()
    for name in [*world.nodes]:
        if name != leader.id:
            world.crash(name)
    with pytest.raises(OutcomeUnknown, match="may have been carried out"):
        await leader.propose(USER, b"a")
    await world.until(lambda: leader.role is Role.LOOKING)
    with pytest.raises(StoreUnavailable, match=r"no leader is known.*was not carried out"):
        await leader.propose(USER, b"b")
    with pytest.raises(StoreUnavailable, match="the read was not confirmed"):
        await leader.barrier()
    with pytest.raises(StoreUnavailable):
        await leader.ask_leader(b"?")
    assert leader.status().pending == 0


@with_world(voters=("n1", "n2"), limits=ProposalLimits(patience_s=1.0))
async def test_what_was_given_up_without_a_leader_leaves_nothing_behind(world: World) -> None:
    (leader,) = world.leaders()
    other = follower_of(world).id
    world.crash(other)
    with pytest.raises(OutcomeUnknown):
        await leader.propose(USER, b"for which only this node can lead")
    await world.until(lambda: leader.role is Role.LOOKING)
    for _ in range(10):
        proposed = (leader.propose(USER, b"a") for _ in range(100))
        read = (leader.barrier() for _ in range(100))
        errors = await asyncio.gather(*proposed, *read, return_exceptions=True)
        assert {type(error) for error in errors} == {StoreUnavailable}
    assert not leader.proposals.queue
    assert not leader.reads._waiting
    world.disks[leader.id].full = True
    await world.boot_one(other)
    await world.until(lambda: leader.role is Role.LEADING)
    with pytest.raises(StoreUnavailable, match="disk"):
        await leader.propose(USER, b"b")
    await leader.barrier()
    assert not leader.reads._waiting


@with_world
async def test_a_proposal_outlives_its_leader(world: World) -> None:
    """Accepted by a leader that is cut off before anyone has it; carried out by the next, once."""
    (leader,) = world.leaders()
    world.cut(leader.id)
    waiting = asyncio.ensure_future(leader.propose(USER, b"mine"))
    await world.until(lambda: any(node is not leader for node in world.leaders()))
    (other,) = [node for node in world.leaders() if node is not leader]
    assert await other.propose(USER, b"theirs") == 1
    world.heal()
    assert await waiting == 2
    assert world.tallies[leader.id].done == [b"theirs", b"mine"]


@with_world
async def test_a_forwarded_proposal_outlives_its_leader(world: World) -> None:
    (leader,) = world.leaders()
    follower = follower_of(world)
    waiting = [asyncio.ensure_future(follower.propose(USER, b"%d" % n)) for n in range(20)]
    await asyncio.sleep(0.002)
    world.crash(leader.id)
    assert sorted(await asyncio.gather(*waiting)) == list(range(1, 21))
    assert len(world.tallies[follower.id].done) == 20


@with_world
async def test_a_request_repeated_with_its_number_is_served_once(world: World) -> None:
    (leader,) = world.leaders()
    follower = follower_of(world)
    assert await leader.propose(USER, b"a", request=("client", 1, 1)) == 1
    assert await follower.propose(USER, b"a", request=("client", 1, 1)) == 1
    assert await leader.propose(USER, b"b", request=("client", 2, 2)) == 2
    with pytest.raises(OutcomeUnknown, match="has confirmed its result"):
        await follower.propose(USER, b"a", request=("client", 1, 1))
    with pytest.raises(OutcomeUnknown, match="forgotten"):
        await follower.propose(USER, b"a", request=("stranger", 7, 5))
    assert world.tallies[leader.id].done == [b"a", b"b"]


def test_a_dropped_client_gets_a_new_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doyen.quorum.node.replicated.FORGOTTEN_AFTER", 5)

    async def main(world: World) -> None:
        (leader,) = world.leaders()
        follower = follower_of(world)
        assert await follower.propose(USER, b"a") == 1
        for _ in range(10):
            await leader.propose(USER, b"x")
        assert await follower.propose(USER, b"b") == 12
        assert world.tallies[leader.id].done.count(b"b") == 1

    run_world(main)


@with_world
async def test_a_proposer_that_has_gone_is_not_missed(world: World) -> None:
    (leader,) = world.leaders()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0001):
            await leader.propose(USER, b"a")
    assert await leader.propose(USER, b"b") == 2


def test_results_too_large_to_send_are_reported() -> None:
    large = [b"x" * (2 << 20), b"y" * (3 << 20), 1, Failure("no")]
    commands = [Command("c", seq, 1, USER, b"") for seq in range(4)]
    first, second, third, fourth = decode_results(encode_results(large), commands)
    assert "too large" in first.reason
    assert "too large" in second.reason
    assert (third, fourth) == (1, Failure("no"))
    assert decode_results(encode_results(large[:1]), commands) == large[:1]


@with_world
async def test_failures_of_any_length_are_reported(world: World) -> None:
    """Their texts are the application's. All of a batch are sent to the node it came from, in one
    frame."""
    (leader,) = world.leaders()
    commands = [b"fail%d" % length for length in (0, 9_000_000, *[200_000] * 50)]
    for node in (leader, follower_of(world)):
        proposed = (node.propose(USER, command) for command in commands)
        errors = await asyncio.gather(*proposed, return_exceptions=True)
        assert {type(error) for error in errors} == {CommandFailed}
        assert all("as asked" in str(error) for error in errors)


@with_world
async def test_questions_go_to_whoever_leads(world: World) -> None:
    for node in world.nodes.values():
        node.on_question(
            lambda question, answer, node=node: answer(  # type: ignore[misc]
                node.id.encode() + question
            )
        )
    (leader,) = world.leaders()
    for node in world.nodes.values():
        assert await node.ask_leader(b"?") == leader.id.encode() + b"?"


@with_world
async def test_transfer_from_anywhere(world: World) -> None:
    (leader,) = world.leaders()
    follower = follower_of(world)
    await follower.admin.transfer(follower.id)
    assert (await world.leader()) is follower
    with pytest.raises(OrderFailed, match="n9 is not a voter"):
        await leader.admin.transfer("n9")
    await follower.admin.transfer()
    assert (await world.leader()) is not follower


@with_world
async def test_a_refused_request_does_not_fail_the_transfer_under_way(world: World) -> None:
    (leader,) = world.leaders()
    successor, down = (node for node in world.nodes if node != leader.id)
    world.crash(down)
    await asyncio.sleep(3.0)  # the leader has noticed
    transfer, removal, transfer_to_nobody = await asyncio.gather(
        leader.admin.transfer(successor),
        leader.admin.perform("remove", leader.id),
        leader.admin.transfer("n9"),
        return_exceptions=True,
    )
    assert transfer is None
    assert (await world.leader()).id == successor
    assert isinstance(removal, OrderFailed), "two of the three voters were down"
    assert isinstance(transfer_to_nobody, OrderFailed)
    assert "n9 is not a voter" in str(transfer_to_nobody)


@with_world
async def test_of_two_transfers_the_later_one_counts(world: World) -> None:
    (leader,) = world.leaders()
    first, second = (node for node in world.nodes if node != leader.id)
    replaced, carried_out = await asyncio.gather(
        leader.admin.transfer(first), leader.admin.transfer(second), return_exceptions=True
    )
    leads = (await world.leader()).id
    assert leads in (first, second)
    for to, outcome in ((first, replaced), (second, carried_out)):
        assert (outcome is None) == (leads == to)
        assert outcome is None or isinstance(outcome, OrderFailed)


@with_world
async def test_changes_of_role_are_reported_after_them_and_in_order(world: World) -> None:
    (leader,) = world.leaders()
    successor = follower_of(world)
    changed: list[tuple[Role, int, str | None]] = []
    reported: list[tuple[Role, int, str | None]] = []
    behind: list[int] = []

    def change(*state: Any) -> None:
        changed.append(state)
        behind.append(len(changed) - len(reported))

    successor.on_role(change)
    successor.observe_role(lambda *state: reported.append(state))
    await leader.admin.transfer(successor.id)
    assert changed[-1] == (Role.LEADING, successor.generation, successor.id)
    late: list[tuple[Role, int, str | None]] = []
    successor.observe_role(lambda *state: late.append(state))
    assert reported == changed  # the new observer is told of later changes only
    assert not late
    await successor.admin.transfer(leader.id)
    await asyncio.sleep(0.1)
    assert reported == changed
    await leader.admin.transfer(successor.id)
    successor.crash()
    assert reported == changed  # also what was not due yet
    assert late == changed[-len(late) :]
    assert min(behind) > 0  # none was reported within the step that it belongs to


@with_world
async def test_a_transfer_that_ends_in_another_election_of_the_same_node_has_failed(
    world: World,
) -> None:
    """Its successor crashed before it was elected, and the third node has less of the log."""
    (leader,) = world.leaders()
    successor, other = (node for node in world.nodes if node != leader.id)
    world.cut(other)
    await leader.propose(USER, b"a")
    world.disks[leader.id].sync_s = 0.05  # for as long as its vote takes
    transfer = asyncio.ensure_future(leader.admin.transfer(successor))
    await world.until(lambda: leader.role is not Role.LEADING)
    world.crash(successor)
    world.heal()
    await world.until(lambda: leader.role is Role.LEADING)
    await asyncio.sleep(0.01)
    assert transfer.done()
    with pytest.raises(OrderFailed, match="elected again"):
        await transfer


@with_world
async def test_a_stop_hands_over_first_and_loses_nothing(world: World) -> None:
    for _ in range(4):
        leader = await world.leader()
        generation = leader.generation
        waiting = [
            asyncio.ensure_future(node.propose(USER, b"%s-%d" % (node.id.encode(), n)))
            for node in world.nodes.values()
            for n in range(10)
        ]
        await asyncio.sleep(0.0005)
        began = world.loop.time()
        await world.stop(leader.id)
        assert world.loop.time() - began < 0.1
        await asyncio.gather(*waiting)
        with pytest.raises(SessionClosed):
            await leader.propose(USER, b"late")
        assert (await world.leader()).generation == generation + 1
        await world.boot_one(leader.id)


@with_world
async def test_a_backlog_of_slow_commands_does_not_hold_up_a_node(world: World) -> None:
    """A node that was cut off applies what it has missed in many turns of its loop."""
    (leader,) = world.leaders()
    node = follower_of(world)
    clock, apply_slice = world.clock, node.applier._apply_slice
    took: list[float] = []

    def timed() -> None:
        began = clock.now()
        apply_slice()
        took.append(clock.now() - began)

    def slow(command: bytes) -> int:
        clock.advance(0.004)
        return done(command)

    world.cut(node.id)
    for n in range(100):
        await leader.propose(USER, b"%d" % n)
    done = world.tallies[node.id].apply
    node.machine._applies[USER] = slow
    node.applier._apply_slice = timed  # type: ignore[method-assign]
    world.heal()
    await world.until(lambda: len(world.tallies[node.id].done) == 100)
    assert sum(took) > 0.4
    assert max(took) < SLICE_S + 0.005


def test_a_journal_that_fails_ends_the_process() -> None:
    async def main() -> None:
        world = World()
        await world.boot()
        leader = await world.leader()
        leader.pump.fail(OSError("fsync"))
        assert [name for name, _ in world.aborted] == [leader.id]
        with pytest.raises(SessionClosed):
            await leader.propose(USER, b"a")
        leader.pump.step(Received("n9", Message(1)))
        assert len(world.aborted) == 1

    run_virtual(main)


@with_world(limits=ProposalLimits(snapshot_bytes=3000, batch_commands=2))
async def test_a_node_that_was_away_is_sent_a_snapshot(world: World) -> None:
    (leader,) = world.leaders()
    away = follower_of(world).id
    world.crash(away)
    for n in range(30):
        await asyncio.gather(*(leader.propose(USER, b"%d-%d" % (n, m)) for m in range(20)))
    assert leader.status().snapshot > 0
    await world.boot_one(away)
    await world.until(lambda: world.nodes[away].applied == leader.applied)
    assert world.streams == 1
    assert world.tallies[away].done == world.tallies[leader.id].done
    assert world.nodes[away].status().snapshot > 0
    await world.nodes[away].propose(USER, b"back")
    world.crash(away)
    await world.boot_one(away)
    await world.nodes[away].barrier()
    assert world.tallies[away].done[-1] == b"back"


@with_world(limits=ProposalLimits(snapshot_bytes=1000))
async def test_a_large_state_is_not_copied_as_often(world: World) -> None:
    (leader,) = world.leaders()
    taken: list[int] = []
    for n in range(200):
        await leader.propose(USER, b"%05d" % n + bytes(95))
        if leader.status().snapshot not in taken:
            taken.append(leader.status().snapshot)
    apart = [after - before for before, after in pairwise(taken)]
    assert apart[0] <= 12
    assert apart[-1] > 40


@with_world
async def test_nodes_come_and_go(world: World) -> None:
    (leader,) = world.leaders()
    await leader.propose(USER, b"a")
    await world.boot_one("n4", Membership(VOTERS, ("n4",)))
    with pytest.raises(OrderFailed, match="add it first"):
        await leader.admin.perform("promote", "n4")
    await follower_of(world).admin.perform("add", "n4", "n4:1")
    await leader.admin.perform("add", "n4", "n4:1")
    await world.until(lambda: world.nodes["n4"].applied == leader.applied)
    assert world.tallies["n4"].done == [b"a"]
    assert world.links[leader.id].addresses["n4"] == "n4:1"
    while "n4" not in leader.membership.voters:
        await asyncio.sleep(0.01)
        with contextlib.suppress(OrderFailed):  # it may be a little behind
            await leader.admin.perform("promote", "n4")
    assert leader.membership.voters == ("n1", "n2", "n3", "n4")
    await leader.admin.perform("remove", leader.id)
    world.crash(leader.id)
    other = await world.leader()
    assert leader.id not in other.membership.everyone
    assert await world.nodes["n4"].propose(USER, b"b") == 2
    with pytest.raises(OrderFailed, match="unknown request"):
        await world.nodes["n4"].leader_calls.call_leader(b"O" + encode(AdminRequest("dance", "n4")))


@with_world
async def test_a_snapshot_has_the_members_of_its_own_place_in_the_log(world: World) -> None:
    """Not a later one's, which is in the log already and may yet be cut off: whoever started from
    such a snapshot would count majorities of a quorum that never was."""
    (leader,) = world.leaders()
    await leader.propose(USER, b"a")
    await leader.admin.perform("add", "n4", "n4:1")
    follower = follower_of(world)
    await world.until(lambda: follower.applied == leader.applied)
    world.crash(follower.id)
    world.cut(follower.id)
    await world.boot_one(follower.id)
    again = world.nodes[follower.id]
    assert again.membership.learners == ("n4",)
    assert again.applied == 0
    assert again.applier.copy()[0].membership == Membership(VOTERS)
    world.heal()
    await again.barrier()
    assert again.applier.copy()[0].membership == leader.membership


@with_world(limits=ProposalLimits(batch_commands=4, apply_commands=8, pipeline=100))
async def test_a_long_backlog_does_not_hold_up_the_loop(world: World) -> None:
    (leader,) = world.leaders()
    done = world.tallies[leader.id].done
    seen: list[int] = []
    leader.on_applied(lambda _: seen.append(len(done)))
    entries = [leader.propose(USER, b"%d" % n) for n in range(100)]
    await asyncio.gather(*entries)
    assert len(seen) > 10
    assert max(after - before for before, after in pairwise(seen)) <= 12


@with_world
async def test_garbage_from_a_peer_is_refused(world: World) -> None:
    (leader,) = world.leaders()
    answers: list[bytes] = []
    for question in (b"", b"P", b"P\xc1garbage", b"O\xc1", b"X", b"Q"):
        leader.leader_calls.called("n9", question, answers.append)
    await asyncio.sleep(0.1)
    assert len(answers) == 6
    assert all(answer[0] == 3 for answer in answers)


@with_world(limits=ProposalLimits(pending_commands=40, internal_commands=2, batch_commands=2))
async def test_no_load_of_clients_refuses_or_delays_commands_of_the_node_itself(
    world: World,
) -> None:
    (leader,) = world.leaders()
    for disk in world.disks.values():
        disk.sync_s = 0.05
    waiting = [asyncio.ensure_future(leader.propose(USER, b"%d" % n)) for n in range(40)]
    await asyncio.sleep(0.001)
    with pytest.raises(StoreUnavailable, match="40 proposals are under way on node"):
        await leader.propose(USER, b"one too many")
    settled: list[Any] = []
    for _ in range(2):
        leader.submit(USER, b"own", lambda *outcome: settled.append(outcome), internal=True)
    with pytest.raises(StoreUnavailable, match=r"2 commands of node n. itself"):
        leader.submit(USER, b"own", lambda *outcome: None, internal=True)
    await world.until(lambda: len(settled) == 2)
    # Behind what was in the log already, and before everything else.
    assert [result for _, result, error in settled if error is None] == [17, 18]
    await asyncio.gather(*waiting)


@with_world
async def test_an_internal_command_of_a_deposed_leader_is_not_forwarded(world: World) -> None:
    """It was right when it was proposed: a version that all members supported, say, and one has
    joined since that does not."""
    (leader,) = world.leaders()
    world.cut(leader.id)
    settled: list[Any] = []
    leader.submit(USER, b"own", lambda *outcome: settled.append(outcome), internal=True)
    await world.until(lambda: [node for node in world.leaders() if node is not leader])
    world.heal()
    await world.until(lambda: settled)
    assert isinstance(settled[0][2], OutcomeUnknown)
    assert await leader.propose(USER, b"a client's") == 1


async def written_at(world: World, node: Driver, rate: int, seconds: float) -> list[float]:
    """How long each of so many writes a second took; all of them have been answered."""
    took: list[float] = []

    async def write(n: int) -> None:
        began = world.loop.time()
        await node.propose(USER, b"%s-%d" % (node.id.encode(), n))
        took.append(world.loop.time() - began)

    async with asyncio.TaskGroup() as writes:
        for n in range(int(rate * seconds)):
            writes.create_task(write(n))
            await asyncio.sleep(1 / rate)
    return sorted(took)


@with_world
async def test_writes_through_a_follower_keep_up_on_a_slow_disk(world: World) -> None:
    """Every turn's proposals as a batch of their own would be more entries than the leader's
    disk can take, so they would pile up there."""
    (leader,) = world.leaders()
    for disk in world.disks.values():
        disk.sync_s = 0.01
    direct = await written_at(world, leader, 2000, 1.0)
    forwarded = await written_at(world, follower_of(world), 2000, 1.0)
    assert len(direct) == len(forwarded) == 2000
    assert forwarded[1000] < 1.5 * direct[1000]
    assert forwarded[-1] < 2 * direct[-1]


@with_world(limits=ProposalLimits(batch_commands=32, pipeline=2))
async def test_a_leader_serves_its_own_clients_and_its_followers_alike(world: World) -> None:
    for disk in world.disks.values():
        disk.sync_s = 0.01
    took = await asyncio.gather(
        *(written_at(world, node, 1000, 0.5) for node in world.nodes.values())
    )
    assert max(each[-1] for each in took) < 0.1


async def longest_write(world: World, node: Driver, order: Callable[[], Any]) -> float:
    """How long the longest write took while an order was carried out."""
    longest = 0.0
    over = False

    async def write() -> None:
        nonlocal longest
        while not over:
            began = world.loop.time()
            await node.propose(USER, b"%d" % int(began * 1e6))
            longest = max(longest, world.loop.time() - began)
            await asyncio.sleep(0.001)

    writing = asyncio.ensure_future(write())
    await asyncio.sleep(0.1)
    await order()
    await asyncio.sleep(2.0)
    over = True
    await writing
    return longest


@pytest.mark.parametrize("voters", [("n1", "n2"), VOTERS, ("n1", "n2", "n3", "n4", "n5")])
def test_removing_the_leader_stops_writes_no_longer_than_two_transfers(
    voters: tuple[str, ...],
) -> None:
    async def main(world: World) -> None:
        follower = follower_of(world)
        admin = follower.admin
        transfer = await longest_write(world, follower, lambda: admin.transfer(follower.id))
        (leader,) = world.leaders()
        client = next(node for node in world.nodes.values() if node is not leader)
        removal = await longest_write(
            world, client, lambda: client.admin.perform("remove", leader.id)
        )
        assert removal < 2 * transfer
        assert leader.id not in client.membership.everyone
        assert leader.membership == client.membership, "it has heard of it"
        assert leader.id not in world.links[client.id].addresses

    run_world(main, voters=voters)


@with_world
async def test_members_that_leave_are_reached_until_the_change_is_committed(world: World) -> None:
    (leader,) = world.leaders()
    leaves = follower_of(world)
    stays = next(n for n in world.nodes if n not in (leader.id, leaves.id))
    world.disks[leader.id].sync_s = world.disks[stays].sync_s = 0.5
    removal = asyncio.ensure_future(leader.admin.perform("remove", leaves.id))
    await asyncio.sleep(0.1)
    assert leaves.id not in leader.membership.everyone
    assert leaves.id in world.links[leader.id].addresses
    assert leaves.id in world.links[stays].addresses
    await removal
    await world.until(lambda: leaves.id not in world.links[stays].addresses)
    assert leaves.id not in world.links[leader.id].addresses


@with_world
async def test_a_repeated_request_is_not_confirmed_before_the_change_is_committed(
    world: World,
) -> None:
    """A client whose connection breaks makes its request again on another node. A change that is
    not committed may still be undone by the next leader."""
    (leader,) = world.leaders()
    leaves, other = (node for node in world.nodes if node != leader.id)
    for disk in world.disks.values():
        disk.sync_s = 0.5
    first = asyncio.ensure_future(leader.admin.perform("remove", leaves))
    await asyncio.sleep(0.1)
    assert leaves not in leader.core.membership.everyone
    await world.nodes[other].admin.perform("remove", leaves)
    assert leaves not in leader.applier.membership.everyone, "it is confirmed when it is committed"
    await first
    await world.nodes[other].admin.perform("remove", leaves)


@with_world
async def test_a_leader_with_slow_disks_is_removed(world: World) -> None:
    """Its successor waits for its own first entry; the administrator need not ask again."""
    (leader,) = world.leaders()
    for disk in world.disks.values():
        disk.sync_s = 0.5
    await follower_of(world).admin.perform("remove", leader.id)
    (successor,) = world.leaders()
    assert successor is not leader
    assert leader.id not in successor.applier.membership.everyone
