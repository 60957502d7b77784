"""Sets of shards in virtual time: plans, specs and lists that are old, damaged or missing."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from doyen.errors import (
    BadDocument,
    OrderFailed,
    StoreError,
)
from doyen.manage.documents import Versioned
from doyen.manage.shards import controller, moves, steps
from doyen.manage.shards.bodies import ThreadBodies
from doyen.manage.shards.plan import Move, ShardPlan
from doyen.model import Member, encode_json, shards_key
from doyen.testing.faults import Faults, Late
from mutants_shards import trusting
from support import TTL_S, Place, keepalive_of, now, until, virtual
from test_shards import Jobs


@virtual
async def test_drain_is_not_done_by_a_plan_that_does_not_know_of_it(place: Place) -> None:
    """The controller has read the spec before it was changed, and is about to give the member
    shards."""
    jobs = Jobs(place)
    session = await jobs.create(4)
    slow = Faults()
    await jobs.join("a", slow)
    await jobs.settled(4)
    slow.next("list", Late(after_s=0.8))
    calls = len(slow.trace)
    await jobs.join("b")
    await until(lambda: any("Late" in each for each in slow.trace[calls:]))
    await session.shards("jobs").drain("b", wait_s=20.0)
    begun = len(jobs.log)
    await asyncio.sleep(5.0)
    assert not [name for name, _ in jobs.log[begun:] if name == "b"]
    assert jobs.loads() == {"a": 4}


GARBAGE = [
    b"\xff\x00 not JSON",
    b"[]",
    b'{"schema": 1, "version": 7, "id": "x", "token": 0}',
    b'{"schema": 1, "version": 9, "id": "x", "token": Infinity}',
    encode_json(
        {"schema": 1, "version": 9, "id": "x", "token": 10**30}
        | {"generation": 1, "open": True, "names": ["z"], "owners": [0, 0, 0, 0]}
    ),
    encode_json(
        {"schema": 1, "version": 9, "id": "x", "token": 0}
        | {"generation": 1, "open": True, "names": ["a"], "owners": [0]}
        | {"moves": {"7": Move("b", 1, 1)._asdict()}}
    ),
    None,
]
"""What another program has written in place of the plan; None: it was deleted."""


def vandalise(place: Place, part: Literal["plan", "spec"], value: bytes | None) -> None:
    key = shards_key("jobs", part)
    entry = place.server.get(key)
    assert entry is not None
    if value is None:
        place.server.delete(key, entry.version)
    else:
        place.server.put(key, value, entry.version)


def is_plan(place: Place, count: int) -> bool:
    entry = place.server.get(shards_key("jobs", "plan"))
    try:
        plan = Versioned.decode(entry) if entry is not None else None
        return plan is not None and ShardPlan.decode(plan.body).count == count and plan.token < 1000
    except BadDocument:
        return False


@pytest.mark.parametrize(
    ("value", "barrier", "controlled"),
    [
        *((value, False, True) for value in GARBAGE),
        *((value, barrier, False) for value in GARBAGE[-2:] for barrier in (False, True)),
    ],
)
@virtual
async def test_a_plan_that_another_program_overwrote_is_restored(
    place: Place, value: bytes | None, barrier: bool, controlled: bool
) -> None:
    """By the controller that wrote it, or by the next one, from the records."""
    jobs = Jobs(place)
    session = await jobs.create(4, barrier=barrier)
    first, _ = await jobs.join("a")
    await jobs.settled(4)
    await jobs.join("b", control=controlled)
    await jobs.join("c", control=controlled)
    await jobs.settled(4)
    before, log = jobs.plan(), len(jobs.log)
    if not controlled:
        keepalive = keepalive_of(first)
        place.server.revoke(keepalive.lease.id)  # there is no controller for a moment
    vandalise(place, "plan", value)
    await until(lambda: is_plan(place, 4))
    await jobs.settled(4)
    after = jobs.plan()
    if controlled:
        assert after.owners == before.owners
        assert after.generation == before.generation
        forged = value is not None and b"10" in value  # nobody could tell it from a plan
        assert forged or len(jobs.log) == log, "no shard had to be begun again"
    else:
        assert after.generation >= before.generation
    await session.shards("jobs").drain("b", wait_s=30.0)
    assert "b" not in jobs.loads()
    assert not jobs.overlaps


@pytest.mark.parametrize("value", [b"\xff", b"{}", b'{"schema":1,"version":1,"id":"","token":0}'])
@virtual
async def test_a_spec_that_another_program_overwrote_is_reported_and_can_be_replaced(
    place: Place, value: bytes
) -> None:
    jobs = Jobs(place)
    session = await jobs.create(4)
    await jobs.join("a")
    await jobs.settled(4)
    owned = jobs.owners()
    vandalise(place, "spec", value)
    await until(lambda: "the spec cannot be read" in jobs.plan().note)
    assert jobs.owners() == owned
    shards = session.shards("jobs")
    for request in (
        partial(shards.configure, count=8),
        partial(shards.drain, "a"),
        partial(shards.move, 1, to="a"),
        shards.rebalance,
    ):
        with pytest.raises(BadDocument, match=r"cannot be read.*--force"):
            await request()
    await shards.configure(count=8, force=True)
    await jobs.settled(8)
    assert not jobs.plan().note


@virtual
async def test_a_spec_that_another_program_deleted_is_reported_and_can_be_replaced(
    place: Place,
) -> None:
    jobs = Jobs(place)
    session = await jobs.create(4)
    await jobs.join("a")
    await jobs.settled(4)
    owned = jobs.owners()
    vandalise(place, "spec", None)
    await until(lambda: "jobs create COUNT" in jobs.plan().note)
    await session.resign("shards/jobs")  # by the next controller too
    await asyncio.sleep(5.0)
    assert "was deleted by another program" in jobs.plan().note
    assert jobs.owners() == owned
    with pytest.raises(OrderFailed, match="create it"):
        await session.shards("jobs").drain("a")
    await session.shards("jobs").configure(count=8)
    await jobs.settled(8)
    assert not jobs.plan().note


@virtual
async def test_no_shard_begins_while_the_plan_is_gone(place: Place) -> None:
    """The controller is gone as well, so nobody restores it."""
    jobs = Jobs(place)
    await jobs.create(4)
    first, _ = await jobs.join("a")
    _, second = await jobs.join("b", control=False)
    await jobs.settled(4)
    shard = next(n for n, name in jobs.owners().items() if name == "b")
    record = next(
        each for each in place.server.list(shards_key("jobs", "at")) if f"/{shard}/" in each.key
    )
    await first.close()
    vandalise(place, "plan", None)
    begun = len(jobs.log)
    jobs.running[shard]._lose("as if its record had been removed")
    place.server.delete(record.key, record.version)
    await asyncio.sleep(10.0)
    assert len(jobs.log) == begun
    assert shard not in second.terms


@virtual
async def test_a_member_leaves_while_the_plan_of_a_shard_that_it_won_cannot_be_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No controller is there that would restore it. The record is deleted."""
    jobs = Jobs(place)
    await jobs.create(1)
    faults = Faults()
    await jobs.join("controller", faults, weight=0.0)
    changed = place.server._changed

    def vandalise_once(key: str) -> None:
        changed(key)
        if key.endswith("/at/0/leader"):
            monkeypatch.undo()
            faults.cut()
            vandalise(place, "plan", b"garbage")

    monkeypatch.setattr(place.server, "_changed", vandalise_once)
    async with jobs.member("a", control=False):
        await until(jobs.records)
        await asyncio.sleep(5.0)
        assert not jobs.running
        leaving_since = now()
    assert now() - leaving_since < 5.0
    assert not jobs.records()


@virtual
async def test_a_controller_that_failed_unexpectedly_begins_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as when the thread that computes a plan cannot be started."""
    failures = [RuntimeError("can't start new thread")]

    def limited(*args: Any) -> ShardPlan:
        if failures:
            raise failures.pop()
        return steps.next_plan(*args)

    monkeypatch.setattr(controller, "next_plan", limited)
    jobs = Jobs(place)
    await jobs.create(4)
    await jobs.join("a")
    await jobs.settled(4)
    assert not failures
    assert "event=controller_failed" in caplog.text
    assert "can't start new thread" in caplog.text


def test_a_thread_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """To its shard alone: it ends as a body that raised, and others begin."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    posted: list[Any] = []
    ended: list[BaseException | None] = []
    runtime: Any = SimpleNamespace(post=posted.append)
    bodies = ThreadBodies(runtime, lambda _: None, lambda _: None)
    term: Any = SimpleNamespace(shards="jobs", shard=3)
    bodies.start(term, ended.append)
    bodies.prepare(3, ended.append)
    assert not ended, "the caller is not ready for that yet"
    for call in posted:
        call()
    assert [str(each) for each in ended] == ["can't start new thread"] * 2


@virtual
async def test_an_unread_list_of_members_is_read_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error was, such as a missing permission that is granted later."""
    refusals = [StoreError("permission denied")]

    async def refused(*args: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await controller.seen_members(*args)

    monkeypatch.setattr(moves, "seen_members", refused)
    jobs = Jobs(place)
    session = await jobs.create(4)
    await jobs.join("a")
    await jobs.settled(4)
    await jobs.join("b")
    await session.shards("jobs").drain("a", wait_s=60.0)
    assert jobs.loads() == {"b": 4}
    assert not refusals


@pytest.mark.parametrize("weight", [float("inf"), float("nan"), 1e300, "much", -1, None])
def test_a_weight_that_is_none_gives_no_shards(weight: Any) -> None:
    member = Member("a", 1, "up", "", {"weight": weight}, 0.0)
    assert controller.seen_member(member).weight == 0.0


@pytest.mark.parametrize("mutant", [False, True])
@virtual
async def test_a_plan_that_wrongly_says_that_records_are_missing_ends_no_term(
    place: Place, mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "unheld", lambda *_: (0, 1))
    if mutant:
        trusting(monkeypatch)
    jobs = Jobs(place)
    await jobs.create(2)
    await jobs.join("a")
    await jobs.settled(2)
    tokens = {shard: term.token for shard, term in jobs.running.items()}
    await until(lambda: jobs.plan().unheld == (0, 1), 2 * TTL_S)
    await asyncio.sleep(TTL_S)
    assert ({shard: term.token for shard, term in jobs.running.items()} != tokens) is mutant
