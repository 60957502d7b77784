"""The measured processes: start them, send them commands and signals, and read their reports.

All members write their reports, one JSON object per line, to one pipe. Every member ends when its
standard input ends, so no process outlives the run, even if it is killed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, Self

from doyen.lease.clock import SystemClock

__all__ = ["Crew", "Report", "now"]

now = SystemClock().now
ROOT = Path(__file__).parents[1]
PATIENCE_S = 60.0

Report = dict[str, Any]


class Crew:
    """Processes, a directory for their store, and the pipe for their reports."""

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="doyen-bench-"))
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        self._reports: list[Report] = []
        self._partial = b""
        self._reading, self._writing = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()
        os.close(self._reading)
        os.close(self._writing)
        shutil.rmtree(self.folder)

    def dismiss(self) -> None:
        """End every member and discard their reports."""
        for who in list(self._members):
            self.kill(who)
        self.take()

    @property
    def url(self) -> str:
        return f"sqlite://{self.folder}/doyen.db"

    def start(self, who: str, role: str, **options: Any) -> str:
        """Start a process in one of the roles of `bench.worker`."""
        options = {"who": who, "url": self.url, **options}
        return self.start_command(who, ["-m", "bench.worker", role, json.dumps(options)])

    def start_command(self, who: str, arguments: list[str], python: str = sys.executable) -> str:
        self._members[who] = subprocess.Popen(
            [python, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=self._writing
        )
        return who

    def pid(self, who: str) -> int:
        return self._members[who].pid

    def send(self, who: str, command: str) -> None:
        stdin = self._members[who].stdin
        assert stdin is not None
        stdin.write(command.encode() + b"\n")
        stdin.flush()

    def signal(self, who: str, number: Signals) -> float:
        """Send a signal and return the time just before."""
        at = now()
        self._members[who].send_signal(number)
        return at

    def kill(self, who: str) -> None:
        member = self._members.pop(who)
        member.kill()
        self.reap(member)

    def crash(self, who: str, number: Signals = SIGKILL) -> tuple[float, subprocess.Popen[bytes]]:
        """Kill without waiting: reaping the process would compete with what is measured."""
        at = self.signal(who, number)
        return at, self._members.pop(who)

    @staticmethod
    def reap(member: subprocess.Popen[bytes]) -> None:
        member.wait()
        if member.stdin is not None:
            member.stdin.close()

    def wait(self, kind: str, who: str | None = None, within_s: float = PATIENCE_S) -> Report:
        """Wait for the next report of this kind, of this member if one is given."""
        return self.wait_for(
            lambda report: report["kind"] == kind and who in (None, report["who"]),
            within_s,
            f"{kind} of {who or 'any member'}",
        )

    def wait_for(self, wanted: Callable[[Report], bool], within_s: float, what: str) -> Report:
        give_up = time.monotonic() + within_s
        seen = 0
        while True:
            for index in range(seen, len(self._reports)):
                if wanted(self._reports[index]):
                    return self._reports.pop(index)
            seen = len(self._reports)
            left_s = give_up - time.monotonic()
            if self._listen(min(left_s, 0.5)):
                continue
            dead = [who for who, member in self._members.items() if member.poll() is not None]
            if dead or left_s <= 0:
                raise TimeoutError(f"no {what} within {within_s:g} s; ended: {dead or 'none'}")

    def take(self, within_s: float = 0.0) -> list[Report]:
        """All reports that arrive within a time."""
        give_up = time.monotonic() + within_s
        while self._listen(give_up - time.monotonic()):
            pass
        reports, self._reports = self._reports, []
        return reports

    def _listen(self, within_s: float) -> bool:
        """Read what is available. Returns False if nothing arrived."""
        ready, _, _ = select.select([self._reading], [], [], max(0.0, within_s))
        if not ready:
            return False
        *lines, self._partial = (self._partial + os.read(self._reading, 1 << 20)).split(b"\n")
        self._reports += map(json.loads, lines)
        return True
