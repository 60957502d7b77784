"""Elections on stores with more than one server that takes writes: two PostgreSQL primaries after a
failover, and the members of a Galera cluster."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

import servers
from contest import Candidate, Contest, Place, sound
from engines import CLUSTERS, SLACK_S, worst_s
from servers.tally import tally

TTL_S = 2.0


@pytest.fixture
def primary() -> Iterator[servers.Postgres]:
    """It confirms nothing that the standby does not have."""
    with servers.Postgres(synchronous_standby_names="*") as server:
        yield server


@pytest.fixture
def standby(primary: servers.Postgres) -> Iterator[servers.PostgresStandby]:
    with servers.PostgresStandby(primary) as server:
        yield server


@pytest.mark.chaos(engine="postgresql")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_primary_that_was_frozen_comes_back_beside_its_successor(
    primary: servers.Postgres, standby: servers.PostgresStandby, seed: int, tmp_path: Path
) -> None:
    """Two primaries. The old one, first in the URL, confirms nothing new; but what waits there for
    its standby can be read once the connection that waits has ended. Connections are closed at
    random, so that candidates come to have one to each."""
    chance = random.Random(seed)

    def close(server: servers.Postgres, which: str, share: float) -> None:
        for (pid,) in server.query(f"SELECT pid FROM pg_stat_activity WHERE {which} ORDER BY pid"):
            if chance.random() < share:
                server.query(f"SELECT pg_terminate_backend({pid})")
                tally.faults += 1

    with Contest(Place(standby.url), tmp_path, ttl_s=TTL_S) as contest:
        _, term = contest.leader()
        primary.freeze()
        standby.promote()
        contest.leader(after=term["token"])
        primary.thaw()
        for _ in range(3):
            close(standby, "application_name = 'doyen'", 0.5)
            for _ in range(12):
                contest.listen(TTL_S / 4)
                close(primary, "wait_event = 'SyncRep'", 0.7)
        primary.kill()
        contest.settle(3 * TTL_S)
        report = contest.report()
    sound(report, 2)


@pytest.mark.chaos(engine="postgresql")
def test_a_standby_is_promoted_while_the_primary_serves(
    primary: servers.Postgres, standby: servers.PostgresStandby, tmp_path: Path
) -> None:
    """The old primary can confirm nothing any more, so its leader's term ends. When it is gone,
    another leads on the new one, with a higher token."""
    with Contest(Place(standby.url), tmp_path, ttl_s=TTL_S) as contest:
        leader, term = contest.leader()
        standby.promote()
        contest.wait("the term did not end", lambda: contest.seen(leader, "lost"))
        primary.kill()
        contest.leader(after=term["token"])
        contest.settle(TTL_S)
        report = contest.report()
    sound(report, 2)


class EachAtAnother:
    """Where a contest is held: every candidate prefers another member of the cluster."""

    port = 0

    def __init__(self, cluster: servers.GaleraCluster) -> None:
        self._urls = cycle([cluster.url_from(number) for number in range(len(cluster.members))])

    @property
    def url(self) -> str:
        return next(self._urls)


@pytest.mark.chaos(engine="galera")
def test_candidates_write_to_different_members(tmp_path: Path) -> None:
    """Leaders are killed, frozen and let go, and so are members, with writes from all sides."""
    chance = random.Random(5)
    ttl_s = CLUSTERS["galera"].ttl_s / 2
    with (
        servers.GaleraCluster() as cluster,
        Contest(EachAtAnother(cluster), tmp_path, ttl_s=ttl_s) as contest,
    ):
        bound_s = worst_s(cluster.url, ttl_s) + SLACK_S
        for hurt in (Candidate.kill, Candidate.let_go, Candidate.kill, Candidate.let_go):
            assert contest.failover_s(hurt) <= bound_s
            contest.join()
        for how in ("kill", "freeze"):
            member = chance.choice(cluster.members)
            getattr(member, how)()
            contest.settle(2 * ttl_s)
            member.start() if how == "kill" else member.thaw()
            member.await_ready()
            _, term = contest.leader()
            contest.elected[-1][0].let_go()
            contest.leader(after=term["token"])
            contest.join()
        report = contest.report()
    sound(report, 7)
