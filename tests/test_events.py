"""Telemetry reaches every sink, in order, and can never hurt the one who emits."""

from __future__ import annotations

import logging
import os

import pytest

from doyen.clock import VirtualClock
from doyen.events import Elected, Event, Lost, Record, Renewed, Telemetry

ELECTED = Elected(election="billing", name="server1", token=7, lease="l", valid_until=5.0)


def test_events_are_stamped_and_handed_on_in_order() -> None:
    clock = VirtualClock(wall=1e9)
    first: list[Record] = []
    second: list[Record] = []
    telemetry = Telemetry(clock, "s1", [first.append, second.append])
    telemetry.emit(ELECTED)
    clock.advance(2.0)
    telemetry.emit(Renewed(lease="l", valid_until=7.0))
    assert first == second
    assert [record.event.kind for record in first] == ["elected", "renewed"]
    assert first[1] == Record(Renewed(lease="l", valid_until=7.0), 2.0, 1e9 + 2, "s1", os.getpid())


def test_a_record_is_the_event_with_its_kind() -> None:
    assert Record(ELECTED, 0.0, 0.0, "s", 1).fields() == {
        "event": "elected",
        "election": "billing",
        "name": "server1",
        "token": 7,
        "lease": "l",
        "valid_until": 5.0,
    }


def test_a_sink_that_raises_is_reported_and_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_record: Record) -> None:
        raise RuntimeError("no")

    reached: list[Record] = []
    Telemetry(VirtualClock(), "s", [broken, reached.append]).emit(ELECTED)
    assert len(reached) == 1
    assert "a telemetry sink failed on elected" in caplog.text
    assert "RuntimeError: no" in caplog.text


@pytest.mark.parametrize(
    ("event", "level", "words"),
    [
        (ELECTED, logging.INFO, "elected election=billing name=server1 token=7"),
        (Renewed(lease="l", valid_until=7.0), logging.DEBUG, "renewed lease=l valid_until=7.0"),
        (
            Lost(election="e", name="n", token=1, lease="l", reason="late", ended_at=1.0),
            logging.WARNING,
            "lost election=e",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Event) else "",
)
def test_every_event_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture, event: Event, level: int, words: str
) -> None:
    caplog.set_level(logging.DEBUG, "doyen")
    Telemetry(VirtualClock(), "s").emit(event)
    (line,) = caplog.records
    assert (line.name, line.levelno) == ("doyen", level)
    assert line.getMessage().startswith(words)
    assert line.__dict__["doyen"].event is event


def test_a_level_that_is_off_costs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "doyen")
    Telemetry(VirtualClock(), "s").emit(ELECTED)
    assert not caplog.records
