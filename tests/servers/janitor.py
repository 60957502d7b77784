"""A process that cleans up after this one if it dies without doing so, even by SIGKILL.

The janitor receives the ids of processes and the paths of directories over a pipe. When this
process ends, so does the pipe, and the janitor kills the remaining processes with all descendants,
frozen or not, and removes the directories. Descendants of this process itself, whose parents may
have ended by then, are recognised by a variable of their environment (`hold_descendants`). The
parent-death signal of the kernel is not sufficient: it covers neither descendants nor directories,
and depends on the thread that started the process.

It runs by path and imports the standard library only.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "DOYEN_TESTS_OF"
"""The variable by which descendants are recognised."""


def send_signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def family_of(pid: int) -> list[int]:
    """A process and its descendants, ancestors first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return family


def marked(mark: str) -> list[int]:
    """The running processes with this in their environment."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue  # it has ended, or belongs to somebody else
            if mark.encode() in environment.split(b"\0"):
                found.append(int(entry))
    return found


class Janitor:
    """Sends to the janitor process what it has to clean up when this process ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._parent_pid: int | None = None

    def hold_descendants(self) -> None:
        """All processes that are started from now on, by this one or those that it starts."""
        os.environ[MARK] = uuid.uuid4().hex
        self._send(f"hold {MARK}={os.environ[MARK]}")

    def hold_process(self, pid: int) -> None:
        self._send(f"hold {pid}")

    def release_process(self, pid: int) -> None:
        self._send(f"release {pid}")

    def hold_folder(self, folder: Path) -> None:
        self._send(f"hold {folder}")

    def release_folder(self, folder: Path) -> None:
        self._send(f"release {folder}")

    def _send(self, line: str) -> None:
        if self._process is None or self._parent_pid != os.getpid():
            command = [sys.executable, "-I", __file__]
            self._process = subprocess.Popen(
                command,
                env={name: value for name, value in os.environ.items() if name != MARK},
                stdin=subprocess.PIPE,
                text=True,
                cwd="/",
                start_new_session=True,
            )
            self._parent_pid = os.getpid()
            atexit.register(self._finish)
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _finish(self) -> None:
        if self._process is not None and self._parent_pid == os.getpid():
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


janitor = Janitor()


def clean_up_at_end_of_input() -> None:
    """The main function of the janitor process."""
    held = set()
    for line in sys.stdin:
        verb, _, what = line.rstrip("\n").partition(" ")
        if verb == "hold":
            held.add(what)
        else:
            held.discard(what)
    for pid in [pid for what in held if what.isdigit() for pid in family_of(int(what))]:
        send_signal(pid, signal.SIGKILL)
    for mark in [what for what in held if what.startswith(f"{MARK}=")]:
        while left := marked(mark):  # until none of them has started another
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            time.sleep(0.01)
    for what in held:
        if what.startswith("/"):
            shutil.rmtree(what, ignore_errors=True)


if __name__ == "__main__":
    clean_up_at_end_of_input()
