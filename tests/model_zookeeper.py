"""A simulated ZooKeeper ensemble: the part of the protocol that doyen uses, for `adversary`.

It acts as one server: all requests are carried out in one order, and any connection may resume a
session by its number. Sessions expire at the first full tick after their time has passed without a
request; their connection is then closed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from adversary import Connection, WireWorld

TICK_S = 0.5
NO_NODE, BAD_VERSION, NO_CHILDREN, NODE_EXISTS, NOT_EMPTY = -101, -103, -108, -110, -111
ROLLED_BACK, INCONSISTENT, UNIMPLEMENTED = 0, -2, -6
CREATED, DELETED, CHANGED, CHILD = 1, 2, 3, 4
CREATE, DELETE, EXISTS, GET, SET, CHILDREN, PING, CHECK, MULTI, CREATE2, UNWATCH, CLOSE = (
    1,
    2,
    3,
    4,
    5,
    8,
    11,
    13,
    14,
    15,
    18,
    -11,
)  # fmt: skip
EPHEMERAL, SEQUENCE = 1, 2


class Failed(Exception):
    """An error, by ZooKeeper's number."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class Node:
    data: bytes
    czxid: int
    mzxid: int
    owner: int = 0
    version: int = 0
    created: int = 0
    """How many children were created: the number of the next ticket."""
    children: set[str] = field(default_factory=set)

    def stat(self) -> bytes:
        sizes = (len(self.data), len(self.children))
        return struct.pack(
            "!qqqqiiiqiiq",
            self.czxid,
            self.mzxid,
            0,
            0,
            self.version,
            self.created,
            0,
            self.owner,
            *sizes,
            self.mzxid,
        )


@dataclass(eq=False)
class SessionRow:
    number: int
    timeout_s: float
    heard_at: float
    connection: Connection | None = None


@dataclass(eq=False)
class _Watches:
    """The watches of one connection."""

    data: set[str] = field(default_factory=set)
    children: set[str] = field(default_factory=set)


class Reader:
    """Decodes the fields of a message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from(f"!{form}", self._data, self._at)
        self._at += struct.calcsize(f"!{form}")
        return int(value)

    def buffer(self) -> bytes:
        size = max(0, self.take("i"))
        self._at += size
        return self._data[self._at - size : self._at]

    def text(self) -> str:
        return self.buffer().decode()


def _buffer(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


class ZooKeeperModel:
    """The ensemble."""

    def __init__(self, world: WireWorld) -> None:
        self._clock = world.clock
        self._zxid = 1 << 32
        self._nodes = {"/": Node(b"", 0, 0)}
        self.sessions: dict[int, SessionRow] = {}
        self._watches: dict[Connection, _Watches] = {}
        self._last_session = 0x1000_0000
        self.expired = 0

    async def serve(self, connection: Connection) -> None:
        self._watches[connection] = _Watches()
        session: SessionRow | None = None
        try:
            opening = Reader(await self._message(connection))
            opened: list[SessionRow | None] = []
            await connection.answer("CONNECT", lambda: self._open(connection, opening, opened))
            session = opened[0] if opened else None
            while session is not None and not connection.closed:
                message = Reader(await self._message(connection))
                xid, kind = message.take("i"), message.take("i")

                def carry_out(message: Reader = message, xid: int = xid, kind: int = kind) -> bytes:
                    return self._carry_out(connection, session, message, xid, kind)

                await connection.answer(str(kind), carry_out)
                if kind == CLOSE and session.number not in self.sessions:
                    return
        finally:
            del self._watches[connection]
            if session is not None and session.connection is connection:
                session.connection = None

    async def _message(self, connection: Connection) -> bytes:
        (size,) = struct.unpack("!i", await connection.reader.readexactly(4))
        return await connection.reader.readexactly(size)

    def _open(
        self, connection: Connection, opening: Reader, opened: list[SessionRow | None]
    ) -> bytes:
        self.expire()
        opening.take("i")
        opening.take("q")
        timeout_ms, number = opening.take("i"), opening.take("q")
        if number:
            session = self.sessions.get(number)
        else:
            self._last_session += 1
            session = SessionRow(self._last_session, timeout_ms / 1000, 0.0)
            self.sessions[session.number] = session
        opened.append(session)
        if session is None:
            return _buffer(struct.pack("!iiq", 0, 0, 0) + _buffer(bytes(16)) + b"\0")
        session.connection = connection
        self._touch(session)
        return _buffer(
            struct.pack("!iiq", 0, timeout_ms, session.number) + _buffer(b"p" * 16) + b"\0"
        )

    def _touch(self, session: SessionRow) -> None:
        session.heard_at = self._clock.now()

    def expire(self) -> None:
        """End the sessions whose time has passed. Called at every tick."""
        now = self._clock.now()
        for session in list(self.sessions.values()):
            due = math.floor((session.heard_at + session.timeout_s) / TICK_S + 1) * TICK_S
            if now >= due:
                self.expired += 1
                self._end(session)

    def _end(self, session: SessionRow) -> None:
        del self.sessions[session.number]
        for path in [path for path, node in self._nodes.items() if node.owner == session.number]:
            self._zxid += 1
            self._delete(path, -1)()
        if session.connection is not None:
            session.connection.close()

    def _carry_out(
        self, connection: Connection, session: SessionRow, message: Reader, xid: int, kind: int
    ) -> bytes:
        self.expire()
        if session.number not in self.sessions:
            connection.close()
            return b""
        self._touch(session)
        error, body = 0, b""
        try:
            body = self._request(connection, session, message, kind)
        except Failed as failed:
            error = failed.code
        return _buffer(struct.pack("!iqi", xid, self._zxid, error) + body)

    def _request(
        self, connection: Connection, session: SessionRow, message: Reader, kind: int
    ) -> bytes:
        watches = self._watches.get(connection, _Watches())
        match kind:
            case 11:  # PING
                return b""
            case -11:  # CLOSE
                self._end_by_request(session)
                return b""
            case 3 | 4 | 8:  # EXISTS, GET, CHILDREN
                path, watch = message.text(), message.take("B")
                node = self._nodes.get(path)
                if watch and (node is not None or kind == EXISTS):
                    (watches.children if kind == CHILDREN else watches.data).add(path)
                if node is None:
                    raise Failed(NO_NODE)
                if kind == EXISTS:
                    return node.stat()
                if kind == GET:
                    return _buffer(node.data) + node.stat()
                names = [_buffer(name.encode()) for name in sorted(node.children)]
                return struct.pack("!i", len(names)) + b"".join(names)
            case 18:  # UNWATCH
                path, of = message.text(), message.take("i")
                (watches.children if of == 1 else watches.data).discard(path)
                return b""
            case 14:  # MULTI
                return self._multi(session, message)
        self._zxid += 1
        return self._write(session, message, kind)()

    def _end_by_request(self, session: SessionRow) -> None:
        connection, session.connection = session.connection, None
        self._end(session)
        session.connection = connection

    def _multi(self, session: SessionRow, message: Reader) -> bytes:
        """Check all, then carry out all: the requests of one transaction are independent."""
        self._zxid += 1
        steps: list[tuple[int, Callable[[], bytes]]] = []
        codes: list[int] = []
        while True:
            kind, done, _ = message.take("i"), message.take("B"), message.take("i")
            if done:
                break
            try:
                steps.append((kind, self._write(session, message, kind)))
                codes.append(0)
            except Failed as failed:
                codes.append(failed.code)
        end = struct.pack("!iBi", -1, 1, -1)
        if any(codes):
            failed_at = next(at for at, code in enumerate(codes) if code)
            shown = [
                ROLLED_BACK if at < failed_at else code if at == failed_at else INCONSISTENT
                for at, code in enumerate(codes)
            ]
            return b"".join(struct.pack("!iBii", -1, 0, code, code) for code in shown) + end
        parts = [struct.pack("!iBi", kind, 0, 0) + carry_out() for kind, carry_out in steps]
        return b"".join(parts) + end

    def _write(self, session: SessionRow, message: Reader, kind: int) -> Callable[[], bytes]:
        """Check a change; returns the function that carries it out."""
        path = message.text()
        match kind:
            case 1 | 15:  # CREATE, CREATE2
                data = message.buffer()
                for _ in range(message.take("i")):
                    message.take("i"), message.text(), message.text()
                return self._create(session, path, data, message.take("i"), kind == CREATE2)
            case 2:  # DELETE
                return self._delete(path, message.take("i"))
            case 5:  # SET
                data, version = message.buffer(), message.take("i")
                return self._set(path, data, version)
            case 13:  # CHECK
                self._at(path, message.take("i"))
                return lambda: b""
        raise Failed(UNIMPLEMENTED)

    def _at(self, path: str, version: int) -> Node:
        node = self._nodes.get(path)
        if node is None:
            raise Failed(NO_NODE)
        if version not in (-1, node.version):
            raise Failed(BAD_VERSION)
        return node

    def _create(
        self, session: SessionRow, path: str, data: bytes, flags: int, with_stat: bool
    ) -> Callable[[], bytes]:
        parent = self._at(_parent(path), -1)
        if parent.owner:
            raise Failed(NO_CHILDREN)
        if flags & SEQUENCE:
            path = f"{path}{parent.created:010d}"
        if path in self._nodes:
            raise Failed(NODE_EXISTS)

        def carry_out() -> bytes:
            parent.created += 1
            parent.children.add(path.rpartition("/")[2])
            owner = session.number if flags & EPHEMERAL else 0
            node = self._nodes[path] = Node(data, self._zxid, self._zxid, owner)
            self._notify(CREATED, path)
            self._notify(CHILD, _parent(path))
            return _buffer(path.encode()) + (node.stat() if with_stat else b"")

        return carry_out

    def _delete(self, path: str, version: int) -> Callable[[], bytes]:
        if self._at(path, version).children:
            raise Failed(NOT_EMPTY)

        def carry_out() -> bytes:
            del self._nodes[path]
            self._nodes[_parent(path)].children.discard(path.rpartition("/")[2])
            self._notify(DELETED, path)
            self._notify(CHILD, _parent(path))
            return b""

        return carry_out

    def _set(self, path: str, data: bytes, version: int) -> Callable[[], bytes]:
        node = self._at(path, version)

        def carry_out() -> bytes:
            node.data, node.mzxid, node.version = data, self._zxid, node.version + 1
            self._notify(CHANGED, path)
            return node.stat()

        return carry_out

    def _notify(self, event: int, path: str) -> None:
        """Send an event to the watches of a path, and remove them."""
        for connection, watches in self._watches.items():
            kinds = {CHILD: [watches.children], DELETED: [watches.data, watches.children]}.get(
                event, [watches.data]
            )
            hit = [kind for kind in kinds if path in kind]
            for kind in hit:
                kind.discard(path)
            if hit:
                message = struct.pack("!iqiii", -1, -1, 0, event, 3) + _buffer(path.encode())
                connection.send(_buffer(message))


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"
