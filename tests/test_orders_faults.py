"""Orders, one fault at a time: what the swarm has found, in readable form.

Each case is one in which an order was lost, taken for another, or left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from doyen import NotElected, OrderFailed
from doyen.election.candidate import Claiming
from doyen.errors import OutcomeUnknown, StoreError
from doyen.model import Claim, Order, leader_key, line_key, order_key, ready_key
from doyen.testing.faults import Faults, Late, Stray, Unanswered
from support import TTL_S, Place, core_of, now, run_in_place, until, virtual
from test_orders import Candidate, holders, lined_up, stop_all


def attempt_of(place: Place, name: str) -> str:
    claims = [Claim.decode(ticket.value) for ticket in place.server.list(line_key("e"))]
    return next(claim.attempt for claim in claims if claim.name == name)


@virtual
async def test_transfer_by_a_leader_elected_out_of_turn(place: Place) -> None:
    """Others stand before it in the line; none of them overtakes the successor."""
    a, b, c, d = await lined_up(place, "a", "b", "c", "d")
    ops = await place.open()
    for successor in ("d", "c", "a", "d", "b"):
        await ops.transfer("e", to=successor)
        await until(lambda: len(place.line()) == 4)
    assert holders(place) == ["a", "d", "c", "a", "d", "b"]
    await stop_all(a, b, c, d)


@virtual
async def test_transfer_past_candidates_of_a_higher_rank(place: Place) -> None:
    (a,) = await lined_up(place, "a")
    high = Candidate(await place.open(), "high", priority=9)
    await until(lambda: len(place.line()) == 2)
    low = Candidate(await place.open(), "low", priority=-1)
    await until(lambda: len(place.line()) == 3)
    ops = await place.open()
    began = now()
    await ops.transfer("e", to="low")
    assert now() - began < 0.1
    await until(lambda: len(place.line()) == 3)
    assert place.line() == ["high", "a", "low"]
    assert [one.name for one in await ops.line("e")] == ["high", "a", "low"]
    await stop_all(low, high, a)


@virtual
async def test_the_line_waits_for_a_slow_successor(place: Place) -> None:
    """Who is first in line, and was so long before, makes way for a while."""
    (a,) = await lined_up(place, "a", slow_s=0.5)
    faults = Faults()
    successor = Candidate(await place.open(faults), "successor", priority=-1)
    await until(lambda: len(place.line()) == 2)
    first = Candidate(await place.open(), "first", priority=1)
    await until(lambda: place.line() == ["first", "a", "successor"])
    ops = await place.open()
    ordering = asyncio.create_task(ops.transfer("e", to="successor"))
    await until(lambda: not a.leads)
    faults.next("create", Late(before_s=0.9))
    began = now()
    assert (await ordering).name == "successor"
    assert 1.3 < now() - began < 1.5
    assert successor.leads
    await stop_all(successor, first, a)


@virtual
async def test_a_candidate_that_yields_still_gives_up_in_time(place: Place) -> None:
    (a,) = await lined_up(place, "a", slow_s=0.5)
    faults = Faults()
    successor = Candidate(await place.open(faults), "successor")
    await until(lambda: len(place.line()) == 2)
    session, ops = await place.open(), await place.open()
    waiting = asyncio.create_task(session.campaign("e", priority=1, wait_s=1.0).__aenter__())
    await until(lambda: len(place.line()) == 3)
    began = now()
    ordering = asyncio.create_task(ops.transfer("e", to="successor"))
    await until(lambda: not a.leads)
    faults.next("create", Late(before_s=0.9))
    with pytest.raises(NotElected, match="was not elected to 'e' in time"):
        await waiting
    assert now() - began == pytest.approx(1.0, abs=0.05)
    assert place.holder() is None
    assert (await ordering).name == "successor"
    await stop_all(successor, a)


@virtual
async def test_the_line_goes_on_past_the_successor_of_a_leader_elected_out_of_turn(
    place: Place,
) -> None:
    a, b, c = await lined_up(place, "a", "b", "c", slow_s=0.2)
    ops = await place.open()
    await ops.transfer("e", to="c")
    faults = Faults()
    d = Candidate(await place.open(faults), "d")
    await until(lambda: len(place.line()) == 4)
    ordering = asyncio.create_task(ops.transfer("e", to="d"))
    await until(lambda: not c.leads)
    faults.cut()
    with pytest.raises(OrderFailed, match="the line went on: 'b' leads"):
        await ordering
    assert b.leads
    faults.heal()
    await stop_all(a, b, c, d)


@virtual
async def test_an_order_that_comes_before_the_leader_knows_that_it_leads(place: Place) -> None:
    """Its record stands, and the answer that says so is still on its way."""
    faults = Faults()
    a, b = Candidate(await place.open(faults), "a"), None
    faults.next("create", Late(after_s=0.5))
    await until(lambda: place.holder() == "a")
    b = Candidate(await place.open(), "b")
    ops = await place.open()
    assert not a.terms
    assert (await ops.resign("e")).name == "a"
    await until(lambda: b.leads)
    await stop_all(b, a)


@virtual
async def test_a_record_that_goes_before_the_leader_knows_that_it_leads(place: Place) -> None:
    faults = Faults()
    a = Candidate(await place.open(faults), "a")
    faults.next("create", Late(after_s=0.5))
    await until(lambda: place.holder() == "a")
    place.server.delete(leader_key("e"))
    await until(lambda: a.terms)
    await asyncio.sleep(0.1)
    record = place.server.get(leader_key("e"))
    assert record is not None
    assert a.leads
    assert a.terms[-1].token == record.revision
    await a.stop()


@virtual
async def test_the_same_order_given_twice_at_once(place: Place) -> None:
    """Of two who ask for the same thing in the same name, neither takes back the other's."""
    a, b = await lined_up(place, "a", "b", slow_s=2.0)
    ops, other = await place.open(), await place.open()
    first = asyncio.create_task(ops.resign("e"))
    await until(lambda: place.server.get(order_key("e")))
    with pytest.raises(OrderFailed, match="is under way"):
        await other.resign("e")
    assert place.server.get(order_key("e"))
    assert (await first).name == "a"
    await until(lambda: b.leads)
    await stop_all(b, a)


@virtual
async def test_an_order_that_arrives_after_its_giver_has_given_up(place: Place) -> None:
    """The giver's session lives on, and nothing of the order does."""
    (a,) = await lined_up(place, "a")
    faults = Faults()
    ops = await place.open(faults)
    faults.next("create", Stray(after_s=TTL_S / 3))
    with pytest.raises(StoreError):
        await ops.resign("e")
    await asyncio.sleep(10 * TTL_S)
    assert place.server.get(order_key("e")) is None
    assert a.leads
    assert (await ops.resign("e")).name == "a"
    await a.stop()


@virtual
async def test_an_order_whose_giver_loses_its_lease_fails(place: Place) -> None:
    (a,) = await lined_up(place, "a", slow_s=1000)
    faults = Faults()
    ops = await place.open(faults)
    ordering = asyncio.create_task(ops.resign("e", wait_s=100))
    await until(lambda: place.server.get(order_key("e")))
    (keepalive,) = core_of(ops).leases._own
    place.server.revoke(keepalive.lease.id)
    began = now()
    with pytest.raises(OrderFailed, match="ended with the lease that it was bound to"):
        await ordering
    assert now() - began < TTL_S
    await a.stop()


@virtual
async def test_an_order_for_an_earlier_term_blocks_no_other(place: Place) -> None:
    """A leader removes it; a claim of priority that was refused for it is made again."""
    a, b = await lined_up(place, "a", "b")
    old = a.terms[0].token
    lease = place.server.grant(1000)
    faults = Faults()
    await a.stop()
    await until(lambda: b.leads)
    place.server.create(order_key("e"), Order(old, "late").encode(), lease.id)
    await until(lambda: place.server.get(order_key("e")) is None)
    favourite = Candidate(await place.open(faults), "c", priority=1, preempt=True, cooldown_s=5)
    await until(lambda: favourite.leads)
    place.server.revoke(lease.id)
    await stop_all(favourite, b)


@virtual
async def test_a_claim_of_priority_waits_for_another_order_to_end(place: Place) -> None:
    """That order's successor never becomes ready, and it is taken back: then the claim is made."""
    (a,) = await lined_up(place, "a")
    deaf = Faults()
    b = Candidate(await place.open(deaf), "b")
    await until(lambda: len(place.line()) == 2)
    await asyncio.sleep(0.1)
    deaf.cut()
    favourite = Candidate(await place.open(), "f", priority=1, preempt=True, cooldown_s=1)
    ops = await place.open()
    with pytest.raises(OrderFailed, match="did not confirm within 3 s that it is ready"):
        await ops.transfer("e", to="b", wait_s=3)
    await until(lambda: favourite.leads, within_s=1)
    deaf.heal()
    await stop_all(favourite, a, b)


@virtual
async def test_a_successor_with_two_tickets_counts_once(place: Place) -> None:
    """An answer was lost, and the request behind it came late."""
    (a,) = await lined_up(place, "a")
    faults = Faults()
    faults.next("enqueue", Stray(after_s=TTL_S / 3))
    b = Candidate(await place.open(faults), "b")
    await until(lambda: place.line() == ["a", "b", "b"])
    ops = await place.open()
    assert [one.name for one in await ops.line("e")] == ["a", "b"]
    assert (await ops.transfer("e", to="b")).name == "b"
    await stop_all(b, a)


@virtual
async def test_readiness_for_an_earlier_order_does_not_count(place: Place) -> None:
    """The ready marker came late, when that order was gone. Now the candidate cannot be reached."""
    (a,) = await lined_up(place, "a")
    faults = Faults()
    b = Candidate(await place.open(faults), "b")
    await until(lambda: len(place.line()) == 2)
    await asyncio.sleep(0.1)
    ops = await place.open()
    faults.next("create", Stray(after_s=TTL_S / 3))
    with pytest.raises(OrderFailed, match="did not confirm"):
        await ops.transfer("e", to="b", wait_s=0.5)
    await until(lambda: place.server.get(ready_key("e", attempt_of(place, "b"))))
    faults.cut()
    with pytest.raises(OrderFailed, match="did not confirm"):
        await ops.transfer("e", to="b", wait_s=0.5)
    assert a.leads
    faults.heal()
    await asyncio.sleep(0.1)
    assert (await ops.transfer("e", to="b")).name == "b"
    await stop_all(b, a)


@virtual
async def test_a_ready_marker_is_removed_although_its_answer_was_lost(place: Place) -> None:
    deaf, faults = Faults(), Faults()
    a = Candidate(await place.open(deaf), "a")
    await until(lambda: a.leads)
    b = Candidate(await place.open(faults), "b")
    await until(lambda: len(place.line()) == 2)
    await asyncio.sleep(0.1)
    deaf.cut()
    ops = await place.open()
    faults.next("create", Unanswered())
    ready = ready_key("e", attempt_of(place, "b"))
    with pytest.raises(OrderFailed, match="was ordered to give up 'e' and has not done so"):
        await ops.transfer("e", to="b", wait_s=0.1)
    assert place.server.get(ready)
    deaf.heal()
    await until(lambda: place.server.get(ready) is None, within_s=3)
    assert a.leads
    await stop_all(b, a)


@virtual
async def test_a_candidate_no_longer_first_recognises_its_late_record(place: Place) -> None:
    """Its creation was sent at the head of the line, refused at the second try, and landed when
    somebody of a higher rank had come before. Everyone would wait for one who does not know."""
    faults, late = Faults(), Faults()
    (a,) = await lined_up(place, "a")
    b = Candidate(await place.open(faults), "b")
    await until(lambda: len(place.line()) == 2)
    await asyncio.sleep(0.1)
    faults.next("create", Stray(after_s=5.0))
    racer = Candidate(await place.open(), "r", recipe="race")
    await asyncio.sleep(0.1)
    await a.stop()
    await until(lambda: racer.leads)
    await asyncio.sleep(2.0)
    high = Candidate(await place.open(late), "high", priority=9)
    await until(lambda: place.line() == ["high", "b"])
    await asyncio.sleep(0.1)
    late.cut()
    await asyncio.sleep(2.0)
    await racer.stop()
    await until(lambda: b.leads, within_s=3)
    late.heal()
    await stop_all(b, high)


def led_with_a_record_given_back(patch: pytest.MonkeyPatch) -> None:
    """A candidate whose deletion of its record was not answered leads with that record."""
    give_back = Claiming._give_back

    async def forget(self: Claiming) -> None:
        try:
            await give_back(self)
        except OutcomeUnknown:
            self._giving_back, self._created, self._given_back = False, True, 0
            raise

    patch.setattr(Claiming, "_give_back", forget)


@pytest.mark.parametrize("broken", [None, led_with_a_record_given_back])
def test_nobody_leads_with_a_record_that_it_has_begun_to_delete(
    broken: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was created in the moment in which the leader left, but a candidate of higher priority has
    come before. The answer to the deletion is lost, and it is carried out late."""

    async def trial(place: Place) -> bool:
        faults, late = Faults(), Faults()
        (a,) = await lined_up(place, "a")
        b = Candidate(await place.open(faults), "b")
        await until(lambda: len(place.line()) == 2)
        high = Candidate(await place.open(late), "high", priority=9)
        await until(lambda: place.line() == ["high", "a", "b"])
        await asyncio.sleep(0.1)
        late.cut()
        faults.next("delete", Stray(after_s=5.0))
        await a.stop()
        await until(lambda: place.holder() == "b")
        await asyncio.sleep(2.0)
        too_early = b.leads
        late.heal()
        if not too_early:
            await until(lambda: high.leads)
        await stop_all(b, high)
        return too_early

    if broken is not None:
        broken(monkeypatch)
    seen: list[bool] = []

    async def whole(place: Place) -> None:
        seen.append(await trial(place))

    run_in_place(whole)
    assert seen == [broken is not None]


@virtual
async def test_a_leader_elected_out_of_turn_lets_in_those_ahead(place: Place) -> None:
    """Nobody else leads in between, not even for a moment."""
    a, b, c = await lined_up(place, "a", "b", "c")
    ops = await place.open()
    await ops.transfer("e", to="c")
    await until(lambda: place.line() == ["b", "c", "a"])
    await c.stop()
    await until(lambda: b.leads)
    await asyncio.sleep(1.0)
    assert holders(place) == ["a", "c", "b"]
    await stop_all(b, a)
