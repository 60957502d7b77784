"""Waiting for a future without owning it, admission, and calls between threads."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from doyen._waiting import Admission, LoopCalls, shared
from doyen.lease.runtime import Outcome
from doyen.testing import run_virtual


def test_a_waiter_gets_the_outcome_and_its_cancellation_is_its_own() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        patient, hasty = (asyncio.create_task(shared(future)) for _ in range(2))
        await asyncio.sleep(0)
        hasty.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hasty
        future.set_result(7)
        assert await patient == 7
        assert await shared(future) == 7
        failing: asyncio.Future[int] = loop.create_future()
        waiting = asyncio.create_task(shared(failing))
        await asyncio.sleep(0)
        failing.set_exception(ValueError("why"))
        with pytest.raises(ValueError, match="why"):
            await waiting

    run_virtual(main())


@pytest.mark.parametrize("ends", ["fails", "is cancelled"])
def test_a_failure_after_the_waiter_has_gone_is_not_logged(ends: str) -> None:
    reported: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        future: asyncio.Future[None] = loop.create_future()
        waiting = asyncio.create_task(shared(future))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        if ends == "fails":
            future.set_exception(ValueError("too late"))
        else:
            future.cancel()
        await asyncio.sleep(0)
        del future, waiting
        gc.collect()

    run_virtual(main())
    assert reported == []


class _CountingLoop(asyncio.SelectorEventLoop):
    woken = 0

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.woken += 1
        return super().call_soon_threadsafe(*args, **kwargs)


def test_calls_that_wait_together_wake_the_loop_once_and_are_made_in_order() -> None:
    loop = _CountingLoop()
    turns: list[list[int]] = []
    calls = LoopCalls(loop, at_once=3)
    reported: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def call(number: int) -> None:
        turns[-1].append(number)
        if number == 2:
            raise ValueError(number)
        if number == 5:
            calls.put(partial(call, 8))  # by a call

    async def main() -> None:
        for number in range(8):
            calls.put(partial(call, number))
        assert loop.woken == 1
        while sum(map(len, turns)) < 9:
            turns.append([])
            await asyncio.sleep(0)

    loop.run_until_complete(main())
    made = [turn for turn in turns if turn]
    assert made == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [type(error) for error in reported] == [ValueError]
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        calls.put(lambda: None)


def test_a_call_is_refused_also_if_the_loop_was_closed_before_it_woke() -> None:
    """Otherwise the caller would wait for an answer without end."""
    loop = asyncio.new_event_loop()
    calls = LoopCalls(loop)
    calls.put(lambda: None)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        calls.put(lambda: None)


def test_without_a_limit_calls_are_made_that_waited_when_the_turn_began() -> None:
    made: list[str] = []

    async def main() -> None:
        calls = LoopCalls(asyncio.get_running_loop())

        def endless() -> None:
            made.append("call")
            if len(made) < 5:
                calls.put(endless)

        calls.put(endless)
        await asyncio.sleep(0)
        assert made == ["call"]  # the loop had a turn in between
        for _ in range(4):
            await asyncio.sleep(0)
        assert len(made) == 5

    asyncio.run(main())


def test_places_are_given_in_turn_and_never_to_more_than_there_are() -> None:
    async def main() -> None:
        admission, inside, most, order = Admission(2), 0, 0, []

        async def visit(number: int) -> None:
            nonlocal inside, most
            async with admission:
                order.append(number)
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(1.0)
                inside -= 1

        await asyncio.gather(*map(visit, range(7)))
        assert (most, order) == (2, list(range(7)))
        assert not admission.full()

    run_virtual(main)


@pytest.mark.parametrize("given", [False, True], ids=["waiting", "given a place"])
def test_the_place_of_one_that_is_cancelled_goes_to_the_next(given: bool) -> None:
    async def main() -> None:
        admission = Admission(1)
        assert admission.enter_now()
        assert not admission.enter_now()
        hasty, patient = (asyncio.ensure_future(admission.enter()) for _ in range(2))
        await asyncio.sleep(0)
        if given:
            admission.leave()
        hasty.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hasty
        assert admission.full()
        if not given:
            await asyncio.sleep(0)
            assert not patient.done()
            admission.leave()
        await patient
        assert admission.full()
        admission.leave()
        assert not admission.full()

    run_virtual(main)


def test_a_waiter_that_is_closed_without_a_place_gives_none_back() -> None:
    async def main() -> None:
        admission = Admission(1)
        assert admission.enter_now()
        waiting = admission.enter()
        waiting.send(None)
        waiting.close()
        assert not admission.enter_now()
        admission.leave()
        assert admission.enter_now()

    run_virtual(main)


class InterruptedLoop:
    """A loop of which one wake-up is interrupted by the handler of a signal."""

    def __init__(self, handler: Callable[[], None]) -> None:
        self._handler: Callable[[], None] | None = handler
        self.scheduled: list[Callable[[], None]] = []

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            handler()
        self.scheduled.append(call)

    def turn(self) -> None:
        scheduled, self.scheduled = self.scheduled, []
        for call in scheduled:
            call()


def test_the_handler_of_a_signal_may_wait_for_a_call_that_it_puts() -> None:
    made: list[str] = []

    def handler() -> None:
        calls.put(lambda: made.append("of the handler"))
        loop.turn()
        assert made == ["interrupted", "of the handler"]

    loop = InterruptedLoop(handler)
    calls = LoopCalls(loop)  # type: ignore[arg-type]
    calls.put(lambda: made.append("interrupted"))
    loop.turn()
    calls.put(lambda: made.append("later"))
    loop.turn()
    assert made == ["interrupted", "of the handler", "later"]


def test_the_handler_of_a_signal_may_raise_in_the_middle_of_a_call() -> None:
    made: list[int] = []

    def handler() -> None:
        raise KeyboardInterrupt

    loop = InterruptedLoop(handler)
    calls = LoopCalls(loop)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        calls.put(lambda: made.append(1))
    for number in (2, 3):
        calls.put(lambda number=number: made.append(number))  # type: ignore[misc]
    loop.turn()
    assert made == [1, 2, 3]


def test_the_first_outcome_counts_and_reaches_all_threads() -> None:
    cancelled, done = [], threading.Event()
    outcome: Outcome[int] = Outcome(lambda: cancelled.append(True), done.set)
    assert not outcome.done
    with pytest.raises(TimeoutError):
        outcome.result(0.0)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(outcome.result) for _ in range(3)]
        outcome.reach(7, None)
        outcome.reach(None, ValueError("late"))
        outcome.cancel()
        assert [each.result(20) for each in waiting] == [7, 7, 7]
    assert outcome.done
    assert done.is_set()
    assert not cancelled
    given_up: Outcome[int] = Outcome(lambda: cancelled.append(True))
    given_up.cancel()
    given_up.reach(7, None)
    assert cancelled == [True]
    with pytest.raises(CancelledError):
        given_up.result()
