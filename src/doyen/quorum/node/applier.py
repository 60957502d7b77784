"""What is committed is applied, in order and a little at a time; now and then a snapshot of it is
taken, and sometimes one of a leader's is put in its place.

`Applied` owns the state machine and knows how far it has come. A backlog is applied in slices, one
in each turn of the loop, so that nothing else waits for it. One snapshot is taken at a time, of the
machine as it stands between two entries.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from heapq import heappop, heappush
from typing import Any, Protocol

from msgspec import MsgspecError
from msgspec.msgpack import Decoder

from doyen.errors import StoreUnavailable
from doyen.quorum.consensus.core import (
    Committed,
    Compacted,
    CoreEvent,
    EntryKind,
    Install,
    LogEntry,
    Membership,
    Snapshot,
)
from doyen.quorum.keyspace.state import UnknownCommand
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.node.interfaces import Journal
from doyen.quorum.node.proposals import Batch, ProposalLimits
from doyen.quorum.node.replicated import Command, ReplicatedMachines, decode_batch

__all__ = ["Applied", "ApplierOwner"]

log = logging.getLogger("doyen.quorum.node")

AGAIN_S = 2.0
"""Pause before a snapshot is tried again that could not be written."""

_decode_membership = Decoder(Membership).decode


class ApplierOwner(Protocol):
    """What the driver does for this."""

    def tell_core(self, event: CoreEvent) -> None: ...

    def start_task(self, work: Coroutine[Any, Any, Any]) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def take_own(self, index: int, generation: int) -> Batch | None:
        """The batch of ours that stands at `index`, if it is of that generation."""
        ...

    def settle(self, batch: Batch, results: list[Any]) -> None: ...

    def entered(self, generation: int, index: int) -> None:
        """An entry of a later generation than before is applied at `index`: nothing of an
        earlier one follows."""
        ...

    def replaced(self, index: int) -> None:
        """A snapshot stands for everything up to `index`; what was there went by unseen."""
        ...

    def moved_on(self, index: int) -> None:
        """The machine has come to `index`."""
        ...


class Applied:
    """A node's state machine, and how far it has come."""

    def __init__(
        self,
        machine: ReplicatedMachines,
        journal: Journal,
        founders: Membership,
        limits: ProposalLimits,
        owner: ApplierOwner,
    ) -> None:
        self.machine = machine
        self._journal = journal
        self._limits = limits
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._stand_at(journal.recovered.snapshot or Snapshot(0, 0, founders))
        self._queue: deque[LogEntry | Install] = deque()
        self._queued = self.index
        self._paused = False
        """While a snapshot is put in place."""
        self._scheduled = False
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._waits = 0
        self._snapshotting = False
        self._weight = 0
        """What the last snapshot of ours came to: a large one is not taken as often."""

    def _stand_at(self, snapshot: Snapshot) -> None:
        self.index = self.snapshot = snapshot.index
        self.generation = snapshot.generation
        self.membership = snapshot.membership
        """The latest that is committed."""
        self._entries = self._bytes = 0

    async def restore(self) -> Snapshot:
        """Put the journal's snapshot in the place of everything."""
        snapshot, stream = await self._journal.read_snapshot()
        self.machine.restore([piece async for piece in stream])
        return snapshot

    async def start(self) -> None:
        """Restore what a snapshot holds. Raises if this node cannot carry out what its log
        holds."""
        recovered = self._journal.recovered
        if recovered.snapshot is not None:
            await self.restore()
        self.machine.require(
            entry.data for entry in recovered.entries if entry.kind == EntryKind.COMMANDS
        )

    def when(self, index: int, call: Callable[[], None]) -> None:
        """Call as soon as the machine has come to `index`, at once if it has."""
        if self.index >= index:
            call()
        else:
            self._waits += 1
            heappush(self._waiting, (index, self._waits, call))

    def commit(self, effect: Committed) -> None:
        """These are next."""
        if effect.first != self._queued + 1:
            raise RuntimeError(f"entry {effect.first} is committed after {self._queued}")
        self._queue.extend(effect.entries)
        self._queued += len(effect.entries)

    def install(self, effect: Install) -> None:
        """A leader's snapshot is next, and stands for all that is queued."""
        self._journal.install(effect)
        self._queue.clear()
        self._queue.append(effect)
        self._queued = effect.snapshot.index

    def go_on(self) -> None:
        """Apply what is queued: some of it now, the rest in the next turns."""
        if self._queue and not self._paused and not self._scheduled:
            self._slice()

    def _slice(self) -> None:
        self._scheduled = False
        queue, budget = self._queue, self._limits.apply_commands
        try:
            while queue and budget > 0:
                item = queue.popleft()
                if isinstance(item, Install):
                    self._paused = True
                    self._owner.start_task(self._put_in_place())
                    return
                budget -= self._apply(item)
            self._moved_on()
        except Exception as error:  # noqa: BLE001 - a defect: the machine's state is not known
            self._owner.fail(error)
            return
        if queue:
            self._scheduled = True
            self._loop.call_soon(self._slice)

    def _apply(self, entry: LogEntry) -> int:
        owner = self._owner
        self.index = index = self.index + 1
        if entry.generation > self.generation:
            self.generation = entry.generation
            owner.entered(entry.generation, index)
        batch = owner.take_own(index, entry.generation)
        results: list[Any] = []
        if entry.kind == EntryKind.COMMANDS:
            commands = self._commands(entry.data) if batch is None else batch.commands
            results = self.machine.apply(index, commands)
        elif entry.kind == EntryKind.MEMBERSHIP:
            self.membership = _decode_membership(entry.data)
        elif entry.kind != EntryKind.NOTHING:
            raise UnknownCommand(_UNREADABLE.format(index=index))
        if batch is not None:
            owner.settle(batch, results)
        self._entries += 1
        self._bytes += len(entry.data)
        return len(results) + 1

    def _commands(self, data: bytes) -> list[Command]:
        """An entry's commands."""
        try:
            return decode_batch(data)
        except MsgspecError:
            if self.machine.version == FIRST:  # what cannot be read was nothing, on every node
                return []
            raise UnknownCommand(_UNREADABLE.format(index=self.index)) from None

    def _moved_on(self) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= self.index:
            heappop(waiting)[2]()
        self._owner.moved_on(self.index)
        limits = self._limits
        if not self._snapshotting and (
            self._entries >= limits.snapshot_entries
            or self._bytes >= max(limits.snapshot_bytes, self._weight)
        ):
            self._take_snapshot()

    def copy(self) -> tuple[Snapshot, Iterator[bytes]]:
        """What has been applied so far."""
        snapshot = Snapshot(self.index, self.generation, self.membership)
        return snapshot, self.machine.snapshot()

    def _take_snapshot(self) -> None:
        self._snapshotting = True
        self._owner.start_task(self._write())

    async def _write(self) -> None:
        """Write one, and try again until it is on disk. Nothing else frees what the log takes, and
        on a full disk the log may never grow enough for the next one to be due."""
        failed = False
        try:
            while True:
                self._entries = self._bytes = 0
                snapshot, pieces = self.copy()
                try:
                    await self._journal.take_snapshot(snapshot, self._weighed(pieces))
                    break
                except StoreUnavailable as error:
                    if not failed:
                        failed = True
                        log.warning(
                            "no snapshot was taken: %s; trying again every %g s", error, AGAIN_S
                        )
                await asyncio.sleep(AGAIN_S)
                if self.snapshot >= snapshot.index:  # a leader's has been put in place
                    return
        finally:
            self._snapshotting = False
        if failed:
            log.warning("a snapshot was taken: there is room again")
        if snapshot.index > self.snapshot:
            self.snapshot = snapshot.index
            self._owner.tell_core(Compacted(snapshot))

    def _weighed(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        weight = 0
        for piece in pieces:
            weight += len(piece)
            yield piece
        self._weight = weight

    async def _put_in_place(self) -> None:
        snapshot = await self.restore()
        self._stand_at(snapshot)
        self._owner.replaced(snapshot.index)
        self._owner.entered(snapshot.generation, snapshot.index)
        self._paused = False
        if self._queue:
            self._slice()
        else:
            self._moved_on()


_UNREADABLE = (
    "entry {index} of the quorum's log is none that this release of doyen can read: install the"
    " release that the other nodes run"
)
