"""`postgresql://user:password@h1:p1,h2:p2/database`: PostgreSQL 12 and later.

    ?schema=doyen            the schema of the tables, created if it is not there
    ?token_floor=N           raise the revision counter to N, after a move or a restore
    ?notify=listen|poll      how changes are learned of; by default by listening, unless a pooler
                             stands in between
    ?listen=postgresql://…   where to listen, if everything else goes through a pooler
    ?poll_s=0.05             how often to ask, where it cannot be listened
    ?connect_timeout_s=3     when a host that does not answer is passed over
    ?tls=true&ca=…&cert=…&key=…   encrypted, the server's certificate verified; or ?sslmode=…

Two connections: one for renewals, which also listens, and one for everything else. Messages are in
the simple protocol, so nothing is prepared, and each is a transaction of its own, so a transaction
pooler may stand in between; through such a one nothing can be heard, which is noticed by its not
giving the process id of the server.

Isolation is READ COMMITTED, stated in every transaction: what a statement reads after the counter
was advanced is then what stands there. A revision is never below 2**40 times the number of
failovers and point-in-time restores (the timeline less one), so tokens grow across those too, even
if the new primary lacks the last commits of the old one.

Imports psycopg, the port and its own package.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from doyen.errors import ConfigError, StoreError, StoreUnavailable, StoreUnusable
from doyen.model import Finding
from doyen.stores.port import Context, StoreURL, Watch
from doyen.stores.sql.connection import (
    Given,
    Primary,
    Row,
    SqlAddress,
    SqlConnection,
    SqlConnectionLost,
    TryAgain,
    WrongServer,
)
from doyen.stores.sql.diagnosis import PostgreSQLFacts, findings_of_postgresql
from doyen.stores.sql.store import (
    KEPT,
    LAYOUT,
    Dialect,
    RelationalStore,
    check_layout,
    number_of,
    token_floor,
)

try:
    import psycopg
    from psycopg import AsyncClientCursor, AsyncConnection, errors
    from psycopg.pq import TransactionStatus
except ImportError as missing:
    raise ConfigError(
        'postgresql:// needs psycopg, which is not installed: pip install "doyen[postgresql]"'
    ) from missing

__all__ = ["CLOCK", "PostgreSQLStore", "open_store"]

log = logging.getLogger("doyen")

CLOCK = "CAST(EXTRACT(epoch FROM clock_timestamp()) * 1000000 AS bigint)"
_OLDEST = 120000
_LOCK_TIMEOUT_MS = 700
"""Below the request timeout of a session with the default ttl, so that its user hears the cause."""
_POLL_S = 0.05
_PING_AFTER_S = 2.0
_PING_PULSE_AFTER_S = 10.0
"""Longer where it might delay a renewal: there, leases that are renewed so rarely have the time."""
_PATIENCE_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_CREATIONS = 5
_TIMELINE_STEP = 1 << 40
_OPTIONS = (
    "schema",
    "token_floor",
    "notify",
    "listen",
    "poll_s",
    "connect_timeout_s",
    "tls",
    "ca",
    "cert",
    "key",
    "sslmode",
)

_BEGIN_PLAIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;"
    f" SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}; "
)
_DURABLY = "set_config('synchronous_commit', 'on', true)"
_IF_NOT = "WHERE current_setting('synchronous_commit') = 'off'; "
_BEGIN = f"{_BEGIN_PLAIN}SELECT {_DURABLY} {_IF_NOT}"
_BEGIN_EARLY = f"{_BEGIN_PLAIN}SET LOCAL synchronous_commit = off; "
_FLUSH = (
    f"{_BEGIN_PLAIN}DO $$ BEGIN PERFORM {_DURABLY} {_IF_NOT}"
    "PERFORM pg_logical_emit_message(true, 'doyen', ''); END $$; COMMIT"
)
"""The log is written in order: once this is durable, so is what was committed before."""
_TIMELINE = "CAST(CAST('x' || LEFT(pg_walfile_name(pg_current_wal_lsn()), 8) AS bit(32)) AS bigint)"

_STARTED = "CAST(CAST(EXTRACT(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint) AS text)"
_WHO = f"SELECT {_STARTED}, '', 0, NOT pg_is_in_recovery()"
_WHO_OF_A_TIMELINE = (
    f"SELECT {_STARTED}, CAST(system_identifier AS text),"
    f" CASE WHEN pg_is_in_recovery() THEN 0 ELSE {_TIMELINE} END, NOT pg_is_in_recovery()"
    " FROM pg_control_system()"
)
"""Each failover begins a timeline: of two primaries, the one on the earlier has been deposed."""

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

_STANDBY = ("25006", "0A000", "55000")
"""What a server in recovery says to a write, to BEGIN READ WRITE, and to a query of its log."""

_Connection = AsyncConnection[Any]


async def open_store(url: StoreURL, context: Context) -> PostgreSQLStore:
    """Open the store at `url`, creating its schema if there is none."""
    url.refuse_unknown(*_OPTIONS)
    asked = _Asked.of(url)
    floor = token_floor(url)
    primary = Primary(_WHO)
    work = _PgLink(url, primary)
    try:
        found = await _look_around(work, primary)
        if found.pooled and asked.notify == "listen" and asked.listen is None:
            raise ConfigError(
                f"notify=listen: a pooler stands before {work.where}, and through it nothing can"
                " be heard; say where to listen (listen=postgresql://...), or notify=poll"
            )
        await _make_tables(work, asked.schema)
    except BaseException:
        await work.close()
        raise
    store = PostgreSQLStore(url, context, asked, found, work, primary)
    await store.open(floor)
    return store


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options of the URL, checked."""

    schema: str
    notify: str | None
    listen: StoreURL | None
    poll_s: float

    @classmethod
    def of(cls, url: StoreURL) -> _Asked:
        schema = url.options.get("schema", "doyen")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", schema):
            raise ConfigError(
                f"schema is a name of at most 63 letters, digits and underscores, not {schema!r}"
            )
        notify = url.options.get("notify")
        if notify not in (None, "listen", "poll"):
            raise ConfigError(f"notify is listen or poll, not {notify!r}")
        listen = None
        if "listen" in url.options:
            listen = StoreURL.parse(url.options["listen"])
            if listen.parts.scheme != url.parts.scheme:
                raise ConfigError(f"listen is a postgresql:// URL, not {listen.text!r}")
            listen.refuse_unknown("connect_timeout_s", "tls", "ca", "cert", "key", "sslmode")
            if notify == "poll":
                raise ConfigError("notify=poll does not listen: leave out one of the two")
        return cls(
            schema=schema,
            notify=notify,
            listen=listen,
            poll_s=number_of(url, "poll_s", _POLL_S, 0.005, 10),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the server is like."""

    version: int
    pooled: bool
    timelines: bool


async def _look_around(link: _PgLink, primary: Primary) -> _Found:
    connection = await link.connected()
    version, announced = connection.info.server_version, connection.info.backend_pid
    if version < _OLDEST:
        raise StoreUnusable(
            f"{link.where} runs PostgreSQL {version // 10000}; doyen needs 12 or later"
        )
    ((pid,),) = await link.read("SELECT pg_backend_pid()", {})
    try:
        await link.read(_WHO_OF_A_TIMELINE, {})
        await link.read(_FLUSH, {})
        primary.who = _WHO_OF_A_TIMELINE
        link.early = timelines = True
    except (StoreUnusable, WrongServer):
        timelines = False  # a relative of PostgreSQL that keeps another kind of log
    return _Found(version=version, pooled=pid != announced, timelines=timelines)


async def _make_tables(link: _PgLink, schema: str) -> None:
    names = _names(schema)
    for _ in range(_CREATIONS):
        query = "SELECT to_regnamespace(%(schema)s) IS NULL, to_regclass(%(meta)s) IS NULL"
        ((no_schema, no_tables),) = await link.read(query, names)
        if not no_tables:
            ((layout,),) = await link.read(f"SELECT layout FROM {names['meta']}", {})
            return check_layout(layout, f"the schema {schema} at {link.where}")
        script = f"CREATE SCHEMA {names['schema']};{_SCHEMA}" if no_schema else _SCHEMA
        try:
            await link.write(script.format(**names, channel=schema, layout=LAYOUT, kept=KEPT), {})
        except StoreUnusable as error:
            if isinstance(error.__cause__, errors.InsufficientPrivilege):
                raise StoreUnusable(
                    f"{link.where}: doyen may not create its tables ({_one_line(error.__cause__)}):"
                    f" have an administrator say CREATE SCHEMA {schema} AUTHORIZATION <our role>"
                ) from error
            if not isinstance(error.__cause__, _ANOTHER_WAS_FIRST):
                raise
    raise StoreUnavailable(f"{link.where}: the schema {schema} could not be created")


def _names(schema: str) -> dict[str, str]:
    tables = {name: f'"{schema}".{name}' for name in ("meta", "leases", "entries", "changes")}
    return {"schema": f'"{schema}"', **tables}


def _parameters(url: StoreURL) -> dict[str, Any]:
    """What psycopg is to connect with."""
    address = SqlAddress.of(url)
    given: dict[str, Any] = {
        "user": address.user,
        "password": address.password,
        "dbname": address.database or None,
        "connect_timeout": round(_connect_timeout_s(url)),
        "application_name": "doyen",
        "gssencmode": "disable",
        "keepalives_idle": 10,
        "keepalives_interval": 3,
        "keepalives_count": 3,
        **_tls(url),
    }
    return {name: value for name, value in given.items() if value is not None}


def _connect_timeout_s(url: StoreURL) -> float:
    return number_of(url, "connect_timeout_s", 3, 2, 60)


def _tls(url: StoreURL) -> dict[str, str | None]:
    files = {"sslrootcert": "ca", "sslcert": "cert", "sslkey": "key"}
    tls, mode = url.options.get("tls"), url.options.get("sslmode")
    if tls not in (None, "true", "false"):
        raise ConfigError(f"tls is true or false, not {tls!r}")
    if tls is not None and mode is not None:
        raise ConfigError("tls and sslmode say the same thing: give one of them")
    if tls is not None:
        mode = "verify-full" if tls == "true" else "disable"
    given = {name: url.options[option] for name, option in files.items() if option in url.options}
    if given and mode in (None, "disable"):
        raise ConfigError("ca, cert and key go with tls=true")
    return {"sslmode": mode, **given}


class _PgLink(SqlConnection[_Connection]):
    """A connection to PostgreSQL, which is known to have ended when it ends.

    One that listens tells `heard` the path of every change, and None each time it has begun to
    listen: what happened before that was not heard.
    """

    port = 5432

    def __init__(
        self,
        url: StoreURL,
        primary: Primary,
        channel: str = "",
        heard: Callable[[str | None], None] | None = None,
    ) -> None:
        super().__init__("PostgreSQL", SqlAddress.of(url), _connect_timeout_s(url), primary)
        self.early = False
        """Whether what frees something may be seen before it is durable."""
        self._parameters = _parameters(url)
        self._channel = channel
        self._heard = heard
        self._lost = asyncio.Event()
        self._used_at = 0.0
        self._idle: tuple[_Connection, int] | None = None

    def transaction(self, script: str, *, early: bool) -> str:
        if early and self.early:
            return f"{_BEGIN_EARLY}{script}; COMMIT; {_FLUSH}"
        return f"{_BEGIN}{script}; COMMIT"

    async def reach(self, host: str, port: int) -> _Connection:
        try:
            connection = await AsyncConnection.connect(
                **self._parameters,
                host=host or None,
                port=port,
                target_session_attrs="read-write",
                autocommit=True,
                prepare_threshold=None,
                cursor_factory=AsyncClientCursor,
            )
        except psycopg.Error as error:
            raise _no_connection(error, self.where) from error
        heard = self._heard
        if heard is not None:
            connection.add_notify_handler(lambda notify: heard(notify.payload))
        return connection

    def greeting(self) -> str:
        return "" if self._heard is None else f'LISTEN "{self._channel}"; '

    def arrived(self, connection: _Connection) -> None:
        self._await_word(connection)
        if self._heard is not None:
            self._heard(None)

    async def execute(self, connection: _Connection, text: str, given: Given) -> list[list[Row]]:
        self._stop_awaiting(connection)
        self._used_at = self._loop.time()
        answers: list[list[Row]] = []
        try:
            async with connection.cursor() as cursor:
                await cursor.execute(text.encode(), given or None)
                while True:
                    if cursor.description is not None:
                        answers.append(await cursor.fetchall())
                    if not cursor.nextset():
                        return answers
        except psycopg.Error:
            if connection.info.transaction_status == TransactionStatus.INERROR:
                await connection.execute("ROLLBACK")
            raise
        finally:
            if self._connection is connection and not connection.closed:
                self._await_word(connection)

    def translate(self, error: Exception) -> Exception:
        if not isinstance(error, psycopg.Error):
            return error
        state, cause = error.sqlstate or "", _one_line(error)
        if state.startswith(("08", "57P")):
            return SqlConnectionLost(cause)
        if not state:
            # libpq makes errors of its own, which psycopg passes on as plain DatabaseErrors.
            lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
            return (
                SqlConnectionLost(cause) if lost or type(error) is psycopg.DatabaseError else error
            )
        if state in ("40001", "40P01"):
            return TryAgain(cause)
        if state in _STANDBY:
            return WrongServer(f"{self.where} has become a standby ({cause})")
        if state == "55P03":
            return StoreUnavailable(
                f"{self.where}: for {_LOCK_TIMEOUT_MS} ms another transaction has locked doyen's"
                " tables; look in pg_stat_activity for one that stays open"
            )
        if state[:2] in ("53", "57", "58"):
            return StoreUnavailable(f"{self.where}: {cause}; nothing was written")
        if state == "42501":
            return StoreUnusable(
                f"{self.where}: {cause}; the role needs USAGE on doyen's schema, and SELECT,"
                " INSERT, UPDATE and DELETE on its tables"
            )
        if state in ("42P01", "3F000"):
            return StoreUnusable(
                f"{self.where}: doyen's tables are gone ({cause}): connect again, with token_floor"
                " above the highest token ever given"
            )
        return StoreUnusable(f"{self.where}: {cause}")

    def hang_up(self, connection: _Connection) -> None:
        self._stop_awaiting(connection)
        self._lost.set()
        if connection.closed:
            return
        if connection.info.transaction_status == TransactionStatus.ACTIVE:
            # The call under way meets the end of the stream at once, and ends in its own way.
            with suppress(OSError, psycopg.Error):
                stream = socket.socket(fileno=os.dup(connection.pgconn.socket))
                with stream:
                    stream.shutdown(socket.SHUT_RDWR)
        else:
            connection.pgconn.finish()

    def usable(self, connection: _Connection) -> bool:
        return not connection.closed

    def _await_word(self, connection: _Connection) -> None:
        descriptor = connection.pgconn.socket
        self._idle = connection, descriptor
        self._loop.add_reader(descriptor, self._on_word, connection)

    def _stop_awaiting(self, connection: _Connection) -> None:
        # By the number kept, since libpq may have closed it by now.
        if self._idle is not None and self._idle[0] is connection:
            self._loop.remove_reader(self._idle[1])
            self._idle = None

    def _on_word(self, connection: _Connection) -> None:
        """Unasked, the server has something to say: a notification, or goodbye."""
        try:
            connection.pgconn.consume_input()
            while notify := connection.pgconn.notifies():
                if self._heard is not None:
                    self._heard(notify.extra.decode())
        except psycopg.Error:
            self.drop(connection)

    async def listen(self, ping_after_s: float) -> None:
        """Keep the connection up, and see that it is alive, until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(ping_after_s):
                    await self._lost.wait()
            except TimeoutError:
                pass
            self._lost.clear()
            if self._connection and self._loop.time() - self._used_at < ping_after_s:
                continue
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self.read("SELECT 1", {})
                pause_s = _FIRST_PAUSE_S
            except Exception as error:
                if not isinstance(error, StoreError | TimeoutError):
                    log.exception("listening to %s failed; trying again", self.where)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._lost.set()


class PostgreSQLStore(RelationalStore):
    """One handle on a schema in PostgreSQL."""

    def __init__(
        self,
        url: StoreURL,
        context: Context,
        asked: _Asked,
        found: _Found,
        work: _PgLink,
        primary: Primary,
    ) -> None:
        self._asked = asked
        self._found = found
        polls = asked.notify == "poll" or (found.pooled and asked.listen is None)
        shares = not polls and asked.listen is None
        ears = (asked.schema, self._heard)
        pulse = _PgLink(url, primary, *ears) if shares else _PgLink(url, primary)
        self._ears: _PgLink | None = None
        if not polls:
            self._ears = pulse if shares else _PgLink(asked.listen or url, primary, *ears)
        self._listening: asyncio.Task[None] | None = None
        names = _names(asked.schema)
        numbering = "revision = revision + 1"
        if found.timelines:
            numbering = f"revision = GREATEST(revision, ({_TIMELINE} - 1) * {_TIMELINE_STEP}) + 1"
        dialect = Dialect(
            meta=names["meta"],
            leases=names["leases"],
            entries=names["entries"],
            changes=names["changes"],
            clock=CLOCK,
            numbering=numbering,
            incarnation=_STARTED,
            logs=False,
        )
        super().__init__(
            dialect, context, work=work, pulse=pulse, poll_s=asked.poll_s if polls else None
        )

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        self._require_usable()
        if self._ears is not None:
            await self._ears.connected()
            if self._listening is None:
                ping_s = _PING_PULSE_AFTER_S if self._ears is self._pulse else _PING_AFTER_S
                listening = self._ears.listen(ping_s)
                self._listening = asyncio.get_running_loop().create_task(listening)
        return await super().watch(scope, notify)

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        await super().close()

    def _links(self) -> Iterable[SqlConnection[Any]]:
        separate = self._ears is not None and self._ears is not self._pulse
        return (*super()._links(), *((self._ears,) if separate and self._ears else ()))

    async def diagnose(self) -> Sequence[Finding]:
        self._require_usable()
        ((version, fsync, full, lagging, connections),) = await self._work.read(_FACTS, {})
        facts = PostgreSQLFacts(
            version=str(version),
            pooled=self._found.pooled,
            poll_s=self.capabilities.notice_s or None,
            fsync=fsync == "on",
            full_page_writes=full == "on",
            timelines=self._found.timelines,
            lagging_standbys=int(lagging),
            connections=int(connections),
        )
        return list(findings_of_postgresql(facts))

    def _heard(self, path: str | None) -> None:
        if path is None:
            self._lookout.all_changed()
        else:
            self._lookout.changed(path)


def _no_connection(error: psycopg.Error, where: str) -> StoreError:
    """Why no connection came about. libpq gives no code for it, so its words decide."""
    cause = _one_line(error)
    if re.search(r"password|authentication|role .* does not exist|pg_hba", cause):
        return StoreUnusable(
            f"PostgreSQL at {where} does not let us in: {cause}; check the URL's user and password"
        )
    if re.search(r"database .* does not exist", cause):
        return StoreUnusable(f"PostgreSQL at {where}: {cause}; create it, or correct the URL")
    return StoreUnavailable(cause)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
