"""The relational store on both engines: clocks, transactions, connections, errors."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path

import pytest

import servers
from doyen.errors import (
    ConfigError,
    LeaseGone,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
)
from doyen.events import Event, LeaseEnded
from doyen.model import leader_key, line_key
from doyen.stores.kit import observer
from doyen.stores.sql import postgresql, psycopg_engine
from doyen.stores.sql.store import RelationalStore
from relational import Place, now, run, until
from stalls import Stopwatch

TTL_S = 0.4
KEY = leader_key("e")
LINE = line_key("e")


@pytest.fixture(params=["postgresql", "mysql"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param, request.getfixturevalue(request.param))


async def keeps(
    holder: RelationalStore, other: RelationalStore, place: Place, step_s: float
) -> bool:
    """Whether a holder that renews kept its lease while the clock was stepped. The result does not
    count if this machine was too slow to renew in time."""
    lease = await holder.grant(TTL_S)
    other_lease = await other.grant(60)
    assert (await holder.create(KEY, b"holder", lease)).won
    watch = await other.watch(KEY, lambda: None)
    renewed = began = now()
    stepped = False
    while now() - began < 3 * TTL_S:
        await asyncio.sleep(TTL_S / 8)
        if not stepped and now() - began > TTL_S:
            place.step_clock(step_s)
            stepped = True
        creation = await other.create(KEY, b"other", other_lease)
        try:
            sent = now()
            await holder.renew(lease)
        except LeaseGone:
            assert now() - renewed > TTL_S, "a living leader was deposed"
            return False
        assert not creation.won
        renewed = sent
    watch.close()
    await holder.revoke(lease)
    return True


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_a_stepped_database_clock_ends_no_live_lease(
    place: Place, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.own_clock(monkeypatch)
    async with place.stores(2) as (holder, other):
        for _ in range(5):
            if await keeps(holder, other, place, step_s):
                return
        pytest.fail("this machine is too slow")


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_a_stepped_database_clock_keeps_no_expired_lease(
    place: Place, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.own_clock(monkeypatch)
    async with place.stores(2) as (holder, other):
        began = now()
        lease, other_lease = await holder.grant(TTL_S), await other.grant(60)
        await holder.create(KEY, b"holder", lease)
        notified = asyncio.Event()
        await other.watch(KEY, notified.set)
        assert await other.get(KEY) is not None
        notified.clear()
        place.step_clock(step_s)
        async with asyncio.timeout(100 * TTL_S):
            await notified.wait()
        assert now() - began >= TTL_S
        assert await other.get(KEY) is None
        assert (await other.create(KEY, b"other", other_lease)).won
        with pytest.raises(LeaseGone):
            await holder.renew(lease)


async def test_a_new_client_observes_for_a_whole_ttl(place: Place) -> None:
    """Although the lease expired an hour ago according to the database's clock."""
    async with place.stores(2) as (old, new):
        await old.grant(60)
        await dead_record(old, place)
        lease = await new.grant(60)
        began = now()
        assert not (await new.create(KEY, b"new", lease)).won

        async def won() -> bool:
            return (await new.create(KEY, b"new", lease)).won

        await until(won)
        assert now() - began >= TTL_S


async def dead_record(store: RelationalStore, place: Place) -> str:
    """A record whose holder has not renewed for an hour."""
    lease = await store.grant(TTL_S)
    assert (await store.create(KEY, b"old", lease)).won
    place.server.query(
        f"UPDATE {place.tables['leases']} SET renewed_us = renewed_us - 3600000000"
        f" WHERE id = '{lease.id}'"
    )
    return lease.id


async def test_a_clean_end_needs_no_observation(place: Place) -> None:
    async with place.stores(2) as (old, new):
        lease = await old.grant(600)
        assert (await old.create(KEY, b"old", lease)).won
        await old.revoke(lease)
        assert (await new.create(KEY, b"new", await new.grant(60))).won


def test_a_lease_is_renewed_or_ended_and_never_both(place: Place) -> None:
    """Of a renewal and an expiry at the same time, one finds nothing to do."""
    events: list[Event] = []

    async def main() -> None:
        holder, other = await place.open(), await place.open(emit=events.append)
        chance = random.Random(1)
        renewed = 0
        for number in range(60):
            lease = await holder.grant(60)
            key = leader_key(f"e{number}")
            await holder.create(key, b"v", lease)

            (seen,) = await other.look([lease.id])
            renewal = asyncio.create_task(holder.renew(lease))
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            await other.end_unrenewed({lease.id: 0}, seen.incarnation)
            await asyncio.wait({renewal})
            survived = renewal.exception() is None
            assert survived or isinstance(renewal.exception(), LeaseGone)
            assert (await other.get(key) is not None) == survived
            renewed += survived
        assert len(events) == 60 - renewed, "an end is reported by the client that made it"
        await holder.close()
        await other.close()

    run(main)
    assert all(isinstance(event, LeaseEnded) for event in events)


async def test_opening_a_store_ends_expired_leases(place: Place) -> None:
    """No client watches a lease that owns nothing; a client that opens the store ends it."""
    async with place.stores() as (old,):
        await old.grant(TTL_S)
        lease = await dead_record(old, place)
        await old.delete(KEY)
        leases = f"SELECT COUNT(*) FROM {place.tables['leases']} WHERE id = '{lease}'"
        assert place.number(leases) == 1
    async with place.stores():

        async def gone() -> bool:
            return place.number(leases) == 0

        assert await until(gone) > TTL_S / 2


async def test_leases_that_expired_in_an_outage_are_ended_together(place: Place) -> None:
    """A client that finds a line of expired tickets observes all of them at once, and not one after
    the other."""
    events: list[Event] = []
    async with place.stores() as (old,):
        for _ in range(8):
            await old.enqueue(LINE, b"old", await old.grant(TTL_S))
        place.server.query(
            f"UPDATE {place.tables['leases']} SET renewed_us = renewed_us - 3600000000"
        )
    store = await place.open(emit=events.append)
    began, passed = now(), Stopwatch()
    ticket = await store.enqueue(LINE, b"new", await store.grant(60))
    while (ahead := await store.ahead(ticket)) is not None:
        notified = asyncio.Event()
        watch = await store.watch(ahead.key, notified.set)
        if await store.get(ahead.key) is not None:
            async with asyncio.timeout(10):
                await notified.wait()
        watch.close()
    assert now() - began >= TTL_S
    assert passed.elapsed_s() <= 3 * TTL_S
    assert len(events) == 8
    await store.close()


async def test_tokens_grow_in_the_order_of_the_commits(place: Place) -> None:
    """Many clients create and delete one key. Each creation has a higher revision than any seen
    before it began."""
    seen: list[int] = [0]

    async def compete(store: RelationalStore) -> None:
        lease = await store.grant(60)
        for _ in range(25):
            before = max(seen)
            won, entry = await store.create(KEY, b"v", lease)
            seen.append(entry.revision)
            if won:
                assert entry.revision > before
                assert await store.delete(KEY, if_version=entry.version)

    async with place.stores(6) as stores:
        await asyncio.gather(*map(compete, stores))
    assert len(set(seen)) > 10


async def test_the_counter_survives_and_can_be_raised(place: Place) -> None:
    tokens = []
    floor = 5 * 10**15
    for options in ((), (), (f"token_floor={floor}",), ("token_floor=7",)):
        async with place.stores(1, *options) as (store,):
            lease = await store.grant(60)
            tokens.append((await store.create(KEY, b"v", lease)).entry.revision)
            await store.revoke(lease)
    assert all(before < after for before, after in pairwise(tokens))
    assert tokens[1] < floor < tokens[2]


async def test_racing_creators_of_the_tables_all_succeed(place: Place) -> None:
    stores = await asyncio.gather(*(place.open() for _ in range(8)))
    leases = [await store.grant(60) for store in stores]
    pairs = zip(stores, leases, strict=True)
    wins = [(await store.create(KEY, b"v", lease)).won for store, lease in pairs]
    assert wins == [True] + [False] * 7
    for store in stores:
        await store.close()


async def test_tables_of_a_newer_doyen_are_refused(place: Place) -> None:
    async with place.stores():
        pass
    place.server.query(f"UPDATE {place.tables['meta']} SET layout = 99")
    with pytest.raises(StoreUnusable, match=r"newer doyen \(layout 99.*upgrade doyen here"):
        await place.open()


async def test_tables_that_are_dropped_while_in_use_are_reported(place: Place) -> None:
    async with place.stores() as (store,):
        for table in place.tables.values():
            place.server.query(f"DROP TABLE {table}")
        with pytest.raises(StoreUnusable, match=r"tables are gone.*token_floor"):
            await store.get(KEY)


async def test_a_lost_response_to_a_commit_is_an_unknown_outcome(place: Place) -> None:
    with servers.Proxy(place.server) as proxy:
        store = await place.open(through=proxy)
        lease = await store.grant(60)
        proxy.cut("down")
        enqueue = asyncio.create_task(store.enqueue(LINE, b"t", lease))
        async with place.stores() as (other,):
            await until(lambda: other.list(LINE))
        proxy.reset()
        proxy.heal()
        with pytest.raises(OutcomeUnknown, match="during a transaction"):
            await enqueue
        assert [ticket.value for ticket in await store.list(LINE)] == [b"t"]
        proxy.break_after(0, "down")
        with pytest.raises(StoreUnavailable):
            await store.get(KEY)
        assert await store.get(KEY) is None
        proxy.break_after(20, "up")
        with pytest.raises(OutcomeUnknown):
            await store.put(KEY, b"v", if_version=10**17)
        assert await store.get(KEY) is None
        await store.close()


async def test_a_server_that_cannot_be_reached_is_named(place: Place) -> None:
    with servers.Proxy(place.server) as proxy:
        proxy.refuse()
        with pytest.raises(StoreUnavailable, match=f"no connection to .*127.0.0.1:{proxy.port}"):
            await place.open(through=proxy)
        proxy.heal()
        store = await place.open(through=proxy)
        proxy.refuse()
        with pytest.raises(StoreUnavailable, match=str(proxy.port)):
            await until(lambda: store.get(KEY))
        proxy.heal()
        assert await store.get(KEY) is None
        proxy.cut()
        opening = Stopwatch()
        with pytest.raises(StoreUnavailable, match=str(proxy.port)):
            await place.open("connect_timeout_s=2", through=proxy)
        assert opening.elapsed_s() < 5
        proxy.heal()
        await store.close()


async def test_the_first_host_that_answers_is_used(place: Place) -> None:
    with servers.Proxy(place.server) as proxy:
        proxy.refuse()
        url = place.url().replace(
            f"127.0.0.1:{place.server.port}",
            f"127.0.0.1:{proxy.port},127.0.0.1:{place.server.port}",
        )
        place.url = lambda *_, **__: url  # type: ignore[method-assign]
        async with place.stores() as (store,):
            assert await store.get(KEY) is None


async def test_a_cancelled_call_leaves_no_lock(place: Place) -> None:
    """A client's timeout once left one (greptimedb#7670). At whatever point a call is cancelled,
    the next write is not blocked."""
    chance = random.Random(2)
    async with place.stores(2) as (store, other):
        for number in range(60):
            lease = await store.grant(60)
            key = leader_key(f"e{number}")
            calls: list[Coroutine[object, object, object]] = [
                store.create(key, b"v", lease),
                store.enqueue(key, b"v", lease),
                store.revoke(lease),
                store.delete(key),
            ]
            call = asyncio.create_task(calls.pop(chance.randrange(4)))
            for unused in calls:
                unused.close()
            await asyncio.sleep(chance.uniform(0, 0.003))
            call.cancel()
            await asyncio.wait({call})
            # Blocked by a lock, it would fail sooner: the server has a lock timeout.
            async with asyncio.timeout(20):
                await other.put(key, b"v", if_version=None)
                await other.delete(key)

        async def none_open() -> bool:
            return place.open_transactions() == 0

        await until(none_open)


async def test_a_record_is_not_held_twice(place: Place) -> None:
    """Advisory locks stack: taken twice and released once, they stay taken (wolverine#2691)."""
    async with place.stores(2) as (store, other):
        lease, other_lease = await store.grant(60), await other.grant(60)
        first = await store.create(KEY, b"v", lease)
        again = await store.create(KEY, b"v", lease)
        assert (first.won, again.won) == (True, False)
        assert await store.delete(KEY, if_version=again.entry.version)
        assert (await other.create(KEY, b"v", other_lease)).won


WRITER = """
import asyncio, sys
from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, open_store

async def main():
    store = await open_store(sys.argv[1], Context(SystemClock(), lambda event: None))
    lease = await store.grant(600)
    print("ready", flush=True)
    while True:
        entry = (await store.create("elections/w/leader", b"v", lease)).entry
        await store.delete(entry.key, if_version=entry.version)

asyncio.run(main())
"""


async def test_a_client_that_freezes_while_it_writes_blocks_no_other(place: Place) -> None:
    """At whatever point it is stopped, no transaction is open: others go on, and renew."""
    chance = random.Random(3)
    async with place.stores() as (store,):
        lease = await store.grant(60)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, place.url()], stdout=subprocess.PIPE
        )
        try:
            assert writer.stdout is not None
            await asyncio.to_thread(writer.stdout.readline)
            for number in range(40):
                await asyncio.sleep(chance.uniform(0.001, 0.01))
                os.kill(writer.pid, signal.SIGSTOP)
                # Blocked by a lock, it would fail sooner: the server has a lock timeout.
                async with asyncio.timeout(20):
                    await store.renew(lease)
                    assert (await store.create(leader_key(f"e{number}"), b"v", lease)).won
                os.kill(writer.pid, signal.SIGCONT)
        finally:
            writer.kill()
            writer.communicate()


async def test_a_transaction_that_stays_open_is_reported(place: Place) -> None:
    """Another program locks doyen's tables: writers get an error with the cause, renewals go on."""
    meta = place.tables["meta"]
    lock = f"BEGIN; UPDATE {meta} SET layout = layout; SELECT {{}}(4); COMMIT"
    sleep = lock.format("pg_sleep" if place.engine == "postgresql" else "SLEEP")
    async with place.stores(2) as (store, blocker):
        lease = await store.grant(60)
        blocking = asyncio.create_task(blocker._connection.read(sleep, {}))

        async def blocked() -> bool:
            try:
                async with asyncio.timeout(0.1):
                    await store.delete(KEY)
            except TimeoutError:
                return True
            return False

        await until(blocked)
        with pytest.raises(StoreUnavailable, match="locked doyen's tables; look in"):
            await store.delete(KEY)
        await store.renew(lease)
        blocking.cancel()


def test_leases_and_watches_survive_a_restart_of_the_server(place: Place) -> None:
    server = type(place.server)()

    async def main() -> None:
        async with place.stores(2) as (store, other):
            lease = await store.grant(60)
            token = (await store.create(KEY, b"v", lease)).entry.revision
            notified = asyncio.Event()
            await other.watch(KEY, notified.set)
            assert await other.get(KEY) is not None
            await asyncio.to_thread(server.restart)

            async def again() -> bool:
                try:
                    await store.renew(lease)
                    return await store.delete(KEY)
                except StoreError:
                    return False

            await until(again)
            await notified.wait()
            assert await other.get(KEY) is None
            assert (await store.create(KEY, b"v", lease)).entry.revision > token

    with server:
        place.server = server
        run(main)


async def test_a_connection_that_goes_silent_is_noticed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(psycopg_engine, "_PING_TIMEOUT_S", 0.3)
    monkeypatch.setattr(postgresql, "_PING_RENEWALS_AFTER_S", 0.2)
    with servers.Proxy(place.server) as proxy:
        watching, writer = await place.open(through=proxy), await place.open()
        notified = asyncio.Event()
        await watching.watch(KEY, notified.set)
        await asyncio.sleep(0.1)
        notified.clear()
        proxy.cut()
        lease = await writer.grant(60)
        assert (await writer.create(KEY, b"v", lease)).won
        await asyncio.sleep(0.1)
        assert not notified.is_set()
        proxy.reset()
        proxy.heal()
        await notified.wait()
        assert await watching.get(KEY) is not None
        await watching.close()
        await writer.close()


async def test_waiting_costs_two_queries_per_renewal(place: Place) -> None:
    """A waiting candidate renews, and looks once per renewal of the candidate ahead."""
    async with place.stores(2) as (leader, waiting):
        lease, own = await leader.grant(TTL_S), await waiting.grant(TTL_S)
        await leader.create(KEY, b"v", lease)
        await waiting.watch(KEY, lambda: None)
        queries: list[str] = []
        read = waiting._connection.read

        async def counted(query: str, given: object) -> list[object]:
            queries.append(query)
            return await read(query, given)  # type: ignore[arg-type,return-value]

        waiting._connection.read = counted  # type: ignore[method-assign,assignment]
        for _ in range(12):
            await asyncio.sleep(TTL_S / 3)
            await asyncio.gather(leader.renew(lease), waiting.renew(own))
        looks = [query for query in queries if query.startswith("SELECT l.id")]
        others = [query for query in queries if not query.startswith("SELECT l.id")]
        assert len(looks) <= 30
        assert place.engine == "mysql" or len(others) <= 4, others


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("nonsense=1", "has no option 'nonsense'"),
        ("token_floor=-1", "token_floor is a whole number"),
        ("poll_s=0", "poll_s is a number from 0.005"),
        ("poll_s=often", "poll_s is a number"),
        ("connect_timeout_s=0", "connect_timeout_s is a number"),
        ("tls=perhaps", "tls is true or false"),
        ("ca=/tmp/ca.pem", "go with tls=true"),
    ],
)
async def test_options_are_checked(place: Place, options: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await place.open(options)


async def test_ports_are_checked(place: Place) -> None:
    place.url = lambda *_, **__: f"{place.engine}://host:none/database"  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="a port is a number"):
        await place.open()


def test_a_missing_client_library_is_named(place: Place) -> None:
    library = {"postgresql": "psycopg", "mysql": "asyncmy"}[place.engine]
    code = f"""
import asyncio, sys
sys.modules[{library!r}] = None
import doyen
async def main():
    async with doyen.connect({place.url()!r}): pass
asyncio.run(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert f"ConfigError: {place.engine}:// needs {library}" in result.stderr
    assert f'pip install "doyen[{place.engine}]"' in result.stderr


async def test_long_keys_are_refused(place: Place) -> None:
    async with place.stores() as (store,):
        lease = await store.grant(60)
        with pytest.raises(ConfigError, match="at most 1024 bytes"):
            await store.create("x" * 1025, b"v", lease)
        with pytest.raises(ConfigError, match="at most 1024 bytes"):
            await store.enqueue("x" * 1000, b"v", lease)
        with pytest.raises(ConfigError, match="a rank is between"):
            await store.enqueue(LINE, b"v", lease, rank=2**31)


async def test_a_forked_child_leaves_the_connections_alone(place: Place, tmp_path: Path) -> None:
    async with place.stores() as (store,):
        lease = await store.grant(60)
        child = os.fork()
        if child == 0:
            store.forked()
            os._exit(0)
        os.waitpid(child, 0)
        await store.renew(lease)
        assert (await store.create(KEY, b"v", lease)).won
        store.forked()
        with pytest.raises(StoreUnusable, match="connect again in the child"):
            await store.get(KEY)
        store._unusable = None
