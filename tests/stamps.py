"""What the tests of supervision share: commands that leave a stamp of the boot-time clock in a file
for as long as they live, so that the last one tells when they ended.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from doyen.lease.clock import SystemClock

PATIENCE_S = 20.0
now = SystemClock().now

PYTHON = [sys.executable, "-I", "-S"]

STAMPER = """
import os, signal, struct, sys, time
directory = sys.argv[1]

def stamp(name, *, stubborn):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file = os.open(os.path.join(directory, name), os.O_CREAT | os.O_WRONLY, 0o600)
    while True:
        boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        os.pwrite(file, struct.pack("<dqq", boot, os.getpid(), os.getppid()), 0)
        time.sleep(0.001)

for name in sys.argv[2:]:
    if name == "away" and not os.fork():      # a session of its own
        os.setsid()
        stamp(name, stubborn=True)
    if name == "daemon" and not os.fork():    # orphaned as well
        os.setsid()
        if not os.fork():
            stamp(name, stubborn=True)
        os._exit(0)
if "leave" in sys.argv[2:]:
    while len(os.listdir(directory)) < len(sys.argv) - 3:
        time.sleep(0.001)
    os._exit(5)
stamp("main", stubborn="meek" not in sys.argv[2:])
"""


class Stamps:
    """What the stampers have left in a directory."""

    def __init__(self, directory: Path, *names: str) -> None:
        self.directory = directory
        directory.mkdir()
        self.names = names
        self.command = [*PYTHON, "-c", STAMPER, str(directory), *names]
        self.writers = {"main", *names} - {"meek", "leave"}
        if "leave" in names:
            self.writers.discard("main")

    def _read(self, name: str) -> tuple[float, int, int] | None:
        try:
            data = (self.directory / name).read_bytes()
        except FileNotFoundError:
            return None
        return struct.unpack("<dqq", data) if len(data) == 24 else None

    def all_write(self) -> bool:
        return all(self._read(name) for name in self.writers)

    def last(self) -> float:
        """The latest stamp of any."""
        return max(stamp[0] for name in self.writers if (stamp := self._read(name)))

    def pids(self) -> list[int]:
        return [stamp[1] for name in self.writers if (stamp := self._read(name))]

    def guard(self) -> int:
        stamp = self._read("main")
        assert stamp is not None
        return stamp[2]

    def any_alive(self) -> bool:
        return any(map(alive, self.pids()))

    def kill(self) -> None:
        for pid in self.pids():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process can still run; a zombie cannot."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting until {what}"
        time.sleep(0.001)
