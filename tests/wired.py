"""Stores of every engine on a simulated server, in virtual time (see `adversary`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import grpc.aio
import pytest
from redis.asyncio import connection as redis_connection

from adversary import Network, WireLoop
from doyen.lease.clock import VirtualClock
from doyen.stores.port import Store, open_store
from doyen.testing import StoreHarness
from doyen.testing.faults import Faults
from model_consul import ConsulModel
from model_etcd import Channel, EtcdModel
from model_mysql import MySQLModel
from model_nats import NatsModel
from model_postgresql import PostgreSQLModel, keep_virtual_time
from model_redis import FAIR, RedisModel
from model_zookeeper import TICK_S, ZooKeeperModel
from test_zookeeper_adversary import Kazoo

ENGINES = ("consul", "etcd", "mysql", "nats", "postgresql", "redis", "zookeeper")
PORT = 1000


class WiredHarness(StoreHarness):
    """How the conformance suite reaches a simulated server. Each client has a host name, and so
    faults, of its own."""

    ttl_s = 3.0

    def __init__(self, engine: str, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.engine = engine
        self.virtual = VirtualClock()
        self.clock = self.virtual
        self.faults: list[Faults] = []
        self.network = Network()
        self.model: Any = None
        self._kazoo = Kazoo(patch)
        patch.setattr(grpc.aio, "insecure_channel", Channel)
        patch.setattr(redis_connection.Connection, "_connect", _connect)
        keep_virtual_time(patch)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = WireLoop(self.virtual)
        loop.network = self.network
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._serve(main))
        finally:
            self.network.close()
            if self.engine == "zookeeper":
                self._kazoo.close()

    async def _serve(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        world: Any = SimpleNamespace(clock=self.virtual, network=self.network)
        models: dict[str, Callable[[], Any]] = {
            "consul": ConsulModel,
            "etcd": EtcdModel,
            "mysql": MySQLModel,
            "nats": lambda: NatsModel(self.virtual.now),
            "postgresql": PostgreSQLModel,
            "redis": lambda: RedisModel(self.virtual, random.Random(0), FAIR),
            "zookeeper": lambda: ZooKeeperModel(world),
        }
        self.model = models[self.engine]()
        if self.engine != "zookeeper":
            await main()
            return
        self._kazoo.on(world)
        ticking = asyncio.create_task(self._tick())
        try:
            await main()
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.model.expire()

    async def open(self) -> Store:
        host, faults = f"h{len(self.faults)}", Faults(len(self.faults))
        self.faults.append(faults)
        await self.network.listen(host, PORT, self.model, faults)
        at = quote(str(self.network.directory / host), safe="")
        url = {
            "mysql": f"mysql://u:p@{host}:{PORT}/d",
            "postgresql": f"postgresql://u@{at}:{PORT}/d",
            "nats": f"nats://{host}:{PORT}/doyen?connect_timeout_s=1",
        }
        return await open_store(
            url.get(self.engine, f"{self.engine}://{host}:{PORT}"), self.context()
        )


async def _connect(self: redis_connection.Connection) -> None:
    """Without options of TCP, which the sockets of a test do not have."""
    self._reader, self._writer = await asyncio.open_connection(self.host, self.port)
