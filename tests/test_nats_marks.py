"""How long a renewal has been standing, by positions of the stream: never too long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from doyen.stores.nats.marks import Marks


def test_one_mark_dates_every_lease_that_was_silent_since() -> None:
    marks = Marks()
    marks.note("server", 100, 10.0)
    marks.note("server", 110, 12.0)
    assert [marks.standing_s("server", each, 15.0) for each in (1, 100, 101, 110, 111)] == [
        5.0,
        5.0,
        3.0,
        3.0,
        0.0,
    ]


def test_marks_of_another_incarnation_or_of_a_stream_that_went_back_are_void() -> None:
    marks = Marks()
    marks.note("first", 100, 10.0)
    assert marks.standing_s("second", 5, 15.0) == 0.0
    marks.note("second", 100, 20.0)
    assert marks.standing_s("second", 5, 21.0) == 1.0
    marks.note("second", 99, 25.0)
    assert marks.standing_s("second", 5, 26.0) == 1.0


@given(st.lists(st.tuples(st.sampled_from(["write", "mark", "restart"]), st.floats(0, 3))))
def test_nothing_stands_for_longer_than_it_has_been_written(
    script: list[tuple[str, float]],
) -> None:
    """Against the true history; and what was marked is dated to the mark."""
    marks, now, server = Marks(), 0.0, 0
    written: list[float] = []
    marked: list[tuple[float, int]] = []
    for what, wait_s in script * 3:
        now += wait_s
        match what:
            case "write":
                written.append(now)
            case "mark":
                marks.note(str(server), len(written), now)
                marked.append((now, len(written)))
            case "restart":
                server += 1
                marked.clear()
        for sequence, at in enumerate(written, 1):
            standing_s = marks.standing_s(str(server), sequence, now)
            assert standing_s <= now - at
            first = next((when for when, position in marked if position >= sequence), now)
            assert standing_s >= now - first - 0.011
