"""How long an election is without a leader: after a crash, and after a resignation.

The floor on one machine is a process blocked in `flock` while the holder is killed or releases the
lock. It is measured alternately in the same run.

A killed process frees its memory before it closes its descriptors, which takes longer the more
memory it has: about 0.6 ms for a bare interpreter and 1.8 ms for one that has imported asyncio, as
every leader here has. So there are two floors: `flock` between processes that have imported what a
candidate imports, with which doyen is compared, and `flock` between bare interpreters, which is
also shown.

A lock leaves no record and no token. The floor of a handover is therefore that of one SQLite file:
a commit that deletes a row, a byte in a pipe, and a commit that inserts a row, none of which waits
for the disk.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.crew import Crew
from bench.figures import Figure, spread

__all__ = ["crash", "handover"]

FLOCK = """
import fcntl, json, os, sys, time
who, path, *modules = sys.argv[1:]
for module in modules:
    __import__(module)
def report(kind, at):
    os.write(1, (json.dumps({"who": who, "kind": kind, "at": at}) + "\\n").encode())
while True:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report("waiting", 0)
        fcntl.flock(file, fcntl.LOCK_EX)
    at = time.clock_gettime(time.CLOCK_BOOTTIME)
    report("entered", at)
    if not sys.stdin.readline():
        break
    at = time.clock_gettime(time.CLOCK_BOOTTIME)
    os.close(file)
    report("resigned", at)
    sys.stdin.readline()
"""


ROW = """
import json, os, sqlite3, sys, time
who, path = sys.argv[1:]
def report(kind, at):
    os.write(1, (json.dumps({"who": who, "kind": kind, "at": at}) + "\\n").encode())
database = sqlite3.connect(path, isolation_level=None)
database.execute("PRAGMA journal_mode = WAL")
database.execute("PRAGMA synchronous = NORMAL")
database.execute("CREATE TABLE IF NOT EXISTS leader (one INTEGER PRIMARY KEY, name TEXT)")
try:
    os.mkfifo(path + ".bell")
except FileExistsError:
    pass
bell = os.open(path + ".bell", os.O_RDWR)
while True:
    try:
        database.execute("INSERT INTO leader VALUES (1, ?)", (who,))
    except sqlite3.IntegrityError:
        report("waiting", 0)
        os.read(bell, 1)
        database.execute("INSERT INTO leader VALUES (1, ?)", (who,))
    at = time.clock_gettime(time.CLOCK_BOOTTIME)
    report("entered", at)
    if not sys.stdin.readline():
        break
    at = time.clock_gettime(time.CLOCK_BOOTTIME)
    database.execute("DELETE FROM leader")
    os.write(bell, b"x")
    report("resigned", at)
    sys.stdin.readline()
"""

SAME_SIZE = ["doyen.blocking", "doyen.stores.sqlite"]


class Contest:
    """A leader and a waiting candidate of one kind: a blocked flock, or candidates of doyen."""

    def __init__(self, crew: Crew, kind: str) -> None:
        self._crew = crew
        self._kind = kind
        self._count = 0
        self.gaps_ms: list[float] = []
        self._holder = self._join()
        crew.wait("entered", self._holder)
        self._waiter = self._join()
        crew.wait("waiting", self._waiter)

    def _join(self) -> str:
        self._count += 1
        return self._start(f"{self._kind}-{self._count}")

    def _start(self, who: str) -> str:
        if self._kind.startswith("flock"):
            modules = SAME_SIZE if self._kind == "flock" else []
            path = str(self._crew.folder / f"{self._kind}.lock")
            return self._crew.start_command(who, ["-c", FLOCK, who, path, *modules])
        if self._kind == "row":
            path = str(self._crew.folder / "row.db")
            return self._crew.start_command(who, ["-c", ROW, who, path])
        url = f"sqlite://{self._crew.folder}/{self._kind}.db"
        return self._crew.start(who, self._kind, url=url, events=["waiting"])

    def _entered(self, since: float) -> None:
        entered = self._crew.wait("entered", self._waiter)
        self.gaps_ms.append((entered["at"] - since) * 1e3)

    def crash(self) -> None:
        settle()
        killed_at, dead = self._crew.crash(self._holder)
        self._entered(killed_at)
        self._crew.reap(dead)
        self._holder, self._waiter = self._waiter, self._join()
        self._crew.wait("waiting", self._waiter)

    def handover(self) -> None:
        settle()
        self._crew.send(self._holder, "resign")
        self._entered(self._crew.wait("resigned", self._holder)["at"])
        self._crew.send(self._holder, "campaign again")
        self._holder, self._waiter = self._waiter, self._holder
        self._crew.wait("waiting", self._waiter)


def settle() -> None:
    """Give the waiting process time to block, at a random phase of its timers."""
    time.sleep(random.uniform(0.03, 0.06))


@contextmanager
def contests(*kinds: str) -> Iterator[list[Contest]]:
    with Crew() as crew:
        yield [Contest(crew, kind) for kind in kinds]


def crash(*, trials: int = 40) -> list[Figure]:
    """From killing the leader with SIGKILL until a waiting candidate has entered its body."""
    with contests("flock", "flock-bare", "candidate", "async-candidate") as turns:
        for _ in range(trials):
            for contest in turns:
                contest.crash()
        flock, bare, blocking, asynchronous = (contest.gaps_ms for contest in turns)
    p50 = statistics.median
    figures = []
    for api, gaps in (("blocking", blocking), ("async", asynchronous)):
        details = {
            "doyen_ms": spread(gaps),
            "flock_ms": spread(flock),
            "flock_bare_ms": spread(bare),
            "times_flock_bare": round(p50(gaps) / p50(bare), 2),
        }
        figures.append(
            Figure(
                name=f"crash failover, {api}",
                value=p50(gaps) / p50(flock),
                unit="times flock, p50",
                limit=1.8,
                details=details,
            )
        )
    return figures


def handover(*, trials: int = 60) -> list[Figure]:
    """From the end of the old leader's body to the beginning of the new leader's body.

    The old leader campaigns again only after that: with flock it could overtake the waiter.
    """
    with contests("flock", "row", "candidate", "async-candidate") as turns:
        for _ in range(trials):
            for contest in turns:
                contest.handover()
        flock, row, blocking, asynchronous = (contest.gaps_ms for contest in turns)
    figures = []
    for api, gaps in (("blocking", blocking), ("async", asynchronous)):
        details = {
            "ms": spread(gaps),
            "flock_ms": spread(flock),
            "row_ms": spread(row),
            "times_row": round(statistics.median(gaps) / statistics.median(row), 2),
        }
        figures.append(
            Figure(
                name=f"handover on resign, {api}",
                value=statistics.median(gaps) / statistics.median(row),
                unit="times row, p50",
                limit=3.0,
                details=details,
            )
        )
    return figures
