"""The life of a store and of a watch: opened once, closed once, unusable in a forked child."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from doyen._waiting import shared
from doyen.errors import LeaseGone, StoreError, StoreUnusable, TicketGone
from doyen.events.log_lines import log_line
from doyen.model import Entry, Lease
from doyen.stores.port import Store

log = logging.getLogger("doyen")

CLOSED = "this store has been closed; open another"
_FORKED = (
    "this store was opened before a fork and belongs to the parent process: connect again in the"
    " child"
)
_CALLS = [name for name, call in vars(Store).items() if iscoroutinefunction(call)]
_CALLS.remove("close")

S = TypeVar("S", bound=Store)


def ahead_of(ticket: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The ticket directly before this one, given both in reverse order."""
    if not entries or entries[0].key != ticket.key:
        raise TicketGone(f"the ticket {ticket.key} is no longer in the line")
    return entries[1] if len(entries) > 1 else None


def lease_gone(lease: str) -> LeaseGone:
    return LeaseGone(f"lease {lease} has ended, and with it all entries bound to it")


async def opened(store: S, opening: Awaitable[None]) -> S:
    """The store once `opening` is done. If that fails, the store is closed."""
    try:
        await opening
    except BaseException:
        await store.close()
        raise
    return store


class GuardedStore(Store):
    """A store that refuses calls after `close`, and in a child process after a fork.

    An adapter overrides `_release` and, if it must do something in a forked child, `_abandon`. Each
    is called at most once. If the parent was closing the store when it forked, `_abandon` meets
    what `_release` has left. A method of several requests calls `_require_usable` before each, so
    that it opens no connection again.
    """

    _unusable: str | None = None
    _releasing: asyncio.Task[None] | None = None

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise StoreUnusable(self._unusable)

    def _refuse_calls(self, reason: str) -> None:
        """From now on, all calls of the port but `close` raise."""

        async def refused(*_: object, **__: object) -> None:
            raise StoreUnusable(reason)

        self._unusable = reason
        for name in _CALLS:
            setattr(self, name, refused)

    def warrant(self, lease: Lease) -> bytes:
        """The id. This suffices where ids are unique across clusters, and `revoke` ends the leases
        of other handles too."""
        return lease.id.encode()

    async def end(self, warrant: bytes) -> None:
        await self.revoke(Lease(warrant.decode(), 0.0))

    @abstractmethod
    async def _release(self) -> None:
        """End all connections and tasks of this store."""

    def _abandon(self) -> None:
        """Close this process's copies of descriptors in a forked child. The connections belong to
        the parent: nothing may be sent on them."""

    def forked(self) -> None:
        if self._unusable != _FORKED:
            self._refuse_calls(_FORKED)
            self._abandon()

    async def close(self) -> None:
        if self._unusable is None:
            self._refuse_calls(CLOSED)
            self._releasing = asyncio.get_running_loop().create_task(self._release())
        if self._releasing is not None:  # goes on if this call is cancelled
            await shared(self._releasing)


BEGIN_AGAIN_S = 0.5


async def begun_again(work: Callable[[], Awaitable[None]], task: str) -> None:
    """Run the work of a task that notifies watches. If a defect ends it, log that, and begin it
    again after a pause: otherwise no watch would be notified any more, and no caller would get an
    error."""
    while True:
        try:
            return await work()
        except Exception:
            log.exception("%s", log_line(event="watches_interrupted", task=task))
            await asyncio.sleep(BEGIN_AGAIN_S)


class WatchHandle:
    """A watch as its user holds it.

    It has begun when the store notifies it of changes. An adapter whose watches begin at once need
    not call `begin`. There may be thousands of watches, so they are small.
    """

    __slots__ = (
        "_beginning",
        "_due",
        "_failure",
        "_notify",
        "_on_close",
        "begun",
        "closed",
        "scope",
    )

    def __init__(
        self, scope: str, notify: Callable[[], None], on_close: Callable[[Any], None]
    ) -> None:
        self.scope = scope
        self.closed = False
        self.begun = False
        self._beginning: asyncio.Future[None] | None = None
        """Done when the watch has begun or failed; only while that is waited for."""
        self._failure: StoreError | None = None
        self._notify = notify
        self._on_close = on_close
        self._due = False

    async def wait_begun(self) -> None:
        """Wait until the watch has begun. If that fails, it is closed."""
        try:
            if not self.begun and self._failure is None:
                self._beginning = asyncio.get_running_loop().create_future()
                await self._beginning
            if self._failure is not None:
                raise self._failure
        except BaseException:
            self.close()
            raise
        finally:
            self._beginning = None

    def begin(self) -> None:
        """The server has the watch. If it had it before, on a connection that has ended, changes in
        between may have been missed: notify."""
        if self.begun:
            self.notify()
        elif self._failure is None:
            self.begun = True
            self._end_beginning()

    def fail(self, error: StoreError) -> None:
        """The watch could not begin. This has no effect on a watch that had begun before."""
        if not self.begun and self._failure is None:
            self._failure = error
            self._end_beginning()

    def _end_beginning(self) -> None:
        if self._beginning is not None and not self._beginning.done():
            self._beginning.set_result(None)

    def notify(self) -> None:
        """Call the watcher's callback, unless the watch is closed."""
        self._due = False
        if not self.closed:
            try:
                self._notify()
            except Exception:
                log.exception("%s", log_line(event="watch_callback_failed", scope=self.scope))

    def notify_soon(self) -> None:
        """Call the callback in the next turn of the loop, once for all changes until then."""
        if not self._due and not self.closed:
            self._due = True
            asyncio.get_running_loop().call_soon(self.notify)

    def close(self) -> None:
        """Stop notifying. Idempotent."""
        if not self.closed:
            self.closed = True
            self.fail(StoreUnusable(CLOSED))
            self._on_close(self)
