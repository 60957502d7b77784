"""kazoo's errors, as doyen's.

Imports kazoo and the error tree.
"""

from __future__ import annotations

from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionClosedError,
    InvalidACLError,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotReadOnlyCallError,
    QuotaExceededError,
    SASLException,
    SessionClosedRequireSaslError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
    UnimplementedError,
)

from doyen.errors import LeaseGone, OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable

__all__ = ["translate"]

_ANSWERS = (NoNodeError, NodeExistsError, BadVersionError)
"""Regular answers of a server, which the caller interprets."""
_NOT_DONE = (ConnectionClosedError, NotReadOnlyCallError, SessionMovedError, ThrottledOpError)


def translate(error: Exception, *, writes: bool, lease: str | None) -> Exception:
    """The error of a failed request. With `writes` it could have changed something. `lease`
    is the id of the session if that is a lease."""
    if isinstance(error, _ANSWERS):
        answer: Exception = error
        return answer
    translated = _translate(error, writes, lease)
    translated.__cause__ = error
    return translated


def _translate(error: Exception, writes: bool, lease: str | None) -> StoreError:
    reason = str(error) or type(error).__name__
    match error:
        case NoAuthError():
            return StoreUnusable(
                "ZooKeeper refuses: the access list of a znode does not include this client."
                " Check user and password, or have an administrator change the list"
            )
        case AuthFailedError() | SessionClosedRequireSaslError() | SASLException():
            reason = str(error.__cause__ or error) or type(error).__name__
            return StoreUnusable(
                f"ZooKeeper does not accept the credentials: {reason}; check user and password"
            )
        case InvalidACLError():
            return StoreUnusable("acl=creator needs a user that ZooKeeper has authenticated")
        case UnimplementedError():
            return StoreUnusable("this ZooKeeper is too old: version 3.5 or later is needed")
        case QuotaExceededError():
            return StoreUnusable("a quota of ZooKeeper's is exhausted: have it raised")
        case SessionExpiredError() if lease and not isinstance(error, ConnectionClosedError):
            return LeaseGone(f"ZooKeeper has expired the session {lease}")
    if writes and not isinstance(error, _NOT_DONE):
        return OutcomeUnknown(f"the connection broke before ZooKeeper answered: {reason}")
    return StoreUnavailable(f"ZooKeeper did not carry out the request: {reason}")
