"""Shards on real engines: members share them, move them, lose them and change their number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import doyen
from fixtures import store_url
from support import until

WITHIN_S = 60.0

url = store_url("sqlite", "etcd", "quorum")


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
                assert "b" not in {term.name for term in running.values()}
                await until(owned("a", count=4, generation=2))
                await shards.drain("b", undo=True)
            await until(owned("b", count=4, generation=2))
        seen = await session.shard_map("engines")
        assert (seen.generation, seen.count) == (2, 4)
    assert running == {}
