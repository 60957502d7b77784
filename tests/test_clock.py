"""The clocks: boot time for decisions, a virtual one for tests."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doyen.lease.clock import Clock, SystemClock, VirtualClock, boot_id

seconds = st.floats(0.0, 1e6)


@pytest.mark.parametrize("clock", [SystemClock(), VirtualClock()])
def test_each_is_a_clock(clock: Clock) -> None:
    assert isinstance(clock.now(), float)
    assert isinstance(clock.wall(), float)


def test_the_system_clock_is_boot_time_where_there_is_one() -> None:
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    before = time.monotonic() if boottime is None else time.clock_gettime(boottime)
    now = SystemClock().now()
    after = time.monotonic() if boottime is None else time.clock_gettime(boottime)
    assert before <= now <= after


def test_the_system_clock_never_goes_back() -> None:
    now = SystemClock().now
    readings = [now() for _ in range(10_000)]
    assert readings == sorted(readings)


def test_monotonic_time_stands_in_where_there_is_no_boot_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert SystemClock().now is time.monotonic


@given(st.lists(st.tuples(st.sampled_from(["advance", "suspend", "step_wall"]), seconds)))
def test_only_a_step_parts_wall_time_from_boot_time_and_only_a_suspend_parts_timers_from_it(
    moves: list[tuple[str, float]],
) -> None:
    clock = VirtualClock(wall=0.0)
    passed = {"advance": 0.0, "suspend": 0.0, "step_wall": 0.0}
    for move, by in moves:
        before = clock.now()
        getattr(clock, move)(by)
        passed[move] += by
        assert clock.now() >= before
    assert clock.monotonic() == pytest.approx(passed["advance"])
    assert clock.now() == pytest.approx(passed["advance"] + passed["suspend"])
    assert clock.wall() == pytest.approx(sum(passed.values()))


@pytest.mark.parametrize("move", ["advance", "suspend"])
def test_time_does_not_run_backwards(move: str) -> None:
    with pytest.raises(ValueError, match="backwards"):
        getattr(VirtualClock(), move)(-1.0)


def test_wall_time_may_go_back() -> None:
    clock = VirtualClock()
    before = clock.now(), clock.wall()
    clock.step_wall(-3600.0)
    assert (clock.now(), clock.wall()) == (before[0], before[1] - 3600.0)


def test_the_boot_has_one_name() -> None:
    assert boot_id() == boot_id()
    boot_id.cache_clear()
    assert boot_id()
