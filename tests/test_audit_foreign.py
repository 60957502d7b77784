"""The verifier compares terms with the foreign leaders that candidates have seen."""

from __future__ import annotations

import pytest

from doyen.audit import LogLine
from test_audit import Process, check


@pytest.mark.parametrize(
    ("seen", "token", "expected"),
    [
        ((2.0, 2.1), 2, []),
        ((0.5, 2.1), 2, []),  # it may have led before or after the term of a
        ((0.6, 0.7), 2, ["overlap"]),
        ((2.0, 2.1), 1, ["token-regressed"]),
        ((2.0, 2.1), 3, ["token-regressed"]),
    ],
)
def test_foreign_leaders_are_compared_with_terms(
    seen: tuple[float, float], token: int, expected: list[str]
) -> None:
    lines: list[LogLine] = []
    a, b = Process(lines, "a"), Process(lines, "b")
    a.elected(0.0, 1, until=5.0)
    a.resigned(1.0, 1)
    b.term("foreignleader", seen[1], token, leader="x", since=seen[0])
    b.elected(3.0, 3, until=8.0)
    b.resigned(4.0, 3)
    report = check(lines, *expected)
    assert [(each.leader, each.token) for each in report.foreign] == [("x", token)]
    assert any("1 term of 'billing' was foreign: 'x'" in warning for warning in report.warnings)
