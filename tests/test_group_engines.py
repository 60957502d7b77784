"""Members and published lists on real engines."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

import doyen
from fixtures import shared
from servers import QuorumCluster
from support import known

WITHIN_S = 30.0

quorum = shared(QuorumCluster)


@pytest.fixture(params=["sqlite", "etcd", "quorum"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/doyen.db"
    return str(request.getfixturevalue(request.param).url)


async def test_members_join_change_and_leave_and_the_list_follows(url: str) -> None:
    async with (
        asyncio.timeout(WITHIN_S),
        doyen.connect(url) as session,
        doyen.connect(url) as other,
        session.member("engines", name="a") as first,
        session.campaign("engines", member=first) as term,
        session.publisher("engines", term),
        aclosing(other.observe_members("engines")) as changes,
        aclosing(other.observe_published("engines")) as lists,
    ):
        assert known(await anext(changes)).kind == "joined"
        async with other.member("engines", name="b") as second:
            joined = known(await anext(changes))
            assert (joined.kind, joined.member.incarnation) == ("joined", second.incarnation)
            await second.update({"n": 1})
            changed = known(await anext(changes))
            assert (changed.kind, changed.member.meta) == ("changed", {"n": 1})
            assert changed.member.incarnation == second.incarnation
            positions = []
            async for published in lists:
                if published:
                    positions.append(published.position)
                    if [each.meta for each in published.members] == [{}, {"n": 1}]:
                        break
            assert positions == sorted(set(positions))
            assert positions[-1][0] == term.token
        gone = known(await anext(changes))
        assert (gone.kind, gone.member.name) == ("gone", "b")
        async for published in lists:
            if published and len(published.members) == 1:
                break


async def test_a_name_that_is_taken_is_refused(url: str) -> None:
    async with (
        asyncio.timeout(WITHIN_S),
        doyen.connect(url, ttl_s=2.0) as session,
        doyen.connect(url, ttl_s=2.0) as other,
        session.member("taken", name="a") as member,
    ):
        with pytest.raises(doyen.NameTaken, match=f"incarnation {member.incarnation} of"):
            await other.member("taken", name="a").__aenter__()
        assert [each.name for each in await other.members("taken")] == ["a"]
