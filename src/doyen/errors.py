"""Every exception doyen raises, in one tree.

    DoyenError
    ├── ConfigError            a setting, URL or name is invalid; nothing was started
    ├── SessionClosed          the session was closed, or belongs to the parent of a fork
    ├── NotElected             the campaign ended without leadership, such as after `wait_s`
    │   └── AlreadyCampaigning the calling scope leads this election; waiting would deadlock
    ├── NameTaken              another member of the group has this name
    ├── NotArrived             the barrier was not passed within `wait_s`
    ├── OrderFailed            the leader did not resign or transfer as ordered
    ├── Conflict               the document has been changed since it was read
    ├── BadDocument            a document in the store cannot be read, or fails its type
    ├── NotApplied             the configuration was written, and not all subscribers applied it
    ├── CommandFailed          a state machine raised an error, the same on every node
    ├── GuardFailed            the process that runs a command for a term did not start it
    ├── LeadershipLost         the term ended before its body did
    ├── StaleToken             a fenced resource refused the token of an earlier term
    ├── StaleMap               a request was routed by an older map of shards than the owner's
    └── StoreError             the store failed; raised by its adapter
        ├── StoreUnavailable   the request was not carried out; a later attempt may succeed
        ├── OutcomeUnknown     no response came; the request may have been carried out
        ├── LeaseGone          the lease has ended, and with it everything bound to it
        ├── TicketGone         the ticket is no longer in the line
        └── StoreUnusable      retrying will not help: wrong file, newer schema, no permission

Messages name the cause and the remedy. Adapters translate the errors of their client libraries and
keep the original as `__cause__`. This module imports nothing of doyen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "AlreadyCampaigning",
    "BadDocument",
    "CommandFailed",
    "ConfigError",
    "Conflict",
    "DoyenError",
    "GuardFailed",
    "LeadershipLost",
    "LeaseGone",
    "NameTaken",
    "NotApplied",
    "NotArrived",
    "NotElected",
    "OrderFailed",
    "OutcomeUnknown",
    "SessionClosed",
    "StaleMap",
    "StaleToken",
    "StoreError",
    "StoreUnavailable",
    "StoreUnusable",
    "TicketGone",
]


class DoyenError(Exception):
    """The base of all exceptions of doyen."""


class ConfigError(DoyenError, ValueError):
    """A setting, URL or name is invalid."""


class SessionClosed(DoyenError):
    """The session has been closed, or was opened by the parent process before a fork."""


class NotElected(DoyenError):
    """The campaign ended without leadership."""


class AlreadyCampaigning(NotElected):
    """The calling scope already leads this election with this session; waiting would deadlock."""


class NameTaken(DoyenError):
    """Another member of the group has this name and renews its lease."""


class NotArrived(DoyenError):
    """The barrier was not passed in time, because too few have arrived."""


class OrderFailed(DoyenError):
    """The leader did not resign in time, or the named successor does not lead."""


class Conflict(DoyenError):
    """The document has been changed since it was read; nothing was written. `current` is what it is
    now."""

    def __init__(self, message: str, current: Any = None) -> None:
        super().__init__(message)
        self.current = current


class BadDocument(DoyenError):
    """A document in the store cannot be read, or fails its type. The last good one stays in
    force. `version`, `id` and `author` are those of the document, where they are known."""

    def __init__(
        self,
        message: str,
        *,
        version: int | None = None,
        id: str = "",  # noqa: A002 - as in the document
        author: str | None = None,
    ) -> None:
        super().__init__(message)
        self.version = version
        self.id = id
        self.author = author


class NotApplied(DoyenError):
    """The configuration was written, and not all of the subscribers that were waited for have
    applied it. `refused` maps the names of those that refused it to their reasons, and `waiting`
    has the names of those that have not answered yet."""

    def __init__(
        self, message: str, refused: Mapping[str, str] | None = None, waiting: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.refused = dict(refused or {})
        self.waiting = list(waiting)


class CommandFailed(DoyenError):
    """The command was committed, and the state machine raised an error, the same on every node."""


class GuardFailed(DoyenError):
    """The guard process of a `Supervisor` did not start the command in time."""


class LeadershipLost(DoyenError):
    """The term ended before its body did. Work done after `term.valid` became false must not take
    effect."""


class StaleToken(DoyenError):
    """A fenced resource has seen the token of a later term and refused this one."""


class StaleMap(DoyenError):
    """A request was routed by an older map of shards than the owner's, and was not executed.
    `generation` is the owner's."""

    def __init__(self, message: str, generation: int) -> None:
        super().__init__(message)
        self.generation = generation


class StoreError(DoyenError):
    """The store failed. The message is that of its adapter."""


class StoreUnavailable(StoreError):
    """The request was not carried out. A later attempt may succeed."""


class OutcomeUnknown(StoreError):
    """The request was sent and no response came. It may have been carried out, or may be later."""


class LeaseGone(StoreError):
    """The lease has ended: expired, revoked, or its holder proved dead. It cannot be renewed."""


class TicketGone(StoreError):
    """The ticket is no longer in the line."""


class StoreUnusable(StoreError):
    """The store cannot be used in its present state. Retrying will not help."""


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error; empty if nothing known is similar.

    >>> did_you_mean("ectd", ["etcd", "consul"]), did_you_mean("x", ["etcd"])
    (' (did you mean etcd?)', '')
    """
    from difflib import get_close_matches

    similar = get_close_matches(text, list(known), 1)
    return f" (did you mean {similar[0]}?)" if similar else ""


def describe(error: BaseException, how: Callable[[BaseException], str] = repr) -> str:
    """An exception of a user's code as text, also if its own `__repr__` or `__str__` raises.

    >>> describe(ValueError("x")), describe(ValueError("x"), str)
    ("ValueError('x')", 'x')
    """
    try:
        return how(error)
    except Exception:  # noqa: BLE001 - whatever it is, the first error is to be reported
        return type(error).__name__
