"""Two primaries of PostgreSQL at once: a standby was promoted while the old primary goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import servers
from doyen.errors import LeaseGone, StoreError, StoreUnavailable
from doyen.model import Lease, leader_key
from doyen.stores.sql.store import RelationalStore
from relational import Place, until

KEY = leader_key("e")


@dataclass
class Pair:
    """The old primary and the promoted one, with a URL that names both."""

    old: servers.Postgres
    new: servers.PostgresStandby
    to_old: servers.Proxy
    to_new: servers.Proxy
    place: Place

    def url(self) -> str:
        hosts = f"127.0.0.1:{self.to_old.port},127.0.0.1:{self.to_new.port}"
        return f"postgresql://postgres@{hosts}/postgres?{self.place.option}&connect_timeout_s=2"

    def counter(self, server: servers.Postgres, lease: Lease) -> int:
        query = f"SELECT counter FROM {self.place.tables['leases']} WHERE id = '{lease.id}'"
        ((counter,),) = server.query(query)
        return int(counter or 0)

    async def replicated(self, lease: Lease) -> None:
        async def there() -> bool:
            query = f"SELECT 1 FROM {self.place.tables['entries']} WHERE lease = '{lease.id}'"
            try:
                return bool(self.new.query(query))
            except ValueError:
                return False  # the tables do not exist yet

        await until(there)

    def end_other_connections(self, server: servers.Postgres) -> None:
        """End all connections of doyen except the one that listens and renews."""
        server.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'doyen' AND query NOT LIKE '%counter = counter + 1%'"
        )


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        servers.Postgres() as old,
        servers.PostgresStandby(old) as new,
        servers.Proxy(old) as to_old,
        servers.Proxy(new) as to_new,
    ):
        yield Pair(old, new, to_old, to_new, Place("postgresql", old))


async def test_all_connections_of_a_store_leave_a_deposed_primary_together(pair: Pair) -> None:
    """The connection for renewals still leads to the old primary. A renewal there must not count
    once another connection has met the new primary."""
    pair.place.url = lambda *_, **__: pair.url()  # type: ignore[method-assign]
    async with pair.place.stores() as (store,):
        lease = await store.grant(60)
        before = (await store.create(KEY, b"v", lease)).entry.revision
        await store.renew(lease)
        await pair.replicated(lease)
        pair.new.promote()
        pair.to_old.refuse_new()
        pair.end_other_connections(pair.old)
        await until(lambda: found(store))
        known = pair.counter(pair.old, lease)
        await until(lambda: renewed(store, lease))
        assert pair.counter(pair.old, lease) == known
        assert pair.counter(pair.new, lease) == known + 1

        pair.to_old.heal()
        await stays_with_the_new_one(pair, store)
        await store.delete(KEY)
        assert (await store.create(KEY, b"v", lease)).entry.revision > before + 2**39


async def found(store: RelationalStore) -> bool:
    try:
        return await store.get(KEY) is not None
    except StoreUnavailable:
        return False


async def renewed(store: RelationalStore, lease: Lease) -> bool:
    try:
        await store.renew(lease)
    except LeaseGone:
        raise
    except StoreError:
        return False
    return True


async def stays_with_the_new_one(pair: Pair, store: RelationalStore) -> None:
    """Even if only the old primary, the first in the URL, can be reached."""
    pair.to_new.refuse()

    async def refused() -> bool:
        with pytest.raises(StoreUnavailable) as failure:
            await store.get(KEY)
        return "it was the primary before a failover" in str(failure.value)

    await until(refused)
    pair.to_new.heal()
    await until(lambda: found(store))
