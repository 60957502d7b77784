"""What a Redis server's mode and settings mean for elections. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from doyen.model import Finding


def findings(info: Mapping[str, str], fsync: str, awaited: int, poll_s: float) -> Iterator[Finding]:
    """What the state of a server means: its INFO, its `appendfsync` (empty if it does not report
    that), and how many replicas a write waits for."""
    version = f"Redis {info.get('redis_version', '?')}"
    if info.get("server_name") == "valkey":
        version = f"Valkey {info.get('valkey_version', '?')}"
    yield Finding.ok("redis", version)
    yield Finding.ok(
        "changes",
        "changes are notified by subscription; while something is watched, the server is also"
        f" asked for changes every {poll_s:g} s",
    )
    eviction = info.get("maxmemory_policy", "")
    if eviction.startswith("allkeys"):
        yield Finding.problem(
            "memory",
            f"maxmemory-policy is {eviction}: short of memory, the server evicts leases"
            " and leader records, and two candidates may lead at a time",
            "set maxmemory-policy noeviction (or volatile-*: doyen's keys have no expiry)",
        )
    lost = "confirmed writes may be lost, among them a leader record or a renewal"
    if info.get("aof_enabled") != "1":
        yield Finding.warning(
            "durability",
            f"the server has no append-only file (appendonly no): after a restart {lost}",
            "set appendonly yes",
        )
    elif fsync in ("everysec", "no"):
        yield Finding.note(
            "durability",
            f"appendfsync is {fsync}: after a crash of the machine {lost}; tokens still grow",
            "set appendfsync always",
        )
    replicas = int(info.get("connected_slaves", 0))
    tokens = "only fencing by tokens protects against that (doyen.fencing); tokens still grow"
    if replicas and awaited < replicas:
        counted = "a replica" if replicas == 1 else f"{replicas} replicas"
        yield Finding.warning(
            "replication",
            f"{counted} may lack the last writes: after a failover a leader record can be"
            f" lost while its leader is still valid, so two may lead at a time; {tokens}",
            f"add replicas={replicas} to the URL: writes then wait for them, and fail"
            " if one is down",
        )
    elif replicas:
        yield Finding.note(
            "replication",
            f"writes wait for {awaited} replicas. A failover of Redis does not take into"
            f" account which replica has confirmed which write; {tokens}",
        )
    if info.get("cluster_enabled") == "1":
        yield Finding.warning(
            "cluster",
            "this is a Redis cluster: all keys of doyen are in one slot and so on one master,"
            f" and writes that it confirmed can be lost when a replica takes over; {tokens}",
        )
