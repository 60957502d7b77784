"""The driver on virtual time, with commands that are submitted together."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from time import process_time
from typing import Any

from doyen.errors import CommandFailed, OutcomeUnknown
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.proposals import ProposalLimits
from doyen.quorum.node.replicated import USER
from drivers import World, follower_of, with_world


async def submitted(node: Driver, bodies: list[bytes]) -> dict[Any, Any]:
    """The outcomes of commands that are submitted together, by tag; each is reported once."""
    outcomes: dict[Any, Any] = {}
    done = asyncio.get_running_loop().create_future()

    def settle(tag: Any, result: Any, error: BaseException | None) -> None:
        assert tag not in outcomes
        outcomes[tag] = error or result
        if len(outcomes) == len(bodies):
            done.set_result(None)

    def settle_all(tags: Sequence[Any], results: Sequence[Any]) -> None:
        for tag, result in zip(tags, results, strict=True):
            settle(tag, result, None)

    tags = [f"t{number}" for number in range(len(bodies))]
    assert node.proposals.submit_all(USER, bodies, tags, settle, settle_all)
    assert len(node.proposals) == len(bodies)
    # A command is given up after `patience_s`; a limit of the same length could end first.
    await asyncio.wait_for(done, 2 * ProposalLimits().patience_s)
    assert not len(node.proposals)
    assert not node.proposals._live_bytes
    assert not node.proposals._identity.open
    return outcomes


@with_world(limits=ProposalLimits(batch_commands=3))
async def test_commands_that_are_submitted_together_have_outcomes_of_their_own(
    world: World,
) -> None:
    """On the leader and on a follower: each gets its own result, and one that fails does not affect
    the others. Those that do not fit into one entry are in several."""
    (leader,) = world.leaders()
    await leader.propose(USER, b"first")
    before, count = leader.core.commit, 1
    for node in (leader, follower_of(world)):
        outcomes = await submitted(node, [b"a", b"b", b"c", b"fail", b"d", b"e", b"f", b"g"])
        assert isinstance(outcomes.pop("t3"), CommandFailed)
        assert sorted(outcomes.values()) == [*range(count + 1, count + 8)]
        count += 7
    assert leader.core.commit == before + 6


@with_world
async def test_commands_that_are_submitted_together_are_given_up_one_by_one(world: World) -> None:
    (leader,) = world.leaders()
    world.cut(leader.id)
    outcomes = await submitted(leader, [b"a", b"b"])
    assert [type(each) for each in outcomes.values()] == [OutcomeUnknown] * 2
    assert outcomes["t0"] is not outcomes["t1"], "each is raised somewhere else"


@with_world
async def test_what_a_machine_has_forgotten_of_commands_is_proposed_again(world: World) -> None:
    """The results of all commands of a proposal are failures; each is carried out once."""
    (leader,) = world.leaders()
    assert await leader.propose(USER, b"first") == 1
    for node in world.nodes.values():
        node.machine._clients.clear()
    outcomes = await submitted(leader, [b"a", b"b", b"c"])
    assert outcomes == {"t0": 2, "t1": 3, "t2": 4}
    assert world.tallies[leader.id].done == [b"first", b"a", b"b", b"c"]


@with_world(limits=ProposalLimits(patience_s=1.0))
async def test_commands_of_the_node_itself_that_were_given_up_raise_no_version(
    world: World,
) -> None:
    """Their entry turns out to be lost after that, so they wait in the queue for a turn."""
    (leader,) = world.leaders()
    world.cut(leader.id)
    settled: list[Any] = []
    leader.submit(USER, b"own", lambda *outcome: settled.append(outcome), internal=True)
    await world.until(lambda: settled)
    assert leader.proposals.appended
    leader.proposals.replaced(leader.core.commit + 10)
    assert leader.proposals.internal
    assert not leader.proposals.raises_version()


def submit_many(node: Driver, count: int, together: int) -> list[Any]:
    """Submit so many commands; returns the tags of those that have outcomes."""
    settled: list[Any] = []

    def settle_all(tags: Sequence[Any], _: Sequence[Any]) -> None:
        settled.extend(tags)

    for at in range(0, count, together):
        tags, bodies = range(at, at + together), [b"a"] * together
        assert node.proposals.submit_all(
            USER, bodies, tags, lambda tag, *_: settled.append(tag), settle_all
        )
    return settled


def processor_s(work: Callable[[], object]) -> float:
    """The processor time of some work, without collections of garbage: in a process that has run
    many tests they take longer than the work."""
    gc.disable()
    try:
        began = process_time()
        work()
        return process_time() - began
    finally:
        gc.enable()


@with_world
async def test_many_proposals_are_refused_in_the_time_of_many_commands(world: World) -> None:
    """A leader that refuses writes for longer than an election timeout would be replaced."""
    (leader,) = world.leaders()
    took_s = []
    for together in (1, 2):
        settled = submit_many(leader, 16384, together)
        took_s.append(processor_s(lambda: leader.proposals.refuse_waiting("full", lambda _: False)))
        assert settled == [*range(16384)]
    assert took_s[1] < 8 * took_s[0]


@with_world
async def test_proposals_are_gathered_as_fast_after_many_others(world: World) -> None:
    (leader,) = world.leaders()
    proposals = leader.proposals
    submit_many(leader, 16384, 1)
    took_s = []
    for first in range(1, 16384, 512):
        gathered: list[Any] = []
        took_s.append(processor_s(lambda: gathered.append(proposals.gather(0))))  # noqa: B023
        (batch,) = gathered
        assert batch is not None
        assert batch.commands[0].floor == first
        proposals.settle(batch, [0] * 512)
    assert not len(proposals)
    assert min(took_s[-8:]) < 4 * min(took_s[:8])  # a pause of the interpreter is in few of them
