"""Requests to the etcd keyspace and their results, as they stand in the log.

They mean what etcd's requests of the same names mean. A range is from `key` up to and without
`end`; with an empty `end` it is the key alone, and an `end` of one zero byte stands for everything
from `key` on. The tags and the order of the fields are part of the log format. Imports msgspec.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from msgspec import Struct

FROM_KEY: Final = b"\0"
"""The `end` of a range without an end."""


class EtcdRecord(Struct, frozen=True, array_like=True, gc=False):
    """What a key had from revision `mod` on. A deleted key has version 0."""

    key: bytes
    value: bytes
    create: int
    mod: int
    version: int
    lease: int = 0


class SortOrder(IntEnum):
    NONE = 0
    ASCEND = 1
    DESCEND = 2


class SortTarget(IntEnum):
    KEY = 0
    VERSION = 1
    CREATE = 2
    MOD = 3
    VALUE = 4


class CompareTarget(IntEnum):
    VERSION = 0
    CREATE = 1
    MOD = 2
    VALUE = 3
    LEASE = 4


class CompareResult(IntEnum):
    EQUAL = 0
    GREATER = 1
    LESS = 2
    NOT_EQUAL = 3


class EtcdRequest(
    Struct, frozen=True, array_like=True, tag=True, gc=False, forbid_unknown_fields=True
):
    """A request of the etcd keyspace."""


class RangeKeys(EtcdRequest, frozen=True, gc=False, tag=1):
    """Read keys. → KeysRead"""

    key: bytes
    end: bytes = b""
    limit: int = 0
    revision: int = 0
    """The revision to read at; 0 or less for the current one."""
    order: SortOrder = SortOrder.NONE
    target: SortTarget = SortTarget.KEY
    keys_only: bool = False
    count_only: bool = False
    min_mod: int = 0
    max_mod: int = 0
    min_create: int = 0
    max_create: int = 0


class PutKey(EtcdRequest, frozen=True, gc=False, tag=2):
    """Write a key. → KeyPut"""

    key: bytes
    value: bytes = b""
    lease: int = 0
    previous: bool = False
    """Whether the result has what the key had before."""
    ignore_value: bool = False
    """Keep the value of the key, which must exist."""
    ignore_lease: bool = False
    """Keep the lease of the key, which must exist."""


class DeleteKeys(EtcdRequest, frozen=True, gc=False, tag=3):
    """Delete keys. → KeysDeleted"""

    key: bytes
    end: bytes = b""
    previous: bool = False


class Compare(Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A condition on every key of a range."""

    key: bytes
    end: bytes = b""
    target: CompareTarget = CompareTarget.VERSION
    result: CompareResult = CompareResult.EQUAL
    number: int = 0
    value: bytes = b""


class EtcdTransaction(EtcdRequest, frozen=True, gc=False, tag=4):
    """Carry out one of two lists of requests, as one change. → TransactionDone"""

    compares: tuple[Compare, ...] = ()
    success: tuple[RangeKeys | PutKey | DeleteKeys | EtcdTransaction, ...] = ()
    failure: tuple[RangeKeys | PutKey | DeleteKeys | EtcdTransaction, ...] = ()


EtcdRequests = RangeKeys | PutKey | DeleteKeys | EtcdTransaction


class EtcdResult(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The result of a request. `revision` is the one that etcd has in the header of its response:
    within a transaction, that of the transaction as soon as it has changed something."""


class KeysRead(EtcdResult, frozen=True, gc=False, tag=1):
    revision: int
    records: list[EtcdRecord]
    more: bool
    count: int


class KeyPut(EtcdResult, frozen=True, gc=False, tag=2):
    revision: int
    previous: EtcdRecord | None = None


class KeysDeleted(EtcdResult, frozen=True, gc=False, tag=3):
    revision: int
    deleted: int
    previous: list[EtcdRecord] = []


class TransactionDone(EtcdResult, frozen=True, gc=False, tag=4):
    revision: int
    succeeded: bool
    results: list[KeysRead | KeyPut | KeysDeleted | TransactionDone]


EtcdResults = KeysRead | KeyPut | KeysDeleted | TransactionDone


class EtcdRefusal(IntEnum):
    """Why a request was refused. Nothing was changed."""

    COMPACTED = 1
    """The revision has been compacted."""
    FUTURE = 2
    """The revision is later than the current one."""
    LEASE_NOT_FOUND = 3
    KEY_NOT_FOUND = 4
    LEASE_EXISTS = 5
