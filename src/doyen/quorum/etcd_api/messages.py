"""Messages of etcd's API into requests of the etcd keyspace, checked as etcd checks them, and the
results back into messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.errors import (
    DUPLICATE_KEY,
    EMPTY_KEY,
    INVALID_SORT,
    KEY_NOT_FOUND,
    LEASE_PROVIDED,
    TOO_MANY_OPS,
    VALUE_PROVIDED,
    fail,
)
from doyen.quorum.keyspace.etcd_requests import (
    FROM_KEY,
    Compare,
    CompareResult,
    CompareTarget,
    DeleteKeys,
    EtcdRecord,
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

MAX_OPS: Final = 128
"""How many conditions or requests a transaction may have in one list."""
MAX_DEPTH: Final = 8
"""How deep transactions may be within others. etcd has no such limit."""

Interval = tuple[bytes, bytes]


def range_request(message: Any) -> RangeKeys:
    _check_key(message.key)
    if message.sort_order not in _ORDERS or message.sort_target not in _SORT_TARGETS:
        raise fail(INVALID_SORT)
    return RangeKeys(
        message.key,
        message.range_end,
        message.limit,
        message.revision,
        SortOrder(message.sort_order),
        SortTarget(message.sort_target),
        message.keys_only,
        message.count_only,
        message.min_mod_revision,
        message.max_mod_revision,
        message.min_create_revision,
        message.max_create_revision,
    )


def put_request(message: Any) -> PutKey:
    _check_key(message.key)
    if message.ignore_value and message.value:
        raise fail(VALUE_PROVIDED)
    if message.ignore_lease and message.lease:
        raise fail(LEASE_PROVIDED)
    return PutKey(
        message.key,
        message.value,
        message.lease,
        message.prev_kv,
        message.ignore_value,
        message.ignore_lease,
    )


def delete_request(message: Any) -> DeleteKeys:
    _check_key(message.key)
    return DeleteKeys(message.key, message.range_end, message.prev_kv)


def txn_request(message: Any) -> EtcdTransaction:
    request = _transaction(message, 1)
    _changed(request.success)
    _changed(request.failure)
    return request


def _transaction(message: Any, depth: int) -> EtcdTransaction:
    lists = message.compare, message.success, message.failure
    if max(map(len, lists)) > MAX_OPS or depth > MAX_DEPTH:
        raise fail(TOO_MANY_OPS)
    return EtcdTransaction(
        tuple(map(_compare, message.compare)),
        tuple(_op(each, depth) for each in message.success),
        tuple(_op(each, depth) for each in message.failure),
    )


def _op(message: Any, depth: int) -> EtcdRequests:
    kind = message.WhichOneof("request")
    if kind == "request_range":
        return range_request(message.request_range)
    if kind == "request_put":
        return put_request(message.request_put)
    if kind == "request_delete_range":
        return delete_request(message.request_delete_range)
    if kind == "request_txn":
        return _transaction(message.request_txn, depth + 1)
    raise fail(KEY_NOT_FOUND)


def _compare(message: Any) -> Compare:
    _check_key(message.key)
    if message.target not in _TARGETS or message.result not in _RESULTS:
        raise fail(INVALID_SORT)
    target = CompareTarget(message.target)
    # What was given for another target counts as not given.
    given = message.WhichOneof("target_union") == _UNION[target]
    value = getattr(message, _UNION[target]) if given else None
    return Compare(
        message.key,
        message.range_end,
        target,
        CompareResult(message.result),
        0 if target is CompareTarget.VALUE else value or 0,
        value or b"" if target is CompareTarget.VALUE else b"",
    )


_UNION: Final = {
    CompareTarget.VERSION: "version",
    CompareTarget.CREATE: "create_revision",
    CompareTarget.MOD: "mod_revision",
    CompareTarget.VALUE: "value",
    CompareTarget.LEASE: "lease",
}
_ORDERS, _SORT_TARGETS = {*map(int, SortOrder)}, {*map(int, SortTarget)}
_TARGETS, _RESULTS = {*map(int, CompareTarget)}, {*map(int, CompareResult)}


def _check_key(key: bytes) -> None:
    if not key:
        raise fail(EMPTY_KEY)


def _changed(requests: Sequence[EtcdRequests]) -> tuple[set[bytes], list[Interval]]:
    """The keys that a list of requests may put and the ranges that it may delete. Raises if a key
    may be changed twice."""
    deleted = [(each.key, each.end) for each in requests if type(each) is DeleteKeys]
    put: set[bytes] = set()
    for each in requests:
        if type(each) is not EtcdTransaction:
            continue
        then, deleted_then = _changed(each.success)
        otherwise, deleted_otherwise = _changed(each.failure)
        # Only one of the two is carried out, so both may put the same key.
        for key in then | otherwise:
            _check_once(key, put, deleted)
        put |= then | otherwise
        deleted += deleted_then + deleted_otherwise
    for each in requests:
        if type(each) is PutKey:
            _check_once(each.key, put, deleted)
            put.add(each.key)
    return put, deleted


def _check_once(key: bytes, put: set[bytes], deleted: Iterable[Interval]) -> None:
    if key in put or any(_covers(interval, key) for interval in deleted):
        raise fail(DUPLICATE_KEY)


def _covers(interval: Interval, key: bytes) -> bool:
    start, end = interval
    if not end:
        return key == start
    return key >= start and (end == FROM_KEY or key < end)


def key_value(record: EtcdRecord) -> Any:
    return rpc.KeyValue(
        key=record.key,
        create_revision=record.create,
        mod_revision=record.mod,
        version=record.version,
        value=record.value,
        lease=record.lease,
    )


def response(result: EtcdResults, header: Any) -> Any:
    """The message for a result."""
    if type(result) is KeysRead:
        return rpc.RANGE.response(
            header=header,
            kvs=map(key_value, result.records),
            more=result.more,
            count=result.count,
        )
    if type(result) is KeyPut:
        previous = None if result.previous is None else key_value(result.previous)
        return rpc.PUT.response(header=header, prev_kv=previous)
    if type(result) is KeysDeleted:
        return rpc.DELETE_RANGE.response(
            header=header, deleted=result.deleted, prev_kvs=map(key_value, result.previous)
        )
    assert type(result) is TransactionDone
    return rpc.TXN.response(
        header=header, succeeded=result.succeeded, responses=map(_response_op, result.results)
    )


_OPS: Final = {
    KeysRead: "response_range",
    KeyPut: "response_put",
    KeysDeleted: "response_delete_range",
    TransactionDone: "response_txn",
}


def _response_op(result: EtcdResults) -> Any:
    header = rpc.ResponseHeader(revision=result.revision)
    return rpc.ResponseOp(**{_OPS[type(result)]: response(result, header)})
