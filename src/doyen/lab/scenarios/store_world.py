"""The world of scenarios about elections in a store: processes that share one store.

Each process has a session of its own, with everything that users run from the session downward, on
a memory store at a distance of one millisecond. A process can be killed or paused, as by a signal:
its session, its timers and the answers on their way to it stop with it; the store does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context as Variables
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from doyen.election.options import SessionSettings
from doyen.lab.processes import LabLoop, Process, quiet
from doyen.lab.scenarios.transcript import Transcript
from doyen.lease.clock import VirtualClock
from doyen.lease.runtime import InlineRuntime
from doyen.model import Lease
from doyen.session import Session
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Watch
from doyen.testing.faults import Faults, FaultyStore

T = TypeVar("T")

TTL_S = 5.0
"""As in the documents: `client.lease(5)`."""
ONE_WAY_S = 0.001


class StoreWorld:
    """A store, and the processes that use it."""

    def __init__(self, transcript: Transcript, clock: VirtualClock, *, local: bool) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, LabLoop)
        self.transcript = transcript
        self.loop = loop
        self.clock = clock
        self.server = MemoryServer(clock)
        self.outside = copy_context()
        self.notified: list[tuple[float, str]] = []
        """The times and receivers of the store's notifications."""
        self.calls: list[tuple[float, str]] = []
        """The times and operations of the requests to the store."""
        self.local = local
        """Whether the store has no distance. That is faster, but no process can be stopped then."""
        self.participants: dict[str, Participant] = {}

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def record(self, subject: str, predicate: str) -> None:
        self.transcript.record(self.now, subject, predicate)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let time pass until the condition holds."""
        while not condition():  # noqa: ASYNC110  (virtual time costs nothing)
            await asyncio.sleep(0.01)

    def start(
        self, name: str, run: Callable[[Session], Awaitable[None]], *, ttl_s: float = TTL_S
    ) -> Participant:
        """Start a process that runs this with its session."""
        participant = self.participants[name] = Participant(self, name)
        participant.start(self._run(participant, run, ttl_s))
        return participant

    async def _run(
        self, participant: Participant, run: Callable[[Session], Awaitable[None]], ttl_s: float
    ) -> None:
        store = RemoteStore(self, participant)
        runtime = InlineRuntime(self.clock, participant.number)
        settings = SessionSettings(url="memory://", ttl_s=ttl_s)
        async with Session(settings, runtime, store) as session:
            await run(session)

    async def close(self) -> None:
        """End all processes, including killed and paused ones."""
        tasks = []
        for participant in self.participants.values():
            participant.release()
            tasks += [task for task in participant.tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Participant(Process):
    """One process. What happens to it is recorded."""

    def __init__(self, world: StoreWorld, name: str) -> None:
        super().__init__(world.loop, name, len(world.participants) + 1)
        self._world = world

    def kill(self) -> None:
        self._world.record(self.machine, "is killed")
        self.dead = True

    def pause(self) -> None:
        self._world.record(self.machine, "is paused")
        super().pause()

    def resume(self) -> None:
        self._world.record(self.machine, "resumes")
        super().resume()


class RemoteStore(FaultyStore):
    """The store as a process sees it: requests are executed elsewhere, a millisecond away."""

    def __init__(self, world: StoreWorld, participant: Participant) -> None:
        store = MemoryStore(world.server, Context(world.clock, lambda _: None))
        super().__init__(store, Faults())
        self._world = world
        self._participant = participant
        self._inside: Variables = participant.context
        self._local = world.local

    async def _call(
        self,
        operation: str,
        about: str,
        do: Callable[[], Awaitable[T]],
        lease: Lease | None = None,
    ) -> T:
        self._world.calls.append((self._world.now, operation))
        if self._local:
            return await do()
        await asyncio.sleep(ONE_WAY_S)

        async def execute() -> T:
            return await do()

        result = await self._world.loop.create_task(execute(), context=self._world.outside.copy())
        await asyncio.sleep(ONE_WAY_S)
        return result

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        world, name = self._world, self._participant.machine

        def changed() -> None:
            world.notified.append((world.now, name))
            if self._local:
                notify()
            else:
                world.loop.call_later(ONE_WAY_S, notify, context=self._inside)

        return await self._call("watch", scope, partial(self._store.watch, scope, changed))


def run_store_world(
    transcript: Transcript,
    main: Callable[[StoreWorld], Coroutine[Any, Any, T]],
    *,
    local: bool = False,
) -> T:
    """Run a scenario in virtual time, in a world of its own."""
    clock = VirtualClock()

    async def run() -> T:
        world = StoreWorld(transcript, clock, local=local)
        try:
            return await main(world)
        finally:
            await world.close()

    with quiet(), asyncio.Runner(loop_factory=lambda: LabLoop(clock)) as runner:
        return runner.run(run())
