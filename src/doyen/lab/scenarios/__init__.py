"""Scenarios: the lessons of documents about leader election, with a transcript and asserted facts.

    transcript    a scenario, its transcript and its facts
    core_world    a world of bare cores for scenarios
    store_world   processes on one store for scenarios
    oracle        what must hold after every event, of members, documents and shards
    ensembles     five-servers, restarted-cluster, no-majority
    elections     master-row, herd, paused-leader
    logs          quorum-anomaly, partition-heals, votes-too-early, vote-without-log
    groups        registration, leader-switch, publishing, fault-detection
    configurations  config-change
    controllers   controller

They run what users run: cores, sessions, elections and fencing, in virtual time. Only what a
document shows as broken is a model or a mutant, and the transcript says so. The transcript of a
scenario is always the same.

    >>> from doyen.lab.scenarios import run_scenario
    >>> result = run_scenario("five-servers")
    >>> result.ok, result.facts[2].text
    (True, 'server3 has three votes of five and leads')
"""

from __future__ import annotations

from doyen.lab.scenarios.configurations import config_change
from doyen.lab.scenarios.controllers import controller
from doyen.lab.scenarios.elections import herd, master_row, paused_leader
from doyen.lab.scenarios.ensembles import five_servers, no_majority, restarted_cluster
from doyen.lab.scenarios.groups import (
    fault_detection,
    leader_switch,
    publishing,
    registration,
)
from doyen.lab.scenarios.logs import (
    partition_heals,
    quorum_anomaly,
    vote_without_log,
    votes_too_early,
)
from doyen.lab.scenarios.store_world import NotReached
from doyen.lab.scenarios.transcript import Scenario, ScenarioFact, ScenarioResult, Transcript

__all__ = ["SCENARIOS", "Scenario", "ScenarioFact", "ScenarioResult", "run_scenario"]

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
        "rounds of votes for the smallest id without a majority",
        f"{_INTRODUCTION}, 3",
        no_majority,
    ),
    "master-row": Scenario(
        "a master's row in a database outlives it; a lease ends, and the next server is notified",
        f"{_ZOOKEEPER}, Master 选举; {_ETCD}",
        master_row,
    ),
    "herd": Scenario(
        "a thousand candidates watch one key and all are notified; in a line only one is",
        f"{_ZOOKEEPER}, guid_",
        herd,
    ),
    "quorum-anomaly": Scenario(
        "x = 2 is read, then x = 1: a quorum without a leader, and with one",
        f"{_PATTERN}, 为何 Quorum 读/写不足以保证强一致性",
        quorum_anomaly,
    ),
    "partition-heals": Scenario(
        "a partition heals and all servers start an election: there is one leader",
        f"{_INTRODUCTION}, 5.2",
        partition_heals,
    ),
    "votes-too-early": Scenario(
        "servers that start first must not count as a majority",
        f"{_INTRODUCTION}, 5.3",
        votes_too_early,
    ),
    "vote-without-log": Scenario(
        "a vote without a comparison of logs loses an acknowledged write",
        f"{_PATTERN}, handleVoteRequest",
        vote_without_log,
    ),
    "paused-leader": Scenario(
        "a paused leader resumes and writes: with a token it is refused",
        f"{_ETCD}; {_PATTERN}",
        paused_leader,
    ),
    "registration": Scenario(
        "servers register under their names; a second one of a name is refused",
        f"{_INTRODUCTION}, 3, 第二阶段 1",
        registration,
    ),
    "leader-switch": Scenario(
        "the leader dies, another is about to stop: each time the next in line leads",
        f"{_INTRODUCTION}, 3, 第二阶段 2",
        leader_switch,
    ),
    "publishing": Scenario(
        "the leader publishes the list of servers; the late list of an earlier leader is refused",
        f"{_INTRODUCTION}, 3, 第二阶段 3",
        publishing,
    ),
    "config-change": Scenario(
        "a change of configuration is written first and then applied, even if the leader dies",
        f"{_INTRODUCTION}, 3, 第二阶段 4",
        config_change,
    ),
    "fault-detection": Scenario(
        "a server that finds itself broken says so; one that is silent is suspected, then gone",
        f"{_INTRODUCTION}, 3, 第二阶段 5",
        fault_detection,
    ),
    "controller": Scenario(
        "a controller assigns partition leaders, and is replaced while a plan is on its way",
        f"{_PATTERN}, Kafka",
        controller,
    ),
}
"""In the order of the documents."""


def run_scenario(name: str) -> ScenarioResult:
    """Run a scenario. Raises `KeyError` if there is none of that name."""
    transcript = Transcript()
    try:
        SCENARIOS[name].run(transcript)
    except NotReached as error:
        transcript.fact(str(error), False)
    return transcript.end()
