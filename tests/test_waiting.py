"""Waiting for a future without owning it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from doyen._waiting import shared
from doyen.testing import run_virtual


def test_a_waiter_gets_the_outcome_and_its_cancellation_is_its_own() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        patient, hasty = (asyncio.create_task(shared(future)) for _ in range(2))
        await asyncio.sleep(0)
        hasty.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hasty
        future.set_result(7)
        assert await patient == 7
        assert await shared(future) == 7
        failing: asyncio.Future[int] = loop.create_future()
        waiting = asyncio.create_task(shared(failing))
        await asyncio.sleep(0)
        failing.set_exception(ValueError("why"))
        with pytest.raises(ValueError, match="why"):
            await waiting

    run_virtual(main())


@pytest.mark.parametrize("ends", ["fails", "is cancelled"])
def test_a_failure_after_the_waiter_has_gone_is_not_logged(ends: str) -> None:
    reported: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        future: asyncio.Future[None] = loop.create_future()
        waiting = asyncio.create_task(shared(future))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        if ends == "fails":
            future.set_exception(ValueError("too late"))
        else:
            future.cancel()
        await asyncio.sleep(0)
        del future, waiting
        gc.collect()

    run_virtual(main())
    assert reported == []
