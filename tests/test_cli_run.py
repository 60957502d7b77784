"""`doyen run` with real processes on the local store.

The most important property has two tests: the command of a successor starts only after all
processes of the predecessor have ended, whether its `doyen` was killed or frozen.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from candidates import complaints
from doyen.audit import verify
from doyen.cli.run import _as_text, _sentence
from doyen.events import Overrun, Record
from doyen.events.log_lines import log_line
from frozen import freeze
from stamps import PYTHON, Stamps, alive, until

if not sys.platform.startswith("linux"):
    pytest.skip("whole process trees can be seen on Linux only", allow_module_level=True)

DOYEN = [sys.executable, "-c", "import sys; from doyen.cli import main; sys.exit(main())"]

STAY = """
import os, struct, sys, time
boot = time.clock_gettime(time.CLOCK_BOOTTIME)
with open(sys.argv[1] + ".part", "wb") as file:
    file.write(struct.pack("<dqq", boot, os.getpid(), int(os.environ["DOYEN_TOKEN"])))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(3600)
"""


class Stay:
    """A command that records its start and keeps running."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.command = [*PYTHON, "-c", STAY, str(path)]

    @property
    def begun(self) -> bool:
        return self.path.exists()

    def _note(self) -> tuple[float, int, int]:
        at, pid, token = struct.unpack("<dqq", self.path.read_bytes())
        return at, pid, token

    @property
    def begun_at(self) -> float:
        return self._note()[0]

    @property
    def pid(self) -> int:
        return self._note()[1]

    @property
    def token(self) -> int:
        return self._note()[2]


class Bench:
    """A directory with a store, in which `doyen run` is started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.database = directory / "doyen.db"
        self.environ = {
            **os.environ,
            "DOYEN_STORE": f"sqlite://{self.database}",
            "XDG_STATE_HOME": str(directory / "state"),
        }
        self.processes: list[subprocess.Popen[str]] = []
        self.trees: list[Stamps] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*DOYEN, "run", "billing", *arguments],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def lead(self, command: list[str], *options: str) -> subprocess.Popen[str]:
        return self.start("--ttl", "3", *options, "--", *command)

    def freeze(self, process: subprocess.Popen[str]) -> None:
        freeze(process.pid, self.database)

    def stamps(self, *names: str) -> Stamps:
        self.trees.append(Stamps(self.directory / f"stamps{len(self.trees)}", *names))
        return self.trees[-1]

    def stay(self, name: str = "stay") -> Stay:
        return Stay(self.directory / name)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for tree in self.trees:
            until(lambda: not tree.any_alive(), "the guard has done its work")  # noqa: B023


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.end()


def ends(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, complaints(err)


def test_it_runs_the_command_as_leader(bench: Bench) -> None:
    script = 'echo "$DOYEN_ELECTION $DOYEN_NAME $DOYEN_TOKEN"; exit 7'
    code, out, err = ends(bench.start("--name", "a", "--", "sh", "-c", script))
    assert code == 7
    assert err == ""
    election, name, token = out.split()
    assert (election, name) == ("billing", "a")
    code, out, _ = ends(bench.start("--name", "b", "--", "sh", "-c", script))
    assert int(out.split()[2]) > int(token)


@pytest.mark.parametrize("named", [True, False])
def test_doyen_within_the_command_uses_the_same_store(bench: Bench, named: bool) -> None:
    store = bench.environ.pop("DOYEN_STORE")
    options = ["--store", store] if named else []
    code, out, _ = ends(bench.start(*options, "--", "sh", "-c", 'echo "$DOYEN_STORE"'))
    assert code == 0
    assert out.strip() == (store if named else f"sqlite://{bench.directory}/state/doyen/doyen.db")


def test_it_needs_no_store_to_be_named(bench: Bench) -> None:
    del bench.environ["DOYEN_STORE"]
    assert ends(bench.start("--", "true"))[0] == 0
    assert (bench.directory / "state/doyen/doyen.db").exists()


def test_a_command_that_cannot_run_is_never_elected(bench: Bench) -> None:
    plain = bench.directory / "plain"
    plain.write_text("not a program")
    assert ends(bench.start("--", "no-such-command")) == (
        127,
        "",
        "doyen: no-such-command: command not found\n",
    )
    assert ends(bench.start("--", str(plain)))[0] == 126
    assert ends(bench.start())[0] == 2
    assert not (bench.directory / "doyen.db").exists()


def test_times_without_a_margin_are_refused(bench: Bench) -> None:
    code, _, err = ends(bench.start("--ttl", "3", "--stop-budget", "2.5", "--", "true"))
    assert code == 2
    assert "margin" in err


def test_not_elected_in_time(bench: Bench) -> None:
    stay = bench.stay()
    bench.lead(stay.command, "--name", "first")
    until(lambda: stay.begun, "the first leads")
    code, _, err = ends(bench.lead(["true"], "--wait", "0.05"))
    assert code == 75
    assert "first" in err


def test_verbose_and_json_report_events(bench: Bench) -> None:
    _, _, words = ends(bench.start("--verbose", "--", "true"))
    assert "leading 'billing', token" in words
    assert "resigned from 'billing'" in words
    _, out, lines = ends(bench.start("--json", "--", "true"))
    assert '"event": "elected"' in lines
    assert out == ""


# Signals.


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_end_it_passes_that_on_and_resigns(bench: Bench, signum: signal.Signals) -> None:
    first, second = bench.stay("first"), bench.stay("second")
    leader = bench.lead(first.command)
    until(lambda: first.begun, "the first leads")
    bench.lead(second.command)
    leader.send_signal(signum)
    assert ends(leader)[0] == 128 + signum
    until(lambda: second.begun, "the second leads")


def test_asked_twice_it_kills(bench: Bench) -> None:
    work = bench.stamps("away")
    leader = bench.lead(work.command)
    until(work.all_write, "the tree runs")

    def asked_again() -> bool:
        leader.send_signal(signal.SIGTERM)
        return leader.poll() is not None

    until(asked_again, "it ends")
    assert ends(leader)[0] == 128 + signal.SIGKILL
    assert not work.any_alive()


def test_other_signals_are_the_commands(bench: Bench) -> None:
    script = (
        "trap 'echo usr1' USR1; trap 'echo hup; exit 9' HUP; echo ready; while :; do wait; done"
    )
    leader = bench.lead(["sh", "-c", f"sleep 3600 & {script}"])
    assert leader.stdout is not None
    assert leader.stdout.readline() == "ready\n"
    leader.send_signal(signal.SIGTSTP)
    leader.send_signal(signal.SIGUSR1)
    assert leader.stdout.readline() == "usr1\n"
    leader.send_signal(signal.SIGHUP)
    assert ends(leader)[:2] == (9, "hup\n")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_asked_to_end_while_waiting(bench: Bench, signum: signal.Signals) -> None:
    stay = bench.stay()
    bench.lead(stay.command)
    until(lambda: stay.begun, "the first leads")
    waiting = bench.lead(["touch", str(bench.directory / "ran")])
    assert waiting.stderr is not None
    assert "doyen: store " in waiting.stderr.readline()
    assert "waiting to lead" in waiting.stderr.readline()
    waiting.send_signal(signum)
    assert ends(waiting)[0] == 128 + signum
    assert not (bench.directory / "ran").exists()


def test_a_store_that_is_waited_for_is_told_in_words() -> None:
    line = log_line(event="store_waited_for", store="etcd://h1", for_s=39.963, error="refused")
    record = logging.LogRecord("doyen", logging.WARNING, "", 0, "%s", (line,), None)
    assert _sentence(record) == "the store does not answer yet, waiting for up to 40 s: refused"


# The end of the command, and of leadership.


def test_restart(bench: Bench) -> None:
    count = bench.directory / "count"
    leader = bench.lead(["sh", "-c", f"echo $DOYEN_TOKEN >> {count}; exit 3"], "--restart")
    until(lambda: count.exists() and count.read_text().count("\n") >= 3, "it ran three times")
    leader.send_signal(signal.SIGTERM)
    _, _, err = ends(leader)
    assert len(set(count.read_text().split())) == 1
    assert "ended with exit code 3; restarting it in 0.2 s" in err


def test_frozen_past_its_term_it_campaigns_again(bench: Bench) -> None:
    stay = bench.stay()
    leader = bench.lead(stay.command)
    until(lambda: stay.begun, "it leads")
    pid, token = stay.pid, stay.token
    bench.freeze(leader)
    until(lambda: not alive(pid), "its guard has stopped the command")
    stay.path.unlink()
    leader.send_signal(signal.SIGCONT)
    until(lambda: stay.begun, "it leads again")
    assert stay.token > token
    token = stay.token
    leader.send_signal(signal.SIGTERM)
    code, _, err = ends(leader)
    assert code == 128 + signal.SIGTERM
    before, lost, after = err.partition("no longer leading 'billing'")
    assert lost
    assert f"leading 'billing', token {token}" in after
    assert "leading" not in before, "the first election is not news"


def test_frozen_past_its_term_with_once_it_ends(bench: Bench) -> None:
    stay = bench.stay()
    leader = bench.lead(stay.command, "--once")
    until(lambda: stay.begun, "it leads")
    bench.freeze(leader)
    until(lambda: not alive(stay.pid), "its guard has stopped the command")
    leader.send_signal(signal.SIGCONT)
    assert ends(leader)[0] == 75


def test_the_guard_is_killed(bench: Bench) -> None:
    work = bench.stamps("away", "daemon")
    leader = bench.lead(work.command)
    until(work.all_write, "the tree runs")
    os.kill(work.guard(), signal.SIGKILL)
    code, _, err = ends(leader)
    assert code == 128 + signal.SIGKILL
    assert "was killed; the command is being killed with it" in err
    assert not work.any_alive()


# A successor starts only after all processes of the predecessor have ended.


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_no_two_commands_run_at_once(bench: Bench, fault: str) -> None:
    work, next_one = bench.stamps("away", "daemon"), bench.stay()
    logs = [bench.directory / "first.log", bench.directory / "second.log"]
    leader = bench.lead(work.command, "--audit", str(logs[0]))
    until(work.all_write, "the first tree runs")
    follower = bench.lead(next_one.command, "--audit", str(logs[1]))
    if fault == "killed":
        leader.kill()
    else:
        bench.freeze(leader)
    until(lambda: next_one.begun, "the second leads")
    assert not work.any_alive()
    assert work.last() < next_one.begun_at
    follower.send_signal(signal.SIGTERM)
    assert ends(follower)[0] == 128 + signal.SIGTERM
    report = verify([str(log) for log in logs])
    assert report.ok
    assert report.terms == 2


def test_a_command_that_ends_on_sigterm_is_followed_at_once_after_doyen_is_killed(
    bench: Bench,
) -> None:
    first, second = bench.stay("first"), bench.stay("second")
    leader = bench.start("--ttl", "3600", "--", *first.command)
    until(lambda: first.begun, "the first leads")
    waiting = bench.start("--ttl", "3600", "--verbose", "--", *second.command)
    assert waiting.stderr is not None
    assert "doyen: store " in waiting.stderr.readline()
    assert "waiting to lead" in waiting.stderr.readline()
    leader.kill()
    until(lambda: second.begun, "the second leads")
    assert not alive(first.pid)


def test_the_one_of_higher_priority_takes_over_if_it_may(bench: Bench) -> None:
    """The leader's command has ended before the next one starts, and its `doyen` campaigns
    again."""
    low, high = bench.stay("low"), bench.stay("high")
    first = bench.lead(low.command)
    until(lambda: low.begun, "the first leads")
    old = low.pid
    bench.lead(high.command, "--priority", "5", "--preempt", "--cooldown", "0")
    until(lambda: high.begun, "the second leads")
    assert high.token > low.token
    assert not alive(old)
    assert first.poll() is None


def _warned(caplog: pytest.LogCaptureFixture, warn: Callable[[], object]) -> str:
    """What a user of `doyen run` reads when this is logged."""
    caplog.clear()
    warn()
    return _sentence(caplog.records[-1])


def test_log_lines_are_shown_as_sentences(caplog: pytest.LogCaptureFixture) -> None:
    """Those that are not events of a session, and are logged as pairs of keys and values."""
    log, failure = logging.getLogger("doyen"), RuntimeError("no")
    died = log_line(event="guard_died", pid=7, effect="the command is killed")
    assert _warned(caplog, lambda: log.error("%s", died)) == (
        "the guard process 7 was killed; the command is being killed with it"
    )
    refused = log_line(event="watch_refused", scope="elections/a", error="100 % full")
    assert _warned(caplog, lambda: log.warning(refused)) == (
        "watch refused: scope elections/a, error 100 % full"
    )
    assert _warned(caplog, lambda: log.error("event=background_task_failed", exc_info=failure)) == (
        "background task failed: RuntimeError('no')"
    )
    assert _warned(caplog, lambda: log.warning("restarting in %g s", 2)) == "restarting in 2 s"


def test_an_overrun_is_reported_as_text() -> None:
    event = Overrun(election="e", name="a", token=7, lease="l")
    words = _as_text(Record(event, at=1.0, wall=1.0, session="s", pid=1))
    assert words is not None
    assert "(token 7) was noticed after its stop budget" in words
