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
    """The state of a server."""

    name: str
    version: str
    replicas: int
    awaited: int
    """How many replicas a write waits for."""
    cluster: bool
    log: bool
    """Whether the server has an append-only file."""
    fsync: str
    """When that file is synced to disk; empty if the server does not report it."""
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
        text="changes are notified by subscription; while something is watched, the server is also"
        f" asked for changes every {facts.poll_s:g} s",
    )
    if facts.eviction.startswith("allkeys"):
        yield Finding(
            level="problem",
            subject="memory",
            text=f"maxmemory-policy is {facts.eviction}: short of memory, the server evicts leases"
            " and leader records, and two candidates may lead at a time",
            remedy="set maxmemory-policy noeviction (or volatile-*: doyen's keys have no expiry)",
        )
    yield from _durability(facts)
    yield from _replication(facts)


def _durability(facts: RedisServerFacts) -> Iterator[Finding]:
    lost = "confirmed writes may be lost, among them a leader record or a renewal"
    if not facts.log:
        yield Finding(
            level="warning",
            subject="durability",
            text=f"the server has no append-only file (appendonly no): after a restart {lost}",
            remedy="set appendonly yes",
        )
    elif facts.fsync in ("everysec", "no"):
        yield Finding(
            level="note",
            subject="durability",
            text=f"appendfsync is {facts.fsync}: after a crash of the machine {lost}; tokens still"
            " grow",
            remedy="set appendfsync always",
        )


def _replication(facts: RedisServerFacts) -> Iterator[Finding]:
    tokens = "only fencing by tokens protects against that (doyen.fencing); tokens still grow"
    if facts.replicas and facts.awaited < facts.replicas:
        counted = "a replica" if facts.replicas == 1 else f"{facts.replicas} replicas"
        yield Finding(
            level="warning",
            subject="replication",
            text=f"{counted} may lack the last writes: after a failover a leader record can be"
            f" lost while its leader is still valid, so two may lead at a time; {tokens}",
            remedy=f"add replicas={facts.replicas} to the URL: writes then wait for them, and fail"
            " if one is down",
        )
    elif facts.replicas:
        yield Finding(
            level="note",
            subject="replication",
            text=f"writes wait for {facts.awaited} replicas. A failover of Redis does not take into"
            f" account which replica has confirmed which write; {tokens}",
        )
    if facts.cluster:
        yield Finding(
            level="warning",
            subject="cluster",
            text="this is a Redis cluster: all keys of doyen are in one slot and so on one master,"
            f" and writes that it confirmed can be lost when a replica takes over; {tokens}",
        )
