"""Marks never report a renewal as unchanged for longer than it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from doyen.stores.nats.marks import Marks


def test_one_mark_dates_all_leases_without_a_renewal_since() -> None:
    marks = Marks()
    marks.note("server", 100, 10.0)
    marks.note("server", 110, 12.0)
    assert [marks.unchanged_s("server", each, 15.0) for each in (1, 100, 101, 110, 111)] == [
        5.0,
        5.0,
        3.0,
        3.0,
        0.0,
    ]


def test_marks_of_another_incarnation_or_of_a_stream_that_went_back_are_discarded() -> None:
    marks = Marks()
    marks.note("first", 100, 10.0)
    assert marks.unchanged_s("second", 5, 15.0) == 0.0
    marks.note("second", 100, 20.0)
    assert marks.unchanged_s("second", 5, 21.0) == 1.0
    marks.note("second", 99, 25.0)
    assert marks.unchanged_s("second", 5, 26.0) == 1.0


@given(st.lists(st.tuples(st.sampled_from(["write", "mark", "restart"]), st.floats(0, 3))))
def test_no_renewal_is_older_than_its_write(
    script: list[tuple[str, float]],
) -> None:
    """Compared with the true history. Renewals up to a mark are at least as old as the mark."""
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
            unchanged_s = marks.unchanged_s(str(server), sequence, now)
            assert unchanged_s <= now - at
            first = next((when for when, position in marked if position >= sequence), now)
            assert unchanged_s >= now - first - 0.011
