"""Many candidates, a hostile store, one seed: at most one valid leader at any true instant.

The world and its oracle are in `swarm`. That the oracle can see is shown at the end, on variants
of the code with one rule broken each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen import Term
from doyen.election.attempt import Attempt
from doyen.errors import OutcomeUnknown
from doyen.lease.keepalive import Keepalive
from doyen.model import Entry
from doyen.stores.port import Creation
from doyen.testing.faults import Late
from mutants_nodes import answer_ignored, removed_by_another
from swarm import FAIR, TTL_S, OwnClock, SafetyViolated, World, assert_oracle_sees, reached


def run_world(seed: int, *, candidates: int = 4, steps: int = 150) -> World:
    """Run a world to its end: trouble, then fair weather in which somebody must lead."""
    world = World(seed)

    async def live() -> None:
        await world.trouble(candidates, steps)
        world.start()
        world.calm()
        world.oracle.somebody_leads.clear()
        async with reached("somebody leads", 10 * TTL_S):
            await world.oracle.somebody_leads.wait()
        await world.end()

    world.watch_over(live())
    return world


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_hundred_candidates_come_and_go(seed: int) -> None:
    """Joining, leaving, crashing and cut off at random on a rough link: never two at once, tokens
    increase, and once the weather is fair somebody leads."""
    assert run_world(seed, candidates=100, steps=60).oracle.terms > 0


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_few_candidates_in_much_trouble(seed: int) -> None:
    assert run_world(seed).oracle.terms > 0


@pytest.mark.chaos
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), crowd=st.integers(0, 4))
def test_many_seeds(seed: int, crowd: int) -> None:
    world = run_world(seed) if crowd else run_world(seed, candidates=100, steps=60)
    assert world.oracle.terms > 0


def test_one_seed_gives_one_run() -> None:
    def trace(seed: int) -> list[list[str]]:
        return [process.faults.trace for process in run_world(seed, steps=40).processes]

    assert trace(7) == trace(7)


# What the oracle must see. Each variant breaks one rule of the code that users run.


def from_the_reply(patch: pytest.MonkeyPatch) -> None:
    """Validity is counted from the answer, not from the sending."""
    confirm = Keepalive._confirm
    patch.setattr(Keepalive, "_confirm", lambda self, _: confirm(self, self._clock.now()))


def on_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    """Leases are counted on a clock that administrators set."""
    patch.setattr(OwnClock, "now", lambda self: self.true.wall())


def unknown_is_victory(patch: pytest.MonkeyPatch) -> None:
    """A create that was never answered is believed."""
    write = Attempt.write

    async def believe(self: Attempt, request: Awaitable[object]) -> object:
        creating = getattr(request, "__qualname__", "").endswith("create")
        try:
            return await write(self, request)
        except OutcomeUnknown:
            if not creating:
                raise
            revision = self.core.store._store._server._counter + 1  # type: ignore[attr-defined]
            return Creation(True, Entry(self.record_key, b"", revision, revision))

    patch.setattr(Attempt, "write", believe)


def let_go_too_early(patch: pytest.MonkeyPatch) -> None:
    """The record is deleted while the term still counts as valid."""
    patch.setattr(Term, "_conclude", lambda self: True)


def clocks_too_far_apart(patch: pytest.MonkeyPatch) -> None:
    """A leader's clock runs slower than the drift allowed for."""
    start = World.__init__

    def slow(self: World, seed: int) -> None:
        start(self, seed, 0.5)

    patch.setattr(World, "__init__", slow)


SEEDS = 60
"""Worlds to try until one shows what is broken."""


@pytest.mark.parametrize(
    "broken",
    [
        answer_ignored,
        on_the_wall_clock,
        unknown_is_victory,
        removed_by_another,
        let_go_too_early,
        clocks_too_far_apart,
    ],
)
def test_the_oracle_sees(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_oracle_sees(broken, monkeypatch, run_world, range(SEEDS))


def late_and_then_silent() -> None:
    """The leader's renewal is answered late, and nothing gets through to it after that."""
    world = World(0, drift=0.0)

    async def live() -> None:
        world.start()
        leader = world.processes[0]
        leader.faults.odds = FAIR
        leader.faults.next("renew", Late(after_s=0.45))
        await world.oracle.somebody_leads.wait()
        world.start()
        world.processes[1].faults.odds = FAIR
        while "renew" not in "".join(leader.faults.trace):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.46)
        leader.faults.cut()
        await asyncio.sleep(2 * TTL_S)
        await world.end()

    world.body_s = 100 * TTL_S
    world.watch_over(live())


def test_validity_is_counted_from_the_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    late_and_then_silent()
    from_the_reply(monkeypatch)
    with pytest.raises(SafetyViolated):
        late_and_then_silent()
