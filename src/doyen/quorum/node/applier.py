"""Applies committed log entries to the state machine, in order, and keeps its snapshots.

A backlog is applied in slices, one per turn of the event loop, so that nothing else waits for it,
heartbeats in particular. One snapshot is taken at a time, of the state between two entries. A
snapshot of the leader replaces the state and everything that waits to be applied.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any

from msgspec import MsgspecError
from msgspec.msgpack import Decoder

from doyen.errors import StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.quorum.consensus.core import (
    Committed,
    Compacted,
    EntryKind,
    Install,
    LogEntry,
    Membership,
    Snapshot,
)
from doyen.quorum.keyspace.state import UnknownCommand
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.node.journal import FileJournal
from doyen.quorum.node.proposals import ProposalLimits, Proposals
from doyen.quorum.node.pump import Pump
from doyen.quorum.node.replicated import Command, ReplicatedMachines, decode_batch

log = logging.getLogger("doyen.quorum.node")

SLICE_S = 0.01
"""How long a slice of the backlog may take, to the end of an entry. The end of many leases, or a
command of an application's machine, takes much longer than an ordinary write."""
RETRY_S = 2.0
"""Pause before the next attempt to write a snapshot that could not be written."""

_decode_membership = Decoder(Membership).decode


class Applier:
    """A node's state machine, and the index that it has reached."""

    def __init__(
        self,
        pump: Pump,
        machine: ReplicatedMachines,
        journal: FileJournal,
        proposals: Proposals,
        limits: ProposalLimits,
    ) -> None:
        self.machine = machine
        self.on_applied: list[Callable[[int], None]] = []
        """Called with the index after entries were applied. Exceptions are logged."""
        self._pump = pump
        self._journal = journal
        self._proposals = proposals
        self._limits = limits
        self._start_from(journal.recovered.snapshot or Snapshot(0, 0, pump.core.founders))
        self._queue: deque[LogEntry | Install] = deque()
        self._queued = self.index
        """The last index in the queue."""
        self._paused = False
        """Whether a snapshot of the leader is being restored."""
        self._scheduled = False
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._waits = 0
        self._snapshotting = False
        self._snapshot_bytes = 0
        """The size of the last snapshot that was taken: large ones are taken less often."""
        pump.carry_out[Committed] = self._commit
        pump.carry_out[Install] = self._install

    def _start_from(self, snapshot: Snapshot) -> None:
        self.index = self.snapshot = snapshot.index
        self.generation = snapshot.generation
        self.membership = snapshot.membership
        """The latest that is committed."""
        self._applied_entries = self._applied_bytes = 0
        """Since the last snapshot."""

    async def restore(self) -> Snapshot:
        """Replace the state by the journal's snapshot."""
        snapshot, stream = await self._journal.read_snapshot()
        self.machine.restore([piece async for piece in stream])
        return snapshot

    async def start(self) -> None:
        """Restore the snapshot on disk. Raises if the log needs a state machine that this node does
        not have."""
        recovered = self._journal.recovered
        if recovered.snapshot is not None:
            await self.restore()
        self.machine.require(
            entry.data for entry in recovered.entries if entry.kind == EntryKind.COMMANDS
        )

    def when(self, index: int, call: Callable[[], None]) -> None:
        """Call this as soon as the machine has reached `index`; at once if it has."""
        if self.index >= index:
            call()
        else:
            self._waits += 1
            heappush(self._waiting, (index, self._waits, call))

    def _commit(self, effect: Committed) -> None:
        if effect.first != self._queued + 1:
            raise RuntimeError(f"entry {effect.first} is committed after {self._queued}")
        self._queue.extend(effect.entries)
        self._queued += len(effect.entries)
        if not self._paused and not self._scheduled:
            self._scheduled = True
            self._pump.after_step.append(self._apply_slice)

    def _install(self, effect: Install) -> None:
        self._journal.install(effect)
        self._queue.clear()
        self._queue.append(effect)
        self._queued = effect.snapshot.index
        if not self._paused and not self._scheduled:
            self._scheduled = True
            self._pump.after_step.append(self._apply_slice)

    def _apply_slice(self) -> None:
        """Apply what is queued: a slice now, the rest in the next turns of the loop."""
        self._scheduled = False
        queue, budget = self._queue, self._limits.apply_commands
        now = self._pump.now
        until = now() + SLICE_S
        try:
            while queue and budget > 0:
                item = queue.popleft()
                if isinstance(item, Install):
                    self._paused = True
                    self._pump.start_task(self._restore_installed())
                    return
                budget -= self._apply(item)
                if now() > until:
                    break
            self._moved_on()
        except Exception as error:  # noqa: BLE001 - a defect: the machine's state is unknown
            self._pump.fail(error)
            return
        if queue:
            self._scheduled = True
            self._pump.loop.call_soon(self._apply_slice)

    def _apply(self, entry: LogEntry) -> int:
        """Returns what it takes of the budget of a slice."""
        proposals = self._proposals
        self.index = index = self.index + 1
        if entry.generation > self.generation:
            self.generation = entry.generation
            proposals.entered(entry.generation, index)
        batch = proposals.appended.pop(index, None)
        if batch is not None and batch.generation != entry.generation:
            proposals.propose_again(batch)
            batch = None
        results: list[Any] = []
        if entry.kind == EntryKind.COMMANDS:
            commands = self._commands(entry.data) if batch is None else batch.commands
            results = self.machine.apply(index, commands)
        elif entry.kind == EntryKind.MEMBERSHIP:
            self.membership = _decode_membership(entry.data)
        elif entry.kind != EntryKind.NOTHING:
            raise UnknownCommand(_UNREADABLE.format(index=index))
        if batch is not None:
            proposals.commits.add(self._pump.now() - batch.appended_at)
            proposals.settle(batch, results)
        self._applied_entries += 1
        self._applied_bytes += len(entry.data)
        return len(results) + 1

    def _commands(self, data: bytes) -> list[Command]:
        """An entry's commands."""
        try:
            return decode_batch(data)
        except MsgspecError:
            if self.machine.version == FIRST:  # every node takes it as empty
                return []
            raise UnknownCommand(_UNREADABLE.format(index=self.index)) from None

    def _moved_on(self) -> None:
        waiting, index = self._waiting, self.index
        while waiting and waiting[0][0] <= index:
            heappop(waiting)[2]()
        for callback in self.on_applied:
            try:
                callback(index)
            except Exception:
                log.exception(log_line(event="callback_failed"))
        limits = self._limits
        if not self._snapshotting and (
            self._applied_entries >= limits.snapshot_entries
            or self._applied_bytes >= max(limits.snapshot_bytes, self._snapshot_bytes)
        ):
            self._snapshotting = True
            self._pump.start_task(self._take_snapshot())

    def copy(self) -> tuple[Snapshot, Iterator[bytes]]:
        """The state as it is now."""
        snapshot = Snapshot(self.index, self.generation, self.membership)
        return snapshot, self.machine.snapshot()

    async def _take_snapshot(self) -> None:
        """Write a snapshot, retrying until it is on disk. Nothing else frees the space that the log
        takes, and on a full disk the log may never grow enough for another snapshot to be due."""
        failed = False
        try:
            while True:
                self._applied_entries = self._applied_bytes = 0
                snapshot, pieces = self.copy()
                try:
                    await self._journal.take_snapshot(snapshot, self._measured(pieces))
                    break
                except StoreUnavailable as error:
                    if not failed:
                        failed = True
                        line = log_line(event="snapshot_failed", error=error, retry_s=RETRY_S)
                        log.warning("%s", line)
                await asyncio.sleep(RETRY_S)
                if self.snapshot >= snapshot.index:  # one of the leader was installed meanwhile
                    return
        finally:
            self._snapshotting = False
        if failed:
            log.warning("%s", log_line(event="snapshot_taken", index=snapshot.index))
        if snapshot.index > self.snapshot:
            self.snapshot = snapshot.index
            self._pump.step(Compacted(snapshot))

    def _measured(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        size = 0
        for piece in pieces:
            size += len(piece)
            yield piece
        self._snapshot_bytes = size

    async def _restore_installed(self) -> None:
        snapshot = await self.restore()
        self._start_from(snapshot)
        self._proposals.replaced(snapshot.index)
        self._proposals.entered(snapshot.generation, snapshot.index)
        self._paused = False
        if self._queue:
            self._apply_slice()
        else:
            self._moved_on()


_UNREADABLE = (
    "this release of doyen cannot read entry {index} of the quorum's log: install the release that"
    " the other nodes run"
)
