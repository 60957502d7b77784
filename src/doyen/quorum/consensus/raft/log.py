"""A server's log in memory, and how much of it is on disk.

Invariants: indices `base + 1 … last` are held; generations never decrease along them; `durable` is
the index up to which the *current* entries are on disk. An entry that has been replaced is durable
only when its replacement is written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import msgspec

from doyen.quorum.consensus.core import EntryKind, LogEntry, Membership, Recovered, Snapshot
from doyen.quorum.consensus.invariants import InvariantBroken
from doyen.quorum.consensus.raft.messages import RaftSettings

__all__ = ["RaftLog", "encode_membership"]

encode_membership = msgspec.msgpack.Encoder().encode
_decode_membership = msgspec.msgpack.Decoder(Membership).decode

_MEMBERSHIP = int(EntryKind.MEMBERSHIP)


def _generation_of(entry: LogEntry) -> int:
    return entry.generation


class RaftLog:
    """Entries by index, counted from 1."""

    __slots__ = (
        *("_memberships", "_pending", "base", "base_generation"),
        *("durable", "entries", "last", "last_generation"),
    )

    def __init__(self, recovered: Recovered, founders: Membership) -> None:
        snapshot = recovered.snapshot or Snapshot(0, 0, founders)
        self.base = snapshot.index
        self.base_generation = snapshot.generation
        self.entries: list[LogEntry] = []
        self.last = self.base
        self.last_generation = self.base_generation
        self._memberships = [(self.base, snapshot.membership)]
        self._pending: deque[tuple[int, int]] = deque()
        """Writes that are not known to be on disk: their token, and the index up to which they
        contain the current entries."""
        entries = recovered.entries
        if entries and entries[0].generation < self.base_generation:
            # Left from before the snapshot: the entries that were to replace them never reached the
            # disk.
            entries = ()
        self.append(entries, token=0)
        self._pending.clear()
        self.durable = self.last

    def generation_at(self, index: int) -> int:
        """The generation at an index; -1 if there is no such entry, or no longer."""
        if index == self.last:
            return self.last_generation
        if index == self.base:
            return self.base_generation
        if self.base < index < self.last:
            return self.entries[index - self.base - 1].generation
        return -1

    def batch(self, first: int, settings: RaftSettings) -> tuple[tuple[LogEntry, ...], int]:
        """The entries from `first` on that fit in one message, and their size."""
        if first == self.last:
            entry = self.entries[-1]
            return (entry,), len(entry.data)
        start = first - self.base - 1
        chosen: list[LogEntry] = []
        size = 0
        for entry in self.entries[start : start + settings.message_entries]:
            if chosen and size + len(entry.data) > settings.message_bytes:
                break
            size += len(entry.data)
            chosen.append(entry)
        return tuple(chosen), size

    def meeting_point(self, index: int, generation: int) -> int:
        """The greatest index up to `index` whose generation is not above `generation`: the last
        point where a log that has `generation` at `index`, or conflicts there, can agree with this
        one."""
        held = min(index, self.last) - self.base
        if held <= 0:
            return min(index, self.base)
        return self.base + bisect_right(self.entries, generation, hi=held, key=_generation_of)

    @property
    def membership(self) -> Membership:
        """The membership in force: the latest in the log, committed or not."""
        return self._memberships[-1][1]

    @property
    def membership_index(self) -> int:
        return self._memberships[-1][0]

    @property
    def membership_before(self) -> Membership:
        """The membership that is in force again if the latest is lost; the latest itself if there
        is no other."""
        return self._memberships[-2 if len(self._memberships) > 1 else -1][1]

    def append(self, entries: Sequence[LogEntry], token: int) -> bool:
        """Append the entries of the write with this token. Returns whether they change the
        membership."""
        if not entries:
            return False
        self.entries.extend(entries)
        changed = False
        for index, entry in enumerate(entries, self.last + 1):
            if entry.kind == _MEMBERSHIP:
                self._memberships.append((index, _decode_membership(entry.data)))
                changed = True
        self.last += len(entries)
        self.last_generation = entries[-1].generation
        self._pending.append((token, self.last))
        return changed

    def cut(self, last: int) -> None:
        """Drop everything after `last`, which is about to be replaced."""
        self.last_generation = self.generation_at(last)
        del self.entries[last - self.base :]
        self.last = last
        while self.membership_index > last:
            self._memberships.pop()
        self._disown(last)

    def _disown(self, last: int) -> None:
        """Pending writes no longer contain the current entries after `last`."""
        self.durable = min(self.durable, last)
        self._pending = deque((token, min(index, last)) for token, index in self._pending)

    def persisted(self, token: int) -> bool:
        """The write with this token is on disk. Returns whether more is durable than before."""
        before = self.durable
        pending = self._pending
        while pending and pending[0][0] <= token:
            self.durable = pending.popleft()[1]
        return self.durable > before

    def compact(self, upto: int, settings: RaftSettings) -> None:
        """Drop the entries that a snapshot up to `upto` replaces, except for a bounded tail."""
        keep_from = max(self.base, upto - settings.tail_entries)
        size = 0
        for index in range(upto, keep_from, -1):
            size += len(self.entries[index - self.base - 1].data)
            if size > settings.tail_bytes:
                keep_from = index
                break
        generation = self.generation_at(keep_from)
        del self.entries[: keep_from - self.base]
        self.base, self.base_generation = keep_from, generation
        while len(self._memberships) > 1 and self._memberships[1][0] <= upto:
            del self._memberships[0]

    def replace(self, snapshot: Snapshot, token: int) -> None:
        """Replace the log by the snapshot."""
        self.entries.clear()
        self.base = self.last = snapshot.index
        self.base_generation = self.last_generation = snapshot.generation
        self._memberships = [(snapshot.index, snapshot.membership)]
        self._disown(0)
        self._pending.append((token, snapshot.index))

    def check(self, name: str) -> None:
        """Raise if the end of the log is inconsistent."""
        generations = [self.base_generation, *map(_generation_of, self.entries[-2:])]
        if (
            self.last != self.base + len(self.entries)
            or self.last_generation != generations[-1]
            or self.durable > self.last
            or generations != sorted(generations)
        ):
            raise InvariantBroken(
                f"{name}: a log from {self.base} to {self.last}, of generation "
                f"{self.last_generation}, on disk up to {self.durable}, ends in {generations}"
            )
