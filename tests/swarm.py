"""A world in virtual time: processes with clocks of their own, links that fail, and an oracle.

Everything runs on the code that users run (sessions, campaigns, memory store). The oracle looks
after *every* turn of the event loop, and is told of every record that is made or removed, and by
whom. One seed gives one run.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest

from doyen import Session, Term
from doyen.election.options import Recipe, SessionSettings
from doyen.events import Elected, Record
from doyen.lease.clock import Clock, VirtualClock
from doyen.lease.runtime import InlineRuntime
from doyen.model import Entry, Lease, Order, Version
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context
from doyen.term import is_valid
from doyen.testing.faults import Faults, FaultyStore, Odds
from doyen.testing.virtual import VirtualLoop

TTL_S = 3.0
RECIPES: list[Recipe] = ["line", "line", "race"]
FAIR = Odds()
ROUGH = Odds(late=0.05, lost=0.03, unanswered=0.04, refused=0.03, stray=0.03, delay_s=1.5)


class SafetyViolated(AssertionError):
    """The oracle's word."""


class NotReached(Exception):
    """Nothing was violated, but what must happen once all is calm has not happened in its bound."""


@asynccontextmanager
async def reached(what: str, within_s: float) -> AsyncIterator[None]:
    """Around waiting for something that must happen within this time."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise NotReached(f"within {within_s:g} s: {what}") from None


class Oracle:
    """Sees every term that was ever entered, after every turn of the loop.

    What it asks, of each election and each lock:

    - at most one term is valid at any instant, and each has a record of its own;
    - tokens increase;
    - no record goes while its term is valid; and nobody but its holder deletes it, or ends its
      lease, and that only after the body has ended;
    - nobody deletes what another has laid, unless it has become void.
    """

    def __init__(self) -> None:
        self._valid: list[Term] = []
        self._bodies: dict[tuple[str, int], Term] = {}
        self._last_token: defaultdict[str, int] = defaultdict(int)
        self._orders: dict[str, Entry] = {}
        self.records: dict[tuple[str, int], Entry] = {}
        """Every record that was ever made, by election and token."""
        self.terms = 0
        self.somebody_leads = asyncio.Event()
        self.violation: SafetyViolated | None = None
        self.stop: Callable[[], object] = lambda: None

    def hear(self, record: Record) -> None:
        event = record.event
        if isinstance(event, Elected):
            if event.token <= self._last_token[event.election]:
                self.object(f"token {event.token} after {self._last_token[event.election]}")
            if (event.election, event.token) not in self.records:
                self.object(f"{event.name} entered with token {event.token} and no record")
            self._last_token[event.election] = event.token

    @contextmanager
    def body(self, term: Term) -> Iterator[None]:
        """Around the body of a term."""
        self.terms += 1
        self.somebody_leads.set()
        self._valid.append(term)
        self._bodies[label_of(term), term.token] = term
        try:
            yield
        finally:
            del self._bodies[label_of(term), term.token]

    def look(self) -> None:
        self._valid = [term for term in self._valid if is_valid(term)]
        if len(self._valid) > 1:
            elections = [label_of(term) for term in self._valid]
            if len(set(elections)) < len(elections):
                self.object(f"valid at once: {self._valid}")

    def created(self, entry: Entry) -> None:
        if is_record(entry.key):
            self.records[election_of(entry.key), entry.revision] = entry
        elif entry.key.endswith("/order"):
            self._orders[election_of(entry.key)] = entry

    def gone(self, entry: Entry) -> None:
        """Whatever the cause, be it the end of its lease."""
        if entry.key.endswith("/order"):
            self._orders.pop(election_of(entry.key))
        term = self._bodies.get((election_of(entry.key), entry.revision))
        if is_record(entry.key) and term is not None and is_valid(term):
            self.object(f"its record went while it was valid: {term}")

    def deleted(self, entry: Entry, *, mine: bool) -> None:
        """By one client: `mine` if the entry is bound to a lease of that client's."""
        election = election_of(entry.key)
        if is_record(entry.key) and (election, entry.revision) in self._bodies:
            self.object(f"{entry.key} ({entry.revision}) was deleted while its body ran")
        if not mine and not self._is_void(entry):
            self.object(f"{entry.key} ({entry.revision}) was deleted by somebody else")

    def _is_void(self, entry: Entry) -> bool:
        """An order for a term that is over, or mail of one whose order does not stand."""
        election = election_of(entry.key)
        if "/mail/" in entry.key:
            order = self._orders.get(election)
            return order is None or order.lease != entry.lease
        if not entry.key.endswith("/order"):
            return False
        meant = Order.decode(entry.value)
        assert meant is not None
        return meant.token < max(token for where, token in self.records if where == election)

    def object(self, what: str) -> None:
        if self.violation is None:
            self.violation = SafetyViolated(what)
            self.stop()


def is_record(key: str) -> bool:
    return key.endswith("/leader")


def election_of(key: str) -> str:
    kind, name, *rest = key.split("/")
    numbered = (kind, *rest[:1]) in (("semaphores", "slots"), ("shards", "at"))
    return f"{unquote(name)}/{rest[1]}" if numbered else unquote(name)


def label_of(term: Term) -> str:
    """The name of its election or lock, or of its slot of a semaphore."""
    return term.election if term.slot is None else f"{term.election}/{term.slot}"


class WatchedServer(MemoryServer):
    """A store that tells the oracle what becomes of its entries."""

    def __init__(self, clock: Clock, oracle: Oracle) -> None:
        super().__init__(clock)
        self.oracle = oracle

    def _insert(self, key: str, value: bytes, lease: str | None, line: str | None = None) -> None:
        super()._insert(key, value, lease, line)
        self.oracle.created(self._entry(key))

    def _remove(self, key: str) -> None:
        stored = self._entries[key]
        self.oracle.gone(Entry(key, stored.value, stored.revision, stored.version, stored.lease))
        super()._remove(key)


class WatchedClient(MemoryStore):
    """A client of such a store, which tells the oracle what it is about to delete."""

    def __init__(self, server: WatchedServer, clock: Clock) -> None:
        super().__init__(server, Context(clock, lambda event: None))
        self._oracle = server.oracle

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        entry = await self.get(key)
        if entry is not None and if_version in (None, entry.version):
            self._oracle.deleted(entry, mine=entry.lease in self._own)
        return await super().delete(key, if_version=if_version)

    async def revoke(self, lease: Lease) -> None:
        held = self._at()._leases.get(lease.id)
        for key in held.keys if held else ():
            self._oracle.deleted(self._server._entry(key), mine=lease.id in self._own)
        await super().revoke(lease)


class WatchedLoop(VirtualLoop):
    """A virtual loop on which the oracle looks after every turn."""

    def __init__(self, clock: VirtualClock, look: Callable[[], None]) -> None:
        super().__init__(clock)
        self._look = look

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self._look()


@dataclass
class OwnClock:
    """A machine's clock: begins anywhere, runs a little slow, and its wall time means nothing."""

    true: VirtualClock
    offset: float
    rate: float

    def now(self) -> float:
        return self.offset + self.true.now() * self.rate

    def wall(self) -> float:
        return self.offset


class Process:
    """A process with a session on a faulty link; by default a candidate that never gives up."""

    def __init__(self, world: World, name: str) -> None:
        rng = world.rng
        self.world = world
        self.name = name
        self.faults = Faults(rng.getrandbits(32), ROUGH)
        self.clock: Clock = OwnClock(
            world.clock, rng.uniform(0, 1000), rng.uniform(1 - world.drift, 1)
        )
        self.crashed = False
        self.prepare()
        self.task = asyncio.get_running_loop().create_task(self._live())

    def prepare(self) -> None:
        """Decide what it will be like."""
        self.rank = self.world.rng.choice([0, 0, 0, 1, 2])
        self.recipe: Recipe = self.world.rng.choice(RECIPES)

    async def _live(self) -> None:
        world = self.world
        runtime = InlineRuntime(self.clock, world.rng.getrandbits(32))
        asked = SessionSettings(
            url="memory://",
            ttl_s=TTL_S,
            stop_budget_s=world.stop_budget_s,
            sinks=(world.oracle.hear,),
        )
        async with Session(asked, runtime, self.store()) as session:
            await self.act(session)

    def store(self) -> FaultyStore:
        return FaultyStore(WatchedClient(self.world.server, self.clock), self.faults)

    async def act(self, session: Session) -> None:
        """What it does, until it is stopped."""
        world = self.world
        async for campaign in session.campaigns(
            "swarm", name=self.name, priority=self.rank, recipe=self.recipe
        ):
            async with campaign as term:
                with world.oracle.body(term):
                    await asyncio.sleep(world.rng.uniform(0, 1) * world.body_s)

    def crash(self) -> None:
        """Gone without a word: nothing it has sent is answered, nothing more is sent."""
        self.crashed = True
        self.faults.cut()
        self.task.cancel()

    def calm(self) -> None:
        """From now on its link is as good as a link can be."""
        self.faults.odds = FAIR
        self.faults.heal()


class World:
    """A store, its candidates, and what happens to them."""

    happenings: ClassVar = {"join": 4, "leave": 1, "crash": 2, "cut": 3, "heal": 4, "wall": 1}
    """What may happen at any time, and how often."""

    def __init__(self, seed: int, drift: float = 0.005, stop_budget_s: float = 0.01) -> None:
        """The stop budget is as good as none: it would hide what the oracle is to see."""
        self.rng = random.Random(seed)
        self.drift = drift
        self.stop_budget_s = stop_budget_s
        self.body_s = 4 * TTL_S
        self.clock = VirtualClock()
        self.oracle = Oracle()
        self.server = WatchedServer(self.clock, self.oracle)
        self.processes: list[Process] = []
        self.started = 0

    def start(self) -> None:
        self.started += 1
        self.processes.append(Process(self, f"p{self.started}"))

    def happen(self) -> None:
        """One thing, at random."""
        kind = self.rng.choices(list(self.happenings), list(self.happenings.values()))[0]
        if kind == "join" or not self.processes:
            self.start()
        else:
            getattr(self, kind)(self.rng.choice(self.processes))

    def leave(self, process: Process) -> None:
        self.processes.remove(process)
        process.task.cancel()

    def crash(self, process: Process) -> None:
        self.processes.remove(process)
        process.crash()

    def cut(self, process: Process) -> None:
        process.faults.cut(answers_only=self.rng.random() < 0.3)

    def heal(self, process: Process) -> None:
        process.faults.heal()

    def wall(self, _: Process) -> None:
        self.clock.step_wall(self.rng.choice([-3600, 3600]))

    async def trouble(self, candidates: int, steps: int) -> None:
        for _ in range(candidates):
            self.start()
        for _ in range(steps):
            await asyncio.sleep(self.rng.expovariate(1.0))
            self.happen()

    def calm(self) -> None:
        for process in self.processes:
            process.calm()

    async def end(self) -> None:
        tasks = [process.task for process in self.processes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch_over(self, life: Coroutine[Any, Any, None]) -> None:
        """Run it under the eyes of the oracle."""
        loop = WatchedLoop(self.clock, self.oracle.look)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(self._stoppable(life))
            except (asyncio.CancelledError, NotReached):
                if self.oracle.violation is None:
                    raise
        if self.oracle.violation is not None:
            raise self.oracle.violation

    async def _stoppable(self, life: Coroutine[Any, Any, None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.oracle.stop = task.cancel
        await life


def assert_oracle_sees(
    broken: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[int], object],
    seeds: Iterable[int],
    error: type[SafetyViolated | NotReached] = SafetyViolated,
) -> None:
    """With one rule broken some world ends with this error; unbroken, the same world does not.

    A world that only fails to reach something does not show that a violation is seen.
    """

    def ends(seed: int) -> type[BaseException] | None:
        try:
            run(seed)
        except (SafetyViolated, NotReached) as found:
            return type(found)
        return None

    with monkeypatch.context() as patch:
        broken(patch)
        seed = next((seed for seed in seeds if ends(seed) is error), None)
    assert seed is not None, f"no world ended with {error.__name__}"
    run(seed)
