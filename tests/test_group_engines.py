"""Members, published lists, semaphores, barriers and publications of leaders, on real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing

import pytest

import doyen
from doyen.lease.clock import SystemClock
from doyen.manage import roster
from doyen.manage.members import MemberValue
from doyen.model import Entry, member_key
from doyen.stores.port import Context, open_store
from fixtures import store_url
from support import known

WITHIN_S = 30.0

url = store_url("sqlite", "etcd", "quorum")
telling = store_url("sqlite", "etcd", "quorum", "nats")
"""Those that tell what is left of a lease."""


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
    """At once, and not after the holder's lease could have expired."""
    async with (
        doyen.connect(url, ttl_s=60.0) as session,
        doyen.connect(url) as other,
        session.member("taken", name="a") as member,
        asyncio.timeout(WITHIN_S),
    ):
        with pytest.raises(doyen.NameTaken, match=f"incarnation {member.incarnation} of"):
            await other.member("taken", name="a").__aenter__()
        assert [each.name for each in await other.members("taken")] == ["a"]


async def test_a_member_that_is_silent_is_suspected(telling: str) -> None:
    async with asyncio.timeout(WITHIN_S), doyen.connect(telling) as session:
        store = await open_store(telling, Context(SystemClock(), lambda event: None))
        lease = await store.grant(3.0)
        silent = MemberValue("a", "silent-1", "silent", "test", lease.ttl_s, 0.0, "up", "", {})
        await store.create(member_key("silent", "a"), silent.encode(), lease)
        kinds = []
        async with aclosing(session.observe_members("silent")) as changes:
            async for change in changes:
                if isinstance(change, doyen.MemberChange):
                    kinds.append(change.kind)
                    if change.kind == "gone":
                        break
        await store.close()
    assert kinds == ["joined", "suspected", "gone"]


async def test_a_burst_in_a_group_of_a_thousand_costs_an_observer_one_list(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in requests. The time without a change that ends a burst is long here, so that a
    machine with other work does not make two bursts of one."""
    monkeypatch.setattr(roster, "SETTLE_S", 0.4)
    store = await open_store(url, Context(SystemClock(), lambda event: None))
    lease = await store.grant(60.0)

    async def join(*numbers: int) -> None:
        for number in numbers:
            value = MemberValue(f"m{number}", "a-1", "a", "test", 60.0, 0.0, "up", "", {})
            await store.create(member_key("many", value.name), value.encode(), lease)

    async with asyncio.timeout(WITHIN_S), doyen.connect(url, ttl_s=60.0) as session:
        await asyncio.gather(*(join(*range(first, 1000, 50)) for first in range(50)))
        lists, list_ = 0, session._opened.store.list

        def counted(prefix: str) -> Awaitable[list[Entry]]:
            nonlocal lists
            lists += 1
            return list_(prefix)

        monkeypatch.setattr(session._opened.store, "list", counted)
        async with aclosing(session.observe_members("many", suspect=False)) as changes:
            for _ in range(1000):
                assert known(await anext(changes)).kind == "joined"
            assert lists == 1
            await asyncio.gather(*(join(number) for number in range(1000, 1050)))
            for _ in range(50):
                assert known(await anext(changes)).kind == "joined"
            assert lists == 2
            gone = [member_key("many", f"m{number}") for number in range(50)]
            await asyncio.gather(*map(store.delete, gone))
            for _ in range(50):
                assert known(await anext(changes)).kind == "gone"
            assert lists == 3
    await store.revoke(lease)
    await store.close()


async def test_what_a_leader_publishes_reaches_observers_in_the_same_term(url: str) -> None:
    async with (
        asyncio.timeout(WITHIN_S),
        doyen.connect(url) as session,
        doyen.connect(url) as other,
        session.campaign("published", name="a", meta={"n": 0}) as term,
        aclosing(other.observe("published")) as leaders,
    ):
        seen: list[object] = []
        for n in range(1, 4):
            await term.publish({"n": n})
            async for leader in leaders:
                assert isinstance(leader, doyen.Leader)
                assert leader.token == term.token
                seen.append(leader.meta["n"])
                if leader.meta["n"] == n:
                    break
        assert seen[-1] == 3
        assert term.valid
    async with doyen.connect(url) as session:
        assert await session.leader("published") is None


async def test_a_semaphore_has_n_holders_and_the_next_in_line_follows(url: str) -> None:
    async with (
        asyncio.timeout(WITHIN_S),
        doyen.connect(url) as session,
        doyen.connect(url) as other,
    ):
        async with session.semaphore("slots", 2) as first:
            held = other.semaphore("slots", 2)
            second = await held.__aenter__()
            third = session.semaphore("slots", 2)
            next_in_line = asyncio.create_task(third.__aenter__())
            done, _ = await asyncio.wait({next_in_line}, timeout=0.3)
            assert not done
            assert {first.slot, second.slot} == {0, 1}
        follower = await next_in_line
        assert follower.slot == first.slot
        assert follower.token > first.token
        with pytest.raises(doyen.ConfigError, match="not 3"):
            await other.semaphore("slots", 3).__aenter__()
        await third.__aexit__(None, None, None)
        await held.__aexit__(None, None, None)


async def test_a_barrier_is_passed_by_all_at_once(url: str) -> None:
    async with (
        asyncio.timeout(WITHIN_S),
        doyen.connect(url) as session,
        doyen.connect(url) as other,
    ):
        for time in (1, 2):
            early = asyncio.create_task(session.barrier("start", 2))
            done, _ = await asyncio.wait({early}, timeout=0.1)
            assert not done
            assert await other.barrier("start", 2) == await early == time
        with pytest.raises(doyen.NotArrived, match="1 of 2"):
            await session.barrier("start", 2, wait_s=1.0)
