"""The arithmetic of leases: the leader has stopped before the store forgets it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from doyen.errors import ConfigError
from doyen.lease.timing import DEFAULT_TTL_S, Timing

ttls = st.floats(0.05, 3600.0)
fractions = st.floats(0.0, 1.0)


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    """Any times that are accepted, those that leave hardly any margin included."""
    ttl_s = draw(ttls)
    rest: dict[str, Any] = {
        "ttl_s": ttl_s,
        "drift": draw(st.floats(0.0, 0.2)),
        "renew_every_s": ttl_s * draw(st.floats(0.01, 0.5)),
        "renew_jitter": draw(st.floats(0.0, 0.5)),
        "request_timeout_s": ttl_s * draw(st.floats(0.01, 1 / 6)),
    }
    try:
        widest = Timing(stop_budget_s=0.0, **rest)
        return Timing(
            stop_budget_s=widest.margin_s * draw(st.sampled_from([0.0, 0.5, 0.999])), **rest
        )
    except ConfigError:
        assume(False)
        raise


def test_defaults_are_as_documented() -> None:
    timing = Timing()
    assert timing.ttl_s == DEFAULT_TTL_S == 5.0
    assert timing.drift == 0.005
    assert timing.renew_jitter == 0.2
    assert timing.stop_budget_s == pytest.approx(5 / 6)
    assert timing.renew_every_s == pytest.approx(5 / 3)
    assert timing.request_timeout_s == pytest.approx(5 / 6)
    assert timing.validity_s == pytest.approx(5 * 0.995 - 5 / 6)


@given(ttls)
def test_the_defaults_are_accepted_for_every_ttl(ttl_s: float) -> None:
    timing = Timing(ttl_s=ttl_s)
    assert timing.margin_s > 0
    assert timing.validity_s < ttl_s


@given(
    timings(),
    st.floats(0.0, 1e6),
    st.floats(0.0, 10.0),
    st.lists(st.tuples(fractions, st.floats(0.0, 3.0)), min_size=1, max_size=6),
)
def test_the_body_has_its_stop_budget_before_the_store_forgets(
    timing: Timing, sent_at: float, delay_s: float, weather: list[tuple[float, float]]
) -> None:
    """However the leader's clock runs against the store's, within the drift, and however late the
    request arrives: from the leader's deadline to the store's expiry there is the stop budget.

    `weather` is stretches of the store's time, each with the leader's speed over it: from
    1 - drift (slowest allowed) upwards. The last stretch goes on.
    """
    leader_at = sent_at + delay_s  # the leader's clock when the store begins to count
    store_passed = 0.0
    for number, (share, faster) in enumerate(weather):
        speed = 1 - timing.drift * share if faster < 1.5 else 1 + faster
        last = number == len(weather) - 1
        stretch = (timing.ttl_s - store_passed) if last else (timing.ttl_s - store_passed) * share
        leader_at += stretch * speed
        store_passed += stretch
    assert store_passed == pytest.approx(timing.ttl_s)
    expiry_on_the_leaders_clock = leader_at
    grain = 1e-9 * (1 + abs(leader_at))
    assert timing.valid_until(sent_at) + timing.stop_budget_s <= expiry_on_the_leaders_clock + grain


@given(timings(), st.floats(0.0, 1e6))
def test_one_lost_renewal_costs_no_leadership(timing: Timing, sent_at: float) -> None:
    """A renewal as late as jitter makes it, lost, tried again after the pause, and answered only
    just within the request timeout is confirmed before the deadline."""
    lost_at = timing.renew_at(sent_at, 1.0) + timing.request_timeout_s
    confirmed_at = lost_at + timing.retry_every_s + timing.request_timeout_s
    assert confirmed_at < timing.valid_until(sent_at) + 1e-9 * (1 + sent_at)


@given(timings(), st.floats(0.0, 1e6), st.floats(-1.0, 1.0))
def test_renewals_are_spread_around_their_time(
    timing: Timing, sent_at: float, spread: float
) -> None:
    after_s = timing.renew_at(sent_at, spread) - sent_at
    grain = 1e-9 * (1 + sent_at)
    assert after_s >= timing.renew_every_s * (1 - timing.renew_jitter) - grain
    assert after_s <= timing.renew_every_s * (1 + timing.renew_jitter) + grain


@given(ttls, st.floats(0.0, 0.5), fractions, fractions, st.floats(0.0, 0.5), fractions)
def test_what_is_accepted_has_a_margin_and_what_has_none_is_refused_with_the_number(
    ttl_s: float, drift: float, stop: float, renew: float, jitter: float, timeout: float
) -> None:
    values: dict[str, Any] = {
        "ttl_s": ttl_s,
        "drift": drift,
        "stop_budget_s": ttl_s * stop,
        "renew_every_s": max(ttl_s * renew, 1e-3),
        "renew_jitter": jitter,
        "request_timeout_s": max(ttl_s / 6 * timeout, 1e-3),
    }
    try:
        assert Timing(**values).margin_s > 0
    except ConfigError as error:
        found = re.search(r"safety margin of (-?[\d.]+) s", str(error))
        assert found is not None
        assert float(found[1]) <= 0


def test_a_refusal_names_the_numbers_and_the_remedy() -> None:
    with pytest.raises(ConfigError) as refused:
        Timing(ttl_s=6.0, stop_budget_s=2.0)
    words = str(refused.value)
    assert "safety margin of -0." in words
    assert "ttl of 6 s" in words
    assert "2.000 s to the stop budget" in words
    assert "raise ttl_s or lower stop_budget_s" in words


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttl_s", 0.0),
        ("ttl_s", -1.0),
        ("ttl_s", float("inf")),
        ("ttl_s", float("nan")),
        ("drift", -0.01),
        ("drift", 0.6),
        ("drift", float("nan")),
        ("stop_budget_s", -2.0),
        ("stop_budget_s", 7.0),
        ("renew_every_s", 0.0),
        ("renew_every_s", 7.0),
        ("renew_jitter", 0.7),
        ("request_timeout_s", 0.0),
        ("request_timeout_s", 1.1),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        values: dict[str, Any] = {"ttl_s": 6.0, name: value}
        Timing(**values)


def test_a_timing_cannot_be_changed() -> None:
    timing = Timing()
    with pytest.raises(dataclasses.FrozenInstanceError):
        timing.ttl_s = 9.0  # type: ignore[misc]


@given(ttls, st.floats(1.0, 3.0), st.floats(0.0, 10.0))
def test_the_worst_failover_is_no_better_than_the_ttl(
    ttl_s: float, factor: float, notice_s: float
) -> None:
    timing = Timing(ttl_s=ttl_s)
    worst_s = timing.worst_failover_s(expiry_factor=factor, notice_s=notice_s)
    assert worst_s >= ttl_s * factor + notice_s
    assert worst_s >= timing.worst_failover_s()


def test_where_a_renewal_proves_only_the_one_before_it_they_come_twice_as_often() -> None:
    """The margin still covers a renewal that is sent late and lost once."""
    timing = Timing(ttl_s=6.0, renewals_lag=True)
    assert timing.renew_every_s == 1.0
    assert timing.margin_s > 0
