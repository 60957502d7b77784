"""Long trials of the relational store: elections among real processes while the server's clock is
stepped or the server restarts, and the whole suite through a pooler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import servers
from contest import Candidate, Contest, now
from doyen.store import Store, open_store
from doyen.testing import StoreConformance, StoreHarness
from relational import Place

pytestmark = pytest.mark.chaos

TTL_S = 2.0
ENGINES = {"postgresql": servers.Postgres, "mysql": servers.MariaDB}
each_engine = pytest.mark.parametrize("engine", ENGINES)


@each_engine
def test_stepping_the_servers_clock_deposes_nobody(engine: str, tmp_path: Path) -> None:
    """The server's own clock, an hour forward and two back, again and again."""
    with (
        ENGINES[engine](own_clock=True) as server,
        Contest(server, tmp_path, ttl_s=TTL_S) as contest,
    ):
        leader, term = contest.leader()
        for step_s in (3600, -7200, TTL_S / 2, -TTL_S / 2, 3600, -5, 5):
            server.step_clock(step_s)
            until = now() + TTL_S
            while now() < until:
                time.sleep(0.05)
            assert contest.elected[-1] == (leader, term), "the leader was deposed"
            assert not contest.said(leader, "lost")

        def step_and_kill(old: Candidate) -> None:
            server.step_clock(-3600)
            old.kill()

        took_s = contest.failover_s(step_and_kill)
        assert took_s <= 2 * TTL_S + 2
        report = contest.report()
    assert not report.violations, report.violations[0].story


@each_engine
def test_a_restart_of_the_server_in_an_election(engine: str, tmp_path: Path) -> None:
    with ENGINES[engine]() as server, Contest(server, tmp_path, ttl_s=TTL_S) as contest:
        for turn in range(4):
            _, term = contest.leader()
            if turn % 2:
                server.stop()
                server.start()
            else:
                server.restart()
            contest.failover_s(lambda old: old.freeze())
            for candidate in contest.candidates:
                candidate.thaw()
            contest.leader(after=term["token"])
        report = contest.report()
    assert not report.violations, report.violations[0].story
    assert report.terms >= 5


@each_engine
def test_a_slow_and_broken_link(engine: str, tmp_path: Path) -> None:
    """The leader's answers come late, then its connections are reset, then half of them is lost."""
    with (
        ENGINES[engine]() as server,
        Contest(server, tmp_path, ttl_s=TTL_S, links=True) as contest,
    ):
        for fault in ("delay", "reset", "half_open", "refuse"):
            leader, term = contest.leader()
            assert leader.link is not None
            match fault:
                case "delay":
                    leader.link.delay(TTL_S)
                case "reset":
                    leader.link.reset()
                    leader.kill()
                case "half_open":
                    leader.link.half_open()
                case _:
                    leader.link.refuse()
            contest.leader(after=term["token"])
            leader.link.heal()
            contest.add()
        report = contest.report()
    assert not report.violations, report.violations[0].story


class Harness(StoreHarness):
    ttl_s = 0.6

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    async def open(self) -> Store:
        return await open_store(self._url, self.context())


@pytest.fixture(scope="module")
def pooler(postgresql: servers.Postgres) -> Iterator[servers.PgBouncer]:
    with servers.PgBouncer(postgresql) as server:
        yield server


class TestAskingThroughAPooler(StoreConformance):
    @pytest.fixture
    def store_harness(
        self, postgresql: servers.Postgres, pooler: servers.PgBouncer
    ) -> StoreHarness:
        return Harness(f"{pooler.url}?{Place('postgresql', postgresql).option}")


class TestListeningBesideAPooler(StoreConformance):
    @pytest.fixture
    def store_harness(
        self, postgresql: servers.Postgres, pooler: servers.PgBouncer
    ) -> StoreHarness:
        option = Place("postgresql", postgresql).option
        return Harness(f"{pooler.url}?{option}&listen={postgresql.url}")
