"""Whether the quorum has disk space for more writes.

A node whose disk is full logs it, shows it in its status, and reports it to the leader until there
is space again. It goes on voting and acknowledging, using what its journal keeps in reserve. So
that the reserve lasts, a leader refuses clients' writes while its own disk is full, while no
majority of the voters has space, and while too much waits for its own disk. Commands that end
leases or delete entries are still accepted, within bounds, and so are commands of the node itself.

A leader whose disk is full transfers leadership to a node with space, if a majority has space.
Otherwise it keeps leading: another leader could do no more, and a transfer writes to every disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from math import inf

from doyen.events.log_lines import log_line
from doyen.quorum.consensus.core import Role, TransferAsked
from doyen.quorum.node.journal import FileJournal
from doyen.quorum.node.leader_calls import DISK_SPACE, DONE, LeaderCalls, Respond
from doyen.quorum.node.proposals import ProposalLimits
from doyen.quorum.node.pump import Pump
from doyen.quorum.node.replicated import Command
from doyen.quorum.node.roles import frees

log = logging.getLogger("doyen.quorum.node")

FULL, ROOM = b"F", b"R"
REPORT_S = 0.25
"""How often a node reports that its disk is full."""
STALE_S = 1.0
"""How long a report counts that is not repeated."""
SETTLE_S = 0.5
"""How long a full leader collects reports before it transfers leadership."""
LOOK_S = 5.0
"""How old what is said about the size of the disk may be before it is looked at again."""
SPARE_BYTES = 4 << 20
"""How much of the reserve clients' ends of leases and deletes may use."""


class DiskUsage:
    """The size of the disk of a data directory, and its free space, for display. A thread looks at
    it, since a disk that hangs must not hold up the node."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._seen = (0, 0)
        self._looking = self._look_soon()
        self._at = time.monotonic()

    def usage(self) -> tuple[int, int]:
        """The free and all bytes, as they were some seconds ago; zeros if that is not known."""
        if not self._looking.is_alive() and time.monotonic() - self._at > LOOK_S:
            self._at = time.monotonic()
            self._looking = self._look_soon()
        return self._seen

    def _look_soon(self) -> threading.Thread:
        thread = threading.Thread(target=self._look, name="doyen-disk", daemon=True)
        thread.start()
        return thread

    def _look(self) -> None:
        try:
            disk = os.statvfs(self._path)
        except OSError:
            self._seen = (0, 0)
        else:
            self._seen = (disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)


class DiskSpace:
    """What one node knows about its own disk and, while it leads, about those of the others."""

    def __init__(
        self, pump: Pump, journal: FileJournal, leader_calls: LeaderCalls, limits: ProposalLimits
    ) -> None:
        self._pump = pump
        self._journal = journal
        self._leader_calls = leader_calls
        self._limits = limits
        self._reporting = False
        self._reports: dict[str, float] = {}
        """Peers whose disk is full, and until when the report counts."""
        self._settled_at = -inf
        self._transferring: asyncio.TimerHandle | None = None
        self._spent = 0
        pump.on_disk = self._check
        pump.on_end.append(self._cancel)
        leader_calls.handlers[DISK_SPACE] = self._reported

    def _cancel(self) -> None:
        if self._transferring is not None:
            self._transferring.cancel()

    def role_changed(self) -> None:
        self._cancel()
        self._transferring = None
        self._reports.clear()
        self._settled_at = self._pump.now() + SETTLE_S

    # The node's own disk.

    def _check(self) -> None:
        """Notice whether the disk is full."""
        full, name = self._journal.full, self._pump.id
        if full is self._pump.disk_full:
            return
        self._pump.disk_full = full
        if not full:
            log.warning("%s", log_line(event="disk_has_room", node=name))
            return
        effect = "writes are refused if this node leads or no majority has room"
        remedy = "make room on the disk of this node"
        log.error("%s", log_line(event="disk_full", node=name, effect=effect, remedy=remedy))
        self._settled_at = max(self._settled_at, self._pump.now() + SETTLE_S)
        if not self._reporting:
            self._reporting = True
            self._pump.start_task(self._report())

    async def _report(self) -> None:
        pump, full = self._pump, True
        while full:
            self._check()
            full, leader = pump.disk_full, pump.core.leader
            if leader is not None and leader != pump.id:
                await self._leader_calls.call(leader, DISK_SPACE + (FULL if full else ROOM))
            if full:
                await pump.pause(REPORT_S)
            full = full or self._journal.full
        self._reporting = False

    # The others, on the node that leads.

    def _reported(self, peer: str, report: bytes, respond: Respond) -> None:
        if report == FULL:
            self._reports[peer] = self._pump.now() + STALE_S
        else:
            self._reports.pop(peer, None)
        respond(DONE)

    def without_space(self) -> tuple[str, ...]:
        """The nodes whose disk is full, as far as this one knows."""
        now, own = self._pump.now(), (self._pump.id,) if self._pump.disk_full else ()
        return (*own, *(peer for peer, until in self._reports.items() if until > now))

    def refusal(self) -> str | None:
        """Why clients' writes are refused now; None if they are not."""
        if self._journal.full is not self._pump.disk_full:
            self._check()
        waiting = self._journal.queued
        if (self._pump.disk_full or self._reports) and not self._majority_has_space():
            full = self.without_space()
            which = f"disk of node {full[0]} is" if len(full) == 1 else ""
            which = which or f"disks of nodes {', '.join(full)} are"
            return f"the {which} full, so no majority has room: make room there"
        if self._pump.disk_full:
            return f"the disk of node {self._pump.id}, which leads, is full: make room there"
        if waiting > self._limits.journal_bytes:
            return (
                f"{waiting} bytes wait for the disk of node {self._pump.id}, which leads: it is"
                " slower than what is written; write less, or let another node lead"
            )
        self._spent = 0
        return None

    def _majority_has_space(self) -> bool:
        members, full = self._pump.core.membership, self.without_space()
        return sum(voter not in full for voter in members.voters) >= members.majority

    def spares(self, commands: Sequence[Command]) -> bool:
        """Whether these are accepted while others are refused: they free space."""
        size = sum(len(each.body) + len(each.client) + 32 for each in commands)
        if self._spent + size > SPARE_BYTES or not all(map(frees, commands)):
            return False
        self._spent += size
        return True

    def transfer_soon(self) -> None:
        """Transfer leadership to a node with space, once it is known which have."""
        if self._pump.disk_full and self._transferring is None:
            wait_s = max(self._settled_at - self._pump.now(), 0.0)
            self._transferring = self._pump.loop.call_later(wait_s, self._transfer)

    def _transfer(self) -> None:
        leading = self._pump.core.role is Role.LEADING
        if leading and self._journal.full and self._majority_has_space():
            self._pump.step(TransferAsked("", self.without_space()))
        else:
            self._transferring = None

    def transfer_failed(self) -> None:
        self._transferring = None
        self._settled_at = self._pump.now() + SETTLE_S
