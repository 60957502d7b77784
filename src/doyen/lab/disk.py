"""A simulated journal, and what a server recovers from it after a crash at any instant.

Writes are queued. A sync takes some time and makes durable what was queued when it began. A crash
keeps everything that was synced and a random prefix of the rest; a write that was torn is dropped.
A bit that flips in durable data is detected at the next start, and the server refuses to start.

The three rules of recovery (`recover`, `crash`, `failed`) are small methods, so that tests can
break them one by one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from doyen.quorum.consensus.core import EntryKind, Install, LogEntry, Persist, Recovered, Snapshot

_HOLE = LogEntry(0, EntryKind.NOTHING, b"")


class CorruptDisk(Exception):
    """The disk does not hold what was written, so the server must not start."""


@dataclass(slots=True, eq=False)
class SimulatedDisk:
    """One server's journal and its snapshot."""

    state: Any = None
    snapshot: Snapshot | None = None
    image: Any = None
    """The state machine at the snapshot's index."""
    base: int = 0
    """The index of the snapshot. The first entry has the index `base + 1`."""
    entries: list[LogEntry] = field(default_factory=list)
    queue: list[Persist | Install] = field(default_factory=list)
    """Written, not yet synced."""
    received: dict[int, tuple[Snapshot, Any]] = field(default_factory=dict)
    """Snapshots that leaders have sent and that are not installed yet, by index."""
    full: int = 0
    stall_s: float = 0.0
    until: float = 0.0
    """When the sync under way, or the last one, is complete."""
    flipped: int | None = None
    """The index at which a bit has flipped."""

    def has(self, index: int, entry: LogEntry) -> bool:
        """Whether this entry, or a snapshot that includes it, would survive a crash now."""
        at = index - self.base - 1
        if at < 0:
            return True
        return at < len(self.entries) and self.entries[at] == entry

    def settle(self, count: int) -> int:
        """Make the first `count` queued writes durable. Returns the token of the last one."""
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
        """Store a snapshot of the server's own, and drop the log before it."""
        if snapshot.index <= self.base:
            return
        del self.entries[: snapshot.index - self.base]
        self.base = snapshot.index
        self.snapshot, self.image = snapshot, image

    def crash(self, rng: random.Random) -> None:
        """The process has ended. Of what was not synced, a random prefix is kept."""
        kept = rng.randint(0, len(self.queue))
        if kept:
            self.settle(kept)
        self.queue.clear()
        self.received.clear()

    def failed(self, rng: random.Random) -> bool:
        """A sync has failed, so it is unknown what is on disk. True if the process must end."""
        return True

    def flip(self, rng: random.Random) -> None:
        self.flipped = self.base + rng.randint(0, len(self.entries))

    def recover(self) -> Recovered:
        """What the server finds. Raises `CorruptDisk` rather than return what was not written."""
        if self.flipped is not None:
            raise CorruptDisk(f"a bit has flipped near index {self.flipped}")
        return Recovered(self.state, self.snapshot, tuple(self.entries))
