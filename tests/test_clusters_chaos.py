"""Elections on stores of three members, one of which is killed or frozen: its leader or another.

consul#1290: one server of three was down, and the lock was lost. The candidate that leads keeps its
term here, whichever member it is; when the leading candidate dies as well, with the member still
away, another follows within the store's worst case.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contest import Candidate, Contest, Place, unexplained
from engines import CLUSTERS, SLACK_S, ClusterEngine, worst_s
from servers.cluster import Cluster

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module", params=sorted(CLUSTERS))
def kind(request: pytest.FixtureRequest) -> ClusterEngine:
    return CLUSTERS[request.param]


@pytest.fixture(scope="module")
def cluster(kind: ClusterEngine) -> Iterator[Cluster[Any]]:
    with kind.start() as cluster:
        yield cluster


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.parametrize("who", ["the leader", "a follower"])
def test_one_of_three_is(
    kind: ClusterEngine, cluster: Cluster[Any], who: str, how: str, tmp_path: Path
) -> None:
    bound_s = worst_s(cluster.url, kind.ttl_s) + SLACK_S
    with Contest(Place(cluster.url), tmp_path, ttl_s=kind.ttl_s) as contest:
        leading = contest.leader()
        member = cluster.leader() if who == "the leader" else cluster.followers()[0]
        member.kill() if how == "killed" else member.freeze()
        try:
            contest.settle(1.5 * kind.ttl_s)
            assert contest.leader() == leading, "the term did not outlive the member"
            assert contest.failover_s(Candidate.kill) <= bound_s
        finally:
            member.start() if how == "killed" else member.thaw()
        contest.settle(kind.ttl_s / 2)
        report = contest.report()
    if kind is CLUSTERS["etcd"] and (who, how) == ("the leader", "frozen"):
        assert not unexplained(report)
        assert report.terms in (2, 3)
    else:
        assert not report.violations, report.violations[0].story
        assert report.terms == 2


def test_members_restart_one_after_another(
    kind: ClusterEngine, cluster: Cluster[Any], tmp_path: Path
) -> None:
    """An upgrade: a new leader of the store with almost every step, and the same of ours."""
    with Contest(Place(cluster.url), tmp_path, ttl_s=kind.ttl_s) as contest:
        leading = contest.leader()
        for member in cluster.members:
            member.stop()
            member.start()
            contest.settle(kind.ttl_s / 2)
        assert contest.leader() == leading
        report = contest.report()
    assert not report.violations, report.violations[0].story
    assert report.terms == 1
