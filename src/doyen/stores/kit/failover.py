"""Requests to several servers: each has a deadline, and the next server is tried where that is
safe.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable

M = TypeVar("M")
T = TypeVar("T")


class ConnectionLost(Exception):
    """The connection ended with a request in flight. A read was not carried out, as far as the
    caller is concerned; the outcome of a write is unknown."""


def connect_cause(error: object) -> str:
    """Why there is no connection, in the words of the system, which asyncio hides.

    >>> connect_cause("[Errno 111] Connect call failed ('127.0.0.1', 6379)")
    'Connection refused'
    >>> refused = "[Errno 111] Connect call failed ('::1', 6379, 0, 0), [Errno 111] Connect call"
    >>> connect_cause(f"Multiple exceptions: {refused} failed ('127.0.0.1', 6379)")
    'Connection refused'
    >>> connect_cause(f"Can't connect (Multiple exceptions: {refused} failed ('127.0.0.1', 6379))")
    "Can't connect (Connection refused)"
    >>> connect_cause("[Errno -2] Name or service not known")
    'Name or service not known'
    """
    text = re.sub(
        r"\[Errno (\d+)\] Connect call failed \([^()]*\)",
        lambda found: os.strerror(int(found[1])),
        str(error),
    )
    text = re.sub(r"Multiple exceptions: ([^,()]+)(, \1)*(?![^,()])", r"\1", text)
    return re.sub(r"\[Errno -?\d+\] ", "", text)


@asynccontextmanager
async def answer_within(timeout_s: float, server: object) -> AsyncIterator[None]:
    """A deadline for a request that changes nothing, or that was not sent."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise StoreUnavailable(f"{server} does not answer within {timeout_s:g} s") from error


async def failover(
    members: Iterable[M],
    attempt: Callable[[M], Awaitable[T]],
    *,
    repeatable: bool = True,
    summary: str = "",
) -> T:
    """The result of the first member at which `attempt` succeeds.

    The next member is tried if the request was not carried out, or if it is `repeatable` and its
    outcome is unknown. If all fail, the error has every member's reason after the `summary`.
    """
    failures: list[StoreError] = []
    for member in members:
        try:
            return await attempt(member)
        except StoreUnavailable as error:
            failures.append(error)
        except OutcomeUnknown as error:
            if not repeatable:
                raise
            failures.append(error)
    reasons = "; ".join(dict.fromkeys(map(str, failures)))
    raise StoreUnavailable(f"{summary}{reasons}") from failures[-1]
