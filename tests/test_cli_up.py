"""`doyen up`: real processes that are killed and frozen, the live view on a terminal, and a verdict
that can be negative.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from candidates import WITHIN_S, eventually
from doyen.cli import main
from doyen.cli.up.cluster import CandidateGroup, ElectionHistory, InjectedFault
from doyen.cli.up.drill import judge, summary
from doyen.lease.timing import Timing

DOYEN = [sys.executable, "-c", "from doyen.cli import main; raise SystemExit(main())"]
AT_TERMINAL = [
    sys.executable,
    "-c",
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "from doyen.cli import main; raise SystemExit(main())",
]


def environment(tmp: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(tmp), **more}


def saboteur(folder: Path, code: str) -> str:
    """A PYTHONPATH with which every Python process of a run executes `code` at its start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def candidates(tmp: Path) -> dict[int, str]:
    """The running candidates of a directory, with the state that the kernel reports."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"doyen.cli.up.candidate" in words and f"{tmp}/".encode() in words and state != "Z":
            found[int(process.name)] = state
    return found


def nodes(tmp: Path) -> list[int]:
    """The running nodes of the quorum in this directory."""
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if (words := _words(process)) and b"doyen.cli.up.node" in words
        if f"{tmp}/".encode() in words
    ]


def _words(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def up(tmp: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """An unattended run in the background."""
    with subprocess.Popen(
        [*DOYEN, "up", *in_a_file(tmp), *options],
        env=environment(tmp),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def in_a_file(tmp: Path) -> list[str]:
    """Options for a sqlite store, which has proof of death and needs no nodes."""
    return ["--store", f"sqlite://{tmp}.db"]


def drill(
    tmp: Path, *options: str, quorum: bool = False, **more: str
) -> tuple[int, dict[str, Any]]:
    """An unattended run, to its end."""
    tmp.mkdir()
    done = subprocess.run(
        [*DOYEN, "up", "--json", *([] if quorum else in_a_file(tmp)), *options],
        env=environment(tmp, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert not done.stderr, done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def test_an_unattended_run_proves_one_leader_through_kills_and_freezes(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    code, outcome = drill(tmp, "--for", "1", "--ttl", "3")  # each fault once
    assert (code, outcome["ok"], outcome["problems"]) == (0, True, [])
    assert {"killed", "frozen"} == {failover["fault"] for failover in outcome["failovers"]}
    for failover in outcome["failovers"]:
        assert failover["successor_token"] > failover["token"]
        assert 0 < failover["failover_s"] <= outcome["worst_failover_s"]
    assert outcome["summary"]["killed"]["max_s"] < outcome["summary"]["frozen"]["p50_s"]
    assert outcome["audit"]["terms"] > len(outcome["failovers"])
    assert outcome["work_done"] > 0
    assert list(tmp.iterdir()) == []
    assert candidates(tmp) == {}


def test_a_quorum_of_its_own_is_disturbed_as_well(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    code, outcome = drill(tmp, "--for", "2", "--ttl", "1.5", quorum=True)
    assert (code, outcome["ok"], outcome["problems"]) == (0, True, [])
    assert {"killed", "frozen"} == {failover["fault"] for failover in outcome["failovers"]}
    assert {change["struck"].partition(" ")[2] for change in outcome["quorum"]} >= {
        "killed",
        "frozen",
    }
    generations = [change["generation"] for change in outcome["quorum"]]
    assert generations == sorted(set(generations))
    assert list(tmp.iterdir()) == []
    assert candidates(tmp) == {}
    assert nodes(tmp) == []


def test_leaders_that_trust_their_lease_too_long_are_found_out(tmp_path: Path) -> None:
    lie = saboteur(
        tmp_path / "lie",
        "import doyen.lease.timing as timing\n"
        "true = timing.Timing.valid_until\n"
        "timing.Timing.valid_until = lambda self, sent_at: true(self, sent_at) + 60\n",
    )
    tmp = tmp_path / "tmp"
    code, outcome = drill(tmp, "--for", "1", "--ttl", "0.6", PYTHONPATH=lie)
    assert code == 1
    assert "overlap" in {violation["kind"] for violation in outcome["audit"]["violations"]}
    kept = Path(outcome["evidence"])
    assert kept.parent == tmp
    assert list(kept.glob("*.audit.jsonl"))
    assert candidates(tmp) == {}


def test_a_leader_without_followers_is_a_failure(tmp_path: Path) -> None:
    deaf = saboteur(
        tmp_path / "deaf",
        "from doyen.election import attempt\nattempt.Wakeup.wake = lambda self: None\n",
    )
    code, outcome = drill(tmp_path / "tmp", "--for", "1", "--ttl", "0.4", PYTHONPATH=deaf)
    assert code == 1
    assert "no candidate was elected within" in outcome["problems"][0]


def test_candidates_that_cannot_start_are_quoted(tmp_path: Path) -> None:
    broken = saboteur(
        tmp_path / "broken",
        "import os, sys\n"
        "if 'doyen.cli.up.candidate' in sys.orig_argv:\n"
        "    print('out of order', file=sys.stderr, flush=True)\n"
        "    os._exit(3)\n",
    )
    code, outcome = drill(tmp_path / "tmp", "--for", "1", PYTHONPATH=broken)
    assert code == 1
    assert any("out of order" in problem for problem in outcome["problems"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path: Path, number: int) -> None:
    with up(tmp_path, "--for", "60", "--candidates", "2") as process:
        eventually(lambda: len(candidates(tmp_path)) == 2, "two candidates")
        process.send_signal(number)
        assert process.wait(WITHIN_S) == 128 + number
        assert candidates(tmp_path) == {}
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["nodes", "store"])
def test_a_signal_while_it_starts_ends_it_at_once(tmp_path: Path, what: str) -> None:
    """Nodes that do not come up, and a store that does not answer, are not waited for: either would
    take longer than this test does."""
    slow = saboteur(
        tmp_path / "slow",
        "import sys, time\nif 'doyen.cli.up.node' in sys.orig_argv: time.sleep(600)\n",
    )
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        store = ["--store", f"redis://{address}?connect_timeout_s=60"]
        with subprocess.Popen(
            [*DOYEN, "up", "--for", "60", *(store if what == "store" else [])],
            env=environment(tmp, PYTHONPATH=slow),
            stdin=subprocess.DEVNULL,
        ) as process:
            try:
                if what == "store":
                    silent.settimeout(WITHIN_S)
                    stack.enter_context(silent.accept()[0])
                else:
                    eventually(lambda: len(nodes(tmp)) == 3, "three nodes that do not listen")
                process.send_signal(signal.SIGINT)
                assert process.wait(WITHIN_S) == 128 + signal.SIGINT
            finally:
                process.kill()
    assert nodes(tmp) == []
    assert list(tmp.iterdir()) == []


FOSTER = [
    sys.executable,
    "-c",
    "import ctypes, subprocess, sys\n"
    "ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER\n"
    "with subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL) as up:\n"
    "    print(up.pid, flush=True)\n"
    "    sys.stdin.read()\n",
]
"""Adopts the orphans of `doyen up` into its own session: the kernel would otherwise continue those
that are frozen, and the end of their pipe would be enough."""


def test_candidates_die_with_a_killed_up_even_frozen_ones(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*FOSTER, *DOYEN, "up", *in_a_file(tmp_path), "--json", "--for", "60", "--ttl", "1"],
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as foster:
        assert foster.stdout is not None
        pid = int(foster.stdout.readline())
        try:
            eventually(lambda: "T" in candidates(tmp_path).values(), "a frozen candidate")
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: not candidates(tmp_path), "no candidates left")
        finally:
            for left in (pid, *candidates(tmp_path)):
                os.kill(
                    left, signal.SIGKILL
                )  # it has not been reaped, so the pid has not been reused


class Terminal:
    """`doyen up` in a terminal of 80 by 24, with its output and its keys."""

    def __init__(self, tmp: Path, *, quorum: bool = False, **more: str) -> None:
        self.near, self.far = pty.openpty()
        termios.tcsetwinsize(self.far, (24, 80))
        self.before = termios.tcgetattr(self.far)
        self.output = ""
        self.process = subprocess.Popen(
            [*AT_TERMINAL, "up", *([] if quorum else in_a_file(tmp)), "--ttl", "1.5"],
            env=environment(tmp, TERM="xterm-256color", **more),
            stdin=self.far,
            stdout=self.far,
            stderr=self.far,
            start_new_session=True,
        )

    def _read(self) -> None:
        if select.select([self.near], [], [], 0.02)[0]:
            self.output += os.read(self.near, 65536).decode(errors="replace")

    def seen(self, pattern: str, *, after: int = 0) -> re.Match[str]:
        """Wait for a pattern in the output after some position."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            plain = self._plain(after)
            if match := re.search(pattern, plain):
                return match
            assert time.monotonic() < deadline, f"no {pattern!r} in {plain[-3000:]!r}"
            self._read()

    def press(self, key: str) -> int:
        """Press a key; returns the position in the output after which its effect may appear."""
        os.write(self.near, key.encode())
        return len(self.output)

    def _plain(self, after: int = 0) -> str:
        """The output without control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output[after:])

    def ends(self) -> None:
        """Wait for the end, which must be with exit code 0."""
        deadline = time.monotonic() + WITHIN_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {self._plain()[-3000:]}"
            self._read()
        while select.select([self.near], [], [], 0)[0]:
            self._read()
        code = self.process.returncode
        assert code == 0, f"exit code {code}: {self._plain()[-3000:]}"


@contextmanager
def terminal(tmp: Path, *, quorum: bool = False, **more: str) -> Iterator[Terminal]:
    shown = Terminal(tmp, quorum=quorum, **more)
    try:
        yield shown
        assert termios.tcgetattr(shown.far) == shown.before
    finally:
        shown.process.kill()
        shown.process.wait()
        os.close(shown.near)
        os.close(shown.far)


def test_in_a_terminal_keys_kill_freeze_and_depose_the_leader(tmp_path: Path) -> None:
    with terminal(tmp_path) as shown:
        first = shown.seen(r"Leader +(server\d)")[1]
        shown.seen(r"waiting +behind")
        at = shown.press("k")
        second = shown.seen(rf"{first} killed, (server\d) leads \(token \d+\) after", after=at)[1]
        assert second != first
        shown.seen(rf"Leader +{second}", after=at)
        shown.seen(rf"{first} +waiting", after=at)

        at = shown.press("r")
        third = shown.seen(rf"{second} asked to resign, (server\d) leads", after=at)[1]
        shown.seen(rf"{second} +waiting", after=at)
        at = shown.press("f")
        shown.seen(rf"{third} +frozen (ex-)?leader", after=at)
        shown.seen(rf"{third} frozen, server\d leads", after=at)
        shown.seen(rf"{third} +waiting", after=at)

        at = shown.press("q")
        shown.ends()
        shown.seen("Proved by the audit logs", after=at)
        assert shown.output.index("\x1b[?1049h") < shown.output.index("\x1b[?1049l")
        assert shown.output.rindex("\x1b[?25h") > shown.output.rindex("\x1b[?25l")
    assert list(tmp_path.iterdir()) == []


def test_in_a_terminal_keys_kill_and_freeze_the_quorums_leader(tmp_path: Path) -> None:
    with terminal(tmp_path, quorum=True) as shown:
        shown.seen(r"Leader +(server\d)")
        shown.seen(r" Quorum +n1 ")
        first = shown.seen(r"(n\d) leading")[1]
        at = shown.press("K")
        shown.seen(rf"{first} (dead|starting)", after=at)
        second = shown.seen(rf"(?!{first})(n\d) leading", after=at)[1]
        shown.seen(rf"{first} following", after=at)
        at = shown.press("F")
        shown.seen(rf"{second} frozen", after=at)
        shown.seen(rf"{second} following", after=at)
        shown.press("q")
        shown.ends()
    assert list(tmp_path.iterdir()) == []
    assert nodes(tmp_path) == []


def test_a_chosen_candidate_is_thawed_in_time_and_ctrl_c_quits(tmp_path: Path) -> None:
    with terminal(tmp_path) as shown:
        leader = shown.seen(r"Leader +(server\d)")[1]
        shown.seen(r"waiting +behind")
        at = shown.press(leader[-1])
        shown.seen(rf"{leader}: k kill", after=at)
        at = shown.press("f")
        shown.seen(rf"{leader} +frozen (ex-)?leader", after=at)
        at = shown.press("f")
        shown.seen(rf"{leader} +(leading|waiting)", after=at)
        shown.press("\x03")
        shown.ends()
    assert list(tmp_path.iterdir()) == []


def test_without_rich_changes_are_lines(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    plain = saboteur(tmp_path / "plain", "import sys\nsys.modules['rich'] = None\n")
    with terminal(tmp, PYTHONPATH=plain) as shown:
        first = shown.seen(r"(server\d) leads \(token \d+\)")[1]
        at = shown.press("k")
        shown.seen(rf"{first} killed, server\d leads \(token \d+\) after [\d.]+ ms", after=at)
        shown.press("q")
        shown.ends()
        assert "\x1b" not in shown.output
    assert list(tmp.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "because"),
    [
        (["--candidates", "1"], "--candidates must be from 2 to 9"),
        (["--for", "0"], "--for must be a number"),
        (["--store", "memory://"], "a memory: store exists within one process only"),
        (["--ttl", "0"], "ttl"),
    ],
)
def test_what_cannot_work_is_refused(
    options: list[str], because: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *options]) == 2
    assert because in capsys.readouterr().err


STAMP = {"boot": "b", "pid": 1, "wall": 1e9, "election": "demo"}


def elected(name: str, token: int, at: float) -> dict[str, Any]:
    fields = {"event": "elected", "name": name, "token": token, "lease": f"l{token}"}
    return {**fields, "at": at, "valid_until": at + 0.5, "session": name, **STAMP}


def cluster_after_a_kill(folder: Path, *, worst_s: float) -> CandidateGroup:
    """Its logs contain a leader that was killed at 11 and replaced at 12."""
    folder.mkdir()
    cluster = CandidateGroup(
        folder, candidates=2, store="-", timing=Timing(ttl_s=0.6), worst_s=worst_s
    )
    one, two = cluster.candidates
    one.audit.write_text(json.dumps(elected(one.name, 3, 10.0)) + "\n")
    cluster.read()
    cluster.history.pending = InjectedFault("killed", one.name, 3, 11.0)
    two.audit.write_text(json.dumps(elected(two.name, 4, 12.0)) + "\n")
    cluster.read()
    return cluster


def test_a_failover_later_than_the_worst_case_is_a_failure(tmp_path: Path) -> None:
    in_time = judge(cluster_after_a_kill(tmp_path / "in time", worst_s=1.1), [], bounded=True)
    assert in_time.ok
    assert in_time.times("killed") == [1.0]
    late = judge(cluster_after_a_kill(tmp_path / "late", worst_s=0.9), [], bounded=True)
    assert not late.ok
    assert "this exceeds the worst case" in summary(late)[-1]


def test_a_run_without_a_leader_proves_nothing(tmp_path: Path) -> None:
    cluster = CandidateGroup(
        tmp_path, candidates=2, store="-", timing=Timing(ttl_s=0.6), worst_s=1.0
    )
    assert not judge(cluster, [], bounded=True).ok


def test_a_fault_that_struck_too_late_is_not_credited_with_the_failover() -> None:
    history = ElectionHistory()
    history.add(elected("server1", 3, 10.0))
    history.pending = InjectedFault("killed", "server1", 3, 11.0)
    history.add(elected("server2", 4, 10.9))
    assert [failover.fault for failover in history.failovers] == [None, None]
    assert history.pending is None


def test_a_line_written_after_a_thaw_does_not_make_an_old_leader_the_latest() -> None:
    history = ElectionHistory()
    history.add(elected("server2", 4, 10.9))
    history.add(elected("server1", 3, 11.5))
    assert history.latest is not None
    assert history.latest.name == "server2"
