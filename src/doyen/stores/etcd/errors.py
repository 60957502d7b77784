"""The errors of etcd and gRPC, as doyen's.

A call that fails was sent, so its outcome is unknown, unless etcd or gRPC says otherwise.

Imports grpc and the error tree.
"""

from __future__ import annotations

import grpc.aio
from grpc import StatusCode

from doyen.errors import LeaseGone, OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable

__all__ = ["Denied", "LoginExpired", "refusal", "translate"]

_NOT_DONE = (
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
    "failed to connect to all addresses",
    "errors resolving",
    "DNS resolution failed",
)
_OUTCOME_UNKNOWN = {
    StatusCode.UNAVAILABLE,
    StatusCode.UNKNOWN,
    StatusCode.INTERNAL,
    StatusCode.CANCELLED,
    StatusCode.ABORTED,
    StatusCode.DEADLINE_EXCEEDED,
}


class LoginExpired(StoreUnusable):
    """etcd does not accept the login token, or wants one."""


class Denied(StoreUnusable):
    """etcd accepts the login, and does not permit the request."""


def translate(error: grpc.aio.AioRpcError, member: str) -> StoreError:
    """The error of a failed call."""
    # The traceback refers to the call, and the call to its channel. A closed channel would go on
    # connecting for as long as the error is referenced.
    error.__traceback__ = None
    details = error.details() or error.code().name.lower()
    # gRPC lists a chain of causes. The last is the most specific.
    reason = details.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
    if any(phrase in details for phrase in _NOT_DONE):
        return StoreUnavailable(f"etcd at {member}: {reason}")
    if error.code() in _OUTCOME_UNKNOWN:
        return OutcomeUnknown(f"etcd at {member}: {reason}")
    return refusal(reason, member)


def refusal(reason: str, member: str) -> StoreError:
    """The error of a request that etcd refused for this reason."""

    def mentions(*phrases: str) -> bool:
        return any(phrase in reason for phrase in phrases)

    if mentions("requested lease not found"):
        return LeaseGone("etcd has ended the lease")
    if mentions("database space exceeded"):
        return StoreUnavailable(
            f"etcd at {member} accepts no writes, because its space quota is exhausted: compact and"
            " defragment it, then disarm the alarm"
        )
    if mentions("too many requests"):
        return StoreUnavailable(f"etcd at {member}: {reason}")
    if mentions("permission denied"):
        return Denied(
            f"etcd at {member} does not permit this: grant the user read and write access to"
            " every key that begins with the URL's path and a slash"
        )
    if mentions("invalid auth token", "user name is empty", "revision of auth store is old"):
        return LoginExpired(
            f"etcd at {member} requires a user and a password, as in etcd://user:password@host"
            f" ({reason})"
        )
    return StoreUnusable(f"etcd at {member} refuses this: {reason}")
