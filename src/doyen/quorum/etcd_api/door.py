"""The port on which a node serves etcd's API: gRPC and JSON, told apart by the first bytes.

A connection that begins as HTTP/2 belongs to the gRPC server; any other is HTTP/1.1, for the
gateway. TLS ends here, with the certificates of the node. Clients of etcd cannot prove a secret of
doyen, so where the cluster has secrets, they are admitted with a client certificate only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any, Final

from doyen.errors import ConfigError, StoreUnusable
from doyen.quorum.etcd_api.gateway import Gateway
from doyen.quorum.etcd_api.grpc_server import GrpcServer
from doyen.quorum.etcd_api.service import EtcdApi
from doyen.quorum.node.server import NodeOptions, NodeServer
from doyen.quorum.protocol.security import (
    Security,
    certificate_role,
    check_exposure,
    parse_address,
)

START: Final = b"PRI "
"""How every connection of HTTP/2 begins, and no other."""
READ: Final = 1 << 18
FIRST_S: Final = 10.0
"""How long a client may take to send its first bytes."""
MAX_CONNECTIONS: Final = 10_000
KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 9}
"""The system ends the connection of a client whose machine has gone. Otherwise a watch of the
gateway would last until something is to be told. These are the values of Go, and so of etcd."""
EVERY_ADDRESS: Final = ("", "0.0.0.0", "::")


def check_access(host: str, security: Security, *, insecure: bool) -> None:
    """Refuse an address where anyone could do what only clients with a secret may."""
    if security.certified or insecure:
        return
    if security.accepted:
        raise ConfigError(
            "clients of etcd cannot prove the secret of this cluster, so anyone who reaches"
            f" {host or 'this machine'} could read and write. Use mutual TLS (--tls-certificate,"
            " --tls-key, --tls-authority), or pass --insecure"
        )
    check_exposure(host, security)


class EtcdDoor:
    """The API on one port of a node. Made by `open`."""

    def __init__(self, listening: asyncio.Server, api: EtcdApi) -> None:
        self.api = api
        self.port: int = listening.sockets[0].getsockname()[1]
        self._listening = listening
        self._gateway = Gateway(api.unary, api.streaming)
        self._server = GrpcServer(api.unary, api.streaming | api.encoded)
        self._connections: set[_Connection] = set()
        self.closed = False

    @classmethod
    async def open(
        cls, node: NodeServer, options: NodeOptions, address: str, *, url: str | None = None
    ) -> EtcdDoor:
        """Listen on `address`. `url` is what member lists name for this node, if clients reach it
        under another address."""
        host, port = parse_address(address)
        security = options.security
        check_access(host, security, insecure=options.insecure)
        doors: list[EtcdDoor] = []
        try:
            listening = await asyncio.get_running_loop().create_server(
                lambda: _Connection(doors[0]),
                host or None,
                port,
                ssl=security.listening_for("h2", "http/1.1"),
                backlog=1024,
                start_serving=False,
            )
        except OSError as error:
            raise StoreUnusable(
                f"cannot listen on {address} for clients of etcd: {error.strerror}. Stop whatever"
                " listens there, or name an address of this machine that is free"
            ) from error
        port = listening.sockets[0].getsockname()[1]
        api = EtcdApi(
            node.driver,
            node.keyspace,
            node.members,
            election_s=options.election_s,
            url=url or _url(options, host, port),
        )
        door = cls(listening, api)
        doors.append(door)
        try:
            await listening.start_serving()
        except BaseException:
            await door.close()
            raise
        return door

    async def close(self) -> None:
        """End all connections."""
        self.closed = True
        self._listening.close()
        self.api.close()
        await self._server.close()
        for connection in [*self._connections]:
            connection.close()
        tasks = [each.task for each in self._connections if each.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # in which the loop closes aborted connections

    def admit(self, connection: _Connection) -> bool:
        """Count a connection. False if there are too many."""
        if len(self._connections) >= MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def left(self, connection: _Connection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)

    def serve_grpc(self, connection: _Connection, transport: Any) -> None:
        """Serve a client of gRPC."""
        protocol = self._server.connection(lambda: self.left(connection))
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        first, connection.first = connection.first, b""
        protocol.data_received(first)

    async def serve_http(self, connection: _Connection, transport: Any) -> None:
        """Serve a client of the gateway."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=READ, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        protocol.connection_made(transport)
        transport.set_protocol(protocol)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        transport.resume_reading()
        await self._gateway.serve(connection.first, reader, writer)
        writer.close()
        async with asyncio.timeout(FIRST_S):
            await writer.wait_closed()


class _Connection(asyncio.Protocol):
    """A connection of a client, until its first bytes show which protocol it speaks."""

    def __init__(self, door: EtcdDoor) -> None:
        self._door = door
        self._transport: Any = None
        self.first = b""
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        # The role of an onlooker allows no writes, and the API does not tell roles apart. Closing
        # the connection in order would wait for the client.
        onlooker = certificate_role(transport.get_extra_info("peercert")) == "onlooker"
        if onlooker or not self._door.admit(self):
            self._transport.abort()
            return
        _keep_alive(transport.get_extra_info("socket"))
        self._timer = asyncio.get_running_loop().call_later(FIRST_S, self.close)

    def data_received(self, data: bytes) -> None:
        first = self.first = self.first + data
        if self._door.closed or self.task is not None:
            return
        # The first line of any HTTP request is longer than this.
        if len(first) < len(START) and START.startswith(first):
            return
        if self._timer is not None:
            self._timer.cancel()
        if first.startswith(START):
            self._door.serve_grpc(self, self._transport)
            return
        self._transport.pause_reading()  # until the protocol that takes over is there
        work = self._door.serve_http(self, self._transport)
        self.task = asyncio.get_running_loop().create_task(self._serve(work))

    async def _serve(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has gone
        except asyncio.CancelledError:
            pass  # the door is being closed; asyncio would log the cancellation
        finally:
            self.ended()

    def connection_lost(self, error: Exception | None) -> None:
        if self.task is None:
            self.ended()

    def close(self) -> None:
        """End it at once."""
        if self.task is not None:
            self.task.cancel()
        self.ended()

    def ended(self) -> None:
        """Everything was said, or nothing more may be."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()
        self._door.left(self)


def _keep_alive(connection: Any) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _url(options: NodeOptions, host: str, port: int) -> str:
    shown = host
    if host in EVERY_ADDRESS:
        shown = parse_address(options.peers[options.id])[0] or "localhost"
    name = f"[{shown}]" if ":" in shown else shown
    return f"{'https' if options.tls else 'http'}://{name}:{port}"
