"""How the suite reaches a store, and how a promise becomes a test."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from doyen.lease.clock import Clock, SystemClock
from doyen.model import Lease
from doyen.stores.port import Context, Store

__all__ = ["StoreHarness", "leased", "listed", "promise"]


class StoreHarness(ABC):
    """How the suite reaches one store. A harness serves one test."""

    ttl_s: float = 1.0
    """The ttl that tests ask for. As short as the store and the machine can keep to."""
    patience_s: float = 10.0
    """How long to wait for what must come, beyond the time the store itself may take."""
    racers: int = 8
    """How many clients race each other."""
    clock: Clock = SystemClock()

    def __init__(self) -> None:
        self._opened: list[Store] = []
        self._names = uuid.uuid4().hex[:12]

    @abstractmethod
    async def open(self) -> Store:
        """Open another independent client of the same store, on the running loop."""

    async def elapse(self, seconds: float) -> None:
        """Let time pass, for the store as well."""
        await asyncio.sleep(seconds)

    async def restart(self) -> None:
        """Stop the store and start it again, if that can be done. Every client is closed."""
        return

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one test's coroutine on an event loop of the right kind."""
        asyncio.run(main())

    def context(self) -> Context:
        return Context(self.clock, lambda _: None)

    async def client(self) -> Store:
        """A client that is closed when the test ends."""
        store = await self.open()
        self._opened.append(store)
        return store

    async def close_clients(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    def name(self, name: str = "e") -> str:
        """An election of this test alone."""
        return f"{self._names}-{name}"

    async def within(self, what: str, reached: Callable[[], Awaitable[bool]]) -> None:
        """Look until it is so; fail if it does not come to be within the store's own bounds."""
        deadline = self.now() + self._bound_s()
        while not await reached():
            if self.now() > deadline:
                pytest.fail(f"within {self._bound_s():g} s it did not come to pass that {what}")
            await self.elapse(self.ttl_s / 20)

    async def told(self, event: asyncio.Event, what: str) -> None:
        """Wait to be told, looking at nothing meanwhile."""
        try:
            async with asyncio.timeout(self._bound_s()):
                await event.wait()
        except TimeoutError:
            pytest.fail(f"no notification within {self._bound_s():g} s of this: {what}")
        event.clear()

    async def shows(self, store: Store, key: str, value: bytes | None) -> None:
        """The store shows this value at `key`: at once, if its reads are linearizable."""

        async def so() -> bool:
            entry = await store.get(key)
            return (None if entry is None else entry.value) == value

        if store.capabilities.linearizable_reads:
            assert await so(), f"a read did not show {value!r}, which had been acknowledged"
        else:
            await self.within(f"{key} reads {value!r}", so)

    async def unhurried(self, attempt: Callable[[], Awaitable[bool]]) -> None:
        """Repeat a statement about time until the machine was quick enough to make it."""
        for _ in range(10):
            if await attempt():
                return
        pytest.fail(f"this machine is too slow for a ttl of {self.ttl_s} s: raise the harness's")

    def slow(self, since: float) -> bool:
        """Whether so much of the ttl has passed that the lease may rightly have ended."""
        return self.now() - since > 0.8 * self.ttl_s

    def now(self) -> float:
        """Seconds on the loop's clock."""
        return asyncio.get_running_loop().time()

    def _bound_s(self) -> float:
        store = self._opened[0].capabilities
        return self.ttl_s * store.expiry_factor + store.notice_s + self.patience_s


H = TypeVar("H", bound=StoreHarness)


def promise(body: Callable[[Any, H], Coroutine[Any, Any, None]]) -> Callable[[Any, H], None]:
    """Make a test of a coroutine: run by the harness, with its clients closed at the end."""

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
    """A client, and a lease that is long enough not to end during the test."""
    store = await h.client()
    return store, await store.grant(h.ttl_s * 60)


async def listed(store: Store, prefix: str) -> list[bytes]:
    return [entry.value for entry in await store.list(prefix)]
