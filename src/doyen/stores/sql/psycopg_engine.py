"""PostgreSQL through psycopg: connections, transactions, notifications, the meaning of errors.

While a connection is idle, the loop watches its socket. Notifications and the end of the connection
are therefore noticed at once.

Imports psycopg, its own package and the kit of the stores.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from doyen.errors import ConfigError, StoreError, StoreUnavailable, StoreUnusable
from doyen.events.log_lines import log_line
from doyen.stores.kit import url as options
from doyen.stores.kit.failover import ConnectionLost, connect_cause
from doyen.stores.kit.url import Host
from doyen.stores.port import StoreURL
from doyen.stores.sql.connection import (
    Given,
    Row,
    ServerConnection,
    SqlConnection,
    SqlEngine,
    TransactionUndone,
    WrongServer,
    release_frames,
)

with options.requires("postgresql", "psycopg"):
    import psycopg
    from psycopg import AsyncClientCursor, AsyncConnection, errors
    from psycopg.pq import TransactionStatus

__all__ = [
    "BEGIN_PLAIN",
    "FLUSH",
    "PASSED",
    "PostgreSQLConnection",
    "PsycopgEngine",
    "errors",
    "keep_connected",
    "one_line",
]

log = logging.getLogger("doyen")

PASSED = ("application_name", "channel_binding", "gssencmode", "options")
"""Options that are passed to libpq as they are."""

_LOCK_TIMEOUT_MS = 700
"""Below the request timeout of a session with the default ttl, so that the error has the cause."""
_PING_TIMEOUT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5

BEGIN_PLAIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;"
    f" SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}; "
)
_DURABLY = "set_config('synchronous_commit', 'on', true)"
_IF_NOT = "WHERE current_setting('synchronous_commit') = 'off'; "
_BEGIN = f"{BEGIN_PLAIN}SELECT {_DURABLY} {_IF_NOT}"
_BEGIN_EARLY = f"{BEGIN_PLAIN}SET LOCAL synchronous_commit = off; "
FLUSH = (
    f"{BEGIN_PLAIN}DO $$ BEGIN PERFORM {_DURABLY} {_IF_NOT}"
    "PERFORM pg_logical_emit_message(true, 'doyen', ''); END $$; COMMIT"
)
"""The write-ahead log is written in order: once this is durable, so are all earlier commits."""

_STANDBY = ("25006", "0A000", "55000")
"""Errors of a server in recovery: for a write, for BEGIN READ WRITE, for a query of its log."""


class PostgreSQLConnection(ServerConnection):
    """One connection of psycopg. After `begin`, its socket is watched while it is idle."""

    def __init__(
        self,
        connection: AsyncConnection[Any],
        notified: Callable[[str | None], None] | None,
        ended: Callable[[], None],
    ) -> None:
        self.psycopg = connection
        self._notified = notified
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._in_use = self._executing = self._hung_up = False
        self._watched: int | None = None
        """The descriptor that the loop watches. libpq may have closed it by itself."""
        if notified is not None:
            connection.add_notify_handler(lambda notify: notified(notify.payload))

    @property
    def usable(self) -> bool:
        return not self.psycopg.closed

    def begin(self) -> None:
        """What happened before was not notified."""
        self._in_use = True
        self._watch_socket()
        if self._notified is not None:
            self._notified(None)

    async def execute(self, text: str, given: Given) -> list[list[Row]]:
        self._unwatch_socket()
        self._executing = True
        results: list[list[Row]] = []
        try:
            async with self.psycopg.cursor() as cursor:
                await cursor.execute(text.encode(), given or None)
                while True:
                    if cursor.description is not None:
                        results.append(await cursor.fetchall())
                    if not cursor.nextset():
                        return results
        except psycopg.Error:
            if self.psycopg.info.transaction_status == TransactionStatus.INERROR:
                await self.psycopg.execute("ROLLBACK")
            raise
        finally:
            self._executing = False
            if self._hung_up:
                self.psycopg.pgconn.finish()
            elif self._in_use and self.usable:
                self._watch_socket()

    def hang_up(self) -> None:
        self._hung_up = True
        self._unwatch_socket()
        self._ended()
        if not self._executing:
            self.psycopg.pgconn.finish()
        elif self.usable:
            # The call in flight sees the end of the stream at once, and fails.
            with suppress(OSError, psycopg.Error):
                stream = socket.socket(fileno=os.dup(self.psycopg.pgconn.socket))
                with stream:
                    stream.shutdown(socket.SHUT_RDWR)

    def _watch_socket(self) -> None:
        self._watched = self.psycopg.pgconn.socket
        self._loop.add_reader(self._watched, self._on_readable)

    def _unwatch_socket(self) -> None:
        if self._watched is not None:
            self._loop.remove_reader(self._watched)
            self._watched = None

    def _on_readable(self) -> None:
        """The server has sent a notification, or has closed the connection."""
        try:
            self.psycopg.pgconn.consume_input()
            while notify := self.psycopg.pgconn.notifies():
                if self._notified is not None:
                    self._notified(notify.extra.decode())
        except psycopg.Error:
            self.hang_up()


class PsycopgEngine(SqlEngine):
    """PostgreSQL. With a channel, `notified` is called with the path of every change, and with None
    each time that listening has begun: changes before that were not notified."""

    name = "PostgreSQL"

    def __init__(
        self, url: StoreURL, channel: str = "", notified: Callable[[str | None], None] | None = None
    ) -> None:
        super().__init__(url, 5432, 2)
        self.commits_early = False
        """Whether the server keeps a log in which a later commit makes earlier ones durable."""
        self.lost = asyncio.Event()
        """Set when a connection has ended."""
        self._tls = _tls(url)
        given = {name: url.options[name] for name in PASSED if name in url.options}
        self._passed: dict[str, Any] = {
            "application_name": "doyen",
            "gssencmode": "disable",
            **given,
        }
        self._channel = channel
        self._notified = notified

    async def connect(self, host: Host) -> PostgreSQLConnection:
        try:
            connection = await AsyncConnection.connect(
                **self._tls,
                host=host.name or None,
                port=host.port,
                user=self.user or None,
                password=self.password or None,
                dbname=self.database or None,
                connect_timeout=round(self.timeout_s),
                **self._passed,
                keepalives_idle=10,
                keepalives_interval=3,
                keepalives_count=3,
                target_session_attrs="read-write",
                autocommit=True,
                prepare_threshold=None,
                cursor_factory=AsyncClientCursor,
            )
        except BaseException as error:
            release_frames(error)
            if isinstance(error, psycopg.Error):
                raise _connect_error(error, self.where) from error
            raise
        return PostgreSQLConnection(connection, self._notified, self.lost.set)

    def greeting(self) -> str:
        return "" if self._notified is None else f'LISTEN "{self._channel}"; '

    def transaction(self, script: str, *, early: bool) -> str:
        if early and self.commits_early:
            return f"{_BEGIN_EARLY}{script}; COMMIT; {FLUSH}"
        return f"{_BEGIN}{script}; COMMIT"

    def translate(self, error: Exception) -> Exception:
        if not isinstance(error, psycopg.Error):
            return error
        state, cause = error.sqlstate or "", one_line(error)
        if state.startswith(("08", "57P")):
            return ConnectionLost(cause)
        if not state:
            # psycopg raises errors of libpq itself as plain DatabaseErrors.
            lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
            return ConnectionLost(cause) if lost or type(error) is psycopg.DatabaseError else error
        if state in ("40001", "40P01"):
            return TransactionUndone(cause)
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


async def keep_connected(
    connection: SqlConnection, engine: PsycopgEngine, ping_after_s: float
) -> None:
    """Replace the connection as soon as it is lost, and probe it when it was idle for
    `ping_after_s`, until cancelled."""
    loop = asyncio.get_running_loop()
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            async with asyncio.timeout(ping_after_s):
                await engine.lost.wait()
        except TimeoutError:
            pass
        engine.lost.clear()
        present = connection.present
        if present is not None and loop.time() - present.used_at < ping_after_s:
            continue
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                await connection.read("SELECT 1", {})
            pause_s = _FIRST_PAUSE_S
        except Exception as error:
            if not isinstance(error, StoreError | TimeoutError):
                log.exception(log_line(event="listening_failed", server=connection.where))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            engine.lost.set()


def _tls(url: StoreURL) -> dict[str, Any]:
    tls = options.choice(url, "tls", "", "", "true", "false")
    mode = url.options.get("sslmode")
    if tls and mode is not None:
        raise ConfigError("tls and sslmode say the same thing: give one of them")
    if tls:
        mode = "verify-full" if tls == "true" else "disable"
    files = {"sslrootcert": "ca", "sslcert": "cert", "sslkey": "key"}
    given = {name: url.options[option] for name, option in files.items() if option in url.options}
    if given and mode in (None, "disable"):
        raise ConfigError("ca, cert and key go with tls=true")
    return {"sslmode": mode, **given}


def _connect_error(error: psycopg.Error, where: str) -> StoreError:
    """Why a connection failed. libpq gives no code for it, so the text of the error decides."""
    cause = connect_cause(re.sub(r" Is the server running .+?\?", "", one_line(error)))
    if re.search(r"password|authentication|role .* does not exist|pg_hba", cause):
        return StoreUnusable(
            f"PostgreSQL at {where} refuses the login: {cause}; check the URL's user and password"
        )
    if re.search(r"database .* does not exist", cause):
        return StoreUnusable(f"PostgreSQL at {where}: {cause}; create it, or correct the URL")
    return StoreUnavailable(cause)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
