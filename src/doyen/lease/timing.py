"""Lease arithmetic, as pure functions of one frozen value.

    sent            renew (1/3 ± 20 %)                valid_until            expiry at the store
    |------------------|---------------------------------|----- stop budget -----|
    0                                                                           ttl

Safety rests on one inequality. A leader counts its lease from the instant at which it *sent* the
request, which is never later than the instant from which the store counts. It allows for the two
clocks running at different speeds (`drift`), and it stops `stop_budget_s` early, so that its work
has ended before the store can give the record to another candidate.

`margin_s` is what is left of the validity in an ordinary worst case: the renewal is sent as late as
jitter allows, is lost, and its retry takes the full request timeout. A configuration whose margin
is not positive would lose leadership without any failure, so it is refused.

Imports the standard library, values and the errors only. Time and random numbers are arguments.
"""

from __future__ import annotations

import math

from doyen._values import Value
from doyen.errors import ConfigError

__all__ = ["DEFAULT_TTL_S", "Timing"]

DEFAULT_TTL_S = 5.0


class Timing(Value, kw_only=True):
    """The times of one lease.

    >>> timing = Timing(ttl_s=6.0)
    >>> timing.stop_budget_s, timing.renew_every_s, timing.request_timeout_s
    (1.0, 2.0, 1.0)
    >>> timing.valid_until(100.0)
    104.97
    >>> round(timing.margin_s, 2)
    0.32
    """

    ttl_s: float = DEFAULT_TTL_S
    """How long the store keeps the lease after a renewal. Default 5 s."""
    drift: float = 0.005
    """Fraction by which the leader's clock may run slower than the store's. Default 0.5 %."""
    stop_budget_s: float = math.nan
    """Time the body has to end between loss and expiry. Default ttl / 6."""
    renew_every_s: float = math.nan
    """Time between renewals. Default ttl / 3."""
    renew_jitter: float = 0.2
    """Renewals are spread by this fraction either way. Default 20 %."""
    renewals_lag: bool = False
    """The store's confirmation of a renewal proves only the one before it. Validity is counted
    from that one then, and renewals are sent twice as often."""
    request_timeout_s: float = math.nan
    """When a store call without a response is given up. Default ttl / 6, and never more."""

    def __post_init__(self) -> None:
        for name in self._specs:
            given: object = getattr(self, name)
            if not isinstance(given, int | float):
                raise ConfigError(f"{name} is a number, not {given!r}")
        if not 0 < self.ttl_s < float("inf"):
            raise ConfigError(f"ttl_s must be positive, not {self.ttl_s}")
        renewals = 6 if self.renewals_lag else 3
        shares = {"stop_budget_s": 6, "renew_every_s": renewals, "request_timeout_s": 6}
        for name, share in shares.items():
            if math.isnan(getattr(self, name)):
                object.__setattr__(self, name, self.ttl_s / share)
        for name, low, high in (
            ("drift", 0.0, 0.5),
            ("renew_jitter", 0.0, 0.5),
            ("stop_budget_s", 0.0, self.ttl_s),
            ("renew_every_s", 1e-6, self.ttl_s),
            ("request_timeout_s", 1e-6, self.ttl_s / 6 + 1e-9),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be between {low:g} and {high:g}, not {value:g}")
        if self.margin_s <= 0:
            raise ConfigError(
                f"these times leave a safety margin of {self.margin_s:.3f} s, which must be above"
                f" 0: of a ttl of {self.ttl_s:g} s, {self.ttl_s * self.drift:.3f} s go to drift,"
                f" {self.stop_budget_s:.3f} s to the stop budget and"
                f" {self._renewal_bound_s:.3f} s to a renewal that is lost once;"
                " raise ttl_s or lower stop_budget_s"
            )

    @property
    def validity_s(self) -> float:
        """How long a confirmed renewal is valid, from the instant at which it was sent."""
        return self.ttl_s * (1 - self.drift) - self.stop_budget_s

    @property
    def _renewal_bound_s(self) -> float:
        late_s = self.renew_every_s * (1 + self.renew_jitter) * (2 if self.renewals_lag else 1)
        return late_s + self.request_timeout_s + self.retry_every_s + self.request_timeout_s

    @property
    def margin_s(self) -> float:
        """What remains of the validity after a late renewal that is lost once."""
        return self.validity_s - self._renewal_bound_s

    def valid_until(self, sent_at: float) -> float:
        """The leader's own deadline after a grant or renewal sent at `sent_at`."""
        return sent_at + self.validity_s

    def renew_at(self, sent_at: float, spread: float) -> float:
        """When to send the next renewal. `spread` is a random number in [-1, 1]."""
        return sent_at + self.renew_every_s * (1 + self.renew_jitter * spread)

    @property
    def retry_every_s(self) -> float:
        """Pause before a failed renewal or request is retried."""
        return self.request_timeout_s / 4

    def retry_pause_s(self, spread: float) -> float:
        """How long to wait before a failed request is retried. `spread` is a random number in
        [-1, 1]: processes that lost the store at the same instant should not retry at the same."""
        return self.retry_every_s * (1 + spread / 2)

    def worst_failover_s(self, *, expiry_factor: float = 1.0, notice_s: float = 0.0) -> float:
        """The longest time from a leader's last action to a successor that holds the record.

        The leader may have renewed just before; the store may keep the lease `expiry_factor`
        times its ttl (Consul: up to 2) and takes `notice_s` to notify; and the successor's request
        may be lost once.
        """
        expiry_s = self.ttl_s * expiry_factor * (1 + self.drift)
        return expiry_s + notice_s + 2 * self.request_timeout_s + self.retry_pause_s(1.0)
