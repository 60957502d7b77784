"""etcd's errors: the codes and the texts that clients compare. Imports the error tree."""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import Final

from doyen.errors import ConfigError, DoyenError
from doyen.quorum.keyspace.etcd_requests import EtcdRefusal


class Code(IntEnum):
    """Codes of gRPC."""

    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class EtcdError(Exception):
    """An error response."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def _error(code: Code, text: str) -> tuple[Code, str]:
    return code, f"etcdserver: {text}"


EMPTY_KEY: Final = _error(Code.INVALID_ARGUMENT, "key is not provided")
KEY_NOT_FOUND: Final = _error(Code.INVALID_ARGUMENT, "key not found")
VALUE_PROVIDED: Final = _error(Code.INVALID_ARGUMENT, "value is provided")
LEASE_PROVIDED: Final = _error(Code.INVALID_ARGUMENT, "lease is provided")
TOO_MANY_OPS: Final = _error(Code.INVALID_ARGUMENT, "too many operations in txn request")
DUPLICATE_KEY: Final = _error(Code.INVALID_ARGUMENT, "duplicate key given in txn request")
INVALID_SORT: Final = _error(Code.INVALID_ARGUMENT, "invalid sort option")
TOO_LARGE: Final = _error(Code.INVALID_ARGUMENT, "request is too large")
COMPACTED: Final = _error(Code.OUT_OF_RANGE, "mvcc: required revision has been compacted")
FUTURE: Final = _error(Code.OUT_OF_RANGE, "mvcc: required revision is a future revision")
NO_SPACE: Final = _error(Code.RESOURCE_EXHAUSTED, "mvcc: database space exceeded")
LEASE_NOT_FOUND: Final = _error(Code.NOT_FOUND, "requested lease not found")
LEASE_EXISTS: Final = _error(Code.FAILED_PRECONDITION, "lease already exists")
LEASE_TOO_LONG: Final = _error(Code.OUT_OF_RANGE, "too large lease TTL")
NO_USERS: Final = _error(Code.FAILED_PRECONDITION, "authentication is not enabled")
NO_LEADER: Final = _error(Code.UNAVAILABLE, "no leader")
TIMED_OUT: Final = _error(Code.UNAVAILABLE, "request timed out")
STOPPED: Final = _error(Code.UNAVAILABLE, "server stopped")
LEADERLESS: Final = _error(Code.UNAVAILABLE, "this node knows no leader: try another one")
"""Ends a stream. Clients of etcd go to another node after it; a watch that ends with `NO_LEADER`
they do not resume."""

REFUSALS: Final = {
    EtcdRefusal.COMPACTED: COMPACTED,
    EtcdRefusal.FUTURE: FUTURE,
    EtcdRefusal.LEASE_NOT_FOUND: LEASE_NOT_FOUND,
    EtcdRefusal.KEY_NOT_FOUND: KEY_NOT_FOUND,
    EtcdRefusal.LEASE_EXISTS: LEASE_EXISTS,
}


def fail(error: tuple[Code, str]) -> EtcdError:
    """The exception for one of the errors above."""
    return EtcdError(*error)


def translated(error: DoyenError) -> EtcdError:
    """The response to an error of the node. A write may have been carried out in spite of it, as
    with etcd's own errors of this code."""
    if isinstance(error, ConfigError):
        return fail(TOO_LARGE)
    return EtcdError(Code.UNAVAILABLE, f"{TIMED_OUT[1]}: {error}")


def unexpected(error: Exception) -> EtcdError:
    """The response to a defect of a handler, which is reported."""
    context = {"message": "a call of etcd's API failed", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)
    return EtcdError(Code.UNKNOWN, f"unexpected {type(error).__name__}: {error}")
