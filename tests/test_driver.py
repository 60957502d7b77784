"""The driver on virtual time."""

from __future__ import annotations

import asyncio

import pytest
from drivers import World

from doyen.consensus.core import Role
from doyen.errors import CommandFailed
from doyen.node.driver import Limits
from doyen.node.machine import USER
from doyen.testing.virtual import run_virtual


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
