"""Wardens among many candidates, in virtual time: nothing but a death ends a lease early.

That the oracle can see is shown at the end, on variants of the warden with one rule broken each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen.term import is_valid
from doyen.warden.holder import HolderWatch, Verdict
from doyen.warden.table import WardedLease
from doyen.warden.watched import WatchedSession
from doyen.warden.wire import Hello
from swarm import TTL_S, assert_oracle_sees, reached
from warden_world import WardedProcess, WardenWorld


def run_world(seed: int, *, candidates: int = 4, steps: int = 60) -> WardenWorld:
    """Trouble, then fair weather, in which a leader that is killed is replaced at once."""
    world = WardenWorld(seed)

    async def live() -> None:
        await world.trouble(candidates, steps)
        world.calm()
        for process in list(world.processes):
            world.leave(process)  # some of them run supervised commands, or have no descriptors
        for _ in range(3):
            world.start()
            world.processes[-1].supervised = False
            world.processes[-1].hello = Hello(
                session="s", url="memory://", request_timeout_s=TTL_S / 6
            )
        world.calm()
        world.body_s = 1000 * TTL_S
        await asyncio.sleep(3 * TTL_S)  # what the dead have left behind expires
        for _ in range(2):
            leader = await led(world)
            world.oracle.somebody_leads.clear()
            world.crash(leader)
            async with reached("a leader that was killed is replaced", 0.2 * TTL_S):
                await world.oracle.somebody_leads.wait()
        await world.end()

    world.watch_over(live())
    return world


async def led(world: WardenWorld) -> WardedProcess:
    """The process that leads, once there is one and a warden watches over it."""
    async with reached("somebody leads and has a warden", 10 * TTL_S):
        while True:
            for process in world.processes:
                if (
                    any(is_valid(term) for term in process.terms)
                    and process.warding.link is not None
                ):
                    return process
            await asyncio.sleep(0.01)
    raise AssertionError


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_wardens_in_much_trouble(seed: int) -> None:
    assert run_world(seed).oracle.terms > 0


def test_one_seed_gives_one_run() -> None:
    def trace(seed: int) -> list[list[str]]:
        return [host.faults.trace for host in run_world(seed, steps=30).hosts]

    assert trace(7) == trace(7)


# What the oracle must see. Each variant breaks one rule of the warden.


def ends_on_silence(patch: pytest.MonkeyPatch) -> None:
    """The end of the link is taken for the end of the holder."""
    patch.setattr(HolderWatch, "link_ended", HolderWatch.died)


def ends_the_leases_of_others(patch: pytest.MonkeyPatch) -> None:
    """Whoever dies, the leases of all the warden's sessions are ended."""

    def all_leases(self: WatchedSession) -> list[WardedLease]:
        host = self.connection.host  # type: ignore[attr-defined]
        return [lease for each in host.warden._sessions for lease in own(each)]

    own = WatchedSession.leases
    patch.setattr(WatchedSession, "leases", all_leases)


def ends_before_the_children_are_gone(patch: pytest.MonkeyPatch) -> None:
    """The guard's word is not waited for."""
    died = HolderWatch.died

    def at_once(self: HolderWatch) -> Verdict:
        return Verdict.LEAVE if died(self) is Verdict.LEAVE else Verdict.END

    patch.setattr(HolderWatch, "died", at_once)


def takes_the_end_of_the_guard_for_its_word(patch: pytest.MonkeyPatch) -> None:
    """A guard that is gone is taken for one that has reaped all processes."""
    ended = HolderWatch.link_ended

    def gone(self: HolderWatch) -> Verdict:
        verdict = ended(self)
        return Verdict.END if verdict is Verdict.LEAVE and self._dead else verdict

    patch.setattr(HolderWatch, "link_ended", gone)


def takes_any_word_for_the_last(patch: pytest.MonkeyPatch) -> None:
    """The word about an earlier run is taken for that about the present one."""
    verdict = HolderWatch.verdict

    def any_word(self: HolderWatch) -> Verdict:
        if self._words:
            self._words |= set(range(100))
        return verdict(self)

    patch.setattr(HolderWatch, "verdict", any_word)


def ends_frozen_holders_without_killing(patch: pytest.MonkeyPatch) -> None:
    """A holder that does not answer is taken for dead."""
    patch.setattr(WatchedSession, "_kill", lambda self: self._died())


MUTANTS = [
    ends_on_silence,
    ends_the_leases_of_others,
    ends_before_the_children_are_gone,
    takes_the_end_of_the_guard_for_its_word,
    takes_any_word_for_the_last,
    ends_frozen_holders_without_killing,
]


@pytest.mark.parametrize("broken", MUTANTS)
def test_the_oracle_sees(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_oracle_sees(broken, monkeypatch, run_world, range(20))
