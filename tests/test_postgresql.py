"""What only PostgreSQL has: poolers, timelines, durability, logins."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg.pq import TransactionStatus

import servers
from doyen.errors import ConfigError, StoreUnavailable, StoreUnusable
from doyen.lease.clock import SystemClock
from doyen.model import leader_key
from doyen.stores.port import Context, Store, open_store
from doyen.stores.sql import connection as connection_module
from doyen.stores.sql.diagnosis import findings_of_postgresql
from relational import Place, until

KEY = leader_key("e")
CONTEXT = Context(SystemClock(), lambda event: None)


@pytest.fixture
def place(postgresql: servers.Postgres) -> Place:
    return Place("postgresql", postgresql)


@pytest.fixture(scope="module")
def pooler(postgresql: servers.Postgres) -> Iterator[servers.PgBouncer]:
    with servers.PgBouncer(postgresql) as server:
        yield server


async def lead_and_hand_over(stores: list[Store]) -> None:
    """Each candidate leads once, notified by its watch."""
    leases = [await store.grant(60) for store in stores]
    for _ in range(3):
        led: list[int] = []

        async def stand(number: int, led: list[int] = led) -> None:
            store, lease, free = stores[number], leases[number], asyncio.Event()
            watch = await store.watch(KEY, free.set)
            while not (creation := await store.create(KEY, b"v", lease)).won:
                async with asyncio.timeout(10):
                    await free.wait()
                free.clear()
            watch.close()
            led.append(creation.entry.revision)
            assert await store.delete(KEY, if_version=creation.entry.version)

        await asyncio.gather(*map(stand, range(len(stores))))
        assert led == sorted(set(led))
        assert len(led) == len(stores)


@pytest.mark.parametrize("listens", [False, True])
async def test_a_transaction_pooler_may_be_used(
    place: Place, pooler: servers.PgBouncer, listens: bool
) -> None:
    """Leases are safe behind a pooler, as advisory locks are not (skypilot#10347). Notifications do
    not pass it: doyen listens at the server itself, or polls."""
    url = f"{pooler.url}?{place.option}"
    if listens:
        url += f"&listen={place.server.url}"
    stores = [await open_store(url, CONTEXT) for _ in range(5)]
    assert {store.capabilities.notice_s for store in stores} == {0.0 if listens else 0.05}
    await lead_and_hand_over(stores)
    found = [finding for finding in await stores[0].diagnose() if finding.level == "note"]
    assert ["pooler" in finding.text for finding in found] == ([] if listens else [True])
    for store in stores:
        await store.close()


async def test_listening_through_a_pooler_is_refused(
    place: Place, pooler: servers.PgBouncer
) -> None:
    with pytest.raises(ConfigError, match=r"is a transaction pooler.* notify=poll"):
        await open_store(f"{pooler.url}?{place.option}&notify=listen", CONTEXT)


async def test_a_standby_is_refused_and_tokens_grow_across_timelines() -> None:
    """A server that was promoted, or restored to an instant, may lack the last tokens."""
    with servers.Postgres() as server:
        place = Place("postgresql", server)
        async with place.stores() as (store,):
            before = (await store.create(KEY, b"v", await store.grant(60))).entry.revision
        server.stop()
        (server.folder / "data/standby.signal").touch(mode=0o600)
        await asyncio.to_thread(server.start)
        with pytest.raises(StoreUnavailable, match="read-only"):
            await place.open()
        server.query("SELECT pg_promote()")
        async with place.stores() as (store,):
            after = (await store.create(leader_key("f"), b"v", await store.grant(60))).entry
    assert before < 2**40 < after.revision < 2**41


@pytest.mark.parametrize("last", ["create", "delete"])
async def test_confirmed_writes_survive_a_crash_whatever_the_role_has_set(last: str) -> None:
    """With synchronous_commit off, a server loses its last confirmed commits in a crash."""
    with servers.Postgres(synchronous_commit="off", wal_writer_delay="10s") as server:
        place = Place("postgresql", server)
        store = await place.open()
        lease = await store.grant(600)
        if last == "delete":
            await store.create(KEY, b"v", lease)
            await store.delete(KEY)
        else:
            await store.create(KEY, b"v", lease)
        await asyncio.to_thread(server.restart)
        await store.close()
        async with place.stores() as (store,):
            assert (await store.get(KEY) is None) == (last == "delete")


async def test_a_stricter_isolation_by_default_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "_ATTEMPTS", 1)
    with servers.Postgres(default_transaction_isolation="serializable") as server:
        place = Place("postgresql", server)
        stores: list[Store] = [await place.open() for _ in range(5)]
        await lead_and_hand_over(stores)
        for store in stores:
            await store.close()


async def test_deletions_by_hand_are_notified(place: Place) -> None:
    async with place.stores() as (store,):
        await store.create(KEY, b"v", await store.grant(60))
        notified = asyncio.Event()
        await store.watch(KEY, notified.set)

        async def quiet() -> bool:
            seen = notified.is_set()
            notified.clear()
            return not seen

        await until(quiet)
        place.server.query(f"DELETE FROM {place.tables['entries']}")
        await notified.wait()
        assert await store.get(KEY) is None


async def test_entries_without_their_lease_are_void(place: Place) -> None:
    async with place.stores() as (store,):
        lease = await store.grant(60)
        await store.create(KEY, b"v", lease)
        place.server.query(f"DELETE FROM {place.tables['leases']}")
        assert await store.get(KEY) is None
        assert (await store.create(KEY, b"w", await store.grant(60))).won


async def test_a_rehearsal_changes_nothing(place: Place) -> None:
    def numbers() -> list[list[list[str | None]]]:
        return [
            place.server.query(f"SELECT count(*) FROM {place.tables[table]}")
            for table in ("leases", "entries", "changes")
        ]

    async with place.stores() as (store,):
        await store.create(KEY, b"v", await store.grant(60))
        before = numbers()
        await store.rehearse()
        assert numbers() == before


@pytest.fixture(scope="module")
def guarded() -> Iterator[servers.Postgres]:
    """A server that needs a password for every role but the administrator."""
    with servers.Postgres() as server:
        rules = "host all postgres all trust\nhost all all all scram-sha-256\n"
        (server.folder / "data/pg_hba.conf").write_text(rules)
        server.query("CREATE ROLE app LOGIN PASSWORD 'right'")
        server.query("SELECT pg_reload_conf()")
        yield server


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("app:wrong@HOST/postgres", "refuses the login: .*password.*check the URL's user"),
        ("app@HOST/postgres", "refuses the login: .*no password supplied"),
        ("stranger:x@HOST/postgres", "refuses the login: "),
        ("postgres@HOST/nowhere", 'database "nowhere" does not exist; create it, or correct'),
        ("app:right@HOST/postgres", "CREATE SCHEMA doyen AUTHORIZATION"),
    ],
)
async def test_a_refused_login_has_a_reason(
    guarded: servers.Postgres, address: str, says: str
) -> None:
    host = f"127.0.0.1:{guarded.port}"
    with pytest.raises(StoreUnusable, match=says):
        await open_store(f"postgresql://{address.replace('HOST', host)}", CONTEXT)


async def test_a_role_needs_no_more_than_the_tables(guarded: servers.Postgres) -> None:
    place = Place("postgresql", guarded)
    async with place.stores():
        pass
    schema = place.option.partition("=")[2]
    url = f"postgresql://app:right@127.0.0.1:{guarded.port}/postgres?{place.option}"
    with pytest.raises(StoreUnusable, match="permission denied"):
        await open_store(url, CONTEXT)
    for grant in (
        f"USAGE ON SCHEMA {schema}",
        f"SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema}",
    ):
        guarded.query(f"GRANT {grant} TO app")
    stores = [await open_store(url, CONTEXT) for _ in range(2)]
    await lead_and_hand_over(stores)
    for store in stores:
        await store.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("schema=a-b", "schema is a name"),
        ("notify=never", "notify is listen or poll"),
        ("listen=redis://x", "listen is a postgresql:// URL"),
        ("notify=poll&listen=postgresql://x", "leave out one of the two"),
        ("listen=postgresql://x?schema=y", "has no option 'schema'"),
        ("tls=true&sslmode=require", "say the same thing"),
    ],
)
async def test_options_are_checked(postgresql: servers.Postgres, options: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await open_store(f"{postgresql.url}?{options}", CONTEXT)


async def test_encryption_is_required_if_asked_for(place: Place) -> None:
    for options in ("tls=true", "sslmode=require"):
        with pytest.raises(StoreUnavailable, match="does not support SSL"):
            await place.open(options)


FINE: dict[str, Any] = {
    "version": "15.0",
    "pooled": False,
    "poll_s": None,
    "fsync": True,
    "full_page_writes": True,
    "timelines": True,
    "lagging_standbys": 0,
    "connections": 2,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fsync": False}, "fsync is off"),
        ({"full_page_writes": False}, "full_page_writes is off"),
        ({"lagging_standbys": 1}, "a standby may lack the last commits"),
        ({"lagging_standbys": 2, "timelines": False}, "tokens may be given out twice"),
    ],
)
def test_unsafe_settings_are_found(change: dict[str, int], says: str) -> None:
    assert all(finding.level == "ok" for finding in findings_of_postgresql(**FINE))
    found = list(findings_of_postgresql(**FINE | change))
    warnings = [finding for finding in found if finding.level == "warning"]
    assert len(warnings) == 1
    assert says in warnings[0].text
    assert warnings[0].remedy


async def test_the_server_is_diagnosed(place: Place) -> None:
    async with place.stores() as (store,):
        found = {finding.text for finding in await store.diagnose()}
    assert any("fsync is off" in text for text in found)
    assert "changes are notified by LISTEN" in found


async def test_a_dropped_connection_is_closed_even_if_its_last_call_was_answered(
    place: Place,
) -> None:
    """psycopg warns of a connection that is deleted while it is open."""
    async with place.stores() as (store,):
        connection = store._connection
        present: Any = await connection.connected()
        call = asyncio.create_task(connection.read("SELECT 1", {}))
        active, info = TransactionStatus.ACTIVE, present.psycopg.info
        while info.transaction_status != active:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0)
        select.select([present.psycopg.fileno()], [], [], 10)
        connection.leave_others("another server")
        assert not present.psycopg.closed, "a call is in flight on it"
        with pytest.raises(StoreUnavailable, match="another server had become the primary"):
            await call
        assert present.psycopg.closed


async def test_a_dropped_connection_is_closed_even_if_its_last_call_was_abandoned(
    place: Place,
) -> None:
    """As when the loop ends: for libpq, the call is then in flight for ever."""
    async with place.stores() as (store,):
        present: Any = await store._connection.connected()
        execution = present.execute("SELECT pg_sleep(60)", {})
        execution.send(None)
        assert present.psycopg.info.transaction_status == TransactionStatus.ACTIVE
        execution.close()
        present.hang_up()
        assert present.psycopg.closed


async def test_attempts_to_connect_to_a_silent_server_leave_no_descriptor_behind() -> None:
    """Whether they time out or are cancelled, and before any garbage collection."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/d?connect_timeout_s=2"
        gc.disable()
        try:
            before = len(os.listdir("/proc/self/fd"))
            for within_s in (0.1, 0.1, 60):
                with pytest.raises((StoreUnavailable, TimeoutError)):
                    async with asyncio.timeout(within_s):
                        await open_store(url, Context(SystemClock(), lambda _: None))
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            gc.enable()
