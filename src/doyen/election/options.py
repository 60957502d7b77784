"""What a campaign asks for: the options, checked and completed before anything is sent."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from doyen.errors import ConfigError
from doyen.model import Claim, Kind, Meta, leader_key

__all__ = ["CampaignOptions", "CampaignSettings", "OnOverrun", "Recipe", "default_name"]

Recipe = Literal["line", "race"]
OnOverrun = Literal["report", "exit"]


def default_name() -> str:
    """Who this process is, if nobody says."""
    return f"{socket.gethostname()}-{os.getpid()}"


class CampaignOptions(TypedDict, total=False):
    """What a campaign may ask for."""

    name: str
    """Who stands; shown to others. Default: host name and process id."""
    meta: Meta
    """What others are told about the candidate, and about the leader."""
    wait_s: float | None
    """Bounds the waiting only, and raises `NotElected`. None waits for ever."""
    priority: int
    """Candidates of higher priority stand further ahead."""
    preempt: bool
    """Do not wait for a leader of lower priority to end: order it to hand over."""
    cooldown_s: float
    """With `preempt`: leave a leader alone until this candidate has known it for so long."""
    recipe: Recipe
    """"line" (fair, one candidate wakes per change) or "race" (everyone tries)."""
    stall_after_s: float | None
    """Lose the term if its work does not call `term.beat()` at least so often."""
    on_overrun: OnOverrun
    """What follows if a body has not ended within its stop budget after a loss: "report" emits
    an event, "exit" ends the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSettings:
    """What a campaign asks for, checked and completed; see `CampaignOptions`."""

    election: str
    kind: Kind = "elections"
    name: str = ""
    meta: Meta = field(default_factory=dict)
    wait_s: float | None = None
    priority: int = 0
    preempt: bool = False
    cooldown_s: float = 60.0
    recipe: Recipe = "line"
    stall_after_s: float | None = None
    on_overrun: OnOverrun = "report"

    def __post_init__(self) -> None:
        leader_key(self.election, self.kind)
        object.__setattr__(self, "name", self.name or default_name())
        try:
            object.__setattr__(self, "meta", dict(self.meta))
        except (TypeError, ValueError):
            raise ConfigError(f"meta maps names to values, not {self.meta!r}") from None
        Claim(self.name, "", self.meta).encode()
        if self.recipe not in ("line", "race"):
            raise ConfigError(f"recipe is 'line' or 'race', not {self.recipe!r}")
        if self.on_overrun not in ("report", "exit"):
            raise ConfigError(f"on_overrun is 'report' or 'exit', not {self.on_overrun!r}")
        priority: object = self.priority
        if not isinstance(priority, int) or not -(2**31) < priority < 2**31:
            raise ConfigError(f"priority is a whole number of 32 bits, not {self.priority!r}")
        for option, least in (("wait_s", 0.0), ("stall_after_s", 0.001), ("cooldown_s", 0.0)):
            seconds = getattr(self, option)
            if seconds is None and option != "cooldown_s":
                continue
            if not isinstance(seconds, int | float) or not least <= seconds:
                raise ConfigError(f"{option} is {least:g} s or more, not {seconds!r}")
        if self.preempt and self.recipe == "race":
            raise ConfigError("preempt=True goes with recipe='line': a race knows no priority")
