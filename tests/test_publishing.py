"""Publishing the members of a group: one document, written by a leader under its token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from doyen import ConfigError, Published, Session, Term
from doyen.events import PublishFailed
from doyen.manage.documents import Document, Versioned
from doyen.model import encode_json, members_key, published_key
from doyen.testing.faults import Faults, Stray, Unanswered
from support import TTL_S, Place, core_of, known, until, virtual

GROUP = "workers"
KEY = published_key(GROUP)
FOREIGN = {"schema": 1, "version": 1, "id": "x", "group": GROUP, "members": []}


@contextlib.asynccontextmanager
async def leading(session: Session) -> AsyncIterator[Term]:
    async with session.campaign("controller") as term, session.publisher(GROUP, term):
        yield term


def current(place: Place) -> Versioned | None:
    entry = place.server.get(KEY)
    return None if entry is None else Versioned.decode(entry)


def names(published: Published | Versioned | None) -> list[str] | None:
    if isinstance(published, Versioned):
        return [each["name"] for each in published.body["members"]]
    return None if published is None else [member.name for member in published.members]


def lists(faults: Faults) -> int:
    return len([call for call in faults.trace if call.startswith("list members")])


async def collect(session: Session, seen: list[Published | None]) -> None:
    async for published in session.observe_published(GROUP):
        seen += [known(published)]


@virtual
async def test_the_leader_publishes_and_everybody_else_follows_one_key(place: Place) -> None:
    leader, reader, watched = await place.open(), await place.open(), Faults()
    follower = await place.open(watched)
    assert await reader.published(GROUP) is None
    seen: list[Published | None] = []
    following = asyncio.create_task(collect(follower, seen))
    async with leading(leader) as term:
        await asyncio.sleep(1)
        first = await reader.published(GROUP)
        assert first is not None
        assert first.position == (term.token, 1)
        assert first.members == ()
        async with reader.member(GROUP, name="a", meta={"address": "h:1"}) as member:
            await asyncio.sleep(1)
            second = await reader.published(GROUP)
            assert second is not None
            assert list(second.members) == await reader.members(GROUP)
            assert second.position > first.position
            await member.drain()
            await asyncio.sleep(1)
            third = await reader.published(GROUP)
            assert third is not None
            assert [each.state for each in third.members] == ["draining"]
        await asyncio.sleep(1)
    assert [names(each) for each in seen] == [None, [], ["a"], ["a"], []]
    assert not any(each.regressed for each in seen if each)
    assert lists(watched) == 0
    following.cancel()


@virtual
async def test_a_burst_is_read_and_published_once(place: Place) -> None:
    faults = Faults()
    leader, session = await place.open(faults), await place.open()
    async with leading(leader):
        await asyncio.sleep(1)
        faults.trace.clear()
        scopes = [session.member(GROUP, name=f"m{n}") for n in range(50)]
        await asyncio.gather(*(scope.__aenter__() for scope in scopes))
        await asyncio.sleep(1)
        published = current(place)
        assert published is not None
        assert published.version == 2
        assert len(published.body["members"]) == 50
        assert lists(faults) == 1
        # A change of what is not published, such as a renewal, publishes nothing.
        await asyncio.sleep(5 * TTL_S)
        assert current(place) == published
        await asyncio.gather(*(scope.__aexit__() for scope in scopes))


@virtual
async def test_a_new_leader_writes_first_and_its_predecessor_cannot_any_more(place: Place) -> None:
    faults = Faults()
    paused, next_one, members = await place.open(faults), await place.open(), await place.open()
    ended = asyncio.Event()

    async def lead_and_be_cut_off() -> None:
        with contextlib.suppress(Exception):
            async with leading(paused):
                await asyncio.sleep(1)
                # Its next list is written much later, when another leads.
                faults.next("put", Stray(after_s=3 * TTL_S))
                async with members.member(GROUP, name="gone later"):
                    await asyncio.sleep(0.5)
                faults.cut(answers_only=True)
                await ended.wait()

    task = asyncio.create_task(lead_and_be_cut_off())
    await asyncio.sleep(3)
    async with leading(next_one) as term:
        await until(lambda: (doc := current(place)) and doc.token == term.token)
        before = current(place)
        assert names(before) == []
        await asyncio.sleep(5 * TTL_S)
        assert current(place) == before
    ended.set()
    task.cancel()


@virtual
async def test_an_unknown_write_is_settled_before_the_members_are_read_again(place: Place) -> None:
    faults = Faults()
    leader, session = await place.open(faults), await place.open()
    async with leading(leader):
        await asyncio.sleep(1)
        faults.trace.clear()
        faults.next("put", *[Unanswered()] * 2)
        async with session.member(GROUP, name="a"):
            await asyncio.sleep(0.5)
        await asyncio.sleep(4 * TTL_S)
        calls = [call.split()[0] for call in faults.trace if "members" in call or "put" in call]
        assert [call for call in calls if call in ("list", "put")] == ["list", "put", "list", "put"]
        published = current(place)
        assert names(published) == []


@virtual
async def test_a_list_that_does_not_fit_is_reported_and_the_last_one_stays(place: Place) -> None:
    leader, session = await place.open(), await place.open()
    async with leading(leader):
        await asyncio.sleep(1)
        store = core_of(leader).store
        store.capabilities = type(store.capabilities)(value_bytes=300, value_limit="x's limit")
        async with session.member(GROUP, name="a", meta={"text": "x" * 300}):
            await asyncio.sleep(1)
            assert names(current(place)) == []
            (failed,) = place.seen(PublishFailed)
            assert isinstance(failed, PublishFailed)
            assert "more than 300 (x's limit)" in failed.error
        async with session.member(GROUP, name="b"):
            await asyncio.sleep(1)
            assert names(current(place)) == ["b"]


@virtual
async def test_garbage_is_replaced_by_the_leader_and_not_delivered(place: Place) -> None:
    reader, leader = await place.open(), await place.open()
    seen: list[Published | None] = []
    following = asyncio.create_task(collect(reader, seen))
    place.server.put(KEY, b"garbage", None)
    await asyncio.sleep(1)
    async with leading(leader):
        await asyncio.sleep(1)
        assert [names(each) for each in seen] == [[]]
    following.cancel()


@virtual
async def test_a_list_that_is_overwritten_is_published_again(place: Place) -> None:
    leader, reader = await place.open(), await place.open()
    seen: list[Published | None] = []
    following = asyncio.create_task(collect(reader, seen))
    async with leading(leader) as term, reader.member(GROUP, name="a"):
        await asyncio.sleep(1)
        for value in (b"garbage", encode_json({**FOREIGN, "token": term.token})):
            before, entry = current(place), place.server.get(KEY)
            assert before is not None
            assert entry is not None
            place.server.put(KEY, value, entry.version)
            await asyncio.sleep(1)
            after = current(place)
            assert after is not None
            assert (names(after), after.version) == (["a"], before.version + 1)
    following.cancel()


@virtual
async def test_a_token_of_no_leader_is_reported_and_left(place: Place) -> None:
    leader = await place.open()
    foreign = place.server.put(KEY, encode_json({**FOREIGN, "token": 10**9}), None)
    async with leading(leader), leader.member(GROUP, name="a"):
        await asyncio.sleep(5 * TTL_S)
        assert names(current(place)) == []
        (failed,) = place.seen(PublishFailed)
        assert isinstance(failed, PublishFailed)
        assert "was written with token 1000000000" in failed.error
        assert "delete that key, and the list is published again" in failed.error
        assert foreign is not None
        place.server.delete(KEY, foreign.version)
        await asyncio.sleep(1)
        assert names(current(place)) == ["a"]


@virtual
async def test_a_list_that_went_back_is_marked(place: Place) -> None:
    reader, leader = await place.open(), await place.open()
    seen: list[Published | None] = []
    following = asyncio.create_task(collect(reader, seen))
    async with leading(leader):
        await asyncio.sleep(1)
        old = current(place)
        assert old is not None
        async with reader.member(GROUP, name="a"):
            await asyncio.sleep(1)
    latest = current(place)
    assert latest is not None
    place.server.put(KEY, old.entry.value, latest.entry.version)
    await asyncio.sleep(1)
    assert [each.regressed for each in seen if each] == [False, False, True]
    following.cancel()


@virtual
async def test_bad_arguments_are_refused(place: Place) -> None:
    session = await place.open()
    async with session.campaign("controller") as term:
        for group, settle_s in (("", None), (GROUP, -1.0), (GROUP, float("nan"))):
            with pytest.raises(ConfigError):
                session.publisher(group, term, settle_s=settle_s)
    await Document(core_of(session).calls, KEY).write({"members": [{}]}, expect=None)
    assert place.server.list(members_key(GROUP)) == []
    with pytest.raises(Exception, match="version 1, cannot be read"):
        await session.published(GROUP)
