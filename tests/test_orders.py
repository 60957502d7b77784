"""Orders, priority, work-bound leadership and locks, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from doyen import LeadershipLost, NotElected, OrderFailed, Session, Term
from doyen.errors import ConfigError
from doyen.events import Elected, Hindered, Lost, Overrun
from doyen.model import leader_key, order_key
from doyen.testing.faults import Faults, Late, RefusedCall
from support import TTL_S, VALID_S, Place, core_of, now, until, virtual


class Candidate:
    """Campaigns over and over; each body lasts until it is cancelled, plus `slow_s`."""

    def __init__(self, session: Session, name: str, *, slow_s: float = 0.0, **options: Any) -> None:
        self.name = name
        self.slow_s = slow_s
        self.terms: list[Term] = []
        self.task = asyncio.create_task(self._live(session, {"name": name, **options}))

    async def _live(self, session: Session, options: Any) -> None:
        async for campaign in session.campaigns("e", **options):
            async with campaign as term:
                self.terms.append(term)
                try:
                    await asyncio.sleep(10_000)
                finally:
                    await asyncio.sleep(self.slow_s)

    async def stop(self) -> None:
        self.slow_s = 0.0
        self.task.cancel()
        await asyncio.wait({self.task})

    @property
    def leads(self) -> bool:
        return bool(self.terms) and self.terms[-1].valid


async def lined_up(place: Place, *names: str, **options: Any) -> list[Candidate]:
    """Candidates in line in this order, each a process of its own; the first leads."""
    candidates = []
    for name in names:
        candidates.append(Candidate(await place.open(), name, **options))
        await until(lambda: len(place.line()) == len(candidates))
    await until(lambda: candidates[0].leads)
    return candidates


@virtual
async def test_an_order_that_is_refused_leaves_no_watch_open(place: Place) -> None:
    """Its watch may be opened when it has been refused already."""
    faults = Faults()
    leader, giver = await lined_up(place, "a"), await place.open(faults)
    leader[0].slow_s = TTL_S / 4
    first = asyncio.create_task(giver.resign("e"))
    await until(lambda: place.server.get(order_key("e")) is not None)
    watched = len(place.server._watchers)
    for _ in range(3):
        faults.next("watch", Late(before_s=0.05))
        with pytest.raises(OrderFailed, match="under way"):
            await giver.resign("e")
    await asyncio.sleep(0.1)
    assert len(place.server._watchers) == watched
    assert sum(map(len, place.server._watchers.values())) <= 3
    await first
    await stop_all(*leader)


async def stop_all(*candidates: Candidate) -> None:
    for candidate in candidates:
        await candidate.stop()


def holders(place: Place) -> list[str]:
    return [event.name for event in place.seen(Elected) if isinstance(event, Elected)]


@virtual
async def test_a_leader_ordered_to_resign_lets_the_next_one_lead(place: Place) -> None:
    a, b = await lined_up(place, "a", "b")
    ops = await place.open()
    assert (await ops.resign("e")).name == "a"
    await until(lambda: b.leads)
    await until(lambda: place.line() == ["b", "a"])
    lost = place.seen(Lost)[0]
    assert isinstance(lost, Lost)
    assert "ordered it to resign" in lost.reason
    await stop_all(b, a)


@virtual
async def test_the_record_stays_until_the_body_has_ended(place: Place) -> None:
    """An order is obeyed, not enforced: a slow body holds its record, and its lease, until it is
    done."""
    a, b = await lined_up(place, "a", "b", slow_s=2 * TTL_S)
    ops = await place.open()
    ordering = asyncio.create_task(ops.resign("e", wait_s=100))
    await until(lambda: not a.leads)
    began = now()
    assert place.holder() == "a"
    await ordering
    assert now() - began == pytest.approx(2 * TTL_S, abs=0.1)
    assert place.seen(Overrun)
    await until(lambda: b.leads)
    await stop_all(b, a)


@virtual
async def test_a_leader_that_ignores_an_order_goes_on(place: Place) -> None:
    """Nothing takes its record from a live holder; the giver hears that it did not work."""
    (a,) = await lined_up(place, "a", slow_s=1000)
    ops = await place.open()
    with pytest.raises(OrderFailed, match="'a' was ordered to give up 'e' and has not done so"):
        await ops.resign("e", wait_s=20)
    assert place.holder() == "a"
    await a.stop()


@virtual
async def test_force_removes_the_record_and_the_holder_notices(place: Place) -> None:
    (a,) = await lined_up(place, "a", slow_s=1000)
    ops = await place.open()
    assert (await ops.resign("e", force=True)).name == "a"
    assert place.holder() is None
    await until(lambda: not a.leads)
    await a.stop()


@virtual
async def test_orders_without_a_leader_fail_with_the_reason(place: Place) -> None:
    ops = await place.open()
    with pytest.raises(OrderFailed, match="'e' has no leader"):
        await ops.resign("e")
    with pytest.raises(OrderFailed, match="'e' has no leader"):
        await ops.transfer("e", to="b")


@virtual
async def test_an_order_to_a_dead_leader_ends_with_its_lease(place: Place) -> None:
    """The order waits for the lease, as everyone does, and harms nobody after."""
    faults = Faults()
    a = Candidate(await place.open(faults), "a")
    await until(lambda: a.leads)
    b = Candidate(await place.open(), "b")
    await until(lambda: len(place.line()) == 2)
    faults.cut()
    ops = await place.open()
    began = now()
    await ops.resign("e", wait_s=100)
    assert now() - began <= TTL_S + 0.1
    await until(lambda: b.leads)
    faults.heal()
    await asyncio.sleep(TTL_S)
    assert b.leads
    await stop_all(a, b)


@virtual
async def test_transfer_elects_the_successor_out_of_turn(place: Place) -> None:
    a, b, c, d = await lined_up(place, "a", "b", "c", "d")
    ops = await place.open()
    leader = await ops.transfer("e", to="d")
    assert (leader.name, leader.token) == ("d", d.terms[0].token)
    assert holders(place) == ["a", "d"]
    assert d.terms[0].token > a.terms[0].token
    await until(lambda: len(place.line()) == 4)
    assert place.line() == ["b", "c", "d", "a"]
    assert [one.leads for one in (a, b, c, d)] == [False, False, False, True]
    await d.stop()
    await until(lambda: b.leads)
    await stop_all(a, b, c)


@virtual
async def test_the_successor_is_ready_before_the_leader_receives_the_order(place: Place) -> None:
    """While the successor cannot answer, the leader leads on, and the order is taken back."""
    (a,) = await lined_up(place, "a")
    faults = Faults()
    b = Candidate(await place.open(faults), "b")
    await until(lambda: len(place.line()) == 2)
    await asyncio.sleep(0.1)
    faults.cut()
    ops = await place.open()
    with pytest.raises(OrderFailed, match="'b' did not confirm within 2 s that it is ready"):
        await ops.transfer("e", to="b", wait_s=2)
    assert a.leads
    faults.heal()
    await asyncio.sleep(3 * TTL_S)
    assert a.leads
    assert len(a.terms) == 1
    await stop_all(b, a)


@virtual
async def test_the_line_goes_on_if_the_successor_dies_in_the_middle(place: Place) -> None:
    a, b = await lined_up(place, "a", "b", slow_s=0.5)
    faults = Faults()
    c = Candidate(await place.open(faults), "c")
    await until(lambda: len(place.line()) == 3)
    ops = await place.open()
    ordering = asyncio.create_task(ops.transfer("e", to="c"))
    await until(lambda: not a.leads)
    faults.cut()
    with pytest.raises(OrderFailed, match="the line went on: 'b' leads"):
        await ordering
    assert b.leads
    await stop_all(a, b, c)


@virtual
async def test_transfer_needs_exactly_one_of_that_name(place: Place) -> None:
    a, b, c = await lined_up(place, "a", "b", "b")
    ops = await place.open()
    with pytest.raises(OrderFailed, match="2 candidates in the line of 'e' are named 'b'"):
        await ops.transfer("e", to="b")
    with pytest.raises(OrderFailed, match="'a' leads 'e' already"):
        await ops.transfer("e", to="a")
    with pytest.raises(OrderFailed, match="'x' is not in the line of 'e'; candidates there: 'b'"):
        await ops.transfer("e", to="x")
    assert a.leads
    await stop_all(c, b, a)


@virtual
async def test_two_orders_at_once(place: Place) -> None:
    """One goes through, the other fails because it is too late or that one is under way."""
    a, b, c = await lined_up(place, "a", "b", "c", slow_s=1.0)
    ops, other = await place.open(), await place.open()
    outcomes = await asyncio.gather(
        ops.transfer("e", to="b"), other.transfer("e", to="c"), return_exceptions=True
    )
    assert sum(isinstance(outcome, OrderFailed) for outcome in outcomes) == 1
    assert "is under way" in str(outcomes[1])
    assert b.leads
    await stop_all(a, b, c)


@virtual
async def test_an_order_does_not_outlive_its_giver(place: Place) -> None:
    (a,) = await lined_up(place, "a", slow_s=1000)
    faults = Faults()
    ops = await place.open(faults)
    ordering = asyncio.create_task(ops.resign("e"))
    await until(lambda: place.server.get(order_key("e")))
    faults.cut()
    ordering.cancel()
    await asyncio.sleep(2 * TTL_S)
    assert place.server.get(order_key("e")) is None
    faults.heal()
    await a.stop()


@virtual
async def test_an_order_meant_for_an_earlier_term_is_ignored_and_replaced(place: Place) -> None:
    a, b = await lined_up(place, "a", "b")
    old = a.terms[0].token
    await a.stop()
    await until(lambda: b.leads)
    place.server.put(order_key("e"), b'{"token":%d,"by":"late"}' % old, None)
    await asyncio.sleep(1)
    assert b.leads
    ops = await place.open()
    assert (await ops.resign("e")).name == "b"
    await b.stop()


@virtual
async def test_priority_is_the_place_in_line(place: Place) -> None:
    a = Candidate(await place.open(), "a")
    await until(lambda: a.leads)
    low = Candidate(await place.open(), "low", priority=1)
    await until(lambda: len(place.line()) == 2)
    high = Candidate(await place.open(), "high", priority=2)
    await until(lambda: len(place.line()) == 3)
    ops = await place.open()
    line = await ops.line("e")
    assert [(c.name, c.priority, c.leads) for c in line] == [
        ("high", 2, False),
        ("low", 1, False),
        ("a", 0, True),
    ]
    await asyncio.sleep(100)
    assert a.leads, "without preempt priority waits its turn"
    await a.stop()
    await until(lambda: high.leads)
    await stop_all(high, low)


@virtual
async def test_preemption_waits_for_the_cooldown_and_does_not_flap(place: Place) -> None:
    a = Candidate(await place.open(), "a")
    await until(lambda: a.leads)
    began = now()
    b = Candidate(await place.open(), "b", priority=5, preempt=True, cooldown_s=30)
    await until(lambda: b.leads)
    assert now() - began == pytest.approx(30, abs=0.1)
    assert b.terms[0].token > a.terms[0].token
    await asyncio.sleep(300)
    assert holders(place) == ["a", "b"], "the one who was preempted does not strike back"
    equal = Candidate(await place.open(), "c", priority=5, preempt=True, cooldown_s=0)
    await asyncio.sleep(100)
    assert b.leads, "of equal priority, who leads goes on"
    await stop_all(equal, b, a)


@virtual
async def test_a_candidate_that_leaves_takes_its_order_with_it(place: Place) -> None:
    """Also from a store that can begin to delete its ticket at once."""
    for session in (await place.open(), await place.open(Faults())):
        (leader,) = await lined_up(place, "a", slow_s=TTL_S)
        favourite = Candidate(session, "b", priority=5, preempt=True, cooldown_s=0)
        await until(lambda: place.server.get(order_key("e")) is not None)
        left_at = now()
        await favourite.stop()
        await until(lambda: place.server.get(order_key("e")) is None)
        assert now() - left_at < TTL_S / 4
        await leader.stop()
        await until(lambda: not place.line())


@virtual
async def test_an_unstable_favourite_is_held_back_by_the_cooldown(place: Place) -> None:
    """A candidate of high priority that keeps losing its lease does not take the others down with
    it: each of them leads for the cooldown at least."""
    faults = Faults()
    steady = Candidate(await place.open(), "steady")
    await until(lambda: steady.leads)
    favourite = Candidate(
        await place.open(faults), "favourite", priority=9, preempt=True, cooldown_s=40
    )
    for _ in range(3):
        await until(lambda: favourite.leads, within_s=100)
        faults.cut()
        await asyncio.sleep(2 * TTL_S)
        faults.heal()
        await until(lambda: steady.leads)
        began = now()
        await until(lambda: not steady.leads, within_s=100)
        assert now() - began >= 39
    await stop_all(favourite, steady)


@virtual
async def test_work_that_stalls_loses_its_term_alone(place: Place) -> None:
    session = await place.open()
    lost_at: list[float] = []

    async def stalls() -> None:
        with pytest.raises(LeadershipLost, match=r"has not called term.beat\(\) for 2 s"):
            async with session.campaign("e", stall_after_s=2) as term:
                for _ in range(10):
                    await asyncio.sleep(1)
                    term.beat()
                began = now()
                try:
                    await asyncio.sleep(10_000)
                finally:
                    lost_at.append(now() - began)

    async with session.campaign("other") as other:
        await stalls()
        assert other.valid
        assert lost_at[0] == pytest.approx(2, abs=0.11)
        async with session.campaign("e", stall_after_s=2, wait_s=10):
            pass


@virtual
async def test_without_renewals_beating_does_not_help(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    began = 0.0
    with pytest.raises(LeadershipLost, match="no renewal was confirmed"):
        async with session.campaign("e", stall_after_s=2) as term:
            began = now()
            faults.cut()
            while True:
                await asyncio.sleep(0.1)
                term.beat()
    assert now() - began <= VALID_S + 3 * TTL_S
    faults.heal()


@virtual
async def test_a_lock_excludes_and_has_a_token(place: Place) -> None:
    a, b = await place.open(), await place.open()
    order: list[str] = []

    async def hold(session: Session, name: str) -> int:
        async with session.lock("m", name=name) as term:
            order.append(f"+{name}")
            await asyncio.sleep(1)
            order.append(f"-{name}")
        return term.token

    first, second = await asyncio.gather(hold(a, "a"), hold(b, "b"))
    assert order == ["+a", "-a", "+b", "-b"]
    assert second > first
    async with a.campaign("m"), a.lock("m"):
        pass
    assert place.server.list("locks") == []


@virtual
async def test_a_lock_is_called_a_lock(place: Place) -> None:
    a, b = await place.open(), await place.open()
    with pytest.raises(LeadershipLost, match="no longer has the lock 'm'"):
        async with a.lock("m") as term:
            with pytest.raises(NotElected, match="'b' did not get the lock 'm' in time"):
                await b.lock("m", name="b", wait_s=0).__aenter__()
            term._lose("of a reason")


@virtual
async def test_a_store_that_cannot_be_used_is_reported_once(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    faults.next("enqueue", RefusedCall(), RefusedCall(), RefusedCall())
    async with session.campaign("e", name="a"):
        (hindered,) = place.seen(Hindered)
        assert isinstance(hindered, Hindered)
        assert "refused" in hindered.error


@virtual
async def test_a_lock_holder_that_is_cut_off_loses_it(place: Place) -> None:
    faults = Faults()
    a, b = await place.open(faults), await place.open()
    with pytest.raises(LeadershipLost):
        async with a.lock("m") as term:
            faults.cut()
            waiting = asyncio.create_task(b.lock("m").__aenter__())
            await term.lost()
            assert not waiting.done(), "stopped before the next one starts"
            await asyncio.sleep(10_000)
    other = await waiting
    assert other.token > term.token
    faults.heal()


@virtual
async def test_options_that_make_no_sense_are_refused(place: Place) -> None:
    session = await place.open()
    for options, message in [
        ({"preempt": True, "recipe": "race"}, "the recipe 'race' ignores priorities"),
        ({"stall_after_s": 0}, "stall_after_s is 0.001 s or more, not 0"),
        ({"stall_after_s": float("nan")}, "stall_after_s is 0.001 s or more, not nan"),
        ({"cooldown_s": -1}, "cooldown_s is 0 s or more, not -1"),
        ({"wait_s": "1"}, "wait_s is 0 s or more, not '1'"),
        ({"priority": 1.5}, "priority is a 32-bit integer, not 1.5"),
        ({"priority": "1"}, "priority is a 32-bit integer"),
        ({"meta": [1]}, "meta maps names to values"),
        ({"meta": None}, "meta maps names to values"),
    ]:
        with pytest.raises(ConfigError, match=message):
            session.campaign("e", **options)  # type: ignore[arg-type]
    assert leader_key("e") != leader_key("e", "locks")


@virtual
async def test_a_leader_still_receives_orders_after_a_failed_read(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong while it looks at its record, it looks again."""
    session, giver = await place.open(), await place.open()
    store = core_of(session).store
    get, wrong = store.get, [ValueError("unforeseen")]

    async def fail_once(key: str) -> Any:
        if wrong:
            raise wrong.pop()
        return await get(key)

    with pytest.raises(LeadershipLost, match="ordered it to resign"):
        async with session.campaign("e"):
            store.get = fail_once  # type: ignore[method-assign]
            order = asyncio.create_task(giver.resign("e"))
            await asyncio.sleep(100)
    await order
    assert not wrong
    assert "unforeseen" in caplog.text
