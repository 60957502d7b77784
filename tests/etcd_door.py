"""Quorums that serve etcd's API, in this process or in processes of their own, and a client that
speaks it to any server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.door import EtcdDoor
from doyen.quorum.node.server import NodeOptions, NodeServer
from servers import free_port
from servers.cluster import Cluster
from servers.process import HOST
from servers.quorum import QuorumNode

POLL_S = 0.01
OPTIONS = [("grpc.max_receive_message_length", -1)]


class EtcdClient:
    """Calls methods of etcd's API, as messages."""

    def __init__(self, address: str, credentials: Any = None, ping_s: int = 0) -> None:
        """With `ping_s` the connection ends if the server does not answer for twice as long, and
        calls are given up after three times as long."""
        self._answer_s = 3 * ping_s or 20
        pings = ("keepalive_time", "keepalive_timeout", "http2.ping_timeout") if ping_s else ()
        options = [(f"grpc.{each}_ms", 1000 * ping_s) for each in pings]
        options += [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        options.append(("grpc.http2.max_pings_without_data", 0))
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)

    async def __aenter__(self) -> EtcdClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def call(self, method: rpc.EtcdMethod, request: Any = None, **fields: Any) -> Any:
        call = self._channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return await call(request or method.request(**fields), timeout=self._answer_s)

    async def outcome(self, method: rpc.EtcdMethod, request: Any = None, **fields: Any) -> Any:
        """The response, or the code and the text of the error."""
        try:
            return await self.call(method, request, **fields)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details()

    def stream(self, method: rpc.EtcdMethod) -> Any:
        call = self._channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return call()

    async def ready(self) -> None:
        """Wait until the server takes writes."""
        async with asyncio.timeout(20):
            while isinstance(await self.outcome(rpc.COMPACT, revision=1 << 60), tuple):
                found = await self.outcome(rpc.COMPACT, revision=1 << 60)
                if found[0] == "OUT_OF_RANGE":
                    return
                await asyncio.sleep(POLL_S)


class AnyNode:
    """Calls one node of a cluster, and another one when that does not answer."""

    def __init__(self, addresses: Sequence[str], ping_s: int) -> None:
        self.clients = [EtcdClient(each, ping_s=ping_s) for each in addresses]
        self._at = 0

    @property
    def current(self) -> EtcdClient:
        return self.clients[self._at]

    async def close(self) -> None:
        for client in self.clients:
            await client.__aexit__()

    async def call(self, method: rpc.EtcdMethod, **fields: Any) -> Any:
        while True:
            try:
                return await self.current.call(method, **fields)
            except grpc.aio.AioRpcError as error:
                if error.code().name not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    raise
                self._at = (self._at + 1) % len(self.clients)
                await asyncio.sleep(POLL_S)


@dataclass
class Door:
    """Where etcd's API is served, for a `Proxy`."""

    port: int

    @property
    def url(self) -> str:
        return f"etcd://{HOST}:{self.port}"


class DoorNode(QuorumNode):
    """`doyen serve --etcd`. Options are those of the command, without the dashes."""

    port_count = 2

    @property
    def door(self) -> str:
        return f"{HOST}:{self.ports[1]}"

    def command(self) -> list[str]:
        peers = ",".join(f"{name}={address}" for name, address in self.addresses.items())
        return [
            *(sys.executable, "-m", "doyen", "serve", "--found", "--id", self.name),
            *("--data-dir", str(self.folder / "data"), "--peers", peers, "--etcd", self.door),
            *(f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()),
        ]


class DoorCluster(Cluster[DoorNode]):
    member = DoorNode


class Doors:
    """The nodes of a quorum in this process, each with a door for clients of etcd."""

    def __init__(self, folder: Path, count: int = 1, **options: Any) -> None:
        names = [f"n{number + 1}" for number in range(count)]
        self._peers = {name: f"127.0.0.1:{free_port()}" for name in names}
        self._folder = folder
        self._options = {"election_s": 0.5, "heartbeat_s": 0.05} | options
        self.nodes: dict[str, NodeServer] = {}
        self.doors: dict[str, EtcdDoor] = {}

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{door.port}" for door in self.doors.values()]

    async def start(self, name: str, port: int = 0) -> None:
        options = NodeOptions(
            id=name,
            peers=self._peers,
            data_dir=self._folder / name,
            found=True,
            **self._options,
        )
        self.nodes[name] = node = await NodeServer.open(options)
        self.doors[name] = await EtcdDoor.open(node, options, f"127.0.0.1:{port}")

    async def stop(self, name: str) -> None:
        await self.doors.pop(name).close()
        await self.nodes.pop(name).close()

    @property
    def leader(self) -> str | None:
        leaders = {node.driver.leader for node in self.nodes.values()}
        return leaders.pop() if len(leaders) == 1 else None


@asynccontextmanager
async def doors(
    folder: Path, count: int = 1, *, credentials: Any = None, **options: Any
) -> AsyncIterator[Doors]:
    """A quorum that takes writes."""
    quorum = Doors(folder, count, **options)
    async with AsyncExitStack() as stack:
        for name in quorum._peers:
            await quorum.start(name)
        stack.push_async_callback(_stop_all, quorum)
        for address in quorum.addresses:
            async with EtcdClient(address, credentials) as client:
                await client.ready()
        yield quorum


async def _stop_all(quorum: Doors) -> None:
    for name in [*quorum.nodes]:
        await quorum.stop(name)
