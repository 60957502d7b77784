"""A model of MySQL: the part of the client/server protocol that doyen's adapter uses.

Messages are text queries of several statements, each message a transaction; answers are result sets
in the text protocol. The server introduces itself as MariaDB and lets everybody in.
"""

from __future__ import annotations

import re
import struct
from functools import partial
from typing import Any

from adversary import Connection
from doyen.stores.sql import mysql
from model_sql import Answer, Cluster, DatabaseServer

__all__ = ["MySQLModel"]

_NAMES = {name: f"doyen_{name}" for name in ("meta", "leases", "entries", "changes")}
_DIALECT = {
    mysql._BEGIN: "",
    mysql.CLOCK: "clock_us()",
    mysql._SERVER: "server_name()",
    "CONCAT(@@global.read_only)": "read_only()",
    "SELECT VERSION()": "SELECT '10.11.0-MariaDB'",
    mysql._GROUPS: "SELECT 1 WHERE 0",
    "FOR UPDATE": "",
}
_CAPABLE = 0x1 | 0x8 | 0x200 | 0x2000 | 0x8000 | 0x10000 | 0x20000 | 0x40000 | 0x80000
"""The client may name a database, send several statements, and authenticate by plugin."""
_AUTOCOMMIT, _MORE = 2, 8
_LONGLONG, _VAR_STRING, _BINARY, _UTF8 = 8, 253, 63, 45


class MySQLModel(Cluster):
    """Servers of MySQL."""

    def __init__(self, **options: Any) -> None:
        super().__init__(_NAMES, _DIALECT, **options)

    async def wait_for_lock(self, connection: Connection, text: str) -> None:
        """Locks are granted at once, as by servers that do not share them."""

    def understand(self, text: str) -> tuple[list[str], dict[str, Any]]:
        return super().understand(re.sub(r"SELECT GET_LOCK\(.*?, 30\);", "SELECT 1;", text))

    async def speak(self, connection: Connection, server: DatabaseServer) -> None:
        await connection.answer("connect", lambda: _packets(0, _greeting()))
        await self._packet(connection)
        connection.send(_packets(2, _ok(0)))
        while True:
            packet = await self._packet(connection)
            match packet[0]:
                case 0x01:  # quit
                    return
                case 0x0E:  # ping
                    connection.send(_packets(1, _ok(0)))
                case 0x03:  # query
                    text = packet[1:].decode("utf-8", "surrogateescape")
                    await self.wait_for_lock(connection, text)
                    name = "write" if "COMMIT" in text else "read"
                    await connection.answer(name, partial(self._answer, connection, server, text))
                case other:
                    raise NotImplementedError(other)

    async def _packet(self, connection: Connection) -> bytes:
        head = await connection.reader.readexactly(4)
        return await connection.reader.readexactly(int.from_bytes(head[:3], "little"))

    def _answer(self, connection: Connection, server: DatabaseServer, text: str) -> bytes:
        answers = self.carry_out(connection, server, text)
        if answers is None:
            return b""
        packets: list[bytes] = []
        for number, answer in enumerate(answers or [None], 1):
            packets += _result(answer, _MORE if number < len(answers) else 0)
        return _packets(1, *packets)


def _packets(sequence: int, *bodies: bytes) -> bytes:
    return b"".join(
        len(body).to_bytes(3, "little") + bytes([(sequence + number) % 256]) + body
        for number, body in enumerate(bodies)
    )


def _greeting() -> bytes:
    return (
        b"\x0a10.11.0-MariaDB\0"
        + struct.pack("<I", 1)
        + b"saltsalt\0"
        + struct.pack("<HBHH", _CAPABLE & 0xFFFF, _UTF8, _AUTOCOMMIT, _CAPABLE >> 16)
        + bytes([21])
        + bytes(10)
        + b"saltsaltsalt\0"
        + b"mysql_native_password\0"
    )


def _ok(more: int) -> bytes:
    return b"\0\0\0" + struct.pack("<HH", _AUTOCOMMIT | more, 0)


def _end(more: int) -> bytes:
    return b"\xfe" + struct.pack("<HH", 0, _AUTOCOMMIT | more)


def _result(answer: Answer, more: int) -> list[bytes]:
    if answer is None:
        return [_ok(more)]
    columns, rows = answer
    packets = [_size(len(columns))]
    for number, name in enumerate(columns):
        types = {type(row[number]) for row in rows}
        kind = _LONGLONG if int in types else _VAR_STRING
        charset = _UTF8 if str in types else _BINARY
        names = b"".join(_string(part) for part in (b"def", b"", b"", b"", name.encode(), b""))
        packets.append(names + b"\x0c" + struct.pack("<HIBHBH", charset, 1024, kind, 0, 0, 0))
    packets.append(_end(0))
    packets += [b"".join(map(_field, row)) for row in rows]
    return [*packets, _end(more)]


def _field(value: Any) -> bytes:
    if value is None:
        return b"\xfb"
    return _string(value if isinstance(value, bytes) else str(value).encode())


def _string(data: bytes) -> bytes:
    return _size(len(data)) + data


def _size(number: int) -> bytes:
    return bytes([number]) if number < 251 else b"\xfd" + number.to_bytes(3, "little")
