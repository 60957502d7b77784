"""`postgresql://user:password@h1:p1,h2:p2/database`: PostgreSQL 12 and later.

    ?schema=doyen            the schema of the tables, created if it is not there
    ?token_floor=N           raise the revision counter to N, after a move or a restore
    ?notify=listen|poll      how to learn of changes; by default LISTEN, unless the connection goes
                             through a transaction pooler
    ?listen=postgresql://…   where to LISTEN, if everything else goes through a pooler
    ?poll_s=0.05             how often to ask for changes, where LISTEN is not possible
    ?connect_timeout_s=3     how long a host may take to answer before the next one is tried
    ?tls=true&ca=…&cert=…&key=…   encrypted, the server's certificate verified; or ?sslmode=…
    ?application_name=…&channel_binding=…&gssencmode=…&options=…   passed to libpq

libpq's names are understood too: sslrootcert, sslcert, sslkey, connect_timeout.

Two connections: one for renewals, on which doyen also listens, and one for everything else.
Messages use the simple protocol, so no statements are prepared, and each message is a transaction.
A transaction pooler may therefore be used. LISTEN does not work through one; doyen detects it by
the server's process id, which a pooler does not pass on.

Isolation is READ COMMITTED, set in every transaction: what a statement reads after the counter was
advanced is the present state. A revision is never below 2**40 times the number of failovers and
point-in-time restores (the timeline minus one), so tokens grow across those too, even if the new
primary lacks the last commits of the old one.

Imports the engine, the port and its own package.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

from doyen.errors import ConfigError, StoreUnavailable, StoreUnusable
from doyen.model import Finding
from doyen.stores.kit import url as options
from doyen.stores.port import Context, StoreURL, Watch
from doyen.stores.sql.connection import Primary, SqlConnection, WrongServer
from doyen.stores.sql.diagnosis import findings_of_postgresql
from doyen.stores.sql.psycopg_engine import (
    BEGIN_PLAIN,
    FLUSH,
    PASSED,
    PsycopgEngine,
    errors,
    keep_connected,
    one_line,
)
from doyen.stores.sql.store import KEPT, LAYOUT, RelationalStore, check_layout

__all__ = ["CLOCK", "PostgreSQLStore", "open_store"]

CLOCK = "CAST(EXTRACT(epoch FROM clock_timestamp()) * 1000000 AS bigint)"
_OLDEST = 120000
_POLL_S = 0.05
_PING_AFTER_S = 2.0
_PING_RENEWALS_AFTER_S = 10.0
"""Longer where a probe might delay a renewal: leases that are renewed so rarely have the time."""
_CREATIONS = 5
_TIMELINE_STEP = 1 << 40
_OPTIONS = (
    "schema",
    "token_floor",
    "notify",
    "listen",
    "poll_s",
    "connect_timeout_s",
    *options.TLS_OPTIONS,
    "sslmode",
    *PASSED,
)
_OF_LIBPQ = {
    "sslrootcert": "ca",
    "sslcert": "cert",
    "sslkey": "key",
    "connect_timeout": "connect_timeout_s",
}
_NOT_NEEDED = ("target_session_attrs", "client_encoding", "pgbouncer", "keepalives")
"""doyen finds the primary and a pooler by itself, and keeps connections alive."""

_TIMELINE = "CAST(CAST('x' || LEFT(pg_walfile_name(pg_current_wal_lsn()), 8) AS bit(32)) AS bigint)"

_STARTED = "CAST(CAST(EXTRACT(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint) AS text)"
_IDENTITY = f"SELECT {_STARTED}, '', 0, NOT pg_is_in_recovery()"
_IDENTITY_BY_TIMELINE = (
    f"SELECT {_STARTED}, CAST(system_identifier AS text),"
    f" CASE WHEN pg_is_in_recovery() THEN 0 ELSE {_TIMELINE} END, NOT pg_is_in_recovery()"
    " FROM pg_control_system()"
)
"""Each failover begins a timeline. Of two primaries, the one on the earlier timeline is deposed."""

_SCHEMA = """
CREATE TABLE {meta} (one smallint PRIMARY KEY CHECK (one = 1), layout integer NOT NULL,
    revision bigint NOT NULL, position bigint NOT NULL) WITH (fillfactor = 10);
CREATE TABLE {leases} (id text COLLATE "C" PRIMARY KEY, ttl_us bigint NOT NULL,
    counter bigint NOT NULL, renewed_us bigint NOT NULL) WITH (fillfactor = 50);
CREATE TABLE {entries} (path text COLLATE "C" PRIMARY KEY, value bytea NOT NULL,
    revision bigint NOT NULL, version bigint NOT NULL, lease text COLLATE "C");
CREATE INDEX entries_by_lease ON {entries} (lease) WHERE lease IS NOT NULL;
CREATE TABLE {changes} (position bigint, path text COLLATE "C", PRIMARY KEY (position, path));
CREATE FUNCTION {schema}.tell() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE changed text := COALESCE(NEW.path, OLD.path); latest bigint;
    BEGIN
        PERFORM pg_notify('{channel}', changed);
        SELECT position INTO latest FROM {meta};
        INSERT INTO {changes} VALUES (latest, changed) ON CONFLICT DO NOTHING;
        IF latest % 100 = 0 THEN DELETE FROM {changes} WHERE position < latest - {kept}; END IF;
        RETURN NULL;
    END $$;
CREATE TRIGGER tell AFTER INSERT OR UPDATE OR DELETE ON {entries}
    FOR EACH ROW EXECUTE FUNCTION {schema}.tell();
INSERT INTO {meta} VALUES (1, {layout}, 0, 0);
"""

_FACTS = """
SELECT current_setting('server_version'), current_setting('fsync'),
    current_setting('full_page_writes'),
    (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('async', 'potential')),
    (SELECT count(*) FROM pg_stat_activity WHERE application_name = 'doyen')
"""

_ANOTHER_WAS_FIRST = (
    errors.UniqueViolation,
    errors.DuplicateSchema,
    errors.DuplicateTable,
    errors.DuplicateFunction,
    errors.DuplicateObject,
    errors.SerializationFailure,
    errors.InternalError_,  # "tuple concurrently updated"
)


async def open_store(url: StoreURL, context: Context) -> PostgreSQLStore:
    """Open the store at `url`, creating its schema if there is none and the context allows it."""
    url = options.renamed(url, _OF_LIBPQ, _NOT_NEEDED)
    url.refuse_unknown(*_OPTIONS)
    schema = url.options.get("schema", "doyen")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", schema):
        raise ConfigError(
            f"schema is a name of at most 63 letters, digits and underscores, not {schema!r}"
        )
    notify = options.choice(url, "notify", "", "", "listen", "poll")
    listen = _listen(url, notify)
    floor = options.whole_number(url, "token_floor")
    poll_s = options.number(url, "poll_s", _POLL_S, 0.005, 10)
    primary = Primary(_IDENTITY)
    engine = PsycopgEngine(url)
    connection = SqlConnection(engine, primary)
    try:
        pooled = await _inspect(connection, engine, primary)
        if pooled and notify == "listen" and listen is None:
            raise ConfigError(
                f"notify=listen: {connection.where} is a transaction pooler, through which LISTEN"
                " does not work; give the server's address (listen=postgresql://...), or"
                " notify=poll"
            )
        await _create_tables(connection, schema, create=context.create)
    except BaseException:
        await connection.close()
        raise
    polls = notify == "poll" or (pooled and listen is None)
    store = PostgreSQLStore(
        url,
        context,
        schema,
        listen=listen,
        poll_s=poll_s if polls else None,
        pooled=pooled,
        timelines=engine.commits_early,
        connection=connection,
        primary=primary,
    )
    await store.open(floor)
    return store


def _listen(url: StoreURL, notify: str) -> StoreURL | None:
    if "listen" not in url.options:
        return None
    listen = options.renamed(StoreURL.parse(url.options["listen"]), _OF_LIBPQ, _NOT_NEEDED)
    if listen.parts.scheme != url.parts.scheme:
        raise ConfigError(f"listen is a postgresql:// URL, not {listen.text!r}")
    listen.refuse_unknown("connect_timeout_s", *options.TLS_OPTIONS, "sslmode", *PASSED)
    if notify == "poll":
        raise ConfigError("notify=poll does not listen: leave out one of the two")
    return listen


async def _inspect(connection: SqlConnection, engine: PsycopgEngine, primary: Primary) -> bool:
    """Check the server, and whether it has timelines. Returns whether it is a pooler."""
    present: Any = await connection.connected()
    version, announced = present.psycopg.info.server_version, present.psycopg.info.backend_pid
    if version < _OLDEST:
        raise StoreUnusable(
            f"{connection.where} runs PostgreSQL {version // 10000}; doyen needs 12 or later"
        )
    ((pid,),) = await connection.read("SELECT pg_backend_pid()", {})
    try:
        await connection.read(_IDENTITY_BY_TIMELINE, {})
        await connection.read(FLUSH, {})
        primary.identity_query = _IDENTITY_BY_TIMELINE
        engine.commits_early = True
    except (StoreUnusable, WrongServer):
        pass  # a relative of PostgreSQL with another kind of log
    return bool(pid != announced)


async def _create_tables(connection: SqlConnection, schema: str, *, create: bool) -> None:
    names = _names(schema)
    for _ in range(_CREATIONS):
        query = "SELECT to_regnamespace(%(schema)s) IS NULL, to_regclass(%(meta)s) IS NULL"
        ((no_schema, no_tables),) = await connection.read(query, names)
        if not no_tables:
            ((layout,),) = await connection.read(f"SELECT layout FROM {names['meta']}", {})
            return check_layout(layout, f"the schema {schema} at {connection.where}")
        if not create:
            raise StoreUnusable(
                f"{connection.where} has no tables of doyen in the schema {schema}, and a query"
                " creates none: no candidate has used this store yet; check the URL"
            )
        script = f"CREATE SCHEMA {names['schema']};{_SCHEMA}" if no_schema else _SCHEMA
        try:
            await connection.write(
                script.format(**names, channel=schema, layout=LAYOUT, kept=KEPT), {}
            )
        except StoreUnusable as error:
            if isinstance(error.__cause__, errors.InsufficientPrivilege):
                raise StoreUnusable(
                    f"{connection.where}: doyen may not create its tables"
                    f" ({one_line(error.__cause__)}): have an administrator run"
                    f" CREATE SCHEMA {schema} AUTHORIZATION <doyen's role>"
                ) from error
            if not isinstance(error.__cause__, _ANOTHER_WAS_FIRST):
                raise
    raise StoreUnavailable(f"{connection.where}: the schema {schema} could not be created")


def _names(schema: str) -> dict[str, str]:
    tables = {name: f'"{schema}".{name}' for name in ("meta", "leases", "entries", "changes")}
    return {"schema": f'"{schema}"', **tables}


class PostgreSQLStore(RelationalStore):
    """One handle on a schema in PostgreSQL. Without `poll_s` it listens, at the server `listen` if
    that is given."""

    def __init__(
        self,
        url: StoreURL,
        context: Context,
        schema: str,
        *,
        listen: StoreURL | None,
        poll_s: float | None,
        pooled: bool,
        timelines: bool,
        connection: SqlConnection,
        primary: Primary,
    ) -> None:
        self._pooled, self._timelines = pooled, timelines
        self._engine = PsycopgEngine(listen or url, schema, self._notified)
        shared = poll_s is None and listen is None
        renewals = SqlConnection(self._engine if shared else PsycopgEngine(url), primary)
        self._listener: SqlConnection | None = None
        if poll_s is None:
            self._listener = renewals if shared else SqlConnection(self._engine, primary)
        self._listening: asyncio.Task[None] | None = None
        numbering = "revision = revision + 1"
        if timelines:
            numbering = f"revision = GREATEST(revision, ({_TIMELINE} - 1) * {_TIMELINE_STEP}) + 1"
        super().__init__(
            {**_names(schema), "clock": CLOCK, "numbering": numbering, "incarnation": _STARTED},
            context,
            logs=False,
            connection=connection,
            renewals=renewals,
            poll_s=poll_s,
        )

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        if self._listener is not None:
            await self._listener.connected()
            if self._listening is None:
                shared = self._listener is self._renewals
                ping_after_s = _PING_RENEWALS_AFTER_S if shared else _PING_AFTER_S
                listening = keep_connected(self._listener, self._engine, ping_after_s)
                self._listening = asyncio.get_running_loop().create_task(listening)
        return await super().watch(scope, notify)

    async def rehearse(self) -> None:
        """End a lease that has an entry, in a transaction that is rolled back: each connection
        compiles the trigger when it first fires, which takes longer than all the rest."""
        given: dict[str, object] = {"lease": "0", "ttl_us": 1, "line": "rehearsal/", "value": b""}
        steps = "; ".join(self._sql[name] for name in ("grant", "enqueue", "revoke"))
        await self._connection.read(f"{BEGIN_PLAIN}{steps}; ROLLBACK", given)
        await super().rehearse()

    async def _release(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        await super()._release()

    async def diagnose(self) -> Sequence[Finding]:
        ((version, fsync, full, lagging, connections),) = await self._connection.read(_FACTS, {})
        return list(
            findings_of_postgresql(
                version=str(version),
                connections=int(connections),
                pooled=self._pooled,
                poll_s=self.capabilities.notice_s or None,
                fsync=fsync == "on",
                full_page_writes=full == "on",
                timelines=self._timelines,
                lagging_standbys=int(lagging),
            )
        )

    def _notified(self, path: str | None) -> None:
        if path is None:
            self._observer.all_changed()
        else:
            self._observer.changed(path)
