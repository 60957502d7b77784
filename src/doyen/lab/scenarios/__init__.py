"""What the documents teach, acted out: named, narrated, asserted.

    play          a scenario, its narration and its facts
    stage, place  where they are acted: bare cores in the lab's world; processes on a store
    ensembles     five-servers, restarted-cluster, no-majority
    elections     master-row, herd, paused-leader
    logs          quorum-anomaly, partition-heals, votes-too-early, vote-without-log
    controllers   controller

They run what users run: cores, sessions, elections, fencing, in virtual time. Only what a document
shows as broken is a model or a mutant, which says so. Each tells the same every time.

    >>> from doyen.lab.scenarios import act
    >>> played = act("five-servers")
    >>> played.ok, played.facts[2].text
    (True, 'server3 has three votes of five, and leads')

Imports the rest of the lab, and what it acts with.
"""

from __future__ import annotations

from doyen.lab.scenarios.controllers import controller
from doyen.lab.scenarios.elections import herd, master_row, paused_leader
from doyen.lab.scenarios.ensembles import five_servers, no_majority, restarted_cluster
from doyen.lab.scenarios.logs import (
    partition_heals,
    quorum_anomaly,
    vote_without_log,
    votes_too_early,
)
from doyen.lab.scenarios.play import Played, Scenario, ScenarioFact, Script

__all__ = ["SCENARIOS", "Played", "Scenario", "ScenarioFact", "act"]

_ETCD = "领导选举 (leader election with etcd)"
_INTRODUCTION = "Leader Election模式 (an introduction)"
_PATTERN = "领导者和追随者 (Leader and Followers)"
_ZOOKEEPER = "Zookeeper leader选举 (leader election in ZooKeeper)"

SCENARIOS: dict[str, Scenario] = {
    "five-servers": Scenario(
        "ZooKeeper's five servers, started in order: the third leads, four and five follow",
        f"{_ZOOKEEPER}, 9.1",
        five_servers,
    ),
    "restarted-cluster": Scenario(
        "a restarted cluster votes by logical clock, then by data, then by id",
        f"{_ZOOKEEPER}, 9.2",
        restarted_cluster,
    ),
    "no-majority": Scenario(
        "rounds of votes for the smallest id in which nobody has a majority",
        f"{_INTRODUCTION}, 3",
        no_majority,
    ),
    "master-row": Scenario(
        "a master's row in a database outlives it; a lease ends, and the next one is told",
        f"{_ZOOKEEPER}, Master 选举; {_ETCD}",
        master_row,
    ),
    "herd": Scenario(
        "a thousand watch one key and all wake; in a line one does",
        f"{_ZOOKEEPER}, guid_",
        herd,
    ),
    "quorum-anomaly": Scenario(
        "x = 2 is read, then x = 1: a quorum without a leader, and with one",
        f"{_PATTERN}, 为何 Quorum 读/写不足以保证强一致性",
        quorum_anomaly,
    ),
    "partition-heals": Scenario(
        "a partition heals and everybody elects at once: one leader comes of it",
        f"{_INTRODUCTION}, 5.2",
        partition_heals,
    ),
    "votes-too-early": Scenario(
        "those who start first take themselves for a majority, and must not",
        f"{_INTRODUCTION}, 5.3",
        votes_too_early,
    ),
    "vote-without-log": Scenario(
        "a vote granted with no look at the log loses what was acknowledged",
        f"{_PATTERN}, handleVoteRequest",
        vote_without_log,
    ),
    "paused-leader": Scenario(
        "a leader wakes too late and writes: with a token it is refused",
        f"{_ETCD}; {_PATTERN}",
        paused_leader,
    ),
    "controller": Scenario(
        "a controller hands out partition leaders, and is replaced with an order under way",
        f"{_PATTERN}, Kafka",
        controller,
    ),
}
"""In reading order."""


def act(name: str) -> Played:
    """Act it. Raises `KeyError` if there is none of that name."""
    script = Script()
    SCENARIOS[name].perform(script)
    return script.end()
