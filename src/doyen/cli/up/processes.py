"""The processes of `doyen up`: started, killed, frozen, thawed and restarted.

Invariant: when `stop` of a group has returned, all processes that it started have ended.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar

from doyen.lease.clock import SystemClock

RESTART_AFTER_S = 1.0
"""How long after its end a process is restarted."""
STOP_WITHIN_S = 3.0
"""How long processes may take to end, before they are killed."""
_PR_SET_PDEATHSIG = 1

Kind = Literal["killed", "frozen", "asked to resign"]


class Stopped(Exception):
    """A signal asked to end before everything had started."""


def never() -> bool:
    """The default of callbacks that ask whether to stop starting processes."""
    return False


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, frozen or not."""
    import ctypes

    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux: candidates end when their pipe does
    if os.getppid() != parent:  # the parent ended before the call
        sys.exit(1)


class ChildProcess:
    """A candidate or a node: its name, and the process that runs it now, if any."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self._errors = directory / f"{name}.errors"
        self.process: subprocess.Popen[bytes] | None = None
        self.frozen_at: float | None = None
        self.died_at = -math.inf
        self.killed = False

    @property
    def alive(self) -> bool:
        """Whether the process runs; it may be frozen. False as soon as it was sent SIGKILL."""
        return self.process is not None and not self.killed

    def start(self, command: list[str], *, stdin: int, stdout: int) -> subprocess.Popen[bytes]:
        self.killed = False
        with self._errors.open("wb") as errors:
            # A process group of its own, so that Ctrl-C in the terminal does not reach it.
            self.process = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=errors, process_group=0
            )
        return self.process

    def last_error_line(self) -> str:
        text = self._errors.read_text(errors="replace").strip() if self._errors.exists() else ""
        return text.splitlines()[-1] if text else "no error message"


C = TypeVar("C", bound=ChildProcess)


class ProcessGroup(ABC, Generic[C]):
    """Processes of one kind."""

    def __init__(self, members: Sequence[C], *, thaw_after_s: float) -> None:
        self.now = SystemClock().now
        self._members = members
        self.thaw_after_s = thaw_after_s

    @abstractmethod
    def _start(self, member: C) -> None: ...

    @abstractmethod
    def _note_fault(self, kind: Kind, member: C) -> None:
        """A fault is about to be injected."""

    def _note_end(self, member: C, code: int) -> None:
        """A process has ended with this exit code."""
        if member.process is not None:
            for pipe in (member.process.stdin, member.process.stdout):
                if pipe is not None:
                    pipe.close()
        member.process = member.frozen_at = None
        member.died_at = self.now()

    def _reap(self) -> None:
        for member in self._members:
            if member.process is not None and (code := member.process.poll()) is not None:
                self._note_end(member, code)

    def _restart(self) -> None:
        """Thaw and start members where due."""
        now = self.now()
        for member in self._members:
            if member.frozen_at is not None and now >= member.frozen_at + self.thaw_after_s:
                self.thaw(member)
            if member.process is None and now >= member.died_at + RESTART_AFTER_S:
                self._start(member)

    def kill(self, member: C) -> None:
        """Send SIGKILL. The process is restarted after `RESTART_AFTER_S`."""
        if member.process is not None and member.alive:
            self._note_fault("killed", member)
            member.killed = True
            member.died_at = self.now()
            member.process.send_signal(signal.SIGKILL)

    def freeze(self, member: C) -> None:
        """Send SIGSTOP. The process is thawed after `thaw_after_s`."""
        if member.process is not None and member.alive and member.frozen_at is None:
            self._note_fault("frozen", member)
            member.frozen_at = self.now()
            member.process.send_signal(signal.SIGSTOP)

    def thaw(self, member: C) -> None:
        """Send SIGCONT."""
        if member.process is not None and member.frozen_at is not None:
            member.frozen_at = None
            member.process.send_signal(signal.SIGCONT)

    @abstractmethod
    def _ask_to_end(self, process: subprocess.Popen[bytes]) -> None: ...

    def stop(self) -> None:
        """Ask all processes to end, and kill those that have not within `STOP_WITHIN_S`."""
        self._reap()
        for member in self._members:
            self.thaw(member)
            if member.process is not None:
                self._ask_to_end(member.process)
        deadline = self.now() + STOP_WITHIN_S
        for member in self._members:
            if member.process is not None:
                try:
                    member.process.wait(max(0.0, deadline - self.now()))
                except subprocess.TimeoutExpired:
                    member.killed = True
                    member.process.kill()
                    member.process.wait()
        self._reap()
