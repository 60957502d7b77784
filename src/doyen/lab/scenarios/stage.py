"""Where scenarios about protocols are acted: a world of bare cores in which nothing happens unless
it is asked for.

The hosts, the network, the disks and the checkers are the lab's; the servers have the names that
documents give them, and start, die and are cut off when the scenario says so.

Imports the lab's world and the words of consensus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from doyen.lab.checkers import Broken
from doyen.lab.linearizability import Operation
from doyen.lab.network import SimulatedLink
from doyen.lab.plan import Plan, Weather
from doyen.lab.protocols import known
from doyen.lab.scenarios.play import Script, listed
from doyen.lab.server import SimulatedServer
from doyen.lab.workload import Client, WorkloadRequest
from doyen.lab.world import World
from doyen.quorum.consensus.core import Core, CoreEvent, Effect, Send
from doyen.quorum.consensus.invariants import InvariantBroken

__all__ = ["Caller", "Stage", "objection", "servers"]


SEED = 1
"""What is told differs from seed to seed, in its times above all. What is asserted does not."""


def servers(count: int) -> tuple[str, ...]:
    """server1, server2, …"""
    return tuple(f"server{number}" for number in range(1, count + 1))


class _Cast(Plan, frozen=True, kw_only=True):
    """A plan for servers with names of their own."""

    cast: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.cast


class Stage(World):
    """A world whose fate is the scenario's."""

    def __init__(
        self,
        script: Script,
        names: Sequence[str],
        protocol: str,
        *,
        core: Callable[..., Core] | None = None,
    ) -> None:
        plan = _Cast(
            protocol=protocol,
            nodes=len(names),
            seed=SEED,
            for_s=0.0,
            clients=0,
            weather=Weather(spread=0.0),
            cast=tuple(names),
        )
        plays = known(protocol)
        super().__init__(plan, plays if core is None else plays.but(make=core))
        self.script = script
        self.chronicle = self._befell
        self.listener = self._heard
        self.hearing: list[Callable[[SimulatedServer, CoreEvent, Sequence[Effect]], None]] = []
        """Told of everything that a core takes in and says."""
        self.generation_word = "generation"
        """The protocol's own word for it."""
        self._cut: list[SimulatedLink] = []
        self._told: set[tuple[str, int, str]] = set()
        self.started: dict[str, float] = {}
        """When each was last started."""
        self.voted: list[float] = []
        """When votes were asked for or given."""

    # What the scenario lets happen.

    def wait(self, seconds: float) -> None:
        self._go(self.now + seconds)

    def until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
        """Let time pass until it is so. False if it never was."""
        end = self.now + limit_s
        while not condition():
            if self.now >= end:
                return False
            self._go(min(end, self.now + 0.001))
        return True

    def start(self, *names: str) -> None:
        for name in names:
            self.script.say(self.now, name, "starts")
            self.started[name] = self.now
            self.hosts[name].start()
        self.stability.disturb()

    def kill(self, *names: str, told: bool = True) -> None:
        """`told`: the kernel ends their connections; otherwise they fall silent."""
        for name in names:
            self.script.say(self.now, name, "is killed")
        for name in names:
            self.hosts[name].stop(told=told)
        self.stability.disturb()

    def cut(self, *groups: Sequence[str], told: bool = False) -> None:
        """Nothing passes from one group to another. `told`: connections end with a word."""
        sides = [[self.hosts[name] for name in group] for group in groups]
        apart = [
            (one, other)
            for number, side in enumerate(sides)
            for further in sides[number + 1 :]
            for one in side
            for other in further
        ]
        self.script.happens(
            self.now, "the network is cut: " + " | ".join(listed(list(group)) for group in groups)
        )
        for one, other in apart:
            if told:
                self.network.reset(one, other)
            links = [one.links[other.id], other.links[one.id]]
            for link in links:
                link.cuts += 1
            self._cut += links
        self.stability.disturb()

    def heal(self) -> None:
        self.script.happens(self.now, "the network is whole again")
        for link in self._cut:
            link.cuts -= 1
        self._cut = []
        self.stability.disturb()
        self.network.reach()

    # What can be seen.

    def core(self, name: str) -> Any:
        """The server's core, with all that the protocol has in it."""
        core = self.hosts[name].core
        assert core is not None, f"{name} is down"
        return core

    def due_s(self, name: str) -> float:
        """In how many seconds the server will do something of its own accord."""
        due_s: float = self.core(name).next_deadline - self.hosts[name].clock()
        return due_s

    def leading(self) -> list[str]:
        """Everybody who takes itself for the leader."""
        return [
            host.id
            for host in self.hosts.values()
            if host.core is not None and host.core.leader == host.id
        ]

    def led(self) -> bool:
        """Whether everybody who is up follows one leader, which is up as well."""
        leaders = {host.core.leader for host in self.hosts.values() if host.core is not None}
        return leaders == set(self.leading()) and len(leaders) == 1

    def _befell(self, _: float, who: str, what: str) -> None:
        if who and not what.startswith("is looking"):
            self.script.say(self.now, who, what.replace("generation", self.generation_word))

    def _heard(self, host: SimulatedServer, event: CoreEvent, effects: Sequence[Effect]) -> None:
        for call in self.hearing:
            call(host, event, effects)
        # Zab's votes are its notifications, which its scenarios tell; a vote to the lab is what
        # binds a server to a leader, and there that is to accept its epoch.
        vote_in = self.protocol.vote_in if self.protocol.name != "zab" else None
        for effect in effects:
            if vote_in is not None and type(effect) is Send:
                vote = vote_in(effect)
                if vote is not None:
                    self._voted(host, *vote)

    def _voted(self, host: SimulatedServer, generation: int, candidate: str | None) -> None:
        key = (host.id, generation, candidate or host.id)
        if key not in self._told:
            self._told.add(key)
            self.voted.append(self.now)
            what = f"votes for {candidate}" if candidate else "asks for votes"
            self.script.say(self.now, host.id, f"{what} in generation {generation}")


class Caller(Client):
    """A client of a stage: asks when it is told to, of whom it is told to."""

    def __init__(self, stage: Stage, number: int, name: str) -> None:
        super().__init__(stage, number)
        self._stage = stage
        self.name = name
        self._asked = 0

    def write(self, server: str, value: int) -> Operation:
        """Ask to set x."""
        return self._ask_for(server, value)

    def read(self, server: str) -> Operation:
        """Ask for x."""
        return self._ask_for(server, None)

    def again(self, server: str, operation: Operation) -> None:
        """Ask for the same once more: it is carried out once."""
        stage = self._stage
        request = WorkloadRequest(self, operation)
        stage.push(stage.now + stage.network.latency(), stage.hosts[server].asked, request)

    def _ask_for(self, server: str, value: int | None) -> Operation:
        self._asked += 1
        operation = Operation(self.number, self._asked, 0, value, self._stage.stamp())
        self.history.append(operation)
        self.again(server, operation)
        return operation

    def refused(self, what: tuple[WorkloadRequest, str | None]) -> None:
        request, leader = what
        verb = "read" if request.operation.value is None else "write"
        hint = f"; {leader} leads, it is told" if leader else ""
        self._stage.script.say(self._stage.now, self.name, f"has its {verb} refused{hint}")

    def answered(self, what: tuple[WorkloadRequest, int | None, int, str]) -> None:
        request, result, _, server = what
        operation = request.operation
        if operation.ended == inf:
            operation.ended = self._stage.stamp()
            operation.result = result
            if operation.value is None:
                told = f"reads x = {result} from {server}"
            else:
                told = f"is told by {server} that x = {operation.value} is written"
            self._stage.script.say(self._stage.now, self.name, told)


def objection(act: Callable[[], object]) -> str:
    """What the lab's checkers object to in this; empty if nothing."""
    try:
        act()
    except InvariantBroken as broken:
        return str(broken)
    except Broken as broken:
        return broken.violation.text
    return ""
