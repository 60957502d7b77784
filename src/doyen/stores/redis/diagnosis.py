"""What a Redis server's mode and settings mean for elections. Pure: facts in, findings out.

Imports the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from doyen.model import Finding

__all__ = ["RedisServerFacts", "findings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisServerFacts:
    """How a server was found."""

    name: str
    version: str
    replicas: int
    awaited: int
    """How many replicas a write waits for."""
    cluster: bool
    log: bool
    """Whether commands are logged to disk before, or soon after, they are answered."""
    fsync: str
    """When that log is forced to disk; empty if the server does not tell."""
    eviction: str
    poll_s: float

    @classmethod
    def of(
        cls, info: Mapping[str, str], fsync: str, awaited: int, poll_s: float
    ) -> RedisServerFacts:
        valkey = info.get("server_name") == "valkey"
        return cls(
            name="Valkey" if valkey else "Redis",
            version=info.get("valkey_version" if valkey else "redis_version", "?"),
            replicas=int(info.get("connected_slaves", 0)),
            awaited=awaited,
            cluster=info.get("cluster_enabled") == "1",
            log=info.get("aof_enabled") == "1",
            fsync=fsync,
            eviction=info.get("maxmemory_policy", "noeviction"),
            poll_s=poll_s,
        )


def findings(facts: RedisServerFacts) -> Iterator[Finding]:
    """What the state of a server means."""
    yield Finding(level="ok", subject="redis", text=f"{facts.name} {facts.version}")
    yield Finding(
        level="ok",
        subject="changes",
        text="changes are heard by subscription; while something is watched, it is also asked for"
        f" them every {facts.poll_s:g} s",
    )
    if facts.eviction.startswith("allkeys"):
        yield Finding(
            level="problem",
            subject="memory",
            text=f"maxmemory-policy is {facts.eviction}: short of memory, the server throws away"
            " leases and leaders' records, and then there are two leaders",
            remedy="set maxmemory-policy noeviction (or volatile-*: what is doyen's never expires)",
        )
    yield from _durability(facts)
    yield from _replication(facts)


def _durability(facts: RedisServerFacts) -> Iterator[Finding]:
    lost = "what was confirmed may be gone, a leader's record or a renewal among it"
    if not facts.log:
        yield Finding(
            level="warning",
            subject="durability",
            text=f"the server keeps no log (appendonly no): after its restart {lost}",
            remedy="set appendonly yes",
        )
    elif facts.fsync in ("everysec", "no"):
        yield Finding(
            level="note",
            subject="durability",
            text=f"appendfsync is {facts.fsync}: after a crash of the machine {lost}; tokens keep"
            " growing all the same",
            remedy="set appendfsync always",
        )


def _replication(facts: RedisServerFacts) -> Iterator[Finding]:
    tokens = "only the token protects then (doyen.fencing); it keeps growing"
    if facts.replicas and facts.awaited < facts.replicas:
        counted = "a replica" if facts.replicas == 1 else f"{facts.replicas} replicas"
        yield Finding(
            level="warning",
            subject="replication",
            text=f"{counted} may lack the last writes: after a failover a leader's record can be"
            f" gone while the leader still counts on it, so two may lead at a time; {tokens}",
            remedy=f"add replicas={facts.replicas} to the URL: writes then wait for them, and fail"
            " if one is away",
        )
    elif facts.replicas:
        yield Finding(
            level="note",
            subject="replication",
            text=f"writes wait for {facts.awaited} replicas. Redis still decides on a failover"
            f" without asking who has confirmed what; {tokens}",
        )
    if facts.cluster:
        yield Finding(
            level="warning",
            subject="cluster",
            text="this is a Redis cluster: all of doyen lies in one slot and so on one master,"
            f" and what that one confirmed can be lost when a replica takes over; {tokens}",
        )
