"""Waiting for something that must go on when the one who waits is cancelled.

Imports the standard library only.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

__all__ = ["retrieve", "shared"]

T = TypeVar("T")


async def shared(future: asyncio.Future[T]) -> T:
    """The result of a future that others may wait for too: cancelling this does not cancel it.

    `asyncio.shield` does the same, but from Python 3.14 on it reports to the loop's exception
    handler every failure that comes after the waiter was cancelled. Here a caller that gave up, say
    for its timeout, has no interest in the outcome, and nothing is reported.
    """
    if not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            future.add_done_callback(retrieve)
            raise
    return future.result()


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception of a future as retrieved, or asyncio would log that it never was."""
    if future.done() and not future.cancelled():
        future.exception()
