"""Scenarios about the choice of a candidate: ZooKeeper's ensembles, and votes for the smallest id.

The servers are the cores `zab` and `smallest_id`. Only the textbook's vote by ids alone is a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from doyen.lab.scenarios.core_world import CoreWorld, ScenarioClient, server_names
from doyen.lab.scenarios.transcript import Transcript, listed
from doyen.lab.server import SimulatedServer
from doyen.quorum.consensus.core import CoreEvent, Effect, Received, Role, Send
from doyen.quorum.consensus.smallest_id import Looking
from doyen.quorum.consensus.zab.messages import Notification


class Ensemble(CoreWorld):
    """Servers of ZooKeeper's protocol. Their votes are recorded."""

    def __init__(self, transcript: Transcript, count: int) -> None:
        super().__init__(transcript, server_names(count), "zab")
        self.generation_name = "epoch"
        self.step_listeners.append(self._record_notifications)
        self._last: dict[str, tuple[int, str, str]] = {}
        self.ignored: list[tuple[str, str]] = []
        """Pairs of a voter and a server that ignored its vote because it was of an earlier
        round."""

    def _record_notifications(
        self, server: SimulatedServer, event: CoreEvent, effects: Sequence[Effect]
    ) -> None:
        match event:
            case Received(peer, Notification(role=Role.LOOKING, round=given)) if (
                self.core(server.id).role is Role.LOOKING and 0 < given < self.core(server.id).clock
            ):
                if (peer, server.id) not in self.ignored:
                    self.ignored.append((peer, server.id))
                    text = f"ignores the vote of {peer}, which is of round {given}"
                    self.transcript.record(self.now, server.id, text)
        for effect in effects:
            match effect:
                case Send(_, Notification(role=Role.LOOKING, round=given, leader=leader) as vote):
                    zxid = f"{vote.zxid_epoch}:{vote.zxid}"
                    if self._last.get(server.id) != (given, leader, zxid):
                        self._last[server.id] = (given, leader, zxid)
                        text = f"votes for {leader} (zxid {zxid}) in round {given}"
                        self.transcript.record(self.now, server.id, text)

    def votes(self) -> dict[str, str]:
        """The current votes of the servers that are up."""
        return {name: self._last[name][1] for name, server in self.servers.items() if server.core}

    def settle(self) -> None:
        """Let time pass until all servers that are up follow one leader."""
        self.until(self.has_leader)

    def roles(self) -> dict[str, Role]:
        return {name: server.core.role for name, server in self.servers.items() if server.core}


def five_servers(transcript: Transcript) -> None:
    world = Ensemble(transcript, 5)
    seen = []
    for name in server_names(5):
        world.start(name)
        world.wait(1.0)
        seen.append((world.roles(), world.votes()))
        if Role.LEADING not in world.roles().values():
            up = len(world.roles())
            transcript.record_event(
                world.now, f"{up} of 5 is no majority: all running servers are LOOKING"
            )
    alone, two, three, four, five = seen
    transcript.fact("server1 alone stays LOOKING", list(alone[0].values()) == [Role.LOOKING])
    transcript.fact(
        "server2 has the greater id, so both vote for it; two of five are no majority",
        set(two[1].values()) == {"server2"} and set(two[0].values()) == {Role.LOOKING},
    )
    transcript.fact(
        "server3 has three votes of five and leads",
        three[0]["server3"] is Role.LEADING and list(three[1].values()) == ["server3"] * 3,
    )
    transcript.fact(
        "server4 and server5 have greater ids, but follow",
        four[0]["server4"] is five[0]["server5"] is Role.FOLLOWING,
    )
    transcript.fact(
        "there was one election: epoch 1 is the only one",
        world.checkers.cluster.leaders == {1: "server3"},
    )


def _history(world: Ensemble) -> None:
    """server5 misses the last write; then all servers lose power."""
    world.start(*server_names(5))
    world.settle()
    world.kill("server5")
    world.settle()
    written = ScenarioClient(world, 1, "a client").write("server4", 1)
    world.until(lambda: written.ended < inf)
    world.wait(0.5)
    world.kill(*server_names(4), power_loss=True)


def restarted_cluster(transcript: Transcript) -> None:
    world = Ensemble(transcript, 5)
    transcript.note("Before: server5 led and crashed; then server4 led, and x was written.")
    with transcript.muted():
        _history(world)
    transcript.note("All servers have lost power. server5, which has missed x, starts first.")
    world.start("server5")
    world.wait(0.5)
    world.start("server1", "server2")
    world.settle()
    first = world.leading()
    logs = {name: world.core(name).log.position() for name in ("server1", "server2", "server5")}
    transcript.note("server3 and server4 start; then server1, server2 and server5 crash.")
    with transcript.muted():
        world.start("server3", "server4")
        world.settle()
        world.wait(0.5)
    world.kill("server1", "server2", "server5")
    world.wait(0.6)
    rounds = world.core("server4").clock
    transcript.record_event(world.now, f"server3 and server4 are in round {rounds}: two of five")
    for name in ("server3", "server4"):
        world.servers[name].links["server5"].slow_down(0.15)
    world.start("server5")
    transcript.record_event(
        world.now, "messages to server5 take 150 ms, so it votes before it has received any"
    )
    world.settle()
    transcript.fact(
        "the newer data won: server5 has the greatest id, but did not lead with older data",
        first == ["server2"],
    )
    transcript.fact(
        "with the same data the greater id won: server2, not server1",
        logs["server1"] == logs["server2"] and first == ["server2"],
    )
    transcript.fact("server5 received what it had missed", logs["server5"] == logs["server2"])
    transcript.fact(
        "the restarted server5's vote of an earlier round was ignored, and it voted again",
        ("server5", "server4") in world.ignored and world.core("server5").clock >= rounds,
    )
    transcript.fact(
        "in the same round and with the same data, the greatest id won: server5",
        world.leading() == ["server5"]
        and world.core("server5").clock == world.core("server4").clock == rounds,
    )


Rule = Callable[[str, Mapping[str, Sequence[str]]], str | None]
"""The leader according to one server after a round, or None, given which servers each can reach."""


def _number(name: str) -> int:
    return int(name.removeprefix("node"))


def by_ids_alone(me: str, reach: Mapping[str, Sequence[str]]) -> str | None:
    """The model: the voting phase exactly as the introduction describes it. A server that knows of
    no smaller number than its own and has received no vote is the new leader; so is a candidate
    with the votes of more than half of the servers; otherwise the round has failed."""
    votes = {name: min((name, *reach[name]), key=_number) for name in reach}
    reachable = (me, *reach[me])
    for candidate in reachable:
        if sum(votes[name] == candidate for name in reachable) > len(reach) / 2:
            return candidate
    others = [name for name in reach[me] if votes[name] == me]
    return me if votes[me] == me and not others else None


def no_majority(transcript: Transcript, rule: Rule = by_ids_alone) -> None:
    nodes = ("node17", "node42", "node88")
    transcript.note("Servers A, B and C have drawn the numbers 42, 17 and 88.")
    transcript.note("A model of the vote by numbers alone, with the network cut between all three:")
    isolated: dict[str, tuple[str, ...]] = dict.fromkeys(nodes, ())
    elected = [name for name in nodes if rule(name, isolated) == name]
    for name in elected:
        transcript.record_event(
            0.0, f"{name} knows of no smaller number and has received no vote: it leads"
        )
    transcript.fact(
        "by numbers alone, each of the three considers itself the leader", elected == list(nodes)
    )

    transcript.note("The same cut for `smallest-id`, which requires a majority of all servers:")
    world = CoreWorld(transcript, nodes, "smallest-id")
    rounds: dict[str, int] = dict.fromkeys(nodes, 0)

    def count_rounds(server: SimulatedServer, event: CoreEvent, effects: Sequence[Effect]) -> None:
        rounds[server.id] += any(
            isinstance(effect, Send) and isinstance(effect.message, Looking) for effect in effects
        )

    world.step_listeners.append(count_rounds)
    world.start(*nodes)
    world.cut(*([name] for name in nodes))
    world.wait(5.0)
    least = min(rounds.values())
    transcript.record_event(
        world.now, f"{listed(list(nodes))} have asked in vain, at least {least} times"
    )
    transcript.fact(
        f"{least} rounds had no majority, and there was no leader",
        least >= 10 and not world.checkers.cluster.leaders,
    )
    world.heal()
    world.cut(["node17"], ["node42", "node88"])
    world.until(lambda: bool(world.leading()))
    world.wait(0.5)
    transcript.fact(
        "two of three are a majority: node42, which has the smaller id, leads",
        world.leading() == ["node42"],
    )
    world.heal()
    world.until(world.has_leader)
    world.wait(3.0)
    transcript.record_event(world.now, "node42 still leads")
    transcript.fact(
        "node17 returned and follows: a smaller number is no reason to depose a leader",
        world.leading() == ["node42"] and world.core("node17").role is Role.FOLLOWING,
    )
    transcript.fact(
        "there was one generation, and one leader in it",
        len(world.checkers.cluster.leaders) == 1,
    )
