"""Scenarios about who is voted for: ZooKeeper's ensembles, and the vote for the smallest id.

Everything acted here is the cores `zab` and `smallest_id`, but for the textbook's vote by ids
alone, which is a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from doyen.lab.scenarios.play import Script, listed
from doyen.lab.scenarios.stage import Caller, Stage, servers
from doyen.lab.server import SimulatedServer
from doyen.quorum.consensus.core import CoreEvent, Effect, Received, Role, Send
from doyen.quorum.consensus.smallest_id import Looking
from doyen.quorum.consensus.zab import Notification

__all__ = ["by_ids_alone", "five_servers", "no_majority", "restarted_cluster"]


class Ensemble(Stage):
    """Servers of ZooKeeper's protocol, whose votes are told."""

    def __init__(self, script: Script, count: int) -> None:
        super().__init__(script, servers(count), "zab")
        self.generation_word = "epoch"
        self.hearing.append(self._notified)
        self._last: dict[str, tuple[int, str, str]] = {}
        self.ignored: list[tuple[str, str]] = []
        """Whose vote was ignored by whom, since it was one of an earlier round."""

    def _notified(self, host: SimulatedServer, event: CoreEvent, effects: Sequence[Effect]) -> None:
        match event:
            case Received(peer, Notification(role=Role.LOOKING, round=given)) if (
                self.core(host.id).role is Role.LOOKING and 0 < given < self.core(host.id).clock
            ):
                if (peer, host.id) not in self.ignored:
                    self.ignored.append((peer, host.id))
                    told = f"ignores {peer}'s vote, which is one of round {given}"
                    self.script.say(self.now, host.id, told)
        for effect in effects:
            match effect:
                case Send(_, Notification(role=Role.LOOKING, round=given, leader=whom) as vote):
                    zxid = f"{vote.zxid_epoch}:{vote.zxid}"
                    if self._last.get(host.id) != (given, whom, zxid):
                        self._last[host.id] = (given, whom, zxid)
                        told = f"votes for {whom} (zxid {zxid}) in round {given}"
                        self.script.say(self.now, host.id, told)

    def votes(self) -> dict[str, str]:
        """Whom each that is up votes for at present."""
        return {name: self._last[name][1] for name, host in self.hosts.items() if host.core}

    def rest(self) -> None:
        """Let everybody who is up come to rest behind one leader."""
        self.until(self.led)

    def roles(self) -> dict[str, Role]:
        return {name: host.core.role for name, host in self.hosts.items() if host.core is not None}


def five_servers(script: Script) -> None:
    """Started in order, with no history."""
    stage = Ensemble(script, 5)
    seen = []
    for name in servers(5):
        stage.start(name)
        stage.wait(1.0)
        seen.append((stage.roles(), stage.votes()))
        if Role.LEADING not in stage.roles().values():
            up = len(stage.roles())
            script.happens(stage.now, f"{up} of 5 is no majority: all that are up are LOOKING")
    alone, two, three, four, five = seen
    script.fact("server1 alone stays LOOKING", list(alone[0].values()) == [Role.LOOKING])
    script.fact(
        "server2 has the greater id, so both vote for it; two of five are no majority",
        set(two[1].values()) == {"server2"} and set(two[0].values()) == {Role.LOOKING},
    )
    script.fact(
        "server3 has three votes of five, and leads",
        three[0]["server3"] is Role.LEADING and list(three[1].values()) == ["server3"] * 3,
    )
    script.fact(
        "server4 and server5 have greater ids and follow all the same",
        four[0]["server4"] is five[0]["server5"] is Role.FOLLOWING,
    )
    script.fact(
        "there was one election: epoch 1 is the only one",
        stage.checkers.cluster.leaders == {1: "server3"},
    )


def _history(stage: Ensemble) -> None:
    """All but server5 have what was written last; then the power fails."""
    stage.start(*servers(5))
    stage.rest()
    stage.kill("server5")
    stage.rest()
    written = Caller(stage, 1, "a client").write("server4", 1)
    stage.until(lambda: written.ended < inf)
    stage.wait(0.5)
    stage.kill(*servers(4), told=False)


def restarted_cluster(script: Script) -> None:
    """Logical clock, then data version, then id."""
    stage = Ensemble(script, 5)
    script.note(
        "An ensemble with a history: server5 led, and died; server4 led, and had x written."
    )
    with script.aside():
        _history(stage)
    script.note("Power has failed everywhere. First server5 comes back, which has missed x.")
    stage.start("server5")
    stage.wait(0.5)
    stage.start("server1", "server2")
    stage.rest()
    first = stage.leading()
    logs = {name: stage.core(name)._last() for name in ("server1", "server2", "server5")}
    script.note("server3 and server4 join; then the leader dies, and server1 and server5 with it.")
    with script.aside():
        stage.start("server3", "server4")
        stage.rest()
        stage.wait(0.5)
    stage.kill("server1", "server2", "server5")
    stage.wait(0.6)
    rounds = stage.core("server4").clock
    script.happens(stage.now, f"server3 and server4 are in round {rounds}: two of five")
    for name in ("server3", "server4"):
        stage.hosts[name].links["server5"].extra_s = 0.15
    stage.start("server5")
    script.happens(stage.now, "what the others say takes 150 ms to server5, which cannot wait")
    stage.rest()
    script.fact(
        "the newer data won: server5 has the greatest id, and did not lead with the older history",
        first == ["server2"],
    )
    script.fact(
        "with the same data the greater id won: server2, not server1",
        logs["server1"] == logs["server2"] and first == ["server2"],
    )
    script.fact("server5 was given what it had missed", logs["server5"] == logs["server2"])
    script.fact(
        "the restarted server5's vote of an earlier round was ignored, and it voted again",
        ("server5", "server4") in stage.ignored and stage.core("server5").clock >= rounds,
    )
    script.fact(
        "in the same round, with the same data, server5's id won",
        stage.leading() == ["server5"]
        and stage.core("server5").clock == stage.core("server4").clock == rounds,
    )


Rule = Callable[[str, Mapping[str, Sequence[str]]], str | None]
"""Whom a server takes for the leader after a round, given whom each can reach; None: nobody."""


def _number(name: str) -> int:
    return int(name.removeprefix("node"))


def by_ids_alone(me: str, reach: Mapping[str, Sequence[str]]) -> str | None:
    """The model: the introduction's voting phase, to the letter. A server whose number is the
    smallest it knows of, and that has had no vote of another, is the new leader; so is a candidate
    with the votes of more than half; else the round has failed."""
    votes = {name: min((name, *reach[name]), key=_number) for name in reach}
    heard = (me, *reach[me])
    for candidate in heard:
        if sum(votes[name] == candidate for name in heard) > len(reach) / 2:
            return candidate
    others = [name for name in reach[me] if votes[name] == me]
    return me if votes[me] == me and not others else None


def no_majority(script: Script, rule: Rule = by_ids_alone) -> None:
    """Rounds without a majority."""
    nodes = ("node17", "node42", "node88")
    script.note("Servers A, B and C have drawn the numbers 42, 17 and 88.")
    script.note("A model of the vote by numbers alone, with the network cut between all three:")
    apart: dict[str, tuple[str, ...]] = dict.fromkeys(nodes, ())
    elected = [name for name in nodes if rule(name, apart) == name]
    for name in elected:
        script.happens(0.0, f"{name} knows of no smaller number and has had no vote: it leads")
    script.fact(
        "by numbers alone, each of the three takes itself for the leader", elected == list(nodes)
    )

    script.note("The same cut for `smallest-id`, whose vote counts only with a majority of all:")
    stage = Stage(script, nodes, "smallest-id")
    rounds: dict[str, int] = dict.fromkeys(nodes, 0)

    def called(host: SimulatedServer, event: CoreEvent, effects: Sequence[Effect]) -> None:
        rounds[host.id] += any(
            isinstance(effect, Send) and isinstance(effect.message, Looking) for effect in effects
        )

    stage.hearing.append(called)
    stage.start(*nodes)
    stage.cut(*([name] for name in nodes))
    stage.wait(5.0)
    least = min(rounds.values())
    script.happens(stage.now, f"{listed(list(nodes))} have called in vain, {least} times at least")
    script.fact(
        f"{least} rounds had no majority, and nobody led",
        least >= 10 and not stage.checkers.cluster.leaders,
    )
    stage.heal()
    stage.cut(["node17"], ["node42", "node88"])
    stage.until(lambda: bool(stage.leading()))
    stage.wait(0.5)
    script.fact(
        "two of three are a majority: node42, the smallest of those who meet, leads",
        stage.leading() == ["node42"],
    )
    stage.heal()
    stage.until(stage.led)
    stage.wait(3.0)
    script.happens(stage.now, "node42 leads still")
    script.fact(
        "node17 came back and follows: a smaller number is no reason to depose a leader",
        stage.leading() == ["node42"] and stage.core("node17").role is Role.FOLLOWING,
    )
    script.fact(
        "in all this there was one generation, and one leader in it",
        len(stage.checkers.cluster.leaders) == 1,
    )
