"""Scenarios about one leader and its log: what a quorum alone does not give, and what voting does.

The servers are Raft's cores. What the documents show as broken is a model (the quorum without a
leader) or a core with one rule taken out (`AsPrinted`, `StandsAtOnce`, `CountsWhoIsUp`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from doyen.lab.linearizability import Operation, linearizable
from doyen.lab.scenarios.play import Script
from doyen.lab.scenarios.stage import Caller, Stage, objection, servers
from doyen.quorum.consensus.core import Connected, Core, Disconnected, Role
from doyen.quorum.consensus.raft import Raft, Vote

__all__ = [
    "AsPrinted",
    "CountsWhoIsUp",
    "Replicas",
    "StandsAtOnce",
    "partition_heals",
    "quorum_anomaly",
    "vote_without_log",
    "votes_too_early",
]

THREE = servers(3)
FIVE = servers(5)

Making = Callable[..., Core]


def lead_with(stage: Stage, first: str) -> None:
    """Start everybody so that this one leads: it is up before the others."""
    stage.start(first)
    stage.wait(0.9)
    stage.start(*(name for name in stage.hosts if name != first))
    stage.until(stage.led)
    stage.wait(0.2)


def _tell_objection(stage: Stage, text: str) -> None:
    if text:
        stage.script.happens(stage.now, "the lab's checker stops the run:")
        stage.script.note(f"             {text}")


# x = 1, x = 2, and back.


class Replicas:
    """The model: three copies of x under a quorum of two, with a version each and no leader."""

    def __init__(self, script: Script, *, repair: bool = False) -> None:
        self._script = script
        self._copies = dict.fromkeys(THREE, (1, 1))
        self._repair = repair
        """Whether a reader writes what it has read to a quorum before it believes it."""
        self.history: list[Operation] = []
        self._stamps = 0
        self.now = 0.0

    def _stamp(self) -> int:
        self._stamps += 1
        return self._stamps

    def _began(self, client: int, value: int | None) -> Operation:
        operation = Operation(client, len(self.history) + 1, 0, value, self._stamp())
        self.history.append(operation)
        return operation

    def begin(self) -> None:
        first = self._began(0, 1)
        first.ended = self._stamp()

    def write(self, who: str, client: int, value: int, reached: Sequence[str]) -> None:
        """Reaches these; without a quorum it is never answered."""
        self._began(client, value)
        for name in reached:
            self._copies[name] = (2, value)
        self.now += 0.1
        told = f"writes x = {value}; only {reached[0]} gets it, so it is told of no success"
        self._script.say(self.now, who, told)

    def read(self, who: str, client: int, asked: Sequence[str]) -> int:
        operation = self._began(client, None)
        latest = max(self._copies[name] for name in asked)
        if self._repair:
            self._copies.update(dict.fromkeys(asked, latest))
        operation.result = latest[1]
        operation.ended = self._stamp()
        self.now += 0.1
        told = f"reads from {asked[0]} and {asked[1]}: x = {latest[1]}"
        self._script.say(self.now, who, told)
        return latest[1]


def quorum_anomaly(script: Script, *, repair: bool = False) -> None:
    """A value that was read disappears, and comes back."""
    script.note("A model: x on three servers, W = R = 2, and no leader. At first x = 1.")
    model = Replicas(script, repair=repair)
    model.begin()
    model.write("writer1", 1, 2, ["server1"])
    seen = [model.read("client c1", 2, ["server1", "server2"])]
    script.happens(model.now, "server1 is down for a while")
    seen.append(model.read("client c2", 3, ["server2", "server3"]))
    script.happens(model.now, "server1 is back")
    seen.append(model.read("client c2", 3, ["server1", "server3"]))
    script.fact("with a quorum alone x was read as 2, then 1, then 2", seen == [2, 1, 2])
    script.fact(
        "the lab's checker finds no order of reads and writes that explains it",
        linearizable(model.history) is not None,
    )

    script.note("The same with a leader (Raft): only it answers, and only with a majority's word.")
    stage = Stage(script, THREE, "raft")
    with script.aside():
        lead_with(stage, "server1")
    script.say(stage.now, "server1", "leads")
    writer, c1, c2 = (
        Caller(stage, number, name)
        for number, name in enumerate(("writer1", "client c1", "client c2"), 1)
    )
    done = writer.write("server1", 1)
    stage.until(lambda: done.ended < inf)
    stage.cut(["server1"], ["server2", "server3"])
    script.say(stage.now, "writer1", "writes x = 2, to server1")
    second = writer.write("server1", 2)
    script.say(stage.now, "client c1", "asks server1 for x")
    early = c1.read("server1")
    stage.until(lambda: stage.core("server1").role is not Role.LEADING)
    script.say(stage.now, "server1", "has heard of no majority for a second: it leads no more")
    stage.wait(0.1)
    stage.until(lambda: bool(stage.leading()))
    stage.wait(0.1)
    (leader,) = stage.leading()
    old = c2.read(leader)
    stage.until(lambda: old.ended < inf)
    unacknowledged = second.ended == inf
    stage.heal()
    stage.until(stage.led)
    stage.wait(0.05)
    script.say(stage.now, "writer1", f"asks {leader} for the same once more")
    writer.again(leader, second)
    stage.until(lambda: second.ended < inf)
    later = [c1.read(leader), c2.read(leader)]
    stage.until(lambda: all(read.ended < inf for read in later))
    history = [operation for each in (writer, c1, c2) for operation in each.history]
    script.fact(
        "with a leader, c1 was never shown an x = 2 that others could not see", early.ended == inf
    )
    script.fact(
        "c2 read x = 1, and writer1 had not been told of any success",
        old.result == 1 and unacknowledged,
    )
    script.fact(
        "once x = 2 was acknowledged, every read gave it",
        [read.result for read in later] == [2, 2],
    )
    script.fact("the checker finds an order that explains all of it", linearizable(history) is None)


# Everyone at once.


class StandsAtOnce(Raft):
    """The mutant: asks for votes without first asking whether there would be any."""

    def _canvass(self) -> None:
        self._stand(transfer=False)


def _apart_for(stage: Stage, seconds: float) -> tuple[int, int, float]:
    """Everybody cut off from everybody, and together again. Gives how many had no leader then, the
    generations that this took, and the seconds until somebody led."""
    with stage.script.aside():
        lead_with(stage, "server1")
    before = stage.core("server1").generation
    stage.script.say(stage.now, "server1", f"leads in generation {before}; the others follow")
    stage.cut(*([name] for name in FIVE), told=True)
    stage.wait(seconds)
    looking = sum(stage.core(name).role is Role.LOOKING for name in FIVE)
    highest = max(stage.core(name).generation for name in FIVE)
    told = f"{looking} of 5 have no leader and want one; they are in generation {highest}"
    stage.script.happens(stage.now, told)
    stage.heal()
    healed_at = stage.now
    stage.until(stage.led)
    took_s = stage.now - healed_at
    stage.wait(3.0)
    return looking, stage.core("server1").generation - before, took_s


def partition_heals(script: Script) -> None:
    """A network that heals, and five who all want to lead."""
    stage = Stage(script, FIVE, "raft")
    spent: list[tuple[int, int, float]] = []
    broken = objection(lambda: spent.append(_apart_for(stage, 10.0)))
    looking, generations, took_s = spent[0] if spent else (0, 0, 0.0)
    if stage.led():
        script.happens(stage.now, f"{stage.leading()[0]} leads still, and everybody follows")
    script.note("The same with a mutant: whoever misses a leader asks for votes at once.")
    hasty = Stage(script, FIVE, "raft", core=StandsAtOnce)
    with script.aside():
        _, more, _ = _apart_for(hasty, 10.0)
    script.happens(hasty.now, f"one leads as well; that took {more} generations")
    script.fact(
        "all five were electing when the network healed, and one leader came of it",
        looking == 5 and stage.led(),
    )
    script.fact(f"it took {took_s:.2f} s: less than two election timeouts of 1 s", 0 < took_s < 2.0)
    script.fact("at no instant did two lead in one generation", not broken)
    script.fact(
        f"asking first cost {generations} generations; asking for votes at once, {more}",
        generations < more,
    )
    script.fact(
        "haste does not split the cluster either: every generation needs a majority",
        hasty.led(),
    )


# Too early.


class CountsWhoIsUp(Raft):
    """The mutant: a majority of those it has met so far is enough for it."""

    def __init__(self, id: str, *given: Any, **others: Any) -> None:  # noqa: A002
        self._met = {id}
        super().__init__(id, *given, **others)

    def _connected(self, event: Connected) -> None:
        self._met.add(event.peer)
        super()._connected(event)

    def _disconnected(self, event: Disconnected) -> None:
        self._met.discard(event.peer)
        super()._disconnected(event)

    def _elected(self, *more: str) -> bool:
        return 2 * len(self._met & self._votes.union(more)) > len(self._met)


def _start_up(stage: Stage) -> None:
    """Two start while the way to the others is not open yet; then the others do."""
    stage.cut(["server1", "server2"], ["server3", "server4", "server5"])
    stage.start("server1", "server2")
    stage.wait(2.0)
    _tell_roles(stage)
    stage.start("server3", "server4")
    stage.wait(2.0)
    _tell_roles(stage)
    stage.start("server5")
    stage.wait(2.0)
    _tell_roles(stage)
    stage.heal()
    stage.wait(3.0)


def _tell_roles(stage: Stage) -> None:
    if not stage.leading():
        up = sum(host.core is not None for host in stage.hosts.values())
        stage.script.happens(stage.now, f"{up} of 5 are up, and nobody leads")


def votes_too_early(script: Script, early: Making = CountsWhoIsUp) -> None:
    """Those who start first, and take themselves for everybody."""
    script.note("A mutant: a server that has just started counts a majority of those it has met.")
    hasty = Stage(script, FIVE, "raft", core=early)
    hasty.checkers.cluster.majorities = False  # let it be seen what comes of it
    broken = objection(lambda: _start_up(hasty))
    _tell_objection(hasty, broken)
    script.note("Raft as it is: a majority is one of all five, whoever has started so far.")
    stage = Stage(script, FIVE, "raft")
    sound = objection(lambda: _start_up(stage))
    leaders = stage.checkers.cluster.leaders
    script.fact(
        "counting only whom they had met, the first two elected a leader, and so did the others",
        "both lead" in broken,
    )
    script.fact(
        "counting all five, two were too few to elect anybody: server1 and server2 waited",
        not sound and not {"server1", "server2"} & set(leaders.values()),
    )
    script.fact(
        "no vote was asked for or given before server5 made three who could reach one another",
        min(stage.voted) > stage.started.get("server5", inf),
    )
    script.fact("when the way was open, one leader was followed by all", stage.led())


# The vote as printed.


class AsPrinted(Raft):
    """The mutant: `handleVoteRequest` as the document prints it. A request of a later generation
    is granted at once; only within the same generation is the log compared. (It has no canvass.)"""

    def _canvass(self) -> None:
        self._stand(transfer=False)

    def _vote_asked(self, peer: str, message: Vote) -> None:
        if message.generation > self.generation and not self._content():
            self._adopt(message.generation, peer)
            self._grant(peer)
        else:
            super()._vote_asked(peer, message)


def _behind(stage: Stage) -> Operation:
    """server3 is cut off and misses a write; then server1, which led, dies. Gives a last read."""
    with stage.script.aside():
        lead_with(stage, "server1")
    stage.script.say(stage.now, "server1", "leads; server2 and server3 follow")
    client = Caller(stage, 1, "a client")
    stage.cut(["server1", "server2"], ["server3"])
    done = client.write("server1", 1)
    stage.until(lambda: done.ended < inf)
    stage.wait(3.0)
    stage.kill("server1", told=False)
    stage.wait(1.0)  # until server2 does not count on server1 any more
    stage.until(lambda: stage.due_s("server3") < 0.02)
    stage.heal()
    stage.until(lambda: stage.leading() not in ([], ["server1"]))
    stage.wait(0.5)
    read = client.read(stage.leading()[0])
    stage.until(lambda: read.ended < inf)
    return read


def vote_without_log(script: Script, printed: Making = AsPrinted) -> None:
    """A later generation is not enough for a vote."""
    script.note("The mutant: a request of a later generation gets the vote, whatever its log.")
    bare = Stage(script, THREE, "raft", core=printed)
    broken = objection(lambda: _behind(bare))
    lost = bare.leading() == ["server3"] and not _has_write(bare, "server3")
    _tell_objection(bare, broken)
    script.note("Raft as it is: the vote goes only to a log that is at least as far.")
    stage = Stage(script, THREE, "raft")
    reads: list[Operation] = []
    sound = objection(lambda: reads.append(_behind(stage)))
    script.fact(
        "as printed, server3 was elected without x = 1, which the client had been told is written",
        "which is committed" in broken and lost,
    )
    script.fact(
        "with the log compared, server3 was not elected: server2 leads",
        not sound and stage.leading() == ["server2"],
    )
    script.fact("and x = 1 is still there to be read", bool(reads) and reads[0].result == 1)


def _has_write(stage: Stage, name: str) -> bool:
    return any(entry.data for entry in stage.core(name).log.entries)
