"""A simulated journal: what a node finds again after a crash at any instant.

Writes queue; a sync takes a while and makes durable what was queued when it began. A crash keeps
everything that was synced, and of the rest a beginning of any length: what was being written last
is torn, and a torn write counts as none. A bit that flips in what was durable is found at the next
start, and the node refuses to start.

The three rules of recovery (`recover`, `crash`, `failed`) are small methods, so that tests can
break them one by one.

Imports the words of consensus.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from doyen.quorum.consensus.core import EntryKind, Install, LogEntry, Persist, Recovered, Snapshot

__all__ = ["Rotten", "SimulatedDisk"]

_HOLE = LogEntry(0, EntryKind.NOTHING, b"")


class Rotten(Exception):
    """What is on the disk is not what was written: the node must not start."""


class SimulatedDisk:
    """One node's journal and its snapshot."""

    __slots__ = (
        "base",
        "entries",
        "flipped",
        "full",
        "image",
        "queue",
        "received",
        "snapshot",
        "stall_s",
        "state",
        "until",
    )

    def __init__(self) -> None:
        self.state: Any = None
        self.snapshot: Snapshot | None = None
        self.image: Any = None
        """The state machine that the snapshot stands for."""
        self.base = 0
        """The index of the snapshot: the first entry stands at `base + 1`."""
        self.entries: list[LogEntry] = []
        self.queue: list[Persist | Install] = []
        """Written, not yet synced."""
        self.received: dict[int, tuple[Snapshot, Any]] = {}
        """Snapshots that leaders have sent, beside what is in force."""
        self.full = 0
        self.stall_s = 0.0
        self.until = 0.0
        """When the sync under way, or the last one, is over."""
        self.flipped: int | None = None
        """The index at which a bit has flipped."""

    def has(self, index: int, entry: LogEntry) -> bool:
        """Whether this entry, or a snapshot that stands for it, would survive a crash now."""
        at = index - self.base - 1
        if at < 0:
            return True
        return at < len(self.entries) and self.entries[at] == entry

    def settle(self, count: int) -> int:
        """The first `count` writes of the queue are durable now. Gives the last one's token."""
        done = self.queue[:count]
        del self.queue[:count]
        for write in done:
            self._apply(write)
        return done[-1].token

    def _apply(self, write: Persist | Install) -> None:
        if type(write) is Install:
            snapshot, image = self.received.pop(write.snapshot.index, (None, None))
            if snapshot is None:
                return
            self.snapshot, self.image = snapshot, image
            self.base = snapshot.index
            self.entries = []
            return
        assert isinstance(write, Persist)
        if write.state is not None:
            self.state = write.state
        if write.first:
            self._place(write.first, write.entries, keep=write.keep)

    def _place(self, first: int, entries: Sequence[LogEntry], *, keep: bool) -> None:
        at = first - self.base - 1
        if at < 0:
            entries = entries[-at:]
            at = 0
        mine = self.entries
        if at > len(mine):
            mine.extend([_HOLE] * (at - len(mine)))
        if keep:
            mine[at : at + len(entries)] = entries
        else:
            mine[at:] = entries

    def compact(self, snapshot: Snapshot, image: Any) -> None:
        """A snapshot of our own is durable, and the log before it forgotten."""
        if snapshot.index <= self.base:
            return
        del self.entries[: snapshot.index - self.base]
        self.base = snapshot.index
        self.snapshot, self.image = snapshot, image

    def crash(self, rng: random.Random) -> None:
        """The process is gone; of what was not synced, a beginning of any length is there."""
        kept = rng.randint(0, len(self.queue))
        if kept:
            self.settle(kept)
        self.queue.clear()
        self.received.clear()

    def failed(self, rng: random.Random) -> bool:
        """A sync has failed: nothing is certain any more. Whether the process must end."""
        return True

    def flip(self, rng: random.Random) -> None:
        """A bit of the log is not what it was."""
        self.flipped = self.base + rng.randint(0, len(self.entries))

    def recover(self) -> Recovered:
        """What the node finds. Raises `Rotten` rather than giving anything that was not written."""
        if self.flipped is not None:
            raise Rotten(f"a bit has flipped near index {self.flipped}")
        return Recovered(self.state, self.snapshot, tuple(self.entries))
