"""Processes of a framework that campaign on a local store, and the judgement of what they did.

`FRAMEWORKS` has the command of each framework. The leader's work writes lines to a ledger: when it
begins, while it goes on, and when it ends; the work of a scheduler is one job after the other. A
line is written under a lock, right after the term was found valid, and nobody is frozen while it
has the lock. So work of an earlier term after the beginning of a later one is an overlap.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import doyen
from doyen import Term
from frozen import freeze
from support import until_blocking

TTL_S = float(os.environ.get("TTL_S", "60"))
"""Of the processes. Nobody is frozen by the tests that are not trials."""
TRIAL_TTL_S = "2"
PROMPT_S = 30.0
"""A successor that began sooner has not waited for the lease to expire. The figure itself is
measured by the trials."""
PATIENCE_S = 60.0
TARGET_S = 0.05
TESTS = Path(__file__).parent


def work(term: Term) -> None:
    """What a leader does: write to the ledger, for as long as its term is valid."""
    with recording(term) as book:
        while term.valid:
            book.write("work")
            time.sleep(0.002)


@contextlib.contextmanager
def recording(term: Term) -> Iterator[Book]:
    """Record the beginning and the end of the work in a term."""
    book = Book(term)
    begun = book.write("begin")
    try:
        yield book
    finally:
        if begun:
            book.write("end")


class Book:
    """The ledger, as the work of one term writes to it."""

    def __init__(self, term: Term) -> None:
        self._term = term

    def write(self, what: str) -> bool:
        """Write a line, unless the term is over; an end is recorded all the same. Returns whether
        it was written."""
        with Path(os.environ["LEDGER"]).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            written = self._term.valid or what == "end"
            if written:
                file.write(f"{what} {self._term.token} {os.getpid()} {time.monotonic()}\n")
                file.flush()
        return written


class Line(NamedTuple):
    """A line of the ledger."""

    what: str
    token: int
    pid: int
    at: float


class Crew:
    """Processes that run one command each, on one store."""

    def __init__(self, folder: Path, command: list[str], count: int = 2, **environ: str) -> None:
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self.database = folder / "doyen.db"
        self.environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
            "LEDGER": str(self.ledger),
            "STORE": f"sqlite://{self.database}",
            **environ,
        }
        self._folder, self._command, self._count = folder, command, count
        self._ends = contextlib.ExitStack()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start one more process."""
        command = [*self._command, *arguments]
        process = subprocess.Popen(
            command, cwd=self._folder, env=self.environ, start_new_session=True
        )
        self._ends.callback(kill, process)
        self.processes.append(process)
        return process

    def __enter__(self) -> Self:
        for _ in range(self._count):
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def lines(self) -> list[Line]:
        """What has been recorded."""
        rows = [
            row.split() for row in self.ledger.read_text().splitlines(keepends=True) if "\n" in row
        ]
        return [Line(what, int(token), int(pid), float(at)) for what, token, pid, at in rows]

    @property
    def terms(self) -> list[Line]:
        """The beginnings: the first line of each term."""
        firsts: dict[int, Line] = {}
        for line in self.lines:
            firsts.setdefault(line.token, line)
        return [*firsts.values()]

    def next_term(self, after: Line | None = None) -> Line:
        """The first term after this one, once it has begun and work is done in it."""
        token = after.token if after is not None else -1

        def worked() -> bool:
            assert any(each.poll() is None for each in self.processes), "all processes have ended"
            return any(line.token > token and line.what == "work" for line in self.lines)

        until_blocking(worked, PATIENCE_S)
        return next(line for line in self.terms if line.token > token)

    def signal(self, term: Line, number: int) -> float:
        """Send a signal to the process of a term. Returns when."""
        at = time.monotonic()
        os.kill(term.pid, number)
        return at

    def freeze(self, term: Line) -> None:
        """Stop the process of a term, but not in the middle of a write."""
        with self.ledger.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            freeze(term.pid, self.database)

    def hand_over(self, term: Line) -> tuple[float, Line]:
        """Terminate the leader. Returns after how long its successor began, and its term."""
        until_blocking(self.waiting, PATIENCE_S)
        at = self.signal(term, signal.SIGTERM)
        after = self.next_term(term)
        return after.at - at, after

    def fail_over(self, term: Line) -> Line:
        """Freeze the leader until it has a successor, and continue it. Returns the next term."""
        self.freeze(term)
        try:
            return self.next_term(term)
        finally:
            self.signal(term, signal.SIGCONT)

    def hand_overs(self, count: int) -> list[float]:
        """Terminate one leader after the other. Returns after how long each successor began."""
        term, took_s = self.next_term(), []
        for _ in range(count):
            self.replace()
            seconds, term = self.hand_over(term)
            took_s.append(seconds)
        self.judge()
        return took_s

    def replace(self) -> None:
        """Replace the processes that have ended. Returns when two candidates wait."""

        def two() -> bool:
            for process in self.processes:
                if process.poll() is not None:
                    self.processes.remove(process)
                    self.start()
            return self.waiting() >= 2

        until_blocking(two, PATIENCE_S)

    def trouble(self, rounds: int) -> None:
        """Terminate, kill and freeze one leader after the other. A process that has ended is
        replaced. Prints how long it took from SIGTERM to the successor's work."""
        term, took_s = self.next_term(), []
        for number in range(rounds):
            if number % 3 == 0:
                before = term
                seconds, term = self.hand_over(before)
                took_s.append(seconds)
                assert self.ended_before(before, term)
            elif number % 3 == 1:
                term = self.fail_over(term)
            else:
                self.signal(term, signal.SIGKILL)
                term = self.next_term(term)
            self.replace()
        self.judge()
        figures = ", ".join(f"{1000 * each:.1f}" for each in took_s)
        print(f"from SIGTERM to the work of the successor, in ms: {figures}")
        assert min(took_s) < TARGET_S, "the machine may be slow once, but not each time"

    def waiting(self) -> int:
        """How many candidates are in line behind the leader."""
        with doyen.connect_blocking(f"sqlite://{self.database}") as session:
            return len(session.line("e")) - 1

    def judge(self) -> None:
        """At no time was work done in two terms."""
        lines = self.lines
        highest = -1
        for line in lines:
            highest = max(highest, line.token)
            assert line.token == highest or line.what == "end", f"{line} after token {highest}"
        tokens = [line.token for line in self.terms]
        assert tokens == sorted({*tokens})

    def ended_before(self, term: Line, after: Line) -> bool:
        """Whether all work that began in a term had ended when that of the next one began."""
        lines = self.lines
        before = [line.what for line in lines[: lines.index(after)] if line.token == term.token]
        return 0 < before.count("begin") == before.count("end")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its workers."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def crew(framework: str, folder: Path, count: int = 2, **environ: str) -> Crew:
    """Processes of this framework. `gunicorn` is one, with so many workers."""
    command, database = FRAMEWORKS[framework], folder / "db.sqlite3"
    started = 1 if "gunicorn" in command else count
    environ |= {"WORKERS": str(count), "DATABASE": str(database)}
    made = Crew(folder, command, started, DJANGO_SETTINGS_MODULE="django_site.settings", **environ)
    if framework == "django":
        made.database = folder / "db.sqlite3.doyen"
    return made


def program(name: str, *arguments: str) -> list[str]:
    """The command that runs a program of the tests."""
    return [sys.executable, str(TESTS / name), *arguments]


def module(name: str, arguments: str) -> list[str]:
    """The command that runs a module."""
    return [sys.executable, "-m", name, *arguments.split()]


GUNICORN = "--config python:gunicorn_hooks --bind unix:socket --log-level critical flask_app:app"
FRAMEWORKS = {
    "starlette": module("uvicorn", "--factory starlette_app:served --log-level critical --port 0"),
    "django": module("django", "lead --store-wait 10s e work --note payments"),
    "flask": module("gunicorn", f"--preload {GUNICORN}"),
    "flask with threads": module("gunicorn", f"--threads 4 {GUNICORN}"),
    "apscheduler": program("apscheduler_program.py"),
    "celery": module("celery", "-q -A celery_app beat --pidfile= -l CRITICAL"),
    "rq": program("rq_program.py"),
    "click": program("click_program.py", "click", "--note", "payments"),
    "typer": program("click_program.py", "typer", "--note", "payments"),
}
