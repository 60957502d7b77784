"""Where scenarios about elections in a store are acted: processes that meet in one.

Each process has a session of its own, with everything that users run from the session downward, on
a memory store that is a millisecond away. A process can be killed or frozen, as by a signal: its
session, its timers and the answers that are on their way to it stop with it; the store does not.

Imports the lab's machines, the session and the memory store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context as Variables
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from doyen.election.options import SessionSettings
from doyen.lab.machines import LabLoop, Process, undisturbed
from doyen.lab.scenarios.play import Script
from doyen.lease.clock import VirtualClock
from doyen.lease.runtime import InlineRuntime
from doyen.model import Lease
from doyen.session import Session
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Watch
from doyen.testing.faults import Faults, FaultyStore

__all__ = ["TTL_S", "Participant", "Place", "meet"]

T = TypeVar("T")

TTL_S = 5.0
"""As in the documents: `client.lease(5)`."""
AWAY_S = 0.001


class Place:
    """A store, and the processes that meet in it."""

    def __init__(self, script: Script, clock: VirtualClock, *, near: bool) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, LabLoop)
        self.script = script
        self.loop = loop
        self.clock = clock
        self.server = MemoryServer(clock)
        self.outside = copy_context()
        self.woken: list[tuple[float, str]] = []
        """When the store has notified whom."""
        self.calls: list[tuple[float, str]] = []
        """When the store was asked for what."""
        self.near = near
        """The store is right here: cheaper, and nobody can be stopped."""
        self.members: dict[str, Participant] = {}

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def say(self, who: str, what: str) -> None:
        self.script.say(self.now, who, what)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let time pass until it is so."""
        while not condition():  # noqa: ASYNC110  (virtual time costs nothing)
            await asyncio.sleep(0.01)

    def member(
        self, name: str, live: Callable[[Session], Awaitable[None]], *, ttl_s: float = TTL_S
    ) -> Participant:
        """Start a process that does this with its session."""
        member = self.members[name] = Participant(self, name)
        member.process.start(self._live(member, live, ttl_s))
        return member

    async def _live(
        self, member: Participant, live: Callable[[Session], Awaitable[None]], ttl_s: float
    ) -> None:
        store = Remote(self, member)
        runtime = InlineRuntime(self.clock, member.process.number)
        settings = SessionSettings(url="memory://", ttl_s=ttl_s)
        async with Session(settings, runtime, store) as session:
            await live(session)

    async def close(self) -> None:
        """Let everybody who was stopped come to an end, and end them."""
        tasks = []
        for member in self.members.values():
            member.process.bury()
            tasks += [task for task in member.process.tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Participant:
    """One process of the place."""

    def __init__(self, place: Place, name: str) -> None:
        self._place = place
        self.name = name
        self.process = Process(place.loop, name, len(place.members) + 1)

    def kill(self) -> None:
        self._place.say(self.name, "is killed")
        self.process.dead = True

    def freeze(self) -> None:
        self._place.say(self.name, "is frozen")
        self.process.freeze()

    def thaw(self) -> None:
        self._place.say(self.name, "goes on")
        self.process.thaw()


class Remote(FaultyStore):
    """The store as a process sees it: what is asked is done elsewhere, a millisecond away."""

    def __init__(self, place: Place, member: Participant) -> None:
        store = MemoryStore(place.server, Context(place.clock, lambda _: None))
        super().__init__(store, Faults())
        self._place = place
        self._member = member
        self._inside: Variables = member.process.context
        self._near = place.near

    async def _call(
        self,
        operation: str,
        about: str,
        do: Callable[[], Awaitable[T]],
        lease: Lease | None = None,
    ) -> T:
        self._place.calls.append((self._place.now, operation))
        if self._near:
            return await do()
        await asyncio.sleep(AWAY_S)

        async def there() -> T:
            return await do()

        result = await self._place.loop.create_task(there(), context=self._place.outside.copy())
        await asyncio.sleep(AWAY_S)
        return result

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        place, name = self._place, self._member.name

        def told() -> None:
            place.woken.append((place.now, name))
            if self._near:
                notify()
            else:
                place.loop.call_later(AWAY_S, notify, context=self._inside)

        return await self._call("watch", scope, partial(self._store.watch, scope, told))


def meet(
    script: Script, main: Callable[[Place], Coroutine[Any, Any, T]], *, near: bool = False
) -> T:
    """Run it in virtual time, in a place of its own."""
    clock = VirtualClock()

    async def whole() -> T:
        place = Place(script, clock, near=near)
        try:
            return await main(place)
        finally:
            await place.close()

    with undisturbed(), asyncio.Runner(loop_factory=lambda: LabLoop(clock)) as runner:
        return runner.run(whole())
