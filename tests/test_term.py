"""A term alone: what it says at every instant, and that what has ended stays ended."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, cast

import pytest

from doyen import LeadershipLost, Term, TermState
from doyen import term as term_module
from doyen.events.telemetry import Telemetry
from doyen.lease import keepalive as keepalive_module
from doyen.lease.clock import VirtualClock
from doyen.lease.keepalive import NEVER, Keepalive
from doyen.lease.timing import Timing
from doyen.model import Lease
from doyen.testing import run_virtual
from support import STOP_BUDGET_S, TTL_S, VALID_S


def keepalive_and_term(
    clock: VirtualClock, stall_after_s: float | None = None
) -> tuple[Keepalive, Term]:
    keepalive = Keepalive(
        cast(Any, None),
        Lease("lease-1", TTL_S),
        Timing(ttl_s=TTL_S, stop_budget_s=STOP_BUDGET_S),
        clock,
        Telemetry(clock, "session-1"),
        sent_at=clock.now(),
        spread=random.Random(0),
        post=lambda call: call(),
        stall_after_s=stall_after_s,
    )
    term = Term(election="e", name="a", meta={}, token=7, keepalive=keepalive, clock=clock)
    return keepalive, term


def beat(keepalive: Keepalive, clock: VirtualClock) -> None:
    """A renewal, sent and confirmed at once."""
    keepalive._confirm(clock.now())


def test_valid_is_two_numbers_compared() -> None:
    clock = VirtualClock()
    _, term = keepalive_and_term(clock)
    assert term.valid
    assert term.state is TermState.LEADER
    assert term.valid_until == term.remaining_s == VALID_S
    clock.advance(VALID_S - 1e-6)
    assert term.valid
    clock.advance(1e-6)
    assert not term.valid
    assert term.state is TermState.LOST
    assert term.remaining_s == 0


FILES = (term_module.__file__, keepalive_module.__file__)


def interrupted(call: Callable[[], object], line: int, act: Callable[[], None]) -> bool:
    """Make a call, and act before the given line of doyen that it executes, as the handler of a
    signal does. False if it executes fewer lines."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                act()
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return left <= 0


CALLS: dict[str, Callable[[Keepalive, Term], object]] = {
    "valid": lambda keepalive, term: term.valid,
    "check": lambda keepalive, term: term.check(),
    "beat": lambda keepalive, term: term.beat(),
    "wait_lost": lambda keepalive, term: term.wait_lost(0),
    "on_end": lambda keepalive, term: term.on_end(lambda: None),
    "renewal": lambda keepalive, term: keepalive._confirm(keepalive._clock.now()),
    "bind": lambda keepalive, term: keepalive.bind(term),
    "conclude": lambda keepalive, term: term._conclude(),
    "lose": lambda keepalive, term: keepalive.lose("lost"),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_does_not_hold_up_another_thread(name: str) -> None:
    """The handler of a signal may run between any two lines of the main thread, and wait for
    doyen's thread, which ends the lease meanwhile."""
    line = 0
    there = True
    while there:
        line += 1
        keepalive, term = keepalive_and_term(VirtualClock(), stall_after_s=TTL_S)
        keepalive.bind(term)

        def end(keepalive: Keepalive = keepalive, term: Term = term) -> None:
            other = threading.Thread(target=keepalive.lose, args=("gone",), daemon=True)
            other.start()
            other.join(10)
            assert not other.is_alive()
            assert not term.valid

        with suppress(LeadershipLost):
            there = interrupted(partial(CALLS[name], keepalive, term), line, end)
        if there:
            assert not term.valid
            assert keepalive.valid_until == NEVER
    assert line > 1


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("name", [name for name in CALLS if name != "lose"])
def test_after_an_exception_in_the_middle_of_a_call_the_end_is_still_told(name: str) -> None:
    """`lose` runs on threads of doyen, which no handler interrupts."""

    def interrupt() -> None:
        raise Interrupt

    line = 0
    there = True
    while there:
        line += 1
        keepalive, term = keepalive_and_term(VirtualClock(), stall_after_s=TTL_S)
        keepalive.bind(term)
        told: list[str] = []
        term.on_end(lambda told=told: told.append("body"))  # type: ignore[misc]
        keepalive.on_loss("owner", lambda told=told: told.append("owner"))  # type: ignore[misc]
        try:
            there = interrupted(partial(CALLS[name], keepalive, term), line, interrupt)
        except Interrupt:
            there = True
        except LeadershipLost:
            there = False
        keepalive.lose("gone")
        # A body that was left needs not be told.
        assert {*told} >= ({"owner"} if name == "conclude" else {"body", "owner"})
        assert len(told) == len({*told})
        assert not term.valid
    assert line > 1


@pytest.mark.parametrize("name", ["renewal", "beat"])
def test_what_another_thread_has_seen_invalid_is_not_revived_by_what_is_under_way(
    name: str,
) -> None:
    """The thread that moves the deadline is pre-empted between two lines, and the deadline
    passes."""
    line = 0
    there = True
    while there:
        line += 1
        seen: list[bool] = []
        clock = VirtualClock()
        keepalive, term = keepalive_and_term(clock, stall_after_s=TTL_S / 2)
        keepalive.bind(term)
        keepalive.progress()
        other = Term(election="f", name="a", meta={}, token=8, keepalive=keepalive, clock=clock)
        keepalive.bind(other)
        clock.advance(term.remaining_s - 1e-6)

        def pass_deadline(
            clock: VirtualClock = clock, term: Term = term, seen: list[bool] = seen
        ) -> None:
            clock.advance(2e-6)
            seen.append(term.valid)

        there = interrupted(partial(CALLS[name], keepalive, term), line, pass_deadline)
        if seen == [False]:
            assert not term.valid
            assert term.state is TermState.LOST
    assert line > 1


def test_renewals_move_the_deadline_and_suspension_counts() -> None:
    clock = VirtualClock()
    keepalive, term = keepalive_and_term(clock)
    for _ in range(5):
        clock.advance(2)
        beat(keepalive, clock)
        assert term.remaining_s == pytest.approx(VALID_S)
    clock.step_wall(-3600)
    assert term.valid
    clock.suspend(VALID_S)
    assert not term.valid


def test_what_was_seen_invalid_is_never_valid_again() -> None:
    """The machine sleeps past the deadline with a renewal under way, and wakes. The answer comes
    before the watchdog: nobody may see the term revive, though the store would have it."""
    clock = VirtualClock()
    keepalive, term = keepalive_and_term(clock)
    clock.advance(2)
    sent_at = clock.now()
    clock.suspend(VALID_S - 1)
    assert not term.valid
    keepalive._confirm(sent_at)
    assert not term.valid
    assert keepalive.lost_because is not None
    assert not term._conclude()


def test_unsure_is_valid() -> None:
    clock = VirtualClock()
    keepalive, term = keepalive_and_term(clock)
    states = [term.state]
    keepalive._failed(TimeoutError())
    states.append(term.state)
    assert term.valid
    beat(keepalive, clock)
    states.append(term.state)
    assert states == [TermState.LEADER, TermState.UNSURE, TermState.LEADER]


def test_check() -> None:
    clock = VirtualClock()
    _, term = keepalive_and_term(clock)
    term.check()
    term.check(for_s=VALID_S)
    with pytest.raises(LeadershipLost, match=r"for certain for 4\.970 s more, less than the 5 s"):
        term.check(for_s=5)
    clock.advance(TTL_S)
    with pytest.raises(LeadershipLost, match=r"\(token 7\): no renewal was confirmed in time"):
        term.check()
    _, term = keepalive_and_term(clock)
    term._lose("of a reason")
    with pytest.raises(LeadershipLost, match="of a reason"):
        term.check()


Step = Callable[[Keepalive, Term], object]
STEPS: dict[str, Step] = {
    "term lost": lambda keepalive, term: term._lose("lost"),
    "body ended": lambda keepalive, term: term._conclude(),
    "lease lost": lambda keepalive, term: keepalive.lose("lease"),
    "keepalive stopped": lambda keepalive, term: keepalive.stop(),
    "forked": lambda keepalive, term: keepalive.forked(),
    "renewed": lambda keepalive, term: beat(keepalive, keepalive._clock),  # type: ignore[arg-type]
    "renewal failed": lambda keepalive, term: keepalive._failed(TimeoutError()),
}


@pytest.mark.parametrize("second", STEPS)
@pytest.mark.parametrize("first", [*STEPS][:5])
def test_every_end_is_final(first: str, second: str) -> None:
    """Whatever ended it, whatever comes after: it stays invalid, its end is seen once, and only a
    body that ended first counts as kept."""
    clock = VirtualClock()
    keepalive, term = keepalive_and_term(clock)
    keepalive.bind(term)
    ends: list[TermState] = []
    term.on_end(lambda: ends.append(term.state))
    for step in (first, second):
        STEPS[step](keepalive, term)
        assert not term.valid
        assert term.valid_until == NEVER
        assert term.remaining_s == 0
    kept = term._conclude()
    assert kept is (first == "body ended")
    assert term.state is (TermState.ENDED if kept else TermState.LOST)
    assert ends == [term.state]
    assert term.ended_at == clock.now()
    assert term.reason


def test_a_body_that_ends_while_the_lease_is_being_lost() -> None:
    """The watchdog has marked the lease and not yet reached the term."""
    clock = VirtualClock()
    keepalive, term = keepalive_and_term(clock)
    clock.advance(1)
    keepalive.lose("gone")
    assert not term._conclude()
    assert (term.ended_at, term.reason) == (1.0, "gone")


def test_a_body_that_ends_after_the_deadline_unnoticed() -> None:
    clock = VirtualClock()
    _, term = keepalive_and_term(clock)
    clock.advance(TTL_S)
    assert not term._conclude()
    assert term.ended_at == pytest.approx(VALID_S)


def test_lost_can_be_awaited() -> None:
    clock = VirtualClock()

    async def main() -> None:
        _, term = keepalive_and_term(clock)
        waiting = [asyncio.create_task(term.lost()) for _ in range(3)]
        await asyncio.sleep(1)
        waiting[0].cancel()
        term._lose("why not")
        assert await waiting[1] == await waiting[2] == await term.lost() == "why not"
        assert term._listeners == []

    run_virtual(main, clock=clock)


def test_lost_can_be_waited_for_by_threads() -> None:
    _, term = keepalive_and_term(VirtualClock())
    assert not term.wait_lost(0)
    assert term._listeners == []
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda: answers.append(term.wait_lost(10))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    term._lose("over")
    for thread in threads:
        thread.join(10)
    assert answers == [True] * 3
    assert term.wait_lost()


def test_repr_names_the_candidate_and_the_election() -> None:
    _, term = keepalive_and_term(VirtualClock())
    assert repr(term) == "<Term of 'a' in 'e', token 7, leader>"


def test_the_scope_of_the_body_learns_first_that_the_term_is_over() -> None:
    """It registers last. The others wake doyen's thread, which would then compete with this one."""
    keepalive, term = keepalive_and_term(VirtualClock())
    told: list[str] = []
    keepalive.on_loss("attempt", lambda: told.append("attempt"))
    term.on_end(lambda: told.append("leader"))
    term.on_end(lambda: told.append("scope"))
    keepalive.bind(term)
    keepalive.lose("gone")
    assert told == ["scope", "leader", "attempt"]
