"""The store calls of one session: limited in number, each with a deadline.

A call without a response within the request timeout raises `OutcomeUnknown`: the request may have
been carried out, or may be later. Renewals are not made through this module, so that they never
wait for other calls.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from doyen.errors import OutcomeUnknown, StoreUnavailable
from doyen.lease.timing import Timing
from doyen.stores.port import Store

__all__ = ["CALLS_AT_ONCE", "StoreCalls"]

T = TypeVar("T")

CALLS_AT_ONCE = 128
"""How many store calls of a session are under way at a time."""


class StoreCalls:
    """Makes the calls of one session to its store."""

    def __init__(self, store: Store, timing: Timing, spread: random.Random) -> None:
        self.store = store
        self.timing = timing
        """Of the session's leases. Replaced if the store grants another ttl than was requested."""
        self._random = spread
        self._admission = asyncio.Semaphore(CALLS_AT_ONCE)

    async def call(self, request: Awaitable[T]) -> T:
        """Make one store call.

        Its timeout begins when it is admitted. If it began earlier, thousands of simultaneous
        calls would wait for one another until all of them had timed out.
        """
        if self._admission.locked():
            await self._wait_for_admission(request)
        else:
            await self._admission.acquire()  # returns at once
        try:
            async with asyncio.timeout(self.timing.request_timeout_s):
                return await request
        except TimeoutError as error:
            raise OutcomeUnknown(
                f"the store did not answer within {self.timing.request_timeout_s:g} s"
            ) from error
        finally:
            self._admission.release()

    async def _wait_for_admission(self, request: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(self.timing.ttl_s):
                await self._admission.acquire()
        except BaseException as error:
            if isinstance(request, Coroutine):
                request.close()
            if isinstance(error, TimeoutError):
                raise StoreUnavailable(
                    f"{CALLS_AT_ONCE} calls to the store are under way, and none of them ended"
                    f" within {self.timing.ttl_s:g} s"
                ) from error
            raise

    def retry_pause(self) -> float:
        """How many seconds to wait before a failed request is retried."""
        return self.timing.retry_pause_s(self._random.uniform(-1, 1))
