"""Reading and observing who leads an election, or holds a lock, and who waits in its line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from doyen.election.core import SessionCore
from doyen.election.trail import decode_trail, merge_terms
from doyen.errors import OutcomeUnknown, StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.lease.keeper import StoreCalls
from doyen.model import (
    Candidate,
    Claim,
    Entry,
    Kind,
    Leader,
    Line,
    PastTerm,
    Unreachable,
    leader_key,
    line_key,
    trail_key,
)
from doyen.stores.port import Watch

__all__ = [
    "is_foreign",
    "leader_of",
    "line_of",
    "observe",
    "observe_leader",
    "observe_line",
    "read_history",
    "read_leader",
    "read_line",
]

T = TypeVar("T")
LONGEST_SETTLE = 10
"""An observer that waits for changes to settle waits this many times as long at most."""
log = logging.getLogger("doyen")


async def read_leader(core: SessionCore, election: str, kind: Kind = "elections") -> Leader | None:
    """The leader of an election, read from the store."""
    record = await core.call(core.store.get(leader_key(election, kind)))
    return None if record is None else leader_of(election, record, kind)


async def read_line(core: SessionCore, election: str, kind: Kind = "elections") -> Line:
    """The leader and all candidates in line. The leader keeps its ticket and is marked."""
    record = await core.call(core.store.get(leader_key(election, kind)))
    tickets = await core.call(core.store.list(line_key(election, kind)))
    line = line_of(election, record, tickets, kind)
    return line if core.capabilities.has_line else line.__replace__(complete=False)


async def read_history(core: SessionCore, election: str) -> list[PastTerm]:
    """The last terms of an election, the newest first, with the present one."""
    trail = await core.call(core.store.get(trail_key(election)))
    record = await core.call(core.store.get(leader_key(election)))
    written = decode_trail(trail.value) if trail else ()
    terms = merge_terms(written, core.trail.unwritten(election))
    if record is not None:
        leader = leader_of(election, record)
        known = PastTerm(leader.name, leader.token, leader.since or 0.0)
        terms[leader.token] = terms.get(leader.token, known).__replace__(leads=True)
    return sorted(terms.values(), key=lambda term: -term.token)


async def observe_leader(
    core: SessionCore,
    election: str,
    kind: Kind,
    deliver: Callable[[Leader | Unreachable[Leader] | None], None],
) -> None:
    """Deliver the current leader, then every change, until cancelled."""
    scopes = [leader_key(election, kind)]
    untyped: Callable[[Any], None] = deliver  # `last` is a leader or None either way
    await observe(core.calls, scopes, lambda: read_leader(core, election, kind), untyped)


async def observe_line(
    core: SessionCore,
    election: str,
    kind: Kind,
    deliver: Callable[[Line | Unreachable[Line]], None],
) -> None:
    """The same for the leader and the line."""
    scopes = [leader_key(election, kind), line_key(election, kind)]
    await observe(core.calls, scopes, lambda: read_line(core, election, kind), deliver)


class _Observation(Generic[T]):
    """What one observer has delivered, and whether it is still known to be current."""

    def __init__(self, key: str, deliver: Callable[[T | Unreachable[T]], None]) -> None:
        self.key = key
        self.changed = asyncio.Event()
        self._deliver = deliver
        self._delivered: list[T] = []
        self._unreachable = False

    def read(self, current: T) -> None:
        """Deliver what was read, if that is new, or if the store was unreachable meanwhile."""
        if self._unreachable or self._delivered != [current]:
            self._unreachable = False
            self._delivered = [current]
            self._deliver(current)

    def unreachable(self, since: float, error: str) -> None:
        self._unreachable = True
        self._deliver(Unreachable(since, self._delivered[0] if self._delivered else None, error))

    def reachable(self) -> None:
        self.changed.set()

    def read_again(self) -> None:
        self.changed.set()


async def observe(
    calls: StoreCalls,
    scopes: list[str],
    read: Callable[[], Awaitable[T]],
    deliver: Callable[[T | Unreachable[T]], None],
    *,
    settle_s: float = 0.0,
    due: Callable[[T], float | None] = lambda _: None,
) -> None:
    """Deliver what `read` returns, and again whenever it differs after a change in `scopes`.

    When the store has not answered for a ttl, or has failed this observer for two, `Unreachable` is
    delivered, and what is read then once it answers again. After a change it waits until nothing
    has changed for `settle_s` before it reads, so that many changes at the same time cost one read.
    It waits `LONGEST_SETTLE` times as long at most. `due` returns the seconds after which to read
    again although nothing has changed.
    """
    observation = _Observation(scopes[0], deliver)
    changed = observation.changed
    watches: list[Watch] = []
    calls.reachability.join(observation)
    try:
        while True:
            try:
                while len(watches) < len(scopes):
                    scope = scopes[len(watches)]
                    watches.append(await calls.call(calls.store.watch(scope, changed.set)))
                changed.clear()
                current = await read()
            except (OutcomeUnknown, StoreUnavailable) as error:
                log.debug("%s", log_line(event="observing_failed", key=scopes[0], error=error))
                calls.reachability.failed(observation, error)
                await asyncio.sleep(calls.retry_pause())
                continue
            calls.reachability.succeeded(observation)
            observation.read(current)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due(current)):
                    await changed.wait()
                    if settle_s:
                        await _settled(changed, settle_s)
    finally:
        calls.reachability.leave(observation)
        for watch in watches:
            watch.close()


async def _settled(changed: asyncio.Event, settle_s: float) -> None:
    """Wait until nothing has changed for a while."""
    loop = asyncio.get_running_loop()
    longest = loop.time() + LONGEST_SETTLE * settle_s
    while loop.time() < longest and changed.is_set():
        changed.clear()
        await asyncio.sleep(settle_s)


def is_foreign(entry: Entry) -> bool:
    """Whether a ticket or a leader record is that of a candidate of another program."""
    return not Claim.decode(entry.value).attempt


def leader_of(election: str, record: Entry, kind: Kind = "elections") -> Leader:
    """The leader that a leader record describes."""
    claim = Claim.decode(record.value)
    return Leader(
        election,
        claim.name,
        record.revision,
        claim.meta,
        kind,
        claim.since,
        claim.ttl_s,
        record.remaining_s,
        not claim.attempt,
    )


def line_of(
    election: str, record: Entry | None, tickets: list[Entry], kind: Kind = "elections"
) -> Line:
    """The line that a leader record and the tickets describe."""
    leader = None if record is None else leader_of(election, record, kind)
    leads = None if record is None else _candidate_id(record)
    # By attempt: a candidate may have two tickets for a while.
    claims = {_candidate_id(ticket): Claim.decode(ticket.value) for ticket in tickets}
    return Line(
        leader,
        tuple(
            Candidate(claim.name, claim.rank, False, claim.meta, not claim.attempt)
            if leader is None or candidate != leads
            else Candidate(claim.name, claim.rank, True, leader.meta, leader.foreign)
            for candidate, claim in claims.items()
        ),
    )


def _candidate_id(entry: Entry) -> str | int:
    """What distinguishes a candidate: its attempt; if it is foreign, the revision of its entry."""
    return Claim.decode(entry.value).attempt or entry.revision
