"""`doyen verify`: the verdict as text and as JSON, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from candidates import Capture
from doyen.audit import AuditLog
from doyen.cli import main
from doyen.events import Elected, Event, Gap, Resigned
from doyen.events.telemetry import Telemetry
from doyen.lease.clock import VirtualClock


class Logs:
    """The logs of two processes with one clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock()
        self.paths = [str(folder / f"server{number}.jsonl") for number in (1, 2)]
        self._audits = [AuditLog(path) for path in self.paths]
        self._streams = [
            Telemetry(self.clock, f"session{number}", [audit])
            for number, audit in enumerate(self._audits, 1)
        ]

    def close(self) -> None:
        for audit in self._audits:
            audit.close()

    def says(self, server: int, event: Event) -> None:
        self.clock.advance(1.0)
        self._streams[server - 1].emit(event)

    def elected(self, server: int, token: int, valid_for_s: float = 5.0) -> None:
        until = self.clock.now() + 1.0 + valid_for_s
        self.says(
            server,
            Elected(
                election="billing",
                name=f"server{server}",
                token=token,
                lease=f"lease{server}",
                valid_until=until,
            ),
        )

    def resigned(self, server: int, token: int) -> None:
        name, lease = f"server{server}", f"lease{server}"
        self.says(server, Resigned(election="billing", name=name, token=token, lease=lease))


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    logs = Logs(tmp_path)
    logs.elected(1, 10)
    logs.resigned(1, 10)
    logs.elected(2, 11)
    return logs


def test_a_right_history(logs: Logs, capsys: Capture) -> None:
    logs.close()
    assert main(["verify", *logs.paths]) == 0
    out = capsys.readouterr().out
    assert "2 files, 3 lines, 1 process, 1 election, 2 terms, 1 change of leader" in out
    assert "median 1.000 s, maximum 1.000 s" in out
    assert "proved: no two terms overlapped" in out


def test_a_wrong_history(logs: Logs, capsys: Capture) -> None:
    logs.elected(1, 12)
    logs.close()
    assert main(["verify", *logs.paths]) == 1
    out = capsys.readouterr().out
    assert "VIOLATIONS: 1" in out
    assert "two leaders of 'billing' for 4.000 s (boot clock)" in out
    assert f"{logs.paths[0]}:3" in out
    assert "proved" not in out
    # Names come from other machines.
    path = Path(logs.paths[0])
    path.write_text(path.read_text().replace("server1", "server1\\u001b[2J"))
    assert main(["verify", *logs.paths]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "server1\\x1b[2J" in out


def test_a_wrong_history_for_programs(logs: Logs, capsys: Capture) -> None:
    logs.elected(1, 12)
    logs.close()
    assert main(["verify", "--json", *logs.paths]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    (violation,) = report["violations"]
    assert violation["kind"] == "overlap"
    assert [term["token"] for term in violation["terms"]] == [11, 12]
    assert violation["terms"][1]["start"]["where"] == f"{logs.paths[0]}:3"


def test_a_log_with_a_gap_proves_nothing(logs: Logs, capsys: Capture) -> None:
    logs.says(1, Gap(missed=3, since=1.0))
    logs.close()
    assert main(["verify", *logs.paths]) == 1
    out = capsys.readouterr().out
    assert "not proved: 3 events are missing" in out
    assert main(["verify", "--json", *logs.paths]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["verdict"], report["missing"]) == (False, "incomplete", 3)
    assert report["violations"] == []


def test_a_log_whose_line_with_a_beginning_was_deleted_proves_nothing(
    logs: Logs, capsys: Capture
) -> None:
    logs.close()
    path = Path(logs.paths[0])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert main(["verify", *logs.paths]) == 1
    assert "not proved: 1 term ends in these logs without beginning" in capsys.readouterr().out
    assert main(["verify", "--json", *logs.paths]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "incomplete"


def test_one_log_alone_may_not_show_it(logs: Logs) -> None:
    logs.elected(1, 12)
    logs.close()
    assert main(["verify", logs.paths[0]]) == 0


@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_nothing_to_verify(tmp_path: Path, capsys: Capture, json_option: list[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert main(["verify", str(empty), *json_option]) == 2
    out = capsys.readouterr().out
    assert ("nothing to verify" in out) if not json_option else not json.loads(out)["ok"]


def test_what_was_ignored_is_listed(logs: Logs, tmp_path: Path, capsys: Capture) -> None:
    logs.close()
    torn = tmp_path / "torn.jsonl"
    torn.write_text("nonsense\n" * 30 + '{"event":"elec')
    assert main(["verify", *logs.paths, str(torn)]) == 1
    out = capsys.readouterr().out
    assert "not proved: 30 lines cannot be read." in out
    assert "lines ignored: 31\n" in out
    assert f"{torn}:1: not JSON" in out
    assert "and 11 more; --json has all" in out


def test_a_log_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    assert main(["verify", str(tmp_path / "absent.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("doyen: the audit log ")


def test_a_tolerance_that_is_not_a_number(logs: Logs, capsys: Capture) -> None:
    logs.close()
    with pytest.raises(SystemExit) as ended:
        main(["verify", *logs.paths, "--tolerance", "nan"])
    assert ended.value.code == 2
    assert "tolerance" in capsys.readouterr().err
