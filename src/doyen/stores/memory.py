"""`memory://name`: a store inside one process, for tests, simulations and single-process use.

Sessions of one process that use the same name and the same clock share a store; other processes,
including forked children, do not. `MemoryServer` is the state of the store, a synchronous object
with a lock that several threads and loops can use. `MemoryStore` is one client of it.

Invariants of the server:

- Keys are sorted, and the keys of tickets sort in the order of their line, so `list`, `ahead` and
  `head` use bisection.
- One counter numbers all writes. It only grows, and so do revisions.
- A lease ends when `clock.now()` reaches its expiry. Every operation first ends the leases that are
  due, so none that is over is visible; timers only notify watchers.

Imports the port, the model and the standard library.
"""

from __future__ import annotations

import asyncio
import os
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from doyen.errors import ConfigError, LeaseGone, StoreUnusable, TicketGone
from doyen.events import LeaseEnded
from doyen.lease.clock import Clock, SystemClock
from doyen.model import Entry, Finding, Lease, Version
from doyen.stores.port import Capabilities, Context, Creation, Store, StoreURL, Watch

__all__ = ["MemoryServer", "MemoryStore", "open_store"]

_GRAIN_S = 1e-6  # the shortest timer: a shorter one can be lost in rounding and spin
_RANKS = 2**63


@dataclass(slots=True)
class _Held:
    """A lease, and the keys bound to it in order."""

    ttl_s: float
    expires_at: float
    keys: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Stored:
    """An entry. `line` is set for tickets."""

    value: bytes
    revision: int
    version: int
    lease: str | None
    line: str | None = None


class MemoryServer:
    """The state of a memory store.

    >>> from doyen.lease.clock import VirtualClock
    >>> clock = VirtualClock()
    >>> server = MemoryServer(clock)
    >>> lease = server.grant(5.0)
    >>> server.create("elections/e/leader", b"me", lease.id).won
    True
    >>> clock.advance(5.0)
    >>> server.get("elections/e/leader") is None
    True
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.RLock()
        self._counter = 0
        self._entries: dict[str, _Stored] = {}
        self._keys: list[str] = []
        self._leases: dict[str, _Held] = {}
        # One item per lease. A renewal does not move it; it is moved when it comes up.
        self._expiries: list[tuple[float, str]] = []
        self._watchers: dict[str, dict[object, Callable[[], None]]] = {}
        self._alarms: dict[asyncio.AbstractEventLoop, _Alarm] = {}

    def grant(self, ttl_s: float) -> Lease:
        with self._turn() as now:
            lease = Lease(f"lease-{self._next()}", ttl_s)
            self._leases[lease.id] = _Held(ttl_s, now + ttl_s)
            heappush(self._expiries, (now + ttl_s, lease.id))
            if self._expiries[0][1] == lease.id:
                for alarm in list(self._alarms.values()):
                    alarm.sooner()
            return lease

    def renew(self, lease: str) -> None:
        with self._turn() as now:
            held = self._live(lease)
            held.expires_at = now + held.ttl_s

    def revoke(self, lease: str) -> None:
        with self._turn():
            if lease in self._leases:
                self._end(lease)

    def create(self, key: str, value: bytes, lease: str) -> Creation:
        with self._turn():
            self._live(lease)
            won = key not in self._entries
            if won:
                self._insert(key, value, lease)
            return Creation(won, self._entry(key))

    def put(self, key: str, value: bytes, if_version: Version | None) -> Entry | None:
        with self._turn():
            stored = self._entries.get(key)
            if (stored.version if stored else None) != if_version:
                return None
            if stored is None:
                self._insert(key, value, None)
            else:
                self._unbind(key, stored)
                stored.value, stored.version, stored.lease = value, self._next(), None
                self._changed(key)
            return self._entry(key)

    def update(self, entry: Entry, value: bytes) -> Entry | None:
        with self._turn():
            stored = self._entries.get(entry.key)
            if stored is None or stored.lease is None or stored.version != entry.version:
                return None
            stored.value, stored.version = value, self._next()
            self._changed(entry.key)
            return self._entry(entry.key)

    def delete(self, key: str, if_version: Version | None = None) -> bool:
        with self._turn():
            stored = self._entries.get(key)
            if stored is None or if_version not in (None, stored.version):
                return False
            self._unbind(key, stored)
            self._remove(key)
            return True

    def enqueue(self, line: str, value: bytes, lease: str, rank: int = 0) -> Entry:
        if not -_RANKS < rank < _RANKS:
            raise ConfigError(f"a rank is a 64-bit number, not {rank}")
        with self._turn():
            self._live(lease)
            key = f"{line}/{_RANKS - rank:020d}-{self._counter + 1:020d}"
            self._insert(key, value, lease, line)
            return self._entry(key)

    def ahead(self, ticket: str) -> Entry | None:
        with self._turn():
            stored = self._entries.get(ticket)
            if stored is None:
                raise TicketGone(f"{ticket} is no longer in the line")
            line = f"{stored.line}/"
            for at in range(bisect_left(self._keys, ticket) - 1, -1, -1):
                key = self._keys[at]
                if not key.startswith(line):
                    break
                if self._entries[key].line == stored.line:
                    return self._entry(key)
            return None

    def get(self, key: str) -> Entry | None:
        with self._turn():
            return self._entry(key) if key in self._entries else None

    def list(self, prefix: str) -> list[Entry]:
        with self._turn():
            return [self._entry(key) for key in self._under(prefix)]

    def head(self, line: str) -> Entry | None:
        with self._turn():
            first = next(self._under(line), None)
            return None if first is None else self._entry(first)

    def subscribe(self, scope: str, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed`, with the lock held, at every change at `scope` or below it."""
        with self._lock:
            watchers = self._watchers.setdefault(scope, {})
            mine = object()
            watchers[mine] = changed

        def unsubscribe() -> None:
            with self._lock:
                watchers.pop(mine, None)
                if not watchers and self._watchers.get(scope) is watchers:
                    del self._watchers[scope]

        return unsubscribe

    def alarm(self, loop: asyncio.AbstractEventLoop) -> _Alarm:
        """The timer that notifies the watchers on `loop` when a lease ends by itself."""
        with self._lock:
            return self._alarms.setdefault(loop, _Alarm(self, loop))

    def drop_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._alarms.pop(loop, None)

    def next_expiry(self) -> float | None:
        """When the next lease may end. `expire` checks whether it was renewed."""
        with self._lock:
            return self._expiries[0][0] if self._expiries else None

    def expire(self) -> Sequence[str]:
        """End all leases that are over, and return their ids."""
        with self._lock:
            return self._expire(self.clock.now())

    @contextmanager
    def _turn(self) -> Iterator[float]:
        with self._lock:
            now = self.clock.now()
            self._expire(now)
            yield now

    def _expire(self, now: float) -> Sequence[str]:
        ended = []
        while self._expiries and self._expiries[0][0] <= now:
            lease = self._expiries[0][1]
            held = self._leases.get(lease)
            if held is not None and held.expires_at > now:
                heapreplace(self._expiries, (held.expires_at, lease))
                continue
            heappop(self._expiries)
            if held is not None:
                self._end(lease)
                ended.append(lease)
        return ended

    def _live(self, lease: str) -> _Held:
        held = self._leases.get(lease)
        if held is None:
            raise LeaseGone(f"the lease {lease} has ended")
        return held

    def _end(self, lease: str) -> None:
        for key in self._leases.pop(lease).keys:
            self._remove(key)

    def _insert(self, key: str, value: bytes, lease: str | None, line: str | None = None) -> None:
        revision = self._next()
        self._entries[key] = _Stored(value, revision, revision, lease, line)
        insort(self._keys, key)
        if lease is not None:
            self._leases[lease].keys[key] = None
        self._changed(key)

    def _remove(self, key: str) -> None:
        del self._entries[key]
        del self._keys[bisect_left(self._keys, key)]
        self._changed(key)

    def _unbind(self, key: str, stored: _Stored) -> None:
        if stored.lease is not None:
            del self._leases[stored.lease].keys[key]

    def _under(self, prefix: str) -> Iterator[str]:
        prefix += "/"
        for at in range(bisect_left(self._keys, prefix), len(self._keys)):
            if not self._keys[at].startswith(prefix):
                return
            yield self._keys[at]

    def _entry(self, key: str) -> Entry:
        stored = self._entries[key]
        left = None
        if stored.lease is not None:
            left = self._leases[stored.lease].expires_at - self.clock.now()
        return Entry(key, stored.value, stored.revision, stored.version, stored.lease, left)

    def _changed(self, key: str) -> None:
        scope = key
        while scope:
            for changed in list(self._watchers.get(scope, {}).values()):
                changed()
            scope = scope.rpartition("/")[0]

    def _next(self) -> int:
        self._counter += 1
        return self._counter


class MemoryStore(Store):
    """One client of a `MemoryServer`, on the running loop."""

    capabilities = Capabilities(one_process=True)

    def __init__(self, server: MemoryServer, context: Context) -> None:
        self._server = server
        self._emit = context.emit
        self._loop = asyncio.get_running_loop()
        self._own: set[str] = set()
        self._watches: dict[_MemoryWatch, None] = {}
        self._closed = False

    async def grant(self, ttl_s: float) -> Lease:
        lease = self._at().grant(max(ttl_s, self.capabilities.ttl_min_s))
        self._own.add(lease.id)
        return lease

    async def renew(self, lease: Lease) -> None:
        self._at().renew(lease.id)

    async def revoke(self, lease: Lease) -> None:
        self._at().revoke(lease.id)

    def warrant(self, lease: Lease) -> bytes:
        return lease.id.encode()

    async def end(self, warrant: bytes) -> None:
        self._at().revoke(warrant.decode())

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        return self._at().create(key, value, lease.id)

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        return self._at().put(key, value, if_version)

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        return self._at().update(entry, value)

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        return self._at().delete(key, if_version)

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        return self._at().enqueue(line, value, lease.id, rank)

    async def ahead(self, ticket: Entry) -> Entry | None:
        return self._at().ahead(ticket.key)

    async def get(self, key: str) -> Entry | None:
        return self._at().get(key)

    async def list(self, prefix: str) -> list[Entry]:
        return self._at().list(prefix)

    async def head(self, line: str) -> Entry | None:
        return self._at().head(line)

    async def diagnose(self) -> Sequence[Finding]:
        return [
            Finding.warning(
                "memory",
                "a memory store exists in one process: other processes do not see it, and its"
                " tokens start again with each process",
                "for several processes use another store, such as sqlite:///path",
            )
        ]

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        self._at()
        return _MemoryWatch(self, scope, notify)

    async def close(self) -> None:
        self._closed = True
        for watch in list(self._watches):
            watch.close()

    def report(self, ended: Sequence[str]) -> None:
        """Emit `LeaseEnded` for leases of other clients; a session reports the end of its own."""
        for lease in ended:
            if lease not in self._own:
                self._emit(LeaseEnded(lease=lease, cause="expired"))

    def _at(self) -> MemoryServer:
        if self._closed:
            raise StoreUnusable("this store is closed; open it again")
        self.report(self._server.expire())
        return self._server


class _MemoryWatch:
    """Accepts changes on any thread and notifies on the store's loop, merging notifications."""

    def __init__(self, store: MemoryStore, scope: str, notify: Callable[[], None]) -> None:
        self.store = store
        self._notify = notify
        self._due = False
        self._closed = False
        self._unsubscribe = store._server.subscribe(scope, self._changed)
        store._watches[self] = None
        self._alarm = store._server.alarm(store._loop)
        self._alarm.add(self)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._unsubscribe()
            del self.store._watches[self]
            self._alarm.remove(self)

    def _changed(self) -> None:
        # Set before the notification is scheduled and cleared before it runs: a change that finds
        # it set is covered by a notification that has not begun.
        if not self._due:
            self._due = True
            if not _soon(self.store._loop, self._deliver):
                self._unsubscribe()

    def _deliver(self) -> None:
        self._due = False
        if not self._closed:
            self._notify()


class _Alarm:
    """Ends leases at their expiry while there are watches on this loop. One timer per loop.

    The timer uses the loop's time and the clock decides: it is set again if the clock says that it
    is too early, or if the lease was renewed.
    """

    def __init__(self, server: MemoryServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._watches: dict[_MemoryWatch, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watch: _MemoryWatch) -> None:
        self._watches[watch] = None
        if self._timer is None:
            self._set()

    def remove(self, watch: _MemoryWatch) -> None:
        del self._watches[watch]
        if not self._watches:
            self._set()
            self._server.drop_alarm(self._loop)

    def sooner(self) -> None:
        """Called, on any thread, when a new lease ends before all others."""
        if not _soon(self._loop, self._set):
            self._server.drop_alarm(self._loop)

    def _set(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._server.next_expiry()
        if at is not None and self._watches:
            wait_s = max(at - self._server.clock.now(), _GRAIN_S)
            self._timer = self._loop.call_later(wait_s, self._ring)

    def _ring(self) -> None:
        next(iter(self._watches)).store.report(self._server.expire())
        self._set()


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> bool:
    """Schedule `callback` on `loop` from any thread. False if the loop is closed."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    try:
        if running is loop:
            loop.call_soon(callback)
        else:
            loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return False
    return True


# By name and clock: stores on a virtual clock are separate, and all system clocks are one. A server
# lives as long as the process, so that its revisions never start again.
_servers: dict[tuple[str, int], MemoryServer] = {}
_servers_lock = threading.Lock()


def _in_forked_child() -> None:
    global _servers_lock
    _servers_lock = threading.Lock()
    _servers.clear()


os.register_at_fork(after_in_child=_in_forked_child)


async def open_store(url: StoreURL, context: Context) -> MemoryStore:
    """Open `memory://name`. `memory://` alone is the name ""."""
    url.refuse_unknown()
    clock = context.clock
    key = (url.parts.netloc + url.parts.path, 0 if isinstance(clock, SystemClock) else id(clock))
    with _servers_lock:
        if key not in _servers:
            _servers[key] = MemoryServer(clock)
        return MemoryStore(_servers[key], context)
