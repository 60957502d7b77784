"""The harness by which the suite reaches a store, and the decorator that makes a promise a test."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from doyen.lease.clock import Clock, SystemClock
from doyen.model import Entry, Lease, Version
from doyen.stores.port import Context, Store


class StoreHarness(ABC):
    """How the suite reaches one store. Each test has a harness of its own."""

    ttl_s: float = 1.0
    """The ttl of the leases in tests: as short as the store and the machine can sustain."""
    patience_s: float = 10.0
    """How long to wait for what must happen, in addition to the time that the store may take."""
    racers: int = 8
    """The number of clients that compete with each other."""
    crowd: int = 200
    """The number of leases whose entries are under one prefix."""
    clock: Clock = SystemClock()
    _ends_only: bool = False

    def __init__(self) -> None:
        self._opened: list[Store] = []
        self._names = uuid.uuid4().hex[:12]

    @abstractmethod
    async def open(self) -> Store:
        """Open another independent client of the same store, on the running loop."""

    async def elapse(self, seconds: float) -> None:
        """Wait until time has passed for the test and for the store."""
        await asyncio.sleep(seconds)

    async def restart(self) -> None:
        """Stop the store and start it again, if possible. All clients are closed before."""
        return

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the coroutine of one test on a suitable event loop."""
        asyncio.run(main())

    def context(self) -> Context:
        return Context(self.clock, lambda _: None, ends_only=self._ends_only)

    async def ender(self) -> Store:
        """Open a client that is used to end leases and for nothing else."""
        self._ends_only = True
        try:
            return await self.client()
        finally:
            self._ends_only = False

    async def client(self) -> Store:
        """Open a client that is closed when the test ends."""
        store = await self.open()
        self._opened.append(store)
        return store

    async def close_clients(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    def name(self, name: str = "e") -> str:
        """Return an election name that no other test uses."""
        return f"{self._names}-{name}"

    async def within(self, what: str, reached: Callable[[], Awaitable[bool]]) -> None:
        """Poll until `reached` returns true. Fail if that takes longer than the store may take."""
        deadline = self.now() + self._bound_s()
        while not await reached():
            if self.now() > deadline:
                pytest.fail(f"not reached within {self._bound_s():g} s: {what}")
            await self.elapse(self.ttl_s / 20)

    async def gone(self, store: Store, key: str, what: str) -> None:
        """Wait until there is no entry at `key`."""

        async def absent() -> bool:
            return await store.get(key) is None

        await self.within(what, absent)

    async def notified(self, event: asyncio.Event, what: str) -> None:
        """Wait for a notification without reading the store meanwhile."""
        try:
            async with asyncio.timeout(self._bound_s()):
                await event.wait()
        except TimeoutError:
            pytest.fail(f"no notification within {self._bound_s():g} s: {what}")
        event.clear()

    async def shows(self, store: Store, key: str, value: bytes | None) -> None:
        """Assert that `key` has this value, immediately if the store's reads are linearizable."""

        async def matches() -> bool:
            entry = await store.get(key)
            return (None if entry is None else entry.value) == value

        if store.capabilities.linearizable_reads:
            assert await matches(), (
                f"a read of {key} did not return {value!r}, an acknowledged state"
            )
        else:
            await self.within(f"{key} reads {value!r}", matches)

    async def retry_while_slow(self, attempt: Callable[[], Awaitable[bool]]) -> None:
        """Repeat a test of timing until the machine was fast enough for its result to count.

        `attempt` returns whether it was.
        """
        for _ in range(10):
            if await attempt():
                return
        pytest.fail(f"this machine is too slow for a ttl of {self.ttl_s} s: raise harness.ttl_s")

    def slow(self, since: float) -> bool:
        """Whether so much of the ttl has passed that the lease may have ended."""
        return self.now() - since > 0.8 * self.ttl_s

    def now(self) -> float:
        """The time of the event loop, in seconds."""
        return asyncio.get_running_loop().time()

    def _bound_s(self) -> float:
        store = self._opened[0].capabilities
        return self.ttl_s * store.expiry_factor + store.notice_s + self.patience_s


H = TypeVar("H", bound=StoreHarness)


def promise(body: Callable[[Any, H], Coroutine[Any, Any, None]]) -> Callable[[Any, H], None]:
    """Make a test from a coroutine: the harness runs it, and its clients are closed at the end."""

    def test(self: object, store_harness: H) -> None:
        async def main() -> None:
            try:
                await body(self, store_harness)
            finally:
                await store_harness.close_clients()

        store_harness.run(main)

    test.__name__, test.__qualname__, test.__doc__ = (
        body.__name__,
        body.__qualname__,
        body.__doc__,
    )
    return test


async def leased(h: StoreHarness) -> tuple[Store, Lease]:
    """Open a client and grant it a lease that does not end during the test."""
    store = await h.client()
    return store, await store.grant(h.ttl_s * 60)


async def put(store: Store, key: str, value: bytes, version: Version | None = None) -> Entry:
    """Write an entry, and assert that its version was the expected one."""
    entry = await store.put(key, value, if_version=version)
    assert entry is not None
    return entry


async def read(store: Store, key: str) -> Entry:
    """Read an entry that must exist."""
    entry = await store.get(key)
    assert entry is not None
    return entry


async def listed(store: Store, prefix: str) -> list[bytes]:
    return [entry.value for entry in await store.list(prefix)]


def whole_update(found: Entry, before: Entry) -> None:
    """Assert that an update of `before` to the value "after" was carried out fully or not at
    all."""
    assert (found.revision, found.lease) == (before.revision, before.lease)
    assert found.value in (b"before", b"after")
    assert (found.value == b"before") == (found.version == before.version)
