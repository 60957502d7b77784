"""Ending the leases of a dead holder at its store, and the stores that a warden keeps open.

- The audit log is written first: it states that the holder has died. Without that line, `verify`
  would take the successor's term for an overlap. If it cannot be written, the lease expires.
- An attempt is repeated until the store says that the lease is gone. It cannot be known whether the
  ttl has passed: stores restart leases after outages. It is given up after ten ttls in which the
  store answered and refused, or at once if repeating cannot help.
- Each distinct URL has one store, opened when the first session with it registers, so that its
  client library is loaded and its connection made before they are needed.

Imports the port, the audit log and the events.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from doyen._waiting import retrieve, shared
from doyen.errors import ConfigError, LeaseGone, OutcomeUnknown, StoreUnavailable
from doyen.events import Event, LeaseEnded, Record
from doyen.events.log_lines import log_line
from doyen.lease.clock import Clock
from doyen.stores.port import Store
from doyen.warden.table import WardedLease
from doyen.warden.wire import Hello

if TYPE_CHECKING:
    from doyen.audit import AuditLog

__all__ = ["KeptStores", "LeaseEnder", "Witness"]

log = logging.getLogger("doyen.warden")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 2.0
ANSWERED_TTLS = 10
"""How many ttls an attempt is repeated that the store answers and refuses."""
AT_ONCE = 16
"""How many leases of one holder are ended at a time."""


Opener = Callable[[str], Awaitable[Store]]
"""Opens a store by its URL, which has the credentials, and no relative paths."""


@dataclass(eq=False)
class _Kept:
    """A store, for as long as sessions use it."""

    opening: asyncio.Task[Store] | None = None
    users: int = 0


class KeptStores:
    """The stores of the sessions that a warden serves."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._kept: dict[str, _Kept] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def acquire(self, url: str) -> None:
        """A session with this store has registered: open it, unless it is open."""
        kept = self._kept.setdefault(url, _Kept())
        kept.users += 1
        if kept.opening is None:
            self._open(url, kept)

    def _open(self, url: str, kept: _Kept) -> asyncio.Task[Store]:
        async def opened() -> Store:
            return await self._opener(url)

        def concluded(opening: asyncio.Task[Store]) -> None:
            retrieve(opening)
            if kept.opening is opening and (opening.cancelled() or opening.exception()):
                kept.opening = None

        kept.opening = asyncio.get_running_loop().create_task(opened())
        kept.opening.add_done_callback(concluded)
        return kept.opening

    async def store(self, url: str) -> Store:
        """The store of a session that has not been released. Raises if it cannot be opened; the
        next call tries again."""
        kept = self._kept[url]
        if kept.opening is None:
            self._open(url, kept)
        assert kept.opening is not None
        return await shared(kept.opening)

    def release(self, url: str) -> None:
        """A session has gone. The last one closes the store."""
        kept = self._kept[url]
        kept.users -= 1
        if not kept.users:
            del self._kept[url]
            task = asyncio.get_running_loop().create_task(_close(kept))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        kept, self._kept = list(self._kept.values()), {}
        await asyncio.gather(*map(_close, kept), *self._closing, return_exceptions=True)


async def _close(kept: _Kept) -> None:
    if kept.opening is None:
        return
    kept.opening.cancel()
    try:
        store = await kept.opening
    except (Exception, asyncio.CancelledError):  # noqa: BLE001 - it was not open
        return
    await store.close()


class Witness:
    """Writes to audit logs that a holder has died, as a session of its own."""

    def __init__(self, clock: Clock, session: str) -> None:
        self._clock = clock
        self._session = session

    def record(self, event: Event) -> Record:
        return Record(event, self._clock.now(), self._clock.wall(), self._session, os.getpid())

    def prepare(self) -> None:
        """A session has an audit log. Load the code that writes it, and start the thread on which
        that is done: at the death of the holder, this would take longer than everything else."""
        asyncio.get_running_loop().run_in_executor(None, _audit_log)

    async def testify(self, path: str, leases: Sequence[WardedLease]) -> None:
        """Write that the holder of these leases died. Raises `ConfigError` if that fails."""
        events = [self.record(LeaseEnded(lease=lease.id, cause="died")) for lease in leases]
        # On a thread: a disk that hangs must not stop the other sessions.
        await asyncio.to_thread(partial(_write, path, events))


def _audit_log() -> type[AuditLog]:
    from doyen.audit import AuditLog  # only where there is a log

    return AuditLog


def _write(path: str, events: Sequence[Record]) -> None:
    audit = _audit_log()(path)
    try:
        for event in events:
            audit(event)
            if not audit.complete:
                raise ConfigError(f"the audit log {path} cannot be written")
    finally:
        audit.close()


class LeaseEnder:
    """Ends the leases of one dead holder."""

    def __init__(
        self, stores: KeptStores, witness: Witness, clock: Clock, give_up_s: float
    ) -> None:
        """`give_up_s`: how long a store that does not answer at all is tried."""
        self._stores = stores
        self._give_up_s = give_up_s
        self._witness = witness
        self._now = clock.now

    async def end(self, hello: Hello, leases: Sequence[WardedLease]) -> None:
        """End these leases. Returns when all have ended or are left to expire."""
        if not leases:
            return
        if hello.audit is not None:
            try:
                await self._witness.testify(hello.audit, leases)
            except ConfigError as error:
                _left(leases, error)
                return
        if hello.settle_s:
            await asyncio.sleep(hello.settle_s)
        limit = asyncio.Semaphore(AT_ONCE)
        first, *others = (self._end(hello, lease, limit) for lease in leases)
        if others:
            await asyncio.gather(first, *others)
        else:
            await first  # in this turn of the loop

    async def _end(self, hello: Hello, lease: WardedLease, limit: asyncio.Semaphore) -> None:
        pause_s, refused_s = FIRST_PAUSE_S, 0.0
        died_at = self._now()
        while True:
            began = self._now()
            try:
                async with limit:
                    store = await self._stores.store(hello.url)
                    async with asyncio.timeout(hello.request_timeout_s):
                        await store.end(lease.warrant)
            except LeaseGone:
                return
            except (StoreUnavailable, TimeoutError) as error:
                log.debug("%s", log_line(event="warden_retries", lease=lease.id, error=error))
                if began - died_at > self._give_up_s:
                    _left([lease], error)
                    return
            except OutcomeUnknown as error:
                refused_s += self._now() - began + pause_s
                if refused_s > ANSWERED_TTLS * lease.ttl_s:
                    _left([lease], error)
                    return
            except Exception as error:  # noqa: BLE001 - trying again does not help
                _left([lease], error)
                return
            else:
                log.info("%s", log_line(event="lease_ended_by_warden", lease=lease.id))
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _left(leases: Sequence[WardedLease], error: BaseException) -> None:
    for lease in leases:
        line = log_line(event="lease_left_to_expire", lease=lease.id, error=error)
        log.warning("%s", line)
