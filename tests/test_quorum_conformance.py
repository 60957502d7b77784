"""A quorum of doyen's own keeps the promises that every store makes, whichever node is asked."""

from __future__ import annotations

import asyncio

import pytest

from doyen.model import leader_key, line_key, order_key
from doyen.stores.port import Store, open_store
from doyen.testing import LinkedStoreConformance, StoreConformance, StoreHarness
from fixtures import shared
from linked import ProxyLink, ServerHarness
from servers import QuorumCluster


class Harness(ServerHarness):
    ttl_s = 1.0

    def __init__(self, quorum: QuorumCluster) -> None:
        super().__init__(quorum.members[0])
        self._quorum = quorum

    async def open(self) -> Store:
        return await open_store(self._quorum.url, self.context())

    async def link(self) -> ProxyLink:
        """To each client another node."""
        self.server = self._quorum.members[len(self._links) % len(self._quorum.members)]
        return await super().link()

    async def deface(self, name: str) -> None:
        """Only clients of doyen's own protocol can write here; such a one may be mistaken."""
        store = await self.open()
        for key in (leader_key(name), order_key(name), f"{line_key(name)}/stray"):
            await store.put(key, b"\xff stray", if_version=None)
        await store.close()

    async def restart(self) -> None:
        """One node after the other, so that the quorum goes on."""
        for member in self._quorum.members:
            await asyncio.to_thread(member.restart)


class FollowersOnly(Harness):
    async def open(self) -> Store:
        followers = await asyncio.to_thread(self._quorum.followers)
        return await open_store(followers[0].url, self.context())

    async def restart(self) -> None:
        """All at once."""
        for member in self._quorum.members:
            member.kill()
        await asyncio.to_thread(self._quorum.start)


quorum = shared(QuorumCluster)


class TestQuorum(LinkedStoreConformance):
    @pytest.fixture
    def store_harness(self, quorum: QuorumCluster) -> StoreHarness:
        return Harness(quorum)


class TestByAFollower(StoreConformance):
    @pytest.fixture
    def store_harness(self, quorum: QuorumCluster) -> StoreHarness:
        return FollowersOnly(quorum)
