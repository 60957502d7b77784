"""A run, as data: who takes part, what the weather is like, what goes wrong and when.

A plan is drawn from a seed, swarm-style: each seed switches some kinds of fault off altogether and
draws others often, so that between them the seeds go where no single mixture would. What comes out
is a list of decisions that can be written down, taken apart and run again; the same plan always
gives the same run. A plot is a mixture whose parts are timed on one another, for what hardly ever
comes about by itself.

Chance is forked: `stream(seed, purpose)` gives every purpose a stream of its own, so that one more
draw here changes nothing there.

Imports msgspec and the standard library's pure parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "FOLDERS",
    "KINDS",
    "LEADER",
    "ORDERS",
    "PLOTS",
    "Fault",
    "Plan",
    "Weather",
    "draw",
    "stream",
]

LEADER = "leader"
"""Stands, in a fault, for whoever leads when it happens."""

NETWORK = ("partition", "oneway", "bridge", "reset", "slow", "loss", "duplicate", "reorder")
PROCESS = ("crash", "power", "ballot", "pause")
DISK = ("stall", "full", "fsync", "rot")
CLOCK = ("rate", "jump")
ORDERS = ("transfer", "compact", "churn")
KINDS = NETWORK + PROCESS + DISK + CLOCK + ORDERS
"""Every kind of fault. Those of the last group are orders rather than faults, given to cores that
know them."""
FOLDERS = ("wipe", "rollback", "older")
"""Faults that only whole nodes know: a data directory is emptied, or is an older copy; a node is of
a release that does not know all commands."""

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
"""Mixtures that are known for going where others do not."""


# What a file that somebody has edited is held to.
Number = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0.0)]
Duration = Annotated[float, Meta(gt=0.0)]


class Fault(Struct, frozen=True, omit_defaults=True):
    """One decision: what happens to whom, when, and for how long."""

    kind: str
    at: Amount
    for_s: Amount = 0.0
    nodes: tuple[str, ...] = ()
    amount: Amount = 0.0
    """What it means depends on the kind: seconds, a probability, a rate, effects until a crash."""


class Weather(Struct, frozen=True):
    """What links and disks are like when nothing is wrong with them."""

    latency_s: Duration = 0.001
    """The median, one way."""
    spread: Amount = 0.3
    """Of the logarithm."""
    fsync_s: Duration = 0.002


class Plan(Struct, frozen=True, kw_only=True):
    """A whole run. Everything but the code that runs is in here."""

    protocol: str
    nodes: Number
    seed: int
    world: str = "cores"
    """Of which kind: bare cores, or whole nodes with candidates (`quorum`)."""
    for_s: Amount
    """How long there is trouble. Then everything is healed, and somebody must lead."""
    clients: Annotated[int, Meta(ge=0)] = 3
    pause_s: Duration = 0.1
    """How long a client thinks between two requests, on average."""
    patience_s: Duration = 0.7
    """How long a client waits for an answer before it asks elsewhere."""
    keys: Number = 4
    weather: Weather = Weather()
    election_timeout_s: Duration = 1.0
    heartbeat_s: Duration = 0.1
    message_bytes: Number = 1 << 20
    """How much of the log goes into one message: at 1, a single entry."""
    compact_every: Number = 200
    """Entries between two snapshots, where the protocol has them."""
    tail_entries: Annotated[int, Meta(ge=0)] = 4096
    """Entries kept behind a snapshot for those who are a little behind."""
    faults: tuple[Fault, ...] = ()
    noise: int = 0
    """Draws the same decisions' chance anew: latencies, what a crash leaves of a write."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def but(self, **changes: object) -> Plan:
        """The same plan, with some of it changed."""
        return msgspec.structs.replace(self, **changes)


def stream(seed: int, purpose: str) -> random.Random:
    """A stream of chance of its own for this purpose."""
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
    """What this seed has in store."""
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
        weather=Weather(
            latency_s=rng.choice([0.0003, 0.002, 0.01, 0.03, 0.1]),
            spread=rng.choice([0.1, 0.4, 0.8]),
            fsync_s=rng.choice([0.0005, 0.003, 0.02]),
        ),
        compact_every=rng.choice([10, 50, 400]),
        tail_entries=rng.choice([0, 20, 4096]),
        heartbeat_s=rng.choice([0.1, 0.2, 0.4]),
        message_bytes=rng.choice([1, 100, 1 << 20]),
    )
    if kinds and kinds[0] in PLOTS:
        return PLOTS[kinds[0]](rng, plan)
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
        faults.append(_decide(rng, kind, plan.names, at, rng.expovariate(1 / length_s)))
        if kind == "ballot" and rng.random() < 0.7:
            # Without an election nobody votes.
            faults.append(Fault("crash", round(at + 0.01, 4), rng.choice([0.01, 1.0]), (LEADER,)))
        at += rng.expovariate(1 / gap_s)
    return plan.but(faults=tuple(faults))


def _seesaw(rng: random.Random, plan: Plan) -> Plan:
    """One leader after another has what hardly anybody else has, is gone, and comes back when the
    next one has done the same."""
    faults = []
    at = 1.0
    while at < plan.for_s:
        others = rng.sample(plan.names, rng.randint(0, max(0, plan.nodes // 2 - 1)))
        cut_s = rng.choice([0.05, 0.3, 1.2, 2.5])
        faults.append(Fault("partition", round(at, 4), cut_s, (LEADER, *others)))
        # Some effects after it has written that it stands, a server has just been elected.
        doomed = tuple(rng.sample(plan.names, rng.randint(1, plan.nodes)))
        down_s = rng.choice([0.3, 1.0, 2.5])
        effects = rng.randint(plan.nodes - 1, 2 * plan.nodes + 2)
        faults.append(Fault("ballot", round(at + 0.01, 4), down_s, doomed, effects))
        if rng.random() < 0.5:
            gone_s = rng.choice([0.3, 1.5, 3.0])
            faults.append(Fault("crash", round(at + cut_s / 2, 4), gone_s, (LEADER,)))
        at += rng.expovariate(1.0) + cut_s
    return plan.but(
        pause_s=0.02,
        patience_s=0.7,
        message_bytes=1,
        weather=msgspec.structs.replace(plan.weather, latency_s=rng.choice([0.0003, 0.002, 0.01])),
        faults=tuple(faults),
    )


def _remnant(rng: random.Random, plan: Plan) -> Plan:
    """A leader is cut off with what only it has; of the others, who stands is gone the instant it
    has written so; somebody is lost for good. What is left must get on."""
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
    return plan.but(pause_s=0.02, patience_s=0.7, faults=tuple(faults))


def _rivals(rng: random.Random, plan: Plan) -> Plan:
    """Of four, two that lead one after the other are asked for different changes of who votes: the
    first when it is cut off, the second when one of its voters is gone as soon as it has voted.
    Then it is gone itself, and perhaps whoever knew, and the first is back."""
    plan = plan.but(nodes=4)
    faults = []
    at = rng.uniform(2.5, 4.0)
    while at < plan.for_s:
        one, other = rng.sample(plan.names, 2)
        voter, witness = rng.sample(plan.names, 2)
        cut_s = rng.uniform(2.5, 4.0)
        faults.append(Fault("partition", round(at, 4), round(cut_s, 4), (LEADER,)))
        faults.append(Fault("churn", round(at + 0.01, 4), 0.1, (one,)))
        faults.append(Fault("ballot", round(at + 0.5, 4), 2.5, (voter,), rng.randint(2, 4)))
        faults.append(Fault("churn", round(at + 0.5, 4), 2.0, (other,)))
        gone_at = at + rng.uniform(1.6, 2.8)
        faults.append(Fault("crash", round(gone_at, 4), 4.0, (LEADER,)))
        faults.append(Fault("crash", round(gone_at + 0.01, 4), 4.0, (witness,)))
        # Whoever has been removed is replaced, as a learner and then as a voter.
        faults.append(Fault("churn", round(at + cut_s + 2.0, 4), 1.0, (one,), 1.0))
        faults.append(Fault("churn", round(at + cut_s + 3.5, 4), 1.0, (one,), 1.0))
        at += cut_s + 5.0 + rng.expovariate(1.0)
    return plan.but(faults=tuple(faults))


PLOTS: dict[str, Callable[[random.Random, Plan], Plan]] = {
    "seesaw": _seesaw,
    "remnant": _remnant,
    "rivals": _rivals,
}


def _decide(
    rng: random.Random, kind: str, names: tuple[str, ...], at: float, for_s: float
) -> Fault:
    """One fault of this kind."""
    at, for_s = round(at, 4), round(for_s, 4)
    if kind in ("crash", "power", "fsync") and rng.random() < 0.4:
        for_s = rng.choice([0.002, 0.02, 0.1])
    one = (LEADER if rng.random() < 0.4 else rng.choice(names),)
    shuffled = tuple(rng.sample(names, len(names)))
    some = shuffled[: rng.randint(1, max(1, len(names) - 1))]
    pair = (*one, rng.choice(names))
    match kind:
        case "partition":
            return Fault(kind, at, for_s, one if rng.random() < 0.4 else some)
        case "oneway":
            return Fault(kind, at, for_s, pair if rng.random() < 0.5 else (*one, *names))
        case "bridge":
            return Fault(kind, at, for_s, shuffled[: 1 + len(names) // 2])
        case "reset":
            return Fault(kind, at, 0.0, pair)
        case "slow":
            return Fault(kind, at, for_s, pair, rng.choice([0.05, 0.3, 1.0]))
        case "loss" | "duplicate" | "reorder":
            return Fault(kind, at, for_s, (), rng.choice([0.02, 0.1, 0.4]))
        case "crash" | "power":
            return Fault(kind, at, for_s, one, rng.choice([0, 1, 1, 2, 3, 5, 8]))
        case "ballot":
            down_s = rng.choice([0.002, 0.02, 0.2])
            return Fault(kind, at, down_s, some, rng.choice([0, 1, 1, 2, 3]))
        case "fsync" | "rot":
            return Fault(kind, at, for_s, one)
        case "stall":
            return Fault(kind, at, for_s, one, rng.choice([0.05, 0.3, 1.5]))
        case "rate":
            return Fault(kind, at, for_s, one, rng.choice([0.5, 0.9, 1.1, 2.0]))
        case "jump":
            return Fault(kind, at, 0.0, one, rng.choice([0.2, 1.0, 5.0]))
        case "transfer":
            return Fault(kind, at, 0.0, (rng.choice(names),) if rng.random() < 0.7 else ())
        case "churn":
            return Fault(kind, at, for_s, (rng.choice(names),), float(rng.random() < 0.5))
        case _:
            return Fault(kind, at, for_s, one)
