"""The watchdog: a thread that declares leases lost at their deadline.

It does no I/O and waits for no other thread, so terms end in time even if everything else in the
process is stuck. It decides by the boot-time clock. Thread waits use the monotonic clock, which
halts while the machine is suspended, so it waits in short slices.

Imports the clock and keepalives.
"""

from __future__ import annotations

import threading

from doyen.lease.clock import Clock
from doyen.lease.keepalive import Keepalive

__all__ = ["SLICE_S", "Watchdog"]

SLICE_S = 0.1
"""How long after the end of a suspend a passed deadline may go unnoticed."""


class Watchdog:
    """Watches any number of keepalives. All methods may be called from any thread."""

    __slots__ = ("_changed", "_clock", "_stopped", "_thread", "_watched")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watched: set[Keepalive] = set()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="doyen-watchdog", daemon=True)
        self._thread.start()

    def watch(self, keepalive: Keepalive) -> None:
        """Declare the lease lost when its deadline passes."""
        with self._changed:
            self._watched.add(keepalive)
            self._changed.notify()

    def unwatch(self, keepalive: Keepalive) -> None:
        with self._changed:
            self._watched.discard(keepalive)

    def stop(self) -> None:
        """End the thread, and wait for its end unless called on it."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                if not self._watched:
                    self._changed.wait()
                    continue
                wait = min(each.valid_until for each in self._watched) - self._clock.now()
                if wait > 0:
                    self._changed.wait(min(wait, SLICE_S))
                    continue
                due = [each for each in self._watched if each.valid_until <= self._clock.now()]
                self._watched.difference_update(due)
            for keepalive in due:
                if not keepalive.lose_if_expired():
                    self.watch(keepalive)
