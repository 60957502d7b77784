"""Elections on a quorum of our own whose links are cut, among candidates on the nodes' own hosts.

What is asserted is read from the candidates' audit logs, as in test_engines: never two leaders at a
time, tokens that increase, and another leader within the worst case that the store's figures give.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contest import Candidate, Contest, Place, sound
from doyen.lease.timing import Timing
from doyen.stores.quorum.store import QuorumStore
from engines import SLACK_S
from servers import Lan
from trials import Trial

pytestmark = pytest.mark.chaos

TTL_S = 2.0


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    with Trial(tmp_path, lan=True, serve=True) as trial:
        yield trial
        trial.judge()


def lan_of(trial: Trial) -> Lan:
    assert trial.lan is not None
    return trial.lan


def host(candidate: str) -> str:
    """c1 runs beside n1, c4 too."""
    return f"n{(int(candidate[1:]) - 1) % 3 + 1}"


def contest(trial: Trial, folder: Path) -> Contest:
    place = Place(trial.url(*trial.nodes))
    audits = folder / "audits"
    audits.mkdir()
    return Contest(place, audits, ttl_s=TTL_S, inside=lambda name: lan_of(trial).inside(host(name)))


def bound_s() -> float:
    able = QuorumStore.capabilities
    worst_s = Timing(ttl_s=TTL_S).worst_failover_s(
        expiry_factor=able.expiry_factor, notice_s=able.notice_s
    )
    return worst_s + SLACK_S


@pytest.mark.parametrize("with_the_leader", [False, True], ids=["follower", "leader"])
def test_the_leaders_host_is_cut_off(trial: Trial, with_the_leader: bool, tmp_path: Path) -> None:
    """With the node beside it, which leads the quorum or follows."""
    lan = lan_of(trial)
    with contest(trial, tmp_path) as election:
        for _ in range(3):
            leader, _ = election.leader()
            here = host(leader.name)
            others = {*trial.nodes} - {here}
            trial.transfer(here if with_the_leader else min(others))

            def cut(_: Candidate, here: str = here, others: set[str] = others) -> None:
                lan.part([here], {*others, "clients"})

            lost = len(election.seen(leader, "lost"))
            assert election.failover_s(cut) <= bound_s()
            while len(election.seen(leader, "lost")) == lost:
                election.listen(0.1)
            lan.heal()
            election.settle(TTL_S)
        report = election.report()
    sound(report, 4)


@pytest.mark.parametrize("way", ["dumb", "deaf", "bridge"])
def test_links_of_the_leaders_host_are_cut_one_way_or_in_part(
    trial: Trial, way: str, tmp_path: Path
) -> None:
    """Somebody leads in the end, with the links still cut; never two."""
    lan = lan_of(trial)
    with contest(trial, tmp_path) as election:
        for _ in range(3):
            leader, _ = election.leader()
            here = host(leader.name)
            others = sorted({*trial.nodes} - {here})
            trial.transfer(here)
            if way == "dumb":
                lan.cut(here, others)
            elif way == "deaf":
                lan.cut(others, here)
            else:
                lan.part([here], [others[0]])
            election.settle(bound_s())
            lan.heal()
            election.settle(TTL_S)
        report = election.report()
    sound(report, 1)
