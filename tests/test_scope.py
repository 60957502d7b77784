"""Leadership as a cancel scope: every way in which a body, a loss and a cancellation can meet.

The rules are those of `asyncio.timeout`: the user's own cancellation is never eaten, ours never
leaks out, and what was lost is always told. All in virtual time; `virtual` adds to each test that
no cancellation is left over and that nothing is left in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from doyen import AlreadyCampaigning, LeadershipLost, NotElected, Session, Term, TermState
from doyen.election.options import Recipe
from doyen.election.scopes import Campaign
from doyen.errors import StaleToken
from doyen.events import Elected, Resigned
from doyen.model import leader_key
from doyen.testing.faults import Faults, Late, Odds, Unanswered
from support import STOP_BUDGET_S, VALID_S, Place, keepalive_of, now, soon, until, virtual

LOST = "'a' no longer leads 'e'"


def me() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


def stand(session: Session, election: str = "e", name: str = "a") -> Campaign:
    return session.campaign(election, name=name)


def lose(term: Term) -> None:
    term._lose("the test says so")


# A loss, and how the body takes it.


@virtual
async def test_loss_cancels_the_body_and_raises(place: Place) -> None:
    session = await place.open()
    cancelled_at = None
    with pytest.raises(LeadershipLost, match=rf"{LOST} \(token \d+\): the test says so") as lost:
        async with stand(session) as term:
            assert term.valid
            assert me().cancelling() == 0
            soon(1.0, lose, term)
            try:
                await asyncio.sleep(100)
            finally:
                cancelled_at = now()
                assert not term.valid
                assert me().cancelling() == 1
    assert cancelled_at == 1.0
    assert isinstance(lost.value.__context__, asyncio.CancelledError)
    assert term.state is TermState.LOST


@pytest.mark.parametrize("how", ["lease ended", "record removed", "link cut", "closed"])
@virtual
async def test_every_way_to_lose_reaches_the_body(place: Place, how: str) -> None:
    faults = Faults()
    session = await place.open(faults)
    closing: asyncio.Task[None] | None = None
    deadline = 0.0
    with pytest.raises(LeadershipLost):
        async with stand(session) as term:
            deadline = term.valid_until
            if how == "lease ended":
                place.end_lease(session)
            elif how == "record removed":
                place.server.delete(leader_key("e"))
            elif how == "link cut":
                faults.cut()
            else:
                closing = asyncio.create_task(session.__aexit__(None, None, None))
            await asyncio.sleep(100)
    if how == "link cut":
        assert now() == pytest.approx(VALID_S) == deadline
        faults.heal()
    else:
        assert now() < 1.0
    if closing is not None:
        await closing
        place.sessions.pop_all()


@virtual
async def test_a_body_that_swallows_the_cancellation_still_ends_in_loss(place: Place) -> None:
    session = await place.open()
    went_on = False
    with pytest.raises(LeadershipLost):
        async with stand(session) as term:
            soon(1.0, lose, term)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(100)
            await asyncio.sleep(0.1)
            went_on = True
    assert went_on


@virtual
async def test_a_body_that_never_awaits_ends_in_loss(place: Place) -> None:
    session = await place.open()
    with pytest.raises(LeadershipLost):
        async with stand(session) as term:
            lose(term)
    await asyncio.sleep(1)


@virtual
async def test_the_bodys_own_error_is_kept_as_context(place: Place) -> None:
    session = await place.open()
    with pytest.raises(LeadershipLost) as lost:
        async with stand(session) as term:
            soon(1.0, lose, term)
            try:
                await asyncio.sleep(100)
            finally:
                raise KeyError("cleanup failed")
    assert isinstance(lost.value.__context__, KeyError)


@virtual
async def test_the_bodys_own_error_alone_passes(place: Place) -> None:
    session = await place.open()
    with pytest.raises(KeyError):
        async with stand(session) as term:
            raise KeyError("mine")
    assert term.state is TermState.ENDED
    assert place.holder() is None


@virtual
async def test_a_loss_that_the_body_raised_itself_is_not_raised_twice(place: Place) -> None:
    session = await place.open()
    with pytest.raises(LeadershipLost) as lost:
        async with stand(session) as term:
            lose(term)
            term.check()
    assert lost.value.__context__ is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("lost_first", [True, False])
def test_interrupts_pass(error: type[BaseException], lost_first: bool) -> None:
    seen: list[str | None] = []

    @virtual
    async def body(place: Place) -> None:
        session = await place.open()
        try:
            async with stand(session) as term:
                if lost_first:
                    lose(term)
                raise error
        finally:
            seen.append(place.holder())

    with pytest.raises(error):
        body()
    assert seen == [None]


# The user's own cancellation.


@virtual
async def test_cancellation_from_outside_passes_and_resigns(place: Place) -> None:
    session = await place.open()

    async def campaign() -> None:
        async with stand(session):
            await asyncio.sleep(100)

    task = asyncio.create_task(campaign())
    soon(1.0, task.cancel, "enough")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert place.holder() is None
    assert [type(event) for event in place.seen(Elected, Resigned)] == [Elected, Resigned]


@pytest.mark.parametrize("order", ["cancel, loss", "loss, cancel"])
@pytest.mark.parametrize("swallowed", [False, True])
@virtual
async def test_cancellation_and_loss_in_one_tick(place: Place, order: str, swallowed: bool) -> None:
    """The user's cancellation wins, in either order. One that the body swallowed is the body's
    affair, and then the loss is told: a lost term never ends in silence."""
    session = await place.open()
    cancelling: list[int] = []

    async def campaign() -> None:
        try:
            async with stand(session) as term:
                calls: list[Callable[[], object]] = [me().cancel, lambda: lose(term)]
                for call in calls if order == "cancel, loss" else reversed(calls):
                    soon(1.0, call)
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    if not swallowed:
                        raise
        finally:
            cancelling.append(me().cancelling())
            await asyncio.sleep(1)

    with pytest.raises(LeadershipLost if swallowed else asyncio.CancelledError):
        await asyncio.create_task(campaign())
    assert cancelling == [1]


@virtual
async def test_cancelling_oneself_as_the_term_is_lost(place: Place) -> None:
    session = await place.open()

    async def campaign() -> None:
        async with stand(session) as term:
            lose(term)
            me().cancel()
            await asyncio.sleep(100)

    task = asyncio.create_task(campaign())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


@virtual
async def test_entering_while_cancelling(place: Place) -> None:
    """A task that has an old cancellation on its count (it cleans up, say) can still lead, and
    still be told of loss."""
    session = await place.open()

    async def campaign() -> int:
        me().cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        with pytest.raises(LeadershipLost):
            async with stand(session) as term:
                soon(1.0, lose, term)
                await asyncio.sleep(100)
        await asyncio.sleep(1)
        async with stand(session):
            await asyncio.sleep(1)
        return me().cancelling()

    assert await asyncio.create_task(campaign()) == 1


@virtual
async def test_nothing_stray_comes_after_the_scope(place: Place) -> None:
    session = await place.open()
    for swallowed in (False, True):
        with pytest.raises(LeadershipLost):
            async with stand(session) as term:
                soon(1.0, lose, term)
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    if not swallowed:
                        raise
        assert me().cancelling() == 0
        await asyncio.sleep(10)


@virtual
async def test_a_loss_queued_but_not_yet_run_is_raised_by_the_exit(place: Place) -> None:
    session = await place.open()
    with pytest.raises(LeadershipLost):
        async with stand(session) as term:
            await asyncio.sleep(1)
            lose(term)  # the cancellation is queued, and the body ends first
    assert me().cancelling() == 0
    await asyncio.sleep(1)


@virtual
async def test_a_loss_after_the_exit_has_no_effect(place: Place) -> None:
    session = await place.open()
    async with stand(session) as term:
        pass
    assert not term.valid
    lose(term)
    assert term.state is TermState.ENDED
    place.end_lease(session)
    await asyncio.sleep(10)
    assert term.state is TermState.ENDED


@virtual
async def test_a_term_lost_before_it_was_entered_is_not_entered(place: Place) -> None:
    """Elected, and lost again before the caller's loop came round to it: stand anew."""
    session = await place.open()
    lost: list[Term] = []
    make = Term.__init__

    def lost_at_birth(self: Term, **given: object) -> None:
        make(self, **given)  # type: ignore[arg-type]
        if not lost:
            lost.append(self)
            asyncio.get_running_loop().call_soon(lose, self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Term, "__init__", lost_at_birth)
        async with stand(session) as term:
            assert term.valid
            assert term.token > lost[0].token
            assert place.holder() == "a"


# Timeouts and task groups.


@virtual
async def test_a_timeout_inside(place: Place) -> None:
    session = await place.open()
    async with stand(session) as term:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.sleep(100)
        assert term.valid
    with pytest.raises(LeadershipLost):
        async with stand(session) as term:
            soon(0.5, lose, term)
            async with asyncio.timeout(1):
                await asyncio.sleep(100)


@virtual
async def test_a_timeout_inside_that_ends_with_the_term(place: Place) -> None:
    session = await place.open()
    for loss_first in (True, False):
        with pytest.raises(LeadershipLost):
            async with stand(session) as term:
                if loss_first:
                    soon(1, lose, term)
                async with asyncio.timeout(1):
                    if not loss_first:
                        soon(1, lose, term)
                    await asyncio.sleep(100)
        await asyncio.sleep(1)


@virtual
async def test_a_timeout_outside(place: Place) -> None:
    session = await place.open()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1), stand(session):
            await asyncio.sleep(100)
    assert place.holder() is None
    with pytest.raises(LeadershipLost):
        async with asyncio.timeout(1), stand(session) as term:
            soon(0.5, lose, term)
            await asyncio.sleep(100)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1), stand(session) as term:
            soon(1, lose, term)
            await asyncio.sleep(100)
    await asyncio.sleep(10)


@virtual
async def test_a_timeout_outside_ends_the_waiting(place: Place) -> None:
    leader, other = await place.open(), await place.open()
    async with stand(leader):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), stand(other, name="b"):
                pytest.fail("entered without leading")
        await until(lambda: place.line() == ["a"], 1)


@virtual
async def test_a_task_group_inside(place: Place) -> None:
    session = await place.open()
    children: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            children.append("ended")

    with pytest.raises(LeadershipLost):
        async with stand(session) as term, asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())
            soon(1, lose, term)
    assert children == ["ended", "ended"]
    await asyncio.sleep(10)


@pytest.mark.parametrize("when", ["alone", "before", "after"])
@virtual
async def test_a_task_group_inside_with_a_failing_child(place: Place, when: str) -> None:
    session = await place.open()

    async def child() -> None:
        await asyncio.sleep(1)
        raise KeyError("child")

    with pytest.raises((LeadershipLost, ExceptionGroup)) as raised:
        async with stand(session) as term:
            if when == "before":
                soon(1, lose, term)
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                await asyncio.sleep(0)
                if when == "after":
                    soon(1, lose, term)
                await asyncio.sleep(100)
    group_error = raised.value if when == "alone" else raised.value.__context__
    assert isinstance(group_error, ExceptionGroup)
    assert isinstance(group_error.exceptions[0], KeyError)
    assert isinstance(raised.value, LeadershipLost) is (when != "alone")
    await asyncio.sleep(10)


async def in_a_group(*children: Coroutine[Any, Any, None]) -> None:
    """In a task of its own: before 3.13 a group may leave a cancellation on its parent's count."""
    async with asyncio.TaskGroup() as group:
        for child in children:
            group.create_task(child)


@virtual
async def test_a_task_group_outside(place: Place) -> None:
    """One that leads among siblings: its loss ends the group, as any error of a child does."""
    session = await place.open()
    sibling_ended = False

    async def sibling() -> None:
        nonlocal sibling_ended
        try:
            await asyncio.sleep(100)
        finally:
            sibling_ended = True

    async def campaign() -> None:
        async with stand(session) as term:
            soon(1, lose, term)
            await asyncio.sleep(100)

    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.create_task(in_a_group(sibling(), campaign()))
    assert raised.group_contains(LeadershipLost)
    assert sibling_ended


@virtual
async def test_a_failing_sibling_ends_the_term_and_the_leader_resigns(place: Place) -> None:
    session = await place.open()

    async def failing() -> None:
        await asyncio.sleep(1)
        raise KeyError

    async def campaign() -> None:
        async with stand(session):
            await asyncio.sleep(100)

    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.create_task(in_a_group(campaign(), failing()))
    assert raised.group_contains(KeyError)
    assert len(raised.value.exceptions) == 1
    assert place.holder() is None


# Nested terms.


@pytest.mark.parametrize("lost", ["outer", "inner", "both", "both, inner first", "the lease"])
@virtual
async def test_nested_terms(place: Place, lost: str) -> None:
    """Each scope answers for its own loss: whoever lost first ends first, outermost last."""
    session = await place.open()
    raised: list[str] = []
    try:
        async with stand(session, "outer") as outer:
            try:
                async with stand(session, "inner") as inner:
                    if lost == "the lease":
                        soon(1, place.end_lease, session)
                    if lost in ("outer", "both"):
                        soon(1, lose, outer)
                    if lost != "outer" and lost != "the lease":
                        soon(1, lose, inner)
                    if lost == "both, inner first":
                        soon(1, lose, outer)
                    await asyncio.sleep(100)
            except LeadershipLost as error:
                raised.append(str(error))
                raise
            finally:
                assert place.holder("inner") is None or lost == "the lease"
    except LeadershipLost as error:
        raised.append(str(error))
    expected = {"outer": ["outer"], "inner": ["inner", "inner"]}
    innermost = [text.split(" leads ")[1].split("'")[1] for text in raised]
    # A loss of both in one tick is, to the inner scope, a cancellation from outside as well.
    assert innermost in (
        [expected[lost]] if lost in expected else [["outer"], ["inner", "outer"]]
    ), raised
    await asyncio.sleep(10)


@virtual
async def test_the_same_election_nested_is_refused(place: Place) -> None:
    session = await place.open()
    async with stand(session):
        with pytest.raises(AlreadyCampaigning, match="already leads 'e' in this scope"):
            async with stand(session, name="b"):
                pytest.fail("entered")
        assert place.line() == ["a"]
    async with stand(session) as again:
        assert again.valid


# Letting go.


@virtual
async def test_a_second_cancellation_does_not_stop_the_resignation(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)

    async def campaign() -> None:
        async with stand(session):
            faults.next("delete", Late(before_s=0.5), Late(before_s=0.5))
            await asyncio.sleep(100)

    task = asyncio.create_task(campaign())
    soon(1.0, task.cancel)
    soon(1.2, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert now() == 1.2
    assert place.holder() == "a"
    await asyncio.sleep(1.0)
    assert (place.holder(), place.line()) == (None, [])


@virtual
async def test_a_second_cancellation_at_any_instant_of_the_resignation(place: Place) -> None:
    session = await place.open()

    async def campaign() -> None:
        async with stand(session):
            await asyncio.sleep(100)

    for turns in range(10):
        task = asyncio.create_task(campaign())
        await until(place.holder)
        task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: (place.holder(), place.line()) == (None, []), 1)
        assert keepalive_of(session).bodies == 0


@virtual
async def test_a_cancellation_while_closing_does_not_stop_the_closing(place: Place) -> None:
    faults = Faults()
    closed = False

    async def campaign() -> None:
        session = place.session(faults)
        async with session:
            async with stand(session):
                pass
            faults.next("revoke", Late(before_s=0.5))
            soon(0.1, me().cancel)
        nonlocal closed
        closed = True

    task = asyncio.create_task(campaign())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not closed
    assert now() == 0.5
    assert place.server._leases == {}


@virtual
async def test_a_body_may_take_its_time_to_clean_up(place: Place) -> None:
    """The record is let go when the body has ended, not when it was told to."""
    session = await place.open()
    with pytest.raises(LeadershipLost):
        async with stand(session) as term:
            soon(1, lose, term)
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(STOP_BUDGET_S / 2)
                assert place.holder() == "a"
    assert place.holder() is None


@pytest.mark.parametrize("at", ["in line", "at the record"])
@virtual
async def test_cancelled_while_waiting_leaves_nothing_behind(place: Place, at: str) -> None:
    leader, other = await place.open(), await place.open()
    async with stand(leader):
        if at == "at the record":
            place.server.delete(place.server.list("elections/e/line")[0].key)
        task = asyncio.create_task(stand(other, name="b").__aenter__())
        await until(lambda: "b" in place.line())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: "b" not in place.line(), 1)


@virtual
async def test_cancelled_at_every_instant_of_entering(place: Place) -> None:
    """Between any two turns of the loop: nothing is left behind, and nobody leads unawares."""
    other = await place.open()
    turns, entered = 0, False
    while not entered:
        turns += 1
        assert turns < 100
        session = place.session(Faults(odds=Odds(late=1.0, delay_s=0.0)))
        async with session:
            task = asyncio.create_task(stand(session).__aenter__())
            for _ in range(turns):
                await asyncio.sleep(0)
            entered = task.done()
            task.cancel()
            await asyncio.wait({task})
            if not entered:
                async with asyncio.timeout(1), stand(other, name="b"):
                    assert place.line() == ["b"], turns
    assert turns > 10


@virtual
async def test_cancelled_while_an_answer_is_missing_leaves_nothing_behind(place: Place) -> None:
    for operation in ("enqueue", "create"):
        faults = Faults()
        session = await place.open(faults)
        faults.next(operation, Unanswered())
        task = asyncio.create_task(stand(session).__aenter__())
        await asyncio.sleep(0.1)
        assert place.line() == ["a"]
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: (place.holder(), place.line()) == (None, []), 1)


# Waiting, and failing to win.


@pytest.mark.parametrize("wait_s", [0, 2.5])
@pytest.mark.parametrize("recipe", ["line", "race"])
@virtual
async def test_waiting_has_a_bound_and_the_error_says_who_leads(
    place: Place, wait_s: float, recipe: Recipe
) -> None:
    leader, second, third = [await place.open() for _ in range(3)]
    async with stand(leader):
        queued = asyncio.create_task(stand(second, name="b").__aenter__())
        await until(lambda: "b" in place.line())
        began = now()
        with pytest.raises(NotElected, match=r"'c' was not elected to 'e'.*'a' leads"):
            async with third.campaign("e", name="c", wait_s=wait_s, recipe=recipe):
                pytest.fail("entered without leading")
        assert now() - began == pytest.approx(wait_s)
        await until(lambda: place.line() == ["a", "b"], 1)
        queued.cancel()


@virtual
async def test_wait_s_does_not_bound_the_body(place: Place) -> None:
    session = await place.open()
    async with session.campaign("e", wait_s=0) as term:
        await asyncio.sleep(100)
        assert term.valid


@virtual
async def test_without_a_store_the_error_says_so(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    faults.cut()
    with pytest.raises(NotElected, match="the store did not answer within 1 s"):
        async with session.campaign("e", name="a", wait_s=3):
            pytest.fail("entered without leading")
    faults.heal()


@virtual
async def test_a_campaign_is_entered_once(place: Place) -> None:
    session = await place.open()
    campaign = stand(session)
    async with campaign:
        with pytest.raises(AlreadyCampaigning, match="entered once"):
            await campaign.__aenter__()
    with pytest.raises(AlreadyCampaigning, match="entered once"):
        await campaign.__aenter__()


# campaigns(): a loss is what the loop is for.


@virtual
async def test_campaigns_go_round_after_a_loss(place: Place) -> None:
    session = await place.open()
    tokens: list[int] = []
    async for campaign in session.campaigns("e", name="a"):
        async with campaign as term:
            tokens.append(term.token)
            if len(tokens) == 1:
                soon(1, lose, term)
                await asyncio.sleep(100)
            elif len(tokens) == 2:
                place.end_lease(session)
                await asyncio.sleep(100)
            elif len(tokens) == 3:
                lose(term)
                term.check()
            elif len(tokens) == 4:
                lose(term)
                raise StaleToken("refused by the resource")
            else:
                break
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 5


@pytest.mark.parametrize("lost", [True, False])
@virtual
async def test_campaigns_raise_the_bodys_own_error(place: Place, lost: bool) -> None:
    session = await place.open()
    with pytest.raises(KeyError):
        async for campaign in session.campaigns("e"):
            async with campaign as term:
                if lost:
                    lose(term)
                raise KeyError


@virtual
async def test_campaigns_pass_cancellation_on(place: Place) -> None:
    session = await place.open()

    async def campaign() -> None:
        async for campaign in session.campaigns("e"):
            async with campaign as term:
                soon(1, lose, term)
                soon(1, me().cancel)
                await asyncio.sleep(100)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(campaign())
    assert now() == 1


# The signaller.


def fail() -> None:
    raise ZeroDivisionError("a listener's own mistake")


@virtual
async def test_a_failing_listener_does_not_affect_other_listeners(place: Place) -> None:
    session = await place.open()
    with pytest.raises(LeadershipLost):
        async with stand(session) as term:
            term._listeners.insert(0, fail)
            soon(1, lose, term)
            await asyncio.sleep(100)
    assert now() == 1
