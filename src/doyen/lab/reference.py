"""A second, simple implementation of the replicated state of a quorum.

`Reference` applies the committed entries of a run, in order, to plain dictionaries. Every node's
results are compared with its results, entry by entry. So a node that executes a command twice,
skips one, applies it in a wrong era or has restored an incomplete snapshot is detected at the first
result that differs. It also keeps the history of every key, so that reads can be checked against
the log, and when each lease began and ended.

It shares nothing with `keyspace` and `node.replicated` but the types of commands and results. What
only very large runs reach (forgotten clients, too many results) is left out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from doyen.lab.linearizability import decode_swap
from doyen.quorum.consensus.core import EntryKind, LogEntry
from doyen.quorum.keyspace import commands
from doyen.quorum.keyspace.commands import StoredEntry, decode_command, encode
from doyen.quorum.keyspace.state import OVERHEAD, QUOTA
from doyen.quorum.node.replicated import KEYSPACE, Command, Failure, decode_batch

LARGE = 1024
"""In version 1, a larger result of the keyspace was not kept."""


_CONDITIONAL = (commands.Put, commands.Update, commands.Delete)


class LoggedWrite(NamedTuple):
    """A write that took effect, and its log index."""

    log_index: int
    record: StoredEntry


@dataclass(slots=True)
class ReferenceLease:
    """A lease from its grant to its end."""

    index: int
    began: float
    ttl_s: float
    ended: float = inf
    """When its end was committed, in true time."""
    end_index: int = 0
    expired: bool = False
    """Whether it ended because its ttl had passed, rather than by a revocation."""


class Reference:
    """The state after every committed entry."""

    def __init__(self, slice_keys: int, result_value: int) -> None:
        self.index = 0
        self.times: list[float] = [0.0]
        """By index: when the entry was first known to be committed."""
        self.revisions: list[int] = [0]
        """By index: the revision after the entry."""
        self.keys = KeyHistory()
        self.keyspace = ReferenceKeyspace(slice_keys, result_value, self.keys)
        self._results: list[list[Any]] = [[]]
        self._registers: dict[int, int] = {}
        self._clients: dict[str, tuple[dict[int, Any], list[int]]] = {}
        """By client: the results of its commands, and the number below which none are kept."""

    def advance(self, log: Sequence[LogEntry], now: float) -> None:
        """Apply the entries that have been committed since the last call."""
        while self.index < len(log):
            entry = log[self.index]
            self.index += 1
            self.times.append(now)
            self.keyspace.index, self.keyspace.now = self.index, now
            batch = decode_batch(entry.data) if entry.kind == EntryKind.COMMANDS else []
            self._results.append([self._execute_once(command) for command in batch])
            self.keyspace.end_entry()
            self.revisions.append(self.keyspace.revision)

    def _execute_once(self, command: Command) -> Any:
        """The result of a command, which is executed if it has not been before."""
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
            result: Any = encode(self.keyspace.execute(decode_command(command.body)))
            if self.keyspace.version == 1 and len(result) > LARGE:
                return result
        else:
            _, _, key, value = decode_swap(command.body)
            result = self._registers.get(key)
            self._registers[key] = value
        kept[command.seq] = result
        return result

    def agrees(self, index: int, results: Sequence[Any]) -> bool:
        """Whether a node's results of an entry equal those of the reference, where None stands for
        a command whose result is no longer kept."""
        if index > self.index:
            return False
        expected = self._results[index]
        if len(expected) != len(results):
            return False
        return all(
            mine == theirs or (mine is None and isinstance(theirs, Failure) and theirs.forgotten)
            for mine, theirs in zip(expected, results, strict=True)
        )


class KeyHistory:
    """What was stored at each key after each entry, and when watches had to be notified."""

    def __init__(self) -> None:
        self._changes: dict[str, list[float]] = {}
        """By scope: when its watches had to be notified."""
        self._timeline: dict[str, tuple[list[int], list[StoredEntry | None]]] = {}
        """By key: the indexes after which it changed, and what was stored then."""

    def notify(self, key: str, now: float) -> None:
        """The watches of this key and of its prefixes have to be notified."""
        scope = key
        while scope:
            self._changes.setdefault(scope, []).append(now)
            scope = scope.rpartition("/")[0]

    def note(self, key: str, index: int, record: StoredEntry | None) -> None:
        """After this entry, this is stored at a key."""
        indexes, records = self._timeline.get(key, ([0], [None]))
        if record != records[-1]:
            self._timeline[key] = indexes, records
            indexes.append(index)
            records.append(record)

    def at(self, key: str, index: int) -> StoredEntry | None:
        """What was stored at a key after an entry."""
        found = self._timeline.get(key)
        if found is None:
            return None
        return found[1][bisect_right(found[0], index) - 1]

    def under(self, prefix: str, index: int) -> list[StoredEntry]:
        """What was stored under a prefix after an entry, in order of the keys."""
        begin = f"{prefix}/"
        keys = sorted(key for key in self._timeline if key.startswith(begin))
        return [record for key in keys if (record := self.at(key, index)) is not None]

    def points(self, scopes: Iterable[str], low: int, high: int) -> list[int]:
        """`low`, and every index up to `high` after which a key in one of the scopes had
        changed."""
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
        """When the watches of a scope last had to be notified before this time."""
        times = self._changes.get(scope, [])
        at = bisect_left(times, before)
        return times[at - 1] if at else -inf


class ReferenceKeyspace:
    """Executes the commands of the keyspace."""

    def __init__(self, slice_keys: int, result_value: int, keys: KeyHistory) -> None:
        self._slice_keys = slice_keys
        self._result_value = result_value
        self._keys = keys
        self.index = 0
        """The index of the entry that is being applied."""
        self.now = 0.0
        self.revision = 0
        self.era = 0
        self.version = 1
        self.quota = QUOTA
        self._records: dict[str, StoredEntry] = {}
        """What is stored, including the entries of ended leases that are not removed yet."""
        self.leases: dict[int, ReferenceLease] = {}
        """All leases that were ever granted."""
        self.unended: dict[int, dict[str, None]] = {}
        """Leases that have not ended, and the keys bound to them."""
        self.written: dict[int, LoggedWrite] = {}
        """By version: every write that took effect."""
        self.deleted: dict[int, int] = {}
        """By version: the index at which a client deleted the entry."""
        self.refused: dict[tuple[str, int], list[int]] = {}
        """By key and version: the indexes at which a write that required this version failed. The
        state between two commands of one entry may differ from that after either entry."""
        self.values: dict[bytes, int] = {}
        """How often each value was written."""
        self._ended: dict[int, list[str]] = {}
        """Ended leases, and their keys that are not removed yet."""
        self._touched: dict[str, None] = {}
        """Keys that the current entry may have changed."""
        self._commands: dict[type, Callable[[Any], commands.Result]] = {
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
            commands.RemoveEndedKeys: self._remove_ended_keys,
            commands.SetQuota: self._set_quota,
            commands.Update: self._update,
        }

    def execute(self, command: Any) -> commands.Result:
        result = self._commands[type(command)](command)
        if type(result) is commands.ConditionFailed and type(command) in _CONDITIONAL:
            at = (command.key, command.if_version)
            self.refused.setdefault(at, []).append(self.index)
        return result

    def end_entry(self) -> None:
        """All commands of the current entry have been executed."""
        touched, self._touched = self._touched, {}
        for key in touched:
            self._keys.note(key, self.index, self._current(key))

    def _current(self, key: str) -> StoredEntry | None:
        """What clients see at a key: entries of ended leases are gone at once."""
        record = self._records.get(key)
        return None if record is not None and record.lease in self._ended else record

    def bytes(self) -> int:
        """The size of everything, as the quota counts it."""
        stored = sum(len(each.key) + len(each.value) for each in self._records.values())
        return stored + OVERHEAD * (len(self._records) + len(self.unended))

    def _full(self, more: int) -> commands.QuotaExceeded | None:
        if more <= 0 or self.version == 1 or (used := self.bytes()) + more <= self.quota:
            return None
        return commands.QuotaExceeded(used, self.quota)

    def _grant(self, command: commands.Grant) -> commands.Result:
        if (full := self._full(OVERHEAD)) is not None:
            return full
        self.revision += 1
        self.unended[self.revision] = {}
        self.leases[self.revision] = ReferenceLease(self.index, self.now, command.ttl_s)
        return commands.LeaseGranted(self.revision)

    def _write(self, record: StoredEntry) -> commands.QuotaExceeded | None:
        current = self._records.get(record.key)
        more = len(record.key) + len(record.value) + OVERHEAD
        if current is not None:
            more -= len(current.key) + len(current.value) + OVERHEAD
        if (full := self._full(more)) is not None:
            return full
        self.revision += 1
        self._records[record.key] = record
        self._touched[record.key] = None
        self._keys.notify(record.key, self.now)
        self.written[record.version] = LoggedWrite(self.index, record)
        self.values[record.value] = self.values.get(record.value, 0) + 1
        return None

    def _create(self, command: commands.Create) -> commands.Result:
        if command.lease not in self.unended:
            return commands.LeaseNotFound()
        current = self._current(command.key)
        if current is not None:
            if self.version > 1 and len(current.value) > self._result_value:
                return commands.LargeEntryExists(command.key)
            return commands.EntryExists(current)
        revision = self.revision + 1
        record = StoredEntry(command.key, command.value, revision, revision, command.lease)
        if (full := self._write(record)) is not None:
            return full
        self.unended[command.lease][command.key] = None
        return commands.Written(revision, revision)

    def _put(self, command: commands.Put) -> commands.Result:
        current = self._current(command.key)
        if (current.version if current is not None else 0) != command.if_version:
            return commands.ConditionFailed()
        version = self.revision + 1
        first = current.revision if current is not None else version
        ticket = current is not None and current.ticket
        record = StoredEntry(command.key, command.value, first, version, 0, ticket)
        if (full := self._write(record)) is not None:
            return full
        if current is not None:
            self._unbind(current)
        return commands.Written(first, version)

    def _update(self, command: commands.Update) -> commands.Result:
        """Only in version 3: a node that proposes it earlier has other results than this."""
        current = self._current(command.key)
        if current is None or current.lease not in self.unended or self.version < 3:
            return commands.ConditionFailed()
        if current.version != command.if_version:
            return commands.ConditionFailed()
        version = self.revision + 1
        record = StoredEntry(
            current.key, command.value, current.revision, version, current.lease, current.ticket
        )
        return self._write(record) or commands.Written(current.revision, version)

    def _delete(self, command: commands.Delete) -> commands.Result:
        current = self._current(command.key)
        if current is None or command.if_version not in (0, current.version):
            return commands.ConditionFailed()
        self.revision += 1
        self._unbind(current)
        del self._records[command.key]
        self._touched[command.key] = None
        self._keys.notify(command.key, self.now)
        self.deleted[current.version] = self.index
        return commands.Done()

    def _enqueue(self, command: commands.Enqueue) -> commands.Result:
        if command.lease not in self.unended:
            return commands.LeaseNotFound()
        revision = self.revision + 1
        key = f"{command.line}/{commands.RANKS - command.rank:020d}-{revision:020d}"
        record = StoredEntry(key, command.value, revision, revision, command.lease, True)
        if (full := self._write(record)) is not None:
            return full
        self.unended[command.lease][key] = None
        return commands.TicketIssued(key, revision)

    def _unbind(self, record: StoredEntry) -> None:
        if record.lease in self.unended:
            del self.unended[record.lease][record.key]

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
            if lease not in self.unended:
                continue
            self.revision += 1
            bound = self.unended.pop(lease)
            ending = self.leases[lease]
            ending.ended, ending.end_index, ending.expired = self.now, self.index, expired
            self._touched |= bound
            if self.version == 1:
                for key in bound:
                    if self._records[key].lease == lease:
                        del self._records[key]
                        self._keys.notify(key, self.now)
            elif bound:
                self._ended[lease] = [*bound]
        self._remove_slice()

    def _remove_slice(self) -> None:
        """Remove at most `slice_keys` keys, of at most as many ended leases. The removals of each
        lease have a revision of their own."""
        room = self._slice_keys
        for lease in [*self._ended][: self._slice_keys]:
            keys, removed = self._ended[lease], 0
            while keys and removed < room:
                record = self._records.get(key := keys.pop(0))
                if record is not None and record.lease == lease:
                    del self._records[key]
                    self._keys.notify(key, self.now)
                    removed += 1
            # The keyspace notices that no key is left only if there is room for another one.
            if removed < room:
                del self._ended[lease]
            self.revision += removed > 0
            room -= removed
            if not room:
                break

    def _remove_ended_keys(self, _: commands.RemoveEndedKeys) -> commands.Result:
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
