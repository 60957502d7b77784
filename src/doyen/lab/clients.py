"""Clients of the keyspace in a world of whole nodes.

A `ClientMachine` is a process with a store on `doyen://`. It keeps leases, has a dozen watches, and
creates, puts, updates, deletes, queues and reads. `ClientChecker` checks what it sees. It also
tries to connect as a peer and to raise tokens with a client's secret, which must be refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from doyen.errors import DoyenError, LeaseGone, StoreError, StoreUnavailable, TicketGone
from doyen.lab.client_checker import (
    CLIENT_TTL_S,
    ObservedWatch,
    RequestStart,
    same_entry,
    version_number,
)
from doyen.lab.machines import CLIENT_SECRET, SimulatedMachine
from doyen.model import Entry, Lease
from doyen.quorum.protocol.connection import dial
from doyen.quorum.protocol.handshake import ConnectionIdentity
from doyen.quorum.protocol.security import Security
from doyen.stores.port import Context, Store, Watch, open_store
from doyen.stores.quorum.connection import QuorumWatch

GROUPS, KEYS = 5, 3
LEASES = 2
WATCHES = 12
CALL_S = 2.0
"""How long a client waits for an answer."""
PAUSE_S = 0.15
LARGE = 1100
"""The size of a value, or of a ticket's key, whose result nodes of the first version did not
keep."""
LONG = "l/" + "1" * LARGE
LINES = ("l/0", LONG)

T = TypeVar("T")


class ClientMachine(SimulatedMachine):
    """A client of the keyspace with leases, watches, writes and reads."""

    async def run(self) -> None:
        world = self.world
        nodes = ",".join(f"{name}:1" for name in world.plan.names)
        url = f"doyen://{CLIENT_SECRET}@{nodes}"
        assert self.process is not None
        self._checker = world.clients
        self._own = self.process
        self._checker.watches[self._own] = []
        self._known: dict[str, Entry] = {}
        """Entries as they were last seen."""
        self._tickets: list[Entry] = []
        self._leases: list[Lease] = []
        if self.rng.random() < 0.3:
            await self._try_forbidden(url)
        store: Store | None = None
        while store is None:
            try:
                store = await open_store(url, Context(self.clock, lambda _: None))
            except StoreError:
                await asyncio.sleep(0.2)
        for _ in range(LEASES):
            self._own.start(self._keep(store))
        for _ in range(WATCHES):
            group = f"k/{self.rng.randrange(GROUPS)}"
            scope = group if self.rng.random() < 0.3 else f"{group}/{self.rng.randrange(KEYS)}"
            self._own.start(self._watch(store, scope))
        for line in LINES:
            self._own.start(self._watch(store, line))
        await self._work(store)

    async def _try_forbidden(self, url: str) -> None:
        """Try what a client's secret does not permit."""
        node = self.rng.choice(self.world.plan.names)
        try:
            connection = await dial(
                f"{node}:1",
                ConnectionIdentity("lab", "n1" if node != "n1" else "n2", 1),
                role="peer",
                wanted=node,
                security=Security(peer_secret=CLIENT_SECRET.encode()),
                on_frames=lambda connection, frames: None,
                on_end=lambda connection, end: None,
            )
        except DoyenError:
            pass
        else:
            connection.abort()
            self.world.fail("role", f"{node} has accepted a client's secret as a peer's")
        try:
            store = await open_store(
                f"{url}?token_floor=1000000", Context(self.clock, lambda _: None)
            )
        except StoreError:
            return
        await store.close()
        self.world.fail("role", "tokens were raised with a client's secret")

    async def _ask(self, call: Awaitable[T], value: bytes | None = None) -> T | None:
        """Returns the answer, or None if there was none."""
        try:
            async with asyncio.timeout(CALL_S):
                return await call
        except StoreUnavailable:
            if value is not None:
                self._checker.refused(value)
        except (StoreError, TimeoutError):
            pass
        return None

    # Leases.

    async def _keep(self, store: Store) -> None:
        """Keep one lease after another alive for a while."""
        loop, rng, checker = self.world.loop, self.rng, self._checker
        while True:
            sent = loop.time()
            lease = await self._ask(store.grant(CLIENT_TTL_S))
            if lease is None:
                await asyncio.sleep(0.2)
                continue
            checker.granted(lease, self._own, sent)
            self._leases.append(lease)
            while rng.random() > 0.1:
                await asyncio.sleep(CLIENT_TTL_S / 3 * rng.uniform(0.7, 1.1))
                sent = loop.time()
                try:
                    async with asyncio.timeout(CLIENT_TTL_S / 2):
                        await store.renew(lease)
                except LeaseGone:
                    checker.gone(lease)
                    break
                except (StoreError, TimeoutError):
                    continue
                checker.renewed(lease, sent)
            self._leases.remove(lease)
            checker.abandoned(lease)
            if await self._ask(self._boxed(store.revoke(lease))) is not None:
                checker.revoked(lease)
                await self._list(store, "k")

    # Watches.

    async def _watch(self, store: Store, scope: str) -> None:
        watch = ObservedWatch(scope)
        notified = asyncio.Event()
        handle: Watch | None = None

        def notify() -> None:
            watch.notified_at = self.world.loop.time()
            notified.set()
            if isinstance(handle, QuorumWatch) and (entry := store.carried(handle)) is not None:
                self._checker.carried(scope, entry, handle.revision)

        begin = store.watch_entry if scope.endswith(("/0", "/1")) else store.watch
        while True:
            try:
                handle = await begin(scope, notify)
            except StoreError:
                await asyncio.sleep(0.2)
            else:
                break
        watch.established_at = self.world.loop.time()
        self._checker.watches[self._own].append(watch)
        while True:
            notified.clear()
            await self._list(store, scope)
            await notified.wait()

    # Reads and writes.

    async def _work(self, store: Store) -> None:
        rng = self.rng
        actions: list[Callable[[Store, str], Awaitable[None]]] = [
            *(self._create, self._create, self._create, self._put, self._delete),
            *(self._enqueue, self._enqueue, self._get, self._ahead),
        ]
        while True:
            await asyncio.sleep(rng.expovariate(1 / PAUSE_S))
            # After the end of all faults entries are deleted, to make room within the quota.
            healed = self.world.loop.time() >= self.world.measurements.healed_at
            action = rng.choice((self._get, self._delete) if healed else actions)
            await action(store, f"k/{rng.randrange(GROUPS)}/{rng.randrange(KEYS)}")

    def _value(self) -> bytes:
        number = self._checker.next_number()
        return b"op%d" % number + (b"." * LARGE if self.rng.random() < 0.7 else b"")

    async def _create(self, store: Store, key: str) -> None:
        if not self._leases:
            return
        start, value, lease = self._checker.begin(), self._value(), self.rng.choice(self._leases)
        made = await self._ask_leased(store.create(key, value, lease), lease, value)
        if made is None:
            return
        if made.won:
            self._checker.wrote(start, made.entry)
        else:
            self._entry_read(start, key, made.entry)
        self._known[key] = made.entry

    async def _ask_leased(self, call: Awaitable[T], lease: Lease, value: bytes) -> T | None:
        async def called() -> T:
            try:
                return await call
            except LeaseGone:
                self._checker.gone(lease)
                raise

        return await self._ask(called(), value)

    async def _put(self, store: Store, key: str) -> None:
        start, value = self._checker.begin(), self._value()
        known = self._known.get(key)
        version = None if known is None else version_number(known)
        if known is not None and known.lease is not None and version_number(known) % 2:
            call = store.update(known, value)
        else:
            call = store.put(key, value, if_version=version)
        entry = await self._ask(self._boxed(call), value)
        if entry is None:
            return
        if entry[0] is not None:
            self._checker.wrote(start, entry[0])
            self._known[key] = entry[0]
        else:
            self._checker.version_differed(start, key, version)

    async def _delete(self, store: Store, key: str) -> None:
        known = self._known.pop(key, None)
        if known is None:
            return
        version = version_number(known)
        start = self._checker.begin()
        done = await self._ask(store.delete(key, if_version=version))
        if done:
            self._checker.deleted(key, version)
        elif done is False:
            self._checker.version_differed(start, key, version)

    async def _enqueue(self, store: Store, key: str) -> None:
        if not self._leases:
            return
        start, value = self._checker.begin(), b"op%d" % self._checker.next_number()
        line, lease = self.rng.choice(("l/0", LONG, LONG)), self.rng.choice(self._leases)
        rank = self.rng.choice((0, 0, 1))
        ticket = await self._ask_leased(store.enqueue(line, value, lease, rank=rank), lease, value)
        if ticket is not None:
            self._checker.wrote(start, ticket)
            self._tickets = [*self._tickets[-4:], ticket]

    async def _get(self, store: Store, key: str) -> None:
        start = self._checker.begin()
        found = await self._ask(self._boxed(store.get(key)))
        if found is not None:
            self._entry_read(start, key, found[0])
            self._checker.read_answered(self._own, start)
            if found[0] is not None:
                self._known[key] = found[0]
            else:
                self._known.pop(key, None)

    async def _list(self, store: Store, scope: str) -> None:
        if scope.count("/") == 2:
            await self._get(store, scope)
            return
        start = self._checker.begin()
        found = await self._ask(store.list(scope))
        if found is not None:
            keys = self.world.log.reference.keys

            def explains(index: int) -> bool:
                stored = keys.under(scope, index)
                return len(stored) == len(found) and all(map(same_entry, found, stored))

            self._checker.read(start, [scope], explains)
            self._checker.read_answered(self._own, start)

    async def _ahead(self, store: Store, key: str) -> None:
        """Read the ticket ahead of one of the client's own."""
        if not self._tickets:
            return
        start, keys = self._checker.begin(), self.world.log.reference.keys
        ticket = self._tickets[-1]
        found: list[Entry | None]
        try:
            async with asyncio.timeout(CALL_S):
                found = [await store.ahead(ticket)]
        except TicketGone:
            self._tickets.pop()
            gone = ticket.key
            self._checker.read(start, [gone], lambda index: keys.at(gone, index) is None)
            return
        except (StoreError, TimeoutError):
            return

        name = ticket.key.rpartition("/")[0]

        def explains(index: int) -> bool:
            line = [each for each in keys.under(name, index) if each.ticket]
            before = [each for each in line if each.key < ticket.key]
            return len(before) < len(line) and same_entry(found[0], before[-1] if before else None)

        self._checker.read(start, [name], explains)
        self._checker.read_answered(self._own, start)

    async def _boxed(self, call: Awaitable[T]) -> list[T]:
        """Wrap an answer that may be None, so that it differs from no answer."""
        return [await call]

    def _entry_read(self, start: RequestStart, key: str, entry: Entry | None) -> None:
        keys = self.world.log.reference.keys
        self._checker.read(start, [key], lambda index: same_entry(entry, keys.at(key, index)))
