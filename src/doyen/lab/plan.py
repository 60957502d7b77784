"""A run as data: the participants, the latencies, the faults and their times.

A plan is drawn from a seed. Each seed leaves some kinds of fault out and draws others often (swarm
testing), so that all seeds together reach states that no single mixture would. The result is a list
of decisions that can be saved, reduced and run again; the same plan always gives the same run. In a
fault sequence the faults depend on one another in time, to reach states that independent faults
hardly ever reach.

Randomness is split: `stream(seed, purpose)` gives every purpose its own random numbers, so that one
more draw for one purpose changes nothing for another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

LEADER = "leader"
"""In a fault, names the server that leads when the fault begins."""

NETWORK = ("partition", "oneway", "bridge", "reset", "slow", "loss", "duplicate", "reorder")
PROCESS = ("crash", "power", "ballot", "pause")
DISK = ("stall", "full", "fsync", "rot")
CLOCK = ("rate", "jump")
REQUESTS = ("transfer", "compact", "churn")
KINDS = NETWORK + PROCESS + DISK + CLOCK + REQUESTS
"""Every kind of fault. Those of the last group are requests to protocols that support them, rather
than faults."""
NODE_KINDS = ("wipe", "rollback", "older")
"""Faults of whole nodes only: a data directory is emptied, or replaced by an older copy; a node
runs a release that does not know all commands."""

DROP = "drop"
"""A fault that no seed draws: one message, whose number among all messages is the amount, is lost.
It begins before the message is sent, or at the same instant."""
WITHOUT_NODES = ("loss", "duplicate", "reorder", "transfer", DROP)
"""Kinds of fault that need not name nodes."""

THEMES = (
    ("partition",),
    ("partition", "oneway", "bridge"),
    ("partition", "rate"),
    ("partition", "crash"),
    ("crash", "slow"),
    ("crash", "power", "fsync"),
    ("ballot",),
    ("pause",),
    ("churn", "partition"),
    ("churn", "crash"),
    ("stall", "crash"),
    ("compact", "power", "partition"),
)
"""Mixtures that are known to reach states that others do not."""


# Limits for plans that are read from a file.
Number = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0.0)]
Duration = Annotated[float, Meta(gt=0.0)]


class Fault(Struct, frozen=True, omit_defaults=True):
    """One fault: its kind, when it begins, how long it lasts, and the nodes it affects."""

    kind: str
    at: Amount
    for_s: Amount = 0.0
    nodes: tuple[str, ...] = ()
    amount: Amount = 0.0
    """The meaning depends on the kind: seconds, a probability, a rate, effects until a crash."""


class Latencies(Struct, frozen=True):
    """The latencies of links and disks without faults."""

    latency_s: Duration = 0.001
    """The median, one way."""
    spread: Amount = 0.3
    """Of the logarithm."""
    fsync_s: Duration = 0.002


class Plan(Struct, frozen=True, kw_only=True):
    """Everything that determines a run, except the code."""

    protocol: str
    nodes: Number
    seed: int
    world: str = "cores"
    """`cores` for bare protocol cores, `quorum` for whole nodes with candidates."""
    for_s: Amount
    """How long faults occur. Then all faults end, and the cluster must recover."""
    clients: Annotated[int, Meta(ge=0)] = 3
    pause_s: Duration = 0.1
    """The average pause of a client between two requests."""
    patience_s: Duration = 0.7
    """How long a client waits for an answer before it tries another server."""
    keys: Number = 4
    latencies: Latencies = msgspec.field(default=Latencies(), name="weather")
    election_timeout_s: Duration = 1.0
    heartbeat_s: Duration = 0.1
    message_bytes: Number = 1 << 20
    """The most bytes of log entries in one message; with 1, a single entry."""
    compact_every: Number = 200
    """Entries between two snapshots, if the protocol has snapshots."""
    tail_entries: Annotated[int, Meta(ge=0)] = 4096
    """Entries before a snapshot that are kept for servers that lag a little."""
    faults: tuple[Fault, ...] = ()
    noise: int = 0
    """Varies what is random within the same decisions: latencies, what a crash leaves on disk."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def replace(self, **changes: object) -> Plan:
        return msgspec.structs.replace(self, **changes)


def stream(seed: int, purpose: str) -> random.Random:
    """The random numbers for one purpose."""
    return random.Random(f"{seed}/{purpose}")


def draw(
    protocol: str,
    nodes: int,
    seed: int,
    *,
    kinds: tuple[str, ...] = KINDS,
    for_s: float = 20.0,
    clients: int = 3,
) -> Plan:
    rng = stream(seed, "plan")
    plan = Plan(
        protocol=protocol,
        nodes=nodes,
        seed=seed,
        for_s=for_s,
        clients=min(clients, rng.choice([1, clients, clients])),
        pause_s=rng.choice([0.02, 0.1, 0.5, 3.0]),
        patience_s=rng.choice([0.7, 0.7, 3.0]),
        keys=rng.choice([1, 3, 8]),
        latencies=Latencies(
            latency_s=rng.choice([0.0003, 0.002, 0.01, 0.03, 0.1]),
            spread=rng.choice([0.1, 0.4, 0.8]),
            fsync_s=rng.choice([0.0005, 0.003, 0.02]),
        ),
        compact_every=rng.choice([10, 50, 400]),
        tail_entries=rng.choice([0, 20, 4096]),
        heartbeat_s=rng.choice([0.1, 0.2, 0.4]),
        message_bytes=rng.choice([1, 100, 1 << 20]),
    )
    if kinds and kinds[0] in FAULT_SEQUENCES:
        return FAULT_SEQUENCES[kinds[0]](rng, plan)
    themes = [theme for theme in THEMES if set(theme) <= set(kinds)]
    if themes and rng.random() < 0.5:
        chosen = list(rng.choice(themes))
    else:
        share = rng.choice([0.15, 0.3, 0.6, 1.0])
        chosen = [kind for kind in kinds if rng.random() < share]
    if not chosen and kinds:
        chosen = [rng.choice(kinds)]
    weights = [rng.choice([1, 1, 3, 9]) for _ in chosen]
    gap_s = rng.choice([0.2, 0.5, 1.0, 2.0])
    length_s = rng.choice([0.3, 1.5, 4.0])
    faults = []
    at = rng.expovariate(1 / gap_s)
    while chosen and at < for_s:
        kind = rng.choices(chosen, weights)[0]
        faults.append(_draw_fault(rng, kind, plan.names, at, rng.expovariate(1 / length_s)))
        if kind == "ballot" and rng.random() < 0.7:
            # There are votes only if there is an election.
            faults.append(Fault("crash", round(at + 0.01, 4), rng.choice([0.01, 1.0]), (LEADER,)))
        at += rng.expovariate(1 / gap_s)
    return plan.replace(faults=tuple(faults))


def _seesaw(rng: random.Random, plan: Plan) -> Plan:
    """One leader after another is cut off or crashes with entries that few others have, and returns
    after the next leader has done the same."""
    faults = []
    at = 1.0
    while at < plan.for_s:
        others = rng.sample(plan.names, rng.randint(0, max(0, plan.nodes // 2 - 1)))
        cut_s = rng.choice([0.05, 0.3, 1.2, 2.5])
        faults.append(Fault("partition", round(at, 4), cut_s, (LEADER, *others)))
        # A server that has just written its candidacy is elected some effects later.
        crashing = tuple(rng.sample(plan.names, rng.randint(1, plan.nodes)))
        down_s = rng.choice([0.3, 1.0, 2.5])
        effects = rng.randint(plan.nodes - 1, 2 * plan.nodes + 2)
        faults.append(Fault("ballot", round(at + 0.01, 4), down_s, crashing, effects))
        if rng.random() < 0.5:
            down_s = rng.choice([0.3, 1.5, 3.0])
            faults.append(Fault("crash", round(at + cut_s / 2, 4), down_s, (LEADER,)))
        at += rng.expovariate(1.0) + cut_s
    return plan.replace(
        pause_s=0.02,
        patience_s=0.7,
        message_bytes=1,
        latencies=msgspec.structs.replace(
            plan.latencies, latency_s=rng.choice([0.0003, 0.002, 0.01])
        ),
        faults=tuple(faults),
    )


def _remnant(rng: random.Random, plan: Plan) -> Plan:
    """A leader is cut off with entries that only it has; the other servers crash as soon as they
    have written their candidacy; one disk is corrupted for good. The remaining servers must
    recover."""
    faults = []
    at = rng.uniform(1.0, 4.0)
    while at < plan.for_s:
        cut_s = rng.uniform(1.2, 3.0)
        faults.append(Fault("partition", round(at, 4), round(cut_s, 4), (LEADER,)))
        if rng.random() < 0.3:
            faults.append(Fault("rot", round(at + 0.1, 4), 0.5, (LEADER,)))
        down_s = rng.choice([0.5, 1.5, 3.0])
        faults.append(Fault("ballot", round(at + 0.8, 4), down_s, plan.names, rng.randint(0, 1)))
        lost = rng.choice(plan.names)
        faults.append(Fault("rot", round(at + rng.uniform(1.0, cut_s), 4), 0.5, (lost,)))
        at += cut_s + rng.expovariate(1 / 3)
    return plan.replace(pause_s=0.02, patience_s=0.7, faults=tuple(faults))


def _rivals(rng: random.Random, plan: Plan) -> Plan:
    """Among four servers, two consecutive leaders are asked for different changes of the voters:
    the first when it is cut off, the second when one of its voters crashes right after its vote.
    Then the second leader crashes, and another server with it, and the first one returns."""
    plan = plan.replace(nodes=4)
    faults = []
    at = rng.uniform(2.5, 4.0)
    while at < plan.for_s:
        one, other = rng.sample(plan.names, 2)
        voter, other_voter = rng.sample(plan.names, 2)
        cut_s = rng.uniform(2.5, 4.0)
        faults.append(Fault("partition", round(at, 4), round(cut_s, 4), (LEADER,)))
        faults.append(Fault("churn", round(at + 0.01, 4), 0.1, (one,)))
        faults.append(Fault("ballot", round(at + 0.5, 4), 2.5, (voter,), rng.randint(2, 4)))
        faults.append(Fault("churn", round(at + 0.5, 4), 2.0, (other,)))
        crash_at = at + rng.uniform(1.6, 2.8)
        faults.append(Fault("crash", round(crash_at, 4), 4.0, (LEADER,)))
        faults.append(Fault("crash", round(crash_at + 0.01, 4), 4.0, (other_voter,)))
        # A removed server is replaced: first as a learner, then as a voter.
        faults.append(Fault("churn", round(at + cut_s + 2.0, 4), 1.0, (one,), 1.0))
        faults.append(Fault("churn", round(at + cut_s + 3.5, 4), 1.0, (one,), 1.0))
        at += cut_s + 5.0 + rng.expovariate(1.0)
    return plan.replace(faults=tuple(faults))


FAULT_SEQUENCES: dict[str, Callable[[random.Random, Plan], Plan]] = {
    "seesaw": _seesaw,
    "remnant": _remnant,
    "rivals": _rivals,
}


def _draw_fault(
    rng: random.Random, kind: str, names: tuple[str, ...], at: float, for_s: float
) -> Fault:
    at, for_s = round(at, 4), round(for_s, 4)
    if kind in ("crash", "power", "fsync") and rng.random() < 0.4:
        for_s = rng.choice([0.002, 0.02, 0.1])
    one = (LEADER if rng.random() < 0.4 else rng.choice(names),)
    shuffled = tuple(rng.sample(names, len(names)))
    some = shuffled[: rng.randint(1, max(1, len(names) - 1))]
    pair = (*one, rng.choice(names))
    nodes: tuple[str, ...] = one
    match kind:
        case "partition":
            nodes = one if rng.random() < 0.4 else some
        case "oneway":
            nodes = pair if rng.random() < 0.5 else (*one, *names)
        case "bridge":
            nodes = shuffled[: 1 + len(names) // 2]
        case "reset" | "slow":
            nodes = pair
        case "loss" | "duplicate" | "reorder":
            nodes = ()
        case "ballot":
            for_s, nodes = rng.choice([0.002, 0.02, 0.2]), some
        case "transfer":
            nodes = (rng.choice(names),) if rng.random() < 0.7 else ()
        case "churn":
            return Fault(kind, at, for_s, (rng.choice(names),), float(rng.random() < 0.5))
    amount = rng.choice(_AMOUNTS[kind]) if kind in _AMOUNTS else 0.0
    return Fault(kind, at, 0.0 if kind in ("reset", "jump", "transfer") else for_s, nodes, amount)


_AMOUNTS: dict[str, tuple[float, ...]] = {
    "slow": (0.05, 0.3, 1.0),
    **dict.fromkeys(("loss", "duplicate", "reorder"), (0.02, 0.1, 0.4)),
    **dict.fromkeys(("crash", "power"), (0, 1, 1, 2, 3, 5, 8)),
    "ballot": (0, 1, 1, 2, 3),
    "stall": (0.05, 0.3, 1.5),
    "rate": (0.5, 0.9, 1.1, 2.0),
    "jump": (0.2, 1.0, 5.0),
}
"""From what the amount of a fault is drawn."""
