"""The etcd keyspace: keys with several versions, and etcd's transactions on them.

It is a part of the replicated state, beside the entries of doyen's own elections, and not the same
keys: etcd's revision counts only changes of keys and begins at 1, a transaction changes any number
of keys at one revision, keys are bytes, and earlier versions can be read until they are compacted.
doyen's revisions are tokens, which also number leases and tickets. The two share the log, the eras
and clocks of leases, the quota and the version of the cluster (see `state`). A lease of etcd is a
lease of the keyspace that has an id of etcd as well.

Invariants:

- Every record of the log has a revision above the floor, and the log is in the order of changes.
- What a key had at any revision from the floor on can be read: its latest record is in `_live`, or
  in `_dead` if the key is deleted, and the earlier ones are in `_older`.
- A key is bound to the lease that its latest record names, which exists.
- The history is bounded. What exceeds `HISTORY` changes or `HISTORY_BYTES` is compacted by the
  command that exceeds it, so all nodes keep the same.

Pure; imports msgspec and the other modules of this package.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from operator import attrgetter
from typing import Any, Final

from doyen.quorum.keyspace.etcd_requests import (
    FROM_KEY,
    Compare,
    CompareResult,
    CompareTarget,
    DeleteKeys,
    EtcdRecord,
    EtcdRefusal,
    EtcdRequests,
    EtcdResults,
    EtcdTransaction,
    KeyPut,
    KeysDeleted,
    KeysRead,
    PutKey,
    RangeKeys,
    SortOrder,
    SortTarget,
    TransactionDone,
)
from doyen.quorum.keyspace.sorted_map import APART, Block, SortedMap

__all__ = ["EtcdKeyspace", "RequestRefused", "cost", "only_reads"]

HISTORY: Final = 1 << 17
"""How many changes are kept. Changing it needs a new version."""
HISTORY_BYTES: Final = 64 << 20
"""How many bytes of earlier versions are kept; never more than a quarter of the quota."""
OVERHEAD: Final = 128
"""Bytes that a record takes apart from key and value. Changing it needs a new version."""

_MOD, _KEY = attrgetter("mod"), attrgetter("key")
_NOTHING: Final = EtcdRecord(b"", b"", 0, 0, 0)
_COMPARED: Final[dict[CompareTarget, Callable[[EtcdRecord], Any]]] = {
    CompareTarget.VERSION: attrgetter("version"),
    CompareTarget.CREATE: attrgetter("create"),
    CompareTarget.MOD: _MOD,
    CompareTarget.VALUE: attrgetter("value"),
    CompareTarget.LEASE: attrgetter("lease"),
}
_SORTED: Final[dict[SortTarget, Callable[[EtcdRecord], Any]]] = {
    SortTarget.KEY: _KEY,
    SortTarget.VERSION: attrgetter("version"),
    SortTarget.CREATE: attrgetter("create"),
    SortTarget.MOD: _MOD,
    SortTarget.VALUE: attrgetter("value"),
}


class RequestRefused(Exception):
    """A request was refused, and nothing was changed."""

    def __init__(self, refusal: EtcdRefusal) -> None:
        super().__init__(refusal.name)
        self.refusal = refusal


class EtcdKeyspace:
    """The keys, their history and the keys of each lease.

    >>> etcd = EtcdKeyspace()
    >>> etcd.apply(PutKey(b"a", b"1")).revision, etcd.apply(PutKey(b"a", b"2")).revision
    (2, 3)
    >>> etcd.apply(RangeKeys(b"a", revision=2)).records[0].value
    b'1'
    """

    def __init__(self, history: int = HISTORY) -> None:
        self.revision = 1
        """The number of the last change."""
        self.compacted = -1
        """Earlier revisions cannot be read."""
        self.leases: dict[int, int] = {}
        """For each id of a lease, its number in the keyspace."""
        self.bytes = 0
        """The size of all records."""
        self._history = history
        self._live: SortedMap[bytes, EtcdRecord] = SortedMap()
        self._dead: SortedMap[bytes, EtcdRecord] = SortedMap()
        self._older: dict[bytes, list[EtcdRecord]] = {}
        self._log: list[EtcdRecord] = []
        # For each key that was changed since the floor, what it had there. Only snapshots use it.
        self._replaced: dict[bytes, EtcdRecord] = {}
        self._live_bytes = 0
        self._bound: dict[int, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def _floor(self) -> int:
        """Records up to this revision are kept only as far as later revisions show them. A watch
        may begin at the compacted revision itself."""
        return self.compacted - 1

    # Requests.

    def apply(self, request: EtcdRequests) -> EtcdResults:
        """Carry out a request as one change. Raises `RequestRefused`."""
        before = len(self._log)
        if type(request) is EtcdTransaction:
            path = [*self._path(request)]
            for kind in (PutKey, RangeKeys):  # in etcd's order
                self._check(request, iter(path), kind)
            done = self._run(request, iter(path), before)
            result: EtcdResults = TransactionDone(
                self.revision + (len(self._log) > before), done.succeeded, done.results
            )
        else:
            self._check_request(request)
            result = self._carry_out(request, iter(()), before)
        if len(self._log) > before:
            self.revision += 1
        return result

    def read(self, request: EtcdRequests) -> EtcdResults:
        """`apply` for a request that changes nothing (see `only_reads`)."""
        return self.apply(request)

    def bound_history(self, most_bytes: int) -> None:
        """Compact what exceeds the bounds of the history, with some room for the next changes."""
        limit = min(HISTORY_BYTES, most_bytes)
        while len(self._log) > self._history or self.bytes - self._live_bytes > limit:
            upto = self._log[len(self._log) // 8].mod
            if upto == self._log[0].mod:
                upto += 1  # many changes at one revision
            if upto > self.revision:
                return
            self._drop(upto)

    def compact(self, revision: int) -> None:
        """Make revisions below this one unreadable. Raises `RequestRefused`."""
        if revision <= self.compacted:
            raise RequestRefused(EtcdRefusal.COMPACTED)
        if revision > self.revision:
            raise RequestRefused(EtcdRefusal.FUTURE)
        self._drop(revision)

    def advance(self, by: int) -> None:
        """Raise the revision after a restore. Watches of the old cluster cannot be resumed."""
        self.revision += by
        self._drop(self.revision)

    # Leases.

    def grant(self, lease: int, number: int) -> None:
        """Begin a lease. Raises `RequestRefused` if there is one of this id."""
        if lease in self.leases:
            raise RequestRefused(EtcdRefusal.LEASE_EXISTS)
        self.leases[lease] = number
        self._bound[lease] = {}

    def end(self, lease: int) -> None:
        """End a lease: delete its keys, all at one revision."""
        del self.leases[lease]
        for key in sorted(self._bound.pop(lease)):
            self._push(EtcdRecord(key, b"", 0, self.revision + 1, 0))
        if self._log and self._log[-1].mod > self.revision:
            self.revision += 1

    def bound(self, lease: int) -> list[bytes]:
        """The keys of a lease."""
        return sorted(self._bound.get(lease, ()))

    # History.

    def changes(self, since: int, count: int | None = None) -> list[EtcdRecord]:
        """The changes from a revision on, which must not be compacted: all of them, or about the
        first `count`. Those of one revision are not divided."""
        log = self._log
        first = bisect_left(log, since, key=_MOD)
        if count is None or len(log) - first <= count:
            return log[first:]
        return log[first : bisect_right(log, log[first + count - 1].mod, key=_MOD)]

    def before(self, change: EtcdRecord) -> EtcdRecord | None:
        """What the key of a change had before it, unless that has been compacted."""
        if change.version == 1 or change.mod - 1 < self.compacted:
            return None
        return self._at(change.key, change.mod - 1)

    # Snapshots.

    def snapshot(self) -> tuple[Iterator[EtcdRecord], list[EtcdRecord]]:
        """The state as of now: what keys had at the floor, in order, and all changes since."""
        base = _base(self._live.blocks(), [*self._replaced.values()], self._floor)
        return base, self._log.copy()

    def restore(
        self,
        revision: int,
        compacted: int,
        leases: dict[int, int],
        base: list[EtcdRecord],
        changes: list[EtcdRecord],
    ) -> None:
        """Set the state of a new object."""
        self.compacted = compacted
        self.leases = leases
        self._bound = {lease: {} for lease in leases}
        self._live.append([record.key for record in base], base)
        for record in base:
            self.bytes += _size(record)
            if record.lease in self._bound:  # or it is replaced below, and the lease has ended
                self._bound[record.lease][record.key] = None
        self._live_bytes = self.bytes
        for record in changes:
            self._push(record)
        self.revision = revision

    # Reads.

    def _at(self, key: bytes, revision: int) -> EtcdRecord | None:
        record = self._live.get(key) or self._dead.get(key)
        if record is not None and record.mod > revision:
            older = self._older.get(key, [])
            at = bisect_right(older, revision, key=_MOD)
            record = older[at - 1] if at else None
        return record if record is not None and record.version else None

    def _select(self, key: bytes, end: bytes, revision: int = 0) -> list[EtcdRecord]:
        """The records of a range in the order of their keys, now or at an earlier revision."""
        if not end:
            record = self._at(key, revision) if revision else self._live.get(key)
            return [] if record is None else [record]
        beyond = None if end == FROM_KEY else end
        if not revision:
            return self._live.between(key, beyond)
        both = merge(self._live.between(key, beyond), self._dead.between(key, beyond), key=_KEY)
        found = (self._at(record.key, revision) for record in both)
        return [record for record in found if record is not None]

    def _range(self, request: RangeKeys, before: int) -> KeysRead:
        revision = self.revision + (len(self._log) > before)
        past = request.revision if 0 < request.revision < revision else 0
        records = self._select(request.key, request.end, past)
        count, limit = len(records), request.limit
        if request.count_only:
            return KeysRead(revision, [], False, count)
        filtered = request.min_mod or request.max_mod or request.min_create or request.max_create
        if limit > 0 and request.order is SortOrder.NONE and not filtered:
            records = records[: limit + 1]  # etcd sorts what is left by another target than the key
        elif filtered:
            records = [record for record in records if _admits(request, record)]
        if request.order is not SortOrder.NONE or request.target is not SortTarget.KEY:
            records.sort(key=_SORTED[request.target], reverse=request.order is SortOrder.DESCEND)
        more = 0 < limit < len(records)
        if more:
            records = records[:limit]
        if request.keys_only:
            records = [
                EtcdRecord(each.key, b"", each.create, each.mod, each.version, each.lease)
                for each in records
            ]
        return KeysRead(revision, records, more, count)

    # Transactions.

    def _holds(self, compare: Compare) -> bool:
        records = self._select(compare.key, compare.end)
        if not records:
            if compare.target is CompareTarget.VALUE:
                return False
            records = [_NOTHING]
        of = _COMPARED[compare.target]
        wanted = compare.value if compare.target is CompareTarget.VALUE else compare.number
        return all(_compare(of(record), compare.result, wanted) for record in records)

    def _path(self, request: EtcdTransaction) -> Iterator[bool]:
        """Whether the conditions of this transaction, and of those within it, hold. All of them are
        decided before anything is changed."""
        holds = all(map(self._holds, request.compares))
        yield holds
        for each in request.success if holds else request.failure:
            if type(each) is EtcdTransaction:
                yield from self._path(each)

    def _check(self, request: EtcdTransaction, path: Iterator[bool], kind: type) -> None:
        """Raise `RequestRefused` if a request of this kind that will be carried out cannot be."""
        for each in request.success if next(path) else request.failure:
            if type(each) is EtcdTransaction:
                self._check(each, path, kind)
            elif type(each) is kind:
                self._check_request(each, within=True)

    def _check_request(self, request: EtcdRequests, within: bool = False) -> None:
        if type(request) is PutKey:
            if request.lease and request.lease not in self.leases:
                raise RequestRefused(EtcdRefusal.LEASE_NOT_FOUND)
            kept = request.ignore_value or request.ignore_lease
            if kept and self._live.get(request.key) is None:
                raise RequestRefused(EtcdRefusal.KEY_NOT_FOUND)
        elif type(request) is RangeKeys:
            if request.revision > self.revision:
                raise RequestRefused(EtcdRefusal.FUTURE)
            # A range outside of a transaction takes a negative revision for the current one.
            meant = request.revision > 0 or (within and request.revision < 0)
            if meant and request.revision < self.compacted:
                raise RequestRefused(EtcdRefusal.COMPACTED)

    def _run(self, request: EtcdTransaction, path: Iterator[bool], before: int) -> TransactionDone:
        succeeded = next(path)
        chosen = request.success if succeeded else request.failure
        # etcd leaves the headers of transactions within others empty.
        return TransactionDone(
            0, succeeded, [self._carry_out(each, path, before) for each in chosen]
        )

    def _carry_out(self, request: EtcdRequests, path: Iterator[bool], before: int) -> EtcdResults:
        """Carry out a request that was checked. `before` is the length of the log before the
        change."""
        if type(request) is RangeKeys:
            return self._range(request, before)
        if type(request) is PutKey:
            return self._put(request)
        if type(request) is DeleteKeys:
            return self._delete(request, before)
        assert type(request) is EtcdTransaction
        return self._run(request, path, before)

    def _put(self, request: PutKey) -> KeyPut:
        revision, present = self.revision + 1, self._live.get(request.key)
        had = present or _NOTHING
        self._push(
            EtcdRecord(
                request.key,
                had.value if request.ignore_value else request.value,
                had.create or revision,
                revision,
                had.version + 1,
                had.lease if request.ignore_lease else request.lease,
            )
        )
        return KeyPut(revision, present if request.previous else None)

    def _delete(self, request: DeleteKeys, before: int) -> KeysDeleted:
        records = self._select(request.key, request.end)
        for record in records:
            self._push(EtcdRecord(record.key, b"", 0, self.revision + 1, 0))
        revision = self.revision + (len(self._log) > before)
        return KeysDeleted(revision, len(records), records if request.previous else [])

    # Records.

    def _push(self, record: EtcdRecord) -> None:
        """Add the latest change."""
        key = record.key
        position = self._live.seek(key)
        old = position[2]
        if old is not None:
            self._live_bytes -= _size(old)
            if old.lease and (keys := self._bound.get(old.lease)) is not None:
                del keys[key]
        elif (old := self._dead.get(key)) is not None:
            self._dead.remove(key)
        if old is not None:
            self._older.setdefault(key, []).append(old)
            if old.mod <= self._floor:
                self._replaced[key] = old
        if record.version:
            self._live.put(key, record, position, old is None or len(old.value) <= APART)
            self._live_bytes += _size(record)
            if record.lease and (keys := self._bound.get(record.lease)) is not None:
                keys[key] = None
        else:
            if position[2] is not None:
                self._live.remove(key)
            self._dead.put(key, record)
        self._log.append(record)
        self.bytes += _size(record)

    def _drop(self, revision: int) -> None:
        """Compact: forget what no revision from this one on shows."""
        self.compacted = revision
        floor, log = self._floor, self._log
        kept = bisect_right(log, floor, key=_MOD)
        self._log = log[kept:]
        for key in dict.fromkeys(map(_KEY, log[:kept])):
            latest = self._live.get(key) or self._dead.get(key)
            assert latest is not None
            older = self._older.pop(key, [])
            at = bisect_right(older, floor, key=_MOD)
            self._replaced.pop(key, None)
            if latest.mod <= floor:
                if not latest.version:
                    self._dead.remove(key)
                    self.bytes -= _size(latest)
            elif at and older[at - 1].version:
                at -= 1
                self._replaced[key] = older[at]
            self.bytes -= sum(map(_size, older[:at]))
            if at < len(older):
                self._older[key] = older[at:]


def only_reads(request: EtcdRequests) -> bool:
    """Whether a request changes nothing, whatever it finds."""
    if type(request) is EtcdTransaction:
        return all(map(only_reads, request.success)) and all(map(only_reads, request.failure))
    return type(request) is RangeKeys


def cost(request: EtcdRequests) -> int:
    """How many bytes a request may add."""
    if type(request) is PutKey:
        return len(request.key) + len(request.value) + OVERHEAD
    if type(request) is EtcdTransaction:
        return max(sum(map(cost, request.success)), sum(map(cost, request.failure)))
    return 0


def _size(record: EtcdRecord) -> int:
    return len(record.key) + len(record.value) + OVERHEAD


def _admits(request: RangeKeys, record: EtcdRecord) -> bool:
    """Whether the revisions of a record are within the bounds of a request."""
    return (
        record.mod >= request.min_mod
        and record.create >= request.min_create
        and (not request.max_mod or record.mod <= request.max_mod)
        and (not request.max_create or record.create <= request.max_create)
    )


def _compare(found: Any, result: CompareResult, wanted: Any) -> bool:
    if result is CompareResult.EQUAL:
        return bool(found == wanted)
    if result is CompareResult.GREATER:
        return bool(found > wanted)
    if result is CompareResult.LESS:
        return bool(found < wanted)
    return bool(found != wanted)


def _base(
    blocks: Iterable[Block[bytes, EtcdRecord]], replaced: Iterable[EtcdRecord], floor: int
) -> Iterator[EtcdRecord]:
    unchanged = (each for _, records in blocks for each in records if each.mod <= floor)
    return merge(unchanged, sorted(replaced, key=_KEY), key=_KEY)
