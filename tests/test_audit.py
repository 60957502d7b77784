"""The audit log contains whole lines only, and the verifier distinguishes correct histories from
incorrect ones.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doyen.audit import AuditLog, LogLine, Report, Where, verify, verify_lines
from doyen.errors import ConfigError
from doyen.events import Elected, Record
from doyen.events.telemetry import Telemetry
from doyen.lease.clock import VirtualClock, boot_id

EPOCH = 1_700_000_000.0


class Process:
    """Writes the lines of one session of one process."""

    def __init__(
        self, lines: list[LogLine], name: str, *, boot: str = "boot-1", skew_s: float = 0.0
    ) -> None:
        self.lines, self.name, self.boot, self.skew_s = lines, name, boot, skew_s
        self.lease = f"lease-{name}"

    def says(self, event: str, at: float, **fields: Any) -> None:
        # Each boot has its own origin of time; the tests use one common time.
        origin = 1000.0 * len(self.boot)
        for name in ("valid_until", "ended_at", "since"):
            if name in fields:
                fields[name] += origin
        text = json.dumps(
            {
                "event": event,
                **fields,
                "at": at + origin,
                "wall": EPOCH + at + self.skew_s,
                "boot": self.boot,
                "pid": sum(self.name.encode()),
                "session": f"session-{self.name}",
            }
        )
        here = Where(f"{self.name}.jsonl", len(self.lines) + 1)
        self.lines.append(LogLine(here, text.encode() + b"\n"))

    def gap(self, at: float, *, since: float, missed: int) -> None:
        self.says("gap", at, missed=missed, since=since)

    def granted(self, at: float, until: float) -> None:
        self.says("granted", at, lease=self.lease, ttl_s=5.0, valid_until=until)

    def renewed(self, at: float, until: float) -> None:
        self.says("renewed", at, lease=self.lease, valid_until=until)

    def term(self, event: str, at: float, token: int, **fields: Any) -> None:
        fields = {"election": "billing", "name": self.name, "lease": self.lease, **fields}
        self.says(event, at, token=token, **fields)

    def elected(self, at: float, token: int, until: float, **fields: Any) -> None:
        self.term("elected", at, token, valid_until=until, **fields)

    def resigned(self, at: float, token: int, **fields: Any) -> None:
        self.term("resigned", at, token, **fields)

    def lost(self, at: float, token: int, ended_at: float) -> None:
        self.term("lost", at, token, reason="no renewal was confirmed", ended_at=ended_at)

    def finds(self, cause: str, at: float, other: Process) -> None:
        self.says("leaseended", at, lease=other.lease, cause=cause)


@pytest.fixture
def lines() -> list[LogLine]:
    return []


@pytest.fixture
def a(lines: list[LogLine]) -> Process:
    return Process(lines, "a")


@pytest.fixture
def b(lines: list[LogLine]) -> Process:
    return Process(lines, "b")


def kinds(report: Report) -> list[str]:
    return [violation.kind for violation in report.violations]


def check(lines: list[LogLine], *expected: str, tolerance_s: float = 0.0) -> Report:
    """Verify the lines in several orders, and expect exactly these violations."""
    reports = []
    shuffled = random.Random(7).sample(lines, len(lines))
    for order in (lines, lines[::-1], shuffled, lines + lines):
        report = verify_lines(order, tolerance_s=tolerance_s)
        assert sorted(kinds(report)) == sorted(expected), [v.story for v in report.violations]
        reports.append(report)
    return reports[0]


# Correct histories.


def test_a_lock_and_an_election_of_one_name_are_not_compared(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=8)
    b.elected(2, 11, until=8, election_kind="locks")
    report = check(lines)
    assert (report.elections, report.ok) == (2, True)
    b.elected(3, 12, until=8)
    check(lines, "overlap")


def test_resigning_hands_over(lines: list[LogLine], a: Process, b: Process) -> None:
    a.granted(0, until=4)
    a.elected(1, 10, until=4)
    a.renewed(2, until=6)
    a.resigned(3, 10)
    b.elected(3.5, 11, until=8)
    report = check(lines)
    assert (report.terms, report.elections, report.processes, report.changes) == (2, 1, 2, 1)
    assert report.gaps_s == (0.5,)
    assert report.ok
    assert not report.wall_clocks_compared


def test_a_term_of_a_killed_leader_ends_with_the_proof_of_death(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=5)
    b.finds("died", 2, a)
    b.elected(2.01, 11, until=6)
    report = check(lines)
    assert report.gap_max_s == pytest.approx(0.01)


def test_a_term_of_a_killed_leader_without_proof_ends_at_its_deadline(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=5)
    a.renewed(3, until=7)
    b.elected(7.5, 11, until=12)
    assert check(lines).gaps_s == (0.5,)


def test_a_frozen_leader_may_report_its_loss_late(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=5)
    b.finds("expired", 6, a)
    b.elected(6, 11, until=12)
    b.renewed(7, until=14)
    a.lost(8, 10, ended_at=5)
    a.says("leaselost", 8, lease=a.lease, reason="no renewal", ended_at=5)
    assert check(lines).changes == 1


def test_a_lease_given_up_early_frees_the_leadership_early(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=5)
    a.says("leaselost", 2.1, lease=a.lease, reason="the lease has ended", ended_at=2)
    b.elected(2.5, 11, until=6)
    check(lines)


def test_a_lease_given_up_may_be_found_dead_while_its_process_goes_on(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=5)
    a.resigned(2, 10)
    b.finds("died", 3, a)
    a.says("waiting", 4, election="billing", name="a", behind="b")
    check(lines)


def test_one_leader_may_follow_itself(lines: list[LogLine], a: Process) -> None:
    a.elected(1, 10, until=5)
    a.resigned(2, 10)
    a.elected(2, 11, until=5)
    assert check(lines).changes == 0


def test_elections_are_independent(lines: list[LogLine], a: Process, b: Process) -> None:
    a.elected(1, 10, until=5, election="billing")
    b.elected(2, 3, until=6, election="mail")
    a.elected(3, 10, until=6, election="mail 2")
    report = check(lines)
    assert (report.elections, report.terms, report.gaps_s) == (3, 3, ())


def test_a_term_over_before_it_was_announced_was_never_valid(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    b.elected(6, 11, until=9)
    a.elected(7, 10, until=5)
    a.lost(7, 10, ended_at=5)
    report = check(lines)
    assert (report.terms, report.never_valid) == (1, 1)


def test_minus_infinity_is_a_deadline_already_over(lines: list[LogLine], a: Process) -> None:
    a.elected(7, 10, until=float("-inf"))
    report = check(lines)
    assert (report.terms, report.never_valid, report.ignored) == (0, 1, ())


def test_other_machines_are_compared_by_wall_clock(lines: list[LogLine], a: Process) -> None:
    elsewhere = Process(lines, "c", boot="another-boot", skew_s=-0.2)
    a.elected(1, 10, until=5)
    a.resigned(3, 10)
    elsewhere.elected(3.1, 11, until=7)
    report = check(lines, "overlap")
    assert report.wall_clocks_compared
    assert "wall clocks" in report.violations[0].headline
    assert check(lines, tolerance_s=0.25).ok


# Violations.


def test_two_terms_that_overlap(lines: list[LogLine], a: Process, b: Process) -> None:
    a.elected(1, 10, until=5)
    a.renewed(4, until=8)
    b.elected(7.5, 11, until=12)
    report = check(lines, "overlap")
    violation = report.violations[0]
    assert violation.by_s == pytest.approx(0.5)
    for part in ("'billing'", "0.500 s", "a, token 10", "b, token 11", "a.jsonl:2", "b.jsonl:3"):
        assert part in violation.story
    assert not report.ok


def test_a_term_inside_another(lines: list[LogLine], a: Process, b: Process) -> None:
    a.elected(1, 10, until=20)
    b.elected(5, 11, until=8)
    b.resigned(6, 11)
    report = check(lines, "overlap")
    assert report.violations[0].by_s == pytest.approx(1.0)


def test_an_overlap_is_found_across_a_short_term_between(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    c = Process(lines, "c")
    a.elected(1, 10, until=20)
    b.elected(5, 11, until=6)
    c.elected(7, 12, until=9)
    report = check(lines, "overlap", "overlap")
    assert [v.terms[1].name for v in report.violations] == ["b", "c"]


def test_a_token_that_goes_back(lines: list[LogLine], a: Process, b: Process) -> None:
    a.elected(1, 10, until=5)
    a.resigned(2, 10)
    b.elected(3, 9, until=7)
    report = check(lines, "token-regressed")
    assert "token 9" in report.violations[0].headline


def test_a_token_used_twice(lines: list[LogLine], a: Process, b: Process) -> None:
    a.elected(1, 10, until=5)
    a.resigned(2, 10)
    b.elected(3, 10, until=7)
    check(lines, "token-reused")


def test_a_token_used_twice_by_the_same_session(lines: list[LogLine], a: Process) -> None:
    a.elected(1, 10, until=5)
    a.elected(3, 10, until=7)
    assert "token-reused" in kinds(verify_lines(lines))


@pytest.mark.parametrize(
    "sign",
    [
        lambda a: a.renewed(3, until=8),
        lambda a: a.resigned(3, 10),
        lambda a: a.lost(3.5, 10, ended_at=3),
        lambda a: a.says("unsure", 3, lease=a.lease, remaining_s=1.0, error="timeout"),
        lambda a: a.says("leaselost", 3, lease=a.lease, reason="it has ended", ended_at=3),
        lambda a: a.says("waiting", 3, election="mail", name="a", behind="c"),
    ],
    ids=["renewed", "resigned", "lost", "unsure", "leaselost", "any other sign"],
)
def test_a_leader_proved_dead_and_alive_afterwards(
    lines: list[LogLine], a: Process, b: Process, sign: Callable[[Process], None]
) -> None:
    a.elected(1, 10, until=5)
    b.finds("died", 2, a)
    sign(a)
    report = check(lines, "alive-after-death")
    assert report.violations[0].by_s == pytest.approx(1.0)
    assert "found died by session session-b, b.jsonl:2" in report.violations[0].story


def test_a_false_proof_of_death_ends_no_term(lines: list[LogLine], a: Process, b: Process) -> None:
    a.elected(1, 10, until=5)
    b.finds("died", 2, a)
    b.elected(2.1, 11, until=6)
    a.renewed(3, until=8)
    check(lines, "alive-after-death", "overlap")


def test_a_lease_declared_expired_too_early(lines: list[LogLine], a: Process, b: Process) -> None:
    a.elected(1, 10, until=5)
    b.finds("expired", 4.5, a)
    report = check(lines, "expired-early")
    assert report.violations[0].by_s == pytest.approx(0.5)
    b.elected(4.6, 11, until=9)
    check(lines, "expired-early", "overlap")


def test_a_leader_that_counted_on_its_term_beyond_the_deadline(
    lines: list[LogLine], a: Process
) -> None:
    a.elected(1, 10, until=5)
    a.lost(6, 10, ended_at=5.5)
    check(lines, "valid-beyond-deadline")


def test_a_body_at_work_in_anothers_term(lines: list[LogLine], a: Process, b: Process) -> None:
    a.elected(1, 10, until=5)
    a.lost(5, 10, ended_at=5)
    b.elected(6, 11, until=9)
    a.term("overrun", 6.5, 10)
    report = check(lines, "overrun")
    assert report.violations[0].by_s == pytest.approx(0.5)


def test_an_overrun_without_another_leader_is_a_warning(lines: list[LogLine], a: Process) -> None:
    a.elected(1, 10, until=5)
    a.lost(5, 10, ended_at=5)
    a.term("overrun", 6, 10)
    report = check(lines)
    assert "past its stop budget" in report.warnings[0]


def test_an_overrun_after_a_pause_is_a_warning(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=5)
    b.finds("expired", 6, a)
    b.elected(6, 11, until=9)
    a.lost(8, 10, ended_at=5)
    a.term("overrun", 8.001, 10)
    report = check(lines)
    assert "into the term of b (token 11)" in report.warnings[0]


# Unusual logs.


def test_a_wall_clock_moved_meanwhile_is_mentioned(lines: list[LogLine], a: Process) -> None:
    a.elected(1, 10, until=5)
    a.skew_s = 30.0
    a.resigned(2, 10)
    other = Process(lines, "c", boot="another-boot")
    other.elected(40, 11, until=45)
    report = check(lines)
    assert "was changed by 30.000 s" in report.warnings[0]


def test_on_one_boot_a_stepped_wall_clock_changes_nothing(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=5)
    a.resigned(2, 10)
    b.skew_s = -3600
    b.elected(3, 11, until=6)
    report = check(lines)
    assert report.gaps_s == (1.0,)
    assert report.warnings == ()


@pytest.mark.parametrize("end", ["resigned", "lost", "overrun"])
def test_logs_in_which_a_term_ends_without_beginning_are_incomplete(
    lines: list[LogLine], a: Process, end: str
) -> None:
    """The line that begins the term has been deleted, or is in a file that was not given."""
    ends = {
        "resigned": lambda: a.resigned(2, 9),
        "lost": lambda: a.lost(2, 9, ended_at=2),
        "overrun": lambda: a.term("overrun", 2, 9),
    }
    ends[end]()
    a.elected(3, 10, until=6)
    report = verify_lines(lines)
    assert "without beginning" in report.warnings[0]
    assert (report.verdict, report.ok, report.without_beginning) == ("incomplete", False, 1)


def test_a_log_with_ends_only_is_incomplete(lines: list[LogLine], a: Process) -> None:
    a.resigned(2, 9)
    assert verify_lines(lines).verdict == "incomplete"


GARBAGE = [
    b"\x00\xff\n",
    b"[1]\n",
    b"null\n",
    b"{}\n",
    b"[" * 100_000 + b"\n",
    b'{"event":"elected","at":1}\n',
    b'{"event":"elected","at":NaN,"wall":1,"boot":"b","pid":1,"session":"s"}\n',
    b'{"event":7,"at":1,"wall":1,"boot":"b","pid":1,"session":"s"}\n',
    b'{"event":"renewed","at":1,"wall":1,"boot":"b","pid":1,"session":"s","lease":"l",'
    b'"valid_until":1e999}\n',
    b'{"event":"leaseended","at":1,"wall":1,"boot":"b","pid":1,"session":"s","lease":"l",'
    b'"cause":"boredom"}\n',
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_with_lines_that_cannot_be_read_nothing_is_proved(
    lines: list[LogLine], a: Process, garbage: bytes
) -> None:
    """An unreadable line may have recorded an election."""
    a.elected(1, 10, until=5)
    lines.insert(0, LogLine(Where("a.jsonl", 99), garbage))
    report = verify_lines(lines)
    assert (report.verdict, report.missing, report.unreadable) == ("incomplete", 0, 1)
    assert "1 line cannot be read" in report.warnings[0]
    assert [str(ignored.where) for ignored in report.ignored] == ["a.jsonl:99"]


def test_a_torn_last_line_is_reported(tmp_path: Path, lines: list[LogLine], a: Process) -> None:
    """The process was killed while it wrote the line, or is still writing it. What happened later
    is not covered by the log anyway, so the verdict stays "proved"."""
    a.elected(1, 10, until=5)
    a.resigned(2, 10)
    log = tmp_path / "a.jsonl"
    log.write_bytes(b"".join(line.text for line in lines)[:-20])
    report = verify([log])
    assert report.ok
    assert report.unreadable == 0
    assert "ends in the middle of a line" in report.warnings[0]
    assert report.ignored[0].where == (str(log), 2)
    assert "torn" in report.ignored[0].why


def test_a_line_appended_to_a_torn_one_is_not_lost(
    tmp_path: Path, lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=50)
    a.renewed(2, until=51)
    b.elected(3, 11, until=6)
    first, torn, second = (line.text for line in lines)
    log = tmp_path / "shared.jsonl"
    log.write_bytes(first + torn[:40] + second.replace(b": ", b":"))
    report = verify([log])
    assert kinds(report) == ["overlap"]
    assert len(report.ignored) == 1
    log.write_bytes(torn[:40] + second.replace(b": ", b":"))
    assert (verify([log]).verdict, verify([log]).unreadable) == ("incomplete", 1)


def test_many_gaps_are_read_in_little_time(lines: list[LogLine], a: Process) -> None:
    """A disk that is full again and again leaves one gap after another."""
    a.elected(1, 10, until=1e6)
    for at in range(2, 10_000):
        a.says("gap", at, missed=1, since=at)
    lines += lines
    assert verify_lines(lines).missing == 9_998


def test_nothing_is_proved_by_nothing(lines: list[LogLine], a: Process) -> None:
    assert verify([]).empty
    a.says("waiting", 1, election="billing", name="a", behind="b")
    report = verify_lines(lines)
    assert report.empty
    assert not report.ok


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl cannot be read"):
        verify([tmp_path / "absent.jsonl"])


def test_a_tolerance_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="tolerance"):
        verify([], tolerance_s=-1)


# Every generated correct history passes; one injected fault is found.

ENDINGS = ("resigned", "died", "expired", "frozen", "silent", "given up")


class History:
    """A correct history of one election, recorded by processes on one or two machines."""

    def __init__(self, draw: st.DrawFn, election: str) -> None:
        self.lines: list[LogLine] = []
        self.spans: list[tuple[float, float, int]] = []
        self._draw, self._election = draw, election
        boots = draw(st.sampled_from([("one",), ("one", "other")]))
        now, token = 1.0, 0
        for number in range(draw(st.integers(1, 8))):
            boot = draw(st.sampled_from(boots))
            leader = Process(self.lines, f"{election}{number}", boot=boot)
            other = Process(self.lines, f"{election}{number}x", boot=boot)
            now += self._ms(1, 3000)
            token += 2 * draw(st.integers(1, 5))
            end = self._one_term(leader, other, now, token)
            self.spans.append((now, end, token))
            now = end

    def _ms(self, low: int, high: int) -> float:
        return self._draw(st.integers(low, high)) / 1000

    def _one_term(self, leader: Process, other: Process, now: float, token: int) -> float:
        ttl = self._ms(1000, 5000)
        until = now + ttl
        if self._draw(st.booleans()):
            leader.granted(now - 0.0005, until)
        leader.elected(now, token, until, election=self._election)
        for _ in range(self._draw(st.integers(0, 4))):
            now += ttl / 3
            until = now + ttl
            leader.renewed(now, until)
        ending = self._draw(st.sampled_from(ENDINGS))
        early = now + self._ms(1, 300)
        late = until + self._ms(0, 9000)
        match ending:
            case "resigned":
                leader.resigned(early, token, election=self._election)
                return early
            case "died":
                other.finds("died", early, leader)
                return early
            case "given up":
                leader.says("leaselost", late, lease=leader.lease, reason="gone", ended_at=early)
                return early
            case "expired":
                other.finds("expired", late, leader)
            case "frozen":
                fields = {"election": self._election, "reason": "late", "ended_at": until}
                leader.term("lost", late, token, **fields)
        return until


@st.composite
def histories(draw: st.DrawFn) -> list[History]:
    return [History(draw, election) for election in draw(st.sampled_from(["p", "pq"]))]


def shuffled(histories: list[History], seed: int) -> list[LogLine]:
    lines = [line for history in histories for line in history.lines]
    return random.Random(seed).sample(lines, len(lines))


@given(histories(), st.integers())
def test_right_histories_are_clean(histories: list[History], seed: int) -> None:
    report = verify_lines(shuffled(histories, seed))
    assert report.violations == ()
    assert report.ok
    assert report.terms == sum(len(history.spans) for history in histories)
    assert report.ignored == ()
    assert report.warnings == ()


@given(histories(), st.integers(), st.data())
def test_one_overlap_is_always_found(
    histories: list[History], seed: int, data: st.DataObject
) -> None:
    history = data.draw(st.sampled_from(histories))
    begin, end, token = data.draw(st.sampled_from(history.spans))
    boot = data.draw(st.sampled_from(["one", "other"]))
    at = begin + (end - begin) * data.draw(st.sampled_from([0.01, 0.5, 0.99]))
    intruder = Process(history.lines, "intruder", boot=boot)
    intruder.elected(at, token + 1, until=at + 0.0005, election=history._election)
    report = verify_lines(shuffled(histories, seed))
    assert set(kinds(report)) == {"overlap"}
    assert {term.token for term in report.violations[0].terms} == {token, token + 1}


@given(histories(), st.integers(), st.data())
def test_one_token_that_goes_back_is_always_found(
    histories: list[History], seed: int, data: st.DataObject
) -> None:
    history = data.draw(st.sampled_from(histories))
    _, end, token = history.spans[-1]
    late = Process(history.lines, "late", boot=data.draw(st.sampled_from(["one", "other"])))
    late.elected(end + 1, token - 1, until=end + 2, election=history._election)
    report = verify_lines(shuffled(histories, seed))
    assert "token-regressed" in kinds(report)
    assert "overlap" not in kinds(report)


# Writing.


def elected(token: int, name: str = "server1") -> Elected:
    return Elected(election="billing", name=name, token=token, lease="l", valid_until=5.0)


def test_a_line_has_the_event_and_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    clock = VirtualClock(wall=EPOCH)
    clock.advance(1.5)
    Telemetry(clock, "s1", [audit]).emit(elected(7, name='odd "{"event":\n name'))
    audit.close()
    assert path.read_bytes().count(b"\n") == 1
    assert json.loads(path.read_bytes()) == {
        "event": "elected",
        "election": "billing",
        "election_kind": "elections",
        "name": 'odd "{"event":\n name',
        "token": 7,
        "lease": "l",
        "valid_until": 5.0,
        "at": 1.5,
        "wall": EPOCH + 1.5,
        "boot": boot_id(),
        "pid": os.getpid(),
        "session": "s1",
    }
    assert verify([path]).ok


def test_a_log_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        AuditLog(tmp_path / "absent" / "audit.jsonl")


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.close()
    audit.close()
    audit(Record(elected(1), 1.0, EPOCH, "s", 1))
    assert (tmp_path / "audit.jsonl").read_bytes() == b""


def test_a_full_disk_is_reported_once_and_the_gap_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    write = os.write

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def short(fd: int, data: bytes) -> int:
        return write(fd, data[:30])

    for behaviour in (full, full, short, write):
        monkeypatch.setattr(os, "write", behaviour)
        audit(Record(elected(1), 1.0, EPOCH, "s", 1))
    monkeypatch.setattr(os, "write", write)
    audit.close()
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.ERROR, logging.WARNING]
    assert "No space left" in caplog.text
    report = verify([path])
    assert report.verdict == "incomplete"
    assert not report.ok
    assert report.missing == 3
    assert "3 events of 1 sessions" in report.warnings[0]
    assert "torn" in report.ignored[0].why


def test_a_disk_that_stays_full_leaves_the_gap_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit, write = AuditLog(tmp_path / "audit.jsonl"), os.write
    audit(Record(elected(1), 1.0, EPOCH, "s", 1))
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:0]))
        for at in (2.0, 3.0):
            audit(Record(elected(2), at, EPOCH + at, "s", 1))
    audit.close()
    report = verify([audit.path])
    assert (report.missing, report.verdict) == (2, "incomplete")


def test_a_named_pipe_without_a_reader_is_refused(tmp_path: Path) -> None:
    """Opening it would block doyen's loop until it has a reader."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be written"):
        AuditLog(tmp_path / "pipe")


def test_what_a_gap_may_hide_is_neither_proved_nor_disproved(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    """The end of a term may be among the events that its process could not write."""
    a.elected(1, 10, until=50)
    a.gap(5, since=3, missed=4)
    b.elected(4, 11, until=9)
    report = verify_lines(lines)
    assert (report.verdict, report.missing) == ("incomplete", 4)
    assert any("may both have led" in warning for warning in report.warnings)


def test_a_gap_of_another_process_may_hide_the_proof_of_death(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=50)
    b.gap(3.5, since=2, missed=1)
    b.elected(4, 11, until=9)
    assert verify_lines(lines).verdict == "incomplete"


def test_a_gap_hides_no_violation_that_is_certain(
    lines: list[LogLine], a: Process, b: Process
) -> None:
    a.elected(1, 10, until=50)
    a.gap(3, since=2, missed=4)
    b.elected(4, 11, until=9)
    a.resigned(6, 10)
    assert kinds(verify_lines(lines)) == ["overlap"]


def test_a_gap_at_another_time_hides_nothing(lines: list[LogLine], a: Process, b: Process) -> None:
    a.elected(1, 10, until=50)
    b.elected(4, 11, until=9)
    a.gap(8, since=7, missed=4)
    assert kinds(verify_lines(lines)) == ["overlap"]


def test_renewals_may_be_missing(lines: list[LogLine], a: Process) -> None:
    """A term that was lost after the last deadline in the log is not a violation if a gap may
    contain renewals."""
    a.elected(1, 10, until=5)
    a.gap(9, since=2, missed=4)
    a.says(
        "lost",
        9,
        election="billing",
        name="a",
        token=10,
        lease=a.lease,
        reason="late",
        ended_at=9.0,
    )
    assert verify_lines(lines).verdict == "incomplete"


WRITER = """
import sys
from doyen.audit import AuditLog
from doyen.events import Elected, Record

path, session = sys.argv[1:]
audit = AuditLog(path)
sys.stdin.readline()
for n in range(300):
    event = Elected(election=session, name="x" * (n * 37 % 5000), token=n, lease=session,
                    valid_until=n + 1.0)
    audit(Record(event, float(n), 1e9 + n, session, n))
"""


def test_many_processes_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), f"s{number}"], stdin=subprocess.PIPE
        )
        for number in range(4)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    tokens: dict[str, list[int]] = {}
    for line in path.read_bytes().splitlines():
        raw = json.loads(line)
        tokens.setdefault(raw["session"], []).append(raw["token"])
    assert tokens == {f"s{number}": list(range(300)) for number in range(4)}
