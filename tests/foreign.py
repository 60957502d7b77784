"""Candidates of other programs: processes that take part in an election, and say when they lead."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

LEADS = "leads"
BODY = f"echo {LEADS}; exec sleep 1000"
"""What a candidate that runs a command runs."""


class ForeignCandidate:
    """A process that prints a line when it leads."""

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.printed: list[str] = []

    async def line(self) -> str:
        """The next line that it prints."""
        text = await asyncio.to_thread(self._output.readline)
        assert text, f"it has ended after {self.printed}"
        self.printed.append(text.decode().strip())
        return self.printed[-1]

    async def elected(self) -> tuple[str, str]:
        """The election and the proposal that `etcdctl elect` prints."""
        key, proposal = await self.line(), await self.line()
        return key.rpartition("/")[0], proposal

    async def leads(self) -> None:
        """Wait until it leads."""
        while LEADS not in await self.line():
            pass

    async def resign(self) -> None:
        """Interrupt it and what it has started, as the terminal does."""
        os.killpg(self._process.pid, signal.SIGINT)
        await asyncio.to_thread(self._process.wait)
        self.kill()

    def kill(self) -> None:
        """Kill it and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()
