"""Elections on every engine, among real processes that are killed, frozen and cut off.

What is asserted is read from the candidates' audit logs: never two leaders at a time, tokens that
increase, and a successor within the worst case that the store's own figures give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

import servers
from contest import Candidate, Contest
from doyen.clock import SystemClock
from doyen.store import Context, open_store
from doyen.timing import Timing

SLACK_S = 0.2


@dataclass(frozen=True)
class Engine:
    """How an engine is put on trial."""

    start: Callable[[], servers.Server]
    ttl_s: float
    slack_s: float = SLACK_S
    """How much later than the worst case a successor may be, on a machine that does other work."""
    options: str = ""
    """What is added to the server's URL."""


ENGINES = {
    "consul": Engine(lambda: servers.Consul(session_ttl_min="1s"), 1.0),
    "etcd": Engine(lambda: servers.Etcd(heartbeat_interval="20", election_timeout="200"), 2.0),
    "mysql": Engine(servers.MariaDB, 2.0),
    "nats": Engine(servers.Nats, 2.0),
    "postgresql": Engine(servers.Postgres, 2.0),
    "redis": Engine(servers.Redis, 2.0),
    "zookeeper": Engine(servers.ZooKeeper, 2.0),
}


@dataclass(frozen=True)
class Trial:
    """An engine with its server running."""

    engine: Engine
    port: int
    url: str
    worst_s: float


@pytest.fixture(scope="module", params=sorted(ENGINES))
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    engine = ENGINES[request.param]
    with ExitStack() as stack:
        server = stack.enter_context(engine.start())
        url = server.url + engine.options
        yield Trial(engine, server.port, url, asyncio.run(worst_s(url, engine.ttl_s)))


async def worst_s(url: str, ttl_s: float) -> float:
    store = await open_store(url, Context(SystemClock(), lambda event: None))
    lease = await store.grant(ttl_s)
    await store.revoke(lease)
    await store.close()
    able = store.capabilities
    timing = Timing(ttl_s=lease.ttl_s, renewals_lag=able.renewals_lag)
    return timing.worst_failover_s(expiry_factor=able.expiry_factor, notice_s=able.notice_s)


def cut(leader: Candidate) -> None:
    assert leader.link is not None
    leader.link.cut()


def heal(leader: Candidate) -> None:
    assert leader.link is not None
    leader.link.heal()


FAULTS: dict[str, tuple[Callable[[Candidate], None], Callable[[Candidate], None] | None]] = {
    "killed": (Candidate.kill, None),
    "frozen": (Candidate.freeze, Candidate.thaw),
    "cut off": (cut, heal),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_leads_when_the_leader_is(trial: Trial, fault: str, tmp_path: Path) -> None:
    hurt, mend = FAULTS[fault]
    with Contest(trial, tmp_path, ttl_s=trial.engine.ttl_s, links=fault == "cut off") as contest:
        old, _ = contest.leader()
        took_s = contest.failover_s(hurt)
        if mend is not None:
            mend(old)
            contest.wait("the old leader never noticed", lambda: contest.said(old, "lost"))
        report = contest.report()
    assert took_s <= trial.worst_s + trial.engine.slack_s
    assert not report.violations, report.violations[0].story
    assert report.terms >= 2
