"""What an election costs: messages, bytes and time, for ten candidates and for a hundred thousand.

The sessions and elections that users run, on virtual time, at a store that is as far away as it is
said to be: every request and every answer takes one way, and so does a notification. Requests,
answers and notifications are counted as messages, their keys and values as bytes.

    crowd      many candidates of one election; the leader resigns, or dies
    holdings   many elections of one session; it dies, and another that waits for all of them leads

Imports sessions, the memory store and virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from doyen.election.options import SessionSettings
from doyen.events import Elected, Record, Waiting
from doyen.lab.plot import Panel
from doyen.lease.clock import VirtualClock
from doyen.lease.keepalive import Keepalive
from doyen.lease.runtime import InlineRuntime
from doyen.model import Entry, Lease, Version
from doyen.session import Session
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Creation, Store, Watch
from doyen.testing.virtual import run_virtual

__all__ = ["DISTANCES", "SIZES", "Cost", "crowd", "holdings", "measure", "panels"]

T = TypeVar("T")

SIZES = (10, 100, 1_000, 10_000, 100_000)
DISTANCES = {"one room": 0.00025, "one region": 0.005, "across an ocean": 0.05}
"""One way, in seconds."""
TTL_S = 3600.0
"""So long that no renewal falls into what is measured."""
FRAME = 32
"""What a message takes beside its key and value: an estimate."""


class Cost(Struct, kw_only=True):
    """What one thing cost, once everybody stood."""

    what: str
    count: int
    one_way_s: float
    messages: int
    bytes: int
    seconds: float
    """Without a leader; after a death, beyond the end of the lease."""


class _Meter:
    def __init__(self) -> None:
        self.messages = self.bytes = 0

    def count(self, *texts: str | bytes) -> None:
        self.messages += 1
        self.bytes += FRAME + sum(map(len, texts))


class _Far(Store):
    """A store that is some way away, and what goes over that way."""

    def __init__(self, store: Store, meter: _Meter, one_way_s: float) -> None:
        self.capabilities = store.capabilities
        self._store, self._meter, self._one_way_s = store, meter, one_way_s
        self.dead = False

    async def _go(self, call: Callable[[], Awaitable[T]], *texts: str | bytes) -> T:
        if self.dead:
            await asyncio.Event().wait()
        self._meter.count(*texts)
        await asyncio.sleep(self._one_way_s)
        answer = await call()
        said = [answer.value] if isinstance(answer, Entry) else []
        if isinstance(answer, Creation):
            said = [answer.entry.value]
        self._meter.count(*said)
        await asyncio.sleep(self._one_way_s)
        return answer

    async def grant(self, ttl_s: float) -> Lease:
        return await self._go(lambda: self._store.grant(ttl_s))

    async def renew(self, lease: Lease) -> None:
        await self._go(lambda: self._store.renew(lease), lease.id)

    async def revoke(self, lease: Lease) -> None:
        await self._go(lambda: self._store.revoke(lease), lease.id)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        return await self._go(lambda: self._store.create(key, value, lease), key, value)

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        return await self._go(
            lambda: self._store.put(key, value, if_version=if_version), key, value
        )

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        return await self._go(lambda: self._store.delete(key, if_version=if_version), key)

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        return await self._go(
            lambda: self._store.enqueue(line, value, lease, rank=rank), line, value
        )

    async def ahead(self, ticket: Entry) -> Entry | None:
        return await self._go(lambda: self._store.ahead(ticket), ticket.key)

    async def get(self, key: str) -> Entry | None:
        return await self._go(lambda: self._store.get(key), key)

    async def list(self, prefix: str) -> list[Entry]:
        return await self._go(lambda: self._store.list(prefix), prefix)

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        loop = asyncio.get_running_loop()

        def told() -> None:
            if not self.dead:
                self._meter.count(scope)
                loop.call_later(self._one_way_s, notify)

        return await self._go(lambda: self._store.watch(scope, told), scope)

    async def close(self) -> None:
        await self._store.close()


class _Patient(InlineRuntime):
    """Checks a lease at its deadline, and not every tenth of a second, because there are many."""

    def watch(self, keepalive: Keepalive) -> None:
        if keepalive.lose_if_expired() or keepalive.lost_because is not None:
            self.unwatch(keepalive)
            return
        wait_s = max(0.001, keepalive.valid_until - self.clock.now())
        self._timers[keepalive] = self._loop.call_later(wait_s, self.watch, keepalive)


class _Place:
    """A store, and sessions at some distance from it."""

    def __init__(self, one_way_s: float) -> None:
        loop: Any = asyncio.get_running_loop()
        self.clock: VirtualClock = loop.clock
        self.server = MemoryServer(self.clock)
        self.meter = _Meter()
        self.one_way_s = one_way_s
        self.elected: list[Record] = []
        self.waiting = 0
        self.stores: list[_Far] = []
        self._standing: list[asyncio.Future[None]] = []
        self._news = asyncio.Event()
        self._runtime = _Patient(self.clock)

    @classmethod
    async def meet(
        cls, one_way_s: float, happens: Callable[[_Place], Awaitable[list[Cost]]]
    ) -> list[Cost]:
        """Let it happen in a place of its own, and leave nobody standing there."""
        place = cls(one_way_s)
        try:
            return await happens(place)
        finally:
            for task in place._standing:
                task.cancel()
            for store in place.stores:
                store.dead = True
            await asyncio.wait(place._standing, timeout=1.0)

    def begin_to(self, stand: Coroutine[Any, Any, None]) -> None:
        self._standing.append(asyncio.ensure_future(stand))

    def session(self) -> Session:
        store = MemoryStore(self.server, Context(self.clock, lambda event: None))
        far = _Far(store, self.meter, self.one_way_s)
        settings = SessionSettings(url="memory://", ttl_s=TTL_S, sinks=(self._sink,))
        self.stores.append(far)
        return Session(settings, self._runtime, far)

    def _sink(self, record: Record) -> None:
        if isinstance(record.event, Elected):
            self.elected.append(record)
            self._news.set()
        elif isinstance(record.event, Waiting):
            self.waiting += 1
            self._news.set()

    def begin(self) -> tuple[int, int, float]:
        self.elected.clear()
        return self.meter.messages, self.meter.bytes, self.clock.now()

    def cost(self, what: str, count: int, begun: tuple[int, int, float], from_s: float) -> Cost:
        messages, size, _ = begun
        return Cost(
            what=what,
            count=count,
            one_way_s=self.one_way_s,
            messages=self.meter.messages - messages,
            bytes=self.meter.bytes - size,
            seconds=round(self.elected[-1].at - from_s, 6),
        )

    async def won(self, count: int = 1) -> None:
        """Until so many have been elected since `begin`, and all under way has arrived."""
        while len(self.elected) < count:
            self._news.clear()
            await self._news.wait()
        await self.settle()

    async def stood(self, count: int) -> None:
        """Until so many wait, and all under way has arrived."""
        while self.waiting < count:
            self._news.clear()
            await self._news.wait()
        await self.settle()

    async def settle(self) -> None:
        """Until everything under way has arrived."""
        await asyncio.sleep(100 * self.one_way_s)


async def _stand(
    session: Session, election: str, name: str, recipe: str, done: asyncio.Event
) -> None:
    async with session, session.campaign(election, name=name, recipe=recipe):  # type: ignore[arg-type]
        await done.wait()


async def _crowd(place: _Place, count: int, recipe: str) -> list[Cost]:
    resign = asyncio.Event()
    for number in range(count):
        session = place.session()
        done = resign if number == 0 else asyncio.Event()
        place.begin_to(_stand(session, "e", f"server{number}", recipe, done))
        if number == 0:
            await place.settle()
    await place.settle()
    begun = place.begin()
    resign.set()
    await place.won()
    name = "resigns" if recipe == "line" else "resigns, race"
    costs = [place.cost(name, count, begun, begun[2])]
    if recipe == "line":
        winner = int(place.elected[-1].event.name.removeprefix("server"))  # type: ignore[attr-defined]
        record = place.server.list("elections/e")[0]
        place.stores[winner].dead = True
        begun = place.begin()
        place.server.revoke(str(record.lease))  # as at the end of its time
        await place.won()
        costs.append(place.cost("dies", count, begun, begun[2]))
    return costs


def crowd(count: int, one_way_s: float, recipe: str = "line") -> list[Cost]:
    """One election with so many candidates."""
    return run_virtual(_Place.meet(one_way_s, lambda place: _crowd(place, count, recipe)))


async def _holdings(place: _Place, count: int) -> list[Cost]:
    async def lead(session: Session, election: str, name: str) -> None:
        async with session.campaign(election, name=name):
            await asyncio.Event().wait()

    costs: list[Cost] = []
    for name in ("server1", "server2"):
        session = place.session()
        await session.__aenter__()
        before = place.begin()
        for number in range(count):
            place.begin_to(lead(session, f"e{number}", name))
        if name == "server1":
            await place.won(count)
            costs.append(place.cost("elects", count, before, before[2]))
        else:
            await place.stood(count)
    record = place.server.list("elections")[0]
    place.stores[0].dead = True
    begun = place.begin()
    place.server.revoke(str(record.lease))
    await place.won(count)
    costs.append(place.cost("takes over", count, begun, begun[2]))
    return costs


def holdings(count: int, one_way_s: float) -> list[Cost]:
    """So many elections of one session, while another waits for all of them."""
    return run_virtual(_Place.meet(one_way_s, lambda place: _holdings(place, count)))


def measure(
    sizes: Sequence[int] = SIZES,
    *,
    race_to: int = 1_000,
    progress: Callable[[str], object] = lambda line: None,
) -> list[Cost]:
    """All of it. A race is a herd, and is measured up to `race_to` only."""
    costs = []
    for name, one_way_s in DISTANCES.items():
        for size in sizes:
            progress(f"{name}: {size:,} candidates, then as many elections")
            costs += crowd(size, one_way_s)
            if size <= race_to:
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
