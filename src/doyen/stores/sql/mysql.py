"""`mysql://user:password@h1:p1,h2:p2/database`: MySQL 8.0 and later, MariaDB 10.5 and later.

    ?prefix=doyen_           what the names of the tables begin with; they are created if missing
    ?token_floor=N           raise the revision counter to N, after a move or a restore
    ?poll_s=0.05             how often to ask for changes while anything is watched
    ?connect_timeout_s=3     when a host that does not answer is passed over
    ?tls=true&ca=…&cert=…&key=…   encrypted, the server's certificate verified

These engines cannot tell their clients of changes, so they are asked: what has changed since the
last time, which is one row by its primary key if nothing has, every `poll_s`, on the connection for
ordinary calls, only while something is watched; and never so often that the asking takes more than
a fifth of the time. Locks by name could wake one waiter on
one connection each, and killing another's sleep can hit the wrong query: neither is used.

Isolation is READ COMMITTED, stated for every transaction: what a statement reads after the counter
was advanced is then what stands there. Each transaction is one message of several statements, none
of which fails in the course of things; a row of several hosts is tried for the first that can be
written to.

A revision is never below the server's microseconds since 1970. The server that gave the last one
is kept beside it, and another server leaves out 2**40 of them before it gives its first. So tokens
grow even if a replica takes over that lacks the last commits, and even if its clock is behind,
unless it lacks the commits of 12 days. Where several servers take writes and certify them with each
other (Galera, group replication), no commit is lacking, and all of them count as one server.

Imports asyncmy, the port and its own package.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Sequence

from doyen.errors import ConfigError, StoreUnavailable, StoreUnusable
from doyen.model import Finding
from doyen.stores.port import Context, StoreURL
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
from doyen.stores.sql.diagnosis import MySQLFacts, findings_of_mysql
from doyen.stores.sql.store import (
    LAYOUT,
    Dialect,
    RelationalStore,
    check_layout,
    number_of,
    token_floor,
)

try:
    import asyncmy
    from asyncmy.connection import Connection
    from asyncmy.constants.CLIENT import MULTI_STATEMENTS
    from asyncmy.errors import MySQLError
except ImportError as missing:
    raise ConfigError(
        'mysql:// needs asyncmy, which is not installed: pip install "doyen[mysql]"'
    ) from missing

__all__ = ["CLOCK", "MySQLStore", "open_store"]

CLOCK = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_OLDEST, _OLDEST_MARIADB = (8, 0), (10, 5)
_POLL_S = 0.05
_LOCK_TIMEOUT_S = 1
_BEGIN = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION; "
_OPTIONS = ("prefix", "token_floor", "poll_s", "connect_timeout_s", "tls", "ca", "cert", "key")

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
"""Earlier versions of doyen made `meta` without it. Their clients may go on beside newer ones: they
name the columns that they use."""
_SERVER = "CONCAT(@@hostname, ':', @@port, '/', @@server_id)"
_WHO = f"SELECT {_SERVER}, '', 0, CONCAT(@@global.read_only) IN ('0', 'OFF')"
_LEFT_OUT = 1 << 40
"""How many revisions a server leaves out that takes over from another: in microseconds, 12 days."""
_GROUPS = (
    "SHOW GLOBAL VARIABLES WHERE variable_name = 'wsrep_on' AND value = 'ON'"
    " OR variable_name = 'group_replication_group_name' AND value <> ''"
)
_FACTS = "SELECT @@global.innodb_flush_log_at_trx_commit, @@global.log_bin, @@global.sync_binlog"

_ENDED = {1053, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 4031}
_CANNOT_WRITE = {1047, 1290, 1836, 3100}
_NOT_ALLOWED = {1044, 1142, 1143, 1227, 1370}
_NOT_NOW = {1021, 1037, 1038, 1041, 1114, 1203, 1205, 1226, 1317, 3024}
_STRANGER = {1044, 1045, 1130, 1698}
_NO_TABLE, _NO_DATABASE, _DEADLOCK, _LOCK_TIMEOUT, _STATEMENT_LOG = 1146, 1049, 1213, 1205, 1665
_NO_COLUMN, _COLUMN_IS_THERE = 1054, 1060


async def open_store(url: StoreURL, context: Context) -> MySQLStore:
    """Open the store at `url`, creating its tables if there are none."""
    url.refuse_unknown(*_OPTIONS)
    floor = token_floor(url)
    prefix = url.options.get("prefix", "doyen_")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,49}", prefix):
        raise ConfigError(
            f"prefix is a name of at most 50 letters, digits and underscores, not {prefix!r}"
        )
    names = {name: f"`{prefix}{name}`" for name in ("meta", "leases", "entries", "changes")}
    poll_s = number_of(url, "poll_s", _POLL_S, 0.005, 10)
    primary = Primary(_WHO)
    work = _MyLink(url, primary)
    try:
        version = await _check_version(work)
        await _make_tables(work, names, prefix)
        grouped = bool(await work.read(_GROUPS, {}))
    except BaseException:
        await work.close()
        raise
    giver = "'group'" if grouped else _SERVER
    step = f"IF(server IN ('', {giver}), 1, {_LEFT_OUT})"
    dialect = Dialect(
        **names,
        clock=CLOCK,
        # Assignments are carried out from left to right.
        numbering=f"revision = GREATEST(revision + {step}, {CLOCK}), server = {giver}",
        incarnation=_SERVER,
        logs=True,
    )
    store = MySQLStore(dialect, context, work=work, pulse=_MyLink(url, primary), poll_s=poll_s)
    store.version = version
    await store.open(floor)
    return store


async def _check_version(link: _MyLink) -> str:
    ((version,),) = await link.read("SELECT VERSION()", {})
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    name, oldest = ("MySQL", _OLDEST)
    if "MariaDB" in version:
        name, oldest = ("MariaDB", _OLDEST_MARIADB)
    if number < oldest:
        raise StoreUnusable(
            f"{link.where} runs {name} {version}; doyen needs {oldest[0]}.{oldest[1]} or later"
        )
    return f"{name} {version}"


async def _make_tables(link: _MyLink, names: dict[str, str], prefix: str) -> None:
    query = f"SELECT layout FROM {names['meta']}"
    try:
        rows = await link.read(query, {})
    except _NoTable:
        rows = []
    if not rows:
        for statement in _TABLES:
            await link.read(statement.format(**names, layout=LAYOUT), {})
        rows = await link.read(query, {})
    ((layout,),) = rows
    check_layout(layout, f"the tables {prefix}* at {link.where}")
    try:
        await link.read(f"SELECT server FROM {names['meta']}", {})
    except StoreUnusable as error:
        if _code(error.__cause__) != _NO_COLUMN:
            raise
        await _add_server(link, names)


async def _add_server(link: _MyLink, names: dict[str, str]) -> None:
    """Adapt tables that an earlier version of doyen has made."""
    statement = _ADD_SERVER.format(**names)
    try:
        await link.read(statement, {})
    except StoreUnusable as error:
        code = _code(error.__cause__)
        if code in _NOT_ALLOWED:
            raise StoreUnusable(
                f"{link.where}: doyen's tables are of an earlier version, and we may not change"
                f" them; have an administrator say: {statement}"
            ) from error
        if code != _COLUMN_IS_THERE:  # or another was quicker
            raise


class _NoTable(StoreUnusable):
    """doyen's tables are not there."""


class _MyLink(SqlConnection[Connection]):
    """A connection to MySQL or MariaDB."""

    port = 3306

    def __init__(self, url: StoreURL, primary: Primary) -> None:
        self._address = SqlAddress.of(url)
        if not self._address.database:
            raise ConfigError(
                f"{url.parts.scheme}:// needs a database: {url.parts.scheme}://user@host/database"
            )
        timeout_s = number_of(url, "connect_timeout_s", 3, 1, 60)
        super().__init__("MySQL", self._address, timeout_s, primary)
        self._tls = _tls(url)

    def transaction(self, script: str, *, early: bool) -> str:
        return f"{_BEGIN}{script}; COMMIT"

    async def reach(self, host: str, port: int) -> Connection:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncmy.connect(
                    host=host or "localhost",
                    port=port,
                    user=self._address.user,
                    password=self._address.password or "",
                    database=self._address.database,
                    charset="utf8mb4",
                    autocommit=True,
                    binary_prefix=True,
                    client_flag=MULTI_STATEMENTS,
                    connect_timeout=round(self._timeout_s),
                    # Notes are of no use here, and the client writes them to standard error.
                    init_command=f"SET SESSION innodb_lock_wait_timeout = {_LOCK_TIMEOUT_S},"
                    f" lock_wait_timeout = {_LOCK_TIMEOUT_S}, sql_notes = 0",
                    ssl=self._tls,
                )
        except MySQLError as error:
            code = _code(error)
            if code in _STRANGER or code == _NO_DATABASE:
                raise StoreUnusable(
                    f"{host or 'localhost'}:{port} does not let us in: {_cause(error)}; check the"
                    " URL's user, password and database"
                ) from error
            raise StoreUnavailable(_cause(error)) from error

    async def execute(self, connection: Connection, text: str, given: Given) -> list[list[Row]]:
        answers: list[list[Row]] = []
        try:
            async with connection.cursor() as cursor:
                await cursor.execute(text, dict(given) or None)
                while True:
                    if cursor.description is not None:
                        answers.append(list(await cursor.fetchall()))
                    if not await cursor.nextset():
                        return answers
        except MySQLError:
            if connection.connected and text.startswith(_BEGIN):
                await connection.rollback()
            raise

    def translate(self, error: Exception) -> Exception:
        if isinstance(error, OSError):
            return SqlConnectionLost(str(error))
        if not isinstance(error, MySQLError):
            return error
        code, cause = _code(error), _cause(error)
        if 2000 <= code < 3000 or code in _ENDED or not code:
            return SqlConnectionLost(cause)
        if code == _DEADLOCK:
            return TryAgain(cause)
        if code in _CANNOT_WRITE:
            return WrongServer(f"{self.where} can no longer be written to ({cause})")
        if code == _LOCK_TIMEOUT:
            return StoreUnavailable(
                f"{self.where}: for {_LOCK_TIMEOUT_S} s another transaction has locked doyen's"
                " tables; look in information_schema.innodb_trx for one that stays open"
            )
        if code in _NOT_NOW:
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

    def hang_up(self, connection: Connection) -> None:
        connection.close()

    async def farewell(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(0.5):
                await connection.ensure_closed()
        except (MySQLError, OSError, TimeoutError):
            connection.close()

    def usable(self, connection: Connection) -> bool:
        return connection.connected and not getattr(connection, "_stream_broken", False)


def _tls(url: StoreURL) -> ssl.SSLContext | None:
    tls = url.options.get("tls", "false")
    files = {name: url.options[name] for name in ("ca", "cert", "key") if name in url.options}
    if tls not in ("true", "false"):
        raise ConfigError(f"tls is true or false, not {tls!r}")
    if tls == "false":
        if files:
            raise ConfigError("ca, cert and key go with tls=true")
        return None
    try:
        context = ssl.create_default_context(cafile=files.get("ca"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files.get("key"))
    except OSError as error:
        raise ConfigError(f"the certificates could not be loaded: {error}") from error
    return context


def _code(error: BaseException | None) -> int:
    code = error.args[0] if error is not None and error.args else 0
    return code if isinstance(code, int) else 0


def _cause(error: BaseException) -> str:
    return " ".join(str(error.args[-1] if error.args else error).split())


class MySQLStore(RelationalStore):
    """One handle on doyen's tables in a database of MySQL or MariaDB."""

    version = ""

    async def diagnose(self) -> Sequence[Finding]:
        self._require_usable()
        ((flush, logs, sync),) = await self._work.read(_FACTS, {})
        galera = await self._work.read("SHOW GLOBAL VARIABLES LIKE 'wsrep_on'", {})
        facts = MySQLFacts(
            version=self.version,
            poll_s=self.capabilities.notice_s,
            flush_log=int(flush),
            logs_binary=bool(logs),
            sync_binary_log=int(sync),
            galera=bool(galera) and galera[0][1] == "ON",
        )
        return list(findings_of_mysql(facts))
