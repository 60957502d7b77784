"""Support for tests of sessions: a store in virtual time with any number of sessions."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from doyen import Session, Term
from doyen.election.core import SessionCore
from doyen.election.options import SessionSettings
from doyen.events import Event, Record
from doyen.lease.clock import Clock, SystemClock, VirtualClock
from doyen.lease.runtime import InlineRuntime, ThreadRuntime
from doyen.model import KINDS, Claim, Reachable, Unreachable, leader_key, line_key
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Store
from doyen.testing import run_virtual
from doyen.testing.faults import Faults, FaultyStore

T = TypeVar("T")

TTL_S = 6.0
STOP_BUDGET_S = 1.0
VALID_S = TTL_S * 0.995 - STOP_BUDGET_S
AGES_S = 100_000.0
"""A test that takes this much virtual time hangs. While a session renews, time never stops."""


class Place:
    """A memory store in virtual time. Each session represents a separate process."""

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
        """Open a session that is closed when the test ends."""
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
        """Create a session without entering it."""
        clock = clock or self.clock
        store: Store = MemoryStore(self.server, Context(clock, lambda event: None))
        store = FaultyStore(store, faults or Faults())
        runtime = InlineRuntime(clock, next(self._seeds))
        settings = {"url": "memory://", "ttl_s": TTL_S, "sinks": (self.events.append,), **settings}
        return Session(SessionSettings(**settings), runtime, wrap(store) if wrap else store)

    def holder(self, election: str = "e") -> str | None:
        """The name in the leader record."""
        record = self.server.get(leader_key(election))
        return None if record is None else Claim.decode(record.value).name

    def line(self, election: str = "e") -> list[str]:
        """The names of the candidates in line, in order."""
        return [Claim.decode(ticket.value).name for ticket in self.server.list(line_key(election))]

    def seen(self, *kinds: type[Event]) -> list[Event]:
        """The events of these kinds, of all sessions, in order."""
        return [record.event for record in self.events if isinstance(record.event, kinds)]

    def end_lease(self, session: Session) -> None:
        """End the lease without notifying its holder, as an operator or a faulty store might."""
        self.server.revoke(keepalive_of(session).lease.id)

    async def close(self) -> None:
        await self.sessions.aclose()
        await asyncio.sleep(2 * TTL_S)
        entries = [entry for kind in (*KINDS, "barriers") for entry in self.server.list(kind)]
        kept = ("/spec", "/plan", "/size", "/state")
        left = [entry.key for entry in entries if not entry.key.endswith(kept)]
        assert left == [], "entries were left behind in the store"


def runner(run: Callable[..., None]) -> Callable[..., Callable[..., Any]]:
    """Make a decorator for tests that are coroutine functions. `run` calls such a function with its
    first parameter; the others are fixtures. `run` gets the keywords of the decorator."""

    def decorate(test: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if test is None:
            return partial(decorate, **options)

        def whole(**given: Any) -> None:
            run(partial(test, **given), **options)

        signature = inspect.signature(test)
        whole.__name__, whole.__doc__, whole.__module__ = (
            test.__name__,
            test.__doc__,
            test.__module__,
        )
        whole.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:], return_annotation=None
        )
        return whole

    return decorate


def run_in_place(test: Callable[[Place], Coroutine[Any, Any, None]]) -> None:
    """Run a test in virtual time.

    After each test, its task must have no pending cancellation, and the store must be empty once
    the sessions are closed and the last lease has expired.
    """
    place = Place()

    async def whole() -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(AGES_S):
                await test(place)
            assert task.cancelling() == 0
            await asyncio.sleep(0)
        except BaseException:
            await place.sessions.aclose()
            raise
        await place.close()

    run_virtual(whole(), clock=place.clock)


virtual = runner(run_in_place)


def core_of(session: Any) -> SessionCore:
    core: SessionCore = session._core
    return core


def keepalive_of(session: Any) -> Any:
    keepalive = core_of(session).leases._shared
    assert keepalive is not None
    return keepalive


def soon(delay_s: float, call: Callable[..., object], *args: object) -> None:
    """Call a function after a delay."""
    asyncio.get_running_loop().call_later(delay_s, call, *args)


def now() -> float:
    return round(asyncio.get_running_loop().time(), 6)


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait for a condition, in virtual or real time, and fail if it does not become true."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.01)


def until_blocking(condition: Callable[[], object], within_s: float = 20.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, f"condition not true within {within_s:g} s"
        time.sleep(0.005)


def promptly(attempt: Callable[[], float], within_s: float, attempts: int = 5) -> None:
    """Fail if each of several attempts takes longer than this. A busy machine delays some of them;
    code that waits for something delays each."""
    took_s: list[float] = []
    while not took_s or took_s[-1] >= within_s:
        assert len(took_s) < attempts, f"not within {within_s:g} s: {took_s}"
        took_s.append(attempt())


@asynccontextmanager
async def real_session(server: MemoryServer, faults: Faults | None = None, **settings: Any) -> Any:
    """A session on the doyen thread and the system clock, with fault injection."""
    runtime = ThreadRuntime.acquire()

    async def open_faulty() -> Store:
        context = Context(runtime.clock, lambda event: None)
        return FaultyStore(MemoryStore(server, context), faults or Faults())

    store = await runtime.do(open_faulty())
    async with Session(SessionSettings(url="memory://", **settings), runtime, store) as session:
        yield session


def real_server() -> MemoryServer:
    return MemoryServer(SystemClock())


async def lead_until_set(
    session: Session, stop: asyncio.Event, election: str = "e", **options: Any
) -> Term:
    """Lead until `stop` is set, and return the term."""
    async with session.campaign(election, **options) as term:
        await stop.wait()
    return term


def known(seen: T | Unreachable[Any] | Reachable) -> T:
    """What an observer got, which the store must have answered."""
    assert not isinstance(seen, Unreachable | Reachable)
    return seen


async def gather_leaders(session: Session, seen: list[str | None]) -> None:
    async for leader in session.observe("e"):
        if not isinstance(leader, Unreachable):
            seen += [leader.name if leader else None]
