"""Virtual time: an asyncio event loop that never waits.

When every task sleeps, the loop moves its `VirtualClock` to the next timer and goes on. A test of
an hour's failovers takes milliseconds and gives the same order of events every time. There is no
outside here: sockets, subprocesses and threads are never looked at, so a task that waits for one
is reported as a deadlock, as is a set of tasks that wait only for each other.

Imports `doyen.lease.clock` and the standard library.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from doyen.lease.clock import VirtualClock

__all__ = ["VirtualDeadlock", "VirtualLoop", "run_virtual"]

T = TypeVar("T")


class VirtualDeadlock(RuntimeError):
    """Every task waits and nothing is scheduled: real time would pass for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock. `time()` is the clock's `monotonic`.

    Timers wait on `monotonic`, as on a real machine; leases are decided by `now`. So a test can
    suspend the machine (`clock.suspend`) and see what late timers do.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        super().__init__(_NeverWaiting(self))
        # asyncio runs a timer that is due within this. It must exceed a float's grain even after
        # decades of virtual time, or a timer due exactly now would never be run.
        self._clock_resolution = 1e-7

    def time(self) -> float:
        return self.clock.monotonic()


class _NeverWaiting(selectors.BaseSelector):
    """Stands where the loop would wait for the outside, and moves the clock instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlock(_who_waits(self._loop))
        if timeout > 0:
            self._loop.clock.advance(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, fd, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


def _who_waits(loop: VirtualLoop) -> str:
    waiting = sorted(
        f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')})"
        for task in asyncio.all_tasks(loop)
    )
    return (
        "every task waits and nothing is scheduled, so virtual time cannot go on;"
        " sockets, subprocesses and threads do not exist here."
        f" At {loop.time():.3f} s these wait: {', '.join(waiting) or 'none'}"
    )


def run_virtual(
    main: Callable[[], Coroutine[Any, Any, T]] | Coroutine[Any, Any, T],
    *,
    clock: VirtualClock | None = None,
) -> T:
    """Run a coroutine, or a function that makes one, in virtual time, and return its result.

    As `asyncio.run` does it: what is left over at the end is cancelled, and the loop is closed.

    >>> clock = VirtualClock()
    >>> async def an_hour() -> float:
    ...     await asyncio.sleep(3600)
    ...     return clock.now()
    >>> run_virtual(an_hour, clock=clock)
    3600.0
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(main() if callable(main) else main)
