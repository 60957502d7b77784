"""A simple model of etcd's keyspace: a full copy of all keys for every revision.

`EtcdOracle` carries out the requests of `doyen.quorum.keyspace.etcd_requests` the slow and obvious
way. `requests` is a strategy for them, over few keys, so that they meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from doyen.quorum.keyspace.etcd_requests import (
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
from doyen.quorum.keyspace.etcd_state import RequestRefused

Keys = dict[bytes, EtcdRecord]

FIELDS = {
    CompareTarget.VERSION: "version",
    CompareTarget.CREATE: "create",
    CompareTarget.MOD: "mod",
    CompareTarget.VALUE: "value",
    CompareTarget.LEASE: "lease",
}


class EtcdOracle:
    """etcd's keyspace, by the book."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = -1
        self.states: dict[int, Keys] = {1: {}}
        self.events: list[tuple[EtcdRecord, EtcdRecord | None]] = []
        """Each change, and what the key had before it."""
        self.leases: set[int] = set()

    @property
    def now(self) -> Keys:
        return self.states[self.revision]

    def grant(self, lease: int) -> None:
        if lease in self.leases:
            raise RequestRefused(EtcdRefusal.LEASE_EXISTS)
        self.leases.add(lease)

    def end(self, lease: int) -> None:
        if lease not in self.leases:
            raise RequestRefused(EtcdRefusal.LEASE_NOT_FOUND)
        self.leases.remove(lease)
        new = dict(self.now)
        for key, record in sorted(self.now.items()):
            if record.lease == lease:
                self._delete(new, key)
        self._commit(new)

    def compact(self, revision: int) -> None:
        if revision <= self.compacted:
            raise RequestRefused(EtcdRefusal.COMPACTED)
        if revision > self.revision:
            raise RequestRefused(EtcdRefusal.FUTURE)
        self.compacted = revision

    def changes(self, since: int) -> list[tuple[EtcdRecord, EtcdRecord | None]]:
        return [
            (record, before if record.mod - 1 >= self.compacted else None)
            for record, before in self.events
            if record.mod >= since
        ]

    def apply(self, request: EtcdRequests) -> EtcdResults:
        new, events = dict(self.now), len(self.events)
        try:
            self._check(request)
            result = self._do(request, new)
        except RequestRefused:
            del self.events[events:]
            raise
        self._commit(new)
        if isinstance(result, TransactionDone):
            return TransactionDone(self.revision, result.succeeded, result.results)
        return result

    def _changed(self) -> bool:
        return bool(self.events) and self.events[-1][0].mod > self.revision

    def _commit(self, new: Keys) -> None:
        if self._changed():
            self.revision += 1
            self.states[self.revision] = new

    def _check(self, request: EtcdRequests) -> None:
        """Every put of a transaction is checked before any range."""
        requests = [*self._chosen(request)]
        for each in requests:
            if isinstance(each, PutKey):
                self._check_one(each)
        for each in requests:
            if isinstance(each, RangeKeys):
                self._check_one(each)

    def _chosen(self, request: EtcdRequests) -> Iterator[EtcdRequests]:
        """The requests that are carried out."""
        if isinstance(request, EtcdTransaction):
            for each in self._branch(request)[1]:
                yield from self._chosen(each)
        else:
            yield request

    def _check_one(self, request: EtcdRequests) -> None:
        if isinstance(request, PutKey):
            if request.lease and request.lease not in self.leases:
                raise RequestRefused(EtcdRefusal.LEASE_NOT_FOUND)
            if (request.ignore_value or request.ignore_lease) and request.key not in self.now:
                raise RequestRefused(EtcdRefusal.KEY_NOT_FOUND)
        elif isinstance(request, RangeKeys):
            if request.revision > self.revision:
                raise RequestRefused(EtcdRefusal.FUTURE)
            if 0 < request.revision < self.compacted:
                raise RequestRefused(EtcdRefusal.COMPACTED)

    def _branch(self, request: EtcdTransaction) -> tuple[bool, tuple[EtcdRequests, ...]]:
        succeeded = all(self._holds(compare) for compare in request.compares)
        return succeeded, request.success if succeeded else request.failure

    def _holds(self, compare: Compare) -> bool:
        found = select(self.now, compare.key, compare.end)
        if not found and compare.target is CompareTarget.VALUE:
            return False
        wanted: Any = compare.value if compare.target is CompareTarget.VALUE else compare.number
        for record in found or [EtcdRecord(b"", b"", 0, 0, 0)]:
            has = getattr(record, FIELDS[compare.target])
            if not {
                CompareResult.EQUAL: has == wanted,
                CompareResult.GREATER: has > wanted,
                CompareResult.LESS: has < wanted,
                CompareResult.NOT_EQUAL: has != wanted,
            }[compare.result]:
                return False
        return True

    def _do(self, request: EtcdRequests, new: Keys) -> EtcdResults:
        if isinstance(request, RangeKeys):
            past = self.states[request.revision] if request.revision > 0 else new
            return self._range(request, new if request.revision == 0 else past)
        if isinstance(request, PutKey):
            had = new.get(request.key)
            revision = self.revision + 1
            record = EtcdRecord(
                request.key,
                had.value if request.ignore_value and had else request.value,
                had.create if had else revision,
                revision,
                had.version + 1 if had else 1,
                had.lease if request.ignore_lease and had else request.lease,
            )
            new[request.key] = record
            self.events.append((record, self.now.get(request.key)))
            return KeyPut(revision, had if request.previous else None)
        if isinstance(request, DeleteKeys):
            found = select(new, request.key, request.end)
            for record in found:
                self._delete(new, record.key)
            revision = self.revision + self._changed()
            return KeysDeleted(revision, len(found), found if request.previous else [])
        succeeded, chosen = self._branch(request)
        return TransactionDone(0, succeeded, [self._do(each, new) for each in chosen])

    def _delete(self, new: Keys, key: bytes) -> None:
        del new[key]
        self.events.append((EtcdRecord(key, b"", 0, self.revision + 1, 0), self.now.get(key)))

    def _range(self, request: RangeKeys, keys: Keys) -> KeysRead:
        revision = self.revision + self._changed()
        found = select(keys, request.key, request.end)
        count = len(found)
        if request.count_only:
            return KeysRead(revision, [], False, count)
        if request.min_mod:
            found = [record for record in found if record.mod >= request.min_mod]
        if request.max_mod:
            found = [record for record in found if record.mod <= request.max_mod]
        if request.min_create:
            found = [record for record in found if record.create >= request.min_create]
        if request.max_create:
            found = [record for record in found if record.create <= request.max_create]
        bounds = request.min_mod, request.max_mod, request.min_create, request.max_create
        plain = not any(bounds) and request.order is SortOrder.NONE
        if plain and request.limit > 0:
            found = found[: request.limit + 1]
        found.sort(
            key=lambda record: getattr(record, request.target.name.lower()),
            reverse=request.order is SortOrder.DESCEND,
        )
        more = 0 < request.limit < len(found)
        found = found[: request.limit] if more else found
        if request.keys_only:
            found = [EtcdRecord(r.key, b"", r.create, r.mod, r.version, r.lease) for r in found]
        return KeysRead(revision, found, more, count)


def select(keys: Keys, key: bytes, end: bytes) -> list[EtcdRecord]:
    return [
        record
        for at, record in sorted(keys.items())
        if (at == key if not end else at >= key and (end == b"\0" or at < end))
    ]


KEYS = st.sampled_from([b"a", b"a/1", b"a/2", b"b", b"b\0", b"\xff", b"\0"])
ENDS = st.sampled_from([b"", b"", b"\0", b"a0", b"b", b"c", b"\xff"])
VALUES = st.sampled_from([b"", b"x", b"y", b"yy"])
LEASES = st.integers(1, 3)
REVISIONS = st.integers(0, 12)
RANGES = st.builds(
    RangeKeys,
    KEYS,
    ENDS,
    limit=st.integers(0, 3),
    revision=st.one_of(st.just(0), REVISIONS),
    order=st.sampled_from(SortOrder),
    target=st.sampled_from(SortTarget),
    keys_only=st.booleans(),
    count_only=st.booleans(),
    min_mod=st.one_of(st.just(0), REVISIONS),
    max_mod=st.one_of(st.just(0), REVISIONS),
    min_create=st.one_of(st.just(0), REVISIONS),
    max_create=st.one_of(st.just(0), REVISIONS),
)
LEASED = st.one_of(st.just(0), st.just(0), LEASES)
PUTS = st.builds(PutKey, KEYS, VALUES, LEASED, st.booleans())
KEPT = st.builds(
    lambda key, previous, kept: PutKey(
        key, b"" if kept & 1 else b"x", 0, previous, bool(kept & 1), bool(kept & 2)
    ),
    KEYS,
    st.booleans(),
    st.integers(1, 3),
)
DELETES = st.builds(DeleteKeys, KEYS, ENDS, st.booleans())
COMPARES = st.builds(
    Compare,
    KEYS,
    ENDS,
    st.sampled_from(CompareTarget),
    st.sampled_from(CompareResult),
    st.integers(0, 6),
    VALUES,
)
SIMPLE = st.one_of(PUTS, PUTS, RANGES, DELETES, KEPT)


def _transactions(requests: st.SearchStrategy[EtcdRequests]) -> st.SearchStrategy[EtcdRequests]:
    some = st.lists(requests, max_size=3).map(tuple)
    compares = st.lists(COMPARES, max_size=2).map(tuple)
    return st.builds(EtcdTransaction, compares, some, some)


def overlaps(request: EtcdRequests) -> bool:
    """Whether a transaction may change a key twice, which etcd does not allow."""

    def touched(requests: tuple[EtcdRequests, ...]) -> list[tuple[bytes, bytes]]:
        return [
            each
            for request in requests
            for each in (
                [(request.key, b"")]
                if isinstance(request, PutKey)
                else [(request.key, request.end)]
                if isinstance(request, DeleteKeys)
                else touched(request.success) + touched(request.failure)
                if isinstance(request, EtcdTransaction)
                else []
            )
        ]

    if not isinstance(request, EtcdTransaction):
        return False
    for branch in (request.success, request.failure):
        ranges = touched(branch)
        for number, (key, end) in enumerate(ranges):
            for other, beyond in ranges[number + 1 :]:
                below = end == b"\0" or other < (end or key + b"\0")
                above = beyond == b"\0" or key < (beyond or other + b"\0")
                if below and above:
                    return True
    return False


NESTED = st.builds(
    lambda change, compares, then, otherwise: EtcdTransaction(
        (), (change, EtcdTransaction(compares, then, otherwise), RangeKeys(b"\0", b"\0"))
    ),
    PUTS,
    st.lists(COMPARES, min_size=1, max_size=2).map(tuple),
    st.lists(SIMPLE, max_size=2).map(tuple),
    st.lists(SIMPLE, max_size=2).map(tuple),
)
"""Conditions on keys that the transaction has changed before."""
REQUESTS: st.SearchStrategy[EtcdRequests] = st.one_of(
    SIMPLE,
    SIMPLE,
    st.recursive(SIMPLE, _transactions, max_leaves=8).filter(lambda each: not overlaps(each)),
    NESTED.filter(lambda each: not overlaps(each)),
)
