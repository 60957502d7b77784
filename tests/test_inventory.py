"""Everything that a store has, as one value: complete, current, and not disturbed by what cannot be
read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

import doyen
from doyen import Inventory, Line, Unreachable
from doyen.manage import inventory
from doyen.manage.inventory import INVENTORY_KINDS
from doyen.model import Leader, config_key, leader_key, member_key, shards_key
from support import Place, core_of, known, lead_until_set, until, virtual


async def _idle(term: doyen.ShardTerm) -> None:
    await asyncio.Event().wait()


@virtual
async def test_everything_is_found_by_its_kind_and_name(place: Place) -> None:
    session, other = await place.open(), await place.open()
    odd = "<b>/ü %2F"
    wall = place.clock.wall()
    async with AsyncExitStack() as scopes:
        term = await scopes.enter_async_context(session.campaign(odd, name="a", meta={"x": 1}))
        lock = await scopes.enter_async_context(session.lock("both", name="a"))
        both = await scopes.enter_async_context(session.campaign("both", name="a"))
        slot = await scopes.enter_async_context(session.semaphore("pool", 2, name="a"))
        await scopes.enter_async_context(session.member("workers", name="w/1"))
        stop = asyncio.Event()
        waiting = asyncio.create_task(lead_until_set(other, stop, "both", name="b"))
        meeting = asyncio.create_task(other.barrier("here", 3))
        await session.config("settings", author="ann").set({"n": 1})
        await session.config("settings", author="bob").set({"n": 2})
        await session.shards("jobs").configure(count=4)
        await scopes.enter_async_context(session.own_shards("jobs", _idle, name="m"))
        await asyncio.sleep(3)
        seen = await other.inventory()

        assert seen.as_of == pytest.approx(wall + 3, abs=1)
        assert list(seen.elections) == sorted([odd, "both", "shards/jobs"])
        leader = seen.elections[odd].leader
        assert leader == Leader(odd, "a", term.token, {"x": 1})
        assert leader is not None
        assert leader.since == pytest.approx(wall, abs=1)
        assert leader.ttl_s == 6.0
        assert leader.remaining_s is not None
        assert 3.0 < leader.remaining_s <= 6.0
        assert [each.name for each in seen.elections["both"].candidates] == ["a", "b"]
        assert seen.elections["both"].leader == Leader("both", "a", both.token)
        assert {name: line.leader for name, line in seen.locks.items()} == {
            "both": Leader("both", "a", lock.token, kind="locks")
        }
        pool = seen.semaphores["pool"]
        assert (pool.slots, pool.waiting) == (2, ())
        assert pool.holders == {0: Leader("pool/0", "a", slot.token, kind="semaphores")}
        here = seen.barriers["here"]
        assert (here.n, here.arrived, here.passed) == (3, 1, 0)
        assert {name: [each.name for each in group] for name, group in seen.groups.items()} == {
            "shards/jobs": ["m"],
            "workers": ["w/1"],
        }
        jobs = seen.shards["jobs"]
        assert (jobs.count, jobs.owners) == (4, dict.fromkeys(range(4), "m"))
        assert jobs.map == await other.shard_map("jobs")
        settings = seen.configs["settings"]
        assert (settings.version, settings.author, settings.kept) == (2, "bob", 1)
        assert len(seen) == 3 + 1 + 1 + 1 + 2 + 1 + 1

        assert await other.inventory("locks") == Inventory(locks=seen.locks)
        meeting.cancel()
        stop.set()
    await waiting
    with pytest.raises(doyen.ConfigError, match=r"a kind is one of elections, .*, not 'leases'"):
        await other.inventory("leases")  # type: ignore[arg-type]


@virtual
async def test_what_cannot_be_read_is_reported_and_hides_nothing(place: Place) -> None:
    session = await place.open()
    async with session.campaign("e", name="a"):
        store, lease = place.server, place.server.list("elections")[0].lease
        assert lease is not None
        store.put(config_key("settings", "current"), b"\xff", None)
        store.put(config_key("later", "current"), b'{"schema": 1, "version": 3, "id": "",'
                  b' "token": 0}', None)  # fmt: skip
        store.put(shards_key("jobs", "plan"), b"[]", None)
        store.create(leader_key("raw", "locks"), b"\x00not a claim", lease)
        store.create(member_key("group", "m"), b"{}", lease)
        store.put("semaphores/s/size", b"7", None)
        store.put("barriers/b/state", b'{"n": []}', None)
        seen = await session.inventory()
        assert "is not a document of doyen" in seen.configs["settings"].error
        assert seen.configs["later"].version == 3
        assert "it is not a configuration" in seen.configs["later"].error
        assert "is not a document of doyen" in seen.shards["jobs"].error
        assert seen.locks["raw"].leader is not None
        assert seen.locks["raw"].leader.name == "\x00not a claim"
        assert seen.groups == {}
        assert (seen.semaphores["s"].slots, seen.barriers["b"].n) == (0, 0)
        assert "e" in seen.elections


@virtual
async def test_every_change_is_delivered_and_nothing_else(place: Place) -> None:
    session, looking = await place.open(), await place.open()
    states: list[Inventory] = []

    async def look() -> None:
        async with aclosing(looking.observe_inventory()) as inventories:
            async for seen in inventories:
                states.append(known(seen))  # noqa: PERF401 - it is read meanwhile

    observing = asyncio.create_task(look())
    await until(lambda: states)
    assert len(states[-1]) == 0
    async with session.campaign("e", name="a"), session.member("g", name="m"):
        await until(lambda: len(states[-1]) == 2)
        count = len(states)
        await asyncio.sleep(60)
        assert len(states) == count, "a renewal is no change"
        assert states[-1] == await looking.inventory()
    await until(lambda: len(states[-1]) == 0)
    assert len(states) <= 6, "changes that come together are one"
    observing.cancel()


@virtual
async def test_after_a_second_outage_nothing_from_before_it_is_delivered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """⚔ The store fails again when one of two kinds has been read."""
    tell: dict[str, Callable[[Any], None]] = {}

    async def observe(_calls: Any, scopes: list[str], _read: Any, deliver: Any, **_: Any) -> None:
        tell[scopes[0]] = deliver
        await asyncio.Event().wait()

    monkeypatch.setattr(inventory, "observe", observe)
    core, seen = core_of(await place.open()), list[Any]()
    observing = asyncio.create_task(
        inventory.observe_inventory(core, seen.append, ("elections", "locks"))
    )
    await until(lambda: len(tell) == 2)
    for outage in (1, 2):
        for each in tell.values():
            each(Unreachable(0.0, None, "away"))
        if outage == 1:
            tell["elections"]({"of the first": Line(None)})
    tell["locks"]({})
    assert [type(each) for each in seen] == [Unreachable]
    tell["elections"]({"of the second": Line(None)})
    assert list(seen[-1].elections) == ["of the second"]
    observing.cancel()


def test_the_blocking_session_sees_the_same() -> None:
    with doyen.connect_blocking("memory://the-inventory") as session:
        with session.campaign("e", name="a") as term:
            seen = session.inventory()
            assert seen.elections["e"].leader == Leader("e", "a", term.token)
            assert next(session.observe_inventory("elections")) == Inventory(
                elections=seen.elections
            )
        assert set(INVENTORY_KINDS) < set(Inventory.__dataclass_fields__)
