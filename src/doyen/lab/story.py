"""A run, told: who was cut off, who voted for whom, who believed what.

Only what people need: what befell the servers, elections (the votes of each in one line), who led
and who followed, and at the end what did not hold. Heartbeats and entries go unmentioned.

Imports the world.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from doyen.lab.plan import Plan
from doyen.lab.protocols import Protocol
from doyen.lab.server import SimulatedServer
from doyen.lab.world import RunOutcome, World
from doyen.quorum.consensus.core import CoreEvent, Effect, Send

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld

__all__ = ["make_world", "tell"]


class _Teller:
    def __init__(self) -> None:
        self.lines: list[tuple[float, str, str]] = []
        self._said: set[tuple[str, str, int]] = set()

    def befell(self, at: float, who: str, what: str) -> None:
        last = self.lines[-1] if self.lines else (0.0, "", "")
        if what.startswith("is looking") and last[:2] == (at, who):
            return  # it has just asked for votes, or given its own
        if last[2] == what and at - last[0] < 0.5 and who and what.startswith("follows"):
            self.lines[-1] = (last[0], f"{last[1]} and {who}", what)
        else:
            self.lines.append((at, who, what))

    def heard(self, host: SimulatedServer, event: CoreEvent, effects: Sequence[Effect]) -> None:
        vote_in = host.world.protocol.vote_in
        if vote_in is None:
            return
        for effect in effects:
            if type(effect) is Send:
                vote = vote_in(effect)
                if vote is not None:
                    self._voted(host, *vote)

    def _voted(self, host: SimulatedServer, generation: int, candidate: str | None) -> None:
        key = (host.id, candidate or host.id, generation)
        if key in self._said:
            return
        self._said.add(key)
        if candidate is None:
            self.befell(host.world.now, host.id, f"asks for votes in generation {generation}")
        else:
            self.befell(
                host.world.now, host.id, f"votes for {candidate} in generation {generation}"
            )


def _sentence(who: str, what: str) -> str:
    if " and " in who and what.startswith("follows"):
        what = what.replace("follows", "follow", 1)
    return f"{who} {what}" if who else what


def make_world(plan: Plan, protocol: Protocol | None = None) -> World | QuorumWorld:
    """The world that the plan is for."""
    if plan.world == "cores":
        return World(plan, protocol)
    from doyen.lab.quorum import QuorumWorld  # nodes and sessions, which bare cores do without

    return QuorumWorld(plan, protocol)


def tell(plan: Plan, protocol: Protocol | None = None) -> tuple[RunOutcome, list[str]]:
    """Run the plan, and tell what happened, a line each."""
    world = make_world(plan, protocol)
    teller = _Teller()
    world.chronicle = teller.befell
    if isinstance(world, World):
        world.listener = teller.heard
    outcome = world.run()
    lines = [f"{at:8.3f} s  {_sentence(who, what)}".rstrip() for at, who, what in teller.lines]
    lines += [f"{each.at:8.3f} s  {each.kind}: {each.text}" for each in outcome.violations]
    return outcome, lines
