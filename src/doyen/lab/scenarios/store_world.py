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

from doyen._waiting import shared
from doyen.election.options import SessionSettings
from doyen.errors import DoyenError
from doyen.events import Elected, Lost, Record, Resigned
from doyen.lab.observer import WorldObserver
from doyen.lab.processes import LabLoop, Process, is_unheard, quiet
from doyen.lab.scenarios.transcript import Transcript
from doyen.lease.clock import Clock, VirtualClock
from doyen.lease.runtime import InlineRuntime
from doyen.model import Entry, Lease, Version
from doyen.session import Session
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Creation, Watch
from doyen.testing.faults import Faults, FaultyStore

T = TypeVar("T")

TTL_S = 5.0
"""As in the documents: `client.lease(5)`."""
ONE_WAY_S = 0.001
PATIENCE_S = 20.0
"""A scenario that waits for something longer than this has failed."""


class NotReached(Exception):
    """What a scenario waits for has not happened. The message is the fact that does not hold."""


class ObservedServer(MemoryServer):
    """The store. What is written to it is reported to those who watch over a scenario.

    Keys in `careless` are the broken variant: there, the version that a writer expects is ignored.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.careless: set[str] = set()
        self.on_put: list[Callable[[str, bytes, Entry | None], None]] = []
        """Called with the key, the value, and what was stored; None if it was refused."""

    def put(self, key: str, value: bytes, if_version: Version | None) -> Entry | None:
        if key in self.careless:
            stored = self.get(key)
            if_version = None if stored is None else stored.version
        entry = super().put(key, value, if_version)
        for report in self.on_put:
            report(key, value, entry)
        return entry


class StoreWorld:
    """A store, and the processes that use it."""

    def __init__(self, transcript: Transcript, clock: VirtualClock, *, local: bool) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, LabLoop)
        self.transcript = transcript
        self.loop = loop
        self.clock = clock
        self.server = ObservedServer(clock)
        self.outside = copy_context()
        self.notified: list[tuple[float, str]] = []
        """The times and receivers of the store's notifications."""
        self.calls: list[tuple[float, str]] = []
        """The times and operations of the requests to the store."""
        self.local = local
        """Whether the store has no distance. That is faster, but no process can be stopped then."""
        self.participants: dict[str, Participant] = {}
        """The latest process of each name."""
        self._started: list[Participant] = []
        self._interceptions: dict[tuple[str, str, str], Callable[[], asyncio.Event | None]] = {}
        self.title = ""
        """What distinguishes it from the other worlds of its scenario, if there are several."""
        self.observer: WorldObserver | None = None
        self._unhandled: list[BaseException | None] = []
        """What callbacks have raised."""
        loop.set_exception_handler(
            lambda _, context: self._unhandled.append(context.get("exception"))
        )
        transcript.opened(self)

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def record(self, subject: str, predicate: str) -> None:
        self.transcript.record(self.now, subject, predicate)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let time pass until the condition holds. Raises `NotReached` if it does not."""
        until = self.now + PATIENCE_S
        while not condition():
            if self.now >= until:
                raise NotReached(f"what comes next happens within {PATIENCE_S:g} s")
            await asyncio.sleep(0.01)

    def start(
        self, name: str, run: Callable[[Session], Awaitable[None]], *, ttl_s: float = TTL_S
    ) -> Participant:
        """Start a process that runs this with its session."""
        participant = Participant(self, name, len(self._started) + 1)
        self.participants[name] = participant
        self._started.append(participant)
        if self.observer is not None:
            self.observer.started(name, None, None)
        participant.start(self._run(participant, run, ttl_s))
        return participant

    def intercept(
        self, name: str, operation: str, key: str, do: Callable[[], asyncio.Event | None]
    ) -> None:
        """Do this, once, when the process sends such a request. If it returns an event, the request
        is on its way until that is set, whatever becomes of the process meanwhile."""
        self._interceptions[name, operation, key] = do

    def sends(self, name: str, operation: str, key: str) -> asyncio.Event | None:
        """A process sends a request."""
        self.calls.append((self.now, operation))
        return self._interceptions.pop((name, operation, key), lambda: None)()

    async def _run(
        self, participant: Participant, run: Callable[[Session], Awaitable[None]], ttl_s: float
    ) -> None:
        store = RemoteStore(self, participant)
        runtime = InlineRuntime(self.clock, participant.number)
        watched = (partial(self._record_term, participant.machine),) if self.observer else ()
        settings = SessionSettings(url="memory://", ttl_s=ttl_s, sinks=watched)
        async with Session(settings, runtime, store) as session:
            await run(session)

    def _record_term(self, name: str, record: Record) -> None:
        if self.observer is not None:
            match record.event:
                case Elected(token=token, election=election):
                    self.observer.term_changed(name, token, election=election)
                case Lost(ended_at=ended_at, election=election):
                    self.observer.term_changed(name, None, election=election, ended_at=ended_at)
                case Resigned(election=election):
                    self.observer.term_changed(name, None, election=election)

    async def close(self) -> None:
        """End all processes, including killed and paused ones. Raises the exceptions of their tasks
        and callbacks that were not handled: a scenario with such an error shows nothing."""
        self.transcript.closed(self)
        self.observer = None
        self.loop.after_turn = lambda: None
        self.server.on_put.clear()
        for participant in self._started:
            participant.release()
        tasks = [task for participant in self._started for task in participant.tasks]
        ended = [task for task in tasks if task.done()]
        running = [task for task in tasks if not task.done()]
        for task in running:
            task.cancel()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        outcomes += [*self._unhandled, *(each.exception() for each in ended if is_unheard(each))]
        errors = [each for each in outcomes if isinstance(each, Exception)]
        if errors:
            raise ExceptionGroup("processes of this scenario failed", errors)


class Participant(Process):
    """One process. What happens to it is recorded."""

    def __init__(self, world: StoreWorld, name: str, number: int) -> None:
        super().__init__(world.loop, name, number)
        self._world = world

    def kill(self) -> None:
        self._world.record(self.machine, "is killed")
        self.dead = True
        if self._world.observer is not None:
            self._world.observer.stopped(self.machine)

    def pause(self) -> None:
        self._world.record(self.machine, "is paused")
        super().pause()
        if self._world.observer is not None:
            self._world.observer.paused(self.machine, True)

    def resume(self) -> None:
        self._world.record(self.machine, "resumes")
        super().resume()
        if self._world.observer is not None:
            self._world.observer.paused(self.machine, False)


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
        world, watched = self._world, self._world.observer
        number = watched.asked(self._participant.machine, operation, about) if watched else 0
        delayed = world.sends(self._participant.machine, operation, about)

        async def execute() -> T:
            if delayed is not None:
                await delayed.wait()
            try:
                result = await do()
            except DoyenError as error:
                if watched is not None:
                    watched.answered(number, str(error))
                raise
            if watched is not None:
                watched.answered(number, _shown(result))
            return result

        if self._local:
            result = await execute()
        else:
            if delayed is None:
                await asyncio.sleep(ONE_WAY_S)
            task = world.loop.create_task(execute(), context=world.outside.copy())
            result = await (task if delayed is None else shared(task))
            await asyncio.sleep(ONE_WAY_S)
        if watched is not None:
            watched.received(number)
        return result

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        world, name = self._world, self._participant.machine

        def changed() -> None:
            world.notified.append((world.now, name))
            watched = world.observer
            number = watched.notified(name, scope) if watched is not None else 0

            def receive() -> None:
                if watched is not None:
                    watched.received(number)
                notify()

            if self._local:
                receive()
            else:
                world.loop.call_later(ONE_WAY_S, receive, context=self._inside)

        return await self._call("watch", scope, partial(self._store.watch, scope, changed))


def _shown(result: object) -> str:
    """The result of a request, for readers."""
    match result:
        case Entry():
            return f"{result.key}, revision {result.revision}"
        case Creation():
            return "created" if result.won else f"exists, since revision {result.entry.revision}"
        case Lease():
            return f"a lease of {result.ttl_s:g} s"
        case bool():
            return "yes" if result else "no"
        case list():
            return f"{len(result)} entries"
        case None:
            return "nothing, or done"
        case _:
            return "done"


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
