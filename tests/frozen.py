"""Freeze a process on a local store: in its tracks, but not in the middle of a write.

One that is stopped inside a transaction keeps the database locked for everybody until it is
continued or killed. test_sqlite_processes.py looks at that; elsewhere it would come by chance.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from doyen.stores.sqlite.database import writer
from servers.process import is_stopped

PATIENCE_S = 30.0


def freeze(pid: int, database: str | Path) -> None:
    """Stop it; it stands still, and others can write, when this returns."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        os.kill(pid, signal.SIGSTOP)
        while not is_stopped(pid):
            assert time.monotonic() < deadline, f"process {pid} does not stop"
            time.sleep(0.001)
        if writer(str(database)) != pid:
            return
        assert time.monotonic() < deadline, f"process {pid} does not end its transaction"
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)
