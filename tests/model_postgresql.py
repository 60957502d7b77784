"""A model of PostgreSQL: the part of protocol version 3 that doyen's adapter uses.

The adapter sends messages in the simple protocol only, and each is a transaction. Notifications go
to those who listen on the server on which something was changed.
"""

from __future__ import annotations

import asyncio
import struct
from functools import partial
from typing import Any

from adversary import Connection
from doyen.stores.sql import postgresql, psycopg_engine
from model_sql import Answer, Cluster, DatabaseServer

__all__ = ["PostgreSQLModel"]

_NAMES = {name: f'"doyen".{name}' for name in ("meta", "leases", "entries", "changes")}
_DIALECT = {
    psycopg_engine.FLUSH: "",
    psycopg_engine._BEGIN: "",
    psycopg_engine._BEGIN_EARLY: "",
    postgresql.CLOCK: "clock_us()",
    postgresql._TIMELINE: "server_number()",
    postgresql._STARTED: "server_name()",
    "CAST(system_identifier AS text)": "'system'",
    "FROM pg_control_system()": "",
    "NOT pg_is_in_recovery()": "1",
    "pg_is_in_recovery()": "0",
    "pg_backend_pid()": "backend()",
    "to_regnamespace": "there",
    "to_regclass": "there",
    "FOR UPDATE": "",
    '"doyen".': "",
}
_STATUS = {
    "server_version": "15.0",
    "server_encoding": "UTF8",
    "client_encoding": "UTF8",
    "standard_conforming_strings": "on",
    "default_transaction_read_only": "off",
    "in_hot_standby": "off",
    "integer_datetimes": "on",
    "TimeZone": "GMT",
}
_CANCEL, _ENCRYPT = 80877102, (80877103, 80877104)
_LISTEN = "LISTEN"


class PostgreSQLModel(Cluster):
    """Servers of PostgreSQL."""

    def __init__(self, **options: Any) -> None:
        super().__init__({name: name for name in _NAMES}, _DIALECT, **options)
        self.ends_listeners = False
        """End a connection as soon as it listens."""
        self.garbles = False
        """Send malformed responses."""
        self._listening: dict[Connection, DatabaseServer] = {}

    async def speak(self, connection: Connection, server: DatabaseServer) -> None:
        try:
            if not await self._begin(connection):
                return
            while True:
                kind = await connection.reader.readexactly(1)
                body = await self._body(connection)
                if kind == b"X":
                    return
                if kind != b"Q":
                    raise NotImplementedError(kind)
                text = body[:-1].decode()
                name = "write" if "COMMIT" in text else "read"
                await connection.answer(name, partial(self._answer, connection, server, text))
        finally:
            self._listening.pop(connection, None)

    async def _body(self, connection: Connection) -> bytes:
        (size,) = struct.unpack("!I", await connection.reader.readexactly(4))
        return await connection.reader.readexactly(size - 4)

    async def _begin(self, connection: Connection) -> bool:
        while True:
            (code,) = struct.unpack("!I", (await self._body(connection))[:4])
            if code == _CANCEL:
                return False
            if code not in _ENCRYPT:
                break
            connection.send(b"N")
        status = (f"{name}\0{value}\0".encode() for name, value in _STATUS.items())
        greeting = [
            _message("R", struct.pack("!I", 0)),
            *(_message("S", one) for one in status),
            _message("K", struct.pack("!II", 4242, 1)),
            _message("Z", b"I"),
        ]
        await connection.answer("connect", lambda: b"".join(greeting))
        return not connection.closed

    def _answer(self, connection: Connection, server: DatabaseServer, text: str) -> bytes:
        listens = text.startswith(_LISTEN)
        if listens:
            self._listening[connection] = server
            text = text.partition(";")[2]
        text = text.rpartition("ROLLBACK; ")[2]  # what is rolled back has no effect
        answers = self.carry_out(connection, server, text)
        if answers is None:
            return b""
        if self.garbles:
            return b"Z" + struct.pack("!I", 1)
        notifications = [_notification(path) for path in dict.fromkeys(server.changed)]
        for other, at in self._listening.items():
            if at is server and other is not connection:
                other.send(b"".join(notifications))
        own = notifications if connection in self._listening else []
        done = [_message("C", b"LISTEN\0")] if listens else []
        if listens and self.ends_listeners:
            asyncio.get_running_loop().call_soon(connection.close)
        return b"".join([*done, *map(_result, answers), *own, _message("Z", b"I")])


def _message(kind: str, body: bytes) -> bytes:
    return kind.encode() + struct.pack("!I", len(body) + 4) + body


def _notification(path: str) -> bytes:
    return _message("A", struct.pack("!I", 7) + f"doyen\0{path}\0".encode())


def _result(answer: Answer) -> bytes:
    if answer is None:
        return _message("C", b"UPDATE 1\0")
    columns, rows = answer
    described = [struct.pack("!H", len(columns))]
    for number, name in enumerate(columns):
        types = {type(row[number]) for row in rows}
        oid, size = (20, 8) if int in types else (17, -1) if bytes in types else (25, -1)
        described.append(f"{name}\0".encode() + struct.pack("!IHIhiH", 0, 0, oid, size, -1, 0))
    messages = [_message("T", b"".join(described))]
    for row in rows:
        fields = [struct.pack("!H", len(row)), *map(_field, row)]
        messages.append(_message("D", b"".join(fields)))
    return b"".join([*messages, _message("C", f"SELECT {len(rows)}\0".encode())])


def _field(value: Any) -> bytes:
    if value is None:
        return struct.pack("!i", -1)
    text = rf"\x{value.hex()}".encode() if isinstance(value, bytes) else str(value).encode()
    return struct.pack("!i", len(text)) + text


def keep_virtual_time(monkeypatch: Any) -> None:
    """psycopg counts its connect timeout on the system's clock."""
    monkeypatch.setattr("psycopg.waiting.monotonic", lambda: asyncio.get_running_loop().time())
