"""Who has applied a configuration: acknowledgements, and writers that wait for them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from configs import Backup, Subscriber, acknowledgements, subscriber
from doyen import (
    ConfigError,
    NotApplied,
    Session,
    SessionClosed,
)
from doyen.model import config_key
from doyen.testing.faults import (
    Faults,
)
from support import TTL_S, Place, core_of, now, until, virtual


@virtual
async def test_a_hundred_acknowledgements_cost_their_writer_a_few_requests(place: Place) -> None:
    """And no subscriber hears of those of the others: nobody but the writer watches a key above
    them, and only while it waits."""
    writer, reader = Faults(), Faults()
    config = (await place.open(writer)).config("limits")
    subscribed = [
        Subscriber((await place.open(reader)).config("limits"), f"s{n}", slow_s=n / 5000)
        for n in range(100)
    ]
    await until(lambda: len(acknowledgements(place)) == 100)
    await config.set(0, wait_applied="all")
    writer.trace.clear()
    reader.trace.clear()
    await config.set(1, wait_applied="all")
    assert {version for _, version in acknowledgements(place)} == {2}
    asked = Counter(call.split()[0] for call in writer.trace)
    assert asked["watch"] == 1
    assert asked["get"] == 0
    assert asked["list"] <= 25  # the last acknowledges 20 ms after the first
    # Each subscriber reads the document once, and writes its acknowledgement once.
    assert Counter(call.split()[0] for call in reader.trace) == {"get": 100, "update": 100}
    assert config_key("limits", "applied") not in place.server._watchers
    for each in subscribed:
        await each.leave()


@virtual
async def test_an_acknowledgement_of_a_lost_version_does_not_count(place: Place) -> None:
    config = (await place.open()).config("limits")
    await config.set("a")
    backup = Backup(place.server)
    await config.set("b")
    faults = Faults()
    slow = Subscriber((await place.open(faults)).config("limits"), "slow")
    await until(lambda: acknowledgements(place) == [("slow", 2)])
    faults.cut()
    backup.restore()
    await config.set("c")
    with pytest.raises(NotApplied, match="'slow' has not applied it within 1 s"):
        await config.set("d", wait_applied="all", wait_s=1.0)
    backup.restore()
    with pytest.raises(NotApplied, match="'slow' has not applied it"):
        await config.set("e", wait_applied="all", wait_s=0.5)
    faults.heal()
    await slow.leave()


@virtual
async def test_a_writer_waits_until_all_have_applied_it(place: Place) -> None:
    config = (await place.open()).config("limits")
    assert (await config.set(0, wait_applied="all")).version == 1  # there is nobody
    for n, slow_s in enumerate((0.5, 2.0, 1.0)):
        await subscriber(place, f"s{n}", slow_s=slow_s)
    await until(lambda: acknowledgements(place) == [("s0", 1), ("s1", 1), ("s2", 1)])
    began = now()
    await config.set(1, wait_applied="all")
    assert now() - began == pytest.approx(2.0, abs=0.01)  # short pauses included
    began = now()
    await config.set(2, wait_applied="majority")
    assert now() - began == pytest.approx(1.0, abs=0.01)
    await until(lambda: acknowledgements(place) == [("s0", 3), ("s1", 3), ("s2", 3)])
    began = now()
    await config.rollback(1, wait_applied="all")
    assert now() - began == pytest.approx(2.0, abs=0.01)  # short pauses included


@virtual
async def test_who_has_not_applied_it_is_named(place: Place) -> None:
    config = (await place.open()).config("limits")
    await subscriber(place, "quick")
    stuck = await subscriber(place, "stuck", slow_s=100.0)
    picky = await subscriber(place, "picky", refuses="too many workers")
    with pytest.raises(
        NotApplied,
        match=r"version 1 of 'limits' was written and stays, but 'picky' refused it \(too many"
        r" workers\), 'stuck' has not applied it within 3 s",
    ) as error:
        await config.set(1, wait_applied="all", wait_s=3.0)
    assert now() == pytest.approx(3.0, abs=0.1)
    assert error.value.refused == {"picky": "too many workers"}
    assert error.value.waiting == ["stuck"]
    read = await config.get()
    assert read is not None
    assert read.version == 1
    with pytest.raises(NotApplied):
        await config.set(2, wait_applied="majority", wait_s=3.0)
    await stuck.leave()
    with pytest.raises(NotApplied) as error:  # one of two is no majority
        await config.set(3, wait_applied="majority", wait_s=3.0)
    assert error.value.waiting == []
    await picky.leave()
    await config.set(4, wait_applied="all")


@virtual
async def test_those_that_go_or_come_later_are_not_waited_for(place: Place) -> None:
    config = (await place.open()).config("limits")
    leaves = await subscriber(place, "leaves", slow_s=100.0)
    dies = Faults()
    Subscriber((await place.open(dies)).config("limits"), "dies", slow_s=100.0)
    await until(lambda: len(acknowledgements(place)) == 2)
    began = now()
    writing = asyncio.ensure_future(config.set(1, wait_applied="all", wait_s=60.0))
    await asyncio.sleep(0.5)
    await subscriber(place, "later", slow_s=100.0)
    await leaves.leave()
    assert [name for name, _ in acknowledgements(place)] == ["dies", "later"]
    dies.cut()
    assert (await writing).version == 1
    assert now() - began < 2 * TTL_S
    assert [name for name, _ in acknowledgements(place)] == ["later"]


@virtual
async def test_a_subscriber_that_comes_back_under_its_name_is_another_one(place: Place) -> None:
    config = (await place.open()).config("limits")
    first = await subscriber(place, "server1", slow_s=100.0)
    writing = asyncio.ensure_future(config.set(1, wait_applied="all", wait_s=60.0))
    await asyncio.sleep(1)
    await first.leave()
    await subscriber(place, "server1", slow_s=100.0)
    assert (await asyncio.wait_for(writing, 1.0)).version == 1


@virtual
async def test_a_lost_lease_is_replaced_and_nothing_is_left_behind(place: Place) -> None:
    session = await place.open()
    subscribed = Subscriber(session.config("limits"), "s")
    config = (await place.open()).config("limits")
    await config.set(1)
    await until(lambda: acknowledgements(place) == [("s", 1)])
    (keepalive,) = core_of(session).leases._own
    place.server.revoke(keepalive.lease.id)
    await config.set(2)
    await until(lambda: acknowledgements(place) == [("s", 2)])
    (again,) = core_of(session).leases._own
    assert again.lease.id != keepalive.lease.id
    await subscribed.leave()
    assert acknowledgements(place) == []
    assert not core_of(session).leases._own


@virtual
async def test_a_subscriber_that_leaves_while_cut_off_is_gone_with_its_lease(place: Place) -> None:
    faults = Faults()
    subscribed = Subscriber((await place.open(faults)).config("limits"), "s")
    await until(lambda: acknowledgements(place))
    faults.cut()
    await subscribed.leave()
    faults.heal()
    await asyncio.sleep(2 * TTL_S)
    assert acknowledgements(place) == []


@virtual
async def test_entering_waits_for_the_store_and_can_be_cancelled(place: Place) -> None:
    faults = Faults()
    faults.cut()
    session = await place.open(faults)
    entering = asyncio.ensure_future(session.config("limits").subscribe("s").__aenter__())
    await asyncio.sleep(10)
    assert not entering.done()
    entering.cancel()
    faults.heal()
    await asyncio.sleep(2 * TTL_S)
    assert acknowledgements(place) == []
    assert not core_of(session).leases._own


@virtual
async def test_closing_the_session_ends_subscriptions(place: Place) -> None:
    session: Session = place.session()
    async with session:
        subscribed = Subscriber(session.config("limits"), "s")
        await until(lambda: acknowledgements(place))
    with pytest.raises(SessionClosed):
        await subscribed.task
    assert acknowledgements(place) == []


@virtual
async def test_a_document_can_be_acknowledged_at_once(place: Place) -> None:
    config = (await place.open()).config("limits")
    await config.set(1)
    async with (await place.open()).config("limits").subscribe("s") as documents:
        await anext(documents)
        assert acknowledgements(place) == [("s", 0)]
        documents.applied()
        await until(lambda: acknowledgements(place) == [("s", 1)])
        with pytest.raises(ConfigError, match="no document to refuse"):
            documents.refuse("too late")
