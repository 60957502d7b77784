"""Elections on etcd: known incidents, cost in requests, and the loss of etcd's own leader."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import doyen
from contest import Contest, Place, now, unexplained
from doyen.events import Record, Waiting
from doyen.fencing import GuardedFile
from doyen.model import leader_key
from fixtures import shared
from servers import Etcd, EtcdCluster
from servers.wire import http, http_json
from stalls import Stopwatch
from support import gather_leaders, keepalive_of, lead_until_set, until

PATIENCE_S = 20.0


def revoke(server: Etcd, lease: str) -> None:
    """Revoke a lease as an operator would."""
    http_json(server.port, "POST", "/v3/lease/revoke", {"ID": str(int(lease, 16))})


@asynccontextmanager
async def sessions(
    server: Etcd, count: int, ttl_s: float = 5, **options: Any
) -> AsyncIterator[list[doyen.Session]]:
    async with asyncio.timeout(PATIENCE_S):
        opened = [doyen.connect(server.url, ttl_s=ttl_s, **options) for _ in range(count)]
        try:
            for session in opened:
                await session.__aenter__()
            yield opened
        finally:
            for session in opened:
                await session.__aexit__(None, None, None)


# Incidents


async def test_a_lease_that_ended_while_its_candidate_waited_elects_no_leader(etcd: Etcd) -> None:
    """etcd#11456: a lock was granted to a client whose lease had expired while it was in line."""
    async with sessions(etcd, 2) as (first, second):
        stop, stopped = asyncio.Event(), asyncio.Event()
        leading = asyncio.create_task(lead_until_set(first, stop, "11456", name="first"))
        await until(lambda: heart_is_up(first))
        waiting = asyncio.create_task(lead_until_set(second, stopped, "11456", name="second"))
        await in_line(second, "11456", 2)
        ended = keepalive_of(second).lease.id
        revoke(etcd, ended)
        stop.set()
        await leading
        async for leader in second.observe("11456"):
            if leader and leader.name == "second":
                break
        record = await record_of(second, "11456")
        assert record.lease == keepalive_of(second).lease.id != ended
        stopped.set()
        term = await waiting
        assert term.token == record.revision


async def test_a_lease_revoked_under_a_leader_ends_its_term_and_its_token(
    etcd: Etcd, tmp_path: Path
) -> None:
    """etcd#15247: after a stall of its own leader, etcd revoked leases that were alive. The holder
    notices that its record is gone; its writes until then are refused by the token."""
    async with sessions(etcd, 2) as (first, second):
        resource = GuardedFile(tmp_path / "resource")
        stop = asyncio.Event()
        with pytest.raises(doyen.LeadershipLost):
            async with first.campaign("15247", name="first") as old:
                successor = asyncio.create_task(lead_until_set(second, stop, "15247"))
                await in_line(second, "15247", 2)
                resource.write(old, b"old")
                revoke(etcd, keepalive_of(first).lease.id)
                await asyncio.sleep(PATIENCE_S)
        await until(lambda: not old.valid)
        stop.set()
        new = await successor
        assert new.token > old.token
        resource.write(new, b"new")
        with pytest.raises(doyen.StaleToken):
            resource.write(old, b"old")


async def test_an_observer_is_shown_only_leaders(etcd: Etcd) -> None:
    """etcd#18163: an observer was notified of a candidate that waited."""
    waited: set[str] = set()

    def note(record: Record) -> None:
        if isinstance(record.event, Waiting):
            waited.add(record.event.name)

    async with sessions(etcd, 3, on_event=note) as (first, second, observer):
        seen: list[str | None] = []
        watching = asyncio.create_task(gather_leaders(observer, seen))
        await until(lambda: seen == [None])
        for number in range(5):
            leader, waiter = (first, second) if number % 2 else (second, first)
            stop, stopped = asyncio.Event(), asyncio.Event()
            leading = asyncio.create_task(
                lead_until_set(leader, stop, "e", name=f"leader {number}")
            )
            await until(lambda number=number: seen[-1] == f"leader {number}")  # type: ignore[misc]
            waiting = asyncio.create_task(
                lead_until_set(waiter, stopped, "e", name=f"waiter {number}", priority=9)
            )
            # Until it waits, its attempt to create the record may still be in flight.
            await until(lambda number=number: f"waiter {number}" in waited)  # type: ignore[misc]
            waiting.cancel()
            await asyncio.wait({waiting})
            stop.set()
            await leading
            await until(lambda: seen[-1] is None)
        watching.cancel()
        assert not [name for name in seen if name and name.startswith("waiter")]


def heart_is_up(session: doyen.Session) -> bool:
    core: Any = session._core
    return core.leases._shared is not None


async def in_line(session: doyen.Session, election: str, count: int) -> None:
    while len(await session.line(election)) < count:  # noqa: ASYNC110 - no event for it
        await asyncio.sleep(0.02)


async def record_of(session: doyen.Session, election: str) -> Any:
    core: Any = session._core
    return await core.runtime.do(core.store.get(leader_key(election)))


# Cost in requests


def calls(server: Etcd, *methods: str) -> int:
    """The number of calls that etcd has served, by default of the methods that elections use."""
    _, text = http(server.port, "GET", "/metrics")
    names = "|".join(methods or ("Put", "Range", "Txn", "DeleteRange"))
    made = rf'(?m)^grpc_server_started_total{{.*grpc_method="(?:{names})".*}} (\S+)$'
    return round(sum(map(float, re.findall(made, text.decode()))))


@pytest.mark.parametrize("crowd", [3, 60])
async def test_the_cost_of_a_handover_does_not_depend_on_the_line(etcd: Etcd, crowd: int) -> None:
    async with sessions(etcd, 2, ttl_s=60) as pair:
        election = f"crowd-{crowd}"
        order: list[int] = []
        stops = [asyncio.Event() for _ in range(crowd)]

        async def campaign(number: int) -> None:
            async with pair[number % 2].campaign(election, name=str(number)):
                order.append(number)
                await stops[number].wait()

        candidates = [asyncio.create_task(campaign(number)) for number in range(crowd)]
        await in_line(pair[0], election, crowd)
        spent = [await quiet(etcd)]
        for handovers in (1, 2):
            await until(lambda handovers=handovers: len(order) == handovers)  # type: ignore[misc]
            stops[order[-1]].set()
            await until(lambda handovers=handovers: len(order) > handovers)  # type: ignore[misc]
            spent.append(await quiet(etcd))
        # Delete the record and the ticket; read the ticket ahead; create the record, then read
        # it, and read the order. The next in line may read once more. In the background both
        # leaders read and write the trail, once more if they do so at the same time.
        assert all(after - before <= 8 + 6 for before, after in pairwise(spent))
        for task in candidates:
            task.cancel()
        await asyncio.wait(candidates)


async def quiet(server: Etcd) -> int:
    """The number of calls, once it no longer changes."""
    seen = -1
    while seen != (seen := calls(server)):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return seen


async def test_many_elections_share_one_renewal_stream(etcd: Etcd) -> None:
    async with sessions(etcd, 1, ttl_s=2) as (session,):
        before = calls(etcd, "LeaseKeepAlive"), calls(etcd, "Watch"), calls(etcd, "LeaseGrant")
        stop = asyncio.Event()
        leading = [
            asyncio.create_task(lead_until_set(session, stop, f"many-{number}"))
            for number in range(200)
        ]
        await until(lambda: heart_is_up(session))
        renewals: list[float] = []
        keepalive_of(session).on_renewal(renewals.append)
        await until(lambda: len(renewals) >= 3)
        after = calls(etcd, "LeaseKeepAlive"), calls(etcd, "Watch"), calls(etcd, "LeaseGrant")
        assert [now - then for then, now in zip(before, after, strict=True)] == [1, 1, 1]
        stop.set()
        assert len({term.token for term in await asyncio.gather(*leading)}) == 200


# Loss of etcd's own leader


cluster = shared(EtcdCluster, "function")


def kill(member: Etcd) -> Callable[[], None]:
    member.kill()
    return member.restart


def freeze(member: Etcd) -> Callable[[], None]:
    member.freeze()
    return member.thaw


@pytest.mark.parametrize("lose", [freeze, pytest.param(kill, marks=pytest.mark.chaos)])
def test_an_election_outlives_the_loss_of_etcds_own_leader(
    cluster: EtcdCluster, tmp_path: Path, lose: Callable[[Etcd], Callable[[], None]]
) -> None:
    """etcd#14641: a campaign hung for as long as etcd's leader was paused."""
    with Contest(Place(cluster.url), tmp_path, ttl_s=5) as contest:
        leader, term = contest.leader()
        restore = lose(cluster.leader())
        newcomer, since = contest.add(), now()
        contest.wait("the newcomer hangs", lambda: contest.seen(newcomer, "waiting"))
        contest.wait(
            "no renewal since",
            lambda: [each for each in contest.seen(leader, "renewed") if each["at"] > since],
        )
        restore()
        assert contest.leader() == (leader, term)
        report = contest.report()
    assert not report.violations, report.violations[0].story


@pytest.mark.chaos
def test_a_long_stall_of_etcds_own_leader(cluster: EtcdCluster, tmp_path: Path) -> None:
    """etcd#15247, etcd#18428: when it resumes, etcd may revoke live leases. Their holders learn of
    it at once, and tokens still order the leaders."""
    with Contest(Place(cluster.url), tmp_path, ttl_s=3) as contest:
        for _ in range(3):
            contest.leader()
            stalled = cluster.leader()
            stalled.freeze()
            contest.listen(6)
            stalled.thaw()
            contest.listen(3)
        tokens = [event["token"] for _, event in contest.elected]
        report = contest.report()
    assert tokens == sorted(set(tokens))
    assert not unexplained(report)


@pytest.mark.chaos
def test_chaos_in_the_cluster_and_among_candidates(cluster: EtcdCluster, tmp_path: Path) -> None:
    chance = random.Random(1)
    with Contest(Place(cluster.url), tmp_path, ttl_s=3, size=4) as contest:
        for _ in range(20):
            victim = chance.choice([cluster.leader(), *cluster.members])
            restore = chance.choice((kill, freeze))(victim)
            leader, term = contest.leader()
            dies = chance.random() < 0.5
            if dies:
                leader.kill()
                contest.add()
            contest.listen(chance.uniform(0.2, 4))
            restore()
            if dies:
                contest.leader(after=term["token"])
        report = contest.report()
    assert not unexplained(report)
    assert report.terms >= 3


@pytest.mark.chaos
def test_compaction_under_watchers(tmp_path: Path) -> None:
    """Candidates are disconnected while the leader resigns, and etcd is compacted before they are
    back. They must not wait for the event of that change, which etcd no longer has."""
    with Etcd() as server, Contest(server, tmp_path, ttl_s=5, links=True) as contest:
        for _ in range(8):
            leader, term = contest.leader()
            links = [
                each.link
                for each in contest.candidates
                if each.process.returncode is None and each is not leader and each.link is not None
            ]
            for link in links:
                link.refuse()
            leader.let_go()
            contest.wait("the leader stays", lambda leader=leader: contest.seen(leader, "ended"))  # type: ignore[misc]
            for number in range(3):
                server.put(f"elsewhere-{number}", b"")
            compact(server)
            back = Stopwatch()
            for link in links:
                link.heal()
            contest.leader(after=term["token"])
            assert back.elapsed_s() < 2.5, "the candidates waited for the lease"
            contest.join()
        report = contest.report()
    assert not report.violations, report.violations[0].story
    assert report.terms == 9


def compact(server: Etcd) -> None:
    """Discard all history of etcd."""
    status = http_json(server.port, "POST", "/v3/maintenance/status", {})
    revision = status["header"]["revision"]
    http_json(server.port, "POST", "/v3/kv/compaction", {"revision": revision, "physical": True})
