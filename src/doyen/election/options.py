"""The options of sessions and campaigns, checked and completed before anything is sent."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from typing import Literal, Protocol, TypedDict, get_args

from doyen._values import Value, field
from doyen.errors import ConfigError, did_you_mean
from doyen.events import Sink
from doyen.lease.timing import Timing
from doyen.model import Claim, Kind, Meta, leader_key

Recipe = Literal["line", "race"]
MAX_SLOTS = 1000
"""The most slots of a semaphore. The first candidate in line lists them all."""
WardenForm = Literal["process", "host", "auto", "none"]
LEAST_FROZEN_S = 0.05
OnOverrun = Literal["report", "exit"]


def default_name() -> str:
    """The name of a candidate for which none was given."""
    return f"{socket.gethostname()}-{os.getpid()}"


def meta_of(meta: Meta) -> Meta:
    """A copy of `meta`. Raises `ConfigError` if it is not a mapping."""
    try:
        return dict(meta)
    except (TypeError, ValueError):
        raise ConfigError(f"meta maps names to values, not {meta!r}") from None


class SessionSettings(Value):
    """The options of a session. None stands for the default of the store or of the timing."""

    url: str
    ttl_s: float | None = None
    stop_budget_s: float | None = None
    drift: float | None = None
    audit: str | os.PathLike[str] | None = None
    sinks: tuple[Sink, ...] = ()
    renew_every_s: float | None = None
    request_timeout_s: float | None = None
    create: bool = True
    """Whether to create the store if it does not exist."""
    wait_s: float = 0.0
    """How long to wait for a store that cannot be reached when the session is opened."""
    release_at_exit: bool = True
    """Whether a session that is still open is released when the process ends."""
    origin: str = "connect"
    """Where the store was named; empty if it is the default."""
    warden: WardenForm | None = None
    settle_s: float | None = None
    frozen_after_s: float | None = None

    def __post_init__(self) -> None:
        wait_s: object = self.wait_s
        if not isinstance(wait_s, int | float) or not wait_s >= 0:
            raise ConfigError(f"wait_s is 0 s or more, not {self.wait_s!r}")
        if self.warden not in (None, *get_args(WardenForm)):
            raise ConfigError(
                f"warden is 'process', 'host', 'auto' or 'none', not {self.warden!r}; by default,"
                " the warden of the host is used if there is one"
            )
        for option, least in (("settle_s", 0.0), ("frozen_after_s", LEAST_FROZEN_S)):
            seconds = getattr(self, option)
            if seconds is None:
                continue
            if not isinstance(seconds, int | float) or not least <= seconds < math.inf:
                raise ConfigError(f"{option} is {least:g} s or more, not {seconds!r}")
        if self.frozen_after_s is not None and self.warden == "none":
            raise ConfigError("frozen_after_s needs a warden: leave out warden='none'")

    def timing(self, ttl_s: float, *, renewals_lag: bool = False) -> Timing:
        """The timing of a lease of `ttl_s`; raises `ConfigError` if it leaves no margin."""
        options = {
            "stop_budget_s": self.stop_budget_s,
            "drift": self.drift,
            "renew_every_s": self.renew_every_s,
            "request_timeout_s": self.request_timeout_s,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return Timing(ttl_s=ttl_s, renewals_lag=renewals_lag, **given)


class Eligibility(Protocol):
    """Decides whether a candidate may lead; a `GroupMember` does."""

    @property
    def ineligible_because(self) -> str:
        """Why it must not lead; empty if it may."""
        ...

    def on_eligibility(self, owner: object, listener: Callable[[], None]) -> None:
        """Have `listener` called on doyen's loop when that may have changed."""
        ...

    def forget(self, owner: object) -> None:
        """Remove the listener of `owner`."""
        ...


class CampaignOptions(TypedDict, total=False):
    """The options of a campaign."""

    name: str
    """Name of the candidate, shown to others. Default: host name and process id."""
    meta: Meta
    """Information about the candidate for others to read, in the line and as leader."""
    wait_s: float | None
    """How long to wait to be elected before `NotElected` is raised. None waits without limit."""
    priority: int
    """Candidates of higher priority are further ahead in the line."""
    preempt: bool
    """Order a leader of lower priority to hand over, instead of waiting for its term to end."""
    cooldown_s: float
    """With `preempt`: how long this candidate must have known a leader before it preempts it."""
    recipe: Recipe
    """"line" (fair, one candidate wakes per change) or "race" (every candidate tries)."""
    stall_after_s: float | None
    """Lose the term if its work does not call `term.beat()` at least this often."""
    on_overrun: OnOverrun
    """What to do if a body has not ended within its stop budget after a loss: "report" emits
    an event, "exit" ends the process."""
    member: Eligibility
    """The membership of this process in a group. While the member is unhealthy or draining, the
    candidate leaves the line, and a leader resigns."""
    trail: bool
    """Record the terms in the store, for `Session.history`. Default True. Terms of locks and
    semaphores are not recorded."""


class CampaignIdentity(TypedDict):
    """The fields of `doyen.events.CampaignEvent`."""

    election: str
    election_kind: Kind
    name: str


class CampaignSettings(Value, kw_only=True):
    """The options of a campaign, checked and completed; see `CampaignOptions`."""

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
    member: Eligibility | None = None
    trail: bool = True
    slots: int = 1
    """How many may hold it at a time: more than one for a semaphore only."""

    @classmethod
    def of(
        cls, election: str, options: CampaignOptions, *, kind: Kind = "elections", slots: int = 1
    ) -> CampaignSettings:
        """The settings from the options that a caller gave. The error for a misspelt option
        suggests a known one."""
        known = CampaignOptions.__optional_keys__
        for name in options:
            if name not in known:
                raise TypeError(f"a campaign has no option {name!r}{did_you_mean(name, known)}")
        return cls(election=election, kind=kind, slots=slots, **options)

    @property
    def identity(self) -> CampaignIdentity:
        """What the events of the campaign have in common."""
        return {"election": self.election, "election_kind": self.kind, "name": self.name}

    def __post_init__(self) -> None:
        leader_key(f"{self.election}/0" if self.kind == "semaphores" else self.election, self.kind)
        object.__setattr__(self, "name", self.name or default_name())
        object.__setattr__(self, "meta", meta_of(self.meta))
        # As long as the record will be: with an attempt, a time and a ttl.
        Claim(self.name, "f" * 24, self.meta, since=1.1e9 / 7, ttl_s=1.1e4 / 7).encode()
        if self.recipe not in ("line", "race"):
            raise ConfigError(f"recipe is 'line' or 'race', not {self.recipe!r}")
        if self.on_overrun not in ("report", "exit"):
            raise ConfigError(f"on_overrun is 'report' or 'exit', not {self.on_overrun!r}")
        slots: object = self.slots
        if type(slots) is not int or not 1 <= slots <= MAX_SLOTS:
            raise ConfigError(f"a semaphore has 1 to {MAX_SLOTS} slots, not {self.slots!r}")
        if self.kind == "semaphores" and (self.recipe != "line" or self.preempt):
            raise ConfigError("a semaphore has a line: recipe and preempt are for elections")
        priority: object = self.priority
        if not isinstance(priority, int) or not -(2**31) < priority < 2**31:
            raise ConfigError(f"priority is a 32-bit integer, not {self.priority!r}")
        for option, least in (("wait_s", 0.0), ("stall_after_s", 0.001), ("cooldown_s", 0.0)):
            seconds = getattr(self, option)
            if seconds is None and option != "cooldown_s":
                continue
            if not isinstance(seconds, int | float) or not least <= seconds:
                raise ConfigError(f"{option} is {least:g} s or more, not {seconds!r}")
        if self.preempt and self.recipe == "race":
            raise ConfigError(
                "preempt=True requires recipe='line': the recipe 'race' ignores priorities"
            )
