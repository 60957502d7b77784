"""doyen's own quorum: one node per process, or three nodes in one process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, Store, open_store

from . import wire
from .cluster import Cluster, Member
from .process import HOST

T = TypeVar("T")

PROGRAM = Path(__file__).parents[1] / "quorum_nodes.py"


class QuorumNode(Member):
    """One node, by default a quorum of one. Options are those of
    `doyen.quorum.node.server.Options`."""

    engine = "quorum"
    scheme = "doyen"

    @property
    def addresses(self) -> dict[str, str]:
        return {peer.name: peer.address for peer in self.peers}

    @property
    def nodes(self) -> list[str]:
        return [self.name]

    def command(self) -> list[str]:
        peers, settings = json.dumps(self.addresses), json.dumps(self.options)
        return [sys.executable, str(PROGRAM), str(self.folder), peers, settings, *self.nodes]

    def ping(self) -> None:
        if wire.http(self.port, "GET", "/readyz")[0] != 200:
            raise ValueError("the node knows no leader")

    def leads(self) -> bool:
        return wire.http(self.port, "GET", "/leader", timeout_s=0.5)[0] == 200

    def put(self, key: str, value: bytes) -> None:
        async def put(store: Store) -> None:
            assert await store.put(key, value, if_version=None) is not None

        asyncio.run(self._with_store(put))

    def get(self, key: str) -> bytes | None:
        async def get(store: Store) -> bytes | None:
            entry = await store.get(key)
            return None if entry is None else entry.value

        return asyncio.run(self._with_store(get))

    async def _with_store(self, use: Callable[[Store], Awaitable[T]]) -> T:
        store = await open_store(self.url, Context(SystemClock(), lambda event: None))
        try:
            return await use(store)
        finally:
            await store.close()


class Quorum(QuorumNode):
    """Three nodes in one process. The URL names the first node, which may not be the leader."""

    port_count = 3

    @property
    def addresses(self) -> dict[str, str]:
        return {node: f"{HOST}:{port}" for node, port in zip(self.nodes, self.ports, strict=True)}

    @property
    def nodes(self) -> list[str]:
        return ["n1", "n2", "n3"]


class QuorumCluster(Cluster[QuorumNode]):
    """Nodes of one quorum, each in its own process."""

    member = QuorumNode
