"""Scenarios about a leader and its log: what a quorum alone does not guarantee, and how votes do.

The servers are Raft's cores. What the documents show as broken is a model (the quorum without a
leader) or a core without one of its rules (`AsPrinted`, `StandsAtOnce`, `CountsWhoIsUp`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from doyen.lab.linearizability import Operation, linearizable
from doyen.lab.scenarios.core_world import (
    CoreWorld,
    ScenarioClient,
    server_names,
    violation_of,
)
from doyen.lab.scenarios.transcript import Transcript
from doyen.quorum.consensus.core import Connected, Core, Disconnected, Role
from doyen.quorum.consensus.raft import Raft
from doyen.quorum.consensus.raft.messages import Vote

THREE = server_names(3)
FIVE = server_names(5)

Making = Callable[..., Core]


def lead_with(world: CoreWorld, first: str) -> None:
    """Start all servers so that this one leads: it starts before the others."""
    world.start(first)
    world.wait(0.9)
    world.start(*(name for name in world.servers if name != first))
    world.until(world.has_leader)
    world.wait(0.2)


def _record_violation(world: CoreWorld, text: str) -> None:
    if text:
        world.transcript.violation(world.now, text)


# A quorum without a leader.


class Replicas:
    """The model: three copies of x under a quorum of two, with a version each and no leader."""

    def __init__(self, transcript: Transcript, *, repair: bool = False) -> None:
        self._transcript = transcript
        self._copies = dict.fromkeys(THREE, (1, 1))
        self._repair = repair
        """Whether a reader writes the value to a quorum before it returns it."""
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
        """Write to these servers. Without a quorum the write is never acknowledged."""
        self._began(client, value)
        for name in reached:
            self._copies[name] = (2, value)
        self.now += 0.1
        text = f"writes x = {value}; only {reached[0]} receives it, so it is not acknowledged"
        self._transcript.record(self.now, who, text)

    def read(self, who: str, client: int, asked: Sequence[str]) -> int:
        operation = self._began(client, None)
        latest = max(self._copies[name] for name in asked)
        if self._repair:
            self._copies.update(dict.fromkeys(asked, latest))
        operation.result = latest[1]
        operation.ended = self._stamp()
        self.now += 0.1
        text = f"reads from {asked[0]} and {asked[1]}: x = {latest[1]}"
        self._transcript.record(self.now, who, text)
        return latest[1]


def quorum_anomaly(transcript: Transcript, *, repair: bool = False) -> None:
    transcript.note("A model: x on three servers, W = R = 2, and no leader. At first x = 1.")
    model = Replicas(transcript, repair=repair)
    model.begin()
    model.write("writer1", 1, 2, ["server1"])
    seen = [model.read("client c1", 2, ["server1", "server2"])]
    transcript.record_event(model.now, "server1 is down")
    seen.append(model.read("client c2", 3, ["server2", "server3"]))
    transcript.record_event(model.now, "server1 is up again")
    seen.append(model.read("client c2", 3, ["server1", "server3"]))
    transcript.fact("with a quorum alone x was read as 2, then 1, then 2", seen == [2, 1, 2])
    transcript.fact(
        "the lab's checker finds no order of reads and writes that explains it",
        linearizable(model.history) is not None,
    )

    transcript.note(
        "The same with a leader (Raft): only it answers, once a majority has confirmed it."
    )
    world = CoreWorld(transcript, THREE, "raft")
    with transcript.muted():
        lead_with(world, "server1")
    transcript.record(world.now, "server1", "leads")
    writer, c1, c2 = (
        ScenarioClient(world, number, name)
        for number, name in enumerate(("writer1", "client c1", "client c2"), 1)
    )
    done = writer.write("server1", 1)
    world.until(lambda: done.ended < inf)
    world.cut(["server1"], ["server2", "server3"])
    transcript.record(world.now, "writer1", "sends x = 2 to server1")
    second = writer.write("server1", 2)
    transcript.record(world.now, "client c1", "asks server1 for x")
    early = c1.read("server1")
    world.until(lambda: world.core("server1").role is not Role.LEADING)
    transcript.record(
        world.now, "server1", "has had no contact with a majority for a second, and steps down"
    )
    world.wait(0.1)
    world.until(lambda: bool(world.leading()))
    world.wait(0.1)
    (leader,) = world.leading()
    old = c2.read(leader)
    world.until(lambda: old.ended < inf)
    unacknowledged = second.ended == inf
    world.heal()
    world.until(world.has_leader)
    world.wait(0.05)
    transcript.record(world.now, "writer1", f"sends the same write to {leader}")
    writer.repeat(leader, second)
    world.until(lambda: second.ended < inf)
    later = [c1.read(leader), c2.read(leader)]
    world.until(lambda: all(read.ended < inf for read in later))
    history = [operation for each in (writer, c1, c2) for operation in each.history]
    transcript.fact(
        "with a leader, c1 never read an x = 2 that others could not read", early.ended == inf
    )
    transcript.fact(
        "c2 read x = 1, while x = 2 was not acknowledged",
        old.result == 1 and unacknowledged,
    )
    transcript.fact(
        "after x = 2 was acknowledged, every read returned it",
        [read.result for read in later] == [2, 2],
    )
    transcript.fact(
        "the checker finds an order that explains all of it", linearizable(history) is None
    )


# Five candidates at once.


class StandsAtOnce(Raft):
    """The mutant: asks for votes without a pre-vote."""

    def _begin_pre_vote(self) -> None:
        self._become_candidate(transfer=False)


def _cut_all_for(world: CoreWorld, seconds: float) -> tuple[int, int, float]:
    """Cut all servers off from one another, and end that. Returns how many had no leader then, and
    the generations and the seconds until one led."""
    with world.transcript.muted():
        lead_with(world, "server1")
    before = world.core("server1").generation
    text = f"leads in generation {before}; the others follow"
    world.transcript.record(world.now, "server1", text)
    world.cut(*([name] for name in FIVE), reset=True)
    world.wait(seconds)
    looking = sum(world.core(name).role is Role.LOOKING for name in FIVE)
    highest = max(world.core(name).generation for name in FIVE)
    text = f"{looking} of 5 look for a leader; the latest generation is {highest}"
    world.transcript.record_event(world.now, text)
    world.heal()
    healed_at = world.now
    world.until(world.has_leader)
    took_s = world.now - healed_at
    world.wait(3.0)
    return looking, world.core("server1").generation - before, took_s


def partition_heals(transcript: Transcript) -> None:
    world = CoreWorld(transcript, FIVE, "raft")
    spent: list[tuple[int, int, float]] = []
    broken = violation_of(lambda: spent.append(_cut_all_for(world, 10.0)))
    looking, generations, took_s = spent[0] if spent else (0, 0, 0.0)
    if world.has_leader():
        transcript.record_event(
            world.now, f"{world.leading()[0]} still leads, and all others follow"
        )
    transcript.note("The same with a mutant that asks for votes without a pre-vote.")
    hasty = CoreWorld(transcript, FIVE, "raft", core=StandsAtOnce)
    with transcript.muted():
        _, more, _ = _cut_all_for(hasty, 10.0)
    transcript.record_event(hasty.now, f"there is one leader as well; that took {more} generations")
    transcript.fact(
        "all five looked for a leader when the network healed, and one was elected",
        looking == 5 and world.has_leader(),
    )
    transcript.fact(
        f"it took {took_s:.2f} s: less than two election timeouts of 1 s", 0 < took_s < 2.0
    )
    transcript.fact("at no instant did two lead in one generation", not broken)
    transcript.fact(
        f"with the pre-vote it took {generations} generations, without it {more}",
        generations < more,
    )
    transcript.fact(
        "without the pre-vote there was one leader, too: each needs a majority",
        hasty.has_leader(),
    )


# Votes before all servers are up.


class CountsWhoIsUp(Raft):
    """The mutant: a majority of the servers that it is connected to is enough."""

    def __init__(self, id: str, *given: Any, **others: Any) -> None:  # noqa: A002
        self._met = {id}
        super().__init__(id, *given, **others)

    def _connected(self, event: Connected) -> None:
        self._met.add(event.peer)
        super()._connected(event)

    def _disconnected(self, event: Disconnected) -> None:
        self._met.discard(event.peer)
        super()._disconnected(event)

    def _elected(self, votes: set[str]) -> bool:
        return 2 * len(self._met & votes) > len(self._met)


def _start_up(world: CoreWorld) -> None:
    """Two servers start while they cannot reach the others; then the others start."""
    world.cut(["server1", "server2"], ["server3", "server4", "server5"])
    world.start("server1", "server2")
    world.wait(2.0)
    _record_no_leader(world)
    world.start("server3", "server4")
    world.wait(2.0)
    _record_no_leader(world)
    world.start("server5")
    world.wait(2.0)
    _record_no_leader(world)
    world.heal()
    world.wait(3.0)


def _record_no_leader(world: CoreWorld) -> None:
    if not world.leading():
        up = sum(server.core is not None for server in world.servers.values())
        world.transcript.record_event(world.now, f"{up} of 5 are up, and none leads")


def votes_too_early(transcript: Transcript, early: Making = CountsWhoIsUp) -> None:
    transcript.note("A mutant: a server counts a majority of the servers that it is connected to.")
    hasty = CoreWorld(transcript, FIVE, "raft", core=early)
    hasty.checkers.cluster.majorities = False  # otherwise the checker stops the run too early
    broken = violation_of(lambda: _start_up(hasty))
    _record_violation(hasty, broken)
    transcript.note("Unchanged Raft: a majority of all five is required.")
    world = CoreWorld(transcript, FIVE, "raft")
    sound = violation_of(lambda: _start_up(world))
    leaders = world.checkers.cluster.leaders
    transcript.fact(
        "counting only connected servers, the first two elected a leader, and so did the others",
        "both lead" in broken,
    )
    transcript.fact(
        "counting all five, two were too few for an election: server1 and server2 waited",
        not sound and not {"server1", "server2"} & set(leaders.values()),
    )
    transcript.fact(
        "there were no votes before server5 started, with which three could reach one another",
        min(world.vote_times) > world.started.get("server5", inf),
    )
    transcript.fact(
        "when the network was no longer cut, all followed one leader", world.has_leader()
    )


# Votes without a comparison of logs.


class AsPrinted(Raft):
    """The mutant: `handleVoteRequest` as printed in the document. A vote for a later generation is
    granted at once; logs are compared only within the same generation. There is no pre-vote."""

    def _begin_pre_vote(self) -> None:
        self._become_candidate(transfer=False)

    def _vote_asked(self, peer: str, message: Vote) -> None:
        if message.generation > self.generation and not self._hears_leader():
            self._adopt(message.generation, peer)
            self._grant(peer)
        else:
            super()._vote_asked(peer, message)


def _behind(world: CoreWorld) -> Operation:
    """server3 is cut off and misses a write; then the leader server1 crashes. Returns a last
    read."""
    with world.transcript.muted():
        lead_with(world, "server1")
    world.transcript.record(world.now, "server1", "leads; server2 and server3 follow")
    client = ScenarioClient(world, 1, "a client")
    world.cut(["server1", "server2"], ["server3"])
    done = client.write("server1", 1)
    world.until(lambda: done.ended < inf)
    world.wait(3.0)
    world.kill("server1", power_loss=True)
    world.wait(1.0)  # until server2 no longer considers server1 the leader
    world.until(lambda: world.due_s("server3") < 0.02)
    world.heal()
    world.until(lambda: world.leading() not in ([], ["server1"]))
    world.wait(0.5)
    read = client.read(world.leading()[0])
    world.until(lambda: read.ended < inf)
    return read


def vote_without_log(transcript: Transcript, printed: Making = AsPrinted) -> None:
    transcript.note("The mutant grants its vote to a later generation, whatever the other log.")
    bare = CoreWorld(transcript, THREE, "raft", core=printed)
    broken = violation_of(lambda: _behind(bare))
    lost = bare.leading() == ["server3"] and not _has_write(bare, "server3")
    _record_violation(bare, broken)
    transcript.note("Unchanged Raft: only a candidate whose log is as complete gets the vote.")
    world = CoreWorld(transcript, THREE, "raft")
    reads: list[Operation] = []
    sound = violation_of(lambda: reads.append(_behind(world)))
    transcript.fact(
        "as printed, server3 was elected without x = 1, which had been acknowledged",
        "which is committed" in broken and lost,
    )
    transcript.fact(
        "with the logs compared, server3 was not elected: server2 leads",
        not sound and world.leading() == ["server2"],
    )
    transcript.fact("and x = 1 can still be read", bool(reads) and reads[0].result == 1)


def _has_write(world: CoreWorld, name: str) -> bool:
    return any(entry.data for entry in world.core(name).log.entries)
