"""A term alone: what it says at every instant, and that what has ended stays ended."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from doyen import LeadershipLost, Term, TermState
from doyen import term as term_module
from doyen.events.telemetry import Telemetry
from doyen.lease.clock import VirtualClock
from doyen.lease.keepalive import NEVER, Keepalive
from doyen.lease.timing import Timing
from doyen.model import Lease
from doyen.testing import run_virtual
from support import STOP_BUDGET_S, TTL_S, VALID_S


def keepalive_and_term(clock: VirtualClock) -> tuple[Keepalive, Term]:
    keepalive = Keepalive(
        cast(Any, None),
        Lease("lease-1", TTL_S),
        Timing(ttl_s=TTL_S, stop_budget_s=STOP_BUDGET_S),
        clock,
        Telemetry(clock, "session-1"),
        sent_at=clock.now(),
        spread=random.Random(0),
        post=lambda call: call(),
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


def test_reading_takes_no_lock() -> None:
    """Whoever holds the locks, stuck or dead: `valid` still answers."""
    clock = VirtualClock()
    keepalive, term = keepalive_and_term(clock)
    answers: list[object] = []

    def read() -> None:
        answers.extend([term.valid, term.state, term.remaining_s, repr(term)])
        term.check()

    with keepalive._lock, term_module._latch:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(10)
    assert answers[:2] == [True, TermState.LEADER]


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
    with pytest.raises(LeadershipLost, match=r"\(token 7\): its deadline has passed"):
        term.check()
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
