"""The cost of an election: messages, bytes and time, for ten to a hundred thousand candidates.

It runs the sessions and elections that users run, in virtual time, on a store at a given distance:
every request, answer and notification takes the one-way latency. Requests, answers and
notifications are counted as messages, their keys and values as bytes.

    crowd      many candidates of one election; the leader resigns, or dies
    holdings   many elections of one session; it dies, and a session that waits for all takes over
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from doyen.election.options import SessionSettings
from doyen.events import Elected, Record, Waiting
from doyen.lab.chart import Panel
from doyen.lease.clock import VirtualClock
from doyen.lease.keepalive import Keepalive
from doyen.lease.runtime import InlineRuntime
from doyen.model import Entry, Lease
from doyen.session import Session
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Creation, Store, Watch
from doyen.testing.faults import Faults, FaultyStore
from doyen.testing.virtual import run_virtual

T = TypeVar("T")

SIZES = (10, 100, 1_000, 10_000, 100_000)
DISTANCES = {"one room": 0.00025, "one region": 0.005, "across an ocean": 0.05}
"""One way, in seconds."""
TTL_S = 3600.0
"""So long that there is no renewal during a measurement."""
FRAME = 32
"""An estimate of the bytes of a message besides its key and value."""


class Cost(Struct, kw_only=True):
    """The cost of one change, once all candidates wait."""

    what: str
    count: int
    one_way_s: float
    messages: int
    bytes: int
    seconds: float
    """The time without a leader; after a death, from the end of the lease on."""


class _Meter:
    def __init__(self) -> None:
        self.messages = self.bytes = 0

    def count(self, *texts: str | bytes) -> None:
        self.messages += 1
        self.bytes += FRAME + sum(map(len, texts))


class _DistantStore(FaultyStore):
    """A store at a distance. Counts the messages to and from it."""

    def __init__(self, store: Store, meter: _Meter, one_way_s: float) -> None:
        super().__init__(store, Faults())
        self._meter, self._one_way_s = meter, one_way_s
        self.dead = False

    async def _call(
        self, operation: str, about: str, do: Callable[[], Awaitable[T]], lease: Lease | None = None
    ) -> T:
        if self.dead:
            await asyncio.Event().wait()
        written = [each for each in getattr(do, "args", ()) if isinstance(each, bytes)]
        self._meter.count(*written, "" if operation == "grant" else about)
        await asyncio.sleep(self._one_way_s)
        answer = await do()
        values = [answer.value] if isinstance(answer, Entry) else []
        if isinstance(answer, Creation):
            values = [answer.entry.value]
        self._meter.count(*values)
        await asyncio.sleep(self._one_way_s)
        return answer

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        loop = asyncio.get_running_loop()

        def changed() -> None:
            if not self.dead:
                self._meter.count(scope)
                loop.call_later(self._one_way_s, notify)

        return await self._call("watch", scope, partial(self._store.watch, scope, changed))


class _SparseRuntime(InlineRuntime):
    """Checks each keepalive only at its deadline, because there are many."""

    def watch(self, keepalive: Keepalive) -> None:
        if keepalive.lose_if_expired() or keepalive.lost_because is not None:
            self.unwatch(keepalive)
            return
        wait_s = max(0.001, keepalive.valid_until - self.clock.now())
        self._timers[keepalive] = self._loop.call_later(wait_s, self.watch, keepalive)


class _Measurement:
    """A store, sessions at a distance from it, and the cost of what they do."""

    def __init__(self, one_way_s: float) -> None:
        loop: Any = asyncio.get_running_loop()
        self.clock: VirtualClock = loop.clock
        self.server = MemoryServer(self.clock)
        self.meter = _Meter()
        self.one_way_s = one_way_s
        self.elected: list[Record] = []
        self.waiting = 0
        self.stores: list[_DistantStore] = []
        self._campaigns: list[asyncio.Future[None]] = []
        self._changed = asyncio.Event()
        self._runtime = _SparseRuntime(self.clock)

    @classmethod
    async def run(
        cls, one_way_s: float, measure: Callable[[_Measurement], Awaitable[list[Cost]]]
    ) -> list[Cost]:
        """Run a measurement on a store of its own, and cancel the campaigns that are left."""
        measurement = cls(one_way_s)
        try:
            return await measure(measurement)
        finally:
            for task in measurement._campaigns:
                task.cancel()
            for store in measurement.stores:
                store.dead = True
            await asyncio.wait(measurement._campaigns, timeout=1.0)

    def start(self, campaign: Coroutine[Any, Any, None]) -> None:
        self._campaigns.append(asyncio.ensure_future(campaign))

    def session(self) -> Session:
        store = MemoryStore(self.server, Context(self.clock, lambda event: None))
        distant = _DistantStore(store, self.meter, self.one_way_s)
        settings = SessionSettings(url="memory://", ttl_s=TTL_S, sinks=(self._sink,))
        self.stores.append(distant)
        return Session(settings, self._runtime, distant)

    def _sink(self, record: Record) -> None:
        if isinstance(record.event, Elected):
            self.elected.append(record)
            self._changed.set()
        elif isinstance(record.event, Waiting):
            self.waiting += 1
            self._changed.set()

    def begin(self) -> tuple[int, int, float]:
        self.elected.clear()
        return self.meter.messages, self.meter.bytes, self.clock.now()

    def cost(self, what: str, count: int, begun: tuple[int, int, float]) -> Cost:
        messages, size, from_s = begun
        return Cost(
            what=what,
            count=count,
            one_way_s=self.one_way_s,
            messages=self.meter.messages - messages,
            bytes=self.meter.bytes - size,
            seconds=round(self.elected[-1].at - from_s, 6),
        )

    async def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until this holds, and all messages have arrived."""
        while not reached():
            self._changed.clear()
            await self._changed.wait()
        await self.settle()

    async def wait_elected(self, count: int = 1) -> None:
        """Wait until this many were elected since `begin`."""
        await self.wait_until(lambda: len(self.elected) >= count)

    async def settle(self) -> None:
        """Wait until all messages have arrived."""
        await asyncio.sleep(100 * self.one_way_s)


async def _campaign(
    session: Session, election: str, name: str, recipe: str, done: asyncio.Event
) -> None:
    async with session, session.campaign(election, name=name, recipe=recipe):  # type: ignore[arg-type]
        await done.wait()


async def _crowd(measurement: _Measurement, count: int, recipe: str) -> list[Cost]:
    resign = asyncio.Event()
    for number in range(count):
        session = measurement.session()
        done = resign if number == 0 else asyncio.Event()
        measurement.start(_campaign(session, "e", f"server{number}", recipe, done))
        if number == 0:
            await measurement.settle()
    await measurement.settle()
    begun = measurement.begin()
    resign.set()
    await measurement.wait_elected()
    name = "resigns" if recipe == "line" else "resigns, race"
    costs = [measurement.cost(name, count, begun)]
    if recipe == "line":
        winner = int(measurement.elected[-1].event.name.removeprefix("server"))  # type: ignore[attr-defined]
        record = measurement.server.list("elections/e")[0]
        measurement.stores[winner].dead = True
        begun = measurement.begin()
        measurement.server.revoke(str(record.lease))  # as if its ttl had passed
        await measurement.wait_elected()
        costs.append(measurement.cost("dies", count, begun))
    return costs


def crowd(count: int, one_way_s: float, recipe: str = "line") -> list[Cost]:
    """Measure one election with this many candidates."""
    return run_virtual(_Measurement.run(one_way_s, lambda own: _crowd(own, count, recipe)))


async def _holdings(measurement: _Measurement, count: int) -> list[Cost]:
    async def lead(session: Session, election: str, name: str) -> None:
        async with session.campaign(election, name=name):
            await asyncio.Event().wait()

    costs: list[Cost] = []
    for name in ("server1", "server2"):
        session = measurement.session()
        await session.__aenter__()
        before = measurement.begin()
        for number in range(count):
            measurement.start(lead(session, f"e{number}", name))
        if name == "server1":
            await measurement.wait_elected(count)
            costs.append(measurement.cost("elects", count, before))
        else:
            await measurement.wait_until(lambda: measurement.waiting >= count)
    record = measurement.server.list("elections")[0]
    measurement.stores[0].dead = True
    begun = measurement.begin()
    measurement.server.revoke(str(record.lease))
    await measurement.wait_elected(count)
    costs.append(measurement.cost("takes over", count, begun))
    return costs


def holdings(count: int, one_way_s: float) -> list[Cost]:
    """Measure this many elections of one session, while another session waits for all of them."""
    return run_virtual(_Measurement.run(one_way_s, lambda own: _holdings(own, count)))


def measure(
    sizes: Sequence[int] = SIZES,
    *,
    progress: Callable[[str], object] = lambda line: None,
) -> list[Cost]:
    """Measure everything. A race wakes all candidates, so it is measured up to 1,000 only."""
    costs = []
    for name, one_way_s in DISTANCES.items():
        for size in sizes:
            progress(f"{name}: {size:,} candidates, then as many elections")
            costs += crowd(size, one_way_s)
            if size <= 1_000:
                costs += crowd(size, one_way_s, "race")
            costs += holdings(size, one_way_s)
    return costs


def panels(costs: Sequence[Cost]) -> list[Panel]:
    """Messages and time over the number of candidates and of elections."""
    sizes = sorted({cost.count for cost in costs})
    names = {one_way_s: name for name, one_way_s in DISTANCES.items()}
    far = max(cost.one_way_s for cost in costs)

    def line(what: str, one_way_s: float, of: Callable[[Cost], float]) -> list[float]:
        found = {
            cost.count: of(cost)
            for cost in costs
            if cost.what == what and cost.one_way_s == one_way_s
        }
        return [found[size] for size in sizes if size in found]

    def messages(title: str, x_label: str, *kinds: str, per_one: bool = False) -> Panel:
        def of(cost: Cost) -> float:
            return cost.messages / (cost.count if per_one else 1)

        series = {kind: line(kind, far, of) for kind in kinds}
        unit = "messages per election" if per_one else "messages"
        return Panel(title=title, unit=unit, series=series, x=sizes, x_label=x_label)

    def times(title: str, kind: str, x_label: str) -> Panel:
        series = {
            name: line(kind, one_way_s, lambda cost: cost.seconds * 1000)
            for one_way_s, name in names.items()
        }
        return Panel(title=title, unit="ms", series=series, x=sizes, x_label=x_label)

    return [
        messages("a change of leader", "candidates", "resigns", "dies", "resigns, race"),
        times("the leader resigns", "resigns", "candidates"),
        times("the leader dies", "dies", "candidates"),
        messages("many elections", "elections", "elects", "takes over", per_one=True),
        times("all elections are won", "elects", "elections"),
        times("all elections are taken over", "takes over", "elections"),
    ]
