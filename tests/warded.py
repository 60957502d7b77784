"""A process with a session that has a warden, for tests.

    python warded.py URL '{"name": "a", "ttl_s": 30, "warden": "process", "does": "lead"}'

It prints its events, one JSON object a line, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import doyen
from doyen.events import Record

WITHIN_S = 30.0


class Warded:
    """Such a process, as the test sees it."""

    def __init__(self, url: str, name: str, **options: Any) -> None:
        self.name = name
        self.events: list[dict[str, Any]] = []
        asked = {"name": name, "ttl_s": 30.0, "warden": "process"} | options
        self.process = subprocess.Popen(
            [sys.executable, __file__, url, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._unread = b""

    def wait_for(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next event of this kind, or one that was there already."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            for each in self.events:
                if each["event"] == event and fields.items() <= each.items():
                    self.events.remove(each)
                    return each
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{self.name}: no {event} among {self.events}"
            self._read(left_s)

    def has(self, event: str, within_s: float) -> bool:
        """Whether there is such an event within a time."""
        deadline = time.monotonic() + within_s
        while all(each["event"] != event for each in self.events):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._read(left_s)
        return True

    def _read(self, within_s: float) -> None:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        if select.select([descriptor], [], [], within_s)[0]:
            data = os.read(descriptor, 65536)
            assert data, f"{self.name} has ended; it said {self.events}"
            *lines, self._unread = (self._unread + data).split(b"\n")
            self.events += map(json.loads, lines)

    def ready(self, *, leads: bool = False) -> int:
        """Wait until it leads, or stands in line, and has a warden, whose process id is
        returned."""
        self.wait_for("elected" if leads else "ready")
        warden: int = self.wait_for("warded")["warden"]
        return warden

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def warded(url: str, **options: Any) -> Iterator[Callable[..., Warded]]:
    """Starts such processes. They are gone in the end."""
    started: list[Warded] = []
    election = f"e{uuid4().hex}"  # no other test's leases are in the way

    def start(name: str, **more: Any) -> Warded:
        started.append(Warded(url, name, **{"election": election} | options | more))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            each.stop()


def _print(event: str, **fields: Any) -> None:
    line = json.dumps({"event": event, **fields}, default=str)
    os.write(1, line.encode() + b"\n")


async def _main(url: str, asked: dict[str, Any]) -> None:
    name, does = asked.pop("name"), asked.pop("does", "lead")
    election, is_warded = asked.pop("election"), asyncio.Event()
    loop = asyncio.get_running_loop()

    def show(record: Record) -> None:
        fields = record.fields()
        _print(**fields)
        if fields["event"] in ("elected", "waiting"):
            _print("ready")
        if fields["event"] == "warded":
            loop.call_soon_threadsafe(is_warded.set)

    async with doyen.connect(url, on_event=show, **asked) as session:
        if does == "changes":
            # A lease of its own for one campaign, which it gives up before it leads.
            async with session.campaign(f"{election}-first", stall_after_s=60):
                pass
        async with session.campaign(election, name=name):
            if does == "forks":
                child = os.fork()
                if not child:
                    signal.pause()
                _print("forked", child=child)
            elif does == "waits for children":
                # The process that starts the warden may still be there; it ends by itself.
                with suppress(ChildProcessError):
                    while True:
                        os.waitpid(-1, 0)
                _print("childless")
            elif does == "closes":
                await is_warded.wait()
                _close_links()
                _print("closed")
            await asyncio.to_thread(sys.stdin.read)


def _close_links() -> None:
    """Close the sockets and the shared memory of the warden, as `os.closerange` would."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        unix = target.startswith("socket:") and _is_unix(int(descriptor))
        if unix or "doyen-leases" in target:
            os.close(int(descriptor))


def _is_unix(descriptor: int) -> bool:
    import socket

    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.family == socket.AF_UNIX and copy.type == socket.SOCK_SEQPACKET


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], json.loads(sys.argv[2])))
