"""Leader election for Python: one leader at a time, and everyone knows who.

    async with doyen.connect("sqlite:///var/lib/app/doyen.db") as session:
        async with session.campaign("billing", name="server1") as term:
            await work(term.token)

Start with the README; what is guaranteed, and what is not, is in docs/guarantees.md.
"""

from doyen.blocking import BlockingSession, connect_blocking, while_leader
from doyen.errors import (
    AlreadyCampaigning,
    ConfigError,
    DoyenError,
    LeadershipLost,
    NotElected,
    SessionClosed,
    StaleToken,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
)
from doyen.model import Leader
from doyen.session import Session, connect
from doyen.term import Term, TermState

__version__ = "0.1.0"

__all__ = [
    "AlreadyCampaigning",
    "BlockingSession",
    "ConfigError",
    "DoyenError",
    "Leader",
    "LeadershipLost",
    "NotElected",
    "Session",
    "SessionClosed",
    "StaleToken",
    "StoreError",
    "StoreUnavailable",
    "StoreUnusable",
    "Term",
    "TermState",
    "connect",
    "connect_blocking",
    "while_leader",
]
