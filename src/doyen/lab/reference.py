"""What the log of a quorum says: a second, simple implementation of the replicated state.

`Reference` applies the committed entries of a run, in order, to plain dictionaries. Every node's
results are compared with its results, entry by entry, so a node that carries a command out twice,
skips one, applies it in a wrong era or has restored a snapshot that lacks something is found at the
first result that differs. It also keeps what stood at each key after every entry, so that reads
can be held against the log, and when each lease began and ended.

It shares nothing with `quorum.keyspace` and `node.machine` but the words for commands and results.
What only very large runs reach (clients that are forgotten, results that are too many) is left out.

Imports the words of the keyspace and of consensus.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from msgspec.msgpack import Decoder

from doyen.quorum.consensus.core import EntryKind, LogEntry
from doyen.quorum.keyspace import commands
from doyen.quorum.keyspace.commands import StoredEntry, decode_command, encode
from doyen.quorum.keyspace.state import OVERHEAD, QUOTA
from doyen.quorum.node.replicated import KEYSPACE, Command, Failure, decode_batch

__all__ = ["LoggedWrite", "Reference", "ReferenceLease"]

_decode_swap = Decoder(tuple[int, int, int, int]).decode

LARGE = 1024
"""In version 1, a larger result of the keyspace was not kept."""


class LoggedWrite(NamedTuple):
    """A write that took effect, and where in the log."""

    place: int
    record: StoredEntry


class ReferenceLease:
    """A lease, from its grant to its end."""

    __slots__ = ("began", "end_index", "ended", "expired", "index", "ttl_s")

    def __init__(self, index: int, began: float, ttl_s: float) -> None:
        self.index = index
        self.began = began
        self.ttl_s = ttl_s
        self.ended = inf
        """When its end was committed, in true time."""
        self.end_index = 0
        self.expired = False
        """Ended by its time, not by its owner."""


class Reference:
    """The state after every committed entry."""

    def __init__(self, slice_keys: int) -> None:
        self._slice_keys = slice_keys
        self.index = 0
        self.times: list[float] = [0.0]
        """When each entry was first known to be committed."""
        self.results: list[list[Any]] = [[]]
        self.revision = 0
        self.era = 0
        self.version = 1
        self.quota = QUOTA
        self.records: dict[str, StoredEntry] = {}
        """What is stored, with what waits for its removal."""
        self.leases: dict[int, ReferenceLease] = {}
        """All there ever were."""
        self.standing: dict[int, dict[str, None]] = {}
        """Leases that have not ended, and the keys bound to them."""
        self.written: dict[int, LoggedWrite] = {}
        """Every write that took effect, by its version."""
        self.deleted: dict[int, int] = {}
        """Where the record of a version was deleted by a client."""
        self.values: dict[bytes, int] = {}
        """How often each value was written."""
        self.changes: dict[str, list[float]] = {}
        """When those who watch a scope had something to be told of."""
        self._ended: dict[int, list[str]] = {}
        self._now = 0.0
        self._touched: dict[str, None] = {}
        self._seen: dict[str, StoredEntry | None] = {}
        self._timeline: dict[str, tuple[list[int], list[StoredEntry | None]]] = {}
        self._registers: dict[int, int] = {}
        self._clients: dict[str, tuple[dict[int, Any], list[int]]] = {}
        self._do: dict[type, Callable[[Any], commands.Result]] = {
            commands.Grant: self._grant,
            commands.Revoke: self._revoke,
            commands.Create: self._create,
            commands.Put: self._put,
            commands.Delete: self._delete,
            commands.Enqueue: self._enqueue,
            commands.BeginEra: self._begin,
            commands.Expire: self._expire,
            commands.AdvanceRevision: self._advance,
            commands.RaiseVersion: self._raise,
            commands.RemoveEndedKeys: self._reap,
            commands.SetQuota: self._set_quota,
        }

    # The log.

    def advance(self, log: Sequence[LogEntry], now: float) -> None:
        """Apply what has been committed since."""
        self._now = now
        while self.index < len(log):
            entry = log[self.index]
            self.index += 1
            self.times.append(now)
            commands = decode_batch(entry.data) if entry.kind == EntryKind.COMMANDS else []
            self.results.append([self._once(command) for command in commands])
            self._note_changes()

    def _once(self, command: Command) -> Any:
        """The result of a command, which is carried out if it has not been."""
        if command.client not in self._clients:
            if command.floor > 1:
                return None
            self._clients[command.client] = {}, [1]
        kept, floor = self._clients[command.client]
        if command.floor > floor[0]:
            floor[0] = command.floor
            for seq in [seq for seq in kept if seq < command.floor]:
                del kept[seq]
        if command.seq in kept:
            return kept[command.seq]
        if command.seq < floor[0]:
            return None
        if command.target == KEYSPACE:
            wanted = decode_command(command.body)
            result: Any = encode(self._do[type(wanted)](wanted))
            if self.version == 1 and len(result) > LARGE:
                return result
        else:
            _, _, key, value = _decode_swap(command.body)
            result = self._registers.get(key)
            self._registers[key] = value
        kept[command.seq] = result
        return result

    def agrees(self, index: int, results: Sequence[Any]) -> bool:
        """Whether a node's results of an entry are those of the log. None stands for a command
        that is too old to have a result."""
        if index > self.index:
            return False
        expected = self.results[index]
        if len(expected) != len(results):
            return False
        return all(
            mine == theirs or (mine is None and isinstance(theirs, Failure) and theirs.forgotten)
            for mine, theirs in zip(expected, results, strict=True)
        )

    def _note_changes(self) -> None:
        touched, self._touched = self._touched, {}
        for key in touched:
            now = self._now_at(key)
            if now == self._seen.get(key):
                continue
            self._seen[key] = now
            indexes, records = self._timeline.setdefault(key, ([0], [None]))
            indexes.append(self.index)
            records.append(now)

    def _changed(self, key: str) -> None:
        """Whoever watches is to be told: of what ends with its lease, when it is removed."""
        scope = key
        while scope:
            self.changes.setdefault(scope, []).append(self._now)
            scope = scope.rpartition("/")[0]

    def _now_at(self, key: str) -> StoredEntry | None:
        record = self.records.get(key)
        return None if record is not None and record.lease in self._ended else record

    # What clients may have seen.

    def at(self, key: str, index: int) -> StoredEntry | None:
        """What stood at a key after an entry."""
        found = self._timeline.get(key)
        if found is None:
            return None
        return found[1][bisect_right(found[0], index) - 1]

    def under(self, prefix: str, index: int) -> list[StoredEntry]:
        """What stood under a prefix after an entry, in order."""
        begin = f"{prefix}/"
        keys = sorted(key for key in self._timeline if key.startswith(begin))
        return [record for key in keys if (record := self.at(key, index)) is not None]

    def points(self, scopes: Iterable[str], low: int, high: int) -> list[int]:
        """`low`, and every index up to `high` after which something at the scopes or under them
        had changed."""
        found = {low: None}
        for scope in scopes:
            under = f"{scope}/"
            for key, (indexes, _) in self._timeline.items():
                if key == scope or key.startswith(under):
                    for index in indexes[bisect_right(indexes, low) :]:
                        if index > high:
                            break
                        found[index] = None
        return sorted(found)

    def last_change(self, scope: str, before: float) -> float:
        """When those who watch a scope last had something to be told of, before an instant."""
        times = self.changes.get(scope, [])
        at = bisect_left(times, before)
        return times[at - 1] if at else -inf

    # Commands.

    def bytes(self) -> int:
        """The size of everything, as the quota counts it."""
        stored = sum(len(each.key) + len(each.value) for each in self.records.values())
        return stored + OVERHEAD * (len(self.records) + len(self.standing))

    def _full(self, more: int) -> commands.QuotaExceeded | None:
        if more <= 0 or self.version == 1 or (used := self.bytes()) + more <= self.quota:
            return None
        return commands.QuotaExceeded(used, self.quota)

    def _grant(self, command: commands.Grant) -> commands.Result:
        if (full := self._full(OVERHEAD)) is not None:
            return full
        self.revision += 1
        self.standing[self.revision] = {}
        self.leases[self.revision] = ReferenceLease(self.index, self._now, command.ttl_s)
        return commands.LeaseGranted(self.revision)

    def _write(self, record: StoredEntry) -> commands.QuotaExceeded | None:
        there = self.records.get(record.key)
        more = len(record.key) + len(record.value) + OVERHEAD
        if there is not None:
            more -= len(there.key) + len(there.value) + OVERHEAD
        if (full := self._full(more)) is not None:
            return full
        self.revision += 1
        self.records[record.key] = record
        self._touched[record.key] = None
        self._changed(record.key)
        self.written[record.version] = LoggedWrite(self.index, record)
        self.values[record.value] = self.values.get(record.value, 0) + 1
        return None

    def _create(self, command: commands.Create) -> commands.Result:
        if command.lease not in self.standing:
            return commands.LeaseNotFound()
        there = self._now_at(command.key)
        if there is not None:
            return commands.EntryExists(there)
        revision = self.revision + 1
        record = StoredEntry(command.key, command.value, revision, revision, command.lease)
        if (full := self._write(record)) is not None:
            return full
        self.standing[command.lease][command.key] = None
        return commands.Written(revision, revision)

    def _put(self, command: commands.Put) -> commands.Result:
        there = self._now_at(command.key)
        if (there.version if there is not None else 0) != command.if_version:
            return commands.ConditionFailed()
        version = self.revision + 1
        first = there.revision if there is not None else version
        ticket = there is not None and there.ticket
        record = StoredEntry(command.key, command.value, first, version, 0, ticket)
        if (full := self._write(record)) is not None:
            return full
        if there is not None:
            self._unbind(there)
        return commands.Written(first, version)

    def _delete(self, command: commands.Delete) -> commands.Result:
        there = self._now_at(command.key)
        if there is None or command.if_version not in (0, there.version):
            return commands.ConditionFailed()
        self.revision += 1
        self._unbind(there)
        del self.records[command.key]
        self._touched[command.key] = None
        self._changed(command.key)
        self.deleted[there.version] = self.index
        return commands.Done()

    def _enqueue(self, command: commands.Enqueue) -> commands.Result:
        if command.lease not in self.standing:
            return commands.LeaseNotFound()
        revision = self.revision + 1
        key = f"{command.line}/{commands.RANKS - command.rank:020d}-{revision:020d}"
        record = StoredEntry(key, command.value, revision, revision, command.lease, True)
        if (full := self._write(record)) is not None:
            return full
        self.standing[command.lease][key] = None
        return commands.TicketIssued(key, revision)

    def _unbind(self, record: StoredEntry) -> None:
        if record.lease in self.standing:
            del self.standing[record.lease][record.key]

    def _revoke(self, command: commands.Revoke) -> commands.Result:
        self._end((command.lease,), expired=False)
        return commands.Done()

    def _begin(self, command: commands.BeginEra) -> commands.Result:
        if command.era <= self.era:
            return commands.ConditionFailed()
        self.era = command.era
        return commands.Done()

    def _expire(self, command: commands.Expire) -> commands.Result:
        if command.era != self.era:
            return commands.ConditionFailed()
        self._end(command.leases, expired=True)
        return commands.Done()

    def _end(self, leases: Iterable[int], *, expired: bool) -> None:
        for lease in leases:
            if lease not in self.standing:
                continue
            self.revision += 1
            bound = self.standing.pop(lease)
            ending = self.leases[lease]
            ending.ended, ending.end_index, ending.expired = self._now, self.index, expired
            self._touched |= bound
            if self.version == 1:
                for key in bound:
                    if self.records[key].lease == lease:
                        del self.records[key]
                        self._changed(key)
            elif bound:
                self._ended[lease] = [*bound]
        self._remove_slice()

    def _remove_slice(self) -> None:
        """At most so many keys, of at most as many leases; each lease's at a revision of their
        own."""
        room = self._slice_keys
        for lease in [*self._ended][: self._slice_keys]:
            keys, removed = self._ended[lease], 0
            while keys and removed < room:
                record = self.records.get(key := keys.pop(0))
                if record is not None and record.lease == lease:
                    del self.records[key]
                    self._changed(key)
                    removed += 1
            # Whether there is more is found out only when there is room for it.
            if removed < room:
                del self._ended[lease]
            self.revision += removed > 0
            room -= removed
            if not room:
                break

    def _reap(self, _: commands.RemoveEndedKeys) -> commands.Result:
        self._remove_slice()
        return commands.Done()

    def _advance(self, command: commands.AdvanceRevision) -> commands.Result:
        self.revision = max(self.revision + command.by, command.floor)
        return commands.Done()

    def _raise(self, command: commands.RaiseVersion) -> commands.Result:
        if command.version <= self.version:
            return commands.ConditionFailed()
        self.version = command.version
        return commands.Done()

    def _set_quota(self, command: commands.SetQuota) -> commands.Result:
        self.quota = command.bytes
        return commands.Done()
