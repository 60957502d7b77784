"""Elections on a quorum of our own whose leader is killed and frozen meanwhile.

What is asserted is read from the candidates' audit logs, as in test_engines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from contest import Candidate, Contest, Place
from engines import SLACK_S, worst_s
from fixtures import shared
from servers import QuorumCluster, QuorumNode

TTL_S = 2.0


quorum = shared(QuorumCluster)


FAULTS: dict[str, tuple[Callable[[QuorumNode], object], Callable[[QuorumNode], object]]] = {
    "killed": (QuorumNode.kill, QuorumNode.start),
    "frozen": (QuorumNode.freeze, QuorumNode.thaw),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_election_outlives_the_quorums_own_leader(
    quorum: QuorumCluster, fault: str, tmp_path: Path
) -> None:
    """Twice in a row: the second time together with the leader of the election."""
    hurt, mend = FAULTS[fault]
    bound_s = worst_s(quorum.url, TTL_S) + SLACK_S
    with Contest(Place(quorum.url), tmp_path, ttl_s=TTL_S) as contest:
        node = quorum.leader()
        hurt(node)
        assert quorum.leader() is not node
        contest.settle(TTL_S)
        mend(node)
        contest.settle(TTL_S)

        node = quorum.leader()

        def both(leader: Candidate) -> None:
            hurt(node)
            leader.kill()

        took_s = contest.failover_s(both)
        mend(node)
        contest.settle(TTL_S)
        report = contest.report()
    assert took_s <= bound_s
    assert not report.violations, report.violations[0].story
    assert report.terms >= 2


def test_a_leader_keeps_its_term_when_a_node_is_killed(
    quorum: QuorumCluster, tmp_path: Path
) -> None:
    """The others see the connection end, so the quorum has another leader long before a lease of
    ordinary length is over."""
    with Contest(Place(quorum.url), tmp_path, ttl_s=5.0) as contest:
        for _ in range(3):
            node = quorum.leader()
            node.kill()
            assert quorum.leader() is not node
            node.start()
        contest.settle(5.0)
        report = contest.report()
        lost = [event for _, event in contest.events if event["event"] == "lost"]
    assert not lost
    assert not report.violations, report.violations[0].story
