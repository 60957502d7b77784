"""The simulated network: links in one direction each, and the connections over them.

A link delivers messages in order after a random latency, unless a fault makes the network lose,
repeat or reorder them. A link that is cut drops everything. Both servers learn when a connection is
reset or when the process at its other end stops; they do not learn that a machine has lost power. A
connection is established again when both servers are up and can reach each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappush
from typing import TYPE_CHECKING

from doyen.lab.observer import Fate
from doyen.lab.plan import Latencies, stream
from doyen.quorum.consensus.core import Connected, CoreEvent, Disconnected, Received

if TYPE_CHECKING:
    from doyen.lab.server import SimulatedServer
    from doyen.lab.world import World

_BITS = 10


@dataclass(slots=True, eq=False)
class SimulatedLink:
    """From one server to another."""

    source: SimulatedServer
    target: SimulatedServer
    cuts: int = 0
    """The number of faults that cut it at present."""
    connected: bool = False
    """Whether the source believes it is connected."""
    extra_s: float = 0.0
    last: float = 0.0
    """When the last message under way arrives. No later message overtakes it."""

    def cut(self, by: int) -> None:
        """Add to the number of faults that cut the link."""
        self.cuts += by
        self._changed()

    def slow_down(self, seconds: float) -> None:
        """Add to the time that messages take."""
        self.extra_s += seconds
        self._changed()

    def _changed(self) -> None:
        observer = self.source.world.observer
        if observer is not None:
            extra_s = self.extra_s if self.extra_s > 1e-9 else 0.0
            observer.link_changed(self.source.id, self.target.id, bool(self.cuts), extra_s)


class MessageNetwork:
    """Delivers messages over links, and makes and ends connections."""

    def __init__(self, world: World, latencies: Latencies, seed: int) -> None:
        self._world = world
        self._queue = world.queue
        rng = stream(seed, "network")
        self._chance = rng.random
        self._bits = rng.getrandbits
        self._latencies = [
            latencies.latency_s * math.exp(rng.gauss(0.0, latencies.spread))
            for _ in range(1 << _BITS)
        ]
        self.loss = self.duplicate = self.reorder = 0.0
        self.unreliable = False
        self.messages = 0
        self.dropped: set[int] = set()
        """The numbers of messages that are dropped, counted as they are sent."""

    def bound_latency(self, longest_s: float) -> None:
        """From now on no message takes longer than this."""
        self._latencies = [min(each, longest_s) for each in self._latencies]

    def latency(self) -> float:
        return self._latencies[self._bits(_BITS)]

    def degrade(self, *, loss: float = 0.0, duplicate: float = 0.0, reorder: float = 0.0) -> None:
        """Add to the probabilities with which messages are lost, repeated and reordered."""
        self.loss = max(0.0, self.loss + loss)
        self.duplicate = max(0.0, self.duplicate + duplicate)
        self.reorder = max(0.0, self.reorder + reorder)
        self.unreliable = self.loss + self.duplicate + self.reorder > 1e-9
        if self._world.observer is not None:
            self._world.observer.network_degraded(self.loss, self.duplicate, self.reorder)

    def send(self, link: SimulatedLink, event: Received) -> None:
        self.messages += 1
        if self._world.observer is not None:
            self._world.observer.sent(link, event, self._send(link, event))
        else:
            self._send(link, event)

    def _send(self, link: SimulatedLink, event: Received) -> float | Fate:
        """Send a message. Returns when it arrives, or why it does not."""
        if link.cuts:
            return Fate.CUT
        if not link.connected:
            return Fate.DISCONNECTED
        queue = self._queue
        at = queue.now + self._latencies[self._bits(_BITS)] + link.extra_s
        if self.unreliable:
            if self._chance() < self.loss:
                return Fate.LOST
            if self._chance() < self.duplicate:
                queue.push(at + self.latency() * 20 * self._chance(), link.target.receive, event)
            if self._chance() < self.reorder:
                at += self.latency() * 20 * self._chance()
                queue.push(at, link.target.receive, event)
                return at
        if at < link.last:
            at = link.last
        link.last = at
        if self.messages in self.dropped:
            return Fate.DROPPED
        queue.seq += 1
        heappush(queue.heap, (at, queue.seq, link.target.receive, event))
        return at

    def _notify(self, link: SimulatedLink, event: CoreEvent) -> None:
        """Let the link's target learn of its connection, after the messages under way."""
        link.last = max(link.last, self._queue.now + self.latency())
        self._queue.push(link.last, link.target.receive, event)

    def reset(self, one: SimulatedServer, other: SimulatedServer) -> None:
        """End a connection so that both servers learn of it. It is established again soon after."""
        for source, target in ((one, other), (other, one)):
            link = source.links[target.id]
            back = target.links[source.id]
            if back.connected and not link.cuts:
                back.connected = False
                self._notify(link, Disconnected(source.id))
        self._queue.push_after(0.05, self._connect, (one, other))

    def stopped(self, server: SimulatedServer, *, power_loss: bool) -> None:
        """A process has ended. Its kernel closes its connections, unless the machine lost power."""
        for link in server.links.values():
            link.connected = False
            back = link.target.links[server.id]
            if not power_loss and back.connected and not link.cuts:
                back.connected = False
                self._notify(link, Disconnected(server.id))

    def reconnect(self) -> None:
        """Try to connect all servers that are not connected: a server or a link is back."""
        servers = list(self._world.servers.values())
        for number, one in enumerate(servers):
            for other in servers[number + 1 :]:
                if not (one.links[other.id].connected and other.links[one.id].connected):
                    self._queue.push_after(2 * self.latency(), self._connect, (one, other))

    def _connect(self, pair: tuple[SimulatedServer, SimulatedServer]) -> None:
        one, other = pair
        there, back = one.links[other.id], other.links[one.id]
        if there.connected and back.connected:
            return
        if one.process is None or other.process is None or there.cuts or back.cuts:
            return
        for link, peer in ((there, other), (back, one)):
            if link.connected:
                link.source.receive(Disconnected(peer.id))
            link.connected = True
        one.receive(Connected(other.id))
        other.receive(Connected(one.id))
