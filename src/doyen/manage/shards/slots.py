"""A shard that a member claims or owns: its slot, its term, and the body that runs it.

claiming ── record created ──▶ won ── still planned ──▶ running ── term over ──▶ ending
    │                           │                                                  │
    └─ no longer planned ───────┴── no longer planned ─────────────────────────────┴─▶ (none)
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Collection
from typing import Any, Protocol

from doyen.election.attempt import Attempt
from doyen.election.leader import Leading
from doyen.errors import describe
from doyen.events.log_lines import log_line
from doyen.model import encode_json
from doyen.term import Term

__all__ = ["Bodies", "BodyFailures", "ShardTerm", "Slot", "Stage", "log_shard_error"]

log = logging.getLogger("doyen")

STEADY_S = 60.0
"""A body that has run for this long has not failed to start; its earlier failures are forgotten."""
ERROR_BYTES = 100
"""How much of an exception is reported. Characters of other scripts take several bytes each."""
PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""How long to wait before a body that ended is run again: doubled with each failure in a row."""


class ShardTerm(Term):
    """The ownership of one shard: a term, with the shard's number."""

    def __init__(self, *, shards: str, shard: int, generation: int, **term: Any) -> None:
        super().__init__(**term)
        self.shards = shards
        """The name of the set."""
        self.shard = shard
        """The number of the shard."""
        self.generation = generation
        """The generation of the plan in which the body began."""


class Bodies(Protocol):
    """Runs the code of users, on their loop or on threads. Called on doyen's loop."""

    def start(self, term: ShardTerm, ended: Callable[[BaseException | None], None]) -> None:
        """Begin the body of a shard, and end it when the term is over. `ended` is called on doyen's
        loop when it has ended, with the exception that it raised."""
        ...

    def prepare(self, shard: int, done: Callable[[BaseException | None], None]) -> None:
        """Prepare for a shard that another member still owns; `done` as above."""
        ...


class Stage(enum.Enum):
    CLAIMING = "claiming"
    BLOCKED = "blocked"
    """The record is another member's."""
    WON = "won"
    """The plan is to be read again before the body begins."""
    RUNNING = "running"
    ENDING = "ending"
    """The term is over and the body has not ended, or the record is being deleted."""


class Slot:
    """A shard that this member claims or owns."""

    __slots__ = ("attempt", "began_at", "changed", "leading", "shard", "stage", "wanted")

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.stage = Stage.CLAIMING
        self.attempt: Attempt | None = None
        self.leading: Leading | None = None
        self.began_at = 0.0
        self.wanted = True
        """The plan gives the shard to this member."""
        self.changed = False
        """The record, which another holds, may have changed since it was claimed."""


class BodyFailures:
    """The bodies that ended by themselves: when each is run again, and which are given up."""

    def __init__(self) -> None:
        self.given_up: dict[int, str] = {}
        """The shards whose body has failed too often, with the last exception."""
        self._in_a_row: dict[int, int] = {}
        self._not_before: dict[int, float] = {}

    def ended(
        self, shard: int, error: BaseException | None, *, ran_s: float, now: float, limit: int
    ) -> None:
        """A body failed, or returned although its member still owns the shard."""
        if ran_s >= STEADY_S:
            self._in_a_row.pop(shard, None)
        failures = self._in_a_row.get(shard, 0) + (error is not None)
        self._in_a_row[shard] = failures
        self._not_before[shard] = now + min(PAUSE_S * 2**failures, LONGEST_PAUSE_S)
        if error is not None and failures >= limit:
            self.given_up[shard] = _shortened(describe(error))

    def next_time(self) -> float:
        """When a body that ended is run again."""
        return min(self._not_before.values(), default=math.inf)

    def pausing(self, now: float) -> Collection[int]:
        """The shards whose body is not run again yet."""
        self._not_before = {n: at for n, at in self._not_before.items() if at > now}
        return self._not_before.keys()


def _shortened(text: str) -> str:
    """The beginning of a text that takes at most `ERROR_BYTES` in the entry of a member."""
    text = text[:ERROR_BYTES]
    while len(encode_json(text)) > ERROR_BYTES:
        text = text[:-1]
    return text


def log_shard_error(event: str, shards: str, shard: int, error: BaseException) -> None:
    """Log what went wrong with one shard of a set."""
    line = log_line(event=event, shard=f"{shards}/{shard}", error=describe(error))
    log.error("%s", line, exc_info=error)
