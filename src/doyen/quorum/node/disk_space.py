"""Whether the quorum has room for more: what a node says of its own disk, and what a leader knows.

A node whose disk is full says so in its log and its status, and tells whoever leads, again and
again until there is room. It goes on voting and acknowledging from what its journal keeps in
reserve. So that the reserve lasts, a leader refuses clients' writes while its own disk is full,
while no majority has room, and while too much waits for its own disk. What ends leases and deletes
goes on, within bounds, and so do the commands of the node itself.

A full leader hands over to a node with room, if a majority has room. Otherwise it leads on: another
leader could do no more, and handing over would cost generations, which are written to disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from math import inf
from typing import Any, Protocol

from doyen.quorum.consensus.core import Core, CoreEvent, Role, TransferAsked
from doyen.quorum.node.interfaces import Journal
from doyen.quorum.node.proposals import ProposalLimits
from doyen.quorum.node.replicated import Command
from doyen.quorum.node.validation import frees

__all__ = ["FULL", "ROOM", "DiskSpaceOwner", "Room"]

log = logging.getLogger("doyen.quorum.node")

FULL, ROOM = b"F", b"R"
REPORT_S = 0.25
"""How often a node says that its disk is full."""
STALE_S = 1.0
"""When a report counts no longer that was not repeated."""
SETTLE_S = 0.5
"""How long a full leader listens to reports before it hands over."""
SPARE_BYTES = 4 << 20
"""How much of the reserve is for clients' ends of leases and deletes."""


class DiskSpaceOwner(Protocol):
    """What the driver does for this."""

    core: Core

    def tell_core(self, event: CoreEvent) -> None: ...

    def start_task(self, work: Coroutine[Any, Any, Any]) -> None: ...

    async def pause(self, within_s: float) -> None:
        """Until the role changes, or so long."""


class Room:
    """What one node knows."""

    def __init__(
        self,
        owner: DiskSpaceOwner,
        journal: Journal,
        limits: ProposalLimits,
        now: Callable[[], float],
        tell: Callable[[str, bytes], Awaitable[object]],
    ) -> None:
        """`tell` sends a report (`FULL` or `ROOM`) to the node that leads."""
        self._owner = owner
        self._journal = journal
        self._limits = limits
        self._now = now
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self.full = False
        """Whether the disk was full when it was looked at last."""
        self._reporting = False
        self._reports: dict[str, float] = {}
        self._settled_at = -inf
        self._hands_over: asyncio.TimerHandle | None = None
        self._spent = 0

    def end(self) -> None:
        if self._hands_over is not None:
            self._hands_over.cancel()

    def role_changed(self) -> None:
        self.end()
        self._hands_over = None
        self._reports.clear()
        self._settled_at = self._now() + SETTLE_S

    # A node's own disk.

    def look(self) -> None:
        """Notice whether the disk is full."""
        full = self._journal.full()
        if full is self.full:
            return
        self.full, name = full, self._owner.core.id
        if not full:
            log.warning("the disk of node %s has room again", name)
            return
        log.error(
            "the disk of node %s is full: make room there. Until then it takes part from what it"
            " has in reserve, and writes are refused if it leads or no majority has room",
            name,
        )
        self._settled_at = max(self._settled_at, self._now() + SETTLE_S)
        if not self._reporting:
            self._reporting = True
            self._owner.start_task(self._report())

    async def _report(self) -> None:
        owner, full = self._owner, True
        while full:
            self.look()
            full, leader = self.full, owner.core.leader
            if leader not in (None, owner.core.id):
                await self._tell(leader, FULL if full else ROOM)
            if full:
                await owner.pause(REPORT_S)
            full = full or self._journal.full()
        self._reporting = False

    # What a leader knows.

    def heard(self, peer: str, report: bytes) -> None:
        """A peer says how its disk is."""
        if report == FULL:
            self._reports[peer] = self._now() + STALE_S
        else:
            self._reports.pop(peer, None)

    def without(self) -> tuple[str, ...]:
        """The nodes whose disk is full, as far as this one knows."""
        now, own = self._now(), (self._owner.core.id,) if self.full else ()
        return (*own, *(peer for peer, until in self._reports.items() if until > now))

    def refusal(self) -> str | None:
        """Why clients' writes are refused now."""
        self.look()
        waiting = self._journal.queued()
        if self.full:
            name = self._owner.core.id
            return f"the disk of node {name}, which leads, is full: make room there"
        if self._reports and not self._majority_has_room():
            names = ", ".join(self.without())
            return f"the disks of nodes {names} are full, so no majority has room: make room there"
        if waiting > self._limits.journal_bytes:
            return (
                f"{waiting} bytes wait for the disk of node {self._owner.core.id}, which leads: it"
                " is slower than what is written; write less, or let another node lead"
            )
        self._spent = 0
        return None

    def _majority_has_room(self) -> bool:
        members, full = self._owner.core.membership, self.without()
        return sum(voter not in full for voter in members.voters) >= members.majority

    def spares(self, commands: Sequence[Command]) -> bool:
        """Whether these are carried out all the same."""
        size = sum(len(each.body) + len(each.client) + 32 for each in commands)
        if self._spent + size > SPARE_BYTES or not all(map(frees, commands)):
            return False
        self._spent += size
        return True

    def hand_over_soon(self) -> None:
        """Let a node with room lead, once it is known which have."""
        if self.full and self._hands_over is None:
            wait_s = max(self._settled_at - self._now(), 0.0)
            self._hands_over = self._loop.call_later(wait_s, self._hand_over)

    def _hand_over(self) -> None:
        leading = self._owner.core.role is Role.LEADING
        if leading and self._journal.full() and self._majority_has_room():
            self._owner.tell_core(TransferAsked("", self.without()))
        else:
            self._hands_over = None

    def stays(self) -> None:
        """A transfer has failed."""
        self._hands_over = None
        self._settled_at = self._now() + SETTLE_S
