"""Deleting the records and tickets of a session so that they stay deleted.

A store that replicates asynchronously may lose a confirmed deletion in a failover. The entry is
then back, under a lease that is still renewed, so it would never expire and every candidate would
wait for it. Any candidate of the same session that finds such an entry deletes it, and every
deletion is checked once more after one to two ttls, because no candidate may be left to find it.

Imports the bounded calls, the session's leases and the model.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

from doyen._waiting import BackgroundTasks
from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable
from doyen.lease.calls import StoreCalls
from doyen.lease.keeper import LeaseKeeper
from doyen.model import Claim, Entry

__all__ = ["Deletions"]

log = logging.getLogger("doyen")

CHECKS_AT_ONCE = 16
"""How many deletions are checked at a time. They are not urgent and must not delay other calls."""


class Deletions:
    """Deletes records and tickets of one session."""

    __slots__ = ("_calls", "_checking", "_leases", "_tasks", "_unchecked")

    def __init__(self, calls: StoreCalls, leases: LeaseKeeper, tasks: BackgroundTasks) -> None:
        self._calls = calls
        self._leases = leases
        self._tasks = tasks
        self._unchecked: dict[str, None] = {}
        """Keys whose deletion is checked in the next round."""
        self._checking: asyncio.Task[None] | None = None

    async def delete(self, entry: Entry) -> None:
        """Delete a record or ticket by its version. It is no error if it is gone already."""
        store = self._calls.store
        await self._calls.call(store.delete(entry.key, if_version=entry.version))
        if not store.capabilities.durable:
            self._unchecked[entry.key] = None
            if self._checking is None or self._checking.done():
                self._checking = self._tasks.start(self._check())

    async def delete_left_over(self, entry: Entry) -> bool:
        """Delete a record or ticket of this session whose attempt has ended; False for others."""
        keepalive = self._leases.find(entry.lease)
        if keepalive is None or Claim.decode(entry.value).attempt in keepalive.attempts:
            return False
        await self.delete(entry)
        return True

    async def _check(self) -> None:
        while self._unchecked:
            keys, self._unchecked = iter(self._unchecked), {}
            await asyncio.sleep(self._calls.timing.ttl_s)
            while some := [*itertools.islice(keys, CHECKS_AT_ONCE)]:
                await asyncio.gather(*map(self._check_key, some))

    async def _check_key(self, key: str) -> None:
        while True:
            try:
                entry = await self._calls.call(self._calls.store.get(key))
                if entry is not None:
                    await self.delete_left_over(entry)
                return
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(self._calls.retry_pause())
            except StoreError as error:
                log.debug("the deletion of %s could not be checked: %s", key, error)
                return
