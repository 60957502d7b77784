"""Harnesses of the conformance suite: real servers behind proxies, and stores in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import servers
from doyen.lease.clock import VirtualClock
from doyen.model import leader_key, line_key, order_key
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Store, open_store
from doyen.testing import Faults, FaultyStore, LinkedHarness, Odds, run_virtual


class ProxyLink:
    """The network path of one client to the server, through a proxy of its own."""

    def __init__(self, harness: ServerHarness, server: servers.Server) -> None:
        self._harness = harness
        self._proxy = servers.Proxy(server)
        self._proxy.__enter__()

    async def open(self) -> Store:
        return await self._harness.open_at(self._proxy.url)

    async def cut(self, *, answers_only: bool = False) -> None:
        self._proxy.cut(*(("down",) if answers_only else ()))

    async def reset(self) -> None:
        self._proxy.reset()

    async def delay(self, answers_s: float) -> None:
        self._proxy.delay(answers_s, "down")

    async def heal(self) -> None:
        self._proxy.heal()

    def close(self) -> None:
        self._proxy.close()


class ServerHarness(LinkedHarness):
    """How the suite reaches a server of its own. Subclasses implement writing foreign values."""

    def __init__(self, server: servers.Server) -> None:
        super().__init__()
        self.server = server
        self._links: list[ProxyLink] = []

    async def open_at(self, url: str) -> Store:
        """Open a client at the URL of the server or of a proxy in front of it."""
        return await open_store(url, self.context())

    async def open(self) -> Store:
        return await self.open_at(self.server.url)

    async def restart(self) -> None:
        await asyncio.to_thread(self.server.restart)

    async def link(self) -> ProxyLink:
        link = ProxyLink(self, self.server)
        self._links.append(link)
        return link

    async def close_clients(self) -> None:
        for link in self._links:
            await link.heal()
        await super().close_clients()
        while self._links:
            self._links.pop().close()


class VirtualLink:
    """The simulated network path of one client to a store in this process, in virtual time."""

    def __init__(self, harness: VirtualHarness) -> None:
        self._harness = harness
        self._faults = Faults()
        self._stores: list[FaultyStore] = []

    async def open(self) -> Store:
        store = self._harness.faulty(await self._harness.open(), self._faults)
        self._stores.append(store)
        return store

    async def cut(self, *, answers_only: bool = False) -> None:
        self._faults.cut(answers_only=answers_only)

    async def reset(self) -> None:
        for store in self._stores:
            self._harness.was_reset(store)
        self._faults.heal()

    async def delay(self, answers_s: float) -> None:
        self._faults.odds = Odds(late=1.0, delay_s=answers_s)

    async def heal(self) -> None:
        self._faults.odds = Odds()
        self._faults.heal()


class VirtualHarness(LinkedHarness):
    """How the suite reaches a memory store, or a variant of it, in virtual time."""

    ttl_s = 5.0
    server_type: type[MemoryServer] = MemoryServer
    store_type: type[MemoryStore] = MemoryStore
    faulty: type[FaultyStore] = FaultyStore

    def __init__(self) -> None:
        super().__init__()
        self.virtual = VirtualClock()
        self.clock = self.virtual
        self.server = self.server_type(self.virtual)

    async def open(self) -> Store:
        return self.store_type(self.server, self.context())

    async def link(self) -> VirtualLink:
        return VirtualLink(self)

    def was_reset(self, store: FaultyStore) -> None:
        """Called when the connection of this client was reset."""

    async def deface(self, name: str) -> None:
        for key in (leader_key(name), order_key(name), f"{line_key(name)}/stray"):
            self.server.put(key, b"\xff stray", None)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        run_virtual(main, clock=self.virtual)


class RelationalHarness(ServerHarness):
    """A database, with the prefix of its tables and `ff00` as a literal."""

    ttl_s = 0.4
    server: servers.MariaDB | servers.Postgres
    tables: str
    foreign: str

    async def restart(self) -> None:
        """The server is shared; tests that restart one start their own."""

    async def deface(self, name: str) -> None:
        leases, entries = f"{self.tables}leases", f"{self.tables}entries"
        statements = [
            f"DELETE FROM {leases} WHERE id = 'stray'",
            f"INSERT INTO {leases} VALUES ('stray', -1, 0, 0)",
        ]
        for path in (leader_key(name), order_key(name), f"{line_key(name)}/stray"):
            row = f"'{path}', {self.foreign}, -1, -1, 'stray'"
            columns = "path, value, revision, version, lease"
            statements.append(f"INSERT INTO {entries} ({columns}) VALUES ({row})")
        for statement in statements:
            await asyncio.to_thread(self.server.query, statement)
