"""Every exception doyen raises, in one tree.

    DoyenError
    ├── ConfigError            a setting, URL or name that cannot work; nothing was started
    ├── SessionClosed          the session was closed, or belongs to another process (fork)
    ├── NotElected             `wait_s` passed, or the campaign could not be entered
    │   └── AlreadyCampaigning this very scope leads the election already: waiting would deadlock
    ├── OrderFailed            a leader was not made to let go, or not in favour of the heir
    ├── CommandFailed          a state machine raised an error of its own, on every node alike
    ├── LeadershipLost         the term ended before its body did
    ├── StaleToken             a fenced resource refused a write of an earlier term
    └── StoreError             the store, as its adapter translated it
        ├── StoreUnavailable   nothing was done; trying again later may work
        ├── OutcomeUnknown     the request was sent and no answer came: it may have been done
        ├── LeaseGone          the lease has ended; everything bound to it is void
        ├── TicketGone         the ticket is no longer in the line
        └── StoreUnusable      trying again will not help: wrong file, newer schema, no permission

Messages name the cause and the remedy. Adapters translate their client's errors once, at their
edge, and keep the original as `__cause__`. This module imports nothing.
"""

from __future__ import annotations

__all__ = [
    "AlreadyCampaigning",
    "CommandFailed",
    "ConfigError",
    "DoyenError",
    "LeadershipLost",
    "LeaseGone",
    "NotElected",
    "OrderFailed",
    "OutcomeUnknown",
    "SessionClosed",
    "StaleToken",
    "StoreError",
    "StoreUnavailable",
    "StoreUnusable",
    "TicketGone",
]


class DoyenError(Exception):
    """Base of everything doyen raises."""


class ConfigError(DoyenError, ValueError):
    """A setting, URL or name that cannot work."""


class SessionClosed(DoyenError):
    """The session has been closed, or was opened by another process before a fork."""


class NotElected(DoyenError):
    """The campaign ended without leadership."""


class AlreadyCampaigning(NotElected):
    """The calling scope already leads this election on this session; waiting would deadlock."""


class OrderFailed(DoyenError):
    """A leader was not made to let go in time, or not in favour of the heir that was named."""


class CommandFailed(DoyenError):
    """What was proposed was agreed on, and the state machine raised this, on every node alike."""


class LeadershipLost(DoyenError):
    """The term ended before its body did. Work after `term.valid` turned false must not count."""


class StaleToken(DoyenError):
    """A fenced resource has already seen a later term and refused this one."""


class StoreError(DoyenError):
    """The store failed, in the words of its adapter."""


class StoreUnavailable(StoreError):
    """The request was not carried out. Trying again later may work."""


class OutcomeUnknown(StoreError):
    """The request was sent and no answer came. It may have been carried out."""


class LeaseGone(StoreError):
    """The lease has ended (expired, revoked or proved dead). It never comes back."""


class TicketGone(StoreError):
    """The ticket is no longer in the line."""


class StoreUnusable(StoreError):
    """The store cannot be used as it is, and trying again will not change that."""
