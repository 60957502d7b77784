"""Diagnosis of a Consul datacentre: versions, agents, and settings of time that conflict.

Pure: `findings` is a function of the agents' states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from doyen.model import Finding

OLDEST = (1, 7)
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """The configuration of an agent, or the error of the request for it."""

    agent: str
    error: str = ""
    version: str = ""
    datacentre: str = ""
    server: bool = False
    leader_lease_s: float = 0.0
    """How long a deposed server may act as leader before it notices."""

    @classmethod
    def of(cls, agent: str, found: Mapping[str, Any] | None) -> Self:
        """From the answer to agent/self; None if the ACL does not permit reading it."""
        if found is None:
            return cls(agent=agent)
        config, debug = found["Config"], found.get("DebugConfig", {})
        lease = debug.get("ConsulRaftLeaderLeaseTimeout", "") if config.get("Server") else ""
        return cls(
            agent=agent,
            version=config["Version"],
            datacentre=config["Datacenter"],
            server=bool(config.get("Server")),
            leader_lease_s=seconds(lease) if lease else 0.0,
        )


def seconds(duration: str) -> float:
    """The seconds of a duration in Go's notation.

    >>> seconds("1m30.5s"), seconds("500ms")
    (90.5, 0.5)
    """
    parts = re.findall(r"([0-9.]+)(h|ms|m|s|µs|us|ns)", duration)
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def findings(states: Sequence[AgentState], ttl_min_s: float) -> list[Finding]:
    """The findings for the states of the agents and the shortest ttl that they grant."""
    return [*_agents(states), *_versions(states), *_times(states, ttl_min_s)]


def _agents(states: Sequence[AgentState]) -> Iterator[Finding]:
    for state in states:
        if state.error:
            yield Finding.warning(
                "agents", state.error, "bring the agent back, or take it out of the URL"
            )
    datacentres = sorted({state.datacentre for state in states if state.datacentre})
    if len(datacentres) > 1:
        yield Finding.problem(
            "agents",
            f"the agents are of several datacentres, {', '.join(datacentres)}: each would"
            " elect a leader",
            "name agents of one datacentre only",
        )
    if len(states) == 1:
        yield Finding.note(
            "agents",
            f"the URL names one agent, {states[0].agent}: if it fails, the store is lost",
            "name several, separated by commas, unless each machine uses its own agent",
        )


def _versions(states: Sequence[AgentState]) -> Iterator[Finding]:
    for state in states:
        if state.version:
            release = tuple(int(part) for part in re.findall(r"\d+", state.version)[:2])
            old = release < OLDEST
            yield Finding(
                level="warning" if old else "ok",
                subject="version",
                text=f"Consul {state.version} at {state.agent}"
                + (", with which doyen has not been tested" if old else ""),
                remedy=f"update Consul to {'.'.join(map(str, OLDEST))} or later" if old else "",
            )
        elif not state.error:
            yield Finding.note(
                "version",
                f"{state.agent} does not report its version and datacentre to this ACL token",
                "grant agent:read to have them checked",
            )


def _times(states: Sequence[AgentState], ttl_min_s: float) -> Iterator[Finding]:
    lease_s = max((state.leader_lease_s for state in states), default=0.0)
    if ttl_min_s < lease_s:
        yield Finding.warning(
            "session_ttl_min",
            f"sessions may be as short as {ttl_min_s:g} s, while a deposed server may answer"
            f" renewals for {lease_s:g} s: a shorter ttl than that is not safe",
            f"use a ttl of {lease_s:g} s or more, or lower performance.raft_multiplier",
        )
    yield Finding.note(
        "expiry",
        "Consul keeps a session up to twice its ttl after the last renewal; the worst"
        " case includes that",
    )
