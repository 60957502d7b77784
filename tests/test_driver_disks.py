"""The driver on virtual time, with disks that are full or slow."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from doyen.errors import (
    OrderFailed,
    StoreUnavailable,
)
from doyen.quorum.node.proposals import ProposalLimits
from doyen.quorum.node.replicated import USER
from drivers import VOTERS, World, follower_of, with_world


@with_world
async def test_a_full_disk_refuses_and_another_leads(world: World) -> None:
    (leader,) = world.leaders()
    world.disks[leader.id].full = True
    with pytest.raises(StoreUnavailable, match=f"disk of node {leader.id}.* is full"):
        await leader.propose(USER, b"a")
    assert leader.status().full
    await world.until(lambda: world.leaders() and world.leaders() != [leader])
    assert await leader.propose(USER, b"b") == 1


@with_world
async def test_when_every_disk_is_full_one_leader_stays(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    (leader,) = world.leaders()
    refusals: list[str] = []
    for disk in world.disks.values():
        disk.full = True
    for node in [*world.nodes.values()] * 20:
        with pytest.raises(StoreUnavailable, match=f"of nodes? {leader.id}.* full") as refused:
            await node.propose(USER, b"a")
        refusals.append(str(refused.value))
        await node.barrier()
        await asyncio.sleep(0.1)
    assert all(name in refusals[-1] for name in world.nodes), "a refusal names every full disk"
    assert world.leaders() == [leader]
    assert leader.generation == 1
    logged = [
        record.getMessage() for record in caplog.records if "event=disk_full" in record.message
    ]
    assert len(logged) == len({*logged}) == 3, "each node says so once, followers too"
    assert all(node.status().full for node in world.nodes.values())
    with pytest.raises(OrderFailed, match="that could lead; these have no room on their disks: "):
        await leader.admin.transfer()
    other = follower_of(world).id
    with pytest.raises(OrderFailed, match=f"the disk of {other} is full"):
        await leader.admin.transfer(other)
    for disk in world.disks.values():
        disk.full = False
    await asyncio.sleep(0.5)
    assert await world.leaders()[0].propose(USER, b"b") == 1


@with_world(voters=("n1", "n2", "n3", "n4", "n5"))
async def test_a_full_leader_hands_over_to_a_node_with_room(world: World) -> None:
    (leader,) = world.leaders()
    full, *roomy = [node for node in world.voters if node != leader.id]
    world.disks[leader.id].full = True
    world.disks[full].full = True
    await world.until(lambda: full in leader.disk_space.without_space())
    for _ in range(10):
        with contextlib.suppress(StoreUnavailable):
            await leader.propose(USER, b"a")
        await asyncio.sleep(0.2)
    (successor,) = world.leaders()
    assert successor.id in roomy
    assert successor.generation == 2


@with_world
async def test_writes_are_refused_while_no_majority_has_room(world: World) -> None:
    """Else the reserves of the full nodes would be used up, and no lease could end."""
    (leader,) = world.leaders()
    full = [node for node in VOTERS if node != leader.id]
    world.disks[full[0]].full = True
    await asyncio.sleep(0.5)
    assert await leader.propose(USER, b"a") == 1
    world.disks[full[1]].full = True
    await asyncio.sleep(0.5)
    for node in world.nodes.values():
        with pytest.raises(StoreUnavailable, match="no majority has room"):
            await node.propose(USER, b"b")
    settled: list[Any] = []
    leader.submit(USER, b"own", lambda *outcome: settled.append(outcome), internal=True)
    await world.until(lambda: settled)
    assert settled[0][1:] == (2, None)
    world.disks[full[0]].full = False
    await asyncio.sleep(0.5)
    assert await leader.propose(USER, b"c") == 3


@with_world(limits=ProposalLimits(journal_bytes=10000))
async def test_what_waits_for_the_leaders_disk_has_a_bound(world: World) -> None:
    """The others commit without it, so nothing else bounds it."""
    (leader,) = world.leaders()
    disk = world.disks[leader.id]
    disk.sync_s = 5.0
    with pytest.raises(StoreUnavailable, match=f"bytes wait for the disk of node {leader.id}"):
        for n in range(30):
            await leader.propose(USER, b"%d" % n + b"x" * 1000)
    assert 10_000 < disk.queued < 12_500
    await asyncio.sleep(6.0)
    assert disk.queued == 0
    disk.sync_s = 0.001
    await leader.propose(USER, b"again")
