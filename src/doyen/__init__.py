"""Leader election for Python: one leader at a time, and everyone knows who.

    async with doyen.connect("sqlite:///var/lib/app/doyen.db") as session:
        async with session.campaign("billing", name="server1") as term:
            await work(term.token)

Start with the README; what is guaranteed, and what is not, is in docs/guarantees.md.

Importing this module imports nothing else: each name is fetched from its home when first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from doyen.blocking import BlockingSession, connect_blocking, while_leader
    from doyen.errors import (
        AlreadyCampaigning,
        BadDocument,
        CommandFailed,
        ConfigError,
        Conflict,
        DoyenError,
        LeadershipLost,
        NameTaken,
        NotApplied,
        NotArrived,
        NotElected,
        OrderFailed,
        OutcomeUnknown,
        SessionClosed,
        StaleMap,
        StaleToken,
        StoreError,
        StoreUnavailable,
        StoreUnusable,
    )
    from doyen.manage.config import ConfigDocument, Missed, Regressed
    from doyen.manage.config_session import (
        BlockingConfig,
        BlockingSubscription,
        Config,
        Subscription,
    )
    from doyen.manage.inventory import Inventory
    from doyen.manage.shards.routing import ShardMap
    from doyen.manage.shards.slots import ShardTerm
    from doyen.manage.shards.spec import ShardSpec
    from doyen.model import (
        Candidate,
        Leader,
        Line,
        Member,
        MemberChange,
        PastTerm,
        Published,
        Reachable,
        Unreachable,
    )
    from doyen.quorum.node import Node, StateMachine
    from doyen.session import Session, connect
    from doyen.term import Term, TermState

__version__ = "0.1.0"

__all__ = [
    "AlreadyCampaigning",
    "BadDocument",
    "BlockingConfig",
    "BlockingSession",
    "BlockingSubscription",
    "Candidate",
    "CommandFailed",
    "Config",
    "ConfigDocument",
    "ConfigError",
    "Conflict",
    "DoyenError",
    "Inventory",
    "Leader",
    "LeadershipLost",
    "Line",
    "Member",
    "MemberChange",
    "Missed",
    "NameTaken",
    "Node",
    "NotApplied",
    "NotArrived",
    "NotElected",
    "OrderFailed",
    "OutcomeUnknown",
    "PastTerm",
    "Published",
    "Reachable",
    "Regressed",
    "Session",
    "SessionClosed",
    "ShardMap",
    "ShardSpec",
    "ShardTerm",
    "StaleMap",
    "StaleToken",
    "StateMachine",
    "StoreError",
    "StoreUnavailable",
    "StoreUnusable",
    "Subscription",
    "Term",
    "TermState",
    "Unreachable",
    "connect",
    "connect_blocking",
    "while_leader",
]

_HOMES = (
    "blocking",
    "session",
    "term",
    "model",
    "errors",
    "manage.config",
    "manage.config_session",
    "manage.inventory",
    "manage.shards.routing",
    "manage.shards.slots",
    "manage.shards.spec",
    "quorum.node",
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in __all__:
        from importlib import import_module

        for home in _HOMES:
            module = import_module(f"doyen.{home}")
            if name in module.__all__:
                value: object = getattr(module, name)
                globals()[name] = value
                return value
    raise AttributeError(f"module 'doyen' has no attribute {name!r}")
