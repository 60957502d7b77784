"""The narration of a run: faults, votes and roles, one line each.

It contains what a reader needs to understand a failure: what happened to the servers, elections
(each vote once), leaders and followers, and at the end what did not hold. Heartbeats and log
entries are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from doyen.lab.outcome import RunOutcome
from doyen.lab.plan import Plan
from doyen.lab.protocols import Protocol
from doyen.lab.server import SimulatedServer
from doyen.lab.world import World
from doyen.quorum.consensus.core import CoreEvent, Effect, Send

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld


class Narrator:
    """Collects what happens, one line for each event that a reader wants to know."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str, str]] = []
        self._votes: set[tuple[str, str, int]] = set()

    def add(self, at: float, subject: str, predicate: str) -> None:
        last = self.lines[-1] if self.lines else (0.0, "", "")
        if predicate.startswith("looks for a leader") and last[:2] == (at, subject):
            return  # its line before says that it asks for votes, or votes
        if (
            last[2] == predicate
            and at - last[0] < 0.5
            and subject
            and predicate.startswith("follows")
        ):
            self.lines[-1] = (last[0], f"{last[1]} and {subject}", predicate)
        else:
            self.lines.append((at, subject, predicate))

    def step(self, server: SimulatedServer, event: CoreEvent, effects: Sequence[Effect]) -> None:
        self.add_votes(server.world.now, server.id, server.world.protocol, effects)

    def add_votes(
        self, at: float, name: str, protocol: Protocol, effects: Sequence[Effect]
    ) -> None:
        """Add the votes that a server gives or asks for, each of them once."""
        if protocol.vote_in is None:
            return
        for effect in effects:
            if type(effect) is Send:
                vote = protocol.vote_in(effect)
                if vote is not None:
                    self._add_vote(at, name, *vote)

    def _add_vote(self, at: float, name: str, generation: int, candidate: str | None) -> None:
        key = (name, candidate or name, generation)
        if key in self._votes:
            return
        self._votes.add(key)
        action = "asks for votes" if candidate is None else f"votes for {candidate}"
        self.add(at, name, f"{action} in generation {generation}")


def sentence(subject: str, predicate: str) -> str:
    """A line of the narration as a sentence."""
    if " and " in subject and predicate.startswith("follows"):
        predicate = predicate.replace("follows", "follow", 1)
    return f"{subject} {predicate}" if subject else predicate


def make_world(plan: Plan, protocol: Protocol | None = None) -> World | QuorumWorld:
    if plan.world == "cores":
        return World(plan, protocol)
    from doyen.lab.quorum import QuorumWorld  # imports nodes and sessions, which cores do not need

    return QuorumWorld(plan, protocol)


def narrate(
    plan: Plan,
    protocol: Protocol | None = None,
    observe: Callable[[World | QuorumWorld], object] = lambda world: None,
) -> tuple[RunOutcome, list[str]]:
    """Run the plan. Returns the outcome and the narration. `observe` is called with the world
    before the run."""
    world = make_world(plan, protocol)
    observe(world)
    narrator = Narrator()
    world.on_report = narrator.add
    if isinstance(world, World):
        world.on_step = narrator.step
    outcome = world.run()
    lines = [
        f"{at:8.3f} s  {sentence(subject, predicate)}".rstrip()
        for at, subject, predicate in narrator.lines
    ]
    lines += [f"{each.at:8.3f} s  {each.kind}: {each.text}" for each in outcome.violations]
    return outcome, lines
