"""What only MySQL and MariaDB have: revisions by the clock, polling, logins, settings."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
from asyncmy.connection import Connection

import servers
from doyen.errors import ConfigError, StoreUnavailable, StoreUnusable
from doyen.lease.clock import SystemClock
from doyen.model import Entry, leader_key
from doyen.stores.port import Context, open_store
from doyen.stores.sql import mysql as mysql_module
from doyen.stores.sql.diagnosis import findings_of_mysql
from doyen.stores.sql.mysql import TicketBell
from relational import Place, run
from stalls import Stopwatch

KEY = leader_key("e")
CONTEXT = Context(SystemClock(), lambda event: None)


@pytest.fixture
def place(mysql: servers.MariaDB) -> Place:
    return Place("mysql", mysql)


async def test_tokens_are_never_below_the_servers_microseconds(place: Place) -> None:
    """They grow even if a replica takes over that lacks the last ones."""
    async with place.stores() as (store,):
        before = place.number("SELECT UNIX_TIMESTAMP() * 1000000")
        token = (await store.create(KEY, b"v", await store.grant(60))).entry.revision
        assert token > before
        place.server.query(f"UPDATE {place.tables['meta']} SET revision = 5000000000000000")
        again = (await store.create(leader_key("f"), b"v", await store.grant(60))).entry
        assert again.revision == 5 * 10**15 + 1


async def test_servers_that_certify_each_others_writes_count_as_one(place: Place) -> None:
    """Clients write to any of them at any time: skipping revisions each time would use them up."""
    async with place.stores() as (store,):
        await store.put(KEY, b"v", if_version=None)
        place.server.query(f"UPDATE {meta(place)} SET server = 'group'")
    with mock.patch.object(mysql_module, "_GROUPS", "SELECT 1"):
        async with place.stores() as (store,):
            before = place.number(f"SELECT revision FROM {meta(place)}")
            await store.delete(KEY)
            assert place.number(f"SELECT revision FROM {meta(place)}") - before < 2**39


@pytest.mark.parametrize("behind_s", [0, 3600])
async def test_tokens_grow_when_a_replica_with_a_slow_clock_takes_over(
    mysql: servers.MariaDB, monkeypatch: pytest.MonkeyPatch, behind_s: int
) -> None:
    """It also lacks the last commits, and with them the last tokens."""
    with servers.MariaDB(server_id="2") as replica:
        primary, promoted = Place("mysql", mysql), Place("mysql", replica)
        promoted.option, promoted.tables = primary.option, primary.tables
        async with primary.stores() as (store,):
            lease = await store.grant(60)
            await store.create(KEY, b"v", lease)
            async with promoted.stores():
                pass  # creates the tables
            copied = mysql.query(f"SELECT revision, position, server FROM {meta(primary)}")
            await store.delete(KEY)
            before = (await store.create(KEY, b"v", lease)).entry.revision
        ((revision, position, server),) = copied
        replica.query(
            f"UPDATE {meta(promoted)} SET revision = {revision}, position = {position},"
            f" server = '{server}'"
        )
        promoted.own_clock(monkeypatch)
        promoted.step_clock(-behind_s)
        tokens = [before]
        for _ in range(3):
            async with promoted.stores() as (store,):
                lease = await store.grant(60)
                tokens.append((await store.create(KEY, b"v", lease)).entry.revision)
                await store.revoke(lease)
        assert tokens == sorted(set(tokens))
        assert tokens[-1] - tokens[1] < 2**40, "revisions are left out once"


FORMER_META = (
    "CREATE TABLE {meta} (one TINYINT PRIMARY KEY, layout INT NOT NULL,"
    " revision BIGINT NOT NULL, position BIGINT NOT NULL) ENGINE = InnoDB"
)
"""The table of a version that did not store the server of the last revision."""


async def make_as_before(place: Place) -> None:
    async with place.stores():
        pass
    place.server.query(f"DROP TABLE {meta(place)}")
    place.server.query(FORMER_META.format(meta=meta(place)))
    place.server.query(f"INSERT INTO {meta(place)} VALUES (1, 1, 6000000000000000, 7)")


async def test_tables_of_an_earlier_version_are_adapted_while_in_use(place: Place) -> None:
    """Several clients open them at once, while clients of the earlier version go on writing."""
    await make_as_before(place)
    done = False

    def write_as_before() -> int:
        number = 0
        while not done:
            place.server.query(
                f"UPDATE {meta(place)} SET revision = GREATEST(revision + 1, 5),"
                " position = position + 1"
            )
            number += 1
        return number

    writing = asyncio.create_task(asyncio.to_thread(write_as_before))
    try:
        stores = await asyncio.gather(*(place.open() for _ in range(8)))
        entries = [
            await store.put(leader_key(str(number)), b"v", if_version=None)
            for number, store in enumerate(stores)
        ]
    finally:
        done = True
        written = await writing
    tokens = [entry.revision for entry in entries if entry is not None]
    assert len(tokens) == 8
    assert tokens == sorted(set(tokens))
    assert tokens[0] > 6 * 10**15
    revision = place.number(f"SELECT revision FROM {meta(place)}")
    assert revision == 6 * 10**15 + written + 8
    for store in stores:
        await store.close()


async def test_tables_of_an_earlier_version_that_may_not_be_altered(place: Place) -> None:
    """The error names the statement for an administrator."""
    await make_as_before(place)
    user = f"u{place.tables['meta'][-12:-5]}"
    place.server.query(f"CREATE USER {user}@'%' IDENTIFIED BY 'p'")
    place.server.query(f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON doyen.* TO {user}@'%'")
    url = place.url().replace("doyen:doyen@", f"{user}:p@")
    with pytest.raises(StoreUnusable, match=r"ALTER TABLE .* ADD COLUMN server"):
        await open_store(url, CONTEXT)


def meta(place: Place) -> str:
    return place.tables["meta"]


def test_opening_a_store_again_logs_nothing(
    place: Place, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The client library logs the server's notes, such as that a table already exists."""

    async def main() -> None:
        async with place.stores(2):
            pass

    run(main)
    run(main)
    assert capfd.readouterr().err == ""
    assert not caplog.records


async def test_changes_are_notified_at_the_polling_interval(place: Place) -> None:
    async with place.stores(2, "poll_s=0.5") as (writer, watching):
        assert watching.capabilities.notice_s == 0.5
        notified = asyncio.Event()
        await watching.watch(KEY, notified.set)
        await writer.put(KEY, b"v", if_version=None)
        written = Stopwatch()
        await notified.wait()
        assert written.elapsed_s() < 2


async def test_after_a_long_pause_all_watches_are_notified(place: Place) -> None:
    async with place.stores() as (store,):
        position, paths = await store.changes(None)
        assert paths is None
        await store.put(KEY, b"v", if_version=None)
        assert await store.changes(position) == (position + 1, [KEY])
        assert await store.changes(position + 1) == (position + 1, [])
        place.server.query(f"UPDATE {place.tables['meta']} SET position = position + 5000")
        await store.delete(KEY)
        assert await store.changes(position) == (position + 5002, None)
        assert await store.changes(position + 9999) == (position + 5002, None)
        kept = place.number(f"SELECT COUNT(*) FROM {place.tables['changes']}")
        assert kept == 1, "what is too long ago is dropped"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("doyen:wrong@HOST/doyen", "refuses the login: .*check the URL's user, password"),
        ("stranger:x@HOST/doyen", "refuses the login: "),
        ("doyen:doyen@HOST/nowhere", "refuses the login: .*nowhere"),
        ("poor:doyen@HOST/doyen", "needs SELECT, INSERT, UPDATE and DELETE"),
    ],
)
async def test_a_refused_login_has_a_reason(
    mysql: servers.MariaDB, address: str, says: str
) -> None:
    mysql.query("CREATE USER IF NOT EXISTS poor@'%' IDENTIFIED BY 'doyen'")
    mysql.query("CREATE TABLE IF NOT EXISTS doyen.rich (x int)")
    mysql.query("GRANT SELECT ON doyen.rich TO poor@'%'")
    url = f"mysql://{address.replace('HOST', f'127.0.0.1:{mysql.port}')}?prefix=poor_"
    with pytest.raises(StoreUnusable, match=says):
        await open_store(url, CONTEXT)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://u@h", "needs a database"),
        ("mysql://u@h/d?prefix=a-b", "prefix is a name"),
        ("mysql://u@h/d?schema=x", "has no option 'schema'"),
        ("mysql://u@h/d?tls=true&ca=/nowhere.pem", "cannot be used"),
    ],
)
async def test_options_are_checked(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await open_store(url, CONTEXT)


async def test_a_read_only_server_is_not_used() -> None:
    with servers.MariaDB() as server:
        place = Place("mysql", server)
        server.query("CREATE USER app@'%' IDENTIFIED BY 'app'")
        server.query("GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON doyen.* TO app@'%'")
        url = place.url().replace("doyen:doyen@", "app:app@")
        store = await open_store(url, CONTEXT)
        lease = await store.grant(60)
        server.query("SET GLOBAL read_only = 1")
        for says in ("can no longer be written to", "read-only: a replica"):
            with pytest.raises(StoreUnavailable, match=says):
                await store.delete(KEY)
        server.query("SET GLOBAL read_only = 0")
        await store.renew(lease)
        await store.close()


def test_the_buffer_of_a_lost_connection_is_freed_at_once(mysql: servers.MariaDB) -> None:
    """It has 256 KiB, and the garbage collector would find it only after many losses."""

    async def main() -> None:
        with servers.Proxy(mysql) as proxy:
            store = await Place("mysql", mysql).open(through=proxy)
            gc.collect()
            gc.disable()
            for _ in range(10):
                proxy.reset()
                with suppress(StoreUnavailable):  # unless the loss was noticed before
                    await store.get(KEY)
            kept = [each for each in gc.get_objects() if issubclass(type(each), Connection)]
            assert len(kept) <= 2
            await store.close()

    try:
        run(main)
    finally:
        gc.enable()


FINE: dict[str, Any] = {
    "version": "MariaDB 10.11",
    "poll_s": 0.05,
    "flush_log": 1,
    "sync_binary_log": 1,
    "galera": False,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"flush_log": 2}, "innodb_flush_log_at_trx_commit is 2"),
        ({"sync_binary_log": 0}, "sync_binlog is 0"),
        ({"galera": True}, "Galera"),
    ],
)
def test_unsafe_settings_are_found(change: dict[str, int], says: str) -> None:
    assert all(finding.level == "ok" for finding in findings_of_mysql(**FINE))
    found = list(findings_of_mysql(**FINE | change))
    odd = [finding for finding in found if finding.level != "ok"]
    assert len(odd) == 1
    assert says in odd[0].text
    assert odd[0].remedy


async def test_the_server_is_diagnosed(place: Place) -> None:
    async with place.stores() as (store,):
        found = [finding.text for finding in await store.diagnose()]
    assert found[0].startswith("MariaDB 1")
    assert any("innodb_flush_log_at_trx_commit is 2" in text for text in found)


async def test_failed_attempts_to_connect_leave_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        url = f"mysql://u@127.0.0.1:{servers.free_port()}/d"
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await open_store(url, Context(SystemClock(), lambda _: None))
        assert not [each for each in gc.get_objects() if issubclass(type(each), Connection)]
    finally:
        gc.enable()


async def notified_within(event: asyncio.Event, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        await event.wait()
    event.clear()


async def test_whoever_is_behind_hears_that_a_ticket_is_deleted(place: Place) -> None:
    """Changes are asked for so rarely that this shows only what the lock of the ticket does."""
    async with place.stores(2, "poll_s=10") as (first, second):
        ticket = await first.enqueue("lines/e", b"", await first.grant(60))
        gone = asyncio.Event()
        watch = await second.watch(ticket.key, gone.set)
        await until_blocked(place, ticket)
        gone.clear()
        await first.delete(ticket.key, if_version=ticket.version)
        await notified_within(gone)
        watch.close()
        # A session that ends leaves all its lines.
        lease = await first.grant(60)
        ticket = await first.enqueue("lines/e", b"", lease)
        watch = await second.watch(ticket.key, gone.set)
        await until_blocked(place, ticket)
        gone.clear()
        await first.revoke(lease)
        await notified_within(gone)
        watch.close()


async def test_a_holder_whose_connection_ended_is_looked_at_often(place: Place) -> None:
    async with place.stores(3, "poll_s=10") as (first, second, warden):
        lease = await first.grant(60)
        await second.grant(60)
        ticket = await first.enqueue("lines/e", b"", lease)
        changed = asyncio.Event()
        watch = await second.watch(ticket.key, changed.set)
        holder = await until_blocked(place, ticket)
        changed.clear()
        place.server.query(f"KILL {holder}")
        await notified_within(changed)
        assert await second.get(ticket.key) is not None, "the lease goes on"
        await warden.revoke(lease)
        await notified_within(changed)
        watch.close()


async def test_a_wait_that_is_given_up_blocks_no_other(place: Place) -> None:
    async with place.stores(2, "poll_s=10") as (first, second):
        lease = await first.grant(60)
        tickets = [await first.enqueue("lines/e", b"", lease) for _ in range(2)]
        gone = asyncio.Event()
        given_up = await second.watch(tickets[0].key, gone.set)
        watch = await second.watch(tickets[1].key, gone.set)
        await until_blocked(place, tickets[0])
        given_up.close()
        await until_blocked(place, tickets[1])
        gone.clear()
        await first.delete(tickets[1].key)
        await notified_within(gone)
        watch.close()


async def test_a_watch_that_is_closed_ends_no_other_of_its_ticket(place: Place) -> None:
    """A candidate opens the next watch of the ticket ahead before it closes the last one."""
    async with place.stores(2, "poll_s=10") as (first, second):
        ticket = await first.enqueue("lines/e", b"", await first.grant(60))
        gone = asyncio.Event()
        earlier = await second.watch(ticket.key, gone.set)
        watch = await second.watch(ticket.key, gone.set)
        earlier.close()
        await until_blocked(place, ticket)
        gone.clear()
        await first.delete(ticket.key, if_version=ticket.version)
        await notified_within(gone)
        watch.close()


async def until_blocked(place: Place, ticket: Entry) -> int:
    """Wait until a client waits for the lock of a ticket; the connection that holds it."""
    name = mysql_module._LOCK.format(
        prefix=place.option.removeprefix("prefix="), path=f"'{ticket.key}'"
    ).replace("DATABASE()", "'doyen'")
    waiting = (
        "SELECT COUNT(*) FROM information_schema.processlist"
        f" WHERE state = 'User lock' AND info LIKE '%{ticket.key}%'"
    )
    async with asyncio.timeout(10):
        while not place.number(waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return place.number(f"SELECT IS_USED_LOCK({name})")


async def test_a_session_waits_for_the_locks_of_several_tickets_in_turn() -> None:
    class Locks:
        def __init__(self) -> None:
            self.asked: list[str] = []

        async def read(self, statement: str, given: dict[str, str]) -> Any:
            self.asked.append(given["path"])
            await asyncio.sleep(0)
            return ((0,),)  # the wait was too long

    locks: Any = Locks()
    bell = TicketBell(locks, "")
    bell.wait_for("a")
    bell.wait_for("b")
    for _ in range(20):
        await asyncio.sleep(0)
    bell.close()
    assert locks.asked[:4] == ["a", "b", "a", "b"]
