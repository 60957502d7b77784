"""PaxosLease: one holder at a time, in true time, with nothing on disk."""

from __future__ import annotations

import random
from heapq import heappop, heappush
from typing import Any

import pytest

from doyen.quorum.consensus.core import Elapsed, Membership, Received, Send
from doyen.quorum.consensus.paxos_lease import (
    LeaseChanged,
    PaxosLease,
    Prepare,
    Promise,
    Propose,
    Proposed,
)

NAMES = ("n1", "n2", "n3")


class WithoutSilence(PaxosLease):
    """22: a server that restarts takes part at once."""

    def _silence(self, drift: float) -> float:
        return 0.0


class TimerStartedLate(PaxosLease):
    """The holder counts from the answer, not from the proposal."""

    def _won(self, now: float) -> None:
        self._start_timer(now)
        super()._won(now)


class Overlap(Exception):
    """Two servers hold the lease."""


class Hall:
    """Three servers with clocks of their own, a slow network and crashes, from one seed."""

    def __init__(self, make: Any, seed: int) -> None:
        self.make = make
        self.random = random.Random(seed)
        self.now = 0.0
        self.heap: list[Any] = []
        self.count = 0
        self.cores: dict[str, Any] = {}
        self.lives = dict.fromkeys(NAMES, 0)
        self.rates = {name: self.random.uniform(0.992, 1.008) for name in NAMES}
        self.offsets = {name: self.random.uniform(0, 1000) for name in NAMES}
        self.slow = self.random.choice([0.01, 0.2, 0.4])
        self.tokens: list[int] = []
        self.held = 0

    def clock(self, name: str) -> float:
        return self.now * self.rates[name] + self.offsets[name]

    def at(self, delay: float, what: str, *arguments: Any) -> None:
        self.count += 1
        heappush(self.heap, (self.now + delay, self.count, what, arguments))

    def start(self, name: str) -> None:
        self.lives[name] += 1
        floor = 1000 * sum(self.lives.values())
        self.cores[name] = self.make(
            name,
            Membership(NAMES),
            lease_s=1.0,
            floor=floor,
            jitter=self.random.random,
            now=self.clock(name),
        )
        self.at(0.0, "wake", name, self.lives[name])

    def wake(self, name: str, life: int) -> None:
        if self.lives[name] != life or name not in self.cores:
            return
        core = self.cores[name]
        self.tell(name, Elapsed())
        wait = (core.next_deadline - self.clock(name)) / self.rates[name]
        self.at(max(wait, 0.001), "wake", name, life)

    def deliver(self, sender: str, to: str, message: Any) -> None:
        if to in self.cores:
            self.tell(to, Received(sender, message))

    def crash(self, name: str) -> None:
        del self.cores[name]
        self.at(self.random.uniform(0, 0.5), "start", name)
        self.at(self.random.uniform(0, 4), "trouble")

    def trouble(self) -> None:
        name = self.random.choice(NAMES)
        if name in self.cores:
            self.crash(name)
        else:
            self.at(0.5, "trouble")

    def tell(self, name: str, event: Any) -> None:
        for effect in self.cores[name].handle(event, self.clock(name)):
            if isinstance(effect, Send):
                if self.random.random() > 0.05:
                    delay = self.random.uniform(0, self.slow)
                    self.at(delay, "deliver", name, effect.peer, effect.message)
            elif isinstance(effect, LeaseChanged) and self.cores[name].holds(self.clock(name)):
                self.held += 1
                if not self.tokens or self.tokens[-1] != effect.token:
                    self.tokens.append(effect.token)
        holders = [each for each, core in self.cores.items() if core.holds(self.clock(each))]
        if len(holders) > 1:
            raise Overlap(f"{holders} at {self.now:.3f}")

    def run(self, for_s: float) -> None:
        for name in NAMES:
            self.at(self.random.random(), "start", name)
        self.at(5.0, "trouble")
        while self.heap and self.now < for_s:
            self.now, _, what, arguments = heappop(self.heap)
            getattr(self, what)(*arguments)


@pytest.mark.parametrize("seed", range(12))
def test_one_holder_at_a_time(seed: int) -> None:
    hall = Hall(PaxosLease, seed)
    hall.run(120.0)
    assert hall.held > 0
    assert hall.tokens == sorted(set(hall.tokens))


@pytest.mark.parametrize(("mutant", "seed"), [(WithoutSilence, 0), (TimerStartedLate, 22)])
def test_every_mutant_breaks_the_safety(mutant: Any, seed: int) -> None:
    Hall(PaxosLease, seed).run(120.0)
    with pytest.raises(Overlap):
        for each in range(seed, seed + 60):
            Hall(mutant, each).run(120.0)


def test_a_server_that_starts_is_silent_for_the_longest_lease() -> None:
    core = PaxosLease("n1", Membership(NAMES), lease_s=1.0, jitter=lambda: 0.5, now=10.0)
    assert core.next_deadline > 11.0
    assert core.handle(Received("n2", Prepare(4)), 10.5) == []
    assert core.handle(Elapsed(), 10.9) == []
    assert core.handle(Received("n2", Prepare(4)), 11.2) != []


@pytest.mark.parametrize("make", [PaxosLease, TimerStartedLate])
def test_the_timer_starts_before_the_proposal_leaves(make: Any) -> None:
    core = make("n1", Membership(NAMES), lease_s=1.0, jitter=lambda: 0.5, now=0.0)
    core.handle(Elapsed(), 2.0)
    ballot = core._ballot
    effects = core.handle(Received("n2", Promise(ballot, None)), 2.1)
    assert any(isinstance(e, Send) and isinstance(e.message, Propose) for e in effects)
    effects = core.handle(Received("n2", Proposed(ballot)), 2.9)
    assert (effects == [LeaseChanged(ballot, 3.1)]) == (make is PaxosLease)
    assert core.holds(3.05)
    assert core.holds(3.1) == (make is not PaxosLease)


def test_an_answer_that_comes_too_late_gives_nothing() -> None:
    core = PaxosLease("n1", Membership(NAMES), lease_s=1.0, jitter=lambda: 0.5, now=0.0)
    core.handle(Elapsed(), 2.0)
    core.handle(Received("n2", Promise(core._ballot, None)), 2.1)
    assert core.handle(Received("n2", Proposed(core._ballot)), 3.2) == []
    assert not core.holds(3.2)


def test_a_lease_that_runs_is_not_given_to_another() -> None:
    core = PaxosLease("n1", Membership(NAMES), lease_s=1.0, jitter=lambda: 0.5, now=0.0)
    core.handle(Elapsed(), 2.0)
    assert core.handle(Received("n2", Promise(core._ballot, "n3")), 2.1) == []
