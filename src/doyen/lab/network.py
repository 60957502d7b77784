"""The simulated network: links in one direction each, and the connections over them.

A link delivers in order after a latency drawn from the weather, unless the network is told to
lose, repeat or reorder. A link that is cut swallows everything in silence. A connection is what
servers believe: it ends with a word to both (`reset`, or the end of a process) or with none (the
end of a machine), and is made anew when both are up and can reach each other.

Imports the words of consensus and the plan.
"""

from __future__ import annotations

import math
from heapq import heappush
from typing import TYPE_CHECKING

from doyen.lab.plan import Weather, stream
from doyen.quorum.consensus.core import Connected, CoreEvent, Disconnected, Received

if TYPE_CHECKING:
    from doyen.lab.server import SimulatedServer
    from doyen.lab.world import World

__all__ = ["MessageNetwork", "SimulatedLink"]

_BITS = 10


class SimulatedLink:
    """From one server to another."""

    __slots__ = ("connected", "cuts", "extra_s", "last", "source", "target")

    def __init__(self, source: SimulatedServer, target: SimulatedServer) -> None:
        self.source = source
        self.target = target
        self.cuts = 0
        """How many faults cut it at present."""
        self.connected = False
        """Whether the source believes it is connected."""
        self.extra_s = 0.0
        self.last = 0.0
        """When the last of what is under way arrives: nothing overtakes it."""


class MessageNetwork:
    """Every link there is, and the chance that governs them."""

    def __init__(self, world: World, weather: Weather, seed: int) -> None:
        self._world = world
        rng = stream(seed, "network")
        self._chance = rng.random
        self._bits = rng.getrandbits
        self._latencies = [
            weather.latency_s * math.exp(rng.gauss(0.0, weather.spread)) for _ in range(1 << _BITS)
        ]
        self.loss = self.duplicate = self.reorder = 0.0
        self.rough = False
        self.messages = 0

    def calm(self, most_s: float) -> None:
        """From now on nothing takes longer than this."""
        self._latencies = [min(each, most_s) for each in self._latencies]

    def latency(self) -> float:
        return self._latencies[self._bits(_BITS)]

    def weather(self, *, loss: float = 0.0, duplicate: float = 0.0, reorder: float = 0.0) -> None:
        """Add to what the network does to messages."""
        self.loss = max(0.0, self.loss + loss)
        self.duplicate = max(0.0, self.duplicate + duplicate)
        self.reorder = max(0.0, self.reorder + reorder)
        self.rough = self.loss + self.duplicate + self.reorder > 1e-9

    def send(self, link: SimulatedLink, event: Received) -> None:
        """Let a message go."""
        self.messages += 1
        if link.cuts or not link.connected:
            return
        world = self._world
        at = world.now + self._latencies[self._bits(_BITS)] + link.extra_s
        if self.rough:
            if self._chance() < self.loss:
                return
            if self._chance() < self.duplicate:
                world.push(at + self.latency() * 20 * self._chance(), link.target.take, event)
            if self._chance() < self.reorder:
                world.push(at + self.latency() * 20 * self._chance(), link.target.take, event)
                return
        if at < link.last:
            at = link.last
        link.last = at
        world.seq += 1
        heappush(world.heap, (at, world.seq, link.target.take, event))

    def tell(self, link: SimulatedLink, event: CoreEvent) -> None:
        """What the link's target learns of the connection, behind what is under way."""
        link.last = max(link.last, self._world.now + self.latency())
        self._world.push(link.last, link.target.take, event)

    def reset(self, one: SimulatedServer, other: SimulatedServer) -> None:
        """The connection ends, and both are told; it is made anew at once."""
        for source, target in ((one, other), (other, one)):
            link = source.links[target.id]
            back = target.links[source.id]
            if back.connected and not link.cuts:
                back.connected = False
                self.tell(link, Disconnected(source.id))
        self._world.push(self._world.now + 0.05, self._try, (one, other))

    def ended(self, host: SimulatedServer, *, told: bool) -> None:
        """A process has ended. Its kernel tells its peers, unless the machine went with it."""
        for link in host.links.values():
            link.connected = False
            back = link.target.links[host.id]
            if told and back.connected and not link.cuts:
                back.connected = False
                self.tell(link, Disconnected(host.id))

    def reach(self) -> None:
        """Something has come back: whoever is not connected tries again."""
        hosts = list(self._world.hosts.values())
        for number, one in enumerate(hosts):
            for other in hosts[number + 1 :]:
                if not (one.links[other.id].connected and other.links[one.id].connected):
                    at = self._world.now + 2 * self.latency()
                    self._world.push(at, self._try, (one, other))

    def _try(self, pair: tuple[SimulatedServer, SimulatedServer]) -> None:
        one, other = pair
        there, back = one.links[other.id], other.links[one.id]
        if there.connected and back.connected:
            return
        if one.core is None or other.core is None or there.cuts or back.cuts:
            return
        for link, peer in ((there, other), (back, one)):
            if link.connected:
                link.source.take(Disconnected(peer.id))
            link.connected = True
        one.take(Connected(other.id))
        other.take(Connected(one.id))
