"""The virtual-time loop: it never waits, is deterministic, and reports deadlocks."""

from __future__ import annotations

import asyncio
import time

import pytest

from doyen.lease.clock import VirtualClock
from doyen.testing import VirtualDeadlock, VirtualLoop, run_virtual


def test_sleeping_moves_the_clock_and_takes_no_time() -> None:
    clock = VirtualClock()

    async def main() -> float:
        await asyncio.sleep(86_400 * 365)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtual(main, clock=clock) == clock.monotonic() == 86_400 * 365
    assert time.monotonic() - began < 60


def test_timers_fire_in_order_of_time_then_of_scheduling() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            seen.append(f"{name}@{asyncio.get_running_loop().time()}")

        async with asyncio.TaskGroup() as group:
            for seconds, name in [(2.0, "c"), (1.0, "a"), (1.0, "b"), (0.0, "now")]:
                group.create_task(after(seconds, name))
        return seen

    assert run_virtual(main()) == ["now@0.0", "a@1.0", "b@1.0", "c@2.0"]


def test_timeouts_are_exact() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0.3


def test_suspend_moves_boot_time_and_leaves_timers_waiting() -> None:
    clock = VirtualClock()

    async def main() -> tuple[float, float]:
        asyncio.get_running_loop().call_later(1.0, clock.suspend, 60.0)
        await asyncio.sleep(5.0)
        return clock.now(), clock.monotonic()

    assert run_virtual(main, clock=clock) == (65.0, 5.0)


def test_a_deadlock_is_an_error_that_names_the_waiting_tasks() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(stuck(), name="candidate-7")

    with pytest.raises(VirtualDeadlock, match=r"every task waits.*candidate-7 \(.*stuck\)"):
        run_virtual(main)


def test_leftovers_are_cancelled_and_the_loop_is_closed() -> None:
    ended: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def background() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("background")

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        ended_task = asyncio.create_task(background())
        await asyncio.sleep(1)
        assert not ended_task.done()

    run_virtual(main)
    assert ended == ["background"]
    assert isinstance(loops[0], VirtualLoop)
    assert loops[0].is_closed()


def test_an_exception_of_the_main_coroutine_is_raised() -> None:
    async def main() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_virtual(main)


def test_one_clock_can_serve_several_runs() -> None:
    clock = VirtualClock()
    for _ in range(3):
        run_virtual(asyncio.sleep(2.0), clock=clock)
    assert clock.now() == 6.0
