"""What must hold of a world of whole nodes: terms, the log, service, and recovery.

What clients of the keyspace see is checked in `client_checker`, and what proposers see in
`registers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from doyen.events import Elected, Record
from doyen.lab.machines import RESULT_VALUE, SLICE_KEYS, NodeMachine, SimulatedMachine
from doyen.lab.reference import Reference
from doyen.quorum.consensus.core import CoreEvent, Effect
from doyen.quorum.consensus.invariants import ClusterView
from doyen.term import Term, is_valid

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld

STEADY_S = 1.0
"""A leader that has committed nothing for this long does not count as steady."""
OUTAGE_S = 10.0
"""The longest time without an answer while there are no faults."""


class TermChecker:
    """Checks that valid terms do not overlap in true time and that tokens increase."""

    def __init__(self, world: QuorumWorld) -> None:
        self._world = world
        self._valid: list[tuple[str, Term]] = []
        self._last_token = 0
        self.count = 0
        """The number of terms so far."""
        self.latest = -inf
        """When the last term began."""

    def on_record(self, record: Record) -> None:
        event = record.event
        if isinstance(event, Elected):
            if event.token <= self._last_token:
                self._world.fail(
                    "tokens", f"{event.name} has token {event.token} after {self._last_token}"
                )
            self._last_token = event.token

    def entered(self, name: str, term: Term) -> None:
        self.count += 1
        self.latest = self._world.loop.time()
        self._valid.append((name, term))
        self._world.report(name, f"is elected with token {term.token}")
        if self._world.observer is not None:
            self._world.observer.term_changed(name, term.token)

    def check(self) -> None:
        if self._valid:
            ended = [name for name, term in self._valid if not is_valid(term)]
            if ended:
                self._valid = [(name, term) for name, term in self._valid if is_valid(term)]
                if self._world.observer is not None:
                    for name in ended:
                        self._world.observer.term_changed(name, None)
            if len(self._valid) > 1:
                names = " and ".join(name for name, _ in self._valid)
                self._world.fail("two terms", f"the terms of {names} are valid at the same time")

    @property
    def holder(self) -> str | None:
        """The candidate whose term is valid."""
        return self._valid[0][0] if self._valid else None


class LogChecker:
    """Checks every step of every core against the invariants, and every result of every node
    against the reference."""

    def __init__(self, world: QuorumWorld) -> None:
        self._world = world
        self.cluster = ClusterView(ballots=world.protocol.ballots)
        self.reference = Reference(SLICE_KEYS, RESULT_VALUE)
        self.make_core = self._checked(world.protocol.make)

    def _checked(self, make: Any) -> Any:
        """A subclass of the core whose every step is checked."""
        checker, cluster, reference = self, self.cluster, self.reference

        class Checked(make):  # type: ignore[misc]
            def handle(self, event: CoreEvent, now: float) -> list[Effect]:
                effects: list[Effect] = super().handle(event, now)
                if checker._world.observer is not None:
                    checker._world.observer.stepped(self.id, self, event, effects)
                if effects:
                    cluster.stepped(self, effects)
                    if len(cluster.committed) > reference.index:
                        checker._advance()
                return effects

        return Checked

    def _advance(self) -> None:
        self.reference.advance(self.cluster.committed, self._world.loop.time())
        self._world.clients.check_expired()

    def check_results(self, machine: SimulatedMachine, index: int, results: Sequence[Any]) -> None:
        if not self.reference.agrees(index, results):
            self._world.fail(
                "applied", f"{machine.name} has other results for entry {index} than the reference"
            )


class ServiceChecker:
    """Checks that requests are answered while there are no faults, and that leases end in time
    while one node leads."""

    def __init__(self, world: QuorumWorld) -> None:
        self._world = world
        self._answered_at = self._disturbed_at = 0.0
        self.longest_s = 0.0
        """The longest time between two answers."""
        self._steady_since = 0.0
        self._leader: tuple[str, int, int] | None = None
        """The name, the process and the generation of a leader that commits entries."""

    def answered(self) -> None:
        now = self._world.loop.time()
        if self._answered_at:
            self.longest_s = max(self.longest_s, now - self._answered_at)
        self._answered_at = now

    def disturb(self) -> None:
        self._disturbed_at = self._world.loop.time()

    def check(self) -> None:
        idle_s = self._world.loop.time() - max(self._answered_at, self._disturbed_at)
        if idle_s > OUTAGE_S:
            self._world.fail(
                "outage", f"there are no faults, but no request was answered for {idle_s:.1f} s"
            )
        self._check_lease_ends()

    def _check_lease_ends(self) -> None:
        world = self._world
        machine, now, leader = world.participants.leader(), world.loop.time(), None
        if machine is not None and machine.driver is not None and machine.process is not None:
            leader = machine.name, machine.starts, machine.driver.generation
            if machine.process.paused or now - world.log.reference.times[-1] > STEADY_S:
                leader = None
        if leader is None or leader != self._leader:
            self._steady_since = now
        self._leader = leader
        world.clients.check_overdue(self._steady_since)


class QuorumRecoveryChecker:
    """Checks, after all faults have ended, that the quorum and its clients work again."""

    def __init__(self, world: QuorumWorld) -> None:
        self._world = world
        self._applied = -1
        """What the leader had applied at the last call of `missing`; -1 before the first call."""

    def missing(self) -> str | None:
        """What does not work yet. There must be a leader, requests must be answered, and every
        voter must follow and have what the leader had applied at the call before."""
        world = self._world
        healed_at = world.measurements.healed_at
        leader = world.participants.leader()
        if leader is None or leader.driver is None:
            return "no node leads"
        status, before = leader.driver.status(), self._applied
        self._applied = status.applied
        terms = world.terms
        if world.plan.clients and terms.latest <= healed_at and terms.holder is None:
            return "no candidate leads"
        if world.measurements.last_tenth / 10 <= healed_at:
            return "no request was answered"
        for name in status.membership.voters:
            machine = world.participants.machines[name]
            driver = machine.driver if isinstance(machine, NodeMachine) else None
            if (
                before < 0
                or driver is None
                or driver.leader != leader.name
                or driver.status().applied < before
            ):
                return f"voter {name} has not caught up with the leader"
        if world.administrator.pending:
            return f"{next(iter(world.administrator.pending))} has not been added again"
        return world.clients.lease_left() or world.clients.watch_left()
