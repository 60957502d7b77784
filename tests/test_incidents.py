"""Incidents of other projects, each as a test.

Docstrings name the tracker and the issue; docs/incidents.md lists all incidents and tests. Every
scenario runs with the code as it is, and again with variants that break the rule which the incident
broke and that must be detected. All run in virtual time.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from doyen import (
    AlreadyCampaigning,
    LeadershipLost,
    NotElected,
    Session,
    SessionClosed,
    Term,
    TermState,
)
from doyen.election.attempt import Attempt
from doyen.election.candidate import Candidacy
from doyen.election.core import SessionCore
from doyen.election.leader import Leading
from doyen.election.scopes import Campaign
from doyen.errors import LeaseGone, StoreUnavailable
from doyen.events import Elected, Event, Lost, Overrun, Waiting
from doyen.lease.clock import VirtualClock
from doyen.lease.keepalive import Keepalive
from doyen.lease.keeper import LeaseKeeper, StoreCalls
from doyen.lease.timing import Timing
from doyen.model import Claim, Entry, Leader, Lease, leader_key
from doyen.stores.memory import MemoryServer, _Held
from doyen.stores.port import Creation, Looked, Store
from doyen.testing.faults import Expired, Faults, FaultyStore, RefusedCall, Stray, Unanswered
from doyen.testing.faults import LostCall as Unheard
from mutants_nodes import answer_ignored
from support import STOP_BUDGET_S, TTL_S, VALID_S, Place, keepalive_of, now, until, virtual

Scenario = Callable[..., Coroutine[Any, Any, None]]
Variant = Callable[[pytest.MonkeyPatch], None]

CAUGHT = (AssertionError, pytest.fail.Exception, TimeoutError, LeadershipLost, NotElected)


def broken_by(*variants: Variant) -> Callable[[Scenario], Callable[..., None]]:
    """Make a test of a scenario: with the code as it is, and once for each broken rule."""

    def decorate(scenario: Scenario) -> Callable[..., None]:
        attempt = virtual(scenario)

        def test(broken: Variant | None, **given: Any) -> None:
            if broken is None:
                attempt(**given)
                return
            with pytest.MonkeyPatch.context() as patch:
                broken(patch)
                with pytest.raises(CAUGHT):
                    attempt(**given)

        own = list(inspect.signature(attempt).parameters.values())
        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter("broken", inspect.Parameter.POSITIONAL_OR_KEYWORD), *own]
        )
        ids = ["as it is", *(variant.__name__ for variant in variants)]
        marked: Callable[..., None] = pytest.mark.parametrize("broken", [None, *variants], ids=ids)(
            test
        )
        return marked

    return decorate


async def hold_on(session: Session, terms: list[Term], for_s: float = 1e6, **options: Any) -> None:
    """Campaign for "e", record the term, and keep it for a while."""
    async with session.campaign("e", **options) as term:
        terms.append(term)
        await asyncio.sleep(for_s)


def in_background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run it in the background; the scenario may ignore its result."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


# Broken rules.


def owner_known_by_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Attempt, "is_mine", lambda self, got: Claim.decode(got.value).name == self.settings.name
    )


def believing(*errors: type[Exception]) -> Variant:
    """A broken rule: a create that failed in this way is taken for a success."""

    def a_failed_create_believed(patch: pytest.MonkeyPatch) -> None:
        write = Attempt.write

        async def believe(self: Attempt, request: Awaitable[Any]) -> Any:
            called = getattr(request, "__qualname__", "").rpartition(".")[2]
            try:
                return await write(self, request)
            except errors:
                entry = Entry(self.record_key, b"", 9**9, 0, self.keepalive.lease.id)
                if called == "create_and_look":
                    return Looked(Creation(True, entry))
                if called != "create":
                    raise
                return Creation(True, entry)

        async def trust(self: Leading) -> None:
            """Skip the read of the record, which would reveal the mistake at once."""

        patch.setattr(Attempt, "write", believe)
        patch.setattr(Leading, "_look", trust)

    return a_failed_create_believed


def loss_not_reported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keepalive, "_tell", lambda self: None)
    patch.setattr(Term, "_expire", lambda self: None)


def body_not_stopped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Campaign, "_over", lambda self: None)


def no_stop_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Timing, "validity_s", property(lambda self: self.ttl_s))


def failed_renewal_ends_renewing(patch: pytest.MonkeyPatch) -> None:
    async def stop(self: Keepalive) -> None:
        while self.lost_because is None:
            await asyncio.sleep(self.timing.renew_every_s)
            sent_at = self._clock.now()
            await self._store.renew(self.lease)
            self._confirm(sent_at)

    patch.setattr(Keepalive, "run", stop)


def traces_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Candidacy, "_start_leaving", lambda self: setattr(self, "_left", True))


def given_back_over_the_bodys_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        LeaseKeeper, "_revoke_lost", lambda self, lost: self._tasks.start(self._revoke(lost))
    )


def record_not_watched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leading, "_changed", lambda self: self.attempt.wakeup.wake())


def calls_without_a_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StoreCalls, "call", lambda self, request: request)


# Two leaders.


@broken_by(owner_known_by_name)
async def test_a_record_left_by_a_dead_session_is_not_trusted(place: Place) -> None:
    """curator#1211: a candidate restarted under its old name found the node of its dead session and
    took itself for the leader."""
    faults = Faults()
    dead, restarted = await place.open(faults), await place.open()
    terms: list[Term] = []
    in_background(hold_on(dead, terms, name="server1", recipe="race"))
    await until(lambda: terms)
    faults.cut()
    in_background(hold_on(restarted, terms, name="server1", recipe="race"))
    await until(lambda: len(terms) == 2, 2 * TTL_S)
    assert not terms[0].valid
    assert now() >= TTL_S
    faults.heal()


def late_callback_counts(patch: pytest.MonkeyPatch) -> None:
    """A broken rule: the loss of any earlier lease of a campaign ends its current term."""
    terms: dict[str, Term] = {}
    begin, lead = Attempt.__init__, Leading.__init__

    def listen(self: Attempt, *given: Any) -> None:
        begin(self, *given)
        self.keepalive.on_loss(object(), partial(lose, self.settings.name))

    def lose(name: str) -> None:
        if name in terms:
            terms[name]._lose("the lease of an earlier attempt was lost")

    def remember(self: Leading, *given: Any) -> None:
        lead(self, *given)
        terms[self.term.name] = self.term

    patch.setattr(Attempt, "__init__", listen)
    patch.setattr(Leading, "__init__", remember)


@broken_by(late_callback_counts)
async def test_late_callback_of_an_old_session_changes_nothing(place: Place) -> None:
    """curator#1018: a late callback of the old session replaced live state."""
    leader, session = await place.open(), await place.open()
    terms: list[Term] = []
    in_background(hold_on(leader, [], for_s=10, name="a"))
    await until(lambda: place.holder() == "a")
    in_background(hold_on(session, terms, name="b"))
    await until(lambda: place.line() == ["a", "b"])
    old = keepalive_of(session)
    late = list(old._listeners.values())
    old.lose("the test says so")
    await until(lambda: terms)
    assert keepalive_of(session) is not old
    for listener in late:
        listener()
    old._confirm(place.clock.now())
    await asyncio.sleep(10 * TTL_S)
    assert terms[0].valid
    assert old.lost_because == "the test says so"


@pytest.mark.parametrize("how", ["lease gone", "refused", "silent", "adapter's own mistake"])
@broken_by(loss_not_reported, body_not_stopped)
async def test_every_failure_to_renew_stops_the_body(place: Place, how: str) -> None:
    """kubernetes#23731: the code path of a failed renewal skipped the stop hook, and the old leader
    continued to work. consul#1843: the failure of the renewer was discarded."""
    faults = Faults()

    class Mistaken(FaultyStore):
        async def renew(self, lease: Lease) -> None:
            raise KeyError("mistake")

    def wrap(store: Store) -> Store:
        return Mistaken(store, Faults())

    session = await place.open(faults, wrap=wrap if how.startswith("adapter") else None)
    if how == "lease gone":
        faults.next("renew", Expired())
    elif how == "refused":
        faults.next("renew", *[RefusedCall()] * 1000)
    elif how == "silent":
        faults.next("renew", *[Unheard()] * 1000)
    terms: list[Term] = []
    stopped_at: list[float] = []
    try:
        async with session.campaign("e") as term:
            terms.append(term)
            try:
                await asyncio.sleep(2 * TTL_S)
            finally:
                stopped_at.append(now())
    except LeadershipLost:
        pass
    assert stopped_at[0] <= VALID_S + 1e-6
    assert terms[0].state is TermState.LOST
    assert len(place.seen(Lost)) == 1


@broken_by(no_stop_budget)
async def test_a_stop_hook_within_its_budget_ends_before_the_successor_begins(place: Place) -> None:
    """cilium#42920: slow stop hooks outlived the lease, and two operators ran."""
    faults = Faults()
    a, b = await place.open(faults), await place.open()
    story: list[tuple[float, str]] = []

    async def work() -> None:
        async with a.campaign("e"):
            try:
                await asyncio.sleep(1e6)
            finally:
                await asyncio.sleep(0.95 * STOP_BUDGET_S)
                story.append((now(), "old leader has stopped"))

    in_background(work())
    await until(place.holder)
    faults.cut()
    async with b.campaign("e"):
        story.append((now(), "new leader begins"))
        await asyncio.sleep(STOP_BUDGET_S)
    assert [what for _, what in story] == ["old leader has stopped", "new leader begins"]
    assert place.seen(Overrun) == []
    faults.heal()


def ahead_gone_is_victory(patch: pytest.MonkeyPatch) -> None:
    """A broken rule: when the wait ends, the lock is taken as acquired, whatever the lease."""
    ahead = MemoryServer.ahead

    def none_ahead(self: MemoryServer, ticket: str) -> Entry | None:
        return ahead(self, ticket) if ticket in self._entries else None

    patch.setattr(MemoryServer, "ahead", none_ahead)
    believing(LeaseGone)(patch)


@broken_by(ahead_gone_is_victory)
async def test_no_candidate_is_elected_on_a_lease_that_expired_while_waiting(place: Place) -> None:
    """etcd#11456: the lock was granted after waiting, on a lease that had expired meanwhile."""
    a, b = await place.open(), await place.open()
    terms: list[Term] = []
    leading = in_background(hold_on(a, [], name="a"))
    await until(lambda: place.holder() == "a")
    in_background(hold_on(b, terms, name="b"))
    await until(lambda: place.line() == ["a", "b"])
    place.end_lease(b)
    leading.cancel()
    await until(lambda: terms)
    elected = place.seen(Elected)[-1]
    assert isinstance(elected, Elected)
    assert elected.lease in place.server._leases
    assert place.holder() == "b"
    await asyncio.sleep(10 * TTL_S)
    assert terms[0].valid


def entered_unheld(patch: pytest.MonkeyPatch) -> None:
    """A broken rule: `acquire` gives up and returns, and the body of `with` is entered."""
    enter, leave = Campaign.__aenter__, Campaign.__aexit__

    async def anyway(self: Campaign) -> Any:
        try:
            return await enter(self)
        except NotElected:
            return None

    async def if_entered(self: Campaign, *error: Any) -> Any:
        return await leave(self, *error) if self.term is not None else None

    patch.setattr(Campaign, "__aenter__", anyway)
    patch.setattr(Campaign, "__aexit__", if_entered)


@pytest.mark.parametrize("wait_s", [0, 3])
@broken_by(entered_unheld)
async def test_a_scope_is_never_entered_without_leading(place: Place, wait_s: float) -> None:
    """python-etcd3#599, #1314, redis-py#621: `with lock:` was entered when the wait timed out."""
    a, b = await place.open(), await place.open()
    async with a.campaign("e"):
        with pytest.raises(NotElected):
            async with b.campaign("e", wait_s=wait_s):
                pytest.fail("entered without leading")


@broken_by(believing(Exception))
async def test_an_error_while_acquiring_is_no_success(place: Place) -> None:
    """redbeat#208: an exception in acquire was taken as success."""
    a = await place.open()

    class Mistaken(FaultyStore):
        async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
            raise KeyError("mistake")

    class Unreachable(FaultyStore):
        async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
            raise StoreUnavailable("connection refused")

    async with a.campaign("e", name="a", recipe="race"):
        for kind, error in ((Mistaken, KeyError), (Unreachable, NotElected)):
            b = await place.open(wrap=lambda store, kind=kind: kind(store, Faults()))  # type: ignore[misc]
            with pytest.raises(error):
                async with b.campaign("e", recipe="race", wait_s=1):
                    pytest.fail("entered without leading")
        assert place.holder() == "a"


def renewal_revives(patch: pytest.MonkeyPatch) -> None:
    """A broken rule: `SET key ttl`, without a check of the holder."""

    def set_anew(self: MemoryServer, lease: str) -> None:
        held = self._leases.setdefault(lease, _Held(TTL_S, 0.0))
        held.expires_at = self.clock.now() + held.ttl_s

    patch.setattr(MemoryServer, "renew", set_anew)


@broken_by(renewal_revives)
async def test_a_renewal_that_lands_after_the_end_revives_nothing(place: Place) -> None:
    """redbeat#127: the lock was extended without a check of its holder."""
    faults = Faults()
    a, b = await place.open(faults), await place.open()
    terms: list[Term] = []
    faults.next("renew", Stray(after_s=2 * TTL_S), *[Unheard()] * 1000)
    in_background(hold_on(a, [], name="a"))
    await until(lambda: place.holder() == "a")
    lease = keepalive_of(a).lease.id
    in_background(hold_on(b, terms, name="b"))
    await until(lambda: terms, 2 * TTL_S)
    await asyncio.sleep(2 * TTL_S)
    assert lease not in place.server._leases
    assert place.holder() == "b"
    assert terms[0].valid


def any_attempt_of_ours(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Attempt, "is_mine", lambda self, entry: entry.lease == self.keepalive.lease.id)


@broken_by(any_attempt_of_ours)
async def test_a_stale_read_confirms_nothing(place: Place) -> None:
    """patroni#316: a read from a lagging replica "confirmed" a leadership that had ended. Here the
    replica still shows the former record when the response to the next claim is lost."""
    stale: list[Entry] = []

    class Lagging(FaultyStore):
        async def get(self, key: str) -> Entry | None:
            return stale[0] if stale else await super().get(key)

    faults = Faults()
    a = await place.open(wrap=lambda store: Lagging(store, faults))
    b = await place.open()
    async with a.campaign("e", name="a"):
        former = place.server.get(leader_key("e"))
    assert former is not None
    async with b.campaign("e", name="b"):
        stale.append(former)
        faults.next("create", Unheard())
        with pytest.raises(NotElected):
            async with a.campaign("e", name="a", recipe="race", wait_s=2 * TTL_S):
                pytest.fail("entered without leading")
        stale.clear()


@broken_by(answer_ignored)
async def test_a_store_error_extends_nothing(place: Place) -> None:
    """patroni#329: after an error of the store the lock was still taken as held. helix#691: work
    went on until the connection was restored."""
    faults = Faults()
    a, b = await place.open(faults), await place.open()
    terms: list[Term] = []
    faults.next("renew", *[RefusedCall()] * 1000)
    in_background(hold_on(a, terms, name="a"))
    await until(lambda: terms)
    in_background(hold_on(b, terms, name="b"))
    await asyncio.sleep(VALID_S - now() - 1e-6)
    assert terms[0].valid
    await asyncio.sleep(2e-6)
    assert not terms[0].valid
    await until(lambda: len(terms) == 2, TTL_S)


@broken_by(loss_not_reported)
async def test_the_loss_is_reported_although_the_next_attempt_fails(place: Place) -> None:
    """spring-integration#2098: leadership was not revoked while locking again kept failing."""
    faults = Faults()
    session = await place.open(faults)
    rounds: list[str] = []

    async def work() -> None:
        async for campaign in session.campaigns("e"):
            async with campaign:
                rounds.append("entered")
                try:
                    await asyncio.sleep(1e6)
                finally:
                    rounds.append("ended")

    task = in_background(work())
    await until(lambda: rounds)
    faults.cut()
    await asyncio.sleep(3600)
    assert rounds == ["entered", "ended"]
    assert len(place.seen(Lost)) == 1
    faults.heal()
    await until(lambda: len(rounds) == 3)
    task.cancel()


def on_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VirtualClock, "now", lambda self: self._monotonic + self._wall_offset)


@broken_by(on_the_wall_clock)
async def test_no_wall_clock_decides(place: Place) -> None:
    """PySyncObj#108: ages were computed from the clients' wall clocks."""
    session = await place.open()
    async with session.campaign("e") as term:
        for step_s in (3600, -7200, 86_400):
            place.clock.step_wall(step_s)
            assert term.valid
            await asyncio.sleep(TTL_S)
            assert term.valid


# Stuck, leaked or wrongly notified.


@broken_by(calls_without_a_bound)
async def test_a_campaign_goes_on_after_the_store_was_paused(place: Place) -> None:
    """etcd#14641: a campaign hung for ever after the store's leader had been paused for a while."""
    for operation in ("grant", "enqueue", "ahead", "watch", "create", "get"):
        faults = Faults()
        other = await place.open(faults)
        faults.next(operation, Unheard())
        async with asyncio.timeout(2 * TTL_S), other.campaign("e"):
            pass
    faults = Faults()
    session = await place.open(faults)
    faults.cut()
    task = in_background(hold_on(session, [], for_s=1))
    await asyncio.sleep(600)
    faults.heal()
    async with asyncio.timeout(2 * TTL_S):
        await task


def first_under_the_prefix(patch: pytest.MonkeyPatch) -> None:
    async def first(calls: StoreCalls, election: str, **_: Any) -> Leader | None:
        for entry in await calls.call(calls.store.list("elections")):
            if entry.key.startswith(f"elections/{election}") and entry.key.endswith("/leader"):
                return Leader(election, Claim.decode(entry.value).name, entry.revision)
        return None

    for module in ("doyen.session", "doyen.election.queries"):
        patch.setattr(f"{module}.read_leader", first)


@broken_by(first_under_the_prefix)
async def test_an_observer_is_notified_of_its_own_election_only(place: Place) -> None:
    """etcd#18163: observe returned the leader of another election with the same prefix."""
    watcher, a = await place.open(), await place.open()
    seen: list[str | None] = []

    async def watch() -> None:
        async for leader in watcher.observe("e"):
            seen.append(leader.name if leader else None)  # noqa: PERF401 - as it comes

    task = in_background(watch())
    await until(lambda: seen == [None])
    for other in ("e2", "e/leader", "e/line", "e%2F", "E", "./e"):
        async with a.campaign(other, name=other):
            await asyncio.sleep(1)
            assert await watcher.leader("e") is None
    async with a.campaign("e", name="right"), a.campaign("e/leader", name="wrong"):
        await until(lambda: len(seen) == 2)
    await until(lambda: len(seen) == 3)
    assert seen == [None, "right", None]
    task.cancel()


@broken_by(record_not_watched)
async def test_a_lease_revoked_by_the_stores_mistake_is_noticed_at_once(place: Place) -> None:
    """etcd#15247: a stalled former leader of the store revoked live leases. Holders cannot prevent
    that, but they notice it before their next renewal."""
    session = await place.open()
    with pytest.raises(LeadershipLost):
        async with session.campaign("e") as term:
            await asyncio.sleep(0.1)
            place.end_lease(session)
            revoked_at = now()
            await asyncio.sleep(100)
    assert now() - revoked_at < 0.01
    assert not term.valid


def scopes_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("doyen.election.scopes.enter_term", lambda *entered: None)


@broken_by(scopes_forgotten)
async def test_a_second_claim_on_the_same_session_does_not_stack(place: Place) -> None:
    """wolverine#2691: re-entrant locks were counted, and one release did not free the lock."""
    a, b = await place.open(), await place.open()
    async with asyncio.timeout(TTL_S):
        async with a.campaign("e"):
            with pytest.raises(AlreadyCampaigning):
                async with a.campaign("e"):
                    pytest.fail("entered twice")
        async with b.campaign("e"):
            pass


@pytest.mark.parametrize("fault", [Unanswered(), Unanswered(raises=True), Stray(after_s=3.0)])
@pytest.mark.parametrize("operation", ["create", "enqueue"])
@pytest.mark.parametrize("giving_up", ["wait_s", "timeout"])
@broken_by(traces_left)
async def test_a_claim_given_up_unanswered_leaks_nothing(
    place: Place, fault: Any, operation: str, giving_up: str
) -> None:
    """greptimedb#7670: the client timed out, the lock was acquired nevertheless, and had no holder.

    The session that made the claim lives on and renews its lease, so nothing else would end it.
    """
    faults = Faults()
    a, b = await place.open(faults), await place.open()
    async with a.campaign("other"):
        faults.next(operation, fault)
        wait_s = 0.5 if giving_up == "wait_s" else None
        timeout_s = 0.5 if giving_up == "timeout" else None
        try:
            async with asyncio.timeout(timeout_s), a.campaign("e", name="a", wait_s=wait_s):
                # Only an own write that was found again can lead to this.
                assert place.holder() == "a"
        except (NotElected, TimeoutError):
            pass
        await asyncio.sleep(2 * TTL_S)
        assert (place.holder(), place.line()) == (None, [])
        async with asyncio.timeout(1), b.campaign("e"):
            pass


@pytest.mark.parametrize("fault", [RefusedCall(), Unheard(), Unheard(raises=True), Unanswered()])
@broken_by(failed_renewal_ends_renewing)
async def test_one_failed_renewal_is_not_the_last(place: Place, fault: Any) -> None:
    """redisson#775: after one failed renewal the next was never scheduled."""
    faults = Faults()
    session = await place.open(faults)
    async with session.campaign("e") as term:
        for _ in range(10):
            faults.next("renew", fault)
            await asyncio.sleep(2 * TTL_S)
            assert term.valid


@broken_by()
async def test_a_listener_that_fails_does_not_end_the_renewals(place: Place) -> None:
    """redisson#775 again: here an error of a user's callback must not end the renewals."""
    session = await place.open()

    def fail(deadline: float) -> None:
        raise ZeroDivisionError

    async with session.campaign("e") as term:
        term._on_renewal(fail)
        await asyncio.sleep(10 * TTL_S)
        assert term.valid


@broken_by(given_back_over_the_bodys_head)
async def test_the_record_stands_until_the_guarded_work_has_returned(place: Place) -> None:
    """kubernetes#139504: the lease was released at shutdown while the work was still ending."""
    a, b = await place.open(), await place.open()
    story: list[str] = []

    async def work() -> None:
        async with a.campaign("e", name="a"):
            try:
                await asyncio.sleep(1e6)
            finally:
                await asyncio.sleep(0.9 * STOP_BUDGET_S)
                story.append("old leader has stopped")

    async def succeed() -> None:
        async with b.campaign("e", name="b"):
            story.append("new leader begins")

    for how in ("cancelled", "lost"):
        story.clear()
        task = in_background(work())
        await until(lambda: place.holder() == "a")
        successor = in_background(succeed())
        await until(lambda: place.line() == ["a", "b"])
        task.cancel() if how == "cancelled" else keepalive_of(a).lose("the test says so")
        async with asyncio.timeout(STOP_BUDGET_S):  # released, not left to expire
            await successor
        assert story == ["old leader has stopped", "new leader begins"], how


def keepalive_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keepalive, "_deadline", lambda self: self.timing.valid_until(self._sent_at))


@broken_by(keepalive_is_enough)
async def test_a_leader_whose_work_hangs_makes_room(place: Place) -> None:
    """lavinmq#2151, kubernetes-client/python#2670: the keepalive was healthy while the work hung.

    Only the campaign with `stall_after_s` is ended; the session's other terms go on.
    """
    a, b = await place.open(), await place.open()
    async with a.campaign("other") as other:
        with pytest.raises(LeadershipLost, match=r"has not called term\.beat\(\) for 2 s"):
            async with a.campaign("e", name="a", stall_after_s=2) as term:
                for _ in range(100):
                    await asyncio.sleep(1)
                    term.beat()
                hung_at = now()
                await asyncio.sleep(100)
                pytest.fail("it was not ended")
        assert now() - hung_at == pytest.approx(2)
        async with asyncio.timeout(1), b.campaign("e", name="b"):
            assert other.valid


def waiting_left_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SessionCore, "run", lambda self, work: work())


@broken_by(waiting_left_waiting)
async def test_closing_a_session_ends_its_waiting_candidates(place: Place) -> None:
    """kazoo#89: waiting candidates were not notified of the end of the session."""
    faults = Faults()
    session = place.session(faults)
    async with session:
        watching = in_background(watch_forever(session))
        await asyncio.sleep(1)
        faults.cut()
        waiting = in_background(hold_on(session, []))
        await asyncio.sleep(TTL_S)
    for task in (watching, waiting):
        async with asyncio.timeout(0.1):
            with pytest.raises(SessionClosed):
                await task
    faults.heal()


async def watch_forever(session: Session) -> None:
    async for _ in session.observe("e"):
        pass


def ready_when_leading(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("test_incidents.READY", (Elected,))


READY: tuple[type[Event], ...] = (Waiting, Elected)
"""What tells that a candidate has started well."""


@broken_by(ready_when_leading)
async def test_a_rolling_update_does_not_wait_for_leadership(place: Place) -> None:
    """argo-workflows#8283: a new process was ready only when it led, and the old one was stopped
    only when the new one was ready. A candidate in line is ready without reading the store."""
    replicas: list[asyncio.Task[None]] = []
    for generation in range(6):
        name = f"replica-{generation}"
        session = await place.open()
        replicas.append(in_background(hold_on(session, [], name=name)))

        def ready(name: str = name) -> bool:
            return any(
                isinstance(event, Waiting | Elected) and event.name == name
                for event in place.seen(*READY)
            )

        await until(ready)
        if len(replicas) > 2:
            replicas.pop(0).cancel()
    await until(lambda: place.holder() == "replica-4")


DOCUMENT = Path(__file__).parents[1] / "docs" / "incidents.md"


def incidents() -> list[tuple[str, list[str]]]:
    """The rows of the document: the issues and the tests."""
    rows = re.findall(r"(?m)^\| (\S+#\d.*?) \| .* \| (`test.*`) \|$", DOCUMENT.read_text())
    return [(issues, re.findall(r"`(.*?)`", tests)) for issues, tests in rows]


@pytest.mark.parametrize(("issues", "tests"), incidents())
def test_the_tests_of_an_incident_exist(issues: str, tests: list[str]) -> None:
    sources = ""
    for test in tests:
        module, *path = test.split("::")
        text = (Path(__file__).parent / f"{module}.py").read_text()
        inside: list[ast.stmt] = ast.parse(text).body
        for name in path:
            named = [each for each in inside if getattr(each, "name", "") == name]
            assert named, f"{test} is named in {DOCUMENT.name}, and there is none"
            inside = getattr(named[0], "body", [])
        sources += text
    for issue in issues.split(", "):
        number = issue.rpartition("#")[2]
        assert f"#{number}" in sources, f"none of the tests mentions {issue}"


def test_every_incident_of_these_tests_is_in_the_document() -> None:
    listed = {issue for issues, _ in incidents() for issue in issues.split(", ")}
    here = set(re.findall(r"[\w/-]+#\d+", Path(__file__).read_text()))
    assert len(listed) >= 30
    assert here <= listed
