"""A library's threads in virtual time: each runs only while the loop waits for it.

A `Strand` is a thread that takes turns with the event loop. Where it would wait (for a socket, for
a time, for an event) it hands the turn back, and the loop, in its own time, gives it the next one.
So at most one of them runs at any instant, and a run has one order of events.

    strands = Strands(loop, clock)
    strands.spawn(blocking_function)       # in which strands.sleep(1.0) takes no time

Imports the standard library.
"""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Killed(BaseException):
    """The loop has ended, and so has what was to be done."""


class Strand:
    """One thread, as `threading.Thread` is used."""

    def __init__(self, strands: Strands, run: Callable[[], object]) -> None:
        self._strands = strands
        self._run = run
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self.ended = Event(strands)
        self._thread = threading.Thread(target=self._live, daemon=True)

    def start(self) -> None:
        self._strands.all.add(self)
        self._thread.start()
        self._strands.loop.call_soon_threadsafe(self.resume)

    def join(self) -> None:
        self.ended.wait()

    def resume(self) -> None:
        """Let it run until it waits again. The loop's thread."""
        if self._thread.is_alive():
            self._turn.release()
            self._back.acquire()

    def park(self) -> None:
        """Hand the turn back, until `resume`. The strand's thread."""
        self._back.release()
        self._turn.acquire()
        if self._killed:
            raise _Killed

    def kill(self) -> None:
        self._killed = True
        while self._thread.is_alive():
            self._turn.release()
            self._thread.join(0.01)

    def _live(self) -> None:
        self._strands.local.strand = self
        self._turn.acquire()
        try:
            if not self._killed:
                self._run()
        except _Killed:
            pass
        finally:
            if not self._killed:
                self.ended.set()
                self._strands.all.discard(self)
            self._back.release()


class Event:
    """As `threading.Event`."""

    def __init__(self, strands: Strands) -> None:
        self._strands = strands
        self._is_set = False
        self._waiting: list[asyncio.Future[None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._strands.loop.call_soon_threadsafe(_settle, each)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            waiter = self._strands.loop.create_future()
            self._waiting.append(waiter)
            self._strands.wait(waiter, timeout)
        return self._is_set


class Strands:
    """The strands of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.all: set[Strand] = set()
        self.local = threading.local()

    def spawn(self, run: Callable[..., object], *arguments: Any) -> Strand:
        strand = Strand(self, lambda: run(*arguments))
        strand.start()
        return strand

    def close(self) -> None:
        for strand in list(self.all):
            strand.kill()

    def wait(self, what: asyncio.Future[T], timeout: float | None) -> None:
        """Until it is done, or the time is over. A strand's thread."""
        strand: Strand = self.local.strand
        woken = False

        def wake(_: object = None) -> None:
            nonlocal woken
            if not woken:
                woken = True
                self.loop.call_soon(strand.resume)

        def begin() -> None:
            what.add_done_callback(wake)
            if timeout is not None:
                self.loop.call_later(max(timeout, 0.0), wake)

        self.loop.call_soon_threadsafe(begin)
        strand.park()

    def sleep(self, seconds: float) -> None:
        self.wait(self.loop.create_future(), seconds)

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Have a coroutine carried out by the loop; `TimeoutError` if it takes too long."""
        done: asyncio.Future[T] = self.loop.create_future()

        async def bounded() -> None:
            try:
                async with asyncio.timeout(timeout):
                    done.set_result(await work)
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                done.set_exception(error)

        tasks: list[asyncio.Task[None]] = []
        self.loop.call_soon_threadsafe(lambda: tasks.append(self.loop.create_task(bounded())))
        self.wait(done, None)
        return done.result()

    def poll(self) -> Poll:
        return Poll(self)


class Poll:
    """As `select.poll`."""

    def __init__(self, strands: Strands) -> None:
        self._strands = strands
        self._wanted: dict[int, int] = {}

    def register(self, each: Any, mask: int) -> None:
        fd = each if isinstance(each, int) else each.fileno()
        self._wanted[fd] = self._wanted.get(fd, 0) | mask

    def poll(self, timeout_ms: float | None) -> list[tuple[int, int]]:
        real = select.poll()
        for fd, mask in self._wanted.items():
            real.register(fd, mask)
        if (ready := real.poll(0)) or timeout_ms == 0:
            return ready
        loop, seen = self._strands.loop, self._strands.loop.create_future()

        def begin() -> None:
            for fd, mask in self._wanted.items():
                if mask & select.POLLIN:
                    loop.add_reader(fd, _settle, seen)
                if mask & select.POLLOUT:
                    loop.add_writer(fd, _settle, seen)

        def end() -> None:
            for fd in self._wanted:
                loop.remove_reader(fd)
                loop.remove_writer(fd)

        loop.call_soon_threadsafe(begin)
        try:
            self._strands.wait(seen, None if timeout_ms is None else timeout_ms / 1000)
        finally:
            if not loop.is_closed():
                end()
        return real.poll(0)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
