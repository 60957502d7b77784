"""Freeze a process on a local store: in its tracks, but not in the middle of a write.

One that is stopped inside a transaction keeps the database locked for everybody until it is
continued or killed. test_sqlite_processes.py looks at that; elsewhere it would come by chance.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from doyen.stores.sqlite.connection import writer
from servers.process import is_stopped

PATIENCE_S = 30.0


def freeze(pid: int, database: str | Path) -> None:
    """Stop it; it stands still, and others can write, when this returns."""
    _freeze([pid], str(database))


def freeze_group(group: int, store: str) -> None:
    """The same for all processes of a group, on any store."""
    pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _group(pid) == group]
    _freeze(pids, store.partition("sqlite://")[2])


def _freeze(pids: list[int], database: str) -> None:
    """`database` is empty if the store is not a local one."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        while not all(map(is_stopped, pids)):
            assert time.monotonic() < deadline, f"processes {pids} do not stop"
            time.sleep(0.001)
        if not database or writer(database) not in pids:
            return
        assert time.monotonic() < deadline, f"one of {pids} does not end its transaction"
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)


def _group(pid: str) -> int | None:
    try:
        return os.getpgid(int(pid))
    except ProcessLookupError:
        return None
