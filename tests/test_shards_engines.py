"""Shards on real engines: members share them, move them, lose them and change their number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import doyen
from fixtures import shared
from servers import QuorumCluster
from support import until

WITHIN_S = 60.0

quorum = shared(QuorumCluster)


@pytest.fixture(params=["sqlite", "etcd", "quorum"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/doyen.db"
    return str(request.getfixturevalue(request.param).url)


async def test_members_share_move_lose_and_recount(url: str) -> None:
    running: dict[int, doyen.ShardTerm] = {}

    async def body(term: doyen.ShardTerm) -> None:
        assert term.shard not in running
        running[term.shard] = term
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            del running[term.shard]

    def owned(*names: str, count: int, generation: int = 1) -> Callable[[], bool]:
        return lambda: (
            len(running) == count
            and {term.name for term in running.values()} == set(names)
            and all(term.generation == generation for term in running.values())
        )

    async with asyncio.timeout(WITHIN_S), doyen.connect(url) as session, doyen.connect(url) as b:
        shards = session.shards("engines")
        await shards.configure(count=6, barrier=True, min_members=2, settle_s=0.05)
        async with b.own_shards("engines", body, name="b"):
            async with (
                doyen.connect(url) as a,
                a.own_shards("engines", body, name="a", address="http://a") as at_a,
            ):
                await until(owned("a", "b", count=6))
                shard, term = next(iter(at_a.terms.items()))
                await shards.move(shard, to="b")
                assert running[shard].name == "b"
                assert running[shard].token > term.token
                await shards.configure(count=4)
                await until(owned("a", "b", count=4, generation=2))
                await shards.drain("b")
                assert owned("a", count=4, generation=2)()
                await shards.drain("b", undo=True)
            await until(owned("b", count=4, generation=2))
        seen = await session.shard_map("engines")
        assert (seen.generation, seen.count) == (2, 4)
    assert running == {}
