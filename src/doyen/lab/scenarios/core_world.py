"""The world of scenarios about protocols: bare cores, and only the faults of the scenario.

The servers, the network, the disks and the checkers are the lab's. The servers have the names of
the documents, and start, crash and are cut off when the scenario says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from doyen.lab.checkers import ViolationFound
from doyen.lab.linearizability import Operation
from doyen.lab.network import SimulatedLink
from doyen.lab.plan import Latencies, Plan
from doyen.lab.protocols import known
from doyen.lab.scenarios.transcript import Transcript, listed
from doyen.lab.server import SimulatedServer
from doyen.lab.workload import Client, WorkloadRequest
from doyen.lab.world import World
from doyen.quorum.consensus.core import Core, CoreEvent, Effect, Send
from doyen.quorum.consensus.invariants import InvariantBroken

SEED = 1
"""The times in a transcript depend on the seed. The facts do not."""


def server_names(count: int) -> tuple[str, ...]:
    """server1, server2, …"""
    return tuple(f"server{number}" for number in range(1, count + 1))


class _NamedPlan(Plan, frozen=True, kw_only=True):
    """A plan for servers with names of their own."""

    server_names: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.server_names


class CoreWorld(World):
    """A world in which the scenario decides what happens."""

    def __init__(
        self,
        transcript: Transcript,
        names: Sequence[str],
        protocol: str,
        *,
        core: Callable[..., Core] | None = None,
    ) -> None:
        plan = _NamedPlan(
            protocol=protocol,
            nodes=len(names),
            seed=SEED,
            for_s=0.0,
            clients=0,
            latencies=Latencies(spread=0.0),
            server_names=tuple(names),
        )
        chosen = known(protocol)
        super().__init__(plan, chosen if core is None else chosen.replace(make=core))
        self.transcript = transcript
        self.on_report = self._record_report
        self.on_step = self._record_votes
        self.step_listeners: list[
            Callable[[SimulatedServer, CoreEvent, Sequence[Effect]], None]
        ] = []
        """Called with every event that a core handles and the effects."""
        self.generation_name = "generation"
        """The protocol's own word for a generation."""
        self._cut: list[SimulatedLink] = []
        self._votes: set[tuple[str, int, str]] = set()
        self.started: dict[str, float] = {}
        """When each server was last started."""
        self.vote_times: list[float] = []
        """When votes were requested or granted."""
        transcript.opened(self)

    # What the scenario decides.

    def wait(self, seconds: float) -> None:
        self.run_until(self.now + seconds)

    def until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
        """Let time pass until the condition holds. False if it did not within the limit."""
        end = self.now + limit_s
        while not condition():
            if self.now >= end:
                return False
            self.run_until(min(end, self.now + 0.001))
        return True

    def start(self, *names: str) -> None:
        for name in names:
            self.transcript.record(self.now, name, "starts")
            self.started[name] = self.now
            self.servers[name].start()
        self.stability.disturb()

    def kill(self, *names: str, power_loss: bool = False) -> None:
        """Kill servers. With `power_loss` nothing closes their connections."""
        for name in names:
            self.transcript.record(self.now, name, "is killed")
        for name in names:
            self.servers[name].stop(power_loss=power_loss)
        self.stability.disturb()

    def cut(self, *groups: Sequence[str], reset: bool = False) -> None:
        """Cut all links between the groups. With `reset` the servers learn that their connections
        have ended."""
        sides = [[self.servers[name] for name in group] for group in groups]
        pairs = [
            (one, other)
            for number, side in enumerate(sides)
            for further in sides[number + 1 :]
            for one in side
            for other in further
        ]
        self.transcript.record_event(
            self.now, "the network is cut: " + " | ".join(listed(list(group)) for group in groups)
        )
        for one, other in pairs:
            if reset:
                self.network.reset(one, other)
            links = [one.links[other.id], other.links[one.id]]
            for link in links:
                link.cut(1)
            self._cut += links
        self.stability.disturb()

    def heal(self) -> None:
        self.transcript.record_event(self.now, "the network is no longer cut")
        for link in self._cut:
            link.cut(-1)
        self._cut = []
        self.stability.disturb()
        self.network.reconnect()

    # What the scenario sees.

    def core(self, name: str) -> Any:
        """The server's core, with the attributes of its protocol."""
        core = self.servers[name].core
        assert core is not None, f"{name} is down"
        return core

    def due_s(self, name: str) -> float:
        """The seconds until the server acts on a timeout."""
        due_s: float = self.core(name).next_deadline - self.servers[name].clock.now()
        return due_s

    def leading(self) -> list[str]:
        """Every server that considers itself the leader."""
        return [
            server.id
            for server in self.servers.values()
            if server.core is not None and server.core.leader == server.id
        ]

    def has_leader(self) -> bool:
        """Whether all servers that are up follow one leader, which is up as well."""
        leaders = {server.core.leader for server in self.servers.values() if server.core}
        return leaders == set(self.leading()) and len(leaders) == 1

    def _record_report(self, _: float, subject: str, predicate: str) -> None:
        if subject and not predicate.startswith("looks for a leader"):
            text = predicate.replace("generation", self.generation_name)
            self.transcript.record(self.now, subject, text)

    def _record_votes(
        self, server: SimulatedServer, event: CoreEvent, effects: Sequence[Effect]
    ) -> None:
        for call in self.step_listeners:
            call(server, event, effects)
        # Zab's scenarios record its notifications as votes. For the lab, a vote is the message that
        # binds a server to a leader, which in Zab is the acceptance of its epoch.
        vote_in = self.protocol.vote_in if self.protocol.name != "zab" else None
        for effect in effects:
            if vote_in is not None and type(effect) is Send:
                vote = vote_in(effect)
                if vote is not None:
                    self._record_vote(server, *vote)

    def _record_vote(self, server: SimulatedServer, generation: int, candidate: str | None) -> None:
        key = (server.id, generation, candidate or server.id)
        if key not in self._votes:
            self._votes.add(key)
            self.vote_times.append(self.now)
            action = f"votes for {candidate}" if candidate else "asks for votes"
            self.transcript.record(self.now, server.id, f"{action} in generation {generation}")


class ScenarioClient(Client):
    """A client that sends the requests of the scenario to the servers of the scenario."""

    def __init__(self, world: CoreWorld, number: int, name: str) -> None:
        super().__init__(world, number)
        self._core_world = world
        self.name = name
        self._requests = 0

    def write(self, server: str, value: int) -> Operation:
        return self._request_from(server, value)

    def read(self, server: str) -> Operation:
        return self._request_from(server, None)

    def repeat(self, server: str, operation: Operation) -> None:
        """Send the same request again. It is executed once."""
        world = self._core_world
        request = WorkloadRequest(self, operation)
        receive = world.servers[server].receive_request
        world.queue.push_after(world.network.latency(), receive, request)

    def _request_from(self, server: str, value: int | None) -> Operation:
        self._requests += 1
        operation = Operation(self.number, self._requests, 0, value, self._core_world.stamp())
        self.history.append(operation)
        self.repeat(server, operation)
        return operation

    def refused(self, refusal: tuple[WorkloadRequest, str | None]) -> None:
        request, leader = refusal
        verb = "read" if request.operation.value is None else "write"
        hint = f", with the hint that {leader} leads" if leader else ""
        self._record(f"has its {verb} refused{hint}")

    def answered(self, answer: tuple[WorkloadRequest, int | None, int, str]) -> None:
        request, result, _, server = answer
        operation = request.operation
        if operation.ended == inf:
            operation.ended = self._core_world.stamp()
            operation.result = result
            if operation.value is None:
                self._record(f"reads x = {result} from {server}")
            else:
                self._record(f"gets the acknowledgement of x = {operation.value} from {server}")

    def _record(self, predicate: str) -> None:
        self._core_world.transcript.record(self._core_world.now, self.name, predicate)


def violation_of(run: Callable[[], object]) -> str:
    """Run something. Returns the violation that the lab's checkers find, or ""."""
    try:
        run()
    except InvariantBroken as broken:
        return str(broken)
    except ViolationFound as found:
        return found.violation.text
    return ""
