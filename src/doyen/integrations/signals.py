"""Signals of servers and schedulers: what SIGTERM releases first, and what it leaves alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from doyen.lease.lifetime import ends_process

__all__ = ["Uninterrupted", "given_up_on_sigterm", "release_on_sigterm"]

Handler = Callable[[int, Any], object]


def release_on_sigterm(server_handler: Any, release: Callable[[], None]) -> Callable[[], None]:
    """Have `release` called on SIGTERM, before the handler that the server has. It must not block.

    Without such a handler, and on other threads, nothing is changed: that is the business of
    `doyen.lease.lifetime`. Returns a function that restores the handler.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(server_handler) or ends_process(server_handler):
        return lambda: None
    pid = os.getpid()

    def release_first(signum: int, frame: object) -> None:
        if os.getpid() == pid:
            release()
        server_handler(signum, frame)

    def restore() -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is release_first:
            signal.signal(signal.SIGTERM, server_handler)

    signal.signal(signal.SIGTERM, release_first)
    return restore


@contextmanager
def given_up_on_sigterm() -> Iterator[None]:
    """What is waited for in this context is given up on SIGTERM: `SystemExit` is raised after the
    handler of the server was called, which only notes that the process is to end. Without such a
    handler, and on other threads, nothing is changed."""
    server_handler = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(server_handler) or ends_process(server_handler):
        yield
        return
    pid, waiting = os.getpid(), True

    def give_up(signum: int, frame: Any) -> None:
        server_handler(signum, frame)
        if waiting and os.getpid() == pid:
            raise SystemExit(0)

    signal.signal(signal.SIGTERM, give_up)
    try:
        yield
    finally:
        waiting = False
        if signal.getsignal(signal.SIGTERM) is give_up:
            signal.signal(signal.SIGTERM, server_handler)


class Uninterrupted:
    """Steps of the main thread that a signal does not interrupt: its handler, which raises an
    exception, is called at the end of the step. A second signal interrupts the step.

        with steps.step():
            send(task)
    """

    def __init__(self) -> None:
        self.inside = False
        """Whether a step is under way."""
        self._due: tuple[Handler, int, Any] | None = None
        """The handler that is called at the end of the step, with its arguments."""

    def guard(self, *signals: int) -> Callable[[], None]:
        """Have the present handlers of these signals wait for the end of a step. On other threads
        than the main one nothing is changed. Returns a function that restores the handlers."""
        restored: list[tuple[int, Handler, Handler]] = []
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                handler = signal.getsignal(number)
                if callable(handler) and not ends_process(handler):
                    waiting = partial(self.handle, handler)
                    signal.signal(number, waiting)
                    restored.append((number, waiting, handler))

        def restore() -> None:
            if threading.current_thread() is threading.main_thread():
                for number, waiting, handler in restored:
                    if signal.getsignal(number) is waiting:
                        signal.signal(number, handler)

        return restore

    def handle(self, handler: Handler, signum: int, frame: Any) -> None:
        """Call the handler of a signal, now or at the end of the step."""
        if self.inside and self._due is None:
            self._due = handler, signum, frame
        else:
            self._due = None
            handler(signum, frame)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is done in this context is not interrupted by the first signal."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            due, self._due = self._due, None
            if due is not None:
                handler, signum, frame = due
                handler(signum, frame)

    def hurry(self) -> None:
        """Interrupt the step, if a signal waits for its end. Any thread."""
        due = self._due
        if due is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, due[1])
