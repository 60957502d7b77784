"""Sessions: renewals, doubt and loss; lines and races; observers; closing; settings.

In virtual time, but for processes that must really end; doyen's own threads are on trial in
`test_session_threads`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

import doyen
from doyen import ConfigError, Leader, LeadershipLost, NotElected, SessionClosed, Term, TermState
from doyen.election.options import Recipe
from doyen.events import (
    Elected,
    Granted,
    LeaseLost,
    Lost,
    Overrun,
    Renewed,
    Resigned,
    Unsure,
    Waiting,
)
from doyen.lease.runtime import ThreadRuntime
from doyen.model import Entry, Lease
from doyen.stores.port import Store
from doyen.testing import run_virtual
from doyen.testing.faults import Faults, FaultyStore, Late, RefusedCall, Stray, Unanswered
from support import (
    STOP_BUDGET_S,
    TTL_S,
    VALID_S,
    Place,
    core_of,
    gather_leaders,
    keepalive_of,
    lead_until_set,
    now,
    soon,
    until,
    virtual,
)
from swarm import OwnClock

# Renewals, doubt and loss.


@virtual
async def test_a_lease_is_renewed_for_as_long_as_it_takes(place: Place) -> None:
    session = await place.open()
    async with session.campaign("e") as term:
        for _ in range(1000):
            await asyncio.sleep(1.0)
            assert term.remaining_s > VALID_S - 0.4 * TTL_S - 0.01
    assert 1000 / (0.4 * TTL_S) < len(place.seen(Renewed)) < 1000 / (TTL_S / 4)


@virtual
async def test_valid_ends_at_the_deadline_and_the_states_tell_the_way(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    states: list[tuple[float, TermState]] = []
    with pytest.raises(LeadershipLost, match="no renewal was confirmed in time"):
        async with session.campaign("e") as term:
            faults.cut()
            while True:
                if not states or states[-1][1] is not term.state:
                    states.append((now(), term.state))
                await asyncio.sleep(0.001)
    states.append((now(), term.state))
    assert [state for _, state in states] == [TermState.LEADER, TermState.UNSURE, TermState.LOST]
    assert 0.8 * TTL_S / 3 < states[1][0] - 1.0 < 1.2 * TTL_S / 3 + 0.01
    assert states[2][0] == pytest.approx(VALID_S, abs=0.002)
    assert term.ended_at == pytest.approx(VALID_S)


@virtual
async def test_doubt_passes_when_renewals_come_back(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    async with session.campaign("e") as term:
        faults.cut()
        await until(lambda: term.state is TermState.UNSURE)
        assert term.valid
        faults.heal()
        await until(lambda: term.state is TermState.LEADER)
        await asyncio.sleep(10 * TTL_S)
        assert term.valid


@virtual
async def test_the_stream_of_events_is_in_order(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    async with session.campaign("e", name="a"):
        await asyncio.sleep(TTL_S / 2)
    with pytest.raises(LeadershipLost):
        async with session.campaign("e", name="a"):
            faults.cut()
            await asyncio.sleep(100)
    faults.heal()
    async with session.campaign("e", name="a"):
        pass
    kinds = [type(record.event) for record in place.events]
    story = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] is not kind]
    assert story == [
        *(Granted, Elected, Renewed, Resigned),
        *(Elected, Unsure, Lost, LeaseLost),
        *(Granted, Waiting, Elected, Resigned),  # for the old lease, which could not be given back
    ]
    assert [record.at for record in place.events] == sorted(record.at for record in place.events)
    lost, lease_lost = place.seen(Lost, LeaseLost)
    assert isinstance(lost, Lost)
    assert isinstance(lease_lost, LeaseLost)
    assert lost.ended_at == lease_lost.ended_at
    leases = [event.lease for event in place.seen(Granted) if isinstance(event, Granted)]
    tokens = [event.token for event in place.seen(Elected) if isinstance(event, Elected)]
    assert len(set(leases)) == 2
    assert tokens == sorted(set(tokens))


@virtual
async def test_a_failing_sink_costs_no_lease(place: Place) -> None:
    def sink(record: object) -> None:
        raise RuntimeError("disk full")

    session = await place.open(sinks=(sink,))
    async with session.campaign("e") as term:
        await asyncio.sleep(10 * TTL_S)
        assert term.valid


@virtual
async def test_a_suspended_machine_knows_at_once_that_it_has_lost(place: Place) -> None:
    """Timers slept with it; the clock did not. Meanwhile another leads: never both are valid."""
    sleeper, other = await place.open(), await place.open()
    terms: list[Term] = []
    woken: list[float] = []

    async def successor() -> None:
        async with other.campaign("e", name="b") as term:
            terms.append(term)
            await asyncio.sleep(1)

    with pytest.raises(LeadershipLost):
        async with sleeper.campaign("e", name="a") as term:
            task = asyncio.create_task(successor())
            await asyncio.sleep(TTL_S)
            assert term.valid
            place.clock.suspend(TTL_S)
            assert not term.valid  # at the very first instruction after waking
            woken.append(now())
            await asyncio.sleep(100)
    assert now() - woken[0] <= 0.1 + 1e-6
    await task
    assert terms[0].token > term.token


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
@virtual
async def test_the_wall_clock_may_jump(place: Place, step_s: float) -> None:
    session = await place.open()
    async with session.campaign("e") as term:
        for _ in range(10):
            place.clock.step_wall(step_s)
            before = term.remaining_s
            await asyncio.sleep(0.1)
            assert before - 0.2 < term.remaining_s
        await asyncio.sleep(10 * TTL_S)
        assert term.valid
    assert place.seen(Lost) == []


@virtual
async def test_after_a_loss_a_new_lease_serves_and_the_old_is_given_back(place: Place) -> None:
    session = await place.open()
    with pytest.raises(LeadershipLost):
        async with session.campaign("e", name="a") as first:
            lease = keepalive_of(session).lease.id
            keepalive_of(session).lose("the test says so")
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(0.5)
                assert lease in place.server._leases  # not while the body still runs
    await asyncio.sleep(0.1)
    assert lease not in place.server._leases
    async with session.campaign("e", name="a") as second:
        assert second.token > first.token
        assert keepalive_of(session).lease.id != lease


@virtual
async def test_one_term_ended_by_others_leaves_the_rest_of_the_session_alone(place: Place) -> None:
    session = await place.open()
    async with session.campaign("kept") as kept:
        with pytest.raises(LeadershipLost, match="its record was removed"):
            async with session.campaign("taken"):
                place.server.delete("elections/taken/leader")
                await asyncio.sleep(100)
        await asyncio.sleep(TTL_S)
        assert kept.valid


# Lines, races, names.


@virtual
async def test_a_line_is_served_in_order_of_rank_and_arrival(place: Place) -> None:
    order: list[str] = []

    async def candidate(name: str, rank: int) -> None:
        session = await place.open()
        async with session.campaign("e", name=name, priority=rank):
            order.append(name)
            await asyncio.sleep(1)

    tasks = []
    for name, rank in [("a", 0), ("b", 0), ("c", 0), ("d", 5), ("e", -1), ("f", 5)]:
        tasks.append(asyncio.create_task(candidate(name, rank)))
        await until(lambda name=name: name in place.line())  # type: ignore[misc]
    await asyncio.gather(*tasks)
    assert order == ["a", "d", "f", "b", "c", "e"]


@pytest.mark.parametrize("recipe", ["line", "race"])
@virtual
async def test_tasks_of_one_session_take_turns(place: Place, recipe: Recipe) -> None:
    """Concurrent campaigns of one election on one session queue up like any others."""
    session = await place.open()
    inside: list[str] = []
    tokens: list[int] = []

    async def candidate(name: str) -> None:
        async with session.campaign("e", name=name, recipe=recipe) as term:
            inside.append(name)
            assert len(inside) == 1
            tokens.append(term.token)
            await asyncio.sleep(1)
            inside.remove(name)

    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(candidate(name))
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 4
    assert now() == 4


@virtual
async def test_two_candidates_may_share_a_name(place: Place) -> None:
    first, second = await place.open(), await place.open()
    stop = asyncio.Event()
    a = asyncio.create_task(lead_until_set(first, stop, name="same"))
    await until(lambda: place.holder() == "same")
    b = asyncio.create_task(lead_until_set(second, stop, name="same"))
    await until(lambda: place.line() == ["same", "same"])
    stop.set()
    terms = [await a, await b]
    assert terms[0].token < terms[1].token


@virtual
async def test_the_two_recipes_meet_at_the_record(place: Place) -> None:
    inside = 0

    async def candidate(recipe: Recipe) -> None:
        nonlocal inside
        session = await place.open()
        for _ in range(3):
            async with session.campaign("e", recipe=recipe):
                inside += 1
                assert inside == 1
                await asyncio.sleep(1)
                inside -= 1

    recipes: list[Recipe] = ["line", "race", "line", "race"]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for recipe in recipes:
            group.create_task(candidate(recipe))


@virtual
async def test_a_ticket_removed_by_another_client_is_taken_anew(place: Place) -> None:
    a, b = await place.open(), await place.open()
    stop = asyncio.Event()
    leading = asyncio.create_task(lead_until_set(a, stop, name="a"))
    await until(lambda: place.line() == ["a"])
    waiting = asyncio.create_task(lead_until_set(b, stop, name="b"))
    await until(lambda: place.line() == ["a", "b"])
    place.server.delete(place.server.list("elections/e/line")[1].key)
    assert place.line() == ["a"]
    stop.set()
    assert (await leading).token < (await waiting).token


@virtual
async def test_without_its_ticket_a_candidate_still_knows_its_own_record(place: Place) -> None:
    """Its create is under way without an answer, somebody removes its ticket, and the record
    appears while it takes another: it must not wait for itself."""
    faults = Faults()
    session = await place.open(faults)
    faults.next("create", Stray(after_s=1.5))
    faults.next("enqueue", Late(), Late(before_s=0.5))
    soon(0.5, lambda: place.server.delete(place.server.list("elections/e/line")[0].key))
    async with asyncio.timeout(TTL_S), session.campaign("e", name="a") as term:
        assert place.holder() == "a"
        assert term.valid


@virtual
async def test_no_candidate_waits_behind_a_ticket_that_another_has_lost_sight_of(
    place: Place,
) -> None:
    """The answer to an enqueue is lost. It is carried out after the candidate has looked for its
    ticket, and before it takes another; a second candidate joins the line between the two."""
    faults = Faults()
    a, b = await place.open(faults), await place.open()
    faults.next("enqueue", Stray(after_s=TTL_S / 4), Late(before_s=TTL_S / 8))
    stop = asyncio.Event()
    first = asyncio.create_task(lead_until_set(a, stop, name="a"))
    await until(lambda: place.line() == ["a"])
    second = asyncio.create_task(lead_until_set(b, stop, name="b"))
    await until(lambda: place.line()[:2] == ["a", "b"])
    await until(lambda: place.holder() == "a", within_s=TTL_S)
    stop.set()
    assert (await first).token < (await second).token


def forgetful(store: Store) -> Store:
    store.capabilities = replace(store.capabilities, durable=False)
    return store


def resurrect(place: Place, entries: list[Entry]) -> None:
    """What a failover does that loses the deletion of these."""
    for entry in entries:
        line = "elections/e/line" if "/line/" in entry.key else None
        place.server._insert(entry.key, entry.value, entry.lease, line)


async def resign(place: Place, session: doyen.Session, recipe: Recipe, of: str) -> list[Entry]:
    """Lead `e` for a moment; the record, the ticket or both that were deleted then."""
    async with session.campaign("e", name="a", recipe=recipe):
        record = place.server.get("elections/e/leader")
        tickets = place.server.list("elections/e/line")
    assert record is not None
    return {"record": [record], "ticket": tickets, "both": [*tickets, record]}[of]


LOST_DELETIONS = pytest.mark.parametrize(
    ("recipe", "of"), [("line", "record"), ("line", "ticket"), ("line", "both"), ("race", "record")]
)


@LOST_DELETIONS
@pytest.mark.parametrize("options", [{}, {"stall_after_s": 1000.0}])
@virtual
async def test_a_candidate_does_not_wait_for_its_own_former_record(
    place: Place, recipe: Recipe, of: str, options: dict[str, Any]
) -> None:
    """A failover has lost the confirmed deletion of a record, a ticket or both: they stand again
    under a lease that lives. Candidates of the same session that come to them delete them."""
    session, other = await place.open(wrap=forgetful), await place.open()
    deleted = await resign(place, session, recipe, of)
    resurrect(place, deleted)
    leading = session.campaign("e", name="a", recipe=recipe, **options)
    async with asyncio.timeout(TTL_S / 2):
        term = await leading.__aenter__()
    assert term.token > deleted[-1].revision
    waiting = asyncio.create_task(lead_until_set(other, asyncio.Event(), name="b"))
    await asyncio.sleep(10 * TTL_S)
    assert term.valid
    assert place.holder() == "a"
    await leading.__aexit__(None, None, None)
    await until(lambda: place.holder() == "b")
    waiting.cancel()


@LOST_DELETIONS
@virtual
async def test_a_session_checks_that_what_it_deleted_has_not_come_back(
    place: Place, recipe: Recipe, of: str
) -> None:
    """As above, and the session has no candidate that would come to what stands there. Its other
    terms, on the same lease, go on."""
    faults = Faults()
    session, other = await place.open(faults, wrap=forgetful), await place.open()
    async with session.campaign("another", name="a") as kept:
        deleted = await resign(place, session, recipe, of)
        await asyncio.sleep(TTL_S / 2)
        faults.next("get", RefusedCall(), Unanswered())
        resurrect(place, deleted)
        async with asyncio.timeout(4 * TTL_S):
            async with other.campaign("e", name="b", recipe=recipe) as term:
                await asyncio.sleep(2 * TTL_S)
                assert term.valid
        assert kept.valid
        assert place.holder("another") == "a"


@virtual
async def test_a_lease_lost_while_taking_a_ticket(place: Place) -> None:
    """The ticket went with the lease: the candidate takes another at once, not when it is woken."""
    faults = Faults()
    a, b = await place.open(), await place.open(faults)
    async with a.campaign("e", name="a"):
        faults.next("enqueue", Late(after_s=0.5))
        faults.next("revoke", Late(before_s=0.9))
        waiting = asyncio.create_task(b.campaign("e", name="b").__aenter__())
        await until(lambda: place.line() == ["a", "b"])
        keepalive_of(b).lose("the test says so")
        await asyncio.sleep(2)
        assert place.line() == ["a", "b"]
        waiting.cancel()


@virtual
async def test_the_candidate_ahead_is_reported(place: Place) -> None:
    first, second = await place.open(), await place.open()
    async with first.campaign("e", name="a"):
        with pytest.raises(NotElected):
            async with second.campaign("e", name="b", wait_s=1):
                pass
    assert place.seen(Waiting) == [Waiting(election="e", name="b", behind="a")]


@virtual
async def test_names_and_meta_reach_the_others(place: Place) -> None:
    session, other = await place.open(), await place.open()
    meta = {"url": "http://10.0.0.1:8000", "zone": ["a", 1]}
    async with session.campaign("böses/../spiel", name="né\n🦉", meta=meta) as term:
        assert await other.leader("böses/../spiel") == Leader(
            "böses/../spiel", "né\n🦉", term.token, meta
        )
    assert await other.leader("böses/../spiel") is None


# Observers.


@virtual
async def test_observers_see_who_leads_then_every_change(place: Place) -> None:
    watcher, a, b = [await place.open() for _ in range(3)]
    seen: list[str | None] = []
    late: list[str | None] = []
    watching = [asyncio.create_task(gather_leaders(watcher, seen))]
    await until(lambda: seen == [None])
    stop_a, stop_b = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(lead_until_set(a, stop_a, name="a"))]
    await until(lambda: seen == [None, "a"])
    tasks.append(asyncio.create_task(lead_until_set(b, stop_b, name="b")))
    watching.append(asyncio.create_task(gather_leaders(watcher, late)))
    await until(lambda: late == ["a"])
    leader = await watcher.leader("e")
    assert leader is not None
    assert leader.name == "a"
    stop_a.set()
    await until(lambda: seen[-1] == "b")
    stop_b.set()
    await until(lambda: seen[-1] is None)
    assert [name for name in seen if name] == ["a", "b"]
    assert late[-1] is None
    await asyncio.gather(*tasks)
    for task in watching:
        task.cancel()


@virtual
async def test_an_observer_outlives_an_outage(place: Place) -> None:
    faults = Faults()
    watcher, a = await place.open(faults), await place.open()
    seen: list[str | None] = []
    watching = asyncio.create_task(gather_leaders(watcher, seen))
    await until(lambda: seen == [None])
    faults.cut()
    stop = asyncio.Event()
    leading = asyncio.create_task(lead_until_set(a, stop, name="a"))
    await asyncio.sleep(10 * TTL_S)
    assert seen == [None]
    faults.heal()
    await until(lambda: seen == [None, "a"])
    faults.next("get", RefusedCall(), RefusedCall(), RefusedCall())
    stop.set()
    await leading
    await until(lambda: seen == [None, "a", None])
    watching.cancel()


@virtual
async def test_an_observer_sees_a_leader_that_fell_silent(place: Place) -> None:
    faults = Faults()
    watcher, a = await place.open(), await place.open(faults)
    seen: list[str | None] = []
    watching = asyncio.create_task(gather_leaders(watcher, seen))
    with pytest.raises(LeadershipLost):
        async with a.campaign("e", name="a"):
            faults.cut()
            await asyncio.sleep(100)
    await until(lambda: seen[-2:] == ["a", None], TTL_S)
    watching.cancel()
    faults.heal()


# Closing.


@virtual
async def test_closing_ends_terms_candidates_and_observers(place: Place) -> None:
    outside = await place.open()
    session = place.session()
    seen: list[str | None] = []
    async with session:
        leading = asyncio.create_task(lead_until_set(session, asyncio.Event(), name="a"))
        await until(lambda: place.holder() == "a")
        waiting = asyncio.create_task(lead_until_set(session, asyncio.Event(), name="b"))
        await until(lambda: place.line() == ["a", "b"])
        watching = asyncio.create_task(gather_leaders(session, seen))
        await until(lambda: seen == ["a"])
    with pytest.raises(LeadershipLost, match="the session was closed"):
        await leading
    for task in (waiting, watching):
        with pytest.raises(SessionClosed, match="connect again"):
            await task
    assert now() < 1
    assert place.server._leases == {}
    async with asyncio.timeout(0.1), outside.campaign("e"):
        pass


@virtual
async def test_closing_waits_for_a_body_no_longer_than_its_budget(place: Place) -> None:
    session, other = place.session(), await place.open()
    ended: list[float] = []

    async def slow() -> None:
        async with session.campaign("e", name="a"):
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(2 * STOP_BUDGET_S)
                ended.append(now())

    async with session:
        leading = asyncio.create_task(slow())
        await until(lambda: place.holder() == "a")
        began = now()
    assert now() - began == pytest.approx(STOP_BUDGET_S)
    # The lease is not given back over the body's head: it runs out by itself.
    with pytest.raises(NotElected, match="'a' leads"):
        async with other.campaign("e", wait_s=STOP_BUDGET_S):
            pass
    with pytest.raises(LeadershipLost):
        await leading
    assert ended == [pytest.approx(began + 2 * STOP_BUDGET_S)]
    assert len(place.seen(Overrun)) == 1
    async with other.campaign("e", wait_s=TTL_S):
        pass


@virtual
async def test_closing_a_session_ends_a_candidate_whose_store_is_down(place: Place) -> None:
    faults = Faults()
    session = place.session(faults)
    async with session:
        faults.cut()
        waiting = asyncio.create_task(lead_until_set(session, asyncio.Event()))
        await asyncio.sleep(10)
    with pytest.raises(SessionClosed):
        await waiting
    assert now() < 12


@virtual
async def test_a_session_is_used_inside_its_scope_only(place: Place) -> None:
    session = place.session()
    with pytest.raises(SessionClosed, match="async with"):
        session.campaign("e")
    async with session:
        campaign = session.campaign("e")
        with pytest.raises(SessionClosed, match="opened once"):
            await session.__aenter__()
    with pytest.raises(SessionClosed, match="connect again"):
        await session.leader("e")
    with pytest.raises(SessionClosed, match="connect again"):
        async with campaign:
            pass
    with pytest.raises(SessionClosed, match="connect again"):
        await anext(session.observe("e"))


# Overrun.


@virtual
async def test_a_body_that_overruns_is_reported(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    with pytest.raises(LeadershipLost):
        async with session.campaign("e", name="a"):
            faults.cut()
            try:
                await asyncio.sleep(100)
            finally:
                lost_at = now()
                await asyncio.sleep(STOP_BUDGET_S - 0.01)
                assert place.seen(Overrun) == []
                await asyncio.sleep(0.02)
                assert len(place.seen(Overrun)) == 1
    assert lost_at == pytest.approx(VALID_S)
    faults.heal()


@virtual
async def test_a_body_that_ends_in_time_is_not_reported(place: Place) -> None:
    session = await place.open()
    with pytest.raises(LeadershipLost):
        async with session.campaign("e") as term:
            soon(1, term._lose, "the test says so")
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(STOP_BUDGET_S / 2)
    await asyncio.sleep(TTL_S)
    assert place.seen(Overrun) == []


def test_a_body_that_overruns_ends_the_process_if_asked() -> None:
    script = """
import time, doyen
with doyen.connect_blocking("memory://", ttl_s=1) as session:
    with session.campaign("e", on_overrun="exit") as term:
        term._lose("the test says so")
        time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30)
    assert ended.returncode == 70, ended.stderr


# Settings.


@pytest.mark.parametrize(
    ("url", "settings", "message"),
    [
        ("memory://", {"ttl_s": -1}, "ttl_s must be positive, not -1"),
        ("memory://", {"ttl_s": 0}, "ttl_s must be positive, not 0"),
        ("memory://", {"ttl_s": float("nan")}, "ttl_s must be positive"),
        ("memory://", {"ttl_s": 0.01}, r"ttl_s=0.01 is below the minimum of this store: 0\.1 s"),
        ("memory://", {"ttl_s": 6, "stop_budget_s": 3}, r"a safety margin of -\d"),
        ("memory://", {"stop_budget_s": -2}, "stop_budget_s must be between 0 and 5, not -2"),
        ("memory://", {"drift": 0.6}, "drift must be between 0 and 0.5, not 0.6"),
        ("zoo://", {}, "no store for zoo://; known schemes: .*memory.*sqlite"),
        ("doyen.db", {}, "'doyen.db' is not a store URL: it must start with a scheme"),
        ("localhost:2379,h2:2379", {}, "without a scheme: write etcd://localhost:2379,h2:2379,"),
        ("10.0.0.1:16379", {}, "without a scheme: write redis://10.0.0.1:16379, or the scheme of"),
        ("memory://x?ttl=5", {}, "memory:// has no option 'ttl'"),
    ],
)
def test_what_cannot_work_is_refused(url: str, settings: dict[str, Any], message: str) -> None:
    async def open_asynchronously() -> None:
        async with doyen.connect(url, **settings):
            pass

    with pytest.raises(ConfigError, match=message):
        asyncio.run(open_asynchronously())
    with pytest.raises(ConfigError, match=message), doyen.connect_blocking(url, **settings):
        pass
    assert not ThreadRuntime._shared


deep: dict[str, Any] = {}
for _ in range(100_000):
    deep = {"in": deep}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wait_s": -1}, "wait_s is 0 s or more, not -1"),
        ({"recipe": "lottery"}, "recipe is 'line' or 'race', not 'lottery'"),
        ({"on_overrun": "explode"}, "on_overrun is 'report' or 'exit'"),
        ({"meta": {"socket": object()}}, "meta must be something that JSON can represent"),
        ({"meta": {"load": math.nan}}, "meta must be something that JSON can represent"),
        ({"meta": {"all": "x" * 70_000}}, "more than 65536: store large values elsewhere"),
        ({"meta": deep}, "meta must be something that JSON can represent"),
    ],
)
@virtual
async def test_a_campaign_that_cannot_work_is_refused(
    place: Place, options: dict[str, Any], message: str
) -> None:
    session = await place.open()
    with pytest.raises(ConfigError, match=message):
        async with session.campaign("e", **options):
            pass
    elections: list[Any] = ["", "x" * 201, "é" * 101, "a\nb", "\udcff", 5, None]
    for election in elections:
        with pytest.raises(ConfigError, match="election"):
            async with session.campaign(election):
                pass


@virtual
async def test_the_granted_ttl_counts_not_the_asked(place: Place) -> None:
    class Shorter(FaultyStore):
        async def grant(self, ttl_s: float) -> Lease:
            return await super().grant(ttl_s / 2)

    def wrap(store: Store) -> Store:
        return Shorter(store, Faults())

    session = await place.open(wrap=wrap)
    async with session.campaign("e") as term:
        assert term.remaining_s == pytest.approx(TTL_S / 2 * 0.995 - TTL_S / 12)
        await asyncio.sleep(10 * TTL_S)
        assert term.valid


@pytest.mark.parametrize("campaigning", [True, False])
@pytest.mark.parametrize("seed", range(5))
@virtual
async def test_doubt_is_reported_with_the_remaining_time(
    place: Place, campaigning: bool, seed: int
) -> None:
    """A renewal may fail when the deadline has passed: that is a loss, not doubt."""
    faults = Faults(seed)
    session = await place.open(faults)
    core = core_of(session)
    core.runtime.random.seed(seed)
    keepalive = await core.leases.shared()
    try:
        async with contextlib.AsyncExitStack() as stack:
            if campaigning:
                await stack.enter_async_context(session.campaign("e"))
            await asyncio.sleep(seed)
            faults.cut()
            await asyncio.sleep(3 * TTL_S)
    except LeadershipLost:
        assert campaigning
    assert keepalive.lost_because == "no renewal was confirmed in time"
    doubts = [event for event in place.seen(Unsure) if isinstance(event, Unsure)]
    assert doubts
    assert all(0 < doubt.remaining_s < TTL_S for doubt in doubts)


def test_a_store_that_fails_at_once_is_not_asked_without_end() -> None:
    """Renewals that fail in no time, up to the very deadline, where timers are coarser than the
    clock and so early: a bounded number of them."""
    place, faults = Place(), Faults()
    place.clock.advance(1e6)

    async def main() -> str | None:
        async with place.sessions:
            session = await place.open(faults, clock=OwnClock(place.clock, -0.995e6, 0.995))
            keepalive = await core_of(session).leases.shared()
            faults.next("renew", *[RefusedCall()] * 10_000)
            await asyncio.sleep(2 * TTL_S)
            return keepalive.lost_because

    assert run_virtual(main, clock=place.clock) == "no renewal was confirmed in time"
    assert len([line for line in faults.trace if line.startswith("renew")]) < 100
