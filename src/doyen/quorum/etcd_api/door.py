"""The port on which a node serves etcd's API: gRPC and JSON, told apart by the first bytes.

A connection that begins as HTTP/2 is passed to the gRPC server, which listens on a socket of its
own in a directory that only this user can open; any other is HTTP/1.1, for the gateway. TLS ends
here, with the certificates of the node. Clients of etcd cannot prove a secret of doyen, so where
the cluster has secrets, they are admitted with a client certificate only.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from doyen.errors import ConfigError, StoreUnusable
from doyen.quorum.etcd_api.elections import Elections
from doyen.quorum.etcd_api.gateway import Gateway
from doyen.quorum.etcd_api.grpc_server import make_server
from doyen.quorum.etcd_api.service import EtcdApi
from doyen.quorum.node.server import NodeOptions, NodeServer
from doyen.quorum.protocol.security import (
    Security,
    certificate_role,
    check_exposure,
    parse_address,
)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
READ: Final = 1 << 18
FIRST_S: Final = 10.0
"""How long a client may take to send its first bytes."""
MAX_CONNECTIONS: Final = 10_000
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

    def __init__(self, listening: asyncio.Server, api: EtcdApi, folder: Path) -> None:
        self.api = api
        self.port: int = listening.sockets[0].getsockname()[1]
        self._listening = listening
        self._folder = folder
        self._socket = str(folder / "grpc")
        self._gateway = Gateway(api.unary, api.streaming)
        self._server = make_server(api.unary, api.streaming)
        self._connections: set[asyncio.Task[None]] = set()

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

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await doors[0].serve(reader, writer)

        try:
            listening = await asyncio.start_server(
                accept,
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
        Elections(api)
        door = cls(listening, api, Path(tempfile.mkdtemp(prefix="doyen-etcd-")))
        doors.append(door)
        try:
            door._server.add_insecure_port(f"unix:{door._socket}")
            await door._server.start()
            await listening.start_serving()
        except BaseException:
            await door.close()
            raise
        return door

    async def close(self) -> None:
        """End all connections."""
        self._listening.close()
        self.api.close()
        await self._server.stop(0)
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await asyncio.sleep(0)  # in which the loop closes aborted connections
        shutil.rmtree(self._folder, ignore_errors=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
            writer.close()
            async with asyncio.timeout(FIRST_S):
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has gone
        except asyncio.CancelledError:
            pass  # the door is being closed; asyncio would log the cancellation
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if certificate_role(writer.get_extra_info("peercert")) == "onlooker":
            # Its role allows no writes, and the API does not tell roles apart. Closing the
            # connection in order would wait for the client.
            writer.transport.abort()
            return
        async with asyncio.timeout(FIRST_S):
            first = await reader.readexactly(1)
            # The first line of any HTTP request is longer than this.
            while PREFACE.startswith(first) and len(first) < len(b"PRI "):
                first += await reader.readexactly(1)
        if first != b"PRI ":
            await self._gateway.serve(first, reader, writer)
            return
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._socket, limit=READ)
        try:
            inner_writer.write(first)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, inner_writer))
                both.create_task(_copy(inner_reader, writer))
        except* OSError:
            pass  # one side has gone
        finally:
            inner_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what arrives, no faster than it is taken."""
    while data := await reader.read(READ):
        writer.write(data)
        await writer.drain()
    with suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
        else:
            writer.close()


def _url(options: NodeOptions, host: str, port: int) -> str:
    shown = host
    if host in EVERY_ADDRESS:
        shown = parse_address(options.peers[options.id])[0] or "localhost"
    name = f"[{shown}]" if ":" in shown else shown
    return f"{'https' if options.tls else 'http'}://{name}:{port}"
