"""What the tests of sessions share: a store in virtual time with any number of sessions on it."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from doyen import Session, Term
from doyen.election.core import SessionCore
from doyen.election.options import SessionSettings
from doyen.events import Event, Record
from doyen.lease.clock import Clock, SystemClock, VirtualClock
from doyen.lease.runtime import InlineRuntime, ThreadRuntime
from doyen.model import Claim, leader_key, line_key
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Store
from doyen.testing import run_virtual
from doyen.testing.faults import Faults, FaultyStore

TTL_S = 6.0
STOP_BUDGET_S = 1.0
VALID_S = TTL_S * 0.995 - STOP_BUDGET_S
AGES_S = 100_000.0
"""Virtual time passes for ever while a session renews: a test that takes this long hangs."""


class Place:
    """A memory store in virtual time. Each session of it stands for a process of its own."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.server = MemoryServer(self.clock)
        self.sessions = AsyncExitStack()
        self.events: list[Record] = []
        self._seeds = itertools.count()

    async def open(
        self,
        faults: Faults | None = None,
        *,
        clock: Clock | None = None,
        wrap: Callable[[Store], Store] | None = None,
        **settings: Any,
    ) -> Session:
        """A session, open until the test ends."""
        session = self.session(faults, clock=clock, wrap=wrap, **settings)
        return await self.sessions.enter_async_context(session)

    def session(
        self,
        faults: Faults | None = None,
        *,
        clock: Clock | None = None,
        wrap: Callable[[Store], Store] | None = None,
        **settings: Any,
    ) -> Session:
        """A session yet to be entered."""
        clock = clock or self.clock
        store: Store = MemoryStore(self.server, Context(clock, lambda event: None))
        store = FaultyStore(store, faults or Faults())
        runtime = InlineRuntime(clock, next(self._seeds))
        settings = {"url": "memory://", "ttl_s": TTL_S, "sinks": (self.events.append,), **settings}
        return Session(SessionSettings(**settings), runtime, wrap(store) if wrap else store)

    def holder(self, election: str = "e") -> str | None:
        """Whose record stands in the store."""
        record = self.server.get(leader_key(election))
        return None if record is None else Claim.decode(record.value).name

    def line(self, election: str = "e") -> list[str]:
        """Who stands in line, in order."""
        return [Claim.decode(ticket.value).name for ticket in self.server.list(line_key(election))]

    def seen(self, *kinds: type[Event]) -> list[Event]:
        """The events of these kinds, of all sessions, in order."""
        return [record.event for record in self.events if isinstance(record.event, kinds)]

    def end_lease(self, session: Session) -> None:
        """As an operator or the store's own mistake would: the lease is gone, unannounced."""
        self.server.revoke(keepalive_of(session).lease.id)

    async def close(self) -> None:
        await self.sessions.aclose()
        await asyncio.sleep(2 * TTL_S)
        assert self.server.list("elections") == [], "something was left behind in the store"


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function that takes a `Place` first: run it in virtual time.

    Of every test it is asked that its task has no cancellation left over, and that the store is
    empty once the sessions are closed and the last lease has run out.
    """

    async def whole(place: Place, given: dict[str, Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(AGES_S):
                await test(place, **given)
            assert task.cancelling() == 0
            await asyncio.sleep(0)
        except BaseException:
            await place.sessions.aclose()
            raise
        await place.close()

    def run(**given: Any) -> None:
        place = Place()
        run_virtual(whole(place, given), clock=place.clock)

    signature = inspect.signature(test)
    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:], return_annotation=None
    )
    return run


def core_of(session: Any) -> SessionCore:
    core: SessionCore = session._core
    return core


def keepalive_of(session: Any) -> Any:
    keepalive = core_of(session).leases._shared
    assert keepalive is not None
    return keepalive


def soon(delay_s: float, call: Callable[..., object], *args: object) -> None:
    """Have something happen in a while."""
    asyncio.get_running_loop().call_later(delay_s, call, *args)


def now() -> float:
    return round(asyncio.get_running_loop().time(), 6)


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait for a condition, in virtual time or in real time, and fail if it does not come."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is not ours to signal
            await asyncio.sleep(0.01)


def until_blocking(condition: Callable[[], object], within_s: float = 20.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "it did not come about in time"
        time.sleep(0.005)


@asynccontextmanager
async def real_session(server: MemoryServer, faults: Faults | None = None, **settings: Any) -> Any:
    """A session on doyen's own threads and the system's clock, on a link that can be cut."""
    runtime = ThreadRuntime.acquire()

    async def open_link() -> Store:
        context = Context(runtime.clock, lambda event: None)
        return FaultyStore(MemoryStore(server, context), faults or Faults())

    store = await runtime.do(open_link())
    async with Session(SessionSettings(url="memory://", **settings), runtime, store) as session:
        yield session


def real_server() -> MemoryServer:
    return MemoryServer(SystemClock())


async def lead_until_told(
    session: Session, stop: asyncio.Event, election: str = "e", **options: Any
) -> Term:
    """A candidate that leads until it is told to stop, and returns its term."""
    async with session.campaign(election, **options) as term:
        await stop.wait()
    return term


async def gather_leaders(session: Session, seen: list[str | None]) -> None:
    async for leader in session.observe("e"):
        seen += [leader.name if leader else None]
