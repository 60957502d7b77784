"""Minimal clients for the protocols of the servers, enough to ping, read and write.

They are independent of doyen's adapters and of client libraries, so that a test can inspect a store
by another path. Calls block, use one connection each and have a timeout. They raise OSError if
there is no answer, and ValueError if the answer is not the expected one.

Imports the standard library only.
"""

from __future__ import annotations

import json
import socket
import struct
from hashlib import sha1
from http.client import HTTPConnection, HTTPException
from typing import Any

TIMEOUT_S = 2.0


class Connection:
    """A connection that reads exactly the requested number of bytes."""

    def __init__(self, port: int, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> None:
        self._socket = socket.create_connection((host, port), timeout_s)
        self._file = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise ConnectionError("the server closed the connection")
        return data

    def line(self) -> bytes:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the server closed the connection")
        return line

    def rest(self) -> bytes:
        return self._file.read()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()


def http(
    port: int, method: str, path: str, body: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> tuple[int, bytes]:
    """Return status and body of the response."""
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    except HTTPException as failure:
        raise ConnectionError(f"not an HTTP response: {failure!r}") from failure
    finally:
        connection.close()


def http_json(port: int, method: str, path: str, body: object = None) -> Any:
    """Return the decoded response. Raises ValueError if the status is not 200."""
    data = None if body is None else json.dumps(body).encode()
    status, answer = http(port, method, path, data)
    if status != 200:
        raise ValueError(f"{status} {answer[:200]!r}")
    return json.loads(answer)


def zookeeper_command(port: int, word: bytes) -> str:
    """The answer to a four-letter command of ZooKeeper."""
    with Connection(port) as connection:
        connection.send(word)
        return connection.rest().decode()


class ZooKeeperConnection:
    """A session with ZooKeeper, open within its `with` block."""

    CREATE, DELETE, GET, CLOSE = 1, 2, 4, -11

    def __init__(self, port: int) -> None:
        self._connection = Connection(port)
        self._calls = 0
        self._send(struct.pack(">iqiq", 0, 0, 10_000, 0) + _text(b"\0" * 16))
        self._receive()

    def create(self, path: str, data: bytes) -> None:
        acl = struct.pack(">ii", 1, 31) + _text(b"world") + _text(b"anyone")
        self._call(self.CREATE, _text(path.encode()) + _text(data) + acl + struct.pack(">i", 0))

    def get(self, path: str) -> bytes:
        answer = self._call(self.GET, _text(path.encode()) + b"\0")
        (size,) = struct.unpack_from(">i", answer)
        return answer[4 : 4 + size]

    def _call(self, operation: int, body: bytes) -> bytes:
        self._calls += 1
        self._send(struct.pack(">ii", self._calls, operation) + body)
        answer = self._receive()
        _, _, error = struct.unpack_from(">iqi", answer)
        if error:
            raise ValueError(f"ZooKeeper returned error {error}")
        return answer[16:]

    def _send(self, message: bytes) -> None:
        self._connection.send(struct.pack(">i", len(message)) + message)

    def _receive(self) -> bytes:
        (size,) = struct.unpack(">i", self._connection.read(4))
        return self._connection.read(size)

    def __enter__(self) -> ZooKeeperConnection:
        return self

    def __exit__(self, *_: object) -> None:
        with self._connection:
            self._call(self.CLOSE, b"")


def _text(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def postgres_query(port: int, query: str, user: str = "postgres") -> list[list[str | None]]:
    """The rows of a query, as text."""
    with Connection(port) as connection:
        parameters = f"user\0{user}\0database\0postgres\0\0".encode()
        connection.send(struct.pack(">ii", len(parameters) + 8, 196608) + parameters)
        _postgres_until_ready(connection)
        text = query.encode() + b"\0"
        connection.send(b"Q" + struct.pack(">i", len(text) + 4) + text)
        rows = _postgres_until_ready(connection)
        connection.send(b"X" + struct.pack(">i", 4))
        return rows


def _postgres_until_ready(connection: Connection) -> list[list[str | None]]:
    rows: list[list[str | None]] = []
    while True:
        kind, size = struct.unpack(">ci", connection.read(5))
        body = connection.read(size - 4)
        if kind == b"E":
            fields = {part[:1]: part[1:] for part in body.split(b"\0") if part}
            raise ValueError(fields[b"M"].decode())
        if kind == b"R" and body != b"\0\0\0\0":
            raise ValueError("PostgreSQL requires a password")
        if kind == b"D":
            rows.append(_postgres_row(body))
        if kind == b"Z":
            return rows


def _postgres_row(body: bytes) -> list[str | None]:
    (count,) = struct.unpack_from(">h", body)
    at, row = 2, list[str | None]()
    for _ in range(count):
        (size,) = struct.unpack_from(">i", body, at)
        at += 4
        row.append(None if size < 0 else body[at : at + size].decode())
        at += max(size, 0)
    return row


def redis_command(port: int, *words: str) -> bytes | None:
    """The answer to a command: a simple string, an integer or a bulk string."""
    with Connection(port) as connection:
        parts = (f"${len(word.encode())}\r\n{word}\r\n" for word in words)
        connection.send(f"*{len(words)}\r\n{''.join(parts)}".encode())
        line = connection.line().rstrip()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise ValueError(rest.decode())
        if kind == b"$":
            return None if rest == b"-1" else connection.read(int(rest))
        return rest


def nats_request(port: int, subject: str, payload: bytes = b"") -> bytes:
    """The answer to a request. Raises ValueError if the subject has no responder."""
    with Connection(port) as connection:
        if not connection.line().startswith(b"INFO "):
            raise ValueError("not a NATS server")
        connect = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
        publish = f"PUB {subject} answer {len(payload)}\r\n".encode() + payload + b"\r\n"
        connection.send(connect + b"PING\r\nSUB answer 1\r\n" + publish)
        while True:
            kind, *words = connection.line().split()
            if kind == b"MSG":
                return connection.read(int(words[-1]))
            if kind not in (b"PONG", b"PING", b"INFO"):
                raise ValueError(f"NATS answers {kind.decode()}")


def mysql_query(port: int, query: str, user: str, password: str) -> list[list[str | None]]:
    """The rows of a query, as text."""
    with Connection(port) as connection:
        salt = _mysql_salt(_mysql_packet(connection))
        # Protocol 4.1 with mysql_native_password.
        flags = 0x200 | 0x8000 | 0x80000
        proof = _mysql_proof(password.encode(), salt)
        login = struct.pack("<IIB23x", flags, 1 << 24, 45) + user.encode() + b"\0"
        login += bytes([len(proof)]) + proof + b"mysql_native_password\0"
        _mysql_send(connection, 1, login)
        _mysql_packet(connection)
        _mysql_send(connection, 0, b"\x03" + query.encode())
        return _mysql_rows(connection)


def _mysql_send(connection: Connection, number: int, body: bytes) -> None:
    connection.send(struct.pack("<I", len(body) | number << 24) + body)


def _mysql_packet(connection: Connection) -> bytes:
    (head,) = struct.unpack("<I", connection.read(4))
    body = connection.read(head & 0xFFFFFF)
    if body[:1] == b"\xff":
        raise ValueError(body[3:].decode(errors="replace"))
    return body


def _mysql_salt(greeting: bytes) -> bytes:
    at = greeting.index(b"\0") + 5
    return greeting[at : at + 8] + greeting[at + 27 : at + 39]


def _mysql_proof(password: bytes, salt: bytes) -> bytes:
    once = sha1(password).digest()
    mask = sha1(salt + sha1(once).digest()).digest()
    return bytes(a ^ b for a, b in zip(once, mask, strict=True))


def _mysql_rows(connection: Connection) -> list[list[str | None]]:
    columns = _mysql_packet(connection)[0]
    if columns == 0:
        return []
    while _mysql_packet(connection)[:1] != b"\xfe":
        pass  # column definitions
    rows: list[list[str | None]] = []
    while (body := _mysql_packet(connection))[:1] != b"\xfe":
        at, row = 0, list[str | None]()
        for _ in range(columns):
            size = body[at]  # values are short: longer ones have another length encoding
            if size == 0xFB:
                row.append(None)
                size = 0
            else:
                row.append(body[at + 1 : at + 1 + size].decode())
            at += 1 + size
        rows.append(row)
    return rows
