"""anyio and trio use the blocking API on a thread, as docs/lifecycle.md shows. A task that is
cancelled, while it waits or leads, lets go."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
import trio

import doyen

backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])
WITHIN_S = 30.0


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await anyio.sleep(0.005)


async def leading(url: str, began: threading.Event, name: str) -> None:
    """The pattern of the page."""

    async def step() -> None:
        began.set()
        await anyio.sleep(0.01)

    def lead(session: doyen.BlockingSession) -> None:
        with session.campaign("e", name=name) as term:
            while term.valid:
                anyio.from_thread.run(step)

    session = await anyio.to_thread.run_sync(doyen.connect_blocking(url).open)
    try:
        await anyio.to_thread.run_sync(lead, session, abandon_on_cancel=True)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(session.close)


@backends
def test_a_cancelled_task_lets_go(backend: str, store: str) -> None:
    async def main() -> None:
        first, second = threading.Event(), threading.Event()
        async with anyio.create_task_group() as whole, anyio.create_task_group() as waiting:
            async with anyio.create_task_group() as leader:
                leader.start_soon(leading, store, first, "a")
                await until(first.is_set)
                waiting.start_soon(leading, store, second, "b")
                await until(lambda: names(store) == ["a", "b"])
                leader.cancel_scope.cancel()
            await until(second.is_set)
            whole.start_soon(leading, store, threading.Event(), "c")
            await until(lambda: names(store) == ["b", "c"])
            whole.cancel_scope.cancel()  # c waits
            waiting.cancel_scope.cancel()
        await until(lambda: not names(store))

    anyio.run(main, backend=backend)
    assert not [each for each in threading.enumerate() if each.name.startswith("doyen")]


def names(url: str) -> list[str]:
    with doyen.connect_blocking(url) as session:
        return [each.name for each in session.line("e")]


def test_trio_alone(store: str) -> None:
    async def pay(token: int) -> int:
        await trio.lowlevel.checkpoint()
        return token

    def lead() -> int:
        with doyen.connect_blocking(store) as session, session.campaign("e") as term:
            paid: int = trio.from_thread.run(pay, term.token)
            assert paid == term.token
            return paid

    async def main() -> None:
        assert await trio.to_thread.run_sync(lead) > 0

    trio.run(main)
