"""Members of a group: names, leases, health, eligibility and observation. In virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import doyen
from doyen import ConfigError, LeadershipLost, NameTaken, NotElected, Session
from doyen.events import Listed, Lost, Unlisted
from doyen.manage.members import MemberOptions, MemberValue
from doyen.manage.registration import Listing, Registration
from doyen.model import Entry, Member, MemberChange, member_key, members_key
from doyen.stores.memory import MemoryStore
from doyen.testing.faults import Faults, Late, LostCall, Odds, RefusedCall, Stray, Unanswered
from support import TTL_S, Place, core_of, keepalive_of, now, until, until_blocking, virtual

GROUP = "workers"


def listed(place: Place) -> dict[str, int]:
    """The members in the store, with their incarnations."""
    return {
        entry.key.rpartition("/")[2]: entry.revision
        for entry in place.server.list(members_key(GROUP))
    }


async def names(session: Session) -> list[str]:
    return [member.name for member in await session.members(GROUP)]


async def collect(session: Session, seen: list[MemberChange], suspect: bool = True) -> None:
    async for change in session.observe_members(GROUP, suspect=suspect):
        if isinstance(change, MemberChange):
            seen += [change]


@contextlib.asynccontextmanager
async def observing(session: Session) -> Any:
    seen: list[MemberChange] = []
    task = asyncio.create_task(collect(session, seen))
    await asyncio.sleep(1)
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def told(seen: list[MemberChange]) -> list[tuple[str, str]]:
    return [(change.kind, change.member.name) for change in seen]


# Joining and leaving.


@virtual
async def test_a_member_is_on_the_list_for_the_duration_of_its_scope(place: Place) -> None:
    session, other = await place.open(), await place.open()
    async with session.member(GROUP, name="a/b", meta={"zone": "x"}) as member:
        assert (member.name, member.group, member.state) == ("a/b", GROUP, "up")
        assert listed(place) == {"a%2Fb": member.incarnation}
        (seen,) = await other.members(GROUP)
        assert seen == Member("a/b", member.incarnation or 0, meta={"zone": "x"}, since=seen.since)
        assert seen.silent_s is not None
        await asyncio.sleep(10 * TTL_S)
        assert [seen] == await other.members(GROUP)
        await member.update({"zone": "y"})
        (changed,) = await other.members(GROUP)
        assert changed.meta == {"zone": "y"}
        assert changed.incarnation == seen.incarnation
    assert await other.members(GROUP) == []
    assert [type(event) for event in place.seen(Listed, Unlisted)] == [Listed, Listed, Unlisted]


@virtual
async def test_names_and_options_are_checked(place: Place) -> None:
    session = await place.open()
    wrong: list[MemberOptions] = [
        {"name": "a\n"},
        {"meta": {"a": object()}},
        {"meta": {"a": "x" * 5000}},
        {"health": "yes"},  # type: ignore[typeddict-item]
        {"health_every_s": 0},
        {"health_limit_s": float("nan")},
    ]
    for options in wrong:
        with pytest.raises(ConfigError):
            session.member(GROUP, **options)
    with pytest.raises(ConfigError, match="the name of a group"):
        session.member("")
    async with session.member(GROUP, name="a") as member:
        with pytest.raises(ConfigError):
            await member.update({"a": "x" * 5000})
        assert (await session.members(GROUP))[0].meta == {}


@virtual
async def test_a_name_that_a_live_member_has_is_refused_at_once_with_its_holder(
    place: Place,
) -> None:
    holder, late = await place.open(), await place.open()
    meta = {"port": 1, "at": "h 1", "zones": {"x": None}}
    shown = re.escape(r'(port=1 at="h 1" zones="{\"x\":null}") is alive')
    async with holder.member(GROUP, name="a", meta=meta) as first:
        for session in (late, holder):
            began = now()
            with pytest.raises(NameTaken, match=rf"incarnation \d+ of \S+ {shown}"):
                async with session.member(GROUP, name="a"):
                    raise AssertionError("never entered")
            assert now() - began < 0.1
            assert listed(place) == {"a": first.incarnation}
        await asyncio.sleep(1)
        assert place.server.list("challenges") == []


@virtual
async def test_many_that_want_one_name_are_refused_at_once(place: Place) -> None:
    holder = await place.open()
    async with holder.member(GROUP, name="a"), asyncio.timeout(0.5 * TTL_S):
        sessions = [await place.open() for _ in range(12)]
        refused = await asyncio.gather(
            *(_stay(session, "a") for session in sessions), return_exceptions=True
        )
    assert [type(error) for error in refused] == [NameTaken] * 12


@pytest.mark.parametrize("operation", ["list", "update"])
@virtual
async def test_a_holder_answers_although_its_link_is_poor(place: Place, operation: str) -> None:
    faults = Faults()
    holder, late = await place.open(faults), await place.open()
    async with holder.member(GROUP, name="a"):
        faults.next(operation, LostCall())
        began = now()
        with pytest.raises(NameTaken, match=r"incarnation \d+ of \S+ is alive"):
            await _stay(late, "a")
        assert now() - began < 0.5 * TTL_S


@virtual
async def test_challenges_that_come_while_the_holder_joins_are_answered(place: Place) -> None:
    """One while its entry is created, another while it answers the first."""
    faults = Faults()
    holder, early, late = await place.open(faults), await place.open(), await place.open()
    faults.next("create", Late(after_s=0.2))
    faults.next("update", Late(after_s=0.2))
    joining = asyncio.create_task(_stay(holder, "a"))
    await until(lambda: listed(place))
    first = asyncio.create_task(_stay(early, "a"))
    await asyncio.sleep(0.3)
    began = now()
    for refused in (first, asyncio.create_task(_stay(late, "a"))):
        with pytest.raises(NameTaken, match="is alive"):
            await refused
    assert now() - began < TTL_S / 2
    joining.cancel()


@virtual
async def test_a_holder_that_does_not_answer_keeps_its_name_if_it_renews(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Registration, "_note_challenge", lambda self: None)
    holder, late = await place.open(), await place.open()
    async with holder.member(GROUP, name="a"):
        began = now()
        with pytest.raises(NameTaken, match="still holds it"):
            await _stay(late, "a")
        assert TTL_S <= now() - began < 1.5 * TTL_S


@virtual
async def test_the_name_of_a_dead_member_is_waited_for(place: Place) -> None:
    faults = Faults()
    dead, heir = await place.open(faults), await place.open()
    task = asyncio.create_task(_stay(dead, "a"))
    await until(lambda: listed(place))
    before = listed(place)["a"]
    await asyncio.sleep(1)
    faults.cut()
    began = now()
    async with heir.member(GROUP, name="a") as member:
        assert 0.5 * TTL_S < now() - began < TTL_S + 0.5
        assert (member.incarnation or 0) > before
    task.cancel()


async def _stay(session: Session, name: str, **options: Any) -> None:
    async with session.member(GROUP, name=name, **options):
        await asyncio.Event().wait()


@virtual
async def test_unknown_outcomes_leave_one_entry_and_then_none(place: Place) -> None:
    for fault in (
        Unanswered(),
        LostCall(),
        Unanswered(raises=True),
        RefusedCall(),
        Stray(after_s=4),
    ):
        faults = Faults()
        session = place.session(faults)
        async with session:
            faults.next("create", fault)
            async with session.member(GROUP, name="a") as member:
                faults.next("update", fault)
                await member.update({"n": 1})
                assert [each.meta for each in await session.members(GROUP)] == [{"n": 1}]
                faults.next("delete", fault)
            await asyncio.sleep(3 * TTL_S)
            assert listed(place) == {}, fault


@virtual
async def test_a_creation_that_is_carried_out_after_leaving_is_removed(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    faults.next("create", Stray(after_s=5.0))
    joining = asyncio.create_task(_stay(session, "a"))
    await asyncio.sleep(0.5)
    joining.cancel()
    await asyncio.sleep(5)
    assert listed(place) == {}
    await asyncio.sleep(5)
    assert listed(place) == {}


# Lost leases.


@virtual
async def test_a_member_whose_lease_is_lost_joins_again_as_a_new_incarnation(place: Place) -> None:
    session = await place.open()
    async with session.member(GROUP, name="a") as member:
        first = member.incarnation
        place.end_lease(session)
        await until(lambda: len(place.seen(Listed)) == 2)
        assert (member.incarnation or 0) > (first or 0)
        assert listed(place) == {"a": member.incarnation}
        assert [type(event) for event in place.seen(Listed, Unlisted)] == [Listed, Unlisted, Listed]


@virtual
async def test_an_entry_under_the_sessions_own_lost_lease_is_replaced(place: Place) -> None:
    """The lease is lost here and still lives at the store: a term's body runs on it."""
    session = await place.open()
    async with session.member(GROUP, name="a") as member:
        first = member.incarnation
        core = core_of(session)
        lost = keepalive_of(session)
        core.leases.body_begins(lost)  # which keeps it from being revoked
        lost.lose("a test")
        began = now()
        await until(lambda: len(place.seen(Listed)) == 2)
        assert now() - began < 0.1
        assert (member.incarnation or 0) > (first or 0)
        core.leases.body_ended(lost)


@virtual
async def test_an_entry_that_an_operator_removed_is_created_again(place: Place) -> None:
    session = await place.open()
    async with session.member(GROUP, name="a") as member:
        place.server.delete(member_key(GROUP, "a"))
        await until(lambda: len(place.seen(Listed)) == 2)
        assert listed(place) == {"a": member.incarnation}


@virtual
async def test_a_member_that_lost_its_name_joins_again_when_it_is_free(place: Place) -> None:
    faults = Faults()
    session, other = await place.open(faults), await place.open()
    async with session.member(GROUP, name="a") as member:
        await asyncio.sleep(1)
        faults.cut()
        async with other.member(GROUP, name="a") as thief:
            faults.heal()
            await until(lambda: member.ineligible_because)
            assert "is alive" in member.ineligible_because
            assert member.incarnation is None
            assert listed(place) == {"a": thief.incarnation}
        await until(lambda: member.incarnation is not None)
        assert not member.ineligible_because


@virtual
async def test_a_store_may_tell_of_leases_apart_from_entries(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As etcd does. Then the leases are asked for with each list of an observer that suspects."""
    entry_of, asked = place.server._entry, []

    async def remaining(store: MemoryStore, leases: Sequence[str]) -> dict[str, float]:
        asked.append(len(leases))
        leases_now, now = store._server._leases, store._server.clock.now()
        left = {each: leases_now[each].expires_at - now for each in leases}
        # Some end after the list was read and before this.
        return {each: left_s if left_s > TTL_S / 10 else 0.0 for each, left_s in left.items()}

    monkeypatch.setattr(MemoryStore, "remaining", remaining)
    monkeypatch.setattr(
        place.server, "_entry", lambda key: entry_of(key)._replace(remaining_s=None)
    )
    faults = Faults()
    session, other, observer = await place.open(faults), await place.open(), await place.open()
    task = asyncio.create_task(_stay(session, "a"))
    async with other.member(GROUP, name="b"), observing(observer) as seen:
        faults.cut()
        await until(lambda: ("gone", "a") in told(seen))
        assert told(seen) == [
            ("joined", "a"),
            ("joined", "b"),
            ("suspected", "a"),
            ("gone", "a"),
        ]
        assert seen[2].silent_s is not None
        assert 2 / 3 * TTL_S < seen[2].silent_s < TTL_S
        assert set(asked) == {1, 2}
        before = len(asked)
        indifferent = asyncio.create_task(collect(observer, [], suspect=False))
        await asyncio.sleep(0.1)
        indifferent.cancel()
        assert len(asked) == before
    task.cancel()


@virtual
async def test_many_leases_are_asked_for_in_calls_of_their_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its timeout: a thousand answers of a slow store take longer than one allows."""
    session = await place.open()
    calls = core_of(session).calls
    asked: list[int] = []

    async def remaining(store: MemoryStore, leases: Sequence[str]) -> dict[str, float]:
        asked.append(len(leases))
        await asyncio.sleep(len(leases) * calls.timing.request_timeout_s / 100)
        return dict.fromkeys(leases, 1.0)

    monkeypatch.setattr(MemoryStore, "remaining", remaining)
    leases = [str(number) for number in range(300)]
    assert list(await calls.remaining(leases)) == leases
    assert sum(asked) == 300
    assert await calls.remaining([]) == {}


@virtual
async def test_a_second_challenge_is_not_removed_with_the_first(place: Place) -> None:
    """The name passes from a dead holder to a live one while it is waited for."""
    dead, slow = Faults(), Faults()
    first, second, late = await place.open(dead), await place.open(), await place.open(slow)
    holding = asyncio.create_task(_stay(first, "a"))
    await until(lambda: listed(place))
    dead.cut()
    waiting = asyncio.create_task(_stay(late, "a"))
    await until(lambda: place.server.list("challenges"))
    slow.next("get", Late(before_s=0.2))
    slow.next("delete", Late(before_s=0.3))
    began = now()
    place.server.revoke(keepalive_of(first).lease.id)
    async with second.member(GROUP, name="a"):
        with pytest.raises(NameTaken, match="is alive"):
            await waiting
        assert now() - began < TTL_S / 2
    holding.cancel()


@pytest.mark.parametrize("ttl_s", [0, -1, 1e9, "Infinity", "NaN", None])
@virtual
async def test_an_entry_with_a_ttl_that_is_none_is_not_waited_for(place: Place, ttl_s: Any) -> None:
    session = await place.open()
    async with session.member(GROUP, name="b"):
        lease = place.server.grant(1e6)
        entry = place.server.list(members_key(GROUP))[0]
        value = {**json.loads(entry.value), "session": "another", "ttl_s": ttl_s}
        raw = json.dumps(value).replace('"Infinity"', "Infinity").replace('"NaN"', "NaN")
        place.server.create(member_key(GROUP, "a"), raw.encode(), lease.id)
        assert [each.name for each in await session.members(GROUP)] == ["b"]
        began = now()
        with pytest.raises(NameTaken, match="not a member"):
            await _stay(session, "a")
        assert now() - began < 2 * TTL_S


# Health, draining and failure.


class Patient:
    """A health check whose result the test decides."""

    def __init__(self) -> None:
        self.result: object = None
        self.takes_s = 0.0
        self.calls = 0

    def check(self) -> object:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def check_async(self) -> object:
        self.calls += 1
        await asyncio.sleep(self.takes_s)
        return self.check()


@virtual
async def test_an_unhealthy_member_says_so_on_the_list(place: Place) -> None:
    for coroutine in (False, True):
        patient = Patient()
        session = place.session()
        check = patient.check_async if coroutine else patient.check
        async with (
            session,
            session.member(
                GROUP, name="a", health=check, health_every_s=1, health_limit_s=2
            ) as member,
        ):
            for result, reason in (
                (ValueError("disk full"), "disk full"),
                (False, "the health check returned False"),
            ):
                patient.result = result
                await asyncio.sleep(1.5)
                (seen,) = await session.members(GROUP)
                assert (seen.state, seen.reason) == ("unhealthy", reason)
                assert member.state == "unhealthy"
            patient.result = True
            await asyncio.sleep(1.5)
            assert [each.state for each in await session.members(GROUP)] == ["up"]


@virtual
async def test_a_check_that_hangs_makes_unhealthy_and_is_not_started_again(place: Place) -> None:
    patient = Patient()
    session = await place.open()
    async with session.member(
        GROUP, name="a", health=patient.check_async, health_every_s=1, health_limit_s=2
    ) as member:
        patient.takes_s = 20
        await asyncio.sleep(4.5)
        assert "has not returned within 2 s" in (await session.members(GROUP))[0].reason
        assert patient.calls == 2
        patient.takes_s = 0
        await asyncio.sleep(25)
        assert member.state == "up"


async def broken() -> None:
    raise RuntimeError("broken")


async def exits() -> None:
    raise SystemExit(3)


async def cancelled() -> None:
    raise asyncio.CancelledError


class Check:
    """A check that is no coroutine function and returns an awaitable."""

    def __init__(self, check: Callable[[], Awaitable[None]]) -> None:
        self.check = check

    def __call__(self) -> Awaitable[None]:
        return self.check()


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (Check(broken), "broken"),
        (exits, "the health check raised SystemExit(3)"),
        (partial(sys.exit, 3), "the health check raised SystemExit(3)"),
        (Check(exits), "the health check raised SystemExit(3)"),
        (cancelled, "the health check was cancelled"),
        (Check(cancelled), "the health check was cancelled"),
    ],
)
def test_whatever_a_check_raises_makes_unhealthy_and_ends_no_loop(
    check: Callable[[], object], reason: str
) -> None:
    async def examined() -> None:
        async with (
            doyen.connect("memory://", ttl_s=2) as session,
            session.member(GROUP, name="a", health=check, health_every_s=0.01),
            asyncio.timeout(20),
        ):
            while [each.reason for each in await session.members(GROUP)] != [reason]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(examined())


def test_a_blocking_session_has_no_loop_for_an_awaitable() -> None:
    with (
        doyen.connect_blocking("memory://") as session,
        session.member(GROUP, name="a", health=Check(broken), health_every_s=0.01),
    ):
        until_blocking(lambda: "has no loop to run it on" in session.members(GROUP)[0].reason)


@virtual
async def test_an_unhealthy_leader_resigns_and_an_unhealthy_candidate_leaves_the_line(
    place: Place,
) -> None:
    sick, well = Patient(), Patient()
    led: list[str] = []

    async def process(name: str, patient: Patient) -> None:
        session = await place.open()
        async with session.member(
            GROUP, name=name, health=patient.check, health_every_s=0.5
        ) as member:
            async for campaign in session.campaigns("e", name=name, member=member):
                async with campaign:
                    led.append(name)
                    await asyncio.Event().wait()

    tasks = [asyncio.create_task(process("sick", sick))]
    await until(lambda: led == ["sick"])
    tasks.append(asyncio.create_task(process("well", well)))
    await until(lambda: place.line() == ["sick", "well"])
    sick.result = OSError("no disk")
    await until(lambda: led == ["sick", "well"])
    (lost,) = place.seen(Lost)
    assert isinstance(lost, Lost)
    assert "'sick' of 'workers' is unhealthy: no disk" in lost.reason
    await until(lambda: place.line() == ["well"])
    sick.result = None
    await until(lambda: place.line() == ["well", "sick"])
    sick.result = False
    await until(lambda: place.line() == ["well"])
    well.result = False
    await until(lambda: place.holder() is None)
    await asyncio.sleep(3 * TTL_S)
    assert led == ["sick", "well"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@virtual
async def test_a_draining_member_does_not_lead(place: Place) -> None:
    session = await place.open()
    async with session.member(GROUP, name="a") as member:
        with pytest.raises(LeadershipLost, match="is draining"):
            async with session.campaign("e", member=member) as term:
                await member.drain()
                assert not term.valid
                await asyncio.sleep(1)
        assert [each.state for each in await session.members(GROUP)] == ["draining"]
        with pytest.raises(NotElected, match="is draining"):
            async with session.campaign("e", member=member, wait_s=1):
                raise AssertionError("never entered")
        await member.resume()
        async with session.campaign("e", member=member, wait_s=1) as term:
            assert term.valid


@virtual
async def test_a_member_that_failed_is_off_the_list_and_stays_off(place: Place) -> None:
    session = await place.open()
    async with session.member(GROUP, name="a") as member:
        await member.drain()
        await member.fail("its disk is broken")
        assert member.state == "failed"
        assert listed(place) == {}
        place.end_lease(session)
        await asyncio.sleep(3 * TTL_S)
        assert listed(place) == {}
        assert "has failed: its disk is broken" in member.ineligible_because
        (event,) = place.seen(Unlisted)
        assert isinstance(event, Unlisted)
        assert event.reason == "its disk is broken"


@virtual
async def test_a_member_fails_without_a_reason_too(place: Place) -> None:
    session = await place.open()
    async with session.member(GROUP, name="a") as member:
        await member.fail("")
        assert listed(place) == {}
        assert "has failed: no reason was given" in member.ineligible_because


# Observing.


@virtual
async def test_observers_see_members_join_change_and_leave(place: Place) -> None:
    session = await place.open()
    async with observing(await place.open()) as seen:
        async with session.member(GROUP, name="a") as member:
            await asyncio.sleep(1)
            await member.update({"n": 1})
            await asyncio.sleep(1)
            place.end_lease(session)
            await asyncio.sleep(2 * TTL_S)
        await asyncio.sleep(1)
        assert told(seen) == [
            ("joined", "a"),
            ("changed", "a"),
            ("gone", "a"),
            ("joined", "a"),
            ("gone", "a"),
        ]
        assert seen[2].member.incarnation < seen[3].member.incarnation


@virtual
async def test_a_silent_member_is_suspected_and_then_gone_or_cleared(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    task = asyncio.create_task(_stay(session, "a"))
    await until(lambda: listed(place))
    async with observing(await place.open()) as seen:
        await asyncio.sleep(10 * TTL_S)
        assert told(seen) == [("joined", "a")]
        faults.next("renew", *[RefusedCall()] * 9)
        await asyncio.sleep(2 * TTL_S)
        assert told(seen) == [("joined", "a"), ("suspected", "a"), ("changed", "a")]
        assert TTL_S * 2 / 3 < (seen[1].silent_s or 0) < TTL_S
        faults.cut()
        await asyncio.sleep(2 * TTL_S)
        assert told(seen)[3:] == [("suspected", "a"), ("gone", "a")]
        assert TTL_S <= (seen[-1].silent_s or 0) < TTL_S * 1.2
    task.cancel()


@virtual
async def test_an_observer_that_is_cut_off_suspects_nobody(place: Place) -> None:
    faults = Faults()
    session = await place.open()
    async with session.member(GROUP, name="a"), observing(await place.open(faults)) as seen:
        faults.cut()
        await asyncio.sleep(5 * TTL_S)
        faults.heal()
        await asyncio.sleep(5 * TTL_S)
        assert told(seen) == [("joined", "a")]


@virtual
async def test_a_burst_costs_one_read_and_each_change_is_told_once(place: Place) -> None:
    faults = Faults()
    session = await place.open()
    observer = await place.open(faults)
    seen: list[MemberChange] = []
    task = asyncio.create_task(collect(observer, seen, suspect=False))
    await asyncio.sleep(1)
    scopes = [session.member(GROUP, name=f"m{n:03}") for n in range(200)]
    faults.trace.clear()
    await asyncio.gather(*(scope.__aenter__() for scope in scopes))
    await asyncio.sleep(1)
    assert len([call for call in faults.trace if call.startswith("list")]) == 1
    assert sorted(told(seen)) == [("joined", f"m{n:03}") for n in range(200)]
    faults.trace.clear()
    seen.clear()
    await asyncio.gather(*(scope.__aexit__() for scope in scopes))
    await asyncio.sleep(1)
    assert len([call for call in faults.trace if call.startswith("list")]) == 1
    assert sorted(told(seen)) == [("gone", f"m{n:03}") for n in range(200)]
    task.cancel()


@virtual
async def test_a_burst_that_takes_longer_costs_one_read_a_second(place: Place) -> None:
    faults = Faults()
    session, observer = await place.open(), await place.open(faults)
    seen: list[MemberChange] = []
    task = asyncio.create_task(collect(observer, seen, suspect=False))
    await asyncio.sleep(1)

    async def join(number: int) -> int:
        """Members join every 80 ms. Returns how often the list was read."""
        faults.trace.clear()
        for _ in range(number):
            await place.sessions.enter_async_context(
                session.member(GROUP, name=f"m{now()}", meta={})
            )
            await asyncio.sleep(0.08)
        await asyncio.sleep(0.2)
        return len([call for call in faults.trace if call.startswith("list")])

    assert await join(10) == 1
    assert len(seen) == 10
    assert await join(60) in (5, 6)
    assert len(seen) == 70
    task.cancel()


@virtual
async def test_entries_that_are_not_members_are_ignored(place: Place) -> None:
    session = await place.open()
    place.server.put(member_key(GROUP, "x"), b"{}", None)
    async with session.member(GROUP, name="a"):
        assert await names(session) == ["a"]
    assert MemberValue.decode(b"[1]") is None
    place.server.delete(member_key(GROUP, "x"))


@virtual
async def test_closing_the_session_inside_the_scope_removes_the_member(place: Place) -> None:
    session = place.session()
    await session.__aenter__()
    scope = session.member(GROUP, name="a")
    await scope.__aenter__()
    await session.__aexit__()
    assert listed(place) == {}
    await scope.__aexit__()


@virtual
async def test_with_failing_links_everything_comes_right(place: Place) -> None:
    odds = Odds(late=0.1, lost=0.1, unanswered=0.1, refused=0.1, stray=0.1, delay_s=2)
    for seed in range(10):
        faults = Faults(seed, odds)
        session = place.session(faults)
        async with session:
            async with session.member(GROUP, name="a") as member:
                for n in range(5):
                    await member.update({"n": n})
                    await asyncio.sleep(1)
                faults.odds = Odds()
                await until(lambda: member.incarnation is not None)
                assert listed(place) == {"a": member.incarnation}
            faults.odds = Odds()
            await asyncio.sleep(3 * TTL_S)
            assert listed(place) == {}


@virtual
async def test_a_member_that_leaves_lets_go_of_its_name_before_others_can_take_it(
    place: Place,
) -> None:
    """The response to the deletion is late, and another has the name by then."""
    faults = Faults()
    session, other = await place.open(faults), await place.open()
    scope = session.member(GROUP, name="a")
    member = await scope.__aenter__()
    faults.next("delete", Late(after_s=0.9))
    leaving = asyncio.create_task(scope.__aexit__())
    await until(lambda: not listed(place))
    async with other.member(GROUP, name="a") as heir:
        assert (member.incarnation, heir.incarnation) == (None, listed(place)["a"])
        assert not leaving.done()
        await leaving


def test_a_member_that_cannot_join_again_reports_why_and_does_so_once() -> None:
    told: list[Any] = []
    telemetry = SimpleNamespace(emit=lambda event, planned=False: told.append(event))
    about: Any = SimpleNamespace(group="g", name="a")
    listing = Listing(SimpleNamespace(telemetry=telemetry), about)  # type: ignore[arg-type]
    listing.refuse("its name is taken")  # which its first attempt to join raises
    assert not told
    desired: Any = SimpleNamespace(state="up", unhealthy="")
    listing.listed(Entry("members/g/a", b"", 7, 7, "1"), desired)
    listing.unlisted("its lease was lost")
    for _ in range(2):
        listing.refuse("its name is taken")
    assert [type(event) for event in told] == [Listed, Unlisted, Unlisted]
    assert (told[-1].incarnation, told[-1].reason) == (7, "its name is taken")
