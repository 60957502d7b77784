"""One candidate of `doyen up`, started as a process by `python -m doyen.cli.up.candidate`.

It campaigns, again after every loss, and writes an audit log. While it leads, it increments a
number in a file that refuses the tokens of earlier leaders.

Its standard input is a pipe from `doyen up`: an `r` makes it resign, the end of the pipe makes it
resign and stop. It never outlives `doyen up`: if that is killed, the kernel kills the candidate,
even a frozen one; on systems without this feature, the pipe ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import suppress

from doyen.cli.up.processes import die_with
from doyen.fencing import GuardedFile
from doyen.session import Session, connect
from doyen.term import Term

ELECTION = "demo"
WORK_FILE = "work"
_WORK_EVERY_S = 0.05


def command(*, name: str, store: str, ttl_s: float, audit: str, work: str) -> list[str]:
    """The command that starts a candidate."""
    options = {"name": name, "store": store, "ttl": ttl_s, "audit": audit, "work": work}
    arguments = [f"--{option}={value}" for option, value in options.items()]
    return [sys.executable, "-P", "-m", __name__, f"--parent={os.getpid()}", *arguments]


class _Candidate:
    def __init__(self, name: str, work: str) -> None:
        self._name = name
        self._counter = GuardedFile(work)
        self._resign = asyncio.Event()

    async def run(self, session: Session) -> None:
        async for campaign in session.campaigns(ELECTION, name=self._name):
            async with campaign as term:
                self._resign.clear()
                await self._lead(term)

    async def _lead(self, term: Term) -> None:
        self._counter.append(term, b"")
        done = int(self._counter.read() or b"0")
        while not self._resign.is_set():
            term.check()
            done += 1
            self._counter.write(term, b"%d" % done)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._resign.wait(), _WORK_EVERY_S)

    def obey(self, running: asyncio.Task[None]) -> None:
        orders = os.read(0, 64)
        if not orders:
            asyncio.get_running_loop().remove_reader(0)
            running.cancel()
        elif b"r" in orders:
            self._resign.set()


async def _main(options: argparse.Namespace) -> None:
    candidate = _Candidate(options.name, options.work)
    async with connect(
        options.store, ttl_s=options.ttl, audit=options.audit, warden="auto"
    ) as session:
        running = asyncio.ensure_future(candidate.run(session))
        asyncio.get_running_loop().add_reader(0, candidate.obey, running)
        await asyncio.wait({running})
    if not running.cancelled():
        running.result()


def main() -> None:
    parser = argparse.ArgumentParser(prog="a candidate of doyen up", add_help=False)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--ttl", type=float, required=True)
    parser.add_argument("--audit", required=True)
    parser.add_argument("--work", required=True)
    options = parser.parse_args()
    die_with(options.parent)
    asyncio.run(_main(options))


if __name__ == "__main__":
    main()
