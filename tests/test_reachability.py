"""Observers learn within a ttl that the store does not answer, and get the present state when it
does again. In virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from doyen import (
    Inventory,
    Leader,
    Line,
    MemberChange,
    Reachable,
    Session,
    SessionClosed,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
    Unreachable,
)
from doyen.election.queries import _Observation
from doyen.lease.keeper import Observer, Reachability
from doyen.manage.config import ConfigDocument
from doyen.manage.shards.routing import ShardMap
from doyen.testing.faults import Faults, LostCall, Odds
from support import TTL_S, Place, core_of, lead_until_set, now, until, virtual

Observe = Callable[[Session], AsyncGenerator[Any, None]]


class Seen:
    """What an observer has got, and when."""

    def __init__(self, stream: AsyncGenerator[Any, None]) -> None:
        self.items: list[Any] = []
        self.times: list[float] = []
        self._task = asyncio.create_task(self._gather(stream))

    async def _gather(self, stream: AsyncGenerator[Any, None]) -> None:
        with contextlib.suppress(SessionClosed):
            async for item in stream:
                self.items.append(item)
                self.times.append(now())

    @property
    def last(self) -> Any:
        return self.items[-1] if self.items else None

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


STREAMS: dict[str, tuple[Observe, type]] = {
    "observe": (lambda session: session.observe("e"), Leader),
    "observe_line": (lambda session: session.observe_line("e"), Line),
    "observe_inventory": (lambda session: session.observe_inventory(), Inventory),
    "observe_members": (lambda session: session.observe_members("g"), MemberChange),
    "observe_shards": (lambda session: session.observe_shards("s"), ShardMap),
    "config.observe": (lambda session: session.config("c").observe(), ConfigDocument),
}


@pytest.mark.parametrize("name", STREAMS)
@virtual
async def test_silence_is_told_within_a_ttl(place: Place, name: str) -> None:
    faults = Faults()
    session, looking = await place.open(), await place.open(faults)
    observe, kind = STREAMS[name]
    tells_changes = kind in (MemberChange, ConfigDocument)
    await session.config("c").set(1)
    async with session.campaign("e", name="a"), session.member("g", name="m"):
        seen = Seen(observe(looking))
        await until(lambda: seen.items)
        await asyncio.sleep(100.0)
        count = len(seen.items)
        assert isinstance(seen.last, kind), "a store that answers is no news"
        known = seen.last

        cut_at, wall = now(), place.clock.wall()
        faults.cut()
        await until(lambda: isinstance(seen.last, Unreachable))
        assert seen.times[-1] - cut_at <= TTL_S
        lost: Any = seen.items[-1]
        assert wall - TTL_S / 2 <= lost.since <= wall, "since the last answer"
        assert lost.error
        assert not lost
        if kind is MemberChange:
            assert [member.name for member in lost.last] == ["m"]
        else:
            assert lost.last == known
        await asyncio.sleep(100.0)
        assert len(seen.items) == count + 1, "it is told once"
        assert looking.as_of == pytest.approx(lost.since)

        healed_at = now()
        faults.heal()
        await until(lambda: len(seen.items) > count + 1)
        assert seen.times[-1] - healed_at <= TTL_S
        assert isinstance(seen.last, Reachable) if tells_changes else seen.last == known
        await asyncio.sleep(100.0)
        assert len(seen.items) == count + 2
    await seen.stop()


@pytest.mark.parametrize("name", STREAMS)
@virtual
async def test_an_observer_whose_own_calls_fail_is_told(place: Place, name: str) -> None:
    """As on a full disk: reads are answered, and no watch can be registered."""
    session, looking = await place.open(), await place.open()
    observe, kind = STREAMS[name]
    await session.config("c").set(1)
    async with session.campaign("e", name="a"), session.member("g", name="m"):
        store, asked_at = core_of(looking).store, now()
        watch, full = store.watch, True

        async def watch_if_space(scope: str, notify: Callable[[], None]) -> Any:
            if full:
                raise StoreUnavailable("no space left")
            return await watch(scope, notify)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "watch", watch_if_space)
            seen = Seen(observe(looking))
            await until(lambda: seen.items)
            assert isinstance(seen.last, Unreachable)
            assert 2 * TTL_S <= seen.times[-1] - asked_at <= 2.5 * TTL_S
            assert seen.last.error == "no space left"
            await asyncio.sleep(100.0)
            assert len(seen.items) == 1, "it is told once"
            full = False
            await until(lambda: isinstance(seen.last, kind))
            if kind in (MemberChange, ConfigDocument):
                assert isinstance(seen.items[1], Reachable)
            await asyncio.sleep(100.0)
            assert sum(isinstance(each, Unreachable) for each in seen.items) == 1
    await seen.stop()


@virtual
async def test_what_changed_meanwhile_is_told_when_the_store_answers(place: Place) -> None:
    faults, stop = Faults(), asyncio.Event()
    session, looking = await place.open(), await place.open(faults)
    seen = Seen(looking.observe("e"))
    await until(lambda: seen.items)
    assert seen.last is None
    faults.cut()
    leading = asyncio.create_task(lead_until_set(session, stop, name="a"))
    await until(lambda: len(seen.items) == 2)
    assert isinstance(seen.items[-1], Unreachable)
    faults.heal()
    await until(lambda: seen.last)
    assert [getattr(item, "name", None) for item in seen.items] == [None, None, "a"]
    stop.set()
    await leading
    await seen.stop()


@pytest.mark.parametrize("name", STREAMS)
@virtual
async def test_an_observer_of_a_store_that_refuses_to_answer_gets_the_error(
    place: Place, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that waits for a notification: nothing will notify it any more."""
    session = await place.open()
    seen = Seen(STREAMS[name][0](session))
    await asyncio.sleep(2 * TTL_S)

    async def refuse(*_: object, **__: object) -> None:
        raise StoreUnusable("the file was replaced")

    for call in ("get", "list"):
        monkeypatch.setattr(core_of(session).store, call, refuse)
    await asyncio.wait({seen._task}, timeout=TTL_S)
    assert seen._task.done()
    with pytest.raises(StoreUnusable, match="replaced"):
        await seen._task


@virtual
async def test_as_of_is_the_time_of_the_last_check(place: Place) -> None:
    looking = await place.open()
    assert looking.as_of is None
    seen = Seen(looking.observe("e"))
    for _ in range(100):
        await asyncio.sleep(1.0)
        assert looking.as_of is not None
        assert place.clock.wall() - looking.as_of <= TTL_S / 3 + 0.01
    assert seen.items == [None], "although nothing has changed"
    await seen.stop()
    before = looking.as_of
    await asyncio.sleep(100.0)
    assert looking.as_of == before, "nobody observes, and nothing is asked"


@virtual
async def test_many_observers_cost_one_check(place: Place) -> None:
    faults = Faults()
    looking = await place.open(faults)
    observers = [Seen(looking.observe(f"e{number}")) for number in range(50)]
    await until(lambda: all(each.items for each in observers))
    faults.trace.clear()
    await asyncio.sleep(10 * TTL_S)
    assert len(faults.trace) <= 31
    assert len({line.split()[1] for line in faults.trace}) >= 29, "each has its turn"
    faults.cut()
    await asyncio.sleep(TTL_S)
    assert all(isinstance(each.last, Unreachable) for each in observers)
    faults.heal()
    await asyncio.sleep(1.0)
    assert all(each.last is None for each in observers)
    for each in observers:
        await each.stop()


@virtual
async def test_an_observer_that_begins_in_an_outage_is_told(place: Place) -> None:
    faults = Faults()
    looking = await place.open(faults)
    faults.cut()
    first = Seen(looking.observe("e"))
    await asyncio.sleep(TTL_S + 0.01)
    assert isinstance(first.last, Unreachable)
    second = Seen(looking.observe("f"))
    await asyncio.sleep(0.01)
    assert isinstance(second.last, Unreachable), "it is known already"
    faults.heal()
    await until(lambda: first.last is None and second.last is None)
    await first.stop()
    await second.stop()


@virtual
async def test_a_suspended_machine_asks_before_it_tells(place: Place) -> None:
    looking = await place.open()
    seen = Seen(looking.observe("e"))
    await until(lambda: seen.items)
    place.clock.suspend(3600.0)
    await asyncio.sleep(10.0)
    assert seen.items == [None]
    await seen.stop()


@pytest.mark.parametrize("moment", ["while a check is under way", "after one has failed"])
@virtual
async def test_a_machine_that_was_suspended_in_a_bad_moment_tells_nothing(
    place: Place, moment: str
) -> None:
    """The answer that was under way is lost, or one check had failed shortly before."""
    faults = Faults()
    looking = await place.open(faults)
    seen = Seen(looking.observe("e"))
    await until(lambda: seen.items)
    checks = len(faults.trace)
    faults.next("get", LostCall(raises=moment != "while a check is under way"))
    await until(lambda: len(faults.trace) > checks)
    await asyncio.sleep(0.01)
    place.clock.suspend(3600.0)
    await asyncio.sleep(10.0)
    assert seen.items == [None]
    faults.cut()
    await asyncio.sleep(1.5 * TTL_S)
    assert isinstance(seen.last, Unreachable), "an outage is told as before"
    assert seen.last.since <= place.clock.wall() - TTL_S
    await seen.stop()


UNRELIABLE = Odds(lost=0.3, unanswered=0.1, refused=0.2, late=0.3, delay_s=0.8)


@pytest.mark.parametrize("seed", [*range(20), 35, 75, 101, 125, 126])
@virtual
async def test_an_unreliable_store_is_not_silent(place: Place, seed: int) -> None:
    """Whatever is lost: an observer is never silent about more than a ttl without an answer, and
    never says that a store is unreachable that has answered within the last ttl."""
    faults = Faults(seed, UNRELIABLE)
    looking = await place.open(faults)
    await oracle(place, looking, faults)


async def oracle(place: Place, looking: Session, faults: Faults) -> None:
    answered = [place.clock.now()]
    tried = [place.clock.now()]
    """When the observer was told that the store answers, and when its calls failed since."""
    calls = core_of(looking).calls
    reachability = calls.reachability
    note, note_failure = reachability.answered, reachability.failed

    def noted(sent_at: float) -> None:
        answered.append(sent_at)
        if reachability.lost:
            tried.append(place.clock.now())
        note(sent_at)

    def noted_failure(observer: Observer, error: StoreError) -> None:
        tried.append(place.clock.now())
        note_failure(observer, error)

    reachability.answered = noted  # type: ignore[method-assign]
    reachability.failed = noted_failure  # type: ignore[method-assign]
    attempt_s = calls.timing.request_timeout_s + calls.timing.retry_pause_s(1.0)
    seen = Seen(looking.observe("e"))
    for step in range(400):
        if step % 100 == 50:
            faults.cut()
        if step % 100 == 70:
            faults.heal()
        await asyncio.sleep(0.1)
        silent_s = place.clock.now() - max(answered)
        lost = isinstance(seen.last, Unreachable)
        assert lost or silent_s <= TTL_S + 1e-6, f"{silent_s} s of silence were not told"
        if lost and silent_s < TTL_S - 1e-6:
            # It has answered. The observer reads again, however often that fails.
            assert place.clock.now() - max(tried) <= attempt_s + 1e-6, "it does not read again"
    await seen.stop()


def test_the_oracle_sees_an_observer_that_waits_for_notifications_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def idle(self: Reachability) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Reachability, "_check", idle)

    @virtual
    async def test(place: Place) -> None:
        faults = Faults(1)
        await oracle(place, await place.open(faults), faults)

    with pytest.raises(AssertionError, match="of silence were not told"):
        test()


def test_the_oracle_sees_an_observer_that_does_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Observation, "reachable", lambda self: None)

    @virtual
    async def test(place: Place) -> None:
        faults = Faults(3, UNRELIABLE)
        await oracle(place, await place.open(faults), faults)

    with pytest.raises(AssertionError, match="it does not read again"):
        test()
