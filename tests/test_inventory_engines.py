"""The inventory of a store and the trail of an election on every engine: what others wrote is found
by prefix, whatever the engine makes of keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import doyen
from fixtures import shared
from servers import QuorumCluster
from support import until

WITHIN_S = 60.0
ODD = "/app/<b> ü%2F"

quorum = shared(QuorumCluster)
ENGINES = [
    "sqlite",
    "etcd",
    "zookeeper",
    "consul",
    "postgresql",
    "mysql",
    "redis",
    "nats",
    "quorum",
]


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/doyen.db"
    return str(request.getfixturevalue(request.param).url)


async def test_everything_is_found_and_terms_are_recorded(url: str) -> None:
    async with (
        asyncio.timeout(WITHIN_S),
        doyen.connect(url) as session,
        doyen.connect(url) as other,
    ):
        async with (
            session.campaign(ODD, name="a") as term,
            session.lock("inventory", name="a") as lock,
            session.member("inventory", name="m"),
            session.semaphore("inventory", 2, name="a"),
        ):
            await session.config("inventory", author="ann").set({"n": 1})
            seen = await other.inventory()
            leader = seen.elections[ODD].leader
            assert leader is not None
            assert (leader.name, leader.token, leader.since is not None) == ("a", term.token, True)
            holder = seen.locks["inventory"].leader
            assert holder is not None
            assert holder.token == lock.token
            assert [member.name for member in seen.groups["inventory"]] == ["m"]
            assert len(seen.semaphores["inventory"].holders) == 1
            assert seen.configs["inventory"].author == "ann"
        while not (terms := await other.history(ODD)) or not terms[0].end:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert terms[0].end == "resigned"
        assert (terms[0].name, terms[0].token) == ("a", term.token)
        states: list[doyen.Inventory] = []

        async def observe() -> None:
            async for state in other.observe_inventory("elections"):
                if not isinstance(state, doyen.Unreachable):
                    states.append(state)  # noqa: PERF401 - it is read meanwhile

        observing = asyncio.create_task(observe())
        await until(lambda: states and ODD not in states[-1].elections)
        async with session.campaign(ODD, name="b"):
            await until(lambda: ODD in states[-1].elections)
        await until(lambda: ODD not in states[-1].elections)
        observing.cancel()
