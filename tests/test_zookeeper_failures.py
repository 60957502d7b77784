"""Failures on ZooKeeper: broken connections, dead or silent servers, lost sessions.

Includes known incidents of other libraries on ZooKeeper.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.protocol.states import KazooState

import doyen
import servers
from contest import Candidate, Contest, Place
from doyen.election.core import SessionCore
from doyen.errors import LeaseGone, OutcomeUnknown, StoreUnavailable
from doyen.events import Record, Waiting
from doyen.lease.clock import SystemClock
from doyen.lease.timing import Timing
from doyen.model import Claim, Lease, leader_key, line_key, order_key
from doyen.stores.zookeeper.session import CONNECT_ATTEMPTS, LeaseSession
from fixtures import shared
from stalls import Stopwatch
from test_zookeeper import TTL_S, opened

# From 3.12 on, Python warns of forks in a process with threads, which is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

WITHIN_S = 15.0
now = SystemClock().now


server = shared(servers.ZooKeeper)


@pytest.fixture
def proxy(server: servers.ZooKeeper) -> Iterator[servers.Proxy]:
    with servers.Proxy(server) as proxy:
        yield proxy


@pytest.fixture
def election(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-{os.urandom(3).hex()}"


async def eventually(reached: Callable[[], Any], what: str) -> Any:
    """Repeat until the result is neither None nor False, also after errors of the store."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            if (result := await reached()) not in (None, False):
                return result
        except (StoreUnavailable, OutcomeUnknown):
            pass
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.02)


async def test_a_creation_whose_answer_was_lost_is_found(
    proxy: servers.Proxy, election: str
) -> None:
    """The connection breaks between the request and its answer: the outcome is unknown, the record
    is found under the same lease, and the session continues."""
    async with opened(proxy.url) as store:
        lease = await store.grant(10.0)
        await store.enqueue(line_key(election), b"", lease)
        broken = proxy.break_after(0, "down")
        with pytest.raises(OutcomeUnknown):
            await store.create(leader_key(election), b"mine", lease)
        assert broken.is_set()
        found = await eventually(lambda: store.get(leader_key(election)), "it is found")
        assert (found.value, found.lease) == (b"mine", lease.id)
        await eventually(lambda: renewed(store, lease), "the session goes on")
        assert not (await store.create(leader_key(election), b"again", lease)).won


async def renewed(store: Any, lease: Lease) -> bool:
    await store.renew(lease)
    return True


def test_a_request_that_was_never_sent_was_not_carried_out(
    proxy: servers.Proxy, election: str
) -> None:
    async def main() -> None:
        async with opened(proxy.url) as store:
            lease = await store.grant(10.0)
            proxy.refuse()
            await eventually(lambda: unavailable(store, lease), "the connection is seen to be gone")
            with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{proxy.port}: .*refused"):
                await store.create(leader_key(election), b"", lease)
            proxy.heal()
            await eventually(lambda: renewed(store, lease), "the session goes on")
            assert (await store.create(leader_key(election), b"", lease)).won

    async def unavailable(store: Any, lease: Lease) -> bool:
        try:
            await store.renew(lease)
        except StoreUnavailable as error:
            return "refused" in str(error)
        return False

    asyncio.run(main())


async def test_watches_outlive_their_connection(
    server: servers.ZooKeeper, proxy: servers.Proxy, election: str
) -> None:
    """After a reconnect every watch is notified, also of later changes."""
    async with opened(proxy.url) as watching, opened(server.url) as writing:
        notified = [asyncio.Event() for _ in range(3)]
        keys = [leader_key(election), order_key(election), line_key(election)]
        for key, event in zip(keys, notified, strict=True):
            await watching.watch(key, event.set)
        for trouble in (proxy.reset, proxy.half_open):
            trouble()
            proxy.heal()
            for event in notified:
                await asyncio.wait_for(event.wait(), WITHIN_S)
                event.clear()
        lease = await writing.grant(10.0)
        await writing.create(keys[0], b"", lease)
        await writing.put(keys[1], b"", if_version=None)
        await writing.enqueue(keys[2], b"", lease)
        for event in notified:
            await asyncio.wait_for(event.wait(), WITHIN_S)


@pytest.mark.parametrize("known", ["by its own clock", "by ZooKeeper"])
async def test_a_lost_session_is_not_replaced(
    server: servers.ZooKeeper, election: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kazoo connects with a new session when one has expired. For a lease it must not."""
    sessions: dict[LeaseSession, set[int]] = {}
    connected = LeaseSession.connected

    def note(leased: LeaseSession, session: int, granted_s: float) -> None:
        sessions.setdefault(leased, set()).add(session)
        connected(leased, session, granted_s)

    monkeypatch.setattr(LeaseSession, "connected", note)

    def wait_for_kazoo(leased: LeaseSession) -> None:
        """Wait until kazoo is refused a connection, or has made one. Blocks the loop, so that
        nothing else runs."""
        refused: list[str] = []
        create = leased._handler.create_connection

        def note_refusal(*args: Any, **options: Any) -> Any:
            try:
                return create(*args, **options)
            except ConnectionRefusedError as error:
                refused.append(str(error))
                raise

        monkeypatch.setattr(leased._handler, "create_connection", note_refusal)
        deadline = time.monotonic() + WITHIN_S
        while not refused and len(sessions[leased]) == 1:
            assert time.monotonic() < deadline, "kazoo did not try again"
            time.sleep(0.005)

    # With a second server, kazoo reconnects at once.
    async with opened(f"{server.url},{server.address}") as store:
        lease = await store.grant(0.6)
        await store.create(leader_key(election), b"old", lease)
        leased = store._leases[lease.id]
        if known == "by ZooKeeper":
            leased.until = math.inf
        wait_for_kazoo(leased)
        with pytest.raises(LeaseGone):
            await eventually(lambda: never(store.renew(lease)), "the loss is known")
        with pytest.raises(LeaseGone):
            await store.create(leader_key(election), b"new", lease)
        await leased.end("")
        assert len(sessions[leased]) == 1
        assert await store.get(leader_key(election)) is None


async def test_the_expiry_of_a_session_is_noticed_at_the_reconnect(
    server: servers.ZooKeeper, proxy: servers.Proxy, election: str
) -> None:
    """The server closes the connection when it expires a session. A renewal that is sent before the
    holder notices has an unknown outcome. Every call after the reconnect raises `LeaseGone`."""
    async with opened(proxy.url) as holder, opened(server.url) as other:
        lease = await holder.grant(0.6)
        await holder.create(leader_key(election), b"", lease)
        proxy.cut("down")

        async def gone() -> bool:
            return await other.get(leader_key(election)) is None

        await eventually(gone, "the session has expired")
        with pytest.raises(OutcomeUnknown):
            await holder.renew(lease)
        proxy.heal()
        with pytest.raises(LeaseGone):
            await eventually(lambda: never(holder.renew(lease)), "the end is known")
        with pytest.raises(LeaseGone):
            await holder.create(leader_key(election), b"", lease)
        with pytest.raises(LeaseGone):
            await holder.enqueue(line_key(election), b"", lease)


async def never(call: Any) -> bool:
    await call
    return False


async def test_a_watch_is_set_again_before_the_notification(
    server: servers.ZooKeeper, election: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher may act through another connection, faster than the watch is set."""
    async with opened(server.url) as watching, opened(server.url) as writing:
        notified, setting, proceed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        await watching.watch(leader_key(election), notified.set)
        exists = watching._watches.exists

        async def slowly(path: str) -> None:
            setting.set()
            await proceed.wait()
            await exists(path)

        monkeypatch.setattr(watching._watches, "exists", slowly)
        await writing.create(leader_key(election), b"", await writing.grant(10.0))
        await asyncio.wait_for(setting.wait(), WITHIN_S)
        assert not notified.is_set()
        proceed.set()
        await asyncio.wait_for(notified.wait(), WITHIN_S)


def test_a_lease_that_is_revoked_in_an_outage_ends_with_the_outage(election: str) -> None:
    """A server that restarts gives every session its full time. The revoked one is closed as soon
    as the server is back, so that a successor need not wait for its expiry."""

    async def main(server: servers.ZooKeeper) -> None:
        async with opened(server.url) as store:
            lease = await store.grant(30.0)
            await store.create(leader_key(election), b"old", lease)
            await asyncio.to_thread(server.kill)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await store.revoke(lease)
            began = now()
            await asyncio.to_thread(server.start)

            async def gone() -> bool:
                return await store.get(leader_key(election)) is None

            await eventually(gone, "the record is gone")
            assert now() - began < 30.0
            with pytest.raises(LeaseGone):
                await store.renew(lease)

    with servers.ZooKeeper() as server:
        asyncio.run(main(server))


async def test_a_client_that_cannot_receive_does_not_keep_its_session(
    server: servers.ZooKeeper, proxy: servers.Proxy, election: str
) -> None:
    """Its requests arrive, the answers do not. The server counts each attempt to connect as a sign
    of life, so the client must stop trying."""
    async with opened(proxy.url) as deaf, opened(server.url) as other:
        lease = await deaf.grant(1.0)
        await deaf.create(leader_key(election), b"", lease)
        proxy.cut("down")
        while True:
            try:
                await asyncio.wait_for(renewed(deaf, lease), 0.2)
            except (TimeoutError, OutcomeUnknown):
                pass
            except StoreUnavailable:
                break  # the client has left the connection
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await deaf.revoke(lease)

        async def gone() -> bool:
            return await other.get(leader_key(election)) is None

        await eventually(gone, "the session has ended")
        proxy.heal()


def test_sessions_survive_a_restart_of_the_server(election: str) -> None:
    """Within the ttl, leases, entries and watches continue."""

    async def main(server: servers.ZooKeeper) -> None:
        async with opened(server.url) as store:
            lease = await store.grant(20.0)
            entry = (await store.create(leader_key(election), b"", lease)).entry
            notified = asyncio.Event()
            await store.watch(leader_key(election), notified.set)
            await asyncio.to_thread(server.restart)
            await eventually(lambda: renewed(store, lease), "the lease lives on")
            await asyncio.wait_for(notified.wait(), WITHIN_S)
            assert await store.get(leader_key(election)) == entry
            notified.clear()
            assert await store.delete(entry.key, if_version=entry.version)
            await asyncio.wait_for(notified.wait(), WITHIN_S)

    with servers.ZooKeeper() as server:
        asyncio.run(main(server))


@pytest.mark.parametrize("trouble", ["the server dies", "the connection is silent"])
def test_a_leader_stops_without_the_server(trouble: str, election: str) -> None:
    """kazoo#89: the loss was not reported when the server died. helix#691: the leader went on until
    it was reconnected. In doyen its own clock ends the term, before the session can expire."""

    async def main(server: servers.ZooKeeper, proxy: servers.Proxy) -> None:
        async with (
            doyen.connect(proxy.url, ttl_s=1.2) as session,
            session.campaign(election) as term,
        ):
            ending = Stopwatch()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.to_thread(server.kill if trouble == "the server dies" else proxy.cut)
                await asyncio.wait_for(asyncio.Event().wait(), WITHIN_S)
            assert not term.valid
            assert ending.elapsed_s() < 1.2
            asyncio.current_task().uncancel()  # type: ignore[union-attr]

    with (
        servers.ZooKeeper() as server,
        servers.Proxy(server) as proxy,
        pytest.raises(doyen.LeadershipLost),
    ):
        asyncio.run(main(server, proxy))


@pytest.mark.parametrize("recipe", ["line", "race"])
async def test_the_record_of_an_earlier_session_is_not_accepted(
    server: servers.ZooKeeper, election: str, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """curator#1211: a client accepted the record of its earlier session. Here the content of the
    record is that of this candidate, but ZooKeeper has bound it to another session."""
    monkeypatch.setattr(SessionCore, "next_attempt", lambda self: "the-same-1")
    async with opened(server.url) as last, doyen.connect(server.url, ttl_s=TTL_S) as session:
        lease = await last.grant(10.0)
        ours = Claim("same", "the-same-1", {}).encode()
        left = await last.create(leader_key(election), ours, lease)
        with pytest.raises(doyen.NotElected, match="'same' leads"):
            async with session.campaign(election, name="same", recipe=recipe, wait_s=0.3):
                pytest.fail("elected by what another session left")
        assert await last.get(leader_key(election)) == left.entry
        await last.revoke(lease)
        async with session.campaign(election, name="same", recipe=recipe) as term:
            assert term.token > left.entry.revision


async def test_late_callbacks_of_an_old_session_have_no_effect(
    server: servers.ZooKeeper, election: str
) -> None:
    """curator#1018: a late callback of an earlier session replaced the state of the live one."""
    async with opened(server.url) as store:
        old = await store.grant(10.0)
        session = store._leases[old.id]
        await store.revoke(old)
        new = await store.grant(10.0)
        record = await store.create(leader_key(election), b"", new)
        session.state_changed(KazooState.CONNECTED)
        session.state_changed(KazooState.SUSPENDED)
        session.state_changed(KazooState.LOST)
        session._went_up()
        session._went_down()
        await store.renew(new)
        assert await store.get(leader_key(election)) == record.entry
        with pytest.raises(LeaseGone):
            await store.renew(old)


async def test_a_forked_child_does_not_affect_its_parent(
    server: servers.ZooKeeper, election: str
) -> None:
    """After a fork the child closes its descriptors, and the parent's sessions continue."""
    async with opened(server.url) as store:
        lease = await store.grant(10.0)
        await store.create(leader_key(election), b"", lease)
        child = os.fork()
        if child == 0:
            store.forked()
            os._exit(0)
        os.waitpid(child, 0)
        await store.renew(lease)
        assert await store.get(leader_key(election)) is not None


def test_the_cost_of_a_failover_does_not_depend_on_the_line(election: str) -> None:
    """Each candidate watches the one before it, so one wakes when the leader resigns."""

    async def main(server: servers.ZooKeeper, size: int) -> int:
        name, loop = f"{election}-{size}", asyncio.get_running_loop()
        waiting: set[str] = set()
        all_wait, first, second, leave = (asyncio.Event() for _ in range(4))

        def note(record: Record) -> None:
            if isinstance(record.event, Waiting):
                waiting.add(record.event.name)
                if len(waiting) == size:
                    loop.call_soon_threadsafe(all_wait.set)

        async def campaign(session: doyen.Session, place: int) -> None:
            async with session.campaign(name, name=str(place)):
                (second if first.is_set() else first).set()
                await leave.wait()

        async with doyen.connect(server.url, ttl_s=30.0, on_event=note) as session:
            tasks = [asyncio.create_task(campaign(session, 0))]
            await asyncio.wait_for(first.wait(), WITHIN_S)
            tasks += [asyncio.create_task(campaign(session, 1 + place)) for place in range(size)]
            await asyncio.wait_for(all_wait.wait(), WITHIN_S)
            before = packets(server)
            leave.set()
            await asyncio.wait_for(second.wait(), WITHIN_S)
            spent = packets(server) - before
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return spent

    with servers.ZooKeeper() as server:
        few, many = (asyncio.run(main(server, size)) for size in (3, 60))
    # A few are pings and renewals. If every candidate read, it would be 60 and more.
    assert abs(many - few) <= 20, f"{few} packets with 3 waiting, {many} with 60"


def packets(server: servers.ZooKeeper) -> int:
    answer = servers.wire.zookeeper_command(server.port, b"mntr")
    return int(answer.partition("zk_packets_received\t")[2].split()[0])


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["kill", "freeze", "freeze a follower", "roll"])
def test_an_election_outlives_the_ensembles_own(fault: str, tmp_path: Path) -> None:
    """The leader of an ensemble of three servers is killed or frozen during an election. Then the
    election's leader is killed too, and another is elected in time."""
    ttl_s = 2.0
    worst_s = Timing(ttl_s=ttl_s, renewals_lag=True).worst_failover_s(expiry_factor=1.75)
    with (
        servers.ZooKeeperEnsemble() as ensemble,
        Contest(Place(ensemble.url), tmp_path, ttl_s=ttl_s) as contest,
    ):
        contest.leader()
        members = {
            "kill": [ensemble.leader()],
            "freeze": [ensemble.leader()],
            "freeze a follower": ensemble.followers()[:1],
            "roll": ensemble.members,
        }[fault]
        for member in members:
            if "freeze" in fault:
                member.freeze()
                contest.settle(3 * ttl_s)
                member.thaw()
            else:
                member.kill()
                contest.settle(ttl_s)
                member.restart()
        contest.settle(ttl_s)
        took_s = contest.failover_s(Candidate.kill)
        report = contest.report()
    assert took_s <= worst_s + 0.2
    assert not report.violations, report.violations[0].story
    assert report.terms >= 2


def test_a_session_that_cannot_be_taken_over_is_left_to_expire(
    server: servers.ZooKeeper, proxy: servers.Proxy, election: str
) -> None:
    """Servers count every attempt to connect as a sign of life of the session."""

    async def main() -> None:
        async with opened(server.url) as holder, opened(proxy.url) as ender:
            lease = await holder.grant(TTL_S)
            key, warrant = leader_key(election), holder.warrant(lease)
            await holder.create(key, b"v", lease)
            proxy.cut("down")
            ending = asyncio.ensure_future(ender.end(warrant))
            await asyncio.sleep(0)

            async def attempted() -> bool:
                return ender._foreign[warrant]._unanswered == CONNECT_ATTEMPTS

            async def gone() -> bool:
                return await holder.get(key) is None

            await eventually(attempted, "three attempts were made")
            await eventually(gone, "the session has expired")
            assert ender._foreign[warrant]._unanswered == CONNECT_ATTEMPTS
            assert not ending.done()
            proxy.heal()
            ending.cancel()

    asyncio.run(main())
