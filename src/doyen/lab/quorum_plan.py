"""Plans for a world of whole nodes."""

from __future__ import annotations

import random

import msgspec

from doyen.lab.plan import KINDS as ALL
from doyen.lab.plan import LEADER, Fault, Latencies, Plan, stream
from doyen.lab.plan import draw as draw_plan

HOLDER = "holder"
"""In a fault, names the candidate whose term is valid when the fault begins."""
CLIENTS = ("k1", "k2")
"""The clients of the keyspace."""
KINDS = (
    *("partition", "oneway", "bridge", "reset", "slow", "loss"),
    *("crash", "power", "pause"),
    *("stall", "full", "fsync"),
    *("rate", "jump"),
    *("transfer", "churn", "wipe"),
)
"""The kinds of fault. Connections are TCP, so messages are neither repeated nor reordered."""
NAMED = ("rollback", "older")
"""Kinds that are drawn only on request. The protection from the first has limits (see
`docs/stores/quorum.md`), which other faults would exceed; the handshake prevents the second."""
OF_NODES = frozenset({"stall", "full", "fsync", "transfer", "churn", "wipe", "rollback", "older"})
"""Kinds that affect only nodes: candidates have no disk and belong to no membership."""


def _depose_leaders(rng: random.Random, for_s: float) -> list[Fault]:
    """Cut leaders off again and again for about as long as an election takes, so that their last
    proposals arrive late."""
    faults = []
    at = rng.uniform(2.0, 3.0)
    while at < for_s - 2:
        duration_s = rng.uniform(1.0, 3.0)
        faults.append(Fault("partition", round(at, 4), round(duration_s, 4), (LEADER,)))
        at += duration_s + rng.uniform(1.0, 2.5)
    return faults


def draw(
    protocol: str,
    nodes: int,
    seed: int,
    *,
    kinds: tuple[str, ...] = ALL,
    for_s: float = 20.0,
    clients: int = 3,
) -> Plan:
    kinds = KINDS if kinds == ALL else tuple(kind for kind in kinds if kind in (*KINDS, *NAMED))
    plan = draw_plan(protocol, nodes, seed, kinds=kinds, for_s=for_s, clients=clients)
    rng = stream(seed, "quorum")
    candidates = [*(f"c{number}" for number in range(1, clients + 1)), *CLIENTS]
    # Usually the cluster is founded before the first fault: all its nodes must be up for that.
    founding_s = 1.0 if rng.random() < 0.85 else 0.0
    faults = []
    for fault in plan.faults:
        names = list(fault.nodes)
        if names and clients and fault.kind not in OF_NODES and rng.random() < 0.4:
            names[0] = HOLDER if rng.random() < 0.3 else rng.choice(candidates)
        if fault.kind == "partition" and rng.random() < 0.5:
            names += rng.sample(candidates, rng.randint(0, len(candidates)))
        at = round(fault.at + founding_s, 4)
        faults.append(msgspec.structs.replace(fault, at=at, nodes=tuple(dict.fromkeys(names))))
    if "partition" in kinds and rng.random() < 0.25:
        faults = _depose_leaders(rng, for_s)
    if kinds:
        # At least one node is down for so long that it needs a snapshot.
        at = round(rng.uniform(3.0, for_s - 3.0), 4)
        faults.append(Fault("crash", at, 2.0, (rng.choice(plan.names),)))
    normal = plan.latencies
    return plan.replace(
        world="quorum",
        clients=clients,
        faults=tuple(faults),
        latencies=Latencies(min(normal.latency_s, 0.02), normal.spread, normal.fsync_s),
        heartbeat_s=min(plan.heartbeat_s, 0.2),
        # Small, so that every run has snapshots, and nodes that need one.
        compact_every=rng.choice([5, 10, 20]),
        tail_entries=rng.choice([0, 5]),
    )
