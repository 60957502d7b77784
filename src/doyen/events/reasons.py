"""Why a term was lost: the texts, and the cause that each of them states.

A reason is a text for people. It stands in events, audit logs and the trails of elections, also in
those that an earlier release wrote. Programs act on its cause, and read it only here.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["EXPIRED", "INELIGIBLE", "REMOVED", "LossCause", "loss_cause", "ordered", "stalled"]

LossCause = Literal[
    "expired", "stalled", "removed", "ineligible", "transferred", "ordered", "ended"
]
"""`expired`: no renewal was confirmed in time; `stalled`: the work did not report progress;
`removed`: the record was removed; `ineligible`: the member must not lead; `transferred`: it was
ordered to resign in favour of another; `ordered`: to resign; `ended`: the store or another process
ended the lease."""

EXPIRED = "no renewal was confirmed in time"
REMOVED = "its record was removed from the store by another process"
INELIGIBLE = "the member "
"""How the reasons of `Registration.ineligible_because` begin."""
_ORDERED = " ordered it to resign"
_FAVOUR = " in favour of another"


def stalled(after_s: float) -> str:
    return f"the work has not called term.beat() for {after_s:g} s"


def ordered(by: str, *, transfer: bool) -> str:
    return f"{by!r}{_ORDERED}{_FAVOUR if transfer else ''}"


def loss_cause(reason: str) -> LossCause:
    """The cause that a reason states.

    >>> loss_cause(EXPIRED), loss_cause(stalled(3)), loss_cause(REMOVED)
    ('expired', 'stalled', 'removed')
    >>> loss_cause(ordered("ops", transfer=False)), loss_cause(ordered("ops", transfer=True))
    ('ordered', 'transferred')
    >>> loss_cause("the member 'a' of 'web' is unhealthy: 'ops' ordered it to resign")
    'ineligible'
    """
    beginnings: dict[str, LossCause] = {
        "no renewal was confirmed": "expired",
        "the work has not called term.beat()": "stalled",
        "its record was removed": "removed",
        INELIGIBLE: "ineligible",
    }
    for beginning, cause in beginnings.items():
        if reason.startswith(beginning):
            return cause
    if _ORDERED + _FAVOUR in reason:
        return "transferred"
    return "ordered" if _ORDERED in reason else "ended"
