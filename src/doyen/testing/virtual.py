"""Virtual time: an asyncio event loop that never waits.

When every task sleeps, the loop advances its `VirtualClock` to the next timer. A test of an hour of
failovers takes milliseconds and has the same order of events in every run. The loop does not poll
sockets, subprocesses or threads: a task that waits for one is reported as a deadlock, as are tasks
that wait only for each other.

Imports `doyen.lease.clock` and the standard library.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from doyen.lease.clock import VirtualClock

T = TypeVar("T")


class VirtualDeadlock(RuntimeError):
    """Every task waits and no timer is set, so nothing would ever happen."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock. `time()` is the clock's `monotonic`.

    Timers use `monotonic`, as on a real machine, and leases are decided by `now`. A test can
    therefore suspend the machine (`clock.suspend`) and check what late timers do.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        super().__init__(_AdvancingSelector(self))
        # asyncio runs timers that are due within this resolution. It must exceed the rounding
        # error of a float even after decades of virtual time, or a timer that is due now would
        # never run.
        self._clock_resolution = 1e-7

    def time(self) -> float:
        return self.clock.monotonic()


class _AdvancingSelector(selectors.BaseSelector):
    """Advances the clock where the loop would wait for I/O or a timer."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlock(_waiting_tasks(self._loop))
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


def _waiting_tasks(loop: VirtualLoop) -> str:
    waiting = sorted(
        f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')})"
        for task in asyncio.all_tasks(loop)
    )
    return (
        "every task waits and no timer is set, so virtual time cannot advance;"
        " sockets, subprocesses and threads are not available in virtual time."
        f" Waiting tasks at {loop.time():.3f} s: {', '.join(waiting) or 'none'}"
    )


def run_virtual(
    main: Callable[[], Coroutine[Any, Any, T]] | Coroutine[Any, Any, T],
    *,
    clock: VirtualClock | None = None,
) -> T:
    """Run a coroutine, or a function that makes one, in virtual time, and return its result.

    Like `asyncio.run`, it cancels remaining tasks at the end and closes the loop.

    >>> clock = VirtualClock()
    >>> async def an_hour() -> float:
    ...     await asyncio.sleep(3600)
    ...     return clock.now()
    >>> run_virtual(an_hour, clock=clock)
    3600.0
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(main() if callable(main) else main)
