"""`mysql://user:password@h1:p1,h2:p2/database`: MySQL 8.0 and later, MariaDB 10.5 and later.

    ?prefix=doyen_           the prefix of the tables' names; they are created if missing
    ?token_floor=N           raise the revision counter to N, after a move or a restore
    ?poll_s=0.05             how often to ask for changes while anything is watched
    ?connect_timeout_s=3     how long a host may take to answer before the next one is tried
    ?tls=true&ca=…&cert=…&key=…   encrypted, the server's certificate verified

PyMySQL's names are understood too: ssl_ca, ssl_cert, ssl_key, connect_timeout. charset is ignored.

These engines have no notifications, so doyen asks for changes since the last time, every `poll_s`
while anything is watched, on the connection for ordinary calls. Without changes this reads one row
by its primary key. Polling takes at most a fifth of the time.

A candidate in line does not wait for the next query. The session that has a ticket holds a named
lock for it, and releases the lock when it deletes the ticket. The candidate behind waits for that
lock on a connection of its own (`TicketBell`). To get it is a hint that the ticket is gone. The
lock is also released when the holder's connection ends, although the lease goes on. Then doyen asks
every 1 to 5 ms for one ttl, because a warden may end the lease. Where servers do not share their
locks, as in Galera, a wait does not block, and means nothing.

Isolation is READ COMMITTED, set in every transaction: what a statement reads after the counter was
advanced is the present state. Each transaction is one message of several statements, none of which
fails in normal operation. Of several hosts, the first that can be written to is used.

A revision is never below the server's microseconds since 1970. The server that gave the last one is
stored beside it, and another server skips 2**40 revisions before it gives its first. So tokens grow
even if a replica takes over that lacks the last commits, and even if its clock is behind, unless it
lacks the commits of 12 days. Where several servers accept writes and certify them with each other
(Galera, group replication), no commit is missing, and all of them count as one server.

Imports asyncmy, the port and its own package.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from doyen.errors import ConfigError, StoreUnavailable, StoreUnusable
from doyen.model import Finding
from doyen.stores.kit import url as options
from doyen.stores.kit.failover import ConnectionLost, connect_cause
from doyen.stores.kit.url import Host
from doyen.stores.port import Context, StoreURL, Watch
from doyen.stores.sql.connection import (
    Given,
    Primary,
    Row,
    ServerConnection,
    SqlConnection,
    SqlEngine,
    TransactionUndone,
    WrongServer,
    release_frames,
)
from doyen.stores.sql.diagnosis import findings_of_mysql
from doyen.stores.sql.store import LAYOUT, RelationalStore, check_layout, is_ticket

with options.requires("mysql", "asyncmy"):
    import asyncmy
    from asyncmy.connection import Connection
    from asyncmy.constants.CLIENT import MULTI_STATEMENTS
    from asyncmy.errors import MySQLError

__all__ = ["CLOCK", "MySQLStore", "open_store"]

CLOCK = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_OLDEST, _OLDEST_MARIADB = (8, 0), (10, 5)
_POLL_S = 0.05
_LOCK_TIMEOUT_S = 1
_BEGIN = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION; "
_OF_OTHERS = {
    "ssl_ca": "ca",
    "ssl_cert": "cert",
    "ssl_key": "key",
    "connect_timeout": "connect_timeout_s",
}
_OPTIONS = ("prefix", "token_floor", "poll_s", "connect_timeout_s", *options.TLS_OPTIONS)

_TABLES = (
    "CREATE TABLE IF NOT EXISTS {leases} (id VARBINARY(40) PRIMARY KEY, ttl_us BIGINT NOT NULL,"
    " counter BIGINT NOT NULL, renewed_us BIGINT NOT NULL) ENGINE = InnoDB",
    "CREATE TABLE IF NOT EXISTS {entries} (path VARBINARY(1024) PRIMARY KEY,"
    " value LONGBLOB NOT NULL, revision BIGINT NOT NULL, version BIGINT NOT NULL,"
    " lease VARBINARY(40), KEY by_lease (lease)) ENGINE = InnoDB ROW_FORMAT = DYNAMIC",
    "CREATE TABLE IF NOT EXISTS {changes} (position BIGINT, path VARBINARY(1024),"
    " PRIMARY KEY (position, path)) ENGINE = InnoDB ROW_FORMAT = DYNAMIC",
    "CREATE TABLE IF NOT EXISTS {meta} (one TINYINT PRIMARY KEY, layout INT NOT NULL,"
    " revision BIGINT NOT NULL, position BIGINT NOT NULL, server VARBINARY(255) NOT NULL)"
    " ENGINE = InnoDB",
    "INSERT INTO {meta} (one, layout, revision, position, server) VALUES (1, {layout}, 0, 0, '')"
    " ON DUPLICATE KEY UPDATE one = 1",
)
_ADD_SERVER = "ALTER TABLE {meta} ADD COLUMN server VARBINARY(255) NOT NULL DEFAULT ''"
"""Earlier versions of doyen created `meta` without it. Their clients may go on beside newer ones,
since they name the columns that they use."""
_SERVER = "CONCAT(@@hostname, ':', @@port, '/', @@server_id)"
_IDENTITY = f"SELECT {_SERVER}, '', 0, CONCAT(@@global.read_only) IN ('0', 'OFF')"
_SKIPPED = 1 << 40
"""How many revisions a server skips that takes over from another: in microseconds, 12 days."""
_GROUPS = (
    "SHOW GLOBAL VARIABLES WHERE variable_name = 'wsrep_on' AND value = 'ON'"
    " OR variable_name = 'group_replication_group_name' AND value <> ''"
)
_LOCK = "CONCAT('doyen:', SHA1(CONCAT(DATABASE(), '/{prefix}', {path})))"
"""The name of the lock for a ticket. Names have at most 64 characters, for the whole server."""
_TICKET_PATH = "(SELECT CONCAT(%(line)s, LPAD(CONCAT(revision), 20, '0')) FROM {meta})"
_WAIT_S = 30
_WAIT = f"SELECT GET_LOCK({{lock}}, {_WAIT_S}); DO RELEASE_LOCK({{lock}})"
_BLOCKED_S = 0.01
"""A wait that ends sooner may not have waited for another connection."""
_RING_AGAIN_S = 1.0
_RUNG = 100
_FACTS = "SELECT @@global.innodb_flush_log_at_trx_commit, @@global.log_bin, @@global.sync_binlog"

_CONNECTION_LOST = {1053, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 4031}
_READ_ONLY = {1047, 1290, 1836, 3100}
_NOT_ALLOWED = {1044, 1142, 1143, 1227, 1370}
_TEMPORARY = {1021, 1037, 1038, 1041, 1114, 1203, 1205, 1226, 1317, 3024}
_LOGIN_REFUSED = {1044, 1045, 1130, 1698}
_NO_TABLE, _NO_DATABASE, _DEADLOCK, _LOCK_TIMEOUT, _STATEMENT_LOG = 1146, 1049, 1213, 1205, 1665
_NO_COLUMN, _COLUMN_EXISTS = 1054, 1060


async def open_store(url: StoreURL, context: Context) -> MySQLStore:
    """Open the store at `url`, creating its tables if there are none and the context allows it."""
    url = _understood(url)
    url.refuse_unknown(*_OPTIONS)
    floor = options.whole_number(url, "token_floor")
    prefix = url.options.get("prefix", "doyen_")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,49}", prefix):
        raise ConfigError(
            f"prefix is a name of at most 50 letters, digits and underscores, not {prefix!r}"
        )
    names = {name: f"`{prefix}{name}`" for name in ("meta", "leases", "entries", "changes")}
    poll_s = options.number(url, "poll_s", _POLL_S, 0.005, 10)
    primary = Primary(_IDENTITY)
    connection = SqlConnection(AsyncmyEngine(url), primary)
    try:
        version = await _check_version(connection)
        await _create_tables(connection, names, prefix, create=context.create)
        grouped = bool(await connection.read(_GROUPS, {}))
    except BaseException:
        await connection.close()
        raise
    server = "'group'" if grouped else _SERVER
    lock = partial(_LOCK.format, prefix=prefix)
    held = lock(path=_TICKET_PATH.format_map(names))
    step = f"IF(server IN ('', {server}), 1, {_SKIPPED})"
    store = MySQLStore(
        {
            **names,
            "clock": CLOCK,
            # MySQL evaluates assignments from left to right.
            "numbering": f"revision = GREATEST(revision + {step}, {CLOCK}), server = {server}",
            "incarnation": _SERVER,
            "hold": f"DO GET_LOCK({held}, 0); ",
            "ring": f"DO RELEASE_LOCK({lock(path='%(path)s')})",
            "ring_all": "DO RELEASE_ALL_LOCKS()",
        },
        context,
        logs=True,
        connection=connection,
        renewals=SqlConnection(AsyncmyEngine(url), primary),
        poll_s=poll_s,
    )
    store.version = version
    if not grouped:
        waiting = SqlConnection(AsyncmyEngine(url), primary)
        store.ring_with(TicketBell(waiting, _WAIT.format(lock=lock(path="%(path)s"))))
    await store.open(floor)
    return store


def _understood(url: StoreURL) -> StoreURL:
    """The URL with the options of PyMySQL and others under doyen's names."""
    tls = {} if "tls" in url.options or "ssl_ca" not in url.options else {"tls": "true"}
    url = options.renamed(url, _OF_OTHERS, ("charset", "collation"))
    return replace(url, options={**url.options, **tls})


async def _check_version(connection: SqlConnection) -> str:
    ((version,),) = await connection.read("SELECT VERSION()", {})
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    name, oldest = ("MySQL", _OLDEST)
    if "MariaDB" in version:
        name, oldest = ("MariaDB", _OLDEST_MARIADB)
    if number < oldest:
        raise StoreUnusable(
            f"{connection.where} runs {name} {version};"
            f" doyen needs {oldest[0]}.{oldest[1]} or later"
        )
    return f"{name} {version}"


async def _create_tables(
    connection: SqlConnection, names: dict[str, str], prefix: str, *, create: bool
) -> None:
    query = f"SELECT layout FROM {names['meta']}"
    try:
        rows = await connection.read(query, {})
    except _NoTable:
        rows = []
    if not rows and not create:
        raise StoreUnusable(
            f"{connection.where} has no tables {prefix}* of doyen, and a query creates none: no"
            " candidate has used this store yet; check the URL"
        )
    if not rows:
        for statement in _TABLES:
            await connection.read(statement.format(**names, layout=LAYOUT), {})
        rows = await connection.read(query, {})
    ((layout,),) = rows
    check_layout(layout, f"the tables {prefix}* at {connection.where}")
    try:
        await connection.read(f"SELECT server FROM {names['meta']}", {})
    except StoreUnusable as error:
        if _code(error.__cause__) != _NO_COLUMN:
            raise
        await _add_server(connection, names)


async def _add_server(connection: SqlConnection, names: dict[str, str]) -> None:
    """Adapt tables that an earlier version of doyen has created."""
    statement = _ADD_SERVER.format(**names)
    try:
        await connection.read(statement, {})
    except StoreUnusable as error:
        code = _code(error.__cause__)
        if code in _NOT_ALLOWED:
            raise StoreUnusable(
                f"{connection.where}: doyen's tables are of an earlier version, and this user may"
                f" not change them; have an administrator run: {statement}"
            ) from error
        if code != _COLUMN_EXISTS:  # unless another client has just added it
            raise


class _NoTable(StoreUnusable):
    """doyen's tables do not exist."""


class AsyncmyConnection(ServerConnection):
    """One connection of asyncmy."""

    def __init__(self, connection: Connection) -> None:
        self._asyncmy: Connection | None = connection

    @property
    def usable(self) -> bool:
        connected = self._asyncmy is not None and self._asyncmy.connected
        return connected and not getattr(self._asyncmy, "_stream_broken", False)

    async def execute(self, text: str, given: Given) -> list[list[Row]]:
        results: list[list[Row]] = []
        try:
            if self._asyncmy is None:
                raise ConnectionResetError("the connection was dropped")
            async with self._asyncmy.cursor() as cursor:
                await cursor.execute(text, dict(given) or None)
                while True:
                    if cursor.description is not None:
                        results.append(list(await cursor.fetchall()))
                    if not await cursor.nextset():
                        return results
        except MySQLError:
            if self._asyncmy is not None and self._asyncmy.connected and text.startswith(_BEGIN):
                await self._asyncmy.rollback()
            raise

    def hang_up(self) -> None:
        if self._asyncmy is not None:
            self._asyncmy.close()
        # asyncmy keeps the error that ended a connection, and with it this object. Without the
        # reference to asyncmy's connection, the read buffer of 256 KiB is freed at once.
        self._asyncmy = None

    async def close(self) -> None:
        try:
            async with asyncio.timeout(0.5):
                if self._asyncmy is not None:
                    await self._asyncmy.ensure_closed()
        except (MySQLError, OSError, TimeoutError):
            self.hang_up()


class AsyncmyEngine(SqlEngine):
    """MySQL or MariaDB, through asyncmy."""

    name = "MySQL"

    def __init__(self, url: StoreURL) -> None:
        super().__init__(url, 3306)
        if not self.database:
            raise ConfigError(
                f"{url.parts.scheme}:// needs a database: {url.parts.scheme}://user@host/database"
            )
        tls = options.tls_files(url, implied=False, combined=True)
        self._tls = tls.context() if tls else None

    def transaction(self, script: str, *, early: bool) -> str:
        return f"{_BEGIN}{script}; COMMIT"

    async def connect(self, host: Host) -> AsyncmyConnection:
        try:
            async with asyncio.timeout(self.timeout_s):
                connection = await asyncmy.connect(
                    host=host.name or "localhost",
                    port=host.port,
                    user=self.user or None,
                    password=self.password or "",
                    database=self.database,
                    charset="utf8mb4",
                    autocommit=True,
                    binary_prefix=True,
                    client_flag=MULTI_STATEMENTS,
                    connect_timeout=round(self.timeout_s),
                    # asyncmy would write the server's notes to standard error.
                    init_command=f"SET SESSION innodb_lock_wait_timeout = {_LOCK_TIMEOUT_S},"
                    f" lock_wait_timeout = {_LOCK_TIMEOUT_S}, sql_notes = 0",
                    ssl=self._tls,
                )
        except BaseException as error:
            release_frames(error)
            if not isinstance(error, MySQLError):
                raise
            code = _code(error)
            if code in _LOGIN_REFUSED or code == _NO_DATABASE:
                raise StoreUnusable(
                    f"{host.name or 'localhost'}:{host.port} refuses the login: {_cause(error)};"
                    " check the URL's user, password and database"
                ) from error
            raise StoreUnavailable(_cause(error)) from error
        return AsyncmyConnection(connection)

    def translate(self, error: Exception) -> Exception:
        if isinstance(error, OSError):
            return ConnectionLost(str(error))
        if not isinstance(error, MySQLError):
            return error
        code, cause = _code(error), _cause(error)
        if 2000 <= code < 3000 or code in _CONNECTION_LOST or not code:
            return ConnectionLost(cause)
        if code == _DEADLOCK:
            return TransactionUndone(cause)
        if code in _READ_ONLY:
            return WrongServer(f"{self.where} can no longer be written to ({cause})")
        if code == _LOCK_TIMEOUT:
            return StoreUnavailable(
                f"{self.where}: for {_LOCK_TIMEOUT_S} s another transaction has locked doyen's"
                " tables; look in information_schema.innodb_trx for one that stays open"
            )
        if code in _TEMPORARY:
            return StoreUnavailable(f"{self.where}: {cause}; nothing was written")
        if code in _NOT_ALLOWED:
            return StoreUnusable(
                f"{self.where}: {cause}; the user needs SELECT, INSERT, UPDATE and DELETE on"
                " doyen's tables, and CREATE to make them"
            )
        if code == _NO_TABLE:
            return _NoTable(
                f"{self.where}: doyen's tables are gone ({cause}): connect again, with token_floor"
                " above the highest token ever given"
            )
        if code == _STATEMENT_LOG:
            return StoreUnusable(
                f"{self.where}: {cause}: set binlog_format to ROW or MIXED on the server"
            )
        return StoreUnusable(f"{self.where}: {cause}")


def _code(error: BaseException | None) -> int:
    code = error.args[0] if error is not None and error.args else 0
    return code if isinstance(code, int) else 0


def _cause(error: BaseException) -> str:
    return " ".join(connect_cause(error.args[-1] if error.args else error).split())


class TicketBell:
    """Waits for the lock of one ticket at a time. Which ones others hold is not known before."""

    def __init__(self, connection: SqlConnection, statement: str) -> None:
        self.rang: Callable[[str], None] = lambda ticket: None
        """Called with a ticket whose lock was released."""
        self._connection = connection
        self._statement = statement
        self._wanted: dict[str, None] = {}
        self._waiting: asyncio.Task[None] | None = None
        self._awaited = ""

    def wait_for(self, ticket: str) -> None:
        self._wanted[ticket] = None
        if self._waiting is None or self._waiting.done():
            self._waiting = asyncio.get_running_loop().create_task(self._wait())

    def forget(self, ticket: str) -> None:
        self._wanted.pop(ticket, None)
        if ticket == self._awaited and self._waiting is not None:
            self._waiting.cancel()  # which ends the connection
            self._waiting = None
            if self._wanted:
                self.wait_for(next(iter(self._wanted)))

    def close(self) -> None:
        self._wanted.clear()
        if self._waiting is not None:
            self._waiting.cancel()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        while self._wanted:
            self._awaited = ticket = next(iter(self._wanted))
            try:
                began = loop.time()
                ((granted,),) = await self._connection.read(self._statement, {"path": ticket})
                took_s = loop.time() - began
            except StoreUnavailable:
                await asyncio.sleep(_RING_AGAIN_S)
                continue
            except StoreUnusable:
                return  # this server does not let us; changes are asked for
            finally:
                self._awaited = ""
            if granted == 0 and ticket in self._wanted:  # the next one's turn
                del self._wanted[ticket]
                self._wanted[ticket] = None
            else:
                self._wanted.pop(ticket, None)
                if granted == 1 and took_s >= _BLOCKED_S:
                    self.rang(ticket)


class MySQLStore(RelationalStore):
    """One handle on doyen's tables in a database of MySQL or MariaDB."""

    version = ""
    _bell: TicketBell | None = None

    def ring_with(self, bell: TicketBell) -> None:
        """Be woken by this bell when a ticket is deleted."""
        self._bell = bell
        self._rung: dict[str, None] = {}
        """Tickets whose lock was released: there is nothing more to wait for."""
        bell.rang = self._rang
        self._observer.unwatched = bell.forget

    def _rang(self, ticket: str) -> None:
        self._rung[ticket] = None
        if len(self._rung) > _RUNG:
            del self._rung[next(iter(self._rung))]
        self._observer.changed(ticket)
        self._observer.expect(ticket)

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        watch = await super().watch(scope, notify)
        if self._bell is not None and is_ticket(scope) and scope not in self._rung:
            self._bell.wait_for(scope)
        return watch

    async def _release(self) -> None:
        if self._bell is not None:
            self._bell.close()
        await super()._release()

    async def diagnose(self) -> Sequence[Finding]:
        ((flush, logs, sync),) = await self._connection.read(_FACTS, {})
        galera = await self._connection.read("SHOW GLOBAL VARIABLES LIKE 'wsrep_on'", {})
        return list(
            findings_of_mysql(
                version=self.version,
                poll_s=self.capabilities.notice_s,
                flush_log=int(flush),
                sync_binary_log=int(sync) if logs else None,
                galera=bool(galera) and galera[0][1] == "ON",
            )
        )
