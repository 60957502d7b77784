"""When to end the leases of a holder: pure decisions, on what the kernel and the guard report.

    alive --died--> dead, no run is under way --------------------> END
                    dead, a run is under way --guard's report-----> END
                                             --the link ended-----> LEAVE (the guard died too)
    alive --closed, or BYE ---------------------------------------> LEAVE

- The only reason to end a lease is that the kernel has reported the death of its holder. The end of
  the link is not a reason: a program may close all its descriptors and go on running.
- A supervised command may outlive its holder for the stop budget. Its guard reports over the link
  when it has reaped every process; only then are the leases ended. If the guard dies as well, it is
  not known whether the command still runs, and the leases expire.

`FrozenWatch` decides when a holder that lives but does not answer is killed. It counts its own
ticks, not time, and only punctual ones: after a suspend, or on an overloaded machine, all processes
are late, and the first to wake must not kill the others.

Imports the lease table and the standard library.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Literal, NamedTuple

from doyen.warden.table import TableState
from doyen.warden.wire import BYE

__all__ = ["FrozenWatch", "HolderWatch", "Ping", "Verdict"]


class Verdict(enum.Enum):
    """What to do with the leases of a holder."""

    WAIT = "wait"
    END = "end"
    LEAVE = "leave"
    """The holder has closed its session, or it is not known whether its work has ended: the leases
    expire if they are not revoked."""


class HolderWatch:
    """The state of one holder. `state` reads the head of its table, None if that is damaged."""

    def __init__(self, state: Callable[[], TableState | None]) -> None:
        self._state = state
        self._dead = False
        self._said_bye = False
        self._link_ended = False
        self._words: set[int] = set()

    def died(self) -> Verdict:
        """The kernel reports that the process has died. What it had sent before has been
        received."""
        self._dead = True
        return self.verdict()

    def heard(self, number: int) -> Verdict:
        """A number arrived over the link: BYE, or the number of a run whose processes are gone."""
        if number == BYE:
            self._said_bye = True
        else:
            self._words.add(number)
        return self.verdict()

    def link_ended(self) -> Verdict:
        """All descriptors of the other end of the link are closed."""
        self._link_ended = True
        return self.verdict()

    def verdict(self) -> Verdict:
        if self._said_bye:
            return Verdict.LEAVE
        if not self._dead and not self._link_ended:
            return Verdict.WAIT
        state = self._state()
        if state is None or state.closed:
            return Verdict.LEAVE
        if not self._dead:
            return Verdict.WAIT
        if state.runs <= self._words:
            return Verdict.END
        return Verdict.LEAVE if self._link_ended else Verdict.WAIT


class Ping(NamedTuple):
    """Ask the holder whether its loop runs."""

    number: int


TICKS = 4
"""Unanswered ticks before a holder counts as frozen."""


class FrozenWatch:
    """Decides, at every tick, whether to ping or to kill a holder.

    >>> watch = FrozenWatch(1.0)
    >>> watch.tick_s
    0.25
    >>> watch.tick(0.25, TableState(0, 1, False, frozenset(), 0))
    Ping(number=1)
    >>> [watch.tick(0.25 * n, TableState(0, 1, False, frozenset(), 0)) for n in (2, 3, 4, 5)]
    [None, None, None, 'kill']
    """

    def __init__(self, frozen_after_s: float) -> None:
        self.tick_s = frozen_after_s / TICKS
        self._last: float | None = None
        self._asked: int | None = None
        self._silent = 0

    def tick(self, now: float, state: TableState | None) -> Ping | Literal["kill"] | None:
        """`now` is on the monotonic clock."""
        late = self._last is not None and now - self._last > 2 * self.tick_s
        self._last = now
        if state is None or not state.bodies:
            self._silent = 0
            return None
        # An earlier warden may have asked before: its last number is in the table.
        if self._asked is None or state.answered >= self._asked:
            self._silent = 0
            self._asked = state.answered + 1
            return Ping(self._asked)
        self._silent = 0 if late else self._silent + 1
        return "kill" if self._silent >= TICKS else None

    def not_asked(self) -> None:
        """The ping could not be sent: the next tick asks again."""
        self._asked = None
