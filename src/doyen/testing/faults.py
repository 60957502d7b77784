"""Fault injection: a store that wraps another store and fails as networks do.

Calls may be delayed, lost, carried out without an answer, refused, or overtaken by later calls. A
lease may end without its holder's knowledge, and a cut stops all traffic. All faults are within
what the port allows, so correct users of the port must tolerate them.

    faults = Faults(seed=7, odds=Odds(lost=0.05, unanswered=0.05))
    store = FaultyStore(await open_store("memory://", context), faults)
    faults.next("create", Unanswered())    # the next create is carried out and not answered
    faults.cut()                           # no traffic until heal()
    faults.heal()

Faults are drawn from the seed once per call, in the order of the calls, so on a `VirtualLoop` the
same seed gives the same `trace`.

Imports the port, the model and the standard library.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from doyen._waiting import shared
from doyen.errors import OutcomeUnknown, StoreUnavailable
from doyen.model import Entry, Finding, Lease, Version
from doyen.stores.port import Creation, Store, Watch

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Carried out after `before_s`, answered `after_s` later. Cancelling the call stops it."""

    before_s: float = 0.0
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCall:
    """Not carried out. Never answered, or with `raises` answered by `OutcomeUnknown`."""

    raises: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """Carried out. Never answered, or with `raises` answered by `OutcomeUnknown`."""

    raises: bool = False


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """Not carried out, and answered by `StoreUnavailable`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """Carried out after `after_s`, even if the caller cancels the call. Later calls may overtake
    it."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Expired:
    """The lease that the call names, or whose entry it updates, ends at the store just before the
    call is carried out."""


Fault = Late | LostCall | Unanswered | RefusedCall | Stray | Expired


@dataclass(frozen=True, slots=True, kw_only=True)
class Odds:
    """The probability of each fault in one call. The rest of the calls succeed.

    `expired` applies to calls that name a lease. `late` applies to notifications too.
    """

    late: float = 0.0
    lost: float = 0.0
    unanswered: float = 0.0
    refused: float = 0.0
    stray: float = 0.0
    expired: float = 0.0
    delay_s: float = 1.0
    """The longest delay of a late or stray call."""


class Faults:
    """The faults of one client, or of several clients that share this object."""

    def __init__(self, seed: int = 0, odds: Odds | None = None) -> None:
        self.odds = odds or Odds()
        """May be replaced at any time. `Odds()` means no random faults."""
        self.trace: list[str] = []
        """Every call, with the fault that was injected."""
        self._random = random.Random(seed)
        self._next: dict[str, deque[Fault]] = {}
        self.requests_cut = False
        self.answers_cut = False
        self._watches: dict[_FaultyWatch, None] = {}

    def next(self, operation: str, *faults: Fault) -> None:
        """Inject these faults into the next calls of `operation`, the name of a method.

        They take precedence over random faults.
        """
        self._next.setdefault(operation, deque()).extend(faults)

    def cut(self, *, answers_only: bool = False) -> None:
        """Drop all traffic in both directions, including notifications and what is in flight.

        With `answers_only` requests still arrive and are carried out.
        """
        self.requests_cut = not answers_only
        self.answers_cut = True

    def heal(self) -> None:
        """End the cut. Lost traffic stays lost, so every watch is notified.

        Like `cut` and `next`, this may be called from any thread.
        """
        self.requests_cut = self.answers_cut = False
        for watch in list(self._watches):
            watch.notify_soon()

    def choose(self, operation: str, about: str, leased: bool) -> Fault | None:
        """Choose the fault of one call, if any."""
        directed = self._next.get(operation)
        fault = directed.popleft() if directed else self._chance(leased)
        self.trace.append(f"{operation} {about} {fault}")
        return fault

    def notification_delay_s(self) -> float:
        """Choose the delay of one notification."""
        late = self._random.random() < self.odds.late
        return self._delay() if late else 0.0

    def _chance(self, leased: bool) -> Fault | None:
        odds, draw = self.odds, self._random.random()
        for chance, make in (
            (odds.late, self._late),
            (odds.lost, lambda: LostCall(raises=self._coin())),
            (odds.unanswered, lambda: Unanswered(raises=self._coin())),
            (odds.refused, RefusedCall),
            (odds.stray, lambda: Stray(after_s=self._delay())),
            (odds.expired if leased else 0.0, Expired),
        ):
            draw -= chance
            if draw < 0:
                return make()
        return None

    def _late(self) -> Late:
        delay_s = self._delay()
        return Late(before_s=delay_s) if self._coin() else Late(after_s=delay_s)

    def _delay(self) -> float:
        return self._random.uniform(0.0, self.odds.delay_s)

    def _coin(self) -> bool:
        return self._random.random() < 0.5


class FaultyStore(Store):
    """A store that passes calls to another store, which it owns, and injects `faults`."""

    def __init__(self, store: Store, faults: Faults) -> None:
        self.capabilities = store.capabilities
        self.faults = faults
        self._store = store
        self._strays: dict[asyncio.Task[Any], None] = {}
        self._watches: dict[_FaultyWatch, None] = {}

    async def grant(self, ttl_s: float) -> Lease:
        return await self._call("grant", f"{ttl_s:g}", partial(self._store.grant, ttl_s))

    async def renew(self, lease: Lease) -> None:
        await self._call("renew", lease.id, partial(self._store.renew, lease), lease)

    async def revoke(self, lease: Lease) -> None:
        await self._call("revoke", lease.id, partial(self._store.revoke, lease), lease)

    def warrant(self, lease: Lease) -> bytes:
        return self._store.warrant(lease)

    async def end(self, warrant: bytes) -> None:
        await self._call("end", repr(warrant), partial(self._store.end, warrant))

    async def remaining(self, leases: Sequence[str]) -> Mapping[str, float]:
        do = partial(self._store.remaining, leases)
        return await self._call("remaining", f"{len(leases)} leases", do)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        do = partial(self._store.create, key, value, lease)
        return await self._call("create", key, do, lease)

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        do = partial(self._store.put, key, value, if_version=if_version)
        return await self._call("put", key, do)

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        do = partial(self._store.update, entry, value)
        lease = None if entry.lease is None else Lease(entry.lease, 0.0)
        return await self._call("update", entry.key, do, lease)

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        do = partial(self._store.delete, key, if_version=if_version)
        return await self._call("delete", key, do)

    def begin_deletion(self, entries: Sequence[Entry]) -> asyncio.Future[Any] | None:
        deletions = (self.delete(entry.key, if_version=entry.version) for entry in entries)
        return asyncio.gather(*deletions)

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        do = partial(self._store.enqueue, line, value, lease, rank=rank)
        return await self._call("enqueue", line, do, lease)

    async def ahead(self, ticket: Entry) -> Entry | None:
        return await self._call("ahead", ticket.key, partial(self._store.ahead, ticket))

    async def get(self, key: str) -> Entry | None:
        return await self._call("get", key, partial(self._store.get, key))

    async def list(self, prefix: str) -> list[Entry]:
        return await self._call("list", prefix, partial(self._store.list, prefix))

    async def head(self, line: str) -> Entry | None:
        return await self._call("head", line, partial(self._store.head, line))

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        watch = _FaultyWatch(self, notify)
        try:
            await self._call("watch", scope, partial(watch.begin, self._store, scope))
        except BaseException:
            watch.close()
            raise
        return watch

    def proof(self, lease: Lease) -> tuple[int, ...]:
        return self._store.proof(lease)

    async def diagnose(self) -> Sequence[Finding]:
        return await self._store.diagnose()

    def forked(self) -> None:
        self._store.forked()

    async def close(self) -> None:
        """Close the wrapped store after stray calls have been carried out."""
        for watch in list(self._watches):
            watch.close()
        if self._strays:
            await asyncio.wait(list(self._strays))
        await self._store.close()

    async def _call(
        self,
        operation: str,
        about: str,
        do: Callable[[], Awaitable[T]],
        lease: Lease | None = None,
    ) -> T:
        fault = self.faults.choose(operation, about, lease is not None)
        match fault:
            case RefusedCall():
                raise StoreUnavailable(f"{operation} was refused by an injected fault")
            case LostCall():
                await self._no_answer(operation, fault.raises)
            case Stray():
                return await self._stray(fault.after_s, do)
            case Late():
                await asyncio.sleep(fault.before_s)
            case Expired() if lease is not None:
                await self._store.revoke(lease)
            case _:
                pass
        if self.faults.requests_cut:
            await _silence()
        result = await do()
        if isinstance(fault, Unanswered):
            await self._no_answer(operation, fault.raises)
        if isinstance(fault, Late):
            await asyncio.sleep(fault.after_s)
        if self.faults.answers_cut:
            await _silence()
        return result

    async def _no_answer(self, operation: str, raises: bool) -> NoReturn:
        if raises:
            raise OutcomeUnknown(f"the answer to {operation} was lost by an injected fault")
        await _silence()

    async def _stray(self, after_s: float, do: Callable[[], Awaitable[T]]) -> T:
        async def deliver() -> T:
            await asyncio.sleep(after_s)
            if self.faults.requests_cut:
                raise _Dropped
            return await do()

        task = asyncio.create_task(deliver())
        self._strays[task] = None
        task.add_done_callback(self._stray_ended)
        try:
            result = await shared(task)
        except _Dropped:
            await _silence()
        if self.faults.answers_cut:
            await _silence()
        return result

    def _stray_ended(self, stray: asyncio.Task[Any]) -> None:
        del self._strays[stray]
        if not stray.cancelled():
            stray.exception()  # retrieved: the caller may have cancelled the call


class _FaultyWatch:
    """Passes on notifications, possibly late, and drops them during a cut."""

    def __init__(self, store: FaultyStore, notify: Callable[[], None]) -> None:
        self._store = store
        self._faults = store.faults
        self._loop = asyncio.get_running_loop()
        self._notify = notify
        self._inner: Watch | None = None
        self._closed = False
        store._watches[self] = None
        store.faults._watches[self] = None

    async def begin(self, store: Store, scope: str) -> None:
        self._inner = await store.watch(scope, self._changed)
        if self._closed:
            self._inner.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            del self._store._watches[self]
            del self._faults._watches[self]
            if self._inner is not None:
                self._inner.close()

    def notify_soon(self) -> None:
        self._loop.call_soon_threadsafe(self._deliver)

    def _changed(self) -> None:
        delay_s = self._faults.notification_delay_s()
        if delay_s:
            self._loop.call_later(delay_s, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        if not self._closed and not self._faults.answers_cut:
            self._notify()


class _Dropped(Exception):
    """A stray call was in flight when a cut began."""


async def _silence() -> NoReturn:
    """Wait for an answer that never arrives, until the caller cancels the call."""
    while True:
        await asyncio.get_running_loop().create_future()
